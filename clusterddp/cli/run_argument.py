"""Argument and options that the commands on runs share, and one action on each of several runs."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click
from click.shell_completion import CompletionItem

from clusterddp.errors import EXIT_DONE, ClusterDDPError, RequestError
from clusterddp.run.run_dir import RunDir
from clusterddp.run.status import DEFAULT_ROOT, RunStatus, all_runs, statuses

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")


class RunArgument(click.types.StringParamType):
    """A run's name, job id or directory; completes the names, the latest first."""

    name = "run"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,
        incomplete: str,
    ) -> list[CompletionItem]:
        root = ctx.params.get("output_root") or os.environ.get("CLUSTERDDP_OUTPUT_ROOT")
        try:
            runs = all_runs(Path(root or DEFAULT_ROOT))
        except RequestError:
            return []  # while completing, nothing may be printed but names
        names = [run.name for run in reversed(runs)]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


RUN = RunArgument()

JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def output_root_option(function: F) -> F:
    """Add the option of the output root, the same as that of `submit`."""
    return click.option(
        "--output-root",
        metavar="DIR",
        type=click.Path(path_type=Path),
        default=DEFAULT_ROOT,
        show_default=True,
        envvar="CLUSTERDDP_OUTPUT_ROOT",
        help="Folder in which runs are kept.",
    )(function)


def on_each(
    runs: Sequence[RunDir],
    act: Callable[[RunDir, RunStatus], T],
    tell: Callable[[T], str] | None,
    failed: list[ClusterDDPError],
) -> list[T]:
    """Act on each run, and return the results; `tell` words one for a person, who reads it at once.

    failed: takes the error of a run with which it did not work, and the next run follows.
    """
    done = []
    for run, status in zip(runs, statuses(runs), strict=True):
        try:
            result = act(run, status)
        except ClusterDDPError as error:
            failed.append(error)
            continue
        done.append(result)
        if tell:
            click.echo(tell(result))
    return done


def print_failed(failed: Sequence[ClusterDDPError]) -> int:
    """Print the errors; returns the highest of the exit codes, 0 without an error."""
    for error in failed:
        click.echo(f"clusterddp: {error}", err=True)
    return max((error.exit_code for error in failed), default=EXIT_DONE)

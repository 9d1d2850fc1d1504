"""Shared by the commands on runs: the argument RUN, options, JSON, a run followed to its end."""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import click
from click.shell_completion import CompletionItem

from clusterddp import log
from clusterddp.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PAUSED,
    ClusterDDPError,
    RequestError,
)
from clusterddp.launchers import Submission
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import DONE, FAILED, STOPPED
from clusterddp.run.status import DEFAULT_ROOT, RunStatus, all_runs, statuses

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")
_LAST_LINES = 20


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


def echo_json(value: object) -> None:
    """Print indented JSON; a loss that is not a number becomes null, for JSON knows no NaN."""
    click.echo(json.dumps(_finite(value), indent=2))


def follow(
    run: RunDir,
    paths: Sequence[Path] = (),
    lines: int | None = None,
    *,
    goes_on: bool = True,
    to_stderr: bool = False,
) -> int:
    """Print the run's logs as they grow until it ends, and its changes of state on stderr.

    paths: the logs to print, rank 0's when none are given; they need not exist yet.
    lines: how many of the existing lines are printed first; all when None.
    to_stderr: print the logs there too, where stdout is for a script to read.
    goes_on: True where the run outlives a Ctrl-C here, which is then printed.

    It continues over requeues and the jobs that take another one's place. Returns the exit code for
    the command: 0 done, 1 failed, cancelled or lost, 75 stopped, 130 interrupted.
    """
    from clusterddp.run.follow import LogPrinter, how_it_ended, wait_for_end
    from clusterddp.run.logs import of_attempt

    stream = (sys.stderr if to_stderr else sys.stdout).buffer
    printer = LogPrinter(paths or [run.rank_log(0)], lines, stream)
    try:
        status = wait_for_end(run, printer)
    except KeyboardInterrupt:
        if goes_on:
            click.echo(
                f"\nclusterddp: {run.name} goes on; 'clusterddp logs -f {run.shown}' follows it "
                f"again, 'clusterddp cancel {run.shown}' ends it",
                err=True,
            )
        return EXIT_INTERRUPTED
    if status.state == FAILED and status.failed_rank != 0:
        # The job log ends with the last words of the rank that failed.
        latest = sys.maxsize if status.attempt is None else status.attempt
        last = of_attempt(run.job_log, latest).rstrip().splitlines()[-_LAST_LINES:]
        if last:
            click.echo("\n".join([f"--- last lines of {run.job_log}:", *last]), err=True)
    log.info(f"{run.name}: {how_it_ended(status)}")
    return exit_code(status)


def follow_submitted(
    run: RunDir,
    submission: Submission,
    words: str | None,
    fields: Mapping[str, str],
    *,
    wait: bool,
    lines: int | None = None,
) -> int:
    """Print a submission, and follow the run where that is asked for or where it lives no longer.

    words: the text for a person; None prints `fields` as JSON instead, with the exit code of a run
    that was followed. lines: see `follow`. Returns the command's exit code.
    """
    following = wait or submission.stop is not None
    if words is not None:
        click.echo(words)
    elif not following:
        click.echo(json.dumps(fields))
    if not following:
        return EXIT_DONE
    code = follow(run, lines=lines, goes_on=not submission.stop, to_stderr=words is None)
    if submission.stop:
        if code == EXIT_INTERRUPTED:
            log.info(f"{run.name}: cancelling")
            submission.stop()
            log.info(f"{run.name}: cancelled")
        submission.stop()
    if words is None:
        click.echo(json.dumps({**fields, "exit_code": code}))
    return code


def exit_code(status: RunStatus) -> int:
    """Return the exit code of a command that has waited for a run's end."""
    return {DONE: EXIT_DONE, STOPPED: EXIT_PAUSED}.get(status.state, EXIT_FAILED)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

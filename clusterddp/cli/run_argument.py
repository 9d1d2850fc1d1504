"""What the commands on runs share: finding the run that is meant, and asking how runs are doing."""

import contextlib
import difflib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from clusterddp.errors import EXIT_DONE, ClusterDDPError, RequestError
from clusterddp.run import events
from clusterddp.run.attempt import latest
from clusterddp.run.run_dir import RunDir, find_runs
from clusterddp.run.status import RunStatus, run_status
from clusterddp.run.submission import jobs_to_ask, latest_submission
from clusterddp.slurm.queries import query

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

DEFAULT_ROOT = "jobs"


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
            found = all_runs(Path(root or DEFAULT_ROOT))
        except RequestError:
            return []  # while completing, nothing may be printed but names
        names = [run.name for run in reversed(found)]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


RUN = RunArgument()

JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def output_root_option(function: F) -> F:
    """The option that says where the runs are kept; the same as that of `submit`."""
    return click.option(
        "--output-root",
        metavar="DIR",
        type=click.Path(path_type=Path),
        default=DEFAULT_ROOT,
        show_default=True,
        envvar="CLUSTERDDP_OUTPUT_ROOT",
        help="Folder in which runs are kept.",
    )(function)


def all_runs(root: Path) -> list[RunDir]:
    """The runs below the output root, the latest last."""
    try:
        return find_runs(root)
    except OSError as error:
        raise RequestError(
            f"--output-root: {root} cannot be read: {error.strerror}. Name a folder of runs that "
            "you can read."
        ) from None


def find_run(root: Path, text: str | None) -> RunDir:
    """The run of that name, job id or directory; the latest when `text` is None.

    Raises RequestError when there is none, or a job id that belongs to several.
    """
    runs = all_runs(root)
    if text is None:
        if not runs:
            raise RequestError(
                f"there is no run below {root}. Start one with 'clusterddp submit', or name the "
                "folder that holds your runs with --output-root."
            )
        return runs[-1]
    for run in runs:
        if run.name == text:
            return run
    if "/" in text and (Path(text) / "spec.json").is_file():
        return RunDir(Path(text))
    holders = [run for run in runs if text in _job_ids(run)]
    if len(holders) == 1:
        return holders[0]
    if holders:
        names = ", ".join(run.name for run in holders)
        raise RequestError(f"the job id {text} belongs to several runs: {names}. Name one of them.")
    raise RequestError(f"there is no run {text!r} below {root}.{_hint(runs, text)}")


def statuses(runs: Sequence[RunDir]) -> list[RunStatus]:
    """How the runs are doing; Slurm is asked once for all of them, and only where it must be."""
    submissions = [latest_submission(events.read(run.events)) for run in runs]
    states = query(jobs_to_ask(submissions))
    return [run_status(run, states) for run in runs]


def find_each(root: Path, texts: Sequence[str]) -> list[RunDir]:
    """The runs that are meant, as `find_run` finds them; one that is named twice is there once."""
    return list({one.path: one for one in (find_run(root, text) for text in texts)}.values())


def find_those(root: Path, texts: Sequence[str]) -> tuple[list[RunDir], list[ClusterDDPError]]:
    """The runs that are meant, each once, and why the other names are none."""
    found: dict[Path, RunDir] = {}
    wrong: list[ClusterDDPError] = []
    for text in texts:
        try:
            run = find_run(root, text)
        except RequestError as error:
            wrong.append(error)
        else:
            found[run.path] = run
    return list(found.values()), wrong


def on_each(
    runs: Sequence[RunDir],
    act: Callable[[RunDir, RunStatus], T],
    tell: Callable[[T], str] | None,
    failed: list[ClusterDDPError],
) -> list[T]:
    """What `act` has made of each run; `tell` words it for a person, who reads it at once.

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


def say_failed(failed: Sequence[ClusterDDPError]) -> int:
    """Print what did not work; returns the highest of the exit codes, 0 without an error."""
    for error in failed:
        click.echo(f"clusterddp: {error}", err=True)
    return max((error.exit_code for error in failed), default=EXIT_DONE)


def as_json(value: object) -> str:
    """Indented JSON; a loss that is not a number becomes null, for JSON knows no NaN."""
    import json

    return json.dumps(_finite(value), indent=2)


def duration(seconds: float | None) -> str:
    """`45s`, `12m05s`, `3h07m`, `2d04h`; `-` when unknown."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _job_ids(run: RunDir) -> set[str]:
    """Job ids of a run: submitted ones, or the one in which ranks started by hand have trained.

    Of an array's element they are its own, 12, its name, 11_1, and the array's, 11.
    """
    told = events.read(run.events)
    if not told:
        with contextlib.suppress(OSError):  # one run that cannot be looked into hides no other
            told = [events.parse(one.read_record()) for one in [latest(run)] if one]
    elements = [event.array_element for event in told if event.array_element]
    arrays = [name.partition("_")[0] for name in elements]
    return {event.job_id for event in told if event.job_id} | {*elements, *arrays}


def _hint(runs: Sequence[RunDir], text: str) -> str:
    names = [run.name for run in runs]
    near = difflib.get_close_matches(text, names, n=3) or [n for n in names if text in n][-3:]
    if near:
        return f" Did you mean {', '.join(near)}?"
    if names:
        return f" The latest are {', '.join(names[-3:])}; 'clusterddp jobs' lists them all."
    return " There are no runs there; --output-root names the folder that holds them."


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

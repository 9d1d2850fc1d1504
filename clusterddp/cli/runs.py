"""Parts shared by the commands on runs: the argument RUN, options, JSON, following a run."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from clusterddp import errors, files, log
from clusterddp.cli.options import Completed
from clusterddp.launchers import SentJob
from clusterddp.request.spec import JobSpec
from clusterddp.run.history import History
from clusterddp.run.run_dir import RunDir, find_runs
from clusterddp.status.find import DEFAULT_ROOT, find_sweeps, names_several, select_each
from clusterddp.status.state import RunState
from clusterddp.status.status import RunStatus, statuses

if TYPE_CHECKING:
    from clusterddp.status.stop import Cancellation, Send, Stop

_Result = TypeVar("_Result", bound="Stop | Cancellation")
_LAST_LINES = 20


def _names(ctx: click.Context, _incomplete: str) -> Iterable[str]:
    """Return the names of sweeps, then of runs, the latest first."""
    root = ctx.params.get("runs_dir") or os.environ.get("CLUSTERDDP_RUNS_DIR")
    try:
        folder = Path(root or DEFAULT_ROOT)
        return [run.name for run in reversed([*find_runs(folder), *find_sweeps(folder)])]
    except errors.RequestError:
        return []  # while completing, nothing may be printed but names


RUN = Completed("run", _names)
"""Type of a run's name, job id or directory."""
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
RUNS_DIR_OPTION = click.option(
    "--runs-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=DEFAULT_ROOT,
    show_default=True,
    envvar="CLUSTERDDP_RUNS_DIR",
    help="Directory for runs.",
)
"""The same as that of `submit`."""


def act_on_each(
    root: Path,
    names: Sequence[str],
    act: "Callable[[RunDir, RunStatus, Send], _Result]",
    words: Callable[[_Result], str],
    *,
    as_json: bool,
    wait: Callable[[Sequence[RunDir]], int] | None = None,
    confirm: Callable[[Sequence[RunStatus]], None] | None = None,
) -> int:
    """Act on each run and print the results; an error with one does not stop the others.

    words: formats a result as text; JSON is printed at the end, as a list.
    wait: waits for the successful runs and returns an exit code.
    confirm: raises if the user does not mean the several runs of a sweep or a pattern.
    Returns the highest exit code.
    """
    from clusterddp.status.stop import apply_to_all

    runs, failed = select_each(root, names)
    known = statuses(runs)
    if confirm and len(runs) > 1 and any(names_several(root, name) for name in names):
        confirm(known)
    reached, results = [], []
    for run, result in zip(runs, apply_to_all(act, [*zip(runs, known, strict=True)]), strict=True):
        if isinstance(result, errors.ClusterDDPError):
            failed.append(result)
            continue
        reached.append(run)
        results.append(result)
        if not as_json:
            click.echo(words(result))
    code = echo_failures(failed)
    if wait:
        code = max(code, wait(reached))
    if as_json:
        echo_json([dataclasses.asdict(result) for result in results])
    return code


def agrees(question: str) -> bool:
    """Ask before something is removed. Raises RequestError without an answer."""
    click.echo(f"{question} [y/N] ", nl=False, err=True)
    answer = sys.stdin.readline()
    if not answer:
        raise errors.RequestError("nobody answered, so nothing was removed. Add --yes. [CD0109]")
    return answer.strip().lower() in ("y", "yes")


def echo_failures(failures: Sequence[errors.ClusterDDPError]) -> int:
    """Print the errors and return the highest exit code."""
    for failure in dict.fromkeys(failures):
        click.echo(f"clusterddp: {errors.coded(failure)}", err=True)
    return max((failure.exit_code for failure in failures), default=errors.EXIT_DONE)


def echo_json(value: object) -> None:
    """Print indented JSON, with null for NaN, which JSON lacks."""
    click.echo(json.dumps(files.finite(value), indent=2))


def follow(
    run: RunDir,
    paths: Sequence[Path] = (),
    lines: int | None = None,
    *,
    goes_on: bool = True,
    to_stderr: bool = False,
    attempt: int | None = None,
) -> int:
    """Print the run's logs as they grow until it ends, and its changes of state on stderr.

    paths: the logs to print, rank 0's when none are given; they need not exist yet.
    lines: how many of the existing lines are printed first; all when None.
    attempt: the attempt with which the logs begin; sys.maxsize for the next one.
    to_stderr: print the logs there too, where stdout is for a script to read.
    goes_on: True where the run outlives a Ctrl-C here, which is then printed.

    It continues over requeues and the jobs that take another one's place. Returns the exit code for
    the command: 0 done, 1 failed, cancelled or lost, 75 stopped, 130 interrupted.
    """
    stream = (sys.stderr if to_stderr else sys.stdout).buffer
    followed = paths or [run.rank_log(0)]
    try:
        from clusterddp.run.attempt import read_attempt_log
        from clusterddp.status.follow import LogPrinter, log_end, wait_for_end

        status = wait_for_end(run, LogPrinter(followed, lines, stream, attempt=attempt))
    except KeyboardInterrupt:
        if goes_on:
            click.echo(
                f"\nclusterddp: {run.name} goes on; 'clusterddp logs -f {run.cli_name}' follows it "
                f"again, 'clusterddp cancel {run.cli_name}' ends it",
                err=True,
            )
        return errors.EXIT_INTERRUPTED
    if status.state == RunState.FAILED:
        # The cause follows below; unlike the job log, a rank's log does not repeat it.
        rank = None if status.failed_rank is None else run.rank_log(status.failed_rank)
        failed = rank if rank and rank.is_file() else run.job_log
        if failed not in followed:
            latest = sys.maxsize if status.attempt is None else status.attempt
            last = read_attempt_log(failed, latest).rstrip().splitlines()[-_LAST_LINES:]
            if last:
                click.echo("\n".join([f"--- last lines of {failed}:", *last]), err=True)
    return log_end(run, status)


def follow_submitted(
    spec: JobSpec,
    run: RunDir,
    submission: SentJob,
    words: str,
    *,
    wait: bool,
    as_json: bool,
    lines: int | None = None,
) -> int:
    """Print a submission and follow the run if requested, or if it ends with this process.

    words: text of the submission, without the place of the code. JSON replaces it; for a followed
    run it is printed at the end, with the exit code. lines: see `follow`. Returns the command's
    exit code.
    """
    fields: dict[str, object] = {
        "run": spec.run_name,
        "run_dir": spec.run_dir,
        "job_id": submission.job_id,
    }
    if spec.uses_own_code:
        from clusterddp.submission import snapshot

        tree = Path(History.read(run).folder or Path.cwd())
        place = snapshot.code_location(run, tree)
        fields |= place
        words += f"\n  code    {snapshot.format_code_location(run, place, tree)}" if place else ""
    if not (wait or submission.stop):
        click.echo(json.dumps(fields) if as_json else words)
        return errors.EXIT_DONE
    if not as_json:
        click.echo(words)
    code = follow(run, lines=lines, goes_on=not submission.stop, to_stderr=as_json)
    if submission.stop:
        if code == errors.EXIT_INTERRUPTED:
            log.info(f"{run.name}: cancelling")
            submission.stop()
            log.info(f"{run.name}: cancelled")
        submission.stop()
    if as_json:
        click.echo(json.dumps({**fields, "exit_code": code}))
    return code

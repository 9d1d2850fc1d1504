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
from clusterddp.cli.options import Completed, source
from clusterddp.launchers import SentJob
from clusterddp.request.options import FLAG
from clusterddp.request.spec import IN_ALLOCATION, JobSpec
from clusterddp.run.history import History
from clusterddp.run.run_dir import RunDir, find_runs
from clusterddp.status.find import DEFAULT_ROOT, find_sweeps, names_several, select_each
from clusterddp.status.state import RunState
from clusterddp.status.status import RunStatus, statuses

if TYPE_CHECKING:
    from clusterddp.status.stop import CancelResult, Send, StopResult

_Result = TypeVar("_Result", bound="StopResult | CancelResult")
_LAST_LINES = 20


def _names(ctx: click.Context, _incomplete: str) -> Iterable[str]:
    """Return the names of sweeps, then of runs, the latest first."""
    root = ctx.params.get("runs_dir") or os.environ.get("CLUSTERDDP_RUNS_DIR")
    try:
        folder = Path(root or DEFAULT_ROOT)
        return [run.name for run in reversed([*find_runs(folder), *find_sweeps(folder)])]
    except errors.RequestError:
        return []  # completion must print only names


RUN = Completed("run", _names)
"""Click type of a run's name, job id or directory."""
RUNS_DIR_OPTION = click.option(
    "--runs-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=DEFAULT_ROOT,
    show_default=True,
    envvar="CLUSTERDDP_RUNS_DIR",
    help="Directory for runs.",
)
"""Same option as in `submit`."""


def typed_runs_dir(root: Path) -> list[str]:
    """Return the option for the cluster's part of a command, if it was typed."""
    return [f"--runs-dir={root}"] * (source(click.get_current_context(), "runs_dir") == FLAG)


def refuse_misspelt(ctx: click.Context, root: Path) -> None:
    """Refuse a typed runs directory that does not exist."""
    if source(ctx, "runs_dir") == FLAG and not root.is_dir():
        raise errors.RequestError(f"--runs-dir: the directory '{root}' does not exist. [CD0501]")


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
    """Act on each run and print the results, even if some fail.

    words: formats a result as text; JSON is printed at the end, as a list.
    wait: waits for the successful runs and returns an exit code.
    confirm: asks about the runs of a sweep or a pattern, or a name found in another directory, and
    raises if the answer is not yes.
    Returns the highest exit code.
    """
    from clusterddp.status.stop import apply_to_all

    runs, failed = select_each(root, names)
    known = statuses(runs)
    if confirm:
        # A name that is only known elsewhere may be that of a submission here that was refused.
        elsewhere = (
            run.path.parent.resolve() != root.resolve()
            for run, status in zip(runs, known, strict=True)
            if {run.name, run.name.rpartition("-")[0]} & {*names} and not status.has_ended
        )
        if any(elsewhere) or (len(runs) > 1 and any(names_several(root, name) for name in names)):
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


def confirm(question: str, done: str) -> None:
    """Ask a question on the terminal. Raises RequestError unless the answer is yes.

    done: what is not done then, `removed`.
    """
    if not sys.stdin.isatty():
        raise errors.RequestError(
            f"{question} There is no terminal to confirm on, so nothing was {done}. Add --yes. "
            "[CD0109]"
        )
    if not click.confirm(question, err=True):
        raise errors.RequestError(f"nothing was {done}. [CD0109]")


def echo_failures(failures: Sequence[errors.ClusterDDPError]) -> int:
    """Print the errors and return the highest exit code."""
    for failure in dict.fromkeys(failures):
        click.echo(f"clusterddp: {errors.coded(failure)}", err=True)
    return max((failure.exit_code for failure in failures), default=errors.EXIT_DONE)


def echo_json(value: object) -> None:
    """Print indented JSON, with null for NaN."""
    click.echo(json.dumps(files.finite(value), indent=2))


def follow(
    run: RunDir,
    paths: Sequence[Path] = (),
    lines: int | None = None,
    *,
    survives_ctrl_c: bool = True,
    to_stderr: bool = False,
    attempt: int | None = None,
) -> int:
    """Print the run's logs as they grow until it ends, and its state changes on stderr.

    paths: logs to print, by default rank 0's; they need not exist yet.
    lines: number of existing lines to print first; None for all.
    attempt: first attempt to print; sys.maxsize for the next one.
    to_stderr: print the logs on stderr, because a script reads stdout.
    survives_ctrl_c: the run continues after Ctrl-C; print how to follow it again.

    Follows the run across requeues and replacement jobs. Returns the command's exit code: 0 done,
    1 failed, cancelled or lost, 75 stopped, 130 interrupted.
    """
    stream = (sys.stderr if to_stderr else sys.stdout).buffer
    followed = paths or [run.rank_log(0)]
    try:
        from clusterddp.run.attempt import read_attempt_log
        from clusterddp.run.rank_log import RankLog
        from clusterddp.status.follow import LogPrinter, log_end, wait_for_end

        status = wait_for_end(run, LogPrinter(followed, lines, stream, attempt=attempt))
    except KeyboardInterrupt:
        if survives_ctrl_c:
            click.echo(
                f"\nclusterddp: {run.name} continues. Follow it: clusterddp logs -f "
                f"{run.cli_name}. End it: clusterddp cancel {run.cli_name}",
                err=True,
            )
        return errors.EXIT_INTERRUPTED
    if status.state == RunState.FAILED:
        # The cause is printed below; the job log would repeat it, a rank's log does not.
        rank = None if status.failed_rank is None else run.rank_log(status.failed_rank)
        failed = rank if rank and RankLog(rank).find() else run.job_log
        if failed not in followed:
            latest = sys.maxsize if status.attempt is None else status.attempt
            last = read_attempt_log(failed, latest).rstrip().splitlines()[-_LAST_LINES:]
            if last:
                click.echo(
                    "\n".join([f"--- last lines of {RankLog(failed).path}:", *last]), err=True
                )
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

    words: text of the submission, without the location of the code. JSON replaces it, and has the
    exit code of a followed run. lines: see `follow`. Returns the command's exit code.
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
        if place:
            words += f"\n  workdir    {snapshot.format_code_location(run, place, tree)}"
    if not (wait or submission.stop):
        click.echo(json.dumps(fields) if as_json else words)
        return errors.EXIT_DONE
    if not as_json:
        click.echo(words)
    code = follow(run, lines=lines, survives_ctrl_c=not submission.stop, to_stderr=as_json)
    if submission.stop:
        if code == errors.EXIT_INTERRUPTED and spec.launcher == IN_ALLOCATION:
            code = _stop_and_follow(run, to_stderr=as_json)
        if code == errors.EXIT_INTERRUPTED:
            log.info(f"{run.name}: cancelling")
            submission.stop()
            log.info(f"{run.name}: cancelled")
        submission.stop()
    if as_json:
        click.echo(json.dumps({**fields, "exit_code": code}))
    return code


def _stop_and_follow(run: RunDir, *, to_stderr: bool) -> int:
    """Ask a run of this terminal to stop, and follow it to its end. Return the exit code."""
    from clusterddp.status.stop import stop

    try:
        log.info(f"{stop(run, statuses([run])[0]).message}. Ctrl-C again ends it now")
        return follow(run, lines=0, survives_ctrl_c=False, to_stderr=to_stderr)
    except (KeyboardInterrupt, errors.ClusterDDPError):
        return errors.EXIT_INTERRUPTED

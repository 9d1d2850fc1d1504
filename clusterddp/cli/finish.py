"""`clusterddp finish`: the batch script's last word, after srun has ended.

Says what the run achieved or which rank failed first, records it, and turns it into the job's
exit code: srun's own code hides the first failure behind the ranks that it ended for it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import click

from clusterddp.errors import EXIT_FAILED, RequestError
from clusterddp.outcome import Failure, first_failure, read_outcomes
from clusterddp.run_dir import RunDir, read_json

# srun's lines stand at the log's end; a set-up can have written a great deal before them.
_LAST_LINES = 10
_LOG_TAIL_BYTES = 1 << 20


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--exit-code", type=int, required=True, help="srun's exit code.")
@click.option("--job-id", default="", help="Slurm's job id.")
@click.option("--restart", type=int, default=0, help="SLURM_RESTART_COUNT.")
def command(run_dir: Path, exit_code: int, job_id: str, restart: int) -> int:
    """Print and record how a job of a run ended, and exit with the job's code."""
    run = RunDir(run_dir)
    outcomes = read_outcomes(run, job_id, restart)
    failure = first_failure(outcomes, _log_of(run, job_id))
    if exit_code == 0 and not any(outcome.failed for outcome in outcomes):
        failure = None  # srun's lines may be of another step, run by the set-up
    code = _job_code(exit_code, failure)
    missing = code == 0 and _trains(run) and not _fresh_report(run, job_id, restart)
    if missing:
        code = EXIT_FAILED
    if _was_cancelled(run, job_id):
        click.echo("clusterddp: cancelled")
        failure = None
    elif failure:
        _show_last_words(run, failure)
        click.echo(f"clusterddp: {failure.describe()}")
        click.echo(f"clusterddp: see its log: clusterddp logs {run.shown} --rank {failure.rank}")
    elif missing:
        click.echo(
            f"clusterddp: srun ended with exit code 0, but the run has no {run.report.name} of "
            f"this job: it did not finish. See {run.logs}."
        )
    elif code:
        where = run.job_log if outcomes else f"{run.job_log}, as no task has started"
        click.echo(f"clusterddp: ended with exit code {code}; no rank says why. See {where}.")
    else:
        click.echo(f"clusterddp: {_achieved(run)}")
    _record(run, job_id=job_id, restart=restart, exit_code=code, failure=failure)
    return code


def _was_cancelled(run: RunDir, job_id: str) -> bool:
    """Whether `clusterddp cancel` asked for this end: then no rank is to blame for it."""
    said = [e for e in run.read_events() if str(e.get("job_id", "")) == job_id]
    kinds = [e["event"] for e in said if e.get("event") in ("cancelled", "cancel_failed")]
    return kinds[-1:] == ["cancelled"]


def _show_last_words(run: RunDir, failure: Failure) -> None:
    """The end of the failing rank's log, so that its own words stand beside the verdict."""
    try:
        lines = (run.path / failure.log).read_text(errors="replace").splitlines()
    except OSError:
        return
    if lines:
        click.echo(f"--- the end of {failure.log}")
        click.echo("\n".join(lines[-_LAST_LINES:]))


def _job_code(srun_code: int, failure: Failure | None) -> int:
    """The first failing rank's own code, rather than 143 of those that were ended for it."""
    if failure and failure.exit_code:
        return failure.exit_code
    return srun_code or (EXIT_FAILED if failure else 0)


def _log_of(run: RunDir, job_id: str) -> str:
    """What the job log says since this job, or its latest restart, has started."""
    try:
        with run.job_log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _LOG_TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text.rpartition(f", job {job_id} on ")[2] if job_id else text


def _trains(run: RunDir) -> bool:
    try:
        return run.load_spec().train is not None
    except RequestError:
        return run.metrics.exists()


def _fresh_report(run: RunDir, job_id: str, restart: int) -> bool:
    """Whether report.json was written by this start of the job, not by an earlier one."""
    report = read_json(run.report)
    if report is None:
        return False
    starts = [
        event["time"]
        for event in run.read_events()
        if event.get("event") == "started"
        and str(event.get("job_id", "")) == job_id
        and event.get("restart", 0) == restart
    ]
    # The script notes its start in whole seconds.
    return not starts or float(report.get("finished", 0)) >= starts[-1] - 1


def _achieved(run: RunDir) -> str:
    """One line of the report; a person's own command leaves none."""
    report: dict[str, Any] | None = read_json(run.report)
    if report is None:
        return "done: every task ended with exit code 0"
    try:
        hosts = len(report["hosts"])
        return (
            f"done: test accuracy {report['accuracy']:.2%}, test loss {report['loss']:.4f}; "
            f"{report['train_seconds']:.1f} s of training ({report['total_seconds']:.1f} s in "
            f"all), {report['images_per_second']:,.0f} images/s on {report['world_size']} "
            f"{'rank' if report['world_size'] == 1 else 'ranks'} of {hosts} "
            f"{'host' if hosts == 1 else 'hosts'}; {run.report}"
        )
    except (KeyError, TypeError, ValueError):
        return f"done; see {run.report}"


def _record(
    run: RunDir, job_id: str, restart: int, exit_code: int, failure: Failure | None
) -> None:
    first = dataclasses.asdict(failure) if failure else None
    try:
        run.add_event(
            "ended", job_id=job_id, restart=restart, exit_code=exit_code, first_failure=first
        )
    except OSError as error:
        click.echo(
            f"clusterddp: cannot record the end in {run.events}: {error.strerror}.", err=True
        )

"""Whether a run can be submitted once more as it stands: where it lies, and that it is at rest."""

from pathlib import Path

import click

from clusterddp.errors import RequestError
from clusterddp.request.spec import JobSpec
from clusterddp.run import attempt as attempts
from clusterddp.run import events
from clusterddp.run.progress import newest_checkpoint
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import DONE, QUEUED, RUNNING, UNKNOWN
from clusterddp.run.status import run_status
from clusterddp.run.submission import jobs_to_ask, latest_submission
from clusterddp.slurm.queries import query
from clusterddp.slurm.states import JobState, State
from clusterddp.submission.changed_request import has_more


def check_directory(run: RunDir, spec: JobSpec) -> None:
    """The run is one that this version can go on with, and its script leads here."""
    latest = attempts.latest(run)
    if latest and int(latest.read_record().get("format") or 0) > attempts.FORMAT:
        raise RequestError(
            f"{latest.record} was written by a newer clusterddp; update this one to go on with "
            f"{run.name}."
        )
    here, there = run.path.resolve(), Path(spec.run_dir).resolve()
    if here == there:
        return
    if run.array_index:
        raise RequestError(
            f"{run.name} is an element of an array, whose script starts all of them. Go on with: "
            f"{run.resubmission}"
        )
    raise RequestError(
        f"{run.name} lies at {here}, but its script leads to {there}: the directory was moved. "
        f"Move it back, or submit a new run with --resume {here}."
    )


def check_state(run: RunDir, before: JobSpec, after: JobSpec) -> None:
    """Refuse a run that is queued or running, may be, or has nothing left to do."""
    submission = latest_submission(events.read(run.events))
    states = query(jobs_to_ask([submission]))
    status = run_status(run, states)
    job = states.get(status.job_id, JobState(State.UNKNOWN))
    detail = f" ({status.detail})" if status.detail else ""
    if status.state in (QUEUED, RUNNING):
        raise RequestError(
            f"{run.name} is {status.state}{detail} as job {status.job_id}: one run cannot train "
            f"twice at once. Follow it with 'clusterddp logs -f {run.shown}', or end it first "
            f"with 'clusterddp stop {run.shown}'."
        )
    if status.state == DONE and not has_more(run, before, after):
        if not before.train:
            raise RequestError(
                f"{run.name} is done: its command has ended with exit code 0. Submit a new run."
            )
        reached = newest_checkpoint(run)
        is_at_most = reached and 0 < before.train.max_steps <= reached[0]
        more = "a larger --max-steps N" if is_at_most else "--epochs N --allow-changed"
        raise RequestError(
            f"{run.name} is done: there is nothing left to train. Give it more, such as {more}, or "
            "submit a new run."
        )
    if status.state != UNKNOWN or submission is None:
        return
    if submission.is_local:
        latest = attempts.latest(run)
        if latest is None or latest.end.exists() or not latest.is_alive():
            return  # wherever that was, nobody trains it any more
        raise RequestError(
            f"{run.name} still trains: {status.detail}. Stop it first with 'clusterddp stop "
            f"{run.shown}'."
        )
    if job.problem:
        raise RequestError(
            f"whether job {status.job_id} of {run.name} still waits or runs is not known: "
            f"{job.problem}. Try again where 'squeue -j {status.job_id}' answers; two jobs cannot "
            "train one run."
        )
    click.echo(f"clusterddp: {run.name}: {status.detail}; submitting it again", err=True)

"""One start of a job: its records, its requeue or withdrawal, and the nodes that it excludes."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from clusterddp import log, polling
from clusterddp.errors import ClusterDDPError, SlurmError
from clusterddp.ranks.variables import slurm_job_name
from clusterddp.request.spec import JobSpec
from clusterddp.run import bad_nodes, events
from clusterddp.run.attempt import Attempt, StartRefused, Superseded, print_to_job_log
from clusterddp.run.events import Cause, Event
from clusterddp.run.history import History, withdrawal_cause
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm.client import Ending

T = TypeVar("T")


@dataclass(frozen=True)
class JobStart:
    """One start of a run's job by Slurm."""

    run: RunDir
    id: str
    """Slurm's job id."""
    restart: int = 0
    """SLURM_RESTART_COUNT."""
    nodelist: str = ""
    """Nodes of the tasks, in Slurm's form."""

    @property
    def name(self) -> str:
        """Name of the job for Slurm's commands: 89_0 for an array task."""
        return slurm_job_name(os.environ, self.id)

    def record(self, event: Event) -> None:
        """Append an event; its job defaults to this one.

        If the run directory is gone or full, the record is lost but the run continues.
        """
        path = self.run.events
        try:
            events.add(path, event if event.job_id else replace(event, job_id=self.id))
        except OSError as error:
            line = f"cannot record {event.kind!r} in {path}: {error.strerror}. [CD0518]"
            print_to_job_log(f"clusterddp: {line}", err=True)

    def withdrawal_cause(self, history: History) -> str:
        """Return the cause of the user's withdrawal of this job (see `history.withdrawal_cause`).

        An array task is known by its name until it has recorded a start.
        """
        return withdrawal_cause(history.events, self.id) or withdrawal_cause(
            history.events, self.name
        )

    def withdraw_if_asked(self, successor: str = "") -> None:
        """Withdraw the next job if the user has stopped or cancelled the run meanwhile.

        successor: the job that replaces this one; empty for this job itself.
        """
        if self.withdrawal_cause(History.read(self.run)):
            self.withdraw(successor)

    def withdraw(self, successor: str = "") -> None:
        """Cancel the next job. If the cancellation fails, the job starts but begins no attempt."""
        name = successor or self.name
        self.record(events.CancelRequested(job_id=name))
        try:
            slurm.cancel(name)
        except SlurmError as error:
            log.info(str(error))
        log.info(f"job {successor or self.id} is cancelled: the user has stopped or cancelled it")

    def requeue(self, why: str = "") -> None:
        """Requeue the job. `why` is the cause of the attempt's end.

        Raises StartRefused if the user cancelled it, except after a preemption: Slurm would requeue
        it even then. Raises SlurmError if Slurm does not report its state, or refuses.
        """
        word = slurm.ending(self.name, self.restart)
        if word is Ending.UNKNOWN:
            raise SlurmError("Slurm does not report the state of the job")
        if word is Ending.CANCELLED and why != Cause.PREEMPTED:
            raise StartRefused("the job was cancelled, so it is not requeued [CD1203]")
        slurm.requeue(self.name)


def retry_while_unreachable(attempt: Attempt, ask: Callable[[], T]) -> T:
    """Repeat a request to Slurm while slurmctld does not respond.

    Raises SlurmError after the last try, and Superseded once a later attempt runs: Slurm gave this
    job up meanwhile, and its id belongs to its successor.
    """
    for is_last in polling.poll(polling.SLURM_RESTART_SECONDS, every=polling.SLURM_POLL_SECONDS):
        if attempt.is_superseded:
            raise Superseded(
                f"attempt {attempt.number} is superseded: a later one of the run has begun"
            )
        try:
            return ask()
        except slurm.RequeueRefused:
            raise
        except SlurmError as error:
            if is_last:
                raise
            log.info(f"{error}; trying again")
    raise AssertionError("the last look answers or raises")


def exclude_bad_nodes(job: JobStart, number: int) -> None:
    """Exclude the bad nodes from the next start of a queued job; a failure is logged.

    number: of the attempt that has ended.
    """
    history = History.read(job.run)
    if not bad_nodes.known_to(history):
        return
    try:
        choice, hosts = choose_excluded(job, job.run.load_spec(), history)
        if set(hosts) != set(slurm.job_nodes(job.name).excluded):
            slurm.exclude_nodes(job.name, hosts)
    except (ClusterDDPError, OSError) as error:
        log.warning(f"bad nodes cannot be excluded: {error} [CD1303]")
        return
    record_excluded(job, job.id, number, choice)


def choose_excluded(
    job: JobStart, spec: JobSpec, history: History
) -> tuple[bad_nodes.Choice, list[str]]:
    """Return the bad nodes to exclude from the next start, and all nodes that the job excludes.

    Raises SlurmError if Slurm does not show what the job excludes so far.
    """
    known = bad_nodes.known_to(history)
    if not known:
        return bad_nodes.Choice(), []
    asked = slurm.job_nodes(job.name)
    count = os.environ.get("SLURM_JOB_NUM_NODES", "")
    choice = bad_nodes.choose(
        job.run.path.parent,
        spec.resources,
        os.environ,
        count=int(count) if count.isdecimal() else 0,
        partition=asked.partition,
        others=dict(spec.sbatch),
        history=history,
    )
    return choice, bad_nodes.merge_excludes(spec.resources, asked.excluded, choice.nodes, known)


def record_excluded(
    job: JobStart, job_id: str, number: int | None, choice: bad_nodes.Choice
) -> None:
    """Log and record the nodes that a job excludes; job_id: this job or its successor."""
    for remark in choice.remarks:
        log.info(remark)
    if choice.nodes:
        job.record(events.NodesExcluded(job_id=job_id, attempt=number, nodes=choice.nodes))
        log.info(choice.line)

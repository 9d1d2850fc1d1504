"""Bad nodes of a job: blamed at the end of an attempt, left out of the next start."""

import contextlib
import os

from clusterddp import files, log
from clusterddp.batch.job import JobStart
from clusterddp.batch.verdict import Verdict
from clusterddp.errors import ClusterDDPError, SlurmError
from clusterddp.ranks.variables import is_rehearsal
from clusterddp.request.spec import JobSpec
from clusterddp.run import bad_nodes, events
from clusterddp.run.attempt import Attempt
from clusterddp.run.events import Cause
from clusterddp.run.history import History
from clusterddp.slurm import client as slurm
from clusterddp.slurm import srun_lines
from clusterddp.slurm.site import nodes

_LONGEST_REASON = 300
_LOG_TAIL_BYTES = 1 << 20


def blame(job: JobStart, attempt: Attempt, verdict: Verdict, history: History) -> None:
    """Blame nodes that were lost, that hardware names, where ranks crash again or are slow.

    One that was blamed in the attempt is not blamed twice.
    """
    if is_rehearsal(os.environ):
        return
    try:
        already = history.blamed(attempt.number)
        blamed = bad_nodes.read_for(history) if verdict.lost_nodes else {}
        new = [
            # A job's log can tell of an earlier attempt in the same job.
            host
            for host in verdict.lost_nodes
            if host not in already and (host not in blamed or blamed[host].job_id != job.id)
        ]
        if new:
            lost = dict.fromkeys(new, f"lost during attempt {attempt.number}")
            bad_nodes.blame(attempt, job.id, lost, bad_nodes.BY_LOSS)
        first = verdict.ended.first_failure
        starts = history.starts_with(attempt.number, failure=first)
        failure = first if first and first.host not in already else None
        if failure and verdict.hardware:
            named = {failure.host: f"rank {failure.rank} died: {verdict.hardware}"}
            bad_nodes.blame(attempt, job.id, named, bad_nodes.BY_HARDWARE)
        elif failure and (host := bad_nodes.failed_again(starts)):
            why = f"ranks crash there again that got further elsewhere: {failure.reason}"
            again = {host: why.partition("\n")[0][:_LONGEST_REASON]}
            bad_nodes.blame(attempt, job.id, again, bad_nodes.BY_REPETITION)
        is_latest = verdict.ended.cause != Cause.SUPERSEDED
        slow = bad_nodes.straggling(starts) if is_latest and starts[-1].slow else {}
        if fresh := {host: why for host, why in slow.items() if host not in already}:
            for host, why in fresh.items():
                log.info(f"node {host} is bad: {why}")
            bad_nodes.blame(attempt, job.id, fresh, bad_nodes.BY_STRAGGLING)
    except OSError as error:
        log.warning(f"bad nodes cannot be recorded: {error} [CD1302]")


def blame_lost_script(history: History) -> bool:
    """Blame the nodes of an attempt that nobody judged, if they are lost: its script was with them.

    srun has seen them fail, or they are down now. Returns whether some were. Raises OSError.
    """
    latest = max(history.starts, key=lambda start: start.number, default=None)
    if latest is None or latest.cause:
        return False
    job_id = history.every(events.Started, latest.number)[-1].job_id
    text = files.read_tail(history.run.job_log, _LOG_TAIL_BYTES).decode(errors="replace")
    lost = set(srun_lines.lost_nodes(text.rpartition(f", job {job_id} on ")[2]))
    with contextlib.suppress(SlurmError):
        partition = os.environ.get("SLURM_JOB_PARTITION", "")
        lost |= {node.name for node in nodes(partition, os.environ) if node.is_lost}
    blamed = history.blamed(latest.number)
    new = [host for host in latest.nodes if host in lost and host not in blamed]
    reason = f"lost during attempt {latest.number}, whose end nobody recorded"
    attempt = Attempt(history.run, latest.number)
    bad_nodes.blame(attempt, job_id, dict.fromkeys(new, reason), bad_nodes.BY_LOSS)
    return bool(new)


def leave_out(job: JobStart, number: int) -> None:
    """Have a job in the queue leave out the bad nodes; where that fails it is logged.

    number: of the attempt that has ended.
    """
    history = History.read(job.run)
    if not bad_nodes.known_to(history):
        return
    try:
        choice, hosts = to_leave_out(job, job.run.load_spec(), history)
        if set(hosts) != set(slurm.job_nodes(job.name).excluded):
            slurm.exclude_nodes(job.name, hosts)
    except (ClusterDDPError, OSError) as error:
        log.warning(f"bad nodes cannot be left out: {error} [CD1303]")
        return
    note_left_out(job, job.id, number, choice)


def to_leave_out(
    job: JobStart, spec: JobSpec, history: History
) -> tuple[bad_nodes.Choice, list[str]]:
    """Return the bad nodes that the next start can do without, and all that it leaves out.

    Raises SlurmError where Slurm does not say what the job leaves out so far.
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
    return choice, bad_nodes.merged(spec.resources, asked.excluded, choice.nodes, known)


def note_left_out(job: JobStart, job_id: str, number: int | None, choice: bad_nodes.Choice) -> None:
    """Log and record what a job leaves out, be it this one or its successor."""
    for remark in choice.remarks:
        log.info(remark)
    if choice.nodes:
        job.record(events.NodesLeftOut(job_id=job_id, attempt=number, nodes=choice.nodes))
        log.info(choice.line)

"""Requeue of a job that has lost its batch script, from one of its remaining tasks.

If a host's processes end and its slurmd is back at once, slurmctld does not notice (seen on 22.05):
the empty job then keeps running until its time limit.
"""

import os
from contextlib import suppress

from clusterddp import log, polling
from clusterddp.errors import ClusterDDPError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import has_queue, host_name, slurm_job_name
from clusterddp.run import events
from clusterddp.run.attempt import LIVENESS_TIMEOUT, Attempt
from clusterddp.run.history import (
    History,
    Policy,
    causes_by_attempt,
    steps_gained,
    withdrawal_cause,
)
from clusterddp.run.outcome import last_renewal, read_outcomes_of
from clusterddp.slurm import client as slurm
from clusterddp.slurm.client import Ending
from clusterddp.slurm.forms import expand_nodelist


def requeue_if_lost(attempt: Attempt, env: DistEnv) -> None:
    """Requeue the job if the attempt's batch controller is lost and the run may resume.

    For a failed task. Returns within seconds if the controller is alive (the usual case), and at
    once if rank 0 has failed on the controller's host.
    """
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if not job_id or env.local_rank or not has_queue(os.environ):
        return
    with suppress(ClusterDDPError, OSError):
        script_host = expand_nodelist(os.environ.get("SLURM_JOB_NODELIST", ""))[0]
        if host_name(os.environ) != script_host and _is_lost(attempt, script_host):
            _requeue(attempt, job_id, script_host)


_POLLS_OF_RECORDS = 10
"""Polls between two reads of the ranks' records: a task of each node polls."""


def _is_lost(attempt: Attempt, host: str) -> bool:
    """Wait for a heartbeat of the controller or its host; return whether none came in time."""
    try:
        before = last_renewal(attempt.controller)
    except OSError:  # a launcher that has no controller
        return False
    polls = polling.poll(LIVENESS_TIMEOUT, every=polling.RECORDS_POLL_SECONDS)
    for number, is_last in enumerate(polls):
        if attempt.is_superseded or last_renewal(attempt.controller) != before:
            return False
        if number % _POLLS_OF_RECORDS and not is_last:
            continue
        if any(each.rank == 0 and each.failed for each in read_outcomes_of(attempt.outcomes, host)):
            return False
    return True


def _requeue(attempt: Attempt, job_id: str, host: str) -> None:
    """Requeue the job if its policy allows it; raises ClusterDDPError and OSError."""
    run, restart = attempt.run, int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    history, name = History.read(run), slurm_job_name(os.environ, job_id)
    policy = Policy.of(history.spec or run.load_spec())
    gains = steps_gained(attempt, history.spec) is not None
    if not (policy.requeue or (policy.requeues_loops and gains)):
        return
    if (
        withdrawal_cause(history.events, job_id)
        or len(causes_by_attempt(history.events)) > policy.max_requeues
    ):
        return
    if slurm.ending(name, restart) is not Ending.NONE:  # another task, or Slurm, was first
        return
    why = f"the batch script is lost with {host}"
    log.info(f"{why}: requeueing job {job_id}")
    slurm.requeue(name)
    events.add(run.events, events.Requeued(job_id=job_id, attempt=attempt.number, why=why))

"""Puts a job back into the queue whose batch script was lost, from a task that it has left behind.

slurmctld does not notice it where the host's processes end and its slurmd is back at once (seen on
22.05): the job then runs on, with nobody in it, until its time limit.
"""

import os
from contextlib import suppress

from clusterddp import log, patience
from clusterddp.errors import ClusterDDPError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import host_name, is_rehearsal, slurm_job_name
from clusterddp.run import events
from clusterddp.run.attempt import LIVENESS_TIMEOUT, Attempt
from clusterddp.run.history import (
    History,
    Policy,
    causes_by_attempt,
    steps_gained,
    withdrawal_cause,
)
from clusterddp.run.outcome import last_renewal, read_outcome
from clusterddp.slurm import client as slurm
from clusterddp.slurm.client import Ending
from clusterddp.slurm.forms import expand_nodelist


def requeue_if_lost(attempt: Attempt, env: DistEnv) -> None:
    """Put the job back into the queue if the attempt's batch controller is lost, and it may resume.

    For a task that has failed. Returns within seconds where the controller lives, as it nearly
    always does, and at once where rank 0 has failed on its host by then.
    """
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if not job_id or env.local_rank or is_rehearsal(os.environ):
        return
    with suppress(ClusterDDPError, OSError):
        script_host = expand_nodelist(os.environ.get("SLURM_JOB_NODELIST", ""))[0]
        if host_name(os.environ) != script_host and _is_lost(attempt, script_host):
            _requeue(attempt, job_id, script_host)


def _is_lost(attempt: Attempt, host: str) -> bool:
    """Wait for a sign of life of the controller or its host; returns whether none came for long."""
    try:
        before = last_renewal(attempt.controller)
    except OSError:  # a launcher that has no controller
        return False
    for _ in patience.looks(LIVENESS_TIMEOUT, every=patience.RECORDS_PAUSE):
        first = read_outcome(attempt.outcomes, 0)  # of all ranks it would cost a large job too much
        if first and first.failed and first.host == host:
            return False
        if attempt.is_superseded or last_renewal(attempt.controller) != before:
            return False
    return True


def _requeue(attempt: Attempt, job_id: str, host: str) -> None:
    """Raises ClusterDDPError and OSError."""
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
    log.info(f"{why}: job {job_id} goes back into the queue")
    slurm.requeue(name)
    events.add(run.events, events.Requeued(job_id=job_id, attempt=attempt.number, why=why))

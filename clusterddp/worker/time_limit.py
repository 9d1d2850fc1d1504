"""What a task knows of its job's time limit: asked of Slurm time and again, beside the training."""

import threading
import time
from collections.abc import Mapping

from clusterddp.slurm import own_job
from clusterddp.slurm.own_job import is_rehearsal, own_name
from clusterddp.training.deadline import Deadline

# Between two questions: an administrator can move the limit.
_SECONDS = 600.0


def keep_asking(deadline: Deadline, environ: Mapping[str, str]) -> None:
    """In a thread: a controller that is away takes its time to answer."""
    job_id = environ.get("SLURM_JOB_ID", "")
    if job_id:
        threading.Thread(target=lambda: _ask(deadline, job_id, environ), daemon=True).start()


def _ask(deadline: Deadline, job_id: str, environ: Mapping[str, str]) -> None:
    while True:
        deadline.set(seconds_left(job_id, environ))
        time.sleep(_SECONDS)


def seconds_left(job_id: str, environ: Mapping[str, str]) -> float | None:
    """By the controller's clock; by this host's own where squeue does not answer from here."""
    left = None if is_rehearsal(environ) else own_job.seconds_left(own_name(environ, job_id))
    end = environ.get("SLURM_JOB_END_TIME", "")  # set by newer versions
    return int(end) - time.time() if left is None and end.isdigit() else left

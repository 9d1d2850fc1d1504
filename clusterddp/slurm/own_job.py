"""Questions of a process to the job around it: why it ends, how long it has."""

import re
from collections.abc import Mapping
from enum import Enum

from clusterddp.errors import SlurmError
from clusterddp.slurm.client import ask, reaches
from clusterddp.slurm.states import State, parse_state

REQUEUE_AFTER_GRACE_SINCE = (24, 5)
"""First release that itself requeues a preempted job which ends within its grace (slurmctld's
proc_req.c, GRACE_PREEMPT; seen on 24.11.5)."""


class Ending(str, Enum):
    """Reason for which a job whose script is still there ends, as the controller sees it."""

    NONE = "none"
    """The job runs."""
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    """The job is in the queue again already."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


def ending(job_id: str, restart: int, environ: Mapping[str, str] | None = None) -> Ending:
    """Return why the job is ending; from inside, Slurm shows COMPLETING for every reason.

    restart: the SLURM_RESTART_COUNT of the start that asks. Seen on 22.05: a requeue has raised
    Restarts by then, preemption with a grace leaves the job RUNNING with a PreemptTime, and the
    time limit and scancel differ only in how long the job ran.
    """
    try:
        fields = _job_fields(job_id, environ)
    except SlurmError:
        return Ending.UNKNOWN
    if "JobState" not in fields:
        return Ending.UNKNOWN
    if int(fields.get("Restarts") or 0) > restart or parse_state(fields["JobState"]) is (
        State.PENDING
    ):
        return Ending.REQUEUED
    if fields.get("PreemptTime", "None") not in ("None", ""):
        return Ending.PREEMPTED
    state = parse_state(fields["JobState"])
    if state is State.RUNNING:
        return Ending.NONE
    if state is State.OTHER:
        return Ending.UNKNOWN
    if state is State.TIMEOUT:
        return Ending.TIME_LIMIT
    ran, limit = _seconds(fields.get("RunTime", "")), _seconds(fields.get("TimeLimit", ""))
    if ran is not None and limit is not None and ran >= limit:
        return Ending.TIME_LIMIT
    return Ending.CANCELLED


def requeued_after_grace(job_id: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether Slurm itself requeues a preempted job that ends within its grace.

    It does since REQUEUE_AFTER_GRACE_SINCE, where the job's PreemptMode is REQUEUE. A requeue of
    the job's own would leave Slurm's mark on it, which counts at the job's next end then, be it
    done or not. False where it cannot be told, as with modes that belong to a QOS. Raises
    SlurmError where Slurm could not be asked.
    """
    config = ask(["scontrol", "show", "config"], environ).stdout
    version = re.search(r"^SLURM_VERSION\s*=\s*(\d+\.\d+)", config, re.MULTILINE)
    if not version or not reaches(version[1], REQUEUE_AFTER_GRACE_SINCE):
        return False
    if not re.search(r"^PreemptType\s*=\s*(preempt/)?partition_prio\b", config, re.MULTILINE):
        return False
    fields = _job_fields(job_id, environ)
    if fields.get("Requeue") != "1" or "Partition" not in fields:
        return False
    show = ["scontrol", "show", "partition", "-o", fields["Partition"]]
    mode = re.search(r" PreemptMode=(\S*)", ask(show, environ).stdout)
    return mode is not None and "REQUEUE" in mode[1].split(",")


def _job_fields(job_id: str, environ: Mapping[str, str] | None) -> dict[str, str]:
    """Return the fields of `scontrol show job`; none for an unknown job. Raises SlurmError."""
    answer = ask(["scontrol", "show", "job", "-o", job_id], environ)
    # The last of each name: a job's name and comment, which can hold anything, stand before them.
    fields = dict(re.findall(r" ([A-Za-z]+)=(\S*)", answer.stdout.partition(" Command=")[0]))
    return {} if answer.returncode else fields


def seconds_left(job_id: str, environ: Mapping[str, str] | None = None) -> float | None:
    """Return the seconds until the job's time limit; None without one, or where it is unknown."""
    try:
        answer = ask(["squeue", "-h", "-j", job_id, "-o", "%L"], environ)
    except SlurmError:
        return None
    return _seconds(answer.stdout.strip())


def _seconds(text: str) -> float | None:
    """Return Slurm's [D-]HH:MM:SS or MM:SS in seconds; None for UNLIMITED and the like."""
    parts = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if not parts:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

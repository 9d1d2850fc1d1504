"""Events of a run as its scripts and commands record them, and what Slurm says beside them."""

from typing import Any

from clusterddp.slurm.states import JobState, State

Event = dict[str, Any]


def submitted(job_id: str = "7", **fields: Any) -> Event:
    return {"event": "submitted", "time": 100.0, "job_id": job_id, "launcher": "sbatch", **fields}


def started(job_id: str = "7", restart: int = 0, **fields: Any) -> Event:
    fields = {"time": 110, "nodelist": "h[01-02]", **fields}
    return {"event": "started", "job_id": job_id, "restart": restart, **fields}


def ended(exit_code: int, job_id: str = "7", restart: int = 0, **fields: Any) -> Event:
    fields = {"time": 170, "exit_code": exit_code, **fields}
    return {"event": "ended", "job_id": job_id, "restart": restart, **fields}


def cancelled(job_id: str = "7") -> Event:
    return {"event": "cancelled", "time": 120.0, "job_id": job_id}


def local(**fields: Any) -> Event:
    return submitted("4242", launcher="local", pid=4242, **fields)


def said(state: State, reason: str = "") -> JobState:
    return JobState(state, reason)


def begun(number: int, job_id: str = "7", restart: int = 0, **fields: Any) -> Event:
    """A start as the scripts of now record it."""
    return started(job_id, restart, attempt=number, **fields)


def left(
    number: int, cause: str, why: str = "", job_id: str = "7", restart: int = 0, **fields: Any
) -> Event:
    """The end of an attempt as `finish` records it."""
    code = {"done": 0, "failed": 1}.get(cause, 75)
    fields = {"attempt": number, "cause": cause, "why": why, "step": 40, **fields}
    return ended(code, job_id, restart, **fields)


def requeued(number: int, why: str, **fields: Any) -> Event:
    return {"event": "requeued", "time": 175.0, "job_id": "7", "attempt": number, "why": why,
            **fields}  # fmt: skip


def in_place(job_id: str, number: int, why: str, of: str = "7") -> Event:
    return submitted(job_id, time=176.0, in_place_of=of, attempt=number, why=why)


def noted(event: str, job_id: str = "7", **fields: Any) -> Event:
    return {"event": event, "time": 172.0, "job_id": job_id, **fields}


FAILURE = {"rank": 3, "host": "h02", "reason": "KeyError: 'a'", "log": "logs/rank-3.log"}
BOOM = "rank 3 on h02 failed first: KeyError: 'a' (logs/rank-3.log)"
FORGOTTEN = JobState(State.UNKNOWN)
SILENT = JobState(State.UNKNOWN, problem="squeue: Unable to contact slurm controller")

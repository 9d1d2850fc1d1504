"""The record of one task: who it was, when it started, and how it ended.

Written by `supervise`; what the records mean for the whole run is left to `outcome`.
"""

import json
import os
import signal
import time
from dataclasses import asdict

from clusterddp import log
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.run.attempt import Attempt
from clusterddp.run.files import write_atomically
from clusterddp.run.records import TaskError
from clusterddp.run.run_dir import RunDir


class TaskRecord:
    """rank-R.json: written when the task starts and again when it has ended."""

    def __init__(self, run: RunDir, env: DistEnv, attempt: int | None) -> None:
        self._run = run
        self._attempt = Attempt(run, attempt) if attempt else None
        self._folder = self._attempt.outcomes if self._attempt else run.outcomes
        self._rank = env.rank
        self._fields: dict[str, object] = {
            "rank": env.rank,
            "local_rank": env.local_rank,
            "node_rank": env.node_rank,
            # By Slurm's name, if it has one: srun's messages use it too.
            "host": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
            "job_id": os.environ.get("SLURM_JOB_ID", ""),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            "step_id": os.environ.get("SLURM_STEP_ID", ""),
        }

    def started(self, pid: int) -> None:
        self._fields |= {"pid": pid, "started": round(time.time(), 3)}
        self._write()

    def ended(self, status: int, error: TaskError | None) -> None:
        code = os.waitstatus_to_exitcode(status)
        self._fields |= {
            "ended": round(time.time(), 3),
            "exit_code": code if code >= 0 else 128 - code,
            "signal": _signal_name(-code) if code < 0 else None,
            "error": _told(error) if error else None,
        }
        self._write()

    def _write(self) -> None:
        """A run directory that is gone or full costs the record, never the task."""
        try:
            path, content = self._folder / f"rank-{self._rank}.json", json.dumps(self._fields)
            if self._attempt:
                self._attempt.write_last_word(path, content.encode())
            else:
                self._run.make(self._folder)  # an attempt's is there, or the attempt is gone
                write_atomically(path, content.encode())
        except OSError as error:
            rank, host = self._rank, self._fields["host"]
            log.info(
                f"rank {rank} on {host} cannot record its outcome in {self._folder}: "
                f"{error.strerror}."
            )


def _told(error: TaskError) -> dict[str, object]:
    return {name: value for name, value in asdict(error).items() if value or name != "of_command"}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal has no name of its own

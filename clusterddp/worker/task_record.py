"""Record of a task's start and end, written by its parent."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from clusterddp import files, log
from clusterddp.errors import EXIT_STOPPED
from clusterddp.formatting import signal_name
from clusterddp.processes.table import start_ticks
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import host_name
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import RENEWAL_SECONDS, node_path, rank_path
from clusterddp.run.records import NestedWorld, TaskError
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import SPARES_VARIABLE
from clusterddp.worker.node_record import NodeRecord

_SAVING = (signal.SIGUSR1, signal.SIGUSR2)


class TaskRecord:
    """Record of a task, written when it starts, and again when it ends.

    In an attempt it is a part of its node's record; otherwise, and if that cannot be written, it
    is the rank's own.
    """

    def __init__(self, run: RunDir, env: DistEnv, attempt: int | None) -> None:
        self._run = run
        self._attempt = Attempt(run, attempt) if attempt else None
        self._folder = self._attempt.outcomes if self._attempt else run.outcomes
        self._path = self._written = rank_path(self._folder, env.rank)
        self._rank, self._writing = env.rank, threading.Lock()
        self._asked_to_end = False
        self._fields: dict[str, object] = {
            "rank": env.rank,
            "local_rank": env.local_rank,
            "node_rank": env.node_rank,
            # Slurm's name for the host, because srun's messages use it too.
            "host": host_name(os.environ),
            "job_id": os.environ.get("SLURM_JOB_ID", ""),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            "step_id": os.environ.get("SLURM_STEP_ID", ""),
            "agent_restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
            "received_signal": None,  # set early: a signal can arrive while the fields are written
        }
        self._node = self._node_record()

    def record_start(self, pid: int) -> None:
        self._fields |= {
            "pid": pid,
            "ticks": start_ticks(pid),
            "python": sys.executable,
            "started": round(time.time(), 3),
        }
        self._write()
        if SPARES_VARIABLE in os.environ and self._fields["local_rank"] == 0:
            threading.Thread(target=self._renew_liveness, daemon=True).start()

    def _renew_liveness(self) -> None:
        """Renew the record's time, which shows the controller that this node is not lost."""
        while True:
            time.sleep(RENEWAL_SECONDS)
            with suppress(OSError):  # it may be gone
                os.utime(self._written)

    def note_signal(self, number: int) -> None:
        """Note a signal that the task does not ignore. Called from a signal handler."""
        if number in _SAVING and self._asked_to_end:
            return
        self._asked_to_end = number not in _SAVING
        self._fields["received_signal"] = {
            "signal": signal_name(number),
            "time": round(time.time(), 3),
        }

    def note_step(self, step: int | None) -> None:
        """Note how many steps the rank had done at its end."""
        if step is not None:
            self._fields["step"] = step

    def note_continued(self) -> None:
        """Note that the task continued after a stop."""
        self._fields["continued"] = round(time.time(), 3)

    @property
    def has_signal(self) -> bool:
        """True if a signal was noted."""
        return self._fields["received_signal"] is not None

    def record_end(self, status: int, explain: Callable[[int], TaskError | None]) -> int:
        """Record the end and its error. status: as from wait(2); it is returned."""
        code, error = os.waitstatus_to_exitcode(status), explain(status)
        with self._writing:
            self._fields |= {
                "ended": round(time.time(), 3),
                "exit_code": code if code >= 0 else 128 - code,
                "signal": signal_name(-code) if code < 0 else None,
                "error": _error_fields(error) if error else None,
                **self._collectives(code),
            }
            self._write()
        return status

    def _collectives(self, code: int) -> dict[str, object]:
        """Return the collective calls of a failed rank, if it has dumped the flight recorder."""
        if not self._attempt or code in (0, EXIT_STOPPED):
            return {}
        from clusterddp.run import flight_recorder  # seldom needed

        known = flight_recorder.read_dump(self._attempt.nccl_trace(self._rank))
        return {"collectives": [vars(each) for each in known]} if known else {}

    def record_nested_world(self, world: NestedWorld) -> None:
        """Record that the task's children formed a separate world. Any thread may call it."""
        with self._writing:
            self._fields["nested_world"] = vars(world)
            self._write()

    def record_listening(self, has_listened: bool) -> None:
        """Record whether a port for the other ranks is open. Any thread may call it."""
        with self._writing:
            self._fields["listened"] = has_listened
            self._write()

    def close(self, failed: bool) -> None:
        """Leave the other ranks of the node, after the end is recorded."""
        if self._node:
            self._node.close(failed)

    def _node_record(self) -> NodeRecord | None:
        if self._attempt is None:
            return None
        with suppress(OSError):  # no /proc
            path = node_path(self._folder, str(self._fields["host"]))
            return NodeRecord(path, self._attempt.write_final_record)
        return None

    def _write(self) -> None:
        """Write the record. If the run directory is gone or full, only the record is lost."""
        self._fields["written"] = round(time.time(), 6)
        try:
            if self._node and self._node.keep(self._fields):
                self._written = self._node.path
                return
            self._written = self._path
            if self._attempt:
                self._attempt.write_final_record(self._path, self._fields)
            else:
                # An attempt's directory exists, or the attempt is gone.
                self._run.make(self._folder)
                files.write_record(self._path, self._fields)
        except OSError as error:
            log.warning(
                f"rank {self._fields['rank']} on {self._fields['host']} cannot record its outcome "
                f"in {self._folder}: {error.strerror}. [CD0518]"
            )


_OPTIONAL = ("of_command", "code")
"""Fields of an error that are written only if set."""


def _error_fields(error: TaskError) -> dict[str, object]:
    return {name: value for name, value in vars(error).items() if value or name not in _OPTIONAL}

"""Ends of ranks: their records, and which rank failed first.

A task's parent records how it ended. If both were killed, the end is known from srun's lines.
Errors that only follow from another rank's end are distinguished from the first one.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from clusterddp import files, log
from clusterddp.errors import EXIT_FAILED, EXIT_STOPPED
from clusterddp.formatting import signal_name
from clusterddp.processes.table import start_ticks
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import host_name
from clusterddp.run.attempt import Attempt
from clusterddp.run.events import Failure
from clusterddp.run.records import HungRanks, NestedWorld, Outcome, TaskError
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import srun_lines
from clusterddp.slurm.forms import SPARES_VARIABLE
from clusterddp.slurm.srun_lines import TaskEnd

RENEWAL_SECONDS = 5.0
"""Interval at which a node renews its record in a job with spare nodes."""
HUNG = "hung.json"
_CLOCKS = "clocks.json"


def failure_of(outcome: Outcome) -> Failure:
    """Return the failure that a rank's own record describes."""
    reason, code = outcome.reason, outcome.exit_code
    if outcome.hung:  # how it ended in the end does not say why
        code = EXIT_FAILED
    elif outcome.signal == "SIGTERM":
        reason += " (cancelled, time limit or preempted)"
    return Failure(outcome.rank, outcome.host, reason, _log(outcome.rank), code)


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read the records of an attempt's ranks, ordered by rank."""
    outcomes = [files.read(Outcome, path, strict=True) for path in folder.glob("rank-*.json")]
    hung = files.read(HungRanks, folder / HUNG) or HungRanks()
    clocks = files.read_json(folder / _CLOCKS) or {}
    return [
        replace(
            outcome,
            hung=hung.reason if outcome.rank in hung.ranks else "",
            clock_ahead=files.number(clocks.get(outcome.host)),
        )
        for outcome in sorted(filter(None, outcomes), key=lambda outcome: outcome.rank)
    ]


def note_clocks(folder: Path, ahead: Mapping[str, float]) -> None:
    """Record the seconds by which each host's clock is ahead of rank 0's. Raises OSError."""
    files.write_record(folder / _CLOCKS, ahead)


def note_hung(folder: Path, ranks: Sequence[int], reason: str, *, ended: bool = False) -> None:
    """Record which ranks keep the others waiting, and where; without a reason, that none does.

    Without ranks, all hang at one place. A rank whose end is recorded does not hang: the others
    wait because of its end. ended: the job is ended because of the hang. Raises OSError.
    """
    outcomes = {rank: read_outcome(folder, rank) for rank in ranks}
    at_work = tuple(rank for rank, outcome in outcomes.items() if not (outcome and outcome.ended))
    if at_work or ended or (reason and not ranks):
        files.write_record(folder / HUNG, HungRanks(at_work, reason, ended))
    else:
        (folder / HUNG).unlink(missing_ok=True)


def hang_that_ended_job(folder: Path) -> HungRanks | None:
    """Return the hang because of which the job was ended; None without one."""
    hung = files.read(HungRanks, folder / HUNG)
    return hung if hung and hung.ended else None


def read_outcome(folder: Path, rank: int) -> Outcome | None:
    """Read the record of one rank; None if it is missing or unreadable."""
    return files.read(Outcome, path_of(folder, rank), strict=True)


def any_began(folder: Path) -> bool:
    """Return whether a rank of the attempt has recorded its start."""
    return any(folder.glob("rank-*.json"))


def path_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's record, whose time its parent renews."""
    return folder / f"rank-{rank}.json"


def last_renewal(path: Path) -> float:
    """Return when a file was last renewed. Raises OSError.

    The file is opened, because a network file system answers stat from its cache.
    """
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime


def first_failure(outcomes: Sequence[Outcome], job_log_text: str = "") -> Failure | None:
    """Find the rank that failed first; None if no rank is known to have failed.

    job_log_text: what srun and Slurm printed to the batch script's log. Order of precedence: a
    rank whose launcher was killed before srun saw any other end; errors of a rank's own, and tasks
    that srun reports as killed without a recorded end, whichever srun names first; exit codes and
    signals; ranks that hung; ranks that aborted; ranks without a recorded end; ranks that lost
    another one, including those that NCCL's watchdog ended because of it; ranks that got SIGTERM.
    """
    reports = srun_lines.task_ends(job_log_text)
    above = _killed_above(outcomes, reports)
    if above:
        return above
    failed = [outcome for outcome in outcomes if outcome.failed]
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    unrecorded = [report for report in reports if _is_missing(report, by_rank.get(report.rank))]
    if _are_agents(reports, failed):
        unrecorded = [report for report in unrecorded if report.exit_code is None]
    # A rank that hung until the others gave up is finally killed, which does not say why.
    hung = {outcome.rank for outcome in outcomes if outcome.hung} - {r.rank for r in reports[:1]}
    killed = [report for report in unrecorded if report.primary and report.rank not in hung]
    raised = [outcome for outcome in failed if outcome.error and not outcome.peer_lost]
    if killed and raised:
        order = [report.rank for report in reports]
        first = _earliest(raised, reports).rank
        place = order.index(first) if first in order else -1
        if place < order.index(killed[0].rank):
            killed = []
    if killed:
        return _from_srun(killed[0])
    if any(outcome.of_command for outcome in raised):
        # A command's output does not always show which errors follow from another rank's end.
        # There an error counts like an exit code or a signal, and the earliest one is first.
        raised = [o for o in failed if not o.peer_lost and o.signal != "SIGTERM"]
    lost_another = [o for o in outcomes if o.peer_lost]
    own_end = [o for o in failed if not o.error and o.signal != "SIGTERM"]
    for group in (
        raised,
        # A rank that aborted without a reason in its log may have waited for another in vain.
        # Slurm kills a rank together with its parent.
        [o for o in own_end if not o.hung and o.signal != "SIGABRT"],
        [o for o in outcomes if o.hung and failed and (o.failed or o.ended is None)],
        own_end,
        [o for o in outcomes if o.ended is None and failed],
        # Ranks that exited early with code 0 while others still needed them.
        [o for o in outcomes if o.exit_code == 0 and o.ended is not None and lost_another],
        [o for o in lost_another if o.failed],
        failed,
    ):
        if group:
            return failure_of(_earliest(group, reports))
    return _from_srun(unrecorded[0]) if unrecorded else None


def first_killed(outcomes: Sequence[Outcome], job_log_text: str = "") -> Failure | None:
    """Find the rank that was killed, itself or its launcher, before srun saw any other end.

    srun then ends the other ranks, which save and exit as on a request to stop.
    """
    reports = srun_lines.task_ends(job_log_text)
    first = _killed_at_first(reports)
    if first and any(o.rank == first.rank and _is_missing(first, o) for o in outcomes):
        return _from_srun(first)
    return _killed_above(outcomes, reports)


def _killed_above(outcomes: Sequence[Outcome], reports: Sequence[TaskEnd]) -> Failure | None:
    """Find a rank whose end is recorded although the first task that srun saw killed is above it.

    That task is then not a rank but a torchrun agent, submitit's process or a wrapper.
    """
    first = _killed_at_first(reports)
    if first is None:
        return None
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    if _is_missing(first, by_rank.get(first.rank)):
        return None  # killed together with the rank
    on_host = [o for o in outcomes if _short(o.host) == _short(first.host)]
    if any(o.signal not in (None, "SIGTERM") for o in on_host):
        return None  # a rank of this host was killed, not what is above it
    ended_for_it = [o for o in on_host if o.exit_code != 0]
    if all(o.exit_code == 0 for o in outcomes):
        ended_for_it = on_host  # a command that treats TERM as a request, and exits with 0
    if not ended_for_it:
        return None
    named = next((o for o in ended_for_it if o.rank == first.rank), ended_for_it[0])
    reason, code = first.explain()
    return Failure(named.rank, named.host, f"{_LAUNCHER} was {reason}", _log(named.rank), code)


def _killed_at_first(reports: Sequence[TaskEnd]) -> TaskEnd | None:
    first = next((report for report in reports if report.primary), None)
    return first if first and first.was_killed else None


def _earliest(group: Sequence[Outcome], reports: Sequence[TaskEnd]) -> Outcome:
    """Find the rank that ended first: by the clock on one host, by srun's order on several.

    If the ranks have not measured their clock offsets, the order of srun's lines decides. Hosts are
    compared, because under torchrun those lines name agents.
    """
    first_of_host: dict[str, Outcome] = {}
    for outcome in sorted(group, key=lambda o: (o.ended or 0.0, o.rank)):
        first_of_host.setdefault(_short(outcome.host), outcome)
    candidates = list(first_of_host.values())
    if all(outcome.clock_ahead is not None for outcome in candidates):
        return min(candidates, key=lambda o: ((o.ended or 0.0) - (o.clock_ahead or 0.0), o.rank))
    hosts = [_short(report.host) for report in reports if report.primary]
    order = [host for host in hosts if host in first_of_host]
    return first_of_host[order[0]] if len(candidates) > 1 and order else candidates[0]


def _short(host: str) -> str:
    """Return a host name without its domain, because Slurm and the host may differ in it."""
    return host if host.replace(".", "").isdigit() else host.partition(".")[0]


def _are_agents(reports: Sequence[TaskEnd], failed: Sequence[Outcome]) -> bool:
    """Return whether srun's tasks are known not to be ranks.

    srun names each of its tasks that ends with a code, and the code, but does not know the ranks
    below an agent. The agent's code is then not a rank's, even if the rank of the same number was
    ended before it left a record.
    """
    codes = {(report.rank, _short(report.host)): report.exit_code for report in reports}
    hosts = {host for _, host in codes}
    own_end = [
        (o, (o.rank, _short(o.host)))
        for o in failed
        if not o.peer_lost and o.signal != "SIGTERM" and _short(o.host) in hosts
    ]
    return any(codes.get(task, -1) not in (None, o.exit_code) for o, task in own_end)


def _is_missing(report: TaskEnd, outcome: Outcome | None) -> bool:
    """Return whether srun's line is the only record of a task's end.

    Under torchrun, srun's tasks are the agents: a line about agent 3 is not about rank 3.
    """
    if outcome is None:
        return True
    return outcome.ended is None and _short(outcome.host) == _short(report.host)


_LAUNCHER = "its launcher (an agent, submitit's process or a wrapper)"


def _from_srun(report: TaskEnd) -> Failure:
    reason, code = report.explain()
    return Failure(report.rank, report.host, reason, _log(report.rank), code)


def _log(rank: int) -> str:
    return f"logs/rank-{rank}.log"


def is_signalled(code: int) -> bool:
    """Return whether an exit code is a shell's for a command ended by a signal."""
    return 128 < code < 128 + signal.NSIG


_SAVING = (signal.SIGUSR1, signal.SIGUSR2)


class TaskRecord:
    """rank-R.json: written when the task starts, and again when it ends."""

    def __init__(self, run: RunDir, env: DistEnv, attempt: int | None) -> None:
        self._run = run
        self._attempt = Attempt(run, attempt) if attempt else None
        self._folder = self._attempt.outcomes if self._attempt else run.outcomes
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
            "received_signal": None,  # set early: a signal can arrive while the fields are written
        }

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
                os.utime(self._path)

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

    @property
    def _path(self) -> Path:
        return path_of(self._folder, self._rank)

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

    def _write(self) -> None:
        """Write the record. If the run directory is gone or full, only the record is lost."""
        try:
            if self._attempt:
                self._attempt.write_final_record(self._path, self._fields)
            else:
                self._run.make(
                    self._folder
                )  # an attempt's directory exists, or the attempt is gone
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

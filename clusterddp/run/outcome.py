"""Ends of ranks: recorded by each task, read together, and which of them failed first.

A task's parent records how it ended. A task that was killed together with its parent is known from
srun's own lines, and the error of a command from what it has left: torch's error file, or the
traceback with which Python ends. Errors that only follow from another rank's end are told apart
from the first one.
"""

import json
import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from clusterddp import files, log
from clusterddp.errors import EXIT_FAILED, EXIT_PAUSED
from clusterddp.formatting import clean, signal_name
from clusterddp.processes.table import start_ticks
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import host_name
from clusterddp.run.attempt import Attempt
from clusterddp.run.events import Failure
from clusterddp.run.records import HungRanks, Outcome, OwnWorld, TaskError, announced
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import srun_lines
from clusterddp.slurm.forms import SPARES_VARIABLE
from clusterddp.slurm.srun_lines import TaskEnd

SIGN_SECONDS = 5.0
"""Between two signs of life of a node, in a job that has spare ones."""
HUNG = "hung.json"
_CLOCKS = "clocks.json"


def failure_of(outcome: Outcome) -> Failure:
    """Return the failure that a rank's own record tells of."""
    reason, code = outcome.reason, outcome.exit_code
    if outcome.hung:  # what ended it in the end says nothing of why
        code = EXIT_FAILED
    elif outcome.signal == "SIGTERM":
        reason += " (cancelled, time limit or preempted)"
    return Failure(outcome.rank, outcome.host, reason, _log(outcome.rank), code)


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read the records of the ranks of one attempt, by rank."""
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
    """Record which ranks keep the others waiting, and where; no ranks: none does any more.

    A rank whose end is recorded already does not hang: its end is what the others wait for. ended:
    the job is ended for it, also where no rank is known to keep the others. Raises OSError.
    """
    outcomes = {rank: read_outcome(folder, rank) for rank in ranks}
    at_work = tuple(rank for rank, outcome in outcomes.items() if not (outcome and outcome.ended))
    if at_work or ended:
        files.write_record(folder / HUNG, HungRanks(at_work, reason, ended))
    else:
        (folder / HUNG).unlink(missing_ok=True)


def ended_for(folder: Path) -> HungRanks | None:
    """Return the hang for which the job was ended, where it was."""
    hung = files.read(HungRanks, folder / HUNG)
    return hung if hung and hung.ended else None


def read_outcome(folder: Path, rank: int) -> Outcome | None:
    """Read the record of one rank; None where there is none that can be read."""
    return files.read(Outcome, _path(folder, rank), strict=True)


def any_began(folder: Path) -> bool:
    """Return whether a rank of the attempt has recorded its start."""
    return any(folder.glob("rank-*.json"))


def last_sign(folder: Path, rank: int) -> float:
    """Return the time of a rank's latest sign of life, as its parent gives it. Raises OSError."""
    return _path(folder, rank).stat().st_mtime


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def first_failure(outcomes: Sequence[Outcome], job_log_text: str = "") -> Failure | None:
    """Find the rank that failed first; None where no rank is known to have failed.

    `job_log_text` is what srun and Slurm said in the batch script's log. In this order: the
    rank above which something was killed before srun saw any other end; errors of a rank's own and
    tasks that srun reports as killed without a record of their end, whichever srun names first;
    codes and signals; ranks that hung; ranks that aborted; ranks that vanished; ranks that lost
    another, those that NCCL's watchdog ended for it included; and ranks that were told to end.
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
    # A rank that hung while others gave up is killed at last, which says nothing of why.
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
        # Not all that follows from the end of another rank can be told from the words of a
        # command: an error counts no more than a code or a signal there, and the first one does.
        raised = [o for o in failed if not o.peer_lost and o.signal != "SIGTERM"]
    lost_another = [o for o in outcomes if o.peer_lost]
    by_itself = [o for o in failed if not o.error and o.signal != "SIGTERM"]
    for group in (
        raised,
        # A rank whose log does not say why it aborted may be one that waited for another in vain.
        # What Slurm kills, it kills with its parent.
        [o for o in by_itself if not o.hung and o.signal != "SIGABRT"],
        [o for o in outcomes if o.hung and failed and (o.failed or o.ended is None)],
        by_itself,
        [o for o in outcomes if o.ended is None and failed],
        # Those that left early, with exit code 0, while others still counted on them.
        [o for o in outcomes if o.exit_code == 0 and o.ended is not None and lost_another],
        [o for o in lost_another if o.failed],
        failed,
    ):
        if group:
            return failure_of(_earliest(group, reports))
    return _from_srun(unrecorded[0]) if unrecorded else None


def first_killed(outcomes: Sequence[Outcome], job_log_text: str = "") -> Failure | None:
    """Find the rank that srun saw killed, itself or what stands above it, before any other end.

    srun then ends the other ranks, which save and leave as if somebody had asked them to.
    """
    reports = srun_lines.task_ends(job_log_text)
    first = _killed_at_first(reports)
    if first and any(o.rank == first.rank and _is_missing(first, o) for o in outcomes):
        return _from_srun(first)
    return _killed_above(outcomes, reports)


def _killed_above(outcomes: Sequence[Outcome], reports: Sequence[TaskEnd]) -> Failure | None:
    """Find a rank whose end is recorded although srun's task, first of all, was killed.

    That task is then no rank: an agent of torchrun's, submitit's process, a launch prefix.
    """
    first = _killed_at_first(reports)
    if first is None:
        return None
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    if _is_missing(first, by_rank.get(first.rank)):
        return None  # killed together with the rank
    on_host = [o for o in outcomes if _short(o.host) == _short(first.host)]
    if any(o.signal not in (None, "SIGTERM") for o in on_host):
        return None  # a rank of this host was killed itself
    ended_for_it = [o for o in on_host if o.exit_code != 0]
    if all(o.exit_code == 0 for o in outcomes):
        ended_for_it = on_host  # a command that takes TERM for a wish, and exits with 0
    if not ended_for_it:
        return None
    named = next((o for o in ended_for_it if o.rank == first.rank), ended_for_it[0])
    reason, code = first.explain()
    return Failure(named.rank, named.host, f"{_ABOVE} was {reason}", _log(named.rank), code)


def _killed_at_first(reports: Sequence[TaskEnd]) -> TaskEnd | None:
    first = next((report for report in reports if report.primary), None)
    return first if first and first.was_killed else None


def _earliest(group: Sequence[Outcome], reports: Sequence[TaskEnd]) -> Outcome:
    """Find the rank that ended first: by the clock on one host, by srun's order on several.

    Where the ranks have not measured how far the clocks are apart, srun's lines stand in the order
    in which it saw tasks end; under torchrun these are the agents, so their hosts are compared.
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
    """Return the name without its domain, which Slurm and the host itself may or may not give."""
    return host if host.replace(".", "").isdigit() else host.partition(".")[0]


def _are_agents(reports: Sequence[TaskEnd], failed: Sequence[Outcome]) -> bool:
    """Return whether srun's tasks are known to be no ranks.

    srun names every task of its own that ends with a code, and by that code; it does not know the
    ranks below an agent. The agent's code is then no rank's, not even where the rank of that number
    came to no record before it was ended.
    """
    said = {(report.rank, _short(report.host)): report.exit_code for report in reports}
    hosts = {host for _, host in said}
    by_itself = [
        (o, (o.rank, _short(o.host)))
        for o in failed
        if not o.peer_lost and o.signal != "SIGTERM" and _short(o.host) in hosts
    ]
    return any(said.get(task, -1) not in (None, o.exit_code) for o, task in by_itself)


def _is_missing(report: TaskEnd, outcome: Outcome | None) -> bool:
    """Return whether srun's line is all that is known of the task's end.

    Under torchrun srun's tasks are the agents: the line of agent 3 is not about rank 3.
    """
    if outcome is None:
        return True
    return outcome.ended is None and _short(outcome.host) == _short(report.host)


_ABOVE = "what had started it (an agent, submitit's process or a launch prefix)"


def _from_srun(report: TaskEnd) -> Failure:
    reason, code = report.explain()
    return Failure(report.rank, report.host, reason, _log(report.rank), code)


def _log(rank: int) -> str:
    return f"logs/rank-{rank}.log"


def is_signalled(code: int) -> bool:
    """Return whether an exit code is a shell's for a command that a signal ended."""
    return 128 < code < 128 + signal.NSIG


_SAVING = (signal.SIGUSR1, signal.SIGUSR2)


class TaskRecord:
    """rank-R.json: written when the task starts and again when it has ended."""

    def __init__(self, run: RunDir, env: DistEnv, attempt: int | None) -> None:
        self._run = run
        self._attempt = Attempt(run, attempt) if attempt else None
        self._folder = self._attempt.outcomes if self._attempt else run.outcomes
        self._rank, self._writing = env.rank, threading.Lock()
        self._told_to_end = False
        self._fields: dict[str, object] = {
            "rank": env.rank,
            "local_rank": env.local_rank,
            "node_rank": env.node_rank,
            # By Slurm's name, if it has one: srun's messages use it too.
            "host": host_name(os.environ),
            "job_id": os.environ.get("SLURM_JOB_ID", ""),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            "step_id": os.environ.get("SLURM_STEP_ID", ""),
            "told": None,  # here from the start: a signal can come while the fields are written
        }

    def started(self, pid: int) -> None:
        self._fields |= {
            "pid": pid,
            "ticks": start_ticks(pid),
            "python": sys.executable,
            "started": round(time.time(), 3),
        }
        self._write()
        if SPARES_VARIABLE in os.environ and self._fields["local_rank"] == 0:
            threading.Thread(target=self._show_life, daemon=True).start()

    def _show_life(self) -> None:
        """Renew the record's time, which tells the controller that this node lives."""
        while True:
            time.sleep(SIGN_SECONDS)
            with suppress(OSError):  # it may be gone
                os.utime(self._path)

    def told(self, number: int) -> None:
        """Note a signal that the task does not ignore; from a signal's handler."""
        if number in _SAVING and self._told_to_end:
            return
        self._told_to_end = number not in _SAVING
        self._fields["told"] = {"signal": signal_name(number), "time": round(time.time(), 3)}

    def continued(self) -> None:
        """Note that the task goes on after a stop."""
        self._fields["continued"] = round(time.time(), 3)

    @property
    def is_told(self) -> bool:
        """Return whether a signal has been noted."""
        return self._fields["told"] is not None

    @property
    def _path(self) -> Path:
        return _path(self._folder, self._rank)

    def ended(self, status: int, explain: Callable[[int], TaskError | None]) -> int:
        """Record the end and the error behind it; `status` is wait(2)'s, and is returned."""
        code, error = os.waitstatus_to_exitcode(status), explain(status)
        with self._writing:
            self._fields |= {
                "ended": round(time.time(), 3),
                "exit_code": code if code >= 0 else 128 - code,
                "signal": signal_name(-code) if code < 0 else None,
                "error": _shown(error) if error else None,
            }
            self._write()
        return status

    def found(self, world: OwnWorld) -> None:
        """Record that the task's children form a world of their own; from any thread."""
        with self._writing:
            self._fields["own_world"] = vars(world)
            self._write()

    def met(self, has_met: bool) -> None:
        """Record whether the ranks have met at this one, as far as was seen; from any thread."""
        with self._writing:
            self._fields["met"] = has_met
            self._write()

    def _write(self) -> None:
        """A run directory that is gone or full costs the record, never the task."""
        try:
            if self._attempt:
                self._attempt.write_last_word(self._path, self._fields)
            else:
                self._run.make(self._folder)  # an attempt's is there, or the attempt is gone
                files.write_record(self._path, self._fields)
        except OSError as error:
            log.warning(
                f"rank {self._fields['rank']} on {self._fields['host']} cannot record its outcome "
                f"in {self._folder}: {error.strerror} [CD0518]"
            )


_SELDOM = ("of_command", "code")
"""Fields of a record's error that are left out where they say nothing."""


def _shown(error: TaskError) -> dict[str, object]:
    return {name: value for name, value in vars(error).items() if value or name not in _SELDOM}


ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Tells torch's `record` where to write (torch 2.15, elastic/multiprocessing/errors)."""
PEER_LOST = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "Timed out waiting",
    "wait timeout after",
    "remote process exited",
    "communicator was aborted",
    "Socket Timeout",
    "failed to recv, got 0 bytes",
    "Watchdog caught collective operation timeout",
    "collective timeout or exception",
    "watchdog hang",
    "timed out in blocking wait",
    "remote error detected from rank",
    "NCCL timeout when waiting for nonblocking call",
    "ncclRemoteError",
    "ncclSystemError",
    "unhandled system error",
)
"""Messages of torch when the other end of an exchange has gone: gloo finds its sockets reset or
closed, NCCL aborts or times out, and a communicator is set up through a store in which nobody
answers (torch 2.4 to 2.15)."""
# NCCL's words for a cause of this host's own, below the system error that it leads to.
_OWN_FAULTS = ("shared memory segment",)
LONGEST_MESSAGE = 4000
_LONGEST_TYPE = 200
_MOST_FILE_BYTES = 1 << 20
_LOG_TAIL_BYTES = 1 << 18
# torch raises RuntimeError and classes of its own; a ConnectionResetError can be a download's.
_TORCHS_ERROR = re.compile(r"RuntimeError|(?:torch\.distributed\.)?Dist\w*Error")
_HEADER = "Traceback (most recent call last):"
_ANOTHER = "During handling of the above exception, another exception occurred:"
_MOST_TRACEBACKS = 100
# torch's excepthook puts it before each line once there is a process group.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_EXCEPTION = re.compile(r"(?P<type>[^\W\d][\w.]*)(?:: (?P<message>.*))?", re.DOTALL)
# ProcessGroupNCCL's words as it gives up, logged and printed again by C++ (torch 2.4 to 2.15); the
# latter alone where it does not throw, and of any exception the same.
_NCCL_WATCHDOG = (
    re.compile(r"watchdog thread terminated with exception: (?:\[Rank \d+\] )?(.+)"),
    re.compile(r"Terminating the process after attempting to dump debug info, due to (.+)"),
)
# Of the file that Python was given: it never ran, so there is no traceback.
_NO_SYNTAX = re.compile(r"(?:SyntaxError|IndentationError|TabError): .*")
# Of `python -m`, whose module is not there (runpy): in a line of its own, without a traceback.
_NO_MODULE = re.compile(
    r"\S*python\S*: (?:Error while finding module specification for .+"
    r" \(ModuleNotFoundError: (?P<package>.+)\)|(?P<module>No module named .+))"
)


class Traces:
    """Sources that tell of the error that ends a command; made before the command starts."""

    def __init__(self, error_file: Path | None = None, log: int = 2) -> None:
        """error_file: for torch's `record`; a former one is removed. log: descriptor of stderr."""
        self._error_file, self._log = error_file, log
        self._log_start: int | None = None
        if error_file:
            try:
                error_file.unlink(missing_ok=True)
            except OSError:
                self._error_file = None
        with suppress(OSError):
            status = os.fstat(log)
            if stat.S_ISREG(status.st_mode):  # under srun, submitit and agents alike
                self._log_start = status.st_size

    def error(self, status: int) -> TaskError | None:
        """Find the error behind the command's wait status; None where nothing tells of one."""
        code = os.waitstatus_to_exitcode(status)
        if code in (0, EXIT_PAUSED):
            return None
        error = parse_error_file(self._error_file) if self._error_file else None
        if error or code != EXIT_FAILED:
            return error or self.abort(status, of_command=True)
        # As of a Python that an exception has ended, whose output went to a file.
        return parse_traceback(self._tail())

    def abort(self, status: int, *, of_command: bool = False) -> TaskError | None:
        """Find why NCCL's watchdog has ended the process; None where something else has."""
        if os.waitstatus_to_exitcode(status) != -signal.SIGABRT:
            return None
        return parse_abort(self._tail(), of_command=of_command)

    def _tail(self) -> str:
        if self._log_start is None:
            return ""
        log = Path(f"/proc/self/fd/{self._log}")
        tail = files.read_tail(log, _LOG_TAIL_BYTES, since=self._log_start)
        return tail.decode(errors="replace")


def is_peer_loss(error: BaseException) -> bool:
    """Return whether torch failed because another rank had gone."""
    return isinstance(error, RuntimeError) and _blames_a_peer(str(error))


def _blames_a_peer(message: str) -> bool:
    if any(fault in message for fault in _OWN_FAULTS):
        return False
    return any(mark in message for mark in PEER_LOST)


def parse_error_file(path: Path) -> TaskError | None:
    """Parse what torch's `record` wrote; None where there is nothing, or something else."""
    try:
        # Whatever lies there is the command's: no link is followed, and no pipe waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_FILE_BYTES:
                return None
            content: object = json.loads(file.read(_MOST_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, dict):
        message = message.get("message")
    if not isinstance(message, str) or not message.strip():
        return None
    exception = _EXCEPTION.fullmatch(message.strip())
    return _error(exception["type"], exception["message"]) if exception else _error("", message)


def parse_traceback(log: str) -> TaskError | None:
    """Parse the exception of a log's last traceback; None without one.

    A launcher's own says no more than that a child of it has failed, whose error stands above it.
    """
    lines = [_RANK.sub("", line) for line in log.splitlines()]
    headers = [number for number, line in enumerate(lines) if line == _HEADER][-_MOST_TRACEBACKS:]
    error = _exception(lines, headers[-1]) if headers else _never_ran(lines)
    if error is None or not _is_of_launcher(error):
        return error
    while headers and lines[max(headers[-1] - 2, 0)] == _ANOTHER:  # of the launcher itself
        headers.pop()
    above = [*(_exception(lines, header) for header in headers[:-1]), _never_ran(lines)]
    causes = [each for each in above if each and not _is_of_launcher(each)]
    first = [each for each in causes if not each.peer_lost]
    return (first or causes or [error])[-1]


def _exception(lines: Sequence[str], header: int) -> TaskError | None:
    """Parse the exception below a traceback's header."""
    # Frames are indented, and the exception is the first line that is not.
    below = range(header + 1, len(lines))
    first = next((at for at in below if lines[at] and lines[at][0] not in " \t"), None)
    text = "" if first is None else "\n".join(announced(lines[first:]))
    exception = _EXCEPTION.fullmatch(text)
    return _error(exception["type"], exception["message"]) if exception else None


def _never_ran(lines: Sequence[str]) -> TaskError | None:
    """Parse why Python did not start what it was given, which it says without a traceback."""
    if refused := [line for line in lines if _NO_SYNTAX.fullmatch(line)]:
        return _exception(refused, len(refused) - 2)
    missing = [found for line in lines if (found := _NO_MODULE.fullmatch(line))]
    if not missing:
        return None
    return _error("ModuleNotFoundError", missing[-1]["package"] or missing[-1]["module"])


def _is_of_launcher(error: TaskError) -> bool:
    """Return whether an exception is that of a launcher whose child has failed."""
    name = error.type.rpartition(".")[2]
    of_python = name == "CalledProcessError" and re.search(r"python|torchrun", error.message)
    return name == "ChildFailedError" or bool(of_python)


def parse_abort(log: str, *, of_command: bool = False) -> TaskError | None:
    """Parse the exception with which NCCL's watchdog has ended its process; None without one.

    That thread of torch's ends the whole process by SIGABRT: where an exchange has timed out or
    lost its other end, but also for an error of this rank's own GPU.
    """
    said = next((lines for words in _NCCL_WATCHDOG if (lines := words.findall(log))), None)
    if not said:
        return None
    text = clean(said[-1])[:LONGEST_MESSAGE]
    return TaskError("NCCL's watchdog", text, _blames_a_peer(text), of_command)


def _error(kind: str, message: str | None) -> TaskError:
    text = clean(message or "")[:LONGEST_MESSAGE]
    lost = bool(_TORCHS_ERROR.fullmatch(kind)) and _blames_a_peer(text)
    return TaskError(clean(kind)[:_LONGEST_TYPE], text, lost, of_command=True)

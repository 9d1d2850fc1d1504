"""Attempts of a run: one numbered directory each, with its records and checkpoints.

A requeued job, the next job of a run and a resumed run each begin an attempt. Only the attempt
writes in its directory, so the orphan of a lost node cannot touch what its successor reads, and its
late checkpoints are ignored. mkdir creates the directory, which is atomic on network file systems
too; no lock outlives a node. A COMMAND's loop finds its attempt by an environment variable.

All attempts append to the same logs. Each first writes a divider line into the existing logs,
before any of its tasks can write.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from clusterddp import files, log, polling
from clusterddp.errors import ClusterDDPError
from clusterddp.formatting import setting
from clusterddp.processes.table import process_alive
from clusterddp.ranks.variables import OWN_PIDS_VARIABLE
from clusterddp.run import events
from clusterddp.run.rank_log import RankLog
from clusterddp.run.records import (
    ATTEMPT_FORMAT,
    AttemptRecord,
    FinalRecord,
    Liveness,
    Spent,
    StopRequest,
)
from clusterddp.run.run_dir import PathIn, RunDir
from clusterddp.slurm.forms import LOOP_VARIABLE
from clusterddp.version import __version__, bundle_file

_DIVIDER = re.compile(r"^--- attempt (\d{1,9}), job [^\n]* ---$", re.MULTILINE)
_TAIL_BYTES = 1 << 20
ALIVE_SECONDS = 2.0
"""Interval at which rank 0 and the batch controller renew their liveness files."""
LIVENESS_TIMEOUT = 15.0
"""Age of the liveness file from which an attempt of another job counts as dead."""
_RESERVE_BYTES = 256 << 10
FROM_MEMORY = ".memory"
"""End of the hidden file that shows that a snapshot is written as a checkpoint."""
FROM_MEMORY_SECONDS = 10.0
"""Age from which it is of a dead writer; a living one renews it each second."""


class StartRefused(ClusterDDPError):
    """The run may not be started again, or another attempt of it is active."""

    code = "CD0516"


class Superseded(ClusterDDPError):
    """A later attempt of the run has begun, so this one may not publish anything."""

    code = "CD1201"


@dataclass(frozen=True)
class Attempt:
    """Directory of one attempt."""

    run: RunDir
    number: int
    """Number of the attempt, from 1."""

    @property
    def path(self) -> Path:
        return self.run.attempts / f"{self.number:04d}"

    record = PathIn("attempt.json")
    """Record of rank 0, the job, and the checkpoint that the attempt started from."""
    outcomes = PathIn("outcomes")
    checkpoints = PathIn("checkpoints")
    metrics = PathIn("metrics.jsonl")
    stop = PathIn("stop")
    """Request to stop: `{"reason": …}`."""
    alive = PathIn("alive")
    """Liveness file of rank 0: its modification time, with the current and the saved step in it."""
    controller = PathIn("controller")
    """Liveness file of the batch controller: its modification time."""
    end = PathIn("end.json")
    """Final record of the ranks."""
    preflight = PathIn("preflight.json")
    """Record of the node checks before the tasks."""
    full_preflight = PathIn("preflight-full.json")
    """Record of the ranks' checks before the training."""
    preflight_log = PathIn("preflight.log")
    """Output of these checks, useful if they could not run."""
    staging = PathIn("staging.json")
    """Record of an environment that could not be staged."""
    staging_log = PathIn("staging.log")
    """Output of the nodes that unpacked an environment."""
    reserve = PathIn("reserve")
    """Space reserved for the attempt's last records, in case the disk fills up."""
    stragglers = PathIn("stragglers.json")
    """Record of the ranks that were slower than the others."""
    slow_run = PathIn("slow-run.json")
    """Record of the periods in which all ranks were slow."""
    stalled = PathIn("stalled.json")
    """Record that a COMMAND's ranks printed nothing for --hang-timeout."""
    agents = PathIn("torchelastic")
    """Directory of torchrun's agents, removed once they have ended."""

    def error_file(self, rank: int) -> Path:
        """Return the file in which torch's `record` keeps the exception of a command's rank."""
        return self.outcomes / f"error-{rank}.json"

    def nccl_trace(self, rank: int | str = "") -> Path:
        """Return the file of a rank's last NCCL operations after a hang, or its prefix."""
        return self.path / f"nccl-trace-{rank}"

    def remove_leftovers(self) -> None:
        """Remove what killed processes of the attempt left; errors are ignored.

        Hidden files in its directories are unfinished writes. Call it only for an attempt that has
        ended or is superseded: a save of a lost node's orphan may fail because of it.
        """
        for folder in (self.path, self.outcomes, self.checkpoints, self.path / "profile"):
            if folder.is_symlink():
                continue  # to a user's directory, which may have its own hidden files
            with contextlib.suppress(OSError):
                for entry in list(os.scandir(folder)):
                    if not entry.name.startswith(".") or entry.name.startswith(".nfs"):
                        continue  # .nfs*: files that are still open on a network file system
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        Path(entry.path).unlink(missing_ok=True)
        shutil.rmtree(self.agents, ignore_errors=True)
        self.release_space()

    def reserve_space(self) -> None:
        """Write the reserve file. Raises OSError."""
        with self.reserve.open("wb") as file:
            _fill(file, _RESERVE_BYTES)

    def release_space(self) -> None:
        """Remove the reserve file, if it exists."""
        with contextlib.suppress(OSError):
            self.reserve.unlink()

    def write_final_record(self, path: Path, record: object) -> None:
        """Write a final record, with the space of the reserve if the disk is full.

        Raises OSError.
        """
        try:
            files.write_record(path, record)
        except OSError:
            self.release_space()  # or another rank has just released it
            files.write_record(path, record)

    def write_error(self) -> str:
        """Return why nothing can be written in the attempt's directory; empty if it can."""
        try:
            with tempfile.TemporaryFile(dir=self.path) as file:
                _fill(file, _RESERVE_BYTES // 4)
        except OSError as error:
            return f"{self.path} cannot be written: {error.strerror}"
        return ""

    def read_record(self) -> AttemptRecord | None:
        """Read attempt.json; None before the ranks have met."""
        return files.read(AttemptRecord, self.record)

    def read_final_record(self) -> FinalRecord | None:
        """Read end.json; None before the ranks have exited together."""
        return files.read(FinalRecord, self.end)

    def read_liveness(self) -> Liveness:
        """Read rank 0's progress: its step, and the newest step that it has saved."""
        return files.read(Liveness, self.alive) or Liveness()

    @property
    def is_of_newer_version(self) -> bool:
        """True if its record has a newer format than this version reads."""
        record = self.read_record()
        return record is not None and record.format > ATTEMPT_FORMAT

    @property
    def is_saving_memory(self) -> bool:
        """True while a snapshot in a node's memory is written as a checkpoint."""
        with contextlib.suppress(OSError):
            claims = self.checkpoints.glob(f".step-*{FROM_MEMORY}")
            return any(files.age(claim, self.path) < FROM_MEMORY_SECONDS for claim in claims)
        return False

    @property
    def is_superseded(self) -> bool:
        """True if a later attempt of the run has begun."""
        return Attempt(self.run, self.number + 1).path.exists()

    def ask_to_stop(self, reason: str) -> None:
        """Ask the ranks to save a checkpoint and exit. Raises OSError."""
        files.write_record(self.stop, StopRequest(reason))

    def stop_reason(self) -> str | None:
        """Return the reason of a request to stop; None without a request."""
        if not self.stop.exists():
            return None
        # The batch script leaves an empty file, always for Slurm's signal before the time limit.
        request = files.read(StopRequest, self.stop)
        return (request.reason if request else "") or "signal"

    def renew_liveness(
        self,
        step: int,
        saved: int | None = None,
        spent: Spent | None = None,
        planned: int | None = None,
    ) -> None:
        """Renew the liveness file with the training's progress, newest checkpoint and time use.

        planned: step at which the training will be done. Raises OSError.

        A rename makes a network file system look up this directory again, and with it `stop`.
        """
        fresh = self.alive.with_name(f".{self.alive.name}.{os.getpid()}")
        content = dataclasses.asdict(Liveness(step, saved, spent, planned))
        fresh.write_text(json.dumps(content))  # no fsync: it is soon outdated
        fresh.replace(self.alive)

    def expire_liveness(self) -> None:
        """Backdate the liveness file, so that no process waits for the attempt."""
        with contextlib.suppress(OSError):
            os.utime(self.alive, (0, 0))

    def is_alive(self) -> bool:
        """Return whether rank 0 renewed its liveness file lately, by the file system's clock."""
        return files.age(self.alive, self.run.attempts) < LIVENESS_TIMEOUT


def _fill(file: IO[bytes], count: int) -> None:
    file.write(os.urandom(count))  # random, because a file system may compress zeros away
    file.flush()
    os.fsync(file.fileno())


def attempts(run: RunDir) -> list[Attempt]:
    """List the attempts of a run in order. Raises OSError if they cannot be read."""
    try:
        names = [entry.name for entry in os.scandir(run.attempts)]
    except FileNotFoundError:
        return []
    return [Attempt(run, number) for number in sorted(int(n) for n in names if n.isdigit())]


def latest(run: RunDir) -> Attempt | None:
    """Return the latest attempt, or None before the first."""
    known = attempts(run)
    return known[-1] if known else None


def begin(run: RunDir) -> Attempt:
    """Create the directory of the next attempt. Concurrent callers get different ones.

    Unfinished files of earlier attempts are removed. Raises OSError.
    """
    run.make(run.attempts)
    previous = latest(run)
    if previous and previous.is_of_newer_version:
        raise StartRefused(
            f"{previous.record} was written by a newer clusterddp than this one ({__version__}). "
            f"Update clusterddp to resume {run.name}. [CD0506]"
        )
    for number in itertools.count(previous.number + 1 if previous else 1):
        made = Attempt(run, number)
        with contextlib.suppress(FileExistsError):
            made.path.mkdir(mode=0o700)
            break
    made.outcomes.mkdir(mode=0o700)
    for earlier in attempts(run):
        if earlier.number < made.number:
            earlier.remove_leftovers()
    return made


def wait_until_inactive(run: RunDir, job_id: str, seconds: float) -> None:
    """Wait until no other job trains this run. Raises StartRefused after `seconds`.

    An earlier start of this job counts as over even if it has orphans: it is superseded.
    """
    previous = latest(run)

    def at_work() -> str:
        if previous is None or not _is_at_work(previous, job_id):
            return ""
        record = previous.read_record() or AttemptRecord()
        who = f"job {record.job_id or '(none)'} on {record.host}"
        return f"attempt {previous.number} of {run.name} is still trained by {who}"

    refusal = (
        f": rank 0 was active for all of {setting(seconds)}. Two jobs cannot write to one run: "
        "cancel one of them, or give this one its own --run-name (a Loop: its own directory)."
    )
    wait_until_idle(at_work, seconds, refusal, every=polling.RECORDS_POLL_SECONDS)


def wait_until_idle(
    at_work: Callable[[], str], seconds: float, refusal: str, *, every: float
) -> None:
    """Wait while `at_work` returns a description. Raises StartRefused after `seconds`.

    refusal: end of the error message, after that description.
    """
    is_announced = False
    for is_last in polling.poll(seconds, every=every):
        who = at_work()
        if not who:
            return
        if is_last:
            raise StartRefused(who + refusal)
        if not is_announced:
            log.info(f"{who}; waiting up to {setting(seconds)} for it to end")
            is_announced = True


def _is_at_work(attempt: Attempt, job_id: str) -> bool:
    record = attempt.read_record()
    if not record or (job_id and record.job_id == job_id) or attempt.end.exists():
        return False
    # Only its process id is compared: a clock set since would change the start time.
    if process_alive(record.pid, record.host, None) is False:
        return False
    ended = any(
        isinstance(event, events.Ended) and event.attempt == attempt.number
        for event in events.read(attempt.run.events)
    )
    return not ended and attempt.is_alive()


def record_start(
    attempt: Attempt,
    source: Path | None,
    step: int,
    *,
    world_size: int,
    hosts: Sequence[str],
    environ: Mapping[str, str],
) -> None:
    """Record on rank 0 that the ranks have met and which checkpoint they start from; publish it.

    source: the checkpoint, or None; step: its step. Metrics of earlier attempts up to that step are
    carried over, unless the checkpoint is from another run. Raises the exceptions of `publish`.
    """
    run = attempt.run
    path, folder = source.resolve() if source else None, run.path.resolve()
    is_own = path is not None and path.is_relative_to(folder)
    origin = path.relative_to(folder) if path and is_own else path
    copy_history(run.metrics, attempt.metrics, step if is_own else 0)
    attempt.end.unlink(missing_ok=True)
    # The steps that an attempt gains count from its first start.
    record = attempt.read_record() or AttemptRecord(
        step=step,
        saved=path.stat().st_mtime if path else None,
        resumed_from=str(origin) if origin else None,
    )
    record = replace(
        record,
        job_id=environ.get("SLURM_JOB_ID", ""),
        restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
        host=socket.gethostname(),
        pid=None if OWN_PIDS_VARIABLE in environ else os.getpid(),
        agent_starts=record.agent_starts + 1,
        world_size=world_size,
        hosts=tuple(hosts),
    )
    publish(attempt, record)


def copy_history(source: Path, target: Path, step: int) -> None:
    """Start an attempt's metrics with the earlier lines up to the step that it starts from."""
    lines = files.read_json_lines(source) if step > 0 else ()
    kept = [line for line in lines if (files.number(line.get("step")) or 0) <= step]
    files.write_atomically(target, "".join(json.dumps(line) + "\n" for line in kept).encode())


def publish(attempt: Attempt, record: AttemptRecord) -> None:
    """Write attempt.json with the current time, and link the run's paths to this attempt.

    Raises OSError, and Superseded if a later attempt has begun meanwhile.
    """
    if attempt.is_superseded:
        raise Superseded(
            f"attempt {attempt.number} of {attempt.run.name} is superseded: attempt "
            f"{attempt.number + 1} of the run has begun and continues; this one ends."
        )
    attempt.renew_liveness(record.step or 0)
    dated = dataclasses.replace(record, number=attempt.number, began=round(time.time(), 3))
    files.write_record(attempt.record, dated, indent=2)
    link(attempt.run.current, f"{attempt.run.attempts.name}/{attempt.path.name}")
    for path in (attempt.run.checkpoints, attempt.run.metrics):
        if not path.is_symlink():
            link(path, f"{attempt.run.current.name}/{path.name}")


def link(path: Path, target: str) -> None:
    """Create or replace a symbolic link. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(path)


_OFF = "off"
"""Value with which --env disables the loop's search; the other value is `JOB:PATH`."""


def expose_loop(environ: MutableMapping[str, str], attempt: Attempt) -> None:
    """Let a COMMAND import the run's own clusterddp, after the entries of its PYTHONPATH."""
    if environ.get(LOOP_VARIABLE) == _OFF:
        return
    environ[LOOP_VARIABLE] = f"{environ.get('SLURM_JOB_ID', '')}:{attempt.path}"
    own = bundle_file()
    if own:
        value = environ.get("PYTHONPATH")
        parts = value.split(os.pathsep) if value else []  # an empty part: the current directory
        environ["PYTHONPATH"] = os.pathsep.join([*filter(_is_by_user, parts), own])


def _is_by_user(path: str) -> bool:
    """Return whether a part of PYTHONPATH is not the bundle of a run that submitted this job."""
    name = Path(path).name
    return not (name.startswith("clusterddp-") and name.endswith(".pyz"))


def attempt_here(environ: Mapping[str, str]) -> Attempt | None:
    """Return the attempt that this process belongs to; None outside a run.

    A job submitted from inside another one inherits that job's variable, which is ignored.
    """
    job, _, path = environ.get(LOOP_VARIABLE, "").partition(":")
    if not path or job != environ.get("SLURM_JOB_ID", ""):
        return None
    return attempt_at(Path(path))


def attempt_at(path: Path) -> Attempt:
    """Return the attempt with a given directory."""
    return Attempt(RunDir(path.parents[1]), int(path.name))


def printed_bytes(run: RunDir) -> int:
    """Return how many bytes the ranks, and agents above them, have printed."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(run.logs) as entries:
        for entry in entries:
            if entry.name != run.job_log.name:
                with contextlib.suppress(OSError):
                    total += entry.stat().st_size
    return total


def write_attempt_dividers(attempt: Attempt, job_id: str) -> None:
    """Write the divider line of an attempt into the existing logs.

    A log that cannot be written is skipped, because the attempt matters more.
    """
    if attempt.number == 1:
        return
    line = _divider(attempt.number, job_id)
    with contextlib.suppress(OSError):
        for log in sorted(attempt.run.logs.glob("*.log")):
            with contextlib.suppress(OSError):
                files.append_line(log, line, os.O_NOFOLLOW | os.O_NONBLOCK)


def write_restart_divider(number: int, job_id: str, restarts: int) -> None:
    """Write a divider into a task's log when its agent restarts it within the job."""
    with contextlib.suppress(OSError):
        line = _divider(number, job_id, f"start {restarts + 1} in it")
        print(line, file=sys.stderr, flush=True)  # noqa: T201 -- the task's own log


def read_attempt_log(log: Path, number: int) -> str:
    """Read one attempt's part of a log, at most its last megabyte; empty without a log."""
    text = RankLog(log).read_tail(_TAIL_BYTES).decode(errors="replace")
    begin, end = 0, len(text)
    for divider in _DIVIDER.finditer(text):
        if int(divider[1]) > number:
            end = divider.start()
            break
        begin = divider.end() + 1
    return text[begin:end]


def attempt_offset(log: Path, number: int) -> int:
    """Return the byte offset at which an attempt or, without it, the next one begins in a log.

    0 if there is none; sys.maxsize, for attempts to come, gives the log's end.
    """
    text = log.read_bytes() if log.is_file() else b""
    for divider in re.finditer(_DIVIDER.pattern.encode(), text, re.MULTILINE):
        if int(divider[1]) >= number:
            return divider.start()
    return len(text) if number == sys.maxsize else 0


def print_to_job_log(line: str, *, err: bool = False) -> None:
    """Print a line to the job log, from a process of the batch script.

    If the disk is full, this and later lines go to slurm-JOBID.out in the submission's directory,
    where users of Slurm look first. A line that cannot be written there either is lost.
    """
    stream = sys.stderr if err else sys.stdout
    data = f"{line}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        stream.flush()
        try:
            while data:
                data = data[os.write(stream.fileno(), data) :]
        except OSError as error:
            _redirect_to_submission_folder(stream.fileno(), error)
            os.write(stream.fileno(), data)


def _redirect_to_submission_folder(refused: int, error: OSError) -> None:
    """Redirect the refused descriptor, and others of the same file, to a file in that directory."""
    job_id = os.environ.get("SLURM_JOB_ID")
    path = Path(os.environ.get("SLURM_SUBMIT_DIR") or ".", f"slurm-{job_id}.out")
    same = [number for number in (1, 2) if os.path.sameopenfile(number, refused)]
    try:
        if not job_id:
            raise FileNotFoundError
        other = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(other, f"clusterddp: cannot write the job log: {error.strerror}\n".encode())
    except OSError:
        other = os.open(os.devnull, os.O_WRONLY)
    for number in same:
        os.dup2(other, number)
    os.close(other)


def _divider(number: int, job_id: str, start: str = "") -> str:
    words = [f"attempt {number}", f"job {job_id or '(none)'}", start]
    return f"--- {', '.join(filter(None, words))}, {time.strftime('%Y-%m-%d %H:%M')} ---"

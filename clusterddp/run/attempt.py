"""Attempts of a run: a numbered directory each, who trains there, and what they came to.

A requeued job, the next job of a run and a person's own each make an attempt. It alone writes below
its directory, so that a lost node's orphan cannot touch what its successor reads: a checkpoint that
it still writes lies where nobody looks any more. The directory is made by mkdir, which is atomic on
network file systems too; no lock outlives a node. A COMMAND's loop finds its attempt by a variable.

Every log of a run is appended to by all attempts: each begins with a line in those that are there,
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

from clusterddp import files, log, patience
from clusterddp.errors import ClusterDDPError
from clusterddp.processes.table import process_alive
from clusterddp.ranks.variables import OWN_PIDS_VARIABLE
from clusterddp.run import events
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
"""Between two signs of life of an attempt's rank 0, and of its batch controller."""
LIVENESS_TIMEOUT = 15.0
"""Without a sign of life for so long, an attempt of another job is taken for dead."""
_RESERVE_BYTES = 256 << 10


class StartRefused(ClusterDDPError):
    """This start of a run is one too many, or another one is still at work."""

    code = "CD0516"


class Superseded(ClusterDDPError):
    """A later attempt of the run has begun, so this one may publish nothing more."""

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
    """Record of who trains, and from which checkpoint."""
    outcomes = PathIn("outcomes")
    checkpoints = PathIn("checkpoints")
    metrics = PathIn("metrics.jsonl")
    stop = PathIn("stop")
    """Mark of a request to stop: `{"reason": …}`."""
    alive = PathIn("alive")
    """Rank 0's sign of life: its time of change; in it the step, and the newest one saved."""
    controller = PathIn("controller")
    """The batch controller's sign of life: its time of change."""
    end = PathIn("end.json")
    """Record of how the ranks left together."""
    preflight = PathIn("preflight.json")
    """Record of what the nodes measured ahead of the tasks."""
    full_preflight = PathIn("preflight-full.json")
    """Record of what the ranks measured before they trained."""
    preflight_log = PathIn("preflight.log")
    """Output of these checks, which is of interest where they could not run."""
    reserve = PathIn("reserve")
    """Room on the disk for the last records of the attempt, should the disk be full by then."""
    stragglers = PathIn("stragglers.json")
    """Record of the ranks that were slower than the others."""
    silent = PathIn("silent.json")
    """Record of a silence of a COMMAND's ranks."""
    agents = PathIn("torchelastic")
    """Folder of torchrun's agents, which nobody needs once they have ended."""

    def error_file(self, rank: int) -> Path:
        """File in which torch's `record` keeps the exception that ends a rank of a command."""
        return self.outcomes / f"error-{rank}.json"

    def nccl_trace(self, rank: int | str = "") -> Path:
        """File of a rank's latest exchanges over NCCL, if they hung; without a rank, its prefix."""
        return self.path / f"nccl-trace-{rank}"

    def remove_leftovers(self) -> None:
        """Remove what killed processes of the attempt have left; what cannot be removed stays.

        Whatever is hidden in its folders is a file that somebody was writing. Only for an attempt
        that has ended, or is superseded: an orphan of a lost node may see a save fail.
        """
        for folder in (self.path, self.outcomes, self.checkpoints, self.path / "profile"):
            if folder.is_symlink():
                continue  # into a folder of a person's, who may hide things there
            with contextlib.suppress(OSError):
                for entry in list(os.scandir(folder)):
                    if not entry.name.startswith(".") or entry.name.startswith(".nfs"):
                        continue  # a network file system's own are files that are still open
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        Path(entry.path).unlink(missing_ok=True)
        shutil.rmtree(self.agents, ignore_errors=True)
        self.release_space()

    def reserve_space(self) -> None:
        """Take the reserve. Raises OSError."""
        with self.reserve.open("wb") as file:
            _fill(file, _RESERVE_BYTES)

    def release_space(self) -> None:
        """Give the reserve up, if there still is one."""
        with contextlib.suppress(OSError):
            self.reserve.unlink()

    def write_final_record(self, path: Path, record: object) -> None:
        """Write a record of how the attempt ends: on a full disk into its reserve.

        Raises OSError.
        """
        try:
            files.write_record(path, record)
        except OSError:
            self.release_space()  # as another rank may just have done
            files.write_record(path, record)

    def write_error(self) -> str:
        """Return why nothing can be written in the attempt's directory; empty where it can."""
        try:
            with tempfile.TemporaryFile(dir=self.path) as file:
                _fill(file, _RESERVE_BYTES // 4)
        except OSError as error:
            return f"{self.path} cannot be written: {error.strerror}"
        return ""

    def read_record(self) -> AttemptRecord | None:
        """attempt.json; None while the ranks have not met."""
        return files.read(AttemptRecord, self.record)

    def read_final_record(self) -> FinalRecord | None:
        """end.json; None while the ranks have not left together."""
        return files.read(FinalRecord, self.end)

    def read_liveness(self) -> Liveness:
        """Read the step that rank 0 has come to, and the newest one that it has saved."""
        return files.read(Liveness, self.alive) or Liveness()

    @property
    def is_of_newer_version(self) -> bool:
        """Return whether a version has written its record that keeps another format."""
        record = self.read_record()
        return record is not None and record.format > ATTEMPT_FORMAT

    @property
    def is_superseded(self) -> bool:
        """Return whether a later attempt of the run has begun."""
        return Attempt(self.run, self.number + 1).path.exists()

    def ask_to_stop(self, reason: str) -> None:
        """Ask this attempt's ranks to save and leave. Raises OSError."""
        files.write_record(self.stop, StopRequest(reason))

    def asked_to_stop(self) -> str | None:
        """Return the reason for which it was asked to stop, if it was."""
        if not self.stop.exists():
            return None
        # The batch script leaves an empty file: its one reason is Slurm's signal ahead of the end.
        request = files.read(StopRequest, self.stop)
        return (request.reason if request else "") or "signal"

    def renew_liveness(
        self,
        step: int,
        saved: int | None = None,
        spent: Spent | None = None,
        planned: int | None = None,
    ) -> None:
        """Renew the sign of life: how far the training is, what it has saved, and its time.

        planned: step at which it will be done. Raises OSError.

        By a rename, after which a network file system looks at this folder anew, and so at `stop`.
        """
        fresh = self.alive.with_name(f".{self.alive.name}.{os.getpid()}")
        sign = dataclasses.asdict(Liveness(step, saved, spent, planned))
        fresh.write_text(json.dumps(sign))  # nobody waits for the disk
        fresh.replace(self.alive)

    def expire_liveness(self) -> None:
        """Age the sign of life, so that nobody waits for the next one."""
        with contextlib.suppress(OSError):
            os.utime(self.alive, (0, 0))

    def is_alive(self) -> bool:
        """Return whether rank 0 has given a sign of life lately, by the file system's own clock."""
        return files.age(self.alive, self.run.attempts) < LIVENESS_TIMEOUT


def _fill(file: IO[bytes], count: int) -> None:
    file.write(os.urandom(count))  # a file system may pack zeros into nothing
    file.flush()
    os.fsync(file.fileno())


def attempts(run: RunDir) -> list[Attempt]:
    """List the attempts of a run, the latest last. Raises OSError where they cannot be seen."""
    try:
        names = [entry.name for entry in os.scandir(run.attempts)]
    except FileNotFoundError:
        return []
    return [Attempt(run, number) for number in sorted(int(n) for n in names if n.isdigit())]


def latest(run: RunDir) -> Attempt | None:
    """Return the attempt that began last, or None before the first."""
    known = attempts(run)
    return known[-1] if known else None


def begin(run: RunDir) -> Attempt:
    """Make the directory of the next attempt: this one's alone, whoever else tries.

    What earlier ones have left half-written is removed. Raises OSError.
    """
    run.make(run.attempts)
    previous = latest(run)
    if previous and previous.is_of_newer_version:
        raise StartRefused(
            f"{previous.record} was written by a newer clusterddp than this one, "
            f"{__version__}: update it to resume {run.name}. [CD0506]"
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
    """Wait until no other job trains this run. Raises StartRefused after so many seconds.

    An earlier start of this very job is over, whatever its orphans still do: it is superseded.
    """
    previous = latest(run)

    def at_work() -> str:
        if previous is None or not _is_at_work(previous, job_id):
            return ""
        record = previous.read_record() or AttemptRecord()
        who = f"job {record.job_id or '(none)'} on {record.host}"
        return f"attempt {previous.number} of {run.name} is still trained by {who}"

    refusal = (
        f": rank 0 has shown its life for all of {seconds:g} s. Two jobs cannot write one run: "
        "cancel one of them, or give this one a --run-name of its own (a Loop: a folder)."
    )
    wait_until_idle(at_work, seconds, refusal, every=patience.RECORDS_PAUSE)


def wait_until_idle(
    at_work: Callable[[], str], seconds: float, refusal: str, *, every: float
) -> None:
    """Wait while somebody is at work, as `at_work` says. Raises StartRefused after so many seconds.

    refusal: is said then of who it is.
    """
    is_announced = False
    for is_last in patience.looks(seconds, every=every):
        who = at_work()
        if not who:
            return
        if is_last:
            raise StartRefused(who + refusal)
        if not is_announced:
            log.info(f"{who}; waiting up to {seconds:g} s for it to end")
            is_announced = True


def _is_at_work(attempt: Attempt, job_id: str) -> bool:
    record = attempt.read_record()
    if not record or (job_id and record.job_id == job_id) or attempt.end.exists():
        return False
    # Its number alone: with a clock that has been set since, one at work would seem to be another.
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
    """Record on rank 0 that the ranks have met, and from which checkpoint they start; publish it.

    source: the checkpoint, None without one; step: its step. The metrics of earlier attempts are
    carried over up to there, from a checkpoint of another run none. Raises as `publish` does.
    """
    run = attempt.run
    path, folder = source.resolve() if source else None, run.path.resolve()
    is_own = path is not None and path.is_relative_to(folder)
    origin = path.relative_to(folder) if path and is_own else path
    copy_history(run.metrics, attempt.metrics, step if is_own else 0)
    attempt.end.unlink(missing_ok=True)
    # What an attempt has gained counts from its first start.
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
        starts_in_job=record.starts_in_job + 1,
        world_size=world_size,
        hosts=tuple(hosts),
    )
    publish(attempt, record)


def copy_history(source: Path, target: Path, step: int) -> None:
    """Begin an attempt's metrics with the lines of earlier ones up to the step it starts from."""
    lines = files.read_json_lines(source) if step > 0 else ()
    kept = [line for line in lines if (files.number(line.get("step")) or 0) <= step]
    files.write_atomically(target, "".join(json.dumps(line) + "\n" for line in kept).encode())


def publish(attempt: Attempt, record: AttemptRecord) -> None:
    """Write attempt.json, dated now, and let the run's own names lead to this attempt.

    Raises OSError, and Superseded when a later attempt has begun meanwhile.
    """
    if attempt.is_superseded:
        raise Superseded(
            f"attempt {attempt.number} of {attempt.run.name} is superseded: attempt "
            f"{attempt.number + 1} of the run has begun. It trains on; this one ends."
        )
    attempt.renew_liveness(record.step or 0)
    dated = dataclasses.replace(record, number=attempt.number, began=round(time.time(), 3))
    files.write_record(attempt.record, dated, indent=2)
    link(attempt.run.current, f"{attempt.run.attempts.name}/{attempt.path.name}")
    for path in (attempt.run.checkpoints, attempt.run.metrics):
        if not path.is_symlink():
            link(path, f"{attempt.run.current.name}/{path.name}")


def link(path: Path, target: str) -> None:
    """Make a symbolic link, new or in place of an older one. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.link")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(path)


_OFF = "off"
"""Value by which a person's own --env keeps all of this away; the other one is `JOB:PATH`."""


def expose_loop(environ: MutableMapping[str, str], attempt: Attempt) -> None:
    """Let a COMMAND import the run's own clusterddp, behind what its PYTHONPATH names already."""
    if environ.get(LOOP_VARIABLE) == _OFF:
        return
    environ[LOOP_VARIABLE] = f"{environ.get('SLURM_JOB_ID', '')}:{attempt.path}"
    own = bundle_file()
    if own:
        value = environ.get("PYTHONPATH")
        parts = value.split(os.pathsep) if value else []  # an empty part is the current folder
        environ["PYTHONPATH"] = os.pathsep.join([*filter(_is_a_persons, parts), own])


def _is_a_persons(path: str) -> bool:
    """Return whether a part of PYTHONPATH is anything but the file of a run that submitted this."""
    name = Path(path).name
    return not (name.startswith("clusterddp-") and name.endswith(".pyz"))


def attempt_here(environ: Mapping[str, str]) -> Attempt | None:
    """Return the attempt of the run in which this process is; None outside of one.

    A job that was submitted from within another has inherited that one's variable.
    """
    job, _, path = environ.get(LOOP_VARIABLE, "").partition(":")
    if not path or job != environ.get("SLURM_JOB_ID", ""):
        return None
    return attempt_at(Path(path))


def attempt_at(path: Path) -> Attempt:
    """Return the attempt of a directory."""
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
    """Write the line that begins an attempt into the existing logs.

    A log that cannot be written goes without: it must not cost the start.
    """
    if attempt.number == 1:
        return
    line = _divider(attempt.number, job_id)
    with contextlib.suppress(OSError):
        for log in sorted(attempt.run.logs.glob("*.log")):
            with contextlib.suppress(OSError):
                files.append_line(log, line, os.O_NOFOLLOW | os.O_NONBLOCK)


def write_restart_divider(number: int, job_id: str, restarts: int) -> None:
    """Begin a task that its agent has started again within the job, in the log of the task."""
    with contextlib.suppress(OSError):
        line = _divider(number, job_id, f"start {restarts + 1} in it")
        print(line, file=sys.stderr, flush=True)  # noqa: T201 -- the task's own log


def read_attempt_log(log: Path, number: int) -> str:
    """Read one attempt's part of a log, its last megabyte at most; empty without such a log."""
    text = files.read_tail(log, _TAIL_BYTES).decode(errors="replace")
    begin, end = 0, len(text)
    for divider in _DIVIDER.finditer(text):
        if int(divider[1]) > number:
            end = divider.start()
            break
        begin = divider.end() + 1
    return text[begin:end]


def print_to_job_log(line: str, *, err: bool = False) -> None:
    """Print a line of the job's log, from a process of the batch script.

    Where the disk takes no more, this line and those after it go to slurm-JOBID.out in the folder
    of the submission, where Slurm's users look first; a line that fits nowhere is lost.
    """
    stream = sys.stderr if err else sys.stdout
    data = f"{line}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        stream.flush()
        try:
            while data:
                data = data[os.write(stream.fileno(), data) :]
        except OSError as error:
            _turn_to_submission_folder(stream.fileno(), error)
            os.write(stream.fileno(), data)


def _turn_to_submission_folder(refused: int, error: OSError) -> None:
    """Redirect the descriptor that was refused, and those of the same file, to that folder."""
    job_id = os.environ.get("SLURM_JOB_ID")
    path = Path(os.environ.get("SLURM_SUBMIT_DIR") or ".", f"slurm-{job_id}.out")
    same = [number for number in (1, 2) if os.path.sameopenfile(number, refused)]
    try:
        if not job_id:
            raise FileNotFoundError
        other = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(other, f"clusterddp: the job's log takes no more: {error.strerror}\n".encode())
    except OSError:
        other = os.open(os.devnull, os.O_WRONLY)
    for number in same:
        os.dup2(other, number)
    os.close(other)


def _divider(number: int, job_id: str, start: str = "") -> str:
    words = [f"attempt {number}", f"job {job_id or '(none)'}", start]
    return f"--- {', '.join(filter(None, words))}, {time.strftime('%Y-%m-%d %H:%M')} ---"

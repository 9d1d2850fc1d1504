"""Tells a program of the person's, once, that a run or a sweep has ended for good: JSON.

The batch controller tells it. A small job that waits for the run's (`launchers.notice_job`) does
where the controller cannot: a job that was cancelled before it started, or killed, or whose first
node is lost. Whoever makes the mark first, a file for each submission of a person's, is the one.
A sweep's end is told by such a job alone, behind the arrays of its points.
The program's words are arguments, never a shell's; its end changes nothing of the job's.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp import files, log, patience
from clusterddp.errors import ClusterDDPError
from clusterddp.processes.signals import die_with_parent, subreaper
from clusterddp.request.spec import JobSpec, submission_comment
from clusterddp.run import events
from clusterddp.run.history import History
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm.states import JobState, State
from clusterddp.status.state import ACTIVE, RunState
from clusterddp.status.status import RunStatus, run_status, statuses
from clusterddp.status.sweeps import SweepStatus, has_failed, sweep_status

_MOST_OUTPUT_BYTES = 1 << 20
_OURS = ("TERM", "USR1", "USR2", "HUP", "INT", "PIPE")
"""Signals to which the batch controller, and Python, are deaf: the program shall not be."""


@dataclass(frozen=True)
class Notice:
    """notified-NNNN.json: who has told the program, and how that went."""

    by: str = ""
    """`script`, `dependent job`, or `rehearsal` of a sweep that ran on one machine."""
    job_id: str = ""
    """Job in which the program ran."""
    time: float | None = None
    state: str = ""
    """State of the run that was told."""
    exit_code: int | None = None
    """Exit code of the program, 128 + N for signal N; None until it has ended."""
    problem: str = ""
    """Reason for which it could not run, or was ended."""


def tell_at_end(run: RunDir, spec: JobSpec) -> None:
    """Tell the program where the run's own records say that it has ended for good.

    For the batch controller, behind its verdict. Raises nothing: whatever fails is logged.
    """
    try:
        status = run_status(run, {})
        if spec.notify and status.has_ended and tell(run, spec, status, "script"):
            _withdraw_job(run)
    except Exception as error:  # a fault of ours must not change the job's exit code
        log.info(f"--notify: {type(error).__name__}: {error}")


def tell(run: RunDir, spec: JobSpec, status: RunStatus | SweepStatus, by: str) -> bool:
    """Run the program, unless somebody has already; returns whether it was run now.

    Raises OSError where the mark cannot be made, for nobody knows then whether it was told, and
    where nothing can be started: the mark is taken back then.
    """
    mark = mark_of(run)
    now = round(time.time(), 3)
    notice = Notice(by, os.environ.get("SLURM_JOB_ID", ""), now, status.state)
    if not files.create(mark):
        return False
    with contextlib.suppress(OSError):
        files.write_record(mark, notice)
    content = {**status.as_dict(), "notified_by": by, "notified_time": now}
    words = json.dumps(files.finite(content))
    try:
        with _log_of(run, f"{by}: {status.state}") as output:
            code, problem = _run(spec, f"{words}\n".encode(), _folder(run), output)
    except OSError:
        mark.unlink()
        raise
    with contextlib.suppress(OSError):
        files.write_record(mark, replace(notice, exit_code=code, problem=problem))
    how = problem or f"exit code {code}"
    log.info(f"told {spec.notify[0]} that {run.name} is {status.state}: {how} ({run.notify_log})")
    return True


@contextlib.contextmanager
def _log_of(run: RunDir, title: str) -> Iterator[int]:
    """Open the log of what the program prints; what a full disk does not take is lost."""
    try:
        run.logs.mkdir(mode=0o700, exist_ok=True)
        output = os.open(run.notify_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:
        output = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):
        os.write(output, f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}, {title}\n".encode())
    try:
        yield output
    finally:
        with contextlib.suppress(OSError):  # of NFS, which says here that the disk is full
            os.close(output)


def queue(run: RunDir, spec: JobSpec, job_id: str) -> None:
    """Queue the job that tells the end of the run, behind its job. Raises OSError, ClusterDDPError.

    job_id: as Slurm's commands take it, 89_0 of an array's element; several with colons.
    """
    script = run.notice_script.read_text("utf-8")
    own = slurm.sbatch(
        script, os.environ, comment=comment_of(spec), dependency=f"afterany:{job_id}"
    )
    events.add(run.events, events.NoticeQueued(job_id=job_id, notice_job=own))


def comment_of(spec: JobSpec) -> str:
    """Return the comment of that job, by which it is found should sbatch give no answer."""
    return spec.comment and f"{submission_comment(spec.run_name)} notify"


def tell_as_job(run: RunDir) -> None:
    """Tell the program the end of a run whose job has ended; where it goes on, wait for its next.

    For the job that `queue` has queued. A sweep's end is that of its last point. Raises OSError,
    ClusterDDPError.
    """
    spec, own = run.load_spec(), os.environ.get("SLURM_JOB_ID", "")
    queued = History.read(run).every(events.NoticeQueued)
    waited_for = next((event.job_id for event in queued if event.notice_job == own), "")
    began = time.monotonic()
    for _ in patience.looks(every=patience.NOTICE_PAUSE):  # Slurm tells nobody when it has settled
        if mark_of(run).exists():
            return
        status, settles, jobs = _look(run)
        is_late = time.monotonic() - began > settles
        if not jobs and is_late:
            tell(run, spec, status, "dependent job")
            return
        if jobs and (jobs != waited_for or is_late):
            queue(run, spec, jobs)
            return


def tell_sweep(sweep: SweepDir, by: str) -> None:
    """Tell the program that a sweep has ended, whose points have run here; logs what fails."""
    try:
        spec = sweep.load_spec()
        if not spec.notify:
            return
        status, settles, _ = _look(sweep)
        if settles < 0:
            tell(sweep, spec, status, by)
    except (ClusterDDPError, OSError) as error:
        log.warning(f"--notify: {error} [CD1108]")


def _look(run: RunDir) -> tuple[RunStatus | SweepStatus, float, str]:
    """Return the status of a run or a sweep, how long it may be wrong, and the jobs it goes on in.

    Below zero is the time, in seconds, of one that has ended. The jobs are as `queue` takes them,
    arrays as wholes.
    """
    runs = run.elements if isinstance(run, SweepDir) else [run]
    known = statuses(runs)
    _record_cancellations(runs, known)
    status: RunStatus | SweepStatus = known[0]
    if isinstance(run, SweepDir):
        reasons = {index: s.why(in_short=True) for index, s in enumerate(known) if has_failed(s)}
        status = sweep_status(run, [s.state for s in known], reasons)
    jobs = [s.array_element or s.job_id for s in known if s.state in ACTIVE]
    if isinstance(run, SweepDir):
        jobs = [job.partition("_")[0] for job in jobs]
    ended = [each.has_ended or each.is_forgotten for each in known]
    is_unanswered = any(s.state == RunState.UNKNOWN and not s.is_forgotten for s in known)
    settles = patience.NOTICE_UNANSWERED if is_unanswered else patience.NOTICE_SETTLES
    return status, -1.0 if all(ended) else settles, ":".join(dict.fromkeys(jobs))


def _record_cancellations(runs: Sequence[RunDir], known: Sequence[RunStatus]) -> None:
    """Record in the runs what Slurm alone knows: it forgets a cancelled job within minutes."""
    for run, status in zip(runs, known, strict=True):
        forgotten = {status.job_id: JobState(State.UNKNOWN)}
        if (
            status.state == RunState.CANCELLED
            and run_status(run, forgotten).state != RunState.CANCELLED
        ):
            try:
                events.add(run.events, events.CancelAsked(job_id=status.job_id))
            except OSError as error:
                log.warning(f"{run.path} cannot be written: {error.strerror} [CD0504]")


def is_awaited(run: RunDir) -> bool:
    """Return whether a job waits to tell the end of a run or a sweep, which nobody has told."""
    spec = run.read_spec()
    if not (spec and spec.notify) or mark_of(run).exists():
        return False
    return bool(History.read(run).every(events.NoticeQueued))


def mark_of(run: RunDir) -> Path:
    """Return the mark for the latest submission of a person's: each has an end of its own."""
    history = History.read(run)
    sent = sum(not event.in_place_of for event in history.every(events.Submitted))
    again = len(history.every(events.Resubmitted))
    # `resubmit` stands before the submission proper; of an array's element it stands alone.
    return run.path / f"notified-{max(sent, again + 1):04d}.json"


def _withdraw_job(run: RunDir) -> None:
    """Take the job that waits to tell the program out of the queue: it has been told."""
    queued = History.read(run).every(events.NoticeQueued)
    if queued:
        slurm.cancel(queued[-1].notice_job)


def _folder(run: RunDir) -> Path:
    """Return the folder of the submission, or what is left to start in."""
    folder = Path(History.read(run).folder or run.path)
    return folder if folder.is_dir() else run.path


def _run(spec: JobSpec, verdict: bytes, folder: Path, output: int) -> tuple[int | None, str]:
    """Run the program for so long at most; returns its exit code, and what went wrong."""
    environ: Mapping[str, str] = {**os.environ, **dict(spec.environment)}
    parent = os.getpid()

    def begin() -> None:
        for name in _OURS:
            signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(parent)

    source, target = os.pipe()
    with (
        os.fdopen(target, "wb") as stdout,
        tempfile.TemporaryFile() as stdin,  # a pipe would wait for a program that reads nothing
        subreaper() as end_all,
    ):
        stdin.write(verdict)
        stdin.seek(0)
        try:
            program = subprocess.Popen(
                spec.notify,
                cwd=folder,
                env=environ,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=begin,  # noqa: PLW1509 -- no other thread holds a lock then
            )
        except (OSError, ValueError) as error:
            words = error.strerror if isinstance(error, OSError) else str(error)
            os.close(source)
            return None, f"{spec.notify[0]} does not start: {words}"
        stdout.close()
        # A copy: who has left the group can hold the pipe, and the log is closed behind this.
        copying = threading.Thread(target=_copy, args=(source, os.dup(output)), daemon=True)
        copying.start()
        problem = f"ended, as it had not come to an end within {patience.NOTIFIED_PROGRAM:g} s"
        try:
            if _ends(program, patience.NOTIFIED_PROGRAM):
                problem = ""
            else:
                _signal(program, signal.SIGTERM)
                _ends(program, patience.NOTIFIED_PROGRAM_LEAVES)
        finally:  # a Ctrl-C in a rehearsal, too
            _signal(program, signal.SIGKILL)  # and what it has left behind
            code = program.wait()
            if problem:  # in sessions of its own, too
                end_all(patience.NOTIFIED_PROGRAM_LEAVES)
    copying.join(patience.NOTIFIED_PROGRAM_LEAVES)
    return code if code >= 0 else 128 - code, problem


def _ends(program: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for its end without reaping it, by which its number stays that of its group alone."""

    def has_ended() -> bool:
        try:
            how = os.WEXITED | os.WNOWAIT | os.WNOHANG
            return os.waitid(os.P_PID, program.pid, how) is not None
        except ChildProcessError:
            return True

    return patience.wait_until(has_ended, seconds, every=patience.CHILD_PAUSE)


def _signal(program: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, number)


def _copy(source: int, target: int) -> None:
    """Copy what the program prints, the first megabyte of it, until nobody holds the pipe."""
    taken = 0
    with contextlib.suppress(OSError), os.fdopen(source, "rb"), os.fdopen(target, "wb"):
        while text := os.read(source, 1 << 16):
            if taken < _MOST_OUTPUT_BYTES:
                os.write(target, text[: _MOST_OUTPUT_BYTES - taken])
            taken += len(text)
        if taken > _MOST_OUTPUT_BYTES:
            os.write(target, f"\n… and {taken - _MOST_OUTPUT_BYTES} bytes more\n".encode())

"""Notification (--notify): run the user's program once, with JSON, when a run or sweep has ended.

The batch controller runs it. If it cannot (the job was cancelled before it started, was killed, or
has lost its first node), a small dependent job does (`launchers.notice_job`). A marker file per
manual submission ensures that only one of them runs the program. For a sweep, only the dependent
job runs it, after the arrays of all trials.
The program gets its arguments without a shell, and its exit code does not affect the job.
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

from clusterddp import files, log, polling
from clusterddp.errors import ClusterDDPError
from clusterddp.formatting import setting
from clusterddp.processes.signals import die_with_parent, subreaper
from clusterddp.request.spec import JobSpec, submission_comment
from clusterddp.run import events
from clusterddp.run.history import History
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm.states import JobState, State
from clusterddp.status.state import ACTIVE, RunState
from clusterddp.status.status import RunStatus, run_status, statuses
from clusterddp.status.sweeps import SweepStatus, ended_without_success, sweep_status

_MAX_OUTPUT_BYTES = 1 << 20
_RESET_SIGNALS = ("TERM", "USR1", "USR2", "HUP", "INT", "PIPE")
"""Signals that the batch controller or Python ignores; the program gets default actions."""


@dataclass(frozen=True)
class Notice:
    """notified-NNNN.json: what ran the program, and with which result."""

    by: str = ""
    """`script`, `dependent job`, or `rehearsal` of a sweep that ran on one machine."""
    job_id: str = ""
    """Job in which the program ran."""
    time: float | None = None
    state: str = ""
    """Reported state of the run."""
    exit_code: int | None = None
    """Exit code of the program, 128 + N for signal N; None until it has ended."""
    problem: str = ""
    """Reason why it could not run, or was ended."""


def notify_at_end(run: RunDir, spec: JobSpec) -> None:
    """Run the program if the run's records show that it has ended.

    For the batch controller, after it has recorded the end. Raises nothing: errors are logged.
    """
    try:
        status = run_status(run, {})
        if spec.notify and status.has_ended and send(run, spec, status, "script"):
            _withdraw_job(run)
    except Exception as error:  # an internal error must not change the job's exit code
        log.info(f"--notify: {type(error).__name__}: {error}")


def send(run: RunDir, spec: JobSpec, status: RunStatus | SweepStatus, by: str) -> bool:
    """Run the program unless it has already run; return whether this call ran it.

    Raises OSError if the marker cannot be created (the program may have run already), or if no
    process can be started (the marker is then removed).
    """
    mark = marker(run)
    now = round(time.time(), 3)
    notice = Notice(by, os.environ.get("SLURM_JOB_ID", ""), now, status.state)
    if not files.create(mark):
        return False
    with contextlib.suppress(OSError):
        files.write_record(mark, notice)
    words = json.dumps(files.finite({**status.as_dict(), "notified_by": by, "notified_time": now}))
    try:
        with _log_of(run, f"{by}: {status.state}") as output:
            code, problem = _run(spec, f"{words}\n".encode(), _folder(run), output)
    except OSError:
        mark.unlink()
        raise
    with contextlib.suppress(OSError):
        files.write_record(mark, replace(notice, exit_code=code, problem=problem))
    how = problem or f"{spec.notify[0]} exited with {code}"
    log.info(f"--notify for {run.name} ({status.state}): {how}; output in {run.notify_log}")
    return True


@contextlib.contextmanager
def _log_of(run: RunDir, title: str) -> Iterator[int]:
    """Open the log of the program's output; on a full disk the output is lost."""
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
        with contextlib.suppress(OSError):  # NFS reports a full disk here
            os.close(output)


def queue(run: RunDir, spec: JobSpec, job_id: str) -> None:
    """Queue the notification job after the run's job. Raises OSError, ClusterDDPError.

    job_id: a job or an array task (89_0); several are separated by colons.
    """
    script = run.notice_script.read_text("utf-8")
    own = slurm.sbatch(
        script, os.environ, comment=job_comment(spec), dependency=f"afterany:{job_id}"
    )
    events.add(run.events, events.NoticeQueued(job_id=job_id, notice_job=own))


def job_comment(spec: JobSpec) -> str:
    """Return the comment of the notification job, which identifies it if sbatch does not answer."""
    return spec.comment and f"{submission_comment(spec.run_name)} notify"


def notify_from_job(run: RunDir) -> None:
    """Run the program from the notification job; if the run continues, queue the next such job.

    A sweep ends with its last trial. Raises OSError, ClusterDDPError.
    """
    spec, own = run.load_spec(), os.environ.get("SLURM_JOB_ID", "")
    queued = History.read(run).every(events.NoticeQueued)
    waited_for = next((event.job_id for event in queued if event.notice_job == own), "")
    began = time.monotonic()
    # Slurm gives no event for the final state.
    for _ in polling.poll(every=polling.NOTIFY_POLL_SECONDS):
        if marker(run).exists():
            return
        status, settles, jobs = _read_state(run)
        is_late = time.monotonic() - began > settles
        if not jobs and is_late:
            send(run, spec, status, "dependent job")
            return
        if jobs and (jobs != waited_for or is_late):
            queue(run, spec, jobs)
            return


def notify_sweep(sweep: SweepDir, by: str) -> None:
    """Run the program for a rehearsed sweep that has ended; errors are logged."""
    try:
        spec = sweep.load_spec()
        if not spec.notify:
            return
        status, settles, _ = _read_state(sweep)
        if settles < 0:
            send(sweep, spec, status, by)
    except (ClusterDDPError, OSError) as error:
        log.warning(f"--notify: {error} [CD1108]")


def _read_state(run: RunDir) -> tuple[RunStatus | SweepStatus, float, str]:
    """Return the status of a run or sweep, its settling time in seconds, and its active jobs.

    The settling time is how long the status may still be wrong: negative after a recorded end. The
    jobs are in the format of `queue`, with whole arrays.
    """
    runs = run.trials if isinstance(run, SweepDir) else [run]
    known = statuses(runs)
    _record_cancellations(runs, known)
    status: RunStatus | SweepStatus = known[0]
    if isinstance(run, SweepDir):
        reasons = {
            index: s.why(in_short=True) for index, s in enumerate(known) if ended_without_success(s)
        }
        status = sweep_status(run, [s.state for s in known], reasons)
    jobs = [s.array_task or s.job_id for s in known if s.state in ACTIVE]
    if isinstance(run, SweepDir):
        jobs = [job.partition("_")[0] for job in jobs]
    ended = [each.has_ended or each.is_forgotten for each in known]
    is_unanswered = any(s.state == RunState.UNKNOWN and not s.is_forgotten for s in known)
    settles = polling.NOTIFY_UNANSWERED_SECONDS if is_unanswered else polling.NOTIFY_SETTLE_SECONDS
    return status, -1.0 if all(ended) else settles, ":".join(dict.fromkeys(jobs))


def _record_cancellations(runs: Sequence[RunDir], known: Sequence[RunStatus]) -> None:
    """Record cancellations that only Slurm knows: it forgets a cancelled job within minutes."""
    for run, status in zip(runs, known, strict=True):
        forgotten = {status.job_id: JobState(State.UNKNOWN)}
        if (
            status.state == RunState.CANCELLED
            and run_status(run, forgotten).state != RunState.CANCELLED
        ):
            try:
                events.add(run.events, events.CancelRequested(job_id=status.job_id))
            except OSError as error:
                log.warning(f"{run.path} cannot be written: {error.strerror}. [CD0504]")


def has_pending_job(run: RunDir) -> bool:
    """Return whether a notification job is queued for a run or sweep, and has not run yet."""
    spec = run.read_spec()
    if not (spec and spec.notify) or marker(run).exists():
        return False
    return bool(History.read(run).every(events.NoticeQueued))


def marker(run: RunDir) -> Path:
    """Return the marker file of the latest manual submission."""
    history = History.read(run)
    sent = sum(not event.in_place_of for event in history.every(events.Submitted))
    again = len(history.every(events.ResumeRequested))
    # It precedes a submission event, except for an array task, which has no such event.
    return run.path / f"notified-{max(sent, again + 1):04d}.json"


def _withdraw_job(run: RunDir) -> None:
    """Cancel the notification job: the program has run."""
    queued = History.read(run).every(events.NoticeQueued)
    if queued:
        slurm.cancel(queued[-1].notice_job)


def _folder(run: RunDir) -> Path:
    """Return the directory of the submission, or the run's directory if that is gone."""
    folder = Path(History.read(run).folder or run.path)
    return folder if folder.is_dir() else run.path


def _run(spec: JobSpec, result: bytes, folder: Path, output: int) -> tuple[int | None, str]:
    """Run the program with a timeout; return its exit code, and the problem if any."""
    environ: Mapping[str, str] = {**os.environ, **dict(spec.environment)}
    parent = os.getpid()

    def begin() -> None:
        for name in _RESET_SIGNALS:
            signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(parent)

    source, target = os.pipe()
    with (
        os.fdopen(target, "wb") as stdout,
        tempfile.TemporaryFile() as stdin,  # a pipe would block if the program reads nothing
        subreaper() as end_all,
    ):
        stdin.write(result)
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
        # A copy: processes outside the group can keep the pipe open after the log is closed.
        copying = threading.Thread(target=_copy, args=(source, os.dup(output)), daemon=True)
        copying.start()
        problem = f"ended after the timeout of {setting(polling.NOTIFY_PROGRAM_SECONDS)}"
        try:
            if _ends(program, polling.NOTIFY_PROGRAM_SECONDS):
                problem = ""
            else:
                _signal(program, signal.SIGTERM)
                _ends(program, polling.NOTIFY_PROGRAM_EXIT_SECONDS)
        finally:  # also after a Ctrl-C in a rehearsal
            _signal(program, signal.SIGKILL)  # its remaining children
            code = program.wait()
            if problem:  # also in other sessions
                end_all(polling.NOTIFY_PROGRAM_EXIT_SECONDS)
    copying.join(polling.NOTIFY_PROGRAM_EXIT_SECONDS)
    return code if code >= 0 else 128 - code, problem


def _ends(program: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for its end without reaping it, so that its process group id is not reused."""

    def has_ended() -> bool:
        try:
            how = os.WEXITED | os.WNOWAIT | os.WNOHANG
            return os.waitid(os.P_PID, program.pid, how) is not None
        except ChildProcessError:
            return True

    return polling.wait_until(has_ended, seconds, every=polling.CHILD_POLL_SECONDS)


def _signal(program: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, number)


def _copy(source: int, target: int) -> None:
    """Copy the first megabyte of the program's output until the pipe is closed."""
    taken = 0
    with contextlib.suppress(OSError), os.fdopen(source, "rb"), os.fdopen(target, "wb"):
        while text := os.read(source, 1 << 16):
            if taken < _MAX_OUTPUT_BYTES:
                os.write(target, text[: _MAX_OUTPUT_BYTES - taken])
            taken += len(text)
        if taken > _MAX_OUTPUT_BYTES:
            os.write(target, f"\n… and {taken - _MAX_OUTPUT_BYTES} bytes more\n".encode())

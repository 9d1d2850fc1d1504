"""Following a run to its end: its logs on stdout as they grow, its changes of state on stderr.

Used by `logs -f` and `submit --wait`.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import click

from clusterddp.cli import run_argument
from clusterddp.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PAUSED
from clusterddp.run import events
from clusterddp.run.attempt_logs import of_attempt
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import CREATED, DONE, FAILED, QUEUED, RUNNING, STOPPED, UNKNOWN
from clusterddp.run.status import RunStatus, run_status
from clusterddp.run.submission import Submission, jobs_to_ask, latest_submission
from clusterddp.slurm.queries import query
from clusterddp.slurm.states import JobState, State

FILES_SECONDS = 0.3
"""Between two looks at the run's files."""
SLURM_SECONDS = (1.0, 10.0)
"""Between two questions to Slurm: at first and after a change, and at most."""
SETTLE_SECONDS = 30.0
"""How long a failed run's Slurm job may take to leave, before its own record is the last word."""
FORGOTTEN_ANSWERS = 3
"""That many answers in a row that Slurm knows no such job end the following."""

_LAST_LINES = 20
_BLOCK = 65536


class LogTail:
    """A log file read piece by piece as it grows; it need not exist yet."""

    def __init__(self, path: Path, lines: int | None = None) -> None:
        """`lines`: how many of the lines that are there already are read; None reads them all."""
        self.path = path
        self._position = 0 if lines is None else _start_of_last(path, lines)

    def read(self) -> bytes:
        """What was added since the last time."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._position:
                    self._position = 0  # it was emptied and is being written anew
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return b""
        self._position += len(content)
        return content


class LogPrinter:
    """Writes several logs to one stream; with more than one, every line names its file."""

    def __init__(self, paths: Sequence[Path], lines: int | None, stream: BinaryIO) -> None:
        self._tails = [LogTail(path, lines) for path in paths]
        self._unfinished = [b""] * len(paths)
        self._stream = stream
        self.printed = False

    def print_new(self, *, last: bool = False) -> None:
        """Write what is new; `last` also writes lines that have no end yet."""
        for index, tail in enumerate(self._tails):
            content = self._unfinished[index] + tail.read()
            self._unfinished[index] = b""
            if len(self._tails) > 1:
                content = self._labelled(index, content, last)
            if content:
                self._stream.write(content)
                self._stream.flush()
                self.printed = True

    def _labelled(self, index: int, content: bytes, last: bool) -> bytes:
        *whole, rest = content.split(b"\n")
        if last and rest:
            whole.append(rest)
            rest = b""
        self._unfinished[index] = rest
        label = f"{self._tails[index].path.stem} | ".encode()
        return b"".join(label + line + b"\n" for line in whole)


def follow(
    run: RunDir,
    paths: Sequence[Path] = (),
    lines: int | None = None,
    *,
    goes_on: bool = True,
    to_stderr: bool = False,
) -> int:
    """Print the run's logs as they grow until it ends; says on stderr what state it is in.

    paths: the logs to print, rank 0's when none are given; they need not exist yet.
    lines: how many lines of what is there already; all when None.
    to_stderr: print the logs there too, where stdout is for a script to read.
    goes_on: whether the run outlives a Ctrl-C here, which is then said.

    It goes on over requeues and the jobs that take another one's place. Returns the exit code for
    the command: 0 done, 1 failed, cancelled or lost, 75 stopped, 130 interrupted.
    """
    printer = LogPrinter(
        paths or [run.rank_log(0)], lines, (sys.stderr if to_stderr else sys.stdout).buffer
    )
    try:
        status = _follow(run, printer)
    except KeyboardInterrupt:
        if goes_on:
            click.echo(
                f"\nclusterddp: {run.name} goes on; 'clusterddp logs -f {run.shown}' follows it "
                f"again, 'clusterddp cancel {run.shown}' ends it",
                err=True,
            )
        return EXIT_INTERRUPTED
    if status.state == FAILED and not status.first_failure.startswith("rank 0 "):
        _show_job_log(run, status)  # it ends with the last words of the rank that failed
    say(run, how_it_ended(status))
    return {DONE: EXIT_DONE, STOPPED: EXIT_PAUSED}.get(status.state, EXIT_FAILED)


def how_it_ended(status: RunStatus) -> str:
    """One line on the outcome, with what to type next when it was no success."""
    why = status.first_failure or status.detail
    if status.state == DONE:
        parts = [why] if why else []
        if status.accuracy is not None:
            parts.append(f"accuracy {status.accuracy:.4f}")
        if status.elapsed_seconds is not None:
            parts.append(f"took {run_argument.duration(status.elapsed_seconds)}")
        return f"done{': ' if parts else ''}{', '.join(parts)}"
    again = f"\n  {status.next_command}" if status.next_command else ""
    return f"{status.state}{': ' if why else ''}{why}{again}"


def say(run: RunDir, text: str) -> None:
    """A line about the run, kept apart from its logs."""
    click.echo(f"clusterddp: {run.name}: {text}", err=True)


def wait_for_end(run: RunDir) -> RunStatus:
    """Wait until the run has ended, saying on stderr what state it is in; returns the last one."""
    return _follow(run, None)


def _follow(run: RunDir, printer: LogPrinter | None) -> RunStatus:
    watch = _Watch(run)
    while True:
        if printer:
            printer.print_new()
        status = watch.look()
        if watch.is_over:
            if printer:
                printer.print_new(last=True)  # what was written between the two looks
            return status
        time.sleep(FILES_SECONDS)


class _Watch:
    """Looks at a run again and again, asking Slurm rarely; knows when the run is over."""

    def __init__(self, run: RunDir) -> None:
        self.is_over = False
        self._run = run
        self._states: dict[str, JobState] = {}
        self._pause = SLURM_SECONDS[0]
        self._next_question = 0.0
        self._said = ("", "")
        self._same_answers = 0
        self._last_answer = ""
        self._problem = ""
        self._requeues: int | None = None
        self._events_size = -1
        self._submission: Submission | None = None
        self._status: RunStatus | None = None
        self._ended_at = 0.0

    def look(self) -> RunStatus:
        """The state now; whether it is the last is in `is_over`."""
        try:
            size = self._run.events.stat().st_size
        except OSError:
            size = 0
        now = time.monotonic()
        changed = size != self._events_size
        self._events_size = size
        if changed:
            self._submission = latest_submission(events.read(self._run.events))
        asked = jobs_to_ask([self._submission])
        answered = bool(asked) and (now >= self._next_question or changed)
        if answered:
            self._states = query(asked)
            self._say_problem(self._states[asked[0]].problem)
        local = self._submission is None or self._submission.is_local
        if changed or answered or local or self._status is None:
            self._status = run_status(self._run, self._states)
            self._say_requeues(self._status)
            self._say_state(self._status)
            self._judge(self._status, bool(asked), answered)
        if answered:
            self._next_question = time.monotonic() + self._pause
            self._pause = min(self._pause * 1.5, SLURM_SECONDS[1])
        return self._status

    def _judge(self, status: RunStatus, slurm_has_a_say: bool, answered: bool) -> None:
        """An end that the run itself settled is final; another must be seen twice.

        A requeued job shows NODE_FAIL or PREEMPTED, or its own failure, before it is pending.
        """
        if status.has_ended and not slurm_has_a_say:
            self.is_over = True
            return
        if not answered:
            return
        assert self._submission is not None
        job = self._states[self._submission.job_id]
        forgotten = status.state == UNKNOWN and not job.problem
        if not (status.has_ended or forgotten):
            self._same_answers, self._last_answer = 0, ""
            self._ended_at = 0.0
            return
        self._pause = SLURM_SECONDS[0]  # the end is near
        self._ended_at = self._ended_at or time.monotonic()
        leaving = job.state is not State.UNKNOWN and not job.state.is_final
        if leaving and time.monotonic() < self._ended_at + SETTLE_SECONDS:
            return
        answer = f"{status.state} {job.state.value}"
        self._same_answers = self._same_answers + 1 if answer == self._last_answer else 1
        self._last_answer = answer
        self.is_over = self._same_answers >= (FORGOTTEN_ANSWERS if forgotten else 2)

    def _say_state(self, status: RunStatus) -> None:
        # Slurm can say RUNNING before the script has written on which hosts.
        seen = (status.state, f"{status.detail} {status.job_id} {status.attempt} {status.hosts}")
        if seen == self._said or status.state not in (CREATED, QUEUED, RUNNING):
            return
        if status.state != self._said[0]:
            self._pause = SLURM_SECONDS[0]
        self._said = seen
        job = f" as job {status.job_id}" if status.job_id else ""
        where = f" on {' '.join(status.hosts[:8])}" if status.hosts else ""
        if len(status.hosts) > 8:
            where += f" and {len(status.hosts) - 8} more"
        text = status.state + (job if status.state == QUEUED else where)
        if status.state == RUNNING and status.restarts:
            text += f", attempt {status.attempt or status.restarts + 1}"
        say(self._run, f"{text}: {status.detail}" if status.detail else text)

    def _say_requeues(self, status: RunStatus) -> None:
        reasons = [*status.restart_reasons, *filter(None, [status.goes_on_after])]
        known = len(reasons) if self._requeues is None else self._requeues
        for reason in reasons[known:]:
            say(self._run, f"requeued: {reason}")
        self._requeues = len(reasons)

    def _say_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            say(self._run, f"Slurm could not be asked: {problem}; still following the run's files")
        self._problem = problem


def _show_job_log(run: RunDir, status: RunStatus) -> None:
    """The end of the job log, which says why nothing came out of the ranks."""
    latest = sys.maxsize if status.attempt is None else status.attempt
    lines = of_attempt(run.job_log, latest).rstrip().splitlines()
    if lines:
        shown = "\n".join(lines[-_LAST_LINES:])
        click.echo(f"--- last lines of {run.job_log}:\n{shown}", err=True)


def _start_of_last(path: Path, lines: int) -> int:
    """Where the last `lines` lines of a file begin, read from its end."""
    size = _BLOCK
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            while True:
                start = max(0, end - size)
                file.seek(start)
                content = file.read(end - start).removesuffix(b"\n")
                if start == 0 or content.count(b"\n") >= lines:
                    break
                size *= 2
    except FileNotFoundError:
        return 0
    if lines == 0:
        return end
    cut = len(content)
    for _ in range(lines):
        cut = content.rfind(b"\n", 0, cut)
        if cut < 0:
            return start
    return start + cut + 1

"""Following of a run: its growing logs, and its state until it has ended."""

import dataclasses
import math
import os
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from clusterddp import formatting, log, polling
from clusterddp.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, RequestError
from clusterddp.run import events
from clusterddp.run.attempt import attempt_offset, printed_bytes
from clusterddp.run.history import History, causes_by_attempt
from clusterddp.run.hold import is_hold
from clusterddp.run.rank_log import RankLog
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.client import query
from clusterddp.slurm.states import JobState, State
from clusterddp.status.state import RunState, Submission, jobs_to_query, latest_submission
from clusterddp.status.status import RunStatus, run_status

FORGOTTEN_ANSWERS = 3
"""Consecutive answers from Slurm that it knows no such job, after which the run is over."""
GONE_POLLS = 3
"""Consecutive checks without any record of the run, after which it cannot be followed."""

_BLOCK = 65536
_SILENT_SECONDS = 120.0
"""Interval of the looks at the ranks' output; without any, the command for a hang is named."""


class LogTail:
    """Incremental reader of a growing log file, which need not exist yet."""

    def __init__(self, path: Path, lines: int | None = None, attempt: int | None = None) -> None:
        """Start at the last `lines` existing lines, or at the beginning if None.

        attempt: never start before this attempt's part of the log.
        """
        self.path, self._log, self._lines = path, RankLog(path), lines
        source = self._log.path
        self._position = attempt_offset(source, attempt) if attempt else 0
        if lines is not None and not self._log.is_shared:
            self._position = max(self._position, _start_of_last(source, lines))
        self._unfinished = self._part = b""

    def read(self) -> bytes:
        """Return the bytes that were added since the last call."""
        if not self._log.find():
            return b""
        try:
            with self._log.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._position:
                    self._position = 0  # it was truncated
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return b""
        self._position += len(content)
        return self._own(content) if self._log.is_shared else content

    def _own(self, content: bytes) -> bytes:
        """Return this rank's lines of a node's log; the first time, only the last ones asked."""
        *lines, self._part = (self._part + content).split(b"\n")
        own = self._log.own(lines)
        if self._lines is not None:
            own, self._lines = own[max(len(own) - self._lines, 0) :], None
        return b"".join(line + b"\n" for line in own)

    def read_lines(self, *, last: bool) -> list[bytes]:
        """Return the new lines; with `last` also an incomplete one."""
        *lines, self._unfinished = (self._unfinished + self.read()).split(b"\n")
        if last and self._unfinished:
            lines.append(self._unfinished)
            self._unfinished = b""
        return lines


class LogPrinter:
    """Writer of several logs to one stream; with more than one, each line starts with a label."""

    def __init__(
        self,
        paths: Sequence[Path],
        lines: int | None,
        stream: BinaryIO,
        labels: Sequence[str] = (),
        attempt: int | None = None,
    ) -> None:
        """Take the files; labels: prefixes of the lines, by default the files' names."""
        self._tails = [LogTail(path, lines, attempt) for path in paths]
        self._labels = labels or [path.stem for path in paths]
        self._stream = stream

    def print_new(self, *, last: bool = False) -> None:
        """Write the new bytes; with `last` also incomplete lines."""
        for tail, name in zip(self._tails, self._labels, strict=True):
            if len(self._tails) == 1:
                content = tail.read()
            else:
                label = f"{name} | ".encode()
                content = b"".join(label + line + b"\n" for line in tail.read_lines(last=last))
            if content:
                self._stream.write(content)
                self._stream.flush()


def wait_for_end(
    run: RunDir, printer: LogPrinter | None = None, timeout: float | None = None
) -> RunStatus:
    """Wait until the run has ended, across requeues and replacement jobs.

    Logs changes of its state; printer: prints its logs as they grow. timeout: seconds until
    TimeoutError is raised; the run continues. If its directory or events.jsonl disappears, the
    state is unknown.
    """
    watch = _Watch(run)
    seconds = math.inf if timeout is None else timeout
    printed, heard = -1, time.monotonic()
    for _ in polling.poll(seconds, every=polling.FOLLOW_FILES_POLL_SECONDS):
        if printer:
            printer.print_new()
        status = watch.look()
        if status.state != RunState.RUNNING:
            heard = time.monotonic()
        elif printer and time.monotonic() - heard > _SILENT_SECONDS and not is_hold(run):
            before, printed, heard = printed, printed_bytes(run), time.monotonic()
            if printed == before:
                heard = math.inf  # said once
                log.info(f"no rank prints anything. If it hangs: clusterddp stacks {run.cli_name}")
        if watch.is_over:
            if printer:
                printer.print_new(last=True)  # output since the last check
            return status
    words = f"has not ended within {timeout:g} s: it is {status.state}"
    raise TimeoutError(f"the run {run.path.name} {words}")


def how_it_ended(status: RunStatus) -> str:
    """Describe the outcome in a line, with its code and, after a failure, the next command."""
    why = status.why()
    if status.state == RunState.DONE:
        figures = formatting.join_known(
            ("{}", why),
            ("test accuracy {}", formatting.percent(status.accuracy)),
            ("took {}", formatting.duration(status.elapsed_seconds)),
        )
        return f"done{': ' if figures else ''}{figures}"
    again = f"\n  {status.next_command}" if status.next_command else ""
    return f"{status.state}{': ' if why else ''}{why}{again}"


def log_end(run: RunDir, status: RunStatus) -> int:
    """Log how a run has ended; return the command's exit code: 0 done, 75 stopped, else 1."""
    log.info(f"{run.name}: {how_it_ended(status)}")
    return {RunState.DONE: EXIT_DONE, RunState.STOPPED: EXIT_STOPPED}.get(status.state, EXIT_FAILED)


def default_log(run: RunDir, status: RunStatus) -> Path:
    """Return the most informative log: the job's after a failure, otherwise rank 0's."""
    ended_before_its_ranks = status.has_ended and not RankLog(run.rank_log(0)).find()
    if (status.state == RunState.FAILED or ended_before_its_ranks) and run.job_log.is_file():
        return run.job_log
    return run.rank_log(0)


def _script_output(run: RunDir) -> Path | None:
    """Find the output file of the newest job's script, kept if the job recorded no result."""
    for last in History.read(run).every(events.Submitted)[-1:]:
        output = Path(last.folder) / f"slurm-{last.job_id}.out"
        return output if last.folder and output.is_file() else None
    return None


def check_logs(run: RunDir, status: RunStatus, paths: Sequence[Path]) -> None:
    """Raise RequestError for a missing log, with the reason."""
    missing = next((path for path in paths if not RankLog(path).find()), None)
    if missing is None:
        return
    there = sorted(path.name for path in run.logs.glob("*.log"))
    ranks = [name for name in there if re.fullmatch(r"rank-\d+\.log", name)]
    others = [name for name in there if name not in ranks]
    state = f"{status.state}{f' ({status.detail})' if status.detail else ''}"
    if status.has_ended and status.started_time is None and not there:
        output = _script_output(run)
        where = f" The output of its script is in {output}." if output else ""
        raise RequestError(
            f"{run.name} has no logs: it never started; it is {state}.{where} [CD0507]"
        )
    have = ", ".join([*others, *ranks[:4], *(["…"] if len(ranks) > 4 else [])]) or "no log"
    yet, advice = "", "See"
    if not status.has_ended:
        yet, advice = " (yet)", f"Follow it with 'clusterddp logs -f {run.cli_name}', or see"
    raise RequestError(
        f"{run.name} has no {missing.name}{yet}: it is {state} and has {have}. {advice} "
        f"'clusterddp status {run.cli_name}'. [CD0507]"
    )


class _Watch:
    """Poller of a run's files (often) and Slurm (rarely), until the run is over."""

    def __init__(self, run: RunDir) -> None:
        self.is_over = False
        self._run = run
        self._states: dict[str, JobState] = {}
        self._pause = polling.FOLLOW_SLURM_POLL_SECONDS[0]
        self._next_question = 0.0
        self._logged = ("", "")
        self._answers: list[str] = []  # identical answers that the run is over
        self._problem = ""
        self._requeues: int | None = None
        self._events_size = -1
        self._submission: Submission | None = None
        self._status: RunStatus | None = None
        self._ended_at = 0.0
        self._job_id: str | None = None  # newest submission so far
        self._gone = 0  # consecutive checks without records

    def look(self) -> RunStatus:
        """Return the current status; `is_over` becomes True when it is final."""
        try:
            size = self._run.events.stat().st_size
        except OSError:
            size = 0
        now = time.monotonic()
        changed = size != self._events_size
        self._events_size = size
        if changed:
            self._submission = latest_submission(events.read(self._run.events))
            self._job_id = self._submission.job_id if self._submission else self._job_id
        asked = jobs_to_query([self._submission])
        answered = bool(asked) and (now >= self._next_question or changed)
        if answered:
            self._states = query(asked)
            self._log_problem(self._states[asked[0]].problem)
        local = self._submission is None or self._submission.is_local
        if changed or answered or local or self._status is None:
            self._status = run_status(self._run, self._states)
            self._gone = self._gone + 1 if self._lacks_records(self._status) else 0
            if self._gone >= GONE_POLLS:
                self.is_over = True
                return self._without_records(self._status)
            if self._gone:
                return self._status
            self._log_requeues(self._status)
            self._log_state(self._status)
            self._judge(self._status, bool(asked), answered)
        if answered:
            self._next_question = time.monotonic() + self._pause
            self._pause = min(self._pause * 1.5, polling.FOLLOW_SLURM_POLL_SECONDS[1])
        return self._status

    def _lacks_records(self, status: RunStatus) -> bool:
        """Return whether earlier records of the run have disappeared."""
        run = self._run
        is_started = run.attempts.is_dir() and not run.events.exists()
        was_there = self._job_id is not None or is_started or not run.path.is_dir()
        return status.state == RunState.CREATED and was_there

    def _without_records(self, status: RunStatus) -> RunStatus:
        path = shlex.quote(str(self._run.path))
        if self._run.path.is_dir():
            why, code = f"its records, {path}/events.jsonl, are gone", "CD0505"
        else:
            why, code = f"its directory {path} is gone: removed or renamed", "CD0512"
        again = f"squeue -j {self._job_id}" if (self._job_id or "").isdecimal() else ""
        why += f"; its job {self._job_id} may still be running" if again else ""
        return dataclasses.replace(
            status, state=RunState.UNKNOWN, detail=why, code=code, next_command=again
        )

    def _judge(self, status: RunStatus, slurm_is_asked: bool, answered: bool) -> None:
        """Accept an end that the run recorded; any other end must be seen twice.

        A requeued job shows NODE_FAIL, PREEMPTED or its own failure before it is pending again.
        """
        if status.has_ended and not slurm_is_asked:
            self.is_over = True
            return
        if not answered:
            return
        assert self._submission is not None
        job = self._states[self._submission.job_id]
        forgotten = status.state == RunState.UNKNOWN and not job.problem
        if not (status.has_ended or forgotten):
            self._answers, self._ended_at = [], 0.0
            return
        self._pause = polling.FOLLOW_SLURM_POLL_SECONDS[0]  # the end is near
        self._ended_at = self._ended_at or time.monotonic()
        leaving = job.state is not State.UNKNOWN and not job.state.is_final
        if leaving and time.monotonic() < self._ended_at + polling.FOLLOW_SETTLE_SECONDS:
            return
        answer = f"{status.state} {job.state.value}"
        self._answers = [*(before for before in self._answers if before == answer), answer]
        self.is_over = len(self._answers) >= (FORGOTTEN_ANSWERS if forgotten else 2)

    def _log(self, text: str) -> None:
        log.info(f"{self._run.name}: {text}")

    def _log_state(self, status: RunStatus) -> None:
        # Slurm can report RUNNING before the script has recorded the hosts.
        shown = (status.state, f"{status.detail} {status.job_id} {status.attempt} {status.hosts}")
        if shown == self._logged or status.state not in (
            RunState.CREATED,
            RunState.QUEUED,
            RunState.RUNNING,
        ):
            return
        if status.state != self._logged[0]:
            self._pause = polling.FOLLOW_SLURM_POLL_SECONDS[0]
        self._logged = shown
        job = f" as job {status.job_id}" if status.job_id else ""
        where = f" on {formatting.join_limited(status.hosts, 8)}" if status.hosts else ""
        text = status.state + (job if status.state == RunState.QUEUED else where)
        if status.state == RunState.QUEUED and status.launcher == "local":
            self._log("starting")
            return
        if status.state == RunState.RUNNING and status.restarts:
            text += f", attempt {status.attempt or status.restarts + 1}"
        self._log(f"{text}: {status.detail}" if status.detail else text)

    def _log_requeues(self, status: RunStatus) -> None:
        reasons = [*status.restart_reasons, *filter(None, [status.pending_restart_reason])]
        known = len(reasons) if self._requeues is None else self._requeues
        if reasons[known:]:
            history = History.read(self._run)
            attempts = [*causes_by_attempt(history.events), *[0] * len(reasons)]
            for reason, attempt in [*zip(reasons, attempts, strict=False)][known:]:
                end = next(reversed(history.every(events.Ended, attempt)), events.Ended())
                failure = end.first_failure.describe() if end.first_failure else end.how
                why = f": {failure}" if failure and reason == events.Cause.FAILED else ""
                self._log(f"requeued: {reason}{why}")
        self._requeues = len(reasons)

    def _log_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            self._log(f"Slurm cannot be queried: {problem}; still following the run's files")
        self._problem = problem


def _start_of_last(path: Path, lines: int) -> int:
    """Return the offset of the last `lines` lines of a file, reading from its end."""
    try:
        with path.open("rb") as file:
            start = end = file.seek(0, os.SEEK_END)
            content, size = b"", _BLOCK
            while start > 0 and content.count(b"\n") < lines:
                start = max(0, end - size)
                file.seek(start)
                content = file.read(end - start).removesuffix(b"\n")
                size *= 2
    except FileNotFoundError:
        return 0
    before, *last = content.rsplit(b"\n", lines)
    return start + len(before) + 1 if last and len(last) == lines else start

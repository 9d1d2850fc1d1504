"""Determine how an attempt ended, from its ranks' records, Slurm's job state and srun's code."""

import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from clusterddp import files, formatting
from clusterddp.batch.job import JobStart
from clusterddp.errors import EXIT_FAILED, EXIT_STOPPED, coded
from clusterddp.ranks.variables import is_held, is_rehearsal
from clusterddp.run import bad_nodes, events
from clusterddp.run.attempt import Attempt, read_attempt_log
from clusterddp.run.bad_nodes import named_hardware
from clusterddp.run.events import Cause, Ended, Failure
from clusterddp.run.history import (
    OWN_CLOCK,
    Decision,
    History,
    Policy,
    causes_by_attempt,
    decide,
    step_of_death,
    steps_gained,
    withdrawal_cause,
)
from clusterddp.run.outcome import (
    failure_of,
    first_failure,
    first_killed,
    hang_that_ended_job,
    read_outcomes,
    step_name,
)
from clusterddp.run.rank_log import RankLog
from clusterddp.run.records import FinalRecord, Outcome, Report
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import srun_lines
from clusterddp.slurm.client import Ending, ending
from clusterddp.status import end_codes

_ASKED_RESTART = f"command asked for a restart (exit code {EXIT_STOPPED})"
_LOST = "what it trained since its own last checkpoint is lost"
# srun's lines are at the end of the log, after all output of the setup.
_LOG_TAIL_BYTES = 1 << 20
# Lines of Lightning (2.6, loops/fit_loop.py and signal_connector.py): training has finished, or a
# signal has arrived, perhaps in a second fit.
_FINISHED_OR_SIGNALLED = re.compile(
    r"(?P<finished>`Trainer\.fit` stopped: `max_(?:epochs|steps|time)=.*` reached)"
    r"|Received SIGTERM: \d|Handling auto-requeue signal: \d"
)
_MISSING_FILES = re.compile(
    r"FileNotFoundError|NotADirectoryError|[Nn]o such file|not (?:be )?found|does ?n[o']t exist"
    r"|urlopen|[Dd]ownload|HTTPError|URLError"
)
"""Errors of a program whose files are missing, or that then tried to download them."""
_GIVE_UP_SECONDS = 60.0
"""Time after a suspension in which ranks give up whose wait timed out because of it."""
_OVER_MEMORY = re.compile(r"exceeded (?:job |step )?memory limit|[Oo]ut[ -]?[Oo]f[ -]?[Mm]emory")
_INTERRUPTIONS = (
    *(Cause.TIME_LIMIT, Cause.PREEMPTED, Cause.REQUEUED, Cause.NODE_LOST, Cause.STOPPED),
    Cause.SUSPENDED,
)
_NOT_DECIDED = Decision(False, "")


@dataclass(frozen=True)
class AttemptResult:
    """End of an attempt and what follows."""

    ended: Ended
    """Event to record."""
    lines: tuple[str, ...]
    """Lines for the job log."""
    decision: Decision = _NOT_DECIDED
    """True if another attempt follows."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes that the attempt lost."""
    unlaunched_node: str = ""
    """Node on which Slurm could not start a task; empty without one."""
    is_stop_asked: bool = False
    """True if the user asked the run to stop, even too late for its ranks to notice."""

    @property
    def exit_code(self) -> int:
        """Exit code of the job."""
        return self.ended.exit_code or 0


def determine_result(evidence: "Evidence", policy: Policy) -> AttemptResult:
    """Determine what ended an attempt, what follows, and whether its records could be written.

    The ranks' records take precedence over Slurm's job state, and this over srun's exit code.
    """
    rules = (
        *(_done, _superseded, _node_lost, _cancelled, _stopped, _ended_by_slurm),
        *(
            _preflight_failed,
            _not_staged,
            _not_launched,
            _step_cancelled,
            _killed,
            _signalled,
            _suspended,
        ),
        *(_signalled_early, _failed),
    )
    results = (rule(evidence) for rule in rules)
    found = next((result for result in results if result), None) or _unexplained(evidence)
    job, number = evidence.job, evidence.attempt.number
    hardware = _hardware(evidence, found.ended)
    ended = replace(
        found.ended,
        job_id=job.id,
        restart=job.restart,
        attempt=number,
        code=_code(evidence, found.ended, hardware),
        hardware=hardware,
        step=evidence.final_record.step,
        stop_signal=evidence.stop_signal,
    )
    lines = [coded(found.lines[0], ended.code), *found.lines[1:]]
    remarks = list(_remarks(evidence, ended))
    lines += [coded(remark, code) for remark, code in remarks]
    write_error = "" if ended.cause == Cause.DONE else evidence.write_error
    if write_error:
        lines.append(coded(write_error, "CD0504"))
    starts = evidence.history.past_attempts_with(
        number,
        cause=ended.cause,
        steps_gained=evidence.steps_gained,
        stopped_by_signal=bool(ended.stop_signal),
        failure=ended.first_failure,
        code=ended.code,
        hardware=hardware,
        died_at=step_of_death(evidence.attempt, ended.first_failure),
    )
    asked = evidence.is_stop_asked
    decision = decide(policy, ended.cause, starts, stop_requested=asked, how=ended.how)
    is_last = not decision.restarts and ended.cause != Cause.DONE
    ended = replace(
        ended,
        remark="; ".join(filter(None, (ended.remark, *(remark for remark, _ in remarks)))),
        write_error=write_error,
        why=decision.why if is_last else "",
        why_code=decision.code if is_last else "",
    )
    lost, unlaunched = evidence.lost_nodes, found.unlaunched_node
    return AttemptResult(ended, tuple(lines), decision, lost, unlaunched, asked)


def _hardware(evidence: "Evidence", ended: Ended) -> str:
    """Return the hardware that the first failing rank names as its cause; empty without one."""
    failure = ended.first_failure
    if ended.cause != Cause.FAILED or failure is None or not failure.host:
        return ""
    outcome = next((each for each in evidence.outcomes if each.rank == failure.rank), None)
    log = read_attempt_log(evidence.run.rank_log(failure.rank), evidence.attempt.number)
    return named_hardware(outcome.error if outcome else None, failure.exit_code, log)


def _code(evidence: "Evidence", ended: Ended, hardware: str) -> str:
    """Return the error code of an end: the rule's own, the cause's or the first failure's."""
    if ended.code or ended.cause == Cause.DONE:
        return ended.code
    if ended.cause != Cause.FAILED or ended.first_failure is None:
        return end_codes.BY_CAUSE[ended.cause]
    return end_codes.code_of_failure(ended.first_failure, evidence.outcomes, hardware)


class Evidence:
    """Records and logs of an attempt that has ended, and Slurm's state of its job."""

    def __init__(
        self,
        job: JobStart,
        history: History,
        attempt: Attempt,
        exit_code: int,
        write_error: str = "",
    ) -> None:
        """exit_code: srun's. write_error: why the attempt's directory cannot be written."""
        self.job, self.run, self.history, self.attempt = job, job.run, history, attempt
        self.unwritable = bool(write_error)
        self.spec = spec = history.spec
        self.keeps_records = spec.program.keeps_records if spec else self.run.metrics.exists()
        """True if the ranks always leave a final record."""
        final_record = attempt.read_final_record()
        self.has_final_record = final_record is not None
        """True if the ranks have recorded their common end."""
        self.final_record = final_record or FinalRecord()
        self.write_error = self.final_record.write_error or write_error
        """Error that prevented the last checkpoint or records."""
        self.outcomes = read_outcomes(attempt.outcomes)
        any_failed = any(outcome.failed for outcome in self.outcomes)
        self.stop_signal = "" if any_failed else self._find_stop_signal()
        """Signal on which all ranks of a command exited with code 0; empty otherwise."""
        self.step_ended = bool(history.every(events.StepEnded, attempt.number))
        """True if the step was ended because an exit message was lost."""
        # srun's code is then only a consequence of that.
        self.srun_code = 0 if self.step_ended else exit_code
        self.stopped = self._has_stopped(any_failed)
        """True if the ranks saved and exited on request, or were asked before any started."""
        hang = hang_that_ended_job(attempt.outcomes)
        self.hang = hang.reason if hang else ""
        """Hang for which the job was ended. `failure` names the rank that hung, if known."""
        if hang:  # srun was asked to end the tasks, so its code says nothing
            self.srun_code = EXIT_FAILED
            self.failure = next((failure_of(each) for each in self.outcomes if each.hung), None)
        else:
            self.failure = first_failure(self.outcomes, self.job_log)
        if self.failure:
            log = RankLog(self.run.rank_log(self.failure.rank)).path
            self.failure = replace(self.failure, log=f"logs/{log.name}")
        if self.srun_code == 0 and not any_failed:
            self.failure = None  # srun's lines may belong to another step, started by the setup
        self.code = _job_code(self.srun_code, self.failure)
        seems_done = self.code == 0 and not self.stopped and not self.unwritable
        if seems_done and not self.keeps_records and self.final_record.cause != Cause.DONE:
            # The rank was killed with its parent: srun exits with 0 when TERM ends it.
            killed = (failure_of(rank) for rank in self.outcomes if rank.ended is None)
            self.failure = next(killed, None)
            self.code = EXIT_FAILED if self.failure else 0

    def _find_stop_signal(self) -> str:
        ended_well = [outcome for outcome in self.outcomes if outcome.exit_code == 0]
        # A rank that received no signal has finished, and so have the others.
        if self.keeps_records or not ended_well or not all(each.left_early for each in ended_well):
            return ""
        if self.final_record.cause == Cause.DONE or self._says_finished():
            return ""
        return next(each.received_signal.signal for each in ended_well if each.received_signal)

    def _says_finished(self) -> bool:
        """Return whether a framework's last line, from rank 0, says that training has finished."""
        log = read_attempt_log(self.run.rank_log(0), self.attempt.number)
        last = max(_FINISHED_OR_SIGNALLED.finditer(log), key=re.Match.start, default=None)
        return last is not None and last["finished"] is not None

    def _has_stopped(self, any_failed: bool) -> bool:
        if self.stop_signal:
            return True
        if any(outcome.stopped for outcome in self.outcomes) and not any_failed:
            return True
        if self.srun_code == EXIT_STOPPED and not self.outcomes:
            return True
        if not self.unwritable or self.has_final_record or self.srun_code:
            return False
        # Ranks without a record have exited on request, because srun reports no failure. Ranks of
        # a command may also be done, unless it was asked to stop.
        no_code = not any(outcome.exit_code is not None for outcome in self.outcomes)
        return no_code and (self.keeps_records or self.attempt.stop_reason() is not None)

    @property
    def has_left(self) -> bool:
        """True if the ranks exited on their own, not because they were killed."""
        return self.stopped or self.has_final_record

    @property
    def stop_exit_code(self) -> int:
        """Exit code of ranks that exited on request, else 0.

        srun's code may be that of tasks that Slurm killed later.
        """
        return EXIT_STOPPED if self.has_left else 0

    @cached_property
    def job_log(self) -> str:
        """Part of the job log since the latest start of this job."""
        text = files.read_tail(self.run.job_log, _LOG_TAIL_BYTES).decode(errors="replace")
        return text.rpartition(f", job {self.job.id} on ")[2] if self.job.id else text

    @property
    def step_aborted(self) -> bool:
        """True if srun's lines show that the step was aborted before any task ended."""
        return srun_lines.was_aborted(self.job_log)

    @cached_property
    def interrupted_by(self) -> str:
        """Signal to the batch script with which the user stopped the attempt; empty without one."""
        last = next(reversed(self.history.every(events.StopRequested)), events.StopRequested())
        return last.by if last.attempt == self.attempt.number else ""

    @cached_property
    def is_stop_asked(self) -> bool:
        """True if the user asked the run to stop, even too late for its ranks to notice."""
        if self.attempt.stop_reason() == "stop":
            return True
        return withdrawal_cause(self.history.events, self.job.id) == Cause.STOPPED

    @cached_property
    def steps_gained(self) -> int | None:
        """Steps that the attempt added to the checkpoints; None if they are not counted."""
        return steps_gained(self.attempt, self.spec)

    @property
    def can_resume(self) -> bool:
        """True if records show that the attempt left something to resume from."""
        return self.has_left or bool(self.steps_gained)

    @cached_property
    def lost_nodes(self) -> tuple[str, ...]:
        """Nodes that the controller's watch found lost, or else those that srun saw fail."""
        bad_marks = self.history.bad_marks(self.attempt.number, bad_nodes.BY_LOSS)
        lost = tuple(node for each in bad_marks for node in each.nodes)
        return lost or srun_lines.lost_nodes(self.job_log)

    @cached_property
    def slurm_state(self) -> Ending:
        """Reason why the job ends, from the run's events or from slurmctld."""
        known = self.history.latest if is_held(os.environ) else self.history.events
        of_job = [event for event in known if event.job_id == self.job.id]
        asked = [e for e in of_job if isinstance(e, events.CancelRequested | events.CancelFailed)]
        if asked and isinstance(asked[-1], events.CancelRequested):
            return Ending.CANCELLED  # by `clusterddp cancel`
        if any(isinstance(event, events.TimeLimitReached) for event in of_job):
            return Ending.TIME_LIMIT  # recorded by a rehearsal, or inside an allocation
        if is_rehearsal(os.environ):
            return Ending.NONE
        word = ending(self.job.name, self.job.restart)
        # slurmctld can report a job that was preempted by cancellation as cancelled by its user.
        preempted = word is Ending.CANCELLED and srun_lines.was_preempted(self.job_log)
        return Ending.PREEMPTED if preempted else word

    @property
    def has_no_loop(self) -> bool:
        """True if the ranks run a command that has saved nothing with clusterddp."""
        return not self.keeps_records and not self.has_final_record and self.steps_gained is None

    @property
    def can_save(self) -> bool:
        """True if the ranks save with clusterddp, or would in a Loop that has not begun."""
        if not self.has_no_loop or self.spec is None:
            return not self.has_no_loop
        from clusterddp.scripts import check  # rarely needed

        return check.has_loop(self.spec.command, self.program_folder)

    @property
    def program_folder(self) -> Path:
        """Directory in which the command starts, or its copy."""
        return self.run.code_folder if self.run.code_folder.is_dir() else Path()

    @cached_property
    def saved_clause(self) -> str:
        """Clause that says what the next attempt resumes from."""
        if not self.keeps_records and not self.has_final_record:
            if self.stop_signal:
                return f"the command exited with code 0 on {self.stop_signal}"
            if self.stopped:
                return f"the {_ASKED_RESTART}"
            if self.has_no_loop:
                return f"the command has saved no checkpoint with clusterddp: {_LOST}"
        step, saved = self.final_record.step, self.final_record.saved
        at = f" at step {step}" if step is not None else ""
        if saved not in (-1, step):
            last = f"their last checkpoint is from step {saved}"
            if saved is None:
                last = "there is no checkpoint yet"
            return f"the ranks exited{at}; {last}"
        if self.unwritable and not self.has_final_record:
            return "the ranks exited but could not record how"
        if self.has_left:
            return f"the ranks saved a checkpoint and exited{at}"
        return "no rank saved a checkpoint at the end"


def _done(evidence: Evidence) -> AttemptResult | None:
    if evidence.final_record.cause == Cause.DONE:
        # A rank or srun that fails after the final record does not change the result.
        code = evidence.code
        late = (f"the script then ended with exit code {code}",) if code else ()
        return AttemptResult(
            Ended(cause=Cause.DONE, exit_code=0), (_summarize_report(evidence.run), *late)
        )
    left = evidence.stopped or evidence.final_record.cause == Cause.STOPPED
    if evidence.code == 0 and not left and not evidence.keeps_records:
        line = _summarize_report(evidence.run)
        if not evidence.outcomes:  # `exit 0` before the step, or a custom launch line
            line = "done: exit code 0; no task has recorded its end"
        return AttemptResult(Ended(cause=Cause.DONE, exit_code=0), (line,))
    return None


def _superseded(evidence: Evidence) -> AttemptResult | None:
    if not evidence.attempt.is_superseded:
        return None
    line = f"attempt {evidence.attempt.number} is superseded: a later one of the run has begun"
    return AttemptResult(
        Ended(cause=Cause.SUPERSEDED, exit_code=evidence.code or EXIT_FAILED), (line,)
    )


def _node_lost(evidence: Evidence) -> AttemptResult | None:
    lost = evidence.lost_nodes
    silent = (Ending.CANCELLED, Ending.NONE, Ending.UNKNOWN)
    if not lost or evidence.slurm_state not in silent:
        return None
    named = f"node {lost[0]} is" if len(lost) == 1 else f"nodes {', '.join(lost)} are"
    # The order in which srun sees the node's tasks end is arbitrary, and so are their codes.
    gone = (o for o in evidence.outcomes if o.host in lost and o.ended is None)
    first = next(map(failure_of, gone), evidence.failure)
    return AttemptResult(
        Ended(
            cause=Cause.NODE_LOST,
            exit_code=evidence.stop_exit_code or EXIT_FAILED,
            first_failure=first,
            saved=evidence.can_resume,
        ),
        (f"{named} lost; {evidence.saved_clause}",),
    )


def _cancelled(evidence: Evidence) -> AttemptResult | None:
    if evidence.slurm_state is not Ending.CANCELLED:
        return None
    code = evidence.stop_exit_code or evidence.code or EXIT_STOPPED
    return AttemptResult(
        Ended(cause=Cause.CANCELLED, exit_code=code), (f"cancelled; {evidence.saved_clause}",)
    )


def _stopped(evidence: Evidence) -> AttemptResult | None:
    asked = evidence.final_record.reason == "stop" or (
        # Commands, and ranks that have not started, leave no record of who asked.
        not (evidence.keeps_records and evidence.outcomes) and evidence.is_stop_asked
    )
    if not (evidence.has_left and asked):
        return None
    how = evidence.interrupted_by and f"{evidence.interrupted_by} to its batch script"
    by = how and f" by {how}"
    line = f"stopped{by}; {evidence.saved_clause}"
    return AttemptResult(Ended(cause=Cause.STOPPED, exit_code=EXIT_STOPPED, how=how), (line,))


def _ended_by_slurm(evidence: Evidence) -> AttemptResult | None:
    cause = evidence.slurm_state.value
    if cause not in (Cause.REQUEUED, Cause.PREEMPTED, Cause.TIME_LIMIT):
        return None
    return AttemptResult(
        Ended(
            cause=cause,
            exit_code=evidence.stop_exit_code or evidence.code or EXIT_FAILED,
            saved=evidence.can_resume,
        ),
        (f"{cause}; {evidence.saved_clause}",),
    )


def _preflight_failed(evidence: Evidence) -> AttemptResult | None:
    """Return the result if nodes failed the checks before the tasks or the training."""
    bad_marks = evidence.history.bad_marks(evidence.attempt.number, bad_nodes.BY_PREFLIGHT)
    if not bad_marks:
        return None
    named = "; ".join(f"{host}: {reason}" for host, reason in bad_marks[-1].nodes.items())
    done = "step was done" if evidence.outcomes else "task has started"
    line = f"no {done}, because a node failed its checks. {named}"
    return AttemptResult(
        Ended(cause=Cause.PREFLIGHT, exit_code=EXIT_FAILED, saved=False, remark=named), (line,)
    )


def _not_staged(evidence: Evidence) -> AttemptResult | None:
    """Return the result if the environment could not be copied to the nodes (`batch.stage`)."""
    record = files.read_json(evidence.attempt.staging)
    if record is None or evidence.outcomes:
        return None
    line = f"no task has started: {record.get('error')}"
    code = str(record.get("code", ""))
    ended = Ended(cause=Cause.FAILED, exit_code=EXIT_FAILED, saved=False, remark=line, code=code)
    return AttemptResult(ended, (line,))


def _not_launched(evidence: Evidence) -> AttemptResult | None:
    """Return the result if Slurm could not create the step or start all of its tasks."""
    failure = srun_lines.launch_failure(evidence.job_log)
    expected = evidence.spec.world_size if evidence.spec else 1
    if not failure or not evidence.srun_code or len(evidence.outcomes) >= expected:
        return None
    ended_for_it = ("SIGTERM", "SIGKILL")
    if any(o.failed and o.signal not in ended_for_it for o in evidence.outcomes):
        return None
    what, host = failure
    line = f"Slurm could not start the tasks: {what}"
    ended = Ended(cause=Cause.NOT_LAUNCHED, exit_code=EXIT_FAILED, saved=False, remark=what)
    return AttemptResult(ended, (line,), unlaunched_node=host)


def _step_cancelled(evidence: Evidence) -> AttemptResult | None:
    """Return the result if the step, not the job, was cancelled: its ranks were killed."""
    code = evidence.failure.exit_code if evidence.failure else None
    is_killed = code in (128 + signal.SIGKILL, 128 + signal.SIGTERM)
    if not is_killed or evidence.has_left or evidence.hang or is_rehearsal(os.environ):
        return None
    if evidence.slurm_state is not Ending.NONE or not evidence.step_aborted:
        return None
    if evidence.step_ended or _OVER_MEMORY.search(evidence.job_log):
        return None
    step = step_name(evidence.attempt.outcomes, evidence.job.id) or "its step"
    how = f"scancel {step} or a signal to its srun, which ended the step but not the job"
    line = f"cancelled by {how}; {evidence.saved_clause}"
    return AttemptResult(
        Ended(cause=Cause.CANCELLED, exit_code=evidence.code, saved=False, how=how), (line,)
    )


def _killed(evidence: Evidence) -> AttemptResult | None:
    """Return the result if one rank was killed and the others were ended because of it."""
    if not evidence.srun_code or not evidence.has_left:
        return None
    killed = first_killed(evidence.outcomes, evidence.job_log)
    if not killed:
        return None
    line = f"{killed.describe()}; {evidence.saved_clause}"
    code = killed.exit_code or EXIT_FAILED
    return AttemptResult(Ended(cause=Cause.FAILED, exit_code=code, first_failure=killed), (line,))


def _signalled(evidence: Evidence) -> AttemptResult | None:
    if not evidence.has_left:
        return None
    if evidence.keeps_records or evidence.has_final_record:
        reason = evidence.final_record.reason or "a request to stop"
        line = f"{reason}: {evidence.saved_clause}"
        # The run's own clock stops it before Slurm's signal.
        how = OWN_CLOCK if reason == Cause.TIME_LIMIT else ""
        return AttemptResult(Ended(cause=Cause.SIGNAL, exit_code=EXIT_STOPPED, how=how), (line,))
    how = "" if evidence.attempt.stop_reason() is not None else f"its {_ASKED_RESTART}"
    if evidence.stop_signal:
        how = f"{evidence.stop_signal}, on which the command exited with code 0"
    code = end_codes.EXITED_ON_SIGNAL if evidence.stop_signal else ""
    return AttemptResult(
        Ended(cause=Cause.SIGNAL, exit_code=EXIT_STOPPED, how=how, code=code),
        (evidence.saved_clause,),
    )


def _suspended(evidence: Evidence) -> AttemptResult | None:
    """Return the result if ranks timed out on each other because their job was suspended."""
    failed = [each for each in evidence.outcomes if each.failed]
    lost = [each for each in failed if each.peer_lost]
    resumed = {each.rank: each.continued for each in evidence.outcomes if each.continued}
    # If only one rank was stopped, the others really waited for it.
    if len(resumed) < 2 or not all(each in lost or each.signal == "SIGTERM" for each in failed):
        return None
    last_resumed = max(resumed.values())
    if not any((each.ended or 0.0) - last_resumed < _GIVE_UP_SECONDS for each in lost):
        return None
    line = f"suspended for longer than the ranks wait for each other; {evidence.saved_clause}"
    return AttemptResult(
        Ended(
            cause=Cause.SUSPENDED,
            exit_code=evidence.code or EXIT_FAILED,
            saved=bool(evidence.steps_gained),
        ),
        (line,),
    )


def _signalled_early(evidence: Evidence) -> AttemptResult | None:
    """Return the result if a signal to stop ended ranks that do not handle it, or not yet."""
    failure, outcomes = evidence.failure, evidence.outcomes
    number = (failure.exit_code or 0) - 128 if failure else 0
    if failure is None or number not in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        return None
    can_save = evidence.can_save
    if number == signal.SIGTERM and not (can_save and _were_all_terminated(evidence)):
        return None  # it may follow from an error that no rank has recorded
    ended = Ended(cause=Cause.SIGNAL, exit_code=EXIT_STOPPED, code=end_codes.NOT_SAVED)
    if can_save:
        if evidence.is_stop_asked:
            ended = replace(ended, cause=Cause.STOPPED, code="")
        where = f"{f' on {failure.host}' if failure.host else ''} ({failure.log})"
        line = f"rank {failure.rank}{where} got {signal.Signals(number).name} outside of its Loop"
        return AttemptResult(ended, (f"{line}, and saved no checkpoint",))
    if any(o.rank == failure.rank for o in outcomes):
        line = f"{failure.describe()}: the command does not handle that signal: {_LOST}"
        failed = replace(ended, cause=Cause.FAILED, exit_code=evidence.code, first_failure=failure)
        return AttemptResult(failed, (line,))
    line = f"rank {failure.rank} got a signal to stop before it had installed a handler"
    return AttemptResult(replace(ended, code=""), (line,))


def _were_all_terminated(evidence: Evidence) -> bool:
    """Return whether SIGTERM ended all ranks, and neither a lack of memory nor a lost message."""
    if evidence.step_ended or _OVER_MEMORY.search(evidence.job_log):
        return False
    return all(outcome.signal == "SIGTERM" for outcome in evidence.outcomes)


def _failed(evidence: Evidence) -> AttemptResult | None:
    run, failure = evidence.run, evidence.failure
    if failure is None:
        return None
    if _is_late_step_end(evidence, failure):
        line = f"{failure.describe()}: Slurm ended this step late, in place of the lost node's"
        return AttemptResult(
            Ended(cause=Cause.NODE_LOST, exit_code=evidence.code, first_failure=failure), (line,)
        )
    log = f"see its log: clusterddp logs --rank {failure.rank} {run.cli_name}"
    return AttemptResult(
        Ended(cause=Cause.FAILED, exit_code=evidence.code, first_failure=failure),
        (failure.describe(), log),
    )


def _unexplained(evidence: Evidence) -> AttemptResult:
    run, code = evidence.run, evidence.code
    if evidence.hang:
        line = f"the job was ended: {evidence.hang}"
        return AttemptResult(
            Ended(cause=Cause.FAILED, exit_code=code, how=line, code=end_codes.HUNG), (line,)
        )
    if code == 0:
        line = (
            f"srun ended with exit code 0, but the run has no {run.report.name} of this attempt: "
            f"it did not finish. See {run.logs}."
        )
        return AttemptResult(
            Ended(cause=Cause.FAILED, exit_code=EXIT_FAILED, code=end_codes.UNEXPLAINED), (line,)
        )
    if evidence.outcomes:
        line = f"ended with exit code {code}, and no rank recorded a reason. See {run.job_log}."
        return AttemptResult(
            Ended(cause=Cause.FAILED, exit_code=code, code=end_codes.UNEXPLAINED), (line,)
        )
    line = f"no task has started: ended with exit code {code}"
    return AttemptResult(
        Ended(cause=Cause.FAILED, exit_code=code, remark=line, code=end_codes.NO_TASK), (line,)
    )


def _is_late_step_end(evidence: Evidence, failure: Failure) -> bool:
    """Return whether Slurm ended this attempt's step instead of the previous attempt's.

    Seen on 22.05: a lost node that soon returns gets the end of its former step late, when the new
    step has the same number.
    """
    number = evidence.attempt.number
    causes = causes_by_attempt(evidence.history.events)
    before = [cause for earlier, cause in causes.items() if earlier < number]
    if failure.exit_code != 128 + signal.SIGKILL or not before or before[-1]:
        return False
    return srun_lines.was_ended(read_attempt_log(evidence.run.rank_log(failure.rank), number))


def _remarks(evidence: Evidence, ended: Ended) -> Iterator[tuple[str, str]]:
    """Yield remarks for the user about the end, each with its error code."""
    if remark := _nested_worlds(evidence.outcomes) or _unmet_ranks(evidence.outcomes):
        yield remark, "CD1226"
    elif ended.code == "CD0905" and (remark := _launcher_inside(evidence)):
        yield remark, ended.code
    reason = ended.first_failure.reason if ended.first_failure else ""
    if ended.code == "CD1217" and (remark := _other_python(evidence, reason)):
        yield remark, ended.code
    if ended.cause == Cause.FAILED and (remark := _outside_paths(evidence, reason)):
        yield remark, "CD0320"
    if ended.cause == Cause.FAILED and (remark := _absent_ranks(evidence)):
        yield remark, "CD1233"
    if remark := _missing_line(evidence, ended):
        yield remark, ended.code


def _absent_ranks(evidence: Evidence) -> str:
    """Return which ranks the others waited for, by NCCL's flight recorder; empty without dumps."""
    if not any(each.collectives for each in evidence.outcomes):
        return ""
    from clusterddp.run import flight_recorder  # rarely needed

    found = flight_recorder.find_absent(evidence.outcomes)
    return f"{found} ({evidence.attempt.nccl_trace('R')})" if found else ""


def _missing_line(evidence: Evidence, ended: Ended) -> str:
    """Return which lines an interrupted command lacks to be resumed; empty if not known."""
    codes = (end_codes.NOT_SAVED, end_codes.EXITED_ON_SIGNAL)
    if evidence.spec is None or not (ended.cause in _INTERRUPTIONS or ended.code in codes):
        return ""
    if not evidence.has_no_loop or (evidence.stopped and not evidence.stop_signal):
        return ""
    from clusterddp.scripts import check  # rarely needed

    missing = check.missing_line_of(evidence.spec.command, evidence.program_folder)
    return f"to save and resume, {missing.advice} {'; '.join(missing.code)}" if missing else ""


def _launcher_inside(evidence: Evidence) -> str:
    """Return a remark if the launcher in each task competes for one port; else empty."""
    from clusterddp.request import nested_launcher  # rarely needed

    command = evidence.spec.command if evidence.spec else ()
    found = nested_launcher.find(command) or nested_launcher.in_script(command, Path())
    if found is None:
        return ""
    return (
        f"each task starts {found.name}, which starts its own ranks, and those of several tasks "
        f"want the same port. Have each task start the program without {found.name}"
    )


def _other_python(evidence: Evidence, reason: str) -> str:
    """Return a remark if COMMAND's Python comes from the PATH, not from an active environment."""
    spec = evidence.spec
    missing = re.search(r"No module named '?([\w.]+)", reason)
    if spec is None or not spec.command or not missing or spec.container_image:
        return ""
    program, *arguments = spec.command
    found = shutil.which(program) or ""
    activated = (os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    is_same = {Path(found).name, Path(spec.python).name} == {"python", "python3"}
    is_meant = (is_same and Path(found).parent == Path(spec.python).parent) or any(
        a and Path(found).is_relative_to(a) for a in (*activated, spec.python)
    )
    if is_meant or not re.fullmatch(r"python[0-9.]*", program):
        return ""
    named = spec.python if "/" in spec.python else "ENVIRONMENT/bin/python"
    return (
        f"{program} is the first one on the PATH of the tasks, and has no {missing[1]}. Activate "
        "the environment that has it before you submit, or name its Python: "
        f"-- {shlex.join([named, *arguments])}"
    )


def _outside_paths(evidence: Evidence, reason: str) -> str:
    """Return a remark on relative paths that lead outside the copy of the code; else empty.

    Only for an error about missing files, and paths that the submission had found.
    """
    record = files.read_json(evidence.run.code_record) if _MISSING_FILES.search(reason) else None
    outside_paths = record.get("outside_paths") if record else None
    if not (isinstance(outside_paths, list) and outside_paths):
        return ""
    named = formatting.join_limited([str(each) for each in outside_paths], 3, ", ")
    return f"a relative path leads outside the copy of the code in which the command ran: {named}"


def _nested_worlds(outcomes: Sequence[Outcome]) -> str:
    """Return a remark if children of two or more tasks formed separate worlds; else empty."""
    worlds = [outcome.nested_world for outcome in outcomes if outcome.nested_world]
    if len(worlds) < 2:
        return ""
    sizes = sorted({world.size for world in worlds})
    of = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    names = sorted({world.launcher for world in worlds if world.launcher})
    by = f", started by {' and '.join(names)}" if names else ""
    ranks = "1 rank" if of == "1" else f"{of} ranks"
    return (
        f"the children of {len(worlds)} of {len(outcomes)} tasks formed separate worlds{by}, "
        f"of {ranks} each: each trained separately. If one training of all tasks was "
        f"meant, have each start the program {f'without {names[0]}' if names else 'itself'}"
    )


def _unmet_ranks(outcomes: Sequence[Outcome]) -> str:
    """Return a remark if several ranks ended well but never met; else empty."""
    if len(outcomes) < 2 or any(each.exit_code != 0 or each.received_signal for each in outcomes):
        return ""
    if not any(each.rank == 0 and each.listened is False for each in outcomes):
        return ""
    return (
        f"none of the {len(outcomes)} ranks met another: nothing listened on MASTER_PORT, and "
        "rank 0 on no other port, so each trained separately. If one training of all was meant, "
        "call torch.distributed.init_process_group() in each rank, or give its framework the "
        "number of nodes and of ranks per node"
    )


def _job_code(srun_code: int, failure: Failure | None) -> int:
    """Return the exit code of the first failing rank, not the 143 of ranks ended because of it."""
    if failure and failure.exit_code:
        return failure.exit_code
    return srun_code or (EXIT_FAILED if failure else 0)


def _summarize_report(run: RunDir) -> str:
    """Return a one-line summary of the report; a command has none."""
    report = files.read(Report, run.report)
    if report is None:
        return "done: every task ended with exit code 0"
    hosts = len(report.hosts)
    if not hosts or report.world_size is None:
        return f"done; see {run.report}"
    try:
        return (
            f"done: test accuracy {report.accuracy:.2%}, test loss {report.loss:.4f}; "
            f"{report.train_seconds:.1f} s of training ({report.total_seconds:.1f} s in "
            f"all), {report.images_per_second:,.0f} images/s on {report.world_size} "
            f"{'rank' if report.world_size == 1 else 'ranks'} of {hosts} "
            f"{'host' if hosts == 1 else 'hosts'}; {run.report}"
        )
    except TypeError:  # a missing figure
        return f"done; see {run.report}"

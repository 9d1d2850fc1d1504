"""Judges how an attempt ended, from its ranks' records, Slurm's word and srun's exit code."""

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
from clusterddp.batch import step_watch
from clusterddp.batch.job import JobStart
from clusterddp.errors import EXIT_FAILED, EXIT_PAUSED, coded
from clusterddp.ranks.variables import is_rehearsal
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
    steps_gained,
    withdrawal_cause,
)
from clusterddp.run.outcome import (
    ended_for,
    failure_of,
    first_failure,
    first_killed,
    read_outcomes,
)
from clusterddp.run.records import FinalRecord, Outcome, Report
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import srun_lines
from clusterddp.slurm.client import Ending, ending
from clusterddp.status import end_codes

_ASKED_AGAIN = f"command asked to be started again (exit code {EXIT_PAUSED})"
# srun's lines stand at the log's end; a set-up can have written a great deal before them.
_LOG_TAIL_BYTES = 1 << 20
# Lightning's own lines (2.6, loops/fit_loop.py and signal_connector.py): it has finished, or it has
# got a signal, as in the second of two fits.
_FINISHED_OR_TOLD = re.compile(
    r"(?P<finished>`Trainer\.fit` stopped: `max_(?:epochs|steps|time)=.*` reached)"
    r"|Received SIGTERM: \d|Handling auto-requeue signal: \d"
)
_NOT_THERE = re.compile(
    r"FileNotFoundError|NotADirectoryError|[Nn]o such file|not (?:be )?found|does ?n[o']t exist"
    r"|urlopen|[Dd]ownload|HTTPError|URLError"
)
"""Errors of a program that has not found its files, or has then tried to fetch them."""
_BREAKS_OFF_SECONDS = 60.0
"""Time after a suspension in which ranks that have waited for too long by then break off."""
_OVER_MEMORY = re.compile(r"exceeded (?:job |step )?memory limit|[Oo]ut[ -]?[Oo]f[ -]?[Mm]emory")
_NOT_DECIDED = Decision(False, "")


@dataclass(frozen=True)
class AttemptResult:
    """End of an attempt, and what follows."""

    ended: Ended
    """Its record."""
    lines: tuple[str, ...]
    """Lines for the job's log."""
    decision: Decision = _NOT_DECIDED
    """Whether another attempt follows."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes that were lost."""
    hardware: str = ""
    """Hardware that the first failure names, of its node."""
    is_stop_asked: bool = False
    """True where a person asked the run to stop, even if too late for its ranks to see it."""

    @property
    def exit_code(self) -> int:
        """Exit code of the job."""
        return self.ended.exit_code or 0


def determine_result(evidence: "Evidence", policy: Policy) -> AttemptResult:
    """Judge what ended an attempt, and what follows; name its trouble with the disk.

    The ranks' records come first, Slurm's word second, srun's code last.
    """
    rules = (
        *(_done, _superseded, _node_lost, _cancelled, _stopped, _ended_by_slurm),
        *(_preflight_failed, _step_cancelled, _killed, _signalled, _suspended, _failed),
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
        step=evidence.final_record.step,
        stop_signal=evidence.stop_signal,
    )
    lines = [coded(found.lines[0], ended.code), *found.lines[1:]]
    remarks = list(_remarks(evidence, ended))
    lines += [coded(remark, code) for remark, code in remarks]
    write_error = "" if ended.cause == Cause.DONE else evidence.write_error
    if write_error:
        lines.append(coded(write_error, "CD0504"))
    starts = evidence.history.starts_with(
        number,
        cause=ended.cause,
        steps_gained=evidence.steps_gained,
        stopped_by_signal=bool(ended.stop_signal),
    )
    asked = evidence.is_stop_asked
    decision = decide(policy, ended.cause, starts, stop_asked=asked, how=ended.how)
    ended = replace(
        ended,
        remark="; ".join(filter(None, (ended.remark, *(remark for remark, _ in remarks)))),
        write_error=write_error,
        why="" if decision.go_on or ended.cause == Cause.DONE else decision.why,
    )
    return AttemptResult(ended, tuple(lines), decision, evidence.lost_nodes, hardware, asked)


def _hardware(evidence: "Evidence", ended: Ended) -> str:
    """Name the hardware of which the rank died that failed first; empty where nothing does."""
    failure = ended.first_failure
    if ended.cause != Cause.FAILED or failure is None or not failure.host:
        return ""
    outcome = next((each for each in evidence.outcomes if each.rank == failure.rank), None)
    log = read_attempt_log(evidence.run.path / failure.log, evidence.attempt.number)
    return named_hardware(outcome.error if outcome else None, failure.exit_code, log)


def _code(evidence: "Evidence", ended: Ended, hardware: str) -> str:
    """Return the code of an end: one given with it, its cause's, or its first failure's."""
    if ended.code or ended.cause == Cause.DONE:
        return ended.code
    if ended.cause != Cause.FAILED or ended.first_failure is None:
        return end_codes.OF_CAUSE[ended.cause]
    return end_codes.of_failure(ended.first_failure, evidence.outcomes, hardware)


class Evidence:
    """Records and logs of an attempt that has ended, and Slurm's word on its job."""

    def __init__(
        self,
        job: JobStart,
        history: History,
        attempt: Attempt,
        exit_code: int,
        write_error: str = "",
    ) -> None:
        """exit_code: srun's. write_error: why nothing can be written in the attempt's directory."""
        self.job, self.run, self.history, self.attempt = job, job.run, history, attempt
        self.unwritable = bool(write_error)
        self.spec = spec = history.spec
        self.keeps_records = spec.program.keeps_records if spec else self.run.metrics.exists()
        """True where ranks leave a last word in any case."""
        final_record = attempt.read_final_record()
        self.has_final_record = final_record is not None
        """True where the ranks have recorded their common end."""
        self.final_record = final_record or FinalRecord()
        self.write_error = self.final_record.write_error or write_error
        """Error with which the last checkpoint or records could not be written."""
        self.outcomes = read_outcomes(attempt.outcomes)
        any_failed = any(outcome.failed for outcome in self.outcomes)
        self.stop_signal = "" if any_failed else self._find_stop_signal()
        """Signal at which all ranks of a command have left with exit code 0; empty otherwise."""
        self.step_ended = bool(history.every(events.StepEnded, attempt.number))
        """True where the step was ended in place of a message that was lost."""
        # srun's code is that of the end which the records made necessary.
        self.srun_code = 0 if self.step_ended else exit_code
        self.paused = self._has_paused(any_failed)
        """True where the ranks have saved and left as asked, or were asked before any began."""
        hang = ended_for(attempt.outcomes)
        self.hang = hang.reason if hang else ""
        """Hang for which the job was ended; `failure` has its rank, where one is to blame."""
        if hang:  # srun was told to end the tasks, whatever its code is
            self.srun_code = EXIT_FAILED
            self.failure = next((failure_of(each) for each in self.outcomes if each.hung), None)
        else:
            self.failure = first_failure(self.outcomes, self.job_log)
        if self.srun_code == 0 and not any_failed:
            self.failure = None  # srun's lines may be of another step, run by the set-up
        self.code = _job_code(self.srun_code, self.failure)
        seems_done = self.code == 0 and not self.paused and not self.unwritable
        if seems_done and not self.keeps_records and self.final_record.cause != Cause.DONE:
            # Killed with its parent: srun exits with 0 when it was told to end itself (TERM).
            killed = (failure_of(rank) for rank in self.outcomes if rank.ended is None)
            self.failure = next(killed, None)
            self.code = EXIT_FAILED if self.failure else 0

    def _find_stop_signal(self) -> str:
        ended_well = [outcome for outcome in self.outcomes if outcome.exit_code == 0]
        # A rank that was told nothing has come to its end, and so had the others.
        if self.keeps_records or not ended_well or not all(each.left_early for each in ended_well):
            return ""
        if self.final_record.cause == Cause.DONE or self._says_finished():
            return ""
        return next(each.received_signal.signal for each in ended_well if each.received_signal)

    def _says_finished(self) -> bool:
        """Return whether a framework's last line says that it has finished; rank 0 prints it."""
        log = read_attempt_log(self.run.rank_log(0), self.attempt.number)
        last = max(_FINISHED_OR_TOLD.finditer(log), key=re.Match.start, default=None)
        return last is not None and last["finished"] is not None

    def _has_paused(self, any_failed: bool) -> bool:
        if self.stop_signal:
            return True
        if any(outcome.paused for outcome in self.outcomes) and not any_failed:
            return True
        if self.srun_code == EXIT_PAUSED and not self.outcomes:
            return True
        if not self.unwritable or self.has_final_record or self.srun_code:
            return False
        # Ranks without a record have left as asked, as srun reports no failure. A command's may as
        # well be done, unless it was asked to stop.
        no_code = not any(outcome.exit_code is not None for outcome in self.outcomes)
        return no_code and (self.keeps_records or self.attempt.asked_to_stop() is not None)

    @property
    def has_left(self) -> bool:
        """True where the ranks left by themselves."""
        return self.paused or self.has_final_record

    @property
    def asked_code(self) -> int:
        """Exit code of ranks that left as asked, else 0.

        srun's own is that of the tasks which Slurm has ended by force meanwhile.
        """
        return EXIT_PAUSED if self.has_left else 0

    @cached_property
    def job_log(self) -> str:
        """Job log since this job, or its latest restart, has started."""
        text = files.read_tail(self.run.job_log, _LOG_TAIL_BYTES).decode(errors="replace")
        return text.rpartition(f", job {self.job.id} on ")[2] if self.job.id else text

    @property
    def step_aborted(self) -> bool:
        """True where srun was told of the step's end before it saw a task end, by its lines."""
        return srun_lines.was_aborted(self.job_log)

    @cached_property
    def interrupted_by(self) -> str:
        """Signal to the batch script by which a person has stopped the attempt; else empty."""
        last = next(reversed(self.history.every(events.StopAsked)), events.StopAsked())
        return last.by if last.attempt == self.attempt.number else ""

    @cached_property
    def is_stop_asked(self) -> bool:
        """True where a person asked the run to stop, even if too late for its ranks to see it."""
        if self.attempt.asked_to_stop() == "stop":
            return True
        return withdrawal_cause(self.history.events, self.job.id) == Cause.STOPPED

    @cached_property
    def steps_gained(self) -> int | None:
        """Steps that the attempt has brought onto the disk; None where nobody counts them."""
        return steps_gained(self.attempt, self.spec)

    @property
    def leaves_something(self) -> bool:
        """True where the attempt has left something to resume from, as its records tell."""
        return self.has_left or bool(self.steps_gained)

    @cached_property
    def lost_nodes(self) -> tuple[str, ...]:
        """Nodes that were lost: by the controller's own watch, else those srun has seen fail."""
        bad_marks = self.history.bad_marks(self.attempt.number, bad_nodes.BY_LOSS)
        lost = tuple(node for each in bad_marks for node in each.nodes)
        return lost or srun_lines.lost_nodes(self.job_log)

    @cached_property
    def slurms_word(self) -> Ending:
        """Reason for which the job ends, as recorded by its people or asked of slurmctld."""
        of_job = [event for event in self.history.events if event.job_id == self.job.id]
        asked = [e for e in of_job if isinstance(e, events.CancelAsked | events.CancelFailed)]
        if asked and isinstance(asked[-1], events.CancelAsked):
            return Ending.CANCELLED  # `clusterddp cancel` asked for it
        if any(isinstance(event, events.TimeLimitReached) for event in of_job):
            return Ending.TIME_LIMIT  # recorded by a rehearsal
        if is_rehearsal(os.environ):
            return Ending.NONE
        word = ending(self.job.name, self.job.restart)
        # slurmctld can show a job preempted by cancelling it as one that a person cancelled.
        preempted = word is Ending.CANCELLED and srun_lines.was_preempted(self.job_log)
        return Ending.PREEMPTED if preempted else word

    @cached_property
    def was_saved(self) -> str:
        """A clause on what the next attempt finds."""
        if not self.keeps_records and not self.has_final_record:
            # Only a command's exit code is known, not what it saves without a loop of ours.
            asked = f"the {_ASKED_AGAIN}"
            if self.stop_signal:
                asked = f"told to end by {self.stop_signal}, the command left with exit code 0"
            return asked if self.paused else "the command has not said whether it saved"
        step, saved = self.final_record.step, self.final_record.saved
        at = f" at step {step}" if step is not None else ""
        if saved not in (-1, step):
            last = f"their last checkpoint is of step {saved}"
            if saved is None:
                last = "there is no checkpoint yet"
            return f"the ranks have left{at}; {last}"
        if self.unwritable and not self.has_final_record:
            return "the ranks have left and could not record how"
        return f"the ranks have saved and left{at}" if self.has_left else "no rank saved at the end"


def _done(evidence: Evidence) -> AttemptResult | None:
    if evidence.final_record.cause == Cause.DONE:
        # A rank or srun that ended after the run's last word takes nothing from it.
        code = evidence.code
        late = (f"the script then ended with exit code {code}",) if code else ()
        return AttemptResult(Ended(cause=Cause.DONE, exit_code=0), (_achieved(evidence.run), *late))
    left = evidence.paused or evidence.final_record.cause == Cause.STOPPED
    if evidence.code == 0 and not left and not evidence.keeps_records:
        line = _achieved(evidence.run)
        if not evidence.outcomes:  # `exit 0` ahead of the step, or a launch line of one's own
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
    if not lost or evidence.slurms_word not in silent:
        return None
    named = f"node {lost[0]} is" if len(lost) == 1 else f"nodes {', '.join(lost)} are"
    # Which of the tasks that ended with it was seen first is chance, and so is their code.
    gone = (o for o in evidence.outcomes if o.host in lost and o.ended is None)
    first = next(map(failure_of, gone), evidence.failure)
    return AttemptResult(
        Ended(
            cause=Cause.NODE_LOST,
            exit_code=evidence.asked_code or EXIT_FAILED,
            first_failure=first,
            saved=evidence.leaves_something,
        ),
        (f"{named} lost; {evidence.was_saved}",),
    )


def _cancelled(evidence: Evidence) -> AttemptResult | None:
    if evidence.slurms_word is not Ending.CANCELLED:
        return None
    code = evidence.asked_code or evidence.code or EXIT_PAUSED
    return AttemptResult(
        Ended(cause=Cause.CANCELLED, exit_code=code), (f"cancelled; {evidence.was_saved}",)
    )


def _stopped(evidence: Evidence) -> AttemptResult | None:
    asked = evidence.final_record.reason == "stop" or (
        # A command leaves no record of who asked, nor do ranks that have not started.
        not (evidence.keeps_records and evidence.outcomes) and evidence.is_stop_asked
    )
    if not (evidence.has_left and asked):
        return None
    how = evidence.interrupted_by and f"{evidence.interrupted_by} to its batch script"
    by = how and f" by {how}"
    line = f"stopped{by}; {evidence.was_saved}"
    return AttemptResult(Ended(cause=Cause.STOPPED, exit_code=EXIT_PAUSED, how=how), (line,))


def _ended_by_slurm(evidence: Evidence) -> AttemptResult | None:
    cause = evidence.slurms_word.value
    if cause not in (Cause.REQUEUED, Cause.PREEMPTED, Cause.TIME_LIMIT):
        return None
    return AttemptResult(
        Ended(
            cause=cause,
            exit_code=evidence.asked_code or evidence.code or EXIT_FAILED,
            saved=evidence.leaves_something,
        ),
        (f"{cause}; {evidence.was_saved}",),
    )


def _preflight_failed(evidence: Evidence) -> AttemptResult | None:
    """Judge an attempt whose nodes have failed the checks ahead of its tasks or its training."""
    bad_marks = evidence.history.bad_marks(evidence.attempt.number, bad_nodes.BY_PREFLIGHT)
    if not bad_marks:
        return None
    named = "; ".join(f"{host}: {reason}" for host, reason in bad_marks[-1].nodes.items())
    done = "step was done" if evidence.outcomes else "task has started"
    line = f"no {done}, for a node has failed its checks. {named}"
    return AttemptResult(
        Ended(cause=Cause.PREFLIGHT, exit_code=EXIT_FAILED, saved=False, remark=named), (line,)
    )


def _step_cancelled(evidence: Evidence) -> AttemptResult | None:
    """Judge an attempt whose step somebody has ended, and not the job: its ranks are killed."""
    code = evidence.failure.exit_code if evidence.failure else None
    is_killed = code in (128 + signal.SIGKILL, 128 + signal.SIGTERM)
    if not is_killed or evidence.has_left or evidence.hang or is_rehearsal(os.environ):
        return None
    if evidence.slurms_word is not Ending.NONE or not evidence.step_aborted:
        return None
    if evidence.step_ended or _OVER_MEMORY.search(evidence.job_log):
        return None
    step = step_watch.step_name(evidence.attempt, evidence.job.id) or "its step"
    how = f"scancel {step}, or a signal to its srun, which ended the step and not the job"
    line = f"cancelled by {how}; {evidence.was_saved}"
    return AttemptResult(
        Ended(cause=Cause.CANCELLED, exit_code=evidence.code, saved=False, how=how), (line,)
    )


def _killed(evidence: Evidence) -> AttemptResult | None:
    """Judge an attempt one rank of which was killed, for which the others were ended."""
    if not evidence.srun_code or not evidence.has_left:
        return None
    killed = first_killed(evidence.outcomes, evidence.job_log)
    if not killed:
        return None
    line = f"{killed.describe()}; {evidence.was_saved}"
    code = killed.exit_code or EXIT_FAILED
    return AttemptResult(Ended(cause=Cause.FAILED, exit_code=code, first_failure=killed), (line,))


def _signalled(evidence: Evidence) -> AttemptResult | None:
    if not evidence.has_left:
        return None
    if evidence.keeps_records or evidence.has_final_record:
        reason = evidence.final_record.reason or "a request to stop"
        line = f"{reason}: {evidence.was_saved}"
        # By the run's own clock, ahead of Slurm's word and without a signal.
        how = OWN_CLOCK if reason == Cause.TIME_LIMIT else ""
        return AttemptResult(Ended(cause=Cause.SIGNAL, exit_code=EXIT_PAUSED, how=how), (line,))
    how = "" if evidence.attempt.asked_to_stop() is not None else f"its {_ASKED_AGAIN}"
    if evidence.stop_signal:
        how = f"{evidence.stop_signal}, at which the command left with exit code 0"
    code = end_codes.TOLD if evidence.stop_signal else ""
    return AttemptResult(
        Ended(cause=Cause.SIGNAL, exit_code=EXIT_PAUSED, how=how, code=code), (evidence.was_saved,)
    )


def _suspended(evidence: Evidence) -> AttemptResult | None:
    """Judge ranks that lost each other as they went on: the time of a stop counts as waited."""
    failed = [each for each in evidence.outcomes if each.failed]
    lost = [each for each in failed if each.peer_lost]
    went_on = {each.rank: each.continued for each in evidence.outcomes if each.continued}
    # Of a single rank that somebody stopped, the others have waited in earnest.
    if len(went_on) < 2 or not all(each in lost or each.signal == "SIGTERM" for each in failed):
        return None
    gone_on = max(went_on.values())
    if not any((each.ended or 0.0) - gone_on < _BREAKS_OFF_SECONDS for each in lost):
        return None
    line = f"suspended for longer than the ranks wait for each other; {evidence.was_saved}"
    return AttemptResult(
        Ended(
            cause=Cause.SUSPENDED,
            exit_code=evidence.code or EXIT_FAILED,
            saved=bool(evidence.steps_gained),
        ),
        (line,),
    )


def _failed(evidence: Evidence) -> AttemptResult | None:
    run, failure = evidence.run, evidence.failure
    if failure is None:
        return None
    if failure.exit_code in (128 + signal.SIGUSR1, 128 + signal.SIGUSR2):
        if not evidence.keeps_records and any(o.rank == failure.rank for o in evidence.outcomes):
            why = "the command does not take that signal; nobody knows what it had saved before"
            line, code = f"{failure.describe()}: {why}", end_codes.NO_SAVING
            return AttemptResult(
                Ended(
                    cause=Cause.FAILED, exit_code=evidence.code, first_failure=failure, code=code
                ),
                (line,),
            )
        line = f"rank {failure.rank} got its signal before it could take it for a request to stop"
        return AttemptResult(Ended(cause=Cause.SIGNAL, exit_code=EXIT_PAUSED), (line,))
    if _is_aftershock(evidence, failure):
        line = f"{failure.describe()}: Slurm ended a step of the lost node once more"
        return AttemptResult(
            Ended(cause=Cause.NODE_LOST, exit_code=evidence.code, first_failure=failure), (line,)
        )
    log = f"see its log: clusterddp logs {run.cli_name} --rank {failure.rank}"
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
        line = f"ended with exit code {code}; no rank says why. See {run.job_log}."
        return AttemptResult(
            Ended(cause=Cause.FAILED, exit_code=code, code=end_codes.UNEXPLAINED), (line,)
        )
    line = f"no task has started: ended with exit code {code}"
    return AttemptResult(
        Ended(cause=Cause.FAILED, exit_code=code, remark=line, code=end_codes.NO_TASK), (line,)
    )


def _is_aftershock(evidence: Evidence, failure: Failure) -> bool:
    """Return whether Slurm has ended this attempt's step in place of the one before it.

    Seen on 22.05: a node that is lost and soon back gets the end of its former step late, and the
    new step has the same number.
    """
    number = evidence.attempt.number
    causes = causes_by_attempt(evidence.history.events)
    before = [cause for earlier, cause in causes.items() if earlier < number]
    if failure.exit_code != 128 + signal.SIGKILL or not before or before[-1]:
        return False
    return srun_lines.was_ended(read_attempt_log(evidence.run.path / failure.log, number))


def _remarks(evidence: Evidence, ended: Ended) -> Iterator[tuple[str, str]]:
    """Yield what a person should know beside the cause, and its code."""
    if remark := _own_worlds(evidence.outcomes) or _never_met(evidence.outcomes):
        yield remark, "CD1226"
    elif ended.code == "CD0905" and (remark := _launcher_inside(evidence)):
        yield remark, ended.code
    reason = ended.first_failure.reason if ended.first_failure else ""
    if ended.code == "CD1217" and (remark := _other_python(evidence, reason)):
        yield remark, ended.code
    if ended.cause == Cause.FAILED and (remark := _left_paths(evidence, reason)):
        yield remark, "CD0320"


def _launcher_inside(evidence: Evidence) -> str:
    """Say that a launcher in each task wants the port that is in use; empty without one."""
    from clusterddp.request import nested_launcher  # for this end alone

    command = evidence.spec.command if evidence.spec else ()
    found = nested_launcher.find(command) or nested_launcher.in_script(command, Path.cwd())
    if found is None:
        return ""
    return (
        f"each task starts {found.name}, which starts ranks of its own: those of several tasks "
        f"want one port. Have each task start the program without {found.name}"
    )


def _other_python(evidence: Evidence, reason: str) -> str:
    """Say that COMMAND's Python is the first on the PATH, of no environment that is activated."""
    spec = evidence.spec
    missing = re.search(r"No module named '?([\w.]+)", reason)
    if spec is None or not spec.command or not missing or spec.container_image:
        return ""
    program, *arguments = spec.command
    found = shutil.which(program) or ""
    activated = (os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX"))
    is_meant = found == spec.python or any(a and Path(found).is_relative_to(a) for a in activated)
    if is_meant or not re.fullmatch(r"python[0-9.]*", program):
        return ""
    named = spec.python if "/" in spec.python else "ENVIRONMENT/bin/python"
    return (
        f"{program} is the first one on the PATH of the tasks, and has no {missing[1]}: activate "
        "the environment that has it before you submit, or name its Python, as in "
        f"-- {shlex.join([named, *arguments])}"
    )


def _left_paths(evidence: Evidence, reason: str) -> str:
    """Name the relative paths that lead elsewhere from the copy of the code, after such an error.

    Empty where the submission has found none, or the error has nothing to do with files.
    """
    record = files.read_json(evidence.run.code_record) if _NOT_THERE.search(reason) else None
    leaving = record.get("leaving") if record else None
    if not (isinstance(leaving, list) and leaving):
        return ""
    named = formatting.join_limited([str(each) for each in leaving], 3, ", ")
    return f"a relative path leads elsewhere from the copy of the code, in which it ran: {named}"


def _own_worlds(outcomes: Sequence[Outcome]) -> str:
    """Say that the tasks' children formed worlds of their own; empty where fewer than two did."""
    worlds = [outcome.nested_world for outcome in outcomes if outcome.nested_world]
    if len(worlds) < 2:
        return ""
    sizes = sorted({world.size for world in worlds})
    of = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    names = sorted({world.launcher for world in worlds if world.launcher})
    by = f", started by {' and '.join(names)}" if names else ""
    ranks = "1 rank" if of == "1" else f"{of} ranks"
    return (
        f"the children of {len(worlds)} of {len(outcomes)} tasks formed worlds of their own{by}, "
        f"of {ranks} each: every one of them trained by itself. If one training of all tasks was "
        f"meant, have each start the program {f'without {names[0]}' if names else 'itself'}"
    )


def _never_met(outcomes: Sequence[Outcome]) -> str:
    """Say that several ranks have ended well and none has met another; else empty."""
    if len(outcomes) < 2 or any(each.exit_code != 0 or each.received_signal for each in outcomes):
        return ""
    if not any(each.rank == 0 and each.met is False for each in outcomes):
        return ""
    return (
        f"none of the {len(outcomes)} ranks has met another, as nobody listened on MASTER_PORT, "
        "nor rank 0 on another port: each trained by itself. If one training of all was meant, "
        "call torch.distributed.init_process_group() in each, or give its framework the number of "
        "nodes and of ranks on each"
    )


def _job_code(srun_code: int, failure: Failure | None) -> int:
    """Return the first failing rank's code, rather than 143 of those that were ended for it."""
    if failure and failure.exit_code:
        return failure.exit_code
    return srun_code or (EXIT_FAILED if failure else 0)


def _achieved(run: RunDir) -> str:
    """Sum the report up in a line; a command leaves none."""
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
    except TypeError:  # a figure that is not there
        return f"done; see {run.report}"

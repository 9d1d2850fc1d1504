"""`clusterddp finish`: the batch script's last word, after srun has ended.

Says what the run achieved or which rank failed first, records it, and turns it into the job's
exit code: srun's own code hides the first failure behind the ranks that it ended for it.
"""

import dataclasses
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from clusterddp import requeue, step_watch
from clusterddp.attempt import Attempt
from clusterddp.attempt_logs import of_attempt
from clusterddp.cli import next_start
from clusterddp.cli.job_log import say
from clusterddp.errors import EXIT_FAILED, EXIT_PAUSED, RequestError
from clusterddp.outcome import Failure, Outcome, first_failure, first_killed, read_outcomes
from clusterddp.requeue import Policy, Start, decide, gained, starts_since_submission
from clusterddp.run_dir import RunDir, read_json
from clusterddp.slurm.own_job import Ending, ending, is_rehearsal, own_name

# srun's lines stand at the log's end; a set-up can have written a great deal before them.
_ASKED_AGAIN = f"command asked to be started again (exit code {EXIT_PAUSED})"
_LAST_LINES = 10
_LOG_TAIL_BYTES = 1 << 20
# From inside the job a lost node looks like scancel, but for what srun says.
_STEP_ENDED = re.compile(r"^slurmstepd\S*: error: \*\*\* STEP \S+ ON \S+ CANCELLED", re.MULTILINE)
_NODE_LOST = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--exit-code", type=int, required=True, help="srun's exit code.")
@click.option("--job-id", default="", help="Slurm's job id.")
@click.option("--restart", type=int, default=0, help="SLURM_RESTART_COUNT.")
@click.option("--attempt", "number", type=int, required=True, help="What 'begin' printed.")
@click.option("--requeue/--no-requeue", "requeues", default=False, help="Whether it may go on.")
@click.option("--max-requeues", type=int, default=0, help="Starts after the first.")
@click.option("--restart-on-failure", type=int, default=0, help="Of these, after a crash.")
def command(
    run_dir: Path,
    exit_code: int,
    job_id: str,
    restart: int,
    number: int,
    requeues: bool,
    max_requeues: int,
    restart_on_failure: int,
) -> int:
    """Print and record how an attempt ended, start the next where one is due; the job's code."""
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # what ends the job must not take its last word
    next_start.go_to_submission_folder()
    run = RunDir(run_dir)
    attempt = Attempt(run, number)
    trouble = attempt.trouble_writing()
    attempt.give_room_back()  # to what is recorded from here on
    end = judge(attempt, exit_code, job_id, restart, trouble)
    if end.failure:
        _show_last_words(attempt, end.failure)
    for line in end.lines:
        say(f"clusterddp: {line}")
    policy = Policy(requeues, max_requeues, restart_on_failure)
    stop_asked = _stop_asked(attempt, job_id)
    own = Start(number, end.cause, gained(attempt))
    earlier = [start for start in starts_since_submission(run) if start.attempt != number]
    decision = decide(policy, end.cause, [*earlier, own], stop_asked=stop_asked, how=end.how)
    next_start.record(
        run,
        "ended",
        job_id=job_id,
        restart=restart,
        attempt=number,
        exit_code=end.exit_code,
        cause=end.cause,
        how=end.how,
        step=end.step,
        saved=end.saved,
        first_failure=dataclasses.asdict(end.failure) if end.failure else None,
        trouble=end.trouble,
        why="" if decision.go_on or end.cause == requeue.DONE else decision.why,
    )
    attempt.remove_leftovers()
    if decision.go_on:
        requeued = next_start.start(run, attempt, job_id, restart, decision.why)
        # A job that is over must not say that the run is done: an afterok would believe it.
        return 0 if requeued else end.exit_code
    if end.cause == requeue.REQUEUED:
        if stop_asked:
            next_start.withdraw(run, job_id)
        say(f"clusterddp: {decision.why}")
        return 0
    # Of a failure Slurm itself decides whether it was the hardware's, and starts the job again.
    if end.cause not in (requeue.DONE, requeue.FAILED, requeue.SUPERSEDED):
        next_start.let_job_end(run, job_id, preempted=end.cause == requeue.PREEMPTED)
    if end.cause == requeue.CANCELLED:
        say(f"clusterddp: go on with: {run.resubmission}")
    elif end.cause not in (requeue.DONE, requeue.SUPERSEDED):
        say(f"clusterddp: the run does not go on by itself: {decision.why}")
        if end.cause != requeue.FAILED or gained(attempt) is not None:
            say(f"clusterddp: go on with: {run.resubmission}")
    if end.exit_code and end.cause != requeue.CANCELLED and not is_rehearsal(os.environ):
        next_start.warn_of_requeue_exit(run, end.exit_code)
    return end.exit_code


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    cause: str
    """One of the words in `requeue`."""
    exit_code: int
    failure: Failure | None = None
    step: int | None = None
    saved: bool = True
    """True where the attempt has left something to resume from, as its records tell."""
    lines: tuple[str, ...] = ()
    """What is to be said of it."""
    how: str = ""
    """What took place, where the word of its cause would say another thing."""
    trouble: str = ""
    """Why its last checkpoint or its records could not be written, if so."""


def judge(attempt: Attempt, exit_code: int, job_id: str, restart: int, trouble: str = "") -> End:
    """Judge what ended an attempt, and name its trouble with the disk.

    trouble: why nothing can be written in its directory.
    """
    left = read_json(attempt.end) or {}
    end = _judge(attempt, exit_code, job_id, restart, unwritable=bool(trouble))
    trouble = str(left.get("trouble") or "") or trouble
    if not trouble or end.cause == requeue.DONE:
        return end
    return dataclasses.replace(end, lines=(*end.lines, trouble), trouble=trouble)


def _judge(attempt: Attempt, exit_code: int, job_id: str, restart: int, *, unwritable: bool) -> End:
    """What ended an attempt: its ranks' records first, then Slurm's word; srun's code least."""
    run = attempt.run
    outcomes = read_outcomes(attempt.outcomes)
    if step_watch.was_ended(attempt):
        exit_code = 0  # srun's is that of the end which the records made necessary
    failure = first_failure(outcomes, _log_of(run, job_id))
    if exit_code == 0 and not any(outcome.failed for outcome in outcomes):
        failure = None  # srun's lines may be of another step, run by the set-up
    paused = any(outcome.paused for outcome in outcomes) and not any(o.failed for o in outcomes)
    left = read_json(attempt.end) or {}
    if unwritable and not left and exit_code == 0 and _has_left_unrecorded(attempt, outcomes):
        paused = True
    step = left.get("step")
    code = _job_code(exit_code, failure)
    if left.get("cause") == requeue.DONE:
        # What came after the run's last word, to a rank or to srun, takes nothing from it.
        late = (f"the script then ended with exit code {code}",) if code else ()
        return End(requeue.DONE, 0, step=step, lines=(_achieved(run), *late))
    if code == 0 and not paused and not _trains(run):
        failure = None if unwritable else _vanished(outcomes)
        if not failure:
            return End(requeue.DONE, 0, lines=(_achieved(run),))
        code = EXIT_FAILED
    if attempt.is_superseded:
        line = f"attempt {attempt.number} is superseded: a later one of the run has begun"
        return End(requeue.SUPERSEDED, code or EXIT_FAILED, step=step, lines=(line,))
    paused = paused or (exit_code == EXIT_PAUSED and not outcomes)  # before any task has started
    slurms = _slurms_word(run, job_id, restart)
    saved = _what_was_saved(run, left, paused=paused, unwritable=unwritable)
    lost = _NODE_LOST.search(_log_of(run, job_id))
    has_saved = paused or bool(left) or bool(gained(attempt))
    # srun's own code is that of the tasks which Slurm has ended by force meanwhile.
    asked = EXIT_PAUSED if paused or left else 0
    if lost and slurms in (Ending.CANCELLED, Ending.NONE, Ending.UNKNOWN):
        line = f"node {lost[1]} is lost; {saved}"
        # Which of the tasks that ended with it was seen first is chance, and so is their code.
        return End(requeue.NODE_LOST, asked or EXIT_FAILED, failure, step, has_saved, lines=(line,))
    if slurms is Ending.CANCELLED:
        line = f"cancelled; {saved}"
        return End(requeue.CANCELLED, asked or code or EXIT_PAUSED, step=step, lines=(line,))
    # A command leaves no word of its own on who asked.
    stop_asked = left.get("reason") == "stop" or (not _trains(run) and _stop_asked(attempt, job_id))
    if (paused or left) and stop_asked:
        return End(requeue.STOPPED, EXIT_PAUSED, step=step, lines=(f"stopped; {saved}",))
    for word, cause in (
        (Ending.REQUEUED, requeue.REQUEUED),
        (Ending.PREEMPTED, requeue.PREEMPTED),
        (Ending.TIME_LIMIT, requeue.TIME_LIMIT),
    ):
        if slurms is word:
            line = f"{cause}; {saved}"
            return End(
                cause, asked or code or EXIT_FAILED, step=step, saved=has_saved, lines=(line,)
            )
    killed = first_killed(outcomes, _log_of(run, job_id)) if exit_code else None
    if killed and (paused or left):  # the other ranks were ended for it
        line = f"{killed.describe()}; {saved}"
        return End(requeue.FAILED, killed.exit_code or EXIT_FAILED, killed, step, lines=(line,))
    if paused or left:
        if not _trains(run):
            how = "" if attempt.asked_to_stop() is not None else f"its {_ASKED_AGAIN}"
            return End(requeue.SIGNAL, EXIT_PAUSED, lines=(saved,), how=how)
        reason = left.get("reason") or "a request to stop"
        return End(requeue.SIGNAL, EXIT_PAUSED, step=step, lines=(f"{reason}: {saved}",))
    if failure:
        return _judge_failure(attempt, failure, code, step, outcomes)
    if code == 0:
        line = (
            f"srun ended with exit code 0, but the run has no {run.report.name} of this attempt: "
            f"it did not finish. See {run.logs}."
        )
        return End(requeue.FAILED, EXIT_FAILED, lines=(line,))
    where = f"{run.job_log}" if outcomes else f"{run.job_log}, as no task has started"
    return End(
        requeue.FAILED, code,
        lines=(f"ended with exit code {code}; no rank says why. See {where}.",),
    )  # fmt: skip


def _judge_failure(
    attempt: Attempt, failure: Failure, code: int, step: int | None, outcomes: Sequence[Outcome]
) -> End:
    """Judge an attempt that was not interrupted by its first failure."""
    run = attempt.run
    if failure.exit_code in (128 + signal.SIGUSR1, 128 + signal.SIGUSR2):
        if not _trains(run) and any(o.rank == failure.rank for o in outcomes):
            why = "the command does not take that signal, so it saved nothing"
            return End(requeue.FAILED, code, failure, lines=(f"{failure.describe()}: {why}",))
        line = f"rank {failure.rank} got its signal before it could take it for a request to stop"
        return End(requeue.SIGNAL, EXIT_PAUSED, lines=(line,))
    if _is_aftershock(attempt, failure):
        line = f"{failure.describe()}: Slurm ended a step of the lost node once more"
        return End(requeue.NODE_LOST, code, failure, step, lines=(line,))
    log = f"see its log: clusterddp logs {run.shown} --rank {failure.rank}"
    return End(requeue.FAILED, code, failure, step, lines=(failure.describe(), log))


def _what_was_saved(run: RunDir, left: Mapping[str, Any], *, paused: bool, unwritable: bool) -> str:
    """A clause on what the next start finds. left: the ranks' last word, empty without one."""
    if not _trains(run):
        # Nobody knows what a command saves, only what its exit code asks for.
        return f"the {_ASKED_AGAIN if paused else 'command did not ask to be started again'}"
    step = left.get("step")
    at = f" at step {step}" if step is not None else ""
    if left.get("saved", step) != step:
        return f"the ranks have left{at}; {_last_checkpoint(left['saved'])}"
    if unwritable and not left:
        return "the ranks have left and could not record how"
    return f"the ranks have saved and left{at}" if paused or left else "no rank saved at the end"


def _vanished(outcomes: Sequence[Outcome]) -> Failure | None:
    """The first rank that was killed with its parent, if one was, although srun exits with 0.

    It does when it was told to end itself (TERM), and kills the tasks.
    """
    return next((Failure.of(outcome) for outcome in outcomes if outcome.ended is None), None)


def _has_left_unrecorded(attempt: Attempt, outcomes: Sequence[Outcome]) -> bool:
    """Return whether ranks without a record have left as asked, as srun reports no failure.

    Of a command that holds only where it was asked to stop: it may as well be done.
    """
    silent = not any(outcome.exit_code is not None for outcome in outcomes)
    return silent and (_trains(attempt.run) or attempt.asked_to_stop() is not None)


def _last_checkpoint(step: int | None) -> str:
    return (
        "there is no checkpoint yet" if step is None else f"their last checkpoint is of step {step}"
    )


def _is_aftershock(attempt: Attempt, failure: Failure) -> bool:
    """Whether Slurm has ended this start's step in place of the one before it.

    Seen on 22.05: a node that is lost and soon back gets the end of its former step late, and the
    new step has the same number.
    """
    before = [s for s in starts_since_submission(attempt.run) if s.attempt < attempt.number]
    if failure.exit_code != 128 + signal.SIGKILL or not before or before[-1].cause:
        return False
    log = of_attempt(attempt.run.path / failure.log, attempt.number)
    return bool(_STEP_ENDED.search(log))


def _slurms_word(run: RunDir, job_id: str, restart: int) -> Ending:
    said = [e for e in run.read_events() if str(e.get("job_id", "")) == job_id]
    kinds = [e["event"] for e in said if e.get("event") in ("cancelled", "cancel_failed")]
    if kinds[-1:] == ["cancelled"]:
        return Ending.CANCELLED  # `clusterddp cancel` asked for it
    if any(e.get("event") == "time_limit" for e in said):
        return Ending.TIME_LIMIT  # the controller of a rehearsal says so
    if is_rehearsal(os.environ):
        return Ending.NONE
    return ending(own_name(os.environ, job_id), restart)


def _stop_asked(attempt: Attempt, job_id: str) -> bool:
    """Whether a person asked the run to stop, also where its ranks could not see it any more."""
    in_time = attempt.asked_to_stop() == "stop"
    return in_time or requeue.withdrawn(attempt.run.read_events(), job_id) == requeue.STOPPED


def _show_last_words(attempt: Attempt, failure: Failure) -> None:
    """The end of the failing rank's log, so that its own words stand beside the verdict."""
    lines = of_attempt(attempt.run.path / failure.log, attempt.number).splitlines()
    if lines:
        say(f"--- last lines of {failure.log}:")
        say("\n".join(lines[-_LAST_LINES:]))


def _job_code(srun_code: int, failure: Failure | None) -> int:
    """The first failing rank's own code, rather than 143 of those that were ended for it."""
    if failure and failure.exit_code:
        return failure.exit_code
    return srun_code or (EXIT_FAILED if failure else 0)


def _log_of(run: RunDir, job_id: str) -> str:
    """What the job log says since this job, or its latest restart, has started."""
    try:
        with run.job_log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _LOG_TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text.rpartition(f", job {job_id} on ")[2] if job_id else text


def _trains(run: RunDir) -> bool:
    try:
        return run.load_spec().train is not None
    except RequestError:
        return run.metrics.exists()


def _achieved(run: RunDir) -> str:
    """One line of the report; a person's own command leaves none."""
    report: dict[str, Any] | None = read_json(run.report)
    if report is None:
        return "done: every task ended with exit code 0"
    try:
        hosts = len(report["hosts"])
        return (
            f"done: test accuracy {report['accuracy']:.2%}, test loss {report['loss']:.4f}; "
            f"{report['train_seconds']:.1f} s of training ({report['total_seconds']:.1f} s in "
            f"all), {report['images_per_second']:,.0f} images/s on {report['world_size']} "
            f"{'rank' if report['world_size'] == 1 else 'ranks'} of {hosts} "
            f"{'host' if hosts == 1 else 'hosts'}; {run.report}"
        )
    except (KeyError, TypeError, ValueError):
        return f"done; see {run.report}"

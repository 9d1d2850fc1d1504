"""Faults that ask a run to stop: signals, time limits, preemption, requeue, cancel."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial

from clusterddp.files import read_json
from tests.on_slurm.campaign.fault import ENDS, UNHURRIED, fault
from tests.on_slurm.campaign.run import Run, Trial, slurm

# A partition of lower priority whose jobs get no time to leave.
WITHOUT_GRACE = "Nodes=ALL State=UP DefaultTime=10 MaxTime=7-00:00:00 Default=YES PriorityTier=1"


def more_time(run: Run) -> None:
    """Give the job a long limit while it waits for its next start."""
    run.wait(lambda: any(job.endswith(" PENDING") for job in run.queued()), "the job in the queue")
    slurm(run.trial, "scontrol", "update", f"jobid={run.job_id}", "timelimit=10")


def saved_when_told(run: Run, struck_step: int) -> None:
    """The ranks saved at the step at which they were told, rather than fell back to an older."""
    step = run.attempts[1].read_record().step
    if step < struck_step:
        raise run.differs(f"it went on from step {step}, but was told to stop at {struck_step}")


@fault("signal-before-limit", needs=("four-one-bucket",))
def signal_before_limit(trial: Trial) -> str:
    run = trial.start("--time", "1", "--signal", "B:USR1@40", config="four-one-bucket", pace=0.25)
    run.wait_said("got SIGUSR1")
    struck = run.struck()
    more_time(run)
    seen = run.check_same(struck, causes=["signal", "done"])
    saved_when_told(run, struck.step)
    return seen


def _signal_to_script(trial: Trial, config: str) -> str:
    run = trial.start_held(60, config=config, until_told=True)
    struck = run.struck()
    slurm(trial, "scancel", "--batch", "--signal=USR1", run.job_id)
    run.wait_said("got SIGUSR1")
    run.wait_attempt(2)
    seen = run.check_same(struck, causes=["signal", "done"])
    saved_when_told(run, struck.step)
    return seen


@fault("signal-four-ranks", needs=("four-one-bucket",), quick=True)
def signal_four_ranks(trial: Trial) -> str:
    return _signal_to_script(trial, "four-one-bucket")


@fault("signal-four-ranks-buckets", needs=("four-buckets",), quick=True)
def signal_four_ranks_buckets(trial: Trial) -> str:
    return _signal_to_script(trial, "four-buckets")


@fault("limit-without-signal")
def limit_without_signal(trial: Trial) -> str:
    """The run knows the limit from squeue and stops by its own clock."""
    run = trial.start("--time", "1", "--signal", "none", pace=0.3)
    run.wait(lambda: run.attempts and run.attempts[0].end.exists(), "a stop by its own clock")
    reason = (read_json(run.attempts[0].end) or {}).get("reason")
    if reason != "time limit":
        raise run.differs(f"it stopped for {reason!r}")
    struck = run.struck()
    more_time(run)
    seen = run.check_same(struck)
    saved_when_told(run, struck.step)
    return seen


@fault("limit-that-nobody-knows")
def limit_that_nobody_knows(trial: Trial) -> str:
    """Without squeue the ranks cannot know the limit: all they get is its TERM."""
    prefix = ["--wrapper", "/usr/bin/env PATH=/nonexistent"]
    run = trial.start("--time", "1", "--signal", "none", *prefix, pace=0.5)
    run.wait_said("got SIGTERM", 120)
    struck = run.struck()
    more_time(run)
    seen = run.check_same(struck, causes=["time limit", "done"], seconds=240)
    saved_when_told(run, struck.step)
    return seen


def _preempt(trial: Trial) -> tuple[Run, str]:
    run = trial.start_held(60, until_told=True)
    struck = run.struck()
    wrap = ["--parsable", "--wrap", "true", "--output", "/dev/null"]
    high = slurm(trial, "sbatch", "-p", "high", "-N2", "--exclusive", *wrap).stdout.strip()
    run.wait(lambda: trial.cluster.job_state(high) == "COMPLETED", "the job that preempts")
    seen = run.check_same(struck)
    if run.causes[0] not in ("preempted", "requeued"):
        raise run.differs("it was not preempted")
    if run.events("not_started"):
        raise run.differs("it was started once more when it was done")
    return run, seen


@fault("preempt-with-grace", conf=UNHURRIED, quick=True)
def preempt_with_grace(trial: Trial) -> str:
    run, seen = _preempt(trial)
    saved_when_told(run, 60)
    return seen


@fault("preempt-without-grace", conf={"PartitionName=main": WITHOUT_GRACE})
def preempt_without_grace(trial: Trial) -> str:
    return _preempt(trial)[1]


@fault("preempt-cancels-with-grace", conf={"PreemptMode": "CANCEL"})
def preempt_cancels_with_grace(trial: Trial) -> str:
    """PreemptMode=CANCEL, but the ranks leave within the grace: the script is quicker."""
    run, seen = _preempt(trial)
    saved_when_told(run, 60)
    return seen


CANCELS = {"PreemptMode": "CANCEL", "PartitionName=main": WITHOUT_GRACE}


@fault("preempt-cancels-without-grace", conf=CANCELS)
def preempt_cancels_without_grace(trial: Trial) -> str:
    """PreemptMode=CANCEL voids --requeue."""
    return _preempt(trial)[1]


@fault("requeue-from-outside", quick=True)
def requeue_from_outside(trial: Trial) -> str:
    run = trial.start_held(60, until_told=True)
    struck = run.struck()
    slurm(trial, "scontrol", "requeue", run.job_id)
    run.wait_attempt(2)
    return run.check_same(struck, causes=["requeued", "done"])


@fault("scancel", ENDS, quick=True)
def scancel(trial: Trial) -> str:
    run = trial.start_held(60, "--retries", "3", until_told=True)
    slurm(trial, "scancel", run.job_id)
    seen = run.check_failed("cancelled", states=("cancelled",), usable=60)
    if len(run.attempts) != 1:
        raise run.differs("it was started again")
    return seen


def _told_to_ranks(trial: Trial, tell: Callable[[Run], object]) -> str:
    run = trial.start_held(60, until_told=True)
    struck = run.struck()
    tell(run)
    run.wait_attempt(2)
    seen = run.check_same(struck, causes=["signal", "done"])
    saved_when_told(run, struck.step)
    return seen


def _twice(trial: Trial, *signal_options: str) -> str:
    tell = partial(slurm, trial, "scancel", *signal_options)
    return _told_to_ranks(trial, lambda run: [tell(run.job_id) for _ in range(2)])


@fault("term-twice")
def term_twice(trial: Trial) -> str:
    return _twice(trial, "--signal=TERM")


@fault("usr1-twice")
def usr1_twice(trial: Trial) -> str:
    return _twice(trial, "--full", "--signal=USR1")


@fault("usr1-to-one-rank")
def usr1_to_one_rank(trial: Trial) -> str:
    return _told_to_ranks(trial, lambda run: run.kill(1, signal.SIGUSR1))


def _usr1_during_imports(trial: Trial, *whom: str) -> str:
    trial.want("import")
    run = trial.start()
    trial.held("import", 2)
    struck = run.struck()
    slurm(trial, "scancel", *whom, "--signal=USR1", run.job_id)
    trial.release("import")
    run.wait_attempt(2)
    return run.check_same(struck, causes=["signal", "done"])


@fault("usr1-during-imports")
def usr1_during_imports(trial: Trial) -> str:
    return _usr1_during_imports(trial)


@fault("usr1-to-script-during-imports")
def usr1_to_script_during_imports(trial: Trial) -> str:
    return _usr1_during_imports(trial, "--batch")


@fault("usr1-before-the-batch-controller")
def usr1_before_the_batch_controller(trial: Trial) -> str:
    """The interpreter of the batch script is slow to start: the script keeps the signal for it."""
    slow, reached, on = (trial.folder / name for name in ("python", "reached", "on"))
    wait = f'[ -z "$SLURM_JOB_ID" ] || {{ : >{reached}; until [ -e {on} ]; do sleep 0.1; done; }}'
    slow.write_text(f'#!/bin/bash\n{wait}\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    run = trial.start("--controller-python", str(slow))
    run.wait(reached.exists, "the interpreter")
    slurm(trial, "scancel", "--batch", "--signal=USR1", run.job_id)
    on.touch()
    run.wait_attempt(2)
    return run.check_same(causes=["signal", "done"])


@fault("usr1-before-python")
def usr1_before_python(trial: Trial) -> str:
    """What stands before the task, a container's start say, dies of it."""
    here = trial.folder / "prefixed"
    program = f'[ -e {here} ] || {{ : >{here}; sleep 60; }}; exec "$@"'
    run = trial.start("--wrapper", f"bash -c '{program}' bash")
    run.wait(here.exists, "the tasks' prefix")
    struck = run.struck()
    slurm(trial, "scancel", "--signal=USR1", run.job_id)
    run.wait_attempt(2)
    return run.check_same(struck, causes=["signal", "done"])


@fault("usr1-during-a-save")
def usr1_during_a_save(trial: Trial) -> str:
    run = trial.start()
    run.wait_step(45)
    trial.want("save")
    trial.held("save", 1)
    struck = run.struck()
    slurm(trial, "scancel", "--signal=USR1", run.job_id)
    trial.release("save")
    run.wait_attempt(2)
    seen = run.check_same(struck, causes=["signal", "done"])
    saved_when_told(run, struck.step)
    return seen


@fault("deaf-to-term", conf={})
def deaf_to_term(trial: Trial) -> str:
    """A rank that TERM does not reach: killed after KillWait, the run falls back."""
    run = trial.start()
    run.wait_step(60)
    pid = run.kill(1, signal.SIGSTOP)
    run.wait_said("is stopped (SIGSTOP)")
    struck = run.struck()
    slurm(trial, "scontrol", "requeue", run.job_id)
    run.gone(pid)
    run.wait_attempt(2)
    return run.check_same(struck)


@fault("wrapper-deaf-to-term")
def wrapper_deaf_to_term(trial: Trial) -> str:
    """A wrapper in front of the task that ignores TERM and outlives it."""
    prefix = 'bash -c \'trap "" TERM; "$@"; exit $?\' bash'
    run = trial.start_held(60, "--wrapper", prefix, until_told=True)
    struck = run.struck()
    slurm(trial, "scancel", "--signal=TERM", run.job_id)
    run.wait_attempt(2)
    return run.check_same(struck, causes=["signal", "done"])


@fault("requeue-cap", ENDS, quick=True)
def requeue_cap(trial: Trial) -> str:
    run = trial.start_held(50, "--max-requeues", "1", until_told=True)
    slurm(trial, "scancel", "--batch", "--signal=USR1", run.job_id)
    run.wait(lambda: run.causes, "the end of attempt 1")
    trial.want("step-200", until_told=True)
    trial.held("step-200", 2)
    slurm(trial, "scancel", "--batch", "--signal=USR1", run.job_id)
    seen = run.check_failed(
        "--max-requeues 1", "clusterddp resume", states=("stopped",), usable=100
    )
    if len(run.attempts) != 2:
        raise run.differs(f"{len(run.attempts)} attempts")
    return seen


@fault("requeue-cap-from-outside", ENDS)
def requeue_cap_from_outside(trial: Trial) -> str:
    run = trial.start("--max-requeues", "1")
    for attempt in (1, 2):
        run.wait_attempt(attempt)
        run.wait_step(50 * attempt)
        slurm(trial, "scontrol", "requeue", run.job_id)
    seen = run.check_failed("--max-requeues 1", "clusterddp resume", usable=80)
    if len(run.attempts) != 2:
        raise run.differs(f"{len(run.attempts)} attempts")
    return seen

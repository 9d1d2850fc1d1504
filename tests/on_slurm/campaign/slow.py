"""Faults of a run whose state takes 720 MB, on a disk that writes 50 MB per second.

The newest snapshot in node memory takes some 15 s to become a checkpoint. Slurm kills what saves it
KillWait after its own signal.
"""

from __future__ import annotations

import time

from clusterddp.run.run_dir import newest_checkpoint
from tests.on_slurm.campaign.fault import UNHURRIED, fault
from tests.on_slurm.campaign.memory import newest_snapshot
from tests.on_slurm.campaign.run import Run, Trial, slurm

NEEDS = ("large",)
LONG, SHORT = UNHURRIED | {"KillWait": "60"}, UNHURRIED | {"KillWait": "10"}
"""By default 30 s, in which an idle machine saves the 720 MB."""
FIRST_SAVE = 2
"""Step of the program's only checkpoint before its end."""
MARGIN = 3
"""Steps from the snapshot to the strike."""
AT_LEAST_SECONDS = 10.0
"""What less than this takes is no proof of a slow disk."""


def _start(trial: Trial) -> tuple[Run, int, str]:
    """Start a run, and return it with the step of a snapshot, held some steps after it.

    Its checkpoint of step 2 is on the disk by then.
    """
    (trial.holds / "rare-saves").touch()
    run = trial.start("--retries", "3", config="large", pace=0.1)
    run.wait_attempt(1)
    step = run.wait(lambda: newest_snapshot(run)[0], "a snapshot")
    trial.want(moment := f"step-{step + MARGIN}")
    trial.held(moment, run.world_size)
    run.wait(lambda: _saved(run) == FIRST_SAVE, f"the checkpoint of step {FIRST_SAVE}")
    return run, newest_snapshot(run)[0], moment


def _saved(run: Run) -> int:
    """Return the step of the first attempt's newest checkpoint; 0 for none."""
    return (newest_checkpoint(run.attempts[0].checkpoints) or (0,))[0]


def _await_saved(run: Run, step: int) -> str:
    """Wait for a checkpoint of at least this step; returns the seconds and what squeue said."""
    began, states = time.monotonic(), list[str]()

    def is_saved() -> bool:
        if (state := run.trial.cluster.job_state(run.job_id)) not in states:
            states.append(state)
        return _saved(run) >= step

    run.wait(is_saved, f"a checkpoint of step {step}")
    seconds = time.monotonic() - began
    if seconds < AT_LEAST_SECONDS:
        raise run.differs(f"it was saved in {seconds:.1f} s: the disk was not slow")
    return f"saved in {seconds:.0f} s, {' and '.join(states)} meanwhile"


def _resume(run: Run, step: int) -> str:
    """Resume a cancelled run, and judge from where and how it went on."""
    run.wait_over()
    if (state := run.status()["state"]) != "cancelled":
        raise run.differs(f"status says {state}, expected cancelled")
    done = run.trial.clusterddp("resume", run.name)
    if done.returncode:
        raise run.differs(f"resume: exit {done.returncode}: {done.stderr}")
    return _judge(run, step)


def _judge(run: Run, step: int) -> str:
    """The second attempt went on from a step, and nothing unfinished is left."""
    seen = run.check_same()
    if (resumed := run.attempts[1].read_record().step or 0) != step:
        raise run.differs(f"it went on from step {resumed}, expected {step}")
    if left := [str(path) for path in run.dir.path.rglob(".*.*")]:
        raise run.differs(f"files are left: {left}")
    return seen


@fault("memory-slow-disk", conf=UNHURRIED, needs=NEEDS, disk="slow")
def killed(trial: Trial) -> str:
    run, step, moment = _start(trial)
    run.gone(run.kill(1))
    trial.release(moment)
    how = _await_saved(run, step)
    return f"{how}; {_judge(run, step)}"


@fault("memory-slow-disk-cancelled", conf=LONG, needs=NEEDS, disk="slow")
def cancelled(trial: Trial) -> str:
    """The ranks save their own checkpoint, and no snapshot is saved at the same time."""
    run, step, moment = _start(trial)
    slurm(trial, "scancel", run.job_id)
    trial.release(moment)
    how = _await_saved(run, step + MARGIN)
    if "from the memory of this node" in run.rank_logs:
        raise run.differs("a snapshot was saved beside the ranks' own checkpoint")
    return f"{how}; {_resume(run, step + MARGIN)}"


@fault("memory-slow-disk-cancelled-deaf", conf=LONG, needs=NEEDS, disk="slow")
def cancelled_deaf(trial: Trial) -> str:
    """The ranks do not look at the request until they are killed."""
    run, step, moment = _start(trial)
    slurm(trial, "scancel", run.job_id)
    how = _await_saved(run, step)
    run.wait_over()
    trial.release(moment)
    return f"{how}; {_resume(run, step)}"


@fault("memory-slow-disk-killed-first", conf=SHORT, needs=NEEDS, disk="slow")
def killed_first(trial: Trial) -> str:
    """KillWait ends before the snapshot is saved: it is lost, and no draft stays."""
    run, _, moment = _start(trial)
    slurm(trial, "scancel", run.job_id)
    draft = ".step-*.pt.*"
    run.wait(lambda: list(run.attempts[0].checkpoints.glob(draft)), "a draft")
    run.wait_over()
    trial.release(moment)
    if _saved(run) != FIRST_SAVE:
        raise run.differs(f"step {_saved(run)} was saved: KillWait did not end first")
    left = len(list(run.attempts[0].checkpoints.glob(draft)))
    return f"{left} drafts after scancel; {_resume(run, FIRST_SAVE)}"

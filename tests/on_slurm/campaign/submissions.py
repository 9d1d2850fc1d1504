"""Faults of who submits: broken scripts, a submitter that goes, one run submitted twice."""

from __future__ import annotations

import os
import signal
from subprocess import DEVNULL

from tests.on_slurm.campaign.fault import ENDS, fault
from tests.on_slurm.campaign.run import CLUSTERDDP, COMMON, CONFIGURATIONS, Run, Trial
from tests.on_slurm.cluster import Process


def _broken(trial: Trial, *options: str) -> str:
    run = trial.start(*options, "--retries", "5")
    seen = run.check_failed("clusterddp")
    if not 1 <= len(run.attempts) <= 2:
        raise run.differs(f"{len(run.attempts)} attempts")
    return f"{seen}; {len(run.attempts)} attempts"


@fault("broken-script", ENDS, quick=True)
def broken_script(trial: Trial) -> str:
    """Broken from the start: no loop of restarts."""
    return _broken(trial, "--setup", "false")


@fault("broken-python", ENDS)
def broken_python(trial: Trial) -> str:
    """Every task fails at once, in every start."""
    return _broken(trial, "--wrapper", "/bin/false")


def _submitted(trial: Trial, *more: str) -> tuple[Run, Process]:
    """A run at step 60, with the `submit --wait` that waits for it."""
    options = [*more, *CONFIGURATIONS["two"], *COMMON, *trial.data["two"], "--wait"]
    submitter = trial.cluster.popen(
        [*CLUSTERDDP, "submit", "--run-name", "run", *options],
        cwd=trial.folder, env=trial.env, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL,
    )  # fmt: skip
    run = trial.adopt("run")
    run.wait_step(60)
    return run, submitter


@fault("submitter-gone")
def submitter_gone(trial: Trial) -> str:
    """The login shell and its `submit --wait` are killed while the job runs."""
    run, submitter = _submitted(trial)
    struck = run.struck()
    submitter.kill_group()
    if submitter.poll() is None:
        raise run.differs("the submitter lives")
    return run.check_same(struck, causes=["done"])


@fault("two-jobs-of-one-run", quick=True)
def two_jobs_of_one_run(trial: Trial) -> str:
    """The script is submitted once more by hand while its first job trains."""
    run = trial.start_held(60)
    struck = run.struck()
    script = str(run.dir.script)
    second = slurm_in(trial, "sbatch", "--parsable", script)
    run.wait_said("waiting up to")
    trial.release("step-60")
    seen = run.check_same(struck)
    first = run.attempts[0].end.exists()
    state = trial.cluster.job_state(second)
    if not first or state != "COMPLETED":
        raise run.differs(f"the second job ended as {state}, the first at its end: {first}")
    return seen


def slurm_in(trial: Trial, *argv: str) -> str:
    done = trial.cluster.run(argv, cwd=trial.folder, env=trial.env, check=True)
    return done.stdout.strip()


@fault("job-and-submitter-gone")
def job_and_submitter_gone(trial: Trial) -> str:
    """The same, and then a rank goes as well: the run needs nobody outside to start again."""
    run, submitter = _submitted(trial, "--retries", "1")
    struck = run.struck()
    os.killpg(submitter.pid, signal.SIGHUP)
    submitter.kill_group()
    run.gone(run.kill(1))
    run.wait_attempt(2)
    return run.check_same(struck, causes=["failed", "done"])

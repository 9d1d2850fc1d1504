"""Faults of processes: ranks killed, stopped and let go on; srun killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from clusterddp.run.outcome import read_outcome
from tests.on_slurm.campaign.fault import ENDS, fault
from tests.on_slurm.campaign.run import Differs, Run, Struck, Trial, slurm


def named(run: Run, rank: int) -> None:
    """The first failure on record is the rank that was struck."""
    failure = run.events("ended")[0].get("first_failure") or {}
    if failure.get("rank") != rank or f"rank {rank} on " not in run.log:
        raise run.differs(f"the first failure is {failure}, expected rank {rank}")


def _kill_in_the_middle(trial: Trial, config: str, rank: int) -> str:
    run = trial.start_held(60, "--retries", "1", config=config)
    struck = run.struck()
    run.gone(run.kill(rank))
    trial.release("step-60")
    run.wait_attempt(2)
    seen = run.check_same(struck, causes=["failed", "done"])
    named(run, rank)
    return seen


def _kill_at(trial: Trial, moment: str, rank: int, from_step: int) -> str:
    """Kills a rank while all wait at a moment of the training."""
    trial.want(moment)
    run = trial.start("--retries", "1")
    trial.held(moment, 2)
    struck = run.struck()
    run.gone(run.kill(rank))
    trial.release(moment)
    run.wait_attempt(2)
    seen = run.check_same(struck, causes=["failed", "done"])
    named(run, rank)
    step = run.attempts[1].read_record().step
    if step != from_step:
        raise run.differs(f"it went on from step {step}, expected {from_step}")
    return seen


def _kill_during_a_save(trial: Trial, rank: int) -> str:
    """Kills a rank while rank 0 writes the checkpoint of step 80."""
    run = trial.start("--retries", "1")
    run.wait_step(45)
    trial.want("save")
    trial.held("save", 1)
    struck = run.struck()
    run.gone(run.kill(rank))
    trial.release("save")
    run.wait_attempt(2)
    seen = run.check_same(struck, causes=["failed", "done"])
    named(run, rank)
    return seen


def _kill_after_report(trial: Trial, rank: int) -> str:
    """Kills a rank when the report is written: nothing is left to train."""
    trial.want("last")
    run = trial.start("--retries", "1")
    trial.held("last", 1)
    run.gone(run.kill(rank))
    trial.release("last")
    return run.check_same()


@fault("rank-of-three-killed", conf={}, hosts=3, needs=("three",))
def rank_of_three_killed(trial: Trial) -> str:
    """Over three ranks and more a sum depends on the layout of DDP's buckets."""
    return _kill_in_the_middle(trial, "three", 1)


def _rows() -> dict[str, tuple[Callable[[Trial], str], str, bool]]:
    def middle(config: str, rank: int) -> Callable[[Trial], str]:
        return lambda trial: _kill_in_the_middle(trial, config, rank)

    def at(moment: str, rank: int, from_step: int) -> Callable[[Trial], str]:
        return lambda trial: _kill_at(trial, moment, rank, from_step)

    def saving(rank: int) -> Callable[[Trial], str]:
        return lambda trial: _kill_during_a_save(trial, rank)

    def reported(rank: int) -> Callable[[Trial], str]:
        return lambda trial: _kill_after_report(trial, rank)

    return {
        "kill-first-step-rank-0": (at("step-1", 0, 0), "two", False),
        "kill-first-step-rank-1": (at("step-1", 1, 0), "two", False),
        "kill-middle-rank-0": (middle("two", 0), "two", False),
        "kill-middle-rank-1": (middle("two", 1), "two", True),
        "kill-middle-four-ranks": (middle("four-one-bucket", 2), "four-one-bucket", False),
        "kill-middle-four-ranks-buckets": (middle("four-buckets", 3), "four-buckets", False),
        "kill-during-a-save-rank-0": (saving(0), "two", False),
        "kill-during-a-save-rank-1": (saving(1), "two", False),
        "kill-after-last-step-rank-0": (at("step-240", 0, 200), "two", False),
        "kill-after-last-step-rank-1": (at("step-240", 1, 200), "two", False),
        "kill-after-report-rank-0": (reported(0), "two", False),
        "kill-after-report-rank-1": (reported(1), "two", False),
    }


for _name, (_strike, _config, _quick) in _rows().items():
    fault(_name, needs=(_config,), quick=_quick)(_strike)


def _struck_srun(trial: Trial, number: int) -> tuple[Run, Struck]:
    """Strike the srun of a training, which has a process beside it that KILL must meet as well."""
    run = trial.start("--retries", "1", "--nodelist", "h[01-02]")
    run.wait_step(60)
    struck = run.struck()
    sruns = [pid for pid in run.processes("h01", "srun ") if _is_srun(pid)]
    if not sruns:
        raise run.differs("there is no srun on h01")
    for pid in sruns if number == signal.SIGKILL else sruns[:1]:
        with contextlib.suppress(ProcessLookupError):  # the other may have taken it along
            run.signal(pid, number)
    run.gone(sruns[0])
    return run, struck


def _is_srun(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == "srun"


@fault("srun-killed")
def srun_killed(trial: Trial) -> str:
    run, struck = _struck_srun(trial, signal.SIGKILL)
    run.wait_attempt(2)
    return run.check_same(struck, causes=["failed", "done"])


@fault("srun-terminated")
def srun_terminated(trial: Trial) -> str:
    """TERM to srun: it ends the tasks at once and exits with 0, as if all had been done.

    So does `scancel JOB.STEP`, after which nothing starts by itself; a person's resume goes on.
    """
    run, struck = _struck_srun(trial, signal.SIGTERM)
    run.check_failed("clusterddp resume", states=("cancelled",), usable=40)
    done = trial.clusterddp("resume", "run")
    if done.returncode:
        raise run.differs(f"resume: exit {done.returncode}: {done.stderr}")
    run.wait_attempt(2)
    return run.check_same(struck, causes=["cancelled", "done"])


def _batch_controller(trial: Trial, kill: Callable[[int], object]) -> str:
    """No verdict, no tear-down, and no task that trains on; the next start resumes."""
    teardown = ["--teardown", f"touch {trial.folder}/torn-down"]
    run = trial.start_held(60, "--nodelist", "h[01-02]", *teardown, until_told=True)
    struck, job_id = run.struck(), run.job_id
    tasks = [run.task(rank) for rank in (0, 1)]
    [batch] = run.processes("h01", f" batch {run.dir.path} ")
    kill(batch)
    for task in (batch, *tasks):
        run.gone(task)
    trial.release("step-60")  # where they were killed without a word
    run.wait_over()
    shown = slurm(trial, "scontrol", "show", "job", job_id).stdout
    if "ExitCode=0:9" not in shown:
        raise run.differs(shown)
    if not (trial.folder / f"slurm-{job_id}.out").exists():
        raise run.differs("Slurm's own file is gone")
    if (trial.folder / "torn-down").exists():
        raise run.differs("its tear-down lines have run")
    state = run.status()["state"]
    if state != "failed":
        raise run.differs(f"status says {state}")
    again = trial.clusterddp("resume", "run")
    if again.returncode != 0:
        raise run.differs(f"resume: {again.stderr}")
    return run.check_same(struck, causes=["done"])


@fault("batch-controller-killed", quick=True)
def batch_controller_killed(trial: Trial) -> str:
    return _batch_controller(trial, lambda pid: os.kill(pid, signal.SIGKILL))


@fault("batch-controller-out-of-memory")
def batch_controller_out_of_memory(trial: Trial) -> str:
    """The kernel's own choice, as the largest of a control group that has used its memory up."""
    return _batch_controller(trial, use_memory_up_beside)


MEMORY = Path("/sys/fs/cgroup/memory")  # of cgroups v1; v2 has one tree for all
LITTLE = {"memory.swappiness": "0", "memory.limit_in_bytes": "8M",
          "memory.swap.max": "0", "memory.max": "8M"}  # fmt: skip
"""Memory of a group, less than a Python has, in the words of either version; no swap."""


def use_memory_up_beside(pid: int) -> None:
    group = Path(
        tempfile.mkdtemp(prefix="campaign-", dir=MEMORY if MEMORY.is_dir() else MEMORY.parent)
    )
    members = group / "cgroup.procs"
    try:
        written = [
            (group / name).write_text(LITTLE[name]) for name in LITTLE if (group / name).exists()
        ]
        if not written:
            raise Differs(f"{group} limits no memory")
        members.write_text(str(pid))
        eater = 'echo $$ >"$1" && exec tail /dev/zero'  # it is killed next
        subprocess.run(["sh", "-c", eater, "sh", members], check=False)
        while members.read_text():
            time.sleep(0.05)
    finally:
        group.rmdir()


def _kill_above(trial: Trial, words: str, *options: str) -> str:
    """Kills what stands above rank 1; rank 0, ended for it, takes that for a request to stop."""
    options = ("--retries", "1", "--nodelist", "h[01-02]", *options)
    run = trial.start_held(60, *options, until_told=True)
    struck = run.struck()
    [above] = run.wait(lambda: run.processes("h02", words), words)
    run.signal(above, signal.SIGKILL)
    run.gone(above)
    run.wait(lambda: run.causes, "the verdict")
    trial.release("step-60")  # where they were ended without a word
    run.wait_attempt(2)
    seen = run.check_same(struck, causes=["failed", "done"])
    named(run, 1)
    return seen


@fault("agent-killed", quick=True)
def agent_killed(trial: Trial) -> str:
    return _kill_above(trial, "torch.distributed.run", "--template", "torchrun.sbatch.j2")


@fault("submitits-process-killed")
def submitits_process_killed(trial: Trial) -> str:
    return _kill_above(trial, "submitit.core._submit", "--launcher", "submitit")


@fault("wrapper-killed")
def wrapper_killed(trial: Trial) -> str:
    prefix = trial.folder / "prefix"
    prefix.write_text('#!/bin/bash\n"$@"\nexit $?\n')
    prefix.chmod(0o755)
    return _kill_above(trial, str(prefix), "--wrapper", str(prefix))


BOTH = ("--nodelist", "h[01-02]")


def _recorded(run: Run, rank: int) -> bool:
    record = read_outcome(run.attempts[0].outcomes, rank)
    return bool(record and record.ended)


@fault("clocks-apart", quick=True)
def clocks_apart(trial: Trial) -> str:
    """The clock of rank 1's host is five seconds ahead: it is killed first all the same."""
    trial.want("step-100")
    run = trial.start("--retries", "1", *BOTH, CAMPAIGN_CLOCK="h02:5")
    trial.held("step-100", 2)
    struck = run.struck()
    run.kill(1)
    run.wait(lambda: _recorded(run, 1), "the end of rank 1")
    run.kill(0)
    trial.release("step-100")
    run.wait_attempt(2)
    seen = run.check_same(struck, causes=["failed", "done"])
    named(run, 1)
    return seen


@fault("clocks-apart-command", ENDS, needs=())
def clocks_apart_command(trial: Trial) -> str:
    """The same of a command, whose ranks compare no clocks: srun has seen the order."""
    wait = "trap '' TERM; until [ -e go-$RANK ]; do sleep 0.1; done; exit $((3 + RANK))"
    folder = ["--no-snapshot", "--run-name", "run", "--nodes", "2", *BOTH]
    done = trial.clusterddp("submit", *folder, "--", "bash", "-c", wait, CAMPAIGN_CLOCK="h02:5")
    if done.returncode:
        raise Differs(done.stderr)
    run = trial.adopt("run")
    (trial.folder / "go-1").touch()
    run.wait_said("task 1: Exited")
    (trial.folder / "go-0").touch()
    run.wait(lambda: run.causes, "the verdict")
    named(run, 1)
    return run.check_failed("exit code 4")


@fault("two-faults-in-a-row")
def two_faults_in_a_row(trial: Trial) -> str:
    run = trial.start("--retries", "2")
    for attempt, rank in ((1, 1), (2, 0)):
        run.wait_attempt(attempt)
        run.wait_step(50 + 50 * attempt)
        struck = run.struck()
        run.gone(run.kill(rank))
    run.wait_attempt(3)
    return run.check_same(struck, causes=["failed", "failed", "done"])


@fault("fault-in-the-restart")
def fault_in_the_restart(trial: Trial) -> str:
    """The second start is struck before it has trained a step."""
    run = trial.start("--retries", "2")
    run.wait_step(60)
    struck = run.struck()
    trial.want("import")
    run.gone(run.kill(1))
    trial.held("import", 2)
    if len(run.attempts) != 2:
        raise run.differs("the second start has not begun")
    run.gone(run.kill(0))
    trial.release("import")
    run.wait_attempt(3)
    return run.check_same(struck, causes=["failed", "failed", "done"])


def _stop_for_good(trial: Trial, rank: int, *options: str) -> str:
    """SIGSTOP: the others wait in an exchange until the process group's time-out."""
    short = ["--process-group-timeout", "12s", *options]
    run = trial.start_held(60, "--retries", "1", *short)
    struck = run.struck()
    pid = run.kill(rank, signal.SIGSTOP)
    run.wait_said("is stopped (SIGSTOP)")
    trial.release("step-60")
    run.gone(pid)
    run.wait_attempt(2)
    seen = run.check_same(struck, causes=["failed", "done"])
    named(run, rank)
    if "failed first: hung: it did not respond" not in run.log:
        raise run.differs("nobody says that the rank hung")
    return seen


@fault("stopped-for-good", conf={})
def stopped_for_good(trial: Trial) -> str:
    return _stop_for_good(trial, 1, "--hang-timeout", "4s")


@fault("stopped-with-a-time-out-under-the-watchdogs", conf={}, quick=True)
def stopped_with_a_time_out_under_the_watchdogs(trial: Trial) -> str:
    return _stop_for_good(trial, 1)


@fault("stopped-for-seconds")
def stopped_for_seconds(trial: Trial) -> str:
    run = trial.start("--process-group-timeout", "60s", "--hang-timeout", "4s")
    run.wait_step(60)
    pid = run.kill(1, signal.SIGSTOP)
    run.wait_said("is stopped (SIGSTOP)")
    struck = run.struck()
    trial.stopping.wait(6)  # as long as the fault lasts
    if run.step > struck.step + 10:
        raise run.differs("training went on without rank 1")
    run.signal(pid, signal.SIGCONT)
    return run.check_same(struck, causes=["done"])

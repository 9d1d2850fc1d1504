"""A run as a fault sees it: start it, wait until it is somewhere, strike, and judge its end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from clusterddp.files import read_json, read_json_lines
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.outcome import read_outcome
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import FINAL_STATES, ClusterError, SlurmCluster

Answer = TypeVar("Answer")

CLUSTERDDP = [sys.executable, "-m", "clusterddp"]
PATIENCE = 240.0
"""Seconds for anything that waits for an event, on a machine that others use as well."""
STEPS = 240
PACE = 0.02
"""Seconds by which each step is made longer, so that strikes meet training and not its end."""

COMMON = [
    *("--threads", "1", "--max-steps", str(STEPS), "--warmup-steps", "20", "--log-every", "5"),
    *("--save-every", "40steps", "--epochs", "100"),
]
CONFIGURATIONS: dict[str, list[str]] = {
    "one": ["--nodes", "1", "--batch-size", "20"],
    "two": ["--nodes", "2", "--batch-size", "10"],
    "three": ["--nodes", "3", "--batch-size", "8"],
    "four-one-bucket": ["--nodes", "2", "--tasks-per-node", "2", "--batch-size", "8"],
    "four-buckets": [
        *("--nodes", "2", "--tasks-per-node", "2", "--batch-size", "8"),
        *("--bucket-cap-mb", "0.01"),
    ],
}
FRAMEWORKS = {
    "lightning": "train_lightning.py",
    "transformers": "train_transformers.py",
    "accelerate": "train_accelerate.py",
    "iterations": "train_iterations.py",
}
"""By the framework's package the script of `frameworks` that trains on four ranks with it."""
SCRIPTS = {
    **{"loop": "resumable.py", "loop-fsdp": "resumable_fsdp.py", "loop-three": "resumable.py"},
    "large": "train_large.py",
    **FRAMEWORKS,
}
"""Of a configuration the script of examples/ or of `frameworks` that it runs as its COMMAND."""
SCRIPT_STEPS = {"loop": 48, "loop-fsdp": 48, "loop-three": 33, "large": 16}
SCRIPT_STEPS |= dict.fromkeys(FRAMEWORKS, 48)
SCRIPT_PACE = 0.1
EXAMPLES = Path(__file__).parents[3] / "examples"
FRAMEWORK_SCRIPTS = Path(__file__).parents[1] / "frameworks"
REAL_DATA = ("four-buckets",)
"""Those that train the real MNIST where it is at hand; the others have less to load."""


def world_size_of(config: str) -> int:
    """Return the ranks of a configuration."""
    if config.startswith("four") or config in FRAMEWORKS:
        return 4
    return {"one": 1, "three": 3, "loop-three": 3}.get(config, 2)


class Differs(AssertionError):
    """What was seen is not what the row expects."""


class Interrupted(BaseException):
    """The campaign is being ended from outside."""


@dataclass(frozen=True)
class Baseline:
    """An uninterrupted run."""

    weights: str
    wall_seconds: float
    """From its submission to its recorded end, at the usual pace."""


@dataclass(frozen=True)
class Struck:
    """When and where a run was struck."""

    step: int
    time: float
    attempt: int


@dataclass
class Place:
    """Where the runs of one fault live, and with what they are submitted."""

    cluster: SlurmCluster
    folder: Path
    package: Path
    """A copy of the package, so that nobody's edits change a campaign under way."""
    data: Mapping[str, Sequence[str]]
    """Of each configuration the options that name its dataset."""
    baselines: Mapping[str, Baseline]
    stopping: threading.Event

    @property
    def env(self) -> dict[str, str | None]:
        hooks = Path(__file__).with_name("hooks")
        return {
            "PYTHONPATH": f"{hooks}:{self.package}",
            "CAMPAIGN_HOLDS": str(self.holds),
            "CAMPAIGN_PACE": str(PACE),
        }

    @property
    def holds(self) -> Path:
        path = self.folder / "holds"
        path.mkdir(exist_ok=True)
        return path

    def clusterddp(self, *args: str, timeout: float = 120, **env: str) -> Any:
        """Types a command on the login host."""
        argv = [*CLUSTERDDP, *args]
        return self.cluster.run(argv, cwd=self.folder, env={**self.env, **env}, timeout=timeout)

    def wait(
        self, probe: Callable[[], Answer | None], what: str, seconds: float = PATIENCE
    ) -> Answer:
        """Polls until the probe answers; raises Differs after `seconds`."""
        deadline = time.monotonic() + seconds
        while not (answer := probe()):
            if self.stopping.is_set():
                raise Interrupted
            if time.monotonic() > deadline:
                raise Differs(f"not within {seconds:g} s: {what}")
            time.sleep(0.05)
        return answer


class Trial(Place):
    """One fault at work."""

    def __init__(self, place: Place) -> None:
        super().__init__(**place.__dict__)
        self.lost_seconds: float | None = None
        self.runs: list[Run] = []

    def start(
        self, *options: str, config: str = "two", pace: float = PACE, name: str = "run", **env: str
    ) -> Run:
        """Submits a run and returns at once."""
        argv = ["submit", "--run-name", name, "--json"]
        if config in SCRIPTS:
            for file in (*EXAMPLES.glob("*.py"), *FRAMEWORK_SCRIPTS.glob("*.py")):
                shutil.copy(file, self.folder)
            # Of the package the COMMAND sees what its run carries, and no other.
            only = f"PYTHONPATH={Path(__file__).with_name('hooks')}"
            argv += [
                "--nodes", str(min(world_size_of(config), 3) if config not in FRAMEWORKS else 2),
                "--tasks-per-node", "2" if config in FRAMEWORKS else "1",
                "--requeue", "--env", only, "--env", "OMP_NUM_THREADS=1",
            ]  # fmt: skip
            argv += [*options, "--", sys.executable, SCRIPTS[config]]
        else:
            argv += [*CONFIGURATIONS[config], *COMMON, *self.data[config], *options]
        done = self.clusterddp(*argv, CAMPAIGN_PACE=str(pace), **env)
        if done.returncode != 0:
            raise Differs(f"submit: exit {done.returncode}: {done.stdout}{done.stderr}")
        return self.adopt(name, config, pace)

    def adopt(self, name: str, config: str = "two", pace: float = PACE) -> Run:
        """A run that was submitted already."""
        run = Run(self, name, config, pace)
        self.runs.append(run)
        return run

    def start_held(self, step: int, *options: str, until_told: bool = False, **more: Any) -> Run:
        """Submits a run, and returns once its ranks wait after a step; see `want`."""
        self.want(f"step-{step}", until_told=until_told)
        run = self.start(*options, **more)
        self.held(f"step-{step}", run.world_size)
        return run

    def want(self, moment: str, *, until_told: bool = False) -> None:
        """Have the tasks wait at a moment; see `hooks`.

        until_told: until the first of them is asked to stop, which may take its time to arrive.
        """
        (self.holds / f"want-{moment}").write_text("until told" if until_told else "")

    def held(self, moment: str, ranks: int, seconds: float = PATIENCE) -> None:
        """Waits until so many ranks wait there."""
        self.wait(
            lambda: len(list(self.holds.glob(f"held-{moment}.*"))) >= ranks,
            f"{ranks} ranks at {moment}",
            seconds,
        )

    def release(self, moment: str) -> None:
        (self.holds / f"want-{moment}").unlink(missing_ok=True)
        for left in self.holds.glob(f"held-{moment}.*"):
            left.unlink(missing_ok=True)


class Run:
    """One run of a trial."""

    def __init__(self, trial: Trial, name: str, config: str, pace: float) -> None:
        self.trial, self.name, self.config, self.pace = trial, name, config, pace
        self.dir = RunDir(trial.folder / "jobs" / name)
        self.world_size = world_size_of(config)

    # -- what it is doing --------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        ids = [str(e["job_id"]) for e in read_events(self.dir) if e.get("job_id")]
        if not ids:
            raise Differs(f"{self.name} has no job")
        return ids[-1]

    @property
    def step(self) -> int:
        """The latest step in metrics.jsonl."""
        return max([line.get("step", 0) for line in read_json_lines(self.dir.metrics)], default=0)

    @property
    def steps(self) -> int:
        """The steps of the whole training."""
        return SCRIPT_STEPS.get(self.config, STEPS)

    def result(self) -> tuple[int, str] | None:
        """Steps and a digest of the weights of a run that is done; None where there are none."""
        if self.config in SCRIPTS:
            weights = self.dir.code / "model.pt"
            if not weights.exists():
                return None
            return self.step, hashlib.sha256(weights.read_bytes()).hexdigest()
        report = read_json(self.dir.report)
        return (report["steps"], report["weights_sha256"]) if report else None

    @property
    def attempts(self) -> list[Attempt]:
        return attempts(self.dir)

    @property
    def log(self) -> str:
        try:
            return self.dir.job_log.read_text(errors="replace")
        except OSError:
            return ""

    @property
    def rank_logs(self) -> str:
        paths = sorted(self.dir.logs.glob("rank-*.log"))
        return "\n".join(path.read_text(errors="replace") for path in paths)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.dir) if event.get("event") == kind]

    @property
    def causes(self) -> list[str]:
        return [str(event.get("cause")) for event in self.events("ended")]

    def queued(self) -> list[str]:
        """Its jobs that Slurm has not finished with, as `ID STATE`."""
        argv = ["squeue", "-h", "-r", "-t", "all", "-n", self.name, "-o", "%A %T %Z"]
        answer = self.trial.cluster.run(argv)
        if answer.returncode != 0:
            raise ClusterError(answer.stderr)
        jobs = [line.split(" ", 2) for line in answer.stdout.splitlines()]
        return [
            f"{job_id} {state}"
            for job_id, state, folder in jobs
            if state not in FINAL_STATES and Path(folder) == self.trial.folder
        ]

    def status(self) -> dict[str, Any]:
        done = self.trial.clusterddp("status", self.name, "--json")
        if done.returncode != 0:
            raise Differs(f"status: exit {done.returncode}: {done.stderr}")
        value: dict[str, Any] = json.loads(done.stdout)
        return value

    # -- waiting -----------------------------------------------------------------------------

    def wait(
        self, probe: Callable[[], Answer | None], what: str, seconds: float = PATIENCE
    ) -> Answer:
        try:
            return self.trial.wait(probe, what, seconds)
        except Differs as error:
            raise self.differs(str(error)) from None

    def wait_step(self, step: int, seconds: float = PATIENCE) -> int:
        """Waits until training has come so far."""
        return self.wait(lambda: self.step >= step and self.step, f"step {step}", seconds)

    def wait_attempt(self, number: int, seconds: float = PATIENCE) -> None:
        """Waits until an attempt's ranks have met."""
        self.wait(Attempt(self.dir, number).read_record, f"attempt {number}", seconds)

    def wait_said(self, words: str, seconds: float = PATIENCE) -> None:
        self.wait(lambda: words in self.log or words in self.rank_logs, f"{words!r}", seconds)

    def wait_over(self, seconds: float = PATIENCE) -> None:
        """Waits until Slurm has nothing of it any more."""
        seen_idle = 0
        asked = 0.0

        def over() -> bool:
            nonlocal seen_idle, asked
            # A job that is done writes so; Slurm, which costs a process, is asked now and then.
            if time.monotonic() - asked < 0.5:
                return False
            asked = time.monotonic()
            try:
                seen_idle = 0 if self.queued() else seen_idle + 1
            except ClusterError:
                seen_idle = 0  # slurmctld is away
            return seen_idle >= 2  # between two starts a job can look ended for a moment

        self.wait(over, f"the end of {self.name}", seconds)

    # -- its processes -----------------------------------------------------------------------

    def task(self, rank: int) -> int:
        """This machine's id of the process that trains as a rank."""
        return self.wait(lambda: self._task(rank), f"a process of rank {rank}")

    def _task(self, rank: int) -> int | None:
        latest = self.attempts[-1:]
        record = read_outcome(latest[0].outcomes, rank) if latest else None
        if record is None or record.ended:
            return None
        for pid in self.trial.cluster.processes(record.host):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            inside = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            if int(inside.split()[-1]) == record.pid:
                return pid
        return None

    def kill(self, rank: int, number: int = signal.SIGKILL) -> int:
        pid = self.task(rank)
        os.kill(pid, number)
        return pid

    @staticmethod
    def signal(pid: int, number: int) -> None:
        os.kill(pid, number)

    def processes(self, host: str, words: str) -> list[int]:
        """This machine's ids of the host's processes of this run's job with such words."""
        found = []
        for pid, line in self.trial.cluster.processes(host).items():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if words in line and f"SLURM_JOB_ID={self.job_id}".encode() in environ:
                found.append(pid)
        return found

    def gone(self, pid: int) -> None:
        """Waits until a process has gone: the proof that a kill struck."""

        def is_gone() -> bool:
            try:
                return ") Z " in Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                return True

        self.wait(is_gone, f"the end of process {pid}")

    # -- striking and judging ----------------------------------------------------------------

    def struck(self) -> Struck:
        return Struck(self.step, time.time(), self.attempts[-1].number)

    def check_same(
        self, struck: Struck | None = None, *, causes: Sequence[str] | None = None,
        seconds: float = PATIENCE,
    ) -> str:  # fmt: skip
        """The right end of nearly every fault; returns it in words. Raises Differs.

        causes: how the attempts have ended, in order; one that nobody recorded is left out.
        """
        self.wait_over(seconds)
        result = self.result()
        if result is None:
            raise self.differs("there is no result")
        state = self.status()["state"]
        if state != "done":
            raise self.differs(f"status says {state}, expected done")
        if causes is not None and self.causes != list(causes):
            raise self.differs(f"its attempts ended as {self.causes}, expected {list(causes)}")
        baseline = self.trial.baselines[self.config]
        if result != (self.steps, baseline.weights):
            raise self.differs(
                f"step {result[0]}, weights {result[1][:12]}, expected step "
                f"{self.steps}, weights {baseline.weights[:12]}"
            )
        if struck:
            later = [
                line
                for line in read_json_lines(self.dir.metrics)
                if line.get("step", 0) > struck.step and line.get("time", 0) > struck.time
            ]
            if not later:
                raise self.differs(f"no step beyond {struck.step} was trained after the strike")
        self.count_loss()
        records = [attempt.read_record() for attempt in self.attempts]  # none, where none met
        steps = [record.step if record else None for record in records]
        starts = ", ".join("-" if step is None else str(step) for step in steps)
        how = f" after {'; '.join(self.causes[:-1])}" if len(self.causes) > 1 else ""
        return f"attempts from step {starts}{how}; same weights"

    def check_failed(
        self, *words: str, within: float = PATIENCE, states: Sequence[str] = ("failed",),
        usable: int | None = None,
    ) -> str:  # fmt: skip
        """A clean failure: ended, named, no job left, the last checkpoint usable.

        words: what the end of the log, or status, says. usable: a step from which to go on.
        """
        self.wait_over(within)
        status = self.status()
        state = status["state"]
        if state not in states:
            raise self.differs(f"status says {state}, expected {' or '.join(states)}")
        told = [status[name] for name in ("first_failure", "detail", "next_command")]
        said = "\n".join([self.log, self.rank_logs, *told])
        missing = [word for word in words if word not in said]
        if missing:
            raise self.differs(f"nothing says {missing}")
        if self.dir.report.exists():
            raise self.differs("there is a report.json")
        seen = f"{state}: {words[0] if words else status['detail']}"
        if usable is not None:
            seen += f"; step {self.check_usable(usable)} usable"
        return seen

    def check_usable(self, at_least: int) -> int:
        """`clusterddp checkpoints` names one to go on from; returns its step."""
        done = self.trial.clusterddp("checkpoints", self.name, "--json")
        if done.returncode != 0:
            raise self.differs(f"checkpoints: exit {done.returncode}: {done.stderr}")
        entries = [entry for entry in json.loads(done.stdout) if entry["is_next"]]
        if not entries or entries[0]["step"] < at_least:
            raise self.differs(f"no usable checkpoint from step {at_least}: {done.stdout}")
        step: int = entries[0]["step"]
        return step

    def wall_seconds(self) -> float:
        """From the submission to the last word."""
        times = [float(event["time"]) for event in read_events(self.dir)]
        return max(times) - min(times)

    def count_loss(self) -> None:
        """Seconds beyond the uninterrupted run, at this run's pace."""
        baseline = self.trial.baselines.get(self.config)
        if baseline:
            usual = SCRIPT_PACE if self.config in SCRIPTS else PACE
            paced = baseline.wall_seconds + self.steps * (self.pace - usual)
            self.trial.lost_seconds = self.wall_seconds() - paced

    def differs(self, what: str) -> Differs:
        """An error with the run's last words."""
        lines = self.log.splitlines()
        told = [line for line in lines[:-12] if line.startswith("watchdog: ")]
        log = "\n".join([*told, *lines[-12:]])
        return Differs(f"{self.name}: {what}; events {self.causes}\n--- job.log\n{log}")


def slurm(trial: Trial, *argv: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A Slurm command on the login host, which must succeed."""
    return trial.cluster.run(argv, check=True, timeout=timeout)

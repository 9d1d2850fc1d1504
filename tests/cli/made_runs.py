"""Run directories made by hand, commands run in this process, stand-ins for Slurm's commands."""

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.main import main
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import Sweep
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.events import Failure
from clusterddp.run.run_dir import RunDir, SweepDir


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@dataclass
class Workplace:
    """A current directory with `jobs/` in it, and a PATH that holds no Slurm but a test's own."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    @property
    def root(self) -> Path:
        return self.folder / "jobs"

    def run(self, name: str, *events: dict[str, Any], age: float = 0, **asked: Any) -> RunDir:
        """A run `age` seconds old with these events; `asked` goes to Resources."""
        path = self.root / name
        path.mkdir(parents=True)
        run = RunDir(path)
        run.logs.mkdir()
        resources = Resources(**{"nodes": 2, "gpus_per_node": 4, **asked})
        spec = JobSpec(
            run_name=name, run_dir=str(path), resources=resources, python="python",
            train=TrainConfig(),
        )  # fmt: skip
        run.spec.write_text(spec.to_json())
        then = time.time() - age
        os.utime(run.spec, (then, then))
        lines = [json.dumps({"time": then + n, **event}) for n, event in enumerate(events)]
        run.events.write_text("".join(f"{line}\n" for line in lines))
        return run

    def sweep(self, name: str, names: tuple[str, ...], *trials: tuple[str, ...]) -> SweepDir:
        """A sweep whose trials are array 7 and have not started; of a COMMAND with the names."""
        path = self.root / name
        spec = JobSpec(
            run_name=name, run_dir=str(path), resources=Resources(nodes=1), python="python",
            command=("train", *(f"{{{each}}}" for each in names)), sweep=Sweep(names, trials),
        )  # fmt: skip
        sweep = SweepDir(path)
        sweep.make()
        sweep.spec.write_text(spec.to_json())
        for index in range(len(trials)):
            run = sweep.trial(index)
            run.make(run.logs)
            run.spec.write_text(spec.trial_spec(index).to_json())
            run.events.write_text(f"{json.dumps({'time': 1e9, **submitted(f'7_{index}')})}\n")
        return sweep

    def command(self, name: str, body: str) -> None:
        """A shell script on PATH; what it is called with is added to `calls`."""
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >>{self.folder}/calls\n{body}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def invoke(self, *argv: str) -> Outcome:
        """`clusterddp ARGV` in this process, with its exit code and what it printed."""
        self.capture.readouterr()
        self.monkeypatch.setattr(sys, "argv", ["clusterddp", *argv])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = self.capture.readouterr()
        code = caught.value.code
        return Outcome(code if isinstance(code, int) else 0, out, err)


@pytest.fixture
def workplace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Workplace:
    """See Workplace; tests import this fixture by name."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Workplace(tmp_path, monkeypatch, capfd)


# A failure as `clusterddp finish` records it, and as it is told.
FAILURE = dataclasses.asdict(Failure(3, "h02", "ValueError: boom", "logs/rank-3.log", 1))
BOOM = "rank 3 on h02 failed first: ValueError: boom (logs/rank-3.log)"
"""What an `ended` record holds of the rank that failed first."""


def submitted(job_id: str, **fields: Any) -> dict[str, Any]:
    return {"event": "submitted", "job_id": job_id, "launcher": "sbatch", **fields}


def started(job_id: str, restart: int = 0) -> dict[str, Any]:
    return {"event": "started", "job_id": job_id, "restart": restart, "nodelist": "h[01-02]"}


def ended(job_id: str, exit_code: int, **fields: Any) -> dict[str, Any]:
    return {"event": "ended", "job_id": job_id, "restart": 0, "exit_code": exit_code, **fields}

"""One tracked run over all starts: what rank 0's program is shown."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterddp import log
from clusterddp.run.run_dir import RunDir
from clusterddp.worker.tracking import expose_tracker


def shown(run: RunDir, trackers: str, given: Mapping[str, str] | None = None) -> dict[str, str]:
    environ = dict(given or {})
    expose_tracker(environ, run, trackers.split(","), ["train"], lambda *_: "made")
    return environ


def test_every_start_is_shown_the_same_ids(run: RunDir) -> None:
    first = shown(run, "wandb,mlflow")
    assert first == {
        "WANDB_RUN_ID": first["WANDB_RUN_ID"],
        "WANDB_RESUME": "allow",
        "WANDB_NAME": run.name,
        "MLFLOW_RUN_ID": "made",
    }
    assert shown(run, "wandb,mlflow") == first
    assert len(first["WANDB_RUN_ID"]) == 16
    assert shown(run, "wandb").keys() == {"WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME"}
    assert (run.tracked.stat().st_mode & 0o777) == 0o600


def test_a_value_that_is_set_stays(run: RunDir) -> None:
    own = {"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must", "MLFLOW_RUN_ID": "", "WANDB_NAME": "n"}
    assert shown(run, "wandb,mlflow", own) == own
    assert not run.tracked.exists()


def test_mlflow_is_asked_once_and_its_absence_stops_nothing(run: RunDir, tmp_path: Path) -> None:
    calls: list[str] = []

    def make(_argv: Sequence[str], name: str, _environ: Mapping[str, str]) -> str:
        calls.append(name)
        return "" if len(calls) == 1 else "made"

    for expected in ({}, {"MLFLOW_RUN_ID": "made"}, {"MLFLOW_RUN_ID": "made"}):
        environ: dict[str, str] = {}
        expose_tracker(environ, run, ["mlflow"], ["train"], make)
        assert environ == expected
    assert calls == [run.name, run.name]
    # The program's own Python, with a stand-in for mlflow and with none.
    package = tmp_path / "mlflow"
    package.mkdir()
    (package / "__init__.py").write_text(
        "class Run:\n"
        "    def __init__(self, name): self.info, self.run_id = self, 'id-of-' + name\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *_): print('a remark of its own')\n"
        "def start_run(run_name): return Run(run_name)\n"
    )
    fresh = RunDir(tmp_path / "it's; $(touch pwned)")
    fresh.path.mkdir()
    environ = {"PYTHONPATH": str(tmp_path)}
    expose_tracker(environ, fresh, ["mlflow"], [sys.executable, "train.py"])
    assert environ["MLFLOW_RUN_ID"] == f"id-of-{fresh.name}"
    assert json.loads(fresh.tracked.read_text())["mlflow"] == environ["MLFLOW_RUN_ID"]
    lines: list[str] = []
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    environ = {"PYTHONPATH": str(tmp_path / "mlflow")}
    with log.to(lines.append):
        expose_tracker(environ, other, ["mlflow"], ["/nowhere/python"])
    assert "MLFLOW_RUN_ID" not in environ
    assert "--report-to mlflow: cannot create a run" in lines[0]

"""What is made sure of before a job queues: the checkpoint that it would start from."""

from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.inputs import make_sure
from clusterddp.errors import RequestError
from clusterddp.run_dir import RunDir
from clusterddp.spec import JobSpec, Resources
from clusterddp.train_config import TrainConfig
from tests.training import made_checkpoints


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "jobs" / "one"
    path.mkdir(parents=True)
    made_checkpoints.attempt(RunDir(path), 1, 20)
    spec = JobSpec("one", str(path), Resources(), "python", train=TrainConfig(dataset="synthetic"))
    (path / "spec.json").write_text(spec.to_json())
    return RunDir(path)


@pytest.mark.parametrize("what", ["", "attempts/0001/checkpoints/step-00000020.pt"])
def test_a_resume_with_another_configuration_is_refused_before_it_queues(
    run: RunDir, synthetic_dir: Path, what: str
) -> None:
    wanted: dict[str, Any] = {
        "dataset": "synthetic",
        "data_dir": str(synthetic_dir),
        "resume": str(run.path / what),
    }
    with pytest.raises(RequestError, match=r"--lr 0\.001, now 0\.5"):
        make_sure(TrainConfig(lr=0.5, **wanted), may_fetch=False)
    make_sure(TrainConfig(lr=0.5, allow_changed=True, **wanted), may_fetch=False)

"""What is made sure of before a job queues: the checkpoint that it would start from, a person's
own functions, and the copy of their code."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import DataError, RequestError
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.run_dir import RunDir
from clusterddp.submission.inputs import check_inputs
from tests.checkpoints import made_checkpoints
from tests.cli.made_runs import Workplace, workplace
from tests.cli.test_imports import HEAVY, watched

__all__ = ["workplace"]
OWN = TrainConfig(model="nets:build", dataset="pkg.sets:make", data_dir="/nowhere")


def job(python: str = sys.executable, ranks: int = 1) -> JobSpec:
    """A request of a job that trains."""
    return JobSpec("job", "/job", Resources(tasks_per_node=ranks), python, train=OWN)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "jobs" / "one"
    path.mkdir(parents=True)
    made_checkpoints.attempt(RunDir(path), 1, 20)
    spec = JobSpec("one", str(path), Resources(), "python", train=TrainConfig(dataset="synthetic"))
    (path / "spec.json").write_text(spec.to_json())
    return RunDir(path)


def test_nothing_is_downloaded_into_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(data_dir: str) -> None:
        fetched.append(data_dir)
        raise DataError("no network")

    monkeypatch.setattr("clusterddp.data.download.fetch", fetch)
    missing = tmp_path / "shred data"
    with pytest.raises(RequestError, match=r"does not exist.*data fetch --data-dir '/"):
        check_inputs(TrainConfig(data_dir=str(missing)), job())
    assert not missing.exists()
    assert fetched == []
    monkeypatch.chdir(tmp_path)
    missing.mkdir()
    usual = TrainConfig().data_dir
    for there in (str(missing), usual, str(tmp_path / usual)):  # the default is no typing error
        with pytest.raises(RequestError, match="no network"):
            check_inputs(TrainConfig(data_dir=there), job())
    assert fetched == [str(missing), "data", str(tmp_path / "data")]


@pytest.mark.parametrize("what", ["", "attempts/0001/checkpoints/step-00000020.pt"])
def test_a_resume_with_another_configuration_is_refused_before_it_queues(
    run: RunDir, synthetic_dir: Path, what: str
) -> None:
    wanted: dict[str, Any] = {
        "dataset": "synthetic",
        "data_dir": str(synthetic_dir),
        "init_from": str(run.path / what),
    }
    with pytest.raises(RequestError, match=r"--lr 0\.001, now 0\.5"):
        check_inputs(TrainConfig(lr=0.5, **wanted))
    check_inputs(TrainConfig(lr=0.5, allow_config_change=True, **wanted))


@pytest.mark.parametrize(
    ("steps", "wanted", "words"),
    [
        (0, {}, "one finished at step 20, so nothing is left to train"),
        (0, {"epochs": 1}, "nothing is left to train"),
        (0, {"max_steps": 20}, "--max-steps 20 leaves nothing to train"),
        (0, {"max_steps": 30}, "nothing is left to train"),
        (0, {"epochs": 3}, ""),
        (20, {"max_steps": 10}, "--max-steps 10 leaves nothing to train"),
        (20, {"max_steps": 20}, "--max-steps 20 leaves nothing to train"),
        (20, {"max_steps": 30}, ""),
        (20, {}, ""),  # --max-steps had ended it, anywhere in its last epoch
    ],
)
def test_a_resume_of_a_run_that_is_done_is_refused_where_nothing_is_left(
    run: RunDir, synthetic_dir: Path, steps: int, wanted: dict[str, int], words: str
) -> None:
    before = TrainConfig(dataset="synthetic", max_steps=steps)
    spec = JobSpec("one", str(run.path), Resources(), "python", train=before)
    run.spec.write_text(spec.to_json())
    run.report.write_text(json.dumps({"steps": 20, "epochs": 2, "attempt": 1}))
    fields: dict[str, Any] = {"init_from": str(run.path), "data_dir": str(synthetic_dir), **wanted}
    config = TrainConfig(dataset="synthetic", allow_config_change=True, **fields)
    if words:
        with pytest.raises(RequestError, match=words):
            check_inputs(config)
    else:
        check_inputs(config)
    made_checkpoints.make(run.path / "attempts/0001/checkpoints", 10)
    earlier = dataclasses.replace(
        config, init_from=str(run.path / "attempts/0001/checkpoints/step-00000010.pt"), max_steps=15
    )
    check_inputs(earlier)


def test_a_resume_on_ranks_that_cannot_share_the_batch_is_refused(
    run: RunDir, synthetic_dir: Path
) -> None:
    run.resolved.write_text(json.dumps({"global_batch_size": 256, "reference_world_size": 4}))
    config = TrainConfig(dataset="synthetic", data_dir=str(synthetic_dir), init_from=str(run.path))
    with pytest.raises(RequestError, match="cannot be divided evenly among 3 ranks"):
        check_inputs(config, job(ranks=3))
    check_inputs(config, job(ranks=2))


@pytest.fixture
def tree(workplace: Workplace) -> Path:
    """The current directory, with a person's model and dataset, which nobody may run here."""
    (workplace.folder / "pkg").mkdir()
    (workplace.folder / "nets.py").write_text("raise SystemExit\ndef build(): ...\n")
    (workplace.folder / "pkg/sets.py").write_text("raise SystemExit\ndef make(d, train): ...\n")
    importlib.invalidate_caches()
    workplace.command("sbatch", "/bin/cat >sent; echo 12")
    return workplace.folder


def test_own_functions_are_found_and_no_dataset_is_looked_for(
    tree: Path, logged: list[str]
) -> None:
    check_inputs(OWN)
    assert logged == [
        f"model: nets:build of {tree / 'nets.py'}",
        f"dataset: pkg.sets:make of {tree / 'pkg/sets.py'}",
    ]
    assert not {"nets", "pkg", "pkg.sets"} & set(sys.modules)


def test_own_functions_are_looked_for_in_the_copy_where_there_is_one(
    tree: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = tree / "copy"
    copy.mkdir()
    with pytest.raises(RequestError, match=f"there is no module nets in {copy}"):
        check_inputs(OWN, code=copy)
    (tree / "nets.py").rename(copy / "nets.py")
    (tree / "pkg").rename(copy / "pkg")
    importlib.invalidate_caches()
    check_inputs(OWN, code=copy)
    with pytest.raises(RequestError, match="there is no module nets"):
        check_inputs(OWN)
    capfd.readouterr()
    check_inputs(OWN, job("/another/python"))  # it can be installed for the tasks' Python
    assert "warning: --model nets:build is not in" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "nets:biuld"], "nets.py defines no biuld"),
        (["--model", "nuts:build"], "--model nuts:build: there is no module nuts in"),
        (["--dataset", "pkg.set:make"], "there is no module pkg.set in"),
        (["--model", "nets:build()"], "'nets:build()' is not one of convnet, "),
    ],
)
def test_a_function_that_is_not_there_is_refused_and_nothing_is_queued(
    tree: Path, workplace: Workplace, argv: list[str], words: str
) -> None:
    got = workplace.invoke("submit", "--run-name", "one", "--dataset", "pkg.sets:make", *argv)
    assert (got.code, workplace.calls) == (2, [])
    assert words in got.err
    assert not (workplace.root / "one").exists()


def submitted(workplace: Workplace, *argv: str) -> Path:
    got = workplace.invoke("submit", "--run-name", "one", *argv)
    assert got.code == 0, got.err
    return workplace.root / "one"


ENTERS = 'cd -- "$run_dir/code"'
OPTIONS = ("--model", "nets:build", "--dataset", "pkg.sets:make")


def test_a_run_with_own_functions_gets_a_copy_of_the_tree(tree: Path, workplace: Workplace) -> None:
    run = submitted(workplace, *OPTIONS)
    assert (run / "code/nets.py").read_text() == (tree / "nets.py").read_text()
    assert (run / "code/pkg/sets.py").is_file() and not (run / "code/jobs").exists()
    assert "nets.py" in json.loads((run / "code.json").read_text())["digests"]
    assert ENTERS in (tree / "sent").read_text()


def test_without_a_copy_a_changed_tree_is_refused_at_the_next_start(
    tree: Path, workplace: Workplace
) -> None:
    run = submitted(workplace, *OPTIONS, "--no-snapshot")
    assert not (run / "code").exists() and (run / "code.json").is_file()
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "ended", "time": 9e9, "job_id": "12", "exit_code": 1}\n')
    workplace.command("squeue", "true")
    (tree / "nets.py").write_text("def build(): return 2\n")
    got = workplace.invoke("resume", "one", "--dry-run")
    assert got.code == 2 and "changed nets.py" in got.err


def test_a_changed_model_is_said_and_taken_on_purpose(tree: Path, workplace: Workplace) -> None:
    run = submitted(workplace, *OPTIONS)
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "ended", "time": 9e9, "job_id": "12", "exit_code": 1}\n')
    workplace.command("squeue", "true")
    (tree / "nets.py").write_text("raise SystemExit\ndef build(): return 2\n")
    assert "changed nets.py" in workplace.invoke("resume", "one", "--dry-run").err
    got = workplace.invoke("resume", "one", "--refresh-code")
    assert got.code == 0, got.err
    assert (run / "code/nets.py").read_text() == (tree / "nets.py").read_text()


def test_what_is_installed_or_ours_is_not_copied(
    tree: Path, workplace: Workplace, synthetic_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tree.parent / f"{tree.name}-site"
    (tree / "pkg").rename(installed)
    (installed / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(installed)
    run = submitted(workplace, "--dataset", "sets:make")
    assert not (run / "code").exists() and not (run / "code.json").exists()
    data = ["--dataset", "synthetic", "--data-dir", str(synthetic_dir)]
    got = workplace.invoke("submit", "--run-name", "two", *data)
    assert got.code == 0 and not (workplace.root / "two/code").exists()
    assert ENTERS not in (tree / "sent").read_text()


def test_the_images_of_a_shipped_dataset_are_no_code(
    tree: Path, workplace: Workplace, synthetic_dir: Path
) -> None:
    (tree / "data").mkdir()
    (tree / "data/notes.txt").write_text("mine")
    (tree / "data/synthetic").symlink_to(synthetic_dir / "synthetic")
    run = submitted(workplace, "--model", "nets:build", "--dataset", "synthetic")
    assert sorted(path.name for path in (run / "code/data").iterdir()) == ["notes.txt"]


def test_a_submission_with_own_functions_loads_no_torch(tree: Path) -> None:
    loaded, started = watched(tree, ["submit", *OPTIONS])
    assert not loaded & HEAVY
    assert {Path(command).name for command in started} <= {"git", "sinfo", "sbatch"}

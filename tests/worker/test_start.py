"""How a start is decided: what it goes on from, what it refuses, and for whom it waits."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from clusterddp.checkpoints import state
from clusterddp.checkpoints.catalog import name_of
from clusterddp.data import mnist
from clusterddp.data.mnist import Reading
from clusterddp.data.synthetic import generate
from clusterddp.distributed.rendezvous import Identity, RunStore
from clusterddp.errors import CheckpointError, DataError, TrainingError
from clusterddp.files import read_json, read_json_lines
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.request.train_config import TrainConfig
from clusterddp.run import attempt as attempts
from clusterddp.run.attempt import Attempt, StartRefused
from clusterddp.run.run_dir import RunDir
from clusterddp.training.loop import train
from clusterddp.worker import start
from tests.checkpoints.made_checkpoints import DAMAGE
from tests.event_lines import add_event
from tests.training import trainings
from tests.training.trainings import CPU, agree, config, info, train_alone


def decide(settings: TrainConfig, run: Path, job_id: str) -> start.Agreement:
    return start.settle_attempt(settings, run, None, {"SLURM_JOB_ID": job_id}, [info(0, 1)])


def test_a_set_that_ranks_share_costs_one_barrier_and_is_withdrawn_later(
    synthetic_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barriers: list[None] = []
    monkeypatch.setattr(dist, "barrier", lambda: barriers.append(None))
    settings, env = config(synthetic_dir), DistEnv.from_environ({})
    reading = Reading(settings.dataset, settings.data_dir, digest=False)
    store = RunStore(dist.HashStore(), Identity("", ""))
    sets, held = start.load_datasets(settings, env, store, reading, CPU, data_sha256="")
    assert [len(each) for each in sets] == [2_000, 500]
    assert len(barriers) == 1
    assert held and held.ref(), "a rank that is late can still map it"


def test_a_first_start_lays_out_its_attempt_and_records_it(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    agreed = agree(config(synthetic_dir, lr_scaling="linear"), tmp_path / "run", 4)
    run = RunDir(tmp_path / "run")
    assert (agreed.attempt, agreed.resume) == (1, "")
    assert (agreed.global_batch_size, agreed.reference_world_size) == (800, 4)
    record = Attempt(run, 1).read_record()
    assert (record.number, record.job_id, record.step) == (1, "7", 0)
    assert (record.resumed_from, record.world_size, record.hosts) == (None, 4, ("h01",))
    resolved = read_json(run.resolved)
    assert resolved is not None
    assert (resolved["lr"], resolved["data_sha256"]) == (0.004, agreed.data_sha256)
    assert run.current.readlink() == Path("attempts/0001")
    assert run.checkpoints.is_dir() and run.metrics.read_text() == ""


def test_a_later_start_goes_on_in_a_folder_of_its_own(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, save_every="2steps")
    train_alone(settings, tmp_path, 4)
    run = RunDir(tmp_path)
    before = {path.name: path.read_bytes() for path in Attempt(run, 1).path.glob("*.json*")}
    agreed = agree(settings, tmp_path)
    second = Attempt(run, 2)
    # Its own name for the file, which no other attempt takes away.
    assert agreed.resume == str(second.checkpoints / name_of(4))
    assert sorted(path.name for path in second.checkpoints.glob("*.pt")) == [
        name_of(2), name_of(4),
    ]  # fmt: skip
    assert second.read_record().resumed_from == f"attempts/0001/checkpoints/{name_of(4)}"
    assert run.current.readlink() == Path("attempts/0002")
    assert [line["step"] for line in read_json_lines(run.metrics)] == [1, 2, 3, 4]
    after = {path.name: path.read_bytes() for path in Attempt(run, 1).path.glob("*.json*")}
    assert after == before


def test_a_run_without_its_checkpoints_begins_at_step_0_only_where_that_was_asked_for(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, save_every="2steps")
    train_alone(settings, tmp_path, 4)
    run = RunDir(tmp_path)
    first = Attempt(run, 1)
    first.renew_liveness(4, saved=4)
    shutil.rmtree(first.checkpoints)
    with pytest.raises(CheckpointError, match="are gone: it had saved step 4"):
        agree(settings, tmp_path)
    add_event(run, "resume_requested", from_scratch=1)
    agreed = agree(settings, tmp_path, 4)  # of other ranks than before
    assert (agreed.resume, agreed.reference_world_size) == ("", 4)
    assert RunDir(tmp_path).metrics.read_text() == ""


def test_what_a_lost_attempt_measured_beyond_its_checkpoint_is_left_behind(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir)
    train_alone(settings, tmp_path, 4)
    metrics = Attempt(RunDir(tmp_path), 1).metrics
    with metrics.open("a") as file:
        file.write('{"kind": "train", "step": 5}\n{"kind": "tr')
    agree(settings, tmp_path)
    lines = RunDir(tmp_path).metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert metrics.read_text().endswith('{"kind": "tr'), "what went before is not touched"


@pytest.mark.parametrize(("before", "after"), [(4, 3), (1, 3), (2, 7)])
def test_a_batch_that_the_ranks_cannot_share_is_refused_with_both_sides(
    before: int, after: int, synthetic_dir: Path, tmp_path: Path
) -> None:
    settings = config(synthetic_dir, batch_size=50)
    agree(settings, tmp_path, before)  # and it never came to a checkpoint
    with pytest.raises(TrainingError) as caught:
        agree(settings, tmp_path, after)
    batch, asked = f"batch of {50 * before} ", f"--batch-size 50 x {before} ranks"
    for words in (batch, asked, f"{after} ranks"):
        assert words in str(caught.value)
    assert not Attempt(RunDir(tmp_path), 2).record.exists()
    assert agree(settings, tmp_path, before * 5).batch_size == 10


def test_a_changed_configuration_is_refused_with_the_difference(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    train_alone(config(synthetic_dir), tmp_path, 2, noisy=False)
    changed = {"lr": 0.5, "epochs": 9, "bucket_cap_mb": 1.0}
    with pytest.raises(CheckpointError) as caught:
        agree(config(synthetic_dir, **changed), tmp_path)
    for words in (
        "--lr 0.001, now 0.5",
        "--epochs 2, now 9",
        "--bucket-cap-mb 25.0, now 1.0",
        "--allow-config-change",
    ):
        assert words in str(caught.value)
    assert agree(config(synthetic_dir, allow_config_change=True, **changed), tmp_path).resume


def test_what_does_not_decide_the_weights_may_change(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    train_alone(config(synthetic_dir), tmp_path, 2)
    other = config(
        synthetic_dir, max_steps=3, save_every="1m", log_every=7, hang_timeout=5, keep_last=9
    )
    assert agree(other, tmp_path).resume


def test_a_batch_size_that_was_changed_on_purpose_counts_for_the_ranks_there_are(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    train_alone(config(synthetic_dir), tmp_path, 2)
    settings = config(synthetic_dir, batch_size=10, allow_config_change=True)
    agreed = agree(settings, tmp_path, 3)
    assert (agreed.global_batch_size, agreed.batch_size, agreed.reference_world_size) == (30, 10, 3)


@pytest.mark.parametrize(("name", "value"), [("model", "mlp"), ("dataset", "mnist")])
def test_another_model_or_dataset_is_refused_always(
    name: str, value: str, synthetic_dir: Path, tmp_path: Path, alone: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    train_alone(config(synthetic_dir), tmp_path / "run", 1)
    (tmp_path / "run/resolved.json").unlink()  # not even where the record was lost
    monkeypatch.setattr(mnist, "ensure", lambda *_, **__: None)
    monkeypatch.setattr(mnist, "fingerprint", lambda *_: "")
    settings = config(synthetic_dir, allow_config_change=True, **{name: value})
    with pytest.raises(CheckpointError, match=f"--{name}.*--{name} {value}"):
        agree(settings, tmp_path / "run")


@pytest.mark.parametrize("allowed", [False, True])
def test_a_dataset_that_has_changed_is_refused(
    allowed: bool, synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(synthetic_dir, folder)
    settings = config(folder, allow_config_change=allowed)
    train_alone(settings, tmp_path / "run", 1)
    (labels,) = folder.rglob("train-labels-idx1-ubyte")
    labels.chmod(0o600)
    content = bytearray(labels.read_bytes())
    content[-1] = (content[-1] + 1) % 10
    labels.write_bytes(content)
    with pytest.raises(
        DataError, match=r"has changed since this run first started.*Restore the files"
    ):
        agree(settings, tmp_path / "run")
    # Nor can another run start from its checkpoint.
    other = config(folder, allow_config_change=allowed, init_from=str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match="dataset has changed since the checkpoint"):
        agree(other, tmp_path / "other")


def test_a_run_on_digits_that_are_rendered_otherwise_now_is_refused(
    synthetic_dir: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the older generator are gone, so today's are rendered in their place."""
    monkeypatch.setitem(generate.__kwdefaults__, "train_images", 40)
    monkeypatch.setitem(generate.__kwdefaults__, "test_images", 20)
    folder = tmp_path / "data"
    shutil.copytree(synthetic_dir, folder)
    train_alone(config(folder), tmp_path / "run", 1)
    shutil.rmtree(folder / "synthetic")
    now = r"40 and 20, seed 0, generator 2"
    with pytest.raises(DataError, match=f"has changed since this run first started.*{now}"):
        agree(config(folder), tmp_path / "run")
    other = config(folder, init_from=str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=f"has changed since the checkpoint.*{now}"):
        agree(other, tmp_path / "other")


def test_a_second_start_waits_and_is_refused_naming_who_trains(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    settings = config(synthetic_dir, rendezvous_timeout=1)
    decide(settings, tmp_path, "17")
    first = Attempt(RunDir(tmp_path), 1)
    first.renew_liveness(3)
    with pytest.raises(StartRefused) as caught:
        decide(settings, tmp_path, "18")
    for words in ("attempt 1", "job 17", os.uname().nodename, "--run-name"):
        assert words in str(caught.value)
    assert attempts.latest(RunDir(tmp_path)) == first, "it has made no attempt"


def test_a_run_directory_that_went_away_is_said(synthetic_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="does not exist: the run directory was removed"):
        agree(config(synthetic_dir), tmp_path / "run", number=3)


# Ranks that an agent starts again inside a job --------------------------------------------------


@pytest.mark.slow
def test_ranks_started_again_inside_a_job_go_on_from_their_attempts_own_checkpoints(
    tmp_path: Path, synthetic_dir: Path, alone: None
) -> None:
    settings = trainings.config(synthetic_dir, max_steps=12, epochs=9)
    trainings.train_alone(settings, tmp_path / "earlier", stop=3, noisy=False)
    whole = trainings.train_alone(settings, tmp_path / "whole", noisy=False)
    run = RunDir(tmp_path / "earlier")
    number = attempts.begin(run).number
    ours = Attempt(run, number)
    for stop in (5, 7):  # with the number that the script has given to both
        agreed = trainings.agree(settings, run.path, number=number)
        training = trainings.build(settings, agreed)
        trainings.asked_at_once(training, stop)
        train(training)
    agreed = trainings.agree(settings, run.path, number=number)
    assert Path(agreed.resume) == ours.checkpoints / "step-00000007.pt"
    record = ours.read_record()
    assert (record.step, record.agent_starts) == (3, 3)
    assert record.resumed_from == "attempts/0001/checkpoints/step-00000003.pt"
    training = trainings.build(settings, agreed)
    train(training)
    assert state.weights_sha256(training.model) == whole["sha256"]
    steps = [line["step"] for line in read_json_lines(run.metrics) if line["kind"] == "train"]
    assert steps == list(range(1, 13))


def test_a_damaged_checkpoint_of_the_attempt_itself_is_passed_over(
    tmp_path: Path, synthetic_dir: Path, alone: None, logged: list[str]
) -> None:
    settings = trainings.config(synthetic_dir, max_steps=12, epochs=9)
    trainings.train_alone(settings, tmp_path / "run", stop=3, noisy=False)
    run = RunDir(tmp_path / "run")
    number = attempts.begin(run).number
    training = trainings.build(settings, trainings.agree(settings, run.path, number=number))
    trainings.asked_at_once(training, 5)
    train(training)
    ours = Attempt(run, number)
    DAMAGE["flipped"][0](ours.checkpoints / "step-00000005.pt")
    agreed = trainings.agree(settings, run.path, number=number)
    assert Path(agreed.resume) == ours.checkpoints / "step-00000003.pt"
    assert any("skipping step-00000005.pt" in line for line in logged)


def test_the_end_of_an_earlier_start_inside_the_job_does_not_count(
    tmp_path: Path, synthetic_dir: Path, alone: None
) -> None:
    settings = trainings.config(synthetic_dir, max_steps=12, epochs=9)
    run = RunDir(tmp_path / "run")
    number = attempts.begin(run).number
    trainings.agree(settings, run.path, number=number)
    ours = Attempt(run, number)
    ours.end.write_text("{}")
    trainings.agree(settings, run.path, number=number)
    assert not ours.end.exists()


def test_a_checkpoint_of_another_training_is_refused_naming_both_sides(tmp_path: Path) -> None:
    settings, path = TrainConfig(), tmp_path / name_of(1)
    saved = {"config": dataclasses.asdict(settings), "data_sha256": "d" * 64}

    def refused(content: dict[str, object], data_sha256: str = "d" * 64) -> str:
        with pytest.raises(CheckpointError) as caught:
            start.check_fits(path, content, settings, data_sha256=data_sha256)
        return str(caught.value)

    start.check_fits(path, saved, settings, data_sha256="d" * 64)
    for name, other in (("model", "resnet"), ("dataset", "synthetic"), ("optimizer", "sgd")):
        words = refused({**saved, "config": {**dataclasses.asdict(settings), name: other}})
        assert f"--{name} {other}" in words and f"--{name} {getattr(settings, name)}" in words
    words = refused(saved, "e" * 64)
    assert "has changed since" in words and "d" * 16 in words and "e" * 16 in words
    assert "by another program" in refused({"loop": {}})

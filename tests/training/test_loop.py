import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clusterddp.errors import TrainingError
from clusterddp.run_dir import RunDir, read_json_lines
from clusterddp.train_config import TrainConfig
from clusterddp.training import checkpoint, checkpoint_file, data, models
from clusterddp.training.images import Images
from clusterddp.training.loop import Training, evaluate

from .ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one, in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def config(synthetic_dir: Path, **fields: Any) -> TrainConfig:
    defaults: dict[str, Any] = {"dataset": "synthetic", "log_every": 1, "lr_scaling": "none"}
    return TrainConfig(data_dir=str(synthetic_dir), **{**defaults, **fields})


def training(
    rank: int, world_size: int, settings: TrainConfig, run: Path, resume: Path | None = None
) -> Training:
    run.mkdir(exist_ok=True)
    return Training(
        settings,
        rank=rank,
        world_size=world_size,
        device=CPU,
        train_set=Images(data.load(settings.dataset, settings.data_dir, train=True), CPU),
        test_set=Images(data.load(settings.dataset, settings.data_dir, train=False), CPU),
        run=RunDir(run),
        resume=resume,
    )


def train_rank(
    rank: int, world_size: int, settings: TrainConfig, run: Path, resume: Path | None = None
) -> dict[str, Any]:
    ours = training(rank, world_size, settings, run, resume)
    ours.run()
    return {
        "weights": [parameter.detach().numpy().copy() for parameter in ours.model.parameters()],
        "sha256": checkpoint.weights_sha256(ours.model),
        "accuracy": ours.accuracy,
        "loss": ours.loss,
        "buckets": ours.ddp._get_ddp_logging_data().get("rebuilt_bucket_sizes", ""),
    }


def train_alone(settings: TrainConfig, run: Path, resume: Path | None = None) -> dict[str, Any]:
    return train_rank(0, 1, settings, run, resume)


def assert_equal_within_rounding(one: dict[str, Any], other: dict[str, Any]) -> None:
    for mine, theirs in zip(one["weights"], other["weights"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_ranks_agree_on_weights_and_results_with_one_bucket_or_several(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    by_cap = {}
    for cap in (25.0, 0.02):
        settings = config(synthetic_dir, max_steps=4, bucket_cap_mb=cap)
        ranks = run_ranks(2, train_rank, settings, tmp_path / f"run-{cap}")
        assert ranks[0]["sha256"] == ranks[1]["sha256"]
        assert ranks[0]["accuracy"] == ranks[1]["accuracy"]
        by_cap[cap] = ranks[0]
    assert len(by_cap[25.0]["buckets"].split(",")) == 1
    assert len(by_cap[0.02]["buckets"].split(",")) > 1
    assert by_cap[25.0]["sha256"] == by_cap[0.02]["sha256"]  # a sum of two knows no order


def test_two_ranks_step_as_one_process_does_on_the_joined_batch(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    two = run_ranks(
        2, train_rank, config(synthetic_dir, batch_size=32, max_steps=3), tmp_path / "two"
    )
    one = train_alone(config(synthetic_dir, batch_size=64, max_steps=3), tmp_path / "one")
    assert_equal_within_rounding(two[0], one)


def test_every_epoch_has_an_order_of_its_own_and_a_resumed_run_the_same_ones(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    def orders(run: Path, resume: Path | None = None, **fields: Any) -> list[list[int]]:
        ours = training(0, 1, config(synthetic_dir, batch_size=500, **fields), run, resume)
        taken: list[int] = []
        batch = ours.train_set.batch

        def recorded(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            taken.extend(indices.tolist())
            return batch(indices)

        ours.train_set.batch = recorded  # type: ignore[method-assign]
        ours.run()
        return [taken[start : start + 2000] for start in range(0, len(taken), 2000)]

    first, second = orders(tmp_path / "whole", epochs=2)
    assert sorted(first) == sorted(second) == list(range(2000))
    assert first != second
    assert orders(tmp_path / "cut", epochs=2, max_steps=4) == [first]
    resume = checkpoint_file.newest(RunDir(tmp_path / "cut"), print)
    assert orders(tmp_path / "rest", resume, epochs=2) == [second]


def evaluate_rank(rank: int, world_size: int, data_dir: Path) -> tuple[float, float]:
    torch.manual_seed(1)
    test_set = Images(data.load("synthetic", str(data_dir), train=False), CPU)
    return evaluate(models.build("convnet"), test_set, rank, world_size, CPU)


@pytest.mark.parametrize("world_size", [2, 3])
def test_evaluation_counts_each_image_once_at_every_world_size(
    synthetic_dir: Path, world_size: int, alone: None
) -> None:
    accuracy, loss = evaluate_rank(0, 1, synthetic_dir)
    for theirs in run_ranks(world_size, evaluate_rank, synthetic_dir):
        assert theirs[0] == accuracy
        assert theirs[1] == pytest.approx(loss, rel=1e-6)


def test_a_run_resumed_in_mid_epoch_ends_with_the_weights_of_one_in_a_piece(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    whole = train_alone(config(synthetic_dir), tmp_path / "whole")  # 32 steps an epoch
    train_alone(config(synthetic_dir, max_steps=45), tmp_path / "cut")
    run = RunDir(tmp_path / "cut")
    found = checkpoint_file.newest(run, print)
    assert found and found.name == "step-00000045.pt"
    content = checkpoint.load(found)
    assert (content["epoch"], content["step_in_epoch"], content["samples"]) == (1, 13, 13 * 64)
    resumed = train_alone(config(synthetic_dir), tmp_path / "cut", found)
    assert resumed["sha256"] == whole["sha256"]
    steps = [line["step"] for line in read_json_lines(run.metrics) if line["kind"] == "train"]
    assert steps == list(range(1, 65))


def test_a_run_goes_on_at_another_world_size_where_it_stood(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    whole = train_alone(config(synthetic_dir, max_steps=6), tmp_path / "whole")
    train_alone(config(synthetic_dir, max_steps=3), tmp_path / "cut")
    found = checkpoint_file.newest(RunDir(tmp_path / "cut"), print)
    settings = config(synthetic_dir, max_steps=6, batch_size=32)
    two = run_ranks(2, train_rank, settings, tmp_path / "cut", found)
    assert_equal_within_rounding(two[0], whole)


def test_a_finished_run_is_only_evaluated_again(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, epochs=1)
    first = train_alone(settings, tmp_path / "run")
    found = checkpoint_file.newest(RunDir(tmp_path / "run"), print)
    again = train_alone(settings, tmp_path / "run", found)
    assert (again["sha256"], again["accuracy"]) == (first["sha256"], first["accuracy"])


def test_the_end_is_evaluated_and_saved_whatever_the_intervals(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, max_steps=7, save_every="3steps", eval_every="5steps")
    train_alone(settings, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    assert [path.name for path in sorted(run.checkpoints.glob("*.pt"))] == [
        "step-00000003.pt", "step-00000006.pt", "step-00000007.pt",
    ]  # fmt: skip
    lines = list(read_json_lines(run.metrics))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [5, 7]
    for line in lines:
        assert set(line) == {
            "kind", "step", "epoch", "loss", "accuracy", "images_per_second", "lr", "seconds",
            "time",
        }  # fmt: skip
        assert all(math.isfinite(value) for name, value in line.items() if name != "kind")


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, lr=1e30, warmup_steps=0, max_steps=20)
    with pytest.raises(TrainingError, match=r"loss is (nan|inf).*--lr"):
        train_alone(settings, tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*.pt"))


def test_training_learns(synthetic_dir: Path, tmp_path: Path, alone: None) -> None:
    result = train_alone(config(synthetic_dir, warmup_steps=10), tmp_path / "run")
    assert result["accuracy"] > 0.5


def test_each_epoch_has_its_own_order(synthetic_dir: Path, tmp_path: Path, alone: None) -> None:
    ours = training(0, 1, config(synthetic_dir), tmp_path / "run")
    orders = []
    for epoch in (0, 1, 0):
        ours.sampler.set_epoch(epoch)
        orders.append(list(ours.sampler))
    assert orders[0] == orders[2] != orders[1]
    assert json.dumps(sorted(orders[0])) == json.dumps(sorted(orders[1]))

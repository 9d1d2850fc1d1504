"""The recipes' models, and what their settings change of a training."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks import accuracy
from clusterddp.checkpoints.state import Position
from clusterddp.data import mnist
from clusterddp.data.loader import Images
from clusterddp.models import nets
from clusterddp.request.train_config import AUGMENTATIONS, RECIPES, TrainConfig
from clusterddp.training import learner
from clusterddp.training.metrics import MetricSums
from clusterddp.training.step import Schedule, Step
from tests.training import trainings
from tests.training.ranks import run_ranks

CPU = torch.device("cpu")


def test_the_fast_recipes_rate_peaks_at_a_fifth_and_ends_at_zero() -> None:
    config = TrainConfig(**RECIPES["fast"].settings)
    schedule = Schedule(config, 1, 60_000)
    steps = 60_000 // config.batch_size
    rates = [schedule.lr(Position(step=n, samples=n * config.batch_size)) for n in range(steps)]
    assert max(rates) == pytest.approx(0.02, rel=0.02)
    assert rates.index(max(rates)) / steps == pytest.approx(0.2, abs=0.01)
    assert rates[-1] < 0.01 * max(rates)


def test_the_accurate_recipe_warms_up_over_a_fifth_of_its_steps() -> None:
    config = TrainConfig(**RECIPES["accurate"].settings)
    steps = config.epochs * 60_000 / config.batch_size
    assert config.warmup_steps / steps == pytest.approx(0.2)


@pytest.mark.usefixtures("alone")
def test_label_smoothing_is_in_the_training_loss() -> None:
    images, labels = torch.randn(8, 1, 28, 28), torch.arange(8)
    losses = []
    for smoothing in (0.0, 0.25):
        torch.manual_seed(0)
        model = nets.build("convnet")
        expected = cross_entropy(model(images), labels, label_smoothing=smoothing).item()
        tally = MetricSums(CPU)
        step = Step(
            model, torch.optim.SGD(model.parameters(), 0.1), tally,
            device=CPU, label_smoothing=smoothing,
        )  # fmt: skip
        step(images, labels)
        assert tally.collect()[0] == pytest.approx(expected, rel=1e-5)
        losses.append(expected)
    assert losses[0] != losses[1]


def test_every_augmentation_of_the_request_is_there() -> None:
    assert {"none", *learner.AUGMENTATIONS} == set(AUGMENTATIONS)


def test_affine_with_draws_in_the_middle_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape: torch.full(shape, 0.5))
    images = torch.rand(3, 1, 28, 28)
    assert torch.allclose(learner.affine(images), images, atol=1e-5)


@pytest.mark.parametrize(
    ("draw", "seen_at"),
    [
        ({}, (10, 20)),
        ({3: 1.0}, (10, 18)),  # looks two pixels further to the right
        ({4: 0.0}, (12, 20)),  # and two further up
        ({0: 1.0}, (8.92, 19.29)),  # turned by ten degrees about the centre (13.5, 13.5)
        ({1: 1.0}, (10, 13.5 + 6.5 / math.exp(0.1))),
        ({2: 0.0}, (13.5 - 3.5 / math.exp(-0.1), 20)),
    ],
)
def test_affine_moves_a_point_as_drawn(
    draw: dict[int, float], seen_at: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spot at row 10, column 20; where its centre of mass comes to lie."""
    drawn = torch.full((5, 1), 0.5)
    for number, value in draw.items():
        drawn[number] = value
    monkeypatch.setattr(torch, "rand", lambda *_: drawn)
    rows, columns = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    spot = torch.exp(-((rows - 10) ** 2 + (columns - 20) ** 2) / 4)
    moved = learner.affine(spot[None, None])[0, 0]
    centre = ((rows * moved).sum() / moved.sum(), (columns * moved).sum() / moved.sum())
    assert (float(centre[0]), float(centre[1])) == pytest.approx(seen_at, abs=0.05)


def test_affine_goes_on_with_the_background() -> None:
    """Normalised black is not 0, which grid_sample would fill in by itself."""
    images = torch.full((64, 1, 28, 28), -0.4242)
    assert torch.allclose(learner.affine(images), images, atol=1e-6)


def test_each_image_is_changed_in_its_own_way_and_each_time_anew() -> None:
    images = torch.rand(1, 1, 28, 28).expand(4, 1, 28, 28)
    once, again = learner.affine(images), learner.affine(images)
    assert not torch.equal(once[0], once[1])
    assert not torch.equal(once[0], again[0])


def small(data_dir: Path, name: str) -> TrainConfig:
    """The recipe at a size for tests."""
    settings = {**RECIPES[name].settings, "epochs": 2, "batch_size": 200, "warmup_steps": 4}
    return trainings.config(data_dir, **settings)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "fast" else pytest.mark.slow) for name in RECIPES],
)
def test_a_run_of_a_recipe_that_is_cut_off_ends_with_the_same_weights(
    name: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    settings = small(synthetic_dir, name)
    whole = trainings.train_alone(settings, tmp_path / "whole", noisy=False)
    first = trainings.train_alone(settings, tmp_path / "cut", stop=7, noisy=False)
    assert first["reason"] == "signal"
    torch.manual_seed(99)  # another process begins elsewhere
    rest = trainings.train_alone(settings, tmp_path / "cut", noisy=False)
    assert rest["step"] == whole["step"]
    assert rest["sha256"] == whole["sha256"]
    assert rest["draws"][0] == whole["draws"][0]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("field", ["label_smoothing", "augment", "beta2"])
def test_each_setting_of_its_own_reaches_the_training(
    field: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    recipe = small(synthetic_dir, "accurate")
    usual = dataclasses.replace(recipe, **{field: getattr(TrainConfig(), field)})
    ends = [
        trainings.train_alone(
            dataclasses.replace(settings, max_steps=3), tmp_path / name, noisy=False
        )
        for name, settings in (("recipe", recipe), ("usual", usual))
    ]
    assert ends[0]["sha256"] != ends[1]["sha256"]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_augmentation_reaches_the_training_and_not_the_test(
    synthetic_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def counted(images: torch.Tensor) -> torch.Tensor:
        counts.append(len(images))
        return learner.affine(images)

    monkeypatch.setitem(learner.AUGMENTATIONS, "affine", counted)
    trainings.train_alone(small(synthetic_dir, "accurate"), tmp_path / "run", noisy=False)
    assert sum(counts) == 2 * 2_000


@pytest.mark.slow
def test_ranks_draw_apart_and_score_with_the_averages_that_are_saved(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    ranks = run_ranks(2, trainings.train_rank, small(synthetic_dir, "accurate"), tmp_path / "run")
    assert ranks[0]["draws"][0] != ranks[1]["draws"][0]
    assert ranks[0]["sha256"] == ranks[1]["sha256"]  # buffers of BatchNorm are in it


@pytest.mark.usefixtures("alone")
def test_the_benchmark_trains_to_the_end_and_sums_up(synthetic_dir: Path) -> None:
    settings = small(synthetic_dir, "fast")
    held = mnist.read("synthetic", str(synthetic_dir))
    sets = (Images(*held.tensors(train=train), CPU) for train in (True, False))
    training = accuracy.train(settings, *sets)
    assert training.position.epoch == settings.epochs
    assert training.result.accuracy > 0.5
    assert training.position.seconds > 0
    said = accuracy.summary([0.99, 0.98], [2.0, 3.0], 0.5)
    assert "mean 98.500%, standard error 0.500%, 98.00% to 99.00%" in said
    assert "median 2.50 s, 2.00 to 3.00 s" in said

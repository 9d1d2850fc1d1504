import pytest

from clusterddp.checkpoints.state import Position
from clusterddp.models import nets
from clusterddp.request.train_config import OPTIMIZERS, TrainConfig
from clusterddp.training import optimizer
from clusterddp.training.optimizer import Schedule, peak_lr


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 16), ("sqrt", 4), ("none", 1)])
def test_the_rate_grows_with_the_world_as_asked(scaling: str, factor: float) -> None:
    assert peak_lr(TrainConfig(lr=0.01, lr_scaling=scaling), 16) == pytest.approx(0.01 * factor)


def test_the_rate_rises_over_the_warm_up_and_falls_to_zero_at_the_end() -> None:
    config = TrainConfig(lr=0.1, warmup_steps=10, epochs=2)
    schedule = Schedule(config, 1, images_per_epoch=1000)
    rises = [schedule.lr(Position(step=step)) for step in range(12)]
    assert rises[0] == pytest.approx(0.01)
    assert rises[9] == rises[11] == pytest.approx(0.1)
    assert schedule.lr(Position(step=50, epoch=1)) == pytest.approx(0.05)
    assert schedule.lr(Position(step=50, epoch=1, samples=500)) == pytest.approx(0.025)
    assert schedule.lr(Position(step=100, epoch=2)) == 0


def test_a_limit_of_steps_does_not_change_the_rate() -> None:
    position = Position(step=20, samples=300)
    rates = {
        Schedule(TrainConfig(max_steps=steps), 1, 1000).lr(position) for steps in (0, 25, 10_000)
    }
    assert len(rates) == 1


def test_no_warm_up_starts_at_the_full_rate() -> None:
    assert Schedule(TrainConfig(lr=0.1, warmup_steps=0), 1, 10).lr(Position()) == 0.1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_the_request_takes_its_settings(name: str) -> None:
    config = TrainConfig(optimizer=name, lr=0.5, momentum=0.8, weight_decay=0.1)
    group = optimizer.build(config, nets.build("convnet")).param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.1)
    assert group["momentum"] == 0.8 if name == "sgd" else group["betas"][0] == 0.8

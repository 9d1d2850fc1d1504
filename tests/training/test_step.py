from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from clusterddp.checkpoints.state import Position
from clusterddp.distributed.heartbeat import Phase
from clusterddp.models import nets
from clusterddp.request.train_config import OPTIMIZERS, TrainConfig
from clusterddp.run.records import Agreement
from clusterddp.training import step as steps
from clusterddp.training.metrics import MetricSums
from clusterddp.training.step import Schedule, Step, build_optimizer
from clusterddp.worker import join

CPU = torch.device("cpu")
ALONE = Agreement("gloo", "cpu", threads=1, world_size=1)


def digits(count: int = 40) -> tuple[Tensor, Tensor]:
    images = torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    return images, torch.arange(count) % 10


def step(model: nn.Module, **settings: Any) -> Step:
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    return Step(model, optim.SGD(bare.parameters(), 0.1), MetricSums(CPU), device=CPU, **settings)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nets.build("convnet").to(memory_format=torch.channels_last)  # as the learner has it


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("count", "accumulate"), [(40, 4), (10, 4), (3, 7)])
def test_a_batch_in_several_passes_is_one_step(count: int, accumulate: int) -> None:
    whole, pieces = net(), net()
    step(whole)(*digits(count))
    step(pieces, gradient_accumulation_steps=accumulate)(*digits(count))
    assert (weights(whole) - weights(net())).abs().max() > 1e-3
    assert torch.allclose(weights(whole), weights(pieces), atol=1e-6)


def test_gradients_are_exchanged_once_a_step(alone: None) -> None:
    model = DistributedDataParallel(net())
    exchanges = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        exchanges.append(bucket.index())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    step(model, gradient_accumulation_steps=4)(*digits())
    assert exchanges == [0]


def test_the_sums_count_every_image_of_every_pass(alone: None) -> None:
    model = net()
    images, labels = digits(10)
    with torch.no_grad():
        scores = model(images)
        loss = nn.functional.cross_entropy(scores, labels)
        correct = (scores.argmax(1) == labels).double().mean()
    ours = step(model, gradient_accumulation_steps=4)
    ours(images, labels)
    assert ours.tally.steps == 1
    assert ours.tally.collect() == pytest.approx((float(loss), float(correct)), rel=1e-5)


def test_in_bf16_the_network_computes_and_the_weights_stay_fp32() -> None:
    model, exact = net(), net()
    kinds = []
    model.layer1[0].register_forward_hook(lambda *a: kinds.append(a[-1].dtype))  # type: ignore
    ours, theirs = step(model, precision="bf16"), step(exact)
    ours(*digits())
    theirs(*digits())
    assert kinds == [torch.bfloat16]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    moved = weights(exact) - weights(net())
    assert 0 < (weights(model) - weights(exact)).norm() < 0.05 * moved.norm()


def test_a_step_whose_gradients_overflow_fp16_is_left_out_and_the_scale_lowered() -> None:
    model = net()
    ours = step(model, precision="fp16")
    before = ours.scaler.get_scale()
    images, labels = digits()
    ours(images * 1e6, labels)
    assert torch.equal(weights(model), weights(net()))
    assert ours.scaler.get_scale() < before


def test_each_phase_is_told_of_as_it_begins() -> None:
    seen: list[Phase] = []
    step(net(), gradient_accumulation_steps=2, mark=seen.append)(*digits())
    passes = [Phase.FORWARD, Phase.BACKWARD]
    assert seen == [*passes, *passes, Phase.UPDATE]


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_the_rate_is_set_where_the_optimizer_reads_it(rate: float | Tensor) -> None:
    model = net()
    ours = Step(model, optim.SGD(model.parameters(), rate), MetricSums(CPU), device=CPU)
    held = ours.optimizer.param_groups[0]["lr"]
    ours.set_lr(0.25)
    now = ours.optimizer.param_groups[0]["lr"]
    assert float(now) == 0.25
    assert now is held or not isinstance(rate, Tensor)  # a captured step reads this very tensor


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host where one process drives two GPUs."""
    monkeypatch.setattr(
        steps, "gpus_of_one_process", lambda strategy, _: 2 if strategy == "dp" else 1
    )


def test_data_parallel_is_torchs_where_one_process_has_several_gpus(gpus: None) -> None:
    model = nn.Linear(3, 2)
    wrapped = steps.wrap(model, TrainConfig(strategy="dp"), ALONE)
    assert isinstance(wrapped, nn.DataParallel)
    assert isinstance(wrapped.module, steps.AtPrecision) and wrapped.module.model is model
    for strategy in ("ddp", "single"):
        assert steps.wrap(model, TrainConfig(strategy=strategy), ALONE) is model


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_a_copy_of_data_parallel_keeps_the_precision_in_its_thread(
    precision: str, dtype: str
) -> None:
    """As torch's parallel_apply runs it: a new thread knows nothing of the type of autocast."""
    model = steps.AtPrecision(nn.Linear(3, 2), precision, "cpu")
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(model, torch.ones(1, 3)).result().dtype is getattr(torch, dtype)


def test_on_a_cpu_nothing_is_shared() -> None:
    model = nn.Linear(3, 2)
    assert steps.gpus_of_one_process("dp", "cpu") == 0
    assert steps.wrap(model, TrainConfig(strategy="dp"), ALONE) is model


def test_data_parallel_with_fewer_than_two_gpus_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from clusterddp.ranks.dist_env import DistEnv

    env = DistEnv.from_environ({})
    told = join.describe_rank(TrainConfig(strategy="dp", device="cpu"), env, {}).warning
    assert "--strategy dp has no GPU here" in told
    assert join.describe_rank(TrainConfig(device="cpu"), env, {}).warning == ""


@pytest.mark.gpu2
def test_two_gpus_of_one_process_step_as_one_does() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).cuda()
    wrapped = steps.wrap(model, TrainConfig(strategy="dp"), ALONE)
    images = torch.randn(8, 3, device="cuda")
    assert torch.allclose(wrapped(images), model(images), atol=1e-5)


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 16), ("sqrt", 4), ("none", 1)])
def test_the_rate_grows_with_the_world_as_asked(scaling: str, factor: float) -> None:
    assert TrainConfig(lr=0.01, lr_scaling=scaling).peak_lr(16) == pytest.approx(0.01 * factor)


def test_the_rate_rises_over_the_warm_up_and_falls_to_zero_at_the_end() -> None:
    schedule = Schedule(TrainConfig(lr=0.1, warmup_steps=10, epochs=2), 1, images_per_epoch=1000)
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
    config = TrainConfig(optimizer=name, lr=0.5, momentum=0.8, beta2=0.95, weight_decay=0.1)
    group = build_optimizer(config, nets.build("convnet")).param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.1)
    assert group["momentum"] == 0.8 if name == "sgd" else group["betas"] == (0.8, 0.95)

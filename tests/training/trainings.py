"""Starts of a run as a task makes them, without its process: agreed on, trained, cut off."""

import functools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from clusterddp.checkpoints import state
from clusterddp.data import mnist
from clusterddp.data.loader import Images
from clusterddp.distributed.agreement import RankInfo
from clusterddp.models import nets
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import Agreement
from clusterddp.run.run_dir import RunDir
from clusterddp.training import replay
from clusterddp.training.device import computes_in_bf16
from clusterddp.training.loop import Training, train
from clusterddp.training.stop import StopRequest
from clusterddp.worker import start
from tests.training.ranks import run_ranks

CPU = torch.device("cpu")


class Noisy(nets.ConvNet):
    """A model whose weights depend on every generator of random numbers that a rank has."""

    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(torch.dropout(images, 0.1, self.training))
        if self.training:
            scores = scores * (1 + 0.1 * random.random() + 0.1 * np.random.random())
        return scores


def config(data_dir: Path, **fields: Any) -> TrainConfig:
    defaults: dict[str, Any] = {
        "dataset": "synthetic", "log_every": 1, "lr_scaling": "none", "threads": 1,
        "batch_size": 200, "warmup_steps": 5, "device": "cpu",
    }  # fmt: skip
    return TrainConfig(data_dir=str(data_dir), **{**defaults, **fields})


def info(rank: int, world_size: int) -> RankInfo:
    return RankInfo(
        rank=rank, world_size=world_size, local_rank=rank, host="h01", pid=100 + rank, kind="cpu",
        device="cpu", gpu="", threads=1, torch=torch.__version__,
    )  # fmt: skip


def agree(
    settings: TrainConfig, run: Path, world_size: int = 1, *, number: int | None = None
) -> Agreement:
    """As rank 0 decides. All starts are of one job, so that none waits for another."""
    infos = [info(rank, world_size) for rank in range(world_size)]
    return start.settle_attempt(settings, run, number, {"SLURM_JOB_ID": "7"}, infos)


def build(settings: TrainConfig, agreed: Agreement, **more: Any) -> Training:
    sets = {
        "train_set": _images(settings.data_dir, True),
        "test_set": _images(settings.data_dir, False),
    }
    attempt = Attempt(RunDir(Path(agreed.run_dir)), agreed.attempt)
    given = {**sets, "request": StopRequest(), **more}
    content = state.load(Path(agreed.resume)) if agreed.resume else None
    return Training(settings, agreed, CPU, attempt=attempt, resume_content=content, **given)


def train_rank(
    rank: int, world_size: int, settings: TrainConfig, run: Path,
    stop: Mapping[int, int] | None = None, noisy: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """One start of a run; rank r is asked to stop at step stop[r], and at that one all look."""
    at = (stop or {}).get(rank, -1)
    plain = nets.MODELS["convnet"]
    nets.MODELS["convnet"] = Noisy if noisy else plain
    try:
        box = [agree(settings, run, world_size) if rank == 0 else None]
        dist.broadcast_object_list(box)
        assert box[0] is not None
        agreed = box[0]
        random.seed(rank + (999 if agreed.resume else 0))
        np.random.seed(rank + (999 if agreed.resume else 0))
        ours = build(settings, agreed)
    finally:
        nets.MODELS["convnet"] = plain
    asked_at_once(ours, at)
    reason = train(ours)
    return {
        "reason": reason,
        "step": ours.position.step,
        "samples": ours.position.samples,
        "images": ours.position.images,
        "weights": [parameter.detach().numpy().copy() for parameter in ours.model.parameters()],
        "sha256": state.weights_sha256(ours.model),
        "accuracy": ours.result.accuracy,
        "best": ours._best,
        "buckets": _buckets(ours.learner.ddp),
        "draws": (torch.rand(3).tolist(), random.random(), np.random.random()),
    }


def weights_in_one_piece(folder: Path, data_dir: Path, ranks: int, **fields: Any) -> str:
    """A digest of the weights that ranks end with to which nothing happens, as a report has it.

    They compute in what --precision auto comes to on this machine, as the run that is compared.
    """
    fields = {"precision": "bf16" if computes_in_bf16("cpu") else "fp32", **fields}
    settings = config(data_dir, lr_scaling="linear", warmup_steps=2, epochs=100, **fields)
    return str(run_ranks(ranks, train_rank, settings, folder, None, False)[0]["sha256"])


def _buckets(model: torch.nn.Module) -> str:
    """The sizes of DDP's buckets as it has settled them; empty for a rank alone."""
    if not isinstance(model, DistributedDataParallel):
        return ""
    return str(model._get_ddp_logging_data().get("rebuilt_bucket_sizes", ""))


def train_alone(
    settings: TrainConfig, run: Path, stop: int = -1, noisy: bool = True
) -> dict[str, Any]:
    return train_rank(0, 1, settings, run, {0: stop}, noisy)


def asked_at_once(ours: Training, at: int, reason: str = "signal") -> None:
    """Have the ranks look after every step, and this one be asked to stop at step `at`."""
    ours._poll.due = lambda _: True  # type: ignore[method-assign]
    after(ours, at, lambda: ours._request.note(reason))


def after(ours: Training, at: int, act: Callable[[], object]) -> None:
    """Have something happen once step `at` is done; at 0 at once."""
    if at == ours.position.step:
        act()
    step = ours.journal.step

    def counted() -> None:
        step()
        if ours.position.step == at:
            act()

    ours.journal.step = counted  # type: ignore[method-assign]


@functools.cache
def _images(data_dir: str, train: bool) -> Images:
    return Images(*mnist.read("synthetic", data_dir).tensors(train=train), CPU)


def numbers_drawn() -> tuple[Any, ...]:
    """Some numbers of every generator; an odd count of Gaussians leaves half a pair waiting."""
    return (
        torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(3).tolist(),
        np.random.standard_normal(),
    )  # fmt: skip


def generator_states() -> Tensor:
    """The states of all generators, for comparison."""
    states = replay.random_state(())
    _, key, *rest = states["numpy"]
    _, integers, waiting = states["python"]
    numbers = [*integers, waiting or 0.0, *key, *rest]
    return torch.cat([states["torch"].double(), torch.tensor(numbers, dtype=torch.float64)])

"""The training loop as it stands, against its bare step on batches that are in memory already.

One process, one thread, on the CPU. The loop's seconds are those that it reports itself: order,
batches, learning rate, DDP, step, sums and log lines; not the evaluation and the checkpoint.
"""

import contextlib
import functools
import io
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.pairs import Row, alternate
from clusterddp.attempt import begin
from clusterddp.run_dir import RunDir
from clusterddp.stop import StopRequest
from clusterddp.train_config import TrainConfig
from clusterddp.training import data, models, optimizer
from clusterddp.training.agreement import Agreement
from clusterddp.training.images import Images
from clusterddp.training.loop import Training
from clusterddp.training.synthetic import synthesise

_TRAIN_IMAGES, _TEST_IMAGES = 3200, 64
_PAIRS = 12
_CPU = torch.device("cpu")


def measure() -> list[Row]:
    """Two rows: against the step of the bare model, and against the step under DDP."""
    with tempfile.TemporaryDirectory() as name, _alone():
        folder = Path(name)
        config = TrainConfig(dataset="synthetic", data_dir=name, epochs=1, device="cpu")
        synthesise(
            name, train_images=_TRAIN_IMAGES, test_images=_TEST_IMAGES, progress=lambda _: None
        )
        train_set, test_set = (
            Images(*data.load(config.dataset, name, train=train), _CPU) for train in (True, False)
        )
        batches = list(train_set.batches(torch.arange(len(train_set)), config.batch_size))
        loop = functools.partial(_loop, config, train_set, test_set, folder)
        rows = []
        for under_ddp, baseline in (
            (False, "the same step, tensors in memory"),
            (True, "the same step under DDP, tensors in memory"),
        ):
            bare = functools.partial(_steps, config, batches, under_ddp)
            before, seconds = alternate(bare, loop, pairs=_PAIRS)
            rows.append(
                Row(
                    f"training loop, batches of {config.batch_size}",
                    baseline,
                    before,
                    seconds,
                    images=len(train_set),
                )
            )
        return rows


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A world of one rank with one thread; what it prints is not shown."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined] # torch does not mark it as exported
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    hidden = io.StringIO()  # no terminal either, hence no progress bar
    try:
        with contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden):
            yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def _loop(config: TrainConfig, train_set: Images, test_set: Images, folder: Path) -> float:
    """Train one epoch from the start, in a run of its own; the seconds that the run reports."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        attempt = begin(RunDir(Path(name)))
        attempt.checkpoints.mkdir()
        agreed = Agreement(
            backend="gloo",
            kind="cpu",
            threads=1,
            world_size=1,
            global_batch_size=config.batch_size,
            reference_world_size=1,
        )
        training = Training(
            config,
            agreed,
            rank=0,
            device=_CPU,
            train_set=train_set,
            test_set=test_set,
            attempt=attempt,
            request=StopRequest(),
        )
        training.run()
    return training.position.seconds


def _steps(config: TrainConfig, batches: list[tuple[Tensor, Tensor]], under_ddp: bool) -> float:
    """Forward, backward and update over batches that are ready; seconds."""
    torch.manual_seed(config.seed)
    model: nn.Module = models.build(config.model)
    model = model.to(memory_format=torch.channels_last)  # as the loop does on the CPU
    update = optimizer.build(config, model)
    if under_ddp:
        model = DistributedDataParallel(
            model, bucket_cap_mb=config.bucket_cap_mb, gradient_as_bucket_view=True
        )
    began = time.perf_counter()
    for images, labels in batches:
        update.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call] # torch declares no types for it
        update.step()
    return time.perf_counter() - began

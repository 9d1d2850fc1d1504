"""What the recipes reach on the real MNIST, seed by seed, in the project's own training loop.

    python -m benchmarks.accuracy --data-dir data              # fast; about a minute and a half
    python -m benchmarks.accuracy accurate --data-dir data     # minutes a seed

Apart from `python -m benchmarks`, for it takes its time and compares with nothing. One process,
without Slurm. The seconds are those that a run reports as `train_seconds`: batches, forward,
backward, update, sums and log lines; not the evaluation and the checkpoint at the end. The test
set is read once a seed, at the end.
"""

import contextlib
import dataclasses
import io
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch
import torch.distributed as dist

from benchmarks import hardware
from clusterddp.data import mnist
from clusterddp.data.loader import Images
from clusterddp.request.train_config import RECIPES, TrainConfig
from clusterddp.run.attempt import begin
from clusterddp.run.records import Agreement
from clusterddp.run.run_dir import RunDir
from clusterddp.training import device, loop
from clusterddp.training.loop import Training
from clusterddp.training.step import use_tf32
from clusterddp.training.stop import StopRequest

_SEEDS = {"fast": 20, "accurate": 5}
# What a process does more slowly the first time: the choice of kernels, the memory they work in.
_WARM_UP_STEPS = 10


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Choice(list(RECIPES)), default="fast")
@click.option("--data-dir", default="data", show_default=True, help="Folder that holds MNIST/raw.")
@click.option("--device", "kind", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--threads", default=2, show_default=True, help="Compute threads.")
@click.option(
    "--seeds", default=0, show_default="20 of fast, 5 of accurate", help="How many seeds to train."
)
@click.option("--first-seed", default=0, show_default=True, help="The seed to begin with.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every seed.")
def command(
    recipe: str,
    data_dir: str,
    kind: str,
    threads: int,
    seeds: int,
    first_seed: int,
    as_json: bool,
) -> None:
    """Train a RECIPE with several seeds, and print what they reach and how long they take.

    On a GPU the step is replayed as a CUDA graph; its capture is no part of the training.
    """
    config = TrainConfig(
        recipe=recipe, data_dir=data_dir, device=kind, threads=threads, **RECIPES[recipe].settings
    )
    on = _device(kind)
    if kind == "cuda":  # as a task sets its GPU up
        torch.backends.cudnn.deterministic = True
        use_tf32(_precision(kind))
    with _alone(threads):
        held = mnist.read("mnist", data_dir)
        sets = tuple(Images(*held.tensors(train=train), on) for train in (True, False))
        began = time.perf_counter()
        train(dataclasses.replace(config, max_steps=_WARM_UP_STEPS), *sets)
        warm_up = time.perf_counter() - began
        accuracies, seconds, captures = [], [], []
        for seed in range(first_seed, first_seed + (seeds or _SEEDS[recipe])):
            training = train(dataclasses.replace(config, seed=seed), *sets)
            accuracies.append(training.result.accuracy)
            seconds.append(training.position.seconds)
            captures.append(training.capture_seconds)
            click.echo(f"seed {seed}: {accuracies[-1]:.2%} in {seconds[-1]:.2f} s", err=True)
    if as_json:
        found = {
            "accuracies": accuracies,
            "seconds": seconds,
            "capture_seconds": captures,
            "warm_up_seconds": warm_up,
        }
        machine = hardware.named()
        asked = {"recipe": recipe, "threads": threads, "hardware": machine}
        click.echo(json.dumps({**asked, **found}, indent=2))
        return
    click.echo(
        f"{recipe}: {len(accuracies)} seeds from {first_seed}, {threads} threads, "
        f"{_precision(kind)}, on {hardware.named()}\n{summary(accuracies, seconds, warm_up)}"
    )
    if kind == "cuda":
        click.echo(f"capture before each training: median {statistics.median(captures):.2f} s")


def summary(accuracies: list[float], seconds: list[float], warm_up: float) -> str:
    """Three lines: test accuracy, seconds of training, and what came before them."""
    error = statistics.stdev(accuracies) / math.sqrt(len(accuracies)) if accuracies[1:] else 0.0
    return (
        f"test accuracy: mean {statistics.fmean(accuracies):.3%}, standard error {error:.3%}, "
        f"{min(accuracies):.2%} to {max(accuracies):.2%}\n"
        f"training: median {statistics.median(seconds):.2f} s, "
        f"{min(seconds):.2f} to {max(seconds):.2f} s\n"
        f"warm-up, {_WARM_UP_STEPS} steps and an evaluation: {warm_up:.2f} s"
    )


def train(config: TrainConfig, train_set: Images, test_set: Images) -> Training:
    """One training from the start to its end, in a run directory that goes with it."""
    with tempfile.TemporaryDirectory() as name, _hidden():
        attempt = begin(RunDir(Path(name)))
        attempt.checkpoints.mkdir()
        agreed = Agreement(
            backend="gloo",
            kind=config.device,
            threads=config.threads,
            world_size=1,
            precision=_precision(config.device),
            cuda_graph=config.device == "cuda",
            global_batch_size=config.step_size,
            reference_world_size=1,
        )
        on = _device(config.device)
        training = Training(config, agreed, on, train_set, test_set, attempt, StopRequest())
        loop.train(training)
    return training


def _device(kind: str) -> torch.device:
    """Return the first device of its kind, by number as a captured step's release needs it."""
    return torch.device(kind, 0)


def _precision(kind: str) -> str:
    """As a run decides that leaves it open."""
    return "bf16" if device.computes_in_bf16(kind) else "fp32"


@contextlib.contextmanager
def _alone(threads: int) -> Iterator[None]:
    """A world of one rank."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    store = dist.HashStore()  # type: ignore[attr-defined] # torch does not mark it as exported
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(before)


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    """What a training prints is not shown; it sees no terminal, hence draws no progress bar."""
    hidden = io.StringIO()
    with contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden):
        yield


if __name__ == "__main__":
    command()

"""The project's own training loop, as its tasks run it; the seconds are those that it reports."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.contenders.serving import request, serve
from clusterddp.data import shared_memory
from clusterddp.data.loader import Images
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import begin
from clusterddp.run.records import Agreement
from clusterddp.run.run_dir import RunDir
from clusterddp.training.loop import Training
from clusterddp.training.loop import train as run_loop
from clusterddp.training.stop import StopRequest


def main() -> None:
    asked = request()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if asked.device == "cuda" else "gloo")
    torch.set_num_threads(1)
    device = torch.device(asked.device)
    config = TrainConfig(
        data_dir=asked.root, batch_size=asked.batch_size, optimizer="sgd", lr=1e-4, momentum=0.0,
        lr_scaling="none", warmup_steps=0, epochs=1000, max_steps=asked.steps,
        eval_every="1000epochs", save_every="1000epochs", precision=asked.precision,
    )  # fmt: skip
    held = shared_memory.read("mnist", asked.root)
    train_set, test_set = (Images(*held.tensors(train=train), device) for train in (True, False))
    few = Images(test_set._pixels[:64], test_set._labels[:64], device)

    def train() -> float:
        with tempfile.TemporaryDirectory() as name:
            attempt = begin(RunDir(Path(name)))
            attempt.checkpoints.mkdir()
            agreed = Agreement(
                backend=dist.get_backend(), kind=asked.device, threads=1, world_size=world_size,
                precision=asked.precision, cuda_graph=asked.device == "cuda" and world_size == 1,
                global_batch_size=asked.batch_size * world_size, reference_world_size=world_size,
            )  # fmt: skip
            training = Training(
                config, agreed, rank, device, train_set, few, attempt, StopRequest()
            )
            run_loop(training)
            dist.barrier()
        return training.position.seconds

    serve(train)


main()

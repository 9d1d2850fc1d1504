"""The project's own training loop, as its tasks run it; the seconds are those that it reports.

Options: fields of TrainConfig; `folder`, in which it writes; `usual_layout`, that of one channel
for images and the first convolution; `broadcast_buffers`, before every pass of DDP; and those that
`entered` has.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders.serving import request, serve
from benchmarks.contenders.timing import entered
from clusterddp.data import mnist
from clusterddp.data.loader import Images, Loader, as_images
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import begin
from clusterddp.run.records import Agreement
from clusterddp.run.run_dir import RunDir
from clusterddp.training import step as steps
from clusterddp.training.loop import Training
from clusterddp.training.loop import train as run_loop
from clusterddp.training.stop import StopRequest


def main() -> None:
    asked = request()
    options = asked.options
    world_size = int(os.environ["WORLD_SIZE"])
    device = entered(asked)
    settings: dict[str, Any] = {
        "optimizer": "sgd", "lr": 1e-4, "momentum": 0.0, "lr_scaling": "none", "warmup_steps": 0,
        "epochs": 1000, "eval_every": "1000epochs", "save_every": "1000epochs",
        **{name: value for name, value in options.items() if hasattr(TrainConfig, name)},
    }  # fmt: skip
    config = TrainConfig(
        data_dir=asked.root, batch_size=asked.batch_size, max_steps=asked.steps,
        precision=asked.precision, **settings,
    )  # fmt: skip
    held = mnist.read("mnist", asked.root)
    train_set: Images | Loader
    train_set, test_set = (Images(*held.tensors(train=train), device) for train in (True, False))
    few = Images(test_set._pixels[:64], test_set._labels[:64], device)
    if config.data_pipeline == "loader":
        files = mnist.torchvision_set("mnist", asked.root, train=True)
        train_set = Loader(files, device, config.num_workers)
    if options.get("usual_layout"):
        vars(steps)["as_images"] = _in_the_usual_layout

    def train() -> float:
        with tempfile.TemporaryDirectory(dir=options.get("folder")) as name:
            attempt = begin(RunDir(Path(name)))
            attempt.checkpoints.mkdir()
            agreed = Agreement(
                backend=dist.get_backend(), kind=asked.device, threads=1, world_size=world_size,
                precision=asked.precision,
                cuda_graph=asked.device == "cuda" and config.cuda_graph == "on",
                global_batch_size=asked.batch_size * world_size, reference_world_size=world_size,
            )  # fmt: skip
            training = Training(config, agreed, device, train_set, few, attempt, StopRequest())
            if options.get("usual_layout"):
                for parameter in training.model.parameters():
                    if parameter.dim() == 4 and parameter.shape[1] == 1:
                        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            if "broadcast_buffers" in options:
                training.learner.ddp.broadcast_buffers = options["broadcast_buffers"]
            run_loop(training)
            dist.barrier()
        return training.position.seconds

    serve(train)


def _in_the_usual_layout(batch: Tensor) -> Tensor:
    return as_images(batch).clone(memory_format=torch.contiguous_format)


main()

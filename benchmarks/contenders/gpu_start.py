"""One training from the start of its process: the seconds of each phase, then what a step costs the
host, a look at the others' wishes, a copy for a checkpoint, and memory. Prints them as JSON.

BENCHMARK_BEGAN has the time at which the process was started. Options: `cuda_graph` off.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contenders.serving import request

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from clusterddp.training.loop import Training

_REPLAYS, _ASKS = 200, 50
_BEFORE_CUDA = ("import torch", "import clusterddp")


def main() -> None:
    asked = request()
    marks = [("", float(os.environ["BENCHMARK_BEGAN"]))]

    def mark(name: str) -> None:
        if on_gpu and name not in _BEFORE_CUDA:
            torch.cuda.synchronize()
        marks.append((name, time.time()))

    on_gpu = asked.device == "cuda"
    import torch
    import torch.distributed as dist

    torch.optim.SGD([torch.zeros(())])  # imports as much again (torch._dynamo, sympy)
    mark("import torch")
    from clusterddp.data import mnist
    from clusterddp.data.loader import Images, as_images
    from clusterddp.models import nets
    from clusterddp.request.train_config import TrainConfig
    from clusterddp.run.attempt import begin
    from clusterddp.run.records import Agreement
    from clusterddp.run.run_dir import RunDir
    from clusterddp.training.loop import Training
    from clusterddp.training.step import DTYPES, autocast, use_tf32
    from clusterddp.training.stop import StopRequest

    mark("import clusterddp")
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.zeros(1, device=device)
    if on_gpu:
        torch.backends.cudnn.deterministic = True
        use_tf32(asked.precision)
    mark("CUDA context")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    mark("process group, gloo")
    held = mnist.read("mnist", asked.root)
    train_set, test_set = (Images(*held.tensors(train=train), device) for train in (True, False))
    mark("dataset, to the device")
    [(images, labels)] = train_set.batches(torch.arange(asked.batch_size), asked.batch_size)
    with autocast(asked.device, DTYPES[asked.precision]):
        nets.build("convnet").to(device)(as_images(images)).float().sum().backward()
    mark("first pass: cuDNN and cuBLAS load")
    config = TrainConfig(data_dir=asked.root, batch_size=asked.batch_size, max_steps=10**6)
    agreed = Agreement(
        backend="gloo", kind=asked.device, threads=1, world_size=1, precision=asked.precision,
        cuda_graph=on_gpu and asked.options.get("cuda_graph") != "off",
        global_batch_size=asked.batch_size, reference_world_size=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        attempt = begin(RunDir(Path(name)))
        training = Training(
            config, agreed, device, train_set, test_set, attempt, StopRequest()
        )  # fmt: skip
        training.prepare()
        mark("model, optimizer, capture")
        training.learner.learn(images, labels)
        mark("first step")
        found = _afterwards(training, images, labels)
    phases = {name: now - before for (_, before), (name, now) in itertools.pairwise(marks)}
    print(json.dumps({"phases": phases, **found}), flush=True)
    os._exit(0)


def _afterwards(training: "Training", images: "Tensor", labels: "Tensor") -> dict[str, object]:
    """Measure what steps, and what stands beside them, cost from here on."""
    import torch

    from clusterddp.checkpoints import state
    from clusterddp.distributed import agreement
    from clusterddp.distributed.agreement import Poll
    from clusterddp.training import replay
    from clusterddp.training.device import peak_bytes

    device, learner = training.device, training.learner
    on_gpu = device.type == "cuda"
    began = time.perf_counter()
    for _ in range(_REPLAYS):
        learner.step.set_lr(0.001)
        learner.learn(images, labels)
    host = time.perf_counter() - began
    if on_gpu:
        torch.cuda.synchronize()
    steps = time.perf_counter() - began
    began = time.perf_counter()
    poll = Poll()
    for number in range(_ASKS):
        poll.ask(number, [0, 0])
    asking = time.perf_counter() - began
    began = time.perf_counter()
    random_states = agreement.gather(replay.random_state(()), on_first=True)
    state.collect(learner.states, training.position, world_size=1, random_states=random_states)
    copying = time.perf_counter() - began
    return {
        "host_seconds": host / _REPLAYS,
        "step_seconds": steps / _REPLAYS,
        "ask_seconds": asking / _ASKS,
        "copy_seconds": copying,
        "allocated_mib": peak_bytes(device) / 2**20,
        "reserved_mib": torch.cuda.max_memory_reserved() / 2**20 if on_gpu else 0.0,
        "driver_mib": _seen_by_the_driver(),
        "nccl_seconds": _nccl_seconds(device) if on_gpu else None,  # last, for it takes memory
    }


def _nccl_seconds(device: "torch.device") -> float | None:
    """The first exchange of a group of one; None where NCCL refuses it."""
    import torch
    import torch.distributed as dist

    began = time.perf_counter()
    try:
        group = dist.new_group(backend="nccl")
        assert isinstance(group, dist.ProcessGroup)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        print(f"NCCL: {error}", file=sys.stderr)
        return None
    return time.perf_counter() - began


def _seen_by_the_driver() -> float | None:
    """GPU memory of this process by nvidia-smi, which sees no processes in some containers."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = (line.split(", ") for line in answer.stdout.splitlines())
    return next((float(row[1]) for row in rows if row[0] == str(os.getpid())), None)


if __name__ == "__main__":
    main()

"""One all-reduce of so many bytes, again and again; answers with the seconds of one."""

import os
import time

import torch
import torch.distributed as dist

from benchmarks.contenders.serving import request, serve

_SECONDS = 0.3


def main() -> None:
    asked = request()  # its batch_size is the number of bytes
    on_gpu = asked.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    values = torch.zeros(max(asked.batch_size // 4, 1), device=asked.device)

    def some(count: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(values)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def train() -> float:
        one = torch.tensor([some(3) / 3], device=asked.device)
        dist.all_reduce(one, op=dist.ReduceOp.MAX)  # as many on every rank
        count = max(int(_SECONDS / one.item()), 3)
        return some(count) / count

    serve(train)


main()

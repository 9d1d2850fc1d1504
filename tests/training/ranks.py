"""Runs a function as several gloo ranks, each a process of its own, and returns their results."""

import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.forked import CONTEXT

PATIENCE = 120


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(rank, world_size, *arguments)` on every rank, inside a process group."""
    with tempfile.TemporaryDirectory() as folder:
        readers, processes = [], []
        for rank in range(world_size):
            reader, writer = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_rank,
                args=(writer, f"{folder}/store", function, (rank, world_size, *arguments)),
            )
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        try:
            return [_receive(reader) for reader in readers]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _receive(reader: Connection) -> Any:
    assert wait([reader], PATIENCE), "a rank did not answer"
    result, failure = reader.recv()
    assert not failure, failure
    return result


def _rank(
    writer: Connection, store: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world_size = arguments[:2]
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
        writer.send((function(*arguments), ""))
        dist.barrier()
    except BaseException:
        writer.send((None, traceback.format_exc()))

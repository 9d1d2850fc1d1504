"""How a start grows with its ranks: deriving who 80,000 of them are, and their meeting.

The meeting is measured with as many real processes as this machine carries: each opens the store,
agrees and joins a gloo group, as a task does. They are forked from one server that has imported
torch, so that their imports, which are another benchmark's, do not hide it.

    python -m benchmarks.scale [--ranks 2 4 8 …] [--rounds N]
"""

import argparse
import itertools
import multiprocessing
import os
import signal
import socket
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from benchmarks import ranks
from benchmarks.pairs import Row

RANKS = (2, 4, 8, 16, 32)
_ROUNDS = 5
_PATIENCE_SECONDS = 120
_PHASES = ("open_store", "agree", "init_process_group")
_CONTEXT = multiprocessing.get_context("forkserver")


def measure() -> list[Row]:
    """`DistEnv` in 10,000 nodes x 8, then each meeting against torch's own of as many ranks."""
    return [*ranks.measure(), *meetings(RANKS, _ROUNDS)]


def meetings(sizes: Sequence[int], rounds: int) -> list[Row]:
    """Return one row per number of ranks; the baseline is plain `init_process_group("env://")`."""
    _CONTEXT.set_forkserver_preload(["clusterddp.distributed.rendezvous"])
    rows = []
    for size in sizes:
        bare, ours = [], []
        for number in range(rounds + 1):
            baseline, measured = max(sum(each) for each in _meet(size, bare=True)), _meet(size)
            if number:  # the first pair fills caches
                bare.append(baseline)
                ours.append(max(sum(each) for each in measured))
        rows.append(
            Row(f"rendezvous of {size} ranks", 'torch\'s "env://"', tuple(bare), tuple(ours))
        )
    return rows


def curve(sizes: Sequence[int], rounds: int) -> str:
    """Milliseconds of each phase, the slowest rank's, medians over the rounds; as Markdown."""
    _CONTEXT.set_forkserver_preload(["clusterddp.distributed.rendezvous"])
    lines = [f"| ranks | {' | '.join(_PHASES)} |", "| ---: | ---: | ---: | ---: |"]
    for size in sizes:
        seen = [_meet(size) for _ in range(rounds + 1)][1:]
        medians = [
            statistics.median(max(each[phase] for each in meeting) for meeting in seen)
            for phase in range(len(_PHASES))
        ]
        lines.append(f"| {size} | {' | '.join(f'{1000 * value:.0f}' for value in medians)} |")
    return "\n".join(lines)


def _meet(size: int, *, bare: bool = False) -> list[list[float]]:
    """Seconds of each phase on each rank; all are held until the last process is there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    go = _CONTEXT.Event()
    readers, processes = [], []
    try:
        for rank in range(size):
            reader, writer = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_bare if bare else _ours, args=(rank, size, port, go, writer), daemon=True
            )
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        for reader in readers:
            assert _receive(reader) == "here"
        go.set()
        return [_receive(reader) for reader in readers]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(reader: Connection) -> Any:
    assert wait_for([reader], _PATIENCE_SECONDS), "a rank did not answer"
    return reader.recv()


def _ours(rank: int, size: int, port: int, go: Any, writer: Connection) -> None:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    from clusterddp.distributed import rendezvous, tcp_store
    from clusterddp.ranks.dist_env import DistEnv

    env = DistEnv.from_environ(_variables(rank, size, port))
    hello = {"rank": rank, "world_size": size, "host": socket.gethostname(), "pid": os.getpid()}
    bound = tcp_store.bind(env, {})
    writer.send("here")
    go.wait()
    times = [time.perf_counter()]
    store = rendezvous.open_store(env, {}, _PATIENCE_SECONDS, bound=bound)
    times.append(time.perf_counter())
    rendezvous.agree(store, env, hello, lambda hellos: {"ranks": len(hellos)}, _PATIENCE_SECONDS)
    times.append(time.perf_counter())
    dist.init_process_group(
        "gloo", store=PrefixStore("group", store), rank=rank, world_size=size,
        timeout=timedelta(seconds=_PATIENCE_SECONDS),
    )  # fmt: skip
    times.append(time.perf_counter())
    dist.barrier()
    writer.send([after - before for before, after in itertools.pairwise(times)])
    signal.pause()  # until it is killed: a rank that leaves would end exchanges of others


def _bare(rank: int, size: int, port: int, go: Any, writer: Connection) -> None:
    import torch.distributed as dist

    os.environ.update(_variables(rank, size, port))
    writer.send("here")
    go.wait()
    began = time.perf_counter()
    dist.init_process_group("gloo")
    seconds = time.perf_counter() - began
    dist.barrier()
    writer.send([seconds])
    signal.pause()


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the meetings, and print the table and the curve."""
    from benchmarks.__main__ import table

    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    options = parser.parse_args(argv)
    print(f"{table(meetings(options.ranks, options.rounds))}\n")
    print(curve(options.ranks, options.rounds))


if __name__ == "__main__":
    main()

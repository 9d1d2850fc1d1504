"""Costs of a start and an end by the number of ranks, eight a node: `python -m benchmarks.nodes`.

Up to 512 ranks are processes that do what a task and its parent do, without a training: open the
store, agree, record the start, send heartbeats, record the end. Of 4,096, rank 0 is a process, and
16 others do the same steps for 256 ranks each. torch is imported once, before the processes are
forked. One directory stands for the shared one.
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterddp.run.attempt import Attempt

SIZES = (8, 64, 512, 4096)
LARGEST_REAL = 512
RANKS_PER_NODE = 8
_SIMULATING = 16
_PATIENCE_SECONDS = 240.0
_BEAT_SECONDS = 2.0
_CONTEXT = multiprocessing.get_context("fork")
_LABELS = {
    "meeting": "seconds from the last rank's start to the agreement of all",
    "connections": "connections to rank 0",
    "files": "record files at the end",
    "host": "files that a host's `stacks` opens",
    "spares": "files that a look of the spare nodes opens",
    "status": "seconds of `clusterddp status`",
    "judge": "seconds to read the ends and find the first failure",
    "metrics": "bytes of a line of metrics",
}


def table(sizes: Sequence[int] = SIZES) -> list[str]:
    """Measure each size in a process; return the lines of a table with exponents."""
    found = [_measured(size) for size in sizes]
    heads = [f"{size:,}{'' if size <= LARGEST_REAL else ' simulated'}" for size in sizes]
    lines = [
        f"| ranks | {' | '.join(heads)} | exponent |",
        "| --- |" + " ---: |" * (len(sizes) + 1),
    ]
    for name, label in _LABELS.items():
        values = [each[name] for each in found]
        shown = [f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for value in values]
        first, last = max(float(values[0]), 1e-3), max(float(values[-1]), 1e-3)
        exponent = math.log(last / first) / math.log(sizes[-1] / sizes[0]) if len(sizes) > 1 else 0
        lines.append(f"| {label} | {' | '.join(shown)} | {exponent:.2f} |")
    return lines


def _measured(size: int) -> dict[str, Any]:
    """Measure a size in a new process, which may open many files."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_measure, args=(size, writer))
    process.start()
    writer.close()
    try:
        answer: dict[str, Any] = reader.recv()
        return answer
    finally:
        process.join(_PATIENCE_SECONDS)
        process.kill()


def _measure(size: int, writer: Connection) -> None:
    """Start the ranks, look at what they cost once all are there, and have them end."""
    from clusterddp.distributed import heartbeat  # noqa: F401 -- torch, before the forks
    from clusterddp.request.resources import Resources
    from clusterddp.request.spec import JobSpec
    from clusterddp.request.train_config import TrainConfig
    from clusterddp.run.attempt import begin
    from clusterddp.run.run_dir import RunDir

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signals = Signals()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "jobs", "run")
        spec = JobSpec(
            run_name="run", run_dir=str(path), resources=Resources(), python=sys.executable,
            train=TrainConfig(),
        )  # fmt: skip
        with RunDir.create(spec, "") as run:
            attempt = begin(run)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        groups = [
            _CONTEXT.Process(target=_be_ranks, args=(ranks, size, port, attempt, signals))
            for ranks in _split(size)
        ]
        for each in groups:
            each.start()
        try:
            found = _watch(attempt, size, port, signals)
            signals.end.set()
            for each in groups:
                each.join(_PATIENCE_SECONDS)
            writer.send({**found, **_ends(attempt)})
        finally:
            for each in groups:
                each.kill()


def _watch(attempt: "Attempt", size: int, port: int, signals: "Signals") -> dict[str, Any]:
    """Measure the ranks' meeting, and what is done while they train."""
    _await(signals.here, size)
    began = time.monotonic()
    signals.go.set()
    _await(signals.met, size)
    seconds = time.monotonic() - began
    _await(signals.ready, size)
    return {"meeting": seconds, "connections": _connections(port), **_looks(attempt, size)}


class Signals:
    """What the ranks and the one who measures tell each other."""

    def __init__(self) -> None:
        self.here, self.met, self.ready = (_CONTEXT.Semaphore(0) for _ in range(3))
        self.go, self.end = _CONTEXT.Event(), _CONTEXT.Event()


def _await(semaphore: Any, count: int) -> None:
    for _ in range(count):
        assert semaphore.acquire(timeout=_PATIENCE_SECONDS), "a rank did not answer"


def _split(size: int) -> list[range]:
    """Return the ranks of each process; rank 0 always has its own."""
    if size <= LARGEST_REAL:
        return [range(rank, rank + 1) for rank in range(size)]
    step = size // _SIMULATING
    others = [range(max(start, 1), start + step) for start in range(0, size, step)]
    return [range(1), *others]


def _be_ranks(ranks: range, size: int, port: int, attempt: "Attempt", signals: Signals) -> None:
    """Do what tasks and their parents do, but no training. Rank 3 fails at its end, by itself.

    A process of several ranks takes each step for one after the other: threads would wait for the
    interpreter's lock rather than for rank 0.
    """
    from clusterddp import log
    from clusterddp.distributed import heartbeat, rendezvous, tcp_store
    from clusterddp.distributed.heartbeat import Heartbeat, Progress
    from clusterddp.ranks.dist_env import DistEnv
    from clusterddp.run.outcome import node_path
    from clusterddp.worker.node_record import NodeRecord

    log.to(lambda _: None).__enter__()
    environs = [_variables(rank, size, port) for rank in ranks]
    envs = [DistEnv.from_environ(environ) for environ in environs]
    bounds = [tcp_store.bind(env, {}) for env in envs]
    for _ in ranks:
        signals.here.release()
    signals.go.wait()
    # As where no name server answers: torch would look up each of its many addresses.
    stores = [
        rendezvous.open_store(env, {}, _PATIENCE_SECONDS, bound=bound, answered=lambda: False)
        for env, bound in zip(envs, bounds, strict=True)
    ]
    for met in _agree(stores, envs):
        assert met == {"ranks": size}
        signals.met.release()
    beat = Heartbeat("", Progress().position, 0.0, 1)
    kept = []
    for env, environ in zip(envs, environs, strict=True):
        host = environ["SLURMD_NODENAME"]
        record = NodeRecord(node_path(attempt.outcomes, host), attempt.write_final_record)
        fields = _start_of(env, host)
        assert record.keep(fields), f"rank {env.rank} has no part in its node's record"
        shared = heartbeat.connect(env, environ, _PATIENCE_SECONDS, _BEAT_SECONDS)
        shared.set(f"progress/{env.rank}", beat.to_json())
        kept.append((record, fields, shared))
        signals.ready.release()
    signals.end.wait()
    for record, fields, _ in kept:
        own = fields["rank"] == 3
        error = {"type": "ValueError" if own else "RuntimeError", "message": "at the end",
                 "peer_lost": not own}  # fmt: skip
        record.keep(fields | {"ended": time.time(), "exit_code": 1, "error": error, "written": 2.0})
    for record, _, _ in kept:
        record.close(failed=False)
    os._exit(0)


def _agree(stores: Sequence[Any], envs: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Take part in the agreement as `rendezvous.agree` does; yield each rank's decision."""
    from clusterddp.distributed import rendezvous

    hellos = [
        {"rank": env.rank, "world_size": env.world_size, "host": f"n{env.node_rank:04}",
         "pid": os.getpid()} for env in envs
    ]  # fmt: skip
    if len(stores) == 1:
        yield rendezvous.agree(
            stores[0], envs[0], hellos[0], lambda all_: {"ranks": len(all_)}, _PATIENCE_SECONDS
        )
        return
    for store, env, hello in zip(stores, envs, hellos, strict=True):
        assert store.add(f"claim/{env.rank}", 1) == 1
        rendezvous.put(store, f"hello/{env.rank}", hello)
    for store, env in zip(stores, envs, strict=True):
        rendezvous.wait(store, ["decision"], _PATIENCE_SECONDS)
        yield rendezvous.take(store, env, "decision", "rank 0's decision")


def _start_of(env: Any, host: str) -> dict[str, Any]:
    return {
        "rank": env.rank, "local_rank": env.local_rank, "node_rank": env.node_rank, "host": host,
        "job_id": "1", "pid": os.getpid(), "restart": 0, "step_id": "0", "started": time.time(),
        "written": 1.0,
    }  # fmt: skip


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    local, node = min(RANKS_PER_NODE, size), rank // RANKS_PER_NODE
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank % RANKS_PER_NODE), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(size // local), "NODE_RANK": str(node),
        "SLURMD_NODENAME": f"n{node:04}",
    }  # fmt: skip


def _connections(port: int) -> int:
    """Count the connections that rank 0's store has accepted (proc(5), net/tcp: 01 established)."""
    words = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(each[1].endswith(f":{port:04X}") and each[3] == "01" for each in words)


def _looks(attempt: "Attempt", size: int) -> dict[str, Any]:
    """Measure what is done while the ranks train."""
    from clusterddp.run.outcome import read_outcomes, record_paths
    from clusterddp.run.records import RateSpread

    assert len(read_outcomes(attempt.outcomes)) == size
    jobs = attempt.run.path.parent
    argv = [sys.executable, "-m", "clusterddp", "status", "run", "--runs-dir", str(jobs), "--json"]
    began = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    rates = [1000.0 + rank % 7 for rank in range(size)]
    spread = RateSpread.of(rates)
    return {
        "status": seconds,
        "host": len(record_paths(attempt.outcomes, "n0000")),
        "spares": len(record_paths(attempt.outcomes)),
        "metrics": len(json.dumps(dataclasses.asdict(spread) if spread else rates)),
    }


def _ends(attempt: "Attempt") -> dict[str, Any]:
    """Measure the judgement of the ends: which rank failed first."""
    from clusterddp.run.outcome import first_failure, read_outcomes

    began = time.monotonic()
    failure = first_failure(read_outcomes(attempt.outcomes))
    seconds = time.monotonic() - began
    assert failure and failure.rank == 3, failure
    return {"judge": seconds, "files": len([*attempt.outcomes.iterdir()])}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nodes")
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="multiples of 8")
    print(*table(parser.parse_args(argv).ranks), sep="\n")


if __name__ == "__main__":
    main()

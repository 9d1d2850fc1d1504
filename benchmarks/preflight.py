"""Quick preflight as nodes grow: the probes of so many nodes, all processes of this machine.

The nodes are simulated: their probes share this machine's cores and its loopback, so that the time
for many is above all that of so many interpreters on these cores, which the baseline has as well.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.pairs import Row, alternate, note
from clusterddp.preflight import collector, evaluation
from clusterddp.slurm.forms import NONCE_VARIABLE

NODES = (4, 16, 64)
PAIRS = 3
_PROBE = [sys.executable, "-m", "clusterddp", "probe"]


def measure() -> list[Row]:
    """Return a row for each number of nodes."""
    return [_row(count) for count in NODES]


def _row(count: int) -> Row:
    hosts = [f"n{number:02d}" for number in range(count)]
    baseline, seconds = alternate(lambda: _start(hosts), lambda: _check(hosts), PAIRS)
    return Row(f"preflight of {count} nodes", "their processes only", baseline, seconds)


def _start(hosts: Sequence[str]) -> float:
    began = time.perf_counter()
    _wait(_processes(hosts, [*_PROBE, "--help"], os.environ))
    return time.perf_counter() - began


def _check(hosts: Sequence[str]) -> float:
    """Check simulated nodes; returns the seconds from the start to the result."""
    began, nonce = time.perf_counter(), secrets.token_hex(16)
    with collector.listen() as server:
        port = server.getsockname()[1]
        argv = [*_PROBE, "--collector=127.0.0.1", f"--port={port}"]
        probes = _processes(hosts, argv, {**os.environ, NONCE_VARIABLE: nonce})
        collection = collector.collect(server, hosts, nonce, lambda: False)
        judged = evaluation.evaluate(collection.nodes, collection.unresponsive)
        _wait(probes)
    for host, reason in judged.failed.items():
        note(f"preflight of {len(hosts)} nodes: {host} failed: {reason}")
    return time.perf_counter() - began


def _processes(
    hosts: Sequence[str], argv: Sequence[str], environ: Mapping[str, str]
) -> "list[subprocess.Popen[bytes]]":
    return [
        subprocess.Popen(argv, env={**environ, "SLURMD_NODENAME": host}, stdout=subprocess.DEVNULL)
        for host in hosts
    ]


def _wait(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        process.wait()

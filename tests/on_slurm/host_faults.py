"""Faults put into one host of a real Slurm; each function returns what takes it out again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.on_slurm.cluster import SLURMD_PORT, SlurmCluster

Undo = Callable[[], object]


def slow_link(cluster: SlurmCluster, host: str) -> Undo:
    """A link of 20 Mbit/s, for what the host sends."""
    device = ["dev", "eth0", "root"]
    rate = ["tbf", "rate", "20mbit", "burst", "64kb", "latency", "400ms"]
    cluster.run_on(host, ["tc", "qdisc", "add", *device, *rate], check=True)
    return lambda: cluster.run_on(host, ["tc", "qdisc", "del", *device], check=True)


def blocked_port(cluster: SlurmCluster, host: str) -> Undo:
    """A firewall that lets in nobody but Slurm."""
    port = str(SLURMD_PORT)
    rule = ["INPUT", "-p", "tcp", "--syn", "!", "--dport", port, "-j", "DROP"]
    cluster.run_on(host, ["iptables", "-A", *rule], check=True)
    return lambda: cluster.run_on(host, ["iptables", "-D", *rule], check=True)


def full_disk(cluster: SlurmCluster, host: str) -> Undo:
    """A /dev/shm without room for a megabyte."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", "/dev/shm"]
    on_host = ["nsenter", f"--mount=/proc/{slurmd(cluster, host)}/ns/mnt"]
    subprocess.run([*on_host, *mount], check=True)
    return lambda: subprocess.run([*on_host, "umount", "/dev/shm"], check=True)


def busy_core(cluster: SlurmCluster, host: str) -> Undo:
    """Other work on the one core that the host's tasks have."""
    cores = os.sched_getaffinity(0)
    _set_cores(cluster, host, {max(cores)})
    # So many that a machine with other work on it, which slows the others down, hides it not.
    spin = ["taskset", "-c", str(max(cores)), "sh", "-c", "echo; while :; do :; done"]
    busy = [cluster.popen_on(host, spin, stdout=subprocess.PIPE) for _ in range(16)]
    for each in busy:
        assert each.stdout and each.stdout.readline(), "it has not begun"

    def undo() -> None:
        for each in busy:
            each.kill_group()
            assert each.stdout
            each.stdout.close()
        _set_cores(cluster, host, cores)

    return undo


def _set_cores(cluster: SlurmCluster, host: str, cores: set[int]) -> None:
    for thread in Path(f"/proc/{slurmd(cluster, host)}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def frozen(cluster: SlurmCluster, host: str) -> Undo:
    """Off the network, and nothing moves."""
    # But for its slurmd: the nsenter above would stop with it, and stay so.
    spared = ("cat", f"slurmd -D -N {host}")
    stopped = [pid for pid, line in cluster.processes(host).items() if line not in spared]
    cluster.set_link(host, up=False)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)

    def undo() -> None:
        cluster.set_link(host, up=True)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)

    return undo


def slurmd(cluster: SlurmCluster, host: str) -> int:
    """This machine's id of the host's slurmd."""
    lines = cluster.processes(host).items()
    return next(pid for pid, line in lines if line.startswith("slurmd "))

"""Probes and the collector over real sockets of this machine."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from clusterddp.preflight import collector, evaluation
from clusterddp.preflight.collector import Collection, load
from clusterddp.preflight.evaluation import LoadMeasurements, NodeMeasurements
from tests.counting import count_calls
from tests.hostile import CARRIED
from tests.waiting import PATIENCE

NONCE = "secret"


class Job:
    """Probes of this machine, each as a node of its own."""

    def __init__(self) -> None:
        self.server = collector.listen()
        self.port = self.server.getsockname()[1]
        self.probes: list[subprocess.Popen[bytes]] = []

    def probe(self, host: str, **environ: str) -> "subprocess.Popen[bytes]":
        argv = [sys.executable, "-m", "clusterddp", "probe", "--collector=127.0.0.1"]
        self.probes.append(
            subprocess.Popen(
                [*argv, f"--port={self.port}"],
                env={**os.environ, "CLUSTERDDP_NONCE": NONCE, "SLURMD_NODENAME": host, **environ},
            )
        )
        return self.probes[-1]

    def collect(
        self, *hosts: str, has_ended: Callable[[], bool] = lambda: False,
        codes: Mapping[str, int] | None = None,
    ) -> Collection:  # fmt: skip
        return collector.collect(self.server, hosts, NONCE, has_ended, lambda: codes or {})


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.server.close()
    for each in made.probes:
        each.kill()
        each.wait()


def test_the_nodes_measure_themselves_and_each_other(job: Job) -> None:
    hosts = ["a", "b", "c"]
    for host in reversed(hosts):
        job.probe(host)
    found = job.collect(*hosts)
    assert (found.error, found.unresponsive) == ("", {})
    assert [node.host for node in found.nodes] == hosts
    assert [sorted(node.pairs) for node in found.nodes] == [["b", "c"], ["a", "c"], ["a", "b"]]
    for node in found.nodes:
        assert node.own.memory > 0
        assert node.own.disk_free > 0
        assert node.load.spin > 0
        assert abs(node.own.clock) < evaluation.CLOCK_SECONDS
        assert all(pair.sent > 0 and pair.received > 0 for pair in node.pairs.values())
    assert [each.wait(PATIENCE) for each in job.probes] == [0, 0, 0]


class Scripted:
    """A probe's connection whose messages arrive one at a time; counts the bytes that it gets."""

    def __init__(self, host: str) -> None:
        self.socket = socket.socket()
        own = {"host": host, "local": "10.0.0.1", "port": 7, "nonce": NONCE}
        self.messages, self.bytes = [own, {"node": {"memory": 1.0}}], 0

    def receive(self) -> list[dict[str, Any]]:
        return [self.messages.pop(0)]

    def send(self, content: Any) -> None:
        self.bytes += len(json.dumps(content))
        self.messages.append({"load": {}, "pairs": []})


def work_of(nodes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The calls that the messages of so many nodes cost, and the bytes sent to them."""
    hosts = [f"h{number}" for number in range(nodes)]
    probes = [Scripted(host) for host in hosts]
    server = collector.listen()
    made = collector._Collector(server, hosts, NONCE, lambda: False, dict)
    turns = [SimpleNamespace(data=each) for _ in range(3) for each in probes]
    monkeypatch.setattr(made, "_selector", SimpleNamespace(select=lambda _: [(turns.pop(0), 0)]))

    def collect() -> None:
        made.await_all(hosts, 600)
        made.measure_together()

    calls = count_calls(collect)
    assert len(made.nodes()) == nodes and not turns
    for each in (server, *(one.socket for one in probes)):
        each.close()
    return calls, sum(one.bytes for one in probes)


def test_a_nodes_messages_cost_the_same_whatever_the_number_of_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (few_calls, few_bytes), (many_calls, many_bytes) = (
        work_of(nodes, monkeypatch) for nodes in (32, 256)
    )
    assert many_calls < 1.3 * 8 * few_calls
    assert many_bytes < 2 * 8 * few_bytes  # each is told its partners, log2 N of them


STRANGERS = [
    b"\x00\xff\n" * 50, b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\nnull\n" + b"[" * 50_000 + b"\n",
    b"x" * 200_000, b'{"nonce": "other", "host": "b", "local": "127.0.0.1", "port": 1}\n',
    *(
        json.dumps({"nonce": NONCE, "host": host, "local": text, "port": text}).encode() + b"\n"
        for text in CARRIED
        for host in (text, "b")
    ),
]  # fmt: skip


def test_strangers_take_no_nodes_place(job: Job) -> None:
    with contextlib.ExitStack() as open_ones:
        for said in STRANGERS:
            stranger = socket.create_connection(("127.0.0.1", job.port))
            open_ones.enter_context(stranger)
            stranger.sendall(said)
        for host in ("a", "b"):
            job.probe(host)
        found = job.collect("a", "b")
    assert [node.host for node in found.nodes] == ["a", "b"]


def test_a_node_that_never_answers_and_one_that_stops_are_told_apart(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However long that takes: the time passes once those that answer have, and it has stopped."""

    class Clock:
        now = 0.0
        collectors: ClassVar[list[Any]] = []
        time = staticmethod(time.time)

        def monotonic(self) -> float:
            known = self.collectors[0].probes if self.collectors else {}
            if {*known} == {"a", "b", "d"} and known["b"].at.startswith(
                "the check of its local disk"
            ):
                self.now += 0.0 if known["a"].is_due or known["d"].is_due else 3600.0
            return self.now

    clock, await_all = Clock(), collector._Collector.await_all

    def awaited(ours: Any, *arguments: Any, **more: Any) -> None:
        clock.collectors[:] = [ours]
        await_all(ours, *arguments, **more)

    monkeypatch.setattr(collector._Collector, "await_all", awaited)
    monkeypatch.setattr(collector, "time", clock)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\nos.statvfs = lambda directory: os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    job.probe("b", PYTHONPATH=path, TMPDIR=str(tmp_path))
    for host in ("a", "d"):
        job.probe(host)
    found = job.collect("a", "b", "c", "d")
    assert found.unresponsive == {
        "b": f"stopped answering during the check of its local disk {tmp_path}",
        "c": "no answer within 60s",
    }
    assert [node.host for node in found.nodes] == ["a", "d"]


def test_a_probe_that_fails_before_it_answers_tells_of_no_node(job: Job, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "srun: error: c: task 2: Exited with exit code 1\nsrun: error: d: tasks 3-4: "
        f"Exited with exit code {collector.UNREACHED}\nsrun: error: e: task 5: Killed\n"
        "srun: error: h[1-2]: tasks 6-7: Exited with exit code 3\n"
    )
    codes = collector.exit_codes(log)
    assert codes == {"c": 1, "d": collector.UNREACHED, "h1": 3, "h2": 3}
    for host in ("a", "b"):
        job.probe(host)
    found = job.collect("a", "b", "c", "d", codes=codes)
    assert list(found.unresponsive) == ["d"]  # it has reached nobody
    assert found.remarks == ("c: its probe failed with exit code 1; see preflight.log",)


def test_exit_codes_are_read_again_only_where_the_log_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, reads, read_bytes = tmp_path / "log", list[Path](), Path.read_bytes
    line = "srun: error: {}: task 2: Exited with exit code 1\n".format
    log.write_text(line("a"))

    def read(path: Path) -> bytes:
        reads.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    assert [collector.exit_codes(log) for _ in range(3)] == [{"a": 1}] * 3
    assert reads == [log]
    log.write_text(line("a") + line("b"))
    assert collector.exit_codes(log) == {"a": 1, "b": 1}


def test_a_probe_has_all_gpus_of_its_node_whatever_a_task_has(tmp_path: Path) -> None:
    shares = dict.fromkeys(
        ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND", "SLURM_GPU_BIND"), "1"
    )
    environ = {**os.environ, **shares, "SLURM_GPUS_PER_NODE": "4"}
    with collector.started(["env"], environ, tmp_path / "log", lambda: None):
        pass
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line for line in lines if line.startswith("SLURM_")] == ["SLURM_GPUS_PER_NODE=4"]


def test_where_no_other_node_reaches_the_batch_host_it_says_so_at_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "FIRST_SECONDS", 10 * PATIENCE)
    job.probe("a")
    found = job.collect("a", "b", "c", codes=dict.fromkeys("bc", collector.UNREACHED))
    assert found.error == f"b and 1 more cannot connect to port {job.port} of this host"
    assert found.is_unreachable


def test_it_listens_on_the_first_free_port_of_those_that_it_is_given() -> None:
    with collector.listen() as taken, collector.listen() as other:
        first, second = (each.getsockname()[1] for each in (taken, other))
        other.close()
        for address in ("", "127.0.0.1"):
            with collector.listen([first, second], address) as server:
                assert server.getsockname()[1] == second
            with collector.listen([first], address) as server:
                assert server.getsockname()[1] not in (0, first)


def test_where_the_probes_end_without_an_answer_that_is_said(job: Job) -> None:
    assert job.collect("a", has_ended=lambda: True).error == "no node answered"


def test_a_probe_leaves_where_the_batch_host_has_gone(job: Job) -> None:
    heard = threading.Event()

    def serve() -> None:
        job.server.settimeout(PATIENCE)
        stream, _ = job.server.accept()
        stream.recv(1000)
        heard.set()
        stream.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert job.probe("a").wait(PATIENCE) in (0, 1)
    thread.join(PATIENCE)
    assert heard.is_set()


def test_signals_do_not_end_a_probe(job: Job) -> None:
    started = job.probe("a")
    job.server.settimeout(PATIENCE)
    stream, _ = job.server.accept()
    with stream:
        stream.recv(1000)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            started.send_signal(number)
        assert started.poll() is None


def test_what_a_stranger_has_written_has_its_type_or_its_default() -> None:
    wrong: list[Any] = [None, [], "x", {"memory": "9", "disk": 7, "gpus_seen": True, "clock": []}]
    for content in wrong:
        assert load(NodeMeasurements, content) == NodeMeasurements()
    read = load(NodeMeasurements, {"memory": 7, "disk": "x" * 999, "clock": float("inf")})
    assert read == NodeMeasurements(memory=7.0, disk="x" * 200)
    assert load(LoadMeasurements, {"spin": 10**400}) == LoadMeasurements()


def test_srun_gets_a_task_a_node() -> None:
    words = collector.probe_command(["h1", "h2"], ["py", "a.pyz"], ["h1", "10.0.0.1"], 77, 4)
    assert words[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--nodelist=h1,h2", "--overlap"} < set(words)
    behind = words[words.index("--") + 1 :]
    assert behind == [
        *("py", "a.pyz", "probe", "--collector=h1", "--collector=10.0.0.1"),
        *("--port=77", "--gpus=4"),
    ]

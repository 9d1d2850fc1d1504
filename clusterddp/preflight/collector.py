"""Gathers what the probes of a job's nodes measure, on the batch host.

It starts one probe a node, tells them when to measure what they measure together, and names those
that do not answer. Everything has a deadline. What comes over the network is data of strangers
until it names this attempt's nonce, and only numbers and short texts after that.
"""

import contextlib
import errno
import functools
import json
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from clusterddp import files
from clusterddp.preflight import verdict
from clusterddp.preflight.verdict import LoadMeasurements, Node, NodeMeasurements, Pair
from clusterddp.slurm import srun_lines

T = TypeVar("T")

FIRST_SECONDS = 60.0
"""Time for the first node to answer: Slurm may hold a step back."""
PATIENCE_SECONDS = 30.0
"""Time without any further answer, and for each answer of all to the next question."""
UNREACHED = 69
"""Exit code of a probe that reached no address of the batch host (EX_UNAVAILABLE of sysexits.h)."""
_END_SECONDS = 3.0
"""Time for srun to end by itself; a probe that is stopped keeps it waiting."""
_MOST_CONNECTIONS = 4096
_MOST_BYTES = 64 << 10
"""Longest line that is read; those to the probes grow with the nodes, and have no bound."""
_OF_TASKS = {
    *("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_TRES_BIND", "SLURM_TRES_PER_TASK"),
}
"""Variables that give srun's tasks their shares of a node's GPUs: a probe has all of them."""


class Lines:
    """A socket over which objects pass, one line of JSON each."""

    def __init__(self, stream: socket.socket) -> None:
        self.socket = stream
        self._begun = b""

    def send(self, content: Mapping[str, object]) -> None:
        """Send an object. Raises OSError."""
        self.socket.sendall(json.dumps(content).encode() + b"\n")

    def take(self, most: int = _MOST_BYTES) -> Iterator[dict[str, object]] | None:
        """Return the objects that have come whole; None at the end. Raises OSError.

        most: bytes of a line beyond which the sender is no node of ours, and at its end.
        """
        heard = self.socket.recv(1 << 16)
        lines, _, self._begun = (self._begun + heard).rpartition(b"\n")
        if not heard or len(self._begun) > most:
            return None
        return files.parse_json_lines(lines)


@dataclass
class _Probe:
    """Probe of a node, as far as it has answered."""

    lines: Lines
    host: str
    address: str
    port: int
    at: str = "its start"
    node: NodeMeasurements | None = None
    load: LoadMeasurements | None = None
    pairs: dict[str, Pair] = field(default_factory=dict)
    is_due: bool = True
    """True while an answer is awaited."""
    has_gone: bool = False


@dataclass
class Collection:
    """Answers of the nodes."""

    nodes: list[Node] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    """Place in its checks of each node that has not answered in time, by its name."""
    remarks: tuple[str, ...] = ()
    """Nodes whose probe has ended by itself, and what is known of them."""
    trouble: str = ""
    """Reason for which the checks could not run."""
    is_unreached: bool = False
    """True where that is that no other node can connect to the batch host."""


def words(
    nodes: Sequence[str],
    program: Sequence[str],
    addresses: Sequence[str],
    port: int,
    gpus: int,
    ports: Sequence[int] = (),
) -> list[str]:
    """Return the command that starts a probe on each node.

    program: that of clusterddp, on the host. addresses: the batch host's. gpus: of each node.
    ports: those of which a probe listens on the first that is free.
    """
    count = len(nodes)
    return [
        *("srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        f"--nodelist={','.join(nodes)}",
        *("--distribution=block", "--mpi=none", "--overlap", "--export=ALL"),
        *("--kill-on-bad-exit=0", "--input=none", "--", *program, "probe"),
        *(f"--collector={address}" for address in addresses),
        *(f"--port={port}", f"--gpus={gpus}", *(f"--listen={each}" for each in ports)),
    ]


def listen(ports: Sequence[int] = (), address: str = "") -> socket.socket:
    """Listen on the first of these ports that is free, else on any. Raises OSError.

    address: all addresses by default.
    """
    for port in ports:
        with contextlib.suppress(OSError):
            return _listening(address, port)
    return _listening(address, 0)


def _listening(address: str, port: int) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            # IPv6 is switched off in the kernel
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def collect(
    server: socket.socket,
    hosts: Sequence[str],
    nonce: str,
    has_ended: Callable[[], bool],
    exit_codes: Callable[[], Mapping[str, int]] = dict,
) -> Collection:
    """Gather the measurements of the nodes; closes the connections.

    hosts: names of the nodes, as Slurm knows them. has_ended: whether the probes have ended.
    exit_codes: those of probes that have failed, by their node.
    """
    with contextlib.closing(_Collector(server, hosts, nonce, has_ended, exit_codes)) as collector:
        collector.await_all(hosts, FIRST_SECONDS, one_is_enough=True)
        if not collector.probes:
            unreached = collector.unreached()
            return Collection(
                trouble=unreached or "no node has answered", is_unreached=bool(unreached)
            )
        collector.await_all(hosts, PATIENCE_SECONDS)
        if unreached := collector.unreached():
            return Collection(trouble=unreached, is_unreached=True)
        collector.measure_together()
        if verdict.judge(collector.nodes(), collector.silent()).comparisons:
            collector.measure_together()  # once more: it may have been a moment's load
        if collector.was_ended:  # the job is being ended, or srun: it tells of no node
            return Collection(trouble="the probes were ended before all had answered")
        return Collection(collector.nodes(), collector.silent(), collector.remarks())


class _Collector:
    """The connections of the probes."""

    def __init__(
        self,
        server: socket.socket,
        hosts: Sequence[str],
        nonce: str,
        has_ended: Callable[[], bool],
        exit_codes: Callable[[], Mapping[str, int]],
    ) -> None:
        self._hosts, self._nonce, self._has_ended = list(hosts), nonce, has_ended
        self._exit_codes = exit_codes
        self.probes: dict[str, _Probe] = {}
        self._known: dict[Lines, _Probe] = {}
        self._seen_at = ""
        """Address of the batch host as the other nodes have it."""
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._server = server
        self._selector.register(server, selectors.EVENT_READ)
        self._connections = 0
        self.was_ended = False
        """True where the probes have ended while an answer was awaited."""
        self._answers = 0
        self._peers: list[str] = []
        """Nodes that measure together, by their number."""

    def close(self) -> None:
        """Close all connections, on which the probes leave."""
        for key in list(self._selector.get_map().values()):
            if key.data:
                with contextlib.suppress(OSError):
                    key.data.send({"end": True})
                key.data.socket.close()
        self._selector.close()

    def nodes(self) -> list[Node]:
        """Return the measurements of the nodes that have answered, in the job's order."""
        silent = self.silent()
        return [
            Node(probe.host, probe.node, probe.load or LoadMeasurements(), probe.pairs)
            for probe in self._taking_part()
            if probe.node and probe.host not in silent
        ]

    def silent(self) -> dict[str, str]:
        """Return the nodes that have not answered, each with what is known of it."""
        return {
            host: f"answered, and then nothing: it was at {probe.at}"
            if (probe := self.probes.get(host))
            else f"{verdict.NO_ANSWER} within {FIRST_SECONDS:g} s"
            for host in self._hosts
            if ((probe := self.probes.get(host)) and probe.is_due and not probe.has_gone)
            or (not probe and self._exit_codes().get(host, UNREACHED) == UNREACHED)
        }

    def remarks(self) -> tuple[str, ...]:
        """Name the nodes whose probe has ended by itself, which may be a fault of ours."""
        return tuple(
            f"{each.host}: its probe ended at {each.at}, see preflight.log"
            for each in self.probes.values()
            if each.has_gone
        ) + tuple(
            f"{host}: its probe ended with exit code {code}, see preflight.log"
            for host, code in self._exit_codes().items()
            if host in self._hosts and host not in self.probes and code != UNREACHED
        )

    def unreached(self) -> str:
        """Say so where no other node reaches the batch host; empty otherwise.

        A firewall that drops what it forbids does that, and tells of no node.
        """
        own = {host for host, probe in self.probes.items() if not probe.has_gone}
        codes = self._exit_codes()
        others = [host for host in self._hosts if host not in own]
        if len(own) > 1 or not others or any(codes.get(h) != UNREACHED for h in others):
            return ""
        named = f"{others[0]}{f' and {len(others) - 1} more' if others[1:] else ''}"
        return f"{named} cannot connect to port {self._server.getsockname()[1]} of this host"

    def measure_together(self) -> None:
        """Have all nodes that answer measure at one time, and keep the better of two answers."""
        probes = self._taking_part()
        for probe in probes:
            if _is_local(probe.address):
                own = probe.lines.socket.getsockname()[0].removeprefix("::ffff:")
                probe.address = self._seen_at or own
        self._peers = [probe.host for probe in probes]
        peers = [[probe.address, probe.port] for probe in probes]
        for number, probe in enumerate(probes):
            probe.is_due, probe.at = True, "its exchange with the other nodes"
            self._send(probe, {"peers": peers, "own": number})
        self.await_all(self._peers, PATIENCE_SECONDS)

    def await_all(
        self, hosts: Sequence[str], seconds: float, *, one_is_enough: bool = False
    ) -> None:
        """Wait until these nodes have answered, or for so long without any answer.

        A prolog, a cold file system and the GPUs' driver take their time on one node more than on
        another. It ends after FIRST_SECONDS in any case, and with the probes.
        """
        now = time.monotonic()
        last, deadline, answers = now + FIRST_SECONDS, now + seconds, self._answers
        while True:
            until = last if self._is_missing(hosts) else min(deadline, last)
            if (left := until - time.monotonic()) <= 0:
                return
            if self._answers > answers:
                deadline, answers = time.monotonic() + seconds, self._answers
            is_over = self._has_ended()
            for key, _ in self._selector.select(0 if is_over else min(left, 0.1)):
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.data)
            if one_is_enough and self.probes:
                return
            if not self._is_missing(hosts) and not any(
                (probe := self.probes.get(host)) and probe.is_due and not probe.has_gone
                for host in hosts
            ):
                return
            if is_over:
                self.was_ended = True
                return

    def _is_missing(self, hosts: Sequence[str]) -> bool:
        """Return whether the first answer of one of these is awaited whose probe has not failed."""
        missing = [host for host in hosts if host not in self.probes]
        return bool(missing) and not {*missing} <= self._exit_codes().keys()

    def _taking_part(self) -> list[_Probe]:
        """Return the probes that have measured their node, in the job's order."""
        known = (self.probes.get(host) for host in self._hosts)
        return [probe for probe in known if probe and probe.node and not probe.has_gone]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            stream, _ = self._server.accept()
            if self._connections >= _MOST_CONNECTIONS + len(self._hosts):
                stream.close()
                return
            self._connections += 1
            stream.settimeout(1.0)
            self._selector.register(stream, selectors.EVENT_READ, Lines(stream))

    def _hear(self, lines: Lines) -> None:
        with contextlib.suppress(OSError, ValueError):
            said = lines.take()
            if said is not None and all(self._take(lines, each) for each in said):
                return
        self._selector.unregister(lines.socket)
        lines.socket.close()
        if probe := self._known.get(lines):
            probe.has_gone = True

    def _take(self, lines: Lines, said: Mapping[str, object]) -> bool:
        """Take an answer; returns False for a stranger's."""
        probe = self._known.get(lines)
        self._answers += probe is not None or said.get("nonce") == self._nonce
        if probe is None:
            host, local, port = (said.get(name) for name in ("host", "local", "port"))
            if said.get("nonce") != self._nonce or host not in self._hosts or host in self.probes:
                return False
            if not (isinstance(host, str) and isinstance(local, str) and type(port) is int):
                return False
            self.probes[host] = self._known[lines] = _Probe(lines, host, local, port)
            seen = said.get("seen")
            if isinstance(seen, str) and not _is_local(seen):
                self._seen_at = seen
        elif "clock" in said:
            self._send(probe, {"clock": time.time()})
        elif isinstance(said.get("at"), str):
            probe.at = str(said["at"])[:200]
        elif "node" in said:
            probe.node, probe.is_due = load(NodeMeasurements, said["node"]), False
        elif "load" in said and probe.node:
            several = said.get("pairs")
            pairs = [load(Pair, each) for each in several] if isinstance(several, list) else []
            probe.load = verdict.quieter(probe.load, load(LoadMeasurements, said["load"]))
            probe.pairs = verdict.better(
                probe.pairs,
                {self._peers[pair.to]: pair for pair in pairs if 0 <= pair.to < len(self._peers)},
            )
            probe.is_due = False
        return True

    def _send(self, probe: _Probe, content: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):  # one that has gone or stopped is named as silent
            probe.lines.send(content)


def _is_local(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "0.0.0.0", "::", "")


def exit_codes(log: Path) -> dict[str, int]:
    """Return the exit codes of the probes that have failed, by their nodes, from srun's lines.

    Only a log that has grown is read again: this is asked ten times a second, and for each node.
    """
    with contextlib.suppress(OSError):
        return _exit_codes(log, log.stat().st_size)
    return {}


@functools.lru_cache(maxsize=1)
def _exit_codes(log: Path, size: int) -> dict[str, int]:
    return srun_lines.exit_codes(log.read_bytes()[:size].decode(errors="replace"))


@contextlib.contextmanager
def started(
    argv: Sequence[str], environ: Mapping[str, str], log: Path, prepare: Callable[[], None]
) -> Iterator[Callable[[], bool]]:
    """Start the probes for the body's time; yields whether they have ended. Raises OSError.

    log: file of what srun and they print. prepare: called in srun's process before srun.
    """
    with log.open("wb") as output:
        srun = subprocess.Popen(
            argv,
            env={name: value for name, value in environ.items() if name not in _OF_TASKS},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=prepare,  # noqa: PLW1509 -- the attempt has no threads yet
        )
    try:
        yield lambda: srun.poll() is not None
    finally:
        try:
            srun.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            srun.terminate()  # srun then kills the tasks
            try:
                srun.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                srun.kill()
                srun.wait()


def load(kind: type[T], content: object) -> T:
    """Build a record from what a probe has sent; texts have a bound, as anybody can send them."""
    known = content if isinstance(content, dict) else {}
    bound = {n: value[:200] if isinstance(value, str) else value for n, value in known.items()}
    return files.load(kind, bound) or kind()

"""Collects measurements from probes on the job's nodes; runs on the batch host.

It starts one probe per node, starts their joint measurements, and names the nodes that do not
answer. Everything has a deadline. Network input is untrusted: it must contain this attempt's nonce,
and even then only numbers and short texts are accepted.
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
from clusterddp.formatting import setting
from clusterddp.preflight import evaluation
from clusterddp.preflight.evaluation import LoadMeasurements, Node, NodeMeasurements, Pair
from clusterddp.slurm import srun_lines

T = TypeVar("T")

FIRST_SECONDS = 60.0
"""Time for the first node to answer: Slurm may delay a step."""
PATIENCE_SECONDS = 30.0
"""Longest wait for the next node's answer."""
UNREACHED = 69
"""Exit code of a probe that cannot reach the batch host (EX_UNAVAILABLE in sysexits.h)."""
_END_SECONDS = 3.0
"""Time for srun to exit; a stopped probe keeps it waiting."""
_MAX_CONNECTIONS = 4096
_MAX_BYTES = 64 << 10
"""Longest accepted line; lines to the probes grow with the nodes and are not limited."""
_TASK_VARIABLES = {
    *("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_TRES_BIND", "SLURM_TRES_PER_TASK"),
}
"""Variables that split a node's GPUs among srun's tasks: a probe needs all of them."""


class Lines:
    """A socket that carries objects, one line of JSON per object."""

    def __init__(self, stream: socket.socket) -> None:
        self.socket = stream
        self._partial = b""

    def send(self, content: Mapping[str, object]) -> None:
        """Send an object. Raises OSError."""
        self.socket.sendall(json.dumps(content).encode() + b"\n")

    def receive(self, most: int = _MAX_BYTES) -> Iterator[dict[str, object]] | None:
        """Return the complete objects that have arrived; None at the end. Raises OSError.

        most: limit in bytes of a line; a sender that exceeds it is not a probe, and is cut off.
        """
        received = self.socket.recv(1 << 16)
        lines, _, self._partial = (self._partial + received).rpartition(b"\n")
        if not received or len(self._partial) > most:
            return None
        return files.parse_json_lines(lines)


@dataclass
class _Probe:
    """A probe with its answers so far."""

    lines: Lines
    host: str
    address: str
    port: int
    at: str = "startup"
    node: NodeMeasurements | None = None
    load: LoadMeasurements | None = None
    pairs: dict[str, Pair] = field(default_factory=dict)
    is_due: bool = True
    """True while an answer is expected."""
    is_gone: bool = False


@dataclass
class Collection:
    """Answers of the nodes."""

    nodes: list[Node] = field(default_factory=list)
    unresponsive: dict[str, str] = field(default_factory=dict)
    """Nodes that did not answer in time, with the state of their checks."""
    remarks: tuple[str, ...] = ()
    """Remarks on nodes whose probe exited early."""
    error: str = ""
    """Reason why the checks could not run."""
    is_unreachable: bool = False
    """True if the reason is that no other node can connect to the batch host."""


def probe_command(
    nodes: Sequence[str],
    program: Sequence[str],
    addresses: Sequence[str],
    port: int,
    gpus: int,
    ports: Sequence[int] = (),
) -> list[str]:
    """Return the command that starts a probe on each node.

    program: clusterddp's on the host. addresses: the batch host's. gpus: count per node. ports: a
    probe listens on the first free one.
    """
    return [
        *(*step_words(nodes), *program, "probe"),
        *(f"--collector={address}" for address in addresses),
        *(f"--port={port}", f"--gpus={gpus}", *(f"--listen={each}" for each in ports)),
    ]


def step_words(nodes: Sequence[str]) -> list[str]:
    """Return srun and the options with which it starts a program once on each of these nodes."""
    count = len(nodes)
    return [
        *("srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        f"--nodelist={','.join(nodes)}",
        *("--distribution=block", "--mpi=none", "--overlap", "--export=ALL"),
        *("--kill-on-bad-exit=0", "--input=none", "--"),
    ]


def partners(number: int, nodes: int) -> list[int]:
    """Return the numbers of the nodes to which a node connects: at distance 1, 2, 4 and so on."""
    return [(number + (1 << power)) % nodes for power in range((nodes - 1).bit_length())]


def listen(ports: Sequence[int] = (), address: str = "") -> socket.socket:
    """Listen on the first free port of these, else on any port. Raises OSError.

    address: empty for all addresses.
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
            # IPv6 is disabled in the kernel
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def collect(
    server: socket.socket,
    hosts: Sequence[str],
    nonce: str,
    has_ended: Callable[[], bool],
    exit_codes: Callable[[], Mapping[str, int]] = dict,
) -> Collection:
    """Collect the measurements of the nodes, then close the connections.

    hosts: Slurm's names of the nodes. has_ended: whether the probes have exited. exit_codes: exit
    codes of failed probes, by node.
    """
    with contextlib.closing(_Collector(server, hosts, nonce, has_ended, exit_codes)) as collector:
        collector.await_all(hosts, FIRST_SECONDS, one_is_enough=True)
        if not collector.probes:
            unreachable = collector.unreachable()
            return Collection(
                error=unreachable or "no node answered", is_unreachable=bool(unreachable)
            )
        collector.await_all(hosts, PATIENCE_SECONDS)
        if unreachable := collector.unreachable():
            return Collection(error=unreachable, is_unreachable=True)
        collector.measure_together()
        if evaluation.evaluate(collector.nodes(), collector.unresponsive()).is_transient:
            collector.measure_together()  # a second time, because load may have been transient
        if collector.was_ended:  # the job or srun was killed: no evidence about any node
            return Collection(error="the probes were killed before all nodes answered")
        return Collection(collector.nodes(), collector.unresponsive(), collector.remarks())


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
        self._exit_codes, self._names = exit_codes, {*hosts}
        self.probes: dict[str, _Probe] = {}
        self._known: dict[Lines, _Probe] = {}
        self._seen_at = ""
        """Address of the batch host as seen by the other nodes."""
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._server = server
        self._selector.register(server, selectors.EVENT_READ)
        self._connections = 0
        self.was_ended = False
        """True if the probes exited while an answer was expected."""
        self._answers = 0
        self._peers: list[str] = []
        """Nodes of the joint measurement, by number."""

    def close(self) -> None:
        """Close all connections, so that the probes exit."""
        for key in list(self._selector.get_map().values()):
            if key.data:
                with contextlib.suppress(OSError):
                    key.data.send({"end": True})
                key.data.socket.close()
        self._selector.close()

    def nodes(self) -> list[Node]:
        """Return the measurements of the nodes that answered, in the job's order."""
        unresponsive = self.unresponsive()
        return [
            Node(probe.host, probe.node, probe.load or LoadMeasurements(), probe.pairs)
            for probe in self._participants()
            if probe.node and probe.host not in unresponsive
        ]

    def unresponsive(self) -> dict[str, str]:
        """Return the reason for each node that did not answer."""
        return {
            host: f"stopped answering during {probe.at}"
            if (probe := self.probes.get(host))
            else f"{evaluation.NO_ANSWER} within {setting(FIRST_SECONDS)}"
            for host in self._hosts
            if ((probe := self.probes.get(host)) and probe.is_due and not probe.is_gone)
            or (not probe and self._exit_codes().get(host, UNREACHED) == UNREACHED)
        }

    def remarks(self) -> tuple[str, ...]:
        """Return a remark on each probe that exited early, perhaps through a bug in clusterddp."""
        return tuple(
            f"{each.host}: its probe exited during {each.at}; see preflight.log"
            for each in self.probes.values()
            if each.is_gone
        ) + tuple(
            f"{host}: its probe failed with exit code {code}; see preflight.log"
            for host, code in self._exit_codes().items()
            if host in self._names and host not in self.probes and code != UNREACHED
        )

    def unreachable(self) -> str:
        """Return an error if no other node can reach the batch host; empty otherwise.

        A firewall that drops packets causes this, and no node is at fault.
        """
        answering = {host for host, probe in self.probes.items() if not probe.is_gone}
        codes = self._exit_codes()
        others = [host for host in self._hosts if host not in answering]
        if len(answering) > 1 or not others or any(codes.get(h) != UNREACHED for h in others):
            return ""
        named = f"{others[0]}{f' and {len(others) - 1} more' if others[1:] else ''}"
        return f"{named} cannot connect to port {self._server.getsockname()[1]} of this host"

    def measure_together(self) -> None:
        """Let all answering nodes measure at the same time; keep the better of two answers."""
        probes = self._participants()
        for probe in probes:
            if _is_local(probe.address):
                own = probe.lines.socket.getsockname()[0].removeprefix("::ffff:")
                probe.address = self._seen_at or own
        self._peers = [probe.host for probe in probes]
        for number, probe in enumerate(probes):
            probe.is_due, probe.at = True, "the exchange with other nodes"
            others = {
                each: [probes[each].address, probes[each].port]
                for each in partners(number, len(probes))
            }
            self._send(probe, {"address": probe.address, "peers": others})
        self.await_all(self._peers, PATIENCE_SECONDS)

    def await_all(
        self, hosts: Sequence[str], seconds: float, *, one_is_enough: bool = False
    ) -> None:
        """Wait until these nodes have answered, or until none comes for `seconds`.

        A prolog, a cold file system or the GPU driver can make some nodes later than others. The
        wait always ends after FIRST_SECONDS, or when the probes exit.
        """
        now = time.monotonic()
        last, deadline, answers = now + FIRST_SECONDS, now + seconds, self._answers
        absent, due = [*hosts], [*hosts]  # each host leaves once: the loop has a turn per message
        while True:
            until = last if self._is_missing(absent) else min(deadline, last)
            if (left := until - time.monotonic()) <= 0:
                return
            if self._answers > answers:
                deadline, answers = time.monotonic() + seconds, self._answers
            is_over = self._has_ended()
            for key, _ in self._selector.select(0 if is_over else min(left, 0.1)):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            if one_is_enough and self.probes:
                return
            if not self._is_missing(absent) and not self._is_due(due):
                return
            if is_over:
                self.was_ended = True
                return

    def _is_missing(self, absent: list[str]) -> bool:
        """Return whether a node's first answer is missing although its probe has not failed.

        Removes the last nodes of `absent` as long as they have answered or failed.
        """
        codes = self._exit_codes()
        while absent and (absent[-1] in self.probes or absent[-1] in codes):
            absent.pop()
        return bool(absent)

    def _is_due(self, due: list[str]) -> bool:
        """Return whether a further answer of a node is due; removes the last that owe none."""
        while due:
            probe = self.probes.get(due[-1])
            if probe and probe.is_due and not probe.is_gone:
                return True
            due.pop()
        return False

    def _participants(self) -> list[_Probe]:
        """Return the probes with their own node's measurements, in the job's order."""
        known = (self.probes.get(host) for host in self._hosts)
        return [probe for probe in known if probe and probe.node and not probe.is_gone]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            stream, _ = self._server.accept()
            if self._connections >= _MAX_CONNECTIONS + len(self._hosts):
                stream.close()
                return
            self._connections += 1
            stream.settimeout(1.0)
            self._selector.register(stream, selectors.EVENT_READ, Lines(stream))

    def _read(self, lines: Lines) -> None:
        with contextlib.suppress(OSError, ValueError):
            messages = lines.receive()
            if messages is not None and all(self._handle(lines, each) for each in messages):
                return
        self._selector.unregister(lines.socket)
        lines.socket.close()
        if probe := self._known.get(lines):
            probe.is_gone = True

    def _handle(self, lines: Lines, message: Mapping[str, object]) -> bool:
        """Handle a probe's message; return False for an unauthenticated client."""
        probe = self._known.get(lines)
        self._answers += probe is not None or message.get("nonce") == self._nonce
        if probe is None:
            host, local, port = (message.get(name) for name in ("host", "local", "port"))
            if (
                message.get("nonce") != self._nonce
                or not (isinstance(host, str) and isinstance(local, str) and type(port) is int)
                or host not in self._names
                or host in self.probes
            ):
                return False
            self.probes[host] = self._known[lines] = _Probe(lines, host, local, port)
            seen = message.get("seen")
            if isinstance(seen, str) and not _is_local(seen):
                self._seen_at = seen
        elif "clock" in message:
            self._send(probe, {"clock": time.time()})
        elif isinstance(message.get("at"), str):
            probe.at = str(message["at"])[:200]
        elif "node" in message:
            probe.node, probe.is_due = load(NodeMeasurements, message["node"]), False
        elif "load" in message and probe.node:
            several = message.get("pairs")
            pairs = [load(Pair, each) for each in several] if isinstance(several, list) else []
            probe.load = evaluation.less_loaded(probe.load, load(LoadMeasurements, message["load"]))
            probe.pairs = evaluation.best_pairs(
                probe.pairs,
                {self._peers[pair.to]: pair for pair in pairs if 0 <= pair.to < len(self._peers)},
            )
            probe.is_due = False
        return True

    def _send(self, probe: _Probe, content: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):  # a probe that is gone or stopped counts as silent
            probe.lines.send(content)


def _is_local(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "0.0.0.0", "::", "")


def exit_codes(log: Path) -> dict[str, int]:
    """Return the exit codes of the failed probes by node, from srun's output.

    The log is only read again after it has grown: callers ask ten times per second and node.
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
) -> Iterator[Callable[[], int | None]]:
    """Run the probes during the body; yield a function that polls srun. Raises OSError.

    log: file for the output of srun and the probes. prepare: called in srun's process before srun.
    """
    with log.open("wb") as output:
        srun = subprocess.Popen(
            argv,
            env={name: value for name, value in environ.items() if name not in _TASK_VARIABLES},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=prepare,  # noqa: PLW1509 -- the attempt has no threads yet
        )
    try:
        yield srun.poll
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
    """Build a record from a probe's message; texts are cut, because the input is untrusted."""
    known = content if isinstance(content, dict) else {}
    limited = {n: value[:200] if isinstance(value, str) else value for n, value in known.items()}
    return files.load(kind, limited) or kind()

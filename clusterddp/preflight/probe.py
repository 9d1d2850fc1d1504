"""Measures one node of a job before its tasks start, together with probes on the other nodes.

A probe reports to the collector on the batch host, which controls the joint measurements. It needs
no torch. It exits at the collector's request, when the connection closes, or after four minutes.
"""

import contextlib
import dataclasses
import errno
import json
import os
import select
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clusterddp import polling
from clusterddp.preflight.collector import Lines, listen
from clusterddp.preflight.evaluation import LoadMeasurements, NodeMeasurements, Pair
from clusterddp.processes import hardware

MAX_SECONDS = 240
TRANSFER_BYTES = 4 << 20
TRANSFER_SECONDS = 0.3
"""Limits of a transfer, whichever comes first."""
_CONNECT_SECONDS = 2.0
_REACH_SECONDS = 4.0
"""Time for each address of the batch host: Linux sends a SYN at once, after 1 s and after 3 s."""
_REPLY_SECONDS = 3.0
_FILE_BYTES = 1 << 20
_CLOCK_EXCHANGES = 5
_SPIN_TURNS = 2_000_000
"""About 40 ms."""
_SPINS_AGAIN = 5
"""Loops of a repeated measurement; the fastest counts."""
_SPIN_PAUSE_SECONDS = 0.1
_CHUNK = bytes(64 << 10)
_SYSFS_NET = Path("/sys/class/net")


class Unreachable(OSError):
    """No address of the batch host accepts a connection."""


@dataclass(frozen=True)
class Peer:
    """Address at which a probe accepts connections."""

    host: str
    port: int


def run(
    collector: Sequence[str],
    port: int,
    granted: int,
    nonce: str,
    name: str,
    ports: Sequence[int] = (),
) -> None:
    """Take part in the checks until the collector ends them. Raises OSError.

    collector: names and addresses of the batch host; the first that answers is used. granted: the
    job's GPUs on this node. name: Slurm's name of the node. ports: the first free one is used.
    """
    signal.alarm(MAX_SECONDS)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # meant for the tasks, which start later
    with _connected(collector, port) as stream, _listening(stream, os.environ, ports) as server:
        threading.Thread(target=_serve, args=(server, nonce), daemon=True).start()
        lines = Lines(stream)
        own = {"port": server.getsockname()[1], "local": server.getsockname()[0]}
        lines.send({"nonce": nonce, "host": name, "seen": stream.getpeername()[0], **own})
        clock, round_trip = _compare_clocks(lines)
        measured = _measure(os.environ, granted, lambda stage: lines.send({"at": stage}))
        measured = dataclasses.replace(measured, clock=clock, round_trip=round_trip)
        lines.send({"node": vars(measured)})
        spins = 1
        for message in _messages(lines):
            if not isinstance(message.get("peers"), dict):
                return
            load, pairs = measure_with_peers(message, nonce, spins)
            spins = _SPINS_AGAIN
            lines.send({"load": vars(load), "pairs": [vars(pair) for pair in pairs]})


def measure_with_peers(
    message: Mapping[str, object], nonce: str, spins: int
) -> tuple[LoadMeasurements, list[Pair]]:
    """Time a loop, then exchange data with the nodes at distance 1, 2, 4 and so on.

    message: the collector's, with these nodes by number and this node's address. spins: number of
    loops.
    """
    peers = message["peers"]
    assert isinstance(peers, dict)
    spin = quickest_spin(spins)
    pairs, patience = [], _CONNECT_SECONDS
    for number, place in peers.items():
        pairs.append(_exchange(int(number), Peer(*place), nonce, patience))
        if pairs[-1].error:
            patience = 1.0  # the others wait for this node
    interface = _interface_of(str(message["address"]))
    return LoadMeasurements(spin, interface, *_link(interface)), pairs


def measure_gpus(
    environ: Mapping[str, str], granted: int, root: Path = Path("/")
) -> NodeMeasurements:
    """Check this node's GPUs. Memory in use counts if it stays in use for some seconds.

    granted: the job's GPUs on this node. root: root of the file system with /proc and AMD's driver.
    """
    if not granted:
        return NodeMeasurements()
    try:
        from clusterddp.preflight import amd_gpus, gpu_state, gpus
    except ImportError as error:  # a Python built without libffi has no ctypes
        return NodeMeasurements(gpus_granted=granted, gpu_fault=f"no NVML: {error}")
    visible, job = environ.get("CUDA_VISIBLE_DEVICES", "").split(","), environ.get("SLURM_JOB_ID")
    inspect, check = partial(gpus.inspect, granted, visible), partial(gpus.check, granted, visible)
    if hardware.gpu_driver(root) == "AMD":
        inspect = partial(amd_gpus.inspect, granted, root)
        check = partial(amd_gpus.check, granted, root)
    within, every = polling.GPU_RELEASE_SECONDS, polling.GPU_RELEASE_POLL_SECONDS
    readings: dict[str, gpu_state.Reading] = {}

    def is_free() -> bool:
        nonlocal readings
        readings = inspect()
        return not gpu_state.held_memory(readings, job or "", root)

    polling.wait_until(is_free, within, every=every)  # the last job may just have ended
    seen, fault = check()
    linked = [gpu for gpu in readings.values() if gpu.nvlinks > 0]
    return NodeMeasurements(
        gpus_granted=granted,
        gpus_seen=seen,
        gpu_fault=fault,
        memory_fault=gpu_state.held_memory(readings, job or "", root),
        fabric_fault=gpu_state.fabric_fault(readings),
        link_fault=gpu_state.link_fault(readings),
        nvlinks=min((gpu.nvlinks for gpu in linked), default=-1),
        max_nvlinks=max((gpu.max_nvlinks for gpu in linked), default=-1),
    )


def quickest_spin(spins: int) -> float:
    """Return the duration of the fastest of several loops, since a burst of load may miss one."""
    quickest = float("inf")
    for number in range(spins):
        if number:
            time.sleep(_SPIN_PAUSE_SECONDS)
        began = time.perf_counter()
        for _ in range(_SPIN_TURNS):
            pass
        quickest = min(quickest, time.perf_counter() - began)
    return quickest


def _measure(
    environ: Mapping[str, str], granted: int, report: Callable[[str], None]
) -> NodeMeasurements:
    """Measure this node. report: takes the name of each step that may hang, before the step."""
    report("the check of its GPUs")
    measured = measure_gpus(environ, granted)
    free, asked = hardware.free_bytes(), environ.get("SLURM_MEM_PER_NODE", "")
    disk = environ.get("TMPDIR") or "/tmp"
    report(f"the check of its local disk {disk}")
    disk_free, disk_fault = _try_directory(disk)
    report("the check of /dev/shm")
    shm_free, shm_fault = _try_directory("/dev/shm")
    ports, port_states = infiniband_ports()
    return dataclasses.replace(
        measured,
        memory=-1.0 if free is None else float(free),
        memory_asked=float(asked) * 2**20 if asked.isdigit() and asked != "0" else -1.0,
        disk=disk,
        disk_free=disk_free,
        disk_fault=disk_fault,
        shm_free=shm_free,
        shm_fault=shm_fault,
        open_files=hardware.open_files(),
        locked_bytes=hardware.locked_bytes() if ports else -1.0,
        ports=ports,
        port_states=port_states,
        switch=leaf_switch(environ),
    )


def leaf_switch(environ: Mapping[str, str]) -> str:
    """Return the name of this node's leaf switch; empty without Slurm's topology/tree.

    Slurm names the switches from the top of the tree down, and the node last: s0.s4.tux1, with the
    pattern switch.switch.node. Source: SLURM_TOPOLOGY_ADDR in sbatch(1).
    """
    pattern = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    parts = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", pattern.count("."))
    return parts[-2] if pattern.endswith("switch.node") and len(parts) > 1 else ""


def infiniband_ports(
    directory: Path = Path("/sys/class/infiniband"),
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the rate of each InfiniBand or RoCE port in Gbit/s, 0 if it is not active.

    Also returns the states of the ports that are not active. Ports are named `mlx5_0/1`. The files
    hold `4: ACTIVE`, `5: LinkUp` and `400 Gb/sec (4X NDR)` (Linux, Documentation/ABI/stable/
    sysfs-class-infiniband).
    """
    rates, states = {}, {}
    for port in sorted(directory.glob("*/ports/*")):
        name = f"{port.parents[1].name}/{port.name}"
        state, physical, rate = (_sysfs(port / file) for file in ("state", "phys_state", "rate"))
        if not state:
            continue
        rates[name] = _number(rate.partition(" ")[0].encode()) if state.endswith("ACTIVE") else 0.0
        if not rates[name]:
            states[name] = f"{state.rpartition(' ')[2]}, {physical.rpartition(' ')[2]}"
    return rates, states


def _sysfs(path: Path) -> str:
    """Read a short text; empty if that fails."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def _try_directory(directory: str) -> tuple[float, str]:
    """Return the bytes free in a directory, and the error of writing a file there."""
    free = -1.0
    try:
        status = os.statvfs(directory)
        free = float(status.f_bavail * status.f_frsize)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(os.urandom(_FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return free, error.strerror or str(error)
    return free, ""


def _compare_clocks(lines: Lines) -> tuple[float, float]:
    """Return this clock's offset from the collector's and the shortest round trip, in seconds.

    Like NTP (RFC 5905), use the fastest of several exchanges and assume symmetric delays.
    """
    best = (-1.0, 0.0)
    for _ in range(_CLOCK_EXCHANGES):
        sent, began = time.time(), time.perf_counter()
        lines.send({"clock": sent})
        theirs = next(_messages(lines), {}).get("clock")
        took = time.perf_counter() - began
        if isinstance(theirs, float) and (best[0] < 0 or took < best[0]):
            best = (took, sent + took / 2 - theirs)
    return best[1], best[0]


def _messages(lines: Lines) -> Iterator[dict[str, object]]:
    """Yield the collector's messages until it disconnects."""
    while (several := lines.receive(1 << 30)) is not None:
        yield from several


def _connected(names: Sequence[str], port: int) -> socket.socket:
    failure: OSError = ConnectionError("no address of the batch host given")
    places = []
    for name in names:
        try:
            places += socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError as error:
            failure = error
    # The batch host's name and address usually resolve to the same place.
    for address in dict.fromkeys((str(place[4][0]), port) for place in places):
        try:
            stream = socket.create_connection(address, timeout=_REACH_SECONDS)
        except OSError as error:
            failure = error
            continue
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stream
    raise Unreachable(str(failure))


def _listening(
    stream: socket.socket, environ: Mapping[str, str], ports: Sequence[int]
) -> socket.socket:
    """Listen on the requested interface's address, or on the address that reaches the collector.

    On the batch host itself this may be the loopback address: then listen on all addresses.
    """
    own = stream.getsockname()[0]
    named = environ.get("GLOO_SOCKET_IFNAME", "")
    address = hardware.address_of(named) or ("" if own.startswith("127.") or own == "::1" else own)
    return listen(ports, address)


def _interface_of(address: str) -> str:
    if ":" not in address:
        names = (name for _, name in socket.if_nameindex())
        return next((name for name in names if hardware.address_of(name) == address), "")
    with contextlib.suppress(OSError):
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            if line.startswith(packed):
                return line.split()[-1]
    return ""


def _link(interface: str) -> tuple[str, float]:
    """Return an interface's state and its speed in Mbit/s; empty and -1 if unknown."""
    state, speed = "", -1.0
    with contextlib.suppress(OSError):
        state = (_SYSFS_NET / interface / "operstate").read_text().strip()
    with contextlib.suppress(OSError, ValueError):  # EINVAL: virtual interfaces have no speed
        speed = float((_SYSFS_NET / interface / "speed").read_text())
    return state, speed


def _exchange(number: int, peer: Peer, nonce: str, patience: float) -> Pair:
    """Send to another node, then receive from it."""
    try:
        with socket.create_connection((peer.host, peer.port), timeout=patience) as stream:
            stream.sendall(json.dumps({"nonce": nonce, "take": True}).encode() + b"\n")
            _pump(stream)
            stream.settimeout(_REPLY_SECONDS)
            sent = _number(stream.makefile("rb").readline(100))
            _drop(stream)
        with socket.create_connection((peer.host, peer.port), timeout=patience) as stream:
            stream.sendall(json.dumps({"nonce": nonce, "take": False}).encode() + b"\n")
            received = _count(stream)
            _drop(stream)
    except OSError as error:
        return Pair(number, error="timed out" if isinstance(error, TimeoutError)
                    else error.strerror or str(error))  # fmt: skip
    return Pair(number, sent, received)


def _serve(server: socket.socket, nonce: str) -> None:
    """Accept the other probes' connections, each in a thread; close unauthenticated ones."""
    while True:
        with contextlib.suppress(OSError):
            stream, _ = server.accept()
            threading.Thread(target=_answer, args=(stream, nonce), daemon=True).start()
            continue
        time.sleep(0.05)  # for example, out of descriptors


def _answer(stream: socket.socket, nonce: str) -> None:
    with contextlib.suppress(OSError, ValueError, RecursionError), stream:
        stream.settimeout(_REPLY_SECONDS)
        line = b""
        while not line.endswith(b"\n") and len(line) < 1000 and (byte := stream.recv(1)):
            line += byte
        head = json.loads(line)
        if not isinstance(head, dict) or head.get("nonce") != nonce:
            return
        if head.get("take"):
            stream.sendall(f"{_count(stream)}\n".encode())
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(1 << 16):  # wait for the reader: closing now could lose the reply
                pass
        else:
            _pump(stream)
            _drop(stream)


def _pump(stream: socket.socket) -> None:
    """Send until the other side sends anything or disconnects."""
    sent, end = 0, time.monotonic() + 4 * TRANSFER_SECONDS
    stream.settimeout(0.05)
    while sent < TRANSFER_BYTES + len(_CHUNK) and time.monotonic() < end:
        if select.select([stream], [], [], 0)[0]:
            return
        try:
            sent += stream.send(_CHUNK)
        except TimeoutError:
            continue
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.ECONNRESET):
                return
            raise
    select.select([stream], [], [], _REPLY_SECONDS)


def _count(stream: socket.socket) -> float:
    """Return the bytes per second received after the first chunk; negative without any."""
    stream.settimeout(_REPLY_SECONDS)
    if not stream.recv(len(_CHUNK)):
        return -1.0
    count, began = 0, time.perf_counter()
    while count < TRANSFER_BYTES and (left := began + TRANSFER_SECONDS - time.perf_counter()) > 0:
        if not select.select([stream], [], [], left)[0]:
            break
        received = stream.recv(len(_CHUNK))
        if not received:
            break
        count += len(received)
    return count / max(time.perf_counter() - began, 1e-6)


def _drop(stream: socket.socket) -> None:
    """Make closing a connection discard unsent data."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _number(line: bytes) -> float:
    try:
        return float(line)
    except ValueError:
        return -1.0

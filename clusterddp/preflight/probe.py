"""Measures one node of a job ahead of its tasks, together with a probe on each other node.

A probe reports to the collector on the batch host, which says who takes part and when. It needs no
torch, and leaves when the collector says so, goes away, or after four minutes.
"""

import contextlib
import dataclasses
import errno
import fcntl
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
from pathlib import Path

from clusterddp.preflight.collector import Lines, listen
from clusterddp.preflight.verdict import LoadMeasurements, NodeMeasurements, Pair

LIFE_SECONDS = 240
TRANSFER_BYTES = 4 << 20
TRANSFER_SECONDS = 0.3
"""Most of a transfer, whichever comes first."""
_CONNECT_SECONDS = 2.0
_REACH_SECONDS = 4.0
"""Time for each address of the batch host: Linux asks at once, after 1 s and after 3 s."""
_REPLY_SECONDS = 3.0
_FILE_BYTES = 1 << 20
_CLOCK_EXCHANGES = 5
_SPIN_TURNS = 2_000_000
"""Some 40 ms."""
_SPINS_AGAIN = 5
"""Loops of a second look, of which the quickest counts."""
_SPIN_PAUSE_SECONDS = 0.1
_CHUNK = bytes(64 << 10)
_SIOCGIFADDR = 0x8915
_SYSFS_NET = Path("/sys/class/net")


class Unreached(OSError):
    """No address of the batch host takes a connection."""


@dataclass(frozen=True)
class Peer:
    """Place at which a probe takes connections."""

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
    """Take part in the checks until the collector says that they are over. Raises OSError.

    collector: the batch host's names and addresses, of which the first that answers is taken.
    granted: GPUs of the job on this node. name: the node's, as Slurm knows it. ports: those to
    listen on, the first that is free.
    """
    signal.alarm(LIFE_SECONDS)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they are for the tasks, which come after it
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
        for said in _said(lines):
            if not isinstance(said.get("peers"), list):
                return
            load, pairs = meet(said, nonce, spins)
            spins = _SPINS_AGAIN
            lines.send({"load": vars(load), "pairs": [vars(pair) for pair in pairs]})


def meet(said: Mapping[str, object], nonce: str, spins: int) -> tuple[LoadMeasurements, list[Pair]]:
    """Spin, and exchange with the nodes whose number is this one's and 1, 2, 4 and so on.

    said: the collector's word: all nodes, and this one's number. spins: loops.
    """
    peers, own = said["peers"], said["own"]
    assert isinstance(peers, list)
    assert isinstance(own, int)
    spin = quickest_spin(spins)
    pairs, distance, patience = [], 1, _CONNECT_SECONDS
    while distance < len(peers):
        number = (own + distance) % len(peers)
        pairs.append(_exchange(number, Peer(*peers[number]), nonce, patience))
        if pairs[-1].error:
            patience = 1.0  # the others wait for this one
        distance *= 2
    interface = _interface_of(peers[own][0])
    return LoadMeasurements(spin, interface, *_link(interface)), pairs


def quickest_spin(spins: int) -> float:
    """Return the seconds of the quickest of some loops, for a burst of load spares one of them."""
    quickest = float("inf")
    for number in range(spins):
        if number:
            time.sleep(_SPIN_PAUSE_SECONDS)
        began = time.perf_counter()
        for _ in range(_SPIN_TURNS):
            pass
        quickest = min(quickest, time.perf_counter() - began)
    return quickest


def _check_gpus(granted: int, visible: Sequence[str]) -> tuple[int, str]:
    try:
        from clusterddp.preflight import gpus
    except ImportError as error:  # a Python that was built without libffi has no ctypes
        return -1, f"no NVML: {error}" if granted else ""
    return gpus.check(granted, visible)


def _measure(
    environ: Mapping[str, str], granted: int, report: Callable[[str], None]
) -> NodeMeasurements:
    """Measure this node by itself; report: takes what is looked at next, where it may hang."""
    report("its GPUs")
    seen, gpu_fault = _check_gpus(granted, environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    asked = environ.get("SLURM_MEM_PER_NODE", "")
    disk = environ.get("TMPDIR") or "/tmp"
    report(f"its local disk, {disk}")
    disk_free, disk_fault = _try_folder(disk)
    report("/dev/shm")
    shm_free, shm_fault = _try_folder("/dev/shm")
    return NodeMeasurements(
        gpus_granted=granted,
        gpus_seen=seen,
        gpu_fault=gpu_fault,
        memory=available_memory(),
        memory_asked=float(asked) * 2**20 if asked.isdigit() and asked != "0" else -1.0,
        disk=disk,
        disk_free=disk_free,
        disk_fault=disk_fault,
        shm_free=shm_free,
        shm_fault=shm_fault,
    )


def _try_folder(folder: str) -> tuple[float, str]:
    """Return the bytes free in a folder, and the error with which a file could not be written."""
    free = -1.0
    try:
        status = os.statvfs(folder)
        free = float(status.f_bavail * status.f_frsize)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(_FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return free, error.strerror or str(error)
    return free, ""


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes of memory that can be had: MemAvailable, within the control groups' limits.

    A limit counts whole, as most of what its groups use is files that give way. -1 where unknown.
    """
    bounds = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                bounds.append(float(line.split()[1]) * 1024)
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            folder = cgroups / ("memory" if kinds else "") / path.lstrip("/")
            name = "memory.limit_in_bytes" if kinds else "memory.max"
            for each in (folder, *folder.parents):
                with contextlib.suppress(OSError, ValueError):  # `max` is no number
                    bounds.append(float((each / name).read_text()))
                if each == cgroups:
                    break
    return min(bounds, default=-1.0)


def _compare_clocks(lines: Lines) -> tuple[float, float]:
    """Return by how much this clock is ahead of the collector's, and the shortest round trip.

    As NTP does (RFC 5905): of several exchanges the quickest counts, halved.
    """
    best = (-1.0, 0.0)
    for _ in range(_CLOCK_EXCHANGES):
        sent, began = time.time(), time.perf_counter()
        lines.send({"clock": sent})
        theirs = next(_said(lines), {}).get("clock")
        took = time.perf_counter() - began
        if isinstance(theirs, float) and (best[0] < 0 or took < best[0]):
            best = (took, sent + took / 2 - theirs)
    return best[1], best[0]


def _said(lines: Lines) -> Iterator[dict[str, object]]:
    """Yield what the collector says, until it has gone."""
    while (several := lines.take(1 << 30)) is not None:
        yield from several


def _connected(names: Sequence[str], port: int) -> socket.socket:
    trouble: OSError = ConnectionError("no address of the batch host is given")
    places = []
    for name in names:
        try:
            places += socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        except OSError as error:
            trouble = error
    # The batch host's name and address are mostly one place.
    for address in dict.fromkeys((str(place[4][0]), port) for place in places):
        try:
            stream = socket.create_connection(address, timeout=_REACH_SECONDS)
        except OSError as error:
            trouble = error
            continue
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stream
    raise Unreached(str(trouble))


def _listening(
    stream: socket.socket, environ: Mapping[str, str], ports: Sequence[int]
) -> socket.socket:
    """Listen at the address of the interface that is asked for, or of the way to the collector.

    On the batch host itself that way may be the loopback's: then at all addresses.
    """
    own = stream.getsockname()[0]
    named = environ.get("GLOO_SOCKET_IFNAME", "")
    address = address_of(named) or ("" if own.startswith("127.") or own == "::1" else own)
    return listen(ports, address)


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface; empty where it has none (netdevice(7))."""
    if not interface:
        return ""
    request = struct.pack("256s", interface.encode(errors="surrogateescape")[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _interface_of(address: str) -> str:
    if ":" not in address:
        names = (name for _, name in socket.if_nameindex())
        return next((name for name in names if address_of(name) == address), "")
    with contextlib.suppress(OSError):
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            if line.startswith(packed):
                return line.split()[-1]
    return ""


def _link(interface: str) -> tuple[str, float]:
    """Return the state of an interface and its speed in Mbit/s, as far as the kernel says them."""
    state, speed = "", -1.0
    with contextlib.suppress(OSError):
        state = (_SYSFS_NET / interface / "operstate").read_text().strip()
    with contextlib.suppress(OSError, ValueError):  # EINVAL: a virtual one has no speed
        speed = float((_SYSFS_NET / interface / "speed").read_text())
    return state, speed


def _exchange(number: int, peer: Peer, nonce: str, patience: float) -> Pair:
    """Send to another node, and have it send."""
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
    """Take the connections of the other probes, each in a thread; a stranger's is closed."""
    while True:
        with contextlib.suppress(OSError):
            stream, _ = server.accept()
            threading.Thread(target=_answer, args=(stream, nonce), daemon=True).start()
            continue
        time.sleep(0.05)  # out of descriptors, say


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
            while stream.recv(1 << 16):  # until the other has read it: closing now could lose it
                pass
        else:
            _pump(stream)
            _drop(stream)


def _pump(stream: socket.socket) -> None:
    """Send until the other has had enough, which is when it says something or leaves."""
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
    """Return the bytes per second that arrive, after the first; below 0 where none do."""
    stream.settimeout(_REPLY_SECONDS)
    if not stream.recv(len(_CHUNK)):
        return -1.0
    count, began = 0, time.perf_counter()
    while count < TRANSFER_BYTES and (left := began + TRANSFER_SECONDS - time.perf_counter()) > 0:
        if not select.select([stream], [], [], left)[0]:
            break
        heard = stream.recv(len(_CHUNK))
        if not heard:
            break
        count += len(heard)
    return count / max(time.perf_counter() - began, 1e-6)


def _drop(stream: socket.socket) -> None:
    """Have the end of a connection throw away what is still on its way."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _number(line: bytes) -> float:
    try:
        return float(line)
    except ValueError:
        return -1.0

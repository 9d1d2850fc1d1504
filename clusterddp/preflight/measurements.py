"""Measurements of a job's nodes, as they pass between these.

Ahead of the tasks these are lines of JSON. Whoever sends a line may be a stranger: what is read
from it has its type, or its default.
"""

import json
import math
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

T = TypeVar("T")

MOST_BYTES = 64 << 10
"""Longest line that is read; those from the collector grow with the nodes, and have no bound."""


@dataclass(frozen=True)
class NodeMeasurements:
    """Measurements of a node by itself; a number below 0 is not known."""

    gpus_granted: int = 0
    gpus_seen: int = -1
    """GPUs that NVML reaches; -1 without NVML."""
    gpu_fault: str = ""
    """GPU that has fallen off, or that counts errors or is slowed down."""
    memory: float = -1.0
    """Bytes that can be had: available ones, within the limits of its control groups."""
    memory_asked: float = -1.0
    """Bytes that the job has asked for on the node."""
    disk: str = ""
    """Folder of the local disk."""
    disk_free: float = -1.0
    disk_fault: str = ""
    """Error with which a small file could not be written there."""
    shm_free: float = -1.0
    """Bytes free in /dev/shm."""
    shm_fault: str = ""
    clock: float = 0.0
    """Seconds by which its clock is ahead of the batch host's."""
    round_trip: float = -1.0
    """Seconds to the batch host and back, the least of some."""


@dataclass(frozen=True)
class LoadMeasurements:
    """Measurements of a node at the same time as the others."""

    spin: float = -1.0
    """Seconds that a fixed loop took."""
    interface: str = ""
    """Network interface that leads to the others."""
    link_state: str = ""
    """Its state, as in /sys/class/net/NAME/operstate."""
    link_speed: float = -1.0
    """Its speed in Mbit/s, as there."""


@dataclass(frozen=True)
class Pair:
    """Exchange of a node with another one, to which it connects."""

    to: int = -1
    """The other's number."""
    sent: float = -1.0
    """Bytes per second to the other; below 0 where none arrived."""
    received: float = -1.0
    error: str = ""
    """Reason for which there was no connection."""


@dataclass(frozen=True)
class RankMeasurements:
    """Measurements of a rank inside a training's own process."""

    rank: int
    local_rank: int
    host: str
    device: str = "cpu"
    """`cuda:1` or `cpu`."""
    model: str = ""
    """Name of its GPU; only those of one name are compared."""
    fault: str = ""
    """Fault in a matrix product whose result is known."""
    speed: float = -1.0
    """Floating-point operations per second in such products; below 0 where unknown."""
    pairs: Mapping[int, float] = field(default_factory=dict)
    """Bytes per second in all-reduces with one rank of another node each, by its rank."""


def load(kind: type[T], content: object) -> T:
    """Build a record of plain fields from parsed JSON; what is not of its type has its default."""
    values = {}
    known = content if isinstance(content, Mapping) else {}
    for each in fields(kind):  # type: ignore[arg-type]
        value, wanted = known.get(each.name), type(each.default)
        if wanted is float and type(value) is int and abs(value) < 1 << 60:
            value = float(value)
        if isinstance(value, float) and not math.isfinite(value):
            continue
        if type(value) is wanted:
            values[each.name] = value[:200] if isinstance(value, str) else value
    return kind(**values)


class Lines:
    """A socket over which objects pass, one line of JSON each."""

    def __init__(self, stream: socket.socket) -> None:
        self.socket = stream
        self._begun = b""

    def send(self, content: Mapping[str, object]) -> None:
        """Send an object. Raises OSError."""
        self.socket.sendall(json.dumps(content).encode() + b"\n")

    def take(self, most: int = MOST_BYTES) -> Iterator[dict[str, object]] | None:
        """Return the objects that have come whole; None at the end. Raises OSError.

        most: bytes of a line beyond which the sender is no node of ours, and at its end.
        """
        heard = self.socket.recv(1 << 16)
        lines, _, self._begun = (self._begun + heard).rpartition(b"\n")
        if not heard or len(self._begun) > most:
            return None
        return (content for line in lines.split(b"\n") if (content := _parse(line)) is not None)


def _parse(line: bytes) -> dict[str, object] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None

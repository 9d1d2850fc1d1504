"""Layout of the memory in which the ranks of a node keep snapshots of their training.

The parent of a task owns memory without a name in any directory (memfd_create(2)), which its rank
opens through /proc. It stays when the rank is killed, and is gone with the parent. The ranks of a
node share the work: each copies its part of the state into its own task's memory. There are two
halves, so that one is whole while the other is being written. `checkpoints.snapshots` writes them,
and `checkpoints.from_memory` makes an ordinary checkpoint of one.

A half has a header, which names the members (the ranks that share a node's memory) with the steps
that each has begun and finished to copy; then the state's tensors at fixed offsets; then a tail:
the index, and all that is not a tensor of the model or its optimizer. A member fills only its own
part of the tensors; the first one also writes the tail.
"""

import json
import mmap
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp import files
from clusterddp.slurm.forms import KILL_WAIT_VARIABLE

VARIABLE = "CLUSTERDDP_NODE_MEMORY"
"""Names the memory that a task's parent owns; see `Address`."""
MEMORY_COMMENT = b"clusterddp: saved from memory"
"""Comment at the end of the archive of a checkpoint that was saved from a node's memory."""
HEADER_BYTES = 20480
MAX_MEMBERS = 400
_NAME = "clusterddp-"
_COUNTS = struct.Struct("<qqq")
"""Number of members; offset and length of the tail, in bytes."""
_MEMBER = struct.Struct("<qqiii8s4x")
"""Steps begun and finished, plus one, 0 for none; address."""
_STEPS = struct.Struct("<qq")
_STEP_AT, _MEMBERS_AT, _PATH_AT = 32, 64, 16384
_LENGTH = struct.Struct("<q")
_CHUNK_BYTES = 8 << 20
_OWN_SAVE_SECONDS = 4.0


@dataclass(frozen=True)
class Address:
    """Address of a task's memory: the process that owns it, its two descriptors, and their name."""

    pid: int
    halves: tuple[int, int]
    token: str

    @classmethod
    def create(cls) -> "Address":
        """Create the memory of a task, which this process owns until its end.

        Raises OSError or AttributeError if the system has no such memory; Linux has it.
        """
        token = os.urandom(4).hex()
        first, second = (os.memfd_create(f"{_NAME}{token}") for _ in range(2))
        return cls(os.getpid(), (first, second), token)

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> "Address | None":
        """Return the address of this task's memory; None without one."""
        found = re.fullmatch(r"(\d+):(\d+):(\d+):([0-9a-f]{8})", environ.get(VARIABLE, ""))
        return cls(int(found[1]), (int(found[2]), int(found[3])), found[4]) if found else None

    @property
    def scratch(self) -> Path:
        """Directory in memory for a framework's files, which the rank removes after reading them.

        The owner removes it at the rank's end.
        """
        return Path("/dev/shm", f"{_NAME}{self.token}")

    def __str__(self) -> str:
        return ":".join(map(str, (self.pid, *self.halves, self.token)))

    def open(self) -> tuple[int, int]:
        """Open both halves. Raises OSError if the owner has ended or cannot be seen from here."""
        first = self._open(self.halves[0])
        try:
            return first, self._open(self.halves[1])
        except OSError:
            os.close(first)
            raise

    def _open(self, number: int) -> int:
        path = Path(f"/proc/{self.pid}/fd/{number}")
        if path.readlink().name != f"memfd:{_NAME}{self.token} (deleted)":
            raise FileNotFoundError(f"{path} is not the memory of a task")
        return os.open(path, os.O_RDWR)


@dataclass(frozen=True)
class Record:
    """One record of the checkpoint's archive, or one of the files next to it."""

    name: str
    is_tensor: bool
    """True if it is among the tensors; else it is in the tail."""
    offset: int
    """From the end of the header, or from the end of the tail's index."""
    size: int
    is_file: bool = False


@dataclass(frozen=True)
class Index:
    """Index of a snapshot."""

    step: int
    time: float
    """When it was taken, in seconds since the epoch."""
    tensor_bytes: int
    records: tuple[Record, ...]
    rank: int = -1
    """Rank that keeps it, if the model is sharded."""
    shards: tuple[str, ...] = ()
    """File of each rank's shards; empty for a rank without any."""
    kept: tuple[int, ...] = ()
    """Ranks whose shards it has."""


def owner_of(offset: int, size: int, total: int, members: int) -> int:
    """Return the member that copies the tensor at an offset, of `total` bytes of tensors."""
    return (2 * offset + size) * members // (2 * total)


def open_step(address: Address) -> mmap.mmap:
    """Map the place for the steps that the rank has done; see `write_step`. Raises OSError."""
    halves = address.open()
    try:
        os.ftruncate(halves[0], max(HEADER_BYTES, os.fstat(halves[0]).st_size))
        return mmap.mmap(halves[0], mmap.PAGESIZE)
    finally:
        for half in halves:
            os.close(half)


def write_step(mapped: mmap.mmap, step: int) -> None:
    """Write how many steps the rank has done."""
    _LENGTH.pack_into(mapped, _STEP_AT, step + 1)


def read_step(half: int) -> int | None:
    """Return how many steps the rank has done; None if it has not said so."""
    data = os.pread(half, _LENGTH.size, _STEP_AT)
    return _LENGTH.unpack(data)[0] - 1 if data.strip(b"\0") else None


def write_header(half: int, attempt: Path, members: Sequence[Address]) -> None:
    """Write the header of a half: the attempt's directory, and members without a copied step."""
    rows = [_MEMBER.pack(0, 0, m.pid, *m.halves, m.token.encode()) for m in members]
    os.pwrite(half, _COUNTS.pack(len(members), 0, 0), 0)
    os.pwrite(half, b"".join(rows), _MEMBERS_AT)
    os.pwrite(half, os.fsencode(attempt).ljust(HEADER_BYTES - _PATH_AT, b"\0"), _PATH_AT)


def read_attempt(half: int) -> Path | None:
    """Return the directory of the attempt that uses a half; None before its layout."""
    path = os.pread(half, HEADER_BYTES - _PATH_AT, _PATH_AT).rstrip(b"\0")
    return Path(os.fsdecode(path)) if path else None


def read_members(half: int) -> list[Address]:
    """Return the members of a half."""
    count, *_ = _COUNTS.unpack(os.pread(half, _COUNTS.size, 0))
    rows = (_MEMBER.unpack(os.pread(half, _MEMBER.size, _at(n))) for n in range(count))
    return [Address(pid, (first, second), token.decode()) for *_, pid, first, second, token in rows]


def _at(member: int) -> int:
    return _MEMBERS_AT + member * _MEMBER.size


def write_steps(half: int, member: int, begun: int, finished: int) -> None:
    """Write which step, plus one, a member has begun to copy into a half, and finished."""
    os.pwrite(half, _STEPS.pack(begun, finished), _at(member))


def read_steps(half: int, member: int) -> tuple[int, int]:
    """Return which step, plus one, a member has begun to copy into a half, and finished."""
    begun, finished = _STEPS.unpack(os.pread(half, _STEPS.size, _at(member)))
    return begun, finished


def write_tail(half: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write the tail of a half, which `make_tail` begins. Raises OSError without memory."""
    end = offset
    for part in parts:
        for begin in range(0, len(part), _CHUNK_BYTES):
            end += os.pwrite(half, part[begin : begin + _CHUNK_BYTES], end)
    count, *_ = _COUNTS.unpack(os.pread(half, _COUNTS.size, 0))
    os.pwrite(half, _COUNTS.pack(count, offset, end - offset), 0)


def make_tail(index: Index, contents: Sequence[bytes]) -> bytes:
    """Return the tail with an index and the contents of its records."""
    fields = vars(index) | {"records": [vars(record) for record in index.records]}
    text = json.dumps(fields).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *contents])


def read_index(half: int) -> tuple[Index, int] | None:
    """Return the index of a half, and the offset of the contents after it; None if damaged."""
    _, offset, length = _COUNTS.unpack(os.pread(half, _COUNTS.size, 0))
    [size] = _LENGTH.unpack(os.pread(half, _LENGTH.size, offset))
    begin = offset + _LENGTH.size
    text = os.pread(half, size, begin) if 0 < size < length else b"null"
    index = files.load(Index, json.loads(text))
    return (index, begin + size) if index else None


def kill_wait(environ: Mapping[str, str]) -> float | None:
    """Return the seconds from Slurm's SIGTERM to its SIGKILL; None if unknown."""
    value = environ.get(KILL_WAIT_VARIABLE, "")
    return float(value) if value.isdecimal() else None


def own_save_seconds(environ: Mapping[str, str]) -> float:
    """Return the time after SIGTERM for the ranks to save themselves, before their parents do."""
    seconds = kill_wait(environ)
    return _OWN_SAVE_SECONDS if seconds is None else min(_OWN_SAVE_SECONDS, seconds / 4)


def is_from_memory(checkpoint: Path) -> bool:
    """Return whether a checkpoint was saved from a node's memory, which its archive's end says."""
    return files.read_tail(checkpoint, len(MEMORY_COMMENT)) == MEMORY_COMMENT

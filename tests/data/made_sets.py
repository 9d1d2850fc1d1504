"""Small sets in the forms in which people have them: plain, compressed, in an archive."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

from clusterddp.data import mnist

NOBODY = 65534
"""A user without rights."""


def contents(raw: Path) -> dict[str, bytes]:
    return {name: (raw / name).read_bytes() for name in mnist.FILES}


def gzipped(raw: Path, place: Path) -> Path:
    """The four files of a set, compressed into another directory."""
    place.mkdir(parents=True, exist_ok=True)
    for name, content in contents(raw).items():
        (place / f"{name}.gz").write_bytes(gzip.compress(content, 1))
    return place


def tarred(place: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(place, mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return place


def resized(content: bytes) -> bytes:
    return struct.pack(">4I", 0x803, 30, 32, 32) + bytes(30 * 32 * 32)

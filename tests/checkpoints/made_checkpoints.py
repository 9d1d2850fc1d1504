"""Checkpoints made by hand: quickly, without torch, and in the ways in which files get damaged."""

import hashlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

from clusterddp.checkpoints.catalog import (
    FORMAT,
    Best,
    checksum_of,
    files,
    name_of,
    shards_of,
    step_of,
    write_best,
)
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir


def make(folder: Path, step: int, written: int = FORMAT) -> Path:
    """A file that passes for a whole checkpoint, with its checksum."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        content = {"format": written, "versions": {"clusterddp": f"step {step}" + " " * 1900}}
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    path = folder / name_of(step)
    path.write_bytes(buffer.getvalue())
    rehash(path)
    return path


def rehash(path: Path) -> None:
    checksum_of(path).write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")


def attempt(
    run: RunDir, number: int, *steps: int, start: int | None = 0, best: int | None = None
) -> Attempt:
    """An attempt that went on from step `start` (None: it has no record yet) and holds `steps`."""
    made = Attempt(run, number)
    made.checkpoints.mkdir(parents=True)
    if start is not None:
        made.record.write_text(json.dumps({"number": number, "step": start}))
    for step in steps:
        make(made.checkpoints, step)
    if best is not None:
        write_best(made.checkpoints, Best(0.9, best))
    return made


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _replace(path: Path) -> None:
    path.write_bytes(b"#!/bin/sh\necho this is something else\n")
    rehash(path)


def _replace_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", "another program's")
    rehash(path)


def _cut_early(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])
    rehash(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (_flip, "SHA-256 differs"),
    "torn": (lambda path: path.write_bytes(path.read_bytes()[:1000]), "cut off"),
    "empty": (lambda path: path.write_bytes(b""), "empty"),
    "foreign": (_replace, "foreign"),
    "foreign archive": (_replace_archive, "foreign"),
    "no checksum": (lambda path: checksum_of(path).unlink(), "no checksum"),
    "empty checksum": (lambda path: checksum_of(path).write_text(""), "SHA-256 differs"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    "a FIFO": (lambda path: (path.unlink(), os.mkfifo(path)), "cannot be read"),
    "a FIFO for a checksum": (
        lambda path: (checksum_of(path).unlink(), os.mkfifo(checksum_of(path))),
        "cannot be verified",
    ),
    "a dangling link": (lambda path: (path.unlink(), path.symlink_to("gone.pt")), "a dangling"),
    "a link elsewhere": (
        lambda path: path.symlink_to(path.rename(path.with_name("elsewhere.pt"))),
        "a link",
    ),
    "cut off ahead of its checksum": (_cut_early, "unreadable"),
    "another format": (lambda path: make(path.parent, step_of(path), 99), "format 99"),
}
"""Name to what does the damage, and how the reason begins."""


def steps_in(folder: Path) -> list[int]:
    return [step_of(path) for path in files(folder)]


def make_sharded(folder: Path, step: int, ranks: int = 2) -> Path:
    """A checkpoint with a file of each rank, and one that a framework has written."""
    path = make(folder, step)
    shards = shards_of(path)
    (shards / "trainer/fit-1").mkdir(parents=True)
    with checksum_of(path).open("a") as sums:
        names = [f"__{rank}_0.distcp" for rank in range(ranks)]
        for name in (*names, "trainer/fit-1/trainer.ckpt"):
            (shards / name).write_text(f"of {name}")
            digest = hashlib.sha256(f"of {name}".encode()).hexdigest()
            sums.write(f"{digest}  {shards.name}/{name}\n")
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())

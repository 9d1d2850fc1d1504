"""Saves the newest snapshot in a node's memory as an ordinary checkpoint; needs no torch.

The parent of a failed rank calls it. One task of the run writes and the others wait for it, because
srun ends all tasks soon after the first failed one. If the model is sharded, each task writes its
shards, and its copies of the shards of lost nodes.
"""

import contextlib
import math
import os
import shutil
import struct
import time
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from clusterddp import files, log, polling
from clusterddp.checkpoints import catalog
from clusterddp.errors import CheckpointError
from clusterddp.files import sync_folder
from clusterddp.run import node_memory
from clusterddp.run.attempt import FROM_MEMORY, FROM_MEMORY_SECONDS, Attempt, attempt_at
from clusterddp.run.node_memory import (
    HEADER_BYTES,
    MEMORY_COMMENT,
    Address,
    Index,
    Record,
    owner_of,
    read_steps,
)  # fmt: skip

_CHUNK_BYTES = 8 << 20
# torch.save begins each record at a multiple of this, so that torch.load can map the file.
_ALIGNMENT, _PADDING_ID = 64, 0x4246
_HEADER_BYTES, _ZIP64_BYTES = 30, 20  # in a zip file (APPNOTE.TXT 4.3.7, 4.5.3)
_ZIP64_FROM = 1 << 31
_NEWER_SECONDS = 2.0
"""Time for another node to say that it has a newer snapshot whole."""
_NOTES_SECONDS = 6.0
"""Time for the tasks of a sharded training to say which snapshots they have."""
_SHARDS_SECONDS = 60.0
"""Time for the other tasks to write their shards."""
_SHARDS, _NOTE, _DIGESTS = ".shards.parts", ".step-note.", ".digests."


def save(own: Address) -> None:
    """Write the newest snapshot of this node as a checkpoint, if no checkpoint is as new.

    own: this task's memory. Returns once the snapshot, or a newer one, is written, after at most
    five minutes. What goes wrong is logged.
    """
    path = node_memory.read_attempt(own.halves[0])
    if path is None:
        return
    attempt = attempt_at(path)
    known = -1
    with contextlib.ExitStack() as stack:
        try:
            members = node_memory.read_members(own.halves[0])
            known = max(read_steps(half, members.index(own))[1] for half in own.halves) - 1
            found = _whole(members, stack) if known > _newest_saved(attempt) else []
            if found and found[0].index.shards:
                _save_shards(attempt, found)
            elif found:
                _save(attempt, found[0])
        except (OSError, ValueError, struct.error, CheckpointError) as error:
            with contextlib.suppress(CheckpointError):
                if 0 <= known <= _newest_saved(attempt):
                    return  # by a task that has ended since
            cause = getattr(error, "strerror", "") or error
            log.warning(f"the snapshot in this node's memory was not saved: {cause}. [CD0706]")


@dataclass(frozen=True)
class _Snapshot:
    """A whole snapshot of a node."""

    halves: tuple[int, ...]
    """Its half of each member."""
    marks: tuple[int, ...]
    index: Index
    contents_at: int
    """Offset of what is in the tail after its index."""
    has_newer: bool
    """True if the node has begun a newer one, which another node may have whole."""

    def chunks(self, record: Record) -> Iterator[bytes]:
        """Yield the bytes of a record. Raises OSError if its memory was used again meanwhile."""
        half, begin = self.halves[0], self.contents_at + record.offset
        if record.is_tensor:
            total, begin = self.index.tensor_bytes, HEADER_BYTES + record.offset
            half = self.halves[owner_of(record.offset, record.size, total, len(self.halves))]
        for done in range(0, record.size, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, record.size - done)
            chunk = os.pread(half, size, begin + done)
            if len(chunk) < size:
                raise OSError("its memory is incomplete")
            yield chunk
        if _finished(self.halves) != self.marks:
            raise OSError("a newer snapshot has replaced it")


def _finished(halves: tuple[int, ...]) -> tuple[int, ...]:
    """Return the step, plus one, that each member has finished in a half."""
    return tuple(read_steps(half, number)[1] for number, half in enumerate(halves))


def _is_saved(attempt: Attempt, step: int) -> bool:
    return _newest_saved(attempt) >= step or attempt.is_superseded


def _newest_saved(attempt: Attempt) -> int:
    """Return the step of an attempt's newest checkpoint; -1 without one."""
    return next(map(catalog.step_of, catalog.files(attempt.checkpoints)), -1)


def _whole(members: Sequence[Address], stack: contextlib.ExitStack) -> list[_Snapshot]:
    """Open the whole snapshots of the node, the newest first.

    Raises OSError if the memory of another task is gone.
    """
    opened = []
    for member in members:
        opened.append(member.open())
        for half in opened[-1]:
            stack.callback(os.close, half)
    both = [tuple(halves[which] for halves in opened) for which in range(2)] if opened else []
    whole = [halves for halves in both if len({*_finished(halves)}) == 1 and _finished(halves)[0]]
    begun = max(
        (read_steps(half, number)[0] for each in both for number, half in enumerate(each)),
        default=0,
    )
    return [
        _Snapshot(halves, _finished(halves), *read, begun > read[0].step + 1)
        for halves in sorted(whole, key=_finished, reverse=True)
        if (read := node_memory.read_index(halves[0]))
    ]


@dataclass(frozen=True)
class _Note:
    """Says what a task of a sharded training has in memory."""

    rank: int
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    """Ranks of whose shards it has these steps."""


def _save_shards(attempt: Attempt, found: Sequence[_Snapshot]) -> None:
    """Write this task's shards of the newest step for which no shards are lost. Raises OSError.

    If the other tasks do not answer, they still run, and srun ends them when this one is gone: it
    leaves them the shards of both its steps.
    """
    own, folder = found[0].index, attempt.checkpoints
    note = folder / f"{_NOTE}{own.rank}"
    # The batch process waits for it before it kills the tasks.
    with contextlib.closing(catalog.Renewal(folder / f".step-task-{own.rank}{FROM_MEMORY}")):
        steps = tuple(each.index.step for each in found)
        files.write_record(note, _Note(own.rank, steps, own.kept), sync=False)
        written: set[int] = set()
        for patience in (_NOTES_SECONDS, 0.0):  # a note may come during the writing
            notes = _read_notes(folder, len(own.shards), patience)
            complete = _steps_of_all(notes, len(own.shards))
            goal = complete[0] if complete else own.step
            if _is_saved_by_ranks(attempt, goal):  # and the notes are gone, perhaps
                note.unlink(missing_ok=True)
                return
            for each in found:
                step = each.index.step
                if step not in written and step in (complete[:1] or steps):
                    have = {rank for rank, note in notes.items() if step in note.steps}
                    ranks = {own.rank, *(rank for rank in own.kept if rank not in have)}
                    _write_shards(attempt, each, ranks)
                    written.add(step)
            if complete:
                break
        if complete:
            _publish_shards(attempt, found, goal)
            note.unlink(missing_ok=True)


def _read_notes(folder: Path, world_size: int, seconds: float) -> dict[int, _Note]:
    """Return the tasks' notes by rank, once they are complete or some seconds have passed."""
    notes: dict[int, _Note] = {}
    known: set[Path] = set()
    for _ in polling.poll(seconds, every=polling.RECORDS_POLL_SECONDS / 2):
        for path in {*folder.glob(f"{_NOTE}*")} - known:
            if note := files.read(_Note, path):
                notes[note.rank] = note
                known.add(path)
        if len(notes) == world_size:
            break
    return notes


def _is_saved_by_ranks(attempt: Attempt, step: int) -> bool:
    """Wait for a checkpoint that the ranks are writing; return whether one is as new as a step."""
    for _ in polling.poll(_SHARDS_SECONDS, every=polling.RECORDS_POLL_SECONDS):
        if _is_saved(attempt, step) or not _ranks_save(attempt, step):
            break
    return _is_saved(attempt, step)


def _publish_shards(attempt: Attempt, found: Sequence[_Snapshot], step: int) -> None:
    """Wait until all shards of a step are written, and save the checkpoint if no other task has.

    A task that has another step only waits too: srun ends the others when this one is gone.
    """
    chosen = [each for each in found if each.index.step == step]
    for _ in polling.poll(_SHARDS_SECONDS, every=polling.RECORDS_POLL_SECONDS / 2):
        if _is_saved(attempt, step):
            return
        if chosen and not _missing(attempt, chosen[0])[1]:
            _save(attempt, chosen[0])
            return


def _steps_of_all(notes: Mapping[int, _Note], world_size: int) -> list[int]:
    """Return the steps of which every rank's shards are in memory, the newest first."""
    steps = {step for note in notes.values() for step in note.steps}
    ranks_of = {
        step: {rank for note in notes.values() if step in note.steps for rank in note.ranks}
        for step in steps
    }
    return sorted((s for s, ranks in ranks_of.items() if len(ranks) == world_size), reverse=True)


def _folder_of_shards(attempt: Attempt, found: _Snapshot) -> Path:
    return attempt.checkpoints / f".{Path(catalog.name_of(found.index.step)).stem}{_SHARDS}"


def _write_shards(attempt: Attempt, found: _Snapshot, ranks: Collection[int]) -> None:
    """Write the shards of some ranks, and then their SHA-256. Raises OSError."""
    index, folder = found.index, _folder_of_shards(attempt, found)
    folder.mkdir(mode=0o700, exist_ok=True)
    names = {index.shards[rank] for rank in ranks}
    digests = {
        record.name: _write_file(found, record, folder)
        for record in index.records
        if record.is_file and record.name in names
    }
    files.write_record(folder / f"{_DIGESTS}{index.rank}", digests)


def _missing(attempt: Attempt, found: _Snapshot) -> tuple[dict[str, str], int]:
    """Return the SHA-256 of the shards that are written, by name, and how many are not."""
    digests: dict[str, str] = {}
    for path in _folder_of_shards(attempt, found).glob(f"{_DIGESTS}*"):
        digests |= cast(dict[str, str], files.read_json(path) or {})
    return digests, sum(name not in {"", *digests} for name in found.index.shards)


def _save(attempt: Attempt, found: _Snapshot) -> None:
    """Write a snapshot, unless another task writes it or a newer one. Raises OSError."""
    step = found.index.step
    path = attempt.checkpoints / catalog.name_of(step)
    began = time.monotonic()
    for _ in polling.poll(polling.MEMORY_SAVE_SECONDS, every=polling.RECORDS_POLL_SECONDS / 2):
        if _is_saved(attempt, step):
            return
        may_be_newer = found.has_newer and not found.index.shards  # whose tasks have agreed
        may_be_newer = may_be_newer and time.monotonic() - began < _NEWER_SECONDS
        if _newest_claim(attempt) >= step or may_be_newer or _ranks_save(attempt, step):
            continue
        claim = path.with_name(f".{path.name}{FROM_MEMORY}")
        if not files.create(claim):
            if FROM_MEMORY_SECONDS <= files.age(claim, attempt.path) < math.inf:  # a dead writer's
                claim.unlink(missing_ok=True)
            continue
        with contextlib.closing(catalog.Renewal(claim)):
            shards = _write_files(attempt, found, path)
            if catalog.publish(attempt, path, lambda file: _write_archive(file, found), shards):
                _remove_shards(attempt.checkpoints)
                os.utime(path, (found.index.time, found.index.time))
                log.info(f"saved step {step} from the memory of this node: {path.name}")
        return


def _newest_claim(attempt: Attempt) -> int:
    """Return the latest step of a snapshot that another task writes; -1 for none."""
    claims = attempt.checkpoints.glob(f".step-*.pt{FROM_MEMORY}")
    alive = (each for each in claims if files.age(each, attempt.path) < FROM_MEMORY_SECONDS)
    return max(map(_step_of_hidden, alive), default=-1)


def _step_of_hidden(path: Path) -> int:
    """Return the step in the name of a claim or an unfinished checkpoint; -1 for another file."""
    return catalog.step_of(Path(path.name[1:]).with_suffix(""))


def _ranks_save(attempt: Attempt, step: int) -> bool:
    """Return whether the ranks write a checkpoint of this step or a later one."""
    for path in attempt.checkpoints.glob(".step-*.pt.*"):
        if _step_of_hidden(path) >= step and not path.name.endswith(FROM_MEMORY):
            with contextlib.suppress(OSError):
                if files.age(path, attempt.path) < FROM_MEMORY_SECONDS:
                    return True
    return False


def _write_files(attempt: Attempt, found: _Snapshot, path: Path) -> dict[str, str]:
    """Write the files next to the checkpoint; return their SHA-256 by path. Raises OSError."""
    final, digests = catalog.shards_of(path), dict[str, str]()
    fresh = final.with_name(f".{final.name}.{os.uname().nodename}-{os.getpid()}")
    if found.index.shards:
        fresh, (digests, missing) = _folder_of_shards(attempt, found), _missing(attempt, found)
        if missing:
            raise OSError(f"{missing} of {len(found.index.shards)} shards are missing")
    for record in found.index.records:
        if record.is_file and record.name not in found.index.shards:
            digests[record.name] = _write_file(found, record, fresh)
    if digests:
        for each in fresh.glob(f"{_DIGESTS}*"):
            each.unlink()
        shutil.rmtree(final, ignore_errors=True)
        fresh.replace(final)
        sync_folder(final.parent)
    return {f"{final.name}/{name}": digest for name, digest in digests.items()}


def _write_file(found: _Snapshot, record: Record, folder: Path) -> str:
    """Write a file of a snapshot into a directory; return its SHA-256. Raises OSError."""
    file = folder / record.name
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.uname().nodename}-{os.getpid()}")
    with draft.open("wb") as stream:
        stream.writelines(found.chunks(record))
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)  # a task of a lost node may be alive and write it too
    return catalog.stored_sha256(file)


def _remove_shards(folder: Path) -> None:
    """Remove notes and unused shards."""
    for path in folder.glob(f"{_NOTE}*"):
        path.unlink(missing_ok=True)
    for path in folder.glob(f".step-*{_SHARDS}"):
        shutil.rmtree(path, ignore_errors=True)


def _write_archive(file: IO[bytes], found: _Snapshot) -> None:
    """Write a snapshot as torch.save would: an uncompressed zip archive, its records aligned."""
    if found.index.shards:
        data = b"".join(found.chunks(found.index.records[0]))
        end = struct.pack("<H", len(MEMORY_COMMENT)) + MEMORY_COMMENT  # APPNOTE.TXT 4.3.16
        file.write(data[:-2] + end)
        return
    with zipfile.ZipFile(file, "w") as archive:
        archive.comment = MEMORY_COMMENT
        for record in found.index.records:
            if record.is_file:
                continue
            info, is_large = zipfile.ZipInfo(record.name), record.size >= _ZIP64_FROM
            assert archive.fp
            begin = archive.fp.tell() + _HEADER_BYTES + len(record.name) + 4
            padding = -(begin + is_large * _ZIP64_BYTES) % _ALIGNMENT
            info.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
            with archive.open(info, "w", force_zip64=is_large) as stream:
                for chunk in found.chunks(record):
                    stream.write(chunk)

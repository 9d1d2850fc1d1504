"""Names, lists and reads the checkpoint files of one folder, each verified by its checksum.

A file step-00001200.pt lies beside its SHA-256 in the form of sha256sum(1), because torch.load
accepts a flipped bit silently; best.json in the same folder names the best checkpoint. Works
without torch: `state` knows the content, and `writer` writes.
"""

import hashlib
import io
import json
import pickletools
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import CheckpointError
from clusterddp.run.files import load, read_file, read_json, write_atomically
from clusterddp.version import __version__

FORMAT = 3
"""Version of what a checkpoint holds; 2, up to 0.1.1, packed the random states into bytes."""
_READABLE = (2, FORMAT)
BEST = "best.json"
_NAME = re.compile(r"step-(\d{8,})\.pt", re.ASCII)
# torch.save writes a zip archive: its first bytes, and the first of its last 22.
_HEAD, _TAIL, _TAIL_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
# In the name of the version that wrote a checkpoint; the archive is not compressed.
_MARK = b"clusterddp"


class UnusableError(CheckpointError):
    """A checkpoint is missing, damaged, or another program's file under its name."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """The cause in a few words."""


@dataclass(frozen=True)
class Best:
    """The highest accuracy on the test set so far."""

    accuracy: float
    step: int


def name_of(step: int) -> str:
    return f"step-{step:08d}.pt"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name, or -1 for any other file."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def checksum_of(path: Path) -> Path:
    """Path of the SHA-256 of a checkpoint."""
    return path.with_name(path.name + ".sha256")


def files(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, valid or not, the highest step first.

    Empty without a folder. Raises CheckpointError when it cannot be read.
    """
    try:
        paths = [path for path in folder.iterdir() if step_of(path) >= 0]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"the folder {folder} cannot be read: {error.strerror}.") from None
    return sorted(paths, key=step_of, reverse=True)


def read(path: Path) -> bytes:
    """Return the bytes of a valid checkpoint.

    Raises UnusableError when it is missing, torn, unverified, of another format, or no regular
    file of its folder: the run does not keep the target of a symbolic link, and reading a FIFO
    would wait for its writer.
    """
    if path.is_symlink():
        reason = "a link" if path.exists() else "a dangling link"
        raise UnusableError(
            reason,
            f"the checkpoint {path} is {reason} to {path.readlink()}. Put the file itself there.",
        )
    try:
        data = read_file(path)
    except FileNotFoundError:
        raise UnusableError("missing", f"the checkpoint {path} does not exist.") from None
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise UnusableError(reason, f"the checkpoint {path} {reason}.") from None
    if not data:
        raise UnusableError("empty", f"the checkpoint {path} is empty.")
    checksum = checksum_of(path)
    try:
        recorded = read_file(checksum).decode(errors="replace").split()[:1]
    except FileNotFoundError:
        raise UnusableError(
            "no checksum",
            f"the checkpoint {path} has no {checksum.name} beside it, so it may be incomplete. "
            "Copy that file along; if you trust the checkpoint, make it with sha256sum.",
        ) from None
    except OSError as error:
        reason = f"cannot be verified: {checksum.name}: {error.strerror}"
        raise UnusableError(reason, f"the checkpoint {path} {reason}.") from None
    fits = recorded == [hashlib.sha256(data).hexdigest()]
    if not data.startswith(_HEAD) or (fits and _MARK not in data):
        raise UnusableError(
            "foreign", f"{path} is no checkpoint of clusterddp: another file has its name."
        )
    if not fits:
        cut = "" if data[-_TAIL_BYTES:].startswith(_TAIL) else "it is cut off and "
        raise UnusableError(
            "cut off" if cut else "SHA-256 differs",
            f"the checkpoint {path} is damaged: {cut}its SHA-256 is not the recorded one. "
            "Resume from an older checkpoint of the run.",
        )
    written = _format(data)
    if written not in _READABLE:
        raise UnusableError(
            f"format {written}",
            f"the checkpoint {path} has format {written}, and this clusterddp {__version__} reads "
            f"formats {_READABLE[0]} to {FORMAT}. Resume with the clusterddp that wrote it.",
        )
    return data


def _format(data: bytes) -> object:
    """Return the format that a checkpoint names, or None; its pickle is scanned, never run."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            [record] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            words = pickletools.genops(archive.read(record))
            # A dict's value follows its key; an opcode of the memo can stand between.
            any(word == "format" for _, word, _ in words)
            return next((word for op, word, _ in words if "INT" in op.name), None)
    except (ValueError, LookupError, RuntimeError, NotImplementedError, zipfile.BadZipFile):
        return None


def read_best(folder: Path) -> Best | None:
    """Return the best checkpoint that best.json in a folder names, or None."""
    return load(Best, read_json(folder / BEST))


def write_best(folder: Path, best: Best) -> None:
    """Write best.json into a folder. Raises OSError."""
    content = {"step": best.step, "accuracy": best.accuracy}
    write_atomically(folder / BEST, (json.dumps(content) + "\n").encode())


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files and checksums without a checkpoint, which a killed writer leaves.

    Only the folder's one writer may call it. Raises OSError.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        hidden = path.name.startswith((".step-", f".{BEST}."))
        lone = path.suffix == ".sha256" and not path.with_suffix("").exists()
        if hidden or (lone and step_of(path.with_suffix("")) >= 0):
            path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a checkpoint and its checksum. Raises OSError."""
    # In this order, so that a kill in between leaves no apparently damaged checkpoint.
    path.unlink(missing_ok=True)
    checksum_of(path).unlink(missing_ok=True)

"""Checkpoint files: found and read, each only when its checksum holds; without torch.

A file step-00001200.pt lies beside its SHA-256 in the form of sha256sum(1), because torch.load
accepts a flipped bit without a word. What is inside is `checkpoint`'s.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from clusterddp.errors import CheckpointError
from clusterddp.run_dir import RunDir


def find(resume: str, warn: Callable[[str], None]) -> Path:
    """The checkpoint that `--resume RUN|FILE` names; raises CheckpointError when there is none."""
    path = Path(resume).expanduser()
    if not path.is_dir():
        read(path)
        return path
    run = RunDir(path if path.name != "checkpoints" else path.parent)
    found = newest(run, warn)
    if found is None:
        raise CheckpointError(
            f"--resume {resume}: {run.checkpoints} holds no whole checkpoint. "
            "Name another run directory, or a checkpoint file."
        )
    return found


def newest(run: RunDir, warn: Callable[[str], None]) -> Path | None:
    """The latest whole checkpoint of a run; one that is damaged is passed over with a warning."""
    for path in sorted(run.checkpoints.glob("step-*.pt"), reverse=True):
        try:
            read(path)
        except CheckpointError as error:
            warn(f"passing over {path.name}: {error}")
            continue
        return path
    return None


def read(path: Path) -> bytes:
    """The bytes of a checkpoint; raises CheckpointError when it is missing, torn or unverified."""
    try:
        data = path.read_bytes()
        recorded = checksum_of(path).read_text().split()[:1]
    except FileNotFoundError as error:
        if error.filename == str(path):
            raise CheckpointError(f"the checkpoint {path} does not exist.") from None
        raise CheckpointError(
            f"the checkpoint {path} has no {checksum_of(path).name} beside it, so it may be "
            "incomplete. Copy that file along; if you trust the checkpoint, make it with sha256sum."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}.") from None
    if recorded != [hashlib.sha256(data).hexdigest()]:
        raise CheckpointError(
            f"the checkpoint {path} is damaged: its SHA-256 is not the recorded one. "
            "Resume from an older checkpoint of the run."
        )
    return data


def remove_leftovers(run: RunDir) -> None:
    """Delete the temporary files that a killed writer has left."""
    for path in run.checkpoints.glob(".step-*"):
        path.unlink(missing_ok=True)


def checksum_of(path: Path) -> Path:
    """Where the SHA-256 of a checkpoint is kept."""
    return path.with_name(path.name + ".sha256")

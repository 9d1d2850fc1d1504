"""What a checkpoint holds: saving a training's state, loading it, and refusing a foreign one."""

import hashlib
import io
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from clusterddp import __version__
from clusterddp.errors import CheckpointError
from clusterddp.run_dir import RunDir, write_atomically
from clusterddp.train_config import TrainConfig
from clusterddp.training import checkpoint_file

FORMAT = 1


@dataclass
class Position:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps since the start of the run."""
    epoch: int = 0
    """The epoch that is being trained, from 0."""
    step_in_epoch: int = 0
    samples: int = 0
    """Images of this epoch that all ranks have seen together."""
    seconds: float = 0.0
    """Spent in training steps since the start of the run, without evaluation and saving."""
    images: int = 0
    """Images that all ranks have seen together since the start of the run."""

    @property
    def epoch_shown(self) -> int:
        """The epoch of the last step, as people count: from 1."""
        return self.epoch + 1 if self.step_in_epoch else max(self.epoch, 1)

    def advance(self, images: int) -> None:
        """One step over so many images of all ranks is done."""
        self.step += 1
        self.step_in_epoch += 1
        self.samples += images
        self.images += images

    def next_epoch(self) -> None:
        """The epoch's last image was seen."""
        self.epoch += 1
        self.step_in_epoch = self.samples = 0


def save(
    run: RunDir,
    *,
    config: TrainConfig,
    model: nn.Module,
    optimizer: Optimizer,
    position: Position,
    world_size: int,
) -> Path:
    """Write step-NNNNNNNN.pt with its checksum; raises CheckpointError when that fails."""
    content = {
        "format": FORMAT,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        **asdict(position),
        "config": asdict(config),
        "world_size": world_size,
        "versions": {"clusterddp": __version__, "torch": torch.__version__.split("+")[0]},
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    path = run.checkpoints / f"step-{position.step:08d}.pt"
    try:
        run.make(run.checkpoints)
        # Where a file is written again, its old checksum goes first: between the two writes it
        # counts as incomplete, never as torn under a checksum that fits neither.
        checkpoint_file.checksum_of(path).unlink(missing_ok=True)
        write_atomically(path, data)
        line = f"{hashlib.sha256(data).hexdigest()}  {path.name}\n"
        write_atomically(checkpoint_file.checksum_of(path), line.encode())
    except OSError as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error.strerror}. Make room or give the folder "
            "back its write permission; the run goes on from its last checkpoint."
        ) from None
    return path


def load(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, its tensors on the CPU.

    Raises CheckpointError when it is missing, torn, has no checksum, or is of another format.
    """
    data = checkpoint_file.read(path)
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        form = content["format"]
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no checkpoint of clusterddp: {error}") from None
    if form != FORMAT:
        raise CheckpointError(
            f"the checkpoint {path} has format {form}, this clusterddp {__version__} reads format "
            f"{FORMAT}. Resume with the version that wrote it: {content.get('versions')}."
        )
    return dict(content)


def check_fits(path: Path, content: dict[str, Any], config: TrainConfig) -> None:
    """Raise CheckpointError when a checkpoint is of another model, dataset or optimizer."""
    for name in ("model", "dataset", "optimizer"):
        theirs, ours = content["config"].get(name), getattr(config, name)
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint {path} was trained with --{name} {theirs}, this run has --{name} "
                f"{ours}. Use --{name} {theirs}, or start without --resume."
            )


def restore(path: Path, config: TrainConfig, model: nn.Module, optimizer: Optimizer) -> Position:
    """Load weights and optimizer state from a checkpoint and return where it stands.

    `model` is the bare module, not its DDP wrapper. Raises CheckpointError as `load` does, and
    when the checkpoint does not fit.
    """
    content = load(path)
    check_fits(path, content, config)
    try:
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {path} does not fit the model {config.model}: {error}"
        ) from None
    return Position(**{name: content[name] for name in Position.__dataclass_fields__})


def weights_sha256(model: nn.Module) -> str:
    """A digest of all weights by name, type, shape and bytes: equal only for equal weights."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

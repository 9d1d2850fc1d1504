"""Collects, loads and restores the state of a training: the content of a checkpoint.

A checkpoint is a plain torch.save of plain values: `torch.load(FILE, weights_only=True)["model"]`
is the bare module's state dict, and needs nothing of clusterddp. `files` reads the files, and
`writer` writes them.
"""

import hashlib
import io
import pickle
import platform
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from clusterddp.checkpoints import catalog
from clusterddp.checkpoints.catalog import FORMAT, Best
from clusterddp.checkpoints.tensors import copied
from clusterddp.data import mnist as data
from clusterddp.errors import CheckpointError, PeerError
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Agreement
from clusterddp.version import __version__

States = dict[str, Tensor]
"""Random generators' states by name: of one rank, or a row a rank."""


class _BestContent(TypedDict):
    """A `Best`."""

    accuracy: float
    step: int


class Content(TypedDict):
    """Content of a checkpoint: plain values and tensors, for torch.load with `weights_only`.

    Older ones lack `scaler` and `precision`.
    """

    format: int
    model: dict[str, Tensor]
    optimizer: dict[str, object]
    step: int
    epoch: int
    step_in_epoch: int
    samples: int
    seconds: float
    images: int
    best: _BestContent | None
    random_states: States | None
    """Result of `gather_random_states`."""
    scaler: dict[str, object]
    """State of fp16's loss scale; empty at other precisions."""
    precision: str
    world_size: int
    global_batch_size: int
    data_sha256: str
    config: dict[str, object]
    versions: dict[str, str]


# Bytes broadcast at once: a network stack may hold them twice.
_PIECE_BYTES = 64 << 20
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError)


@dataclass
class Position:
    """Progress of a run."""

    step: int = 0
    """Optimizer steps since the start of the run."""
    epoch: int = 0
    """The epoch that is being trained, from 0."""
    step_in_epoch: int = 0
    samples: int = 0
    """Images of this epoch that all ranks together have seen."""
    seconds: float = 0.0
    """Time in training steps since the start of the run, without evaluation and saving."""
    images: int = 0
    """Images that all ranks together have seen since the start of the run."""

    @property
    def epoch_shown(self) -> int:
        """Number of the epoch of the last step, counted from 1."""
        return self.epoch + 1 if self.step_in_epoch else max(self.epoch, 1)

    def advance(self, images: int) -> None:
        """Count a step over so many images of all ranks."""
        self.step += 1
        self.step_in_epoch += 1
        self.samples += images
        self.images += images

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.step_in_epoch = self.samples = 0


@dataclass(frozen=True)
class Restored:
    """Content of a checkpoint besides weights and optimizer state."""

    position: Position
    best: Best | None
    random_states: States | None
    """Result of `gather_random_states`."""
    scaler: dict[str, object]
    """State of fp16's loss scale; empty at other precisions."""


def collect(
    config: TrainConfig,
    agreed: Agreement,
    model: nn.Module,
    optimizer: Optimizer,
    position: Position,
    best: Best | None,
    random_states: States | None,
    scaler: dict[str, object],
) -> Content:
    """Collect the content of a checkpoint, every tensor a copy on the CPU, so training can go on.

    model: the bare module, not its DDP wrapper.
    scaler: state of fp16's loss scale.
    """
    content = {
        "format": FORMAT,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        **asdict(position),
        "best": asdict(best) if best else None,
        "random_states": random_states,
        "scaler": scaler,
        "precision": agreed.precision,
        "world_size": agreed.world_size,
        "global_batch_size": agreed.global_batch_size,
        "data_sha256": agreed.data_sha256,
        "config": asdict(config),
        "versions": {
            "clusterddp": __version__,
            "torch": torch.__version__.split("+")[0],
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
    return cast(Content, {name: copied(value) for name, value in content.items()})


def load(path: Path) -> Content:
    """Load the content of a checkpoint, its tensors on the CPU.

    Raises CheckpointError when it is missing, torn, has no checksum, or is of another format.
    """
    return _parsed(path, catalog.read(path))


def load_together(path: Path, device: torch.device) -> Content:
    """Load a checkpoint on every rank; rank 0 alone reads the file and broadcasts its bytes.

    Collective over the default process group; `device` is this rank's. Raises CheckpointError as
    `load` does, and on the other ranks PeerError where rank 0 could not read it.
    """
    first = dist.get_rank() == 0
    on = device if dist.get_backend() == "nccl" else torch.device("cpu")
    data, failure = b"", None
    if first:
        try:
            data = catalog.read(path)
        except CheckpointError as error:
            failure = error
    size = torch.tensor([-1 if failure else len(data)], dtype=torch.int64, device=on)
    dist.broadcast(size, src=0)
    if failure:
        raise failure
    if int(size) < 0:
        raise PeerError(f"rank 0 could not read the checkpoint {path}. Its log says why.")
    return _parsed(path, _broadcast(data, int(size), on))


def _broadcast(data: bytes, size: int, on: torch.device) -> bytes:
    """Give rank 0's bytes to all; what they travel in is freed before they are parsed."""
    whole = torch.empty(size, dtype=torch.uint8)
    if data:
        whole.numpy()[:] = np.frombuffer(data, np.uint8)
    for piece in torch.split(whole, _PIECE_BYTES):
        sent = piece.to(on)
        dist.broadcast(sent, src=0)
        piece.copy_(sent)
    return data or whole.numpy().tobytes()


def _parsed(path: Path, data: bytes) -> Content:
    try:
        content = dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        content["config"]
        return cast(Content, content)
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} is no checkpoint of clusterddp: {error} [CD0704]") from None


def check_fits(path: Path, content: Content, config: TrainConfig, *, data_sha256: str = "") -> None:
    """Raise CheckpointError for the checkpoint of another model, dataset or optimizer.

    data_sha256: fingerprint of this run's training set; empty where it is not known.
    """
    for name in ("model", "dataset", "optimizer"):
        theirs, ours = content["config"].get(name), getattr(config, name)
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint {path} was trained with --{name} {theirs}, this run has --{name} "
                f"{ours}. Use --{name} {theirs}, or start without --resume. [CD0703]"
            )
    theirs = content["data_sha256"]
    if theirs and data_sha256 and theirs != data_sha256:
        raise CheckpointError(
            f"the dataset has changed since the checkpoint {path}: it was trained on images with "
            f"SHA-256 {theirs[:16]}..., those in {config.data_dir} have {data_sha256[:16]}... "
            "Name the folder with the former ones (--data-dir), or start a new run."
            f"{data.rendered_by(config.dataset, config.data_dir)} [CD0608]"
        )


def restore(
    path: Path, config: TrainConfig, model: nn.Module, optimizer: Optimizer, content: Content
) -> Restored:
    """Restore weights and optimizer state from a checkpoint, and return the rest of it.

    model: the bare module, not its DDP wrapper.
    path: where the content was loaded from, for messages.

    Raises CheckpointError when the checkpoint does not fit.
    """
    try:
        check_fits(path, content, config)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        return Restored(
            position=Position(
                step=content["step"],
                epoch=content["epoch"],
                step_in_epoch=content["step_in_epoch"],
                samples=content["samples"],
                seconds=content["seconds"],
                images=content["images"],
            ),
            best=Best(**content["best"]) if content["best"] else None,
            random_states=content["random_states"],
            scaler=content["scaler"],
        )
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint {path} does not fit the model {config.model}: {error} [CD0703]"
        ) from None


def gather_random_states(device: torch.device) -> States | None:
    """Return the states of all ranks on rank 0, a row a rank; None on the others.

    Collective over the default process group: every rank calls it.
    """
    on = device if dist.get_backend() == "nccl" else torch.device("cpu")
    gathered, first, world_size = {}, dist.get_rank() == 0, dist.get_world_size()
    for name, state in random_states(device).items():
        sent = state.to(on)
        rows = [torch.empty_like(sent) for _ in range(world_size)] if first else None
        dist.gather(sent, rows, dst=0)
        if rows:
            gathered[name] = torch.stack(rows).cpu()
    return gathered or None


def random_states(device: torch.device) -> States:
    """Return the states of this rank's generators, each of one length on all ranks of a kind.

    torch, cuda: bytes, the latter on a GPU alone. python, numpy: the Mersenne Twister's integers,
    numpy's position, whether half of a Gaussian pair waits, and it, all as float64; numpy's is
    left out where its generator is another.
    """
    _, integers, waiting = random.getstate()
    python = [*integers, waiting is not None, waiting or 0.0]
    states = {"torch": torch.get_rng_state(), "python": torch.tensor(python, dtype=torch.float64)}
    kind = np.random.get_state(legacy=False)
    if isinstance(kind, dict) and kind["bit_generator"] == "MT19937":
        twister = kind["state"]
        numpy = [*twister["key"].tolist(), twister["pos"], kind["has_gauss"], kind["gauss"]]
        states["numpy"] = torch.tensor(numpy, dtype=torch.float64)
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(
    states: States | None, rank: int, world: int, device: torch.device
) -> None:
    """Give a rank's generators back what was gathered of as many ranks as `world`.

    Without states, or with those of another number of ranks, they stay as they are; so does a
    device's generator with states of another kind of device. Raises CheckpointError for damaged
    states and for those of another generator.
    """
    if states is None or len(states["torch"]) != world:
        return
    try:
        # Clones: torch reads the state of its generator from the start of the storage.
        states_of_rank = {name: rows[rank].clone() for name, rows in states.items()}
        *integers, waits, waiting = states_of_rank["python"].tolist()
        twister = tuple(map(int, integers))
        torch.set_rng_state(states_of_rank["torch"])
        if device.type == "cuda" and "cuda" in states_of_rank:
            torch.cuda.set_rng_state(states_of_rank["cuda"], device)
        random.setstate((3, twister, waiting if waits else None))
        if "numpy" in states_of_rank:
            *integers, position, has_gauss, gauss = states_of_rank["numpy"].tolist()
            key = np.array(integers, dtype=np.uint32)
            np.random.set_state(("MT19937", key, int(position), int(has_gauss), gauss))
    except (LookupError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the random states of the checkpoint cannot be restored: {error}. "
            "Resume with the versions that wrote it. [CD0704]"
        ) from None


def weights_sha256(model: nn.Module) -> str:
    """Return a digest of all weights by name, type, shape and bytes, equal for equal weights."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):  # a module's extra state
            digest.update(f"{name} {value!r}\n".encode())
            continue
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

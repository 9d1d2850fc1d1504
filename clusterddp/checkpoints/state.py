"""Content of a checkpoint: position, state dicts and random states.

A checkpoint is written by torch.save from plain values: without clusterddp,
`torch.load(FILE, weights_only=True)["model"]` returns the bare module's state dict. `catalog` reads
the files, and `writer` writes them.
"""

import hashlib
import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterddp.checkpoints import catalog
from clusterddp.checkpoints.catalog import FORMAT, Best
from clusterddp.distributed import agreement
from clusterddp.errors import CheckpointError
from clusterddp.version import __version__

Content = Mapping[str, Any]
"""Content of a checkpoint, as `collect` returns it: plain values and tensors."""
# Bytes broadcast at once: a network stack may hold them twice.
_PIECE_BYTES = 64 << 20
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError)


class Stateful(Protocol):
    """Anything whose state can be saved, such as a module or an optimizer."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass
class Position:
    """Progress of a run."""

    step: int = 0
    """Optimizer steps since the start of the run."""
    epoch: int = 0
    """Current epoch, from 0."""
    step_in_epoch: int = 0
    """Batches that each rank has trained in this epoch."""
    samples: int = 0
    """Images that all ranks together have seen in this epoch."""
    seconds: float = 0.0
    """Time in training steps since the start of the run, without evaluation and saving."""
    images: int = 0
    """Images that all ranks together have seen since the start of the run."""

    @classmethod
    def of(cls, content: Content) -> "Position":
        """Return the position at which a checkpoint was saved."""
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})

    @property
    def epoch_shown(self) -> int:
        """Number of the epoch of the last step, counted from 1."""
        return self.epoch + 1 if self.step_in_epoch else max(self.epoch, 1)

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.step_in_epoch = self.samples = 0


def collect(
    states: Mapping[str, Stateful],
    position: Position,
    *,
    world_size: int,
    random_states: Any,
    best: Best | None = None,
    copy: Callable[[Tensor], Tensor] | None = None,
    **more: object,
) -> Content:
    """Collect the content of a checkpoint, with all tensors copied to the CPU.

    Contains the fields of `Position`, the states by name (for a module without the DDP wrapper),
    `random_states` (of all ranks), and `more` (plain values of the training). copy: see `copied`.
    """
    head = {
        "format": FORMAT,  # first, where `catalog` looks for it
        **asdict(position),
        "best": asdict(best) if best else None,
        "world_size": world_size,
        "versions": {"clusterddp": __version__, "torch": torch.__version__.split("+")[0]},
        "random_states": random_states,
    }
    kept = {name: each.state_dict() for name, each in states.items()}
    return {**head, **copied({**more, **kept}, copy)}


def load(path: Path, *, shards: bool = True) -> Content:
    """Load the content of a checkpoint, its tensors on the CPU.

    Raises CheckpointError if it is missing or damaged, has no checksum, or has another format.
    """
    return _parsed(path, catalog.read(path, shards=shards))


def load_together(path: Path) -> Content:
    """Load a checkpoint on every rank; only rank 0 reads the file, and broadcasts its bytes.

    Collective over the default process group, if there is one; does not load shards. Raises
    CheckpointError like `load`, on all ranks if rank 0 cannot read the file.
    """
    rank, world_size = agreement.rank_and_world_size()
    if world_size == 1:
        return load(path, shards=False)
    data, problem = b"", ("", "")
    if rank == 0:
        try:
            data = catalog.read(path, shards=False)
        except CheckpointError as error:
            problem = str(error), error.code
    [(length, (message, code)), *_] = agreement.gather((len(data), problem))
    if message:
        raise CheckpointError(message, code=code)
    return _parsed(path, broadcast(data, length))


def broadcast(data: bytes, size: int, group: dist.ProcessGroup | None = None) -> bytes:
    """Broadcast rank 0's bytes, at least one; collective. size: their number.

    group: of all ranks; the default one without it.
    """
    whole = torch.frombuffer(bytearray(data or size), dtype=torch.uint8)
    for piece in torch.split(whole, _PIECE_BYTES):
        sent = piece.to(agreement.device(group))
        dist.broadcast(sent, src=0, group=group)
        piece.copy_(sent)
    return data or bytes(agreement.bytes_of(whole))


def _parsed(path: Path, data: bytes) -> Content:
    try:
        return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of clusterddp: {error} [CD0704]"
        ) from None


def restore(path: Path, states: Mapping[str, Stateful], content: Content) -> None:
    """Restore states from a checkpoint; raise CheckpointError if they do not fit.

    path: source of the content, for messages.
    """
    for name, each in states.items():
        try:
            each.load_state_dict(content[name])
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint {path} does not fit the {name} of this training: {error} [CD0703]"
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


def to_bytes(content: object) -> bytes:
    """Serialise the content of a checkpoint."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def copied(value: Any, copy: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Copy a value with every tensor in it to the CPU, with the same strides.

    copy: replaces the copy of a tensor. Raises TypeError for a DTensor.
    """
    if isinstance(value, Tensor):
        if hasattr(value, "device_mesh"):
            raise TypeError("a DTensor is spread over the ranks: pass its full_tensor()")
        return copy(value) if copy else value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        items = {name: copied(item, copy) for name, item in value.items()}
        if hasattr(value, "_metadata"):  # a module's state dict: the versions of its layouts
            items = OrderedDict(items)
            items._metadata = value._metadata  # type: ignore[attr-defined]
        return items
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(copied(item, copy) for item in value)
    return value


def why_unreadable(state: object) -> str:
    """Return the type that torch.load refuses in a state with weights_only; empty if none."""
    try:
        hollow = copied(state, lambda tensor: torch.empty(0, dtype=tensor.dtype))
        torch.load(io.BytesIO(to_bytes(hollow)), weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        return name[1] if name else str(error).splitlines()[0]
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # lambda, file, DTensor
        return str(error)
    return ""

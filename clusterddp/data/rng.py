"""The random generators of a rank: seeded, kept, their states as bytes, and taken up again."""

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from clusterddp.errors import CheckpointError

# Random states in bytes: the layout's number and the lengths of torch's two; then Python's
# `random` (its 625 integers, whether half of a Gaussian pair waits, and it), then numpy's
# (624 integers, place, the same two; nothing but zeros where its generator is another).
_LAYOUT = 1
_HEADER = struct.Struct("<3I")
_PYTHON = struct.Struct("<625IId")
_NUMPY = struct.Struct("<624IIId")


def seed(number: int) -> None:
    """Start all random generators of this rank, every device's too, from this number."""
    torch.manual_seed(number)
    seed_host(number)


def seed_host(number: int) -> None:
    """As `seed`, but for the devices' generators; of microseconds, and in any process."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    with suppress(TypeError):  # only the generator that numpy starts with can be seeded
        np.random.seed(number % 2**32)


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Leave all random generators of this rank as they are, whatever is drawn meanwhile."""
    # As they are: to make bytes of them takes twice as long, around every batch.
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(numpy)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


def capture(device: torch.device) -> Tensor:
    """All random generators of this rank as bytes, of one length on all ranks of a kind.

    torch's own, Python's `random` and numpy's global one; on a GPU that of the device too.
    """
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)
    _, integers, waiting = random.getstate()
    data = bytearray(_HEADER.pack(_LAYOUT, len(cpu), len(cuda)))
    data += _PYTHON.pack(*integers, waiting is not None, waiting or 0.0)
    kind = np.random.get_state(legacy=False)
    if isinstance(kind, dict) and kind["bit_generator"] == "MT19937":
        twister = kind["state"]
        data += _NUMPY.pack(
            *twister["key"].tolist(), twister["pos"], kind["has_gauss"], kind["gauss"]
        )
    else:
        data += bytes(_NUMPY.size)
    for state in (cpu, cuda):
        data += state.to(torch.uint8).numpy().tobytes()
    return torch.frombuffer(data, dtype=torch.uint8).clone()


def restore(state: Tensor, device: torch.device) -> None:
    """Give this rank's generators back what `capture` returned.

    On another kind of device its own generator is left as it is. Raises CheckpointError when the
    bytes are none of ours, or of a torch whose generator is another.
    """
    data = state.detach().cpu().contiguous().numpy().tobytes()
    try:
        layout, cpu_bytes, cuda_bytes = _HEADER.unpack_from(data)
        if layout != _LAYOUT:
            raise ValueError(f"layout {layout}")
        place = _HEADER.size
        *integers, waits, waiting = _PYTHON.unpack_from(data, place)
        place += _PYTHON.size
        *key, position, has_gauss, gauss = _NUMPY.unpack_from(data, place)
        place += _NUMPY.size
        if len(data) != place + cpu_bytes + cuda_bytes:
            raise ValueError(f"{len(data)} bytes")
        torch.set_rng_state(_tensor(data[place : place + cpu_bytes]))
        if cuda_bytes and device.type == "cuda":
            torch.cuda.set_rng_state(_tensor(data[place + cpu_bytes :]), device)
        random.setstate((3, tuple(integers), waiting if waits else None))
        if any(key):
            words = np.array(key, dtype=np.uint32)
            np.random.set_state(("MT19937", words, position, has_gauss, gauss))
    except (struct.error, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the random states of the checkpoint cannot be taken up again: {error}. "
            "Resume with the versions that wrote it."
        ) from None


def gather(device: torch.device) -> Tensor | None:
    """The random states of all ranks on rank 0, shape (world size, bytes); None on the others.

    Collective over the default process group: every rank calls it.
    """
    own = capture(device)
    if dist.get_backend() == "nccl":
        own = own.to(device)
    first = dist.get_rank() == 0
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())] if first else None
    dist.gather(own, rows, dst=0)
    return torch.stack(rows).cpu() if rows else None


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

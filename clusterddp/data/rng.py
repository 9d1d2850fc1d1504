"""Seeds, captures and restores the random generators of a rank: torch's, Python's and numpy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from clusterddp.errors import CheckpointError

States = dict[str, Tensor]
"""States by generator: of one rank, or a row a rank."""

# How clusterddp up to 0.1.1 packed the states of a rank, before the bytes of torch's two: their
# lengths, Python's 625 integers and numpy's 625, each with whether half of a Gaussian pair waits.
_PACKED = np.dtype(
    [
        ("layout", "<u4"),
        ("torch", "<u4"),
        ("cuda", "<u4"),
        ("python", "<u4", 626),
        ("python_gauss", "<f8"),
        ("numpy", "<u4", 626),
        ("numpy_gauss", "<f8"),
    ]
)


def seed(number: int) -> None:
    """Seed all random generators of this rank, the devices' too."""
    torch.manual_seed(number)
    seed_host(number)


def seed_host(number: int) -> None:
    """Seed all generators but the devices': takes microseconds, and works in any process."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    with suppress(TypeError):  # only the generator that numpy starts with can be seeded
        np.random.seed(number % 2**32)


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Restore all random generators of this rank on leaving the context."""
    # Not by `capture`, which takes longer: this runs around every batch.
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


def capture(device: torch.device) -> States:
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


def restore(states: States | Tensor | None, rank: int, world: int, device: torch.device) -> None:
    """Give a rank's generators back what `gather` returned for as many ranks as `world`.

    Without states, or with those of another number of ranks, they stay as they are; so does a
    device's generator with states of another kind of device. A tensor holds the rows of an older
    checkpoint. Raises CheckpointError for damaged states and for those of another generator.
    """
    if states is None or len(states if isinstance(states, Tensor) else states["torch"]) != world:
        return
    try:
        if isinstance(states, Tensor):
            own = _unpacked(states[rank])
        else:
            # Clones: torch reads the state of its generator from the start of the storage.
            own = {name: rows[rank].clone() for name, rows in states.items()}
        *integers, waits, waiting = own["python"].tolist()
        twister = tuple(map(int, integers))
        torch.set_rng_state(own["torch"])
        if device.type == "cuda" and "cuda" in own:
            torch.cuda.set_rng_state(own["cuda"], device)
        random.setstate((3, twister, waiting if waits else None))
        if "numpy" in own:
            *integers, position, has_gauss, gauss = own["numpy"].tolist()
            key = np.array(integers, dtype=np.uint32)
            np.random.set_state(("MT19937", key, int(position), int(has_gauss), gauss))
    except (LookupError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the random states of the checkpoint cannot be restored: {error}. "
            "Resume with the versions that wrote it."
        ) from None


def gather(device: torch.device) -> States | None:
    """Return the states of all ranks on rank 0, a row a rank; None on the others.

    Collective over the default process group: every rank calls it.
    """
    on = device if dist.get_backend() == "nccl" else torch.device("cpu")
    gathered = {}
    for name, state in capture(device).items():
        own = state.to(on)
        rows = None
        if dist.get_rank() == 0:
            rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.gather(own, rows, dst=0)
        if rows:
            gathered[name] = torch.stack(rows).cpu()
    return gathered or None


def _unpacked(row: Tensor) -> States:
    """Decode the bytes of one rank in an older checkpoint."""
    data = row.numpy().tobytes()
    packed = np.frombuffer(data, _PACKED, 1)[0]
    if packed["layout"] != 1 or len(data) != _PACKED.itemsize + packed["torch"] + packed["cuda"]:
        raise ValueError(f"layout {packed['layout']}, {len(data)} bytes")
    middle = _PACKED.itemsize + int(packed["torch"])
    states = {"torch": row[_PACKED.itemsize : middle].clone(), "cuda": row[middle:].clone()}
    for name in ("python", "numpy"):
        numbers = [*packed[name].tolist(), float(packed[f"{name}_gauss"])]
        states[name] = torch.tensor(numbers, dtype=torch.float64)
    return {name: state for name, state in states.items() if state.any()}

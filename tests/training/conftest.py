import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from clusterddp.training.synthetic import synthesise
from tests.training.made_sets import NOBODY


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one, in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def port() -> int:
    """A free one, of the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A data folder of our own with 30 and 10 synthetic digits."""
    synthesise(str(tmp_path / "data"), train_images=30, test_images=10, progress=print)
    return tmp_path / "data"


@pytest.fixture
def raw(small: Path) -> Path:
    return small / "synthetic" / "MNIST" / "raw"


@pytest.fixture
def nobody() -> Iterator[None]:
    """A user without rights, where the tests run as root, for whom permissions do not count."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)

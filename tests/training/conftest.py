from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one, in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)

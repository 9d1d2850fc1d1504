from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from clusterddp.request.train_config import TrainConfig
from clusterddp.training import parallel
from clusterddp.worker import join


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host where one process drives two GPUs."""
    monkeypatch.setattr(
        parallel, "gpus_of_one_process", lambda strategy, _: 2 if strategy == "dp" else 1
    )


def test_data_parallel_is_torchs_where_one_process_has_several_gpus(gpus: None) -> None:
    model = nn.Linear(3, 2)
    wrapped = parallel.wrap(model, TrainConfig(strategy="dp"), 1)
    assert isinstance(wrapped, nn.DataParallel)
    assert isinstance(wrapped.module, parallel.AtPrecision) and wrapped.module.model is model
    for strategy in ("ddp", "single"):
        assert parallel.wrap(model, TrainConfig(strategy=strategy), 1) is model


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_a_copy_of_data_parallel_keeps_the_precision_in_its_thread(
    precision: str, dtype: str
) -> None:
    """As torch's parallel_apply runs it: a new thread knows nothing of the type of autocast."""
    model = parallel.AtPrecision(nn.Linear(3, 2), precision, "cpu")
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(model, torch.ones(1, 3)).result().dtype is getattr(torch, dtype)


def test_on_a_cpu_nothing_is_shared() -> None:
    model = nn.Linear(3, 2)
    assert parallel.gpus_of_one_process("dp", "cpu") == 0
    assert parallel.wrap(model, TrainConfig(strategy="dp"), 1) is model


def test_data_parallel_with_fewer_than_two_gpus_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from clusterddp.ranks.dist_env import DistEnv

    env = DistEnv.from_environ({})
    told = join._introduce(TrainConfig(strategy="dp", device="cpu"), env, {}).warning
    assert "--strategy dp has no GPU here" in told
    assert join._introduce(TrainConfig(device="cpu"), env, {}).warning == ""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not run: needs 2 GPUs")
def test_two_gpus_of_one_process_step_as_one_does() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).cuda()
    wrapped = parallel.wrap(model, TrainConfig(strategy="dp"), 1)
    images = torch.randn(8, 3, device="cuda")
    assert torch.allclose(wrapped(images), model(images), atol=1e-5)

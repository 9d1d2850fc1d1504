"""Keras under the training loop: skipped where Keras is not installed."""

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from clusterddp.checkpoints import state as checkpoint
from clusterddp.errors import TrainingError
from clusterddp.models import nets
from clusterddp.models.keras import KerasNet, import_keras
from clusterddp.models.nets import BNConvNet
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.run_dir import RunDir
from tests.training import trainings
from tests.training.ranks import run_ranks

STEPS, CUT = 6, 3

pytestmark = pytest.mark.usefixtures("keras_installed")


def built(seed: int = 0) -> KerasNet:
    torch.manual_seed(seed)
    model = nets.build("keras-convnet")
    assert isinstance(model, KerasNet)
    return model


def settings(data_dir: Path, **fields: Any) -> TrainConfig:
    return trainings.config(data_dir, model="keras-convnet", max_steps=STEPS, **fields)


def trained(model: nn.Module, steps: int = 3, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    update = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        loss = cross_entropy(model(torch.randn(16, 1, 28, 28)), torch.randint(10, (16,)))
        loss.backward()  # type: ignore[no-untyped-call]
        update.step()
        update.zero_grad()
    return model


def twin_of(model: KerasNet) -> BNConvNet:
    """The same network in plain torch, with the same weights and moving statistics."""
    twin, state = BNConvNet(), model.state_dict()
    pairs: list[tuple[Any, str]] = [(twin.head[0], "hidden"), (twin.head[3], "scores")]
    with torch.no_grad():
        for number, place in enumerate((0, 3, 6), 1):
            pairs.append((twin.features[place], f"conv{number}"))
            norm: Any = twin.features[place + 1]
            norm.bias.copy_(state[f"norm{number}_beta"])
            norm.running_mean.copy_(state[f"norm{number}_moving_mean"])
            norm.running_var.copy_(state[f"norm{number}_moving_variance"])
        for layer, name in pairs:
            kernel = state[f"{name}_kernel"]  # rows, columns, in, out; or in, out
            layer.weight.copy_(kernel.permute(3, 2, 0, 1) if kernel.dim() == 4 else kernel.T)
            if layer.bias is not None:
                layer.bias.copy_(state[f"{name}_bias"])
    return twin


# The module -------------------------------------------------------------------------------------


def test_with_the_same_weights_it_and_its_twin_in_torch_give_the_same_scores() -> None:
    model = built()
    trained(model)
    twin, images = twin_of(model), torch.randn(32, 1, 28, 28)
    sizes = [
        sum(each.numel() for each in one.parameters() if each.requires_grad)
        for one in (model, twin)
    ]
    assert sizes[0] == sizes[1]
    scores = model.eval()(images)
    torch.testing.assert_close(scores, twin.eval()(images), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.to(memory_format=torch.channels_last)(images), scores)


def test_the_two_train_alike_from_the_same_weights() -> None:
    """Both draw one mask of Dropout a step from torch's generator, and so the very same one."""
    model = built()
    twin = twin_of(model)
    images = torch.randn(64, 1, 28, 28)
    for one in (model, twin):
        torch.manual_seed(1)
        one(images).square().sum().backward()
    torch.testing.assert_close(
        model.conv1_kernel.grad.permute(3, 2, 0, 1),  # type: ignore[union-attr, operator]
        twin.features[0].weight.grad,
        rtol=1e-3,
        atol=1e-3,
    )
    norm: Any = twin.features[7]
    torch.testing.assert_close(model.norm3_moving_mean, norm.running_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.norm3_moving_variance, norm.running_var, rtol=1e-3, atol=1e-4)


def test_moving_statistics_are_buffers_and_no_seed_is_a_state() -> None:
    model = built()
    kinds = ("moving_mean", "moving_variance")
    statistics = [f"norm{number}_{kind}" for number in (1, 2, 3) for kind in kinds]
    assert [name for name, _ in model.named_buffers()] == statistics
    assert all(each.requires_grad for each in model.parameters())
    assert sorted(model.state_dict()) == sorted(
        [*statistics, *(name for name, _ in model.named_parameters())]
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()(torch.randn(4, 1, 28, 28))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.train()(torch.randn(4, 1, 28, 28))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != (name in statistics), name
    assert not any(buffer.requires_grad for buffer in model.buffers())  # no graph grows on them


def test_weights_and_masks_come_from_torchs_generator_alone() -> None:
    images = torch.randn(8, 1, 28, 28)

    def scores(seed: int, other: int) -> tuple[Tensor, Tensor]:
        random.seed(other)
        model = built(seed)
        return model.eval()(images), model.train()(images)

    one, same, another = scores(1, 5), scores(1, 6), scores(2, 5)
    assert torch.equal(one[0], same[0])
    assert torch.equal(one[1], same[1])
    assert not torch.equal(one[0], another[0])
    model = built()
    assert not torch.equal(model(images), model(images))
    torch.manual_seed(3)
    first = model(images)
    torch.manual_seed(3)
    assert torch.equal(model(images), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_trains_under_autocast(dtype: torch.dtype) -> None:
    model, images = built(), torch.randn(16, 1, 28, 28)
    exact = model.eval()(images)
    with torch.autocast("cpu", dtype):
        scores = model(images)
        loss = cross_entropy(model.train()(images).float(), torch.arange(16) % 10)
    loss.backward()  # type: ignore[no-untyped-call]
    assert not torch.equal(scores.float(), exact)
    torch.testing.assert_close(scores.float(), exact, rtol=0.05, atol=0.05)
    for value in model.state_dict().values():
        assert value.dtype == torch.float32
        assert bool(value.isfinite().all())
    assert all(bool(each.grad.isfinite().all()) for each in model.parameters())  # type: ignore[union-attr]


def test_a_copy_for_another_gpu_computes_with_its_own_weights() -> None:
    """As DataParallel makes it: without parameters, the copied weights as plain attributes."""
    model, images = built(), torch.randn(4, 1, 28, 28)
    copied: Any = model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    for name, value in model.named_parameters():
        setattr(copied, name, torch.zeros_like(value))
    assert torch.equal(copied.eval()(images), torch.zeros(4, 10))
    assert bool(model.eval()(images).any())


def test_the_device_is_that_of_the_images_whatever_keras_would_choose() -> None:
    """As where a rank computes on the CPU beside a GPU, or on another GPU than the first."""
    with import_keras().device("meta"):
        model = built()
        assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
        assert model(torch.randn(4, 1, 28, 28)).device.type == "cpu"


def test_two_weights_of_one_path_are_refused() -> None:
    keras = import_keras()
    with keras.device("cpu"):
        images = keras.Input((2,))
        inner = keras.Model(images, keras.layers.Dense(2, name="one")(images))
        outer = keras.Input((2,))
        model = keras.Model(outer, keras.layers.Dense(2, name="one")(inner(outer)))
    with pytest.raises(TrainingError, match="two weights of the Keras model are named one/kernel"):
        KerasNet(model)


# Training ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_run_cut_in_two_ends_with_the_very_weights_and_its_checkpoint_loads(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    ours = settings(synthetic_dir)
    whole = trainings.train_alone(ours, tmp_path / "whole", noisy=False)
    first = trainings.train_alone(ours, tmp_path / "cut", stop=CUT, noisy=False)
    assert (first["reason"], first["step"]) == ("signal", CUT)
    torch.manual_seed(99)  # another process begins elsewhere
    rest = trainings.train_alone(ours, tmp_path / "cut", noisy=False)
    for name in ("step", "sha256", "accuracy"):
        assert rest[name] == whole[name], name
    assert rest["draws"][0] == whole["draws"][0]
    assert rest["step"] == STEPS
    (path,) = RunDir(tmp_path / "whole").checkpoints.glob("*.pt")
    model = built(7)
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    assert checkpoint.weights_sha256(model) == whole["sha256"]
    images = torch.randn(4, 1, 28, 28)
    assert torch.equal(model.to_keras()(images), model.eval()(images))


@pytest.mark.slow
def test_two_ranks_end_with_one_set_of_weights_and_statistics(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    ranks = run_ranks(2, trainings.train_rank, settings(synthetic_dir), tmp_path, None, False)
    assert ranks[0]["step"] == STEPS
    assert ranks[0]["sha256"] == ranks[1]["sha256"]
    assert ranks[0]["accuracy"] == ranks[1]["accuracy"] > 0
    assert ranks[0]["draws"][0] != ranks[1]["draws"][0]


# Keras itself -----------------------------------------------------------------------------------

HOSTILE = """
import os, sys, torch
from pathlib import Path
from clusterddp.models import nets
before = dict(os.environ)
model = nets.build("keras-convnet").eval()
changed = {name for name in {*os.environ, *before} if os.environ.get(name) != before.get(name)}
assert not {name for name in changed if not name.startswith("TORCH")}, changed  # torch's own
import keras
assert keras.config.backend() == "torch", keras.config.backend()
assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
assert model(torch.zeros(2, 1, 28, 28)).device.type == "cpu"
"""


@pytest.mark.slow
def test_neither_the_environment_nor_the_home_folder_decides_or_is_written_to(
    tmp_path: Path,
) -> None:
    written = '{"backend": "jax", "floatx": "float16", "image_data_format": "channels_first"}'
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras" / "keras.json").write_text(written)
    environ = {
        **os.environ,
        "HOME": str(tmp_path),
        "MPLCONFIGDIR": str(tmp_path / "matplotlib"),
        "KERAS_BACKEND": "jax",
        "KERAS_HOME": str(tmp_path / "elsewhere"),
        "KERAS_TORCH_DEVICE": "meta",
        "KERAS_MAX_EPOCHS": "none",
    }
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE], env=environ, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "elsewhere").exists()
    assert [path.name for path in (tmp_path / ".keras").iterdir()] == ["keras.json"]
    assert (tmp_path / ".keras" / "keras.json").read_text() == written


def test_keras_on_another_backend_in_this_process_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = SimpleNamespace(
        config=SimpleNamespace(backend=lambda: "jax"),
        __spec__=SimpleNamespace(name="keras", origin="keras/__init__.py"),
    )
    monkeypatch.setitem(sys.modules, "keras", other)
    with pytest.raises(TrainingError, match=r"computes on jax .* Set KERAS_BACKEND=torch"):
        nets.build("keras-convnet")


def test_without_keras_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(TrainingError, match=r"pip install 'clusterddp\[keras\]'"):
        nets.build("keras-convnet")


def test_a_keras_that_does_not_import_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "keras.py").write_text("raise ImportError('no h5py here')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    with pytest.raises(TrainingError, match=r"Keras cannot be imported on .*: no h5py here"):
        nets.build("keras-convnet")


class Devices(TorchDispatchMode):
    """Notes on which devices all tensors are that torch computes with; numbers may be anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        values = tree_flatten((args, kwargs, results))[0]
        self.seen |= {
            each.device.type for each in values if isinstance(each, Tensor) and each.dim()
        }
        return results


def devices_of_a_step(_rank: int, _world_size: int, kind: str) -> set[str]:
    model = nets.build("keras-convnet").to(kind)
    update = torch.optim.SGD(model.parameters(), 0.1)
    images, labels = torch.randn(16, 1, 28, 28).to(kind), torch.randint(10, (16,)).to(kind)
    with Devices() as devices:
        cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        update.step()
        model.eval()(images)
    return devices.seen


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_is_done_on_one_device_from_end_to_end(kind: str) -> None:
    """Keras, which knows of devices of its own, brings no tensor from another."""
    assert run_ranks(1, devices_of_a_step, kind) == [{kind}]

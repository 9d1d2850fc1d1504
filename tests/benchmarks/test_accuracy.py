"""The recipes' accuracies: their training is set up as a task sets it up."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import accuracy
from clusterddp.data import mnist
from clusterddp.data.loader import Images
from clusterddp.request.train_config import TrainConfig
from clusterddp.training import loop


def test_a_training_knows_the_number_of_its_device(
    synthetic_dir: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's set_device takes no other, and a captured step is released by it."""
    monkeypatch.setattr(loop, "train", lambda _: None)
    held = mnist.read("synthetic", str(synthetic_dir))
    sets: Any = [Images(*held.tensors(train=train), torch.device("cpu")) for train in (True, False)]
    training = accuracy.train(TrainConfig(dataset="synthetic", device="cpu", threads=1), *sets)
    assert training.device == torch.device("cpu", 0)

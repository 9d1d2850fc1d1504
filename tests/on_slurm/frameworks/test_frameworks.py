"""The command that compares a script's weights over a stop finds a difference."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.on_slurm.frameworks.__main__ import differences

VALUES: dict[str, Any] = {"model": [{"weight": torch.ones(2), "bias": torch.zeros(1)}], "epoch": 3}


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({**VALUES, "epoch": 4}, []),
        ({"model": [{"weight": torch.ones(2), "bias": torch.ones(1)}]}, ["/model/0/bias"]),
        ({"model": [{"weight": torch.ones(2)}]}, ["/model/0/bias"]),
        ({"model": [{**VALUES["model"][0], "bias": torch.zeros(1).double()}]}, ["/model/0/bias"]),
    ],
)
def test_tensors_that_differ_are_named(tmp_path: Path, other: object, found: list[str]) -> None:
    for name, content in (("one", VALUES), ("other", other)):
        (tmp_path / name / "out").mkdir(parents=True)
        torch.save(content, tmp_path / name / "out/model.pt")
    assert differences(tmp_path / "one", tmp_path / "other", "out/*.pt") == found


def test_no_weights_are_no_equal_weights(tmp_path: Path) -> None:
    assert differences(tmp_path, tmp_path, "*.pt") == [f"no file in {tmp_path} matches *.pt"]
    torch.save({"epoch": 3}, tmp_path / "model.pt")
    [found] = differences(tmp_path, tmp_path, "*.pt")
    assert found.endswith("have no tensors")

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp import log
from clusterddp.training.profiling import Profiler

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")


def profiled(folder: Path, steps: int, rank: int = 1, device: str = "cpu") -> list[str]:
    """What a rank says of so many steps of a small model."""
    said: list[str] = []
    model = torch.nn.Linear(8, 4)
    with log.to(said.append):
        profiler = Profiler(folder, rank, torch.device(device))
        for _ in range(steps):
            model(torch.ones(2, 8)).sum().backward()
            profiler.step()
        profiler.close()
    return said


def events(folder: Path) -> list[dict[str, Any]]:
    [path] = folder.iterdir()
    assert path.name == "rank-1.trace.json.gz"
    content: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    found: list[dict[str, Any]] = content["traceEvents"]
    return found


def test_five_steps_are_recorded_and_the_slowest_operations_told(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    said = profiled(folder, 40)
    names = [event.get("name") for event in events(folder)]
    assert [f"ProfilerStep#{n}" in names for n in range(9, 16)] == [False, *[True] * 5, False]
    assert names.count("aten::linear") == 5
    told, table = said
    assert told.startswith(f"profile of 5 steps: {folder}/rank-1.trace.json.gz (open it at")
    rows = table.splitlines()[3:-2]
    assert len(rows) == 10 and "Self CPU %" in table


def test_a_training_that_ends_in_their_midst_leaves_what_was_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    told, _ = profiled(folder, 12)
    assert told.startswith("profile of 2 steps: ")
    assert sum(event.get("name") == "aten::linear" for event in events(folder)) == 2


@pytest.mark.parametrize("steps", [0, 1, 9, 10])
def test_a_training_that_is_too_short_says_so(tmp_path: Path, steps: int) -> None:
    [told] = profiled(tmp_path / "profile", steps)
    assert f"but the training ended after {steps}" in told
    assert "records steps 11 to 15" in told
    assert not (tmp_path / "profile").exists()


def test_a_folder_that_cannot_be_written_costs_the_trace_alone(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    told, table = profiled(tmp_path / "profile", 20)
    assert "cannot write" in told and "File exists" in told and "training continues" in told
    assert "aten::" in table


def test_a_trace_that_torch_left_out_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a full disk, of which torch 2.15 says nothing.
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: None)
    told, _ = profiled(tmp_path / "profile", 20)
    assert "the disk may be full" in told and "training continues" in told
    assert list((tmp_path / "profile").iterdir()) == []


@pytest.mark.parametrize("part", ["prepare_trace", "start_trace", "stop_trace"])
def test_a_profiler_that_fails_costs_the_trace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no counters")

    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, part, fail)
        said = profiled(tmp_path / "profile", 20)
    said_once = "torch.profiler failed: no counters; training continues without it. [CD0820]"
    assert said == [f"warning: {said_once}"]
    assert not (tmp_path / "profile").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU whose kernels would be recorded")
def test_a_gpu_whose_kernels_are_hidden_is_told_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        said = profiled(tmp_path / "profile", 20, device="cuda")
    assert "no kernel was recorded" in said[-1]

"""What a request chooses, on a GPU: precision, compilation, shared statistics; how often lines are
written; and comparisons."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.checkpoints import catalog
from clusterddp.files import read_json_lines
from clusterddp.run.run_dir import RunDir
from tests.on_gpu.hand_started import START_SECONDS, trained, warnings_in

pytestmark = pytest.mark.gpu
Digits = tuple[str, str]
QUIET = ("--epochs=1000000", "--save-every=1000000epochs", "--eval-every=1000000epochs")


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    path = RunDir(run).checkpoints / catalog.name_of(step)
    model: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)[
        "model"
    ]
    return model


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_a_captured_step_computes_at_the_precision_that_was_chosen(
    precision: str, gpu_digits: Digits, tmp_path: Path, record_property: Any
) -> None:
    more = (f"--precision={precision}", "--cuda-graph=on", "--max-steps=300")
    report, said = trained(gpu_digits, tmp_path, *QUIET, *more)
    assert (report["precision"], report["cuda_graph"]) == (precision, True)
    assert report["accuracy"] > 0.8
    assert f"precision {precision}" in said and warnings_in(said) == []
    record_property("images/s", f"{report['images_per_second']:,.0f}")


def test_fp32_trains_on_a_gpu_as_on_a_cpu(gpu_digits: Digits, tmp_path: Path) -> None:
    more = ("--precision=fp32", "--optimizer=sgd", "--max-steps=20", "--cuda-graph=off")
    trained(gpu_digits, tmp_path / "gpu", *more)
    trained(gpu_digits, tmp_path / "cpu", *more, "--device=cpu")
    on_cpu = weights(tmp_path / "cpu", 20)
    for name, value in weights(tmp_path / "gpu", 20).items():
        torch.testing.assert_close(value, on_cpu[name], rtol=1e-4, atol=1e-5)


def test_a_compiled_model_trains(gpu_digits: Digits, tmp_path: Path) -> None:
    report, _ = trained(gpu_digits, tmp_path, "--compile", "--max-steps=20", "--hang-timeout=0")
    assert (report["steps"], report["cuda_graph"]) == (20, False)


@pytest.mark.parametrize(("backend", "graph"), [("gloo", "off"), ("nccl", "on")])
def test_two_ranks_that_share_statistics_train_as_one_on_all_their_images(
    backend: str, graph: str, gpu_digits: Digits, tmp_path: Path
) -> None:
    few = 4  # rounding grows with each step; and a model without dropout, which each rank draws
    alike = (
        "--model=fastnet", "--precision=fp32", "--optimizer=sgd", "--lr-scaling=none",
        "--lr=0.01", "--warmup-steps=0", f"--max-steps={few}",
    )  # fmt: skip
    two = ("--sync-batchnorm", "--batch-size=50", f"--backend={backend}", f"--cuda-graph={graph}")
    trained(gpu_digits, tmp_path / "two", *alike, *two, world_size=2)
    trained(gpu_digits, tmp_path / "one", *alike, "--batch-size=100", "--cuda-graph=off")
    one = weights(tmp_path / "one", few)
    for name, value in weights(tmp_path / "two", few).items():
        torch.testing.assert_close(value, one[name], rtol=1e-3, atol=1e-4)


def test_replayed_steps_write_two_lines_a_second_at_most(
    gpu_digits: Digits, tmp_path: Path, record_property: Any
) -> None:
    report, _ = trained(gpu_digits, tmp_path, *QUIET, "--cuda-graph=on", "--max-steps=20000")
    lines = [each for each in read_json_lines(RunDir(tmp_path).metrics) if each["kind"] == "train"]
    # One after the first hundred steps, and one at the end; and the pace wavers a bit.
    assert len(lines) <= 2.5 * report["train_seconds"] + 3
    record_property("lines", len(lines))
    record_property("steps/s", f"{20_000 / report['train_seconds']:,.0f}")


def compared(digits: Digits, folder: Path, *more: str) -> tuple[list[dict[str, Any]], str]:
    """The reports of a comparison's runs, and its table with the notes."""
    dataset, data_dir = digits
    done = subprocess.run(
        [
            sys.executable, "-m", "clusterddp", "compare", "--run-name=a", f"--dataset={dataset}",
            f"--data-dir={data_dir}", "--device=cuda", "--threads=1", "--max-steps=50", *more,
        ],
        cwd=folder, capture_output=True, text=True, check=False, timeout=4 * START_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = (folder / "jobs").glob("a-*/report.json")
    return [json.loads(path.read_text()) for path in runs], done.stdout


def test_the_rows_of_a_comparison_are_alike(gpu_digits: Digits, tmp_path: Path) -> None:
    more = ("--strategies=single,ddp", "--world-sizes=1", "--cuda-graph=on")
    reports, table = compared(gpu_digits, tmp_path, *more)
    assert [report["cuda_graph"] for report in reports] == [True, True]
    assert "every step a CUDA graph" in table and "not alike" not in table
    assert "without the preparation of the first" in table


@pytest.mark.gpu2
def test_two_gpus_are_compared_by_ddp_and_dp(gpu_digits: Digits, tmp_path: Path) -> None:
    reports, table = compared(gpu_digits, tmp_path, "--world-sizes=2")
    assert sorted(report["strategy"] for report in reports) == ["ddp", "dp", "single"]
    assert not any(report["cuda_graph"] for report in reports)
    assert "not run" not in table and "not alike" not in table

"""The measurements on a GPU: skipped with the reason without one; each part, in small, on a CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import gpu, pairs
from benchmarks.__main__ import command, table
from benchmarks.plots import draw


@pytest.fixture(autouse=True)
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(pairs, "NOTES", told)
    monkeypatch.setattr("benchmarks.__main__.NOTES", told)
    return told


@pytest.fixture
def place(tmp_path: Path) -> gpu.Place:
    """A CPU in a GPU's place, with as little work as there can be."""
    few = {"steps": 3, "rounds": 1, "batches": (16,), "seeds": 1, "starts": 1}
    return gpu.Place(tmp_path, "cpu", **few)


def test_without_a_gpu_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "visible_gpus", lambda: 0)
    answer = CliRunner().invoke(command, ["--only", "gpu"])
    assert answer.exit_code == 0, answer.output
    assert "Not measured: the reason stands below." in answer.output
    assert "- gpu: not measured: torch sees no GPU here" in answer.output


def test_it_says_how_it_is_used() -> None:
    helped = CliRunner().invoke(gpu.command, ["--help"])
    assert helped.exit_code == 0 and "Measure the PARTS that are named" in helped.output
    assert "|".join(gpu.PARTS) in "".join(helped.output.split())
    wrong = CliRunner().invoke(gpu.command, ["step-bf16", "no-such"])
    assert wrong.exit_code == 2 and "'no-such' is not one of" in wrong.output


def test_the_parts_that_are_named_are_measured(
    notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(gpu, "measure", lambda parts: asked.append(parts) or [])
    notes.append("gpu: not measured")
    answer = CliRunner().invoke(gpu.command, ["memory", "data"])
    assert asked == [("memory", "data")]
    assert answer.output.endswith("\nNo figures.\n- gpu: not measured\n")


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen processes that import torch
@pytest.mark.parametrize(
    ("part", "measured"),
    [
        # CI measures the recipes, and two contenders, below.
        *(
            pytest.param(part, measured, marks=pytest.mark.release)
            for part, measured in (
                ("step-fp32", {"ours, fp32, batch 16, captured", "ours, fp32, batch 16, plain"}),
                ("start", {"import torch", "first step", "clusterddp train, to the first step"}),
                ("two-ranks", {"2 ranks on one GPU, gloo, plain"}),
                (
                    "choices",
                    {"no lines of metrics", "--deterministic", "buffers broadcast each pass"},
                ),
                ("data", {"a loader, 2 workers", "accurate's step, affine"}),
                ("memory", {"memory allocated, captured"}),
            )
        )
    ],
)
def test_each_part_measures_what_it_names(
    part: str, measured: set[str], place: gpu.Place, notes: list[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu, "interpreters", lambda _: ({}, ["Lightning: not measured: no pip"]))
    rows = gpu.measure(place, (part,))
    assert place.excluded == []
    assert measured <= {row.name for row in rows}
    assert all(row.ratio > 0 and row.figure > 0 for row in rows)
    assert len(table(rows).splitlines()) == len(rows) + 2


@pytest.mark.slow
def test_a_contender_that_fails_is_left_out_with_the_reason(
    place: gpu.Place, notes: list[str]
) -> None:
    ours = place.contender("ours", precision="fp32", batch=16)
    other = place.contender("other", precision="fp32", batch=16, cuda_graph="off")
    broken = place.contender("broken", precision="fp32", batch=16, model="no-such-model")
    [row] = place.ratios([(ours, broken), (ours, other)])
    assert row.baseline == "other"
    [reason] = place.excluded
    assert reason.startswith("broken ended with 1 instead of an answer: ")
    assert "'no-such-model' is not one of" in reason
    assert notes == [f"gpu: left out: {reason}"]


@pytest.mark.mnist
@pytest.mark.slow
def test_the_recipes_are_timed_on_mnist(
    place: gpu.Place, notes: list[str], mnist_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    there = dataclasses.replace(place, mnist=str(mnist_dir))
    rows = gpu.measure(there, ("mnist",))
    assert [row.baseline for row in rows] == ["training", "training"]
    assert any("99." in line and "mean of 1 seeds" in line for line in notes), notes


@pytest.mark.gpu
def test_on_a_gpu_the_step_is_measured(
    tmp_path: Path, notes: list[str], record_property: Callable[[str, object], None]
) -> None:
    few = {"steps": 500, "rounds": 1, "batches": (100,), "seeds": 1, "starts": 1}
    place = gpu.Place(tmp_path, "cuda", **few)
    for row in gpu.measure(place, ("step-bf16",)):
        record_property(f"{row.name} / {row.baseline}", f"{row.ratio:.2f}")
    assert place.excluded == []


def test_a_picture_is_drawn_of_it(tmp_path: Path) -> None:
    rows = [pairs.Row("ours, captured", "the bare step", (1.0, 1.1), (1.0, 1.2), images=100)]
    [path] = draw({"gpu": rows, "empty": []}, tmp_path, "1 x H200")
    assert path.name == "gpu.svg" and "1 x H200" in path.read_text()

"""The options that make a step faster, in whole trainings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.checkpoints import catalog, state
from clusterddp.data import loader, mnist
from clusterddp.distributed import agreement
from clusterddp.distributed.agreement import Hello
from clusterddp.errors import TrainingError
from clusterddp.run.records import Agreement
from clusterddp.training.loop import train
from clusterddp.training.step import Compiled
from tests.training.ranks import run_ranks
from tests.training.trainings import CPU, agree, build, config, hello, train_alone, train_rank


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"accumulate": 3, "batch_size": 70},
        pytest.param({"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param(
            {"optimizer": "sgd", "precision": "bf16", "accumulate": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_cut_off_ends_with_the_very_weights_of_one_in_a_piece(
    options: dict[str, Any], synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, **options)
    whole = train_alone(settings, tmp_path / "whole")
    cut = train_alone(settings, tmp_path / "cut", 7)
    assert cut["step"] == 7
    done = train_alone(settings, tmp_path / "cut")
    assert (done["step"], done["sha256"]) == (whole["step"], whole["sha256"])
    assert done["draws"] == whole["draws"]


def test_the_scale_of_fp16_is_in_the_checkpoint(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, precision="fp16", max_steps=3)
    ours = build(0, settings, agree(settings, tmp_path))
    ours.learner.step.scaler.load_state_dict(
        {**ours.learner.step.scaler.state_dict(), "scale": 4.0}
    )
    train(ours)
    path = ours.attempt.checkpoints / catalog.name_of(3)
    assert state.load(path)["scaler"]["scale"] == 4.0
    again = build(0, settings, agree(settings, tmp_path))
    assert again.learner.step.scaler.get_scale() == 4.0


def test_two_ranks_that_accumulate_step_as_one_does_on_all_their_images(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    two = run_ranks(
        2, train_rank, config(synthetic_dir, batch_size=16, accumulate=3, max_steps=3),
        tmp_path / "two", None, False,
    )  # fmt: skip
    settings = config(synthetic_dir, batch_size=96, max_steps=3)
    one = train_alone(settings, tmp_path / "one", noisy=False)
    assert two[0]["sha256"] == two[1]["sha256"]
    for mine, theirs in zip(two[0]["weights"], one["weights"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hook", ["bf16", "fp16"])
def test_ranks_whose_gradients_are_rounded_for_their_exchange_stay_equal(
    hook: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    settings = config(synthetic_dir, batch_size=50, max_steps=3, comm_hook=hook)
    exact = config(synthetic_dir, batch_size=50, max_steps=3)
    ours = run_ranks(2, train_rank, settings, tmp_path / "rounded", None, False)
    plain = run_ranks(2, train_rank, exact, tmp_path / "exact", None, False)
    assert ours[0]["sha256"] == ours[1]["sha256"] != plain[0]["sha256"]
    for mine, theirs in zip(ours[0]["weights"], plain[0]["weights"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.1, atol=1e-2)


def test_reading_by_the_loader_trains_to_the_very_weights(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, max_steps=4)
    kept = build(0, settings, agree(settings, tmp_path / "kept"))
    train(kept)
    sets = [
        loader.Loaded(mnist.torchvision_set("synthetic", str(synthetic_dir), train=train), CPU, 2)
        for train in (True, False)
    ]
    agreed = agree(settings, tmp_path / "read")
    read = build(0, settings, agreed, train_set=sets[0], test_set=sets[1])
    train(read)
    assert state.weights_sha256(read.model) == state.weights_sha256(kept.model)
    assert (read.result.accuracy, read.result.loss) == (kept.result.accuracy, kept.result.loss)


def test_the_model_is_compiled_where_that_is_asked_for(
    synthetic_dir: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(torch, "compile", lambda model, **_: calls.append(model) or model)
    for chosen in (False, True):
        settings = config(synthetic_dir, max_steps=1, compile=chosen)
        train(build(0, settings, agree(settings, tmp_path / str(chosen))))
        assert len(calls) == chosen


def test_a_compiler_that_is_missing_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def broken(_: object) -> object:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    model = Compiled(torch.nn.Identity())
    with pytest.raises(TrainingError, match=r"(?s)--compile: .*needs a C\+\+ compiler") as told:
        model(torch.zeros(1))
    assert told.value.__suppress_context__


def test_what_the_model_itself_raises_is_no_matter_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    with pytest.raises(RuntimeError, match="shape"):
        Compiled(torch.nn.Linear(3, 3))(torch.zeros(2, 2))


# What is agreed on -------------------------------------------------------------------------------


def hellos(kind: str, bf16: list[bool]) -> list[Hello]:
    return [
        replace(hello(rank, len(bf16)), kind=kind, gpu=f"gpu{rank}", bf16=able)
        for rank, able in enumerate(bf16)
    ]


def decided(
    options: dict[str, Any], kind: str, bf16: list[bool], recorded: Agreement | None = None
) -> Agreement:
    settings = config(Path("data"), **{"device": "auto", **options})
    return agreement.decide(settings, hellos(kind, bf16), recorded)


def test_auto_is_bf16_where_every_rank_computes_in_it() -> None:
    assert decided({}, "cpu", [True, True]).precision == "bf16"
    assert decided({}, "cpu", [True, False]).precision == "fp32"
    assert decided({"precision": "fp16"}, "cpu", [True]).precision == "fp16"


def test_a_run_that_goes_on_keeps_the_precision_it_began_with() -> None:
    before = Agreement("gloo", "cpu", threads=1, world_size=2, precision="fp32")
    assert decided({}, "cpu", [True, True], before).precision == "fp32"
    assert decided({}, "cpu", [True], before).precision == "fp32"  # at any world size
    assert decided({"precision": "bf16"}, "cpu", [True, True], before).precision == "bf16"


@pytest.mark.parametrize(
    ("options", "kind", "ranks", "expected"),
    [
        ({}, "cuda", 1, True),
        ({}, "cuda", 2, False),
        ({"cuda_graph": "on"}, "cuda", 2, True),
        ({"cuda_graph": "off"}, "cuda", 1, False),
        ({"precision": "fp16"}, "cuda", 1, False),
        ({"compile": True}, "cuda", 1, False),
        ({}, "cpu", 1, False),
    ],
)
def test_a_single_gpu_captures_its_step(
    options: dict[str, Any], kind: str, ranks: int, expected: bool
) -> None:
    assert decided(options, kind, [True] * ranks).cuda_graph is expected


def test_a_graph_that_would_hold_gloos_exchange_is_refused() -> None:
    with pytest.raises(TrainingError, match="--cuda-graph on with 2 ranks: what --backend gloo"):
        decided({"cuda_graph": "on", "backend": "gloo"}, "cuda", [True, True])


def test_a_checkpoints_precision_is_kept_by_another_run_that_leaves_it_at_auto(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    for before in ("bf16", "fp32"):
        first = config(synthetic_dir, precision=before, max_steps=2)
        train(build(0, first, agree(first, tmp_path / before)))
        source = str(tmp_path / before)
        later = config(synthetic_dir, max_steps=3, resume=source, allow_changed=True)
        assert agree(later, tmp_path / f"after {before}").precision == before


def test_a_graph_on_cpus_is_refused() -> None:
    with pytest.raises(TrainingError, match="--cuda-graph on: the ranks compute on CPUs"):
        decided({"cuda_graph": "on"}, "cpu", [True])

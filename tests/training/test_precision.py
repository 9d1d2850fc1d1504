"""The options that make a step faster, in whole trainings."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clusterddp.checkpoints import catalog, state
from clusterddp.data import loader, mnist
from clusterddp.distributed import agreement
from clusterddp.distributed.agreement import RankInfo
from clusterddp.errors import TrainingError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Agreement
from clusterddp.training.loop import train
from clusterddp.training.metrics import MetricSums
from clusterddp.training.step import DTYPES, Compiled, Step, use_tf32
from clusterddp.worker import join, start
from tests.training.ranks import run_ranks
from tests.training.trainings import CPU, agree, build, config, info, train_alone, train_rank

PRECISIONS = tuple(DTYPES)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"gradient_accumulation_steps": 3, "batch_size": 70},
        pytest.param({"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param(
            {"optimizer": "sgd", "precision": "bf16", "gradient_accumulation_steps": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_cut_off_ends_with_the_very_weights_of_one_in_a_piece(
    options: dict[str, Any], synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, **options)
    whole = train_alone(settings, tmp_path / "whole")
    assert train_alone(settings, tmp_path / "cut", 7)["step"] == 7
    done = train_alone(settings, tmp_path / "cut")
    assert (done["step"], done["sha256"]) == (whole["step"], whole["sha256"])
    assert done["draws"] == whole["draws"]


def test_the_scale_of_fp16_is_in_the_checkpoint(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, precision="fp16", max_steps=3, model="mlp")
    ours = build(settings, agree(settings, tmp_path))
    ours.learner.step.scaler.load_state_dict(
        {**ours.learner.step.scaler.state_dict(), "scale": 4.0}
    )
    train(ours)
    assert state.load(ours.attempt.checkpoints / catalog.name_of(3))["scaler"]["scale"] == 4.0
    assert build(settings, agree(settings, tmp_path)).learner.step.scaler.get_scale() == 4.0


def test_two_ranks_that_accumulate_step_as_one_does_on_all_their_images(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    two = run_ranks(
        2, train_rank,
        config(synthetic_dir, batch_size=16, gradient_accumulation_steps=3, max_steps=3),
        tmp_path / "two", None, False,
    )  # fmt: skip
    settings = config(synthetic_dir, batch_size=96, max_steps=3)
    one = train_alone(settings, tmp_path / "one", noisy=False)
    assert two[0]["sha256"] == two[1]["sha256"]
    for mine, theirs in zip(two[0]["weights"], one["weights"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hook", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_ranks_whose_gradients_are_rounded_for_their_exchange_stay_equal(
    hook: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    exact = config(synthetic_dir, batch_size=50, max_steps=3, model="mlp")
    settings = replace(exact, comm_hook=hook)
    ours = run_ranks(2, train_rank, settings, tmp_path / "rounded", None, False)
    plain = run_ranks(2, train_rank, exact, tmp_path / "exact", None, False)
    assert ours[0]["sha256"] == ours[1]["sha256"] != plain[0]["sha256"]
    for mine, theirs in zip(ours[0]["weights"], plain[0]["weights"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.1, atol=1e-2)


def test_reading_by_the_loader_trains_to_the_very_weights(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, max_steps=4)
    kept = build(settings, agree(settings, tmp_path / "kept"))
    train(kept)
    sets = [
        loader.Loader(mnist.torchvision_set("synthetic", str(synthetic_dir), train=train), CPU, 2)
        for train in (True, False)
    ]
    read = build(settings, agree(settings, tmp_path / "read"), train_set=sets[0], test_set=sets[1])
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
        train(build(settings, agree(settings, tmp_path / str(chosen))))
        assert len(calls) == chosen


@pytest.mark.parametrize(
    ("device", "needs"),
    [("cpu", r"needs a C\+\+ compiler on"), ("cuda", r"needs a C compiler .*Python\.h")],
)
def test_a_compiler_that_is_missing_is_told_without_a_traceback(
    device: str, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def broken(_: object) -> object:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    model = Compiled(torch.nn.Identity())
    images: Any = SimpleNamespace(device=torch.device(device))
    with pytest.raises(TrainingError, match=rf"(?s)--compile: .*{needs}") as told:
        model(images)
    assert told.value.__suppress_context__


def test_what_the_model_itself_raises_is_no_matter_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    with pytest.raises(RuntimeError, match="shape"):
        Compiled(torch.nn.Linear(3, 3))(torch.zeros(2, 2))


# What is agreed on -------------------------------------------------------------------------------


def infos(kind: str, bf16: list[bool]) -> list[RankInfo]:
    return [
        replace(info(rank, len(bf16)), kind=kind, gpu=f"gpu{rank}", bf16=able)
        for rank, able in enumerate(bf16)
    ]


def decided(
    options: dict[str, Any], kind: str, bf16: list[bool], recorded: Agreement | None = None
) -> Agreement:
    settings = config(Path("data"), **{"device": "auto", **options})
    return agreement.decide(settings, infos(kind, bf16), recorded)


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
        ({"model": "package.module:net"}, "cuda", 1, False),
        ({"model": "package.module:net", "cuda_graph": "on"}, "cuda", 1, True),
        ({"cuda_graph": "on"}, "cuda", 2, True),
        ({"cuda_graph": "off"}, "cuda", 1, False),
        ({"precision": "fp16"}, "cuda", 1, False),
        ({"compile": True}, "cuda", 1, False),
        ({"strategy": "dp"}, "cuda", 1, False),
        ({}, "cpu", 1, False),
    ],
)
def test_which_steps_are_captured_once_auto_captures(
    options: dict[str, Any], kind: str, ranks: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "AUTO_CAPTURES", True)
    assert decided(options, kind, [True] * ranks).cuda_graph is expected
    monkeypatch.setattr(agreement, "AUTO_CAPTURES", False)
    is_on = expected and options.get("cuda_graph") == "on"
    assert decided(options, kind, [True] * ranks).cuda_graph is is_on


def test_auto_captures_nothing_before_it_has_been_seen_on_a_gpu() -> None:
    """Turn `AUTO_CAPTURES` on in the commit that shows the `gpu` tests passed on a GPU."""
    assert not decided({}, "cuda", [True]).cuda_graph


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("auto_captures", [True, False])
def test_a_run_that_goes_on_is_captured_as_it_was_recorded(
    captured: bool, auto_captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "AUTO_CAPTURES", auto_captures)
    own = {"model": "package.module:net"}
    before = Agreement("nccl", "cuda", threads=1, world_size=1, cuda_graph=captured)
    for options in ({}, own):
        assert decided(options, "cuda", [True], before).cuda_graph is captured
    assert decided({"cuda_graph": "on"}, "cuda", [True], before).cuda_graph
    assert not decided({"cuda_graph": "off"}, "cuda", [True], before).cuda_graph
    assert not decided({"compile": True}, "cuda", [True], before).cuda_graph
    at_two = replace(before, world_size=2)
    assert decided({}, "cuda", [True, True], at_two).cuda_graph is captured
    assert not decided({"backend": "gloo"}, "cuda", [True, True], at_two).cuda_graph
    assert not decided(own, "cuda", [True], at_two).cuda_graph  # another world size: as if new


def test_a_graph_that_would_hold_gloos_exchange_is_refused() -> None:
    with pytest.raises(TrainingError, match="--cuda-graph on with 2 ranks: --backend gloo"):
        decided({"cuda_graph": "on", "backend": "gloo"}, "cuda", [True, True])


def test_bf16_that_a_run_began_in_and_a_gpu_lacks_is_refused_with_the_way_out() -> None:
    before = Agreement("nccl", "cuda", world_size=2, precision="bf16")
    with pytest.raises(
        TrainingError,
        match=r"bf16, which rank 1 on h01 .*--constraint.*--precision fp32 --allow-config-change",
    ):
        decided({}, "cuda", [True, False], before)
    assert decided({}, "cuda", [True, True], before).precision == "bf16"
    chosen = {"precision": "bf16"}  # torch emulates it, which is theirs to choose
    assert decided(chosen, "cuda", [False, False], before).precision == "bf16"
    on_cpu = replace(before, kind="cpu", backend="gloo")
    assert decided({}, "cpu", [False, False], on_cpu).precision == "bf16"
    to_gpus = {"device": "cuda"}  # another processor, chosen on purpose: its own precision
    assert decided(to_gpus, "cuda", [False, False], on_cpu).precision == "fp32"


def test_bf16_of_a_checkpoint_is_refused_on_a_gpu_without_it(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    first = config(synthetic_dir, precision="bf16", max_steps=1)
    train(build(first, agree(first, tmp_path / "first")))
    later = config(
        synthetic_dir, init_from=str(tmp_path / "first"), device="auto", allow_config_change=True
    )  # fmt: skip
    old_gpu = infos("cuda", [False])
    with pytest.raises(TrainingError, match="started in bf16, which rank 0"):
        start.settle_attempt(later, tmp_path / "later", None, {}, old_gpu)


def test_a_step_in_fp16_as_a_checkpoint_was_trained_is_not_captured(
    synthetic_dir: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its precision is known after the graph has been decided on: auto does without one."""
    monkeypatch.setattr(agreement, "AUTO_CAPTURES", True)
    first = config(synthetic_dir, precision="fp16", max_steps=1, model="mlp")
    train(build(first, agree(first, tmp_path / "first")))
    more = {"init_from": str(tmp_path / "first"), "device": "auto", "allow_config_change": True}

    def settled(**options: Any) -> Agreement:
        later = config(synthetic_dir, model="mlp", **more, **options)
        own = {"SLURM_JOB_ID": "7"}  # all of one job: none waits for the one before
        return start.settle_attempt(later, tmp_path / "later", None, own, infos("cuda", [True]))

    with pytest.raises(
        TrainingError, match=r"--cuda-graph on conflicts with fp16, .*Omit --cuda-graph, or"
    ):
        settled(cuda_graph="on")
    agreed = settled()
    assert (agreed.precision, agreed.cuda_graph) == ("fp16", False)
    assert settled(precision="bf16", cuda_graph="on").cuda_graph


def test_tf32_is_refused_where_no_gpu_computes_in_it() -> None:
    for kind, able in (("cpu", True), ("cuda", False)):
        with pytest.raises(TrainingError, match="--precision tf32, which rank 0 on h01 "):
            decided({"precision": "tf32"}, kind, [able])
    assert decided({"precision": "tf32"}, "cuda", [True]).precision == "tf32"


@pytest.fixture
def tf32_settings() -> Iterator[Callable[[], tuple[bool, ...]]]:
    """Reads torch's settings of TF32 by both of its interfaces; they are as before at the end."""
    cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cublas.allow_tf32

    def read() -> tuple[bool, ...]:
        newer = [getattr(each, "fp32_precision", None) for each in (cudnn.conv, cublas)]
        assert all(each in (None, "tf32", "ieee", "none") for each in newer)
        return cudnn.allow_tf32, cublas.allow_tf32

    yield read
    cudnn.allow_tf32, cublas.allow_tf32 = before


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gpu_rounds_to_tf32_where_that_was_chosen_and_only_there(
    precision: str, monkeypatch: pytest.MonkeyPatch, tf32_settings: Callable[[], tuple[bool, ...]]
) -> None:
    """torch's own setting has convolutions in TF32. As a rank that joins does it."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    torch.backends.cudnn.allow_tf32 = precision != "tf32"
    agreed = Agreement("gloo", "cuda", threads=torch.get_num_threads(), precision=precision)
    joined = join.JoinResult(info(0, 1), agreed, torch.device("cuda", 0))
    join._init_group(TrainConfig(), joined, DistEnv.from_environ({}), dist.HashStore())
    dist.destroy_process_group()
    assert tf32_settings() == (precision == "tf32",) * 2


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "exact"), [("fp32", True), ("tf32", False)])
def test_on_a_gpu_fp32_convolves_exactly_and_tf32_does_not(
    precision: str, exact: bool, monkeypatch: pytest.MonkeyPatch,
    tf32_settings: Callable[[], tuple[bool, ...]], record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 16, 14, 14, generator=generator)
    weight = torch.randn(32, 16, 5, 5, generator=generator)
    expected = torch.nn.functional.conv2d(images.double(), weight.double(), padding=2)
    use_tf32(precision)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # as in a training
    ours = torch.nn.functional.conv2d(images.cuda(), weight.cuda(), padding=2).cpu().double()
    error = ((ours - expected).abs().max() / expected.abs().max()).item()
    record_property("relative error", f"{error:.1e}")
    # fp32 on a CPU is off by 1e-6, TF32 by 3e-4.
    assert (error < 2e-5) is exact


@pytest.mark.gpu
def test_on_a_gpu_a_step_of_fp16_that_overflows_is_skipped(
    synthetic_dir: Path, alone: None
) -> None:
    device = torch.device("cuda")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).to(device)
    step = Step(model, torch.optim.SGD(model.parameters(), 0.1), MetricSums(device), device, "fp16")
    images, labels = torch.rand(8, 1, 28, 28, device=device), torch.arange(8, device=device)
    step(images, labels)
    before, scale = [each.clone() for each in model.parameters()], step.scaler.get_scale()
    step(images * math.inf, labels)
    assert step.scaler.get_scale() == scale / 2
    for ours, theirs in zip(model.parameters(), before, strict=True):
        assert torch.equal(ours, theirs)
    step(images, labels)
    assert not torch.equal(next(model.parameters()), before[0]), "and the next one counts again"


def test_a_checkpoints_precision_is_kept_by_another_run_that_leaves_it_at_auto(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    for before in ("bf16", "fp32"):
        first = config(synthetic_dir, precision=before, max_steps=2)
        train(build(first, agree(first, tmp_path / before)))
        source = str(tmp_path / before)
        later = config(synthetic_dir, max_steps=3, init_from=source, allow_config_change=True)
        assert agree(later, tmp_path / f"after {before}").precision == before


def test_a_graph_on_cpus_is_refused() -> None:
    with pytest.raises(
        TrainingError, match="--cuda-graph on needs GPUs, but the ranks compute on CPUs"
    ):
        decided({"cuda_graph": "on"}, "cpu", [True])

"""The captured step on a GPU; `tests/training` holds the same to a stand-in on CPUs."""

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clusterddp.checkpoints import state
from clusterddp.data.loader import Images
from clusterddp.models import nets
from clusterddp.request.train_config import MODELS, TrainConfig
from clusterddp.run.records import Agreement
from clusterddp.training.batch_size import OUT_OF_MEMORY, Trial
from clusterddp.training.cuda_graph import GraphedStep
from clusterddp.training.learner import Learner
from clusterddp.training.metrics import MetricSums
from clusterddp.training.step import Step, build_optimizer
from tests.on_gpu.hand_started import END_SECONDS, pid_of, started, trained, warnings_in
from tests.training.ranks import run_ranks

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
Digits = tuple[str, str]
QUIET = ("--epochs=1000000", "--save-every=1000000epochs", "--eval-every=1000000epochs")
"""So that hardly anything interrupts the steps, however small the set is."""
LONG = (*QUIET, "--log-every=100")
"""Longer than any test waits."""
GRAPH = "--cuda-graph=on"
OWN_MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(784, 10), 0
    def forward(self, images):
        self.calls += 1
        scores = self.layer(images.flatten(1))
        return scores if scores.sum().item() < 1e30 else scores * 0.5
def net():
    return Net()
"""


def report_end(record_property: Any, report: dict[str, Any]) -> None:
    for name in ("accuracy", "images_per_second", "capture_seconds"):
        record_property(name, f"{report[name]:.4g}")


@pytest.mark.parametrize("model", MODELS)
def test_a_built_in_model_trains_captured_from_start_to_report(
    model: str, gpu_digits: Digits, tmp_path: Path, record_property: Any,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if model == "keras-convnet":
        request.getfixturevalue("keras_installed")
    # Its running statistics move by 1 % at each step.
    steps = 1000 if model == "bn-convnet" else 300
    more = (
        f"--model={model}",
        f"--max-steps={steps}",
        "--batch-size=100",
        "--warmup-steps=20",
        GRAPH,
    )
    report, said = trained(gpu_digits, tmp_path, *QUIET, *more)
    assert (report["device"], report["backend"], report["cuda_graph"]) == ("cuda", "gloo", True)
    assert "cuda:0" in said and "the step as one CUDA graph" in said
    assert report["accuracy"] > 0.7
    assert report["capture_seconds"] > 0 and report["images_per_second"] > 0
    assert report["peak_memory_bytes"] > 0
    assert warnings_in(said) == []
    report_end(record_property, report)


# Captured against eager, in a process of its own --------------------------------------------------


class Noisy(nn.Module):
    """With statistics and random numbers of the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8)
        self.dropout, self.layer = nn.Dropout(0.3), nn.Linear(8 * 12 * 12, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.convolution(images)))
        scores: Tensor = self.layer(self.dropout(features.flatten(1)))
        return scores


class Looking(Noisy):
    """Looks at a value in mid-step, which no graph can hold."""

    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(images)
        return scores if scores.sum().item() < 1e30 else scores * 0.5


def _deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.cuda.set_device(GPU)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True


def _batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(256, (size, 28, 28), generator=generator, dtype=torch.uint8).to(GPU),
            (torch.arange(size) % 10).to(GPU),
        )
        for size in sizes
    ]


def _numbers(learner: Learner) -> dict[str, bytes]:
    """All that a step changes: weights, statistics, the optimizer's state, random numbers."""
    tensors = dict(learner.model.state_dict())
    for index, held in enumerate(learner.optimizer.state.values()):
        tensors.update({f"{index} {name}": value for name, value in held.items()})
    tensors["random"] = torch.cuda.get_rng_state(GPU)
    return {
        name: value.detach().float().cpu().numpy().tobytes()
        for name, value in tensors.items()
        if isinstance(value, Tensor)
    }


def _steps(rank: int, _: int, optimizer: str, captured: bool) -> dict[str, Any]:
    """Numbers before the first step and after some, with a small batch among them."""
    _deterministic()
    nets.MODELS["convnet"] = Noisy
    results = {}
    for accumulate, precision in itertools.product((1, 2), ("fp32", "bf16")):
        config = TrainConfig(
            device="cuda", deterministic=True, optimizer=optimizer,
            gradient_accumulation_steps=accumulate,
            precision=precision, weight_decay=0.01,
        )  # fmt: skip
        agreed = Agreement(
            "gloo", "cuda", 1, 1, precision=precision, cuda_graph=captured, global_batch_size=32
        )
        learner = Learner(config, agreed, rank=0, device=GPU, mark=lambda _: None)
        data = _batches([32, 32, 32, 7, 32, 32])
        before = _numbers(learner)
        learner.capture(*data[0])
        after = _numbers(learner)
        untouched = {name: after[name] for name in before} == before
        sums = [float(each) for each in learner.tally.sums]
        for number, batch in enumerate(data):
            learner.step.set_lr(2.0 ** -(6 + number))  # a float32 holds these
            learner.learn(*batch)
        tally = [float(each) for each in learner.tally.sums]
        results[f"{accumulate} {precision}"] = (
            _numbers(learner), tally, untouched, sums, learner.is_captured
        )  # fmt: skip
        learner.close()
    return results


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_captured_step_is_the_eager_one_bit_for_bit(optimizer: str) -> None:
    [eager] = run_ranks(1, _steps, optimizer, False)
    [captured] = run_ranks(1, _steps, optimizer, True)
    for setting, (numbers, tally, untouched, sums, is_captured) in captured.items():
        expected = eager[setting]
        assert (is_captured, untouched, sums) == (True, True, [0.0, 0.0]), setting
        assert tally == expected[1], setting
        differ = {name for name in numbers if numbers[name] != expected[0][name]}
        assert differ == set(), setting


def _fall_back(rank: int, _: int, graphed: bool) -> tuple[str, str, int]:
    _deterministic()
    torch.manual_seed(0)
    model = Looking().to(GPU)
    optimizer = build_optimizer(TrainConfig(optimizer="sgd"), model, captured=graphed)
    step = Step(model, optimizer, MetricSums(GPU), device=GPU)
    train = GraphedStep(step, model, 32, falls_back=True) if graphed else step
    for batch in _batches([32, 32, 7, 32]):
        step.set_lr(2.0**-6)
        train(*batch)
        torch.cuda.empty_cache()  # fails where torch's allocator goes on capturing
    warning = train.warning if isinstance(train, GraphedStep) else ""
    return state.weights_sha256(model), warning, step.tally.steps


def test_a_step_whose_capture_fails_trains_on_as_the_eager_one() -> None:
    """Random numbers included: CUDA's generator has to come out of the capture."""
    [eager] = run_ranks(1, _fall_back, False)
    [fallen] = run_ranks(1, _fall_back, True)
    assert "cannot be captured into a CUDA graph" in fallen[1]
    assert (fallen[0], fallen[2]) == (eager[0], eager[2])


# A person's own model -----------------------------------------------------------------------------


def test_a_model_that_no_graph_can_hold_trains_under_auto_and_is_refused_under_on(
    gpu_digits: Digits, tmp_path: Path
) -> None:
    (tmp_path / "looking.py").write_text(OWN_MODEL)
    more = ("--model=looking:net", "--max-steps=20")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    report, _ = trained(gpu_digits, tmp_path / "auto", *more, PYTHONPATH=path)
    assert report["cuda_graph"] is False
    with started(gpu_digits, tmp_path / "on", *more, GRAPH, PYTHONPATH=path) as [rank]:
        assert rank.end(180) == 1
        assert "cannot be captured into a CUDA graph" in rank.text
        assert "Train without one: --cuda-graph off" in rank.text


# Resuming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["on", "off"])
def test_a_run_that_is_cut_in_two_comes_to_the_weights_of_one_in_a_piece(
    graph: str, gpu_digits: Digits, tmp_path: Path
) -> None:
    more = (f"--cuda-graph={graph}", "--deterministic", "--model=bn-convnet")
    whole, _ = trained(gpu_digits, tmp_path / "whole", *more, "--max-steps=30")
    trained(gpu_digits, tmp_path / "cut", *more, "--max-steps=13")
    rest, _ = trained(gpu_digits, tmp_path / "cut", *more, "--max-steps=30")
    assert rest["resumed_from"].endswith("step-00000013.pt")
    assert rest["weights_sha256"] == whole["weights_sha256"]


def test_a_checkpoint_goes_from_a_gpu_to_a_cpu_and_back(gpu_digits: Digits, tmp_path: Path) -> None:
    places = (("cuda", GRAPH), ("cpu", "--cuda-graph=auto"), ("cuda", GRAPH))
    for number, (device, graph) in enumerate(places, 1):
        more = (f"--device={device}", graph, "--precision=fp32", f"--max-steps={5 * number}")
        report, _ = trained(gpu_digits, tmp_path, *more)
        assert (report["device"], report["steps"]) == (device, 5 * number)


def test_a_signal_in_mid_replay_saves_leaves_and_resumes_to_the_same_weights(
    gpu_digits: Digits, tmp_path: Path
) -> None:
    more = (*LONG, GRAPH, "--deterministic")
    with started(gpu_digits, tmp_path / "cut", *more) as [rank]:
        rank.wait_until("images/s")
        os.kill(pid_of(tmp_path / "cut", 0), signal.SIGUSR1)
        assert rank.end(END_SECONDS) == 75, rank.text
    end = json.loads((tmp_path / "cut/attempts/0001/end.json").read_text())
    assert end["saved"] == end["step"] > 0
    steps = f"--max-steps={end['step'] + 20}"
    rest, _ = trained(gpu_digits, tmp_path / "cut", *more, steps)
    whole, _ = trained(gpu_digits, tmp_path / "whole", *more, steps)
    assert rest["weights_sha256"] == whole["weights_sha256"]


# Several ranks; test_blame.py has those of which one fails ----------------------------------------


def test_two_ranks_captured_train_as_eager_ones_and_end(
    gpu_digits: Digits, tmp_path: Path, record_property: Any
) -> None:
    """2,000 replays, the ranks' polls and lines among them, with NCCL's own watch on."""
    more = (*QUIET, "--deterministic", "--optimizer=sgd", "--max-steps=2000")
    reports = {}
    for graph in ("on", "off"):
        report, said = trained(
            gpu_digits, tmp_path / graph, *more, f"--cuda-graph={graph}", world_size=2
        )
        assert (report["cuda_graph"], report["backend"]) == (graph == "on", "nccl")
        assert warnings_in(said) == []
        assert "cannot leave the process group" not in said
        reports[graph] = report
    assert reports["on"]["weights_sha256"] == reports["off"]["weights_sha256"]
    report_end(record_property, reports["on"])


def test_two_captured_ranks_save_and_leave_at_one_step(gpu_digits: Digits, tmp_path: Path) -> None:
    with started(gpu_digits, tmp_path, *LONG, GRAPH, world_size=2) as ranks:
        ranks[0].wait_until("images/s")
        os.kill(pid_of(tmp_path, 1), signal.SIGTERM)
        assert [rank.end(END_SECONDS) for rank in ranks] == [75, 75], ranks[0].text
    end = json.loads((tmp_path / "attempts/0001/end.json").read_text())
    assert end["saved"] == end["step"] > 0


# What else has to go with a captured step ---------------------------------------------------------


def _tried(rank: int, _: int, captured: bool) -> tuple[list[str], list[int], list[int]]:
    torch.cuda.set_device(GPU)
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (2 << 30) / total))
    images = torch.zeros(60_000, 28, 28, dtype=torch.uint8)
    train_set = Images(images, torch.arange(len(images)) % 10, GPU)
    config = TrainConfig(device="cuda", model="deepnet")
    agreed = Agreement("gloo", "cuda", 1, 1, cuda_graph=captured, hosts=("h",))
    trial = Trial(config, agreed, 0, train_set, GPU)
    trial(16)  # loads what stays
    notes, held, peaks = [], [], []
    for size in (64, 256, 40_000, 256):
        tried = trial(size)
        notes.append(tried.note)
        peaks.append(tried.memory_bytes)
        held.append(torch.cuda.memory_allocated(GPU))
    return notes, held, peaks


@pytest.mark.parametrize("captured", [False, True])
def test_a_batch_size_that_does_not_fit_leaves_the_memory_as_it_was(captured: bool) -> None:
    [(notes, held, peaks)] = run_ranks(1, _tried, captured)
    assert notes == ["", "", OUT_OF_MEMORY, ""]
    assert max(held) - min(held) < 16 << 20
    assert peaks[0] < peaks[1]


def test_a_step_is_captured_while_a_loaders_batches_are_pinned(
    gpu_digits: Digits, tmp_path: Path
) -> None:
    pytest.importorskip("torchvision")
    more = ("--data-pipeline=loader", "--num-workers=2", GRAPH, "--max-steps=50")
    report, _ = trained(gpu_digits, tmp_path, *more)
    assert report["cuda_graph"] and report["steps"] == 50


def test_a_profile_has_the_kernels_of_a_replayed_step(gpu_digits: Digits, tmp_path: Path) -> None:
    import gzip

    trained(gpu_digits, tmp_path, GRAPH, "--profile=0", "--max-steps=30")
    trace = tmp_path / "attempts/0001/profile/rank-0.trace.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)

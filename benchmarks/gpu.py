"""On a GPU: the step against the bare one, time to 99 % of MNIST, the start, what choices cost.

    python -m benchmarks --only gpu          # all; or, in pieces of some minutes each:
    python -m benchmarks.gpu PART...

One GPU is enough. What it cannot show is scaling: links between GPUs, their isolation by Slurm,
DataParallel. Each clock starts after the capture of the step and the first kernels, but where the
row names them. The images are synthetic; the accuracies need the real MNIST, which
CLUSTERDDP_TEST_MNIST names, or the directory `data` holds.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks import launch, launch_programs
from benchmarks.contenders.serving import Request
from benchmarks.pairs import Row, note
from benchmarks.turns import Contender, interpreters, measured
from clusterddp.processes.hardware import visible_gpus

_PATIENCE_SECONDS = 900
_PEERS = {"lightning_ddp": "lightning", "accelerate_ddp": "accelerate"}
_ACCURATE: dict[str, Any] = {"model": "deepnet", "optimizer": "adamw"}
_SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""NCCL's own leave for ranks that share a GPU, since 2.30."""


@dataclass(frozen=True)
class Place:
    """Where it is measured, and how long."""

    folder: Path
    device: str = "cuda"
    steps: int = 2000
    rounds: int = 5
    batches: tuple[int, ...] = (64, 100, 250, 1000)
    seeds: int = 20
    starts: int = 5
    mnist: str = ""
    """Folder that holds MNIST/raw; empty without one."""
    excluded: list[str] = field(default_factory=list)
    """A line for each measurement that could not be made, with the reason."""

    @functools.cached_property
    def images(self) -> str:
        """Torchvision's root of digits that are rendered once."""
        from clusterddp.data.synthetic import generate

        count = 20_000 if self.device == "cuda" else 2_000
        generate(str(self.folder / "digits"), train_images=count, test_images=64)
        return str(self.folder / "digits" / "synthetic")

    def contender(
        self,
        name: str,
        module: str = "ours",
        precision: str = "bf16",
        batch: int = 100,
        ranks: int = 1,
        variables: Mapping[str, str] | None = None,
        interpreter: str = sys.executable,
        **options: Any,
    ) -> Contender:
        """One program that trains on the device, ours with a captured step but where it is off."""
        settings = {"cuda_graph": "on", **options}
        asked = Request(self.images, precision, self.device, self.steps, batch, settings)
        return Contender(name, module, asked, ranks, Path(interpreter), variables=variables or {})

    def ratios(self, pairs: list[tuple[Contender, Contender]]) -> list[Row]:
        """Measure all of them in turn; a row for each pair of which neither failed."""
        contenders = list({id(each): each for pair in pairs for each in pair}.values())
        with measured(contenders, self.rounds, self.folder / "log", self.tell) as well:
            return [
                Row(
                    ours.name,
                    other.name,
                    tuple(seconds * _scale(ours, other) for seconds in other.seconds),
                    tuple(ours.seconds),
                    images=ours.images,
                )
                for ours, other in pairs
                if ours in well and other in well
            ]

    def tell(self, line: str) -> None:
        """Note what was left out."""
        self.excluded.append(line)
        note(f"gpu: left out: {line}")

    def start(self, **options: Any) -> dict[str, Any]:
        """The phases of one start, and what it found afterwards."""
        asked = Request(self.images, "bf16", self.device, self.steps, self.batches[0], options)
        argv = [sys.executable, "-m", "benchmarks.contenders.gpu_start", json.dumps(asdict(asked))]
        answer = self.run(argv, {"BENCHMARK_BEGAN": str(time.time())})
        found: dict[str, Any] = json.loads(answer)
        return found

    def run(self, argv: list[str], variables: Mapping[str, str] | None = None) -> str:
        """Return what a program prints; raises RuntimeError with what it says where it fails."""
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **(variables or {})}
        answer = subprocess.run(
            argv, env=environ, capture_output=True, text=True, check=False,
            timeout=_PATIENCE_SECONDS,
        )  # fmt: skip
        if answer.returncode:
            lines = (answer.stderr or answer.stdout).strip().splitlines()
            raise RuntimeError(f"exit code {answer.returncode}: {(lines or [''])[-1]}")
        return answer.stdout


def measure(place: Place | None = None, parts: tuple[str, ...] = ()) -> list[Row]:
    """All parts, or those that are named; none without a GPU, which is noted."""
    if place is None and not visible_gpus():
        note("gpu: not measured: torch sees no GPU here")
        return []
    with tempfile.TemporaryDirectory() as name:
        place = place or Place(Path(name), mnist=_mnist())
        note(f"gpu: on {_described(place)}")
        rows = []
        for part in parts or tuple(PARTS):
            print(f"measuring gpu: {part} ...", file=sys.stderr)
            try:
                rows += PARTS[part](place)
            except (RuntimeError, OSError, subprocess.TimeoutExpired, ValueError) as error:
                place.tell(f"{part}: {error}")
        return rows


def _step(place: Place, precision: str) -> list[Row]:
    """Ours against the bare step, each captured and not."""
    rows = []
    for batch in place.batches:
        by = {
            (module, graph): place.contender(
                f"{'ours' if module == 'ours' else 'the bare step'}, {precision}, batch {batch}, "
                f"{'captured' if graph == 'on' else 'plain'}",
                module, precision, batch, cuda_graph=graph,
            )
            for module in ("ours", "bound") for graph in ("on", "off")
        }  # fmt: skip
        rows += place.ratios(
            [(by["ours", graph], by["bound", graph]) for graph in ("on", "off")]
            + [(by["ours", "on"], by["ours", "off"])]
        )
    return rows


def _mnist_99(place: Place) -> list[Row]:
    """Seconds of training to 99 %, with the capture, and from the start of the process."""
    if not place.mnist:
        note(
            "gpu: 99 % of MNIST not measured: CLUSTERDDP_TEST_MNIST does not name a directory with "
            "MNIST/raw"
        )
        return []
    found = _recipe(place, "fast", place.seeds)
    lives, training = [], []
    for seed in range(place.starts):
        run = place.folder / f"fast-{seed}"
        began = time.perf_counter()
        place.run([
            sys.executable, "-m", "clusterddp", "debug", "--procs=1", "--recipe=fast",
            f"--device={place.device}", f"--seed={seed}", f"--data-dir={place.mnist}",
            f"--run-dir={run}", "--cuda-graph=on" if place.device == "cuda" else "--threads=1",
        ])  # fmt: skip
        lives.append(time.perf_counter() - began)
        training.append(json.loads((run / "report.json").read_text())["train_seconds"])
    alone, capture = found["seconds"], found["capture_seconds"]
    both = tuple(map(sum, zip(alone, capture, strict=True)))
    return [
        Row("fast on MNIST, capture and training", "training", tuple(alone), both),
        Row("fast on MNIST, start to end of process", "training", tuple(training), tuple(lives)),
    ]


def _recipe(place: Place, recipe: str, seeds: int) -> dict[str, list[float]]:
    argv = ["-m", "benchmarks.accuracy", recipe, f"--device={place.device}", f"--seeds={seeds}"]
    answer = place.run([sys.executable, *argv, f"--data-dir={place.mnist}", "--json"])
    found: dict[str, list[float]] = json.loads(answer)
    accuracies, seconds = found["accuracies"], found["seconds"]
    note(
        f"gpu: {recipe}: {statistics.fmean(accuracies):.2%} on MNIST's test images, mean of "
        f"{len(accuracies)} seeds ({min(accuracies):.2%} to {max(accuracies):.2%}); training "
        f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), capture "
        f"and first kernels {statistics.median(found['capture_seconds']):.3f} s beside it"
    )
    return found


def _start(place: Place) -> list[Row]:
    """Each phase of a start as a share of it, and a start of ours against a bare script's."""
    found = [place.start() for _ in range(place.starts)]
    if nccl := [each["nccl_seconds"] for each in found if each["nccl_seconds"]]:
        seconds = statistics.median(nccl)
        note(f"gpu: NCCL's first exchange, which a rank alone does without, takes {seconds:.2f} s")
    whole = tuple(sum(each["phases"].values()) for each in found)
    rows = [
        Row(phase, "start to first step", whole, tuple(each["phases"][phase] for each in found))
        for phase in found[0]["phases"]
    ]
    folder = place.folder / "launch"
    folder.mkdir()
    launch_programs.write(folder)
    bare = launch_programs.ALONE.replace("DEVICE", place.device)
    (folder / "alone.py").write_text(bare)
    variables = launch.rank_variables(0, 0, ranks=1)

    def ours(made: Path, port: int) -> launch.Commands:
        words = [
            "train", f"--run-dir={made}", "--dataset=synthetic", f"--data-dir={folder / 'data'}",
            f"--device={place.device}", "--threads=1", "--max-steps=1", "--log-every=1",
        ]  # fmt: skip
        named = {**variables, "MASTER_PORT": str(port)}
        return [([sys.executable, "-m", "clusterddp", *words], named)]

    script = [sys.executable, str(folder / "alone.py")]
    lives = launch.rounds(
        {launch.BASELINE: lambda *_: [(script, {})], "clusterddp train": ours},
        folder, place.starts,
    )  # fmt: skip
    return [*rows, *launch.rows(lives, "a bare script, one GPU")]


def _two_ranks(place: Place) -> list[Row]:
    """Two ranks on one GPU against one rank with twice the batch: overhead, not scaling."""
    sharing = [
        ("gloo", "off", {}),
        *([("nccl", "off", _SHARING), ("nccl", "on", _SHARING)] if place.device == "cuda" else []),
    ]
    rows = []
    for backend, graph, variables in sharing:  # one by one: a pair that hangs costs no other
        words = "captured" if graph == "on" else "plain"
        two = place.contender(
            f"2 ranks on one GPU, {backend}, {words}", ranks=2, variables=variables,
            backend=backend, cuda_graph=graph,
        )  # fmt: skip
        alone = place.contender(f"1 rank, batch 200, {words}", batch=200, cuda_graph=graph)
        rows += place.ratios([(two, alone)])
    return rows


def _others(place: Place) -> list[Row]:
    """Ours against others, as they come and at one precision."""
    peers, missing = interpreters(_PEERS)
    for line in missing:
        note(f"gpu: {line}")
    names = {"article": "a tutorial's script", "tensors": "the same, tensors on the GPU"}
    rows = []
    for precision, ours_in in (("as it comes", "bf16"), ("bf16", "bf16"), ("fp32", "fp32")):
        ours = [
            place.contender(f"ours, {ours_in}, {words}", precision=ours_in, cuda_graph=graph)
            for graph, words in (("on", "captured"), ("off", "plain"))
        ]
        others = [
            place.contender(f"{name}, {precision}", module, precision)
            for module, name in names.items()
        ]
        others += [
            place.contender(
                f"{package}, {precision}", module, precision, interpreter=str(peers[module])
            )
            for module, package in _PEERS.items() if module in peers
        ]  # fmt: skip
        if place.device == "cuda":
            mode = "reduce-overhead"
            words = f"tensors on the GPU, torch.compile {mode}, {precision}"
            others.append(place.contender(words, "tensors", precision, compile=mode))
        rows += place.ratios([(one, other) for one in ours for other in others])
    return rows


def _choices(place: Place) -> list[Row]:
    """Compare the step without each of our choices, one at a time, with the full step."""
    usual = place.contender("ours, bf16")
    changed: dict[str, dict[str, Any]] = {
        "the first convolution in the usual layout": {"usual_layout": True},
        "cudnn.deterministic off": {"cudnn_deterministic": False},
        "cudnn.benchmark on": {"cudnn_deterministic": False, "cudnn_benchmark": True},
        "a line of metrics each step": {"log_every": 1},
        "a line of metrics each 100 steps": {"log_every": 100},
        "no lines of metrics": {"log_every": 10**9},
        "run directory in /dev/shm": {"folder": "/dev/shm"},
    }
    rows = place.ratios([(place.contender(name, **options), usual) for name, options in
                         changed.items()])  # fmt: skip
    # The commands that a task sets for it: cuBLAS reads its variable as it starts.
    repeats = place.contender(
        "--deterministic", deterministic=True, variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    )
    rows += place.ratios([(repeats, place.contender("ours, bf16"))])
    net: dict[str, Any] = {"model": "bn-convnet", "backend": "gloo", "cuda_graph": "off"}
    told = place.contender("buffers broadcast each pass", ranks=2, broadcast_buffers=True, **net)
    kept = place.contender("not broadcast, bn-convnet, 2 ranks", ranks=2, broadcast_buffers=False,
                           **net)  # fmt: skip
    return rows + place.ratios([(told, kept)])


def _data(place: Place) -> list[Row]:
    """The loader and the augmentation against images in the GPU's memory as they are."""
    plain = place.contender("images in memory")
    loaders = [
        place.contender(f"a loader, {workers} workers", data_pipeline="loader", num_workers=workers)
        for workers in (2, 8)
    ]
    deep = place.contender("accurate's step, no augmentation", batch=125, **_ACCURATE)
    turned = place.contender("accurate's step, affine", batch=125, augment="affine", **_ACCURATE)
    return place.ratios([*((each, plain) for each in loaders), (turned, deep)])


def _accurate(place: Place) -> list[Row]:
    """Notes what `--recipe accurate` reaches, and in which time; no ratio."""
    if place.mnist:
        _recipe(place, "accurate", min(place.seeds, 3))
    else:
        note("gpu: accurate not measured: no MNIST at hand")
    return []


def _memory(place: Place) -> list[Row]:
    """Memory of the captured step against the plain one; what a step costs the host."""
    captured, plain = place.start(), place.start(cuda_graph="off")
    for name, found in (("captured", captured), ("plain", plain)):
        driver = found["driver_mib"]
        note(
            f"gpu: a {name} step: {1e6 * found['step_seconds']:.0f} us, of which the host is busy "
            f"{1e6 * found['host_seconds']:.0f}; a look at the other ranks' wishes "
            f"{1e6 * found['ask_seconds']:.0f} us, about twice a second; a copy for a checkpoint "
            f"{1e3 * found['copy_seconds']:.1f} ms; nvidia-smi sees "
            f"{f'{driver:,.0f} MiB' if driver else 'no figure'}"
        )
    run = place.folder / "sizes"
    place.run([
        sys.executable, "-m", "clusterddp", "debug", "--procs=1", "--find-batch-size",
        f"--device={place.device}", "--dataset=synthetic",
        f"--data-dir={Path(place.images).parent}", f"--run-dir={run}", "--threads=1",
    ])  # fmt: skip
    largest = json.loads((run / "batch_sizes.json").read_text())[-1]
    note(f"gpu: --find-batch-size ends at {largest['batch_size']:,} images with "
         f"{largest['memory_bytes'] / 2**20:,.0f} MiB allocated: {largest['note']}")  # fmt: skip
    return [
        Row(f"memory {what}, captured", "plain", (plain[key],), (captured[key],), of_memory=True)
        for what, key in (("allocated", "allocated_mib"), ("reserved", "reserved_mib"))
        if plain[key]
    ]


PARTS: dict[str, Callable[[Place], list[Row]]] = {
    "step-bf16": functools.partial(_step, precision="bf16"),
    "step-fp32": functools.partial(_step, precision="fp32"),
    "step-tf32": functools.partial(_step, precision="tf32"),
    "mnist": _mnist_99,
    "start": _start,
    "two-ranks": _two_ranks,
    "others": _others,
    "choices": _choices,
    "data": _data,
    "accurate": _accurate,
    "memory": _memory,
}


def _scale(ours: Contender, other: Contender) -> float:
    """The factor by which the other's seconds are those of as many images as ours."""
    return ours.images / other.images


def _described(place: Place) -> str:
    """The GPU and the versions that its figures depend on."""
    if place.device == "cpu":
        return "a CPU, which says nothing of GPUs"
    words = (
        "import torch; gpu = torch.cuda.get_device_properties(0); nccl = torch.cuda.nccl.version();"
        "print(f'{torch.cuda.device_count()} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, '"
        "f'torch {torch.__version__}, CUDA {torch.version.cuda}, '"
        "f'cuDNN {torch.backends.cudnn.version()}, NCCL ' + '.'.join(map(str, nccl)))"
    )
    return place.run([sys.executable, "-c", words]).strip()


def _mnist() -> str:
    for folder in (os.environ.get("CLUSTERDDP_TEST_MNIST") or "data", "data"):
        if (Path(folder) / "MNIST" / "raw").is_dir():
            return str(Path(folder).absolute())
    return ""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)))
def command(parts: tuple[str, ...]) -> None:
    """Measure the PARTS that are named, or all, on a GPU; print their table and notes."""
    from benchmarks import hardware
    from benchmarks.__main__ import table
    from benchmarks.pairs import NOTES

    rows = measure(parts=parts)
    click.echo(f"On {hardware.named()}.\n")
    click.echo("\n".join([table(rows) if rows else "No figures.", *(f"- {n}" for n in NOTES)]))


if __name__ == "__main__":
    command()

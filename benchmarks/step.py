"""The training step: our loop against others' on the same images, and against what it costs alone,
by itself and with the least exchange that keeps ranks together.

Two ranks with a thread each on CPUs; on a GPU, where there is one, a single rank. All train the
same network (28,938 parameters) at 100 images a rank and step; each program is started once and
then trains in turn with the others. The loop's seconds are those that it reports itself: order,
batches, learning rate, step, exchange, sums and log lines.
"""

import statistics
import tempfile
from pathlib import Path

from benchmarks.contenders.serving import Request
from benchmarks.hardware import NO_BF16, precisions
from benchmarks.pairs import Row, note
from benchmarks.turns import Contender, interpreters, measured

_BATCH, _STEPS, _ROUNDS = 100, 80, 5
_PARAMETERS = 28_938
_PEERS = {"lightning_ddp": "lightning", "accelerate_ddp": "accelerate"}
_NAMES = {
    "article": "a tutorial's DDP script", "tensors": "the same, tensors in memory",
    "lightning_ddp": "Lightning",
    "accelerate_ddp": "Accelerate", "ours": "clusterddp", "bound": "the bare step",
    "bound_exchanged": "the step with a bare all-reduce",
}  # fmt: skip


def measure() -> list[Row]:
    """Ours at each precision against each of the others, and against the step alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = _images(folder)
        if "bf16" not in precisions():
            note(f"step: {NO_BF16}")
        rows = _two_ranks(root, folder) + _one_rank(root, folder, "cpu")
        if _has_gpu():
            rows += _one_rank(root, folder, "cuda")
        else:
            note("step: not measured on a GPU: torch sees none")
        return rows


def _two_ranks(root: str, folder: Path) -> list[Row]:
    peers, missing = interpreters(_PEERS)
    for line in missing:
        note(f"step: {line}")
    by, each_one = {}, precisions()
    for precision in each_one:
        for module in ("article", *peers, "tensors", "ours", "bound", "bound_exchanged"):
            by[module, precision] = _contender(module, root, precision, 2, "cpu")
            if module in peers:
                by[module, precision].interpreter = peers[module]
    _note_exchange(folder)
    with measured(list(by.values()), _ROUNDS, folder / "two.log"):
        others = ["article", *peers]
        pairs = (("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"))
        versus = [(own, its) for own, its in pairs if own in each_one]
        return [
            *(_row(by["ours", own], by[other, its]) for own, its in versus for other in others),
            *(
                _row(by["ours", each], by[other, each])
                for other in ("tensors", "bound", "bound_exchanged")
                for each in each_one
            ),
            *(
                _row(by["bound_exchanged", each], by["bound", each], "a bare all-reduce per step")
                for each in each_one
            ),
        ]


def _note_exchange(folder: Path) -> None:
    """Say what the all-reduce takes where nobody computes, so that neither rank is waited for."""
    size = 4 * _PARAMETERS
    asked = Contender("the exchange", "exchange", Request("", "fp32", "cpu", 0, size), 2)
    with measured([asked], _ROUNDS, folder / "exchange.log"):
        milliseconds = 1000 * statistics.median(asked.seconds)
    note(
        f"step: an all-reduce of {size:,} bytes by itself takes {milliseconds:.2f} ms between two "
        "ranks here; what the step with it takes beyond that is waiting for the slower rank"
    )


def _one_rank(root: str, folder: Path, device: str) -> list[Row]:
    each_one = precisions() if device == "cpu" else ("fp32", "bf16")
    by = {
        (module, precision): _contender(module, root, precision, 1, device)
        for precision in each_one
        for module in ("ours", "bound", *(["article"] if device == "cuda" else []))
    }
    with measured(list(by.values()), _ROUNDS, folder / f"{device}.log"):
        rows = [_row(by["ours", each], by["bound", each]) for each in each_one]
        if device == "cuda":
            rows.append(_row(by["ours", "bf16"], by["article", "fp32"]))
        return rows


def _contender(module: str, root: str, precision: str, ranks: int, device: str) -> Contender:
    gpu = device == "cuda"
    steps = 600 if gpu else _STEPS
    where = f"{ranks} {'rank' if ranks == 1 else 'ranks'}{', GPU, captured' if gpu else ''}"
    return Contender(
        f"{_NAMES[module]}, {precision}, {where}",
        module,
        Request(root, precision, device, steps, _BATCH, {"cuda_graph": "on"} if gpu else {}),
        ranks,
    )


def _row(ours: Contender, other: Contender, what: str = "training") -> Row:
    return Row(
        f"{what}, {ours.name.partition(', ')[2]}",
        ", ".join(other.name.split(", ")[:2]),
        tuple(other.seconds),
        tuple(ours.seconds),
        images=ours.images,
        peak_mib=ours.peak_mib,
        baseline_peak_mib=other.peak_mib,
    )


def _images(folder: Path) -> str:
    """As many digits as the ranks see in a sample, rendered."""
    from clusterddp.data.synthetic import generate

    generate(str(folder), train_images=20_000, test_images=64)
    return str(folder / "synthetic")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()

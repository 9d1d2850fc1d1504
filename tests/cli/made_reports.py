"""The records that a training leaves of what it achieved, made by hand."""

import base64
import json
from typing import Any

from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir

ROUNDS = 5
"""Lines of training metrics that are made, one at every ten steps."""


def achieve(
    run: RunDir, *, rates: tuple[float, ...] = (1000.0, 1010.0, 990.0, 1005.0), **fields: Any
) -> None:
    """Let a run have come to its end, one rank for each of `rates`; `fields` go to its report."""
    hosts = [f"h{1 + rank // 2:02d}" for rank in range(len(rates))]
    report = {
        "accuracy": 0.9876,
        "loss": 0.0432,
        "train_seconds": 12.5,
        "total_seconds": 20.25,
        "images_per_second": 0.9 * sum(rates),
        "world_size": len(rates),
        "num_nodes": len(set(hosts)),
        "hosts": sorted(set(hosts)),
        "backend": "gloo",
        "device": "cpu",
        "threads": 1,
        "precision": "fp32",
        "model": "convnet",
        "strategy": "ddp",
        "dataset": "mnist",
        "parameters": 28938,
        "steps": 10 * ROUNDS,
        "epochs": 1,
        "train_images": 60000,
        "test_images": 10000,
        "versions": {"python": "3.11.7", "torch": "2.9.0"},
        "warnings": [],
        "peak_memory_bytes": 1 << 30,
        "ranks": [
            {"rank": rank, "host": host, "images_per_second": rate, "peak_memory_bytes": 1 << 30}
            for rank, (host, rate) in enumerate(zip(hosts, rates, strict=True))
        ],
        "num_attempts": 1,
        "finished": 1_700_000_000.0,
        **fields,
    }
    run.report.write_text(json.dumps(report))
    measure(run, rates)
    evaluate(run)


def measure(run: RunDir, rates: tuple[float, ...] = (), tested: bool = True) -> None:
    """Lines of metrics; a test at the end."""
    lines: list[dict[str, Any]] = [
        {
            "kind": "train", "step": 10 * number, "epoch": 1, "loss": 2.0 / number,
            "accuracy": 0.18 * number, "lr": 0.001, "images_per_second": sum(rates) or 500.0,
            "rank_images_per_second": list(rates), "seconds": 2.5 * number,
        }
        for number in range(1, ROUNDS + 1)
    ]  # fmt: skip
    if tested:
        last = lines[-1] | {"kind": "eval", "loss": 0.0432, "accuracy": 0.9876}
        del last["rank_images_per_second"]
        lines.append(last)
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def evaluate(run: RunDir, step: int = 10 * ROUNDS) -> None:
    """What the test showed: 4 was taken for 9 twelve times, 7 for 2 once."""
    confusion = [[95 if row == column else 0 for column in range(10)] for row in range(10)]
    confusion[4][9], confusion[7][2] = 12, 1
    pixels = base64.b64encode(bytes(range(12))).decode()
    worst = [
        {"index": 77, "label": 4, "predicted": 9, "loss": 6.5, "shape": [3, 4], "pixels": pixels}
    ]
    run.evaluation.write_text(json.dumps({"step": step, "confusion": confusion, "worst": worst}))


def attempt(run: RunDir, number: int, *, step: int, last: int, **end: Any) -> Attempt:
    """A start whose ranks met at `step`; `end` is how they left together at step `last`."""
    made = Attempt(run, number)
    made.outcomes.mkdir(parents=True)
    record = {"step": step, "began": 1000.0 + 100 * number, "saved": 1050.0 + 100 * (number - 1)}
    made.record.write_text(json.dumps({"number": number, "hosts": ["h01", "h02"], **record}))
    made.alive.write_text(json.dumps({"step": last}))
    if end:
        made.end.write_text(json.dumps({"step": last, **end}))
    return made

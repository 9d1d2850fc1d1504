"""Progress of a run's training, by the files that it has left: cheap looks, no proof."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp.request.train_config import TrainConfig
from clusterddp.run import files
from clusterddp.run.records import Agreement, MetricsLine, Report
from clusterddp.run.run_dir import RunDir

_TAIL_BYTES = 65536
_CHECKPOINT = re.compile(r"step-(\d+)\.pt", re.ASCII)


@dataclass(frozen=True)
class Latest:
    """Latest values in metrics.jsonl."""

    step: int | None = None
    epoch: int | None = None
    loss: float | None = None
    """Loss of training."""
    test_accuracy: float | None = None


def latest_metrics(path: Path) -> Latest:
    """Read the latest values in metrics.jsonl, from its end."""
    latest = Latest()
    for line in _tail_lines(path):
        if line.step >= 0:
            latest = replace(latest, step=line.step, epoch=line.epoch)
        if line.tested:
            latest = replace(latest, test_accuracy=line.accuracy)
        elif line.loss is not None:
            latest = replace(latest, loss=line.loss)
    return latest


def newest_checkpoint(run: RunDir) -> tuple[int, float] | None:
    """Find step and time of the checkpoint with the highest step; not verified, so cheap."""
    try:
        with os.scandir(run.checkpoints) as entries:
            by_step = [
                (int(name[1]), entry)
                for entry in entries
                if (name := _CHECKPOINT.fullmatch(entry.name))
                and entry.is_file(follow_symlinks=False)
            ]
        step, newest = max(by_step, key=lambda each: each[0])
        return step, newest.stat().st_mtime
    except (OSError, ValueError):
        return None


def latest_report(run: RunDir, attempt: int | None) -> Report | None:
    """Read report.json, unless it is of an attempt before that, the latest one."""
    report = files.read(Report, run.report)
    if report is None or report.attempt is None or attempt is None:
        return report
    return None if report.attempt < attempt else report


def checkpoint_step(path: Path) -> int | None:
    """Return the step of a checkpoint, by its name; None for a file of another name."""
    name = _CHECKPOINT.fullmatch(path.name)
    return int(name[1]) if name else None


def recorded_batch(run: RunDir) -> tuple[int, int] | None:
    """Return images of a step over all ranks, and of one rank at the run's start, as agreed."""
    agreed = files.read(Agreement, run.resolved) or Agreement()
    images, reference = agreed.global_batch_size, agreed.reference_world_size
    return (images, images // reference) if 1 <= reference <= images else None


def is_finished(run: RunDir, step: int, before: TrainConfig, after: TrainConfig) -> bool:
    """Return whether a run has trained all of `after`, by the report that it wrote at `step`.

    before: what it was asked for. A run without a report has not come to its end.
    """
    report = files.read(Report, run.report) or Report()
    steps, epochs = report.steps, report.epochs
    if steps is None or epochs is None or step != steps:
        return False
    if after.max_steps and after.max_steps <= steps:
        return True
    # Ended by --max-steps, it may have been anywhere in its last epoch.
    return steps != before.max_steps and after.epochs <= epochs


def _tail_lines(path: Path) -> Iterator[MetricsLine]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            content = file.read()
    except OSError:
        return
    for values in files.parse_json_lines(content):
        line = files.load(MetricsLine, values)
        if line:
            yield line

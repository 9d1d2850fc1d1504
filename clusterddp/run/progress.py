"""How far the training of a run has come, by the files that it has left: cheap looks, no proof."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterddp.request.train_config import TrainConfig
from clusterddp.run.files import read_json
from clusterddp.run.run_dir import RunDir

_TAIL_BYTES = 65536
_CHECKPOINT = re.compile(r"step-(\d+)\.pt", re.ASCII)


def latest_metrics(path: Path) -> dict[str, Any]:
    """The latest values in metrics.jsonl; those of an evaluation are named test_loss and so on."""
    latest: dict[str, Any] = {}
    for record in _tail_records(path):
        tested = record.get("kind") == "eval"
        for name, value in record.items():
            latest[f"test_{name}" if tested and name in ("loss", "accuracy") else name] = value
    return latest


def newest_checkpoint(run: RunDir) -> tuple[int, float] | None:
    """The step and the time of the checkpoint with the highest step; not verified, so cheap."""
    try:
        with os.scandir(run.checkpoints) as entries:
            found = [
                (int(name[1]), entry)
                for entry in entries
                if (name := _CHECKPOINT.fullmatch(entry.name))
                and entry.is_file(follow_symlinks=False)
            ]
        step, newest = max(found, key=lambda one: one[0])
        return step, newest.stat().st_mtime
    except (OSError, ValueError):
        return None


def latest_report(run: RunDir, attempt: int | None) -> dict[str, Any]:
    """report.json, unless it is of an attempt before that, the latest one; empty without one."""
    report = read_json(run.report) or {}
    of = report.get("attempt")
    stale = isinstance(of, int) and attempt is not None and of < attempt
    return {} if stale else report


def checkpoint_step(path: Path) -> int | None:
    """The step of a checkpoint, by its name; None for a file of another name."""
    name = _CHECKPOINT.fullmatch(path.name)
    return int(name[1]) if name else None


def recorded_batch(run: RunDir) -> tuple[int, int] | None:
    """Images of a step over all ranks, and of one rank at the run's start, as its ranks agreed."""
    agreed = read_json(run.resolved) or {}
    images, reference = agreed.get("global_batch_size"), agreed.get("reference_world_size")
    if not isinstance(images, int) or not isinstance(reference, int):
        return None
    return (images, images // reference) if 1 <= reference <= images else None


def is_finished(run: RunDir, step: int, before: TrainConfig, after: TrainConfig) -> bool:
    """Return whether a run has trained all of `after`, by the report that it wrote at `step`.

    before: what it was asked for. A run without a report has not come to its end.
    """
    report = read_json(run.report) or {}
    steps, epochs = report.get("steps"), report.get("epochs")
    if not isinstance(steps, int) or not isinstance(epochs, int) or step != steps:
        return False
    if after.max_steps and after.max_steps <= steps:
        return True
    # Ended by --max-steps, it may have been anywhere in its last epoch.
    return steps != before.max_steps and after.epochs <= epochs


def _tail_records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:  # the first can be cut, the last torn: neither parses
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record

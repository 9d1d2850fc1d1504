"""Prints a comparison as a table, with notes on the conditions of its figures."""

import dataclasses
from collections.abc import Iterable, Sequence

from clusterddp.comparison.plan import counted
from clusterddp.comparison.results import DONE, Result, Trial
from clusterddp.request.train_config import TrainConfig
from clusterddp.run import formatting
from clusterddp.run.records import Report

_NAMES = "STRATEGY RANKS NODES TIME TOTAL IMAGES/S SPEED-UP EFFICIENCY ACCURACY MEMORY"
_HEADER = _NAMES.split()
# Columns of a row without figures.
_OF_ALL = 3
# The settings in which the rows of one comparison differ on purpose.
_OF_A_ROW = {"strategy", "batch_size", "lr", "lr_scaling", "sync_batchnorm", "cuda_graph"}


def table(lines: Sequence[Result]) -> str:
    """Format the table, a line a row; a row without figures gives the cause in their place."""
    rows = [_HEADER, *(_cells(line) for line in lines)]
    full = [row for row in rows if len(row) >= len(_HEADER)]
    widths = [
        max(len(row[column]) for row in (rows if column < _OF_ALL else full))
        for column in range(len(_HEADER))
    ]
    return "\n".join(_line(row, widths) for row in rows)


def notes(trials: Sequence[Trial], lines: Sequence[Result], hardware: str) -> list[str]:
    """List the conditions of the figures, a sentence or two a line.

    hardware: the processors, where they are known; the runs do not report them.
    """
    reports = [trial.report for trial in trials if trial.state == DONE and trial.report]
    measured = [line for line in lines if line.images_per_second is not None]
    base = next((line for line in measured if line.baseline), None)
    if not reports or base is None:
        return []
    hosts = list(dict.fromkeys(host for report in reports for host in report.hosts))
    shown = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
    first = trials[0].row.train
    lines_of_text = [
        f"on {shown}{f' ({hardware})' if hardware else ''}: {_each(reports, 'device')}, "
        f"{_each(reports, 'precision')}, threads per rank {_each(reports, 'threads')}, "
        f"torch {', '.join(_once(_torch(report) for report in reports))}",
        f"{first.model} on {first.dataset}, {_batch(measured)}; steps {_each(reports, 'steps')}",
        f"speed-up: images/s against {base.label}; efficiency: speed-up per device",
        "time: of the training steps; total: of a task, from its start to its end; memory: the "
        "largest of any rank",
    ]
    if any(len(line.images_per_second_each) > 1 for line in lines):
        lines_of_text.append(
            "several runs a row: medians, for images/s with the least and the greatest"
        )
    shares = {line.threads for line in lines if line.threads}
    if len(shares) > 1 and not first.threads and "cuda" not in _each(reports, "device"):
        lines_of_text.append(
            "the ranks had unequal shares of the CPUs, all of them when there was one rank: "
            "--threads 1 compares device with device"
        )
    different = _different([trial.row.train for trial in trials])
    if different:
        lines_of_text.append(f"the runs differ in {', '.join(different)}")
    return [formatting.line(note) for note in lines_of_text]


def figures(line: Result) -> str:
    """Format speed and accuracy of a row or a run in one line."""
    if line.images_per_second is None:
        return _state(line)
    accuracy = f", accuracy {line.accuracy:.2%}" if line.accuracy is not None else ""
    return f"{line.images_per_second:,.0f} images/s{accuracy}"


def _state(line: Result) -> str:
    return formatting.line(f"{line.state}: {line.why}" if line.why else line.state)


def _cells(line: Result) -> list[str]:
    ranks = f"1 ({line.devices} GPUs)" if line.strategy == "dp" else str(line.ranks)
    begin = [line.strategy, ranks, str(line.nodes)]
    if line.images_per_second is None:
        return [*begin, _state(line)]
    rate = f"{line.images_per_second:,.0f}"
    if len(line.images_per_second_each) > 1:
        least, greatest = min(line.images_per_second_each), max(line.images_per_second_each)
        rate += f" ({least:,.0f} to {greatest:,.0f})"
    cells = [
        *begin,
        _text(line.train_seconds, "{:,.2f} s"),
        _text(line.total_seconds, "{:,.1f} s"),
        rate,
        _text(line.speed_up, "{:.2f}"),
        _text(line.efficiency, "{:.0%}"),
        _text(line.accuracy, "{:.2%}"),
        formatting.memory(line.peak_memory_bytes),
    ]
    return cells if line.state == DONE else [*cells, _state(line)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Align words left and figures right; a cell beyond the columns stays as it is."""
    shown = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    if len(cells) == _OF_ALL + 1:  # the state in place of figures
        return "  ".join([*shown, cells[2].rjust(widths[2]), cells[3]])
    shown += [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=False)]
    return "  ".join([*shown, *cells[len(widths) :]])


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _batch(lines: Sequence[Result]) -> str:
    each = {line.images_per_device for line in lines}
    together = {line.images_per_device * line.devices for line in lines}
    if len(each) == 1:
        return f"{counted(each.pop(), 'image')} a device and step: N devices take N times as many"
    if len(together) == 1:
        return f"{counted(together.pop(), 'image')} a step, shared out among the devices"
    return f"{', '.join(map(str, sorted(each)))} images a device and step"


def _torch(report: Report) -> str | None:
    return report.versions.get("torch") if report.versions else None


def _each(reports: Sequence[Report], name: str) -> str:
    return ", ".join(_once(getattr(report, name) for report in reports))


def _once(values: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value not in (None, "")))


def _different(configs: Sequence[TrainConfig]) -> list[str]:
    return [
        f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(configs[0])
        if field.name not in _OF_A_ROW
        and len({getattr(config, field.name) for config in configs}) > 1
    ]

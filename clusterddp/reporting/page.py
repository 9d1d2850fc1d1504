"""Renders the page of `clusterddp report --html`: one file without scripts or external content."""

import base64
import json
import math
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from clusterddp import formatting
from clusterddp.reporting import plots
from clusterddp.reporting.gather import Evaluation, Gathered, differences
from clusterddp.reporting.sweep import SweepReport, order_of, read_lines, table_of
from clusterddp.reporting.usage import split_usage
from clusterddp.request.resources import Resources
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.run_dir import RunDir
from clusterddp.version import __version__

_FORMATS = ("percent", "loss", "duration", "hours", "rate", "memory")
_MAX_MATRIX = 30
_MAX_RANKS = 16
_MAX_ATTEMPTS = 50
_MAX_LINES = 6  # rows of a sweep: more bands would cover each other
_MAX_CURVES = 50  # runs averaged in one line with its band
_LEFT_OUT = "(left out)"


def page(gathered: Sequence[Gathered]) -> str:
    """Render the page of runs."""
    reports = [each.report for each in gathered]
    trained = [train for each in gathered if each.spec for train in each.spec.trainings]
    return _render(
        "page.html.j2",
        reports=reports,
        overall=plots.overall(gathered),
        colours=plots.colours(len(gathered)),
        scalings=[(scaling, plots.of_scaling(scaling)) for scaling in plots.scalings(reports)],
        differences=differences(trained) if len(trained) == len(gathered) else [],
        runs=[_run(each) for each in gathered],
    )


def sweep_page(report: SweepReport) -> str:
    """Render the page of a sweep."""
    best = [row for row in report.rows[:_MAX_LINES] if report.by in row.metrics]
    folder = Path(report.directory)
    lines = [
        [
            read_lines(RunDir(folder.with_name(run.run)).metrics, all_over=True)
            for run in row.trials[:_MAX_CURVES]
        ]
        for row in best
    ]
    header, *rows = table_of(report)
    columns = header[len(report.names) :]
    return _render(
        "sweep.html.j2",
        report=report,
        order=order_of(report),
        header=[*report.names, *(cell.replace("-", " ").capitalize() for cell in columns)],
        rows=rows,
        colours=plots.PALETTE,
        drawn=len(best),
        drawings=plots.of_sweep(report, lines),
    )


def _render(template: str, **values: object) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean,
    )
    environment.filters.update({name: getattr(formatting, name) for name in _FORMATS}, when=_when)
    return environment.get_template(template).render(version=__version__, now=time.time(), **values)


def _run(gathered: Gathered) -> dict[str, object]:
    """Collect the parts of a run's section that are not in its report."""
    figures = gathered.report.figures
    ranks, usage = figures.ranks, figures.usage
    rates = [rank.images_per_second or 0.0 for rank in ranks]
    slowest = sorted(ranks, key=lambda rank: rank.images_per_second or float("inf"))
    return {
        "report": gathered.report,
        "command": shlex.join(gathered.report.command),
        "rates": plots.rank_rates(gathered),
        "slow": {straggler.rank for straggler in gathered.report.stragglers},
        "ranks": ranks if len(ranks) <= _MAX_RANKS else slowest[:_MAX_RANKS],
        "fastest": max(rates, default=0.0),
        "sum_of_rates": sum(rates) if len(ranks) >= (figures.world_size or 0) else 0.0,
        "node_hours": [
            (activity.capitalize(), hours, hours / usage.node_hours)
            for activity, hours in split_usage(usage)
        ]
        if usage and usage.node_hours
        else [],
        "attempts": gathered.report.attempts[-_MAX_ATTEMPTS:],
        "matrix": _shaded(gathered.evaluation),
        "widest": _widest(gathered.evaluation),
        "worst": [
            (worst, f"data:image/png;base64,{base64.b64encode(image).decode()}")
            for worst, grey in gathered.evaluation.worst
            for image in [plots.png(worst.shape, grey)]
        ],
        "settings": _settings(gathered.spec.train if gathered.spec else None, TrainConfig()),
        "resources": _settings(gathered.spec.resources if gathered.spec else None, Resources()),
        "script": _script(gathered),
    }


def _settings(
    asked: TrainConfig | Resources | None, usual: TrainConfig | Resources
) -> list[tuple[str, object, object, bool]]:
    """List (name, value, default, whether they differ), changed options first."""
    if asked is None:
        return []
    defaults = vars(usual)
    rows = [
        (name, value, defaults[name], value != defaults[name])
        for name, value in vars(asked).items()
    ]
    return sorted(rows, key=lambda row: not row[3])


def _shaded(evaluation: Evaluation) -> list[list[tuple[int, float]]]:
    """Pair each count with the opacity of its shade: the root of its share of the row."""
    matrix = evaluation.matrix
    if not 0 < len(matrix) <= _MAX_MATRIX:
        return []
    return [
        [(count, round(0.85 * math.sqrt(count / (sum(row) or 1)), 3)) for count in row]
        for row in matrix
    ]


def _widest(evaluation: Evaluation) -> float:
    """Return the width of a cell for the longest count, as a multiple of the font size."""
    longest = max((len(str(count)) for row in evaluation.matrix for count in row), default=1)
    return round(0.65 * longest + 1, 2)  # a digit is at most 0.65 wide; the rest is padding


def _script(gathered: Gathered) -> str:
    """Return the batch script without the values of --env, which may be secret."""
    if gathered.spec is None:
        return ""  # the lines with such values are unknown
    try:
        script = gathered.run.script.read_text(errors="replace")
    except OSError:
        return ""
    for name, value in gathered.spec.environment:
        # Templates write it as `export NAME=…` and in the record of the request.
        script = re.sub(rf"\b{re.escape(name)}=.*", f"{name}={_LEFT_OUT}", script)
        script = script.replace(json.dumps([name, value]), json.dumps([name, _LEFT_OUT]))
    return script


def _when(seconds: float | None) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"
    except (OverflowError, ValueError, OSError):
        return "-"


def _clean(value: object) -> object:
    """Make every expression of the template printable before escaping."""
    if value is None:
        return ""
    return formatting.clean(value) if type(value) is str else value  # Markup is safe

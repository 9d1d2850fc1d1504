"""`python -m benchmarks`: runs the benchmarks and prints one table of ratios."""

import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks import hardware
from benchmarks.pairs import NOTES, Row

# name -> module with a `measure() -> list[Row]`; loaded when it runs, for one of them needs torch.
BENCHMARKS = {
    "cli": "benchmarks.cli",
    "bundle": "benchmarks.bundle",
    "launch": "benchmarks.launch",
    "scale": "benchmarks.scale",
    "step": "benchmarks.step",
    "hooks": "benchmarks.hooks",
    "scaling": "benchmarks.scaling",
    "growth": "benchmarks.growth",
    "sweeps": "benchmarks.sweeps",
    "losses": "benchmarks.losses",
    "preflight": "benchmarks.preflight",
    "gpu": "benchmarks.gpu",
}
MORE = {"scale": "benchmarks.nodes"}
"""Modules with a table that compares nothing, but shows growth."""
_VERSIONS = ("clusterddp", "click", "jinja2", "torch", "torchvision", "numpy")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--only",
    type=click.Choice(list(BENCHMARKS)),
    multiple=True,
    default=list(BENCHMARKS),
    show_default=True,
    help="A benchmark to run; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every sample.")
@click.option(
    "--plots", type=click.Path(path_type=Path), metavar="DIR", help="Draw each table into DIR."
)
def command(only: tuple[str, ...], as_json: bool, plots: Path | None) -> None:
    """Measure clusterddp against others and against its lower bounds; print tables of ratios.

    Takes up to 26 minutes on two cores; the first time also what installing the others takes.
    What this machine does not allow is skipped, and said. Judges nothing: the exit code is 0
    however slow it was.
    """
    circumstances = _circumstances()
    tables: dict[str, list[Row]] = {}
    for name in dict.fromkeys(only):
        click.echo(f"measuring {name} ...", err=True)
        began = time.monotonic()
        tables[name] = importlib.import_module(BENCHMARKS[name]).measure()
        click.echo(f"measured {name} in {time.monotonic() - began:.0f} s", err=True)
    if plots:
        from benchmarks.plots import draw

        for path in draw(tables, plots, circumstances["hardware"]):
            click.echo(f"drew {path}", err=True)
    if as_json:
        found = {name: [row.to_dict() for row in rows] for name, rows in tables.items()}
        click.echo(
            json.dumps({"circumstances": circumstances, "tables": found, "notes": NOTES}, indent=2)
        )
        return
    width = max(map(len, circumstances))
    for label, value in circumstances.items():
        click.echo(f"{label:<{width}}  {value}")
    for name, rows in tables.items():
        shown = table(rows) if rows else "Not measured: the reason stands below."
        click.echo(f"\n### {name}\n\nOn {circumstances['hardware']}.\n\n{shown}")
        if more := MORE.get(name):
            click.echo("\n" + "\n".join(importlib.import_module(more).table()))
    if NOTES:
        click.echo("\n" + "\n".join(f"- {line}" for line in NOTES))


def table(rows: Sequence[Row]) -> str:
    """The rows as a table of Markdown.

    Of ms less is better, of images/s more. The ratio is the median over the pairs, then the least
    and the greatest; `best` is that of the fastest sample of each side.
    """
    lines = [_HEADINGS, *map(_cells, rows)]
    widths = [max(len(cells[column]) for cells in lines) for column in range(len(_HEADINGS))]
    rule = ["-" * widths[0], "-" * widths[1], *("-" * (width - 1) + ":" for width in widths[2:])]
    shown = [
        [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        for cells in (_HEADINGS, rule, *lines[1:])
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in shown)


_HEADINGS = (
    "measured", "against", "ratio", "least to greatest", "best", "median", "baseline's", "unit",
    "peak MiB", "baseline's",
)  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        row.baseline,
        f"{row.ratio:.2f}",
        f"{min(row.ratios):.2f} to {max(row.ratios):.2f}",
        f"{row.best_ratio:.2f}",
        _figure(row.figure),
        _figure(row.baseline_figure),
        row.unit,
        _figure(row.peak_mib),
        _figure(row.baseline_peak_mib),
    )


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _circumstances() -> dict[str, str]:
    """What the figures depend on."""
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in _VERSIONS]
    return {
        "command": f"python -m benchmarks {' '.join(sys.argv[1:])}".rstrip(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware.named(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "versions": ", ".join(versions),
        "load": f"{os.getloadavg()[0]:.1f} before the start (0.0: the machine was idle)",
    }


if __name__ == "__main__":
    command()

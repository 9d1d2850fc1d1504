"""`clusterddp report`: what runs achieved, as an account, a table, JSON or a page of HTML."""

import dataclasses
import os
import shlex
import sys
from pathlib import Path

import click

from clusterddp.cli import main
from clusterddp.cli.options import SettingsCommand
from clusterddp.cli.runs import JSON_OPTION, OUTPUT_ROOT_OPTION, RUN, echo_json
from clusterddp.errors import RequestError
from clusterddp.reporting.gather import RunReport, gather
from clusterddp.run import formatting
from clusterddp.run.files import write_atomically
from clusterddp.run.status import find_each, find_run, statuses

_WIDTH = len("straggler") + 2
_MOST_STARTS = 8
_MOST_NAMED = 5
_MOST_HOSTS = 8
_HEADER = (
    *("NAME", "STATE", "MODEL", "RANKS", "NODES", "ACCURACY", "SECONDS", "IMAGES/S", "MEMORY"),
    "STARTS",
)


@click.command(name="report", cls=SettingsCommand)
@click.argument("run_names", type=RUN, nargs=-1, metavar="[RUN]…")
@OUTPUT_ROOT_OPTION
@JSON_OPTION
@click.option(
    "--html",
    metavar="FILE",
    help="Write one page that holds everything, curves and pictures too, and needs no network; "
    "'-' is stdout. Needs matplotlib: pip install 'clusterddp[plots]'.",
)
def command(run_names: tuple[str, ...], output_root: Path, as_json: bool, html: str | None) -> None:
    """Show what RUNs achieved: runs' names, job ids or directories; the latest run without one.

    One run is told at length, several are a table. A run that has no report.json yet is shown with
    what its metrics hold. SECONDS are those of training; IMAGES/S is of all ranks together; MEMORY
    the largest of any rank. --json prints a list, an object for each run.

    Exit codes: 0 whenever it could tell, however the runs ended; 2 there is no such run, or the
    page cannot be written.
    """
    if html is not None and as_json:
        raise RequestError("--html and --json ask for two forms; give one of them.")
    if html is not None:
        _check_page(html)
    found = find_each(output_root, run_names) or [find_run(output_root, None)]
    gathered = [gather(run, status) for run, status in zip(found, statuses(found), strict=True)]
    if html is not None:
        from clusterddp.reporting.page import page

        main.go_on()  # matplotlib is no small thing
        _write(html, page(gathered))
    elif as_json:
        echo_json([dataclasses.asdict(one.report) for one in gathered])
    elif len(gathered) == 1:
        click.echo(describe(gathered[0].report))
    else:
        click.echo(formatting.table([_HEADER, *(_row(one.report) for one in gathered)]))


def describe(report: RunReport) -> str:
    """The account of one run as lines of `label  value`; what is not known is left out."""
    lines = [
        ("run", report.name),
        ("state", ": ".join(filter(None, (report.state, report.detail)))),
        ("failure", report.first_failure),
        ("command", shlex.join(report.command)),
        ("result", _result(report)),
        ("training", _training(report)),
        ("ranks", _ranks(report)),
        ("with", _machinery(report)),
        ("memory", _memory(report)),
        ("model", _model(report)),
        ("settings", _settings(report)),
        ("versions", ", ".join(f"{name} {value}" for name, value in report.versions.items())),
        *_starts(report),
        *(("straggler", one.describe()) for one in report.stragglers[:_MOST_NAMED]),
        ("confused", "; ".join(one.describe() for one in report.confusions[:_MOST_NAMED])),
        *(("warning", text) for text in report.warnings),
        ("files", report.directory),
    ]
    return "\n".join(
        f"{label:<{_WIDTH}}{formatting.line(value)}" for label, value in lines if value
    )


def _result(report: RunReport) -> str:
    return _joined(
        ("test accuracy {:.2%}", report.accuracy),
        ("test loss {:.4f}", report.loss),
        ("training loss {:.4f}", None if report.complete else report.train_loss),
        ("step {:,}" if report.complete else "at step {:,}", report.step),
        ("epoch {}", report.epoch),
    )


def _joined(*parts: tuple[str, float | None]) -> str:
    """Format the figures that are known, each in its words."""
    return ", ".join(form.format(value) for form, value in parts if value is not None)


def _training(report: RunReport) -> str:
    parts = []
    if report.train_seconds is not None:
        parts.append(formatting.duration(report.train_seconds))
    if report.images_per_second is not None:
        parts.append(f"{formatting.rate(report.images_per_second)} images/s")
    if report.total_seconds is not None:
        parts.append(f"the latest start took {formatting.duration(report.total_seconds)} in all")
    return ", ".join(parts)


def _ranks(report: RunReport) -> str:
    if report.world_size is None:
        return ""
    hosts = f" on {formatting.some(report.hosts, _MOST_HOSTS)}" if report.hosts else ""
    return f"{formatting.count(report.world_size, 'rank')}{hosts}"


def _machinery(report: RunReport) -> str:
    parts = [report.device, report.precision, report.backend, report.strategy]
    if report.threads is not None:
        parts.append(f"{formatting.count(report.threads, 'thread')} a rank")
    if report.cuda_graph:
        parts.append("CUDA graph")
    return ", ".join(filter(None, parts))


def _memory(report: RunReport) -> str:
    if report.peak_memory_bytes is None:
        return ""
    return f"peak of any rank {formatting.memory(report.peak_memory_bytes)}"


def _model(report: RunReport) -> str:
    parts = [report.model]
    if report.parameters is not None:
        parts.append(f"{report.parameters:,} parameters")
    if report.dataset:
        parts.append(report.dataset)
    if report.train_images is not None and report.test_images is not None:
        parts.append(f"{report.train_images:,} training and {report.test_images:,} test images")
    return ", ".join(filter(None, parts))


def _starts(report: RunReport) -> list[tuple[str, str]]:
    """A line for them all, and one for each of the latest; none for a run that started once."""
    if report.starts < 2:
        return []
    shown = f"{report.starts}, {formatting.count(report.steps_done_twice, 'step')} done twice"
    lines = [("starts", f"{shown}, {formatting.duration(report.seconds_lost)} lost")]
    if len(report.attempts) > _MOST_STARTS:
        lines.append(("", f"… the latest {_MOST_STARTS}:"))
    for one in report.attempts[-_MOST_STARTS:]:
        steps = "its ranks never met"
        if one.first_step is not None:
            steps = f"steps {one.first_step:,} to {one.last_step or one.first_step:,}"
        lines.append(("", f"{one.attempt}  {'; '.join(filter(None, (steps, one.ended)))}"))
    return lines


def _settings(report: RunReport) -> str:
    """Format the settings as the flags that give them."""
    flags = []
    for name, value in report.settings.items():
        flag = f"--{name.replace('_', '-')}"
        flags.append(flag if value is True else f"{flag}={value}")
    return shlex.join(flags)


def _row(report: RunReport) -> tuple[str, ...]:
    def known(value: object) -> str:
        return "-" if value in (None, "") else str(value)

    cells = (
        report.name,
        report.state,
        known(report.model),
        known(report.world_size),
        known(report.num_nodes),
        formatting.percent(report.accuracy),
        "-" if report.train_seconds is None else f"{report.train_seconds:,.1f}",
        formatting.rate(report.images_per_second),
        formatting.memory(report.peak_memory_bytes),
        str(report.starts),
    )
    return tuple(formatting.line(cell) for cell in cells)


def _check_page(html: str) -> None:
    """Check the page's file before anything is read. Raises RequestError."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError(
            f"--html draws its curves with matplotlib, which is not installed for "
            f"{sys.executable}. Install it there: pip install 'clusterddp[plots]'."
        )
    if html == "-":
        return
    path = Path(html)
    if not html or path.is_dir():
        raise RequestError(f"--html: {html!r} names no file; give one, such as report.html.")
    if not path.parent.is_dir():
        raise RequestError(f"--html: there is no folder {path.parent}; make it, or name another.")


def _write(html: str, content: str) -> None:
    if html == "-":
        click.echo(content, nl=False)
        return
    path = Path(os.path.realpath(html))  # a link stays one, and leads to the page
    try:
        if path.exists() and not path.is_file():
            path.write_text(content, encoding="utf-8")  # a device or a pipe has no other place
        else:
            write_atomically(path, content.encode())
    except OSError as error:
        raise RequestError(f"--html: cannot write {html}: {error.strerror}.") from None
    click.echo(f"wrote {html}")

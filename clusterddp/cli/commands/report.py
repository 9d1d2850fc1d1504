"""`clusterddp report`: results of runs as text, a table, JSON or an HTML page."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from clusterddp import formatting
from clusterddp.cli import main
from clusterddp.cli.options import JSON_OPTION, SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, echo_json
from clusterddp.errors import OptionError, RequestError
from clusterddp.reporting.gather import RunReport, gather
from clusterddp.reporting.sweep import SweepReport, as_csv, gather_sweep, order_of, table_of
from clusterddp.reporting.usage import split_usage
from clusterddp.run.records import Report
from clusterddp.run.run_dir import SweepDir
from clusterddp.status.find import find_run, find_sweep, is_pattern, latest_sweep, select_each
from clusterddp.status.status import statuses

_WIDTH = len("straggler") + 2
_MAX_ATTEMPTS = 8
_MAX_NAMED = 5
_MAX_HOSTS = 8
_NAMES = "NAME STATE MODEL RANKS NODES TEST-ACCURACY TRAIN-LOSS TRAIN-SECONDS IMAGES/S PEAK-MEMORY"
_HEADER = (*_NAMES.split(), "ATTEMPTS")


@click.command(name="report", cls=SettingsCommand)
@click.argument("run_names", type=RUN, nargs=-1, metavar="[RUN...]")
@RUNS_DIR_OPTION
@JSON_OPTION
@click.option(
    "--html",
    metavar="FILE",
    help="Write one self-contained page with everything, including plots and images; '-' is "
    "stdout.",
)
@click.option(
    "--csv", metavar="FILE", help="Write a sweep's table with all metrics as CSV; '-' is stdout."
)
@click.option(
    "--by",
    metavar="METRIC",
    help="Metric that orders a sweep's trials: accuracy, loss, train_loss or your own. "
    "'-METRIC' puts the lowest first, '+METRIC' the highest; without a sign its name decides. "
    "Default: accuracy, else loss.",
)
@click.option(
    "--over",
    multiple=True,
    metavar="NAME",
    help="Average over a sweep's trials that differ only in NAME; repeatable. Default: seed.",
)
def command(
    run_names: tuple[str, ...],
    runs_dir: Path,
    as_json: bool,
    html: str | None,
    csv: str | None,
    by: str | None,
    over: tuple[str, ...],
) -> None:
    """Show the results of RUNs (names, job ids or directories); default: the latest run.

    One run is shown in full, several as a table of what is known of any. If a run has no
    report.json yet, its metrics are shown. TRAIN-SECONDS is the training time, IMAGES/S the
    throughput of all ranks, PEAK-MEMORY the largest of any rank. --json prints a list with one
    object per run.

    A sweep is a table of its trials, best first, with mean and sample standard deviation (STD) over
    N seeds; --json prints one object.

    Exit codes: 0 the report was printed, however the runs ended; 2 no such run, sweep or metric, or
    the file cannot be written.
    """
    if (html is not None) + (csv is not None) + as_json > 1:
        raise RequestError(
            "--html, --csv and --json exclude each other. Give one of them. [CD0103]"
        )
    if html is not None:
        from clusterddp.reporting import plots

        plots.check_file("--html", html, formats=())
    if by in ("", "-", "+"):
        raise OptionError("--by", f" {by!r} is not a metric.")
    sweep = _sweep(runs_dir, run_names)
    if sweep:
        _show_sweep(gather_sweep(sweep, by or "", over), as_json=as_json, html=html, csv=csv)
        return
    for option, value in (("--csv", csv is not None), ("--by", by), ("--over", over)):
        if value:
            named = ", ".join(run_names) or "the latest run"
            raise OptionError(option, f" needs a sweep, but {named} is not one. [CD1104]")
    runs, wrong = select_each(runs_dir, run_names)
    if wrong:
        raise wrong[0]
    runs = runs or [find_run(runs_dir, None)]
    gathered = [gather(run, status) for run, status in zip(runs, statuses(runs), strict=True)]
    if html is not None:
        from clusterddp.reporting.page import page

        main.enable_gc()  # importing matplotlib allocates a lot
        _write("--html", html, page(gathered))
    elif as_json:
        echo_json([run.report.as_dict() for run in gathered])
    elif len(gathered) == 1:
        click.echo(describe(gathered[0].report))
    else:
        columns = zip(_HEADER, *(_row(run.report) for run in gathered), strict=True)
        known = [column for column in columns if {*column[1:]} != {"-"}]
        click.echo(formatting.table([*zip(*known, strict=True)]))


def _sweep(root: Path, names: Sequence[str]) -> SweepDir | None:
    """Return the named sweep, or without names the sweep of the latest run."""
    if not names:
        return latest_sweep(root)
    return find_sweep(root, names[0]) if len(names) == 1 and not is_pattern(names[0]) else None


def _show_sweep(report: SweepReport, *, as_json: bool, html: str | None, csv: str | None) -> None:
    if html is not None:
        from clusterddp.reporting.page import sweep_page

        main.enable_gc()
        _write("--html", html, sweep_page(report))
    elif csv is not None:
        _write("--csv", csv, as_csv(report))
    elif as_json:
        echo_json(report.as_dict())
    else:
        counts = ", ".join(f"{count:,} {state}" for state, count in report.counts.items())
        lines = [
            ("sweep", report.sweep),
            ("state", f"{report.state}: {counts}"),
            ("by", order_of(report)),
            ("files", f"{report.directory}-INDEX"),
        ]
        click.echo("\n".join(f"{name:<{_WIDTH}}{formatting.line(text)}" for name, text in lines))
        click.echo(f"\n{formatting.table(table_of(report))}")


def describe(report: RunReport) -> str:
    """Describe one run as lines of `label  value`; unknown values are omitted."""
    figures = report.figures
    versions = figures.versions or {}
    memory = formatting.memory(figures.peak_memory_bytes)
    lines = [
        ("run", report.status.name),
        ("state", ": ".join(filter(None, (report.status.state, report.status.detail)))),
        ("failure", report.status.first_failure),
        ("command", shlex.join(report.command)),
        ("result", _result(report)),
        ("training", _training(figures)),
        ("ranks", _ranks(figures)),
        ("nodes", report.status.preflight and f"preflight: {report.status.preflight}"),
        ("network", report.status.shown_switches),
        ("device", _device(figures)),
        ("memory", formatting.join_known(("peak of any rank {}", memory))),
        ("model", _model(figures)),
        ("settings", _settings(report)),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items())),
        *_attempts(report),
        ("usage", _usage(figures)),
        *_slow_ranks(report),
        *(
            ("slow run", f"attempt {attempt.attempt}: {slow.describe()}")
            for attempt in report.attempts
            for slow in attempt.slowdowns[-_MAX_NAMED:]
        ),
        *(("straggler", rank.describe()) for rank in report.stragglers[:_MAX_NAMED]),
        ("confusions", "; ".join(pair.describe() for pair in report.confusions[:_MAX_NAMED])),
        *(("warning", text) for text in figures.warnings),
        ("files", report.status.directory),
    ]
    return "\n".join(f"{name:<{_WIDTH}}{formatting.line(text)}" for name, text in lines if text)


def _result(report: RunReport) -> str:
    figures = report.figures
    return formatting.join_known(
        ("test accuracy {:.2%}", figures.accuracy),
        ("test loss {:.4f}", figures.loss),
        ("training loss {:.4f}", None if report.complete else report.train_loss),
        ("step {:,}" if report.complete else "at step {:,}", figures.steps),
        ("epoch {}", figures.epochs),
    )


def _training(figures: Report) -> str:
    return formatting.join_known(
        ("{}", formatting.duration(figures.train_seconds)),
        ("{} images/s", formatting.rate(figures.images_per_second)),
        ("latest attempt {} in total", formatting.duration(figures.total_seconds)),
    )


def _ranks(figures: Report) -> str:
    if figures.world_size is None:
        return ""
    hosts = f" on {formatting.join_limited(figures.hosts, _MAX_HOSTS)}" if figures.hosts else ""
    return f"{formatting.count(figures.world_size, 'rank')}{hosts}"


def _device(figures: Report) -> str:
    parts = [figures.device, figures.precision, figures.backend, figures.strategy]
    if figures.threads is not None:
        parts.append(f"{formatting.count(figures.threads, 'thread')} per rank")
    if figures.cuda_graph:
        parts.append("CUDA graph")
    return ", ".join(filter(None, parts))


def _model(figures: Report) -> str:
    images = ""
    if figures.train_images is not None and figures.test_images is not None:
        images = f"{figures.train_images:,} training and {figures.test_images:,} test images"
    return formatting.join_known(
        ("{}", figures.model),
        ("{:,} parameters", figures.parameters),
        ("{}", figures.dataset),
        ("{}", images),
    )


def _attempts(report: RunReport) -> list[tuple[str, str]]:
    """Return a line for all attempts and one for each of the latest; none for a single attempt."""
    figures = report.figures
    if (figures.num_attempts or 0) < 2:
        return []
    total = f"{figures.num_attempts}, {formatting.count(figures.repeated_steps, 'step')} repeated"
    lost = f", {formatting.duration(figures.lost_seconds)} from checkpoint to restart"
    lines = [("attempts", total + (lost if figures.lost_seconds else ""))]
    if len(report.attempts) > _MAX_ATTEMPTS:
        lines.append(("", f"… the latest {_MAX_ATTEMPTS}:"))
    for attempt in report.attempts[-_MAX_ATTEMPTS:]:
        steps = "" if report.command else "no training step"
        if attempt.first_step is not None:
            steps = f"steps {attempt.first_step:,} to {attempt.last_step or attempt.first_step:,}"
        lines.append(("", f"{attempt.attempt}  {'; '.join(filter(None, (steps, attempt.ended)))}"))
    return lines


def _usage(figures: Report) -> str:
    """Format the node-hours and GPU-hours, and the share of each activity."""
    usage = figures.usage
    if usage is None:
        return ""
    whole = formatting.join_known(
        ("{} node-hours", formatting.hours(usage.node_hours)),
        ("{} GPU-hours", formatting.hours(usage.gpu_hours)),
    )
    shares = [
        f"{name} {hours / usage.node_hours:.1%}"
        for name, hours in (split_usage(usage) if usage.node_hours else [])
    ]
    gpus = ""
    if usage.gpu_utilization is not None:
        peak = usage.gpu_peak_memory_bytes
        figures_of_gpu = formatting.join_known(
            ("GPU utilization {:.1%}", usage.gpu_utilization),
            ("peak memory {}", formatting.memory(peak)),
            ("{:.0f} W per GPU", usage.gpu_watts),
        )
        gpus = f"{figures_of_gpu} (NVML)"
    return "; ".join(filter(None, (": ".join(filter(None, (whole, ", ".join(shares)))), gpus)))


def _slow_ranks(report: RunReport) -> list[tuple[str, str]]:
    """Return a line for each rank that was reported as slow during training, latest last."""
    spells = [(attempt, slow) for attempt in report.attempts for slow in attempt.stragglers]
    return [
        (
            "slow rank",
            f"{slow.name}, attempt {attempt.attempt}: {slow.relative_speed:.0%} of the other "
            f"ranks' median speed for {formatting.duration(slow.seconds)} ({slow.steps:,} steps "
            f"from step {slow.first_step:,}){'' if slow.until is None else ', then recovered'}",
        )
        for attempt, slow in spells[-_MAX_NAMED:]
    ]


def _settings(report: RunReport) -> str:
    """Format the settings as command-line options."""
    return shlex.join(
        f"--{name.replace('_', '-')}{'' if value is True else f'={value}'}"
        for name, value in report.settings.items()
    )


def _row(report: RunReport) -> tuple[str, ...]:
    figures = report.figures
    cells = (
        report.status.name,
        report.status.state,
        figures.model or "-",
        str(figures.world_size or "-"),
        str(figures.num_nodes or "-"),
        formatting.percent(figures.accuracy),
        formatting.loss(report.train_loss),
        "-" if figures.train_seconds is None else f"{figures.train_seconds:,.1f}",
        formatting.rate(figures.images_per_second),
        formatting.memory(figures.peak_memory_bytes),
        str(figures.num_attempts),
    )
    return tuple(formatting.line(cell) for cell in cells)


def _write(option: str, name: str, content: str) -> None:
    if name == "-":
        click.echo(content, nl=False)
    else:
        from clusterddp.reporting import plots

        click.echo(plots.write_file(option, name, content.encode()))

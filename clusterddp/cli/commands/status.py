"""`clusterddp status`: how one run is doing, and what to type next."""

import time
from pathlib import Path

import click

from clusterddp.cli.options import SettingsCommand
from clusterddp.cli.runs import JSON_OPTION, OUTPUT_ROOT_OPTION, RUN, echo_json
from clusterddp.run import formatting
from clusterddp.run.state import STOPPED
from clusterddp.run.status import RunStatus, find_run, statuses

_WIDTH = len("checkpoint") + 2
_MOST_REASONS = 5


@click.command(name="status", cls=SettingsCommand)
@click.argument("run", type=RUN, required=False, metavar="[RUN]")
@OUTPUT_ROOT_OPTION
@JSON_OPTION
def command(run: str | None, output_root: Path, as_json: bool) -> None:
    """Show how RUN is doing: a run's name, job id or directory; the latest run without one.

    States: created (nothing submitted), queued, running, done, failed, cancelled, stopped (it can
    resume from its last checkpoint, but does not by itself), unknown (the job recorded no end, and
    Slurm cannot say or no longer knows).

    Exit codes: 0 whenever it could tell, however the run ended; 2 there is no such run.
    """
    [status] = statuses([find_run(output_root, run)])
    if as_json:
        echo_json(status.as_dict())
    else:
        click.echo(describe(status))


def describe(status: RunStatus) -> str:
    """The status as lines of `label  value`; what is not known is left out."""
    launcher = f" ({status.launcher})" if status.launcher else ""
    took = "took {}" if status.has_ended else "running for {}"
    elapsed = formatting.duration(status.elapsed_seconds) if status.started_time else ""
    left = formatting.duration(status.seconds_left)
    progress = formatting.known(
        ("step {}", formatting.steps(status.step, status.steps_planned, status.percent_done)),
        ("about {} left", left),
        ("epoch {}", status.epoch),
        ("training loss {}", formatting.loss(status.loss)),
        ("test accuracy {}", formatting.percent(status.accuracy)),
    )
    wait = (status.expected_start or 0.0) - time.time()
    starts = formatting.known(
        ("expected {}", _time(status.expected_start)),
        ("in {}", formatting.duration(wait) if status.expected_start and wait > 0 else ""),
    )
    lines = [
        ("run", status.name),
        ("state", f"{status.state}: {status.detail}" if status.detail else status.state),
        ("failure", status.first_failure.replace("\n", f"\n{' ' * _WIDTH}")),
        ("exit code", str(status.exit_code or "") if status.state != STOPPED else ""),
        ("job", f"{status.array_element or status.job_id}{launcher}" if status.job_id else ""),
        ("attempt", _attempt(status)),
        ("asked", status.layout),
        ("hosts", formatting.some(status.hosts, 8)),
        ("preflight", status.preflight),
        ("submitted", _time(status.submitted_time)),
        ("start", f"{starts}, by Slurm's estimate" if starts else ""),
        ("started", formatting.known(("{}", _time(status.started_time)), (took, elapsed))),
        ("ended", _time(status.ended_time)),
        ("progress", progress),
    ]
    if status.checkpoint_step is not None:
        age = formatting.duration(time.time() - (status.checkpoint_time or 0.0))
        lines.append(("checkpoint", f"step {status.checkpoint_step}, {age} ago"))
    lines += [("left out", f"{host}: {reason}") for host, reason in status.left_out.items()]
    lines += [("warning", text) for text in status.warnings]
    lines += [("cleaned", status.cleaned), ("files", status.directory)]
    if status.works_in:
        lines.append(("works in", f"{status.works_in}; relative output lies there"))
    lines += [("next", status.next_command)]
    return "\n".join(
        f"{label:<{_WIDTH}}{formatting.clean(value)}" for label, value in lines if value
    )


def _time(when: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else ""


def _attempt(status: RunStatus) -> str:
    """`3 (2 restarts: time limit, node lost or killed)`; empty for a run that started once."""
    if not status.restarts and (status.attempt or 1) == 1:
        return ""
    number = str(status.attempt) if status.attempt is not None else str(status.restarts + 1)
    if not status.restarts:
        return number
    times = formatting.count(status.restarts, "restart")
    shown = status.restart_reasons[-_MOST_REASONS:]
    more = "…, " if len(shown) < len(status.restart_reasons) else ""
    return f"{number} ({times}{': ' if shown else ''}{more}{', '.join(shown)})"

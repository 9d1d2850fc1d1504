"""`clusterddp status`: shows the state of a run and the command to type next."""

import time
from collections.abc import Iterable
from pathlib import Path

import click

from clusterddp import formatting
from clusterddp.cli.options import JSON_OPTION, SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, echo_json
from clusterddp.run.run_dir import SweepDir, describe_output_folder
from clusterddp.status.find import find_run, find_sweep, is_pattern, latest_sweep, select
from clusterddp.status.state import RunState
from clusterddp.status.status import RunStatus, statuses
from clusterddp.status.sweeps import sweep_status

_WIDTH = len("checkpoint") + 2
_MAX_REASONS = 5


@click.command(name="status", cls=SettingsCommand)
@click.argument("run", type=RUN, required=False, metavar="[RUN]")
@RUNS_DIR_OPTION
@JSON_OPTION
def command(run: str | None, runs_dir: Path, as_json: bool) -> None:
    """Show the state and progress of a run, the reason for a failure, and the next command.

    RUN is a run's name, job id or directory; default: the latest run. For a sweep or a pattern
    ('lr-*') it shows one line per run.

    States: created (nothing submitted), queued, running, done, failed, cancelled, stopped (needs a
    manual resume from its last checkpoint), unknown (no end is recorded, and Slurm does not respond
    or no longer knows the job).

    Exit codes: 0 the state is shown, however the run ended; 2 usage error, or no such run.
    """
    if run and is_pattern(run):
        listed = statuses(select(runs_dir, run))
        rows = [(s.name, s.state, formatting.line(s.why())) for s in listed]
        if as_json:
            echo_json([status.as_dict() for status in listed])
        else:
            click.echo(formatting.table([("RUN", "STATE", "REASON"), *rows]))
        return
    sweep = find_sweep(runs_dir, run) if run else latest_sweep(runs_dir)
    if sweep:
        _show_sweep(sweep, as_json=as_json)
        return
    [status] = statuses([find_run(runs_dir, run)])
    if as_json:
        echo_json(status.as_dict())
    else:
        click.echo(describe(status))


def _show_sweep(sweep: SweepDir, *, as_json: bool) -> None:
    status = sweep_status(sweep)
    if as_json:
        echo_json(status.as_dict())
        return
    states = zip(status.states, status.trials, strict=True)
    rows = [
        (
            f"{status.name}-{index}",
            state,
            *map(formatting.line, trial),
            *([formatting.line(status.reasons.get(index, ""))] if status.reasons else []),
        )
        for index, (state, trial) in enumerate(states)
    ]
    heads = ("TRIAL", "STATE", *status.names, *(["REASON"] if status.reasons else []))
    throttle = f", at most {status.max_concurrent} at once" if status.max_concurrent else ""
    lines = [
        ("sweep", status.name),
        ("state", f"{status.state}: {status.summary}"),
        ("job", ", ".join(status.job_ids)),
        ("trials", f"{status.counts.get(RunState.DONE, 0)} of {len(status.trials)} done{throttle}"),
        ("submitted", formatting.moment(status.submitted_time)),
        ("directory", f"{status.directory}-INDEX"),
        ("next", status.next_command),
    ]
    click.echo(_labelled(lines))
    click.echo(f"\n{formatting.table([heads, *rows])}")


def describe(status: RunStatus) -> str:
    """Format the status as lines of `label  value`; unknown values are omitted."""
    detail = "" if status.detail in status.first_failure else status.detail
    is_shown = status.state == RunState.STOPPED or f"exit code {status.exit_code}" in detail
    took = "took {}" if status.has_ended else "running for {}"
    elapsed = formatting.duration(status.elapsed_seconds) if status.started_time else ""
    left = formatting.duration(status.seconds_left)
    of_step = "" if status.loss_step in (None, status.step) else f" at step {status.loss_step}"
    progress = formatting.join_known(
        ("step {}", formatting.steps(status.step, status.steps_planned, status.percent_done)),
        ("about {} left", left),
        ("epoch {}", status.epoch),
        (f"training loss {{}}{of_step}", formatting.loss(status.loss)),
        ("test accuracy {}", formatting.percent(status.accuracy)),
    )
    wait = (status.expected_start or 0.0) - time.time()
    starts = formatting.join_known(
        ("expected {}", formatting.moment(status.expected_start)),
        ("in {}", formatting.duration(wait) if status.expected_start and wait > 0 else ""),
    )
    lines = [
        ("run", status.name),
        ("state", f"{status.state}: {detail}" if detail else status.state),
        ("failure", status.first_failure.replace("\n", f"\n{' ' * _WIDTH}")),
        ("error code", f"{status.code}: clusterddp explain {status.code}" if status.code else ""),
        ("exit code", "" if is_shown else str(status.exit_code or "")),
        ("job", f"{status.shown_job} ({status.launcher})" if status.shown_job else ""),
        ("attempt", _attempt(status)),
        ("requested", status.layout),
        ("nodes", formatting.join_limited(status.hosts, 8)),
        ("network", status.shown_switches),
        ("preflight", status.preflight),
        ("submitted", formatting.moment(status.submitted_time)),
        ("start", f"{starts}, by Slurm's estimate" if starts else ""),
        (
            "started",
            formatting.join_known(("{}", formatting.moment(status.started_time)), (took, elapsed)),
        ),
        ("ended", formatting.moment(status.ended_time)),
        ("progress", progress),
    ]
    if status.checkpoint_step is not None:
        age = formatting.duration(time.time() - (status.checkpoint_time or 0.0))
        of = ", saved from memory" if status.checkpoint_from_memory else ""
        repeats = formatting.count(status.steps_repeated, "step") if status.steps_repeated else ""
        more = f"; a resume repeats {repeats}" if repeats else ""
        lines.append(("checkpoint", f"step {status.checkpoint_step}, {age} ago{of}{more}"))
    lines += [("excluded", f"{host}: {reason}") for host, reason in status.excluded_nodes.items()]
    lines += [("warning", text) for text in status.warnings]
    lines += [("cleaned", status.cleaned), ("directory", status.directory)]
    if status.working_directory:
        output = describe_output_folder(status.working_directory)
        lines.append(("workdir", f"{status.working_directory}; {output}"))
    lines += [("next", status.next_command)]
    return _labelled(lines)


def _labelled(lines: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<{_WIDTH}}{formatting.clean(text)}" for name, text in lines if text)


def _attempt(status: RunStatus) -> str:
    """Return `3 (2 restarts: time limit, requeued by Slurm)`; empty for the first attempt."""
    if not status.restarts and (status.attempt or 1) == 1:
        return ""
    number = str(status.attempt) if status.attempt is not None else str(status.restarts + 1)
    if not status.restarts:
        return number
    times = formatting.count(status.restarts, "restart")
    shown = status.restart_reasons[-_MAX_REASONS:]
    more = "…, " if len(shown) < len(status.restart_reasons) else ""
    return f"{number} ({times}{': ' if shown else ''}{more}{', '.join(shown)})"

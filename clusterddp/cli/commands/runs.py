"""`clusterddp runs`: lists the runs in a runs directory, the latest last."""

import shutil
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import click

from clusterddp import formatting, polling
from clusterddp.cli.options import JSON_OPTION, DurationType, SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, echo_json, refuse_misspelt
from clusterddp.errors import CODE_AT_END
from clusterddp.request.options import Duration
from clusterddp.run.run_dir import RunDir, SweepDir, find_runs
from clusterddp.slurm.states import JobState
from clusterddp.status.find import group_trials, select_each
from clusterddp.status.state import RunState
from clusterddp.status.status import RunStatus, statuses_and_states
from clusterddp.status.sweeps import SweepStatus, sweep_status

_HEADER = ("NAME", "STATE", "JOBID", "LAYOUT", "AGE", "STEP", "ETA", "TEST-ACC", "REASON")
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
"""Terminal codes (ECMA-48): move the cursor home; erase to the end of the line; erase below."""


@click.command(name="runs", cls=SettingsCommand)
@click.argument("run", type=RUN, nargs=-1, metavar="[RUN...]")
@click.option(
    "-n",
    "--last",
    type=click.IntRange(1),
    metavar="N",
    show_default="all",
    help="List only the latest N runs.",
)
@click.option(
    "--state",
    type=click.Choice([state.value for state in RunState]),
    multiple=True,
    help="List only runs in this state; repeatable.",
)
@click.option(
    "--watch",
    type=DurationType(Duration(least=1)),
    is_flag=False,
    flag_value=formatting.setting(polling.WATCH_POLL_SECONDS),
    metavar="[DURATION]",
    help="Print the list again at this interval until Ctrl-C; "
    f"{formatting.setting(polling.WATCH_POLL_SECONDS)} if none is given.",
)
@RUNS_DIR_OPTION
@JSON_OPTION
def command(
    run: tuple[str, ...],
    last: int | None,
    state: tuple[str, ...],
    watch: float | None,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """List the runs, latest last; a sweep has one line with the number of trials in each state.

    RUN is a run, a sweep or a pattern ('lr-*'). A named sweep is listed trial by trial, and so is
    every sweep with --state.

    JOBID is Slurm's job id, or pid:N for a local run. LAYOUT is nodes x tasks per node. AGE is the
    time since the submission. ETA is the estimated time until the run is done, at its recent pace,
    or until Slurm expects it to start. REASON is why a run waits or how it failed, with the code
    for 'clusterddp explain'. A terminal shows truncated lines; 'status' shows everything. --json
    prints a list with the fields of 'status --json' for each run.

    --watch redraws the list in a terminal; elsewhere it prints the list when it changes. Each
    update is one call of squeue.

    Exit codes: 0 listed, 2 usage error, 130 --watch was ended by Ctrl-C.
    """
    refuse_misspelt(click.get_current_context(), runs_dir)
    if watch is not None and as_json:
        raise click.UsageError("--watch conflicts with --json. Call 'runs --json' repeatedly.")
    if watch is not None:
        from clusterddp.cli import main

        main.enable_gc()  # it may be watched for days
        _watch(runs_dir, run, last, state, watch)
    listed = _listed(runs_dir, run, last, state)
    if as_json:
        echo_json([status.as_dict() for status in listed])
    elif not listed:
        click.echo(_none(runs_dir, state), err=True)
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo("\n".join(_lines(listed, width)))


def _listed(
    root: Path,
    names: Sequence[str],
    last: int | None,
    state: Sequence[str],
    known: dict[str, JobState] | None = None,
) -> list[RunStatus | SweepStatus]:
    """Return the statuses to list. known: see `statuses_and_states`."""
    runs = find_runs(root)
    if names:
        found, wrong = select_each(root, names)
        if wrong:
            raise wrong[0]
        paths = {each.path.absolute() for each in found}
        chosen: list[RunDir] = [each for each in runs if each.path.absolute() in paths]
        here = {each.path.absolute() for each in chosen}
        chosen += [each for each in found if each.path.absolute() not in here]
    else:
        chosen = runs if state else group_trials(root, runs)
    listed = _statuses(chosen[-last:] if last and not state else chosen, known)
    if state:
        return [status for status in listed if status.state in state][-(last or 0) :]
    return listed


def _watch(
    root: Path, names: Sequence[str], last: int | None, state: Sequence[str], seconds: float
) -> None:
    """Print the list repeatedly until KeyboardInterrupt."""
    known: dict[str, JobState] = {}
    before: list[tuple[str, str, str]] | None = None
    for _ in polling.poll(every=seconds):
        listed = _listed(root, names, last, state, known)
        if sys.stdout.isatty():
            size = shutil.get_terminal_size()
            every = formatting.setting(seconds)
            head = f"{root}, {time.strftime('%H:%M:%S')}, every {every}; Ctrl-C ends it"
            lines = [_cut(head, size.columns), *_lines(listed, size.columns)]
            if len(lines) > size.lines:  # the latest runs matter most
                lines = [*lines[:2], *lines[2 - max(size.lines, 3) :]]
            # Overwrite line by line: clearing the screen would flicker.
            text = f"{_END_OF_LINE}\n".join(lines)
            click.echo(f"{_HOME}{text}{_END_OF_LINE}{_BELOW}", nl=False)
            sys.stdout.flush()
        else:
            now = [
                (
                    each.name,
                    each.state,
                    each.summary if isinstance(each, SweepStatus) else each.detail,
                )
                for each in listed
            ]
            if now != before:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                click.echo("\n".join([f"--- {stamp}", *_lines(listed, None)]))
                sys.stdout.flush()
            before = now


def _none(root: Path, state: Sequence[str]) -> str:
    among = f"{' or '.join(state)} " if state and find_runs(root) else ""
    return f"no {among}runs in '{root}'"


def _lines(listed: Sequence[RunStatus | SweepStatus], width: int | None) -> list[str]:
    rows = [_row(status, time.time()) for status in listed]
    return [_cut(line, width) for line in formatting.table([_HEADER, *rows]).splitlines()]


def _cut(line: str, width: int | None) -> str:
    """Truncate a line to the terminal's width, if any, but keep the code at its end."""
    if width is None or len(line) <= width:
        return line
    code = CODE_AT_END.search(line)
    end = f"…{code[0] if code else ''}"
    return f"{line[: max(width - len(end), 0)]}{end}"


def _statuses(
    runs: Sequence[RunDir], known: dict[str, JobState] | None
) -> list[RunStatus | SweepStatus]:
    """Return the statuses in order, one per sweep. Queries Slurm once."""
    single = [run for run in runs if not isinstance(run, SweepDir)]
    trials = {run: run.trials for run in runs if isinstance(run, SweepDir)}
    of_runs, of_trials = statuses_and_states(single, [*chain.from_iterable(trials.values())], known)
    status, state = iter(of_runs), iter(of_trials)
    return [
        sweep_status(run, [next(state) for _ in trials[run]])
        if isinstance(run, SweepDir)
        else next(status)
        for run in runs
    ]


def _row(status: RunStatus | SweepStatus, now: float) -> tuple[str, ...]:
    if isinstance(status, SweepStatus):
        age = formatting.duration(now - status.submitted_time if status.submitted_time else None)
        job = status.job_ids[-1] if status.job_ids else "-"
        trials = f"{formatting.count(len(status.trials), 'trial')}: {status.summary}"
        return status.name, status.state, job, status.layout, age, "-", "-", "-", trials
    since = status.submitted_time or status.started_time or status.created_time
    asked = f"{status.nodes}x{status.tasks_per_node}" if status.nodes else "-"
    left = status.seconds_left
    if status.expected_start is not None:
        left = max(status.expected_start - now, 0.0)
    return (
        status.name,
        status.state,
        status.shown_job or "-",
        asked,
        formatting.duration(now - since if since else None),
        formatting.steps(status.step, status.steps_planned, status.percent_done).replace(
            " of ", "/"
        ),
        formatting.duration(left),
        formatting.percent(status.accuracy),
        formatting.line(status.why(in_short=True)),
    )

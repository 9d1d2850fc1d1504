"""Shared by the commands on sweeps: options, the table of trials, and their submission."""

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterddp import errors, log
from clusterddp.launchers import SentJob
from clusterddp.request.options import Given
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import NO_SWEEP, Sweep, format_trial, parse, read_trials

if TYPE_CHECKING:  # a dry run reads no run
    from clusterddp.run.run_dir import RunDir, SweepDir

F = TypeVar("F", bound=Callable[..., object])
_SEEDS = 2**32


def sweep_options(function: F) -> F:
    """Add the options that define the trials of a sweep; `sweep_of` reads them."""
    rows: dict[str, dict[str, Any]] = {
        "--sweep": {
            "multiple": True,
            "metavar": "NAME=VALUES",
            "help": "One trial per value: lr=0.1,0.3 or seed=0..4; repeatable.",
        },
        "--sweep-file": {
            "type": click.Path(path_type=Path, dir_okay=False),
            "metavar": "FILE",
            "help": "Read the trials from a .csv with a header or a .jsonl.",
        },
        "--num-samples": {
            "type": int,
            "metavar": "N",
            "help": "Draw N trials from --sweep: lists, log:1e-4..1e-1, lin:0.0..1.0.",
        },
        "--sample-seed": {
            "type": click.IntRange(0, _SEEDS - 1),
            "metavar": "SEED",
            "help": "Seed of the draws. [default: random, recorded]",
        },
        "--max-concurrent": {
            "type": click.IntRange(1),
            "metavar": "N",
            "help": "Run at most N trials at once.",
        },
    }
    for name, keywords in reversed(rows.items()):
        function = click.option(name, **keywords)(function)
    return function


def sweep_of(given: Given, max_concurrent: int = 0) -> Sweep:
    """Return the sweep that the options define, or NO_SWEEP. Raises OptionError."""
    items, path = given.values["sweep"], given.values["sweep_file"]
    num_samples, seed = given.values["num_samples"], given.values["sample_seed"]
    if seed is not None and num_samples is None:
        raise errors.OptionError("--sample-seed", " needs --num-samples N.")
    if not items and path is None:
        if num_samples is not None:
            raise errors.OptionError("--num-samples", " needs --sweep NAME=VALUES.")
        return NO_SWEEP
    if num_samples is not None and seed is None:
        seed = int.from_bytes(os.urandom(4), "big")
    rows = read_trials(path) if path else ()
    return parse(
        items, rows, num_samples=num_samples, seed=seed or 0, max_concurrent=max_concurrent
    )


def sweep_fields(sweep: Sweep) -> dict[str, object]:
    """Return the fields of --json that list a sweep's trials."""
    trials = [dict(sweep.trial(index)) for index in range(len(sweep))]
    return {"trials": trials, "sample_seed": sweep.sample_seed}


def table_of(spec: JobSpec, indices: Sequence[int] | None = None) -> str:
    """Format a table of the trials, or only of these indices, with their values."""
    from clusterddp import formatting

    sweep = spec.sweep
    rows = [
        (f"{spec.run_name}-{index}", *map(formatting.line, sweep.trials[index]))
        for index in (range(len(sweep)) if indices is None else indices)
    ]
    table = formatting.table([("TRIAL", *sweep.names), *rows])
    if sweep.sample_seed is not None:
        table += f"\ndrawn with --sample-seed {sweep.sample_seed}"
    return table


def echo_dry_run(
    spec: JobSpec,
    script: str,
    fields: Mapping[str, object],
    *,
    indices: Sequence[int] = (),
    as_json: bool,
) -> None:
    """Print a script that would be resubmitted, and the additional options of sbatch.

    indices: trials to submit, for a sweep.
    """
    from clusterddp.submission.submit import extra_sbatch_options

    beside = extra_sbatch_options(spec, script, indices)
    if as_json:
        click.echo(json.dumps({**fields, "sbatch_options": beside, "script": script}))
        return
    if indices:
        click.echo(table_of(spec, indices), err=True)
    if beside:
        click.echo(f"clusterddp: sbatch gets {shlex.join(beside)}", err=True)
    click.echo(script, nl=False)


def follow_sweep(
    spec: JobSpec,
    path: Path,
    submission: SentJob,
    indices: Sequence[int],
    *,
    wait: bool,
    as_json: bool,
) -> int:
    """Print the submission of a sweep's trials, and follow them with `wait`.

    The launcher `local` runs the trials here, one after another. Returns the command's exit code:
    the highest of the trials that were followed.
    """
    from clusterddp import formatting
    from clusterddp.run.run_dir import SweepDir

    sweep, count = SweepDir(path), formatting.count(len(indices), "trial")
    runs = [sweep.trial(index) for index in indices]
    fields: dict[str, object] = {"sweep": spec.run_name, "run_dir": spec.run_dir}
    is_local = spec.launcher == "local"
    fields |= {"job_id": submission.job_id, "indices": [*indices], **sweep_fields(spec.sweep)}
    words = f"submitted {spec.run_name} as job array {submission.job_id}"
    if is_local:
        words = f"running {spec.run_name} here, one trial at a time"
    words += (
        f": {count}, each {spec.layout}\n"
        f"  directory  {spec.run_dir}-INDEX\n"
        f"  trials     clusterddp status {sweep.cli_name}\n"
        f"  logs       clusterddp logs {runs[0].cli_name}\n"
        f"  cancel     clusterddp cancel {sweep.cli_name}"
    )
    if spec.sweep.sample_seed is not None:
        words += f"\n  drawn      with --sample-seed {spec.sweep.sample_seed}"
    if sweep.code.is_dir():
        words += f"\n  workdir    {sweep.code_folder}{spec.program.shared_code}"
    if not as_json:
        click.echo(words)
    code = errors.EXIT_DONE
    if is_local:
        code = _run_here(sweep, runs, as_json=as_json)
    elif wait:
        code = _wait(sweep, runs)
    if as_json:
        click.echo(json.dumps({**fields, **({"exit_code": code} if wait or is_local else {})}))
    return code


def _run_here(sweep: "SweepDir", runs: "Sequence[RunDir]", *, as_json: bool) -> int:
    """Run the trials one after another, including those after a failed one."""
    from clusterddp.cli.runs import follow
    from clusterddp.launchers import local
    from clusterddp.run.history import History
    from clusterddp.status.status import was_cancelled_before_turn

    script, code = sweep.script.read_text(), errors.EXIT_DONE
    for run in runs:
        if was_cancelled_before_turn(History.read(run)):
            log.info(f"{run.name}: cancelled before it started")
            code = max(code, errors.EXIT_FAILED)
            continue
        spec = run.load_spec()
        log.info(f"{run.name}: {format_trial(spec.trial)}")
        sent = local.submit(spec, script, run)
        assert sent.stop
        if was_cancelled_before_turn(History.read(run)):  # while it was submitted
            sent.stop()
        ended = follow(run, lines=0, survives_ctrl_c=False, to_stderr=as_json)
        sent.stop()
        code = max(code, ended)
        if ended == errors.EXIT_INTERRUPTED:
            log.info(f"{sweep.name}: interrupted; the trials after {run.name} have not run")
            break
    else:
        from clusterddp.status import notify  # not after an interruption

        notify.notify_sweep(sweep, "rehearsal")
    return code


def _wait(sweep: "SweepDir", runs: "Sequence[RunDir]") -> int:
    """Wait until each run has ended; return the highest exit code."""
    code = errors.EXIT_DONE
    try:
        from clusterddp.status.follow import log_end, wait_for_end

        for run in runs:
            ended = log_end(run, wait_for_end(run))
            code = ended if code == errors.EXIT_DONE or ended == errors.EXIT_FAILED else code
    except KeyboardInterrupt:
        click.echo(
            f"\nclusterddp: {sweep.name} continues. To follow it: clusterddp runs --watch "
            f"{sweep.cli_name}. To end it: clusterddp cancel {sweep.cli_name}",
            err=True,
        )
        return errors.EXIT_INTERRUPTED
    return code

"""`clusterddp debug`: trains on this workstation in one process or several."""

import os
import shlex
import time
from pathlib import Path

import click

from clusterddp import log
from clusterddp.cli.options import SettingsCommand, config_option, given_by, options
from clusterddp.cli.runs import RUNS_DIR_OPTION
from clusterddp.errors import EXIT_INTERRUPTED, EXIT_STOPPED, RequestError
from clusterddp.processes import START_METHODS
from clusterddp.ranks.dist_env import MAX_PROCS, DistEnv
from clusterddp.request.spec import OPTIONS, JobSpec
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.run import attempt as attempts
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import forms
from clusterddp.submission.fields import CONTAINER, container_of
from clusterddp.submission.inputs import check_inputs


@click.command(cls=SettingsCommand)
@options(TRAINING)
@options(OPTIONS[name.replace("_", "-")] for name in ("python", "hang-timeout", *CONTAINER))
@click.option(
    "--procs",
    type=click.IntRange(1, MAX_PROCS),
    default=1,
    show_default=True,
    envvar="CLUSTERDDP_PROCS",
    help="Number of processes; with 1, breakpoints work.",
)
@click.option(
    "--start-method",
    type=click.Choice(START_METHODS),
    show_default="exec",
    envvar="CLUSTERDDP_START_METHOD",
    help="How processes start: exec, or a method of torch.multiprocessing.",
)
@click.option(
    "--run-name", metavar="NAME", show_default="debug-<time>", help="Name of the run's directory."
)
@config_option
@RUNS_DIR_OPTION
@click.option(
    "--run-dir",
    metavar="DIR",
    show_default="RUNS_DIR/RUN_NAME",
    help="Run directory; resumes if it has checkpoints.",
)
def command(
    procs: int,
    start_method: str | None,
    run_name: str | None,
    run_dir: str | None,
    **_values: object,
) -> int:
    """Train on this machine, without Slurm.

    \b
    clusterddp debug             # in this process: breakpoints in the model work
    clusterddp debug --procs 2   # two ranks; rank 0 prints here, each has a log

    With --container-image, each rank runs in a container, as in a job.

    Exit codes: 0 done, 1 the training failed, 2 usage error, 75 stopped after a checkpoint, can
    resume, 130 interrupted, 128 + N ended by signal N before a checkpoint.
    """
    from clusterddp.worker import workstation  # imported late: --help needs no multiprocessing

    given = given_by(click.get_current_context())
    container, values = container_of(given), given.values
    paths = ("data_dir", "init_from") if container else ()
    config = TrainConfig.of(
        given, **{name: os.path.abspath(values[name]) for name in paths if values[name]}
    )
    if container and start_method:
        raise RequestError(
            "--start-method conflicts with --container-image. Remove one of them. [CD0103]"
        )
    if not container and "python" in given.typed:
        raise RequestError(
            "--python needs --container-image IMAGE: it names an interpreter there. [CD1004]"
        )
    path = _path(values["runs_dir"], run_dir, run_name)
    spec = workstation.request(path, config, procs, **container)
    spec.refuse_pyxis()
    check_inputs(config, spec if container else None)
    with workstation.recorded(spec, may_exist=bool(run_dir)) as (run, record):
        if container or procs > 1 or start_method:
            box = spec.container if container else None
            code, failure = workstation.train(config, run, procs, start_method or "exec", box)
        else:
            from clusterddp.worker.task import run_task

            code, failure = run_task(config, run.path, DistEnv.from_environ({})), None
        record(code, failure)
        made = attempts.latest(run)
        if code in (EXIT_STOPPED, EXIT_INTERRUPTED) and made and made.end.exists():
            log.info(f"resume with: {_again(spec, config, run, start_method)}")
        return code


def _path(runs_dir: Path, run_dir: str | None, run_name: str | None) -> str:
    """Return the run's directory. Raises RequestError for conflicting or invalid options."""
    if run_dir is not None and run_name is not None:
        raise RequestError("--run-dir conflicts with --run-name. Remove one of them. [CD0103]")
    if run_dir == "":
        raise RequestError("--run-dir is empty. Omit it to create a new directory. [CD0102]")
    name = time.strftime("debug-%Y%m%d-%H%M%S") if run_name is None else run_name
    forms.run_name("--run-name", name)
    return os.path.abspath(run_dir or f"{runs_dir}/{name}")


def _again(spec: JobSpec, config: TrainConfig, run: RunDir, start_method: str | None) -> str:
    """Return the command that resumes a run from its latest checkpoint."""
    shown = os.path.relpath(run.path)
    path = shown if not shown.startswith("..") else str(run.path)
    ranks = [f"--procs={spec.world_size}"] if spec.world_size > 1 else []
    if start_method:
        ranks.append(f"--start-method={start_method}")
    if spec.container_image:
        ranks += [f"--container-image={spec.container_image}", f"--python={spec.python}"]
        ranks += [f"--container-runtime={spec.container_runtime}"]
        ranks += [f"--container-mount={mount}" for mount in spec.container_mounts]
        ranks += [f"--container-workdir={spec.container_workdir}"] * bool(spec.container_workdir)
    return shlex.join(
        ["clusterddp", "debug", *ranks, *config.to_argv(defaults=False), f"--run-dir={path}"]
    )

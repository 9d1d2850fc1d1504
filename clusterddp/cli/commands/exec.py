"""`clusterddp exec`: sets the rank variables and executes COMMAND.

For a user's own srun line. In a run, a small parent process stays and records the outcome
(`--run-dir`).
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from clusterddp.errors import DistEnvError, coded
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import JOB_ID, format_value, own_gloo_interfaces, own_mig_device
from clusterddp.slurm.forms import ARM_VARIABLE, ATTEMPT_VARIABLE, CODE_VARIABLE
from clusterddp.version import armed_path
from clusterddp.worker.command import become, run_command
from clusterddp.worker.supervise import raise_open_files


@click.command(name="exec", context_settings={"allow_interspersed_args": False})
@click.option("--run-dir", type=click.Path(path_type=Path), hidden=True)
@click.option("--own-log", is_flag=True, hidden=True)
@click.option("--attempt", type=int, hidden=True, envvar=ATTEMPT_VARIABLE)
@click.option("--container", hidden=True)
@click.option("--stacks/--no-stacks", default=True, hidden=True)
@click.option("--report-to", default="", hidden=True)
@click.argument(
    "argv", metavar="-- COMMAND [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED
)
def command(
    run_dir: Path | None,
    own_log: bool,
    attempt: int | None,
    container: str | None,
    stacks: bool,
    report_to: str,
    argv: tuple[str, ...],
) -> int:
    """Set the rank variables and execute COMMAND.

    \b
    srun clusterddp exec -- python train.py --lr 0.1

    Exports RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, NODE_RANK,
    GROUP_* and ROLE_*, as torchrun does; 'clusterddp env' shows their values. Outside a Slurm step
    and without torch's variables, COMMAND is rank 0 of 1, with MASTER_PORT=0 (any free port) unless
    MASTER_PORT is set. In a job without a step, such as salloc's shell, a warning is printed.

    If it is unset, OMP_NUM_THREADS is SLURM_CPUS_PER_TASK, divided by a torchrun agent's ranks: the
    CPU threads per rank in torch and NumPy.

    COMMAND may open as many files as the hard limit allows, at most 65,536 (ulimit -n).

    Exit codes: COMMAND's own; 126 it cannot be executed, 127 it was not found, 1 the variables
    contradict each other, 2 usage error.
    """
    env = DistEnv.from_environ(os.environ)
    own_device = own_mig_device(os.environ, env.local_rank, env.local_world_size)
    environ = {**os.environ, **env.to_environ(), **own_device, **_gloo_interface(run_dir, env)}
    environ.pop(ATTEMPT_VARIABLE, None)  # COMMAND may start another training
    if threads := _threads(environ, env):
        environ.setdefault("OMP_NUM_THREADS", str(threads))
    if run_dir is not None and (stacks or environ.get(CODE_VARIABLE)):
        # Only in a run: your own srun line has no `clusterddp stacks` and no copy of the code.
        environ["PYTHONPATH"] = armed_path(environ.get("PYTHONPATH", ""))
        environ[ARM_VARIABLE] = str(int(stacks))
    if env.origin == "single":
        _warn_without_step(argv)
    if run_dir is None:
        raise_open_files()
        become(argv, environ)

    if container:
        from clusterddp.processes.container import Container
        from clusterddp.worker.container_parent import run_contained

        return run_contained(
            run_dir.absolute(),
            env,
            Container.from_json(container),
            argv,
            attempt=attempt,
            own_log=own_log,
        )

    return run_command(
        run_dir.absolute(), env, argv, environ, attempt, own_log=own_log, report_to=report_to
    )


def _gloo_interface(run_dir: Path | None, env: DistEnv) -> dict[str, str]:
    """Return the variable with gloo's interface on this host; empty if it does not change.

    Raises DistEnvError if the run's own request names none of this host. One from the environment
    only causes a warning, since COMMAND may not use gloo.
    """
    try:
        return own_gloo_interfaces(os.environ, env.world_size)
    except DistEnvError as error:
        from clusterddp.run.run_dir import RunDir  # seldom needed

        spec = RunDir(run_dir).read_spec() if run_dir else None
        if spec and spec.network_interface:
            raise
        if env.local_rank == 0:
            click.echo(f"clusterddp: warning: {coded(error)}", err=True)
    return {}


def _threads(environ: Mapping[str, str], env: DistEnv) -> int:
    """Return this rank's share of its task's CPUs; 0 if it is unknown."""
    cpus = environ.get("SLURM_CPUS_PER_TASK", "")
    ranks = env.local_world_size if "TORCHELASTIC_RUN_ID" in environ else 1  # per task
    return max(int(cpus) // ranks, 1) if cpus.isdigit() and int(cpus) else 0


def _warn_without_step(argv: Sequence[str]) -> None:
    """Warn if this is the shell of a job, where COMMAND is the only rank."""
    if job := next((os.environ[name] for name in JOB_ID if os.environ.get(name)), ""):
        click.echo(
            f"clusterddp: warning: this shell is in job {format_value(job)} but not in a Slurm "
            "step: COMMAND is rank 0 of 1. For a rank in every task: "
            f"srun clusterddp exec -- {shlex.join(argv)} [CD0801]",
            err=True,
        )

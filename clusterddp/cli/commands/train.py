"""`clusterddp train`: trains as one rank, in a job, started manually or under torchrun."""

import os
from functools import partial
from pathlib import Path

import click

from clusterddp.cli import main
from clusterddp.cli.options import GroupedCommand, given_by, options
from clusterddp.formatting import setting
from clusterddp.processes import change_environment
from clusterddp.ranks import dist_env
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.request.spec import OPTIONS
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.slurm.forms import ATTEMPT_VARIABLE
from clusterddp.training import stop

_MANUAL = ["rank", "world_size", "master_addr", "master_port", "local_rank", "local_world_size"]
"""Options of a manually started rank."""


@click.command(cls=GroupedCommand)
@options([*TRAINING, OPTIONS["hang-timeout"]], settings=False)
@click.option(
    "--run-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    show_default="jobs/train-<time>",
    help="Directory for metrics, checkpoints, the report and each rank's outcome.",
)
@click.option("--rank", type=int, help="This rank, from 0, if ranks are started manually.")
@click.option("--world-size", type=int, help="Number of manually started ranks.")
@click.option(
    "--master-addr",
    metavar="HOST",
    show_default="127.0.0.1",
    help="Host of rank 0, if ranks are started manually.",
)
@click.option("--master-port", type=int, help="Free port of that host, the same for all ranks.")
@click.option(
    "--local-world-size",
    type=int,
    show_default="all ranks",
    help="Ranks per host, if ranks are started manually on several hosts.",
)
@click.option(
    "--local-rank",
    type=int,
    show_default="from --rank, host by host",
    help="Number of this rank on its host.",
)
@click.option("--own-log", is_flag=True, hidden=True)
@click.option("--attempt", type=int, hidden=True, envvar=ATTEMPT_VARIABLE)
@click.option("--signal-lead", type=int, default=0, hidden=True)
def command(
    run_dir: Path | None, own_log: bool, attempt: int | None, signal_lead: int, **_values: object
) -> int:
    """Train as one rank, given by the environment or by --rank.

    \b
    srun clusterddp train                                     # ranks from Slurm
    torchrun --nproc-per-node 2 --no-python clusterddp train  # from torchrun
    clusterddp train --rank 0 --world-size 2 --master-port N  # one of two ranks
    clusterddp train                                          # a single process

    If --run-dir has checkpoints, training resumes from the latest.

    Exit codes: 0 done, 1 this rank failed, 2 usage error, 75 stopped after a checkpoint, can
    resume, 130 interrupted, 128 + N ended by signal N. With --run-dir, a stopped task of Slurm or
    torchrun exits with 0, because another code would end the other tasks.
    """
    ctx = click.get_current_context()
    config = TrainConfig.of(given_by(ctx))
    env = dist_env.from_flags(**{name: ctx.params[name] for name in _MANUAL})
    if env:
        dist_env.check_address(env.master_addr)
        # The variables of a surrounding job do not describe this rank.
        change_environment({}, without=dist_env.foreign_variables(os.environ))
        if env.world_size > 1:
            patience = setting(config.rendezvous_seconds(env.num_nodes))
            click.echo(
                f"clusterddp: rank {env.rank} waits up to {patience} for "
                f"all {env.world_size} at {env.master_addr}:{env.master_port}",
                err=True,
            )
    else:
        env = DistEnv.from_environ(os.environ)

    def child() -> int:
        from clusterddp.worker.task import run_task

        return run_task(config, run_dir, env, attempt=attempt, signal_lead=signal_lead)

    if run_dir is None:
        code = child()
        main.allow_fast_exit()  # the process group is closed, and the teardown of torch is slow
        return code
    run_dir = run_dir.absolute()

    from clusterddp.run.attempt import Attempt
    from clusterddp.run.run_dir import RunDir
    from clusterddp.worker.nccl_log import NcclLog
    from clusterddp.worker.supervise import supervise

    nccl = NcclLog(os.environ, env, Attempt(RunDir(run_dir), attempt) if attempt else None)
    started = partial(supervise, attempt=attempt, own_log=own_log, listen=stop.requested.listen)
    return started(run_dir, env, child, began=nccl.began)

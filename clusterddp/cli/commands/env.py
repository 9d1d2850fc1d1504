"""`clusterddp env`: shows a task's rank variables and their sources."""

import json
import os
import sys
from pathlib import Path

import click

from clusterddp import formatting
from clusterddp.errors import no_file
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import parse_environment


@click.group(name="env", invoke_without_command=True)
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="Read the environment from FILE, the output of 'env' or 'env -0', not from this process; "
    "'-' is standard input.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
@click.pass_context
def command(ctx: click.Context, source: str | None, as_json: bool) -> None:
    """Show this task's rank variables and the variables they come from.

    In a Slurm step: srun clusterddp env.

    Exit codes: 0 shown, 1 the variables contradict each other, 2 usage error.
    """
    if ctx.invoked_subcommand:
        return
    env = DistEnv.from_environ(os.environ if source is None else parse_environment(_read(source)))
    click.echo(_as_json(env) if as_json else _as_table(env))


@command.command("create")
def create_command() -> None:
    """Make a Python environment on a cluster: clusterddp --on NAME env create.

    It gets the packages of the uv.lock, requirements.txt or pyproject.toml of your work tree, with
    uv if the cluster has it, else with pip. Runs that you submit from there use it.

    Exit codes: 0 made, or there already, 1 the cluster was not reached, 2 it cannot be made.
    """
    from clusterddp.remote import environment

    environment.create(Path.cwd(), click.echo)


def _read(source: str) -> str:
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise no_file("--from", source, error, "CD0801") from error
    return data.decode(errors="surrogateescape")


_FIELDS = (
    *("rank", "local_rank", "node_rank", "world_size", "local_world_size", "num_nodes"),
    *("master_addr", "master_port", "hostnames"),
)


def _as_json(env: DistEnv) -> str:
    values = {"origin": env.origin, **{name: getattr(env, name) for name in _FIELDS}}
    sources = {name: env.sources[name] for name in _FIELDS}
    return json.dumps({**values, "sources": sources, "environ": env.to_environ()}, indent=2)


def _as_table(env: DistEnv) -> str:
    shown = {name: str(getattr(env, name)) for name in _FIELDS}
    shown["hostnames"] = _shown_hosts(env.hostnames)
    rows = [(name, value, env.sources[name]) for name, value in shown.items()]
    return formatting.table(
        [("NAME", "VALUE", "SOURCE"), ("origin", env.origin, _ORIGINS[env.origin]), *rows]
    )


_ORIGINS = {
    "torch": "torch's variables",
    "slurm": "a task of a Slurm step",
    "single": "neither torch's variables nor a Slurm step",
}


def _shown_hosts(hostnames: tuple[str, ...]) -> str:
    if len(hostnames) <= 4:
        return ",".join(hostnames) or "?"
    return f"{hostnames[0]},{hostnames[1]},...,{hostnames[-1]} ({len(hostnames)} hosts)"

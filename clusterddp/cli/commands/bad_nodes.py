"""`clusterddp bad-nodes`: lists and clears the nodes marked bad in a runs directory."""

import dataclasses
import time
from pathlib import Path

import click

from clusterddp import formatting
from clusterddp.cli.options import JSON_OPTION, SettingsCommand, source
from clusterddp.cli.runs import RUNS_DIR_OPTION, echo_json, refuse_misspelt
from clusterddp.errors import ClusterDDPError, RequestError
from clusterddp.run import bad_nodes
from clusterddp.run.bad_nodes import BadNode
from clusterddp.slurm.forms import expand_nodelist, text

_HEADER = ("NODE", "CAUSE", "AGE", "EXPIRES", "RUN", "ATTEMPT", "REASON")


class BadNodesGroup(SettingsCommand, click.Group):
    """A group with its own options, which site.cfg can set."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


@click.group(name="bad-nodes", cls=BadNodesGroup, invoke_without_command=True)
@RUNS_DIR_OPTION
@JSON_OPTION
@click.pass_context
def command(ctx: click.Context, runs_dir: Path, as_json: bool) -> None:
    """List the nodes that runs exclude as bad, the latest first.

    In the table, CAUSE is preflight, lost, hardware, repetition or straggling. EXPIRES is how long
    the node stays excluded; 'clusterddp bad-nodes clear HOST' ends that at once.

    Exit codes: 0 listed, 1 the list cannot be read, 2 usage error.
    """
    if ctx.invoked_subcommand:
        return
    refuse_misspelt(ctx, runs_dir)
    nodes = sorted(_read(runs_dir).values(), key=lambda node: node.time, reverse=True)
    if as_json:
        echo_json([dataclasses.asdict(node) for node in nodes])
    elif not nodes:
        click.echo(f"no bad nodes in {runs_dir}", err=True)
    else:
        click.echo(formatting.table([_HEADER, *(_row(node, time.time()) for node in nodes)]))


@command.command(name="clear", cls=SettingsCommand)
@click.argument("hosts", nargs=-1, metavar="[HOST...]")
@click.option("--all", "is_all", is_flag=True, help="Clear all of them.")
@RUNS_DIR_OPTION
@click.pass_context
def clear(ctx: click.Context, hosts: tuple[str, ...], is_all: bool, runs_dir: Path) -> None:
    """Clear HOSTs: runs may use these nodes again. A HOST may be a list, gpu[01-03].

    A job that already excludes a node does so until it is requeued. Unknown nodes are reported.

    Exit codes: 0 cleared, 1 the list cannot be written, 2 no HOST is in it.
    """
    if bool(hosts) == is_all:
        problem = "--all conflicts with HOST. " if is_all else ""
        raise click.UsageError(f"{problem}Name the nodes to clear, or give --all.", ctx)
    if ctx.parent and source(ctx, "runs_dir") == "default":
        runs_dir = ctx.parent.params["runs_dir"]
        refuse_misspelt(ctx.parent, runs_dir)
    refuse_misspelt(ctx, runs_dir)
    bad = _read(runs_dir)
    names = [name for host in hosts for name in expand_nodelist(text("HOST", host))]
    unknown = [formatting.line(name) for name in dict.fromkeys(names) if name not in bad]
    cleared = [name for name in dict.fromkeys(names) if name in bad]
    if unknown and not cleared:
        on_it = f" Marked bad: {formatting.join_limited(list(bad), 20, ', ')}." if bad else ""
        raise RequestError(f"{unknown[0]} is not marked bad in '{runs_dir}'.{on_it} [CD1302]")
    cleared = cleared or list(bad)
    try:
        bad_nodes.clear(runs_dir, cleared)
    except OSError as error:
        raise _Unreadable(runs_dir, error) from None
    click.echo(f"cleared {', '.join(cleared)}" if cleared else "no bad nodes to clear")
    if unknown:
        click.echo(
            f"clusterddp: not marked bad: {formatting.join_limited(unknown, 20, ', ')}", err=True
        )


class _Unreadable(ClusterDDPError):
    """The list of bad nodes cannot be read or written."""

    code = "CD1302"

    def __init__(self, root: Path, error: OSError) -> None:
        super().__init__(f"{root / bad_nodes.FILE_NAME}: {error.strerror}.")


def _read(root: Path) -> dict[str, BadNode]:
    try:
        return bad_nodes.read(root)
    except OSError as error:
        raise _Unreadable(root, error) from None


def _row(node: BadNode, now: float) -> tuple[str, ...]:
    return (
        formatting.line(node.host),
        formatting.line(node.by),
        formatting.duration(now - node.time),
        formatting.duration(node.expires - now),
        formatting.line(node.run),
        "-" if node.attempt is None else str(node.attempt),
        formatting.line(node.reason),
    )

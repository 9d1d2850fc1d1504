"""`clusterddp site`: shows settings and sources; lists and installs files for public clusters."""

import dataclasses
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from clusterddp.cli.commands import submit
from clusterddp.cli.options import Completed, given_by
from clusterddp.errors import OptionError, RequestError
from clusterddp.launchers import SHIPPED
from clusterddp.request import options, sites
from clusterddp.request.options import Given, Settings
from clusterddp.request.spec import OPTIONS
from clusterddp.submission.fields import job_spec, template_folder


def _names(_ctx: click.Context, _incomplete: str) -> Iterable[str]:
    return sites.read_sites()


@click.group(name="site", invoke_without_command=True)
@click.option("--site", metavar="FILE", help="site.cfg to use instead.")
@click.option("--cluster", metavar="NAME", help="Section [cluster:NAME] of site.cfg to use.")
@click.option("--all", "show_all", is_flag=True, help="Show defaults as well.")
@click.option("--json", "as_json", is_flag=True, help="Print all settings as JSON.")
@click.pass_context
def command(
    context: click.Context, site: str | None, cluster: str | None, show_all: bool, as_json: bool
) -> None:
    """Show the settings that differ from the defaults, and their sources.

    'clusterddp site list' lists files for public clusters, 'clusterddp site use NAME' installs one.

    Only one site.cfg is read, the first of --site, $CLUSTERDDP_SITE, ./site.cfg,
    ~/.config/clusterddp/site.cfg and /etc/clusterddp/site.cfg. The others are listed as skipped.

    Exit codes: 0 a submission accepts these settings, 2 it would refuse one of them.
    """
    if context.invoked_subcommand:
        own = {"--site": site, "--cluster": cluster, "--all": show_all, "--json": as_json}
        typed = [name for name, value in own.items() if value]
        if typed:
            word = context.invoked_subcommand
            listed = typed == ["--json"] and word == "list"
            raise RequestError(
                f"'site {word}' does not accept {', '.join(typed)} before '{word}'. "
                + ("Put --json after 'list'." if listed else "Remove it."),
                code="CD0103",
            )
        return
    args = [f"--{k}={v}" for k, v in (("site", site), ("cluster", cluster)) if v]
    try:
        ctx = submit.command.make_context("submit", args)
    except click.UsageError as error:
        raise RequestError(error.format_message(), code="CD0101") from None
    assert isinstance(ctx.obj, Settings)
    given = given_by(ctx)
    rows = {
        name: {"value": given.values[row.parameter], "source": given.source(row.parameter)}
        for name, row in sorted(OPTIONS.items())
    }
    used = ctx.obj.path
    others = options.unused_files(used, os.environ, Path.cwd()) if used else []
    if as_json:
        shown = {
            "site": str(used) if used else None,
            "ignored_files": [*map(str, others)],
            "settings": rows,
            "environment": dict(ctx.obj.environment),
        }
        click.echo(json.dumps(shown, indent=2))
    else:
        _print_table(ctx.obj, rows, others, show_all=show_all)
    _check(given)


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def list_sites(as_json: bool) -> None:
    """List the files for public clusters; a star marks the one for this cluster.

    It matches by ClusterName in slurm.conf or by the names of the login nodes. Each file and
    --json give the source and its date.

    Exit codes: 0 listed.
    """
    from clusterddp import formatting
    from clusterddp.slurm.site import cluster_name

    known = sites.read_sites()
    here = sites.fitting(known, cluster_name(os.environ), socket.gethostname())
    if as_json:
        listed = [
            {**dataclasses.asdict(site), "fits": site.name in here} for site in known.values()
        ]
        click.echo(json.dumps(listed, indent=2))
    elif known:
        rows = [
            ("*" if site.name in here else " ", site.name, site.title, site.tried)
            for site in known.values()
        ]
        click.echo(formatting.table([("", "NAME", "CLUSTER", "TESTED"), *rows]))


@command.command("use")
@click.argument("name", type=Completed("name", _names))
@click.option("--force", is_flag=True, help="Replace an existing file; it is renamed.")
def use_site(name: str, force: bool) -> None:
    """Install a site file.

    The file for the public cluster NAME becomes ~/.config/clusterddp/site.cfg. Fill in the lines
    that depend on the user, for example '# account ='.

    Exit codes: 0 installed, 2 there is no such file, or another one exists.
    """
    path, before = sites.use(name, os.environ, force=force)
    click.echo(path)
    if before:
        click.echo(f"clusterddp: the previous file is now {before}", err=True)
    click.echo(
        f"clusterddp: from the cluster's documentation, {sites.read_sites()[name].tried}. "
        "Fill in lines such as '# account =', then check: clusterddp site",
        err=True,
    )
    found = options.find_site(None, os.environ, Path.cwd())
    if found != path:
        click.echo(f"clusterddp: in this directory, {found} takes precedence over it", err=True)


def _check(given: Given) -> None:
    """Raise the errors of a submission with these settings, with the sources of the values."""
    spec = job_spec(given, "site")
    with given.naming_sources():
        folder = template_folder(given)
        if spec.template in SHIPPED or (folder and (folder / spec.template).is_file()):
            return
        raise OptionError(
            "--template",
            f": {spec.template!r} does not exist. Shipped templates: {', '.join(SHIPPED)}.",
        )


def _print_table(
    site: Settings,
    rows: Mapping[str, Mapping[str, object]],
    others: Sequence[Path],
    *,
    show_all: bool,
) -> None:
    click.echo(f"site.cfg: {site.path or 'none found'}")
    if others:
        click.echo(f"skipped: {', '.join(map(str, others))}")
    elif site.path is None:
        paths = options.site_file_paths(os.environ, Path.cwd())
        click.echo(f"searched: {', '.join(map(str, paths))}")
    if site.clusters:
        click.echo(f"clusters: {', '.join(site.clusters)}")
    if not show_all:
        rows = {name: row for name, row in rows.items() if row["source"] != options.DEFAULT}
        words = "All other settings" if rows else "All settings"
        click.echo(f"{words} have their defaults; 'clusterddp site --all' lists them.")
    width = max(map(len, rows), default=0)
    shown = {name: _shown(OPTIONS[name].text(row["value"])) for name, row in rows.items()}
    values = min(max(map(len, shown.values()), default=0), 40)
    for name, row in rows.items():
        click.echo(f"{name:{width}}  {shown[name]:{values}}  {row['source']}")
    for variable, value in site.environment.items():
        click.echo(f"{variable}={value}  {site.path} [environment]")


def _shown(value: object) -> str:
    if value in (None, ()):
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

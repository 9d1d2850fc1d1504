"""`clusterddp site`: every setting in force, and where it came from."""

import json
from collections.abc import Mapping

import click

from clusterddp.cli.commands import submit
from clusterddp.cli.job_spec import job_spec, template_folder
from clusterddp.cli.options import naming_sources, source
from clusterddp.errors import OptionError, RequestError
from clusterddp.launchers import SHIPPED
from clusterddp.request.options import Settings
from clusterddp.request.spec import OPTIONS


@click.command()
@click.option("--site", metavar="FILE", help="The site.cfg to use.")
@click.option("--cluster", metavar="NAME", help="The [cluster:NAME] of site.cfg to use.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(site: str | None, cluster: str | None, as_json: bool) -> None:
    """Show each setting in force and where it came from.

    site.cfg is looked for at --site, $CLUSTERDDP_SITE, ./site.cfg, the user's config folder
    (~/.config/clusterddp/site.cfg) and /etc/clusterddp/site.cfg; the first that is there is used.

    Exit codes: 0 a submission takes these settings as they are, 2 it would refuse one of them.
    """
    args = [f"--{k}={v}" for k, v in (("site", site), ("cluster", cluster)) if v]
    try:
        ctx = submit.command.make_context("submit", args)
    except click.UsageError as error:
        raise RequestError(error.format_message(), code="CD0101") from None
    assert isinstance(ctx.obj, Settings)
    rows = {
        name: {"value": ctx.params[row.parameter], "source": source(ctx, row.parameter)}
        for name, row in sorted(OPTIONS.items())
    }
    if as_json:
        path = str(ctx.obj.path) if ctx.obj.path else None
        shown = {"site": path, "settings": rows, "environment": dict(ctx.obj.environment)}
        click.echo(json.dumps(shown, indent=2))
    else:
        _print_table(ctx.obj, rows)
    _check(ctx)


def _check(ctx: click.Context) -> None:
    """Refuse what a submission with these settings would refuse, naming where it came from."""
    spec = job_spec(ctx, "site")
    with naming_sources(ctx):
        folder = template_folder(ctx)
        if spec.template in SHIPPED or (folder and (folder / spec.template).is_file()):
            return
        raise OptionError(
            "--template", f": {spec.template!r} is not found; shipped are {', '.join(SHIPPED)}."
        )


def _print_table(site: Settings, rows: Mapping[str, Mapping[str, object]]) -> None:
    click.echo(f"site.cfg: {site.path or 'none found'}")
    if site.clusters:
        click.echo(f"clusters: {', '.join(site.clusters)}")
    width = max(map(len, rows))
    values = max(len(_shown(row["value"])) for row in rows.values())
    for name, row in rows.items():
        click.echo(f"{name:{width}}  {_shown(row['value']):{min(values, 40)}}  {row['source']}")
    for variable, value in site.environment.items():
        click.echo(f"{variable}={value}  {site.path} [environment]")


def _shown(value: object) -> str:
    if value in (None, ()):
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

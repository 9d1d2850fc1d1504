"""Where the value of an option comes from: flag, CLUSTERDDP_*, SBATCH_*, site.cfg, default.

Click resolves the order by itself once its `default_map` holds SBATCH_* over site.cfg; this
module fills that map and lets every message and `clusterddp site` say the source by name.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from clusterddp.cli import sbatch_variables
from clusterddp.errors import RequestError
from clusterddp.request import site


class SettingsCommand(click.Command):
    """A command whose options can be set in site.cfg and by the submitter's SBATCH_* too.

    `groups` names the sections of --help with the parameters that stand in each.
    """

    def __init__(
        self, *args: Any, groups: Mapping[str, Sequence[str]] | None = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.groups = groups or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # completion: a broken site.cfg must not print anything
            with contextlib.suppress(RequestError):
                self._load_defaults(ctx, args)
        else:
            self._load_defaults(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            if error.param is not None and error.param.name and not ctx.resilient_parsing:
                where = source(ctx, error.param.name)
                if where not in ("flag", "default"):
                    message = f"{error.message} (from {where})"
                    raise type(error)(message, ctx, error.param) from None
            raise

    def _load_defaults(self, ctx: click.Context, args: list[str]) -> None:
        given = self._peek(ctx, list(args))
        path = site.find(given.get("site"), os.environ, Path.cwd())
        cluster = given.get("cluster") or os.environ.get("CLUSTERDDP_CLUSTER")
        ctx.obj = loaded = site.read(path, cluster, setting_names() if path else ())
        own = {parameter.name for parameter in self.params}
        ctx.default_map = {
            name: value
            for key, value in {**loaded.settings, **self._sbatch_settings()}.items()
            if (name := key.replace("-", "_")) in own
            for value in [_split(self, name, value)]
        }

    def _sbatch_settings(self) -> dict[str, str]:
        """Only a command that asks Slurm for something has a use for them."""
        asks = any(parameter.name == "partition" for parameter in self.params)
        return sbatch_variables.settings(os.environ) if asks else {}

    def _peek(self, ctx: click.Context, args: list[str]) -> dict[str, Any]:
        """--site and --cluster, read ahead of the others, whose defaults they decide."""
        if not any(arg.startswith(("--site", "--cluster")) for arg in args):
            return {}
        try:
            values, _, _ = self.make_parser(ctx).parse_args(args)
        except click.UsageError:
            return {}  # the parsing proper will say so
        return {k: v for k, v in values.items() if k in ("site", "cluster") and isinstance(v, str)}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {parameter.name: parameter for parameter in self.get_params(ctx)}
        for title, names in [*self.groups.items(), ("Options", list(left))]:
            rows = [
                row
                for name in names
                if (parameter := left.pop(name, None)) and (row := parameter.get_help_record(ctx))
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def setting_names() -> set[str]:
    """The keys that site.cfg can hold: the options of `submit` that describe a run."""
    from clusterddp.cli.commands import submit

    never = {"site", "cluster", "dry-run", "wait", "as-json", "run-name", "help", "command"}
    return {(p.name or "").replace("_", "-") for p in submit.command.params} - never


@contextlib.contextmanager
def naming_sources(ctx: click.Context) -> Iterator[None]:
    """Add to a message about an option where its value came from, if nobody has typed it."""
    try:
        yield
    except RequestError as error:
        found = re.match(r"--([a-z-]+)", str(error))
        name = found[1].replace("-", "_") if found else ""
        where = source(ctx, name) if name in ctx.params else "flag"
        if where in ("flag", "default"):
            raise
        raise RequestError(f"{error} (from {where})") from None


def source(ctx: click.Context, name: str) -> str:
    """Where a parameter's value came from, in words."""
    found = ctx.get_parameter_source(name)
    key = name.replace("_", "-")
    if found is ParameterSource.COMMANDLINE:
        return "flag"
    if found is ParameterSource.ENVIRONMENT:
        return f"CLUSTERDDP_{name.upper()}"
    if found is ParameterSource.DEFAULT_MAP or (found is None and name in (ctx.default_map or {})):
        variable = sbatch_variables.variable_of(key, os.environ)
        if variable:
            return variable
        assert isinstance(ctx.obj, site.Site)
        return ctx.obj.where(key)
    return "default"


def _split(command: click.Command, name: str, value: str) -> Any:
    """An option that can be repeated takes one item a line."""
    if any(p.name == name and getattr(p, "multiple", False) for p in command.params):
        return [line for line in value.split("\n") if line.strip()]
    return value

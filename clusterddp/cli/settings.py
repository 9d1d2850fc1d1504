"""Where the value of an option comes from: flag, CLUSTERDDP_*, SBATCH_*, site.cfg, default.

Click resolves the order by itself once its `default_map` holds SBATCH_* over site.cfg; this
module fills that map and lets every message and `clusterddp site` name the source. sbatch would let
SBATCH_* override the script's own directives, so they are read here, rendered, and kept out of the
submission (`slurm.environment`).
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from clusterddp.errors import OptionError, RequestError
from clusterddp.request import site
from clusterddp.request.options import BARE_DIRECTIVES, PASSED_ON
from clusterddp.request.spec import EXPEDITE, OPTIONS, REQUEST


class SettingsCommand(click.Command):
    """A command whose options can be set in site.cfg and by the submitter's SBATCH_* too.

    `groups` names further sections of --help, with the parameters that stand in each.
    """

    def __init__(
        self, *args: Any, groups: Mapping[str, Sequence[str]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._groups = groups or {}

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
        ctx.obj = loaded = site.read(path, cluster, OPTIONS)
        names = {parameter.name for parameter in self.params}
        asks_slurm = "partition" in names
        settings = {**loaded.settings, **(sbatch_settings(os.environ) if asks_slurm else {})}
        ctx.default_map = {
            row.parameter: _lines(value) if row.type is tuple else value
            for key, value in settings.items()
            if (row := OPTIONS[key]).parameter in names
        }

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
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in self._groups}
        for parameter in self.get_params(ctx):
            key = (parameter.name or "").replace("_", "-")
            given = (title for title, names in self._groups.items() if parameter.name in names)
            title = next(given, OPTIONS[key].group if key in OPTIONS else "Options")
            if record := parameter.get_help_record(ctx):
                sections.setdefault(title, []).append(record)
        for title, rows in sorted(sections.items(), key=lambda section: section[0] == "Options"):
            with formatter.section(title):
                formatter.write_dl(rows)


@contextlib.contextmanager
def naming_sources(ctx: click.Context) -> Iterator[None]:
    """Add to a message about an option where its value came from, if nobody has typed it."""
    try:
        yield
    except OptionError as error:
        name = error.option.removeprefix("--").replace("-", "_")
        where = source(ctx, name) if name in ctx.params else "flag"
        if where in ("flag", "default"):
            raise
        problem = str(error).removeprefix(error.option)
        raise OptionError(error.option, f"{problem} (from {where})") from None


def source(ctx: click.Context, name: str) -> str:
    """Where a parameter's value came from, in words."""
    origin = ctx.get_parameter_source(name)
    key = name.replace("_", "-")
    if origin is ParameterSource.COMMANDLINE:
        return "flag"
    if origin is ParameterSource.ENVIRONMENT:
        return f"CLUSTERDDP_{name.upper()}"
    if origin is ParameterSource.DEFAULT_MAP or (
        origin is None and name in (ctx.default_map or {})
    ):
        variable = _variable_of(key, os.environ)
        if variable:
            return variable
        assert isinstance(ctx.obj, site.Site)
        return ctx.obj.where(key)
    return "default"


_GPU_GRES = re.compile(r"(?:gres[:/])?gpu(?::(?P<type>[^:,=]+))??(?:[:=](?P<count>\d+))?")
_NO_REQUEUE = "SBATCH_NO_REQUEUE"


def sbatch_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that SBATCH_* variables give to options, by the option's name.

    Raises RequestError for an SBATCH_EXCLUSIVE that shares a node.
    """
    settings = {row.name: environ[row.variable] for row in REQUEST if row.variable in environ}
    if "exclusive" in settings:
        if settings["exclusive"] not in ("", "exclusive"):
            raise RequestError(
                f"SBATCH_EXCLUSIVE={settings['exclusive']}: only whole nodes can be asked for here;"
                " unset it, or use --exclusive."
            )
        settings["exclusive"] = "yes"  # sbatch takes the variable's being there as a yes
    # sbatch takes these two by their being there as well (a newer one heeds the word expedite);
    # the second of them wins.
    if "requeue" in settings:
        expedited = settings["requeue"].lower() == EXPEDITE
        settings["requeue"] = EXPEDITE if expedited else "yes"
    if _NO_REQUEUE in environ:
        settings["requeue"] = "no"
    gpus = _GPU_GRES.fullmatch(environ.get("SBATCH_GRES", ""))
    if gpus:
        kind = f"{gpus['type']}:" if gpus["type"] else ""
        settings.setdefault("gpus-per-node", f"{kind}{gpus['count'] or 1}")
        settings["gpu-request"] = "gres"
    return settings


def sbatch_directives(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the directives that SBATCH_* variables give, beside those of options."""
    directives = {
        directive: None if directive in BARE_DIRECTIVES else environ[name]
        for name, directive in PASSED_ON.items()
        if name in environ
    }
    gres = directives.get("gres")
    if gres and _GPU_GRES.fullmatch(gres):
        del directives["gres"]
    elif gres and "gpu" in gres:
        raise RequestError(
            f"SBATCH_GRES={gres}: unset it, and ask for the GPUs with --gpus-per-node and for the "
            "rest with --sbatch gres=…"
        )
    return directives


def unused_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the SBATCH_* variables that have no part in a submission."""
    known = {_NO_REQUEUE, *PASSED_ON, *(row.variable for row in REQUEST)}
    return sorted(name for name in environ if name.startswith("SBATCH_") and name not in known)


def _variable_of(key: str, environ: Mapping[str, str]) -> str | None:
    """Return the SBATCH_* variable that a setting comes from; None when none is set."""
    if OPTIONS[key].variable in environ:
        return OPTIONS[key].variable
    if key == "requeue" and _NO_REQUEUE in environ:
        return _NO_REQUEUE
    return "SBATCH_GRES" if key in sbatch_settings(environ) else None


def _lines(value: str) -> list[str]:
    """Return the items of an option that can be repeated, one a line."""
    return [line for line in value.split("\n") if line.strip()]

"""Where the value of an option comes from: flag, CLUSTERDDP_*, SBATCH_*, site.cfg, default.

Click resolves the order by itself once its `default_map` holds SBATCH_* over site.cfg; this
module fills that map and lets every message and `clusterddp site` say the source by name.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from clusterddp import site
from clusterddp.errors import RequestError

# sbatch's input variables (sbatch(1)) that have an option here. The others become further
# directives, but for those that would take the logs or the script away from the run.
SBATCH_SETTINGS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_EXPORT": "export",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_JOB_NAME": "job-name",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_TIMELIMIT": "time",
}
SBATCH_DIRECTIVES = {
    "SBATCH_ACCTG_FREQ": "acctg-freq",
    "SBATCH_CLUSTERS": "clusters",
    "SBATCH_CONTAINER": "container",
    "SBATCH_CORE_SPEC": "core-spec",
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_DELAY_BOOT": "delay-boot",
    "SBATCH_DISTRIBUTION": "distribution",
    "SBATCH_GPU_BIND": "gpu-bind",
    "SBATCH_GPU_FREQ": "gpu-freq",
    "SBATCH_GRES": "gres",
    "SBATCH_GRES_FLAGS": "gres-flags",
    "SBATCH_HINT": "hint",
    "SBATCH_MEM_BIND": "mem-bind",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_NETWORK": "network",
    "SBATCH_NO_REQUEUE": "no-requeue",
    "SBATCH_POWER": "power",
    "SBATCH_PROFILE": "profile",
    "SBATCH_REQUEUE": "requeue",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_SPREAD_JOB": "spread-job",
    "SBATCH_THREAD_SPEC": "thread-spec",
    "SBATCH_THREADS_PER_CORE": "threads-per-core",
    "SBATCH_USE_MIN_NODES": "use-min-nodes",
    "SBATCH_WAIT_ALL_NODES": "wait-all-nodes",
    "SBATCH_WCKEY": "wckey",
}
_BARE = {"no-requeue", "requeue", "spread-job", "use-min-nodes"}


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
        if not ctx.resilient_parsing:
            given = self._peek(ctx, list(args))
            path = site.find(given.get("site"), os.environ, Path.cwd())
            cluster = given.get("cluster") or os.environ.get("CLUSTERDDP_CLUSTER")
            ctx.obj = loaded = site.read(path, cluster, setting_names() if path else ())
            own = {parameter.name for parameter in self.params}
            ctx.default_map = {
                name: value
                for key, value in {**loaded.settings, **_sbatch_settings(os.environ)}.items()
                if (name := key.replace("-", "_")) in own
                for value in [_split(self, name, value)]
            }
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            if error.param is not None and error.param.name and not ctx.resilient_parsing:
                where = source(ctx, error.param.name)
                if where not in ("flag", "default"):
                    message = f"{error.message} (from {where})"
                    raise type(error)(message, ctx, error.param) from None
            raise

    def _peek(self, ctx: click.Context, args: list[str]) -> dict[str, Any]:
        """--site and --cluster, read ahead of the others, whose defaults they decide."""
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
    from clusterddp.cli import submit

    never = {"site", "cluster", "dry-run", "wait", "as-json", "run-name", "help", "command"}
    return {(p.name or "").replace("_", "-") for p in submit.command.params} - never


def source(ctx: click.Context, name: str) -> str:
    """Where a parameter's value came from, in words."""
    found = ctx.get_parameter_source(name)
    key = name.replace("_", "-")
    if found is ParameterSource.COMMANDLINE:
        return "flag"
    if found is ParameterSource.ENVIRONMENT:
        return f"CLUSTERDDP_{name.upper()}"
    if found is ParameterSource.DEFAULT_MAP or (found is None and name in (ctx.default_map or {})):
        for variable, setting in SBATCH_SETTINGS.items():
            if setting == key and os.environ.get(variable):
                return variable
        assert isinstance(ctx.obj, site.Site)
        return ctx.obj.where(key)
    return "default"


def sbatch_directives(environ: Mapping[str, str]) -> dict[str, str | None]:
    """The submitter's SBATCH_* that have no option here, as directives."""
    return {
        directive: None if directive in _BARE else environ[variable]
        for variable, directive in SBATCH_DIRECTIVES.items()
        if variable in environ
    }


def _sbatch_settings(environ: Mapping[str, str]) -> dict[str, str]:
    settings = {
        key: environ[variable]
        for variable, key in SBATCH_SETTINGS.items()
        if environ.get(variable) is not None
    }
    if "exclusive" in settings:
        if settings["exclusive"] not in ("", "exclusive"):
            raise RequestError(
                f"SBATCH_EXCLUSIVE={settings['exclusive']}: only whole nodes can be asked for "
                "here; unset it, or use --exclusive."
            )
        settings["exclusive"] = "yes"  # sbatch takes the variable's being there as a yes
    return settings


def _split(command: click.Command, name: str, value: str) -> Any:
    """An option that can be repeated takes one item a line."""
    if any(p.name == name and getattr(p, "multiple", False) for p in command.params):
        return [line for line in value.splitlines() if line.strip()]
    return value

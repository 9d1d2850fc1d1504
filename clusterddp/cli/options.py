"""Click options from the table of options, and the classes of commands that take them.

A value comes from the flag, CLUSTERDDP_*, SBATCH_*, site.cfg or the default. Click applies this
order, with SBATCH_* over site.cfg in `default_map`. Messages about a value, and `clusterddp site`,
name its source.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click
from click.core import ParameterSource

from clusterddp.errors import OptionError, RequestError
from clusterddp.request.options import (
    DEFAULT,
    EXPEDITE,
    FLAG,
    GENERAL,
    GROUPS,
    Choice,
    Duration,
    Given,
    Option,
    Settings,
    find_site,
    read_site,
)
from clusterddp.request.spec import OPTIONS, REQUEST

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., object])
FROM = "request_from"
_HELP_ALL = "help-all"


def options(
    rows: Iterable[Option], *, settings: bool = True, defaults: bool = True
) -> Callable[[F], F]:
    """Add options to a command, in this order.

    settings: also read each from CLUSTERDDP_<NAME>.
    defaults: use the defaults of omitted options; otherwise they are None.
    """

    def add(function: F) -> F:
        for row in reversed([*rows]):
            keywords = _keywords(row)
            if settings:
                keywords["envvar"] = f"CLUSTERDDP_{row.parameter.upper()}"
            if not defaults:
                keywords |= {"default": None, "show_default": False}
            others = row.flags[1:]
            both = f"{row.name}/--no-{row.name}" if row.negatable else row.name
            function = click.option(f"--{both}", *others, row.parameter, **keywords)(function)
        return function

    return add


def given_by(ctx: click.Context) -> Given:
    """Return the given option values, including the values of --config."""
    settings = ctx.obj if isinstance(ctx.obj, Settings) else Settings()
    sources = {name: source(ctx, name) for name in ctx.params if not _is_default(ctx, name)}
    given = Given(ctx.params, sources, ctx.meta.get("command"), settings.environment, os.environ)
    if not ctx.params.get(FROM):
        return given
    from clusterddp.cli import request_file

    return request_file.apply_config(given, ctx.params[FROM])


JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
WAIT_OPTION = click.option("--wait", is_flag=True, help="Follow the run; exit with its code.")


def dry_run_option(prints: str) -> Callable[[F], F]:
    """Return --dry-run. prints: what it prints, and what it does not do."""
    return click.option("--dry-run", is_flag=True, help=f"Print {prints}.")


def config_option(function: F) -> F:
    """Add --config, whose values `given_by` merges."""
    return click.option(
        "--config", FROM, metavar="RUN|FILE.toml", help="Start from the options of a run or a file."
    )(function)


def site_options(function: F) -> F:
    """Add --site and --cluster, which `SettingsCommand` reads before the other options."""
    for name, metavar, text in (
        ("--cluster", "NAME", "Section [cluster:NAME] of site.cfg to use."),
        ("--site", "FILE", "site.cfg to use; see 'clusterddp site'."),
    ):
        function = click.option(name, metavar=metavar, expose_value=False, help=text)(function)
    return function


class GroupedCommand(click.Command):
    """A command whose --help lists options in groups, one line each if possible."""

    titles: ClassVar[dict[str, str]] = {}
    """Groups of the command's own parameters, by name; General by default."""
    common: ClassVar[tuple[str, ...]] = ()
    """Parameters that --help shows if the command has --help-all; empty for all."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups, or only the common ones."""
        named = {parameter.name or "": parameter for parameter in self.get_params(ctx)}
        titles = {row.parameter: row.group for row in OPTIONS.values()} | self.titles
        if self.common and not ctx.meta.get(_HELP_ALL):
            named = {name: named[name] for name in self.common} | dict([*named.items()][-1:])
            titles = dict.fromkeys(named, "Common options")
        sections: dict[str, list[tuple[str, str]]] = {
            title: [] for title in ("Common options", *self.titles.values(), *GROUPS)
        }
        for name, parameter in named.items():
            if record := _columns(parameter, ctx):
                sections[titles.get(name, GENERAL)].append(record)
        filled = {title: records for title, records in sections.items() if records}
        for title, records in filled.items():
            with formatter.section(title if len(filled) > 1 or self.common else "Options"):
                formatter.write_dl(records, col_max=24)


def help_all_option(function: F) -> F:
    """Add --help-all to a command with `common` options."""

    def show(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_HELP_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show all options and exit.",
    )(function)


class SettingsCommand(GroupedCommand):
    """A command whose options can also be set in site.cfg and by SBATCH_* variables."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Completion must print nothing, even if site.cfg is broken.
        with contextlib.suppress(*[RequestError] * ctx.resilient_parsing):
            self._load_settings(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            where = source(ctx, error.param.name or "") if error.param else "flag"
            if where in ("flag", "default"):
                raise
            raise type(error)(f"{error.message} (from {where})", ctx, error.param) from None
        except OptionError as error:
            where = source(ctx, error.option.removeprefix("--").replace("-", "_"))
            raise error if where in (FLAG, DEFAULT) else error.saying(f"(from {where})") from None

    def _load_settings(self, ctx: click.Context, args: list[str]) -> None:
        given = self._peek(ctx, list(args))
        path = find_site(given.get("site"), os.environ, Path.cwd())
        cluster = given.get("cluster") or os.environ.get("CLUSTERDDP_CLUSTER")
        settings = read_site(path, cluster, OPTIONS)
        parameters = {parameter.name for parameter in self.params}
        if "partition" in parameters:  # only commands that request Slurm resources use SBATCH_*
            settings = settings.with_sbatch(os.environ, REQUEST)
        ctx.obj = settings
        ctx.default_map = {
            OPTIONS[name].parameter: _items(value) if OPTIONS[name].type is tuple else value
            for name, value in settings.values.items()
            if OPTIONS[name].parameter in parameters
        }

    def _peek(self, ctx: click.Context, args: list[str]) -> dict[str, str]:
        """Read --site and --cluster first, because they decide the defaults of the others."""
        if not any(arg.startswith(("--site", "--cluster")) for arg in args):
            return {}
        try:
            values, _, _ = self.make_parser(ctx).parse_args(args)
        except click.UsageError:
            return {}  # the actual parsing reports it
        return {k: v for k, v in values.items() if k in ("site", "cluster") and isinstance(v, str)}


class WithCommand(SettingsCommand):
    """A command that takes all words after `--` as COMMAND, unchanged."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        cut = [*args, "--"].index("--")
        ctx.meta["command"] = tuple(args[cut + 1 :])
        if cut < len(args) and not args[cut + 1 :]:
            raise click.UsageError("there is no COMMAND after '--'.", ctx)
        return super().parse_args(ctx, args[:cut])


def source(ctx: click.Context, name: str) -> str:
    """Return the source of a parameter's value, in words."""
    origin = ctx.get_parameter_source(name)
    if origin is ParameterSource.COMMANDLINE:
        return FLAG
    if origin is ParameterSource.ENVIRONMENT:
        return f"CLUSTERDDP_{name.upper()}"
    if origin is ParameterSource.DEFAULT_MAP:
        assert isinstance(ctx.obj, Settings)
        return ctx.obj.sources[name.replace("_", "-")]
    return DEFAULT


def _columns(parameter: click.Parameter, ctx: click.Context) -> tuple[str, str] | None:
    """Return the two columns of a parameter in --help: what to type, and its help."""
    if not isinstance(parameter, click.Option) or not (record := parameter.get_help_record(ctx)):
        return None
    short = [name for name in parameter.opts if name[1] != "-"]
    typed = ", ".join([*short, *[name for name in parameter.opts if name[1] == "-"]])
    if parameter.secondary_opts:
        typed = typed.replace("--", "--[no-]")
    elif isinstance(parameter, RequeueOption):
        typed = parameter.FORM
    elif not parameter.is_flag:
        typed += f" {parameter.metavar or _value_name(parameter.type)}"
    text, _, extra = record[1].rpartition("  [")
    if not text:
        return typed, record[1]
    # Click puts words for a default in parentheses, and adds ranges, which the refusal names.
    items = [item.replace("(", "").replace(")", "") for item in extra.rstrip("]").split("; ")]
    kept = "; ".join(item for item in items if ": " in item or item == "required")
    return typed, f"{text} [{kept}]" if kept else text


def _value_name(kind: Any) -> str:
    if isinstance(kind, click.Choice):
        return "|".join(kind.choices)
    return str({"integer": "N", "float": "X"}.get(kind.name.partition(" ")[0], kind.name.upper()))


def _is_default(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) in (None, ParameterSource.DEFAULT)


def _items(value: str) -> list[str]:
    """Return the items of a repeatable option, one per line."""
    return [line for line in value.split("\n") if line.strip()]


class Line(click.types.StringParamType):
    """An item of a list; an environment variable has one item per line."""

    name = "text"

    def split_envvar_value(self, rv: str) -> list[str]:
        return [line for line in rv.split("\n") if line]


class Completed(click.types.StringParamType):
    """Text with completion of words and, with `files`, of files."""

    def __init__(
        self, name: str, words: Callable[[click.Context, str], Iterable[str]], files: bool = False
    ) -> None:
        self.name = name
        self._words = words
        self._files = files

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        words = [word for word in self._words(ctx, incomplete) if word.startswith(incomplete)]
        files = self._files and not (words and incomplete)
        more = [CompletionItem(incomplete, type="file")] if files else []
        return [*map(CompletionItem, words), *more]


class DurationType(click.types.StringParamType):
    """A duration, as seconds."""

    name = "duration"

    def __init__(self, form: Duration, default: tuple[Any, Any] = ("", 0)) -> None:
        """default: the text shown, and its seconds."""
        self._form, self._default = form, default

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the seconds of a text. Raises OptionError if it is not a duration."""
        if value == self._default[0]:  # read without compiling a pattern
            return self._default[1]
        option = param.opts[0] if param else ""
        return self._form.parse(option, value) if isinstance(value, str) else value


class Requeue(click.types.StringParamType):
    """Yes, no or `expedite`, from a flag, a variable or site.cfg."""

    name = EXPEDITE

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return True, False or `expedite`."""
        try:
            return OPTIONS["requeue"].parse(value)
        except OptionError as error:
            self.fail(str(error).removeprefix(f"{error.option}: "), param, ctx)


class RequeueOption(click.Option):
    """`--requeue`, `--requeue=expedite` and `--no-requeue`, as in sbatch."""

    FORM = f"--[no-]requeue[={EXPEDITE}]"

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Register all three forms for one value."""
        super().add_to_parser(parser, ctx)
        parser.add_option(
            obj=self, opts=["--no-requeue"], dest=self.name, action="store_const", const="no"
        )
        parse = parser.parse_args
        parser.parse_args = lambda args: parse(_with_value(args))


def _with_value(args: list[str]) -> list[str]:
    """Replace a bare `--requeue` by `--requeue=yes`: click would use the next word as its value."""
    cut = [*args, "--"].index("--")
    return [f"{arg}=yes" if arg == "--requeue" else arg for arg in args[:cut]] + args[cut:]


def _partitions(_ctx: click.Context, incomplete: str) -> list[str]:
    """Return the cluster's partitions, appended to those already typed."""
    from clusterddp.slurm.client import partitions

    before, comma, _ = incomplete.rpartition(",")
    names = [name for name in partitions() if name not in before.split(",")]
    return [f"{before}{comma}{name}" for name in names]


def _templates(ctx: click.Context, _incomplete: str) -> Iterable[str]:
    """Return the shipped templates and those of --template-dir."""
    from clusterddp.launchers import SHIPPED

    folder = ctx.params.get("template_dir")
    own = sorted(path.name for path in Path(folder).glob("*.j2")) if folder else []
    return dict.fromkeys([*SHIPPED, *own])


_SPECIAL: dict[str, dict[str, Any]] = {
    "partition": {"type": Completed("partition", _partitions)},
    "template": {"type": Completed("template", _templates, files=True)},
    "requeue": {"type": Requeue(), "cls": RequeueOption},
}


def _shown_default(value: object) -> bool | str:
    if isinstance(value, float):
        return f"{value:g}"
    return "on" if value is True else value is not False


def _keywords(row: Option) -> dict[str, Any]:
    """Return the keyword arguments of click.option."""
    keywords = {
        "help": row.help,
        "metavar": row.metavar,
        "default": row.default,
        "show_default": row.shown or _shown_default(row.default),
        "type": row.type,
    }
    if row.name in _SPECIAL:
        keywords |= _SPECIAL[row.name]
    elif row.type is bool:
        keywords["is_flag"] = True
    elif row.type is tuple:
        keywords |= {"type": Line(), "multiple": True}
    elif isinstance(row.form, Duration):
        shown = row.text(row.default)
        keywords |= {"type": DurationType(row.form, (shown, row.default)), "default": shown}
    elif isinstance(row.form, Choice):
        names = row.form.names
        keywords["type"] = (
            Completed("name", lambda _ctx, _word: names) if row.metavar else click.Choice(names)
        )
    if row.bare:
        keywords |= {"is_flag": False, "flag_value": row.bare}
    return keywords

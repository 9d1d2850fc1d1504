"""Click's options from the table of options, and what they complete to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from clusterddp.request.options import Choice, Option
from clusterddp.request.recipes import RECIPES
from clusterddp.request.spec import EXPEDITE
from clusterddp.request.train_config import TRAINING, TrainConfig

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


def options(
    rows: Iterable[Option], *, settings: bool = True, defaults: bool = True
) -> Callable[[F], F]:
    """Add these options to a command, in their order.

    settings: each is also read from CLUSTERDDP_<NAME>. defaults: one that nobody has given has its
    default; without them it is None.
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


def config_from(params: Mapping[str, Any], ctx: click.Context) -> TrainConfig:
    """Return the checked configuration that a command's parameters give; others are left aside.

    A recipe gives those that have their default in `ctx`, the command's. Raises RequestError for
    a value that is not valid.
    """
    names = [row.parameter for row in TRAINING]
    values = {name: params[name] for name in names if params[name] is not None}
    for name, value in recipe_settings(params["recipe"]).items():
        if ctx.get_parameter_source(name) is ParameterSource.DEFAULT:
            values[name] = value
    return TrainConfig(**values)


def recipe_settings(name: str | None) -> Mapping[str, Any]:
    """Return what a recipe gives to fields of TrainConfig, which itself refuses an unknown name."""
    return RECIPES[name].settings if name in RECIPES else {}


class Line(click.types.StringParamType):
    """One item of a list; in an environment variable, items stand on lines of their own."""

    name = "text"
    envvar_list_splitter = "\n"

    def split_envvar_value(self, rv: str) -> list[str]:
        return [line for line in rv.split("\n") if line]


class Completed(click.types.StringParamType):
    """Text for which words, and with `files` also files, are offered."""

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


class Requeue(click.types.StringParamType):
    """Yes, no or `expedite`, from a flag, a variable or site.cfg."""

    name = EXPEDITE

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return True, False or `expedite`."""
        word = str(value).strip().lower()
        if word != EXPEDITE and word not in _WORDS:
            self.fail(f"{value!r} is neither yes, no nor {EXPEDITE}.", param, ctx)
        return _WORDS.get(word, EXPEDITE)


_WORDS = {
    **dict.fromkeys(("yes", "true", "on", "1", "y", "t"), True),
    **dict.fromkeys(("no", "false", "off", "0", "n", "f"), False),
}


class RequeueOption(click.Option):
    """`--requeue`, `--requeue=expedite` and `--no-requeue`, as sbatch has them."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Register all forms for one value."""
        super().add_to_parser(parser, ctx)
        parser.add_option(
            obj=self, opts=["--no-requeue"], dest=self.name, action="store_const", const="no"
        )
        parse = parser.parse_args
        parser.parse_args = lambda args: parse(_with_value(args))

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the two columns of --help."""
        record = super().get_help_record(ctx)
        return record and (f"--requeue[={EXPEDITE}] / --no-requeue", record[1])


def _with_value(args: list[str]) -> list[str]:
    """Spell a bare `--requeue` out: click would take the word after it as its value."""
    cut = args.index("--") if "--" in args else len(args)
    return [f"{arg}=yes" if arg == "--requeue" else arg for arg in args[:cut]] + args[cut:]


def _partitions(_ctx: click.Context, incomplete: str) -> list[str]:
    """Return the live cluster's partitions, behind those that are typed already."""
    from clusterddp.slurm.queries import partitions

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


def _keywords(row: Option) -> dict[str, Any]:
    """Return the keyword arguments of click.option."""
    keywords: dict[str, Any] = {
        "help": row.help,
        "metavar": row.metavar,
        "default": row.default,
        "show_default": row.shown or row.type is not bool or row.negatable,
        "type": row.type,
    }
    if row.name in _SPECIAL:
        keywords |= _SPECIAL[row.name]
    elif row.type is bool:
        keywords["is_flag"] = True
    elif row.type is tuple:
        keywords |= {"type": Line(), "multiple": True}
    elif isinstance(row.form, Choice):
        names = row.form.names
        keywords["type"] = (
            Completed("name", lambda _ctx, _word: names) if row.metavar else click.Choice(names)
        )
    if row.bare:
        keywords |= {"is_flag": False, "flag_value": row.bare}
    return keywords

"""Messages for a mistyped command line: click's errors in the style of ours, with a suggestion."""

import contextlib
import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import click

from clusterddp.errors import coded
from clusterddp.request.options import NO_REQUEUE, PASSED_ON, REPLACED_FLAGS, SHORT_FORMS
from clusterddp.request.spec import OPTIONS, REQUEST
from clusterddp.slurm.forms import BATCH_VARIABLE

_OTHER_NAMES = {
    **dict.fromkeys(("jobs", "list", "ls", "ps", "queue", "squeue"), "runs"),
    **dict.fromkeys(("resubmit", "requeue", "restart"), "resume"),
    **dict.fromkeys(("run", "sbatch", "sweep"), "submit"),
    **dict.fromkeys(("kill", "scancel"), "cancel"),
    **dict.fromkeys(("delete", "remove"), "rm"),
    "wait": "logs -f",
    "help": "--help",
}
"""Commands by names that they have elsewhere."""
_NO_COMMAND = {
    "debug": "For your own program: clusterddp submit --launcher local -- COMMAND",
    "compare": "For your own program, submit each variant, then: clusterddp report RUN RUN",
}
"""Advice of the commands that run only the built-in training."""
_REFUSED_VALUES = {
    r"a valid integer( range)?\.": "valid. Use a whole number.",
    r"a valid float( range)?\.": "valid. Use a number.",
    r"in the range x>=(\d+)\.": r"valid. Use \1 or more.",
    r"in the range (\d+)<=x<=(\d+)\.": r"valid. Use \1 to \2.",
}
"""Click's words about a value after `is not`, and ours."""


def no_such_command(name: str, commands: Sequence[str]) -> str:
    """Return the message for an unknown command, with a similar one or one of the same meaning."""
    near = _OTHER_NAMES.get(name, "".join(difflib.get_close_matches(name, commands, n=1)))
    hint = f" Did you mean {near!r}?" if near else " See 'clusterddp --help'."
    return f"no such command {name!r}.{hint}"


def submit_message(error: click.UsageError) -> str:
    """Return what to type instead of an option or file of sbatch; empty for other errors."""
    if isinstance(error, click.NoSuchOption):
        name = SHORT_FORMS.get(error.option_name, error.option_name.removeprefix("--"))
        use = REPLACED_FLAGS.get(name)
        return f"{error.option_name} is an option of sbatch. Use {use}." if use else ""
    extra = re.search(r"unexpected extra argument.*\((\S+).*\)", error.message)
    if type(error) is not click.UsageError or not extra:
        return ""
    with contextlib.suppress(OSError):
        if re.match(r"(?s)#!.*\n#SBATCH ", Path(extra[1]).read_text(errors="replace")):
            line = f"clusterddp import {shlex.quote(extra[1])}"
            return f"{extra[1]} is an sbatch file. '{line}' converts it into a submit line."
    return f"{error.message}. Put the command after '--': submit [OPTIONS] -- COMMAND."


def warn_of_variables(names: Iterable[str]) -> None:
    """Warn of SBATCH_* variables that a submission ignores, and misspelt CLUSTERDDP_* ones."""
    used = {NO_REQUEUE, *PASSED_ON, *(row.variable for row in REQUEST)}
    own = [row.parameter.upper() for row in OPTIONS.values()]
    for name in sorted(names):
        word = name.removeprefix("CLUSTERDDP_")
        near = difflib.get_close_matches(word, own, n=1, cutoff=0.8) if word != name else []
        if name.startswith("SBATCH_") and name not in used:
            use = "Use submit's options, or unset it."
        elif near and word not in own and name != BATCH_VARIABLE:
            use = f"Did you mean CLUSTERDDP_{near[0]}?"
        else:
            continue
        click.echo(f"clusterddp: warning: {name} is ignored. {use} [CD0206]", err=True)


def usage_message(error: click.ClickException) -> str:
    """Return what click found wrong as one of our messages, with its code."""
    param = getattr(error, "param", None)
    if param and not isinstance(error, click.MissingParameter):
        return coded(_value_message(error.message, param), "CD0102")
    return coded(_line_message(error), "CD0101")


def _value_message(text: str, param: click.Parameter) -> str:
    """Return click's refusal of a value in the form of ours: `--nodes: 'x' is not valid. …`."""
    for theirs, ours in _REFUSED_VALUES.items():
        text = re.sub(f"(?<=is not ){theirs}", ours, text)
    text = re.sub(r"(?:File|Path) ('.*') does not exist", r"there is no file \1", text)
    form = getattr(OPTIONS.get((param.name or "").replace("_", "-")), "form", None)
    text = text.replace("Use a whole number.", f"Use {getattr(form, 'noun', 'a whole number')}.")
    head, one_of, names = text.partition(" is not one of ")
    names = names.replace("'", "")
    is_option = isinstance(param, click.Option)
    option = max(param.opts, key=len) if is_option else param.human_readable_name
    return f"{option}: {head[:1].lower()}{head[1:]}{one_of}{names}"


def _line_message(error: click.ClickException) -> str:
    """Return what click found wrong with the command line, and the help to see."""
    if isinstance(error, click.BadOptionUsage) and "requires an argument" in error.message:
        return f"{error.option_name} needs a value."
    unknown = error.option_name if isinstance(error, click.NoSuchOption) else ""
    message = " ".join((error.message if unknown else error.format_message()).split())
    if isinstance(error, click.MissingParameter) and error.param:
        named = re.search("[A-Z]{2,}|--[a-z-]+", error.param.human_readable_name)
        message = f"{named[0] if named else error.param.opts[0]} is missing."
    elif message[1:2].islower():
        message = message[0].lower() + message[1:]
    message += "" if message.endswith((".", "?")) else "."
    ctx = getattr(error, "ctx", None)
    if ctx and "unexpected extra arg" in message and ctx.info_name in _NO_COMMAND:
        return f"{ctx.info_name!r} runs only the built-in training. {_NO_COMMAND[ctx.info_name]}"
    if unknown and ctx and (near := _near_option(unknown, ctx)):
        return f"{message} Did you mean {near!r}?"
    if ctx is None or "Did you mean" in message or " --help'" in message:
        return message
    return f"{message} See '{ctx.command_path} --help'."


def _near_option(name: str, ctx: click.Context) -> str:
    """Return a similar option of the command, or a command that has this option; or empty."""
    own = [flag for param in ctx.command.params for flag in param.opts]
    begun = [flag for flag in own if len(name) > len("--x") and flag.startswith(name)]
    if near := difflib.get_close_matches(name, own, n=1, cutoff=0.75) or begun:
        return near[0]
    if not name.startswith("--"):
        return ""
    cli = cast("click.Group", ctx.find_root().command)
    others = {each: cli.get_command(ctx, each) for each in cli.list_commands(ctx)}
    for each, group in [*others.items()]:
        others |= {f"{each} {sub}": part for sub, part in getattr(group, "commands", {}).items()}
    has = [each for each, c in others.items() if c and any(name in p.opts for p in c.params)]
    return f"clusterddp {has[0]} {name}" if len(has) == 1 else ""

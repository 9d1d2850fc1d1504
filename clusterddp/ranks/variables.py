"""Numbers and texts out of a mapping of environment variables, and how errors show them.

Every error is a DistEnvError that names the variables and their values as they were seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from clusterddp.errors import DistEnvError, RequestError

PRINTABLE = re.compile(r"[!-~]+")
_INTEGER = re.compile(r"[0-9]{1,19}")
# Bash exports its functions too, under such a name; their bodies are no variable's second line.
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|BASH_FUNC_[^\s=]+(?:%%|\(\)))=")
_DECLARATION = re.compile(r"\s*(?:declare|typeset|export)\s")


def integer(environ: Mapping[str, str], name: str) -> int:
    value = text(environ, name)
    if not _INTEGER.fullmatch(value):
        contradiction(list_shown(environ, (name,)), "a whole number of 0 or more")
    return int(value)


def text(environ: Mapping[str, str], name: str) -> str:
    if not environ[name]:
        raise DistEnvError(
            f"{name} is set but empty: expected a value. Set it, or remove it with 'unset {name}'."
        )
    return environ[name]


def first_set(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in environ), None)


def contradiction(seen: Sequence[str], expected: str) -> NoReturn:
    raise DistEnvError(
        f"{', '.join(seen)}: expected {expected}. Variables of a surrounding job may have leaked "
        "in: unset them, or start the task with srun or torchrun from a clean shell."
    )


def shown(environ: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(list_shown(environ, names))


def list_shown(environ: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return NAME=value of those that are set."""
    return [f"{name}={shown_value(environ[name])}" for name in names if name in environ]


def shown_value(value: str) -> str:
    """Return a value for a message: escaped where it is not plain, shortened where it is long."""
    short = value[:80] if PRINTABLE.fullmatch(value) else ascii(value[:80])
    return f"{short}..." if len(value) > 80 else short


def parse_environment(text: str) -> dict[str, str]:
    """Read the output of `env` or `env -0`; values of several lines are kept whole.

    Raises RequestError where nothing is a variable, or the lines are those of several tasks.
    """
    text = text.replace("\r\n", "\n")
    if _DECLARATION.match(text):
        raise RequestError(
            "the pasted environment is a shell's own list, with the shell's quotes; paste the "
            "output of 'env' or 'env -0'."
        )
    environ: dict[str, str] = {}
    name = ""
    end = "\0" if "\0" in text else "\n"
    for record in text.split(end):
        assigned = _ASSIGNMENT.match(record)
        if assigned:
            name, value = assigned[1], record[assigned.end() :]
            if name in ("SLURM_PROCID", "RANK") and environ.get(name, value) != value:
                raise RequestError(
                    f"{name} is {environ[name]!r} and {value!r} in the pasted environment: "
                    "expected that of one task. Paste one, from 'srun --ntasks=1 env', say."
                )
            environ[name] = value
        elif name and record and end == "\n":
            # `env` quotes nothing: a line that assigns nothing goes on with the value before it.
            environ[name] += f"\n{record}"
    if not environ:
        raise RequestError(
            "the pasted environment holds no NAME=value line; paste the output of 'env'."
        )
    return environ

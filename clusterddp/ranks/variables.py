"""Numbers and texts out of a mapping of environment variables, and how errors show them.

Every error is a DistEnvError that names the variables and their values as they were seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from clusterddp.errors import DistEnvError

PRINTABLE = re.compile(r"[!-~]+")
_INTEGER = re.compile(r"[0-9]{1,19}")


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

"""Writes this process's environment: no other module does."""

import os
from collections.abc import Iterable, Mapping


def change(variables: Mapping[str, str], *, without: Iterable[str] = ()) -> None:
    """Remove some variables, then set others."""
    for name in list(without):
        os.environ.pop(name, None)
    os.environ.update(variables)


def replace(environ: Mapping[str, str]) -> None:
    """Let this be all of the environment."""
    os.environ.clear()
    os.environ.update(environ)

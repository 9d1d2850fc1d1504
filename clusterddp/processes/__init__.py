"""Groups of processes on one machine: start, signals and end.

Only the two functions below write this process's environment.
"""

import os
from collections.abc import Iterable, Mapping

START_METHODS = ("exec", "fork", "spawn", "forkserver")
"""Ways to start a process (`start_methods`)."""


def change_environment(variables: Mapping[str, str], *, without: Iterable[str] = ()) -> None:
    """Remove some variables, then set others."""
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(variables)


def replace_environment(environ: Mapping[str, str]) -> None:
    """Replace the whole environment."""
    os.environ.clear()
    os.environ.update(environ)

"""Groups of processes on one machine: how they start, get signals and end.

The two functions here alone write this process's environment.
"""

import os
from collections.abc import Iterable, Mapping

START_METHODS = ("exec", "fork", "spawn", "forkserver")
"""Ways in which a process can begin (`start_methods`)."""


def change_environment(variables: Mapping[str, str], *, without: Iterable[str] = ()) -> None:
    """Remove some variables, then set others."""
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(variables)


def replace_environment(environ: Mapping[str, str]) -> None:
    """Let this be all of the environment."""
    os.environ.clear()
    os.environ.update(environ)

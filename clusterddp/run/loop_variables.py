"""Variables by which a COMMAND finds clusterddp's loop (`loop`), and the loop its attempt."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import LOOP_VARIABLE
from clusterddp.version import bundle_file

_OFF = "off"
"""Value by which a person's own --env keeps all of this away; the other one is `JOB:PATH`."""


def show_loop(environ: MutableMapping[str, str], attempt: Attempt) -> None:
    """Let a COMMAND import the run's own clusterddp, behind what its PYTHONPATH names already."""
    if environ.get(LOOP_VARIABLE) == _OFF:
        return
    environ[LOOP_VARIABLE] = f"{environ.get('SLURM_JOB_ID', '')}:{attempt.path}"
    own = bundle_file()
    if own:
        value = environ.get("PYTHONPATH")
        parts = value.split(os.pathsep) if value else []  # an empty part is the current folder
        environ["PYTHONPATH"] = os.pathsep.join([*filter(_is_a_persons, parts), own])


def _is_a_persons(path: str) -> bool:
    """Return whether a part of PYTHONPATH is anything but the file of a run that submitted this."""
    name = Path(path).name
    return not (name.startswith("clusterddp-") and name.endswith(".pyz"))


def attempt_here(environ: Mapping[str, str]) -> Attempt | None:
    """Return the attempt of the run in which this process is; None outside of one.

    A job that was submitted from within another has inherited that one's variable.
    """
    job, _, path = environ.get(LOOP_VARIABLE, "").partition(":")
    if not path or job != environ.get("SLURM_JOB_ID", ""):
        return None
    return attempt_at(Path(path))


def attempt_at(path: Path) -> Attempt:
    """Return the attempt of a directory."""
    return Attempt(RunDir(path.parents[1]), int(path.name))

"""Launchers of a run's tasks, one module each, loaded when chosen."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from clusterddp.request.spec import JobSpec

if TYPE_CHECKING:  # a dry run needs no run
    from clusterddp.run.run_dir import RunDir

SHIPPED = {
    "ddp.sbatch.j2": "one srun task per rank (the default)",
    "torchrun.sbatch.j2": "one torchrun agent per node, which starts that node's ranks",
}
"""User templates that the package ships, each with a description."""


@dataclass(frozen=True, eq=False, repr=False)
class SentJob:
    """Job that a launcher has submitted."""

    job_id: str
    stop: Callable[[], None] | None = None
    """Set if the job lives only as long as this process: cancels it and waits for its end."""


class Launcher(Protocol):
    """Interface of every launcher, in two steps."""

    def prepare(self, spec: JobSpec, template_folder: Path | None) -> str:
        """Return the exact text to submit, which the dry run prints. Has no side effects."""

    def submit(self, spec: JobSpec, script: str, run: "RunDir") -> SentJob:
        """Submit the script. The run directory exists already, with its records."""


def load(name: str) -> Launcher:
    """Load the launcher of a name, one of `spec.LAUNCHERS`, from its module here."""
    return cast(Launcher, importlib.import_module(f"{__name__}.{name}"))


def full_name(template: str, folder: Path | None = None) -> str:
    """Return the file name of a template: `torchrun` gives `torchrun.sbatch.j2`.

    A template in the user's directory has precedence. Any other name is returned unchanged.
    """
    names = (template + ending for ending in ("", ".sbatch.j2", ".j2") if template)
    if name := next((name for name in names if folder and (folder / name).is_file()), None):
        return name
    return next((name for name in SHIPPED if name.split(".")[0] == template), template)

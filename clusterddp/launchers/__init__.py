"""Launchers of a run's tasks: one module each, loaded when it is chosen; the sbatch script."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from clusterddp.request.spec import JobSpec

if TYPE_CHECKING:  # a dry run reads no run
    from clusterddp.run.run_dir import RunDir

SHIPPED = {
    "ddp.sbatch.j2": "one srun task per rank (the default)",
    "torchrun.sbatch.j2": "one torchrun agent per node, which starts that node's ranks",
}
"""Templates for people that the package ships, each with a line about it."""


@dataclass(frozen=True, eq=False, repr=False)
class SentJob:
    """Job of a script that a launcher has sent."""

    job_id: str
    stop: Callable[[], None] | None = None
    """Set where the job lives only as long as this process: cancels it and waits for its end."""


class Launcher(Protocol):
    """Interface of every launcher: two steps."""

    def prepare(self, spec: JobSpec, template_folder: Path | None) -> str:
        """Give exactly the text to send; the dry run prints it. Touches nothing."""

    def submit(self, spec: JobSpec, script: str, run: "RunDir") -> SentJob:
        """Send it; the run directory is there already, with its records."""


def load(name: str) -> Launcher:
    """Load the launcher of that name: the module here, for each of `spec.LAUNCHERS`."""
    return cast(Launcher, importlib.import_module(f"{__name__}.{name}"))


def full_name(template: str, folder: Path | None = None) -> str:
    """Give the file name of a template: `torchrun` is `torchrun.sbatch.j2`.

    A template of the person's own folder comes before a shipped one; any other name stays as it is.
    """
    names = (template + ending for ending in ("", ".sbatch.j2", ".j2") if template)
    if name := next((name for name in names if folder and (folder / name).is_file()), None):
        return name
    return next((name for name in SHIPPED if name.split(".")[0] == template), template)

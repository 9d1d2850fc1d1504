"""What starts the tasks of a run: one module a launcher, loaded when it is chosen."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from clusterddp.request.spec import JobSpec
from clusterddp.run.run_dir import RunDir

# launcher -> module; a new launcher is one file, one line here and its name in spec.LAUNCHERS.
MODULES = {
    "sbatch": "clusterddp.launchers.sbatch",
    "submitit": "clusterddp.launchers.submitit",
    "local": "clusterddp.launchers.local",
}


@dataclass(frozen=True)
class Submission:
    """What a launcher did with a script."""

    job_id: str
    stop: Callable[[], None] | None = None
    """Set where the job lives only as long as this process: cancels it and waits for its end."""


class Launcher(Protocol):
    """The two steps of every launcher."""

    def prepare(self, spec: JobSpec, template_folder: Path | None) -> str:
        """Exactly what will be sent; the dry run prints it. Touches nothing."""

    def submit(self, spec: JobSpec, script: str, run: RunDir) -> Submission:
        """Send it; the run directory is there already, with its records."""


def load(name: str) -> Launcher:
    """The launcher of that name; its module must be one of `MODULES`."""
    return cast(Launcher, importlib.import_module(MODULES[name]))

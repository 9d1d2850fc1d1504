"""A training that waits at one of its steps until something has happened to it."""

import os
from pathlib import Path

from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from tests.waiting import wait_for

HOOKS = Path(__file__).parent / "campaign/hooks"
LONG = 200
"""Seconds for a job's start, or a training, on a machine that others use as well."""


class Hold:
    """Tasks that wait after their `step`-th step, in every attempt that comes by, until let go.

    Those of runs that are submitted with `env`. A checkpoint of that very step comes later; ranks
    that were asked to stop meanwhile do so before twice that step and two.
    """

    def __init__(self, folder: Path, step: int, *, until_told: bool = False) -> None:
        """until_told: the first task that was asked to stop lets all of them go."""
        self.step = step
        self.folder = folder / "holds"
        self.folder.mkdir(exist_ok=True)
        self._want = self.folder / f"want-step-{step}"
        self._want.touch()
        if until_told:
            self.until_told()

    @property
    def env(self) -> dict[str, str]:
        """Variables that bring a task to wait; others have no effect but on the import path."""
        paths = filter(None, [str(HOOKS), os.environ.get("PYTHONPATH")])
        return {"PYTHONPATH": os.pathsep.join(paths), "CAMPAIGN_HOLDS": str(self.folder)}

    @property
    def options(self) -> list[str]:
        """The same as options of `submit`, for tasks that do not have its environment."""
        return [f"--env={name}={value}" for name, value in self.env.items()]

    def wait(self, ranks: int) -> None:
        """Wait until so many ranks are at the step."""
        held = f"held-step-{self.step}.*"
        at_step = f"{ranks} ranks at step {self.step}"
        wait_for(lambda: len(list(self.folder.glob(held))) == ranks, at_step, LONG)

    @property
    def is_over(self) -> bool:
        """Whether the tasks were let go."""
        return not self._want.exists()

    def until_told(self) -> None:
        """Have the first task that was asked to stop, or was asked already, let all of them go."""
        self._want.write_text("until told")

    def release(self) -> None:
        self._want.unlink(missing_ok=True)

    def release_after_requeue(self, run: RunDir) -> None:
        """Let a run go on that Slurm has put back: once a task was told, or all were killed."""
        second = Attempt(run, 2).path
        wait_for(lambda: self.is_over or second.exists(), "the requeue", LONG)
        self.release()

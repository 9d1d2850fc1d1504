"""One W&B or MLflow run over all attempts of a COMMAND: ids and variables to resume it.

The variables are documented by W&B and MLflow; neither is imported here. W&B accepts an id of our
choice. MLflow assigns ids, so the first attempt creates a run with the program's interpreter in the
configured tracking store. tracked.json stores the ids.
"""

import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp import files, log
from clusterddp.run.run_dir import RunDir

WANDB, MLFLOW = "wandb", "mlflow"
_SECONDS = 120.0
"""Timeout of MLflow's import and its server's answer."""
_MAKE = """
import sys, mlflow
with mlflow.start_run(run_name=sys.argv[1]) as run:
    print("mlflow-run-id=" + run.info.run_id)
"""


@dataclass(frozen=True)
class Tracked:
    """tracked.json: the run's ids in the trackers; empty without one."""

    wandb: str = ""
    mlflow: str = ""


def expose_tracker(
    environ: MutableMapping[str, str],
    run: RunDir,
    trackers: Sequence[str],
    argv: Sequence[str],
    make: Callable[[Sequence[str], str, Mapping[str, str]], str] | None = None,
) -> None:
    """Set the variables with which rank 0's program resumes its tracked run, unless they are set.

    argv: the program. make: creates an MLflow run and returns its id. Errors are logged, and the
    program starts without the variables.
    """
    before = tracked = files.read(Tracked, run.tracked) or Tracked()
    if WANDB in trackers and "WANDB_RUN_ID" not in environ:
        tracked = replace(tracked, wandb=tracked.wandb or secrets.token_hex(8))
    if MLFLOW in trackers and "MLFLOW_RUN_ID" not in environ and not tracked.mlflow:
        tracked = replace(tracked, mlflow=(make or _make)(argv, run.name, environ))
    if tracked != before:
        try:
            files.write_record(run.tracked, tracked)
        except OSError as error:
            log.warning(f"the next start will not find this tracked run: {error} [CD0820]")
    if WANDB in trackers:
        wanted = {"WANDB_RUN_ID": tracked.wandb, "WANDB_RESUME": "allow", "WANDB_NAME": run.name}
        for name, value in wanted.items():
            environ.setdefault(name, value)
    if MLFLOW in trackers and tracked.mlflow:
        environ.setdefault("MLFLOW_RUN_ID", tracked.mlflow)


def _make(argv: Sequence[str], name: str, environ: Mapping[str, str]) -> str:
    """Create a run with the program's own MLflow; return its id, or an empty string on failure."""
    python = argv[0] if Path(argv[0]).name.startswith("python") else sys.executable
    try:
        done = subprocess.run(
            [python, "-c", _MAKE, name],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning(f"--report-to mlflow: cannot create a run: {error} [CD0820]")
        return ""
    for line in done.stdout.splitlines():
        if line.startswith("mlflow-run-id="):
            return line.partition("=")[2].strip()
    words = done.stderr.strip().splitlines()
    why = words[-1] if words else f"exit code {done.returncode}"
    log.warning(f"--report-to mlflow: {python} cannot create a run: {why} [CD0820]")
    return ""

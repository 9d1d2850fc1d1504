"""Checks of a login node: what this account, Slurm, the folders and the Python allow.

Nothing is queued or written. The questions are asked beside each other, and all together have
`MOST_SECONDS`: a file system that hangs costs its own line, not the others.
"""

import dataclasses
import os
import shutil
import signal
import sys
import time
from concurrent.futures import TimeoutError as NoResultError
from contextlib import suppress
from pathlib import Path

from clusterddp.doctor.diagnosis import BAD, GOOD, WARNING, Check, Diagnosis
from clusterddp.doctor.machine_checks import dataset, output_folder, python
from clusterddp.doctor.site_checks import beside, slurm
from clusterddp.errors import ClusterDDPError
from clusterddp.processes.table import processes
from clusterddp.request.spec import JobSpec

MOST_SECONDS = 60.0
"""Bound on all checks together."""


def examine(spec: JobSpec, template_folder: Path | None = None) -> Diagnosis:
    """Check the site for a request: its settings are those of a submission. Queues nothing.

    Ctrl-C ends the commands that are at work, too; this process can start no others then.
    """
    try:
        return _examined(spec, template_folder)
    except KeyboardInterrupt:
        _end_commands()
        raise


def _examined(spec: JobSpec, template_folder: Path | None) -> Diagnosis:
    deadline = time.monotonic() + MOST_SECONDS
    has_slurm = any(map(shutil.which, ("sbatch", "scontrol")))
    works = {
        "slurm": beside(lambda: slurm(spec, template_folder)) if has_slurm else None,
        "output folder": beside(lambda: output_folder(spec.run_dir, doubts=has_slurm)),
        "dataset": beside(lambda: dataset(spec, doubts=has_slurm)),
        "python": beside(lambda: python(spec)),
    }
    checks: list[Check] = []
    diagnosis = Diagnosis((), {})
    for name, work in works.items():
        if work is None:
            advice = "run it on a login node; submit --launcher local rehearses a run here"
            checks.append(Check(name, WARNING, "no sbatch on PATH: no Slurm here", advice))
            continue
        try:
            result = work.result(max(deadline - time.monotonic(), 0.0))
        except NoResultError:
            seen = f"no answer within {MOST_SECONDS:g} s"
            checks.append(Check(name, BAD, seen, "look whether a file system or Slurm hangs"))
        except (ClusterDDPError, OSError) as error:
            checks.append(Check(name, BAD, str(error), "mend what the message names"))
        else:
            if isinstance(result, Diagnosis):
                diagnosis = result
                checks += result.checks
            else:
                checks.append(result)
    has_gpus = any(check.facts.get("gpus") for check in checks)
    settings = {**diagnosis.settings}
    if any(check.name == "python" and check.verdict == BAD for check in checks):
        settings["python"] = ""
    checked = tuple(_held_against_gpus(check) if has_gpus else check for check in checks)
    return dataclasses.replace(diagnosis, checks=checked, settings=settings)


def _end_commands() -> None:
    """Kill what the checks have started, and have their threads start nothing more."""

    def refuse(event: str, _: object) -> None:
        if event == "subprocess.Popen":
            raise InterruptedError

    sys.addaudithook(refuse)
    for pid, process in processes().items():
        if process.parent == os.getpid():
            with suppress(OSError):  # it has gone
                # --python is the first of a group of its own, which a Ctrl-C does not reach.
                (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)


def _held_against_gpus(check: Check) -> Check:
    """Return the check of the Python, with a warning where it has no use for the site's GPUs."""
    if check.verdict != GOOD or check.facts.get("has_gpu_build", True):
        return check
    advice = "install a torch that is built for the GPUs of the partitions: this one uses CPUs"
    return dataclasses.replace(check, verdict=WARNING, advice=advice)

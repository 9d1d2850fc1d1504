"""Checks of a login node: the account, Slurm, the directories and the Python.

Nothing is queued or written. The checks run in parallel within `MAX_SECONDS`: a hanging file
system costs one line, not the others.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as NoResultError
from contextlib import suppress
from pathlib import Path

from clusterddp import formatting
from clusterddp.data import mnist
from clusterddp.doctor.site_checks import ERROR, OK, WARNING, Check, Diagnosis, in_thread, slurm
from clusterddp.errors import ClusterDDPError, DataError
from clusterddp.processes import hardware
from clusterddp.processes.hardware import LOCAL_TYPES, SHARED_TYPES, file_system_type
from clusterddp.processes.table import processes
from clusterddp.request.options import is_reference
from clusterddp.request.spec import JobSpec

MAX_SECONDS = 60.0
"""Time limit of all checks together."""
IMPORT_SECONDS = 45.0
"""Bound on the start of --python: importing torch is slow on a cold file system."""
SLOW_IMPORT_SECONDS = 20.0
MIN_BYTES, LOW_BYTES = 100 * 2**20, 10 * 2**30
MIN_INODES, LOW_INODES = 1_000, 10_000
"""Free space of the runs directory below which it is an error, or a warning."""
_IMPORT = """\
import os, threading
# Standard input closes when the command that started it ends.
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
import json, platform, torch
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    nccl = ""
cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
print()
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__,
    "cuda": cuda, "hip": hip, "nccl": nccl,
}))
"""


def examine(spec: JobSpec, template_folder: Path | None = None) -> Diagnosis:
    """Check the site with the settings of a request. Queues nothing.

    Ctrl-C also ends the commands in progress; this process can start no others afterwards.
    """
    try:
        return _examine(spec, template_folder)
    except KeyboardInterrupt:
        _end_commands()
        raise


def _examine(spec: JobSpec, template_folder: Path | None) -> Diagnosis:
    deadline = time.monotonic() + MAX_SECONDS
    has_slurm = any(map(shutil.which, ("sbatch", "scontrol")))
    works = {
        "slurm": in_thread(lambda: slurm(spec, template_folder)) if has_slurm else None,
        "runs directory": in_thread(lambda: runs_directory(spec.run_dir, must_share=has_slurm)),
        "dataset": in_thread(lambda: dataset(spec, must_share=has_slurm)),
        "python": in_thread(lambda: python(spec)),
        "limits": in_thread(lambda: process_limits(spec)),
    }
    checks: list[Check] = []
    diagnosis = Diagnosis((), {})
    for name, work in works.items():
        if work is None:
            advice = "run it on a login node; submit --launcher local rehearses a run here"
            checks.append(Check(name, WARNING, "no sbatch on PATH: no Slurm here", advice))
            continue
        try:
            outcome = work.result(max(deadline - time.monotonic(), 0.0))
        except NoResultError:
            found = f"no response within {formatting.setting(MAX_SECONDS)}"
            checks.append(Check(name, ERROR, found, "check whether a file system or Slurm hangs"))
        except (ClusterDDPError, OSError) as error:
            checks.append(Check(name, ERROR, str(error), "fix what the message names"))
        else:
            if isinstance(outcome, Diagnosis):
                diagnosis = outcome
                checks += outcome.checks
            else:
                checks.append(outcome)
    has_gpus = any(check.facts.get("gpus") for check in checks)
    settings = {**diagnosis.settings}
    if any(check.name == "python" and check.result == ERROR for check in checks):
        settings["python"] = ""
    checked = tuple(_check_gpu_build(check) if has_gpus else check for check in checks)
    return dataclasses.replace(diagnosis, checks=checked, settings=settings)


def _end_commands() -> None:
    """Kill the commands of the checks and prevent their threads from starting others."""

    def refuse(event: str, _: object) -> None:
        if event == "subprocess.Popen":
            raise InterruptedError

    sys.addaudithook(refuse)
    for pid, process in processes().items():
        if process.parent == os.getpid():
            with suppress(OSError):  # it has ended
                # --python leads its own process group, which Ctrl-C does not reach.
                (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)


def _check_gpu_build(check: Check) -> Check:
    """Return the Python check, with a warning if its torch cannot use the site's GPUs."""
    if check.result != OK or check.facts.get("has_gpu_build", True):
        return check
    advice = "install a torch build for the partitions' GPUs: this one is CPU-only"
    return dataclasses.replace(check, result=WARNING, advice=advice)


def runs_directory(run_dir: str, *, must_share: bool) -> Check:
    """Check that the runs directory is shared and writable, and has free space."""
    root = Path(run_dir).parent
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    space = os.statvfs(place)
    free = space.f_bavail * space.f_frsize
    # btrfs and some NFS servers, for example, do not count inodes.
    inodes = space.f_favail if space.f_files else None
    kind, is_shared = _file_system(place)
    facts = {
        "path": str(root),
        "exists": place == root,
        "file_system": kind,
        "shared": is_shared,
        "free_bytes": free,
        "free_inodes": inodes,
    }
    counted = "inodes not counted" if inodes is None else f"{inodes:,} inodes"
    found = f"{root} on {kind}, free: {formatting.memory(free)}, {counted}"
    few = inodes is not None and inodes < MIN_INODES
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        advice = "choose a directory that you can write with --runs-dir"
        return Check("runs directory", ERROR, f"{found}; {place} cannot be written", advice, facts)
    if free < MIN_BYTES or few:
        advice = "free disk space there, or choose another directory with --runs-dir"
        return Check("runs directory", ERROR, f"{found}: too little", advice, facts)
    advices = [_sharing_advice(kind, is_shared, "--runs-dir")] if must_share else []
    if free < LOW_BYTES or (inodes is not None and inodes < LOW_INODES):
        advices.append("free disk space: checkpoints need it")
    advice = "; ".join(filter(None, advices))
    return Check("runs directory", WARNING if advice else OK, found, advice, facts)


def _file_system(path: Path) -> tuple[str, bool | None]:
    """Return the type of a path's file system and whether it is shared; None if unknown."""
    kind = file_system_type(os.path.realpath(path), hardware.mounts())
    is_shared = True if kind in SHARED_TYPES.split() else None
    return kind, False if kind in LOCAL_TYPES.split() else is_shared


def _sharing_advice(kind: str, is_shared: bool | None, option: str) -> str:
    """Return the advice for a directory that the nodes may not share; empty if they do."""
    if is_shared:
        return ""
    what = "usually local to one machine" if is_shared is False else "an unknown file system"
    return f"{kind} is {what}. Use a shared directory ({option}), unless all nodes mount it"


def dataset(spec: JobSpec, *, must_share: bool) -> Check:
    """Check that the dataset is complete, with its checksums."""
    train = spec.train
    if train is None or is_reference(train.dataset):
        return Check("dataset", OK, "not checked: your own function loads it")
    root = mnist.dataset_root(train.dataset, train.data_dir)
    try:
        info = mnist.check(train.dataset, train.data_dir, checksums=True)
    except DataError as error:
        first, _, more = str(error).partition("\n")
        is_absent = len(mnist.missing_files(root)) == len(mnist.FILES)
        facts: dict[str, object] = {"whole": False, "missing": is_absent}
        if is_absent and train.dataset == "synthetic":
            found = "does not exist yet: the submission generates it"
            return Check("dataset", OK, found, facts=facts)
        way = re.sub(r" {2,}", " ", more.strip().partition("\n")[0])
        advice = "; or see: ".join(filter(None, (way, "clusterddp data --help")))
        found = f"{first.rstrip(':')}; only the built-in training needs it"
        return Check("dataset", WARNING if is_absent else ERROR, found, advice, facts)
    kind, is_shared = _file_system(info.root)
    facts = {"whole": True, "file_system": kind, "shared": is_shared}
    advice = _sharing_advice(kind, is_shared, "--data-dir") if must_share else ""
    found = f"{info.describe()}, checksums verified, on {kind}"
    return Check("dataset", WARNING if advice else OK, found, advice, facts)


def python(spec: JobSpec) -> Check:
    """Check that the tasks' interpreter imports torch; report its CUDA and the import time."""
    if spec.container_image or spec.wrapper:
        advice = "to test it, submit a run on one node: clusterddp submit --max-steps 1"
        found = "not checked: an image or --wrapper provides the Python"
        return Check("python", WARNING, found, advice)
    note = " (the job's modules or setup lines may provide it)" * bool(spec.modules or spec.setup)
    result = WARNING if note else ERROR
    advice = f"activate an environment with torch, or choose its interpreter with --python{note}"
    began = time.monotonic()
    try:
        code, output, errors = _run([spec.python, "-c", _IMPORT])
    except OSError as error:
        return Check("python", result, f"{spec.python} does not start: {error.strerror}", advice)
    except subprocess.TimeoutExpired:
        found = f"{spec.python} did not import torch within {formatting.setting(IMPORT_SECONDS)}"
        advice = "move the environment to a faster file system, or into an image"
        return Check("python", WARNING, found, advice)
    seconds = time.monotonic() - began
    answer = _parse_answer(output) if code == 0 else None
    if answer is None:
        last = ([line for line in errors.splitlines() if line.strip()] or [f"exit code {code}"])[-1]
        return Check("python", result, f"{spec.python} does not import torch: {last}", advice)
    on = f"CUDA {answer['cuda']}" if answer["cuda"] else "no CUDA"
    on = f"ROCm {answer['hip']}" if answer["hip"] else on
    found = (
        f"{spec.python}: Python {answer['python']}, torch {answer['torch']}, {on}, "
        f"imported in {formatting.duration(seconds)}"
    )
    facts = {**answer, "seconds": round(seconds, 2), "has_gpu_build": on != "no CUDA"}
    if tuple(int(part) for part in re.findall(r"\d+", str(answer["python"]))[:2]) < (3, 10):
        found += "; the tasks need Python 3.10 or later"
        return Check("python", result, found, advice, facts)
    if seconds > SLOW_IMPORT_SECONDS:
        advice = "every start takes this long: use a faster file system or an image"
        return Check("python", WARNING, found, advice, facts)
    return Check("python", OK, found, facts=facts)


def process_limits(spec: JobSpec) -> Check:
    """Check this host's limits of a process: Slurm applies the soft ones to the job as well."""
    files, locked = hardware.open_files(), hardware.locked_bytes()
    facts = {"open_files": files, "locked_bytes": locked}
    problems = [hardware.too_few_files(files, spec.world_size)]
    if spec.resources.gpus_per_node:
        problems.append(hardware.too_little_locked(locked))
    if found := "; ".join(filter(None, problems)):
        advice = "raise it here, or ask the administrators; a job's node checks name its nodes'"
        return Check("limits", WARNING, found, advice, facts)
    memory = "unlimited" if locked < 0 else formatting.memory(locked)
    return Check("limits", OK, f"open files: {files:,}, locked memory: {memory}", facts=facts)


def _run(argv: Sequence[str]) -> tuple[int, str, str]:
    """Run a command and return its exit code, stdout and stderr.

    Raises OSError, and subprocess.TimeoutExpired after it killed the process group.
    """
    pipe = subprocess.PIPE
    theirs, ours = os.pipe()
    with (
        os.fdopen(theirs) as its_input,
        os.fdopen(ours, "w"),
        subprocess.Popen(
            argv,
            stdin=its_input,  # closes when this process ends, also by Ctrl-C: see _IMPORT
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        try:
            output, errors = process.communicate(timeout=IMPORT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output, errors


def _parse_answer(output: str) -> dict[str, object] | None:
    """Return the record in the last line of the output; None without one."""
    try:
        record = json.loads((output.splitlines() or [""])[-1])
    except ValueError:
        return None
    keys = {"python", "torch", "cuda", "hip", "nccl"}
    return record if isinstance(record, dict) and keys <= record.keys() else None

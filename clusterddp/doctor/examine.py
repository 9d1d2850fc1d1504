"""Checks of a login node: the account, Slurm, the directories and the Python.

Nothing is queued or written. The checks run in parallel within `MOST_SECONDS`: a hanging file
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
from collections.abc import Iterable, Sequence
from concurrent.futures import TimeoutError as NoResultError
from contextlib import suppress
from pathlib import Path

from clusterddp import formatting
from clusterddp.data import mnist
from clusterddp.doctor.site_checks import BAD, GOOD, WARNING, Check, Diagnosis, beside, slurm
from clusterddp.errors import ClusterDDPError, DataError
from clusterddp.processes.table import processes
from clusterddp.request.options import is_reference
from clusterddp.request.spec import JobSpec

MOST_SECONDS = 60.0
"""Bound on all checks together."""
IMPORT_SECONDS = 45.0
"""Bound on the start of --python, whose import of torch takes long on a cold file system."""
SLOW_IMPORT_SECONDS = 20.0
FEW_BYTES, LITTLE_BYTES = 100 * 2**20, 10 * 2**30
FEW_INODES, LITTLE_INODES = 1_000, 10_000
"""Room of the output folder below which it is bad, or a warning."""
SHARED_TYPES = (
    "nfs nfs4 lustre gpfs beegfs beegfs_nodev ceph fuse.ceph fuse.ceph-fuse cifs smb3 panfs wekafs "
    "glusterfs fuse.glusterfs orangefs pvfs2 gfs2 ocfs2 afs fuse.juicefs 9p virtiofs"
)
LOCAL_TYPES = (
    "ext2 ext3 ext4 xfs btrfs zfs f2fs jfs bcachefs tmpfs ramfs overlay vfat exfat squashfs"
)
"""Types of file systems as /proc/self/mountinfo names them, proc(5)."""
_IMPORT = """\
import os, threading
# Its input ends with the command that started it.
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
            seen = f"no answer within {formatting.setting(MOST_SECONDS)}"
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


def output_folder(run_dir: str, *, doubts: bool) -> Check:
    """Check the output root: that the nodes share it, that it can be written, and its room."""
    root = Path(run_dir).parent
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    room = os.statvfs(place)
    free = room.f_bavail * room.f_frsize
    # Some file systems, btrfs and some servers of NFS among them, count none.
    inodes = room.f_favail if room.f_files else None
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
    seen = f"{root} on {kind}, free: {formatting.memory(free)}, {counted}"
    few = inodes is not None and inodes < FEW_INODES
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        advice = "name a folder of yours with --runs-dir"
        return Check("output folder", BAD, f"{seen}; {place} cannot be written", advice, facts)
    if free < FEW_BYTES or few:
        advice = "make room there, or name another folder with --runs-dir"
        return Check("output folder", BAD, f"{seen}: too little", advice, facts)
    advices = [_doubt(kind, is_shared, "--runs-dir")] if doubts else []
    if free < LITTLE_BYTES or (inodes is not None and inodes < LITTLE_INODES):
        advices.append("make room: each checkpoint takes some")
    advice = "; ".join(filter(None, advices))
    return Check("output folder", WARNING if advice else GOOD, seen, advice, facts)


def _file_system(path: Path) -> tuple[str, bool | None]:
    """Return the type of a path's file system, and whether machines share it; None is unknown."""
    text = Path("/proc/self/mountinfo").read_text(errors="replace")
    kind = file_system_type(os.path.realpath(path), text.splitlines())
    return (
        kind,
        True if kind in SHARED_TYPES.split() else False if kind in LOCAL_TYPES.split() else None,
    )


def file_system_type(path: str, mountinfo: Iterable[str]) -> str:
    """Return the type of the file system of an absolute path, by lines of /proc/self/mountinfo.

    The form: proc(5). Of mounts over one another the last one counts.
    """
    found, longest = "unknown", -1
    for mount in mountinfo:
        before, dash, behind = mount.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        is_below = path == point or path.startswith(f"{point.rstrip('/')}/")
        if is_below and len(point) >= longest:
            found, longest = behind.split(" ")[0], len(point)
    return found


def _doubt(kind: str, is_shared: bool | None, option: str) -> str:
    """Return what to do about a folder that the nodes may not see; empty where they do."""
    if is_shared:
        return ""
    what = "is this machine's own" if is_shared is False else "is of no type known here"
    return f"{kind} {what}: make sure that all nodes see it, or name a shared folder with {option}"


def dataset(spec: JobSpec, *, doubts: bool) -> Check:
    """Check that the dataset is whole, with its digests."""
    train = spec.train
    if train is None or is_reference(train.dataset):
        return Check("dataset", GOOD, "a function of yours reads it: not looked at")
    root = mnist.folder(train.dataset, train.data_dir)
    try:
        info = mnist.check(train.dataset, train.data_dir, checksums=True)
    except DataError as error:
        first, _, more = str(error).partition("\n")
        is_absent = len(mnist.missing_files(root)) == len(mnist.FILES)
        if is_absent and train.dataset == "synthetic":
            found = {"whole": False, "missing": True}
            return Check("dataset", GOOD, "not there yet: the submission renders it", facts=found)
        ways = [re.sub(r" {2,}", ": ", line.strip()) for line in more.splitlines() if line.strip()]
        advice = "; ".join(ways) or "see 'clusterddp data --help'"
        found = {"whole": False, "missing": is_absent}
        return Check("dataset", WARNING if is_absent else BAD, first.rstrip(":"), advice, found)
    kind, is_shared = _file_system(info.root)
    facts = {"whole": True, "file_system": kind, "shared": is_shared}
    advice = _doubt(kind, is_shared, "--data-dir") if doubts else ""
    seen = f"{info.describe()}, every byte verified, on {kind}"
    return Check("dataset", WARNING if advice else GOOD, seen, advice, facts)


def python(spec: JobSpec) -> Check:
    """Check that the tasks' interpreter imports torch, with which CUDA, and how long that takes."""
    if spec.container_image or spec.wrapper:
        advice = "a run of one node shows it: clusterddp submit --max-steps 1"
        return Check("python", WARNING, "the image's Python is not started here", advice)
    mended = (
        " (modules and set-up lines of the job may mend it)" if spec.modules or spec.setup else ""
    )
    verdict = WARNING if mended else BAD
    advice = f"activate an environment with torch, or name its interpreter with --python{mended}"
    began = time.monotonic()
    try:
        code, output, errors = _started([spec.python, "-c", _IMPORT])
    except OSError as error:
        return Check("python", verdict, f"{spec.python} cannot run: {error.strerror}", advice)
    except subprocess.TimeoutExpired:
        seen = f"{spec.python} has not imported torch within {formatting.setting(IMPORT_SECONDS)}"
        advice = "move the environment to a faster file system, or into an image"
        return Check("python", WARNING, seen, advice)
    seconds = time.monotonic() - began
    answer = _answer(output) if code == 0 else None
    if answer is None:
        last = ([line for line in errors.splitlines() if line.strip()] or [f"exit code {code}"])[-1]
        return Check("python", verdict, f"{spec.python} does not import torch: {last}", advice)
    on = f"CUDA {answer['cuda']}" if answer["cuda"] else "no CUDA"
    on = f"ROCm {answer['hip']}" if answer["hip"] else on
    seen = (
        f"{spec.python}: Python {answer['python']}, torch {answer['torch']}, {on}, "
        f"imported in {formatting.duration(seconds)}"
    )
    facts = {**answer, "seconds": round(seconds, 2), "has_gpu_build": on != "no CUDA"}
    if tuple(int(part) for part in re.findall(r"\d+", str(answer["python"]))[:2]) < (3, 10):
        return Check("python", verdict, f"{seen}; the tasks need Python 3.10", advice, facts)
    if seconds > SLOW_IMPORT_SECONDS:
        advice = "each start waits for that: move the environment to a faster place, or an image"
        return Check("python", WARNING, seen, advice, facts)
    return Check("python", GOOD, seen, facts=facts)


def _started(argv: Sequence[str]) -> tuple[int, str, str]:
    """Run a command; return its exit code and what it printed.

    Raises OSError, and subprocess.TimeoutExpired once it and what it started are killed.
    """
    pipe = subprocess.PIPE
    theirs, ours = os.pipe()
    with (
        os.fdopen(theirs) as its_input,
        os.fdopen(ours, "w"),
        subprocess.Popen(
            argv,
            stdin=its_input,  # it ends with this process, be that by Ctrl-C: see _IMPORT
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


def _answer(output: str) -> dict[str, object] | None:
    """Return the record in the last line of what was printed; None without one."""
    try:
        record = json.loads((output.splitlines() or [""])[-1])
    except ValueError:
        return None
    keys = {"python", "torch", "cuda", "hip", "nccl"}
    return record if isinstance(record, dict) and keys <= record.keys() else None

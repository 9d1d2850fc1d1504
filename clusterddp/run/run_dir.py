"""Paths of a run, and the runs of a runs directory.

A run is one directory in the runs directory. Its content:

    spec.json            the request (a record; the script does not read it)
    script.sbatch        exactly what was submitted
    events.jsonl         submitted, started, ended, requeued: Slurm job ids, times, exit codes
    resolved.json        values on which the ranks agreed for each `auto` of the request
    clusterddp.pyz       link to the run's own clusterddp, clusterddp-VERSION-DIGEST.pyz, with its
                         bytecode in __pycache__ (`submission.bundle`)
    code/ code.json      copy of the user's code, if a command or the user's own model or dataset
                         was submitted, and its digests
    workdir              link to the directory of the copy in which the tasks start, if that is not
                         its top: a git work tree is copied from its top
    logs/job.log         output of the batch script and Slurm
    logs/rank-R.log      output of rank R
    logs/node-N.log      output of a torchrun agent, or of a node's ranks with --log-per node
    attempts/0001/       one attempt, which alone writes there (see `attempt`):
        attempt.json     job, ranks and the checkpoint that the attempt started from
        preflight.json   node checks before the tasks
        preflight-full.json  the ranks' checks before the training
        checkpoints/     step-00001200.pt and its .sha256, including those of earlier attempts
        metrics.jsonl    loss, accuracy, images/s, learning rate since the run's first step
        outcomes/        node-HOST.N.json: ends of a host's ranks; also the notes of `outcome`, and
                         error-R.json, written by torch's `record`
        profile/         rank-R.trace.json.gz, with --profile
        tensorboard/     with --tensorboard
    current              link to the latest attempt that has trained
    checkpoints          link to current/checkpoints
    metrics.jsonl        link to current/metrics.jsonl
    outcomes/            ends of ranks that were started manually, outside a job
    report.json          results of the run
    notify.sbatch        with --notify; notified-NNNN.json records which process notified, and
                         logs/notify.log its output
    tracked.json         with --report-to
    evaluation.json      confusion of the classes at the end, and the images with the highest loss
    batch_sizes.json     with --find-batch-size
    resume-NNNN.claim    process that currently resumes the run

A sweep has its own directory next to those of its trials, which are runs, SWEEP-INDEX. Its content:

    sweep.json           the request with all trials, instead of spec.json: a sweep is not a run
    script.sbatch        the script of all trials
    events.jsonl         submissions: time, array and trials of each
    clusterddp.pyz, code/, code.json
                         shared by the trials, whose directories link to them
"""

import contextlib
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from clusterddp.errors import RequestError
from clusterddp.files import read_json, write_atomically

if TYPE_CHECKING:
    from clusterddp.request.spec import JobSpec

_Kind = TypeVar("_Kind", bound="RunDir")
_CHECKPOINT = re.compile(r"step-(\d+)\.pt", re.ASCII)


class _Folder(Protocol):
    @property
    def path(self) -> Path: ...


@dataclass(frozen=True)
class PathIn:
    """Descriptor: a path relative to the owner's directory."""

    name: str

    def __get__(self, folder: _Folder, _: type) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunDir:
    """Directory of one run."""

    path: Path

    spec = PathIn("spec.json")
    script = PathIn("script.sbatch")
    events = PathIn("events.jsonl")
    resolved = PathIn("resolved.json")
    logs = PathIn("logs")
    job_log = PathIn("logs/job.log")
    outcomes = PathIn("outcomes")
    attempts = PathIn("attempts")
    current = PathIn("current")
    bundle = PathIn("clusterddp.pyz")
    """Link to the run's own clusterddp, if it has one."""
    code = PathIn("code")
    code_record = PathIn("code.json")
    """Digests of the user's code at submission."""
    workdir = PathIn("workdir")
    """Link to the directory of the copy in which the tasks start, if that is not its top."""
    metrics = PathIn("metrics.jsonl")
    checkpoints = PathIn("checkpoints")
    report = PathIn("report.json")
    batch_sizes = PathIn("batch_sizes.json")
    """Throughput of each batch size, if they were measured."""
    notify_log = PathIn("logs/notify.log")
    """Output of the program given by --notify."""
    notice_script = PathIn("notify.sbatch")
    """Script of the job that runs that program if the run's own job cannot."""
    tracked = PathIn("tracked.json")
    """Ids of the run in trackers."""
    evaluation = PathIn("evaluation.json")
    """Confusion of the classes at the end, and the images with the highest loss."""

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def workdir_name(self) -> str:
        """Directory in which the tasks start, below the top of the copy; empty for the top."""
        try:
            return os.readlink(self.workdir).partition("/")[2]  # noqa: PTH115 -- it normalizes
        except OSError:
            return ""

    @property
    def code_folder(self) -> Path:
        """Directory of the copy of the code in which the tasks start."""
        return self.code / self.workdir_name

    def top_of_code(self, folder: Path) -> Path:
        """Return the top of the code that a submission here copies: this directory or one above."""
        depth = len(Path(self.workdir_name).parts)
        return folder.absolute().parents[depth - 1] if depth else folder.absolute()

    @property
    def cli_name(self) -> str:
        """Name or path of the run for a command in the current directory, relative if below it."""
        usual = Path(os.environ.get("CLUSTERDDP_RUNS_DIR") or "jobs")
        path, here = self.path.absolute(), Path.cwd()
        if path.parent == usual.absolute():
            return self.name
        if path.parent != here and path.is_relative_to(here):
            path = path.relative_to(here)
        return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))

    @property
    def array_index(self) -> str:
        """Index of this run's array task, RUN-INDEX; empty if it has none."""
        path = self.path.resolve()
        name, _, index = path.name.rpartition("-")
        recorded = (read_json(self.spec) or {}).get("run_dir") if index.isdigit() else None
        is_task = recorded and path.parent / name == Path(str(recorded)).resolve()
        return index if is_task else ""

    @property
    def sweep(self) -> "SweepDir | None":
        """Sweep that this run is a trial of; None for any other run."""
        name, _, index = self.name.rpartition("-")
        folder = SweepDir(self.path.parent / name)
        if not (name and index.isdecimal() and folder.spec.is_file()):
            return None
        spec = folder.read_spec()
        return folder if spec and int(index) < len(spec.sweep) else None

    @property
    def resume_command(self) -> str:
        """Command that resumes the run; the script of an array task would start all of them."""
        if self.array_index:
            return f"sbatch --array={self.array_index} {shlex.quote(str(self.script.absolute()))}"
        return f"clusterddp resume {self.cli_name}"

    @classmethod
    @contextmanager
    def create(cls, spec: "JobSpec", script: str | None) -> Iterator["RunDir"]:
        """Create the directory of a new run with its records, or nothing at all.

        The records are written to a hidden sibling that is renamed when complete. If the body
        raises a RequestError, everything is removed, so a refused submission leaves nothing. After
        any other error the job may be queued and need the directory. Raises RequestError if the
        run exists or the runs directory cannot be written.
        """
        path = Path(spec.run_dir)
        if path.exists() or path.is_symlink():
            raise RequestError(
                f"the run {spec.run_name} already exists at {path}. Choose another "
                "--run-name. [CD0503]"
            )
        missing = [parent for parent in path.parents if not parent.exists()]
        draft = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # mkdtemp makes it mode 0700: scripts and records can hold values of --env.
            draft = cls(Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)))
            if cls is RunDir:
                draft.logs.mkdir()
            write_atomically(draft.spec, spec.to_json().encode())
            if script is not None:
                write_atomically(draft.script, script.encode())
            os.rename(draft.path, path)  # noqa: PTH104 -- must fail on a non-empty target
        except OSError as error:
            remove_created(draft.path if draft else None, missing)
            raise RequestError(
                f"--runs-dir: cannot write the run directory {path}: {error.strerror}. "
                "Choose a writable directory with enough disk space. [CD0504]"
            ) from None
        try:
            yield cls(path)
        except RequestError:
            remove_created(path, missing)
            raise
        remember_runs_dir(path.parent)

    def make(self, *folders: Path) -> None:
        """Create the directory, private to its owner, and directories in it, unless they exist.

        Raises OSError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        for folder in folders:
            folder.mkdir(mode=0o700, exist_ok=True)

    def load_spec(self) -> "JobSpec":
        """Read the request. Raises RequestError if it is missing or damaged."""
        from clusterddp.request.spec import JobSpec  # tasks do not need it

        try:
            return JobSpec.from_json(self.spec.read_text(errors="replace"), self.spec.name)
        except OSError as error:
            raise RequestError(
                f"{self.path} is not a run: {self.spec.name}: {error.strerror}. [CD0505]"
            ) from None
        except RequestError as error:
            raise RequestError(f"{self.path}: {error}", code=error.code) from None

    def read_spec(self) -> "JobSpec | None":
        """Read the request; None if it is damaged, so that the other records stay usable."""
        try:
            return self.load_spec()
        except RequestError:
            return None


@dataclass(frozen=True)
class SweepDir(RunDir):
    """Directory of a sweep: its request with all trials, and files that the trials share."""

    spec = PathIn("sweep.json")

    def trial(self, index: int) -> RunDir:
        """Return the directory of one trial."""
        return RunDir(self.path.with_name(f"{self.name}-{index}"))

    @property
    def trials(self) -> list[RunDir]:
        """Directories of the trials, by index. Raises RequestError as `load_spec` does."""
        return [self.trial(index) for index in range(len(self.load_spec().sweep))]

    @property
    def is_sweep(self) -> bool:
        """True if a sweep's request exists, even for a name that is too long for a path."""
        return os.path.isfile(self.spec)  # noqa: PTH113 -- Path.is_file raises OSError then


def find_runs(runs_dir: Path) -> list[RunDir]:
    """List the runs of a runs directory that this user can read, the latest last.

    The trials of a sweep are runs, the sweep itself is not. Raises RequestError if the directory
    cannot be read.
    """
    return directories(RunDir, runs_dir)


def directories(kind: type[_Kind], runs_dir: Path) -> list[_Kind]:
    """List the directories of a kind in a runs directory, the latest last.

    Raises RequestError if the directory cannot be read.
    """
    try:
        if not runs_dir.is_dir():
            return []
        found = [kind(path) for path in runs_dir.iterdir() if not path.name.startswith(".")]
        readable = [run for run in found if os.access(run.spec, os.R_OK)]
        return sorted(readable, key=lambda run: (run.spec.stat().st_mtime, _natural_key(run.name)))
    except OSError as error:
        raise RequestError(
            f"--runs-dir: {runs_dir} cannot be read: {error.strerror}. Name a directory of runs "
            "that you can read. [CD0505]"
        ) from None


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts a sweep's trials by number: `a-2` before `a-10`."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def find_in_other_dirs(
    kind: type[_Kind], root: Path, text: str, holds: Callable[[_Kind], bool]
) -> list[_Kind]:
    """List the runs of a name or job id in the user's other runs directories.

    holds: returns whether a run has a job of that id.
    """
    if not text or "/" in text or text in (".", ".."):
        return []
    found: list[_Kind] = []
    for other in known_runs_dirs():
        if other.resolve() == root.resolve():
            continue
        with suppress(RequestError):  # it cannot be read
            if text.partition("_")[0].isdecimal():
                found += [run for run in directories(kind, other) if run.name == text or holds(run)]
            elif os.access(kind(other / text).spec, os.R_OK):
                found.append(kind(other / text))
    return found


def checkpoint_step(path: Path) -> int | None:
    """Return the step in a checkpoint's file name; None for another name."""
    name = _CHECKPOINT.fullmatch(path.name)
    return int(name[1]) if name else None


class NewestCheckpoint(NamedTuple):
    """Checkpoint with the highest step, and the time at which it was written."""

    step: int
    time: float
    path: Path


def newest_checkpoint(folder: Path) -> NewestCheckpoint | None:
    """Return the checkpoint with the highest step, without verifying it."""
    try:
        with os.scandir(folder) as entries:
            by_step = [
                (step, entry)
                for entry in entries
                if (step := checkpoint_step(Path(entry.name))) is not None
                and entry.is_file(follow_symlinks=False)
            ]
        step, newest = max(by_step, key=lambda each: each[0])
        return NewestCheckpoint(step, newest.stat().st_mtime, Path(newest.path))
    except (OSError, ValueError):
        return None


def describe_output_folder(folder: str) -> str:
    """Say whether the tasks' relative output stays in the directory in which they start.

    In a copy of the code, directories that git ignores are links to the user's own.
    """
    try:
        with os.scandir(folder) as entries:
            links = sorted(
                f"{entry.name}/"
                for entry in entries
                if entry.is_symlink() and entry.is_dir() and not entry.name.startswith(".")
            )
    except OSError:
        links = []
    own = (
        f", except in {', '.join(links[:5])}{' …' * (len(links) > 5)} (links to your directories)"
        if links
        else ""
    )
    return f"relative output is there{own}"


def run_folders(run: RunDir) -> list[Path]:
    """List the run directories in a user's code tree: the runs directory, its runs and sweeps."""
    root = run.path.parent
    return [root, *(each.path for each in (*find_runs(root), *directories(SweepDir, root)))]


def remove_created(made: Path | None, parents: list[Path]) -> None:
    """Remove a run's directory, and the directories above it that were created for it."""
    import shutil

    if made:
        shutil.rmtree(made, ignore_errors=True)
    for parent in parents:
        try:
            parent.rmdir()
        except OSError:
            return  # not created, or not empty: something else uses it


def remember_runs_dir(root: Path) -> None:
    """Remember a runs directory in the user's state file, if possible."""
    with contextlib.suppress(OSError, ValueError):
        file, path = _state_file(os.environ), str(root.absolute())
        if file is None or "\n" in path or path in _read_remembered(file):
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8", errors="surrogateescape") as lines:
            lines.write(f"{path}\n")


def known_runs_dirs() -> list[Path]:
    """Return the remembered runs directories that exist, the latest first."""
    file = _state_file(os.environ)
    lines = _read_remembered(file) if file else []
    found = {os.path.realpath(line): Path(line) for line in lines if os.path.isdir(line)}  # noqa: PTH112
    return [*reversed(found.values())]


def _read_remembered(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return [line for line in text.split("\n") if line]


def _state_file(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the state file (XDG); None without a home directory."""
    home = environ.get("HOME")
    state = environ.get("XDG_STATE_HOME") or (f"{home}/.local/state" if home else "")
    return Path(state, "clusterddp", "output-roots") if state else None

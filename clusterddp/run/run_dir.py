"""Paths of a run in one object, and the runs of an output root.

A run is one directory below the output root. What is in it:

    spec.json            the request (a record: the script does not read it)
    script.sbatch        the exact bytes that were submitted
    events.jsonl         submitted, started, ended, requeued: Slurm job ids, times, exit codes
    resolved.json        what the ranks agreed on where the request said auto
    clusterddp.pyz       leads to the run's own clusterddp, clusterddp-VERSION-DIGEST.pyz, whose
                         bytecode lies in __pycache__ (`submission.bundle`)
    code/ code.json      the person's own tree when a command, or a model or dataset of theirs, was
                         submitted, and its digests
    workdir              leads to the folder of the copy in which the tasks start, where that is not
                         its top: a git work tree is copied from its top
    logs/job.log         what the batch script and Slurm said
    logs/rank-R.log      what rank R printed (logs/node-N.log: a torchrun agent)
    attempts/0001/       one start of the run, which alone writes there (see `attempt`):
        attempt.json     who trains, and from which checkpoint
        preflight.json   what the nodes measured ahead of the tasks
        preflight-full.json  what the ranks measured before they trained
        checkpoints/     step-00001200.pt and its .sha256, those of earlier attempts included
        metrics.jsonl    loss, accuracy, images/s, learning rate since the run's first step
        outcomes/        rank-R.json: how rank R ended; beside them what `outcome` notes, and
                         error-R.json: written by torch's `record`
        profile/         rank-R.trace.json.gz, with --profile
        tensorboard/     with --tensorboard
    current              leads to the attempt that trains, or that trained last
    checkpoints          leads to current/checkpoints
    metrics.jsonl        leads to current/metrics.jsonl
    outcomes/            of ranks that were started by hand, each by itself
    report.json          what the run achieved
    notify.sbatch        with --notify; notified-NNNN.json says who told the program, and
                         logs/notify.log has what that printed
    tracked.json         with --tracker
    evaluation.json      which classes were confused in the end, the images of the highest loss
    batch_sizes.json     with --find-batch-size
    resume-NNNN.claim  who resumes the run, while it does

A sweep has a directory of its own beside those of its points, which are runs, SWEEP-INDEX. In it:

    sweep.json           the request with all points, in place of spec.json: a sweep is no run
    script.sbatch        the one script of all points
    events.jsonl         which points were submitted, when, as which array
    clusterddp.pyz, code/, code.json
                         what its points share: in their directories are links to these
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
from typing import TYPE_CHECKING, Protocol, TypeVar

from clusterddp.errors import RequestError
from clusterddp.files import write_atomically

if TYPE_CHECKING:
    from clusterddp.request.spec import JobSpec

_Kind = TypeVar("_Kind", bound="RunDir")
_CHECKPOINT = re.compile(r"step-(\d+)\.pt", re.ASCII)


class _Folder(Protocol):
    @property
    def path(self) -> Path: ...


@dataclass(frozen=True)
class PathIn:
    """Path in the folder whose attribute it is."""

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
    """Leads to the run's own clusterddp, where it carries one."""
    code = PathIn("code")
    code_record = PathIn("code.json")
    """Digests of the person's tree at submission."""
    workdir = PathIn("workdir")
    """Leads to the folder of the copy in which the tasks start, where that is not its top."""
    metrics = PathIn("metrics.jsonl")
    checkpoints = PathIn("checkpoints")
    report = PathIn("report.json")
    batch_sizes = PathIn("batch_sizes.json")
    """Throughput of each batch size, where they were tried."""
    notify_log = PathIn("logs/notify.log")
    """Output of the program that --notify names."""
    notice_script = PathIn("notify.sbatch")
    """Script of the job that tells it where the run's own cannot."""
    tracked = PathIn("tracked.json")
    """Ids by which trackers know the run."""
    evaluation = PathIn("evaluation.json")
    """Classes that were confused in the end, and the images of the highest loss."""

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def workdir_name(self) -> str:
        """Name the folder in which the tasks start, below the top of the copy; empty for that."""
        try:
            return os.readlink(self.workdir).partition("/")[2]  # noqa: PTH115 -- which tidies it
        except OSError:
            return ""

    @property
    def code_folder(self) -> Path:
        """Return the folder of the copy of the code in which the tasks start."""
        return self.code / self.workdir_name

    def top_of_code(self, folder: Path) -> Path:
        """Return what was copied for a submission in this folder: itself, or one above it."""
        depth = len(Path(self.workdir_name).parts)
        return folder.absolute().parents[depth - 1] if depth else folder.absolute()

    @property
    def cli_name(self) -> str:
        """Name or path by which a command that is typed in this folder finds the run."""
        usual = Path(os.environ.get("CLUSTERDDP_RUNS_DIR") or "jobs")
        path = self.path.absolute()
        return self.name if path.parent == usual.absolute() else shlex.quote(str(path))

    @property
    def array_index(self) -> str:
        """Index of the array's element that this run is, RUN-INDEX; empty where it is none."""
        spec, path = self.read_spec(), self.path.resolve()
        name, _, index = path.name.rpartition("-")
        if spec and index.isdigit() and path.parent / name == Path(spec.run_dir).resolve():
            return index
        return ""

    @property
    def sweep(self) -> "SweepDir | None":
        """Sweep of which this run is a point; None for any other run."""
        name, _, index = self.name.rpartition("-")
        folder = SweepDir(self.path.parent / name)
        if not (name and index.isdecimal() and folder.spec.is_file()):
            return None
        spec = folder.read_spec()
        return folder if spec and int(index) < len(spec.sweep) else None

    @property
    def resume_command(self) -> str:
        """Command that resumes the run; the script of an array's element starts all of them."""
        if self.array_index:
            script = shlex.quote(str(self.script.absolute()))
            return f"sbatch --array={self.array_index} {script}"
        return f"clusterddp resume {self.cli_name}"

    @classmethod
    @contextmanager
    def create(cls, spec: "JobSpec", script: str | None) -> Iterator["RunDir"]:
        """Make the directory of a new run with its records, or nothing at all.

        Records are laid down in a hidden sibling that is renamed into place when complete. What
        was made is taken away again when the body raises a RequestError, so that a refused
        submission leaves nothing; after anything else the job may be queued, and needs it.
        Raises RequestError when the run exists or the output root cannot be written.
        """
        path = Path(spec.run_dir)
        if path.exists() or path.is_symlink():
            raise RequestError(
                f"the run {spec.run_name} exists already at {path}; choose another "
                "--run-name. [CD0503]"
            )
        missing = [parent for parent in path.parents if not parent.exists()]
        draft = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # mkdtemp makes it mode 0700: scripts and records may hold values of --env.
            draft = cls(Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)))
            if cls is RunDir:
                draft.logs.mkdir()
            write_atomically(draft.spec, spec.to_json().encode())
            if script is not None:
                write_atomically(draft.script, script.encode())
            os.rename(draft.path, path)  # noqa: PTH104 -- fails, as wanted, on a non-empty target
        except OSError as error:
            undo(draft.path if draft else None, missing)
            raise RequestError(
                f"--runs-dir: cannot write the run directory {path}: {error.strerror}. "
                "Choose a folder that you can write and that has room. [CD0504]"
            ) from None
        try:
            yield cls(path)
        except RequestError:
            undo(path, missing)
            raise
        note_root(path.parent)

    def make(self, *folders: Path) -> None:
        """Make the directory, private to its owner, and folders in it; they may be there already.

        Raises OSError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        for folder in folders:
            folder.mkdir(mode=0o700, exist_ok=True)

    def load_spec(self) -> "JobSpec":
        """Read the request; raises RequestError when there is none or it is damaged."""
        from clusterddp.request.spec import JobSpec  # a task needs none

        try:
            return JobSpec.from_json(self.spec.read_text(errors="replace"), self.spec.name)
        except OSError as error:
            raise RequestError(
                f"{self.path} is no run: {self.spec.name}: {error.strerror}. [CD0505]"
            ) from None
        except RequestError as error:
            raise RequestError(f"{self.path}: {error}", code=error.code) from None

    def read_spec(self) -> "JobSpec | None":
        """Read the request; None for a damaged one, which takes nothing from what else is known."""
        try:
            return self.load_spec()
        except RequestError:
            return None


@dataclass(frozen=True)
class SweepDir(RunDir):
    """Directory of a sweep: its request with all points, and what these share."""

    spec = PathIn("sweep.json")

    def element(self, index: int) -> RunDir:
        """Return the directory of one point's run."""
        return RunDir(self.path.with_name(f"{self.name}-{index}"))

    @property
    def elements(self) -> list[RunDir]:
        """Directories of the points' runs, by index. Raises RequestError as `load_spec` does."""
        return [self.element(index) for index in range(len(self.load_spec().sweep))]

    @property
    def is_sweep(self) -> bool:
        """Return whether a sweep's request is there; also of a name that is too long."""
        return os.path.isfile(self.spec)  # noqa: PTH113 -- Path's own raises OSError then


def find_runs(runs_dir: Path) -> list[RunDir]:
    """List the runs below an output root that this user can read, the latest last.

    A sweep is none, but each of its points is. Raises RequestError where it cannot be read.
    """
    return directories(RunDir, runs_dir)


def directories(kind: type[_Kind], runs_dir: Path) -> list[_Kind]:
    """List the directories of a kind below an output root, the latest last.

    Raises RequestError as `find_runs` does.
    """
    try:
        if not runs_dir.is_dir():
            return []
        found = [kind(path) for path in runs_dir.iterdir() if not path.name.startswith(".")]
        readable = [run for run in found if os.access(run.spec, os.R_OK)]
        return sorted(readable, key=lambda run: (run.spec.stat().st_mtime, _in_order(run.name)))
    except OSError as error:
        raise RequestError(
            f"--runs-dir: {runs_dir} cannot be read: {error.strerror}. Name a folder of runs "
            "that you can read. [CD0505]"
        ) from None


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return what sorts a sweep's points by number: those of `a-2` ahead of those of `a-10`."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def elsewhere(
    kind: type[_Kind], root: Path, text: str, holds: Callable[[_Kind], bool]
) -> list[_Kind]:
    """List the runs of a name or job id below a person's other output roots.

    holds: whether one has a job of that id.
    """
    if not text or "/" in text or text in (".", ".."):
        return []
    found: list[_Kind] = []
    for other in known_roots():
        if other.resolve() == root.resolve():
            continue
        with suppress(RequestError):  # it cannot be read
            if text.partition("_")[0].isdecimal():
                found += [run for run in directories(kind, other) if run.name == text or holds(run)]
            elif os.access(kind(other / text).spec, os.R_OK):
                found.append(kind(other / text))
    return found


def checkpoint_step(path: Path) -> int | None:
    """Return the step of a checkpoint, by its name; None for a file of another name."""
    name = _CHECKPOINT.fullmatch(path.name)
    return int(name[1]) if name else None


def newest_checkpoint(folder: Path) -> tuple[int, float] | None:
    """Find step and time of the checkpoint with the highest step; not verified, so cheap."""
    try:
        with os.scandir(folder) as entries:
            by_step = [
                (step, entry)
                for entry in entries
                if (step := checkpoint_step(Path(entry.name))) is not None
                and entry.is_file(follow_symlinks=False)
            ]
        step, newest = max(by_step, key=lambda each: each[0])
        return step, newest.stat().st_mtime
    except (OSError, ValueError):
        return None


def describe_output_folder(folder: str) -> str:
    """Say whether what the tasks write to relative paths lies in the folder where they start.

    In a copy of the code, folders that git ignores are links to a person's own.
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
        f", but for {', '.join(links[:5])}{' …' * (len(links) > 5)}: links to yours"
        if links
        else ""
    )
    return f"relative output lies there{own}"


def run_folders(run: RunDir) -> list[Path]:
    """List what lies in a person's tree and is no code: runs, or the folder of runs alone."""
    root = run.path.parent
    return [root, *(each.path for each in (*find_runs(root), *directories(SweepDir, root)))]


def undo(made: Path | None, parents: list[Path]) -> None:
    """Remove a run's directory, and the folders above it that were made for it alone."""
    import shutil

    if made:
        shutil.rmtree(made, ignore_errors=True)
    for parent in parents:
        try:
            parent.rmdir()
        except OSError:
            return  # never made, or something else is in it already: not ours to remove


def note_root(root: Path) -> None:
    """Note a folder of runs, where the home takes it."""
    with contextlib.suppress(OSError, ValueError):
        file, path = _file_of_roots(os.environ), str(root.absolute())
        if file is None or "\n" in path or path in _noted(file):
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8", errors="surrogateescape") as lines:
            lines.write(f"{path}\n")


def known_roots() -> list[Path]:
    """Return the folders that are there, the latest first."""
    file = _file_of_roots(os.environ)
    lines = _noted(file) if file else []
    found = {os.path.realpath(line): Path(line) for line in lines if os.path.isdir(line)}  # noqa: PTH112
    return [*reversed(found.values())]


def _noted(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return [line for line in text.split("\n") if line]


def _file_of_roots(environ: Mapping[str, str]) -> Path | None:
    """Return the file with them, in the place of a user's state (XDG); None without a home."""
    home = environ.get("HOME")
    state = environ.get("XDG_STATE_HOME") or (f"{home}/.local/state" if home else "")
    return Path(state, "clusterddp", "output-roots") if state else None

"""Python environments on a cluster, for the packages that a work tree asks for.

One is found again by the content of the file that lists its packages, so a changed list needs a new
one. The tasks of runs that `--on` submits from that work tree use it.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from clusterddp import log
from clusterddp.errors import RequestError
from clusterddp.request import toml_file
from clusterddp.slurm import forms

_SOURCES = ("uv.lock", "requirements.txt", "pyproject.toml")
"""Files that list packages, the most exact first."""
_WHOLE = "complete"
"""File in an environment that is not a part."""
_INCLUDED = re.compile(r"(?m)^\s*(?:-r|-c|--requirement|--constraint)[\s=]*([^\s#]+)")
_LOCAL = re.compile(
    r"(?m)^\s*(?:-e\b|--editable\b|\.{1,2}/|\.\s*(?:$|\[)|\w.*@\s*file:(?!\S*\.whl))"
)
"""Package that is a directory, perhaps of the work tree, which the tasks have anyway."""


def find(folder: Path, code: Path, top: Path) -> str:
    """Return the Python of the environment for a directory's code; empty without one.

    folder: the cluster's directory of environments. top: the work tree's own.
    """
    source = _source(code, top)
    place = _place(folder, source) if source else None
    return str(place / "bin/python") if place and _is_whole(place) else ""


def create(code: Path, show: Callable[[str], None]) -> None:
    """Make the environment for a carried directory, with uv if there is one, else with pip.

    show: prints a line of the result. Raises RequestError.
    """
    top = forms.carried_top(str(code), os.environ)
    if not top:
        raise RequestError("env create needs a cluster: clusterddp --on NAME env create. [CD1407]")
    source = _source(code, Path(top))
    if source is None:
        raise RequestError(
            f"{code.name} and the directories above it have none of {', '.join(_SOURCES)}. Write "
            "one that lists your packages. [CD1407]"
        )
    place = _place(Path(top).parent.parent / "envs", source)
    with _alone(place.parent):
        if not _is_whole(place):
            shutil.rmtree(place, ignore_errors=True)  # a part
            try:
                _fill(place, source)
                (place / _WHOLE).touch()
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
    show(f"{place} has the packages of {source.name}: runs that you submit from here use it")


def _source(code: Path, top: Path) -> Path | None:
    for folder in (code, *code.parents):
        for name in _SOURCES:
            if (folder / name).is_file():
                return folder / name
        if folder == top:
            break
    return None


def _place(envs: Path, source: Path) -> Path:
    """Return the directory for a list, the files that it includes, this Python and its tool."""
    texts = [*_texts(source, set())]
    if source.name == "uv.lock":
        texts.append(str(bool(_uv())))
    key = repr((source.name, texts, sys.version_info[:2]))
    return envs / hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:24]


def _texts(source: Path, seen: set[Path]) -> Iterator[str]:
    if source in seen or not source.is_file():
        return
    seen.add(source)
    yield (text := source.read_text(encoding="utf-8", errors="surrogateescape"))
    for name in _INCLUDED.findall(text) if source.suffix == ".txt" else ():
        yield from _texts(source.parent / name, seen)


def _is_whole(place: Path) -> bool:
    return (place / _WHOLE).is_file() and os.access(place / "bin/python", os.X_OK)


def _uv() -> str | None:
    return shutil.which("uv", path=f"{os.environ.get('PATH', '')}:{Path.home()}/.local/bin")


@contextmanager
def _alone(envs: Path) -> Iterator[None]:
    """Hold a lock, so that one environment is made at a time.

    The lock is a file: NFS has none of a directory for several login nodes.
    """
    envs.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(envs.with_name("envs.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another session makes an environment: waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        os.set_inheritable(lock, True)  # a pip that outlives this process keeps it
        yield
    finally:
        os.close(lock)


def _fill(place: Path, source: Path) -> None:
    """Make an environment and install its packages. Raises RequestError."""
    uv, python = _uv(), str(place / "bin/python")
    if source.name == "uv.lock" and uv:
        sync = [uv, "sync", "--frozen", "--no-install-workspace", "--no-editable"]
        sync.append(f"--python={sys.executable}")
        _run([*sync, f"--project={source.parent}"], UV_PROJECT_ENVIRONMENT=str(place))
    else:
        if source.name == "uv.lock":
            source = source.with_name("pyproject.toml")
            log.info("there is no uv, so the versions of uv.lock are not used")
        wanted, texts = [f"--requirement={source}"], [*_texts(source, set())]
        if source.name == "pyproject.toml":
            texts = _dependencies(source)
            wanted = ["--", *texts]
        if found := next(filter(None, map(_LOCAL.search, texts)), None):
            raise RequestError(
                f"{source.name} has {found[0].strip()!r}: a directory is not installed, and your "
                "tasks have the code that you submit. Remove that line. [CD1407]"
            )
        if uv:
            _run([uv, "venv", f"--python={sys.executable}", str(place)])
            _run([uv, "pip", "install", f"--python={python}", *wanted])
        else:
            # -I: neither the work tree nor a PYTHONPATH has modules or packages for them.
            _run([sys.executable, "-I", "-m", "venv", str(place)])
            _run([python, "-I", "-m", "pip", "install", "--disable-pip-version-check", *wanted])
    has_torch = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('torch'))"
    if subprocess.call([python, "-I", "-c", has_torch]):
        log.info(f"{source.name} does not bring torch: training needs it")


def _dependencies(path: Path) -> list[str]:
    """Return the packages that a pyproject.toml lists. Raises RequestError if it lists none."""
    project = toml_file.read("env create", path).get("project", {})
    listed = project.get("dependencies") if isinstance(project, dict) else None
    if not listed or not isinstance(listed, list):
        raise RequestError(
            f"{path.name} has no list 'dependencies' in [project]. Write your packages there, or "
            "into a requirements.txt. [CD1407]"
        )
    return [str(each) for each in listed]


def _run(argv: list[str], **variables: str) -> None:
    """Run a program that shows its progress. Raises RequestError if it fails."""
    log.info(f"{Path(argv[0]).name} {' '.join(argv[1:])}")
    environ = {**os.environ, "PIP_USER": "0", **variables}
    code = subprocess.call(argv, env=environ, stdin=subprocess.DEVNULL, stdout=2, close_fds=False)
    if code:
        name = argv[3] if argv[1] == "-I" else Path(argv[0]).name
        raise RequestError(
            f"{name} ended with exit code {code}, so the environment was not made. "
            "See its own words above. [CD1407]"
        )

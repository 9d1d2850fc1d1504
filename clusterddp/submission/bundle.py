"""Puts clusterddp itself into a run, as one file that Python runs and imports from: a zipapp.

    clusterddp-0.1.1-3f2a9c41d07b.pyz   the package and click, named by version and digest
    clusterddp.pyz                      leads to it
    __pycache__/                        its bytecode, for the Python that made it

The same sources give the same bytes. Python compiles what it imports from a zip file at each start,
a fifth of a second for a rank: so the bytecode lies beside it, and a Python that it suits reads it
from there. Without it everything works, and starts later.
"""

import contextlib
import hashlib
import importlib.util
import io
import marshal
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from clusterddp import log
from clusterddp.errors import RequestError
from clusterddp.run.attempt import link
from clusterddp.run.files import write_atomically
from clusterddp.run.run_dir import RunDir
from clusterddp.version import __version__, own_file

_DIGITS = 12
_UNCHECKED_HASH = 1
"""Flag of bytecode that is not compared with its source (PEP 552)."""

# Python 2.7 parses it too. It is the whole of `python FILE`, so it can rely on nothing but that.
_MAIN = '''\
"""Runs the clusterddp in this file, where the interpreter suits it and the file is as it was."""

import os
import sys


def check():
    if sys.version_info < (3, 10):
        sys.exit(
            "clusterddp: %s on %s is Python %s, and clusterddp needs 3.10 or later. Name another "
            "interpreter: --python for the tasks, --batch-python for the batch script."
            % (sys.executable, os.uname()[1], sys.version.split()[0])
        )
    import hashlib
    import importlib.util

    path = os.path.realpath(sys.path[0])
    folder, name = os.path.split(path)
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()[:12]
    if not name.endswith("-%s.pyz" % digest):
        import shlex

        sys.exit(
            "clusterddp: %s was altered or damaged: its digest is %s. Give the run another one: "
            "clusterddp resubmit %s --clusterddp new" % (path, digest, shlex.quote(folder))
        )
    magic = importlib.util.MAGIC_NUMBER.hex()
    bytecode = os.path.join(folder, "__pycache__", "%s.%s.zip" % (name[:-4], magic))
    sys.path[:1] = [bytecode, path] if os.path.isfile(bytecode) else [path]


check()

from clusterddp.__main__ import main

main()
'''


@dataclass(frozen=True)
class Bundle:
    """File that holds a clusterddp, by its path."""

    path: Path

    @property
    def version(self) -> str:
        """Return the version, by the file's name."""
        return self.path.name.split("-")[1]

    def __str__(self) -> str:
        """Return version and digest, `0.1.1 (3f2a9c41d07b)`."""
        return f"{self.version} ({self.path.stem.split('-')[-1]})"


def carry(run: RunDir) -> Bundle:
    """Put the clusterddp that is at work into a run, in place of another one; returns it.

    What was there stays: its attempts ran with it. Raises RequestError where it cannot be written;
    the run then leads to the former one.
    """
    content = build()
    path = run.path.resolve() / _name(content)
    is_new = not path.exists()
    try:
        write_atomically(path, content)  # one that is there may be damaged
        link(run.bundle, path.name)
    except OSError as error:
        if is_new:
            path.unlink(missing_ok=True)
        raise RequestError(
            f"cannot put clusterddp into the run, {path} ({len(content) / 1e6:.1f} MB): "
            f"{error.strerror}. Make room there, or choose another --output-root."
        ) from None
    _keep_bytecode(path)
    return Bundle(path)


@contextlib.contextmanager
def renewed(run: RunDir) -> Iterator[list[str]]:
    """Carry the clusterddp that is at work, while the body submits the run.

    The run goes back to the former one when the body raises RequestError. Yields what changes, a
    line or none. Raises RequestError as `carry` does.
    """
    former = _carried(run)
    made = carry(run)
    try:
        yield [] if made == former else [f"clusterddp {former or 'installed'}, now {made}"]
    except RequestError:
        if former is None:
            run.bundle.unlink()
        else:
            link(run.bundle, former.path.name)
        if made != former:
            for file in (made.path, _bytecode(made.path)):
                file.unlink(missing_ok=True)
        raise


def keep(run: RunDir) -> None:
    """Make sure of the file that a run goes on with; log where another one is installed.

    Raises RequestError as `find` does.
    """
    carried = find(run)
    installed = Bundle(run.path.resolve() / _name(build()))
    if carried and carried != installed:
        log.info(
            f"{run.name} goes on with its own clusterddp {carried}; installed is {installed}. "
            "Use --clusterddp new to take that."
        )


def find(run: RunDir) -> Bundle | None:
    """Find the file that a run carries, undamaged; None where it uses an installed clusterddp.

    Raises RequestError where it is gone, or not the file that it was.
    """
    carried = _carried(run)
    if carried is None:
        return None
    remedy = f"Give the run another one: clusterddp resubmit {run.shown} --clusterddp new"
    try:
        content = carried.path.read_bytes()
    except OSError as error:
        raise RequestError(
            f"the clusterddp of {run.name}, {carried.path}, cannot be read: {error.strerror}. "
            f"{remedy}"
        ) from None
    if carried.path.stem[-_DIGITS:] != _digest(content):
        raise RequestError(f"the clusterddp of {run.name}, {carried.path}, was altered. {remedy}")
    return carried


def build() -> bytes:
    """Make the file: the same bytes of the same sources, whatever Python makes it.

    Nothing is compressed: that takes longer than to write it, and differs between libraries.
    """
    if own_file():
        return Path(own_file()).read_bytes()
    sources = {name: path.read_bytes() for name, path in _sources().items()}
    return _zip({"__main__.py": _MAIN.encode(), **sources})


def _carried(run: RunDir) -> Bundle | None:
    """Return the file to which the run leads, as it is."""
    return Bundle(run.bundle.resolve()) if run.bundle.is_symlink() else None


def _name(content: bytes) -> str:
    return f"clusterddp-{__version__}-{_digest(content)}.pyz"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def _bytecode(path: Path) -> Path:
    """Return where the bytecode of a file lies, for this Python."""
    magic = importlib.util.MAGIC_NUMBER.hex()
    return path.parent / "__pycache__" / f"{path.stem}.{magic}.zip"


def _sources() -> dict[str, Path]:
    """Map the name of each module's file in the zip file to where it is installed."""
    click = importlib.util.find_spec("click")
    assert click and click.origin, "the command cannot do without it"
    packages = (Path(__file__).parents[1], Path(click.origin).parent)
    found = {
        path.relative_to(package.parent).as_posix(): path
        for package in packages
        for path in package.rglob("*.py")
        if path.stem.isidentifier()  # and no editor's own file
    }
    return dict(sorted(found.items()))


def _zip(contents: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in contents.items():
            item = zipfile.ZipInfo(name)  # of 1980, as all of them
            item.create_system, item.external_attr = 3, 0o644 << 16  # Unix, rw-r--r--
            archive.writestr(item, content)
    return made.getvalue()


def _keep_bytecode(path: Path) -> None:
    """Keep the modules' bytecode beside the file, where the installation has it or takes it.

    It is compiled once for all runs, into the installation's own `__pycache__`.
    """
    file = _bytecode(path)
    kept = Path(importlib.util.cache_from_source(__file__)).with_name(file.name)
    with contextlib.suppress(OSError):
        if not kept.is_file():
            _compile(kept, path.name)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(file, kept.read_bytes())


def _compile(kept: Path, file: str) -> None:
    """Write the bytecode of all modules of the file. Raises OSError, before it compiles any."""
    if sys.dont_write_bytecode or own_file():
        raise FileNotFoundError
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=kept.parent):  # may something be written there?
        for former in kept.parent.glob(f"clusterddp-*{kept.suffixes[-2]}.zip"):
            former.unlink()
    head = importlib.util.MAGIC_NUMBER + struct.pack("<IQ", _UNCHECKED_HASH, 0)
    contents = {}
    for name, source in _sources().items():
        code = SourceFileLoader(name, str(source)).get_code(name)
        assert code, "a source has code"
        contents[f"{name}c"] = head + marshal.dumps(_moved(code, f"{file}/{name}"))
    write_atomically(kept, _zip(contents))
    kept.chmod(0o644)  # for everybody who uses the installation, as Python's own


def _moved(code: CodeType, path: str) -> CodeType:
    """Return code whose tracebacks name another path."""
    inner = (_moved(each, path) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=path, co_consts=tuple(inner))

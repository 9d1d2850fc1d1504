"""Puts clusterddp itself into a run, as one file that Python runs and imports from: a zipapp.

    clusterddp-0.1.1-3f2a9c41d07b.pyz   the package, and click in a folder of its own, named by
                                        version and digest
    clusterddp.pyz                      leads to it
    __pycache__/                        its bytecode, for the Python that made it

A COMMAND has the file on its path, for `clusterddp.loop`, and sees the package there alone: click
is for the program that the file is. The same sources give the same bytes.

Python compiles what it imports from a zip file at each start: so the bytecode lies beside it, and a
Python that it suits reads it from there, where its digest is that of its name. Without it
everything works, and starts later.
"""

import contextlib
import hashlib
import importlib.util
import io
import marshal
import os
import struct
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp import log
from clusterddp.errors import RequestError
from clusterddp.files import write_atomically
from clusterddp.run.attempt import link
from clusterddp.run.run_dir import RunDir
from clusterddp.version import __version__, bundle_file

_DIGITS = 12
_CLICK = "beside"
"""Folder of the file that only its own program puts on the path."""
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
            "interpreter: --python for the tasks, --controller-python for the batch script."
            % (sys.executable, os.uname()[1], sys.version.split()[0])
        )
    path = os.path.realpath(sys.path[0])
    folder, name = os.path.split(path)
    digest = digest_of(path)
    if not name.endswith("-%s.pyz" % digest):
        import shlex

        sys.exit(
            "clusterddp: %s was altered or damaged: its digest is %s. Give the run another one: "
            "clusterddp resume %s --clusterddp new" % (path, digest, shlex.quote(folder))
        )
    sys.path[:1] = [path, path + "/CLICK"]
    import importlib.util

    bytecode = "%s.%s-" % (name[:-4], importlib.util.MAGIC_NUMBER.hex())
    folder = os.path.join(folder, "__pycache__")
    try:
        for name in os.listdir(folder):
            file = os.path.join(folder, name)
            if name.startswith(bytecode) and name.endswith("-%s.zip" % digest_of(file)):
                sys.path[:0] = [file, file + "/CLICK"]
                break
    except OSError:
        pass  # there is none, or it cannot be read


def digest_of(path):
    import hashlib

    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:DIGITS]


check()

from clusterddp.__main__ import main

main()
'''.replace("DIGITS", str(_DIGITS)).replace("CLICK", _CLICK)


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
            f"{error.strerror}. Make room there, or choose another --runs-dir. [CD0504]"
        ) from None
    _keep_bytecode(path, content)
    return Bundle(path)


def carry_at_start(run: RunDir) -> None:
    """Have a run that was sent by hand, such as an array's element, carry this clusterddp.

    Logs it, or why it cannot: that must not end the attempt.
    """
    try:
        log.info(f"the run carries clusterddp {carry(run)} from now on")
    except Exception as error:
        log.info(f"the run uses the clusterddp that is installed: {error}")


@contextlib.contextmanager
def renewed(run: RunDir) -> Iterator[list[str]]:
    """Carry the clusterddp that is at work, while the body submits the run.

    The run goes back to the former one when the body raises RequestError. Yields what changes, a
    line or none. Raises RequestError as `carry` does.
    """
    former, target = _carried(run), _target(run)
    new = carry(run)
    try:
        yield [] if new == former else [f"clusterddp {former or 'installed'}, now {new}"]
    except RequestError:
        if former is None:
            run.bundle.unlink()
        else:
            link(run.bundle, target)  # that of a sweep's point lies with the sweep
        if new != former:
            for file in (new.path, *_bytecode(new.path.parent / "__pycache__", new.path)):
                file.unlink(missing_ok=True)
        raise


def keeps(run: RunDir) -> bool:
    """Return whether the file that a run carries is whole, or it needs none; logs what it is.

    It is another clusterddp than the installed one, or gone, or damaged.
    """
    installed = Bundle(run.path.resolve() / _name(build()))
    try:
        carried = find(run)
    except RequestError as error:
        log.info(f"{str(error).partition('. Give')[0]}: the run carries {installed} from now on")
        return False
    if carried and carried.path.name != installed.path.name:
        log.info(
            f"{run.name} keeps its clusterddp {carried}; {installed} is installed. Take that with "
            "--clusterddp new."
        )
    return True


def find(run: RunDir) -> Bundle | None:
    """Find the file that a run carries, undamaged; None where it uses an installed clusterddp.

    Raises RequestError where it is gone, or not the file that it was.
    """
    carried = _carried(run)
    if carried is None:
        return None
    remedy = f"Give the run another one: clusterddp resume {run.cli_name} --clusterddp new"
    try:
        content = carried.path.read_bytes()
    except OSError as error:
        raise RequestError(
            f"the clusterddp of {run.name}, {carried.path}, cannot be read: {error.strerror}. "
            f"{remedy} [CD0314]"
        ) from None
    if not _is_whole(carried.path, content):
        raise RequestError(
            f"the clusterddp of {run.name}, {carried.path}, was altered. {remedy} [CD0314]"
        )
    return carried


def build() -> bytes:
    """Make the file: the same bytes of the same sources, whatever Python makes it.

    Nothing is compressed: that takes longer than to write it, and differs between libraries.
    """
    if bundle_file():
        return Path(bundle_file()).read_bytes()
    click = importlib.util.find_spec("click")
    assert click and click.origin, "the command cannot do without it"
    packages = {Path(__file__).parents[1]: "", Path(click.origin).parent: _CLICK}
    sources = {
        (Path(folder) / path.relative_to(package.parent)).as_posix(): path
        for package, folder in packages.items()
        for path in package.rglob("*.py")
        if path.stem.isidentifier()  # and no editor's own file
    }
    contents = {name: path.read_bytes() for name, path in sorted(sources.items())}
    return _zip({"__main__.py": _MAIN.encode(), **contents})


def _carried(run: RunDir) -> Bundle | None:
    """Return the file to which the run leads, as it is."""
    return Bundle(run.bundle.resolve()) if run.bundle.is_symlink() else None


def _target(run: RunDir) -> str:
    return str(run.bundle.readlink()) if run.bundle.is_symlink() else ""


def _name(content: bytes) -> str:
    return f"clusterddp-{__version__}-{_digest(content)}.pyz"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def _is_whole(path: Path, content: bytes) -> bool:
    """Return whether a file has the digest that its name says."""
    return path.stem.endswith(f"-{_digest(content)}")


def _zip(contents: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            item = zipfile.ZipInfo(name)  # of 1980, as all of them
            item.create_system, item.external_attr = 3, 0o644 << 16  # Unix, rw-r--r--
            archive.writestr(item, content)
    return file.getvalue()


def _bytecode(folder: Path, path: Path) -> list[Path]:
    """List the bytecode of a file for this Python: one in most cases."""
    return sorted(folder.glob(f"{path.stem}.{importlib.util.MAGIC_NUMBER.hex()}-*.zip"))


def _keep_bytecode(path: Path, content: bytes) -> None:
    """Keep the modules' bytecode beside the file, where the installation has it or takes it.

    It is compiled once for all runs, into the installation's own `__pycache__`; what another user
    could have written there is not read.
    """
    kept = Path(importlib.util.cache_from_source(__file__)).parent
    folder = path.parent / "__pycache__"
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # a checkout that is being edited
        folder.mkdir(mode=0o700, exist_ok=True)
        if kept.exists() and not _is_trusted(kept):
            kept = folder
        files = [
            file
            for file in _bytecode(kept, path)
            if _is_trusted(file) and _is_whole(file, file.read_bytes())
        ]
        file = files[0] if files else _compile(kept, path, content)
        write_atomically(folder / file.name, file.read_bytes())


def _is_trusted(path: Path) -> bool:
    status, owners = path.stat(), (os.geteuid(), Path(__file__).stat().st_uid, 0)
    return status.st_uid in owners and not status.st_mode & 0o022


def _compile(kept: Path, path: Path, content: bytes) -> Path:
    """Write the bytecode of the file's modules. Raises OSError, before it compiles any."""
    if sys.dont_write_bytecode or bundle_file():
        raise FileNotFoundError
    kept.mkdir(parents=True, exist_ok=True)
    magic = importlib.util.MAGIC_NUMBER
    with tempfile.TemporaryFile(dir=kept):  # may something be written there?
        for former in kept.glob(f"clusterddp-*.{magic.hex()}-*.zip"):
            former.unlink(missing_ok=True)
    head = magic + struct.pack("<IQ", _UNCHECKED_HASH, 0)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        sources = {name: archive.read(name) for name in archive.namelist() if "/" in name}
    compiled = _zip(
        {
            f"{name}c": head
            + marshal.dumps(
                compile(source, f"{path.name}/{name}", "exec", dont_inherit=True, optimize=0)
            )
            for name, source in sources.items()
        }
    )
    file = kept / f"{path.stem}.{magic.hex()}-{_digest(compiled)}.zip"
    write_atomically(file, compiled)
    file.chmod(0o644)  # for everybody who uses the installation, as Python's own
    return file

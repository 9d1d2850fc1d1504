"""Bundle of clusterddp in a run's directory: a zipapp, one file that Python runs and imports from.

    clusterddp-0.2.0-3f2a9c41d07b.pyz   the package and, in a separate directory, click; the name
                                        has the version and a digest
    clusterddp.pyz                      symbolic link to it
    __pycache__/                        its bytecode, for the Python that compiled it

A COMMAND has the file on its path, for `clusterddp.loop`. It can import the package but not click,
which only the bundle's own program uses. The same sources give the same bytes.

Python compiles modules from a zip file at each start. The bundle's bytecode is therefore stored
next to it; a Python of the same version loads it if its digest matches its name. Without the
bytecode everything works but starts more slowly.
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
_CLICK = "vendored"
"""Directory in the bundle that only the bundle's own program puts on the path."""
_UNCHECKED_HASH = 1
"""Flag of bytecode that is not compared with its source (PEP 552)."""

# Python 2.7 must parse it too: any interpreter can be given for `python FILE`.
_MAIN = '''\
"""Run the clusterddp in this file if the interpreter is supported and the file is intact."""

import os
import sys


def check():
    if sys.version_info < (3, 10):
        sys.exit(
            "clusterddp: %s on %s is Python %s; clusterddp needs 3.10 or later. Choose another "
            "interpreter: --python for the tasks, --controller-python for the batch script."
            % (sys.executable, os.uname()[1], sys.version.split()[0])
        )
    path = os.path.realpath(sys.path[0])
    folder, name = os.path.split(path)
    digest = digest_of(path)
    if not name.endswith("-%s.pyz" % digest):
        import shlex

        sys.exit(
            "clusterddp: %s was altered or damaged: its digest is %s. Replace it: "
            "clusterddp resume %s --upgrade-clusterddp" % (path, digest, shlex.quote(folder))
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
        pass  # no bytecode, or unreadable


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
    """File that contains a clusterddp."""

    path: Path

    @property
    def version(self) -> str:
        """Version in the file's name."""
        return self.path.name.split("-")[1]

    def __str__(self) -> str:
        """Return version and digest, `0.2.0 (3f2a9c41d07b)`."""
        return f"{self.version} ({self.path.stem.split('-')[-1]})"


def bundle_into(run: RunDir) -> Bundle:
    """Bundle the clusterddp of this process into a run, and return the bundle.

    Earlier bundles stay, because earlier attempts ran with them. Raises RequestError if the bundle
    cannot be written; the run then keeps its current one.
    """
    content = build()
    path = run.path.resolve() / _name(content)
    is_new = not path.exists()
    try:
        write_atomically(path, content)  # an existing file may be damaged
        link(run.bundle, path.name)
    except OSError as error:
        if is_new:
            path.unlink(missing_ok=True)
        raise RequestError(
            f"cannot write clusterddp's bundle {path} ({len(content) / 1e6:.1f} MB): "
            f"{error.strerror}. Free space there or choose another --runs-dir. [CD0504]"
        ) from None
    _store_bytecode(path, content)
    return Bundle(path)


def bundle_manual_run(run: RunDir) -> None:
    """Bundle this clusterddp into a run that was submitted by hand, for example one array task.

    Log the result. A failure must not end the attempt.
    """
    try:
        log.info(f"the run now uses its own copy of clusterddp, {bundle_into(run)}")
    except Exception as error:
        log.info(f"the run uses the installed clusterddp: {error}")


@contextlib.contextmanager
def replaced_bundle(run: RunDir) -> Iterator[list[str]]:
    """Bundle the clusterddp of this process into a run while the body submits the run.

    Yields the change as at most one line. If the body raises RequestError, the run gets its former
    bundle back. Raises RequestError as `bundle_into` does.
    """
    former, target = _current(run), _target(run)
    new = bundle_into(run)
    try:
        yield [] if new == former else [f"clusterddp {former or 'installed'}, now {new}"]
    except RequestError:
        if former is None:
            run.bundle.unlink()
        else:
            link(run.bundle, target)  # a trial's target is in the sweep's directory
        if new != former:
            for file in (new.path, *_bytecode(new.path.parent / "__pycache__", new.path)):
                file.unlink(missing_ok=True)
        raise


def verify_bundle(run: RunDir) -> bool:
    """Return whether a run's bundle is intact, or the run has none.

    Log a bundle that is missing, damaged or not the installed clusterddp.
    """
    installed = Bundle(run.path.resolve() / _name(build()))
    try:
        current = find(run)
    except RequestError as error:
        log.info(f"{str(error).partition('. Replace')[0]}: replaced by {installed}")
        return False
    if current and current.path.name != installed.path.name:
        log.info(
            f"{run.name} keeps its clusterddp {current}; {installed} is installed. To switch: "
            "--upgrade-clusterddp"
        )
    return True


def find(run: RunDir) -> Bundle | None:
    """Return a run's intact bundle, or None if the run uses an installed clusterddp.

    Raises RequestError if the bundle is missing or altered.
    """
    current = _current(run)
    if current is None:
        return None
    remedy = f"Replace it: clusterddp resume {run.cli_name} --upgrade-clusterddp"
    try:
        content = current.path.read_bytes()
    except OSError as error:
        raise RequestError(
            f"the clusterddp of {run.name}, {current.path}, cannot be read: {error.strerror}. "
            f"{remedy} [CD0314]"
        ) from None
    if not _is_intact(current.path, content):
        raise RequestError(
            f"the clusterddp of {run.name}, {current.path}, was altered. {remedy} [CD0314]"
        )
    return current


def build() -> bytes:
    """Return the bundle's content: the same bytes for the same sources, on every Python.

    The zip is not compressed: compressing takes longer than writing, and zlib versions differ.
    """
    if bundle_file():
        return Path(bundle_file()).read_bytes()
    click = importlib.util.find_spec("click")
    assert click and click.origin, "the command line requires click"
    packages = {Path(__file__).parents[1]: "", Path(click.origin).parent: _CLICK}
    sources = {
        (Path(folder) / path.relative_to(package.parent)).as_posix(): path
        for package, folder in packages.items()
        for path in package.rglob("*.py")
        if path.stem.isidentifier()  # skips editors' backup files
    }
    contents = {name: path.read_bytes() for name, path in sorted(sources.items())}
    return _zip({"__main__.py": _MAIN.encode(), **contents})


def _current(run: RunDir) -> Bundle | None:
    """Return the target of the run's link, unverified."""
    return Bundle(run.bundle.resolve()) if run.bundle.is_symlink() else None


def _target(run: RunDir) -> str:
    return str(run.bundle.readlink()) if run.bundle.is_symlink() else ""


def _name(content: bytes) -> str:
    return f"clusterddp-{__version__}-{_digest(content)}.pyz"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def _is_intact(path: Path, content: bytes) -> bool:
    """Return whether the content's digest is the one in the file's name."""
    return path.stem.endswith(f"-{_digest(content)}")


def _zip(contents: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in contents.items():
            item = zipfile.ZipInfo(name)  # its default date, 1980, is the same for all
            item.create_system, item.external_attr = 3, 0o644 << 16  # Unix, rw-r--r--
            archive.writestr(item, content)
    return file.getvalue()


def _bytecode(folder: Path, path: Path) -> list[Path]:
    """List the bytecode files of a bundle for this Python, usually one."""
    return sorted(folder.glob(f"{path.stem}.{importlib.util.MAGIC_NUMBER.hex()}-*.zip"))


def _store_bytecode(path: Path, content: bytes) -> None:
    """Store the modules' bytecode next to the bundle.

    It is compiled once for all runs, into the installation's own `__pycache__` if that is writable.
    Files there that another user could have written are ignored.
    """
    cache = Path(importlib.util.cache_from_source(__file__)).parent
    folder = path.parent / "__pycache__"
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # a checkout that is being edited
        folder.mkdir(mode=0o700, exist_ok=True)
        if cache.exists() and not _is_trusted(cache):
            cache = folder
        files = [
            file
            for file in _bytecode(cache, path)
            if _is_trusted(file) and _is_intact(file, file.read_bytes())
        ]
        file = files[0] if files else _compile(cache, path, content)
        write_atomically(folder / file.name, file.read_bytes())


def _is_trusted(path: Path) -> bool:
    status, owners = path.stat(), (os.geteuid(), Path(__file__).stat().st_uid, 0)
    return status.st_uid in owners and not status.st_mode & 0o022


def _compile(cache: Path, path: Path, content: bytes) -> Path:
    """Write the bytecode of the bundle's modules.

    Raises OSError, before compiling, if the directory is not writable.
    """
    if sys.dont_write_bytecode or bundle_file():
        raise FileNotFoundError
    cache.mkdir(parents=True, exist_ok=True)
    magic = importlib.util.MAGIC_NUMBER
    with tempfile.TemporaryFile(dir=cache):  # raises if nothing can be written
        for former in cache.glob(f"clusterddp-*.{magic.hex()}-*.zip"):
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
    file = cache / f"{path.stem}.{magic.hex()}-{_digest(compiled)}.zip"
    write_atomically(file, compiled)
    file.chmod(0o644)  # readable for all users of the installation, like Python's own
    return file

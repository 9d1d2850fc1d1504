"""The clusterddp that is carried to a cluster: a directory of sources that any Python runs.

It has jinja2, the templates, sites and error pages, which a run's own bundle lacks.
"""

import gzip
import hashlib
import importlib.util
import io
import os
import tarfile
from pathlib import Path

from clusterddp.version import __version__

_PACKAGES = ("clusterddp", "click", "jinja2", "markupsafe", "tomli")
"""tomli is there only before Python 3.11."""
# Python 2.7 must parse it too, as for a run's bundle.
_MAIN = '''\
"""Run one command for a user on another machine."""
import os, sys

if sys.version_info < (3, 10):
    version = sys.version.split()[0]
    sys.stderr.write(
        "clusterddp: %s there is Python %s; clusterddp needs 3.10 or later. Set python = PATH in "
        "the cluster's section of site.cfg. [CD1403]\\n" % (sys.executable, version)
    )
    os.write(1, b"x\\0\\0\\0\\1" + b"2")  # a frame: exit code 2
    sys.exit(2)
from clusterddp.__main__ import main as command
from clusterddp.remote.far import main

main(command)
'''
UNPACK = """\
import io, os, shutil, sys, tarfile, tempfile
left, content = int(sys.argv[1]), []
while left:
    chunk = os.read(0, left)
    if not chunk:
        sys.exit(1)
    content.append(chunk)
    left -= len(chunk)
target = sys.argv[2]
draft = tempfile.mkdtemp(prefix=os.path.basename(target) + ".", dir="clients")
with tarfile.open(fileobj=io.BytesIO(b"".join(content))) as archive:
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    try:
        archive.extractall(draft, **safe)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
former = []
for name in os.listdir("clients"):
    try:
        if not name.startswith("python"):
            former.append((os.stat("clients/" + name).st_mtime, "clients/" + name))
    except OSError:
        pass  # another session has removed it
for _, path in sorted(former)[:-4]:
    old = "%s.old.%d" % (path, os.getpid())
    try:
        os.rename(path, old)  # a part would be used as the whole
        shutil.rmtree(old, ignore_errors=True)
    except OSError:
        pass
try:
    os.rename(draft, target)
except OSError:
    shutil.rmtree(draft)
    if not os.path.isdir(target):
        raise
"""
"""Program of the other side: it takes argv[1] bytes from stdin and keeps a few former clients."""


def version() -> str:
    """Identify the sources by their names, sizes and times: no file is read."""
    digest = hashlib.sha256()
    for name, path in _files().items():
        status = path.stat()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return f"{__version__}-{digest.hexdigest()[:12]}"


def archive() -> bytes:
    """Return the sources as tar.gz."""
    file = io.BytesIO()
    contents = {name: path.read_bytes() for name, path in _files().items()}
    with (
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as members,
    ):
        for name, content in {**contents, "far.py": _MAIN.encode()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))
    return file.getvalue()


def _files() -> dict[str, Path]:
    """Map names in the client to files."""
    found: dict[str, Path] = {}
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            found |= _below(Path(spec.origin).parent, package)
    beside = Path(__file__).parents[2] / "templates"  # a checkout's
    if not (Path(__file__).parents[1] / "templates").is_dir():
        found |= _below(beside, "clusterddp/templates")
    return dict(sorted(found.items()))


def _below(folder: Path, name: str) -> dict[str, Path]:
    files: dict[str, Path] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir() and entry.name != "__pycache__":
                files |= _below(Path(entry.path), f"{name}/{entry.name}")
            elif entry.is_file() and not entry.name.endswith((".so", ".pyc", ".c")):
                files[f"{name}/{entry.name}"] = Path(entry.path)
    return files

"""Settings files for public clusters, based on the clusters' documentation.

Each is a site.cfg with header comments: the first line is a title; `# Page:`, `# Read:`,
`# Tried:` and `# Hosts:` give the sources, their date, the tests made, and the host names that
identify the cluster in addition to its name.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from clusterddp.errors import RequestError
from clusterddp.request.options import nearest, user_file

FOLDER = Path(__file__).resolve().parents[1] / "sites"
_HEAD = re.compile(r"^# (Page|Read|Tried|Hosts): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class PublicSite:
    """Header of one file."""

    name: str
    title: str
    pages: tuple[str, ...]
    read: str
    """Date of the pages, and their version."""
    tried: str
    hosts: tuple[str, ...] = ()
    """Shell patterns of its login nodes' names."""

    def fits(self, cluster: str, host: str) -> bool:
        """Return whether the cluster's name or the host's matches."""
        return cluster.lower() == self.name or any(fnmatchcase(host, each) for each in self.hosts)


def read_sites() -> dict[str, PublicSite]:
    """Return the headers of the shipped files by name; empty in a run's bundle, which has none."""
    files = sorted(FOLDER.glob("*.cfg")) if FOLDER.is_dir() else ()
    return {path.stem: _head(path.stem, path.read_text(encoding="utf-8")) for path in files}


def fitting(sites: Mapping[str, PublicSite], cluster: str, host: str) -> list[str]:
    """Return the names of the sites that match a cluster or host name."""
    return [name for name, site in sites.items() if site.fits(cluster, host)]


def use(name: str, environ: Mapping[str, str], *, force: bool = False) -> tuple[Path, Path | None]:
    """Write a site's file as the user's site.cfg; return its path and that of a backup, if any.

    With `force` an existing file is renamed to site.cfg.old. Raises RequestError for an unknown
    name, an existing file with other content, a backup that would be overwritten, or a path that
    cannot be written.
    """
    sites = read_sites()
    if name not in sites:
        raise RequestError(
            f"there is no site {name!r}{nearest(name, sites)}. To list the sites: 'clusterddp "
            "site list'. [CD0201]"
        )
    if not (environ.get("XDG_CONFIG_HOME") or environ.get("HOME")):
        raise RequestError("neither HOME nor XDG_CONFIG_HOME is set. Set one of them. [CD0201]")
    path, content = user_file(environ), (FOLDER / f"{name}.cfg").read_bytes()
    before = path.with_name("site.cfg.old") if os.path.lexists(path) else None
    try:
        if before and not path.is_dir() and path.exists() and path.read_bytes() == content:
            return path, None
        if before and not force:
            raise RequestError(
                f"{path} already exists with other settings and was not changed. To rename it to "
                "site.cfg.old, add --force. [CD0201]"
            )
        if before and os.path.lexists(before) and not _same(path, before):
            raise RequestError(
                f"{before} already exists and would be overwritten; nothing was changed. Move it "
                "first. [CD0201]"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, content, before)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}. [CD0201]") from None
    return path, before


def _same(one: Path, other: Path) -> bool:
    """Return whether both are files with the same content."""
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def _write(path: Path, content: bytes, before: Path | None) -> None:
    """Replace the file atomically."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix="site.cfg.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        if before:
            path.replace(before)
        Path(draft).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(draft).unlink()
        raise


def _head(name: str, text: str) -> PublicSite:
    title, _, rest = text.partition("\n")
    said: dict[str, list[str]] = {"Page": [], "Read": [], "Tried": [], "Hosts": []}
    for key, value in _HEAD.findall(rest):
        said[key].append(value)
    return PublicSite(
        name,
        title.removeprefix("# "),
        tuple(said["Page"]),
        " ".join(said["Read"]),
        " ".join(said["Tried"]),
        tuple(" ".join(said["Hosts"]).split()),
    )

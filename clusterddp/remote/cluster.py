"""A cluster that `--on` names: a host of ssh, or a section of site.cfg."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from clusterddp.errors import RequestError
from clusterddp.request.options import find_site, read_site
from clusterddp.request.spec import OPTIONS

_HOST = re.compile(r"(ssh://)?[\w.@%\[][\w.@:%\[\]-]*/?", re.ASCII)
_FOLDER = re.compile(r"(~|\$[A-Za-z_]\w*|)(/[^\n\0]*)?", re.ASCII)


@dataclass(frozen=True)
class Cluster:
    """Place where commands run. Raises RequestError for a host or folder that cannot be used."""

    name: str
    """As typed after --on."""
    host: str
    folder: str = "~/clusterddp"
    """Directory there; may begin with `~` or a variable of the login node."""
    python: str = ""
    """Its interpreter; looked for if empty."""
    before: str = ""
    """Lines of sh before each command."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """CLUSTERDDP_* variables of the section's other settings."""
    similar: str = ""
    """For a name without a section: the section that may have been meant."""

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host):
            raise RequestError(
                f"--on {self.name}: {self.host!r} is not a host. Give a name that 'ssh' knows, or "
                "that of a section [cluster:NAME] of site.cfg with host = HOST. [CD1401]"
            )
        if not self.folder or not _FOLDER.fullmatch(self.folder):
            raise RequestError(
                f"[cluster:{self.name}]: folder = {self.folder!r} is not an absolute path. Begin "
                "it with /, ~/ or $VARIABLE/. [CD1401]"
            )

    @property
    def folder_parts(self) -> tuple[str, str]:
        """Return what the login node's shell expands, and the rest, unchanged."""
        found = _FOLDER.fullmatch(self.folder)
        assert found, "checked above"
        return found[1].replace("~", "$HOME"), found[2] or ""


def with_hosts(environ: Mapping[str, str], folder: Path) -> list[Cluster]:
    """Return the clusters of site.cfg that have a host. Raises RequestError."""
    path = find_site(None, environ, folder)
    names = read_site(path, None, OPTIONS).clusters
    hosts = {name for name in names if "host" in read_site(path, name, OPTIONS).place}
    return [find(name, environ, folder) for name in names if name in hosts]


def find(name: str, environ: Mapping[str, str], folder: Path) -> Cluster:
    """Return the cluster of a section of site.cfg, or else of a host.

    folder: where `site.cfg` is looked for first. Raises RequestError.
    """
    path = find_site(None, environ, folder)
    known = read_site(path, None, OPTIONS).clusters
    if name not in known:
        return Cluster(name, name, similar=next(iter(get_close_matches(name, known, 1)), ""))
    settings = read_site(path, name, OPTIONS)
    own = f"{path} [cluster:{name}]"
    variables = {
        f"CLUSTERDDP_{OPTIONS[key].parameter.upper()}": value
        for key, value in settings.values.items()
        if settings.sources[key] == own
    }
    return Cluster(
        name,
        settings.place.get("host", name),
        settings.place.get("folder", Cluster.folder),
        variables.get("CLUSTERDDP_PYTHON", ""),
        settings.place.get("before", ""),
        variables,
    )

"""Finds, reads and checks site.cfg: a site's own defaults for the request.

    [defaults]         settings for every run, by the names of submit's options
    [cluster:NAME]     settings on top of them, chosen by --cluster NAME
    [environment]      variables for every run

Lists (env, setup, module, sbatch …) take one item a line. Values are handed on as text; the
options that they stand in for convert and check them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.errors import RequestError

if TYPE_CHECKING:
    import configparser

SYSTEM_FILE = Path("/etc/clusterddp/site.cfg")
CLUSTER = "cluster:"


@dataclass(frozen=True)
class Site:
    """The settings of one site.cfg for one cluster, each with the section that it came from."""

    path: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    sections: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    clusters: tuple[str, ...] = ()

    def where(self, key: str) -> str:
        """`site.cfg [section]` of a setting, for messages and for `clusterddp site`."""
        return f"{self.path} [{self.sections[key]}]"


def find(given: str | None, environ: Mapping[str, str], folder: Path) -> Path | None:
    """The first that is there: --site, $CLUSTERDDP_SITE, ./site.cfg, the user's folder, /etc.

    Raises RequestError when a file was named and is not there.
    """
    named = given or environ.get("CLUSTERDDP_SITE")
    if named:
        if not Path(named).exists():
            raise RequestError(f"site configuration {named!r} is not found.")
        return Path(named)
    home = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config"
    for path in (folder / "site.cfg", Path(home) / "clusterddp" / "site.cfg", SYSTEM_FILE):
        if path.is_file():
            return path
    return None


def read(path: Path | None, cluster: str | None, known: Collection[str]) -> Site:
    """Read and check one file. `known` holds the names that a setting can have, with dashes.

    Raises RequestError for a file that cannot be read or parsed, a section or key that does not
    exist (naming the nearest), or a cluster that the file does not define.
    """
    if path is None:
        if cluster:
            raise RequestError(f"--cluster {cluster}: there is no site.cfg to define it.")
        return Site()
    import configparser  # not needed where no site.cfg is

    parser = configparser.ConfigParser(
        interpolation=None, default_section="\0", delimiters=("=",), empty_lines_in_values=False
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign] # variables' names keep their case
    try:
        parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
    except configparser.MissingSectionHeaderError as error:
        raise RequestError(
            f"{path}, line {error.lineno}: {error.line.strip()!r} stands in no section; begin the "
            "file with [defaults]."
        ) from None
    except configparser.Error as error:
        raise RequestError(f"{path}: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path} is not UTF-8 text.") from None
    return _check(path, parser, cluster, known)


def _check(
    path: Path, parser: configparser.ConfigParser, cluster: str | None, known: Collection[str]
) -> Site:
    clusters = tuple(s[len(CLUSTER) :] for s in parser.sections() if s.startswith(CLUSTER))
    for section in parser.sections():
        if section == "environment":
            continue
        if section != "defaults" and not section.startswith(CLUSTER):
            raise RequestError(
                f"{path}: unknown section [{section}]"
                f"{_near(section, ['defaults', 'environment'])}; "
                "there are [defaults], [cluster:NAME] and [environment]."
            )
        for key in parser[section]:
            if key not in known:
                raise RequestError(f"{path} [{section}]: unknown key {key!r}{_near(key, known)}.")
    if cluster and cluster not in clusters:
        raise RequestError(
            f"--cluster {cluster}: {path} defines {', '.join(clusters) or 'no clusters'}."
        )
    settings: dict[str, str] = {}
    sections: dict[str, str] = {}
    for section in ("defaults", f"{CLUSTER}{cluster}" if cluster else ""):
        if parser.has_section(section):
            settings.update(parser[section])
            sections.update(dict.fromkeys(parser[section], section))
    environment = dict(parser["environment"]) if parser.has_section("environment") else {}
    return Site(path, settings, sections, environment, clusters)


def _near(word: str, known: Collection[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""

"""Settings that nobody types: a site's own in site.cfg, the submitter's in SBATCH_* variables.

    [defaults]         settings for every run, by the names of submit's options
    [cluster:NAME]     settings on top of them, chosen by --cluster NAME
    [environment]      variables for every run

Lists (env, setup, module, sbatch …) take one item a line. Values are handed on as text; the options
convert and check them. sbatch would let SBATCH_* override the script's own directives, so they are
read here, rendered, and kept out of the submission (`slurm.command`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.errors import RequestError
from clusterddp.request.options import BARE_DIRECTIVES, PASSED_ON
from clusterddp.request.spec import EXPEDITE, OPTIONS, REQUEST

if TYPE_CHECKING:
    import configparser

SYSTEM_FILE = Path("/etc/clusterddp/site.cfg")
_CLUSTER = "cluster:"
_GPU_GRES = re.compile(r"(?:gres[:/])?gpu(?::(?P<type>[^:,=]+))??(?:[:=](?P<count>\d+))?")
_NO_REQUEUE = "SBATCH_NO_REQUEUE"


@dataclass(frozen=True)
class Settings:
    """Values of options by name, each with its source: a section of site.cfg or a variable."""

    path: Path | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    clusters: tuple[str, ...] = ()

    def with_sbatch(self, environ: Mapping[str, str]) -> Settings:
        """Return these settings below those that SBATCH_* variables give to options.

        Raises RequestError for an SBATCH_EXCLUSIVE that shares a node.
        """
        values = {row.name: environ[row.variable] for row in REQUEST if row.variable in environ}
        sources = {name: OPTIONS[name].variable for name in values}
        if "exclusive" in values:
            if values["exclusive"] not in ("", "exclusive"):
                raise RequestError(
                    f"SBATCH_EXCLUSIVE={values['exclusive']}: only whole nodes can be asked for "
                    "here; unset it, or use --exclusive."
                )
            values["exclusive"] = "yes"  # sbatch takes the variable's being there as a yes
        # sbatch takes these two by their being there as well (a newer one heeds the word expedite);
        # the second of them wins.
        if "requeue" in values:
            values["requeue"] = EXPEDITE if values["requeue"].lower() == EXPEDITE else "yes"
        if _NO_REQUEUE in environ:
            values["requeue"], sources["requeue"] = "no", _NO_REQUEUE
        gpus = _GPU_GRES.fullmatch(environ.get("SBATCH_GRES", ""))
        if gpus:
            kind = f"{gpus['type']}:" if gpus["type"] else ""
            values.setdefault("gpus-per-node", f"{kind}{gpus['count'] or 1}")
            values["gpu-request"] = "gres"
            sources = {**dict.fromkeys(("gpus-per-node", "gpu-request"), "SBATCH_GRES"), **sources}
        return dataclasses.replace(
            self, values={**self.values, **values}, sources={**self.sources, **sources}
        )


def find_site(given: str | None, environ: Mapping[str, str], folder: Path) -> Path | None:
    """Return the first that exists: --site, $CLUSTERDDP_SITE, ./site.cfg, the user's, /etc's.

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


def read_site(path: Path | None, cluster: str | None) -> Settings:
    """Read and check one file.

    Raises RequestError for a file that cannot be read or parsed, a section or key that does not
    exist (naming the nearest), or a cluster that the file does not define.
    """
    if path is None:
        if cluster:
            raise RequestError(f"--cluster {cluster}: there is no site.cfg to define it.")
        return Settings()
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
    clusters = tuple(
        name.removeprefix(_CLUSTER) for name in parser.sections() if name.startswith(_CLUSTER)
    )
    _check_names(path, parser)
    if cluster and cluster not in clusters:
        raise RequestError(
            f"--cluster {cluster}: {path} defines {', '.join(clusters) or 'no clusters'}."
        )
    values: dict[str, str] = {}
    sources: dict[str, str] = {}
    for section in ("defaults", f"{_CLUSTER}{cluster}" if cluster else ""):
        if parser.has_section(section):
            values.update(parser[section])
            sources.update(dict.fromkeys(parser[section], f"{path} [{section}]"))
    environment = dict(parser["environment"]) if parser.has_section("environment") else {}
    return Settings(path, values, sources, environment, clusters)


def sbatch_directives(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the directives that SBATCH_* variables give, beside those of options."""
    directives = {
        directive: None if directive in BARE_DIRECTIVES else environ[name]
        for name, directive in PASSED_ON.items()
        if name in environ
    }
    gres = directives.get("gres")
    if gres and _GPU_GRES.fullmatch(gres):
        del directives["gres"]
    elif gres and "gpu" in gres:
        raise RequestError(
            f"SBATCH_GRES={gres}: unset it, and ask for the GPUs with --gpus-per-node and for the "
            "rest with --sbatch gres=…"
        )
    return directives


def unused_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the SBATCH_* variables that have no part in a submission."""
    known = {_NO_REQUEUE, *PASSED_ON, *(row.variable for row in REQUEST)}
    return sorted(name for name in environ if name.startswith("SBATCH_") and name not in known)


def _check_names(path: Path, parser: configparser.ConfigParser) -> None:
    for section in parser.sections():
        if section == "environment":
            continue
        if section != "defaults" and not section.startswith(_CLUSTER):
            raise RequestError(
                f"{path}: unknown section [{section}]"
                f"{_near(section, ['defaults', 'environment'])}; "
                "there are [defaults], [cluster:NAME] and [environment]."
            )
        for key in parser[section]:
            if key not in OPTIONS:
                raise RequestError(f"{path} [{section}]: unknown key {key!r}{_near(key, OPTIONS)}.")


def _near(word: str, known: Collection[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""

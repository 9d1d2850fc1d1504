"""The table of options, and their values from the command line, variables and site.cfg.

`option` makes a field of a request's dataclass a row of the table. The row determines the flag, the
CLUSTERDDP_* and SBATCH_* variable, the key of site.cfg, the directive, the error messages and the
line of --help; the field determines its name, type and default.

A site sets values in site.cfg, with one item per line for lists (env, setup, module …):

    [defaults]         settings for every run, by the names of submit's options
    [cluster:NAME]     settings on top of them, chosen by --cluster NAME
    [environment]      variables for every run

sbatch would let the submitter's SBATCH_* variables override the script's directives, so they are
read here, rendered, and kept out of the submission (`slurm.client`).
"""

import contextlib
import dataclasses
import functools
import math
import numbers
import os
import re
import shlex
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from clusterddp import formatting
from clusterddp.errors import OptionError, RequestError, no_file
from clusterddp.slurm.forms import WORDS, Form, words

T = TypeVar("T")

RESOURCES = "Resources"
LAUNCH = "Environment and launch"
FAULT_TOLERANCE = "Fault tolerance"
CODE = "Code"
OUTPUT = "Output"
BUILT_IN = "Built-in training"
GENERAL = "General"
GROUPS = (RESOURCES, LAUNCH, FAULT_TOLERANCE, CODE, OUTPUT, BUILT_IN, GENERAL)
"""Sections of --help-all, in order."""

SYSTEM_FILE = Path("/etc/clusterddp/site.cfg")
EXPEDITE = "expedite"
"""Value of sbatch's --requeue that requeues a job at top priority (Slurm 25.11)."""
_CLUSTER = "cluster:"
_PLACE = ("host", "folder", "before")
"""Keys of a cluster's section that do not set an option."""
_GPU_GRES = r"(?:gres[:/])?gpu(?::(?P<type>[^:,=]+))??(?:[:=](?P<count>\d+))?"
NO_REQUEUE = "SBATCH_NO_REQUEUE"

_WORDS = {
    **dict.fromkeys(("yes", "true", "on", "1", "y", "t"), True),
    **dict.fromkeys(("no", "false", "off", "0", "n", "f"), False),
}

FLAG, DEFAULT = "flag", "default"
"""Sources of a typed value and of a default."""

NEEDED_DIRECTIVES = ("nodes", "ntasks")
"""Directives that every run needs."""

_MOST = 10000 * 86400.0
"""Longest duration in seconds."""

_REFERENCE = r"(?a)[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"

_LOGS = "--runs-dir DIR: logs are in the run's directory"
REPLACED = {
    "ntasks": "--nodes N --tasks-per-node N, the ranks per node",
    "gpus": "--gpus-per-node [TYPE:]N",
    "gpus-per-task": "--gpus-per-node [TYPE:]N with --gpu-directive gpus-per-task",
    "no-requeue": "--no-requeue",
    "test-only": "--test-only",
    "parsable": "--json",
    "wait": "--wait",
    "wrap": "the COMMAND after '--'",
    "array": "--sweep NAME=VALUES, which submits a run for each value, or 'clusterddp submit "
    "--dry-run … | sbatch --array=LIST'",
    "het-group": "one 'clusterddp submit' for each group",
    **dict.fromkeys(("output", "error", "open-mode", "input"), _LOGS),
}
"""Unsupported options of sbatch, and their replacements."""
REPLACED_FLAGS = {
    **REPLACED,
    "gres": "--gpus-per-node [TYPE:]N, and --gpu-directive gres if the site requires it",
    "chdir": "cd: a run starts in the directory in which you submit it",
}
"""Unsupported flags of sbatch; two of them are supported as directives."""
SHORT_FORMS = {"-n": "ntasks", "-G": "gpus", "-a": "array", "-o": "output", "-e": "error"}

_PASSED_ON = (
    "acctg-freq batch clusters container core-spec cpus-per-gpu delay-boot distribution gpu-bind "
    "gpu-freq gres gres-flags hint mem-bind mem-per-cpu mem-per-gpu network no-kill overcommit "
    "power profile spread-job thread-spec threads-per-core use-min-nodes wait-all-nodes wckey"
)
PASSED_ON = {
    **{f"SBATCH_{name.replace('-', '_').upper()}": name for name in _PASSED_ON.split()},
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
}
"""SBATCH_* variables of sbatch(1) that become directives without being options."""
BARE_DIRECTIVES = {"no-kill", "overcommit", "spread-job", "use-min-nodes"}
"""Directives among them that have no value."""


@dataclass(frozen=True, eq=False, repr=False)
class Number:
    """Range of numbers from `least` to below `below`."""

    noun: str
    least: float = 0
    below: float = math.inf

    def check(self, option: str, value: float) -> None:
        """Raise OptionError unless the value is a number in the range; NaN is in none."""
        if not (isinstance(value, numbers.Real) and self.least <= value < self.below):
            raise OptionError(option, f": {value!r} is not valid. Use {self.noun}. [CD0102]")


@dataclass(frozen=True, eq=False, repr=False)
class Duration:
    """Duration: seconds as a value; `30s`, `10m`, `24h` or `7d` as text."""

    zero: bool = False
    """True if 0 is a valid value: never, or no limit."""
    least: float = 0.001
    """Shortest other value in seconds."""

    def check(self, option: str, value: float) -> None:
        """Raise OptionError unless the seconds are in the range."""
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (is_number and (self.least <= value <= _MOST or (self.zero and value == 0))):
            finite = is_number and math.isfinite(value)
            shown = formatting.setting(value) if finite else repr(value)
            least, most = map(formatting.setting, (self.least, _MOST))
            use = f"Use {least} to {most}{', or 0' if self.zero else ''}."
            raise OptionError(option, f": {shown} is out of range. {use} [CD0102]")

    def parse(self, option: str, text: str) -> float:
        """Parse text to seconds; raises OptionError."""
        seconds = formatting.seconds(text)
        if seconds is None:
            use = f"{'0, or ' if self.zero else ''}a number with s, m, h or d: 30s, 10m, 24h, 7d"
            raise OptionError(option, f": {text!r} is not a valid duration. Use {use}. [CD0102]")
        self.check(option, seconds)
        return seconds


@dataclass(frozen=True, eq=False, repr=False)
class Choice:
    """Set of names; with `or_function` also a user function, `package.module:function`."""

    names: tuple[str, ...]
    or_function: bool = False

    def check(self, option: str, value: str) -> None:
        """Raise OptionError, listing the names, unless the value is one of them."""
        if value not in self.names and not (self.or_function and is_reference(value)):
            more = ", or your MODULE:FUNCTION" if self.or_function else ""
            names = ", ".join(self.names)
            raise OptionError(option, f": {value!r} is not one of {names}{more}. [CD0102]")


def is_reference(value: str) -> bool:
    """Return whether a value names a user function: `package.module:function`."""
    return re.fullmatch(_REFERENCE, value) is not None


COUNT = Number("a positive whole number", least=1)
SIZE = Number("a whole number from 1 to 1000000", least=1, below=1_000_001)
WHOLE = Number("a whole number of at least 0")
NUMBER = Number("a finite number of at least 0")
POSITIVE = Number("a finite number above 0", least=math.ulp(0.0))
DURATION = Duration()
DURATION_OR_NEVER = Duration(zero=True)
SHARE = Number("a number from 0 to below 1", below=1)


@dataclass(frozen=True, eq=False, repr=False)
class Option:
    """One option of a request or of the training."""

    help: str
    form: Form | Number | Duration | Choice | None = None
    """Form of a valid value."""
    names: str = ""
    """Other names, as in `--time -t LIMIT SBATCH_TIMELIMIT`: the directive, other names in
    sbatch(1), and the value's name in --help."""
    name: str = ""
    """Name with dashes, as in the flag and in site.cfg."""
    field: str = ""
    """Field of the request that it sets."""
    parameter: str = ""
    """Name of click's parameter, `batch_size`."""
    type: type = str
    """Type on the command line; `tuple` is repeatable text."""
    default: object = None
    shown: str = ""
    """Text for the default in --help if it depends on something else."""
    group: str = RESOURCES
    negatable: bool = False
    """True for --NAME / --no-NAME."""
    bare: str = ""
    """Value of a flag that is typed without one."""
    also: str = ""
    """Valid value besides yes and no."""
    decisive: bool = False
    """True if it affects the trained weights."""

    @property
    def flag(self) -> str:
        """Flag, `--batch-size`."""
        return f"--{self.name}"

    @property
    def directive(self) -> str:
        """Sbatch directive that it sets; empty without one."""
        first = self.names.partition(" ")[0]
        return first[2:] if first.startswith("--") else ""

    @property
    def flags(self) -> list[str]:
        """Flag and its alternative forms in sbatch."""
        typed = [word for word in self.names.split() if word.startswith("-")]
        return list(dict.fromkeys([self.flag, *typed]))

    @property
    def variable(self) -> str:
        """SBATCH_* variable that sets it; empty without one."""
        return next((word for word in self.names.split() if word.startswith("SBATCH_")), "")

    def parse(self, value: Any) -> Any:
        """Convert text, or a plain value of Python or TOML, to the option's type.

        Raises OptionError for a wrong type; `check_fields` checks the form.
        """
        if self.type is tuple:
            items = [value] if isinstance(value, str | os.PathLike) else value
            if isinstance(items, Mapping):
                items = [str(k) if v is None else f"{k}={v}" for k, v in items.items()]
            if isinstance(items, list | tuple):
                texts = [os.fspath(i) if isinstance(i, os.PathLike) else i for i in items]
                if all(isinstance(text, str) for text in texts):
                    return tuple(texts)
            raise OptionError(
                self.flag, f": {value!r} is not valid. Use a string or a list of strings."
            )
        if self.type is bool:
            word = value.strip().lower() if isinstance(value, str) else value
            if isinstance(word, bool) or word in _WORDS:
                return word if isinstance(word, bool) else _WORDS[word]
            if word and word == self.also:
                return word
            words = f"yes, no or {self.also}" if self.also else "yes or no"
            raise OptionError(self.flag, f": {value!r} is not valid. Use {words}.")
        if isinstance(self.form, Duration) and not isinstance(value, bool):
            if isinstance(value, str):
                return self.form.parse(self.flag, value)
            total = getattr(value, "total_seconds", None)  # a timedelta
            value = total() if total else value
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        takes = {int: (int, str), float: (int, float, str)}.get(self.type, (int, float, str))
        if isinstance(value, bool) or not isinstance(value, takes):
            kinds = f"{type(value).__name__}, not {self.type.__name__}"
            raise OptionError(self.flag, f": {value!r} is {kinds}.")
        try:
            return self.type(value)
        except ValueError:
            noun = "a whole number" if self.type is int else "a number"
            noun = self.form.noun if isinstance(self.form, Number) else noun
            raise OptionError(self.flag, f": {value!r} is not valid. Use {noun}.") from None

    def read(self, typed: Any) -> Any:
        """Return the field's value for a typed value; raises OptionError if it has no words."""
        if self.form is not WORDS:
            return typed
        lines = [typed] if self.type is str else typed
        return tuple(word for line in lines for word in words(self.flag, line))

    def show(self, value: Any) -> Any:
        """Return the typed form of the field's value."""
        if self.form is not WORDS:
            return value
        return shlex.join(value) if self.type is str else tuple(map(shlex.quote, value))

    def text(self, value: Any) -> Any:
        """Return the displayed form of a value: a duration with its unit."""
        is_duration = isinstance(self.form, Duration) and isinstance(value, numbers.Real)
        return formatting.setting(float(value)) if is_duration else value

    @property
    def metavar(self) -> str | None:
        """Name of the value in --help; None leaves it to click."""
        named = (word for word in self.names.split() if not word.startswith(("-", "SBATCH_")))
        return next(named, "DURATION" if isinstance(self.form, Duration) else None)


class Record:
    """Part of a request, with equality, hash and repr by fields.

    Generating these methods by `dataclass` would cost each start some milliseconds.
    """

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


def option(
    default: T,
    help: str,
    form: Form | Number | Duration | Choice | None = None,
    names: str = "",
    **more: object,
) -> T:
    """Make a field an option. The further arguments are the fields of `Option`."""
    row = {"help": help, "form": form, "names": names, **more}
    return dataclasses.field(default=default, metadata={"option": row})


def decisive(
    default: T, help: str, form: Form | Number | Duration | Choice | None = None, names: str = ""
) -> T:
    """Make a field an option that affects the trained weights."""
    return option(default, help, form, names, decisive=True)


def options_of(record: type, group: str) -> Iterator[Option]:
    """Yield the options among the fields of a dataclass; `group` if a row has none."""
    for field in dataclasses.fields(record):
        if "option" in field.metadata:
            kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else ()
            kind = (kinds or (field.type,))[0]
            row = field.metadata["option"]
            name = row.get("name") or field.name.replace("_", "-")
            usual = {
                "name": name,
                "field": field.name,
                "parameter": name.replace("-", "_"),
                "group": group,
                "type": typing.get_origin(kind) or kind,
            }
            if field.default or not row.get("shown"):
                usual["default"] = None if field.default in ("", ()) else field.default
            yield Option(**{**usual, **row})


@functools.cache
def _fields_of(kind: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the option fields of a record's class; listing runs checks a record for each."""
    return [field for field in dataclasses.fields(kind) if "option" in field.metadata]


def check_fields(record: Any) -> None:
    """Check the option fields of a request's record that are not at their default.

    Raises OptionError with the option, the value and valid values.
    """
    for field in _fields_of(record.__class__):
        row, value = field.metadata["option"], getattr(record, field.name)
        if value == field.default:
            continue
        flag = f"--{row.get('name', field.name.replace('_', '-'))}"
        kind = type(field.default)
        if kind in (bool, str, tuple) and not isinstance(value, kind):
            raise OptionError(flag, f": {value!r} is {type(value).__name__}, not {kind.__name__}.")
        items = value if isinstance(value, tuple) else (value,)
        for item in items if row["form"] else ():
            row["form"].check(flag, item)


@dataclass(frozen=True)
class Given:
    """Plain values from a command line or the keywords of a call."""

    values: Mapping[str, Any]
    """Values by parameter, defaults included; None means not set."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Source of each value except defaults: FLAG, or the text for a variable or a file."""
    command: tuple[str, ...] | None = ()
    """COMMAND; None if none is allowed."""
    environment: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Variables that --env overrides."""
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The shell's variables; SBATCH_* can become directives, which --sbatch overrides."""

    def source(self, name: str) -> str:
        """Return the source of a value as text."""
        return self.sources.get(name, DEFAULT)

    @property
    def typed(self) -> dict[str, Any]:
        """Typed values."""
        return {name: v for name, v in self.values.items() if self.sources.get(name) == FLAG}

    def flags(self, names: Iterable[str]) -> str:
        """Return the typed parameters among `names` as flags: `--epochs, --lr`."""
        typed = (name for name in names if self.sources.get(name) == FLAG)
        return ", ".join(f"--{name.replace('_', '-')}" for name in typed)

    @contextlib.contextmanager
    def naming_sources(self) -> Iterator[None]:
        """Add the source of a value to the error about it, unless it was typed."""
        try:
            yield
        except OptionError as error:
            where = self.source(error.option.removeprefix("--").replace("-", "_"))
            if where in (FLAG, DEFAULT):
                raise
            raise error.saying(f"(from {where})") from None


@dataclass(frozen=True, eq=False, repr=False)
class Settings:
    """Values of options by name, each with its source: a section of site.cfg or a variable."""

    path: Path | None = None
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    clusters: tuple[str, ...] = ()
    place: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The cluster's host, folder and before, for `--on`."""

    def with_sbatch(self, environ: Mapping[str, str], rows: Iterable[Option]) -> "Settings":
        """Return these settings, overridden by SBATCH_* variables.

        Raises RequestError for an SBATCH_EXCLUSIVE that allows node sharing.
        """
        sources = {row.name: row.variable for row in rows if row.variable in environ}
        values = {name: environ[variable] for name, variable in sources.items()}
        if "exclusive" in values:
            if values["exclusive"] not in ("", "exclusive"):
                raise RequestError(
                    f"SBATCH_EXCLUSIVE={values['exclusive']} is not supported: only whole nodes "
                    "can be requested. Unset it, or use --exclusive. [CD0206]"
                )
            values["exclusive"] = "yes"  # sbatch reads any value as yes
        # sbatch reads any value of these two as yes as well (newer versions know expedite); the
        # second one wins.
        if "requeue" in values:
            values["requeue"] = EXPEDITE if values["requeue"].lower() == EXPEDITE else "yes"
        if NO_REQUEUE in environ:
            values["requeue"], sources["requeue"] = "no", NO_REQUEUE
        gres = environ.get("SBATCH_GRES")
        gpus = re.fullmatch(_GPU_GRES, gres) if gres else None
        if gpus:
            kind = f"{gpus['type']}:" if gpus["type"] else ""
            values.setdefault("gpus-per-node", f"{kind}{gpus['count'] or 1}")
            values["gpu-directive"] = "gres"
            sources = {
                **dict.fromkeys(("gpus-per-node", "gpu-directive"), "SBATCH_GRES"),
                **sources,
            }
        return dataclasses.replace(
            self, values={**self.values, **values}, sources={**self.sources, **sources}
        )


def find_site(given: str | None, environ: Mapping[str, str], folder: Path) -> Path | None:
    """Return the first file of --site, $CLUSTERDDP_SITE, ./site.cfg, the user's and /etc's.

    Raises RequestError if a named file does not exist.
    """
    named = given or environ.get("CLUSTERDDP_SITE")
    if named:
        if not Path(named).exists():
            raise no_file("--site" if given else "CLUSTERDDP_SITE", named, code="CD0201")
        return Path(named)
    return next(filter(Path.is_file, site_file_paths(environ, folder)), None)


def site_file_paths(environ: Mapping[str, str], folder: Path) -> tuple[Path, ...]:
    """Return the default locations of site.cfg, in search order."""
    return folder / "site.cfg", user_file(environ), SYSTEM_FILE


def unused_files(used: Path, environ: Mapping[str, str], folder: Path) -> list[Path]:
    """Return the site files that exist but are not read, because only one is."""
    named = environ.get("CLUSTERDDP_SITE")
    paths = [*([folder / named] if named else []), *site_file_paths(environ, folder)]
    # os.path.isfile returns False, rather than raise, if a directory cannot be entered.
    there = [path for path in dict.fromkeys(paths) if os.path.isfile(path)]  # noqa: PTH113
    return [path for path in there if not path.samefile(used)]


def missing_settings(now: Path, before: Path, known: Collection[str]) -> list[str]:
    """Return the settings, variables and clusters of `before` that are missing from `now`.

    Returns none if a file cannot be read. known: valid names of settings.
    """
    try:
        old, new = (read_site(path, None, known) for path in (before, now))
    except RequestError:
        return []
    missing = [name for name in old.values if name not in new.values]
    missing += [name for name in old.environment if name not in new.environment]
    return missing + [f"[cluster:{name}]" for name in old.clusters if name not in new.clusters]


def user_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the user's site.cfg."""
    home = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config"
    return Path(home) / "clusterddp" / "site.cfg"


def read_site(path: Path | None, cluster: str | None, known: Collection[str]) -> Settings:
    """Read and check one file; known: valid names of settings.

    Raises RequestError for a file that cannot be read or parsed, a section or key that does not
    exist (naming the nearest), or a cluster that the file does not define.
    """
    if path is None:
        if cluster:
            raise RequestError(f"--cluster {cluster}: there is no site.cfg to define it. [CD0201]")
        return Settings()
    import configparser  # not needed without a site.cfg

    parser = configparser.ConfigParser(
        interpolation=None, default_section="\0", delimiters=("=",), empty_lines_in_values=False
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign] # variables' names keep their case
    try:
        parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
    except configparser.MissingSectionHeaderError as error:
        raise RequestError(
            f"{path}, line {error.lineno}: {error.line.strip()!r} is not in a section. Start the "
            "file with [defaults]. [CD0201]"
        ) from None
    except configparser.Error as error:
        raise RequestError(f"{path}: {' '.join(str(error).split())} [CD0201]") from None
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}. [CD0201]") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path} is not UTF-8 text. [CD0201]") from None
    sections = {name: dict(parser[name]) for name in parser.sections()}
    _check_names(path, sections, known)
    clusters = [name.removeprefix(_CLUSTER) for name in sections if name.startswith(_CLUSTER)]
    if cluster and cluster not in clusters:
        raise RequestError(
            f"--cluster {cluster}: {path} defines {', '.join(clusters) or 'no clusters'}. [CD0201]"
        )
    values: dict[str, str] = {}
    sources: dict[str, str] = {}
    for section in ("defaults", f"{_CLUSTER}{cluster}" if cluster else ""):
        given = sections.get(section, {})
        place = {key: given.pop(key) for key in _PLACE if key in given}
        values |= given
        sources |= dict.fromkeys(given, f"{path} [{section}]")
    return Settings(path, values, sources, sections.get("environment", {}), tuple(clusters), place)


def sbatch_directives(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the directives from SBATCH_* variables that set no option."""
    directives = {
        directive: None if directive in BARE_DIRECTIVES else environ[name]
        for name, directive in PASSED_ON.items()
        if name in environ
    }
    gres = directives.get("gres")
    if gres and re.fullmatch(_GPU_GRES, gres):
        del directives["gres"]
    elif gres and "gpu" in gres:
        raise RequestError(
            f"SBATCH_GRES={gres} mixes GPUs with other resources. Unset it, and request the GPUs "
            "with --gpus-per-node and the rest with --sbatch gres=… [CD0206]"
        )
    return directives


def _check_names(path: Path, sections: Mapping[str, Iterable[str]], known: Collection[str]) -> None:
    for section, keys in sections.items():
        if section == "environment":
            continue
        if section != "defaults" and not section.startswith(_CLUSTER):
            near = nearest(section, ("defaults", "environment"))
            raise RequestError(
                f"{path}: unknown section [{section}]{near}. "
                "Use [defaults], [cluster:NAME] or [environment]. [CD0203]"
            )
        names = [*known, *(() if section == "defaults" else _PLACE)]
        for key in keys:
            if key not in names:
                raise RequestError(
                    f"{path} [{section}]: unknown key {key!r}{nearest(key, names)}. [CD0203]"
                )


def nearest(word: str, known: Collection[str]) -> str:
    """Return ` (did you mean 'nodes'?)` for an unknown word; empty if no known word is close."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""

"""Rows of the table of options: `option` makes a field of a request's dataclass one of them.

From its row come the flag, the CLUSTERDDP_* and SBATCH_* variable, the key of site.cfg, the
directive, the refusals and the line of --help; its name, type and default are those of the field.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from clusterddp.errors import OptionError
from clusterddp.request.user_functions import is_reference
from clusterddp.slurm.forms import Form

T = TypeVar("T")

ASKED = "What Slurm is asked for"
START = "How the tasks start"
INTERRUPTED = "When it is interrupted"
CODE = "What runs"
KEPT = "Where it is kept"
TRAINED = "What the tasks train (without a COMMAND)"
GROUPS = (ASKED, START, INTERRUPTED, CODE, KEPT, TRAINED)
"""Sections of --help, in their order."""


@dataclass(frozen=True)
class Number:
    """A range of numbers, from `least` to below `below`."""

    noun: str
    least: float = 0
    below: float = math.inf

    def check(self, option: str, value: float) -> None:
        """Raise RequestError unless the value lies in the range; NaN lies in none."""
        if not self.least <= value < self.below:
            raise OptionError(option, f": {value} is not {self.noun}.")


@dataclass(frozen=True)
class Choice:
    """A set of names; with `or_function` also a user function, `package.module:function`."""

    names: tuple[str, ...]
    or_function: bool = False

    def check(self, option: str, value: str) -> None:
        """Raise RequestError with the names unless the value is one of them."""
        if value in self.names or (self.or_function and is_reference(value)):
            return
        more = " (your own is MODULE:FUNCTION)" if self.or_function else ""
        raise OptionError(option, f": {value!r} is not one of {', '.join(self.names)}{more}.")


COUNT = Number("a positive whole number", least=1)
WHOLE = Number("a whole number of at least 0")
NUMBER = Number("a finite number of at least 0")
POSITIVE = Number("a finite number above 0", least=math.ulp(0.0))
SHARE = Number("a number from 0 to below 1", below=1)


@dataclass(frozen=True)
class Option:
    """One option of a request or of the training."""

    help: str
    form: Form | Number | Choice | None = None
    """Form of a valid value."""
    names: str = ""
    """Other names, as in `--time -t LIMIT SBATCH_TIMELIMIT`: those in sbatch(1), the directive
    first, and that of the value in --help."""
    name: str = ""
    """Name with dashes, as in the flag and in site.cfg."""
    type: type = str
    """Type on the command line; `tuple` is a text that can be repeated."""
    default: object = None
    shown: str = ""
    """Words for the default in --help where it depends on something else."""
    group: str = ASKED
    negatable: bool = False
    """True for --NAME / --no-NAME."""
    bare: str = ""
    """Value of a flag that is typed without one."""
    decisive: bool = False
    """True where it decides the weights that a training ends with."""

    @property
    def flag(self) -> str:
        """Return the option as it is typed, `--batch-size`."""
        return f"--{self.name}"

    @property
    def parameter(self) -> str:
        """Return the name of click's parameter, `batch_size`."""
        return self.name.replace("-", "_")

    @property
    def directive(self) -> str:
        """Return the directive of sbatch that it stands for; empty without one."""
        return next((word[2:] for word in self.names.split() if word.startswith("--")), "")

    @property
    def flags(self) -> list[str]:
        """Return all that can be typed for it: the flag and the forms of sbatch."""
        typed = [word for word in self.names.split() if word.startswith("-")]
        return list(dict.fromkeys([self.flag, *typed]))

    @property
    def variable(self) -> str:
        """Return the SBATCH_* variable that sets it; empty without one."""
        return next((word for word in self.names.split() if word.startswith("SBATCH_")), "")

    @property
    def metavar(self) -> str | None:
        """Return the name of the value in --help; None leaves it to click."""
        named = (word for word in self.names.split() if not word.startswith(("-", "SBATCH_")))
        return next(named, None)


def option(
    default: T,
    help: str,
    form: Form | Number | Choice | None = None,
    names: str = "",
    **more: object,
) -> T:
    """Make a field an option. The further arguments are the fields of `Option`."""
    row = {"help": help, "form": form, "names": names, **more}
    return dataclasses.field(default=default, metadata={"option": row})


def options_of(record: type, group: str) -> Iterator[Option]:
    """Yield the options among the fields of a dataclass; `group` where a row gives none."""
    for field in dataclasses.fields(record):
        if "option" in field.metadata:
            kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else ()
            kind = (kinds or (field.type,))[0]
            usual = {
                "name": field.name.replace("_", "-"),
                "group": group,
                "type": typing.get_origin(kind) or kind,
            }
            row = field.metadata["option"]
            if field.default or not row.get("shown"):
                usual["default"] = None if field.default in ("", ()) else field.default
            yield Option(**{**usual, **row})


def check_fields(record: object) -> None:
    """Check the fields of a request's record that are options, but those left at their default.

    Raises RequestError with the option, the value and valid ones.
    """
    assert dataclasses.is_dataclass(record)
    for field in dataclasses.fields(record):
        row, value = field.metadata.get("option", {}), getattr(record, field.name)
        if row.get("form") is None or value is None or value == field.default:
            continue
        flag = f"--{row.get('name', field.name.replace('_', '-'))}"
        for item in value if isinstance(value, tuple) else (value,):
            row["form"].check(flag, item)


NEEDED_DIRECTIVES = ("nodes", "ntasks", "output")
"""Directives that a run cannot do without."""

_ONE_RUN = "one 'clusterddp submit' for each: a submission is one run"
_LOGS = "--output-root DIR: logs lie in the run's folder"
REPLACED = {
    "ntasks": "--nodes N --tasks-per-node N, ranks on each of the nodes",
    "gpus": "--gpus-per-node [TYPE:]N, GPUs on each of the nodes",
    "gpus-per-task": "--gpus-per-node [TYPE:]N with --gpu-request gpus-per-task",
    "no-requeue": "--no-requeue",
    "test-only": "--check",
    "parsable": "--json",
    "wait": "--wait",
    "wrap": "the COMMAND behind '--'",
    **dict.fromkeys(("array", "het-group"), _ONE_RUN),
    **dict.fromkeys(("output", "error", "open-mode", "input"), _LOGS),
}
"""Options of sbatch that are not taken, and what takes their place."""
REPLACED_FLAGS = {
    **REPLACED,
    "gres": "--gpus-per-node [TYPE:]N, and --gpu-request gres where the site wants it so",
    "chdir": "the folder in which you type it",
}
"""Flags of sbatch that are not taken; two of them are taken as directives."""
SHORT_FORMS = {"-n": "ntasks", "-G": "gpus", "-a": "array", "-o": "output", "-e": "error"}

_PASSED_ON = (
    "acctg-freq batch clusters container core-spec cpus-per-gpu delay-boot distribution gpu-bind "
    "gpu-freq gres gres-flags hint mem-bind mem-per-cpu mem-per-gpu network no-kill overcommit "
    "power profile spread-job thread-spec threads-per-core use-min-nodes wait-all-nodes wckey"
)
PASSED_ON = {
    **{f"SBATCH_{name.replace('-', '_').upper()}": name for name in _PASSED_ON.split()},
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_REQ_SWITCH": "switches",
}
"""SBATCH_* variables of sbatch(1) that become a directive of their own."""
BARE_DIRECTIVES = {"no-kill", "overcommit", "spread-job", "use-min-nodes"}
"""Directives among them that take no value."""

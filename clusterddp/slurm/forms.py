"""Forms of the values that Slurm takes: times, memory, GPU counts, names, dependencies.

A value of another form raises OptionError with the option, the value and valid examples. The forms
are those of sbatch(1); a value that Slurm accepts but a script cannot carry is refused.
"""

import re
import shlex
from dataclasses import dataclass

from clusterddp.errors import OptionError

# Slurm copies a directive's argument into a buffer of BUFSIZ (8192) bytes: src/common/slurm_opt.c.
LONGEST_DIRECTIVE_BYTES = 8000

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_GPUS = re.compile(r"(?:(?P<type>[A-Za-z][A-Za-z0-9_.-]*):)?(?P<count>[0-9]+)")

_RANK_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
    "ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT"
)
RANK_VARIABLES = tuple(_RANK_VARIABLES.split())
"""Variables that torchrun gives its workers (torch's local_elastic_agent.py), and NODE_RANK."""

NONCE_VARIABLE = "CLUSTERDDP_NONCE"
"""Variable with the secret that the ranks of one attempt share (`distributed.rendezvous`)."""

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Form:
    """The form of a text: a pattern, its name in messages, and valid examples."""

    pattern: str
    noun: str
    examples: str

    def check(self, option: str, value: str) -> None:
        """Raise RequestError unless the text is wholly of the form, and fits into a script."""
        if not re.fullmatch(self.pattern, text(option, value)):
            raise OptionError(option, f": {value!r} is no {self.noun}; valid: {self.examples}.")


_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*"
_NAMES = rf"{_NAME}(?:,{_NAME})*"
_AFTER = (
    r"(?:singleton|(?:after|afterany|afterburstbuffer|aftercorr|afternotok|afterok)"
    r"(?::[0-9]+(?:_[0-9]+|_\*)?(?:\+[0-9]+)?)+)"
)
_EVENT = (
    "(?:NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|ARRAY_TASKS"
    "|TIME_LIMIT(?:_[589]0)?)"
)

LINE = Form(r".*", "line", "text without control characters")
TIME_LIMIT = Form(
    r"(?ia)\d+|\d+:[0-5]?\d|\d+:[0-5]?\d:[0-5]?\d|\d+-\d{1,2}(:[0-5]?\d(:[0-5]?\d)?)?"
    r"|UNLIMITED|INFINITE",
    "time limit",
    "90 (minutes), 45:00, 02:30:00, 1-12 (days-hours), 1-02:30:00 or UNLIMITED",
)
MEMORY = Form(
    r"(?ia)\d+[KMGT]?", "amount of memory", "64G, 500M, 1T, 4000 (megabytes) or 0 (all of a node)"
)
SIGNAL = Form(
    r"(?:(?:B:)?(?:USR1|USR2|TERM)@[0-9]{1,5})?",
    "signal ahead of the time limit",
    "B:USR1@120 (to the script, seconds before the end), USR1@60 (to the tasks), or none",
)
DEPENDENCY = Form(
    rf"{_AFTER}(?:,{_AFTER})*|{_AFTER}(?:\?{_AFTER})*",
    "dependency",
    "afterok:1234, afterany:1234:1235, afterok:1234,afternotok:1235 or singleton",
)
MAIL_EVENTS = Form(
    rf"(?i){_EVENT}(?:,{_EVENT})*",
    "list of mail events",
    "NONE, BEGIN, END, FAIL, REQUEUE, ALL, INVALID_DEPEND, STAGE_OUT, TIME_LIMIT, TIME_LIMIT_50, "
    "TIME_LIMIT_80, TIME_LIMIT_90, ARRAY_TASKS, or several with commas",
)
PARTITIONS = Form(_NAMES, "list of partitions", "gpu or gpu,long")
ACCOUNT = Form(_NAME, "account", "physics")
QOS = Form(_NAME, "quality of service", "normal")
CONSTRAINT = Form(
    r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:&|*()\[\]!@-]*", "constraint", "a100 or a100&nvlink"
)
RESERVATIONS = Form(_NAMES, "list of reservations", "maintenance")
MAIL_USER = Form(r"[A-Za-z0-9_.+@-]+", "mail address", "me@example.org")
DIRECTIVE = Form(r"[a-z][a-z0-9-]*", "name of a directive", "signal or mem")
NETWORK_INTERFACE = Form(r"[=^]{0,2}[A-Za-z0-9_.:,@-]+", "network interface", "ib0")
MODULE = Form(r"[A-Za-z0-9_][A-Za-z0-9_.+/:@-]*", "environment module", "cuda/12.4")


def run_name(option: str, value: str) -> str:
    """Return a name that a directory, a job and a shell's word can have; refuse any other."""
    if not RUN_NAME.fullmatch(value):
        raise OptionError(
            option,
            f": {value!r} is no name of a run: up to 100 letters, digits, "
            "'.', '_' and '-', a letter or digit first.",
        )
    return value


def text(option: str, value: str) -> str:
    """Return a text that a line of script can carry: no control character, valid UTF-8."""
    control = _CONTROL.search(value)
    if control:
        raise OptionError(
            option,
            f": {value!r} holds the control character {control.group()!r}; "
            "a script line cannot carry it faithfully. Remove it, or put the text into a file.",
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise OptionError(option, f": {value!r} is not valid UTF-8; give it in UTF-8.") from None
    return value


def limit_seconds(value: str) -> int | None:
    """Return a valid time limit in seconds; None for none, which 0 is to sbatch(1) as well."""
    if not value or not value[0].isdigit():
        return None
    days, dash, rest = value.partition("-") if "-" in value else ("0", "", value)
    parts = [int(part) for part in rest.split(":")]
    if dash:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # MM[:SS]
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds or None


def gpu_count(option: str, value: str) -> tuple[str, int]:
    """Return the type, or "", and the count of `[TYPE:]N`."""
    gpus = _GPUS.fullmatch(text(option, value))
    if not gpus:
        raise OptionError(option, f": {value!r} is no GPU count; valid: 4 or a100:4.")
    return gpus["type"] or "", int(gpus["count"])


def words(option: str, value: str) -> tuple[str, ...]:
    """Split a line of arguments as a shell would, without running anything."""
    try:
        return tuple(shlex.split(text(option, value)))
    except ValueError as error:
        raise OptionError(option, f": {value!r} does not split into words: {error}.") from None

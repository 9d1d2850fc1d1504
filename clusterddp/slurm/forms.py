"""The forms in which Slurm takes its values: times, memory, GPU counts, names, dependencies.

Each function returns the value it was given when the form is right and raises `RequestError`
naming the option, the value seen and a valid example when it is not. The forms are those of
sbatch(1); what Slurm itself accepts but cannot be carried in a script faithfully is refused.
"""

import re
import shlex
from dataclasses import dataclass

from clusterddp.errors import RequestError

# Slurm copies a directive's argument into a buffer of BUFSIZ (8192) bytes: src/common/slurm_opt.c.
LONGEST_DIRECTIVE_BYTES = 8000

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_GPUS = re.compile(r"(?:(?P<type>[A-Za-z][A-Za-z0-9_.-]*):)?(?P<count>[0-9]+)")

# What torchrun gives its workers (torch's local_elastic_agent.py), and NODE_RANK.
RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip

NONCE_VARIABLE = "CLUSTERDDP_NONCE"
"""By it the ranks of one attempt know each other (`training.rendezvous`)."""

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
            raise RequestError(
                f"{option}: {value!r} is no {self.noun}; valid: {self.examples}.", option=option
            )


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
    r"(?ia)\d+[KMGT]?",
    "amount of memory",
    "64G, 500M, 1T, 4000 (megabytes) or 0 (all of a node)",
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
    """A name that a directory, a job and a shell's word can have alike."""
    if not RUN_NAME.fullmatch(value):
        raise RequestError(
            f"{option}: {value!r} is no name of a run: up to 100 letters, digits, "
            "'.', '_' and '-', a letter or digit first.",
            option=option,
        )
    return value


def text(option: str, value: str) -> str:
    """Refuse what a line of script cannot carry: line ends, NUL, other control characters."""
    found = _CONTROL.search(value)
    if found:
        raise RequestError(
            f"{option}: {value!r} holds the control character {found.group()!r}; "
            "a script line cannot carry it faithfully. Remove it, or put the text into a file.",
            option=option,
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{option}: {value!r} is not valid UTF-8; give it in UTF-8.", option=option
        ) from None
    return value


def limit_seconds(value: str) -> int | None:
    """A time limit that `time_limit` let pass, in seconds; None for none, as 0 is to sbatch(1)."""
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


def gpus(option: str, value: str) -> tuple[str, int]:
    """`[TYPE:]N` as (type or "", count)."""
    found = _GPUS.fullmatch(text(option, value))
    if not found:
        raise RequestError(
            f"{option}: {value!r} is no GPU count; valid: 4 or a100:4.", option=option
        )
    return found["type"] or "", int(found["count"])


def words(option: str, value: str) -> tuple[str, ...]:
    """Split a line of arguments as a shell would, without running anything."""
    try:
        return tuple(shlex.split(text(option, value)))
    except ValueError as error:
        raise RequestError(
            f"{option}: {value!r} does not split into words: {error}.", option=option
        ) from None

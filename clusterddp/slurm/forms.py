"""The forms in which Slurm takes its values: times, memory, GPU counts, names, dependencies.

Each function returns the value it was given when the form is right and raises `RequestError`
naming the option, the value seen and a valid example when it is not. The forms are those of
sbatch(1); what Slurm itself accepts but cannot be carried in a script faithfully is refused.
"""

import re
import shlex

from clusterddp.errors import RequestError

# Slurm copies a directive's argument into a buffer of BUFSIZ (8192) bytes: src/common/slurm_opt.c.
LONGEST_DIRECTIVE_BYTES = 8000

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_TIME = (
    r"(?ia)\d+|\d+:[0-5]?\d|\d+:[0-5]?\d:[0-5]?\d|\d+-\d{1,2}(:[0-5]?\d(:[0-5]?\d)?)?"
    r"|UNLIMITED|INFINITE"
)
_MEMORY = r"(?ia)\d+[KMGT]?"
_GPUS = re.compile(r"(?:(?P<type>[A-Za-z][A-Za-z0-9_.-]*):)?(?P<count>[0-9]+)")
_DEPENDENCY_ITEM = (
    r"singleton|(?:after|afterany|afterburstbuffer|aftercorr|afternotok|afterok)"
    r"(?::[0-9]+(?:_[0-9]+|_\*)?(?:\+[0-9]+)?)+"
)
_MAIL_TYPES = {
    "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT",
    "TIME_LIMIT", "TIME_LIMIT_50", "TIME_LIMIT_80", "TIME_LIMIT_90", "ARRAY_TASKS",
}  # fmt: skip

# What torchrun gives its workers (torch's local_elastic_agent.py), and NODE_RANK.
RANK_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip

NONCE_VARIABLE = "CLUSTERDDP_NONCE"
"""By it the ranks of one attempt know each other (`training.rendezvous`)."""

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# For `matching`, which compiles them where one is used: a request has few of them.
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*"
NAMES = rf"{NAME}(?:,{NAME})*"
CONSTRAINT = r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:&|*()\[\]!@-]*"
DIRECTIVE_NAME = r"[a-z][a-z0-9-]*"
MAIL_USER = r"[A-Za-z0-9_.+@-]+"
NETWORK_INTERFACE = r"[=^]{0,2}[A-Za-z0-9_.:,@-]+"
MODULE = r"[A-Za-z0-9_][A-Za-z0-9_.+/:@-]*"


def run_name(option: str, value: str) -> str:
    """A name that a directory, a job and a shell's word can have alike."""
    if not RUN_NAME.fullmatch(value):
        raise RequestError(
            f"{option}: {value!r} is no name of a run: up to 100 letters, digits, "
            "'.', '_' and '-', a letter or digit first."
        )
    return value


def text(option: str, value: str) -> str:
    """Refuse what a line of script cannot carry: line ends, NUL, other control characters."""
    found = _CONTROL.search(value)
    if found:
        raise RequestError(
            f"{option}: {value!r} holds the control character {found.group()!r}; "
            "a script line cannot carry it faithfully. Remove it, or put the text into a file."
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{option}: {value!r} is not valid UTF-8; give it in UTF-8.") from None
    return value


def matching(option: str, value: str, pattern: str, example: str) -> str:
    """Refuse a value that is not wholly of the pattern's form."""
    if not re.fullmatch(pattern, text(option, value)):
        raise RequestError(
            f"{option}: {value!r} is not of the form that Slurm takes, such as {example}."
        )
    return value


def time_limit(option: str, value: str) -> str:
    """Minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS (sbatch(1), --time)."""
    if not re.fullmatch(_TIME, text(option, value)):
        raise RequestError(
            f"{option}: {value!r} is no time limit; valid ones are 90 (minutes), 45:00, "
            "02:30:00, 1-12 (days-hours), 1-02:30:00 or UNLIMITED."
        )
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


_SIGNAL = re.compile(r"(?:(B):)?(USR1|USR2|TERM)@(\d{1,5})", re.ASCII)


def signal(option: str, value: str) -> str:
    """`[B:]SIGNAL@SECONDS` with a signal that the tasks take for a request to stop."""
    if not _SIGNAL.fullmatch(text(option, value)):
        raise RequestError(
            f"{option}: {value!r} is no signal ahead of the time limit; valid ones are B:USR1@120 "
            "(to the script, seconds before the end), USR1@60 (to the tasks), or none."
        )
    return value


def memory(option: str, value: str) -> str:
    """A whole number with an optional unit K, M, G or T; 0 asks for all of a node's memory."""
    if not re.fullmatch(_MEMORY, text(option, value)):
        raise RequestError(
            f"{option}: {value!r} is no amount of memory; valid ones are 64G, 500M, 1T, "
            "4000 (megabytes) or 0 (all of a node)."
        )
    return value


def gpus(option: str, value: str) -> tuple[str, int]:
    """`[TYPE:]N` as (type or "", count)."""
    found = _GPUS.fullmatch(text(option, value))
    if not found:
        raise RequestError(f"{option}: {value!r} is no GPU count; valid ones are 4 or a100:4.")
    return found["type"] or "", int(found["count"])


def dependency(option: str, value: str) -> str:
    """Slurm's dependency list, joined by commas (all) or question marks (any)."""
    items = re.split(r"[,?]", text(option, value))
    if not all(re.fullmatch(_DEPENDENCY_ITEM, item) for item in items) or {",", "?"} <= set(value):
        raise RequestError(
            f"{option}: {value!r} is no dependency; valid ones are afterok:1234, "
            "afterany:1234:1235, afterok:1234,afternotok:1235 or singleton."
        )
    return value


def mail_type(option: str, value: str) -> str:
    """A comma list of the event names in sbatch(1), --mail-type."""
    unknown = [word for word in text(option, value).split(",") if word.upper() not in _MAIL_TYPES]
    if unknown:
        raise RequestError(
            f"{option}: {', '.join(map(repr, unknown))} is no mail event; valid ones are "
            f"{', '.join(sorted(_MAIL_TYPES))}."
        )
    return value


def words(option: str, value: str) -> tuple[str, ...]:
    """Split a line of arguments as a shell would, without running anything."""
    try:
        return tuple(shlex.split(text(option, value)))
    except ValueError as error:
        raise RequestError(f"{option}: {value!r} does not split into words: {error}.") from None


def positive(option: str, value: int) -> int:
    """A count of at least one."""
    if value < 1:
        raise RequestError(f"{option}: {value} is not a positive whole number.")
    return value

"""Formats of Slurm's values: times, memory, GPU counts, names, host lists.

An invalid value raises OptionError with the option, the value and valid examples. The formats
follow sbatch(1); a value that Slurm accepts but a script line cannot hold is refused.

Two compressed lists are expanded in pure Python: hosts (`gpu[01-03,07]`) and tasks per node
(`4(x2),3`), because `scontrol show hostnames` needs a Slurm configuration, which many containers
lack. Order, zero padding and duplicates match scontrol (Slurm 22.05, src/common/hostlist.c), with
two deliberate differences: a suffix after the last bracket (`gpu[01-03]-ib`), which that scontrol
refuses, is accepted; malformed lists that scontrol silently repairs (`a[1`, `a[1-]`, `a,,b`, `a b`)
are refused, because Slurm never writes them.
"""

import itertools
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from clusterddp.errors import OptionError, RequestError

# Slurm copies a directive's argument into a buffer of BUFSIZ (8192) bytes: src/common/slurm_opt.c.
MAX_DIRECTIVE_BYTES = 8000

# Patterns are texts: `re` compiles and caches them at first use, and a start uses few of them.
_CONTROL = r"[\x00-\x08\x0a-\x1f\x7f]"
# A type can begin with a digit: MIG devices have types such as 3g.40gb.
_GPUS = r"(?:(?P<type>[A-Za-z0-9][A-Za-z0-9_.-]*):)?(?P<count>[0-9]+)"
_GPU_GRES = r"(?:^|,)gpu(?::(?P<type>[^:,()]+))??(?::(?P<count>\d{1,9}))?(?=[(,]|$)"

RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"),
    *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that torchrun gives its workers (torch's local_elastic_agent.py), and NODE_RANK."""

NONCE_VARIABLE = "CLUSTERDDP_NONCE"
"""Variable with the shared secret of an attempt's ranks (`distributed.rendezvous`)."""

ATTEMPT_VARIABLE = "CLUSTERDDP_ATTEMPT"
"""Variable with the attempt's number, from the batch script to its tasks."""

BATCH_VARIABLE = "CLUSTERDDP_BATCH"
"""Variable with the job id, set if the controller runs a batch script's lines."""

NODES_VARIABLE = "CLUSTERDDP_NODES"
"""Variable with the step's nodes, for a script's lines in a job with spare nodes."""

SPARES_VARIABLE = "CLUSTERDDP_SPARE_NODES"
"""Variable that makes the tasks of a job with spare nodes write heartbeats of their nodes."""

FULL_PREFLIGHT_VARIABLE = "CLUSTERDDP_FULL_PREFLIGHT"
"""Variable that makes an attempt's ranks check their nodes before they train."""

LOOP_VARIABLE = "CLUSTERDDP_LOOP"
"""Variable with which a COMMAND's loop finds its attempt (`run.attempt`)."""

CODE_VARIABLE = "CLUSTERDDP_RUN_CODE"
"""Variable with the run's copy of the code, for the tasks (`processes.armed`)."""

CODE_OF_VARIABLE = "CLUSTERDDP_RUN_CODE_OF"
"""Variable with the original directory of that copy, for the tasks."""

TREE_VARIABLE, COMMIT_VARIABLE = "CLUSTERDDP_TREE", "CLUSTERDDP_TREE_COMMIT"
"""Variables with the top and commit of a work tree that was carried here (`remote.tree`)."""

ARM_VARIABLE = "CLUSTERDDP_RUN_STACKS"
"""Variable of a COMMAND; 0 with --no-stacks."""

KILL_WAIT_VARIABLE = "CLUSTERDDP_KILL_WAIT"
"""Variable with Slurm's KillWait in seconds, for the tasks; unset if unknown."""

STAGED_VARIABLE = "CLUSTERDDP_STAGED"
"""Variable with the copy of the tasks' environment on each node, for a script's lines."""

STAGED_FROM_VARIABLE = "CLUSTERDDP_STAGED_FROM"
"""Variable with the original directory of that environment, for jobs that a task submits."""

STAGED_BUNDLE_VARIABLE = "CLUSTERDDP_STAGED_BUNDLE"
"""Variable with the copy of the run's clusterddp on each node, for a script's lines."""

TASK_VARIABLES = (
    *(NONCE_VARIABLE, ATTEMPT_VARIABLE, SPARES_VARIABLE, FULL_PREFLIGHT_VARIABLE),
    *(LOOP_VARIABLE, CODE_VARIABLE, CODE_OF_VARIABLE, ARM_VARIABLE, KILL_WAIT_VARIABLE),
    *(STAGED_VARIABLE, STAGED_FROM_VARIABLE, STAGED_BUNDLE_VARIABLE),
)
"""Variables of one attempt's tasks; jobs that a task submits must not inherit them."""


def in_salloc_shell(environ: Mapping[str, str]) -> bool:
    """Return whether this is a shell of salloc, on the login host or as its interactive step.

    Other processes of a job have SLURM_PROCID. The interactive step's id is reserved (slurm.h).
    """
    is_interactive = environ.get("SLURM_STEP_ID", "") == str(0xFFFFFFFA)
    is_plain = "SLURM_JOB_ID" in environ and "SLURM_PROCID" not in environ
    return BATCH_VARIABLE not in environ and (is_interactive or is_plain)


def carried_top(folder: str, environ: Mapping[str, str]) -> str:
    """Return the top of the carried work tree that contains a directory; empty without one."""
    top = environ.get(TREE_VARIABLE, "")
    return top if top and f"{folder}/".startswith(f"{top}/") else ""


def refuse_carried(option: str, path: str, environ: Mapping[str, str]) -> None:
    """Raise RequestError for an output in the carried work tree, which is removed later.

    path: absolute.
    """
    if top := carried_top(path, environ):
        raise RequestError(
            f"{option} {path[len(top) + 1 :] or '.'!r}: with --on, that is in the cluster's copy "
            "of your code and would be lost. Give an absolute path of the cluster. [CD1401]"
        )


def unstaged(paths: str, environ: Mapping[str, str]) -> str:
    """Return paths, joined by colons, with the original in place of a node's copy."""
    copy, original = environ.get(STAGED_VARIABLE), environ.get(STAGED_FROM_VARIABLE)
    if not copy or not original:
        return paths
    return ":".join(
        f"{original}{path.removeprefix(copy)}" if f"{path}/".startswith(f"{copy}/") else path
        for path in paths.split(":")
    )


RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
SECRET = r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|KEY)(?:$|_)"
"""Part of a variable's name that marks its value as secret."""


@dataclass(frozen=True, eq=False, repr=False)
class Form:
    """Format of a text: a pattern, its name in messages, and what to use."""

    pattern: str
    noun: str
    use: str

    def check(self, option: str, value: str) -> None:
        """Raise RequestError unless the whole text matches and fits into a script."""
        if not re.fullmatch(self.pattern, text(option, value)):
            problem = f": {value!r} is not a valid {self.noun}. Use {self.use}. [CD0102]"
            raise OptionError(option, problem)


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
WORDS = Form(r".*", "line", "text without control characters")
"""Words as in a shell, in one line or several."""
PATH = Form(r".+", "path", "for example data or /usr/bin/python3")
TIME_LIMIT = Form(
    r"(?ia)\d+|\d+:[0-5]?\d|\d+:[0-5]?\d:[0-5]?\d|\d+-\d{1,2}(:[0-5]?\d(:[0-5]?\d)?)?"
    r"|UNLIMITED|INFINITE",
    "time limit",
    "minutes (60 for 1h), MM:SS, [D-]HH:MM:SS (02:30:00), D-HH (1-12) or UNLIMITED",
)
MEMORY = Form(
    # Python needs more than 99 MB: 64 lacks its unit.
    r"(?ia)0+|\d{3,}|\d+[KMGT]",
    "amount of memory",
    "64G, 500M, 1T, 4000 (megabytes, 100 or more) or 0 (all of a node)",
)
SIGNAL = Form(
    r"(?:(?:B:)?(?:USR1|USR2|TERM)@[0-9]{1,5})?",
    "signal before the time limit",
    "B:USR1@120 (to the script, seconds before the end), USR1@60 (to the tasks) or none",
)
DEPENDENCY = Form(
    rf"{_AFTER}(?:,{_AFTER})*|{_AFTER}(?:\?{_AFTER})*",
    "dependency",
    "for example afterok:1234, afterany:1234:1235, afterok:1234,afternotok:1235 or singleton",
)
MAIL_EVENTS = Form(
    rf"(?i){_EVENT}(?:,{_EVENT})*",
    "list of mail events",
    "NONE, BEGIN, END, FAIL, REQUEUE, ALL, INVALID_DEPEND, STAGE_OUT, TIME_LIMIT, TIME_LIMIT_50, "
    "TIME_LIMIT_80, TIME_LIMIT_90, ARRAY_TASKS, or several with commas",
)
PARTITIONS = Form(_NAMES, "list of partitions", "for example gpu or gpu,long")
ACCOUNT = Form(_NAME, "account", "a name: physics")
QOS = Form(_NAME, "quality of service", "a name: normal")
CONSTRAINT = Form(
    r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:&|*()\[\]!@-]*", "constraint", "for example a100 or a100&nvlink"
)
RESERVATIONS = Form(_NAMES, "list of reservations", "names: maintenance")
SWITCHES = Form(
    rf"[1-9][0-9]{{0,5}}(?:@(?:{TIME_LIMIT.pattern.removeprefix('(?ia)')}))?",
    "number of switches",
    "2, or with the time to wait for so few: 2@60 (minutes), 2@02:30:00",
)
MAIL_USER = Form(r"[A-Za-z0-9_.+@-]+", "mail address", "one address: me@example.org")
DIRECTIVE = Form(r"[a-z][a-z0-9-]*", "name of a directive", "for example signal or mem")
NETWORK_INTERFACE = Form(r"\^?=?[A-Za-z0-9_.:,@-]+", "network interface", "a name: ib0")
MODULE = Form(r"[A-Za-z0-9_][A-Za-z0-9_.+/:@-]*", "environment module", "a name: cuda/12.4")


def array_indices(indices: Iterable[int]) -> str:
    """Format ascending indices like Slurm: `0-3,7`."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and spans[-1][1] == index - 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def run_name(option: str, value: str) -> str:
    """Return a name that is valid for a directory, a job and a shell word; refuse others."""
    if not re.fullmatch(RUN_NAME, value):
        raise OptionError(
            option,
            f": {value!r} is not a valid run name. Use up to 100 letters, digits, "
            "'.', '_' and '-', starting with a letter or digit.",
        )
    return value


def text(option: str, value: str) -> str:
    """Return a text that fits on a script line: valid UTF-8 without control characters."""
    control = re.search(_CONTROL, value)
    if control:
        raise OptionError(
            option,
            f": {value!r} contains the control character {control.group()!r}, which a script "
            "line cannot hold. Remove it, or put the text into a file. [CD0102]",
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        problem = f": {value!r} is not valid UTF-8; give it in UTF-8. [CD0102]"
        raise OptionError(option, problem) from None
    return value


def limit_seconds(value: str) -> int | None:
    """Return a valid time limit in seconds, or None for unlimited, which includes 0 (sbatch(1))."""
    return time_seconds(value) or None


def time_seconds(value: str) -> int | None:
    """Return the seconds of a time in Slurm's format, or None for UNLIMITED and other words."""
    if not value[:1].isdigit() or not re.fullmatch(TIME_LIMIT.pattern, value):
        return None
    days, dash, rest = value.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:  # MM[:SS]
        parts.insert(0, 0)
    hours, minutes, seconds = [*parts, 0, 0][:3]  # [D-]HH[:MM[:SS]]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def gpu_count(option: str, value: str) -> tuple[str, int]:
    """Return the type, or "", and the count of `[TYPE:]N`."""
    gpus = re.fullmatch(_GPUS, text(option, value))
    if not gpus:
        raise OptionError(option, f": {value!r} is not a valid GPU count. Use 4 or a100:4.")
    if gpus["type"] == "gpu":
        count = gpus["count"]
        raise OptionError(option, f" {value}: 'gpu' is not a GPU type. Use {count}.")
    if gpus["type"] and not int(gpus["count"]):
        raise OptionError(
            option, f" {value}: a count of 0 takes no type. Use 0, or a higher count."
        )
    return gpus["type"] or "", int(gpus["count"])


def gpus_of(gres: str, *, bare: int = 0) -> dict[str, int]:
    """Return GPU counts by type, and their total under an empty type.

    gres: from sinfo or --gres, for example `gpu:a100:4(S:0-1),gpu:v100:2,nvme:1`. bare: count of
    `gpu` and `gpu:TYPE` without a number, 1 in a request.
    """
    gpus: dict[str, int] = {}
    for match in re.finditer(_GPU_GRES, gres):
        kind = match["type"] or ""
        count = int(match["count"] or 0)
        if match["count"] is None:
            count = bare if re.fullmatch(r"(?:[A-Za-z][\w.-]*)?", kind, re.ASCII) else 0
        for each in {kind, ""} if count or match["count"] else ():
            gpus[each] = gpus.get(each, 0) + count
    return gpus


def words(option: str, value: str) -> tuple[str, ...]:
    """Split a line of arguments like a shell, without running anything."""
    try:
        return tuple(shlex.split(text(option, value)))
    except ValueError as error:
        raise OptionError(option, f": {value!r} does not split into words: {error}.") from None


# Far above Slurm's own limit for one range (65,536) and still small enough to hold in memory.
MAX_HOSTS = 1_000_000
MAX_NAME_LENGTH = 255
# Slurm reads the numbers as unsigned long, which has at most 20 digits; padding counts as well.
MAX_DIGITS = 20

_HOSTLIST_EXAMPLE = "gpu[01-03,07] or r[1-2]n[01-16],login"
_TASKS_EXAMPLE = "4(x2),3"
# Zero tasks or repeats are invalid: every node of a step runs at least one of its tasks.
_TASKS = r"0*([1-9][0-9]{0,8})(?:\(x0*([1-9][0-9]{0,8})\))?"
_FOREIGN_CHARACTER = r"[^A-Za-z0-9._:,\[\]-]"
_BRACKET = r"\[([^\[\]]*)\]"
_BALANCED = rf"[^\[\]]*(?:{_BRACKET}[^\[\]]*)*"
_HOST_NAME = r"([^\[\],]*(?:\[[^\[\]]*\][^\[\],]*)*),"
"""Name up to its comma, which is outside brackets."""
_RANGE = r"([0-9]+)(?:-([0-9]+))?"

_Range = tuple[int, int, int]
"""First number, last number, and the width to which numbers are zero-padded."""


def expand_nodelist(text: str) -> list[str]:
    """Return every host of a Slurm host list, in the order of `scontrol show hostnames`.

    Accepts comma-separated names, each with any number of brackets: `r[1-2]n[01-03],login-1`. Keeps
    the width of a range's first number (`[08-10]` gives 08, 09, 10) and duplicates. Raises
    RequestError, with the error's position, for a malformed list or more than 1,000,000 hosts.
    """
    names = list(_parse(text))
    total = sum(
        math.prod(sum(last - first + 1 for first, last, _ in bracket) for bracket in brackets)
        for _, brackets in names
    )
    if total > MAX_HOSTS:
        raise RequestError(
            f"host list {_excerpt(text)} expands to {total} hosts; the limit is {MAX_HOSTS}. "
            "Check its ranges. [CD0405]"
        )
    return [host for literals, brackets in names for host in _expand(literals, brackets)]


def hosts_of(nodelist: str) -> list[str]:
    """Return every host of a list; a malformed list counts as one host."""
    try:
        return expand_nodelist(nodelist) if nodelist else []
    except RequestError:
        return [nodelist]


def expand_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node: `4(x2),3` gives [4, 4, 3].

    The format is that of SLURM_STEP_TASKS_PER_NODE (srun(1)). Raises RequestError, with the error's
    position, for a malformed list or more than 1,000,000 nodes.
    """
    counts: list[int] = []
    position = 0
    for item in text.split(","):
        match = re.fullmatch(_TASKS, item)
        if match is None:
            what = f"{_excerpt(item)} is not a count" if item else "there is an empty item"
            _refuse("tasks per node", text, position, what, _TASKS_EXAMPLE)
        repeats = int(match[2] or 1)
        if len(counts) + repeats > MAX_HOSTS:
            _refuse("tasks per node", text, position, f"over {MAX_HOSTS} nodes", _TASKS_EXAMPLE)
        counts.extend([int(match[1])] * repeats)
        position += len(item) + 1
    return counts


def _expand(literals: list[str], brackets: list[list[_Range]]) -> list[str]:
    """Return the hosts of one name. literals: one more than there are brackets."""
    if not brackets:
        return literals
    labels = [
        [f"{number:0{width}}" for first, last, width in b for number in range(first, last + 1)]
        for b in brackets
    ]
    # scontrol's order: the last bracket runs fastest, then the first, the second, and so on,
    # because _push_range_list resolves the prefix from its last bracket backwards.
    fastest, suffix = labels.pop(), literals[-1]
    hosts: list[str] = []
    for chosen in itertools.product(*reversed(labels)):
        pairs = zip(literals, [*reversed(chosen), ""], strict=False)
        prefix = "".join(itertools.chain.from_iterable(pairs))
        hosts += [prefix + label + suffix for label in fastest]
    return hosts


def _parse(text: str) -> Iterator[tuple[list[str], list[list[_Range]]]]:
    """Yield each name's literals and the brackets between them."""
    if not text:
        raise RequestError(
            f"the host list is empty; a valid one looks like {_HOSTLIST_EXAMPLE}. [CD0405]"
        )
    foreign = re.search(_FOREIGN_CHARACTER, text)
    if foreign is not None:
        _refuse_hosts(text, foreign.start(), f"{foreign[0]!r} cannot be part of a host list")
    end = len(text) - len(re.sub(_BALANCED, "", text, count=1))
    if end < len(text):
        close = text.find("]", end)
        if close == end:
            _refuse_hosts(text, end, "']' closes no '['")
        if close < 0:
            _refuse_hosts(text, end, "'[' is never closed")
        _refuse_hosts(text, text.index("[", end + 1), "'[' inside a bracket")
    start = 0
    for name in re.findall(_HOST_NAME, f"{text},"):
        if not name:
            _refuse_hosts(text, start, "there is an empty item")
        literals = re.split(_BRACKET, name)[::2]
        brackets = [
            list(_parse_ranges(text, start + bracket.start(1), bracket[1]))
            for bracket in re.finditer(_BRACKET, name)
        ]
        widest = (max(max(w, len(str(last))) for _, last, w in bracket) for bracket in brackets)
        if sum(map(len, literals)) + sum(widest) > MAX_NAME_LENGTH:
            _refuse_hosts(text, start, f"the name is longer than {MAX_NAME_LENGTH} characters")
        yield literals, brackets
        start += len(name) + 1


def _parse_ranges(text: str, start: int, content: str) -> Iterator[_Range]:
    for item in content.split(","):
        match = re.fullmatch(_RANGE, item)
        if match is None:
            what = (
                f"{_excerpt(item)} is not a number or range" if item else "there is an empty item"
            )
            _refuse_hosts(text, start, what)
        low, high = match[1], match[2] or match[1]
        if max(len(low), len(high)) > MAX_DIGITS:
            _refuse_hosts(text, start, f"a number has more than {MAX_DIGITS} digits")
        if int(low) > int(high):
            _refuse_hosts(text, start, f"the range {item} runs backwards")
        yield int(low), int(high), len(low)
        start += len(item) + 1


def _refuse_hosts(text: str, position: int, what: str) -> NoReturn:
    _refuse("host list", text, position, what, _HOSTLIST_EXAMPLE)


def _refuse(kind: str, text: str, position: int, what: str, example: str) -> NoReturn:
    raise RequestError(
        f"cannot read the {kind} {_excerpt(text, position)}: {what} "
        f"(character {position + 1}); a valid one looks like {example}. [CD0405]"
    )


def _excerpt(text: str, position: int = 0) -> str:
    """Return the text around `position`, quoted so that control characters are visible."""
    start = max(0, position - 40)
    end = start + 80
    before = "..." if start else ""
    after = "..." if end < len(text) else ""
    return f"{before}{text[start:end]!a}{after}"

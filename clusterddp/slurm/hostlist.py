"""Reads Slurm's two compressed lists: hosts (`gpu[01-03,07]`) and tasks per node (`4(x2),3`).

Pure text in, plain lists out: `scontrol show hostnames` needs a Slurm configuration, which many
containers lack. Order, zero padding and duplicates are scontrol's (Slurm 22.05, src/common/
hostlist.c). Two differences are meant: a suffix after the last bracket (`gpu[01-03]-ib`), which
that scontrol refuses, is understood, and what scontrol silently repairs (`a[1`, `a[1-]`, `a,,b`,
`a b`) is refused, because Slurm itself never writes it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from clusterddp.errors import RequestError

# Far above Slurm's own limit for one range (65,536) and still small enough to hold in memory.
MAX_HOSTS = 1_000_000
MAX_NAME_LENGTH = 255
# Slurm reads the numbers as unsigned long, which has at most 20 digits; padding counts as well.
MAX_DIGITS = 20

_HOSTLIST_EXAMPLE = "gpu[01-03,07] or r[1-2]n[01-16],login"
_TASKS_EXAMPLE = "4(x2),3"


def expand_nodelist(text: str) -> list[str]:
    """Return every host of a Slurm host list, in the order of `scontrol show hostnames`.

    Takes comma separated names, each with any number of brackets: `r[1-2]n[01-03],login-1`. The
    width of a range's first number is kept (`[08-10]` gives 08, 09, 10); duplicates are kept too.
    Raises RequestError, with what was seen and where, for a list that cannot be read and for one
    of more than 1,000,000 hosts.
    """
    names = list(_parse(text))
    total = sum(name.count for name in names)
    if total > MAX_HOSTS:
        raise RequestError(
            f"host list {_excerpt(text)} stands for {total} hosts; "
            f"at most {MAX_HOSTS} are expanded. Check the ranges in it."
        )
    hosts: list[str] = []
    for name in names:
        hosts.extend(name.expand())
    return hosts


def first_host(text: str) -> str:
    """Return the first host of a Slurm host list without expanding, or reading, the rest.

    Raises RequestError as `expand_nodelist` does, but only for characters that no list may hold
    and for faults in the first name.
    """
    return next(_parse(text)).first()


def expand_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node: `4(x2),3` gives [4, 4, 3].

    Takes the form of SLURM_STEP_TASKS_PER_NODE (documented in srun(1)). Raises RequestError, with
    what was seen and where, for anything else and for more than 1,000,000 nodes.
    """
    counts: list[int] = []
    position = 0
    for item in text.split(","):
        match = _TASKS.fullmatch(item)
        if match is None:
            what = f"{_excerpt(item)} is no count" if item else "there is an empty item"
            _refuse("tasks per node", text, position, what, _TASKS_EXAMPLE)
        repeats = int(match[2] or 1)
        if len(counts) + repeats > MAX_HOSTS:
            _refuse("tasks per node", text, position, f"over {MAX_HOSTS} nodes", _TASKS_EXAMPLE)
        counts.extend([int(match[1])] * repeats)
        position += len(item) + 1
    return counts


# Zero tasks or zero repeats cannot be: Slurm gives a step no node that runs none of its tasks.
_TASKS = re.compile(r"0*([1-9][0-9]{0,8})(?:\(x0*([1-9][0-9]{0,8})\))?")
_FOREIGN_CHARACTER = re.compile(r"[^A-Za-z0-9._:,\[\]-]")
_LITERAL = re.compile(r"[^\[\],]*")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True)
class _Range:
    first: int
    last: int
    width: int  # digits of the first number as written; shorter numbers are padded to it

    def labels(self) -> list[str]:
        numbers = map(str, range(self.first, self.last + 1))
        if len(str(self.first)) == self.width:
            return list(numbers)
        return [number.zfill(self.width) for number in numbers]


@dataclass(frozen=True)
class _Name:
    """One item of a host list: a literal, then any number of (bracket, literal) pairs."""

    literals: tuple[str, ...]
    brackets: tuple[tuple[_Range, ...], ...]

    @property
    def count(self) -> int:
        return math.prod(sum(r.last - r.first + 1 for r in bracket) for bracket in self.brackets)

    def first(self) -> str:
        labels = [str(bracket[0].first).zfill(bracket[0].width) for bracket in self.brackets]
        return self._join([*labels, ""])

    def expand(self) -> list[str]:
        if not self.brackets:
            return [self.literals[0]]
        labels = [
            [label for part in bracket for label in part.labels()] for bracket in self.brackets
        ]
        # scontrol's order: the last bracket runs fastest, then the first, the second, and so on,
        # because _push_range_list resolves the prefix from its last bracket backwards.
        last, suffix = labels.pop(), self.literals[-1]
        hosts: list[str] = []
        for chosen in itertools.product(*reversed(labels)):
            prefix = self._join([*reversed(chosen), ""])
            hosts.extend([prefix + label + suffix for label in last])
        return hosts

    def _join(self, labels: list[str]) -> str:
        return "".join(itertools.chain.from_iterable(zip(self.literals, labels, strict=False)))

    @property
    def longest(self) -> int:
        widest = (max(max(r.width, len(str(r.last))) for r in bracket) for bracket in self.brackets)
        return sum(map(len, self.literals)) + sum(widest)


def _parse(text: str) -> Iterator[_Name]:
    if not text:
        raise RequestError(f"the host list is empty; a valid one looks like {_HOSTLIST_EXAMPLE}.")
    foreign = _FOREIGN_CHARACTER.search(text)
    if foreign is not None:
        _refuse_hosts(text, foreign.start(), f"{foreign[0]!r} cannot be part of a host list")
    start = 0
    while True:
        name, end = _parse_name(text, start)
        if name.longest > MAX_NAME_LENGTH:
            _refuse_hosts(text, start, f"the name is longer than {MAX_NAME_LENGTH} characters")
        yield name
        if end == len(text):
            return
        start = end + 1


def _parse_name(text: str, start: int) -> tuple[_Name, int]:
    """Return the name that starts at `start`, and where it ends: at a comma or at the end."""
    literals: list[str] = []
    brackets: list[tuple[_Range, ...]] = []
    position = start
    while True:
        literal = _LITERAL.match(text, position)
        assert literal is not None  # it matches the empty string
        literals.append(literal[0])
        position = literal.end()
        if position == len(text) or text[position] == ",":
            if position == start:
                _refuse_hosts(text, position, "there is an empty item")
            return _Name(tuple(literals), tuple(brackets)), position
        if text[position] == "]":
            _refuse_hosts(text, position, "']' closes no '['")
        close = text.find("]", position)
        if close < 0:
            _refuse_hosts(text, position, "'[' is never closed")
        brackets.append(tuple(_parse_ranges(text, position + 1, close)))
        position = close + 1


def _parse_ranges(text: str, start: int, end: int) -> Iterator[_Range]:
    for item in text[start:end].split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            inner = item.find("[")
            if inner >= 0:
                _refuse_hosts(text, start + inner, "'[' inside a bracket")
            what = f"{_excerpt(item)} is no number or range" if item else "there is an empty item"
            _refuse_hosts(text, start, what)
        low, high = match[1], match[2] or match[1]
        if max(len(low), len(high)) > MAX_DIGITS:
            _refuse_hosts(text, start, f"a number has more than {MAX_DIGITS} digits")
        if int(low) > int(high):
            _refuse_hosts(text, start, f"the range {item} runs backwards")
        yield _Range(int(low), int(high), len(low))
        start += len(item) + 1


def _refuse_hosts(text: str, position: int, what: str) -> NoReturn:
    _refuse("host list", text, position, what, _HOSTLIST_EXAMPLE)


def _refuse(kind: str, text: str, position: int, what: str, example: str) -> NoReturn:
    raise RequestError(
        f"cannot read the {kind} {_excerpt(text, position)}: {what} "
        f"(character {position + 1}); a valid one looks like {example}."
    )


def _excerpt(text: str, position: int = 0) -> str:
    """Return the text around `position`, quoted so that control characters show."""
    start = max(0, position - 40)
    end = start + 80
    before = "..." if start else ""
    after = "..." if end < len(text) else ""
    return f"{before}{text[start:end]!a}{after}"

"""Statements of an sbatch file: each as one line of shell, and what it reads and sets."""

import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from clusterddp.scripts.sbatch_file import SbatchFile
from clusterddp.scripts.shell import Command

_REFERENCE = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
_GOES_ON = re.compile(r"(?:^|[\s;])(?:then|do|else|in)$|(?:&&|\|\|?|;|&|\{|\()$")
"""End of a line behind which no semicolon may stand."""
_TANGLED = re.compile(r"\s#|;;")
"""Comment behind a command, or the end of a pattern: a line that takes in the next one breaks."""
SAYS = frozenset({"echo", "printf", "date", ":", "true"})
"""Programs that do nothing but print."""
_COMMENT = re.compile(r"\s#")
_CONTINUED = re.compile(r"\\\n[ \t]*")


@dataclass(frozen=True, eq=False)
class Statement:
    """Lines of a script that stand together: one command, a list of them, an `if` up to its end."""

    first: int
    last: int
    commands: tuple[Command, ...]
    source: str
    """Source text, without a comment behind it."""
    is_compound: bool = False

    @property
    def line(self) -> str | None:
        """Return it as one line of shell; None where that cannot be done."""
        text = _CONTINUED.sub(" ", self.source).strip()
        if "\n" not in text:
            return text
        lines = _separate(text)
        if not lines:
            return None
        if self.is_array:
            return " ".join(lines)
        redirects = [redirect for command in self.commands for redirect in command.redirects]
        in_a_case = any("case" in command.inside for command in self.commands)
        has_text = any(redirect.body is not None for redirect in redirects)
        parentheses = any(line.count("(") != line.count(")") for line in lines)
        if not self.is_compound or in_a_case or has_text or parentheses:
            return None
        return joined(lines)

    @property
    def is_array(self) -> bool:
        """Return whether it only sets an array, between whose elements a line may end."""
        of_array = [each for command in self.commands for each in command.assignments]
        return len(of_array) == 1 and of_array[0].source.startswith("(") and bool(self.assigned)

    @property
    def names(self) -> set[str]:
        """Return the variables that it reads, as far as its text shows."""
        exports = [each for each in self.commands if each.texts[:1] == ("export",)]
        return {*references(self.source), *(name for each in exports for name in each.texts[1:])}

    @property
    def names_set(self) -> set[str]:
        """Return the variables that it sets, whatever else it does."""
        return {each.name for command in self.commands for each in command.assignments}

    @property
    def assigned(self) -> set[str]:
        """Return the variables that it sets, where it does nothing else; empty otherwise."""
        names: set[str] = set()
        for command in self.commands:
            words = command.texts
            if words and words[0] in ("mapfile", "readarray", "read"):
                names.add(words[-1])
            elif words and words[0] in ("[", "[[", "test", "declare", "local", "readonly"):
                names |= {each.name for each in command.assignments}
            elif words and words[0] in SAYS and not command.redirects:
                continue
            elif words or not command.assignments:
                return set()
            else:
                names |= {each.name for each in command.assignments}
        return names


def references(text: str) -> list[str]:
    """Return the names of the variables that a text reads."""
    return _REFERENCE.findall(text)


def statements(file: SbatchFile) -> Iterator[Statement]:
    """Yield the statements of a file in their order."""
    spans = sorted(_spans(file))
    merged: list[tuple[int, int, bool]] = []
    for first, last, compound in spans:
        if merged and first <= merged[-1][1]:
            before = merged[-1]
            merged[-1] = (before[0], max(last, before[1]), compound or before[2])
        elif merged and merged[-1][1] not in file.script.closed:
            merged[-1] = (merged[-1][0], last, True)
        else:
            merged.append((first, last, compound))
    lines = [command.line for command in file.script.commands]
    for first, last, compound in merged:
        begin, end = bisect.bisect_left(lines, first), bisect.bisect_right(lines, last)
        commands = tuple(file.script.commands[begin:end])
        source = "\n".join(file.lines[first - 1 : last])
        if len(commands) == 1 and not compound and commands[0].source in source:
            ended = source.partition(commands[0].source)[2].strip()
            if not ended or ended.startswith("#"):
                source = commands[0].source
        if first == last and first in file.script.comments:
            source = _without_comment(source)
        if commands:
            yield Statement(first, last, commands, source, compound)


def _spans(file: SbatchFile) -> Iterator[tuple[int, int, bool]]:
    """Yield first and last line of each command, and of the lines of keywords alone."""
    covered: set[int] = set()
    for command in file.script.commands:
        last = command.last_line
        for redirect in command.redirects:
            if redirect.body is not None:
                last = max(last, redirect.line + redirect.body.count("\n") + 1)
        covered.update(range(command.line, last + 1))
        yield command.line, last, bool(command.inside)
    for number, text in enumerate(file.lines, 1):
        stripped = text.strip()
        if number not in covered and stripped and not stripped.startswith("#"):
            yield number, number, True


def one_line(text: str) -> str | None:
    """Return plain commands as one line of shell; None where that cannot be done."""
    lines = _separate(_CONTINUED.sub(" ", text))
    tangled = any("<<" in line or line.count("(") != line.count(")") for line in lines)
    return None if tangled or not lines else joined(lines)


def joined(lines: Sequence[str]) -> str:
    """Join lines of shell to one."""
    line = lines[0]
    for each in lines[1:]:
        line += f" {each}" if _GOES_ON.search(line) else f"; {each}"
    return line


def _separate(text: str) -> list[str]:
    """Return the lines of a text without comments; none where one goes on in the next."""
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line and not line.startswith("#")]
    return [] if any(_TANGLED.search(line) or _is_open(line) for line in lines) else lines


def _is_open(line: str) -> bool:
    """Return whether a quoted text goes on in the next line, as far as counting tells."""
    return any(line.count(quote) % 2 for quote in "\"'`")


def _without_comment(line: str) -> str:
    """Return a line without the comment behind it, where that is no part of a quoted word."""
    behind = _COMMENT.search(line, max(line.rfind("'"), line.rfind('"')) + 1)
    return line[: behind.start()].rstrip() if behind else line


def needed(
    wanted: Iterable[Statement], names: Iterable[str], known: Sequence[Statement]
) -> set[int]:
    """Return the first lines of the statements among `known` that only set what others read.

    wanted: the statements that run in any case. names: further variables that are read.
    """
    read = set(names).union(*(statement.names for statement in wanted))
    lines: set[int] = set()
    while True:
        more = [s for s in known if s.first not in lines and s.assigned & read]
        if not more:
            return lines
        for statement in more:
            lines.add(statement.first)
            read |= statement.names

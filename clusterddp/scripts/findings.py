"""Findings, and the rules that make them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A mistake in a script: where, why, and the line that is right."""

    rule: str
    file: str
    line: int
    is_sure: bool
    """True where it will go wrong, False where it may."""
    why: str
    text: str
    """The line in the file."""
    instead: str
    """The line, or lines, to write in its place."""

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "file": self.file,
            "line": self.line,
            "sure": self.is_sure,
            "why": self.why,
            "text": self.text,
            "instead": self.instead,
        }


@dataclass(frozen=True)
class Found:
    """A mistake that a rule has found; its file and its text are known where the rule runs."""

    line: int
    is_sure: bool
    why: str
    instead: str


@dataclass(frozen=True)
class Rule:
    """One kind of mistake."""

    name: str
    mistake: str
    """The mistake, in the words of the documentation."""
    source: str
    """The text that says so."""
    find: Callable[[Any], Iterator[Found]]


class Rules:
    """The rules for one kind of script, in the order in which they are defined."""

    def __init__(self) -> None:
        self.all: list[Rule] = []

    def __call__(
        self, name: str, mistake: str, *, source: str
    ) -> Callable[[Callable[[Any], Iterator[Found]]], Callable[[Any], Iterator[Found]]]:
        """Make a function a rule."""

        def add(find: Callable[[Any], Iterator[Found]]) -> Callable[[Any], Iterator[Found]]:
            self.all.append(Rule(name, mistake, source, find))
            return find

        return add

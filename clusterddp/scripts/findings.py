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
        return {name.removeprefix("is_"): value for name, value in vars(self).items()}


@dataclass(frozen=True)
class Found:
    """A mistake that a rule has found; its file and its text are known where the rule runs."""

    line: int
    is_sure: bool
    why: str
    instead: str


Rule = Callable[[Any], Iterator[Found]]
"""A function that finds one kind of mistake; its docstring has the mistake, and who says so."""


class Rules(list[Rule]):
    """The rules for one kind of script, in the order in which they are defined."""

    def __call__(self, find: Rule) -> Rule:
        """Make a function a rule."""
        self.append(find)
        return find


def rule_name(rule: Rule) -> str:
    """Return a rule's name as it is shown: that of its function."""
    return rule.__name__.replace("_", "-")

"""Findings and the rules that produce them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A mistake in a script: its place, the reason, and the corrected line."""

    rule: str
    file: str
    line: int
    is_sure: bool
    """True if it will go wrong, False if it may."""
    why: str
    text: str
    """Line in the file."""
    instead: str
    """Line or lines that replace it."""

    def to_json(self) -> dict[str, Any]:
        return {name.removeprefix("is_"): value for name, value in vars(self).items()}


@dataclass(frozen=True)
class Found:
    """A mistake found by a rule; the caller adds file and text."""

    line: int
    is_sure: bool
    why: str
    instead: str


Rule = Callable[[Any], Iterator[Found]]
"""A function that finds one kind of mistake; its docstring names the mistake and the source."""


class Rules(list[Rule]):
    """Rules for one kind of script, in order of definition."""

    def __call__(self, find: Rule) -> Rule:
        """Register a function as a rule."""
        self.append(find)
        return find


def rule_name(rule: Rule) -> str:
    """Return the rule's public name: its function's name with hyphens."""
    return rule.__name__.replace("_", "-")

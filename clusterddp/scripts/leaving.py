"""Finds relative paths in a Python script that lead above a folder, by the script's text alone."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from clusterddp.scripts.python_file import PythonFile

_UP = re.compile(r"/?\.\.(?:/[^\s*]*)?")
_LONGEST = 60
_OF_TEXTS = ("replace", "split", "startswith", "endswith", "strip", "count", "find")
"""Methods of a text whose argument is looked for in it."""


@dataclass(frozen=True)
class UpwardPath:
    """A path that goes up from the current folder, or from that of the script."""

    line: int
    typed: str
    """Its expression, as Python writes it."""
    levels: int
    """Folders that it goes up."""
    of_script: bool
    """True where it starts at the script's own folder (`__file__`)."""


def upward_paths(script: PythonFile) -> Iterator[UpwardPath]:
    """Yield the paths that go up, in the order of their lines."""
    seen: set[ast.AST] = set()
    found = []
    for node in script.nodes:
        if isinstance(node, ast.Name) and node.id == "__file__":
            whole = _expression(script, node)
            seen |= set(ast.walk(whole))
            levels = _levels_above(script, node, whole) - 1
            levels += sum(map(_levels, ast.walk(whole)))
            if levels > 0:
                found.append(UpwardPath(node.lineno, _shown(whole), levels, of_script=True))
    for node in script.nodes:
        if isinstance(node, ast.Constant) and node not in seen and (levels := _levels(node)):
            if _is_looked_for(next(script.above(node), (None, None))[0]):
                continue
            found.append(UpwardPath(node.lineno, _shown(node), levels, of_script=False))
    yield from sorted(dict.fromkeys(found), key=lambda path: path.line)


def _is_looked_for(above: ast.AST | None) -> bool:
    """Return whether a text is compared with another, or looked for in one, and so no path."""
    is_method = isinstance(above, ast.Call) and isinstance(above.func, ast.Attribute)
    name = above.func.attr if is_method else ""  # type: ignore[union-attr]
    return isinstance(above, ast.Compare) or name in _OF_TEXTS


def levels_up(path: str) -> int:
    """Return how many folders a path goes up from where it starts: 2 of `../../data`."""
    if not _UP.fullmatch(path):
        return 0
    depth = lowest = 0
    for part in path.split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        lowest = min(lowest, depth)
    return -lowest


def _levels(node: ast.AST) -> int:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return levels_up(node.value) if is_text else 0  # type: ignore[attr-defined]


def _expression(script: PythonFile, name: ast.AST) -> ast.AST:
    """Return the whole path that a `__file__` is part of: up to a call that makes no path."""
    whole = name
    for parent, child in script.above(name):
        is_path = not isinstance(parent, ast.Call) or child is parent.func or _makes_path(parent)
        if not isinstance(parent, ast.expr) or not is_path:
            break
        whole = parent
    return whole


_PATHS = {"dirname", "join", "abspath", "realpath", "normpath", "Path", "PurePath", "str", "fspath"}


def _makes_path(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _PATHS


def _levels_above(script: PythonFile, name: ast.AST, whole: ast.AST) -> int:
    """Count dirname(…), .parent and .parents[N] between a `__file__` and the whole path."""
    count = 0
    for parent, _ in script.above(name):
        match parent:
            case ast.Call(func=function):
                count += ast.unparse(function).endswith("dirname")
            case ast.Attribute(attr="parent"):
                count += 1
            case ast.Subscript(
                value=ast.Attribute(attr="parents"), slice=ast.Constant(int(number))
            ):
                count += number + 1
        if parent is whole:
            break
    return count


def _shown(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

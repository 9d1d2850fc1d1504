"""A person's own function by reference, `package.module:function`: its form, where it lies, itself.

It is looked for as Python looks for a module, from the folder in which the command was typed. On
the submitting side it is found without running anything of it; on the tasks it is imported.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import RequestError, TrainingError, is_debuggers_quit

if TYPE_CHECKING:
    import ast

FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def is_reference(value: str) -> bool:
    """Whether it has the form `package.module:function`."""
    return FORM.fullmatch(value) is not None


def find(reference: str, folder: Path) -> Path | None:
    """The file of the module: from this folder first, then where Python looks; None without one.

    Nothing is run: parents are not imported, as importlib.util.find_spec would.
    """
    import importlib.util
    from importlib.machinery import PathFinder

    head, *rest = reference.partition(":")[0].split(".")
    found = PathFinder.find_spec(head, [str(folder)])
    if found is None or found.loader is None:
        try:
            installed = importlib.util.find_spec(head)  # also by the finders of editable installs
        except ValueError:  # a module that Python has made without one, such as __main__
            installed = None
        # A bare folder hides nothing that is installed, and nothing but that hides it.
        if found is None or (installed is not None and installed.has_location):
            found = installed
    for part in rest:
        if found is None or found.submodule_search_locations is None:
            return None
        found = PathFinder.find_spec(part, list(found.submodule_search_locations))
    if found is None or not found.has_location or not found.origin:
        return None
    return Path(found.origin)


def locate(option: str, reference: str, folder: Path) -> Path:
    """The file that holds the function, as `find` does.

    Raises RequestError when there is no such module, or when its file does not define that name.
    """
    module, _, function = reference.partition(":")
    path = find(reference, folder)
    if path is None:
        raise RequestError(
            f"{option} {reference}: there is no module {module} in {folder}, nor is one installed "
            f"for {sys.executable}. Start from the folder that holds it, or install it."
        )
    if path.suffix != ".py":
        return path
    try:
        names = _names(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise RequestError(f"{option} {reference}: {path} cannot be read: {error}.") from None
    if function not in names and not names & {"*", "__getattr__"}:
        raise RequestError(
            f"{option} {reference}: {path} defines no {function}. Name a function of that file."
        )
    return path


def load(reference: str) -> Callable[..., Any]:
    """Import the function. Raises TrainingError as `running` does, or when it is not there."""
    import importlib

    name, _, function = reference.partition(":")
    here = str(Path.cwd())
    if sys.path[:1] != [here]:  # as `python -m` has it, but not an installed command
        sys.path.insert(0, here)
    with running(reference):
        module = importlib.import_module(name)
        found = getattr(module, function, None)
    if not callable(found):
        seen = f"is {type(found).__name__}" if hasattr(module, function) else "is not there"
        raise TrainingError(
            f"{reference}: {function} {seen} in {getattr(module, '__file__', name)}; expected a "
            "function. Another module of that name comes first if that is not your file."
        )
    function_found: Callable[..., Any] = found
    return function_found


@contextmanager
def running(reference: str) -> Iterator[None]:
    """Around a person's own code: what it raises, in a line that a verdict can carry.

    Raises TrainingError for whatever the code raises; the traceback, which the person needs, goes
    to stderr, which is the rank's log.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # a script that reads its arguments exits at import
        if is_debuggers_quit(error):
            raise
        import traceback

        traceback.print_exception(error)
        first = (str(error).splitlines() or [""])[0]
        raise TrainingError(
            f"{reference} failed on {os.uname().nodename} in {Path.cwd()}: "
            f"{type(error).__name__}{first and ': '}{first} (the rank's log has the traceback)"
        ) from None


def _names(path: Path) -> set[str]:
    """What a file defines or imports at its top level; `*` where it imports a star."""
    import ast

    names: set[str] = set()
    for node in _top_level(ast.parse(path.read_bytes(), filename=str(path)).body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names


def _top_level(nodes: "Iterable[ast.AST]") -> "Iterator[ast.AST]":
    """Every node but those within functions and classes, whose names are their own."""
    import ast

    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _top_level(ast.iter_child_nodes(node))

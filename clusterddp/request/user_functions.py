"""User functions by reference, `package.module:function`: found, checked and imported.

Modules are looked up as Python does, from the folder in which the command was typed. The submitting
side finds a function without running anything of it; the tasks import it.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clusterddp.errors import RequestError, TrainingError, is_debuggers_quit


def find(reference: str, folder: Path) -> Path | None:
    """Return the file of the module, from this folder first, then Python's path; None without one.

    Nothing is run: parents are not imported, as importlib.util.find_spec would.
    """
    import importlib.util
    from importlib.machinery import PathFinder

    head, *rest = reference.partition(":")[0].split(".")
    spec = PathFinder.find_spec(head, [str(folder)])
    if spec is None or spec.loader is None:
        installed = None
        with suppress(ValueError):  # a module that Python has made without one, such as __main__
            installed = importlib.util.find_spec(head)  # also by the finders of editable installs
        # A bare folder hides nothing that is installed, and nothing but that hides it.
        if spec is None or (installed is not None and installed.has_location):
            spec = installed
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    if spec is None or not spec.has_location or not spec.origin:
        return None
    return Path(spec.origin)


def locate(option: str, reference: str, folder: Path) -> Path:
    """Return the file that holds the function, as `find` does.

    Raises RequestError when there is no such module, or when its file does not define that name.
    """
    module, _, function = reference.partition(":")
    path = find(reference, folder)
    if path is None:
        raise RequestError(
            f"{option} {reference}: there is no module {module} in {folder}, nor is one installed "
            f"for {sys.executable}. Start from the folder that holds it, or install it. [CD0308]"
        )
    if path.suffix != ".py":
        return path
    try:
        names = _names(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise RequestError(
            f"{option} {reference}: {path} cannot be read: {error}. [CD0308]"
        ) from None
    if function not in names and not names & {"*", "__getattr__"}:
        raise RequestError(
            f"{option} {reference}: {path} defines no {function}. Name a function of that "
            "file. [CD0308]"
        )
    return path


def load(reference: str) -> Callable[..., object]:
    """Import the function. Raises TrainingError as `running` does, or when it is not there."""
    import importlib

    name, _, function = reference.partition(":")
    here = str(Path.cwd())
    if sys.path[:1] != [here]:  # as `python -m` has it, but not an installed command
        sys.path.insert(0, here)
    with running(reference):
        module = importlib.import_module(name)
        loaded: object = getattr(module, function, None)
    if not callable(loaded):
        problem = f"is {type(loaded).__name__}" if hasattr(module, function) else "is not there"
        raise TrainingError(
            f"{reference}: {function} {problem} in {getattr(module, '__file__', name)}; expected a "
            "function. Another module of that name comes first if that is not your file. [CD0308]"
        )
    return loaded


@contextmanager
def running(reference: str) -> Iterator[None]:
    """Run a user's code, and put what it raises into a line that a verdict can carry.

    Raises TrainingError for any exception of the code; the traceback goes to stderr, which is the
    rank's log.
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
            f"{type(error).__name__}{first and ': '}{first} (the rank's log has the "
            "traceback) [CD0309]"
        ) from None


def _names(path: Path) -> set[str]:
    """Return the names that a file defines or imports at its top level; `*` for a star import."""
    import ast

    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_bytes(), filename=str(path))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # the names in it are local
        nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names

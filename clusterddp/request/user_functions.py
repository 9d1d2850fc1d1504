"""User functions by reference (`package.module:function`): lookup, check and import.

Modules are looked up as Python does, from the directory in which the command was typed. The
submitting process finds a function without running its code; the tasks import it.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clusterddp.errors import RequestError, TrainingError, is_debuggers_quit


def find(reference: str, folder: Path) -> Path | None:
    """Return the file of the module, looked up in this directory, then on Python's path, or None.

    Nothing is run: unlike importlib.util.find_spec, it does not import parent packages.
    """
    import importlib.util
    from importlib.machinery import PathFinder

    head, *rest = reference.partition(":")[0].split(".")
    spec = PathFinder.find_spec(head, [str(folder)])
    if spec is None or spec.loader is None:
        installed = None
        with suppress(ValueError):  # raised for a module without a spec, for example __main__
            installed = importlib.util.find_spec(head)  # also uses finders of editable installs
        # An installed package takes precedence over a directory without __init__.py.
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
    """Return the file that defines the function, looked up as in `find`.

    Raises RequestError if there is no such module or its file does not define that name.
    """
    module, _, function = reference.partition(":")
    path = find(reference, folder)
    if path is None:
        raise RequestError(
            f"{option} {reference}: there is no module {module} in {folder} or installed for "
            f"{sys.executable}. Start from the directory that contains it, or install it. [CD0308]"
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
    """Import the function. Raises TrainingError as `running` does, or if it does not exist."""
    import importlib

    name, _, function = reference.partition(":")
    here = str(Path.cwd())
    if sys.path[:1] != [here]:  # `python -m` adds it, an installed command does not
        sys.path.insert(0, here)
    with running(reference):
        module = importlib.import_module(name)
        loaded: object = getattr(module, function, None)
    if not callable(loaded):
        problem = f"is {type(loaded).__name__}" if hasattr(module, function) else "is missing"
        raise TrainingError(
            f"{reference}: {function} {problem} in {getattr(module, '__file__', name)}; expected a "
            "function. If it is not your file, another module of that name is found first. [CD0308]"
        )
    return loaded


@contextmanager
def running(reference: str) -> Iterator[None]:
    """Run a user's code, and turn its exceptions into one line for the run's result.

    Raises TrainingError for any exception of the code; the traceback goes to stderr, which is the
    rank's log.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # a script that parses arguments exits at import
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

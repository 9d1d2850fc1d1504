"""A person's own function by reference, `package.module:function`: its form, where it lies, itself.

What is named here is looked for as Python looks for a module, from the folder in which the command
was typed. On the submitting side it is found without running it.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterddp.errors import RequestError, TrainingError

FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def is_reference(value: str) -> bool:
    """Whether it has the form `package.module:function`."""
    return FORM.fullmatch(value) is not None


def locate(option: str, reference: str) -> Path:
    """The file that holds the function, found as an import would, without running anything.

    Looked for from the current folder first, then where Python looks. Raises RequestError when
    there is no such module, or when its file does not define that name.
    """
    module, _, function = reference.partition(":")
    path = _find(module)
    if path is None:
        raise RequestError(
            f"{option} {reference}: there is no module {module} in {Path.cwd()}, nor installed. "
            "Start from the folder that holds it, or install it."
        )
    if path.suffix == ".py" and function not in _names(option, reference, path):
        raise RequestError(f"{option} {reference}: {path} defines no {function}.")
    return path


def load(reference: str) -> Callable[..., Any]:
    """Import the function. Raises TrainingError when it is not there, or its module fails."""
    import importlib

    module, _, name = reference.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise TrainingError(
            f"{reference} cannot be imported on {os.uname().nodename} in {here}: "
            f"{type(error).__name__}: {error}."
        ) from error
    if not callable(function):
        raise TrainingError(f"{reference} is no function, but {type(function).__name__}.")
    found: Callable[..., Any] = function
    return found


def _find(module: str) -> Path | None:
    """Of the module's file; parents are not imported, as find_spec by itself would."""
    from importlib.machinery import PathFinder

    search = [str(Path.cwd()), *sys.path]
    head, *rest = module.split(".")
    found = PathFinder.find_spec(head, search)
    for part in rest:
        if found is None or found.submodule_search_locations is None:
            return None
        found = PathFinder.find_spec(part, list(found.submodule_search_locations))
    return Path(found.origin) if found and found.origin else None


def _names(option: str, reference: str, path: Path) -> set[str]:
    """What a file defines or imports at its top level; everything, where it imports a star."""
    import ast

    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise RequestError(f"{option} {reference}: {path} cannot be read: {error}.") from None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name) for alias in node.names)
    return names | {reference.partition(":")[2]} if "*" in names else names

"""Code and paths that a COMMAND uses outside the run's copy of the code.

Files are only read, and nothing is started: installed packages are found by the metadata that
installers write, and paths by parsing the script.
"""

import ast
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from clusterddp import formatting, log
from clusterddp.errors import RequestError
from clusterddp.request import nested_launcher
from clusterddp.request.spec import JobSpec
from clusterddp.scripts import check
from clusterddp.scripts.python_file import PythonFile

_OWN = Path(__file__).parents[2]
"""Directory of this package, which is bundled into the run."""
_INSTALLED = ("site-packages", "dist-packages")
"""Package directories of a base environment, not source trees."""
_UP = re.compile(r"/?\.\.(?:/[^\s*]*)?")
_LONGEST = 60
_STRING_METHODS = ("replace", "split", "startswith", "endswith", "strip", "count", "find")
"""String methods whose argument is a pattern, not a path."""


def warn_of_imports(spec: JobSpec, tree: Path, folder: Path) -> None:
    """Warn of source trees outside `tree` that the tasks import from, because they are not copied.

    Imports from within `tree` use the copy (`processes.armed`).
    folder: directory of the submission.
    """
    own = Path(os.path.realpath(tree))
    folders = [path for path in _sources(spec, folder) if not path.is_relative_to(own)]
    if folders:
        named = formatting.join_limited([shlex.quote(str(path)) for path in folders], 3, ", ")
        log.warning(
            f"the tasks import the current code of {named}: only {tree} is copied. To freeze it "
            "too, install it without -e, or submit from a directory that contains both. [CD0320]"
        )
    script = nested_launcher.started(spec.command)[1]
    if script.startswith("/") and Path(os.path.realpath(script)).is_relative_to(own):
        log.warning(
            f"COMMAND runs {shlex.quote(script)} itself, not its copy. To run the copy, use a path "
            "relative to this directory. [CD0320]"
        )


def find_outside_paths(command: Sequence[str], folder: Path, tree: Path) -> list[str]:
    """List the relative paths in a COMMAND and its script that leave a tree.

    They resolve differently in a copy of the tree. directory: its working directory, in the tree.
    """
    depth = len(folder.relative_to(tree).parts)
    found = []
    for word in command:
        path = word.partition("=")[2] if word.startswith("-") and "=" in word else word
        if levels_up(path) > depth:
            found.append(f"{shlex.quote(path)} of COMMAND")
    program, file = nested_launcher.started(command)
    module = nested_launcher.module_of(command)
    name = file or (f"{module.replace('.', '/')}.py" if module else program)
    return [*found, *outside_paths_of_script(name, folder, tree)]


def outside_paths_of_script(name: str, folder: Path, tree: Path) -> list[str]:
    """List the relative paths in a Python script that leave a tree; empty for other files.

    folder: its working directory, in the tree.
    """
    path = Path(os.path.realpath(folder / name))
    is_file = os.path.isfile(path)  # noqa: PTH113 -- Path.is_file raises if a name is too long
    if path.suffix != ".py" or not is_file or not path.is_relative_to(tree):
        return []
    try:
        script = PythonFile(name, check.read_script(str(path)))
    except (RequestError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # the task itself will report it
    depth = len(folder.relative_to(tree).parts)
    own_depth = len(path.parent.relative_to(_real(tree)).parts)
    return [
        f"{each.typed} ({name}, line {each.line})"
        for each in upward_paths(script)
        if each.levels > (own_depth if each.of_script else depth)
    ]


def outside_paths_remark(paths: Sequence[str], tree: Path) -> str:
    """Return the warning that these paths leave a tree and so break in its copy."""
    named = formatting.join_limited(paths, 3, ", ")
    return (
        f"{named}: a relative path that leaves {tree}. It breaks because the tasks run a copy of "
        "that directory. Use an absolute path, submit from a directory (or git work tree) that "
        "contains its target, or add --no-snapshot."
    )


def src_remark(command: Sequence[str], folder: Path, pythonpath: str | None) -> str:
    """Return how to run `python -m pkg.train` with the package in src/; empty if it is importable.

    pythonpath: PYTHONPATH of the tasks.
    """
    package = nested_launcher.module_of(command).partition(".")[0]
    if not package or not _has(folder / "src", package):
        return ""
    entries = [folder / part for part in (pythonpath or "").split(":")]  # empty: the cwd
    sites = list(_site_packages(command))
    entries += [*sites, *(path for site in sites for path in _named_in(site))]
    if any(_has(entry, package) for entry in (folder, *entries)):
        return ""
    if any(folder.is_relative_to(tree) for site in sites for tree in _editable(site)):
        return ""
    value = shlex.quote(f"src:{pythonpath}" if pythonpath else "src")
    return (
        f"COMMAND: no module {package} in {folder} or in its Python, but src/ has one. Add "
        f"--env PYTHONPATH={value}, or install it: pip install -e ."
    )


def pythonpath(spec: JobSpec) -> str | None:
    """Return the tasks' PYTHONPATH."""
    return dict(spec.environment).get("PYTHONPATH", os.environ.get("PYTHONPATH"))


def _has(folder: Path, package: str) -> bool:
    try:
        is_there = (folder / package).is_dir() or (folder / f"{package}.py").is_file()
        return is_there or any(folder.glob(f"{package}.*.so"))
    except OSError:
        return False


def _sources(spec: JobSpec, folder: Path) -> list[Path]:
    """List the source directories, links resolved, that the tasks' Python imports from."""
    found = [folder / part for part in (pythonpath(spec) or "").split(":") if part]
    # A site's environment modules add their own directories, which users cannot write.
    found = [path for path in found if os.access(path, os.W_OK)]
    for site in _site_packages((*spec.command, spec.python)):  # COMMAND is empty for a training
        inside = Path(os.path.realpath(site))
        named = [*_named_in(site), *_editable(site)]
        found += [path for path in named if not _real(path).is_relative_to(inside.parent)]
    real = dict.fromkeys(map(_real, found))
    return [
        path
        for path in real
        if os.path.isdir(path)  # noqa: PTH112 -- a name can be too long for Path's own
        and path not in (_OWN, _real(folder))
        and path.name not in _INSTALLED
    ]


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _site_packages(command: Sequence[str]) -> Iterator[Path]:
    """Yield the site-packages of the environment that contains the command's program."""
    program = shutil.which(nested_launcher.started(command)[0] or "")
    if program:
        prefix = Path(os.path.abspath(program)).parents[1]
        yield from sorted(prefix.glob("lib/python3*/site-packages"))


def _named_in(site: Path) -> Iterator[Path]:
    """Yield the directories that .pth files add to the path (Python's site module)."""
    for file in sorted(site.glob("*.pth")):
        for line in _lines(file):
            path = line.strip()
            if path and not path.startswith(("#", "import ", "import\t")):
                yield site / path


def _editable(site: Path) -> Iterator[Path]:
    """Yield the source trees of editable installs (PEP 610)."""
    for file in sorted(site.glob("*.dist-info/direct_url.json")):
        try:
            origin = json.loads("\n".join(_lines(file)))
            if origin["dir_info"]["editable"]:
                yield Path(unquote(urlsplit(origin["url"]).path))
        except (ValueError, KeyError, TypeError):
            continue  # not a local install, or damaged


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []


@dataclass(frozen=True)
class UpwardPath:
    """A path that goes up from the working directory or from the script's directory."""

    line: int
    typed: str
    """Its expression, normalized by `ast.unparse`."""
    levels: int
    """Number of directories that it goes up."""
    of_script: bool
    """True if it starts at the script's directory (`__file__`)."""


def upward_paths(script: PythonFile) -> Iterator[UpwardPath]:
    """Yield the paths that go up, in line order."""
    seen: set[ast.AST] = set()
    found = []
    for node in script.nodes:
        if isinstance(node, ast.Name) and node.id == "__file__":
            whole = _expression(script, node)
            seen |= set(ast.walk(whole))
            levels = _levels_above(script, node, whole) - 1
            levels += sum(map(_levels, ast.walk(whole)))
            if levels > 0:
                found.append(UpwardPath(node.lineno, _as_typed(whole), levels, of_script=True))
    for node in script.nodes:
        if isinstance(node, ast.Constant) and node not in seen and (levels := _levels(node)):
            if _is_looked_for(next(script.above(node), (None, None))[0]):
                continue
            found.append(UpwardPath(node.lineno, _as_typed(node), levels, of_script=False))
    yield from sorted(dict.fromkeys(found), key=lambda path: path.line)


def _is_looked_for(above: ast.AST | None) -> bool:
    """Return whether a string is a comparison operand or a search pattern rather than a path."""
    is_method = isinstance(above, ast.Call) and isinstance(above.func, ast.Attribute)
    name = above.func.attr if is_method else ""  # type: ignore[union-attr]
    return isinstance(above, ast.Compare) or name in _STRING_METHODS


def levels_up(path: str) -> int:
    """Return how many directories a path goes up from its start: 2 for `../../data`."""
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
    """Return the whole path expression around `__file__`, up to a call that is not a path's."""
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


def _as_typed(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

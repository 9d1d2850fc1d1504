"""Counts how well the package can be lived in: `python -m benchmarks.house [FOLDER|COMMIT]`.

A room is a package of clusterddp/ or a file at its root. Every import counts: those inside
functions, and, as import-linter has it, those for type checkers alone. A module that is only named
in a string is not seen.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

NAME = "clusterddp"
Graph = Mapping[str, set[str]]

_LONG = 60
_POOR = re.compile(
    r"(That|Those|Of|By|What|Whether|How|Who|Whose|Which|Where|When|As|For|If|In|To|The ones?)\b"
)
_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}

# Runs at the start of every Python with this on its path: notes the package's files of which a
# function runs, until sbatch is started or an optimizer has stepped. Bodies of modules and classes
# are no functions, as their code lacks CO_OPTIMIZED, nor are comprehensions, which from Python 3.12
# on are part of what they stand in.
_TRACER = """
import os, sys, threading
package, reports = os.environ["HOUSE_PACKAGE"] + os.sep, os.environ["HOUSE_REPORTS"]
entered = set()
def end(kind):
    sys.setprofile(None)
    threading.setprofile(None)
    with open(os.path.join(reports, f"{kind}-{os.getpid()}"), "w") as file:
        file.write("\\n".join(path.removeprefix(package) for path in sorted(entered)))
    entered.clear()
def note(frame, event, argument):
    code = frame.f_code
    if event == "call":
        if (code.co_filename.startswith(package) and code.co_flags & 1
                and not code.co_name.endswith(("comp>", "genexpr>"))):
            entered.add(code.co_filename)
    elif event == "return" and code.co_name == "step" and "/torch/optim/" in code.co_filename:
        end("step")
def watch(event, arguments):
    if event == "subprocess.Popen" and entered and os.path.basename(arguments[1][0]) == "sbatch":
        end("sbatch")
sys.addaudithook(watch)
threading.setprofile(note)
sys.setprofile(note)
"""


def main() -> None:
    """Print the figures of a folder that holds a checkout, or of a commit of this repository."""
    parser = argparse.ArgumentParser(description="Count how well the package can be lived in.")
    parser.add_argument("checkout", nargs="?", default=".", help="a folder or a commit")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--traced", action="store_true", help="trace a submission and a rank, too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(asked.checkout).absolute()
        if not root.is_dir():
            root = Path(folder)
            archive = ["git", "archive", asked.checkout]
            content = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
            subprocess.run(["tar", "x", "-C", folder], input=content, check=True)
        figures = measured(root)
        if asked.traced:
            figures |= traced(root)
    if asked.json:
        print(json.dumps(figures, indent=2))
        return
    for label, figure in figures.items():
        items = figure if isinstance(figure, list) else []
        print(f"{label:<34} {len(items) if isinstance(figure, list) else figure}")
        print("".join(f"    {item}\n" for item in items), end="")


def measured(root: Path) -> dict[str, object]:
    """Give each figure by its label; where it is the length of a list, that list."""
    files = [path for path in (root / NAME).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    folders = [path.parent for path in files]
    largest = max(sorted(set(folders)), key=folders.count)
    texts = {
        ".".join(path.relative_to(root).with_suffix("").parts): path.read_text()
        for path in sorted(files)
        if path.suffix == ".py"
    }
    trees = {module: ast.parse(text) for module, text in texts.items()}
    functions = [
        (f"{module}.{node.name}", node, (node.end_lineno or 0) - node.lineno + 1)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    public = [node for _, node, _ in functions if not node.name.startswith("_")]
    documented = sum(ast.get_docstring(node) is not None for node in public)
    docstrings = {module: list(_docstrings(tree)) for module, tree in trees.items()}

    imports = [(module, other) for module in trees for other in _imports(trees[module], trees)]
    layers = _layers(root)
    upwards = [(a, b) for a, b in imports if _points_up(_room(a), _room(b), layers)]
    rooms = {(_room(a), _room(b)) for a, b in imports if _room(a) != _room(b)}
    chain = longest_chain({(a, b) for a, b in rooms if not _points_up(a, b, layers)})
    return {
        "floors": len(chain),
        "longest chain": " > ".join(chain),
        "rooms": len(set(map(_room, trees))),
        "imports between rooms": len(rooms),
        "imports upwards": [f"{a} > {b}" for a, b in sorted(upwards)],
        "circles of modules": [" ".join(circle) for circle in circles(imports)],
        "circles of siblings": [" ".join(circle) for circle in circles(_siblings(imports))],
        "files at the root": folders.count(root / NAME),
        "largest folder": f"{folders.count(largest)} {largest.relative_to(root)}",
        "modules": len(trees),
        "lines": sum(text.count("\n") for text in texts.values()),
        "code lines": sum(_code_lines(texts[module], docstrings[module]) for module in trees),
        "documented public functions, %": round(100 * documented / len(public), 1),
        "fmt: skip": sum(text.count("fmt: skip") for text in texts.values()),
        "Any": sum(len(re.findall(r"\bAny\b", text)) for text in texts.values()),
        f"functions over {_LONG} lines": [
            f"{name} {length}" for name, _, length in functions if length > _LONG
        ],
        "docstrings that open poorly": [
            f"{module}:{node.lineno} {str(node.value).strip().splitlines()[0]}"
            for module in trees
            for node in docstrings[module]
            if _POOR.match(str(node.value).strip())
        ],
    }


def traced(root: Path) -> dict[str, object]:
    """Give the package's files of which a function runs, in a submission and in a rank.

    The one runs from the start of `submit -- COMMAND` until it starts sbatch, a stand-in; the other
    in a rehearsal of two ranks on synthetic digits, until rank 0's optimizer has stepped once.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reports, programs = folder / "reports", folder / "bin"
        for made in (reports, programs):
            made.mkdir()
        (folder / "sitecustomize.py").write_text(_TRACER)
        (programs / "sbatch").write_text("#!/bin/sh\ncat >/dev/null\necho 1\n")
        (programs / "sbatch").chmod(0o755)
        plain = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(root),
        }
        watched = {
            **plain,
            "PYTHONPATH": f"{root}:{folder}",
            "HOUSE_PACKAGE": str(root / NAME),
            "HOUSE_REPORTS": str(reports),
        }

        def run(environ: Mapping[str, str], words: str) -> None:
            command = [sys.executable, "-m", NAME, *words.split()]
            subprocess.run(command, cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL)

        run(plain, "data synthesise --train-images 640 --test-images 64")
        run(watched, "submit --run-name one -- true")
        run(
            watched,
            "submit --launcher local --tasks-per-node 2 --dataset synthetic --epochs 1"
            " --run-name two",
        )
        return {
            f"files entered up to {label}": _most(reports.glob(f"{kind}-*"))
            for kind, label in (("sbatch", "sbatch"), ("step", "the first step"))
        }


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Give the groups of names of which each leads to each other."""
    reached = _reached(edges)
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached.get(other, ())))
        for name in reached
    }
    return [list(group) for group in sorted(groups) if group]


def longest_chain(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Give the names of a longest chain, top first; a circle in it with all its names."""
    reached = _reached(edges)
    chains: dict[str, list[str]] = {}
    # Whatever a name leads to leads to fewer names than it, or stands in a circle with it.
    for name in sorted(reached, key=lambda name: len(reached[name] | {name})):
        circle = {other for other in reached[name] if name in reached[other]} | {name}
        below = (chains[other] for other in sorted(reached[name] - circle))
        chain = [*sorted(circle), *max(below, key=len, default=[])]
        chains |= dict.fromkeys(circle, chain)
    return max(chains.values(), key=len, default=[])


def _reached(edges: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Give by each name those that its edges lead to, over any number of others."""
    graph: defaultdict[str, set[str]] = defaultdict(set)
    for start, end in edges:
        graph[start].add(end)
        graph[end].update()
    reached: dict[str, set[str]] = {}
    for name in graph:
        reached[name], ahead = set(), list(graph[name])
        while ahead:
            other = ahead.pop()
            if other not in reached[name]:
                reached[name].add(other)
                ahead += graph[other]
    return reached


def _imports(tree: ast.Module, modules: Iterable[str]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = {name, f"{name}.__init__"} & set(modules)
                names.add(name if is_module else node.module)
    return {
        module for name in names for module in (name, f"{name}.__init__") if module in set(modules)
    }


def _siblings(imports: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Give each import as one between the two children of the package that holds both."""
    for module, imported in imports:
        one, other = module.split("."), imported.split(".")
        for depth, (part, counterpart) in enumerate(zip(one, other, strict=False), 1):
            if part != counterpart:
                yield ".".join(one[:depth]), ".".join(other[:depth])
                break


def _room(module: str) -> str:
    return module.split(".")[1]


def _layers(root: Path) -> dict[str, int]:
    """Give the layer of each room, from import-linter's contract; 0 is the top."""
    text = (root / "pyproject.toml").read_text()
    listed = re.search(rf'containers = \["{NAME}"\].*?^layers = (\[.*?^\])', text, re.M | re.S)
    layers: list[str] = ast.literal_eval(listed[1]) if listed else []
    return {"__init__": 0} | {
        room: number for number, layer in enumerate(layers, 1) for room in re.findall(r"\w+", layer)
    }


def _points_up(room: str, other: str, layers: Mapping[str, int]) -> bool:
    if room == other or not {room, other} <= layers.keys():
        return False
    return layers[other] <= layers[room]


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Give every string that stands alone: those of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as docstring):
                yield docstring


def _code_lines(text: str, docstrings: Iterable[ast.Constant]) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for docstring in docstrings:
        lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def _most(reports: Iterable[Path]) -> list[str]:
    return max((report.read_text().splitlines() for report in reports), key=len)


if __name__ == "__main__":
    main()

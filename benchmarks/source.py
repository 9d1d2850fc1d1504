"""Counts of a checkout's source: rooms, imports between them, lines, functions, questions.

A room is a package of clusterddp/ or a file at its root. Every import counts: those inside
functions, and, as import-linter has it, those for type checkers alone. A module that is only named
in a string is not seen.
"""

import ast
import io
import re
import subprocess
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NAME = "clusterddp"
Graph = Mapping[str, set[str]]

LONG = 60
"""Lines that a function may have."""
_COMMANDS = f"{NAME}/cli/commands"
"""The one package that has a file for each of many things of a kind."""
_OWN = "__init__.py"
_POOR = re.compile(
    r"(That|Those|Of|By|What|Whether|How|Who|Whose|Which|Where|When|As|For|If|In|To|The ones?)\b"
)
_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
_KIND = re.compile(r"trains?|command|uses_own_code|(is|has|runs)_(a_)?(command|training)")
"""Attributes whose truth says which kind a run is."""
_OTHER_COMMANDS = (f"{NAME}/scripts/", f"{NAME}/launchers/srun.py")
"""Where a command is a line of a shell's, or srun's, and no run's."""


@contextmanager
def checkout(name: str) -> Iterator[Path]:
    """Yield the directory `name`, or a temporary one that holds that commit of this repository."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(name).absolute()
        if not root.is_dir():
            root = Path(folder)
            archive = ["git", "archive", name]
            content = subprocess.run(archive, check=True, stdout=subprocess.PIPE).stdout
            subprocess.run(["tar", "x", "-C", folder], input=content, check=True)
        yield root


def measured(root: Path) -> dict[str, object]:
    """Give each figure by its label; where it is the length of a list, that list."""
    files = sorted((root / NAME).rglob("*.py"))
    folders = [str(path.parent.relative_to(root)) for path in files if path.name != _OWN]
    largest = max(sorted({*folders} - {_COMMANDS}), key=folders.count)
    texts = {
        ".".join(path.relative_to(root).with_suffix("").parts): path.read_text() for path in files
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
        "code lines": sum(_code_lines(texts[module], docstrings[module]) for module in trees),
        "modules": len(trees),
        "files of the largest package": [
            f"{largest}/{path.name}"
            for path in sorted((root / largest).glob("*.py"))
            if path.name != _OWN
        ],
        "functions above 60 lines": [
            f"{name} {length}" for name, _, length in functions if length > LONG
        ],
        "lines of tests": sum(
            path.read_text().count("\n") for path in (root / "tests").rglob("*.py")
        ),
        "places that ask for a run's kind": list(kind_asked(root)),
        "floors": len(chain),
        "longest chain": " > ".join(chain),
        "rooms": len(set(map(_room, trees))),
        "imports between rooms": len(rooms),
        "imports upwards": [f"{a} > {b}" for a, b in sorted(upwards)],
        "circles of modules": [" ".join(circle) for circle in circles(imports)],
        "circles of siblings": [" ".join(circle) for circle in circles(_siblings(imports))],
        "files at the root": len(list((root / NAME).glob("*.py"))),
        "lines": sum(text.count("\n") for text in texts.values()),
        "documented public functions, %": round(100 * documented / len(public), 1),
        "fmt: skip": sum(text.count("fmt: skip") for text in texts.values()),
        "Any": sum(len(re.findall(r"\bAny\b", text)) for text in texts.values()),
        "docstrings that open poorly": [
            f"{module}:{node.lineno} {str(node.value).strip().splitlines()[0]}"
            for module in trees
            for node in docstrings[module]
            if _POOR.match(str(node.value).strip())
        ],
    }


def kind_asked(root: Path) -> Iterator[str]:
    """Give each line that asks whether a run trains or has a COMMAND, by file and number.

    It asks where something hangs on the truth of `spec.train`, of `spec.command` or of what is
    named after them, or on whether one is None. To read a COMMAND's words is no such question.
    """
    for path in sorted((root / NAME).rglob("*.py")):
        name = str(path.relative_to(root))
        if not name.startswith(_OTHER_COMMANDS):
            asked = _questions(ast.parse(path.read_text()))
            lines = {node.lineno for node in asked if _KIND.fullmatch(_attribute(node))}
            yield from (f"{name}:{line}" for line in sorted(lines))


def _questions(tree: ast.Module) -> Iterator[ast.expr]:
    """Give every expression whose truth, or whose being None, decides something."""
    for node in ast.walk(tree):
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield test
            case ast.comprehension(ifs=tests) | ast.BoolOp(values=tests):
                yield from tests
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield operand
            case ast.Compare(left=left, comparators=[ast.Constant(value=None)]):
                yield left
            case ast.Call(func=ast.Name(id="bool"), args=arguments):
                yield from arguments


def _attribute(node: ast.expr) -> str:
    match node:
        case ast.Attribute(attr=name):
            return name
        case ast.NamedExpr(value=value):
            return _attribute(value)
    return ""


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

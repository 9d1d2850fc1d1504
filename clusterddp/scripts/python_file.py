"""Reads a Python training script by its syntax tree: names, guards, calls between functions.

Nothing is run or imported. A guard is a condition on the rank: the code under it runs on some ranks
only.
"""

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import cast

_RANK = re.compile(
    r"(?:global_?|world_?|local_?|node_|process_|proc_|ddp_|ddp_local_|gpu_|dist_|my_?|[gl])?rank"
    r"|(?:OMPI_COMM_WORLD_(?:LOCAL_)?|PMI_|PMIX_)RANK"
    r"|r?gpu(?:_?id)?|proc_?id|local_?id|process_index|local_process_index"
    r"|SLURM_(?:PROCID|LOCALID|NODEID)|(?:LOCAL_|GROUP_|NODE_)?RANK",
    re.IGNORECASE,
)
_GPU_NAME = re.compile(r"r?gpu(?:_?id)?", re.IGNORECASE)
"""Names of ranks that single-device scripts use, too."""
_LOCAL_RANK = re.compile(r"(?:ddp_)?local_?(?:rank|id)|SLURM_LOCALID|LOCAL_RANK", re.IGNORECASE)
_MAIN = re.compile(
    r"(?:is_|on_|am_|_)*(?:local_|global_|world_)?(?:main|master|chief|rank_?(?:zero|0)|first|primary"
    r"|root|coordinator|logger)(?:_process|_rank|_proc|_node|_worker|_only)?",
    re.IGNORECASE,
)
_MANAGED_NAMES = (
    "lightning pytorch_lightning lightning_fabric accelerate deepspeed composer ignite ray "
    "horovod transformers colossalai torch_xla fairscale fairseq mmengine mmcv detectron2 "
    "catalyst"
)
_MANAGED = frozenset(_MANAGED_NAMES.split())
_DISTRIBUTED_NAMES = (
    "init_process_group DistributedDataParallel FullyShardedDataParallel fully_shard"
)
_DISTRIBUTED = frozenset(_DISTRIBUTED_NAMES.split())


_MAX_BITS = 10_000
_MAX_VALUES = 30
"""Assignments of one name to follow; more occur only in generated code."""
_ENV_NAMES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""Variables that init_process_group reads."""
_STARTERS = frozenset({"Process", "start_processes", "elastic_launch", "execv", "execvp"})
"""Calls with which a script starts its own ranks."""
_HARMLESS_NAMES = (
    "torch torchvision torchaudio torchmetrics numpy scipy pandas matplotlib sklearn PIL tqdm yaml "
    "wandb tensorboard timm einops"
)
_HARMLESS = sys.stdlib_module_names | frozenset(_HARMLESS_NAMES.split())
"""Modules that set no rank variables."""


@dataclass(frozen=True)
class Started:
    """Counts of a step that starts a script; None if unknown."""

    tasks: int | None
    nodes: int | None
    gpus: int | None
    """GPUs per node that each task sees."""
    asks_for_none: bool = False
    """True if neither the job nor the step requests GPUs."""


_PLAIN = (ast.Module, ast.Expr, ast.Assign, ast.AnnAssign, ast.Return, ast.With, ast.Call)
"""Nodes whose parts always run with them."""


class PythonFile:
    """A parsed training script."""

    def __init__(self, name: str, text: str) -> None:
        """Parse a script. Raises SyntaxError if this interpreter cannot."""
        self.name, self.text = name, text
        self.lines = text.split("\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the script's strings
            self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        for node in self.nodes:
            value = node.value if isinstance(node, ast.Constant) else 0
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                cast(ast.Constant, node).value = None  # Python refuses to convert it to text
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._called: dict[str, bool] = {}
        self.steps: set[Started] = set()
        """Steps in the sbatch files checked with it that start it."""

    @property
    def tasks(self) -> int | None:
        """Number of tasks that start it, or None if its steps differ."""
        tasks = {step.tasks for step in self.steps}
        return tasks.pop() if len(tasks) == 1 else None

    # Names

    @cached_property
    def imported(self) -> dict[str, str]:
        """Full name of each imported name: `dist` maps to `torch.distributed`."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    names[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return names

    def full_name(self, node: ast.AST) -> str:
        """Return the dotted name of an expression, imports resolved; empty if it has none."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return "." + ".".join(reversed(parts)) if parts else ""
        parts.append(self.imported.get(node.id, node.id))
        return ".".join(reversed(parts))

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls whose last name is one of these, or all calls."""
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        return [call for call in calls if not names or self.last_name(call) in names]

    def last_name(self, call: ast.Call) -> str:
        return self.full_name(call.func).rpartition(".")[2]

    @cached_property
    def modules(self) -> set[str]:
        """Imported packages."""
        return {name.partition(".")[0] for name in self.imported.values()}

    @property
    def is_distributed(self) -> bool:
        """True if it uses torch.distributed directly to train on several ranks."""
        return bool(self.calls(*_DISTRIBUTED))

    @property
    def is_managed(self) -> bool:
        """True if a library manages the ranks, samplers and files."""
        return bool(self.modules & _MANAGED)

    @property
    def trains(self) -> bool:
        """True if it computes gradients."""
        return bool(self.calls("backward"))

    @property
    def knows_no_rank(self) -> bool:
        """True if it never refers to ranks, imported modules not considered."""
        found = {*self.names_in(self.tree), *self.imported.values()}
        names = {each for each in found if not _GPU_NAME.fullmatch(each) and " " not in each}
        return (
            not self.spawns
            and not names & (_ENV_NAMES | _STARTERS)
            and not any("distributed" in name or _is_rank(name) for name in names)
        )

    @property
    def modules_unknown(self) -> set[str]:
        """Imported packages that may handle the ranks."""
        return self.modules - _HARMLESS

    @cached_property
    def spawns(self) -> bool:
        """True if it spawns its own ranks on one machine."""
        return bool(self._spawning)

    @property
    def _spawning(self) -> list[ast.Call]:
        return [c for c in self.calls("spawn") if "multiprocessing" in self.full_name(c.func)]

    @property
    def always_spawns(self) -> int:
        """Line that unconditionally spawns its ranks, or 0."""
        return next((call.lineno for call in self._spawning if self.always_runs(call)), 0)

    @cached_property
    def spawn_flags(self) -> set[str]:
        """Conditions under which it spawns its ranks."""
        above = [pair for call in self._spawning for pair in self.above(call)]
        return {
            ast.unparse(parent.test)
            for parent, child in above
            if isinstance(parent, ast.If)
            and child in parent.body
            and "__main__" not in set(self.names_in(parent.test))
        }

    @property
    def handles_signals(self) -> bool:
        if self.modules & {*_MANAGED, "submitit", "clusterddp"}:
            return True
        return any(self.full_name(c.func).startswith("signal.") for c in self.calls("signal"))

    # Places

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield each node above this one, with the child that leads to it."""
        while node in self.parents:
            yield self.parents[node], node
            node = self.parents[node]

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the function that contains a node."""
        for parent, _ in self.above(node):
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                return parent
        return None

    def scope(self, node: ast.AST) -> list[ast.AST]:
        """Return the nodes of the function or module that contains a node."""
        function = self.function(node)
        return list(ast.walk(function)) if function else self.nodes

    def line(self, node: ast.AST) -> str:
        """Return the first line of a node; a statement of several lines as one line."""
        number = getattr(node, "lineno", 0)
        inner = (node, *(each for each, _ in self.above(node)))
        statement = next((each for each in inner if isinstance(each, ast.stmt)), None)
        if statement and not hasattr(statement, "body") and statement.end_lineno != number:
            return ast.unparse(statement)
        return self.line_at(number)

    def line_at(self, number: int) -> str:
        return self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""

    @cached_property
    def functions(self) -> dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]:
        found: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def uses(self) -> dict[str, list[ast.AST]]:
        """Places that use each function's name, as a call or as a value."""
        found: dict[str, list[ast.AST]] = {}
        for node in self.nodes:
            name = ""
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                name = node.id
            elif isinstance(node, ast.Attribute) and isinstance(self.parents.get(node), ast.Call):
                name = node.attr
            if name in self.functions:
                found.setdefault(name, []).append(node)
        return found

    def values_of(self, node: ast.AST) -> list[ast.expr]:
        """Return the values assigned to a variable or attribute; none if there are too many."""
        values = self._values.get((type(node), getattr(node, "id", getattr(node, "attr", ""))), [])
        return values if len(values) <= _MAX_VALUES else []

    @cached_property
    def _values(self) -> dict[tuple[type, str], list[ast.expr]]:
        """Assigned values by the target's type and name."""
        values: dict[tuple[type, str], list[ast.expr]] = {}
        for value, targets in self.assignments:
            for target in targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(each, ast.Name | ast.Attribute):
                        name = each.id if isinstance(each, ast.Name) else each.attr
                        values.setdefault((type(each), name), []).append(value)
        return values

    @cached_property
    def assignments(self) -> list[tuple[ast.expr, list[ast.expr]]]:
        found: list[tuple[ast.expr, list[ast.expr]]] = []
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                found.append((node.value, node.targets))
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
                found.append((node.value, [node.target]))
        return found

    # Environment variables

    @cached_property
    def rendezvous(self) -> tuple[int, frozenset[str]]:
        """Line that always runs the rendezvous, and the variables that it needs.

        Variables that the script sets are left out. The line is 0 if unknown.
        """
        if self.spawns or self.is_managed or self.calls(*_STARTERS):
            return 0, frozenset()
        for call in self.calls("init_process_group"):
            given = {each.arg: each.value for each in call.keywords}
            method = given.get("init_method", ast.Constant("env://"))
            by_env = isinstance(method, ast.Constant) and method.value in (None, "env://")
            of_torch = self.full_name(call.func).startswith("torch.distributed.")
            if not of_torch or not by_env or len(call.args) > 1 or {None, "store"} & given.keys():
                continue
            if self.always_runs(call):
                names = {name for name in _ENV_NAMES if name.lower() not in given}
                return call.lineno, frozenset(names - self.variables_set)
        return 0, frozenset()

    @cached_property
    def variables_set(self) -> set[str]:
        """Environment variables that it may set."""
        names: set[str] = set()
        for node in self.nodes:
            keys: list[ast.AST | None] = []
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                of_environ = "environ" in set(self.names_in(node.value))
                keys = [node.slice] if of_environ or isinstance(node.slice, ast.Constant) else []
            elif isinstance(node, ast.Dict):
                names |= {name for key in node.keys if key for name in self.names_in(key)}
            elif isinstance(node, ast.Call) and self.last_name(node) in ("setdefault", "putenv"):
                keys = list(node.args[:1])
            elif isinstance(node, ast.Call) and self.last_name(node) == "update":
                names |= {each.arg or "" for each in node.keywords}
                if "environ" in set(self.names_in(node.func)):
                    keys = [each for each in node.args if not isinstance(each, ast.Dict)]
            for key in keys:
                if not isinstance(key, ast.Constant):
                    return set(_ENV_NAMES)  # any of them
                names.add(str(key.value))
        return names

    @property
    def is_whole(self) -> bool:
        """True if no imported module can be part of the training."""
        relative = any(isinstance(node, ast.ImportFrom) and node.level for node in self.nodes)
        return not relative and self.modules <= _HARMLESS

    def always_runs(self, node: ast.AST) -> bool:
        """Return whether a node runs unconditionally: no condition, loop or try around it."""
        for parent, child in self.above(node):
            block = _block(parent, child)
            before = block[: block.index(child)] if child in block else []
            if any(isinstance(each, ast.If) and _exits_early(each) for each in before):
                return False
            if isinstance(parent, ast.FunctionDef):
                return self._is_called(parent)
            is_main = isinstance(parent, ast.If) and "__main__" in set(self.names_in(parent.test))
            if not is_main and not isinstance(parent, _PLAIN):
                return False
        return True

    def _is_called(self, function: ast.FunctionDef) -> bool:
        """Return whether the script always calls a function."""
        name = function.name
        if name not in self._called:
            self._called[name] = False  # ends a recursion
            calls = [(use, self.parents[use]) for use in self.uses.get(name, [])]
            self._called[name] = len(self.functions[name]) == 1 and any(
                isinstance(call, ast.Call) and call.func is use and self.always_runs(call)
                for use, call in calls
            )
        return self._called[name]

    # Ranks

    def names_in(self, node: ast.AST) -> Iterator[str]:
        """Yield the names, attributes and short texts within a node."""
        for each in ast.walk(node):
            if isinstance(each, ast.Name):
                yield each.id
            elif isinstance(each, ast.Attribute):
                yield each.attr
            elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value

    def mentions_rank(self, node: ast.AST, depth: int = 2) -> bool:
        """Return whether an expression depends on the rank, directly or through variables."""
        names = set(self.names_in(node))
        if any(_is_rank(name) or _MAIN.fullmatch(name) or name == "get_rank" for name in names):
            return True
        return depth > 0 and any(
            self.mentions_rank(value, depth - 1)
            for each in ast.walk(node)
            for value in self.values_of(each)
        )

    def is_local_rank(self, node: ast.AST, depth: int = 2) -> bool:
        """Return whether an expression is the local rank itself."""
        if isinstance(node, ast.Call) and self.last_name(node) in ("int", "str") and node.args:
            return self.is_local_rank(node.args[0], depth)
        if isinstance(node, ast.BinOp):
            return False
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            values = self.values_of(node)
            if any(isinstance(value, ast.BinOp) for value in values):
                return False
            if _LOCAL_RANK.fullmatch(name):
                return True
            return depth > 0 and any(self.is_local_rank(value, depth - 1) for value in values)
        if isinstance(node, ast.Subscript | ast.Call):
            return any(
                _LOCAL_RANK.fullmatch(each.value)
                for each in ast.walk(node)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )
        return False

    def is_global_rank(self, node: ast.AST, depth: int = 3) -> bool:
        """Return whether an expression is the global rank itself."""
        if isinstance(node, ast.IfExp):
            return self.is_global_rank(node.body, depth) or self.is_global_rank(node.orelse, depth)
        if isinstance(node, ast.Name | ast.Attribute):
            values = self.values_of(node)
            return (
                bool(values)
                and depth > 0
                and all(self.is_global_rank(value, depth - 1) for value in values)
            )
        if isinstance(node, ast.Call) and self.last_name(node) == "int" and len(node.args) == 1:
            return self.is_global_rank(node.args[0], depth)
        if isinstance(node, ast.Call) and self.last_name(node) == "get_rank":
            of_torch = self.full_name(node.func).startswith("torch.distributed.")
            return of_torch and not node.args and not node.keywords
        if isinstance(node, ast.Call) and self.last_name(node) not in ("get", "getenv"):
            return False
        if not isinstance(node, ast.Call | ast.Subscript):
            return False
        key: ast.AST | None = node.slice if isinstance(node, ast.Subscript) else None
        key = key or (node.args[0] if isinstance(node, ast.Call) and node.args else None)
        return isinstance(key, ast.Constant) and key.value in ("RANK", "SLURM_PROCID")

    @cached_property
    def local_rank_device(self) -> int:
        """Line that selects the GPU by local rank, or 0."""
        for call in self.calls("set_device"):
            if call.args and self.is_local_rank(call.args[0]):
                return call.lineno
        for call in self.calls("device"):
            if "torch" not in self.full_name(call.func):
                continue
            for argument in call.args:
                parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                for part in parts:
                    value = part.value if isinstance(part, ast.FormattedValue) else part
                    if self.is_local_rank(value):
                        return call.lineno
        return 0

    def ranks(self, test: ast.expr, *, when: bool = True) -> bool | None:
        """Return which ranks a test selects when it has the value `when`.

        True for one rank, False for all but one, None for any other selection.
        """
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            if self.is_rank(test.operand):
                return when
            return self.ranks(test.operand, when=not when)
        if isinstance(test, ast.BoolOp):
            kinds = [self.ranks(value, when=when) for value in test.values]
            if isinstance(test.op, ast.And) != when:  # any part may have decided
                return kinds[0] if len(set(kinds)) == 1 else None
            return True if True in kinds else False if False in kinds else None
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, right, op = test.left, test.comparators[0], test.ops[0]
            if self.is_rank(right):
                left, right = right, left
            if not self.is_rank(left):
                return None
            numbers = _numbers(right)
            if isinstance(op, ast.Eq | ast.In | ast.Is) and numbers:
                return when
            if isinstance(op, ast.NotEq | ast.NotIn | ast.Gt | ast.IsNot) and 0 in numbers:
                return not when
            return None
        name = self.full_name(test.func if isinstance(test, ast.Call) else test).rpartition(".")[2]
        if _MAIN.fullmatch(name) and any(word in name for word in ("process", "master", "rank")):
            return when
        if isinstance(test, ast.Name | ast.Attribute) and name:
            values = self.values_of(test)
            if len(values) == 1 and not isinstance(values[0], ast.Name | ast.Attribute):
                return self.ranks(values[0], when=when)
        return None

    @cached_property
    def counters(self) -> set[str]:
        """Variables of for statements and comprehensions."""
        targets = [n.target for n in self.nodes if isinstance(n, ast.For | ast.comprehension)]
        return {name for target in targets for name in self.names_in(target)}

    def is_rank(self, node: ast.AST) -> bool:
        """Return whether an expression is a global or local rank."""
        if isinstance(node, ast.Call):
            name = self.last_name(node)
            if name == "int" and len(node.args) == 1:
                return self.is_rank(node.args[0])
            if name in ("get", "getenv"):
                return any(_is_rank(text) for text in self.names_in(node))
            return name == "get_rank" and not node.args and not node.keywords
        if isinstance(node, ast.Subscript):
            return any(_is_rank(text) for text in self.names_in(node.slice))
        if isinstance(node, ast.Name):
            return _is_rank(node.id) and node.id not in self.counters
        return isinstance(node, ast.Attribute) and _is_rank(node.attr)

    def guard(self, node: ast.AST) -> tuple[ast.If, bool] | None:
        """Return the condition on the rank that guards a node within its function.

        The flag is True if one rank runs the node, False if the others do.
        """
        for parent, child in self.above(node):
            if isinstance(parent, ast.If) and child is not parent.test:
                kind = self.ranks(parent.test, when=child in parent.body)
                if kind is not None:
                    return parent, kind
            block = _block(parent, child)
            for before in block[: block.index(child)] if child in block else []:
                if isinstance(before, ast.If) and _exits_early(before) and not before.orelse:
                    kind = self.ranks(before.test, when=False)
                    if kind is not None:
                        return before, kind
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                break
        return None

    def is_guarded(self, node: ast.AST) -> bool:
        """Return whether a node depends on the rank within its function."""
        return any(True for _ in self._conditions(node))

    def _conditions(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the conditions on the rank that guard a node within its function."""
        for parent, child in self.above(node):
            test = getattr(parent, "test", None)  # if, while, conditional expression
            if isinstance(test, ast.expr) and child is not test and self._depends(test):
                yield test
            if isinstance(parent, ast.BoolOp) and self.mentions_rank(parent):
                yield parent
            if isinstance(parent, ast.With | ast.AsyncWith) and any(
                _is_lock(name) for item in parent.items for name in self.names_in(item)
            ):
                yield parent
            block = _block(parent, child)
            for before in block[: block.index(child)] if child in block else []:
                test = before.test if isinstance(before, ast.If) and _exits_early(before) else None
                if test is not None and self._depends(test):
                    yield test
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from (each for each in parent.decorator_list if self.mentions_rank(each, 0))
                return

    def _depends(self, test: ast.expr) -> bool:
        """Return whether a condition distinguishes ranks, including ranks of a launcher."""
        return self.mentions_rank(test) and not self.is_open_to_launcher(test)

    def is_open_to_launcher(self, test: ast.AST) -> bool:
        """Return whether a condition holds on every rank unless the script spawns them.

        Example: `not args.multiprocessing_distributed or …`, if that option enables mp.spawn.
        """
        return (
            isinstance(test, ast.BoolOp)
            and isinstance(test.op, ast.Or)
            and any(
                isinstance(each, ast.UnaryOp)
                and isinstance(each.op, ast.Not)
                and ast.unparse(each.operand) in self.spawn_flags
                for each in test.values
            )
        )

    def node_guard(self, node: ast.AST, depth: int = 6) -> int:
        """Return the line of the condition that lets one rank per host reach a node, or 0."""
        conditions = list(self._conditions(node))
        if conditions:
            is_of_node = all(self._is_first_of_node(each) for each in conditions)
            return getattr(conditions[0], "lineno", 0) if is_of_node else 0
        function = self.function(node)
        if function is None or depth == 0 or len(self.functions[function.name]) > 1:
            return 0
        uses = [
            use for use in self.uses.get(function.name, []) if self.function(use) is not function
        ]
        lines = [self.node_guard(use, depth - 1) for use in uses]
        return lines[0] if lines and all(lines) else 0

    def _is_first_of_node(self, test: ast.AST) -> bool:
        """Return whether a condition compares only the local rank with 0."""
        if isinstance(test, ast.BoolOp):
            parts = [each for each in test.values if self.mentions_rank(each)]
            return bool(parts) and all(self._is_first_of_node(each) for each in parts)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._is_node_rank(test.operand)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._is_node_rank(test.left) and 0 in _numbers(test.comparators[0])
        values = self.values_of(test) if isinstance(test, ast.Name | ast.Attribute) else []
        return len(values) == 1 and self._is_first_of_node(values[0])

    def _is_node_rank(self, node: ast.AST) -> bool:
        return self.is_local_rank(node) and not self.is_global_rank(node)

    def reached(self, node: ast.AST, depth: int = 6) -> bool | None:
        """Return whether every rank reaches a node; None if nothing here calls its function."""
        if self.is_guarded(node):
            return False
        function = self.function(node)
        if function is None or depth == 0:
            return True if function is None else None
        uses = [
            use for use in self.uses.get(function.name, []) if self.function(use) is not function
        ]
        if len(self.functions[function.name]) > 1 or not uses:
            return None
        kinds = [self.reached(use, depth - 1) for use in uses]
        return True if True in kinds else None if None in kinds else False


def _is_rank(name: str) -> bool:
    return _RANK.fullmatch(name) is not None


def _is_lock(name: str) -> bool:
    return "lock" in name.lower() or ("first" in name and "process" in name) or "rank_zero" in name


def _numbers(node: ast.AST) -> list[int]:
    values = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    found = []
    for value in values:
        inner = value.operand if isinstance(value, ast.UnaryOp) else value
        if isinstance(inner, ast.Constant) and isinstance(inner.value, int | str):
            text = str(inner.value) if not isinstance(inner.value, int) else ""
            if type(inner.value) is int or (text.isdecimal() and len(text) < 9):
                found.append(int(inner.value))
    return found


def _block(parent: ast.AST, child: ast.AST) -> list[ast.AST]:
    """Return the block of statements that contains a statement."""
    for name in ("body", "orelse", "finalbody", "handlers"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and child in block:
            return block
    return []


def _exits_early(node: ast.If) -> bool:
    last = node.body[-1]
    if isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break):
        return True
    if not isinstance(last, ast.Expr) or not isinstance(last.value, ast.Call):
        return False
    called = last.value.func
    return getattr(called, "attr", getattr(called, "id", "")) in ("exit", "_exit")

"""Rules that find mistakes of training scripts in their syntax tree.

A script seldom proves that something goes wrong: most rules say "may". They skip scripts that leave
ranks, samplers and files to a library (Lightning, Accelerate, DeepSpeed …).
"""

import ast
import re
from collections.abc import Iterator

from clusterddp.scripts.findings import Found, Rules
from clusterddp.scripts.frameworks import missing_line
from clusterddp.scripts.python_file import PythonFile

PYTHON_RULES = rule = Rules()


_SAMPLERS = ("DistributedSampler",)
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
_COLLECTIVES_NAMES = (
    "all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all "
    "all_to_all_single barrier broadcast broadcast_object_list gather gather_object "
    "monitored_barrier new_group reduce reduce_scatter reduce_scatter_tensor scatter "
    "scatter_object_list"
)
_COLLECTIVES = frozenset(_COLLECTIVES_NAMES.split())
_GROUP_AT = {
    **dict.fromkeys(("barrier", "monitored_barrier"), 0),
    **dict.fromkeys(("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object"), 2),
    **dict.fromkeys(("broadcast", "broadcast_object_list", "all_to_all"), 2),
}
"""Positions of the group argument; in other collectives it is the fourth or later."""
_REDUCERS_NAMES = (
    "reduce_dict reduce_tensor reduce_mean reduce_value reduce_loss reduce_across_processes "
    "synchronize_between_processes synchronize sync_and_compute all_reduce_mean"
)
_REDUCERS = _COLLECTIVES | frozenset(_REDUCERS_NAMES.split())
_MESHES = {"DeviceMesh", "init_device_mesh", "parallelize_module", "PipelineStage", "rpc"}
_EVALUATION = re.compile(r"test|val|eval|infer|predict", re.IGNORECASE)
_RANDOM_NAMES = "randn rand randint randperm randn_like rand_like bernoulli normal"
_RANDOM = frozenset(_RANDOM_NAMES.split())


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)


def _is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _source(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _typed(script: PythonFile, node: ast.AST, line: str) -> str:
    """Return an expression as it occurs in the line: as typed or unparsed; empty if neither."""
    ways = (ast.get_source_segment(script.text, node) or "", _source(node))
    return next((way for way in ways if way in line), "")


def _with_keyword(script: PythonFile, call: ast.Call, name: str, instead: str) -> str:
    """Return the line of a call with a keyword replaced, or removed if instead is empty."""
    line = script.line(call)
    keyword = next(each for each in call.keywords if each.arg == name)
    typed = re.escape(_typed(script, keyword, line))
    pattern = typed if instead else rf",\s*{typed}|{typed},?\s*"
    return re.sub(pattern, lambda _: instead, line, count=1) if typed else line


def _of_task(script: PythonFile, name: str, of_slurm: str) -> str:
    """Return the expression for a task's number, from Slurm's variable if the script uses those."""
    texts = set(script.names_in(script.tree))
    by_slurm = "SLURM_PROCID" in texts and not texts & {"RANK", name}
    return f'int(os.environ["{of_slurm if by_slurm else name}"])'


def _names_resolved(script: PythonFile, node: ast.AST) -> set[str]:
    """Return the names in an expression and in the values of its variables."""
    values = [value for each in ast.walk(node) for value in script.values_of(each)]
    return {name for each in (node, *values) for name in script.names_in(each)}


def _manages_ranks(script: PythonFile) -> bool:
    return script.is_distributed and not script.is_managed


def _target(script: PythonFile, node: ast.AST) -> str:
    """Return the name that an expression is assigned to, or an empty text."""
    for parent, child in script.above(node):
        if isinstance(parent, ast.Assign) and child is parent.value:
            target = parent.targets[0]
            if isinstance(target, ast.Attribute):
                return target.attr
            return target.id if isinstance(target, ast.Name) else ""
        if not isinstance(parent, ast.expr | ast.keyword):
            break
    return ""


# Data


@rule
def sampler_epoch(script: PythonFile) -> Iterator[Found]:
    """DistributedSampler without set_epoch.

    Source: torch.utils.data.distributed.DistributedSampler's documentation: without it, the same
    order in every epoch.
    """
    if script.is_managed or "set_epoch" in set(script.names_in(script.tree)):
        return
    for call in script.calls(*_SAMPLERS):
        shuffle = _keyword(call, "shuffle") or (call.args[3] if len(call.args) > 3 else None)
        if isinstance(shuffle, ast.Constant) and not shuffle.value:
            continue
        name = _target(script, call)
        loaders = _loaders_with(script, call, name)
        if _EVALUATION.search(name) or any(_EVALUATION.search(each) for each in loaders):
            continue
        for loop in _epoch_loops(script):
            inner = [n for n in ast.walk(loop) if isinstance(n, ast.For) and n is not loop]
            direct = any(set(script.names_in(n.iter)) & loaders for n in inner)
            handed_on = _calls_training(script, loop, loaders)
            if direct or handed_on:
                epoch = loop.target.id if isinstance(loop.target, ast.Name) else "epoch"
                yield Found(
                    loop.lineno,
                    direct,
                    f"nothing calls set_epoch on the sampler of line {call.lineno}: every epoch "
                    "has the same order.",
                    f"{script.line(loop)}\n    {name or 'sampler'}.set_epoch({epoch})",
                )
                break


def _loaders_with(script: PythonFile, sampler: ast.Call, name: str) -> set[str]:
    """Return the names of the loaders that use a sampler."""
    loaders = set()
    for call in script.calls("DataLoader"):
        given = _keyword(call, "sampler")
        if given is None:
            continue
        if sampler in list(ast.walk(given)) or (name and name in set(script.names_in(given))):
            loaders.add(_target(script, call))
    return loaders - {""}


def _epoch_loops(script: PythonFile) -> Iterator[ast.For]:
    for node in script.nodes:
        if not isinstance(node, ast.For):
            continue
        counted = any(name in ("range", "trange") for name in script.names_in(node.iter))
        if counted and "epoch" in _source(node.target).lower():
            once = isinstance(node.iter, ast.Call) and [_source(a) for a in node.iter.args] == ["1"]
            if not once:
                yield node


def _calls_training(script: PythonFile, loop: ast.For, loaders: set[str]) -> bool:
    for node in ast.walk(loop):
        if not isinstance(node, ast.Call):
            continue
        if any(set(script.names_in(argument)) & loaders for argument in node.args):
            return True
        for function in script.functions.get(script.last_name(node), []):
            for each in ast.walk(function):
                if isinstance(each, ast.For) and set(script.names_in(each.iter)) & loaders:
                    return True
    return False


@rule
def no_sampler(script: PythonFile) -> Iterator[Found]:
    """A training DataLoader without DistributedSampler.

    Source: torch.utils.data.distributed.DistributedSampler's documentation; torch.distributed's
    documentation.
    """
    if not _manages_ranks(script) or not script.calls(*_WRAPPERS):
        return
    if script.calls(*_SAMPLERS):
        return  # the author knows samplers, so the omission is intended
    names = set(script.names_in(script.tree))
    if any("model_parallel" in name for name in names) or names & _MESHES:
        return  # ranks that share a model need the same data
    for call in script.calls("DataLoader"):
        if any(_keyword(call, each) is not None for each in ("sampler", "batch_sampler")):
            continue
        if len(call.args) > 3 or any(each.arg is None for each in call.keywords):
            continue
        if not _is_true(_keyword(call, "shuffle")) or _EVALUATION.search(_target(script, call)):
            continue
        dataset = call.args[0] if call.args else _keyword(call, "dataset")
        if dataset is None or _is_split(script, dataset) or script.is_guarded(call):
            continue
        text = _source(dataset)
        if _EVALUATION.search(text):
            continue
        yield Found(
            call.lineno,
            False,
            "every rank reads the whole dataset in each epoch, because no sampler splits it.",
            f"sampler = DistributedSampler({text})\n"
            + _with_keyword(script, call, "shuffle", "sampler=sampler"),
        )


def _is_split(script: PythonFile, dataset: ast.AST) -> bool:
    """Return whether a dataset may split itself by rank."""
    names = _names_resolved(script, dataset)
    for node in script.nodes:
        if isinstance(node, ast.ClassDef) and node.name in names:
            bases = {script.full_name(base).rpartition(".")[2] for base in node.bases}
            if "IterableDataset" in bases or script.mentions_rank(node, 0):
                return True
    streams = re.compile(r"shard|split_by|iterable|stream|webdataset|partition|wds", re.I)
    return any(streams.search(name) for name in names) or script.mentions_rank(dataset)


@rule
def download_per_rank(script: PythonFile) -> Iterator[Found]:
    """Every rank downloads the dataset.

    Source: torchvision's documentation, download; seen: ranks that unpack into one directory.
    """
    if not _manages_ranks(script):
        return
    downloads = [call for call in script.calls() if _is_true(_keyword(call, "download"))]
    if any(script.reached(call) is False for call in downloads):
        return  # one rank downloads; later calls find the files
    for call in downloads:
        if script.reached(call) is not True or not _comes_after_start(script, call):
            continue
        text, line = _source(call), _with_keyword(script, call, "download", "download=False")
        if line.endswith(":"):
            line = text.replace("download=True", "download=False")
        yield Found(
            call.lineno,
            False,
            "if the files are missing, all ranks download them into one directory at once.",
            f"if dist.get_rank() == 0:\n    {text}\ndist.barrier()\n{line}",
        )
        return


def _comes_after_start(script: PythonFile, call: ast.Call) -> bool:
    """Return whether a call runs in the ranks, not in the process that spawns them."""
    if not script.spawns:
        return True
    function = script.function(call)
    if function is None:
        return False
    return not any(node in list(ast.walk(function)) for node in script.calls("spawn"))


# Files


@rule
def save_per_rank(script: PythonFile) -> Iterator[Found]:
    """Every rank, or one rank per node, saves to the same file.

    Source: the tutorial Getting Started with Distributed Data Parallel, Save and Load
    Checkpoints: saving in one process.
    """
    if not _manages_ranks(script):
        return
    for call in script.calls("save"):
        if script.full_name(call.func) != "torch.save":
            continue
        path = call.args[1] if len(call.args) > 1 else _keyword(call, "f")
        if path is None or script.mentions_rank(path) or _is_buffer(script, path):
            continue
        if not _comes_after_start(script, call):
            continue
        constant, sure = isinstance(path, ast.Constant), False
        if script.reached(call) is True:
            sure = constant and bool(script.calls(*_WRAPPERS))
            sure = sure and not script.spawn_flags
            who = "every rank"
        elif not _is_on_one_node(script) and (line := script.node_guard(call)):
            who = f"one rank per node (guarded at line {line})"
        else:
            continue
        yield Found(
            call.lineno,
            sure,
            f"{who} writes {_source(path)} at the same time, which can corrupt the file.",
            f"if dist.get_rank() == 0:\n    {script.line(call)}",
        )


def _is_on_one_node(script: PythonFile) -> bool:
    """Return whether its ranks are known to be on one node."""
    steps = script.steps
    return script.spawns or (bool(steps) and all(each.nodes == 1 for each in steps))


def _is_buffer(script: PythonFile, path: ast.AST) -> bool:
    buffers = {"BytesIO", "io", "buffer", "NamedTemporaryFile", "tempfile", "mkstemp"}
    return bool(_names_resolved(script, path) & buffers)


@rule
def load_map_location(script: PythonFile) -> Iterator[Found]:
    """torch.load without map_location.

    Source: the tutorial Getting Started with Distributed Data Parallel, Save and Load
    Checkpoints: map_location.
    """
    names = set(script.names_in(script.tree))
    if not _manages_ranks(script) or not names & {"cuda", "nccl", "gpu_id"}:
        return
    for call in script.calls("load"):
        if script.full_name(call.func) != "torch.load" or _keyword(call, "map_location"):
            continue
        if len(call.args) > 1 or any(each.arg is None for each in call.keywords):
            continue
        if not _is_state(script, call) or script.is_guarded(call):
            continue
        line = script.line(call)
        typed = _typed(script, call, line) or _source(call)
        fixed = typed[:-1] + ', map_location="cpu")'
        yield Found(
            call.lineno,
            False,
            "tensors return to the GPU that rank 0 saved them from, so every rank fills GPU 0.",
            line.replace(typed, fixed) if typed in line else fixed,
        )


def _is_state(script: PythonFile, call: ast.Call) -> bool:
    """Return whether a call loads training state, not a dataset."""
    for parent, _ in script.above(call):
        if isinstance(parent, ast.Call) and "load_state" in script.last_name(parent):
            return True
        if isinstance(parent, ast.stmt):
            break
    name = _target(script, call)
    for other in script.calls("load_state_dict", "load_model_state_dict"):
        names = {each for argument in other.args for each in script.names_in(argument)}
        if name and name in names and script.function(other) is script.function(call):
            return True
    return False


# Collectives


@rule
def collective_in_branch(script: PythonFile) -> Iterator[Found]:
    """A collective that only some ranks reach: the others never join it.

    Source: torch.distributed's documentation, collective functions: called by every process of
    the group.
    """
    collectives = list(_collectives(script))
    for call in collectives:
        guard = script.guard(call)
        if guard is None or _is_matched(script, call, guard, collectives):
            continue
        function = script.function(call)
        reached, fix = _reach(script, call, guard)
        yield Found(
            call.lineno,
            function is None or script.function(function) is None,  # a closure may be guarded
            f"{script.last_name(call)} waits for every rank, but {reached}.",
            f"{script.line(call)}  # {fix}",
        )
    yield from _collectives_of_functions(script, collectives)


def _reach(script: PythonFile, node: ast.AST, guard: tuple[ast.If, bool]) -> tuple[str, str]:
    """Return which ranks reach a guarded node, and how all of them can."""
    condition, is_one = guard
    at = condition.lineno
    one = f"only {_one_rank(script, condition.test)} reaches this call"
    if condition in [parent for parent, _ in script.above(node)]:
        some = one if is_one else "only some ranks reach this call"
        return f"{some} (guarded at line {at})", f"move it out of the condition at line {at}"
    early = f"exit early at line {at}"
    some = f"{one}: the others {early}" if is_one else f"some ranks {early} and never reach it"
    return some, f"move it above line {at}, or make every rank exit early there"


def _one_rank(script: PythonFile, test: ast.expr) -> str:
    """Return the rank that a guard selects: `rank 0`, or `one rank` if its number is unknown."""
    if isinstance(test, ast.Compare) and script.is_global_rank(test.left):
        number = str(getattr(test.comparators[0], "value", ""))
        return f"rank {number}" if re.fullmatch("[0-9]{1,9}", number) else "one rank"
    return "one rank"


def _collectives(script: PythonFile) -> Iterator[ast.Call]:
    """Yield the calls of torch.distributed's collectives on the default group."""
    for call in script.calls(*_COLLECTIVES):
        name = script.full_name(call.func)
        if not name.startswith(("torch.distributed.", "dist.")):
            continue
        last = script.last_name(call)
        has_group = _keyword(call, "group") is not None or len(call.args) > _GROUP_AT.get(last, 3)
        if not has_group and last != "new_group":
            yield call


def _is_matched(
    script: PythonFile, call: ast.Call, guard: tuple[ast.If, bool], collectives: list[ast.Call]
) -> bool:
    """Return whether the other ranks may call the same collective elsewhere in the script."""
    for other in collectives:
        theirs = script.guard(other)
        same = script.last_name(other) == script.last_name(call)
        if other is not call and same and theirs and theirs[1] != guard[1]:
            return True
    return _may_be_one_rank(script, guard[0].test)


def _may_be_one_rank(script: PythonFile, test: ast.expr) -> bool:
    """Return whether a test may hold only in a world of one rank, or without a process group."""
    names = set(script.names_in(test))
    return bool(names & {"world_size", "get_world_size", "is_initialized", "distributed", "ddp"})


def _collectives_of_functions(script: PythonFile, collectives: list[ast.Call]) -> Iterator[Found]:
    """Find a function that runs a collective and that only some ranks call."""
    inside: dict[str, ast.Call] = {}
    for call in collectives:
        function = script.function(call)
        if function and script.guard(call) is None and not script.is_guarded(call):
            inside.setdefault(function.name, call)
    waiting = list(inside)
    while waiting:  # an unguarded call makes the calling function run the collective, too
        name = waiting.pop()
        for use in script.uses.get(name, []):
            function = script.function(use)
            if function and function.name not in inside and not script.is_guarded(use):
                inside[function.name] = inside[name]
                waiting.append(function.name)
    for name, collective in inside.items():
        if len(script.functions.get(name, [])) != 1:
            continue
        uses = [
            use
            for use in script.uses.get(name, [])
            if isinstance(script.parents.get(use), ast.Call)
        ]
        guards = [script.guard(use) for use in uses]
        if not uses or any(guard is None for guard in guards):
            continue
        if len({guard[1] for guard in guards if guard}) > 1:
            continue
        guard = guards[0]
        assert guard
        if _may_be_one_rank(script, guard[0].test):
            continue
        called = script.last_name(collective)
        reached, fix = _reach(script, uses[0], guard)
        yield Found(
            getattr(uses[0], "lineno", 0),
            False,
            f"{name} runs {called} (line {collective.lineno}), which waits for every rank, but "
            f"{reached}.",
            f"{script.line(uses[0])}  # {fix}",
        )


@rule
def world_size(script: PythonFile) -> Iterator[Found]:
    """A hard-coded world size.

    Source: torch.distributed's documentation, init_process_group: the launcher's WORLD_SIZE.
    """
    for call in script.calls("init_process_group"):
        value = _keyword(call, "world_size")
        size, line = _constant(script, value)
        if size is None or size < 2 or script.spawns:
            continue
        tasks = script.tasks
        if tasks == size:
            continue
        why = (
            f"the job starts {tasks} tasks, but the ranks wait for {size}."
            if tasks
            else f"with any number of tasks other than {size} the ranks hang or fail."
        )
        fixed = _of_task(script, "WORLD_SIZE", "SLURM_NTASKS")
        in_call = not isinstance(value, ast.Name)
        right = _with_keyword(script, call, "world_size", f"world_size={fixed}")
        yield Found(
            call.lineno if in_call else line,
            tasks is not None,
            why,
            right if in_call else f"{_source(value)} = {fixed}" if value else "",
        )
    for value, targets in script.assignments:
        if script.spawns or not any(isinstance(each, ast.Subscript) for each in targets):
            continue
        named = any("WORLD_SIZE" in set(script.names_in(each)) for each in targets)
        typed = value.value if isinstance(value, ast.Constant) else ""
        text = str(typed) if isinstance(typed, int | str) else ""
        if named and text.isdecimal() and int(text[:9]) > 1:
            why = "this overwrites the launcher's WORLD_SIZE."
            yield Found(value.lineno, False, why, f"# remove: {script.line(value)}")


def _constant(script: PythonFile, node: ast.AST | None) -> tuple[int | None, int]:
    """Return the integer value of a constant expression, and the line of the constant."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value, node.lineno
    if isinstance(node, ast.Name):
        values = script.values_of(node)
        if len(values) == 1 and isinstance(values[0], ast.Constant):
            return _constant(script, values[0])
    return None, 0


@rule
def loss_not_reduced(script: PythonFile) -> Iterator[Found]:
    """A loss or an accuracy of one rank, reported as the total.

    Source: torch.distributed's documentation, all_reduce; the ImageNet example of PyTorch.
    """
    if not _manages_ranks(script) or not script.calls(*_SAMPLERS):
        return
    called = {script.last_name(call) for call in script.calls()}
    if called & _REDUCERS or any("reduce" in name or "gather" in name for name in called):
        return
    for node in script.nodes:
        if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add):
            continue
        summed = node.target.id if isinstance(node.target, ast.Name) else ""
        names = set(script.names_in(node.value))
        if not summed or not names & {"item", "sum"} or not _is_over_shard(script, node):
            continue
        report = _report_of(script, node, summed)
        if report:
            guard = script.guard(report)
            at = guard[0] if guard else report  # all ranks must reach the all_reduce
            device = _device(script, node)
            given = f", device={device}" if device else ""
            mean = " / dist.get_world_size()" if _is_divided(script, node, summed) else ""
            yield Found(
                at.lineno,
                False,
                f"{summed} (line {node.lineno}) covers only this rank's part of the data, but line "
                f"{report.lineno} reports it as the total.",
                f"{summed} = torch.as_tensor({summed}{given})\ndist.all_reduce({summed})\n"
                f"{summed} = {summed}.item(){mean}\n{script.line(at)}",
            )
            return


def _device(script: PythonFile, node: ast.AST) -> str:
    """Return the source of the device that nearby tensors use; empty for the CPU."""
    for call in script.scope(node):
        if isinstance(call, ast.Call) and script.last_name(call) in ("to", "cuda") and call.args:
            sent = call.args[0]
            of_torch = script.full_name(sent).startswith("torch.")  # a dtype
            if isinstance(sent, ast.Name | ast.Attribute) and not of_torch:
                return _source(sent)
    return '"cuda"' if {"cuda", "nccl"} & set(script.names_in(script.tree)) else ""


def _is_divided(script: PythonFile, node: ast.AST, summed: str) -> bool:
    """Return whether a sum is divided by a per-rank count, for example its batches."""
    of_all = re.compile(r"data_?set$|_set$|world_size", re.IGNORECASE)
    for each in script.scope(node):
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div):
            above, below = each.left, each.right
        elif isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Div):
            above, below = each.target, each.value
        else:
            continue
        if summed in set(script.names_in(above)):
            return not any(of_all.search(name) for name in script.names_in(below))
    return False


def _is_over_shard(script: PythonFile, node: ast.AST) -> bool:
    """Return whether a node is in a loop over a loader known to have a sampler."""
    for parent, _ in script.above(node):
        if isinstance(parent, ast.For):
            names = set(script.names_in(parent.iter))
            loaders = [c for c in script.calls("DataLoader") if _target(script, c) in names]
            if loaders:
                return any(_keyword(loader, "sampler") is not None for loader in loaders)
            if any("loader" in name.lower() for name in names):
                every = script.calls("DataLoader")
                return bool(every) and all(_keyword(c, "sampler") is not None for c in every)
    return False


def _report_of(script: PythonFile, node: ast.AST, name: str) -> ast.Call | None:
    """Return the call that prints or logs a value."""
    for each in script.scope(node):
        if (
            isinstance(each, ast.Call)
            and script.last_name(each) in ("print", "log", "info", "add_scalar", "write")
            and name in set(script.names_in(each))
            and not script.mentions_rank(each, 0)  # the output names the rank
            and each.lineno > getattr(node, "lineno", 0)
        ):
            return each
    return None


# Wrapping


@rule
def sync_batchnorm_late(script: PythonFile) -> Iterator[Found]:
    """SyncBatchNorm after DDP.

    Source: torch.nn.SyncBatchNorm's documentation, convert_sync_batchnorm: before wrapping.
    """
    for call in script.calls("convert_sync_batchnorm"):
        if not call.args:
            continue
        name = _source(call.args[0])
        for wrapped in script.calls("DistributedDataParallel"):
            same = script.function(wrapped) is script.function(call)
            target = _target(script, wrapped)
            if same and target and name in (target, f"self.{target}"):
                before = [
                    c
                    for c in script.calls("convert_sync_batchnorm")
                    if c.lineno < wrapped.lineno and script.function(c) is script.function(call)
                ]
                if wrapped.lineno < call.lineno and not before:
                    yield Found(
                        call.lineno,
                        True,
                        f"DDP already wrapped {name} at line {wrapped.lineno}: this replaces "
                        "layers that DDP tracks.",
                        f"{script.line(call)}  # move it above line {wrapped.lineno}",
                    )


@rule
def find_unused(script: PythonFile) -> Iterator[Found]:
    """`find_unused_parameters` without need.

    Source: torch.nn.parallel.DistributedDataParallel's documentation: a traversal in every step.
    """
    for call in script.calls("DistributedDataParallel"):
        if _is_true(_keyword(call, "find_unused_parameters")):
            yield Found(
                call.lineno,
                False,
                "every step searches the whole graph for unused parameters; only a model that "
                "leaves some unused needs that.",
                _with_keyword(script, call, "find_unused_parameters", ""),
            )


@rule
def equal_seeds(script: PythonFile) -> Iterator[Found]:
    """Seeds that are equal across ranks but must differ, or differ but must be equal.

    Source: torch.utils.data.distributed.DistributedSampler's documentation, seed; torch's notes
    on reproducibility.
    """
    for call in script.calls(*_SAMPLERS):
        seed = _keyword(call, "seed")
        if seed is not None and script.mentions_rank(seed):
            why = "the ranks shuffle with different seeds: they repeat samples and skip others."
            yield Found(call.lineno, True, why, _with_keyword(script, call, "seed", "seed=0"))
    names = set(script.names_in(script.tree))
    if not _manages_ranks(script) or names & _MESHES:
        return
    every = script.calls("manual_seed")
    seeds = [call for call in every if script.full_name(call.func) == "torch.manual_seed"]
    if not seeds or any(c.args and script.mentions_rank(c.args[0]) for c in seeds):
        return
    draw = _drawn_in_training(script)
    seed = seeds[0]
    if draw is None or not seed.args or not _is_plain(seed.args[0]):
        return
    line = script.line(seed)
    typed = _typed(script, seed, line)
    yield Found(
        seed.lineno,
        False,
        f"every rank uses this seed, so all draw the same random numbers at line {draw.lineno}.",
        line.replace(typed, f"{typed[:-1]} + rank)", 1) if typed else line,
    )


def _is_plain(node: ast.AST) -> bool:
    """Return whether a seed is a number or an option named seed."""
    if isinstance(node, ast.Constant):
        return True
    return isinstance(node, ast.Name | ast.Attribute) and "seed" in _source(node).lower()


def _drawn_in_training(script: PythonFile) -> ast.Call | None:
    """Return a random draw in a training loop."""
    for loop in script.nodes:
        if not isinstance(loop, ast.For | ast.While):
            continue
        inside = list(ast.walk(loop))
        if not any(isinstance(n, ast.Call) and script.last_name(n) == "backward" for n in inside):
            continue
        for node in inside:
            if not isinstance(node, ast.Call) or script.last_name(node) not in _RANDOM:
                continue
            has_generator = _keyword(node, "generator") is not None
            if script.full_name(node.func).startswith("torch.") and not has_generator:
                return node
    return None


# Devices

_TAKE_DEVICES = ("set_device", "set_device_index", "device", "to", "cuda", *_WRAPPERS[:1])


@rule
def global_rank_device(script: PythonFile) -> Iterator[Found]:
    """The global rank as the number of a GPU, in a job of several nodes.

    Source: torch.distributed's documentation, launch utility: --local-rank; the tutorial Getting
    Started with Distributed Data Parallel: rank % torch.cuda.device_count().
    """
    steps = [each for each in script.steps if (each.nodes or 0) > 1]
    if not steps or script.spawns:
        return
    sure = all(each.tasks and each.gpus and each.tasks > each.gpus for each in steps)
    for call in script.calls(*_TAKE_DEVICES):
        last, full = script.last_name(call), script.full_name(call.func)
        of_torch = full.startswith("torch.") or last in ("to", "cuda")  # module or tensor methods
        if last == "DistributedDataParallel":
            given = _keyword(call, "device_ids")
            numbers = list(given.elts) if isinstance(given, ast.List) else []
        else:
            numbers = _numbers_of_devices(call) if of_torch else []
        for number in numbers:
            if not script.is_global_rank(number):
                continue
            typed = _typed(script, number, script.line(call))
            local = _of_task(script, "LOCAL_RANK", "SLURM_LOCALID")
            if 'f"' in script.line(call):
                local = local.replace('"', "'")
            whole = rf"(?<![\w.]){re.escape(typed)}(?![\w(])"
            yield Found(
                call.lineno,
                sure,
                f"{_source(number)} is the global rank: except on the first of the "
                f"{steps[0].nodes} nodes, no GPU has that number.",
                re.sub(whole, local, script.line(call)) if typed else local,
            )


def _numbers_of_devices(call: ast.Call) -> list[ast.expr]:
    """Return the expressions for the GPU number in `set_device(…)` or `torch.device(…)`."""
    found: list[ast.expr] = []
    for argument in call.args:
        parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
        found += [part.value if isinstance(part, ast.FormattedValue) else part for part in parts]
    return found


@rule
def nccl_without_gpus(script: PythonFile) -> Iterator[Found]:
    """nccl in a job that requests no GPUs.

    Source: torch.distributed's documentation, backends; seen: ProcessGroupNCCL is only supported
    with GPUs.
    """
    if not script.steps or not all(each.asks_for_none for each in script.steps):
        return
    for call in script.calls("init_process_group"):
        typed = call.args[0] if call.args else _keyword(call, "backend")
        values = script.values_of(typed) if isinstance(typed, ast.Name) else [typed]
        backend = values[0] if len(values) == 1 else None
        asked = [
            each.test for each, _ in script.above(call) if isinstance(each, ast.If | ast.IfExp)
        ]
        if any("is_available" in set(script.names_in(each)) for each in asked):
            continue
        if isinstance(backend, ast.Constant) and backend.value == "nccl":
            at = backend if isinstance(typed, ast.Name) else call
            line = script.line(at)
            text = _typed(script, backend, line)
            either = '"nccl" if torch.cuda.is_available() else "gloo"'
            yield Found(
                at.lineno,
                False,
                "the job requests no GPUs, and nccl does not start without one.",
                line.replace(text, either, 1) if text else either,
            )


# Lightning


@rule
def trainer_of_one(script: PythonFile) -> Iterator[Found]:
    """Lightning's Trainer without devices and num_nodes, in several tasks.

    Source: Lightning's documentation, Run on an on-prem cluster; seen on CPUs: each task trains
    independently.
    """
    if script.steps and all(
        step.tasks == 1 or (step.nodes == 1 and step.gpus and step.gpus == step.tasks)
        for step in script.steps
    ):
        return
    nodes = 'int(os.environ["SLURM_NNODES"])'
    known = f'devices=int(os.environ["SLURM_NTASKS"]) // {nodes}, num_nodes={nodes}'
    for call in script.calls("Trainer"):
        given = {each.arg for each in call.keywords}
        library = script.full_name(call.func).partition(".")[0]
        if library not in ("lightning", "pytorch_lightning") or given & {
            *("devices", "num_nodes", "plugins"),
            None,
        }:
            continue
        before, name, after = script.line(call).partition("Trainer(")
        after = after.lstrip()
        yield Found(
            call.lineno,
            False,
            "without devices and num_nodes it uses one node and the devices visible there: on "
            "CPUs, or with one GPU per task, each task trains independently.",
            f"{before}{name}{known}{'' if after.startswith(')') else ', '}{after}",
        )


# Interruptions


@rule
def not_resumable(script: PythonFile) -> Iterator[Found]:
    """A training of Lightning, Fabric, transformers or Accelerate that clusterddp cannot resume.

    Source: the frameworks' sources; seen: preempted, Lightning and Accelerate resume an epoch with
    other batches.
    """
    if missing := missing_line(script):
        why = "an interruption loses what the script trained since its own last checkpoint."
        yield Found(missing.line, False, why, missing.instead)


@rule
def jit_checkpoint(script: PythonFile) -> Iterator[Found]:
    """enable_jit_checkpoint of transformers next to resume(trainer).

    Source: transformers' documentation, enable_jit_checkpoint; seen: at SIGTERM the ranks save at
    different steps.
    """
    if "clusterddp.integrations.transformers.resume" not in script.imported.values():
        return
    for call in script.calls():
        if _is_true(_keyword(call, "enable_jit_checkpoint")):
            yield Found(
                call.lineno,
                True,
                "resume(trainer) refuses enable_jit_checkpoint, because its ranks save at "
                "different steps.",
                _with_keyword(script, call, "enable_jit_checkpoint", ""),
            )


# The address


@rule
def address_in_script(script: PythonFile) -> Iterator[Found]:
    """MASTER_ADDR set by the script to its own machine.

    Source: torch.distributed's documentation, environment variable initialization.
    """
    if script.spawns or not script.calls("init_process_group"):
        return
    values = [
        value
        for value, targets in script.assignments
        for target in targets
        if isinstance(target, ast.Subscript) and "MASTER_ADDR" in set(script.names_in(target))
    ]
    if len(values) != 1 or script.is_guarded(values[0]):
        return  # another one may be for other nodes
    for value in values:
        names = set(script.names_in(value))
        asked = [each.test for each, _ in script.above(value) if isinstance(each, ast.If)]
        if any("MASTER_ADDR" in set(script.names_in(each)) for each in (value, *asked)):
            continue  # it keeps the launcher's value
        local = names & {"localhost", "127.0.0.1", "gethostname", "getfqdn"}
        if local and isinstance(value, ast.Constant | ast.Call):
            why = "this overwrites the launcher's MASTER_ADDR: each node would connect to itself."
            fixed = f'os.environ.setdefault("MASTER_ADDR", {_source(value)})'
            yield Found(value.lineno, False, why, fixed)

"""Finds the lines that a training script lacks so that clusterddp can save and resume it.

It knows Lightning, Fabric, transformers (and trl), Accelerate and training loops of torch.
"""

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass

from clusterddp.scripts.python_file import PythonFile

NAMES = re.compile(r"lightning|transformers|\btrl\b|accelerate|init_process_group")
"""Names of which one is in every script that lacks a line."""
_LOOP = "from clusterddp.loop import Loop"
_WRAPPERS = re.compile(r"torch\..*(?:DistributedDataParallel|FullyShardedDataParallel)")
_OPTIMIZERS = re.compile(r"torch\.optim\.[A-Z]\w*")
_USE = "# then use loop.epochs(…), loop.batches(loader) and loop.step()"
_PAGE = "docs/resumable.md"
_PAGES = {"Accelerator": "docs/accelerate.md"}


@dataclass(frozen=True)
class MissingLine:
    """Lines to add to a script, and the call or loop next to which they belong."""

    line: int
    """Line of the call or loop in its file."""
    place: str
    """`before trainer.fit`."""
    code: tuple[str, ...]
    """Lines to add."""
    instead: str
    """Line of the call or loop together with them."""
    page: str = ""
    """Page of the documentation, if the loop has to change too."""
    file: str = ""

    @property
    def advice(self) -> str:
        """Words before the lines to add: `add before trainer.fit (train.py:40):`."""
        page = f"; {self.page}" if self.page else ""
        return f"add {self.place} ({self.file}:{self.line}{page}):"


def missing_line(
    script: PythonFile, modules: Collection[str] = (), *, own_loops: bool = False
) -> MissingLine | None:
    """Return what a script lacks; None if it has a line of clusterddp or no known training.

    modules: imported packages, if the training is in several files. own_loops: also find loops
    without a framework.
    """
    found = frozenset(modules or script.modules)
    missing = None
    if "clusterddp" in found:
        return None
    if found & {"lightning", "pytorch_lightning"}:
        missing = _of_trainer(script, "fit", "lightning") or _of_cli(script)
    if not missing and found & {"transformers", "trl"}:
        missing = _of_trainer(script, "train", "transformers")
    if not missing and script.trains and "accelerate" in found:
        missing = _of_prepared(script, "prepare", "Accelerator", "accelerator={}")
    if not missing and script.trains and found & {"lightning", "lightning_fabric"}:
        missing = _of_prepared(script, "setup", "Fabric", "model=model, optimizer=optimizer")
    return missing or (_of_own_loop(script) if own_loops else None)


def _of_trainer(script: PythonFile, method: str, library: str) -> MissingLine | None:
    for call in script.calls(method):
        if not isinstance(call.func, ast.Attribute):
            continue
        trainer, line = call.func.value, script.line(call)
        if not _is_made_by(script, trainer, "Trainer"):
            continue
        source = shown = ast.unparse(trainer)
        name, made = source, f"trainer = {source}"
        if isinstance(trainer, ast.Call):
            source = ast.get_source_segment(script.text, trainer) or source
            name, shown = "trainer", f"{script.last_name(trainer)}(…)"
            line = line.replace(source if source in line else ast.unparse(trainer), name)
        lines = (f"from clusterddp.integrations.{library} import resume", f"resume({name})")
        each = [lines[0], *([made] if source != name else []), lines[1], line]
        return MissingLine(call.lineno, f"before {shown}.{method}", lines, "\n".join(each))
    return None


def _of_cli(script: PythonFile) -> MissingLine | None:
    for call in script.calls("LightningCLI"):
        given = {each.arg: each.value for each in call.keywords}
        runs = given.get("run")
        if isinstance(runs, ast.Constant) and runs.value is False:
            continue
        option = 'trainer_defaults={"callbacks": [Resume()]}'
        lines = ("from clusterddp.integrations.lightning import Resume", option)
        line = f"{script.line(call)}  # with {option}"
        return MissingLine(call.lineno, "to LightningCLI", lines, f"{lines[0]}\n{line}")
    return None


def _of_prepared(script: PythonFile, method: str, kind: str, states: str) -> MissingLine | None:
    for call in script.calls(method):
        if isinstance(call.func, ast.Attribute) and _is_made_by(script, call.func.value, kind):
            name = ast.unparse(call.func.value)
            lines = (_LOOP, f"loop = Loop({states.format(name)})", _USE)
            instead = "\n".join((lines[0], script.line(call), *lines[1:]))
            page = _PAGES.get(kind, _PAGE)
            return MissingLine(call.lineno, f"after {name}.{method}", lines, instead, page)
    return None


def _of_own_loop(script: PythonFile) -> MissingLine | None:
    """Return what a loop over torch.distributed lacks, unless it handles signals."""
    if script.is_managed or script.handles_signals or not script.is_distributed:
        return None
    for call in script.calls("backward"):
        loops = [each for each, _ in script.above(call) if isinstance(each, ast.For | ast.While)]
        line = loops[-1].lineno if loops else call.lineno
        place = f"before the {'training loop' if loops else 'loop over this step'}"
        model = _assigned(script, _WRAPPERS, "model")
        optimizer = _assigned(script, _OPTIMIZERS, "optimizer")
        lines = (_LOOP, f"loop = Loop(model={model}, optimizer={optimizer})", _USE)
        return MissingLine(line, place, lines, "\n".join((*lines, script.line_at(line))), _PAGE)
    return None


def _assigned(script: PythonFile, names: re.Pattern[str], default: str) -> str:
    """Return the variable that gets the value of a call with such a name."""
    for value, targets in script.assignments:
        if isinstance(value, ast.Call) and names.fullmatch(script.full_name(value.func)):
            return ast.unparse(targets[0])
    return default


def _is_made_by(script: PythonFile, node: ast.AST, kind: str) -> bool:
    """Return whether an object has a class named `…kind`, by its value or its own name."""
    calls = [each for each in (node, *script.values_of(node)) if isinstance(each, ast.Call)]
    made = {script.last_name(call) for call in calls}
    for own in script.nodes:
        if isinstance(own, ast.ClassDef) and own.name in made:
            return any(script.full_name(base).endswith(kind) for base in own.bases)
    if any(name.endswith(kind) for name in made):
        return True
    name = getattr(node, "id", getattr(node, "attr", ""))
    return kind.lower() in name.lower()

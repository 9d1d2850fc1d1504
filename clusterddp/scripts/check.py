"""Reads users' scripts and lists their mistakes."""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from clusterddp.errors import RequestError, no_file
from clusterddp.request import nested_launcher
from clusterddp.scripts import sbatch_file
from clusterddp.scripts.findings import Finding, Rules, rule_name
from clusterddp.scripts.frameworks import NAMES, MissingLine, missing_line
from clusterddp.scripts.job_script import JobScript
from clusterddp.scripts.python_file import PythonFile, Started
from clusterddp.scripts.python_rules import PYTHON_RULES
from clusterddp.scripts.sbatch_rules import SBATCH_RULES

_MAX_BYTES = 1 << 20
"""Size limit of a script; Slurm's own is four times that."""
_MAX_MODULES = 50
"""Modules next to a script to read."""
_OF_LOOP = re.compile(r"\bclusterddp\.(?:loop|integrations)\b")
_IMPORTS = re.compile(r"^[ \t]*(?:from|import)[ \t]+([\w., \t]+)", re.MULTILINE)


def read_script(name: str) -> str:
    """Read a script; `-` is standard input. Raises RequestError if it is unreadable."""
    try:
        if name == "-":
            data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise RequestError(
                f"{name!r} is larger than {_MAX_BYTES:,} bytes; give a job script. [CD0315]"
            )
        if b"\0" in data:
            raise RequestError(
                f"{name!r} contains NUL bytes, so it is not text; give a script. [CD0315]"
            )
        text = data.decode()
    except UnicodeDecodeError:
        raise RequestError(
            f"{name!r} is not UTF-8 text. Convert it first, for example: iconv -f LATIN1 -t "
            "UTF-8. [CD0315]"
        ) from None
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            raise no_file("FILE", name, code="CD0317") from None
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"cannot read {name!r}: {why}; give a script. [CD0315]") from None
    if not is_python(name, text) and not sbatch_file.is_sbatch(text):
        raise RequestError(
            f"{name!r} is neither an sbatch file (first line #!/bin/bash, #SBATCH lines) nor "
            "Python (a name that ends in .py). [CD0315]"
        )
    return text.removeprefix("\ufeff") if is_python(name, text) else text


def check_texts(texts: dict[str, str]) -> list[Finding]:
    """Check scripts by name and text; sbatch files and Python files are cross-checked."""
    jobs, scripts = _read(texts)
    findings: list[Finding] = []
    for name, job in jobs.items():
        findings += _apply(SBATCH_RULES, job, name, job.line)
    for name, script in scripts.items():
        findings += _apply(PYTHON_RULES, script, name, script.line_at)
    return sorted(findings, key=lambda each: (list(texts).index(each.file), each.line))


def _read(texts: Mapping[str, str]) -> tuple[dict[str, JobScript], dict[str, PythonFile]]:
    """Read sbatch and Python files by name; link each script to the steps that start it."""
    scripts = {name: _python(name, text) for name, text in texts.items() if is_python(name, text)}
    named = Counter(Path(name).name for name in scripts)  # equal names are ambiguous
    by_name = {Path(n).name: each for n, each in scripts.items() if named[Path(n).name] == 1}
    jobs = {name: JobScript(sbatch_file.read(texts[name], name)) for name in texts.keys() - scripts}
    for job in jobs.values():
        job.python = by_name
        for run, step in job.in_tasks:
            script, is_named = job.python_of(run)
            if script and is_named:
                tasks = None if run.starts else job.step_tasks(step)
                nodes, gpus = job.step_nodes(step), job.visible_gpus(step)
                script.steps.add(Started(tasks, nodes, gpus, not job.asks_for_gpus_in(step)))
    return jobs, scripts


def one_device_remarks(texts: Mapping[str, str]) -> list[str]:
    """Return a remark for each single-device training; with jobs, if several tasks start it."""
    jobs, scripts = _read(texts)
    known = {Path(name): text for name, text in texts.items()}
    remarks = (
        one_device_remark(name, Path(name), known, script.tasks or 0)
        for name, script in scripts.items()
        if not jobs or {each.tasks for each in script.steps} - {1}
    )
    return [remark for remark in remarks if remark]


def one_device_remark(
    name: str, script: Path, texts: Mapping[Path, str] = MappingProxyType({}), tasks: int = 0
) -> str:
    """Return a remark if a script trains on a single device, else an empty text.

    name: the script's name in the remark. texts: scripts already read. tasks: how many tasks start
    it; 0 if unknown.
    """
    if not _is_one_device_training(script, texts):
        return ""
    each = f"each of the {tasks} tasks trains" if tasks else "each of several tasks would train"
    return (
        f"{name} trains on one device: {each} the full model on the full data. "
        "To distribute it, see docs/from-one-device.md."
    )


def _is_one_device_training(script: Path, texts: Mapping[Path, str]) -> bool:
    """Return whether a script and the modules next to it train without any use of ranks.

    False if an unread module may handle the ranks.
    """
    trains = False
    found, todo = {script}, [script]
    while todo:
        path = todo.pop()
        if path not in texts and not os.path.isfile(path):  # noqa: PTH113
            return False  # pipes are not read; a name can be too long for Path.is_file
        try:
            text = texts[path] if path in texts else read_script(str(path))
            python = _python(path.name, text) if is_python(path.name, text) else None
        except RequestError:
            return False  # not text, or not Python for this interpreter
        if python is None or not python.knows_no_rank:
            return False
        trains = trains or python.trains
        siblings = {path.parent / f"{module}.py" for module in python.modules_unknown}
        todo += siblings - found
        found |= siblings
    return trains


def missing_line_of(command: Sequence[str], folder: Path) -> MissingLine | None:
    """Return what a COMMAND's script lacks to be resumed; None if nothing, or if not known.

    The script and the modules next to it are parsed only if a text names a framework.

    folder: directory in which the COMMAND starts.
    """
    if any("clusterddp." in word for word in command):  # LightningCLI's options name classes
        return None
    texts = _program(command, folder)
    modules = {module for text in texts.values() for module in _imported(text)}
    if "clusterddp" in modules or not any(map(NAMES.search, texts.values())):
        return None
    for path, text in texts.items():
        shown = os.path.relpath(path, folder)
        try:
            missing = missing_line(_python(shown, text), modules, own_loops=True)
        except (RequestError, RecursionError):
            continue  # the task itself will report it
        if missing:
            return replace(missing, file=shown)
    return None


def has_loop(command: Sequence[str], folder: Path) -> bool:
    """Return whether a COMMAND's script, or a module next to it, imports a Loop.

    A package, and a script that a shell or a launcher starts, are not read.
    """
    return any(map(_OF_LOOP.search, (*_program(command, folder).values(), *command)))


def _program(command: Sequence[str], folder: Path) -> dict[Path, str]:
    """Return the texts of a COMMAND's script and of the modules next to it."""
    program, file = nested_launcher.started(command)
    module = nested_launcher.module_of(command)
    name = file or (f"{module.replace('.', '/')}.py" if module else program)
    return dict(_texts(folder / name)) if name.endswith(".py") else {}


def _texts(script: Path) -> Iterator[tuple[Path, str]]:
    """Yield the script and the modules next to it that it imports, with their texts."""
    found, todo = {script}, [script]
    while todo and len(found) < _MAX_MODULES:
        path = todo.pop(0)
        if not os.path.isfile(path):  # noqa: PTH113 -- as above
            continue
        try:
            text = read_script(str(path))
        except RequestError:
            continue
        yield path, text
        modules = _imported(text) - sys.stdlib_module_names
        siblings = {path.parent / f"{module}.py" for module in modules} - found
        todo += sorted(siblings)
        found |= siblings


def _imported(text: str) -> set[str]:
    """Return the packages that a script imports, by its text."""
    lines = (line.partition(" import ")[0] for line in _IMPORTS.findall(text))
    names = (name.strip(" \t.").partition(" ")[0] for line in lines for name in line.split(","))
    return {name.partition(".")[0] for name in names}


def _python(name: str, text: str) -> PythonFile:
    try:
        return PythonFile(name, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise RequestError(
            f"{name}{where}: not valid Python {sys.version_info.major}.{sys.version_info.minor}: "
            f"{what}. [CD0315]"
        ) from None


def is_python(name: str, text: str) -> bool:
    return name.endswith(".py") or bool(re.match(r"#!.*\bpython", text))


def _apply(
    rules: Rules, subject: object, name: str, line_at: Callable[[int], str]
) -> Collection[Finding]:
    findings: dict[tuple[str, int, str], Finding] = {}
    try:
        for rule, found in ((each, found) for each in rules for found in each(subject)):
            kind, line, text = rule_name(rule), found.line, line_at(found.line)
            finding = Finding(kind, name, line, found.is_sure, found.why, text, found.instead)
            findings.setdefault((kind, line, found.why), finding)
    except RecursionError:
        raise RequestError(f"{name}: nested too deeply to check. [CD0315]") from None
    return findings.values()

"""Model of an sbatch file's job, shared by `check` and `import`.

It holds the job's counts, the commands of each task, the training command, and the layout of nodes,
tasks, CPUs and GPUs that `submit` needs for the same job.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath

from clusterddp import formatting
from clusterddp.errors import RequestError
from clusterddp.request import nested_launcher
from clusterddp.request.nested_launcher import NestedLauncher
from clusterddp.scripts import sbatch_file, shell
from clusterddp.scripts.python_file import PythonFile
from clusterddp.scripts.sbatch_file import SbatchFile, SrunCommand
from clusterddp.scripts.shell import (
    Assignment,
    Command,
    Expansion,
    Script,
    Word,
    display_line,
    is_known,
)
from clusterddp.slurm import forms

_REPEATS = frozenset({"for", "while", "until", "function"})
TRAINS = 3
"""Lowest score of a command that trains rather than prepares."""
_NAMES_OF_STAGES = (
    ": awk sed grep hostname mkdir cp rsync rm tar mv ls cat echo date nvidia-smi ip true"
)
_STAGES = frozenset(_NAMES_OF_STAGES.split())
"""Programs that only prepare a job."""
DERIVED = frozenset({*forms.RANK_VARIABLES, "SRUN_CPUS_PER_TASK"})
"""Variables that clusterddp sets for each task or for srun."""
_SHELL_WORDS = frozenset({"exec", "command", "time", "eval"})
"""Shell words that may precede a program."""

_ENDING = re.compile(r"[ \t]*(&&|;|\n)\s*")
DIRECTIVES_OF_GPUS = ("gpus-per-node", "gres", "gpus-per-task", "gpus")
DIRECTIVES_OF_LAYOUT = frozenset(
    {*DIRECTIVES_OF_GPUS, "nodes", "ntasks", "ntasks-per-node", "cpus-per-task"}
)
"""Directives that determine the layout together."""
MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "orterun", "prterun"})
_ALL_GPUS = re.compile(r"SLURM_GPUS_ON_NODE|SLURM_GPUS_PER_NODE|nvidia-smi")
_NODE_COUNT = re.compile(r"SLURM_NNODES|SLURM_JOB_NUM_NODES")

Note = Callable[[int, str, str], None]
"""Function that takes a line number, its text, and a remark on it."""


@dataclass(frozen=True)
class Run:
    """A command that runs in the batch shell or in each task of a step."""

    command: Command
    script: Script
    """Text that the command's values belong to."""
    line: int
    step: SrunCommand | None = None
    in_own_shell: bool = False
    """True if a shell in the task reads it: `srun bash -c '…'`."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> tuple[str, ...]:
        return self.command.texts

    @cached_property
    def launcher(self) -> nested_launcher.NestedLauncher | None:
        return nested_launcher.find(self.texts, in_shell=True)

    @property
    def starts(self) -> str:
        """Launcher's name, or an empty text."""
        return self.launcher.name if self.launcher else ""

    @cached_property
    def options(self) -> dict[str, str]:
        """Launcher's options by name; none if another shell starts the launcher."""
        launcher = self.launcher
        return dict(launcher.options) if launcher and launcher.command == self.texts else {}

    @property
    def is_static(self) -> bool:
        """True if agents get their node's rank from the command line, not the rendezvous."""
        return self.options.get("rdzv-backend", "static") == "static"

    def line_of(self, text: str) -> int:
        """Return the line of the first word that contains a text."""
        return next((word.line for word in self.command.words if text in word.text), self.line)

    @property
    def python_script(self) -> str:
        """Python file that it starts, or an empty text."""
        return next((text for text in self.texts if text.endswith(".py")), "")

    @property
    def trains(self) -> bool:
        """True if it may be the training: a launcher, or Python with a script or module."""
        if self.starts in nested_launcher.START_PYTHON or self.starts == "deepspeed":
            return True
        at = nested_launcher.program_index(self.texts, in_shell=True)
        program = PurePath(self.texts[at]).name if at < len(self.texts) else ""
        if nested_launcher.is_python(program):
            arguments = self.texts[at + 1 :]
            return any(t.endswith(".py") for t in arguments) or bool(
                nested_launcher.module_of(self.texts[at:])
            )
        return program.endswith(".py")


class JobScript:
    """An sbatch file and the known facts of its job."""

    def __init__(self, file: SbatchFile) -> None:
        self.file = file
        self._of_batch = {id(each) for each in file.script.expansions}
        self._steps = {id(step.command): step for step in file.steps}
        self.python: dict[str, PythonFile] = {}
        """Training scripts checked with it, by file name."""

    def is_of_batch(self, expansion: Expansion) -> bool:
        """Return whether the batch shell expands it, not a shell in a task."""
        return id(expansion) in self._of_batch

    def expanded_by_batch(self, run: "Run", text: str) -> list[Expansion]:
        return [each for each in run.script.expanded(text) if self.is_of_batch(each)]

    # Counts

    def number(self, text: str | None) -> int | None:
        """Return an integer; variables that Slurm sets in the job are resolved."""
        if text is None:
            return None
        if shell.is_known(text):
            return _whole(text)
        expansions = self.file.script.expanded(text)
        if len(text) == 1 and len(expansions) == 1 and expansions[0].name:
            return self.counts.get(expansions[0].name)
        return None

    @cached_property
    def counts(self) -> dict[str, int]:
        """Known values of the job's Slurm variables."""
        names = {
            "SLURM_NNODES SLURM_JOB_NUM_NODES": self.nodes,
            "SLURM_NTASKS SLURM_NPROCS": self.ntasks,
            "SLURM_NTASKS_PER_NODE": self.tasks_per_node,
            "SLURM_GPUS_ON_NODE": self.gpus_per_node,
            "SLURM_GPUS_PER_NODE": _gpus(self.file.value("gpus-per-node")),
            "SLURM_CPUS_PER_TASK": self.cpus_per_task,
            "SLURM_GPUS_PER_TASK": self.gpus_per_task,
        }
        pairs = ((name, value) for key, value in names.items() for name in key.split())
        return {name: value for name, value in pairs if value is not None}

    @cached_property
    def nodes(self) -> int | None:
        value = self.file.value("nodes")
        if value is not None:
            return _whole(value)
        if self.file.value("ntasks", "nodelist", "gpus") is None:
            return 1  # with --ntasks-per-node, too (seen)
        ntasks = _whole(self.file.value("ntasks"))
        return 1 if ntasks and ntasks <= (self._per_node or 1) else None

    @property
    def spans_nodes(self) -> bool:
        """True if the job certainly has several nodes."""
        return bool(self.nodes and self.nodes > 1)

    @cached_property
    def _per_node(self) -> int | None:
        return _whole(self.file.value("ntasks-per-node"))

    @cached_property
    def ntasks(self) -> int | None:
        if self.file.value("ntasks") is not None:
            return _whole(self.file.value("ntasks"))
        if self.file.value("ntasks-per-node") is not None:
            return self.nodes * self._per_node if self.nodes and self._per_node else None
        if self.file.value("gpus-per-task") is not None or self.file.value("ntasks-per-gpu"):
            gpus = _gpus(self.file.value("gpus"))
            return gpus // self.gpus_per_task if gpus and self.gpus_per_task else None
        return self.nodes

    @cached_property
    def tasks_per_node(self) -> int | None:
        if self.ntasks and self.nodes:
            return -(-self.ntasks // self.nodes)
        return self._per_node

    @cached_property
    def cpus_per_task(self) -> int | None:
        return _whole(self.file.value("cpus-per-task"))

    @cached_property
    def gpus_per_task(self) -> int | None:
        return _gpus(self.file.value("gpus-per-task"))

    @cached_property
    def gpus_per_node(self) -> int | None:
        if (value := _gpus(self.file.value("gpus-per-node"))) is not None:
            return value
        if "gpu" in (gres := self.file.value("gres") or ""):
            return forms.gpus_of(gres, bare=1).get("")
        if self.gpus_per_task and self.tasks_per_node:
            return self.gpus_per_task * self.tasks_per_node
        gpus = _gpus(self.file.value("gpus"))
        return gpus // self.nodes if gpus and self.nodes else None

    @property
    def asks_for_gpus(self) -> bool:
        names = ("gpus-per-node", "gpus-per-task", "gpus", "gpus-per-socket")
        return self.file.value(*names) is not None or "gpu" in (self.file.value("gres") or "")

    def asks_for_gpus_in(self, step: SrunCommand) -> bool:
        """Return whether the job or the step requests GPUs."""
        names = ("gpus-per-node", "gpus-per-task", "gpus", "gpus-per-socket", "gres")
        return self.asks_for_gpus or step.value(*names, "tres-per-task") is not None

    @property
    def has_whole_nodes(self) -> bool:
        """True if other jobs on its nodes are unlikely."""
        return (
            self.file.value("exclusive") in ("", "exclusive")
            or self.file.value("mem") == "0"
            or (self.gpus_per_node or 0) >= 4
        )

    # Steps

    def step_nodes(self, step: SrunCommand) -> int | None:
        if step.value("het-group", "pack-group") is not None:
            return None
        value = step.value("nodes")
        if value is not None:
            return self.number(value)
        if step.value("nodelist") and step.value("ntasks"):
            return None
        return self.nodes

    def step_tasks(self, step: SrunCommand) -> int | None:
        """Return the number of tasks of a step, or None if unknown.

        SLURM_NTASKS holds the job's task count; srun obeys it over its own --nodes and
        --ntasks-per-node (seen).
        """
        if step.value("ntasks") is not None:
            return self.number(step.value("ntasks"))
        if step.value("ntasks-per-gpu", "het-group", "pack-group") is not None:
            return None
        if self._sets_tasks or "SLURM_NTASKS" in dict(step.environment):
            if step.value("ntasks-per-node") is None:
                return None
        elif self.file.value("ntasks", "ntasks-per-node", "ntasks-per-gpu") is not None:
            return self.ntasks
        nodes, per_node = self.step_nodes(step), step.value("ntasks-per-node")
        if per_node is None:
            return nodes
        number = self.number(per_node)
        return nodes * number if nodes and number else None

    def visible_gpus(self, step: SrunCommand) -> int | None:
        """Return how many GPUs each task of a step sees; None if unknown or restricted."""
        names = ("gpus-per-task", "gpu-bind", "tres-bind", "ntasks-per-gpu", "exclusive")
        if self.file.value(*names) is not None or self.file.value("gpus-per-node", "gres") is None:
            return None
        of_step = (*names, "gpus", "gpus-per-node", "gres", "gpus-per-socket", "tres-per-task")
        if step.value(*of_step) is not None:
            return None
        return None if "CUDA_VISIBLE_DEVICES" in self.typed else self.gpus_per_node

    @cached_property
    def typed(self) -> str:
        """Commands and directives as text, without comments."""
        commands = [command.source for command in self.file.script.commands]
        return "\n".join([*commands, *(each.text for each in self.file.directives)])

    @cached_property
    def _sets_tasks(self) -> bool:
        """True if the script sets or unsets SLURM_NTASKS, which srun reads."""
        return any(
            ("unset" in command.texts[:1] and "SLURM_NTASKS" in command.texts)
            or any(each.name == "SLURM_NTASKS" for each in command.assignments)
            for command in self.file.script.commands
        )

    def step_tasks_per_node(self, step: SrunCommand) -> int | None:
        """Return the highest number of a step's tasks on one node, or None if unknown."""
        tasks, nodes = self.step_tasks(step), self.step_nodes(step)
        if tasks and nodes:
            return -(-tasks // nodes)
        return self.number(step.value("ntasks-per-node"))

    # Commands

    @cached_property
    def runs(self) -> list[Run]:
        """Commands of the batch shell and of the tasks."""
        script = self.file.script
        runs: list[Run] = []
        for command in script.commands:
            step = self._steps.get(id(command))
            runs += _of_task(step, script) if step else _of_shell(command, script)
        return runs

    @cached_property
    def in_tasks(self) -> list[tuple[Run, SrunCommand]]:
        """Commands of the tasks, with their steps."""
        return [(run, run.step) for run in self.runs if run.step]

    @cached_property
    def in_batch(self) -> list[Run]:
        return [run for run in self.runs if not run.step]

    def python_of(self, run: Run) -> tuple[PythonFile | None, bool]:
        """Return the training script that a command starts, and whether the command names it.

        A step without a script's name is assumed to start the only script checked with the file.
        """
        name = PurePath(run.python_script).name
        if name in self.python:
            return self.python[name], True
        only = list(self.python.values()) if not name and len(self.python) == 1 else []
        return (only[0], False) if only and run.step and not run.starts else (None, False)

    @cached_property
    def training(self) -> "Training":
        """Training command: a launcher, a Python program, or any step.

        Among candidates of equal score, a name such as train.py wins, then srun, then the last one.
        Raises RequestError if there is none.
        """
        best: tuple[int, bool, bool] = (0, False, False)
        found: Command | None = None
        for command in self.file.script.commands:
            value, in_step = self.score(command), id(command) in self._steps
            is_named = any(re.search(r"train|main|run", text) for text in command.texts[1:])
            if value and best != (value, True, True) and (value, is_named, in_step) >= best:
                best, found = (value, is_named, in_step), command
        if found is None:
            raise RequestError(
                f"{self.file.name or 'the file'} starts no training: it has no srun, torchrun or "
                "Python script. Give the file with the srun line, or write the submit line "
                "yourself: clusterddp submit [OPTIONS] -- COMMAND [CD0315]"
            )
        step = self._steps.get(id(found))
        program = _known(step.program) if step else _evaluated(self.file, found)
        return _unwrapped(self.file, Training(found, step, program))

    def score(self, command: Command) -> int:
        """Return how likely a command is the training; 0 if it is not."""
        step = self._steps.get(id(command))
        texts = _texts(step.program if step else _evaluated(self.file, command))
        if not texts:
            return 0
        launcher = nested_launcher.find(texts)
        if launcher and launcher.name != "srun":
            return TRAINS + (2 if step else 1)
        program, script = nested_launcher.started(texts)
        name = program.rpartition("/")[2]
        if nested_launcher.is_python(name):
            installs = script.endswith(("get-pip.py", "setup.py")) or {"pip", "venv"} & {*texts}
            runs = bool(script) or (step is not None and bool(nested_launcher.module_of(texts)))
            return TRAINS if runs and not installs else 0
        if step is None:
            runs = any(text.endswith(".py") for text in texts[1:]) and not command.piped
            return int(runs and name not in _STAGES)
        return 0 if name in _STAGES or not name else 2 if script or "." in name else 1

    def layout(self, note: Note) -> "Layout":
        """Return the layout from the directives, completed by the training's step."""
        return _LayoutReader(self, note).layout()

    def line(self, number: int) -> str:
        """Return a line of the file, joined with its continuation lines."""
        lines = self.file.lines
        if not 0 < number <= len(lines):
            return ""
        first = last = number - 1
        while first and _is_continued(lines[first - 1]):
            first -= 1
        while last + 1 < len(lines) and _is_continued(lines[last]):
            last += 1
        return shell.on_one_line("\n".join(lines[first : last + 1]))


def _is_continued(line: str) -> bool:
    return line.endswith("\\") and not line.lstrip().startswith("#")


def _of_task(step: SrunCommand, script: Script) -> Iterator[Run]:
    """Yield the commands of each task: the step's program, or the commands of its `bash -c`."""
    words = step.program
    command = Command(
        words=words,
        assignments=(),
        redirects=(),
        line=words[0].line if words else step.command.line,
        last_line=step.command.last_line,
        source=step.command.source,
        inside=step.command.inside,
    )
    environment = dict(step.environment)
    text, line = _shell_text(command)
    if not text:
        yield Run(command, script, command.line, step, environment=environment)
        return
    inner = shell.read(text, first_line=line, outer=script)
    for each in inner.commands:
        yield Run(each, inner, each.line, step, True, environment)


def _of_shell(command: Command, script: Script) -> Iterator[Run]:
    """Yield a command of the batch shell, or the commands that it evaluates."""
    text, line = _shell_text(command)
    if not text:
        yield Run(command, script, command.line)
        return
    inner = shell.read(text, first_line=line, outer=script)
    steps = {id(step.command): step for step in sbatch_file.steps(inner.commands)}
    for each in inner.commands:
        step = steps.get(id(each))
        if step:
            yield from _of_task(step, inner)
        else:
            yield Run(each, inner, each.line)


def _shell_text(command: Command) -> tuple[str, int]:
    """Return the text that the command passes to a shell, and its line."""
    texts = command.texts
    at = nested_launcher.program_index(texts, in_shell=True)
    if at >= len(texts):
        return "", 0
    name = PurePath(texts[at]).name
    if name == "eval":
        return " ".join(texts[at + 1 :]), command.line
    if name not in nested_launcher.SHELLS:
        return "", 0
    for index in range(at + 1, len(texts) - 1):
        word = texts[index]
        if not word.startswith("-"):
            break
        if "c" in word and not word.startswith("--"):
            argument = command.words[index + 1]
            return argument.text, argument.line
    return "", 0


def in_loop(command: Command) -> bool:
    """Return whether a command may run more than once, or not at all."""
    return bool(_REPEATS.intersection(command.inside))


def _positive(text: str | None) -> int | None:
    return _whole(text) if text and re.fullmatch(r"[1-9][0-9]{0,5}", text) else None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 9 else None


def _gpus(value: str | None) -> int | None:
    """Return the count of `4`, `a100:4`, `tesla:2,kepler:2`."""
    if value is None:
        return None
    total = 0
    for part in value.split(","):
        count = _whole(part.partition("(")[0].rpartition(":")[2])
        if count is None:
            return None
        total += count
    return total


@dataclass(frozen=True)
class Training:
    """The training command of a file: a step, or a program of the batch shell."""

    command: Command
    step: SrunCommand | None
    program: tuple[Word, ...]
    """Words of each task's command; a `bash -c` with one command is unwrapped."""
    text: str = ""
    """Text of a `bash -c` with several commands, of which `program` is the training."""
    environment: tuple[Assignment, ...] = ()
    """Variables set before the program."""

    @property
    def launcher(self) -> NestedLauncher | None:
        launcher = nested_launcher.find(_texts(self.program))
        return None if launcher and self.step and launcher.name == "srun" else launcher

    @property
    def is_of_each_node(self) -> bool:
        """True if the file starts it in a loop over the nodes."""
        return any(kind in ("for", "while", "until") for kind in self.command.inside)


def _texts(words: Iterable[Word]) -> list[str]:
    return [word.text for word in words]


def _known(program: tuple[Word, ...]) -> tuple[Word, ...]:
    """Return a program without preceding variables that may hold options of srun."""
    if not program or is_known(program[0].text):
        return program
    for at in range(1, len(program)):
        texts = _texts(program[at:])
        if nested_launcher.is_python(texts[0]) or nested_launcher.find(texts):
            return program[at:]
    return program


def _evaluated(file: SbatchFile, command: Command) -> tuple[Word, ...]:
    """Return the words of a program; for `eval`, the words of the evaluated text."""
    words = command.words
    if command.texts[:1] == ("eval",):
        inner = shell.read(" ".join(command.texts[1:]), first_line=command.line, outer=file.script)
        words = inner.commands[0].words if inner.commands else ()
    return _without_shells_words(words)


def _without_shells_words(words: tuple[Word, ...]) -> tuple[Word, ...]:
    while words and words[0].text in _SHELL_WORDS:
        words = words[1:]
    return words


def _unwrapped(file: SbatchFile, training: Training) -> Training:
    """Return the training command within a `bash -c`, or the training unchanged."""
    words = _texts(training.program)
    is_text = len(words) == 3 and re.fullmatch(r"-[a-z]*c", words[1])
    if not is_text or words[0].rpartition("/")[2] not in ("bash", "sh"):
        return training
    line = training.program[2].line
    text = _without_derived(words[2], shell.read(words[2], outer=file.script))
    inner = shell.read(text, first_line=line, outer=file.script)
    trains = [command for command in inner.commands if _trains(command)]
    if not trains:
        return training
    program = _without_shells_words(trains[0].words)
    if len(inner.commands) > 1 or trains[0].redirects or trains[0].inside:
        return replace(training, program=program, text=text)
    return replace(training, program=program, environment=trains[0].assignments)


def _without_derived(text: str, script: Script) -> str:
    """Return a text without the commands that only set variables of clusterddp."""
    for command in reversed(script.commands):
        names = {each.name for each in command.assignments}
        if command.texts not in ((), ("export",)) or not names or not names <= DERIVED:
            continue
        before = text[: command.start].rstrip(" \t")
        ending = _ENDING.match(text, command.start + len(command.source))
        is_first = not before or before[-1] in ";\n"
        is_removable = ending and (is_first or (before.endswith("&&") and ending[1] == "&&"))
        if ending and is_removable and not command.inside:
            text = text[: command.start] + text[ending.end() :]
    return text


def _trains(command: Command) -> bool:
    texts = command.texts
    is_python = nested_launcher.is_python(nested_launcher.started(texts)[0])
    return is_python or nested_launcher.find(texts) is not None


@dataclass(frozen=True)
class Layout:
    """Layout of a job in terms of `submit`."""

    nodes: int
    tasks: int
    """Tasks (ranks) per node."""
    cpus: int | None = None
    """CPUs per task."""
    gpus: int = 0
    """GPUs per node."""
    gpu_type: str = ""
    gpu_directive: str = "gpus-per-node"
    other_gres: str = ""
    """Generic resources other than GPUs."""

    @property
    def options(self) -> list[tuple[str, str]]:
        """Names and values of submit's options that differ from its defaults."""
        kind = f"{self.gpu_type}:" if self.gpu_type else ""
        asked = [
            ("nodes", str(self.nodes)),
            ("gpus-per-node", f"{kind}{self.gpus}" if self.gpus else ""),
            ("gpu-directive", "" if self.gpu_directive == "gpus-per-node" else self.gpu_directive),
            ("tasks-per-node", "" if self.tasks == (self.gpus or 1) else str(self.tasks)),
            ("cpus-per-task", str(self.cpus or "")),
            ("sbatch", f"gres={self.other_gres}" if self.other_gres else ""),
        ]
        return [(name, value) for name, value in asked if value]


class _LayoutReader:
    def __init__(self, job: JobScript, note: Note) -> None:
        self.file, self.training, self.note = job.file, job.training, note
        self.where = job.training.command.line

    def layout(self) -> Layout:
        nodes, tasks = self.nodes_and_tasks()
        kind, gpus, request = self.gpus(nodes, tasks)
        cpus, launcher = _positive(self.asked("cpus-per-task")), self.training.launcher
        ranks = tasks
        if launcher:
            ranks = self.ranks(launcher, nodes, gpus) or gpus or tasks
            self.note_ranks(launcher, tasks, ranks, cpus)
        elif self.training.step is None and nodes * tasks > 1:
            why = f"ran once, on the first node; now each of the {nodes * tasks} tasks runs it"
            self.note(self.where, display_line(self.training.command), why)
        if cpus and ranks != tasks:
            cpus = max(cpus * tasks // ranks, 1)
        others = ",".join(
            each for each in (self.file.value("gres") or "").split(",") if each[:3] != "gpu"
        )
        if others and gpus and request == "gres":
            why = f"not carried over: {others}, because --gpu-directive gres only takes GPUs"
            self.note(self.place("gres"), f"--gres={self.file.value('gres')}", why)
            others = ""
        return Layout(nodes, ranks, cpus, gpus, kind, request if gpus else "gpus-per-node", others)

    def asked(self, *names: str) -> str | None:
        """Return the value from the directives, or else from the training's step."""
        value = self.file.value(*names)
        if value is None and self.training.step:
            value = self.training.step.value(*names)
            value = value if value and is_known(value) else None
        return value

    def of_step(self, name: str) -> int | None:
        return _positive(self.training.step.value(name)) if self.training.step else None

    def place(self, name: str) -> int:
        directive = self.file.directive(name)
        return directive.line if directive else self.where

    def nodes_and_tasks(self) -> tuple[int, int]:
        """Return the number of nodes and of tasks per node."""
        typed = self.asked("nodes")
        nodes = _positive(typed)
        if typed and nodes is None:
            nodes = _positive(typed.split("-")[0]) or 1
            self.note(self.place("nodes"), f"--nodes={typed}", f"a run has a fixed count: {nodes}")
        per_node = self.of_step("ntasks-per-node") or _positive(self.asked("ntasks-per-node"))
        total = _positive(self.asked("ntasks"))
        in_step = None if self.training.is_of_each_node else self.of_step("ntasks")
        if in_step:
            total, per_node = in_step, None if in_step % (per_node or 1) else per_node
        if nodes is None:
            nodes = total // per_node if per_node and total and total % per_node == 0 else 1
            if not per_node and total and total > 1:
                why = "Slurm chose the number of nodes; now it is one"
                self.note(self.place("ntasks"), f"--ntasks={total}", why)
        if per_node is None and total:
            per_node = max(total // nodes, 1)
            self.note_uneven("ntasks", total, nodes)
        return nodes, per_node or 1

    def note_uneven(self, name: str, total: int, nodes: int) -> None:
        if total % nodes:
            why = f"does not divide evenly over {nodes} nodes; now each has {total // nodes}"
            self.note(self.place(name), f"--{name}={total}", why)

    def gpus(self, nodes: int, tasks: int) -> tuple[str, int, str]:
        """Return type and number of GPUs per node, and the directive that requests them."""
        for name in DIRECTIVES_OF_GPUS:
            value = self.asked(name)
            if value is None:
                continue
            each = self.file.directive("gpus-per-task")
            if each and name != each.name:
                why = f"not carried over with --{name}: each task sees all GPUs of its node"
                self.note(each.line, each.source, why)
            if name == "gres":
                found = forms.gpus_of(value.replace("gres:", ""), bare=1)
                if found:
                    return next((kind for kind in found if kind), ""), found[""], name
                if re.search(r"(?:^|[,:])gpu\b", value):
                    why = "not carried over: the number of GPUs is unknown"
                    self.note(self.place(name), f"--gres={value[:80]}", why)
                continue
            try:
                kind, count = forms.gpu_count(f"--{name}", value)
            except RequestError as error:
                self.note(self.place(name), f"--{name}={value}", f"not carried over: {error}")
                continue
            if name == "gpus":
                self.note_uneven(name, count, nodes)
                return kind, count // nodes, "gpus-per-node"
            return kind, count * (tasks if name == "gpus-per-task" else 1), name
        return "", 0, ""

    def ranks(self, launcher: NestedLauncher, nodes: int, gpus: int) -> int | None:
        """Return how many ranks the launcher starts per node, or None if unknown."""
        of_all = launcher.name in MPI or launcher.name.startswith(("accelerate", "horovod"))
        keys = ("num-processes", "np", "n", "c") if of_all else ("nproc-per-node", "num-gpus")
        options = dict(launcher.options)
        typed = next((options[key] for key in keys if key in options), None)
        if typed is None:
            return 1 if launcher.name in nested_launcher.AGENTS else None
        count = _positive(typed)
        if count is not None:
            return max(count // nodes, 1) if of_all else count
        sources = " ".join(each.source for each in self.file.script.expanded(typed))
        if gpus and (typed in ("gpu", "auto") or _ALL_GPUS.search(sources)):
            return gpus
        if gpus and of_all and _NODE_COUNT.search(sources):  # a count per node
            return gpus
        why = f"the number of ranks is unknown; now it is {gpus or 1} per node"
        self.note(self.where, self.file.script.with_sources(typed), why)
        return None

    def note_ranks(
        self, launcher: NestedLauncher, tasks: int, ranks: int, cpus: int | None
    ) -> None:
        if tasks > 1 and launcher.name not in MPI:
            why = f"each of {tasks} tasks per node started it; now {ranks} ranks start per node"
            self.note(self.where, launcher.name, why)
        elif ranks != tasks:
            why = f"its ranks are now Slurm's tasks, {ranks} per node"
            if cpus:
                why += f", with {formatting.count(max(cpus * tasks // ranks, 1), 'CPU')} each"
            self.note(self.where, launcher.name, why)

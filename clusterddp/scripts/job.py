"""The job that an sbatch file makes: its counts, and what its steps run in each task."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath

from clusterddp.request import nested_launcher
from clusterddp.scripts import sbatch_file, shell
from clusterddp.scripts.python_file import PythonFile
from clusterddp.scripts.sbatch_file import SbatchFile, Step
from clusterddp.scripts.shell import Command, Expansion, Script

_BEHIND_A_LOOP = frozenset({"for", "while", "until", "function"})


@dataclass(frozen=True)
class Run:
    """A command that runs in the batch shell, or in each task of a step."""

    command: Command
    script: Script
    """The text that the values of the command belong to."""
    line: int
    step: Step | None = None
    in_own_shell: bool = False
    """True where a shell of the task reads it: `srun bash -c '…'`."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> tuple[str, ...]:
        return self.command.texts

    @cached_property
    def launcher(self) -> nested_launcher.NestedLauncher | None:
        return nested_launcher.find(self.texts, in_shell=True)

    @property
    def starts(self) -> str:
        """Return the launcher's name, or an empty one."""
        return self.launcher.name if self.launcher else ""

    @cached_property
    def options(self) -> dict[str, str]:
        """Return the launcher's options by name, dashes for underscores."""
        if not self.launcher or self.launcher.command != self.texts:
            return {}
        words = self.texts[self.launcher.first : self.launcher.last]
        options: dict[str, str] = {}
        for index, word in enumerate(words):
            if not word.startswith("-"):
                continue
            name, equals, value = word.lstrip("-").partition("=")
            if not equals and index + 1 < len(words) and not words[index + 1].startswith("-"):
                value = words[index + 1]
            options[name.replace("_", "-")] = value
        return options

    def line_of(self, text: str) -> int:
        """Return the line of the first word that contains a text."""
        return next((word.line for word in self.command.words if text in word.text), self.line)

    @property
    def python_script(self) -> str:
        """Return the Python file that it starts, or an empty text."""
        return next((text for text in self.texts if text.endswith(".py")), "")

    @property
    def trains(self) -> bool:
        """Return whether it may be the training: a launcher, Python with a script or a module."""
        if self.starts in nested_launcher.START_PYTHON or self.starts == "deepspeed":
            return True
        at = nested_launcher.program_index(self.texts, in_shell=True)
        program = PurePath(self.texts[at]).name if at < len(self.texts) else ""
        if nested_launcher.is_python(program):
            behind = self.texts[at + 1 :]
            return any(t.endswith(".py") for t in behind) or bool(
                nested_launcher.module_of(self.texts[at:])
            )
        return program.endswith(".py")


class Job:
    """An sbatch file, and what is known of the job that it makes."""

    def __init__(self, file: SbatchFile) -> None:
        self.file = file
        self._of_batch = {id(each) for each in file.script.expansions}
        self.python: dict[str, PythonFile] = {}
        """The training scripts that are checked with it, by file name."""

    def is_of_batch(self, expansion: Expansion) -> bool:
        """Return whether the batch shell expands it; else a shell of a task does."""
        return id(expansion) in self._of_batch

    def expanded_by_batch(self, run: "Run", text: str) -> list[Expansion]:
        return [each for each in run.script.expanded(text) if self.is_of_batch(each)]

    # Counts

    def number(self, text: str | None) -> int | None:
        """Return a whole number; what Slurm sets in the job counts as known."""
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
        """Return the values of Slurm's variables of the job, as far as they are known."""
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
        """Return whether the job has more nodes than one for sure."""
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
        gres = [each for each in (self.file.value("gres") or "").split(",") if each[:3] == "gpu"]
        if gres:
            return _gpus(",".join(each.removeprefix("gpu").lstrip(":") or "1" for each in gres))
        if self.gpus_per_task and self.tasks_per_node:
            return self.gpus_per_task * self.tasks_per_node
        gpus = _gpus(self.file.value("gpus"))
        return gpus // self.nodes if gpus and self.nodes else None

    @property
    def asks_for_gpus(self) -> bool:
        names = ("gpus-per-node", "gpus-per-task", "gpus", "gpus-per-socket")
        return self.file.value(*names) is not None or "gpu" in (self.file.value("gres") or "")

    def asks_for_gpus_in(self, step: Step) -> bool:
        """Return whether the job, or the step itself, asks for GPUs."""
        names = ("gpus-per-node", "gpus-per-task", "gpus", "gpus-per-socket", "gres")
        return self.asks_for_gpus or step.value(*names, "tres-per-task") is not None

    @property
    def has_whole_nodes(self) -> bool:
        """Return whether no other job is to be expected on its nodes."""
        return (
            self.file.value("exclusive") in ("", "exclusive")
            or self.file.value("mem") == "0"
            or (self.gpus_per_node or 0) >= 4
        )

    # Steps

    def step_nodes(self, step: Step) -> int | None:
        if step.value("het-group", "pack-group") is not None:
            return None
        value = step.value("nodes")
        if value is not None:
            return self.number(value)
        if step.value("nodelist") and step.value("ntasks"):
            return None
        return self.nodes

    def step_tasks(self, step: Step) -> int | None:
        """Return how many tasks a step has, where that is known.

        The job's number of tasks stands in SLURM_NTASKS, which srun follows whatever its own
        --nodes and --ntasks-per-node say (seen).
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

    def visible_gpus(self, step: Step) -> int | None:
        """Return how many GPUs each task of a step sees, where nothing binds it to some of them."""
        names = ("gpus-per-task", "gpu-bind", "tres-bind", "ntasks-per-gpu", "exclusive")
        if self.file.value(*names) is not None or self.file.value("gpus-per-node", "gres") is None:
            return None
        of_step = (*names, "gpus", "gpus-per-node", "gres", "gpus-per-socket", "tres-per-task")
        if step.value(*of_step) is not None:
            return None
        return None if "CUDA_VISIBLE_DEVICES" in self.typed else self.gpus_per_node

    @cached_property
    def typed(self) -> str:
        """Return the commands and the directives as text, without comments."""
        commands = [command.source for command in self.file.script.commands]
        return "\n".join([*commands, *(each.text for each in self.file.directives)])

    @cached_property
    def _sets_tasks(self) -> bool:
        """Return whether the script itself sets, or unsets, the number of tasks that srun reads."""
        return any(
            ("unset" in command.texts[:1] and "SLURM_NTASKS" in command.texts)
            or any(each.name == "SLURM_NTASKS" for each in command.assignments)
            for command in self.file.script.commands
        )

    def step_tasks_per_node(self, step: Step) -> int | None:
        """Return how many tasks of a step a node has at most, where that is known."""
        tasks, nodes = self.step_tasks(step), self.step_nodes(step)
        if tasks and nodes:
            return -(-tasks // nodes)
        return self.number(step.value("ntasks-per-node"))

    # Commands

    @cached_property
    def runs(self) -> list[Run]:
        """Return the commands of the batch shell, and those of each task."""
        script = self.file.script
        steps = {id(step.command): step for step in self.file.steps}
        runs: list[Run] = []
        for command in script.commands:
            step = steps.get(id(command))
            if step:
                runs += _of_task(step, script)
            else:
                runs += _of_shell(command, script)
        return runs

    @cached_property
    def in_tasks(self) -> list[Run]:
        return [run for run in self.runs if run.step]

    @cached_property
    def in_batch(self) -> list[Run]:
        return [run for run in self.runs if not run.step]

    def python_of(self, run: Run) -> tuple[PythonFile | None, bool]:
        """Return the training script that a command starts, and whether it is named there.

        A script that is checked with the file is taken for what its steps start.
        """
        name = PurePath(run.python_script).name
        if name in self.python:
            return self.python[name], True
        alone = list(self.python.values()) if not name and len(self.python) == 1 else []
        return (alone[0], False) if alone and run.step and not run.starts else (None, False)

    def line(self, number: int) -> str:
        """Return a line of the file, joined with those that it is continued on, or continues."""
        lines = self.file.lines
        if not 0 < number <= len(lines):
            return ""
        first = last = number - 1
        while first and _goes_on(lines[first - 1]):
            first -= 1
        while last + 1 < len(lines) and _goes_on(lines[last]):
            last += 1
        return shell.on_one_line("\n".join(lines[first : last + 1]))


def _goes_on(line: str) -> bool:
    return line.endswith("\\") and not line.lstrip().startswith("#")


def _of_task(step: Step, script: Script) -> Iterator[Run]:
    """Yield what each task runs: the step's program, or the commands of its `bash -c`."""
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
    """Yield a command of the batch shell; what it evaluates, too."""
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
    """Return the text that a shell reads from a word of the command, and its line."""
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
            behind = command.words[index + 1]
            return behind.text, behind.line
    return "", 0


def in_loop(command: Command) -> bool:
    """Return whether a command may run more than once, or not at all."""
    return bool(_BEHIND_A_LOOP.intersection(command.inside))


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

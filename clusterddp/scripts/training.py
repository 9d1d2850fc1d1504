"""Finds, in an sbatch file, the command that trains: what each task runs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from clusterddp.errors import RequestError
from clusterddp.request import nested_launcher
from clusterddp.request.nested_launcher import NestedLauncher
from clusterddp.scripts import shell
from clusterddp.scripts.sbatch_file import SbatchFile, Step
from clusterddp.scripts.shell import Assignment, Command, Script, Word, is_known
from clusterddp.slurm import forms

TRAINS = 3
"""Score from which on a command trains rather than prepares."""
_NAMES_OF_STAGES = (
    ": awk sed grep hostname mkdir cp rsync rm tar mv ls cat echo date nvidia-smi ip true"
)
_STAGES = frozenset(_NAMES_OF_STAGES.split())
"""Programs that prepare a job."""
DERIVED = frozenset({*forms.RANK_VARIABLES, "SRUN_CPUS_PER_TASK"})
"""Variables that clusterddp sets for each task, or says itself."""
_OF_THE_SHELL = frozenset({"exec", "command", "time", "eval"})
"""Words ahead of a program that are no program."""

_ENDING = re.compile(r"[ \t]*(&&|;|\n)\s*")


@dataclass(frozen=True)
class Training:
    """The command of the file that trains: a step, or a program of the batch shell."""

    command: Command
    step: Step | None
    program: tuple[Word, ...]
    """Words that each task runs; the one command of `bash -c "…"` by itself."""
    text: str = ""
    """Text of a `bash -c` that has several commands; the program is the one of them that trains."""
    environment: tuple[Assignment, ...] = ()
    """Variables that stand before the program."""

    @property
    def launcher(self) -> NestedLauncher | None:
        launcher = nested_launcher.find(_texts(self.program))
        return None if launcher and self.step and launcher.name == "srun" else launcher

    @property
    def is_of_each_node(self) -> bool:
        """Return whether the file starts it in a loop, for each node."""
        return any(kind in ("for", "while", "until") for kind in self.command.inside)


def find(file: SbatchFile) -> Training:
    """Find the command that trains: one with a launcher, with Python, or any step.

    Of several a name such as train.py counts, then srun; else it is the last one. Raises
    RequestError without any.
    """
    best: tuple[int, bool, bool] = (0, False, False)
    found: tuple[Command, Step | None] | None = None
    for command in file.script.commands:
        value, step = score(file, command)
        is_named = any(re.search(r"train|main|run", text) for text in command.texts[1:])
        if value and best != (value, True, True) and (value, is_named, bool(step)) >= best:
            best, found = (value, is_named, bool(step)), (command, step)
    if found is None:
        raise RequestError(
            f"{file.name or 'the file'} starts nothing that could be a task: no srun, no torchrun, "
            "no Python script. Give the file that has the srun line, or write the submit line "
            "yourself: clusterddp submit [OPTIONS] -- COMMAND [CD0315]"
        )
    command, step = found
    program = _known(step.program) if step else _evaluated(file, command)
    return _unwrapped(file, Training(command, step, program))


def score(file: SbatchFile, command: Command) -> tuple[int, Step | None]:
    """Return how much a command looks like the one that trains, 0 for not at all, and its step."""
    step = next((step for step in file.steps if step.command is command), None)
    texts = _texts(step.program if step else _evaluated(file, command))
    if not texts:
        return 0, step
    launcher = nested_launcher.find(texts)
    if launcher and launcher.name != "srun":
        return TRAINS + (2 if step else 1), step
    program, script = nested_launcher.started(texts)
    name = program.rpartition("/")[2]
    if nested_launcher.is_python(name):
        installs = script.endswith(("get-pip.py", "setup.py")) or {"pip", "venv"} & {*texts}
        runs = bool(script) or (step is not None and bool(nested_launcher.module_of(texts)))
        return (TRAINS if runs and not installs else 0), step
    if step is None:
        runs = any(text.endswith(".py") for text in texts[1:]) and not command.piped
        return int(runs and name not in _STAGES), None
    return (0 if name in _STAGES or not name else 2 if script or "." in name else 1), step


def _texts(words: Iterable[Word]) -> list[str]:
    return [word.text for word in words]


def _known(program: tuple[Word, ...]) -> tuple[Word, ...]:
    """Return a program without options of srun ahead of it that only the batch shell knows."""
    if not program or is_known(program[0].text):
        return program
    for at in range(1, len(program)):
        texts = _texts(program[at:])
        if nested_launcher.is_python(texts[0]) or nested_launcher.find(texts):
            return program[at:]
    return program


def _evaluated(file: SbatchFile, command: Command) -> tuple[Word, ...]:
    """Return the words of a program; behind `eval` those of the text that the shell reads again."""
    words = command.words
    if command.texts[:1] == ("eval",):
        text = " ".join(command.texts[1:])
        inner = shell.read(text, first_line=command.line, outer=file.script)
        words = inner.commands[0].words if inner.commands else ()
    return _without_shells_words(words)


def _without_shells_words(words: tuple[Word, ...]) -> tuple[Word, ...]:
    while words and words[0].text in _OF_THE_SHELL:
        words = words[1:]
    return words


def _unwrapped(file: SbatchFile, training: Training) -> Training:
    """Return the command that `bash -c` runs in place of the shell, where the text tells it."""
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
    """Return a text without the commands in it that set nothing but what clusterddp sets."""
    for command in reversed(script.commands):
        names = {each.name for each in command.assignments}
        if command.texts not in ((), ("export",)) or not names or not names <= DERIVED:
            continue
        before = text[: command.start].rstrip(" \t")
        ending = _ENDING.match(text, command.start + len(command.source))
        is_first = not before or before[-1] in ";\n"
        goes_on = ending and (is_first or (before.endswith("&&") and ending[1] == "&&"))
        if ending and goes_on and not command.inside:
            text = text[: command.start] + text[ending.end() :]
    return text


def _trains(command: Command) -> bool:
    texts = command.texts
    is_python = nested_launcher.is_python(nested_launcher.started(texts)[0])
    return is_python or nested_launcher.find(texts) is not None

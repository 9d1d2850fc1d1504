"""The program that every task of a run runs: the built-in training, or a COMMAND of one's own.

`JobSpec.program` is one of the two. Each answers by itself what the rest asks of it, so that nobody
else has to know which of them it is.
"""

import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from clusterddp.errors import OptionError, RequestError
from clusterddp.request.options import Record
from clusterddp.request.resources import Resources
from clusterddp.request.sweep import NAME, Point, Sweep, shown, variable
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.slurm import forms

if TYPE_CHECKING:
    from clusterddp.request.nested_launcher import NestedLauncher

NO_PREFLIGHT, QUICK, FULL_PREFLIGHT = PREFLIGHTS = ("none", "quick", "full")
"""Checks of a job's nodes; full ones are made inside the built-in training, too."""
Options: TypeAlias = Mapping[str, Any]
"""Values of options, by their parameters."""
Writer: TypeAlias = Callable[[str], str]
"""What makes a word of bash."""
_PLACE = rf"(?:--?[\w-]+=)?\{{({NAME})\}}"
_LIST = "point"
"""Variable of the batch script that holds a point's options of the training."""
_OF_COMMANDS = {
    "report_to": "the training itself logs to --tensorboard and metrics.jsonl",
    "silence": "the training has --watchdog SECONDS",
    "end_silent": "the training has --process-group-timeout SECONDS",
}
"""Fields of a request that the training has no use for, and why."""
_ROWS = {row.name: row for row in TRAINING}
_KEPT = {
    "recipe": "a recipe sets several options; sweep these",
    "init-from": "every point begins at the same checkpoint; submit one sweep for each",
    "data-dir": "every point reads the same folder; submit one sweep for each",
    "find-batch-size": "it trains nothing; run it once, without a sweep",
    "allow-config-change": "it is for resuming a run",
}
"""Options of the training that a sweep cannot vary, and why."""


class _Program(Record):
    """Answers of a program that has no answer of its own."""

    starter = "exec"
    """Command of ours by which a task starts it."""
    resumable: bool | None = None
    """Whether a start is known to go on from what the one before has saved; see `JobSpec`."""
    keeps_records = False
    """Whether its ranks record their steps and their end in any case; else a Loop does."""
    sees_marks = False
    """Whether its ranks see by themselves that they are asked to stop, without a signal."""
    preflights: tuple[str, ...] = (NO_PREFLIGHT, QUICK)
    """Checks of nodes that it can have."""
    refused: Mapping[str, str] = {}
    """Fields of a request for which it has no use, and why."""
    changeable: tuple[str, ...] = ()
    """Fields of a request that `resume` may change for this program alone."""
    rank = "task"
    """Word for a task that has a GPU."""
    again = "start its command again"
    """What a start without a checkpoint does."""
    packages = "os"
    """What the tasks' interpreter has to import."""
    shared_code = ""
    """What is to be known of one copy of the code for all points of a sweep, as a clause."""

    @property
    def options(self) -> Options:
        """Values of the options that are its own, by their parameters."""
        return {}

    def launcher(self) -> "NestedLauncher | None":
        """Return the launcher that every task would start: its ranks would know no others."""
        return None

    def lists_at(self, point: Point) -> dict[str, list[str]]:
        """Return the variables of bash that `words` reads and that are lists, at a point."""
        return {}

    def meant(self, names: Sequence[str], point: Sequence[str]) -> tuple[object, ...]:
        """Return a point's values as the program reads them; raises OptionError for a bad one."""
        return tuple(point)

    def unswept(self, names: Sequence[str]) -> list[str]:
        """Return the words that look like the place of a value, but of no name here."""
        return []

    def trainings(self, sweep: Sweep) -> list[TrainConfig]:
        """Return the trainings that read different files: one, none, or several of a sweep."""
        return []


class BuiltIn(_Program):
    """The built-in training."""

    starter = "train"
    resumable = True
    keeps_records = True
    sees_marks = True
    preflights = PREFLIGHTS
    rank = "GPU rank"
    again = "start again"
    packages = "torch, numpy"
    refused = _OF_COMMANDS

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a JobSpec that hold it."""
        return {"train": self.config}

    @property
    def options(self) -> Options:
        return vars(self.config)

    def check(self, resources: Resources) -> None:
        """Refuse what cannot start on these resources; raises RequestError."""
        self.config.check_ranks(resources)

    def task_options(
        self, swept: Sequence[str], *, lead: int, arms: bool, report_to: str
    ) -> list[str]:
        """Return the options of `starter`, without those that a sweep varies.

        lead: seconds from Slurm's signal to the time limit. arms: take part in `stacks`.
        report_to: trackers, comma-separated.
        """
        argv = self.config.to_argv(defaults=False)
        common = [word for word in argv if word.partition("=")[0][2:] not in swept]
        return [*([f"--signal-lead={lead}"] if lead else []), *common]

    def words(self, swept: Sequence[str], text: Writer, value: Writer) -> list[str]:
        """Return what stands behind those options, as words of bash.

        swept: names that a sweep varies. text: quotes a text. value: reads a variable.
        """
        return [value(f"{_LIST}[@]")] if swept else []

    def lists_at(self, point: Point) -> dict[str, list[str]]:
        names = dict(point)
        argv = self.at(point).config.to_argv()
        return {_LIST: [word for word in argv if word.partition("=")[0][2:] in names]}

    def at(self, point: Point) -> "BuiltIn":
        """Return the program at a point of a sweep. Raises OptionError for a value not valid."""
        values: dict[str, Any] = {_ROWS[name].parameter: _value(name, v) for name, v in point}
        try:
            return BuiltIn(dataclasses.replace(self.config, **values))
        except OptionError as error:
            raise error.saying(f"It is the point {shown(point)} of the sweep.") from None

    def meant(self, names: Sequence[str], point: Sequence[str]) -> tuple[object, ...]:
        return tuple(_value(name, text) for name, text in zip(names, point, strict=True))

    def refuse_names(self, names: Sequence[str], request: set[str]) -> None:
        """Refuse names that a sweep cannot vary; raises OptionError with the reason.

        request: names of the options that decide what Slurm is asked for.
        """
        for name in names:
            if name in _KEPT:
                raise OptionError("--sweep", f" {name}: {_KEPT[name]}.")
            if name in request:
                raise OptionError(
                    "--sweep",
                    f" {name}: a sweep is one job array, whose elements all ask Slurm for the "
                    "same. Submit one sweep for each value.",
                )
            if name not in _ROWS:
                import difflib

                near = difflib.get_close_matches(name, _ROWS, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise OptionError(
                    "--sweep",
                    f" {name}: the training has no such option.{hint} The arguments of a program "
                    "of your own stand behind '--', with {" + name + "} where the value belongs.",
                )

    def trainings(self, sweep: Sweep) -> list[TrainConfig]:
        points = (sweep.point(i) for i in range(len(sweep)))
        each = [self.at(point).config for point in points] or [self.config]
        return [*{(t.model, t.dataset, t.tensorboard): t for t in reversed(each)}.values()][::-1]

    def changed(self, run: str, options: Options, flags: str, typed: Sequence[str]) -> "BuiltIn":
        """Return it with the options, or the COMMAND, that are typed for the run of this name.

        flags: those of the options. Raises RequestError for what belongs to another program.
        """
        if typed:
            raise RequestError(
                f"{shlex.join(typed)} belongs to the run of a COMMAND, but {run} trains "
                "MNIST. [CD0103]"
            )
        return BuiltIn(dataclasses.replace(self.config, **options))

    def beginning(self, step: int | None) -> str:
        """Return a clause on where a start begins. step: of the run's checkpoint, if it has one."""
        if step is not None:
            return f"resumes from step {step}"
        source = self.config.init_from
        return f"starts from {source}" if source else "starts from the beginning"

    def has_own_code(self, sweep: Sweep, tree: Path | None = None) -> bool:
        """Return whether it runs code of a person's own; tree: in this folder."""
        named = [name for each in self.trainings(sweep) for _, name in each.own_functions]
        if tree is None:
            return bool(named)
        from clusterddp.request import user_functions

        files = [user_functions.find(reference, tree) for reference in named]
        return any(file and file.is_relative_to(tree) for file in files)


class Command(_Program):
    """A COMMAND: of a program of one's own nothing is known ahead, but what its words say."""

    changeable = ("command", "environment", "pass_environment", "modules", "setup", "sbatch")
    shared_code = (
        ", one copy for all points: a relative path that the COMMAND writes is the same for all"
    )

    def __init__(self, command: tuple[str, ...]) -> None:
        self.command = command

    @property
    def fields(self) -> dict[str, Any]:
        return {"command": self.command}

    def check(self, resources: Resources) -> None:
        for word in self.command:
            forms.text("COMMAND", word)
        if not self.command[0]:
            raise RequestError("COMMAND is empty; give a program to run after '--'. [CD0306]")

    def launcher(self) -> "NestedLauncher | None":
        from clusterddp.request import nested_launcher  # not needed for a training

        return nested_launcher.find(self.command)

    def task_options(
        self, swept: Sequence[str], *, lead: int, arms: bool, report_to: str
    ) -> list[str]:
        of_stacks = [] if arms else ["--no-stacks"]
        return [*of_stacks, *([f"--report-to={report_to}"] if report_to else []), "--"]

    def words(self, swept: Sequence[str], text: Writer, value: Writer) -> list[str]:
        words = []
        for argument in self.command:
            parts = _places(swept).split(argument) if swept else [argument]
            texts = [text(part) if part else "" for part in parts]  # text, name, text, … text
            texts[1::2] = [value(variable(name)) for name in parts[1::2]]
            words.append("".join(texts) or text(""))
        return words

    def at(self, point: Point) -> "Command":
        values, pattern = dict(point), _places([name for name, _ in point])
        return Command(
            tuple(pattern.sub(lambda brace: values[brace[1]], word) for word in self.command)
        )

    def refuse_names(self, names: Sequence[str], request: set[str]) -> None:
        used = {name for word in self.command for name in _places(names).findall(word)}
        for name in names:
            if name not in used:
                raise OptionError(
                    "--sweep",
                    f" {name}: there is no {{{name}}} in the COMMAND, so every point would run the "
                    f"same. Write it where the value belongs: -- python train.py --{name} "
                    f"{{{name}}}. What is asked of Slurm is the same for all points.",
                )

    def unswept(self, names: Sequence[str]) -> list[str]:
        places = ((word, re.fullmatch(_PLACE, word)) for word in self.command)
        return [word for word, place in places if place and place[1] not in names]

    def changed(self, run: str, options: Options, flags: str, typed: Sequence[str]) -> "Command":
        if flags:
            problem = f" belongs to the MNIST training, but {run} runs a command."
            raise OptionError(flags, problem, code="CD0103")
        return Command(tuple(typed) or self.command)

    def beginning(self, step: int | None) -> str:
        return "starts its command again"

    def has_own_code(self, sweep: Sweep, tree: Path | None = None) -> bool:
        return True


Program: TypeAlias = BuiltIn | Command


def _value(name: str, text: str) -> object:
    try:
        return _ROWS[name].parse(text)
    except OptionError as error:
        problem = str(error).removeprefix(error.option)
        raise OptionError(f"--sweep {name}", problem) from None


def _places(names: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of `{name}` for these names, the name as its group."""
    return re.compile(rf"\{{({'|'.join(map(re.escape, names))})\}}")

"""The program of a run's tasks: the built-in training or the user's COMMAND.

`JobSpec.program` returns either; both have the same interface.
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
from clusterddp.request.sweep import NAME, Sweep, Trial, format_trial, variable
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.slurm import forms

if TYPE_CHECKING:
    from clusterddp.request.nested_launcher import NestedLauncher

NO_PREFLIGHT, QUICK, FULL_PREFLIGHT = PREFLIGHTS = ("none", "quick", "full")
"""Checks of a job's nodes; `full` also measures inside the built-in training."""
REPORT, END = ON_HANG = ("report", "end")
"""What to do with a hang of a COMMAND; `end` ends the job."""
Options: TypeAlias = Mapping[str, Any]
"""Option values by parameter."""
Writer: TypeAlias = Callable[[str], str]
"""Function that returns a bash word."""
_PLACE = rf"(?:--?[\w-]+=)?\{{({NAME})\}}"
_LIST = "trial"
"""Variable of the batch script with a trial's training options."""
_COMMAND_REFUSALS = {
    "report_to": "the training writes metrics.jsonl, and TensorBoard logs with --tensorboard"
}
"""Fields of a request that the training does not use, and why."""
_ROWS = {row.name: row for row in TRAINING}
_KEPT = {
    "recipe": "a recipe sets several options. Sweep those instead",
    "init-from": "all trials start from the same checkpoint. Submit once for each",
    "data-dir": "all trials read the same directory. Submit once for each",
    "find-batch-size": "it does not train. Run it once, without a sweep",
    "allow-config-change": "it applies only to 'clusterddp resume'. Remove it",
}
"""Options of the training that a sweep cannot vary, and why."""
_OF_A_LOOP = ("save_every", "snapshot_every", "keep_last", "log_every")
"""Options of the training that a `Loop`, and `resume` of a framework, have under the same name."""


def where_instead(names: str) -> str:
    """Return where a COMMAND sets these parameters, or flags, of the training."""
    asked = names.replace("--", "").replace("-", "_").split(", ")
    given = ", ".join([f"{name}=…" for name in _OF_A_LOOP if name in asked])
    return f" In the script, use Loop({given}) or resume(…, {given})." if given else ""


class _Program(Record):
    """Defaults for both programs."""

    starter = "exec"
    """clusterddp command with which a task starts it."""
    resumable: bool | None = None
    """True if an attempt is known to resume from the previous one's checkpoint; see `JobSpec`."""
    keeps_records = False
    """True if its ranks always record their steps and their end; otherwise only a Loop does."""
    reads_stop_file = False
    """True if its ranks notice a stop request without a signal."""
    watches_output = True
    """True if a hang is found by the output of its ranks; otherwise by their watchdog."""
    preflights: tuple[str, ...] = (NO_PREFLIGHT, QUICK)
    """Node checks that it supports."""
    refused: Mapping[str, str] = {}
    """Fields of a request that it does not use, and why."""
    changeable: tuple[str, ...] = ()
    """Fields of a request that resume may change only for this program."""
    rank = "task"
    """Term for a task that has a GPU."""
    restart_phrase = "rerun its command"
    """What an attempt without a checkpoint does."""
    packages = "os"
    """Packages that the tasks' interpreter must be able to import."""
    shared_code = ""
    """Clause with a caveat about sharing one code copy between all trials of a sweep."""

    @property
    def options(self) -> Options:
        """Values of the program's options by parameter."""
        return {}

    def hang_timeout(self, resumable: bool | None) -> float:
        """Return the default of --hang-timeout in seconds; 0 is never."""
        return 0.0 if resumable else 1800.0

    def fields_at(self, hang_timeout: float | None) -> dict[str, Any]:
        """Return the fields of a JobSpec that --hang-timeout changes; None if it is not given."""
        return {}

    def launcher(self) -> "NestedLauncher | None":
        """Return the launcher that every task would start, if any."""
        return None

    def arrays_for(self, trial: Trial) -> dict[str, list[str]]:
        """Return the bash arrays that `words` reads, with their values for a trial."""
        return {}

    def parse_values(self, names: Sequence[str], trial: Sequence[str]) -> tuple[object, ...]:
        """Return a trial's values as the program parses them. Raises OptionError."""
        return tuple(trial)

    def unused_placeholders(self, names: Sequence[str]) -> list[str]:
        """Return the words that look like a placeholder but have none of these names."""
        return []

    def trainings(self, sweep: Sweep) -> list[TrainConfig]:
        """Return the trainings that read different files: one, none, or several of a sweep."""
        return []


class BuiltIn(_Program):
    """The built-in training."""

    starter = "train"
    resumable = True
    keeps_records = True
    reads_stop_file = True
    watches_output = False
    preflights = PREFLIGHTS
    rank = "GPU rank"
    restart_phrase = "start again"
    packages = "torch, numpy"
    refused = _COMMAND_REFUSALS

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a JobSpec that contain it."""
        return {"train": self.config}

    @property
    def options(self) -> Options:
        return vars(self.config)

    def hang_timeout(self, resumable: bool | None) -> float:
        return TrainConfig.hang_timeout

    def fields_at(self, hang_timeout: float | None) -> dict[str, Any]:
        if hang_timeout is None:
            return {"hang_timeout": self.config.hang_timeout}
        return {"train": dataclasses.replace(self.config, hang_timeout=hang_timeout)}

    def check(self, resources: Resources) -> None:
        """Raise RequestError if it cannot run on these resources."""
        self.config.check_ranks(resources)

    def task_options(
        self, swept: Sequence[str], *, lead: int, arms: bool, report_to: str
    ) -> list[str]:
        """Return the options of `starter`, without those that a sweep varies.

        lead: seconds from Slurm's signal to the time limit. arms: support `clusterddp stacks`.
        report_to: trackers, comma-separated.
        """
        argv = self.config.to_argv(defaults=False)
        common = [word for word in argv if word.partition("=")[0][2:] not in swept]
        return [*([f"--signal-lead={lead}"] if lead else []), *common]

    def words(self, swept: Sequence[str], text: Writer, value: Writer) -> list[str]:
        """Return the arguments after those options as bash words.

        swept: names that a sweep varies. text: quotes a text. value: reads a variable.
        """
        return [value(f"{_LIST}[@]")] if swept else []

    def arrays_for(self, trial: Trial) -> dict[str, list[str]]:
        names = dict(trial)
        argv = self.for_trial(trial).config.to_argv()
        return {_LIST: [word for word in argv if word.partition("=")[0][2:] in names]}

    def for_trial(self, trial: Trial) -> "BuiltIn":
        """Return the program of a trial. Raises OptionError for an invalid value."""
        values: dict[str, Any] = {_ROWS[name].parameter: _value(name, v) for name, v in trial}
        try:
            return BuiltIn(dataclasses.replace(self.config, **values))
        except OptionError as error:
            raise error.saying(f"This is the trial {format_trial(trial)}.") from None

    def parse_values(self, names: Sequence[str], trial: Sequence[str]) -> tuple[object, ...]:
        return tuple(_value(name, text) for name, text in zip(names, trial, strict=True))

    def refuse_names(self, names: Sequence[str], request: set[str]) -> None:
        """Raise OptionError for a name that a sweep cannot vary.

        request: names of the options that affect what is requested from Slurm.
        """
        for name in names:
            if name in _KEPT:
                raise OptionError("--sweep", f" {name}: {_KEPT[name]}.")
            if name in request:
                raise _shared_option(name)
            if name not in _ROWS:
                import difflib

                near = difflib.get_close_matches(name, _ROWS, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise OptionError(
                    "--sweep",
                    f" {name}: the training has no such option.{hint} To sweep an argument of your "
                    "program, put its command after '--', with {" + name + "} for the value.",
                )

    def trainings(self, sweep: Sweep) -> list[TrainConfig]:
        trials = (sweep.trial(i) for i in range(len(sweep)))
        each = [self.for_trial(trial).config for trial in trials] or [self.config]
        return [*{(t.model, t.dataset, t.tensorboard): t for t in reversed(each)}.values()][::-1]

    def changed(self, run: str, options: Options, flags: str, typed: Sequence[str]) -> "BuiltIn":
        """Return the program of the run `run` with the typed options or COMMAND.

        flags: the typed options. Raises RequestError if they do not apply to this program.
        """
        if typed:
            raise RequestError(
                f"COMMAND {shlex.join(typed)} cannot be given: {run} runs the built-in "
                "training. [CD0103]"
            )
        return BuiltIn(dataclasses.replace(self.config, **options))

    def beginning(self, step: int | None) -> str:
        """Return a clause that says where an attempt starts; step: of the checkpoint, if any."""
        if step is not None:
            return f"resumes from step {step}"
        source = self.config.init_from
        return f"starts from {source}" if source else "starts from the beginning"

    def has_own_code(self, sweep: Sweep, tree: Path | None = None) -> bool:
        """Return whether it runs the user's code; tree: only code in this directory counts."""
        named = [name for each in self.trainings(sweep) for _, name in each.user_functions]
        if tree is None:
            return bool(named)
        from clusterddp.request import user_functions

        files = [user_functions.find(reference, tree) for reference in named]
        return any(file and file.is_relative_to(tree) for file in files)


class Command(_Program):
    """The user's COMMAND, about which only its words are known."""

    changeable = ("command", "environment", "pass_environment", "modules", "setup", "sbatch")
    shared_code = (
        ": one copy for all trials, which overwrite each other's files at relative paths, unless a "
        "{name} of the sweep is in the path"
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
            raise RequestError("COMMAND is empty. Put a program to run after '--'. [CD0306]")

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

    def for_trial(self, trial: Trial) -> "Command":
        values, pattern = dict(trial), _places([name for name, _ in trial])
        return Command(
            tuple(pattern.sub(lambda brace: values[brace[1]], word) for word in self.command)
        )

    def refuse_names(self, names: Sequence[str], request: set[str]) -> None:
        used = {name for word in self.command for name in _places(names).findall(word)}
        for name in names:
            if name not in used and name in request:
                raise _shared_option(name)
            if name not in used:
                found = self.unused_placeholders(names)
                but = f" but {', '.join(found)}" if found else ""
                raise OptionError(
                    "--sweep",
                    f" {name}: the COMMAND does not contain {{{name}}}{but}, so all trials would "
                    f"be the same. Write it for the value: -- python train.py --{name} {{{name}}}",
                )

    def unused_placeholders(self, names: Sequence[str]) -> list[str]:
        places = ((word, re.fullmatch(_PLACE, word)) for word in self.command)
        return [word for word, place in places if place and place[1] not in names]

    def changed(self, run: str, options: Options, flags: str, typed: Sequence[str]) -> "Command":
        if flags:
            problem = f" applies only to the built-in training, but {run} runs a command."
            raise OptionError(flags, problem + where_instead(flags), code="CD0103")
        return Command(tuple(typed) or self.command)

    def beginning(self, step: int | None) -> str:
        return "reruns its command" + ("" if step is None else f", which resumes from step {step}")

    def has_own_code(self, sweep: Sweep, tree: Path | None = None) -> bool:
        return True


Program: TypeAlias = BuiltIn | Command


def _shared_option(name: str) -> OptionError:
    return OptionError(
        "--sweep",
        f" {name}: all trials are tasks of one job array, so they share --{name}. Submit once for "
        "each value.",
    )


def _value(name: str, text: str) -> object:
    try:
        return _ROWS[name].parse(text)
    except OptionError as error:
        raise OptionError(f"--sweep {name}", str(error).removeprefix(error.option)) from None


def _places(names: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of `{name}` for these names, with the name as a group."""
    return re.compile(rf"\{{({'|'.join(map(re.escape, names))})\}}")

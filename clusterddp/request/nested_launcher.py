"""Detection of a launcher in a COMMAND: a program that would start further ranks in every task.

The tasks are already ranks. `torchrun train.py` in each of eight tasks trains eight independent
copies, and each reports success. The COMMAND is only parsed, never run or expanded.
"""

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

_MAX_SCRIPT_BYTES = 65_536
_MAX_WORD_CHARACTERS = 4096
"""Longest shell word that is unquoted: unquoting takes quadratic time."""

AGENTS = frozenset({"torchrun", "torch.distributed.launch"})
"""Launchers that start torchrun's agents, as the template `torchrun.sbatch.j2` does."""
START_PYTHON = AGENTS | {"accelerate launch", "accelerate-launch"}
"""Launchers that start the ranks of a node as Python processes."""
_ONLY_NAMED = frozenset(
    {
        *("deepspeed", "horovodrun", "composer", "fabric run", "lightning run", "tune run"),
        "colossalai run",
        *("sbatch", "salloc"),  # each task would submit another job
        *("trl sft", "trl dpo", "trl grpo", "trl kto", "trl reward", "trl rloo"),
        *("llamafactory-cli train", "axolotl train"),
    }
)
"""Launchers whose options are not parsed, so their program is not identified."""
_START_ANYTHING = "srun mpirun mpiexec mpiexec.hydra mpirun.openmpi orterun prterun"
_LAUNCHERS = START_PYTHON.union(_START_ANYTHING.split(), _ONLY_NAMED)
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "composer.cli.launcher": "composer",
    "deepspeed.launcher.runner": "deepspeed",
}

_CONTAINER = ("-B --bind --env --env-file -H --home --pwd -W --workdir", 1)
_WRAPPERS = {
    "apptainer exec": _CONTAINER,
    "singularity exec": _CONTAINER,
    "uv run": ("--with --extra --group --python -p --env-file --directory", 0),
    "command": ("", 0),
    "env": ("-u --unset -C --chdir", 0),
    "exec": ("-a", 0),
    "nice": ("-n --adjustment", 0),
    "nohup": ("", 0),
    "time": ("-f -o --format --output", 0),
    "timeout": ("-k -s --kill-after --signal", 1),
}
"""Programs that run the program after their options: the options whose value is the next word, and
the number of the wrapper's own operands between its options and that program."""

BRING_PROGRAMS = frozenset({"apptainer", "singularity", "uv"})
"""Wrappers that start a program from an image or an environment."""
SHELLS = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
_BEFORE_A_COMMAND = re.compile(
    r"[A-Za-z_]\w*\+?=|(!|\{|do|elif|else|if|then|until|while)\Z"
)  # an assignment or a shell keyword
_PYTHON = re.compile(r"python[0-9.]*t?")
_PYTHON_OPTION = re.compile(r"-([^cmWX]*)([cmWX]?)(.*)", re.DOTALL)
_SHEBANG_OF_A_SHELL = re.compile(rf"#!.*\b({'|'.join(sorted(SHELLS))})\b")


@dataclass(frozen=True)
class NestedLauncher:
    """A launcher that a COMMAND starts, and the same COMMAND without it."""

    name: str
    """Usual name: `torchrun`, `accelerate launch`."""
    command: tuple[str, ...]
    first: int
    last: int
    """The launcher and its options are `command[first:last]`."""
    head: tuple[str, ...] | None
    """Words that replace them; None if the launched program was not identified."""
    adds_local_rank: bool = False
    """True if it passes --local-rank to its program, which our tasks do not get."""

    @property
    def options(self) -> Iterator[tuple[str, str]]:
        """Yield its options, with inner dashes rather than underscores, and their values."""
        words = self.command[self.first : self.last]
        at = len(self.name.split())
        if is_python(words[0]):  # skips Python's own options
            at = words.index("-m") + 2 if "-m" in words else at + 1
        while at < len(words):
            word = words[at]
            at += 1
            if not word.startswith("-") or word == "--":
                continue
            name, equals, value = word.lstrip("-").partition("=")
            if not equals and at < len(words) and not words[at].startswith("-"):
                value = words[at]
                at += 1
            yield name.replace("_", "-"), value

    @property
    def instead(self) -> tuple[str, ...] | None:
        """COMMAND without the launcher; None if its program was not identified."""
        if self.head is None:
            return None
        return (*self.command[: self.first], *self.head, *self.command[self.last :])


@dataclass(frozen=True)
class LauncherInScript:
    """A line of a shell script that appears to start a launcher."""

    script: str
    line: int
    name: str


def find(words: Sequence[str], *, in_shell: bool = False) -> NestedLauncher | None:
    """Return the launcher that a command starts directly, through env, nice …, or by `bash -c`.

    in_shell: assignments and shell keywords may precede it.
    """
    at = program_index(words, in_shell=in_shell)
    if at >= len(words):
        return None
    name = PurePath(words[at]).name
    if name == "-S":  # env -S
        return _in_string(words, at + 1)
    if name in SHELLS:
        return _in_string(words, _shell_operand(words, at)[0])
    if is_python(name):
        return _of_python(words, at)
    launcher, begin = _named(words, at, _LAUNCHERS)
    # An absolute torchrun has its interpreter in the same directory.
    python = str(PurePath(words[at]).parent / "python")
    return _launched(launcher, words, at, begin, (python,)) if launcher else None


def in_script(command: Sequence[str], folder: Path) -> LauncherInScript | None:
    """Return the first launcher in the shell script that `command` starts in `folder`, or None.

    The first 64 KiB are read. The line may be conditional, so the launcher may never be started.
    """
    name, is_shell = _script(command)
    if not name:
        return None
    try:
        here = "/" in name or (is_shell and (folder / name).is_file())
        path = folder / name if here else shutil.which(name)
        if path is None or not Path(path).is_file():
            return None
        with Path(path).open("rb") as file:
            text = file.read(_MAX_SCRIPT_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None  # the task itself will report it
    if not is_shell and not _SHEBANG_OF_A_SHELL.match(text):
        return None
    for words, starts in _shell_commands(text):
        launcher = find(words, in_shell=True)
        if launcher:
            line = text.count("\n", 0, starts[launcher.first]) + 1
            return LauncherInScript(name, line, launcher.name)
    return None


def started(command: Sequence[str]) -> tuple[str, str]:
    """Return the program that a command starts, after env, nice …, and its script.

    The script is the file that Python or a shell runs; otherwise empty.
    """
    at = program_index(command)
    if at >= len(command) or command[at].startswith("-"):
        return "", ""
    if is_python(command[at]):
        index = at + 1
        while index < len(command) and (option := _PYTHON_OPTION.fullmatch(command[index])):
            _, letter, value = option.groups()
            if (letter and letter in "cm") or command[index] == "-":
                return command[at], ""
            index += 2 if letter and not value else 1
        return command[at], "".join(command[index : index + 1])
    if PurePath(command[at]).name in SHELLS:
        script, is_shell = _script(command)
        return command[at], script if is_shell else ""
    return command[at], ""


def is_python(program: str) -> bool:
    """Return whether a program's name is Python's."""
    return _PYTHON.fullmatch(PurePath(program).name) is not None


def module_of(command: Sequence[str]) -> str:
    """Return the module that a command's Python runs (`-m`, `-um`), or empty."""
    index = program_index(command) + 1
    while index < len(command) and (option := _PYTHON_OPTION.fullmatch(command[index])):
        _, letter, value = option.groups()
        if letter and letter in "cm":
            return (value or "".join(command[index + 1 : index + 2])) if letter == "m" else ""
        index += 2 if letter and not value else 1
    return ""


def _script(command: Sequence[str]) -> tuple[str, bool]:
    """Return the file that the command starts, and whether a shell is sure to read it."""
    at = program_index(command, in_shell=False)
    if at >= len(command) or PurePath(command[at]).name not in SHELLS:
        return "".join(command[at : at + 1]), False
    string, script = _shell_operand(command, at)
    return "" if string else "".join(command[script : script + 1]), True


def _named(words: Sequence[str], at: int, names: frozenset[str]) -> tuple[str, int]:
    """Return which of the names is at index `at`, or empty, and the index after it."""
    name = PurePath(words[at]).name if at < len(words) else ""
    both = " ".join((name, *words[at + 1 : at + 2]))
    return (name, at + 1) if name in names else (both if both in names else "", at + 2)


def program_index(words: Sequence[str], *, in_shell: bool = False) -> int:
    """Return the index of the program's name, after assignments and wrappers.

    If env splits a string, it is the index of the option `-S`.
    """
    at = 0
    while at < len(words):
        while at < len(words) and in_shell and _BEFORE_A_COMMAND.match(words[at]):
            at += 1
        wrapper, following = _named(words, at, frozenset(_WRAPPERS))
        if not wrapper:
            break
        valued, operands = _WRAPPERS[wrapper]
        at = following
        while at < len(words) and words[at].startswith("-"):
            if words[at] == "-S":
                return at
            at += 2 if words[at] in valued.split() else 1
        while wrapper == "env" and at < len(words) and "=" in words[at]:
            at += 1
        at += operands
    return at


def _shell_operand(words: Sequence[str], at: int) -> tuple[int, int]:
    """Return the index of a shell's `-c` string, or 0, and of its first operand."""
    string, index = False, at + 1
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        string = string or ("c" in word and not word.startswith("--"))
        index += 2 if word[-1] in "oO" else 1
    return (index if string and index < len(words) else 0), index


def _in_string(words: Sequence[str], index: int) -> NestedLauncher | None:
    """Return the launcher in a word that a shell parses as a command line; index 0 means none."""
    text = words[index] if 0 < index < len(words) else ""
    for inner, starts in _shell_commands(text):
        launcher = find(inner, in_shell=True)
        if launcher is None:
            continue
        line = None
        if launcher.head is not None:  # the rest of the string keeps its quotes
            rest = text[starts[launcher.last] :] if launcher.last < len(starts) else ""
            line = (text[: starts[launcher.first]] + f"{shlex.join(launcher.head)} {rest}".strip(),)
        return replace(launcher, command=tuple(words), first=index, last=index + 1, head=line)
    return None


def _of_python(words: Sequence[str], at: int) -> NestedLauncher | None:
    """Return the launcher that Python runs as a module (`-m`) or as a script."""
    index = at + 1
    while index < len(words) and (option := _PYTHON_OPTION.fullmatch(words[index])):
        flags, letter, value = option.groups()
        kept = (*words[at:index], *([f"-{flags}"] if flags else []))  # `-um`: the u stays
        index += 1
        if letter and not value:
            value = "".join(words[index : index + 1])
            index += 1
        if letter == "m" and value in _MODULES:
            return _launched(_MODULES[value], words, at, index, kept)
        is_fabric = letter == "m" and value in ("lightning.fabric", "lightning_fabric")
        if is_fabric and [*words[index : index + 1]] == ["run"]:
            return _launched("fabric run", words, at, index + 1, kept)
        if letter and letter in "cm":
            return None
    launcher, begin = _named(words, index, START_PYTHON)
    return _launched(launcher, words, at, begin, tuple(words[at:index])) if launcher else None


def _launched(
    name: str, words: Sequence[str], first: int, begin: int, python: tuple[str, ...]
) -> NestedLauncher:
    """Parse the launcher's options up to its program, which `python` may have to run.

    A word after an option is its value unless it must be a program. If it remains ambiguous which
    word is the program, none is identified.
    """
    head = python if name in START_PYTHON else ()
    at, doubt = begin, False
    while at < len(words) and words[at].startswith("-"):
        option, doubt = words[at].replace("_", "-"), False
        at += 1
        if option == "--":
            break
        if option == "--no-python":
            head = ()
        elif head and option in ("-m", "--module"):
            head = (*python, "-m")
        elif "=" in option or option[-1].isdigit() or at >= len(words):
            continue
        elif not words[at].startswith("-") and not _must_be_program(words[at], head):
            doubt = not words[at].isdecimal()
            at += 1
    # After a colon, mpirun takes another program with its options.
    known = name not in _ONLY_NAMED and at < len(words) and ":" not in words[at:]
    if doubt and known:
        known = _must_be_program(words[at], head)
    options = {word.replace("_", "-") for word in words[begin:at]}
    adds = name == "torch.distributed.launch" and "--use-env" not in options
    return NestedLauncher(name, tuple(words), first, at, head if known else None, adds)


def _must_be_program(word: str, head: tuple[str, ...]) -> bool:
    name = PurePath(word).name
    if head:
        return name.endswith(".py")
    return bool(_PYTHON.fullmatch(name)) or name in SHELLS or name in _WRAPPERS


_SHELL_PARTS = re.compile(
    r"""(?P<skip>\\\n|(?<!\S)\#[^\n]*)
    |(?P<end>[;&|()\n`]+)
    |(?P<word>(?:[^\s;&|()`<>"'\\]|\\.|'[^']*'|"(?:[^"\\]|\\.|\\\n)*")+)""",
    re.VERBOSE,
)


def _shell_commands(text: str) -> Iterator[tuple[list[str], list[int]]]:
    """Yield each simple command of shell text: its words without quotes, and their offsets.

    Nothing is expanded, and malformed shell text is skipped.
    """
    words: list[str] = []
    starts: list[int] = []
    for part in _SHELL_PARTS.finditer(text):
        if part["word"]:
            words.append(_unquoted(part["word"]))
            starts.append(part.start())
        elif part["end"] and words:
            yield words, starts
            words, starts = [], []
    if words:
        yield words, starts


def _unquoted(word: str) -> str:
    if len(word) > _MAX_WORD_CHARACTERS:
        return word
    try:
        return "".join(shlex.split(word, comments=False))
    except ValueError:
        return word

"""Finds a launcher in a COMMAND: a program that would start ranks of its own inside every task.

The tasks are ranks already. `torchrun train.py` on each of eight tasks trains eight independent
copies, each of which reports success. The COMMAND is only read, never run or expanded.
"""

import dataclasses
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

_MOST_SCRIPT_BYTES = 1_000_000
_SHELLS = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
_SHELL_KEYWORDS = frozenset({"!", "{", "do", "elif", "else", "if", "then", "until", "while"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_PYTHON = re.compile(r"python[0-9.]*t?")
_SHEBANG_OF_A_SHELL = re.compile(rf"#!.*\b({'|'.join(sorted(_SHELLS))})\b")


@dataclass(frozen=True)
class NestedLauncher:
    """A launcher that a COMMAND starts, and the same COMMAND without it."""

    name: str
    """As people call it: `torchrun`, `accelerate launch`."""
    instead: tuple[str, ...] | None
    """The COMMAND with the launcher taken out; None where its program was not made out."""
    agents: bool
    """It starts torchrun's agents, as the template `torchrun.sbatch.j2` does."""
    adds_local_rank: bool
    """It gives its program an argument, --local-rank, which no task of ours gets."""
    nodes: int | None = None
    tasks_per_node: int | None = None
    tasks: int | None = None
    """Counts that it was given, where they are plain numbers."""


@dataclass(frozen=True)
class LauncherInScript:
    """A line of a shell script that starts a launcher, as far as reading it can tell."""

    script: str
    line: int
    name: str


def find(command: Sequence[str]) -> NestedLauncher | None:
    """The launcher that `command` starts: by itself, behind env, nice …, or through `bash -c`."""
    found = _find(list(command), in_shell=False)
    if found is None:
        return None
    instead = None
    if found.words is not None:
        instead = (*command[: found.first], *found.words, *command[found.last :])
    return NestedLauncher(
        name=found.launcher.name,
        instead=instead,
        agents=found.launcher.agents,
        adds_local_rank=found.adds_local_rank,
        nodes=found.counts.get("nodes"),
        tasks_per_node=found.counts.get("tasks_per_node"),
        tasks=found.counts.get("tasks"),
    )


def in_script(command: Sequence[str], folder: Path) -> LauncherInScript | None:
    """The first launcher in the shell script that `command` starts in `folder`; None without one.

    A line may stand behind a condition or a variable, so what is found is no proof.
    """
    name, is_shell = _script(list(command))
    if not name:
        return None
    try:
        here = "/" in name or (is_shell and (folder / name).is_file())
        path = folder / name if here else shutil.which(name)
        if path is None or not Path(path).is_file():
            return None
        with Path(path).open("rb") as file:
            text = file.read(_MOST_SCRIPT_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None  # whoever starts it will hear of that
    if not is_shell and not _SHEBANG_OF_A_SHELL.match(text):
        return None
    for words, spans in _shell_commands(text):
        found = _find(words, in_shell=True)
        if found:
            line = text.count("\n", 0, spans[found.first][0]) + 1
            return LauncherInScript(name, line, found.launcher.name)
    return None


@dataclass(frozen=True)
class _Launcher:
    """A launcher's command line, as far as it takes to find the program behind its options."""

    name: str
    flags: frozenset[str] = frozenset()
    """Options without a value, by their long or short names without dashes."""
    pairs: frozenset[str] = frozenset()
    """Options with two values."""
    counts: dict[str, str] = field(default_factory=dict)
    """Its options for counts, each with the field of NestedLauncher that it is."""
    subcommand: str = ""
    starts_python: bool = False
    """Its program is a Python file, unless it is told otherwise."""
    agents: bool = False
    adds_local_rank: bool = False
    attached: bool = False
    """A letter can be followed by its value at once, as in `-n4`."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TORCHRUN = _Launcher(
    "torchrun",
    flags=_names("h help m module no-python run-path standalone use-env virtual-local-rank"),
    counts={"nnodes": "nodes", "nproc-per-node": "tasks_per_node"},
    starts_python=True,
    agents=True,
)
_TORCH_LAUNCH = dataclasses.replace(
    _TORCHRUN, name="torch.distributed.launch", adds_local_rank=True
)
_ACCELERATE = _Launcher(
    "accelerate launch",
    flags=_names(
        "h help m module no-python cpu debug downcast-bf16 enable-cpu-affinity ipex multi-gpu "
        "no-tpu-cluster q quiet same-network tpu tpu-cluster use-deepspeed use-fsdp "
        "use-megatron-lm use-mps-device use-xpu"
    ),
    counts={"num-machines": "nodes", "num-processes": "tasks"},
    subcommand="launch",
    starts_python=True,
)
_DEEPSPEED = _Launcher(
    "deepspeed",
    flags=_names(
        "h help module no-python no-local-rank no-ssh no-ssh-check force-multi save-pid "
        "bind-cores-to-rank elastic-training"
    ),
    counts={"num-nodes": "nodes", "num-gpus": "tasks_per_node"},
    starts_python=True,
    adds_local_rank=True,
)
_HOROVOD = _Launcher(
    "horovodrun", _names("gloo h help mpi verbose"), counts={"np": "tasks", "n": "tasks"}
)
_SRUN = _Launcher(
    "srun",
    flags=_names(
        "E K O Q Z contiguous disable-status exact exclusive h help k kill-on-bad-exit l label "
        "multi-prog no-kill overcommit overlap oversubscribe preserve-env pty quiet s spread-job "
        "u unbuffered use-min-nodes v verbose"
    ),
    counts={
        "N": "nodes",
        "nodes": "nodes",
        "n": "tasks",
        "ntasks": "tasks",
        "ntasks-per-node": "tasks_per_node",
    },
    attached=True,
)
_MPI = _Launcher(
    "mpirun",
    flags=_names(
        "h help allow-run-as-root bynode bysocket bind-to-core display-map l nolocal oversubscribe "
        "q quiet report-bindings tag-output use-hwthread-cpus v verbose"
    ),
    pairs=_names("mca gmca genv env"),
    counts={"np": "tasks", "n": "tasks", "ppn": "tasks_per_node"},
)
_PROGRAMS = {
    "torchrun": _TORCHRUN,
    "accelerate": _ACCELERATE,
    "deepspeed": _DEEPSPEED,
    "horovodrun": _HOROVOD,
    "srun": _SRUN,
    **{
        name: dataclasses.replace(_MPI, name=name)
        for name in _names(
            "mpirun mpirun.mpich mpirun.openmpi mpiexec mpiexec.hydra mpiexec.mpich "
            "mpiexec.openmpi orterun prterun"
        )
    },
}
_MODULES = {
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCH_LAUNCH,
    "accelerate.commands.launch": _ACCELERATE,
    "deepspeed": _DEEPSPEED,
    "deepspeed.launcher.runner": _DEEPSPEED,
}


@dataclass(frozen=True)
class _Wrapper:
    """A program that becomes, or starts, the one behind its own options."""

    valued: frozenset[str] = frozenset()
    """Options whose value is the next word."""
    operands: int = 0
    """Words of its own between the options and the program."""
    subcommand: str = ""


def _wrapper(valued: str = "", operands: int = 0, subcommand: str = "") -> _Wrapper:
    return _Wrapper(frozenset(valued.split()), operands, subcommand)


_CONTAINER = _wrapper(
    "-B --bind --env --env-file -H --home --overlay --pwd -W --workdir", 1, "exec"
)
_CONDA = _wrapper("-n --name -p --prefix --cwd", 0, "run")
_WRAPPERS = {
    "apptainer": _CONTAINER,
    "singularity": _CONTAINER,
    "conda": _CONDA,
    "mamba": _CONDA,
    "micromamba": _CONDA,
    "uv": _wrapper("--with --extra --group --python -p --env-file --directory", 0, "run"),
    "poetry": _wrapper(subcommand="run"),
    "chrt": _wrapper(operands=1),
    "command": _wrapper(),
    "env": _wrapper("-u --unset -C --chdir"),
    "exec": _wrapper("-a"),
    "ionice": _wrapper("-c -n --class --classdata"),
    "nice": _wrapper("-n --adjustment"),
    "nohup": _wrapper(),
    "numactl": _wrapper("-C -N -m -p -i --cpunodebind --membind --physcpubind --preferred"),
    "setsid": _wrapper(),
    "stdbuf": _wrapper("-i -o -e --input --output --error"),
    "taskset": _wrapper(operands=1),
    "time": _wrapper("-f -o --format --output"),
    "timeout": _wrapper("-k -s --kill-after --signal", 1),
}


@dataclass(frozen=True)
class _Found:
    """A launcher among words; `words` replace those from `first` to before `last`."""

    launcher: _Launcher
    first: int
    last: int
    words: tuple[str, ...] | None
    counts: dict[str, int]
    adds_local_rank: bool


def _find(words: list[str], *, in_shell: bool) -> _Found | None:
    at = _at_program(words, in_shell=in_shell)
    if at >= len(words):
        return None
    name = PurePath(words[at]).name
    if name == "env" and "-S" in words[at + 1 : at + 2]:
        return _in_string(words, at + 2)
    if name in _SHELLS:
        string = _shell_operand(words, at)[0]
        return _in_string(words, string) if string else None
    if _PYTHON.fullmatch(name):
        return _of_python(words, at)
    launcher = _PROGRAMS.get(name)
    if launcher is None:
        return None
    begin = at + 1
    if launcher.subcommand:
        if words[begin : begin + 1] != [launcher.subcommand]:
            return None
        begin += 1
    # An absolute torchrun has its interpreter beside it.
    python = str(PurePath(words[at]).parent / "python")
    return _options(launcher, words, at, begin, (python,))


def _script(command: list[str]) -> tuple[str, bool]:
    """The file that the command starts, and whether a shell reads it whatever its first line."""
    at = _at_program(command, in_shell=False)
    if at >= len(command) or PurePath(command[at]).name not in _SHELLS:
        return "".join(command[at : at + 1]), False
    string, script = _shell_operand(command, at)
    return "" if string else "".join(command[script : script + 1]), True


def _at_program(words: list[str], *, in_shell: bool) -> int:
    """The index of the word that names the program, behind assignments and wrappers."""
    at = 0
    while at < len(words):
        while in_shell and at < len(words):
            if words[at] not in _SHELL_KEYWORDS and not _ASSIGNMENT.match(words[at]):
                break
            at += 1
        if at >= len(words):
            break
        name = PurePath(words[at]).name
        wrapper = _WRAPPERS.get(name)
        if wrapper is None or (name == "env" and words[at + 1 : at + 2] == ["-S"]):
            break
        if wrapper.subcommand and words[at + 1 : at + 2] != [wrapper.subcommand]:
            break
        at += 2 if wrapper.subcommand else 1
        while at < len(words) and words[at].startswith("-"):
            option = words[at]
            at += 2 if option in wrapper.valued else 1
            if option == "--":
                break
        while name == "env" and at < len(words) and "=" in words[at]:
            at += 1
        at += wrapper.operands
    return at


def _shell_operand(words: list[str], at: int) -> tuple[int, int]:
    """The index of a shell's `-c` string, or 0, and that of its first operand."""
    string, index = False, at + 1
    while index < len(words) and words[index][:1] in ("-", "+") and len(words[index]) > 1:
        word = words[index]
        index += 1
        if word == "--":
            break
        if word.startswith("--"):
            index += word in ("--rcfile", "--init-file")
            continue
        string = string or (word.startswith("-") and "c" in word)
        index += word[-1] in "oO"
    return (index if string and index < len(words) else 0), index


def _in_string(words: list[str], index: int) -> _Found | None:
    """The launcher in a word that a shell reads as a line of its own."""
    if index >= len(words):
        return None
    text = words[index]
    for inner, spans in _shell_commands(text):
        found = _find(inner, in_shell=True)
        if found is None:
            continue
        line = None
        if found.words is not None:  # the rest of the string stays as it is, quotes and all
            rest = text[spans[found.last][0] :] if found.last < len(spans) else ""
            line = (
                text[: spans[found.first][0]] + " ".join((shlex.join(found.words), rest)).strip(),
            )
        return dataclasses.replace(found, first=index, last=index + 1, words=line)
    return None


def _of_python(words: list[str], at: int) -> _Found | None:
    """A launcher that Python runs as a module (`-m`), or by the path of its script."""
    index = at + 1
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        word = words[index]
        if word.startswith("--"):
            index += 2 if word == "--check-hash-based-pycs" else 1
            continue
        letter = re.search("[cmWX]", word)  # each takes the rest of its word, or the next one
        if letter is None:
            index += 1
            continue
        value = word[letter.end() :] or "".join(words[index + 1 : index + 2])
        behind = index + (1 if word[letter.end() :] else 2)
        if letter[0] == "c":
            return None
        if letter[0] == "m":
            flags = word[: letter.start()]  # `-um`: the u stays
            kept = (*words[at:index], *([flags] if flags != "-" else []))
            return _of_module(value, words, at, behind, kept)
        index = behind
    script = PurePath(words[index]).name if index < len(words) else ""
    launcher = _PROGRAMS.get(script)
    if launcher is None or not launcher.starts_python:
        return None
    if launcher.subcommand and words[index + 1 : index + 2] != [launcher.subcommand]:
        return None
    begin = index + (2 if launcher.subcommand else 1)
    return _options(launcher, words, at, begin, tuple(words[at:index]))


def _of_module(
    module: str, words: list[str], at: int, begin: int, python: tuple[str, ...]
) -> _Found | None:
    if module == "accelerate.commands.accelerate_cli" and words[begin : begin + 1] == ["launch"]:
        module, begin = "accelerate.commands.launch", begin + 1
    launcher = _MODULES.get(module)
    return _options(launcher, words, at, begin, python) if launcher else None


def _options(
    launcher: _Launcher, words: list[str], at: int, begin: int, python: tuple[str, ...]
) -> _Found:
    """Read the launcher's options up to its program, which `python` runs where that is its way."""
    given: dict[str, str] = {}
    flags: set[str] = set()
    index = begin
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        word = words[index]
        index += 1
        if word == "--":
            break
        name, equals, value = word.lstrip("-").replace("_", "-").partition("=")
        if launcher.attached and not word.startswith("--") and len(word) > 2:
            given[word[1]] = word[2:].removeprefix("=")
        elif equals:
            given[name] = value
        elif name in launcher.pairs:
            index += 2
        elif name in launcher.flags:
            flags.add(name)
        elif index < len(words) and not _looks_like_a_program(words[index]):
            given[name] = words[index]
            index += 1
    counts = {
        wanted: int(given[name])
        for name, wanted in launcher.counts.items()
        if given.get(name, "").isascii() and given.get(name, "").isdigit() and len(given[name]) < 7
    }
    head = (*python, "-m") if flags & {"m", "module"} else python
    if not launcher.starts_python or "no-python" in flags:
        head = ()
    # Behind a colon mpirun takes another program, with options of its own.
    whole = index < len(words) and ":" not in words[index:]
    adds = launcher.adds_local_rank and not flags & {"use-env", "no-local-rank"}
    return _Found(launcher, at, index, head if whole else None, counts, adds)


def _looks_like_a_program(word: str) -> bool:
    name = PurePath(word).name
    return bool(_PYTHON.fullmatch(name)) or name in _SHELLS or name.endswith((".py", ".sh"))


_SHELL_PARTS = re.compile(
    r"""(?P<skip>\\\n|(?<!\S)\#[^\n]*)
    |(?P<end>[;&|()\n`]+)
    |(?P<word>(?:[^\s;&|()`<>"'\\]|\\.|'[^']*'|"(?:[^"\\]|\\.|\\\n)*")+)""",
    re.VERBOSE,
)


def _shell_commands(text: str) -> Iterator[tuple[list[str], list[tuple[int, int]]]]:
    """Each simple command of shell text: its words without quotes, and where each of them stands.

    Nothing is expanded, and what is no well-formed shell is passed over.
    """
    words: list[str] = []
    spans: list[tuple[int, int]] = []
    for part in _SHELL_PARTS.finditer(text):
        if part["word"]:
            words.append(_unquoted(part["word"]))
            spans.append(part.span())
        elif part["end"] and words:
            yield words, spans
            words, spans = [], []
    if words:
        yield words, spans


def _unquoted(word: str) -> str:
    try:
        return "".join(shlex.split(word, comments=False))
    except ValueError:
        return word

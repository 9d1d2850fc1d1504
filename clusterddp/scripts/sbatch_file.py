"""Reads an sbatch file: directives, commands, steps and statements.

sbatch reads `#SBATCH` lines up to the first line that is neither empty nor a comment, with its own
quoting rules (src/sbatch/opt.c). Everything else follows bash: `clusterddp.scripts.shell`. A step
is a command started by srun; a statement is a group of lines that belong together.
"""

import bisect
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath

from clusterddp.request import nested_launcher
from clusterddp.scripts import shell
from clusterddp.scripts.shell import Command, Script, Word

_SHORT = {
    **{"A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint"},
    **{"c": "cpus-per-task", "D": "chdir", "d": "dependency", "E": "preserve-env", "e": "error"},
    **{"F": "nodefile", "G": "gpus", "H": "hold", "I": "immediate", "i": "input", "J": "job-name"},
    **{"K": "kill-on-bad-exit", "k": "no-kill", "L": "licenses", "l": "label", "M": "clusters"},
    **{"m": "distribution", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output"},
    **{"p": "partition", "Q": "quiet", "q": "qos", "r": "relative", "S": "core-spec"},
    **{"s": "oversubscribe", "T": "threads", "t": "time", "u": "unbuffered", "v": "verbose"},
    **{"W": "wait", "w": "nodelist", "X": "disable-status", "x": "exclude", "Z": "no-allocate"},
}
_SHORT_FLAGS = {"sbatch": "HhkOQsvVW", "srun": "EHhIkKlOQsuvVXZ"}
"""Short options without a value, or with an optional one attached to the letter."""
_NAMES_WITHOUT_VALUE = (
    "bcast compress consolidate-segments contiguous disable-status exact exclusive external "
    "external-launcher get-user-env help hold ignore-pbs immediate interactive "
    "kill-on-bad-exit label multi-prog nice no-allocate no-kill no-requeue oom-kill-step "
    "overcommit overlap oversubscribe parsable preserve-env propagate pty quiet "
    "quit-on-interrupt reboot requeue resv-ports send-libs share spread-job spread-segments "
    "stepmgr test-only unbuffered usage use-min-nodes verbose version wait-for-children whole "
    "x11"
)
_NAMES_WITH_VALUE = (
    "accel-bind account acctg-freq array batch bb bbf bcast-exclude begin chdir cluster "
    "cluster-constraint clusters comment constraint container container-id context core-spec "
    "cores-per-socket cpu-bind cpu-freq cpu_bind cpus-per-gpu cpus-per-task deadline "
    "delay-boot dependency distribution environment epilog error exclude export export-file "
    "extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket "
    "gpus-per-task gres gres-flags het-group hint ignore-signals input job-name jobid "
    "kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu "
    "mem-per-gpu mem-update mincpus mpi msg-timeout network nodefile nodelist nodes ntasks "
    "ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres "
    "open-mode output pack-group partition prefer priority profile prolog qos relative "
    "reservation resources segment signal slurmd-debug sockets-per-node switches task-epilog "
    "task-prolog tasks-per-node thread-spec threads threads-per-core time time-min tmp "
    "treewidth tres-bind tres-per-task uid wait-all-nodes wckey workdir wrap"
)
_FLAGS = frozenset(_NAMES_WITHOUT_VALUE.split())
"""Long options without a value, or with an optional one after `=` (slurm_opt.c of 26.05)."""
_VALUED = frozenset(_NAMES_WITH_VALUE.split())
_OPTIONS = sorted({*_FLAGS, *_VALUED, "wait"})
_ALIASES = {
    "tasks-per-node": "ntasks-per-node",
    "cpu_bind": "cpu-bind",
    "workdir": "chdir",
    "share": "oversubscribe",
}
_OWN_WORD = re.compile(r"(?:het|pack)job\b")
_REFERENCE = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
_CONTINUES = re.compile(r"(?:^|[\s;])(?:then|do|else|in)$|(?:&&|\|\|?|;|&|\{|\()$")
"""End of a line that must not be followed by a semicolon."""
_TANGLED = re.compile(r"\s#|;;")
"""Trailing comment or end of a case pattern: joining the next line would break these."""
PRINTS = frozenset({"echo", "printf", "date", ":", "true"})
"""Programs that only print."""
_COMMENT = re.compile(r"\s#")
_CONTINUED = re.compile(r"\\\n[ \t]*")


@dataclass(frozen=True)
class Option:
    """An option of sbatch or srun."""

    name: str
    """Long name, without dashes."""
    value: str | None
    line: int
    source: str
    """Text as typed: `-N 2`, `--nodes=2`."""


@dataclass(frozen=True)
class Directive(Option):
    """An option on a `#SBATCH` line."""

    is_read: bool = True
    """False after the first command, where sbatch no longer reads directives."""
    text: str = ""
    """Whole line."""


@dataclass(frozen=True)
class SrunCommand:
    """A command that srun starts in the tasks."""

    command: Command
    options: tuple[Option, ...]
    program: tuple[Word, ...]
    """Words of the command that each task runs."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables set on the command line before srun."""

    def value(self, *names: str) -> str | None:
        """Return the value of the last option with one of these names, or None."""
        for option in reversed(self.options):
            if option.name in names:
                return option.value or ""
        return None

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(word.text for word in self.program)


@dataclass
class SbatchFile:
    """A parsed sbatch file."""

    name: str
    text: str
    directives: list[Directive] = field(default_factory=list)
    script: Script = field(default_factory=Script)
    dos_lines: tuple[int, ...] = ()
    """Numbers of the lines that end in CR LF."""

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    @cached_property
    def steps(self) -> list[SrunCommand]:
        """Steps in order, including those in functions and conditions."""
        return list(steps(self.script.commands))

    def directive(self, *names: str) -> Directive | None:
        """Return the directive in force: the last one read by sbatch with one of these names."""
        for directive in reversed(self.directives):
            if directive.name in names and directive.is_read:
                return directive
        return None

    def value(self, *names: str) -> str | None:
        """Return the value of the directive in force: empty for a flag, None if there is none."""
        directive = self.directive(*names)
        return None if directive is None else directive.value or ""


def read(text: str, name: str = "") -> SbatchFile:
    """Read the text of an sbatch file."""
    lines = enumerate(text.split("\n")[:-1], 1)
    dos_lines = tuple(number for number, line in lines if line.endswith("\r"))
    text = text.replace("\r\n", "\n")
    script = shell.read(text)
    return SbatchFile(name, text, list(_directives(text, script)), script, dos_lines)


def is_sbatch(text: str) -> bool:
    """Return whether a text is a shell script: it has directives or a shell's shebang."""
    first = text.split("\n", 1)[0]
    shebang = first.startswith("#!") and re.search(r"\b(?:ba|da|k|z)?sh\b", first)
    return bool(shebang or re.search(r"^#SBATCH\b", text, re.MULTILINE))


def _directives(text: str, script: Script) -> Iterator[Directive]:
    is_read = True
    for number, line in enumerate(text.split("\n"), 1):
        if not line.startswith("#SBATCH"):
            is_read = is_read and not (line.strip() and not line.lstrip().startswith("#"))
            continue
        if not is_read and number not in script.comments:
            continue  # quoted text or a here-document
        words = list(arguments(line[len("#SBATCH") :]))
        if words and _OWN_WORD.match(words[0]):
            return  # the next lines belong to the next component
        for option in options(words, "sbatch", number)[0]:
            name, value, source = option.name, option.value, option.source
            yield Directive(name, value, number, source, is_read, line.rstrip())


def arguments(text: str) -> Iterator[str]:
    """Split a directive line like sbatch: quotes pair, backslashes escape, `#` ends the line."""
    word, is_word, quote, at = "", False, "", 0
    while at < len(text):
        character = text[at]
        if character == "\\" and at + 1 < len(text):
            word, is_word, at = word + text[at + 1], True, at + 1
        elif quote:
            if character == quote:
                quote = ""
            else:
                word += character
        elif character in "\"'":
            quote, is_word = character, True
        elif character.isspace() or character == "#":
            if is_word:
                yield word
            word, is_word = "", False
            if character == "#":
                return
        else:
            word, is_word = word + character, True
        at += 1
    if is_word:
        yield word


def options(words: Sequence[str], program: str, line: int) -> tuple[tuple[Option, ...], int]:
    """Parse the options of sbatch or srun; return them and the index of the first other word."""
    found: list[Option] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        at += 1
        if word == "--":
            break
        if word.startswith("--"):
            typed, equals, value = word[2:].partition("=")
            name = _long_name(typed)
            is_flag = name not in _VALUED and (name, program) != ("wait", "srun")
            if equals or is_flag:
                found.append(Option(name, value if equals else None, line, word))
            else:
                value = words[at] if at < len(words) else ""
                found.append(Option(name, value, line, f"{word} {value}"))
                at += 1
            continue
        index = 1
        while index < len(word):
            letter = word[index]
            name = _SHORT.get(letter, letter)
            index += 1
            rest = word[index:]
            if letter in _SHORT_FLAGS[program] and not (letter in "IKk" and rest):
                found.append(Option(name, None, line, f"-{letter}"))
                continue
            if not rest:
                rest = words[at] if at < len(words) else ""
                at += 1
                found.append(Option(name, rest, line, f"-{letter} {rest}"))
            else:
                found.append(Option(name, rest.removeprefix("="), line, word))
            break
    return tuple(found), at


def _long_name(typed: str) -> str:
    """Return the full name of an option; getopt_long accepts abbreviations."""
    typed = _ALIASES.get(typed, typed)
    known = _FLAGS | _VALUED | {"wait"}
    if typed in known:
        return typed
    fitting = {_ALIASES.get(name, name) for name in known if name.startswith(typed)}
    return fitting.pop() if len(fitting) == 1 else typed


def has_option(name: str) -> bool:
    """Return whether sbatch has a long option that begins with this name."""
    return any(each.startswith(name) for each in _OPTIONS)


def nearest_name(name: str) -> str:
    """Return the sbatch option closest to an unknown name; empty if none is close."""
    if has_option(name):
        return ""
    return "".join(difflib.get_close_matches(name, _OPTIONS, 1, 0.85))


def steps(commands: Sequence[Command]) -> Iterator[SrunCommand]:
    """Yield the steps among commands; srun may follow time, exec, timeout …"""
    for command in commands:
        texts = command.texts
        at = nested_launcher.program_index(texts)
        if at >= len(texts) or PurePath(texts[at]).name != "srun":
            continue
        words = command.words[at + 1 :]
        read_options, begin = options([word.text for word in words], "srun", command.line)
        lines = {word.text: word.line for word in words}
        placed = tuple(
            replace(option, line=lines.get(option.source.split(" ")[0], option.line))
            for option in read_options
        )
        environment = tuple((each.name, each.text) for each in command.assignments)
        yield SrunCommand(command, placed, words[begin:], environment)


@dataclass(frozen=True, eq=False)
class Statement:
    """Lines of a script that belong together: a command, a list, an `if` up to its `fi`."""

    first: int
    last: int
    commands: tuple[Command, ...]
    source: str
    """Source text, without a trailing comment."""
    is_compound: bool = False

    @property
    def line(self) -> str | None:
        """Command as one line of shell, or None if that is impossible."""
        text = _CONTINUED.sub(" ", self.source).strip()
        if "\n" not in text:
            return text
        lines = _separate(text)
        if not lines:
            return None
        if self.is_array:
            return " ".join(lines)
        redirects = [redirect for command in self.commands for redirect in command.redirects]
        in_a_case = any("case" in command.inside for command in self.commands)
        has_text = any(redirect.body is not None for redirect in redirects)
        parentheses = any(line.count("(") != line.count(")") for line in lines)
        if not self.is_compound or in_a_case or has_text or parentheses:
            return None
        return joined(lines)

    @property
    def is_array(self) -> bool:
        """True if it only sets an array, whose elements may be on several lines."""
        of_array = [each for command in self.commands for each in command.assignments]
        return len(of_array) == 1 and of_array[0].source.startswith("(") and bool(self.assigned)

    @property
    def names(self) -> set[str]:
        """Variables that its text refers to or exports."""
        exports = [each for each in self.commands if each.texts[:1] == ("export",)]
        return {*references(self.source), *(name for each in exports for name in each.texts[1:])}

    @property
    def names_set(self) -> set[str]:
        """All variables that it sets."""
        return {each.name for command in self.commands for each in command.assignments}

    @property
    def assigned(self) -> set[str]:
        """Variables that it sets if it does nothing else; empty otherwise."""
        names: set[str] = set()
        for command in self.commands:
            words = command.texts
            if words and words[0] in ("mapfile", "readarray", "read"):
                names.add(words[-1])
            elif words and words[0] in ("[", "[[", "test", "declare", "local", "readonly"):
                names |= {each.name for each in command.assignments}
            elif words and words[0] in PRINTS and not command.redirects:
                continue
            elif words or not command.assignments:
                return set()
            else:
                names |= {each.name for each in command.assignments}
        return names


def references(text: str) -> list[str]:
    """Return the names of the variables that a text refers to."""
    return _REFERENCE.findall(text)


def statements(file: SbatchFile) -> Iterator[Statement]:
    """Yield the statements of a file in order."""
    spans = sorted(_spans(file))
    merged: list[tuple[int, int, bool]] = []
    for first, last, compound in spans:
        if merged and first <= merged[-1][1]:
            before = merged[-1]
            merged[-1] = (before[0], max(last, before[1]), compound or before[2])
        elif merged and merged[-1][1] not in file.script.closed:
            merged[-1] = (merged[-1][0], last, True)
        else:
            merged.append((first, last, compound))
    lines = [command.line for command in file.script.commands]
    for first, last, compound in merged:
        begin, end = bisect.bisect_left(lines, first), bisect.bisect_right(lines, last)
        commands = tuple(file.script.commands[begin:end])
        source = "\n".join(file.lines[first - 1 : last])
        if len(commands) == 1 and not compound and commands[0].source in source:
            ended = source.partition(commands[0].source)[2].strip()
            if not ended or ended.startswith("#"):
                source = commands[0].source
        if first == last and first in file.script.comments:
            source = _without_comment(source)
        if commands:
            yield Statement(first, last, commands, source, compound)


def _spans(file: SbatchFile) -> Iterator[tuple[int, int, bool]]:
    """Yield first and last line of each command, and each line with only keywords."""
    covered: set[int] = set()
    for command in file.script.commands:
        last = command.last_line
        for redirect in command.redirects:
            if redirect.body is not None:
                last = max(last, redirect.line + redirect.body.count("\n") + 1)
        covered.update(range(command.line, last + 1))
        yield command.line, last, bool(command.inside)
    for number, text in enumerate(file.lines, 1):
        stripped = text.strip()
        if number not in covered and stripped and not stripped.startswith("#"):
            yield number, number, True


def one_line(text: str) -> str | None:
    """Return plain commands as one line of shell, or None if that is impossible."""
    lines = _separate(_CONTINUED.sub(" ", text))
    tangled = any("<<" in line or line.count("(") != line.count(")") for line in lines)
    return None if tangled or not lines else joined(lines)


def joined(lines: Sequence[str]) -> str:
    """Join lines of shell into one."""
    line = lines[0]
    for each in lines[1:]:
        line += f" {each}" if _CONTINUES.search(line) else f"; {each}"
    return line


def _separate(text: str) -> list[str]:
    """Return the lines of a text without comments; none if they cannot be joined."""
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line and not line.startswith("#")]
    return [] if any(_TANGLED.search(line) or _is_open(line) for line in lines) else lines


def _is_open(line: str) -> bool:
    """Return whether a line has an unbalanced quote, so that the text continues."""
    return any(line.count(quote) % 2 for quote in "\"'`")


def _without_comment(line: str) -> str:
    """Return a line without its trailing comment; a `#` in quotes is kept."""
    comment = _COMMENT.search(line, max(line.rfind("'"), line.rfind('"')) + 1)
    return line[: comment.start()].rstrip() if comment else line


def needed(
    wanted: Iterable[Statement], names: Iterable[str], known: Sequence[Statement]
) -> set[int]:
    """Return the first lines of the statements in `known` that only set variables others read.

    wanted: statements that always run. names: further variables that are read.
    """
    read = set(names).union(*(statement.names for statement in wanted))
    lines: set[int] = set()
    while True:
        more = [s for s in known if s.first not in lines and s.assigned & read]
        if not more:
            return lines
        for statement in more:
            lines.add(statement.first)
            read |= statement.names

"""Translates an sbatch file to the equivalent `clusterddp submit` line.

Directives, modules, setup lines and the environment become options; the launcher becomes Slurm
tasks. Lines that clusterddp replaces (rendezvous, ranks, logs) are dropped. A note reports every
other omission and difference. The file is only read.
"""

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from clusterddp.errors import RequestError
from clusterddp.request import nested_launcher
from clusterddp.request.nested_launcher import NestedLauncher
from clusterddp.request.options import REPLACED
from clusterddp.request.spec import DIRECTIVES
from clusterddp.scripts import job_script, sbatch_file, shell
from clusterddp.scripts.job_script import DERIVED, MPI, TRAINS, JobScript
from clusterddp.scripts.sbatch_file import (
    PRINTS,
    Directive,
    Option,
    SbatchFile,
    Statement,
    one_line,
)
from clusterddp.scripts.shell import Assignment, Command, Word, display_line, is_known
from clusterddp.slurm import forms

_COLUMNS = 90
_ON_SEPARATE_LINES = ("--env", "--setup", "--teardown")
_LOGS = frozenset({"output", "error", "open-mode", "input"})
_LOG_PLACE = "not carried over: logs are in the run's directory, logs/rank-R.log"
_UNKNOWN = "not carried over: only the batch shell knows its value"
_ARGUMENT = "an argument of the script or of a function has no value here: write the value"
_ARGUMENT_USE = re.compile(r"(?<!\\)\$(?:\{?[1-9]|[#@*]|\{[#@*]\})")
_SBATCH_ONLY = frozenset({"parsable", "quiet", "verbose", "get-user-env"})
"""Options of sbatch that do not concern the job."""
_SAME = frozenset({"requeue", "no-requeue", "wait", "test-only", "exclusive"})
"""Flags of sbatch that submit has as well."""
_OPTIONS_OF_STEP = (
    "nodes ntasks ntasks-per-node cpus-per-task label unbuffered kill-on-bad-exit wait quiet jobid "
    "nodelist relative exclusive exact overlap no-container-mount-home"
)
_STEP_ONLY = frozenset(_OPTIONS_OF_STEP.split())
"""Options of srun that the run's own srun sets or does not need."""
_SIGNAL = re.compile(
    r"(?P<batch>[BR]*:)?(?:SIG)?(?P<name>\w+)(?:@(?P<seconds>\d+))?", re.IGNORECASE
)
_BYTES = re.compile(r"(\d+[KMGT])i?B", re.IGNORECASE)
"""Size such as 4GB or 4GiB; sbatch only uses the first letter of the unit."""
_SIGNALS = {"10": "USR1", "12": "USR2", "15": "TERM"}
_MODULE_NAME = re.compile(r"PATH$|HOME$|ROOT$|DIR$|PREFIX$|FLAGS$|MODULE", re.IGNORECASE)
"""Variables that modules set, too, so the order matters."""
_LOADS = frozenset({"load", "add"})
_VERBS_OF_ML = (
    "purge unload del rm use unuse list avail av spider swap sw switch show reset restore r save s "
    "help keyword key update refresh whatis"
)
_NO_MODULES = frozenset(_VERBS_OF_ML.split())
_CANNOT_FAIL = re.compile(r"(?:export|echo|set|ulimit)\s|[A-Za-z_]\w*=[^$`]*$")
"""Setup lines that hardly ever fail."""
_TESTS = frozenset({"[", "[[", "test"})
_ENDS = frozenset({"wait", "exit", "return"})
_OPTIONS_OF_TORCHRUN = (
    "nnodes nproc-per-node node-rank master-addr master-port local-addr standalone rdzv-backend "
    "rdzv-endpoint rdzv-id rdzv-conf use-env module m max-restarts tee t redirects r log-dir role "
    "local-ranks-filter logs-specs"
)
_OPTIONS_OF_ACCELERATE = (
    "multi-gpu num-processes num-machines machine-rank main-process-ip main-process-port "
    "rdzv-backend rdzv-conf same-network max-restarts cpu module m no-python gpu-ids tee role "
    "log-dir"
)
_OPTIONS_OF_MPI = "np n c num-gpus num-nodes hostfile host H npernode no-local-rank"
_VARIABLES_OF_ACCELERATE = {
    "mixed-precision": "ACCELERATE_MIXED_PRECISION",
    "dynamo-backend": "ACCELERATE_DYNAMO_BACKEND",
    "gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}
"""Options that `accelerate launch` passes to its processes as variables."""


_IN_QUOTES = re.compile(r"\$'(?:[^'\\]|\\.)*'|'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.", re.DOTALL)
_EXPANDS = re.compile(r"^~|[*?]|\[[^]]*\]|\{[^{}]*(?:,|\.\.)[^{}]*\}")
"""Unquoted text that bash expands to files, a home directory or several words."""
_SETS_ALL = re.compile(r"\s([-+])(?:\w*a|o\s+allexport)")
_DEFAULT = re.compile(r"\$\{\w+:?[-=]")
_NAMED = re.compile(r"\s*(?:function\s+([\w.:-]+)|([\w.:-]+)\s*\(\s*\))")
_IS_ARRAY = re.compile(r"\[[@*]\]\}")
_LONGEST = 8_000
"""Length up to which a word is certain to be complete."""


@dataclass(frozen=True)
class Note:
    """An omission or a difference."""

    line: int
    """Line of the file; 0 if it concerns several."""
    source: str
    """Source text there; empty if it concerns the whole file."""
    why: str


@dataclass
class SubmitLine:
    """Words of a `clusterddp submit` line, with notes."""

    options: list[tuple[str, ...]] = field(default_factory=list)
    command: tuple[str, ...] = ()
    directory: str = ""
    """Directory to submit from; empty for the current one."""
    notes: list[Note] = field(default_factory=list)

    @property
    def argv(self) -> list[str]:
        """Words after `clusterddp`."""
        return ["submit", *(word for each in self.options for word in each), "--", *self.command]

    @property
    def shell(self) -> str:
        """Line for a shell, with continuation lines if it is long."""
        parts = [_typed(option) for option in self.options]
        separate = [part for part in parts if part.startswith(_ON_SEPARATE_LINES)]
        rows = ["clusterddp submit"]
        for part in parts:
            if part not in separate:
                if len(rows[-1]) + len(part) > _COLUMNS:
                    rows.append("   ")
                rows[-1] += f" {part}"
        rows += [f"    {part}" for part in separate]
        command = f"-- {_typed(self.command)}"
        if len(rows) == 1 and len(rows[0]) + len(command) < _COLUMNS:
            rows[0] += f" {command}"
        else:
            rows.append(f"    {command}")
        line = " \\\n".join(rows)
        path = f"./{self.directory}" if self.directory.startswith("-") else self.directory
        return f"cd {_typed([path])} &&\n{line}" if path else line

    def add(self, name: str, value: str | None = None) -> None:
        """Add an option; its name has no dashes."""
        if value is None:
            self.options.append((f"--{name}",))
        elif value.startswith("-"):
            self.options.append((f"--{name}={value}",))
        else:
            self.options.append((f"--{name}", value))

    def note(self, line: int, source: str, why: str) -> None:
        """Add a note unless it exists."""
        note = Note(line, " ".join(source.split()), why)
        if note not in self.notes:
            self.notes.append(note)


def translate(file: SbatchFile) -> SubmitLine:
    """Return the line. Raises RequestError if the file starts no training."""
    return _Translation(file).run()


class _Translation:
    def __init__(self, file: SbatchFile) -> None:
        self.line = SubmitLine()
        self.file = file = self.with_late_directives(file)
        self.job = JobScript(file)
        self.training = self.job.training
        self.where = self.training.command.line
        self.statements = list(sbatch_file.statements(file))
        around = [s for s in self.statements if s.first <= self.where <= s.last]
        in_function = "function" in self.training.command.inside
        named = _NAMED.match(around[0].source) if in_function else None
        of_function = (named[1] or named[2],) if named else ()
        self.calls = [c for c in file.script.commands if of_function == c.texts[:1] != ()]
        """Calls of the function that contains the training command."""
        self.set_all = [
            (command.line, found[1] == "-")
            for command in file.script.commands
            if command.texts[:1] == ("set",) and (found := _SETS_ALL.search(command.source))
        ]
        """Lines that turn the export of all variables on or off."""
        self.begins = self.calls[0].line if self.calls else self.where
        self.environment: dict[str, str | None] = {}
        assignments = [each for command in file.script.commands for each in command.assignments]
        self.secrets = {a.text for a in assignments if _is_secret(a) and len(a.text) > 2}
        self.read_by_tasks: list[str] = []
        """Variables of the batch shell that the tasks' command reads."""

    def run(self) -> SubmitLine:
        """Translate the whole file."""
        line = self.line
        for name, value in self.job.layout(line.note).options:
            line.add(name, value)
        self.directives()
        self.step()
        self.launcher()
        line.command = self.command()
        self.surroundings()
        line.notes.sort(key=lambda note: note.line)
        return line

    def with_sources(self, text: str) -> str:
        return self.file.script.with_sources(text)

    # Directives

    def with_late_directives(self, file: SbatchFile) -> SbatchFile:
        """Return the file with the directives after its first command in force, and note them.

        A directive before the first command keeps precedence over later ones of its name.
        """
        early = {each.name for each in file.directives if each.is_read}
        meant = [d if d.name in early else replace(d, is_read=True) for d in file.directives]
        late = [old for old, new in zip(file.directives, meant, strict=True) if old != new]
        if late:
            first, *others = dict.fromkeys(each.line for each in late)
            lines = f" (nor line{'s' * (len(others) > 1)} {', '.join(map(str, others))})"
            why = (
                f"sbatch ignores this{lines if others else ''}, because it follows the first "
                "command. Carried over, because it was meant to be in force"
            )
            self.line.note(first, late[0].text, why)
        return replace(file, directives=meant)

    def directives(self) -> None:
        """Turn each directive outside the layout into an option."""
        read_lines = {directive.line for directive in self.file.directives if directive.is_read}
        for number, text in enumerate(self.file.lines, 1):
            if re.match(r"#SBATCH\s+(?:het|pack)job\b", text):
                self.line.note(number, text, f"not carried over: use {REPLACED['het-group']}")
            rest = text.removeprefix("#SBATCH")
            words = list(sbatch_file.arguments(rest)) if number in read_lines else []
            if (at := sbatch_file.options(words, "sbatch", number)[1]) < len(words):
                why = f"not carried over from {words[at]!r} on: sbatch expects an option there"
                self.line.note(number, text, why)
        for directive in self.file.directives:
            if not directive.is_read:
                why = "not carried over: sbatch ignores directives after the first command"
                self.line.note(directive.line, directive.text, why)
            elif self.file.directive(directive.name) is not directive:
                continue  # a later one overrides it
            elif directive.name == "mail-type":  # Slurm combines them
                events = [d.value or "" for d in self.file.directives if d.name == "mail-type"]
                self.directive(replace(directive, value=",".join(events)))
            elif directive.name not in job_script.DIRECTIVES_OF_LAYOUT:
                self.directive(directive)

    def directive(self, directive: Directive) -> None:
        line, name, value = self.line, directive.name, directive.value
        if name in _LOGS:
            line.note(directive.line, directive.text, _LOG_PLACE)
        elif name == "chdir":
            line.directory = "" if value in (None, ".", "./") else str(value)
        elif name == "export":
            self.export(directive)
        elif name == "requeue" and value:
            line.options.append((f"--requeue={value}",))
        elif name in _SAME and (name != "exclusive" or value is None):
            line.add(name)
        elif name in DIRECTIVES:
            if name == "signal" and (parts := _SIGNAL.fullmatch(value or "")):
                signal = _SIGNALS.get(parts["name"], parts["name"].upper())
                to_script = "B:" if "B" in (parts["batch"] or "").upper() else ""
                value = f"{to_script}{signal}@{parts['seconds'] or 60}"
            if name == "mem" and (size := _BYTES.fullmatch(value or "")):
                value = size[1]
            self.option(directive, value)
        elif name in REPLACED:
            why = f"not carried over: use {REPLACED[name]}"
            if name == "array" and "$SLURM_ARRAY" in self.file.text.replace("{", ""):
                why += ". Without one of them, SLURM_ARRAY_TASK_ID is empty"
            line.note(directive.line, directive.text, why)
        elif name not in _SBATCH_ONLY:
            line.add("sbatch", name if value is None else f"{name}={value}")

    def option(self, directive: Directive, value: str | None) -> None:
        """Carry over a directive that is an option of submit, if submit accepts the value."""
        row = DIRECTIVES[directive.name]
        try:
            if row.form and row.type is str:
                row.form.check(row.flag, value or "")  # type: ignore[arg-type]
        except RequestError as error:
            self.line.note(directive.line, directive.text, f"not carried over: {error}")
        else:
            self.line.add(row.name, value)

    def export(self, option: Option) -> None:
        """Carry over `--export=ALL,NAME=VALUE` of sbatch or srun, variable by variable."""
        names = [name for name in (option.value or "").split(",") if name]
        if "ALL" not in names and isinstance(option, Directive):
            self.line.add("export", "NONE")
        elif "ALL" not in names:
            why = "not carried over: the tasks get all variables, not only these"
            only = ",".join(name.partition("=")[0] for name in names)
            self.line.note(option.line, f"--export={only}", why)
        for name in names:
            if name not in ("ALL", "NONE", "NIL"):
                variable, equals, value = name.partition("=")
                if equals or isinstance(option, Directive):  # a step has the others anyway
                    self.variable(variable, value if equals else None, option.line, variable)

    # The step and its launcher

    def step(self) -> None:
        """Carry over the srun options that matter to the tasks."""
        line, step, file = self.line, self.training.step, self.file
        of_gpus = job_script.DIRECTIVES_OF_GPUS
        asks_for_gpus = file.value(*of_gpus) is not None
        for each in self.training.command.assignments:
            self.prefixed(each.name, each.text, each.source, self.where)
        if step is None:
            return
        for option in step.options:
            name, value, source = option.name, option.value, self.with_sources(option.source)
            is_jobs_own = name in of_gpus and (value == file.value(name) or not asks_for_gpus)
            if name in _STEP_ONLY or is_jobs_own:
                continue
            if name in _LOGS:
                line.note(option.line, source, _LOG_PLACE)
            elif name == "export":
                self.export(option)
            elif name == "container-mounts":
                for mount in filter(is_known, mounts := (value or "").split(",")):
                    line.add("container-mount", mount)
                for mount in itertools.filterfalse(is_known, mounts):
                    line.note(option.line, self.with_sources(mount), _UNKNOWN)
            elif not is_known(value or ""):
                line.note(option.line, source, _UNKNOWN)
            elif name == "container-image":
                line.add(name, value)
                line.add("container-runtime", "pyxis")
            elif name == "container-workdir":
                line.add(name, value)
            else:
                line.add("srun-args", f"--{name}" if value is None else f"--{name}={value}")

    def launcher(self) -> None:
        """Note the launcher's options that have no equivalent."""
        launcher, line = self.training.launcher, self.line
        if launcher is None:
            return
        name, ours = launcher.name, frozenset(_OPTIONS_OF_TORCHRUN.split())
        if name.startswith("accelerate"):
            ours = frozenset(_OPTIONS_OF_ACCELERATE.split())
        elif name not in nested_launcher.AGENTS:
            ours = frozenset(_OPTIONS_OF_MPI.split())
        options = list(launcher.options)
        for option, value in options:
            dashes = "--" if len(option) > 1 else "-"
            source = f"{dashes}{option} {self.with_sources(value)}".strip()
            if name.startswith("accelerate") and option in _VARIABLES_OF_ACCELERATE:
                self.variable(_VARIABLES_OF_ACCELERATE[option], value, self.where, source)
            elif option == "max-restarts" and re.fullmatch("[1-9][0-9]*", value):
                line.add("template", "torchrun")
                line.add("max-restarts", value)
            elif option == "x" and name in MPI:
                variable, equals, text = value.partition("=")
                self.variable(variable, text if equals else None, self.where, source)
            elif option not in ours:
                why = f"not carried over: the run starts without {name}"
                line.note(self.where, source, why)
        is_deepspeed = name == "deepspeed" and "no-local-rank" not in dict(options)
        if launcher.adds_local_rank or is_deepspeed:
            why = "passed --local-rank to its program: read LOCAL_RANK from the environment instead"
            line.note(self.where, name, why)

    # The tasks' command

    def command(self) -> tuple[str, ...]:
        """Return COMMAND, the command of each rank without the launcher."""
        for each in self.training.environment:
            self.prefixed(each.name, each.text, each.source, self.where)
        self.note_surroundings()
        launcher, program = self.training.launcher, list(self.training.program)
        if self.training.text:
            return self.text(launcher)
        if launcher is None:
            return self.words(program)
        head, first, last = launcher.head, launcher.first, launcher.last
        if head is None:
            last = next((i for i, w in enumerate(program) if w.text.endswith(".py")), 0)
            head = ("python",)
        if not last:
            self.line.add("allow-launcher")
            why = "its program is unknown, so each task starts the launcher unchanged"
            self.line.note(self.where, launcher.name, why)
            return self.words(program)
        made = [Word(word, self.where, shlex.quote(word)) for word in head]
        return self.words([*program[:first], *made, *program[last:]])

    def text(self, launcher: NestedLauncher | None) -> tuple[str, ...]:
        """Return a `bash -c` of several commands, with the launcher removed."""
        text = self.training.text
        if launcher:
            nested = nested_launcher.find(("bash", "-c", text))
            text = nested.instead[-1] if nested and nested.instead else ""
        shown = self.with_sources(text or self.training.text)
        line = one_line(shown) if text else None
        if line is None:
            why = "not carried over: put the tasks' commands into a file and submit bash FILE"
            self.line.note(self.where, "bash -c", why)
        for expansion in self.file.script.direct(self.training.text):
            self.reads(expansion.source, self.where)
        for command in shell.read(self.training.text, outer=self.file.script).commands:
            for name in sorted(DERIVED.intersection(each.name for each in command.assignments)):
                why = f"overwrites the {name} that clusterddp sets for each task: remove it"
                self.line.note(self.where, display_line(command), why)
        return ("bash", "-c", line or shown)

    def words(self, program: Sequence[Word]) -> tuple[str, ...]:
        """Return the words, within a `bash -c` if a shell must expand some of them."""
        program = [word for word in program if not self.is_argument_of_script(word)]
        texts = [word.text for word in program]
        if len(texts) == 3 and re.fullmatch(r"-[a-z]*c", texts[1]):
            texts[2] = one_line(texts[2]) or texts[2]
        elif any("\n" in text for text in texts):  # must fit on one line of a script
            return self.expanded(program)
        return tuple(texts) if all(map(self.is_exact, program)) else self.expanded(program)

    def expanded(self, program: Sequence[Word]) -> tuple[str, ...]:
        """Return a `bash -c` in which each task does the batch shell's expansions."""
        inexact = {(word.start, word.source) for word in program if not self.is_exact(word)}
        before_it = Counter((word.start, word.source) for word in self.training.program)
        cut = before_it - Counter((word.start, word.source) for word in program)
        parts: list[str] = []
        before: tuple[int, str] | None = None
        for word in program:
            place = (word.start, word.source)
            if place not in inexact:
                parts.append(_typed([word.text]))
            elif place in cut or _IS_ARRAY.search(word.source):
                parts.append(self.inlined(word))
            elif place != before:  # words of the same variable share a place
                source = self.with_sources(word.source).replace("\\\n", "")
                parts.append(_IN_QUOTES.sub(_without_line_ends, source))
                self.reads(parts[-1], word.line)
            before = place
        return ("bash", "-c", f"exec {' '.join(parts)}")

    def inlined(self, word: Word) -> str:
        """Return a word of a variable as shell text, for variables that cannot be exported.

        These are arrays, and variables that contain the launcher and are only partly needed.
        """
        arrays = [statement.source for statement in self.statements if statement.is_array]
        bare = _IN_QUOTES.sub("", "\n".join(arrays))
        home = re.match(r"~[\w.-]*(?=/|$)", word.text)
        typed = home[0] if home else ""
        for known, text in itertools.groupby(word.text[len(typed) :], is_known):
            if known:
                typed += _typed(["".join(text)])
            else:
                for expansion in self.file.script.direct("".join(text)):
                    splits = not word.quoted or expansion.source in bare
                    typed += expansion.source if splits else f'"{expansion.source}"'
                    self.reads(expansion.source, word.line)
        return typed

    def is_argument_of_script(self, word: Word) -> bool:
        """Return whether a word expands to the script's own arguments, and note it."""
        if word.source.strip('"') not in ("$@", "$*", "${@}", "${*}"):
            return False
        why = "arguments of the script itself: append them to the line"
        self.line.note(word.line, word.source, why)
        return True

    def reads(self, source: str, line: int) -> None:
        """Record the batch shell's variables in a text of the tasks, and note differences."""
        setting = {n: each for each in self.statements for n in each.names_set | each.assigned}
        for name in sbatch_file.references(source):
            if re.search(rf"\b(?:for|select)\s+{name}\s", "\n".join(self.file.lines)):
                why = f"not carried over: {name} is a loop variable; write one line per value"
                self.line.note(line, source, why)
            elif name in setting and (setting[name].is_array or f"{{{name}[" in source):
                why = f"not carried over: arrays cannot be exported; export parts of {name} instead"
                self.line.note(line, source, why)
            elif name in setting and self.where in range(
                setting[name].first, setting[name].last + 1
            ):
                why = f"not carried over: the training's statement sets {name}; write its value"
                self.line.note(line, source, why)
            elif name in setting and name not in self.file.script.exported:
                self.read_by_tasks.append(name)
        if _reads_argument(source):
            self.line.note(line, source, _ARGUMENT)
        if "$(" in source or "`" in source:
            why = "now every task runs this substitution; the batch shell ran it once"
            self.line.note(line, source, why)

    def note_surroundings(self) -> None:
        """Note redirections, loops and conditions around the training command."""
        command, line = self.training.command, self.line
        source = display_line(command)
        targets = []
        for each in command.redirects:
            if "<" in each.operator:
                line.note(each.line, each.operator, "not carried over: put the input into a file")
            else:
                targets.append(f"{each.operator}{self.with_sources(each.target)}")
        if command.piped or any(not re.match(r"\d*>&", target) for target in targets):
            why = "not carried over: output goes to logs/rank-R.log in the run's directory"
            line.note(self.where, " ".join(targets) or f"{source} | …", why)
        kinds = [kind for kind in command.inside if kind not in ("(", "{")]
        if self.training.is_of_each_node:
            why = "was started in a loop; now one srun starts all tasks, once"
            line.note(self.where, source, why)
        elif kinds:
            why = f"is inside `{kinds[-1]}`; now it always runs, and once"
            line.note(self.where, source, why)

    # The other statements

    def surroundings(self) -> None:
        """Carry over the other statements: modules, environment, setup and teardown lines."""
        modules: list[str] = []
        setup: list[str] = []
        teardown: list[str] = []
        for statement in self.kept():
            if _reads_argument(statement.source) and not _function(statement):
                self.line.note(statement.first, statement.source.split("\n")[0], _ARGUMENT)
            if statement.first > self.begins:
                teardown += self.carried(statement, "--teardown")
            elif not setup and (names := _loaded(statement)):
                modules += names
            else:
                lines = self.exports(statement, after_others=bool(modules or setup))
                setup += self.carried(statement, "--setup") if lines is None else lines
            set_here = statement.names_set | statement.assigned
            if statement.first <= self.begins:
                read = dict.fromkeys(self.read_by_tasks)
                exports = [f"export {name}" for name in read if name in set_here]
                setup = [*(line for line in setup if line not in exports), *exports]
        variables = [
            name if value is None else f"{name}={value}" for name, value in self.environment.items()
        ]
        values = {"env": variables, "module": modules, "setup": setup, "teardown": teardown}
        for option, each_of in values.items():
            for value in each_of:
                self.line.add(option, value)
        self.note_lines(setup, teardown)

    def kept(self) -> list[Statement]:
        """Return the other statements that the run still needs, in order."""
        others = [s for s in self.statements if not s.first <= self.where <= s.last]
        self.note_same_statement([s for s in self.statements if s not in others])
        others = [s for s in others if not self.is_replaced(s)]
        others = self.without_idle_functions(others)
        pieces = self.pieces_of_the_command(others)
        only_set = [s for s in others if s in pieces or (_only_sets(s) and not self.exports_all(s))]
        prints = [s for s in others if all(_prints(command) for command in s.commands)]
        wanted = [s for s in others if s not in only_set and s not in prints]
        reading = [s for s in wanted if not self.exports_literals(s)]
        lines = sbatch_file.needed(reading, self.read_by_tasks, only_set)
        kept = [*wanted, *(s for s in only_set if s.first in lines)]
        gone = {n for s in self.statements if s not in kept for n in s.names_set}
        kept += [s for s in prints if not s.names & gone]
        for statement in wanted:
            self.note_training(statement)
        return sorted(kept, key=lambda statement: statement.first)

    def without_idle_functions(self, others: Sequence[Statement]) -> list[Statement]:
        """Return the statements without the functions that at most a trap calls."""
        idle = {_function(s): s for s in others if _function(s)}
        text = "\n".join(s.source for s in others if not _function(s))
        text += f"\n{self.training.command.source}"
        while called := [name for name in idle if _is_word(name, text)]:
            text = "\n".join(idle.pop(name).source for name in called)
        return [s for s in others if _function(s) not in idle]

    def exports_all(self, statement: Statement) -> bool:
        """Return whether a statement follows `set -a`, which exports every variable."""
        return [exports for line, exports in self.set_all if line < statement.first][-1:] == [True]

    def pieces_of_the_command(self, others: Sequence[Statement]) -> list[Statement]:
        """Return the statements that export parts of the command with several words."""
        setting = {name: s for s in others for name in s.names_set}
        waiting, pieces = sbatch_file.references(self.training.command.source), []
        seen = set(waiting)
        while waiting:
            statement = setting.get(waiting.pop())
            if statement is None or statement in pieces:
                continue
            waiting += statement.names - seen
            seen |= statement.names
            exports = all(c.texts in ((), ("export",)) for c in statement.commands)
            texts = [each.text for c in statement.commands for each in c.assignments]
            if exports and any(len(text.split()) > 1 for text in texts):
                pieces.append(statement)
        return pieces

    def carried(self, statement: Statement, option: str) -> list[str]:
        """Return a statement as a line for --setup or --teardown, or note why it cannot be one."""
        for command in statement.commands:
            for each in command.assignments:
                if _is_secret(each):
                    self.variable(each.name, each.text, command.line, each.name)
                    if len(statement.commands) > 1 or len(command.assignments) > 1:
                        why = f"rest of its statement not carried over: add it with {option} LINE"
                        self.line.note(statement.first, each.name, why)
                    return []
        if statement.line is not None:
            return [statement.line]
        why = (
            f"not carried over: lines {statement.first} to {statement.last} do not fit on one line "
            f"of shell. Put them into a file and add {option} 'source ./FILE'"
        )
        self.line.note(statement.first, statement.source.split("\n")[0], why)
        return []

    def is_replaced(self, statement: Statement) -> bool:
        """Return whether clusterddp replaces a whole statement, tests and prints included."""
        rest = [command for command in statement.commands if not self.is_ours(command)]
        idle = all(command.texts and command.texts[0] in _TESTS | PRINTS for command in rest)
        return idle and len(rest) < len(statement.commands)

    def is_ours(self, command: Command) -> bool:
        """Return whether clusterddp replaces a command."""
        words, line = command.texts, self.line
        program = words[0] if words else "export"
        if program == "export":
            names = [each.name for each in command.assignments]
            names += [word for word in words[1:] if not word.startswith("-")]
            return bool(names) and all(name in DERIVED for name in names)
        if program == "set":
            flags = [word for word in words[1:] if word not in ("errexit", "pipefail")]
            return bool(flags) and all(set(word) <= set("-eo") for word in flags)
        if program == "unset":
            return all(word in DERIVED or word.startswith("-") for word in words[1:])
        if program in _ENDS or words[:2] == ("kill", "-0"):
            return command.line >= self.begins
        if command in self.calls:
            if len(self.calls) > 1 or len(words) > 1:
                why = "called the function with the training command, which now runs once"
                line.note(command.line, display_line(command), why)
            return True
        if program == "shift" and not command.inside:
            return True
        if program == "cd" and len(words) == 2:
            names = [each.name for each in self.file.script.expanded(words[1])]
            return words[1] in (".", "./") or names == ["SLURM_SUBMIT_DIR"]
        if program == "trap":
            why = "not carried over: clusterddp forwards signals; see --signal and --requeue"
            line.note(command.line, command.source.split("\n")[0], why)
            return True
        if words[:2] == ("scontrol", "requeue"):
            why = "not carried over: clusterddp requeues the job; see --requeue"
            line.note(command.line, command.source, why)
            return True
        return False

    def exports(self, statement: Statement, *, after_others: bool) -> list[str] | None:
        """Carry over `export NAME=value` as --env if the order of the lines does not matter.

        Return the remaining exports as setup lines; None for any other statement.
        """
        command = statement.commands[0]
        is_one = len(statement.commands) == 1 and not statement.is_compound
        if not is_one or command.texts != ("export",) or not command.assignments:
            return None
        if any(f"{each.name}+=" in command.source for each in command.assignments):
            return None
        lines = []
        for each in command.assignments:
            by_modules = after_others and _MODULE_NAME.search(each.name)
            if _is_secret(each) or (self.is_plain(each) and not by_modules):
                self.variable(each.name, each.text, command.line, each.name)
            elif each.name not in DERIVED:
                value = shlex.quote(each.text) if self.is_literal(each) else each.source
                lines.append(f"export {each.name}={value}")
        return lines if all(one_line(line) for line in lines) else None

    def is_plain(self, assignment: Assignment) -> bool:
        """Return whether --env can carry a value unchanged."""
        is_again = assignment.name in self.environment
        return self.is_literal(assignment) and assignment.text.isprintable() and not is_again

    def prefixed(self, name: str, value: str, source: str, line: int) -> None:
        """Carry over a variable that is set before a program."""
        typed = f"{name}={source}"
        if value.startswith("~"):
            why = f"not carried over: add --setup {shlex.quote(f'export {typed}')}"
            self.line.note(line, typed, why)
        else:
            self.variable(name, value, line, typed)

    def variable(self, name: str, value: str | None, line: int, source: str) -> None:
        """Carry over a variable of the tasks; a secret is passed by name, without its value."""
        if name in DERIVED:
            return
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or not re.fullmatch(forms.VARIABLE, name):
            self.line.note(line, source, "not carried over: Slurm sets it for each task")
        elif name == "CUDA_VISIBLE_DEVICES" and any(
            each[0] == "--gpus-per-node" for each in self.line.options
        ):
            self.line.note(line, source, "not carried over: Slurm assigns the GPUs")
        elif value is not None and re.search(forms.SECRET, name):
            self.environment[name] = None
            why = f"looks secret, so the line omits its value: export {name}=… in your shell first"
            self.line.note(line, name, why)
        elif value is not None and not is_known(value):
            self.line.note(line, self.with_sources(source), _UNKNOWN)
        else:
            self.environment[name] = value

    # Words and values

    def is_exact(self, word: Word) -> bool:
        """Return whether the program gets a word's text unchanged, without a shell."""
        bare = _IN_QUOTES.sub("", word.source)
        of_source = "$'" in word.source or _EXPANDS.search(bare)
        of_value = word.source.find("$") >= 0 and (
            word.text.startswith("~") or ("$" in bare and re.search(r"[*?[]", word.text))
        )
        is_plain = is_known(word.text) and not self.contains_secret(word)
        return is_plain and not (of_source or of_value) and len(word.text) < _LONGEST

    def is_literal(self, assignment: Assignment) -> bool:
        """Return whether a value is known from the file; tilde expansion is not."""
        expands_home = assignment.source.startswith("~") or ":~" in assignment.source
        is_plain = is_known(assignment.text) and not self.contains_secret(assignment)
        return is_plain and not expands_home and "$'" not in assignment.source

    def exports_literals(self, statement: Statement) -> bool:
        exports = [command for command in statement.commands if command.texts == ("export",)]
        literal = all(self.is_literal(each) for command in exports for each in command.assignments)
        return len(exports) == len(statement.commands) and literal and not statement.is_compound

    def contains_secret(self, each: Word | Assignment) -> bool:
        """Return whether an expansion contains the value of a variable with a secret's name."""
        return "$" in each.source and any(value in each.text for value in self.secrets)

    # Notes

    def note_same_statement(self, statements: Sequence[Statement]) -> None:
        """Note the other commands in the training's statement."""
        before = self.training.command
        for command in (each for statement in statements for each in statement.commands):
            if command is self.training.command:
                continue
            is_later = command.start > self.training.command.start
            if is_later and before.piped:
                before = command
                continue
            program = command.texts[0] if command.texts else ""
            if program not in {"", ":", "true", *_TESTS} and not self.is_ours(command):
                option = "--teardown" if is_later else "--setup"
                why = f"not carried over: part of the training's statement; add it with {option}"
                if self.job.score(command) >= TRAINS:
                    why = "not carried over: a run has one training step; submit this separately"
                self.line.note(command.line, display_line(command), why)

    def note_training(self, statement: Statement) -> None:
        """Note a second training; a run has only one."""
        for command in statement.commands:
            if self.job.score(command) >= TRAINS:
                option = "--setup" if command.line < self.where else "--teardown"
                why = f"became {option}, because a run has one training: submit this separately"
                self.line.note(command.line, display_line(command), why)

    def note_lines(self, setup: Sequence[str], teardown: Sequence[str]) -> None:
        """Note how setup and teardown lines differ from lines of a batch script."""
        for text in setup:
            if re.match(r"(?:cd|pushd)\s", text):
                why = "the tasks then run there, not in the run's copy of your directory"
                self.line.note(0, text, why)
            elif re.search(r"(?:^|[\s'\"])\.\./", text):
                why = "is relative to the run's copy of your directory: write an absolute path"
                self.line.note(0, text, why)
        sets_errexit = any(_sets_errexit(c) for s in self.statements for c in s.commands)
        if not sets_errexit and any(not _CANNOT_FAIL.match(each) for each in setup):
            why = (
                "a failing setup line ends the run, but did not end the script: if one may fail, "
                "put --setup 'set +e' first"
            )
            self.line.note(0, "", why)
        for text in teardown:
            if "$?" in text:
                why = (
                    "$? is not the tasks' exit code here: submit this as a job with --dependency "
                    "afterok:JOB"
                )
                self.line.note(0, text, why)
        if any(not _CANNOT_FAIL.match(each) for each in teardown):
            why = "teardown lines run after every attempt, even after a failure"
            self.line.note(0, "", why)


def _typed(words: Iterable[str]) -> str:
    """Return words quoted for bash; unprintable characters become byte escapes."""
    return " ".join(
        shlex.quote(word) if word.isprintable() else f"$'{_escaped(word)}'" for word in words
    )


def _without_line_ends(quoted: re.Match[str]) -> str:
    """Escape the newlines of a quoted text so that it fits on one line."""
    text, quote = quoted[0], quoted[0][0]
    if quote == "$":
        return text.replace("\n", "\\n")
    if quote == "'" or (quote == '"' and not re.search(r"\$\(|`", text)):
        return text.replace("\n", f"{quote}$'\\n'{quote}")
    return text


def _escaped(word: str) -> str:
    typed = ""
    for each in word:
        if not each.isprintable():
            typed += "".join(f"\\x{byte:02x}" for byte in each.encode(errors="surrogateescape"))
        else:
            typed += f"\\{each}" if each in "\\'" else each
    return typed


def _function(statement: Statement) -> str:
    """Return the name of the function that a statement defines, or an empty text."""
    named = _NAMED.match(statement.source)
    defines = all("function" in command.inside for command in statement.commands)
    return named[1] or named[2] if named and defines else ""


def _reads_argument(text: str) -> bool:
    """Return whether a text uses an argument of the script outside single quotes."""
    return _ARGUMENT_USE.search(re.sub(r"'[^']*'", "", text)) is not None


def _is_secret(assignment: Assignment) -> bool:
    """Return whether the file contains the value of a variable with a secret's name."""
    has_value = is_known(assignment.text) or _DEFAULT.search(assignment.source)
    return bool(re.search(forms.SECRET, assignment.name) and has_value)


def _is_word(word: str, text: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])", text) is not None


def _loaded(statement: Statement) -> list[str]:
    """Return the modules that a statement loads; none if it does anything else."""
    names: list[str] = []
    for command in statement.commands:
        program, *arguments = command.texts or ("",)
        loads = bool(arguments) and arguments[0] in _LOADS
        loads_shortly = program == "ml" and bool(arguments) and arguments[0] not in _NO_MODULES
        if statement.is_compound or command.redirects or not (loads or loads_shortly):
            return []
        modules = arguments[1:] if loads else arguments
        if program not in ("module", "ml") or not all(map(_is_module, modules)):
            return []
        names += modules
    return names


def _is_module(name: str) -> bool:
    return re.fullmatch(forms.MODULE.pattern, name) is not None


def _only_sets(statement: Statement) -> bool:
    """Return whether a statement only sets variables of the batch shell."""
    return bool(statement.assigned) and not any(
        each.exported for command in statement.commands for each in command.assignments
    )


def _prints(command: Command) -> bool:
    return command.texts[:1] != () and command.texts[0] in PRINTS


def _sets_errexit(command: Command) -> bool:
    program, *flags = command.texts or ("",)
    return program == "set" and any(
        flag == "errexit" or re.fullmatch(r"-[a-z]*e[a-z]*", flag) for flag in flags
    )

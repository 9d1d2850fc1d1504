"""Parses shell text into commands, without running any of it.

Words are expanded statically, following bash: quotes are removed, variables assigned in the text
are replaced by their values and split unless quoted. An expansion known only at run time
(`$SLURM_PROCID`, `$(hostname)`) becomes a mark: one private-use character, described in
`Script.expansions`. Values are therefore plain strings, and the text of `bash -c "…"` can be parsed
again: its marks are expansions of the outer shell.

The parser knows the parts of bash's grammar common in job scripts: quotes, here-documents,
substitutions, arrays, functions, conditions, loops. It accepts malformed text.
"""

import ast
import bisect
import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD
_MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")
_DEEPEST = 40
"""Deepest nesting of substitutions to parse; scripts written by hand stay below ten."""
_MAX_VALUE = 8_192
"""Length limit of a variable's value; stops values that keep doubling."""
_MAX_EXPANDED = 1 << 20
"""Limit of characters that variables may insert; later ones become marks."""

_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(?:&>>|&>|<<<|<<-|<<|>>|>\||>&|<&|<>|[<>](?!\())")
_OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;&|()\n]")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\[[^\]\n]*\])?(?P<op>\+?=)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]")
_COMPOUND = frozenset({"if", "while", "until", "for", "select", "case"})
_BETWEEN = frozenset({"then", "else", "elif", "do", "!", "time", "coproc"})
_ENDS = {"fi": "if", "done": "", "esac": "case", "}": "{"}
_DECLARE = frozenset({"export", "declare", "typeset", "local", "readonly"})
_CONDITIONAL = frozenset({"if", "while", "until", "for", "select", "case", "function", "("})
"""Constructs whose assignments may not have happened afterwards."""


@dataclass(frozen=True)
class Expansion:
    """A value known only at run time: a variable or a command substitution."""

    source: str
    """Source text: `$SLURM_PROCID`, `$(hostname)`."""
    line: int
    name: str = ""
    """Name of the variable; empty for a substitution."""
    commands: tuple["Command", ...] = ()
    """Commands of a substitution."""


@dataclass(frozen=True)
class Word:
    """A word as its command receives it."""

    text: str
    line: int
    source: str
    """Source text with quotes; words split from one unquoted variable share it."""
    quoted: bool = False
    start: int = 0
    """Offset of its first character in the text."""


@dataclass(frozen=True)
class Assignment:
    """`NAME=value`, also before a command or after export."""

    name: str
    text: str
    line: int
    source: str
    """Source text of the value."""
    exported: bool = False


@dataclass(frozen=True)
class Redirect:
    """`>file`, `2>&1`, or a here-document with its body."""

    operator: str
    target: str
    line: int
    body: str | None = None
    """Text of a here-document, with marks for run-time expansions."""


@dataclass(frozen=True)
class Command:
    """A simple command: assignments, words, redirections."""

    words: tuple[Word, ...]
    assignments: tuple[Assignment, ...]
    redirects: tuple[Redirect, ...]
    line: int
    last_line: int
    source: str
    """Full source text."""
    inside: tuple[str, ...] = ()
    """Enclosing constructs, outermost first: `if`, `for`, `while`, `case`, `function`, `(`, `{`."""
    background: bool = False
    piped: bool = False
    """True if its output is piped to another command."""
    start: int = 0
    """Offset of its first character in the text."""

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(word.text for word in self.words)


@dataclass
class Script:
    """Parsed shell text."""

    commands: list[Command] = field(default_factory=list)
    expansions: list[Expansion] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    """Variables set by the text, with their values at its end."""
    exported: set[str] = field(default_factory=set)
    comments: set[int] = field(default_factory=set)
    """Lines with a comment."""
    closed: set[int] = field(default_factory=set)
    """Lines that end a command or construct outside all others."""
    spent: list[int] = field(default_factory=lambda: [0])
    """Characters inserted by variables: one number, shared with substitutions."""

    def direct(self, text: str) -> tuple[Expansion, ...]:
        """Return the run-time expansions in a value, in order."""
        return tuple(self.expansions[ord(mark) - _FIRST_MARK] for mark in _MARKS.findall(text))

    def expanded(self, text: str) -> tuple[Expansion, ...]:
        """Return the run-time expansions in a value, including those in substitutions."""
        found: dict[str, Expansion] = {}
        waiting = _MARKS.findall(text)
        while waiting:
            mark = waiting.pop(0)
            if mark not in found:
                found[mark] = expansion = self.expansions[ord(mark) - _FIRST_MARK]
                for command in expansion.commands:
                    waiting += _MARKS.findall("".join(values(command)))
        return tuple(found.values())

    def with_sources(self, text: str) -> str:
        """Return a value with each mark replaced by its source text."""
        return _MARKS.sub(lambda mark: self.expansions[ord(mark[0]) - _FIRST_MARK].source, text)


def values(command: Command) -> Iterable[str]:
    """Yield each value of a command: words, assignments, redirections."""
    yield from command.texts
    yield from (assignment.text for assignment in command.assignments)
    for redirect in command.redirects:
        yield redirect.target
        yield redirect.body or ""


def typed(words: Sequence[Word]) -> str:
    """Return the source text of words on one line, each text once."""
    sources = {word.start: word.source for word in words}
    return " ".join(on_one_line(source) for source in sources.values())


def display_line(command: Command) -> str:
    """Return a command's words up to a line break, without the values of assignments."""
    words = typed(command.words).split("\n")[0]
    if command.texts and command.texts[0] not in _DECLARE:
        return words
    return " ".join([*filter(None, [words]), *(f"{each.name}=…" for each in command.assignments)])


def on_one_line(source: str) -> str:
    """Return a source text with continuation lines joined."""
    return re.sub(r"\s*\\\n\s*", " ", source).strip()


def is_known(text: str) -> bool:
    """Return whether a value is known statically."""
    return not _MARKS.search(text)


def read(text: str, *, first_line: int = 1, outer: Script | None = None) -> Script:
    """Parse shell text.

    outer: the script of which the text is a value; its marks keep their meaning.
    """
    script = Script()
    if outer:
        script.expansions = outer.expansions
    else:
        text = _MARKS.sub("\N{REPLACEMENT CHARACTER}", text)
    text = text.replace("\r\n", "\n").replace("\0", "\N{REPLACEMENT CHARACTER}")
    _Reader(text, script, first_line).read()
    return script


@dataclass(frozen=True)
class _Piece:
    """A part of a word: its value, or its values if bash splits it."""

    text: str = ""
    quoted: bool = False
    splits: bool = False
    fields: tuple[str, ...] | None = None
    """Elements of an array, each a separate word."""


class _Reader:
    def __init__(
        self,
        text: str,
        script: Script,
        first_line: int,
        depth: int = 0,
        line_starts: Sequence[int] = (),
    ) -> None:
        self.text, self.script, self.first_line, self.depth = text, script, first_line, depth
        self.at = 0
        self.arrays: dict[str, tuple[str, ...]] = {}
        self.inside: list[str] = []
        self.preceding = ""
        """Operator before this command, such as &&."""
        self.optional: set[int] = set()
        """Depths of braces after && or ||."""
        self.unsettled: list[tuple[float, str, int]] = []
        """Variables set conditionally: depth at which the condition ends, name and line."""
        self.line_starts = line_starts or [0, *(end.end() for end in re.finditer("\n", text))]
        self.here_documents: list[tuple[int, str, bool, bool]] = []
        self.bodies: dict[int, str] = {}
        self.waiting: list[tuple[Command, list[int | None]]] = []

    def line(self, at: int) -> int:
        return bisect.bisect_right(self.line_starts, at) - 1 + self.first_line

    # Commands

    def read(self, end: str = "") -> None:
        """Read commands up to the end or to an unmatched closing parenthesis."""
        depth = len(self.inside)
        pattern = False  # at a pattern of a case
        while True:
            self.blanks()
            if self.at >= len(self.text):
                break
            if self.text[self.at] == ")" and end == ")" and len(self.inside) <= depth:
                break
            if between := _OPERATOR.match(self.text, self.at):
                self.at = between.end()
                if between[0] == "\n":
                    self.here_bodies()
                    if not self.inside and not self.preceding:
                        self.script.closed.add(self.line(self.at - 1))
                elif between[0] == "(":
                    if self.text.startswith("(", self.at):
                        self.arithmetic_command()
                    else:
                        self.inside.append("(")
                elif between[0] == ")" and "(" in self.inside[depth:]:
                    self.pop("(")
                elif between[0].startswith(";;") and "case" in self.inside:
                    pattern = True
                if between[0] in ("&&", "||", "|", "|&"):
                    self.preceding = between[0]
                elif between[0] != "\n" or not self.preceding:
                    self.preceding = ""
                    self.settle()
                continue
            if pattern:
                pattern = False
                if not self.word_here("esac"):
                    self.pattern()
                    continue
            keyword = self.keyword()
            if keyword == "case":
                self.at = self.line_end_of("in")
                pattern = True
            elif not keyword:
                self.simple()
                self.preceding = ""
        self.here_bodies()
        del self.inside[depth:]

    def pop(self, opened: str) -> None:
        """Leave the innermost construct of a kind; an empty name leaves a loop."""
        for index in range(len(self.inside) - 1, -1, -1):
            kind = self.inside[index]
            if kind == opened or (not opened and kind in ("for", "while", "until", "select")):
                del self.inside[index:]
                break
        while self.inside and self.inside[-1] == "function":
            self.inside.pop()
        self.settle()

    def settle(self) -> None:
        """Replace variables set under a condition that ends here by marks."""
        self.optional = {depth for depth in self.optional if depth <= len(self.inside)}
        while self.unsettled and self.unsettled[-1][0] > len(self.inside):
            _, name, line = self.unsettled.pop()
            self.script.variables[name] = self.mark(Expansion(f"${name}", line, name))
            self.arrays.pop(name, None)

    def keyword(self) -> str:
        """Read a reserved word of the shell, if there is one here; return it."""
        match = re.compile(r"[A-Za-z_!{}][\w.:-]*").match(self.text, self.at)
        if not match:
            return ""
        word, end = match[0], match.end()
        ends_here = end >= len(self.text) or self.text[end] in " \t\n;&|()<>"
        function = re.compile(r"[ \t]*\([ \t]*\)\s*").match(self.text, end)
        if function and word not in _COMPOUND | _BETWEEN and word not in _ENDS:
            self.inside.append("function")
            self.at = function.end()
            return "function"
        if not ends_here:
            return ""
        if word == "function":
            named = re.compile(r"[ \t]+\S+?[ \t]*(\([ \t]*\))?\s*(?=\{)").match(self.text, end)
            self.at = named.end() if named else end
            self.inside.append("function")
        elif word in _COMPOUND:
            self.at = end
            self.inside.append(word)
            if word in ("for", "select"):
                self.loop()
        elif word in _BETWEEN:
            self.at = end
        elif word in _ENDS:
            self.at = end
            self.pop(_ENDS[word])
        elif word == "{":
            self.at = end
            self.inside.append("{")
            if self.preceding in ("&&", "||"):
                self.optional.add(len(self.inside))
            self.preceding = ""
        else:
            return ""
        return word

    def loop(self) -> None:
        """Read `NAME in words` or `((…))`; the loop variable becomes a mark."""
        self.blanks()
        if self.text.startswith("((", self.at):
            self.at += 1
            self.arithmetic_command()
            return
        if name := _NAME.match(self.text, self.at):
            self.at = name.end()
            self.script.variables[name[0]] = self.mark(
                Expansion(f"${name[0]}", self.line(name.start()), name[0])
            )
            self.blanks()
            if self.word_here("in"):
                self.simple(declares=False)

    def pattern(self) -> None:
        """Skip the patterns of a case up to their parenthesis."""
        while self.at < len(self.text) and self.text[self.at] not in ")\n":
            if self.text[self.at] in "\"'":
                self.pieces_of_quote()
            else:
                self.at += 1
        self.at += 1

    def arithmetic_command(self) -> None:
        end = self.text.find("))", self.at)
        self.at = end + 2 if end >= 0 else len(self.text)

    def word_here(self, word: str) -> bool:
        end = self.at + len(word)
        return self.text.startswith(word, self.at) and (
            end >= len(self.text) or self.text[end] in " \t\n;&|)"
        )

    def line_end_of(self, word: str) -> int:
        match = re.compile(rf"[^\n]*?\b{word}\b").match(self.text, self.at)
        return match.end() if match else self.at

    def simple(self, *, declares: bool = True) -> None:
        """Read a simple command and add it to the script."""
        start, before = self.at, dict(self.script.variables)
        words: list[Word] = []
        assignments: list[Assignment] = []
        redirects: list[Redirect] = []
        bodies: list[int | None] = []
        condition = False
        while True:
            self.blanks()
            if self.at >= len(self.text):
                break
            if redirect := _REDIRECT.match(self.text, self.at):
                if not condition:
                    self.redirect(redirect, redirects, bodies)
                    continue
            elif _OPERATOR.match(self.text, self.at) and not condition:
                break
            begin = self.at
            if condition and _OPERATOR.match(self.text, self.at):
                self.at += 1
                continue
            if condition and redirect:
                self.at = redirect.end()
                continue
            declaring = bool(words) and words[0].text in _DECLARE
            assigned = _ASSIGNMENT.match(self.text, self.at)
            if declares and assigned and (not words or declaring):
                self.assign(assigned, assignments, exported=declaring and _exports(words))
                continue
            made = self.word()
            if self.at == begin:  # unreadable character
                self.at += 1
                continue
            words += made
            if begin == start and self.text[begin : self.at] == "[[":
                condition = True
            elif condition and self.text[begin : self.at] == "]]":
                condition = False
            if declaring and _exports(words[:1]) and len(made) == 1:
                self.script.exported.add(made[0].text)
        command = self.command(start, words, assignments, redirects)
        if words and words[0].text not in _DECLARE:
            self.script.variables.update(
                {each.name: before[each.name] for each in assignments if each.name in before}
            )
            for each in assignments:  # only for this command: `A=1 srun …`
                if each.name not in before:
                    self.script.variables.pop(each.name, None)
        if declares and (words or assignments or redirects):
            self.add(command, bodies)

    def command(
        self,
        start: int,
        words: Sequence[Word],
        assignments: Sequence[Assignment],
        redirects: Sequence[Redirect],
    ) -> Command:
        """Return the command from `start` up to here."""
        ending = match[0] if (match := _OPERATOR.match(self.text, self.at)) else ""
        return Command(
            words=tuple(words),
            assignments=tuple(assignments),
            redirects=tuple(redirects),
            line=self.line(start),
            last_line=self.line(max(start, self.at - 1)),
            source=self.text[start : self.at].rstrip(),
            inside=tuple(self.inside),
            background=ending == "&",
            piped=ending in ("|", "|&"),
            start=start,
        )

    def add(self, command: Command, bodies: list[int | None]) -> None:
        if any(number is not None for number in bodies):
            self.waiting.append((command, bodies))
        self.script.commands.append(command)
        if command.words and command.words[0].text not in _DECLARE:
            self.forget_set_by(command)
        self.script.exported.update(each.name for each in command.assignments if each.exported)

    def forget_set_by(self, command: Command) -> None:
        """Forget the variables that `read` or a similar builtin sets."""
        if command.texts[0] in ("read", "mapfile", "readarray", "unset", "getopts"):
            for word in command.words[1:]:
                if not word.text.startswith("-"):
                    self.script.variables.pop(word.text, None)
                    self.arrays.pop(word.text, None)

    def assign(
        self, match: re.Match[str], assignments: list[Assignment], *, exported: bool
    ) -> None:
        """Read the value of an assignment and set the variable."""
        begin, name = self.at, match["name"]
        self.at = match.end()
        if self.text.startswith("(", self.at):
            fields = self.array()
            before = self.arrays.get(name, ()) if match["op"] == "+=" else ()
            self.arrays[name] = fields = (*before, *fields)
            text = " ".join(fields)
        else:
            text = "".join(piece.text for piece in self.pieces())
            if match["op"] == "+=":
                before_it = self.script.variables.get(name)
                if before_it is None:  # perhaps set in the environment
                    before_it = self.mark(Expansion(f"${name}", self.line(begin), name))
                text = before_it + text
            self.arrays.pop(name, None)
        text = text[:_MAX_VALUE]
        source = self.text[match.end() : self.at]
        line = self.line(begin)
        assignments.append(Assignment(name, text, line, source, exported))
        before_text = self.script.variables.get(name)
        kinds = [
            at
            for at, kind in enumerate(self.inside, 1)
            if kind in _CONDITIONAL or at in self.optional
        ]
        if before_text != text and self.preceding in ("&&", "||"):
            self.unsettled.append((len(self.inside) + 0.5, name, line))
        elif before_text is None and kinds:
            self.unsettled.append((kinds[-1], name, line))
        elif before_text != text and kinds:
            text = self.mark(Expansion(f"${name}", line, name))  # old or new value
            self.arrays.pop(name, None)
        self.script.variables[name] = text

    def array(self) -> tuple[str, ...]:
        """Read an array's `(word word)`."""
        self.at += 1
        fields: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            self.blanks()
            if self.at < len(self.text) and self.text[self.at] == "\n":
                self.at += 1
                continue
            if self.at < len(self.text) and self.text[self.at] == ")":
                break
            begin = self.at
            fields += [word.text for word in self.word()]
            if self.at == begin:
                self.at += 1
        self.at += 1
        return tuple(fields)

    def redirect(
        self, match: re.Match[str], redirects: list[Redirect], bodies: list[int | None]
    ) -> None:
        line, kind = self.line(self.at), match[0].lstrip("0123456789")
        self.at = match.end()
        self.blanks()
        begin = self.at
        made = self.word()
        target = made[0].text if made else ""
        number = None
        if kind in ("<<", "<<-"):
            source = self.text[begin : self.at]
            number = len(self.bodies) + len(self.here_documents)
            is_quoted = any(character in source for character in "\"'\\")
            self.here_documents.append((number, target, is_quoted, kind == "<<-"))
        redirects.append(Redirect(match[0], target, line))
        bodies.append(number)

    def here_bodies(self) -> None:
        """Read the here-documents that the previous line opened."""
        for number, delimiter, is_quoted, tabs in self.here_documents:
            begin, end = self.at, len(self.text)
            at = begin
            while at < len(self.text):
                stop = self.text.find("\n", at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[at:stop]
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    end = at
                    self.at = stop + 1
                    break
                at = stop + 1
            else:
                self.at = len(self.text)
            body = self.text[begin:end]
            self.bodies[number] = body if is_quoted else self.expand_text(body, self.line(begin))
        self.here_documents.clear()
        for command, bodies in self.waiting:
            redirects = tuple(
                redirect
                if number is None
                else dataclasses.replace(redirect, body=self.bodies.get(number, ""))
                for redirect, number in zip(command.redirects, bodies, strict=True)
            )
            for index in range(len(self.script.commands) - 1, -1, -1):
                if self.script.commands[index] is command:
                    self.script.commands[index] = dataclasses.replace(command, redirects=redirects)
                    break
        self.waiting.clear()

    # Words

    def blanks(self) -> None:
        """Skip blanks, continued lines and a comment."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                self.script.comments.add(self.line(self.at))
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                break

    def word(self) -> list[Word]:
        """Read a word; return the words that bash splits it into."""
        begin = self.at
        pieces = self.pieces()
        source, line = self.text[begin : self.at], self.line(begin)
        if not source:
            return []
        is_quoted = any(piece.quoted for piece in pieces)
        fields: list[str] = [""]
        is_empty = True
        for piece in pieces:
            parts = (
                list(piece.fields)
                if piece.fields is not None
                else (piece.text.split() if piece.splits else [piece.text])
            )
            if not parts:
                continue
            is_empty = False
            fields[-1] += parts[0]
            fields += parts[1:]
        if is_empty and not is_quoted:
            return []
        return [Word(text[:_MAX_VALUE], line, source, is_quoted, begin) for text in fields]

    def pieces(self) -> list[_Piece]:
        """Read the parts of one word up to an unquoted blank or operator."""
        pieces: list[_Piece] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in " \t\n;&|)" or (character in "<>" and not self.substitutes()):
                break
            if character == "(" and not (pieces and pieces[-1].text[-1:] in "?*+@!="):
                break
            if character in "\"'" or self.text.startswith("$'", self.at):
                pieces += self.pieces_of_quote()
            elif character == "\\":
                if not self.text.startswith("\\\n", self.at):
                    pieces.append(_Piece(self.text[self.at + 1 : self.at + 2], quoted=True))
                self.at += 2
            elif character in "$`" or self.substitutes():
                pieces.append(self.expansion(quoted=False))
            else:
                begin = self.at
                self.at += 1
                while self.at < len(self.text) and self.text[self.at] not in " \t\n;&|()<>\"'\\$`":
                    self.at += 1
                pieces.append(_Piece(self.text[begin : self.at]))
        return pieces

    def substitutes(self) -> bool:
        return self.text.startswith(("<(", ">("), self.at)

    def pieces_of_quote(self) -> list[_Piece]:
        """Read a quoted text."""
        if self.text.startswith("$'", self.at):
            match = re.compile(r"\$'((?:[^'\\]|\\.)*)'?", re.DOTALL).match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            return [_Piece(re.sub(r"\\(.)", _of_escape, match[1], flags=re.DOTALL), quoted=True)]
        if self.text[self.at] == "'":
            end = self.text.find("'", self.at + 1)
            end = len(self.text) if end < 0 else end
            text = self.text[self.at + 1 : end]
            self.at = end + 1
            return [_Piece(text, quoted=True)]
        self.at += 1
        pieces = [_Piece(quoted=True)]
        while self.at < len(self.text) and self.text[self.at] != '"':
            pieces.append(self.piece_in_double_quotes())
        self.at += 1
        return pieces

    def piece_in_double_quotes(self, ends: str = '"') -> _Piece:
        character = self.text[self.at]
        if character == "\\":
            escaped = self.text[self.at + 1 : self.at + 2]
            self.at += 2
            if escaped == "\n":
                return _Piece(quoted=True)
            return _Piece(escaped if escaped in '$`"\\' else "\\" + escaped, quoted=True)
        if character in "$`":
            return self.expansion(quoted=True)
        begin = self.at
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] not in ends + "\\$`":
            self.at += 1
        return _Piece(self.text[begin : self.at], quoted=True)

    def expand_text(self, text: str, line: int) -> str:
        """Expand a text that bash treats as double-quoted; its own quotes stay."""
        if self.depth >= _DEEPEST:
            return text
        inner = _Reader(text, self.script, line, self.depth + 1)
        inner.arrays = self.arrays
        parts = []
        while inner.at < len(text):
            parts.append(inner.piece_in_double_quotes(ends=""))
        return "".join(piece.text for piece in parts)

    def expansion(self, *, quoted: bool) -> _Piece:
        """Read `$NAME`, `${…}`, `$(…)`, `$((…))`, backquoted text or `<(…)`."""
        begin, line = self.at, self.line(self.at)
        text = self.text
        if text.startswith("$((", begin):
            return self.arithmetic(quoted)
        if text.startswith(("$(", "<(", ">("), begin):
            self.at += 2
            return self.unknown(begin, line, quoted, self.substitution())
        if text[begin] == "`":
            match = re.compile(r"`((?:[^`\\]|\\.)*)`?", re.DOTALL).match(text, begin)
            assert match is not None
            self.at = match.end()
            commands = self.commands_of(re.sub(r"\\([`$\\])", r"\1", match[1]), line)
            return self.unknown(begin, line, quoted, commands)
        if text.startswith("${", begin):
            return self.braces(quoted)
        self.at += 1
        name = _PARAMETER.match(text, self.at)
        if not name:
            return _Piece("$", quoted)
        self.at = name.end()
        return self.variable(name[0], begin, line, quoted)

    def variable(self, name: str, begin: int, line: int, quoted: bool) -> _Piece:
        value = self.script.variables.get(name)
        if value is None or not self.may_expand(value):
            source = self.text[begin : self.at]
            return _Piece(self.mark(Expansion(source, line, name)), quoted, splits=False)
        return _Piece(value, quoted, splits=not quoted)

    def may_expand(self, value: str) -> bool:
        """Return whether a variable's value is within the expansion limit; count it."""
        self.script.spent[0] += len(value)
        return self.script.spent[0] < _MAX_EXPANDED

    def braces(self, quoted: bool) -> _Piece:
        """Read `${NAME}` with its optional index and operator."""
        begin, line = self.at, self.line(self.at)
        self.at += 2
        prefix = ""
        if self.text[self.at : self.at + 1] in ("#", "!"):
            prefix = self.text[self.at]
            self.at += 1
        match = _PARAMETER.match(self.text, self.at)
        name = match[0] if match else ""
        self.at += len(name)
        index = ""
        if self.text[self.at : self.at + 1] == "[":
            end = self.text.find("]", self.at)
            end = len(self.text) if end < 0 else end
            index = self.text[self.at + 1 : end]
            self.at = end + 1
        operation = re.compile(r":?[-=+?]|[^}]").match(self.text, self.at)
        inside = self.argument()
        fields = None if prefix or operation else self.arrays.get(name)
        if fields is not None and self.may_expand("".join(fields)):
            if index in ("@", "*"):
                return _Piece("", quoted, fields=fields)
            if (index or "0").isdecimal() and len(index) < 9 and int(index or 0) < len(fields):
                return _Piece(fields[int(index or 0)], quoted, splits=not quoted)
        known = name in self.script.variables and not index and not prefix
        if operation and operation[0][-1] in "-=" and known:
            value = self.script.variables[name]
            if not value and operation[0].startswith(":"):
                value = self.expand_text(inside, line)
            return _Piece(value, quoted, splits=not quoted)
        if known and not operation:
            return self.variable(name, begin, line, quoted)
        return _Piece(self.mark(Expansion(self.text[begin : self.at], line, name)), quoted)

    def argument(self) -> str:
        """Skip the rest of `${NAME…}`; return the operator's argument."""
        start = self.at
        match = re.compile(r":?[-=+?]").match(self.text, start)
        begin = match.end() if match else start
        self.at = begin
        depth = 1
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "\\":
                self.at += 1
            elif character in "'\"" and self.text.find(character, self.at + 1) > 0:
                self.at = self.text.find(character, self.at + 1)
            elif character == "{":
                depth += 1
            elif character == "}":
                depth -= 1
                if not depth:
                    break
            self.at += 1
        text = self.text[begin : self.at]
        self.at += 1
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
            text = text[1:-1]
        return text

    def arithmetic(self, quoted: bool) -> _Piece:
        """Read `$((…))`; return its value if all its numbers are known."""
        begin, line = self.at, self.line(self.at)
        depth, at = 0, begin + 1
        while at < len(self.text):
            depth += {"(": 1, ")": -1}.get(self.text[at], 0)
            at += 1
            if not depth:
                break
        self.at = at
        inside = self.text[begin + 3 : max(begin + 3, at - 2)]
        if self.depth < _DEEPEST and len(inside) < 1000:
            text = self.expand_text(inside, line)
            text = _NAME.sub(lambda name: self.script.variables.get(name[0], name[0]), text)
            value = evaluate(text)
            if value is not None:
                return _Piece(str(value), quoted)
            if not is_known(text):
                words = (Word("".join(_MARKS.findall(text)), line, inside),)
                command = Command(words, (), (), line, line, inside)
                return self.unknown(begin, line, quoted, (command,))
        name = _NAME.search(inside)
        expansion = Expansion(self.text[begin : self.at], line, name[0] if name else "")
        return _Piece(self.mark(expansion), quoted)

    def substitution(self) -> tuple[Command, ...]:
        """Read the commands of `$(…)` up to the closing parenthesis."""
        script, deeper = self._sub_script(), self.depth + 1
        inner = _Reader(self.text, script, self.first_line, deeper, self.line_starts)
        inner.at, inner.arrays = self.at, dict(self.arrays)
        if self.depth < _DEEPEST:
            inner.read(end=")")
        else:
            inner.at = len(self.text)
        self.at = min(inner.at + 1, len(self.text))
        return tuple(inner.script.commands)

    def commands_of(self, text: str, line: int) -> tuple[Command, ...]:
        inner = _Reader(text, self._sub_script(), line, self.depth + 1)
        inner.arrays = dict(self.arrays)
        if self.depth < _DEEPEST:
            inner.read()
        return tuple(inner.script.commands)

    def _sub_script(self) -> Script:
        return Script(
            expansions=self.script.expansions,
            variables=dict(self.script.variables),
            spent=self.script.spent,
        )

    def unknown(self, begin: int, line: int, quoted: bool, commands: tuple[Command, ...]) -> _Piece:
        source = self.text[begin : self.at]
        return _Piece(self.mark(Expansion(source, line, commands=commands)), quoted)

    def mark(self, expansion: Expansion) -> str:
        number = _FIRST_MARK + len(self.script.expansions)
        if number > _LAST_MARK:
            return "\N{REPLACEMENT CHARACTER}"
        self.script.expansions.append(expansion)
        return chr(number)


def evaluate(text: str) -> int | None:
    """Return the value of a bash arithmetic expression of plain numbers, or None."""
    if not re.fullmatch(r"[\d+*/%() -]{1,200}", text, re.ASCII):
        return None
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
        return None


_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    raise ValueError(node)


def _exports(words: Sequence[Word]) -> bool:
    if not words:
        return False
    flags = "".join(word.text for word in words[1:] if word.text.startswith("-"))
    return words[0].text == "export" or "x" in flags


def _of_escape(match: re.Match[str]) -> str:
    return {"n": "\n", "t": "\t", "r": "\r"}.get(match[1], match[1])

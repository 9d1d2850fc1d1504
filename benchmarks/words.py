"""Counts wording that plain English avoids: `python -m benchmarks.words [--list] [FOLDER|COMMIT]`.

Counts each pattern of words.tsv in the package's comments and docstrings, in its strings (messages
and help), in the error pages and in the docs, and exits with 1 if a total is above its limit. A
limit only falls. A page must also have short sentences and short table cells.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import source

LIMITS = {"comments": 66, "strings": 16, "error pages": 4, "docs": 8}
"""Hits allowed in each kind of text."""
SENTENCE_WORDS = 18
"""Upper limit of a page's mean sentence, in words."""
CELL_WORDS = 25
"""Words allowed in a cell of a table."""
_PATTERNS = Path(__file__).with_name("words.tsv")


@dataclass(frozen=True)
class Pattern:
    """An expression to avoid, and what to write instead."""

    label: str
    expression: re.Pattern[str]
    write: str


@dataclass(frozen=True)
class Hit:
    """A place where a pattern occurs."""

    kind: str
    place: str
    pattern: Pattern
    text: str


def main() -> None:
    """Print hits per pattern and kind of text, or each place."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkout", nargs="?", default=".", help="a directory or a commit")
    parser.add_argument("--list", action="store_true", help="print each place and its remedy")
    parser.add_argument("--under", default="", help="count files whose path begins with this")
    asked = parser.parse_args()
    with source.checkout(asked.checkout) as root:
        found, long = [*hits(root, asked.under)], [*too_long(root)]
    if asked.list:
        for hit in found:
            print(f"{hit.place}: {hit.text!r}: {hit.pattern.label}; write: {hit.pattern.write}")
    counts = Counter((hit.pattern.label, hit.kind) for hit in found)
    for pattern in patterns():
        row = [counts[pattern.label, kind] for kind in LIMITS]
        print(f"{pattern.label:60.60}", *(f"{count:6}" for count in row))
    totals = Counter(hit.kind for hit in found)
    above = [kind for kind, limit in LIMITS.items() if totals[kind] > limit]
    print(*(f"{kind}: {totals[kind]} (limit {limit})" for kind, limit in LIMITS.items()), sep="\n")
    for kind in above:
        print(f"{kind}: {totals[kind]} hits, limit {LIMITS[kind]}", file=sys.stderr)
    for line in long:
        print(line, file=sys.stderr)
    sys.exit(1 if above or long else 0)


def patterns() -> tuple[Pattern, ...]:
    """Read words.tsv: label, regular expression and replacement of each pattern."""
    rows = (line.split("\t") for line in _PATTERNS.read_text().splitlines()[1:])
    return tuple(Pattern(label, re.compile(text), write) for label, text, write in rows)


def hits(root: Path, under: str = "") -> Iterator[Hit]:
    """Yield each hit in the files of the checkout at root whose path begins with `under`."""
    avoided = patterns()
    for kind, place, line, text in texts(root, under):
        for pattern in avoided:
            for match in pattern.expression.finditer(text):
                at = line + text.count("\n", 0, match.start())
                yield Hit(kind, f"{place}:{at}", pattern, match.group().strip())


def texts(root: Path, under: str = "") -> Iterator[tuple[str, str, int, str]]:
    """Yield the kind, file, first line and content of each piece of prose below `under`."""
    for path in sorted((root / source.NAME).rglob("*.py")):
        name = str(path.relative_to(root))
        if not name.startswith(under):
            continue
        code = path.read_text()
        for line, text in _comments(code):
            yield "comments", name, line, text
        tree = ast.parse(code)
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                kind = "comments" if id(node) in prose else "strings"
                yield kind, name, node.lineno, re.sub(r"\s*\n\s*", " ", node.value)
    for folder, glob, kind in (
        (f"{source.NAME}/reporting", "*.j2", "strings"),
        ("templates", "*.j2", "strings"),
        (f"{source.NAME}/sites", "*.cfg", "strings"),
        (f"{source.NAME}/explained", "*.md", "error pages"),
        ("docs", "**/*.md", "docs"),
        *((".", name, "docs") for name in ("README.md", "SKILL.md", "CONTRIBUTING.md")),
        *((name, "README.md", "docs") for name in ("examples", "benchmarks")),
    ):
        for path in sorted((root / folder).glob(glob)):
            if path.name == "errors.md" or path.parent.name == "reference":
                continue
            name = str(path.relative_to(root))
            if name.startswith(under):
                yield kind, name, 1, path.read_text()


def too_long(root: Path) -> Iterator[str]:
    """Yield each page of docs whose mean sentence is too long, and each table cell that is."""
    for kind, name, _, page in texts(root):
        if kind != "docs":
            continue
        text = re.sub(r"^```.*?^```$|^---\n.*?^---$|<[^>]+>", "", page, flags=re.M | re.S)
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        rows = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
        cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
        for cell in cells:
            if len(cell.split()) > CELL_WORDS:
                yield f"{name}: a table cell of more than {CELL_WORDS} words: {cell.strip()}"
        prose = re.sub(r"^[|#].*$", "", text, flags=re.MULTILINE)
        sentences = [
            words
            for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", prose)
            for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`\"'*\[(-])", paragraph)
            if len(words := sentence.split()) > 1
        ]
        mean = sum(map(len, sentences)) / max(len(sentences), 1)
        if mean >= SENTENCE_WORDS:
            yield f"{name}: {mean:.1f} words a sentence, limit {SENTENCE_WORDS}"


def _comments(code: str) -> Iterator[tuple[int, str]]:
    """Yield each block of comment lines as one text, with its first line."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if block and line != last + 1:
                yield first, " ".join(block)
                block = []
            first = first if block else line
            last = line
            block.append(token.string.lstrip("# "))
    if block:
        yield first, " ".join(block)


if __name__ == "__main__":
    main()

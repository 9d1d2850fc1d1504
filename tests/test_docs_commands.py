"""Every `clusterddp …` of the pages is a command that there is, with options that it has."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from clusterddp.cli.main import cli

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted({*(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs" / "reference").iterdir()}),
    *(ROOT / name for name in ("README.md", "SKILL.md", "CONTRIBUTING.md", "examples/README.md")),
]
_PROGRAM = re.compile(r"(?:.*/)?clusterddp")
_PLACES = {"[OPTIONS]", "COMMAND", "[COMMAND]", "[ARGS]...", "…"}
_END = {"|", "||", "&&", ";", ">", "&", ")"}


def lines_of(page: Path) -> Iterator[str]:
    """Yield the lines of blocks and the code within sentences.

    A block of `text` is what a command prints, as is what follows a command in one of `console`.
    """
    text = re.sub(r"\\\n *", "", page.read_text())
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for kind, block in blocks:
        typed = re.sub(r"^(?!\$).*\n", "", block, flags=re.M) if kind == "console" else block
        yield from () if kind == "text" else typed.splitlines()
    yield from (" ".join(span.split()) for span in re.findall(r"`(clusterddp [^`]+)`", text))


def commands_of(line: str) -> Iterator[list[str]]:
    """Yield the words behind each `clusterddp` of a line, to the end of that command.

    A message speaks of clusterddp too, and can end with a command: `clusterddp: …: clusterddp …`.
    """
    if line.startswith("clusterddp: "):
        _, found, rest = line.rpartition(": clusterddp ")
        line = f"clusterddp {rest}" if found else ""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        words = [*lexer]
    except ValueError:
        return  # a quote that ends elsewhere: no line to type
    for place, word in enumerate(words):
        if _PROGRAM.fullmatch(word) and place + 1 < len(words):
            ends = [n for n, other in enumerate(words) if n > place and other in _END]
            yield words[place + 1 : min(ends, default=len(words))]


def parse(words: list[str]) -> None:
    """Have click's own parser look at the options. Raises UsageError; runs nothing."""
    command: click.Command | None = cli
    words = words[: [*words, "--"].index("--")]
    words = [word for word in words if word not in _PLACES]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command = command.get_command(click.Context(command), words[0])
        if command is None:
            raise click.UsageError(f"there is no {words[0]!r}")
        words = words[1:]
    assert command is not None
    ctx = click.Context(command, **{**cli.context_settings, **command.context_settings})
    try:
        command.make_parser(ctx).parse_args([*words])
    except click.BadOptionUsage as error:
        if error.option_name != words[-1]:  # a sentence can name an option without a value
            raise


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_commands_of_a_page_are_there(page: Path) -> None:
    wrong = []
    for line in lines_of(page):
        for words in commands_of(line):
            try:
                parse(words)
            except click.UsageError as error:
                wrong.append(f"{line}: {error.format_message()}")
    assert not wrong


def test_one_that_is_not_there_is_found() -> None:
    for line in ("clusterddp sumbit", "srun clusterddp exec --ranks 2", "a && clusterddp data get"):
        [words] = commands_of(line)
        with pytest.raises(click.UsageError):
            parse(words)
    [words] = commands_of("clusterddp submit --nodes 2 -- python --any  # words")
    parse(words)

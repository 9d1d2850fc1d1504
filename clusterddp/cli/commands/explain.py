"""`clusterddp explain`: prints the cause and remedy of a message's code."""

import dataclasses
import shutil
import sys
import textwrap

import click

from clusterddp.cli.options import JSON_OPTION
from clusterddp.cli.runs import echo_json
from clusterddp.errors import EXIT_DONE, RequestError
from clusterddp.explained import Page, catalogue, code_of, find, is_code


@click.command(name="explain")
@click.argument("typed", nargs=-1, metavar="[CODE... | WORDS]")
@JSON_OPTION
def command(typed: tuple[str, ...], as_json: bool) -> int:
    """Explain CODE, for example CD0401 from the end of a message.

    Without CODE, list all codes. With WORDS, list the codes whose pages contain all of them.

    Exit codes: 0 printed, 2 no such code, or no page with these words.
    """
    if not catalogue():  # in a run's bundle
        raise RequestError(
            "a run's bundled clusterddp has no error pages. Use the installed one, or read "
            "docs/errors.md. [CD0314]"
        )
    pages = find(typed)
    if not pages:
        asked = " ".join(typed)
        wrong = f"there is no code {asked}" if is_code(asked) else f"no page contains {asked!r}"
        raise RequestError(
            f"{wrong}. List all codes: clusterddp explain. Find codes by symptom: "
            "docs/troubleshooting.md. [CD0101]"
        )
    if as_json:
        fields = [field.name for field in dataclasses.fields(Page) if field.name != "text"]
        echo_json([{name: getattr(page, name) for name in fields} for page in pages])
    elif len(pages) == 1 or [page.code for page in pages] == [*map(code_of, typed)]:
        click.echo("\n\n".join(map(_shown, pages)))
    else:
        click.echo(_listed(pages))
    return EXIT_DONE


def _shown(page: Page) -> str:
    paragraphs = page.text.partition("```text")[0].rstrip().split("\n\n")
    width = min(shutil.get_terminal_size().columns, 100) if sys.stdout.isatty() else 80
    text = "\n\n".join([textwrap.fill(" ".join(each.split()), width) for each in paragraphs])
    return f"{page.code}: {text}\n\n{textwrap.indent(page.example, '    ')}"


def _listed(pages: list[Page]) -> str:
    lines: list[str] = []
    for before, page in zip([None, *pages], pages, strict=False):
        if before is None or before.subject != page.subject:
            lines += ["", page.subject]
        lines.append(f"  {page.code}  {page.title}")
    return "\n".join(lines).strip()

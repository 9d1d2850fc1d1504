"""`clusterddp explain`: cause, where to look and remedy of a code that ends a message."""

import dataclasses
import textwrap

import click

from clusterddp.cli.runs import JSON_OPTION, echo_json
from clusterddp.errors import EXIT_DONE, RequestError
from clusterddp.explained import Page, catalogue, code_of, find, nearest


@click.command(name="explain")
@click.argument("typed", nargs=-1, metavar="[CODE… | WORDS]")
@JSON_OPTION
def command(typed: tuple[str, ...], as_json: bool) -> int:
    """Explain CODE, such as CD0401, which stands in brackets at the end of a message.

    Without CODE it lists all of them; with WORDS those whose pages hold all the words.

    Exit codes: 0 printed, 2 there is no such code, and no page with these words.
    """
    if not catalogue():  # in the file that a run carries
        raise RequestError(
            "the clusterddp that a run carries has no pages: type this with the installed one, or "
            "read docs/errors.md. [CD0314]"
        )
    pages = find(typed)
    if not pages:
        asked = " ".join(typed)
        near = ", ".join(nearest(asked))
        if near:
            raise RequestError(f"no page for {asked!r}. Near it are {near}. [CD0101]")
        raise RequestError(
            f"no page has {asked!r}. 'clusterddp explain' lists all, and docs/troubleshooting.md "
            "leads from symptoms to them. [CD0101]"
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
    text = page.text.partition("```text")[0]
    return f"{page.code}: {text}{textwrap.indent(page.example, '    ')}"


def _listed(pages: list[Page]) -> str:
    lines: list[str] = []
    for before, page in zip([None, *pages], pages, strict=False):
        if before is None or before.subject != page.subject:
            lines += ["", page.subject]
        lines.append(f"  {page.code}  {page.title}")
    return "\n".join(lines).strip()

"""The catalogue of codes: title, cause, where to look, remedy and an example of each.

The texts stand beside this module, a Markdown file for each subject; docs/errors.md is made of
them. A code keeps its meaning, and the number of one that is gone is not given again.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
_HEADING = re.compile(r"^## (CD\d{4})\n", re.MULTILINE)
_TYPED = re.compile(r"\[?(?:CD)?0*(\d{1,4})\]?", re.IGNORECASE)
_SECTION = re.compile(r"^(Cause|Look|Remedy|Example):\s", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """Explanation of one code."""

    code: str
    subject: str
    """Title of the file that it stands in."""
    title: str
    cause: str
    look: str
    """How to see more, with a command."""
    remedy: str
    example: str
    """Message, or the lines of one, as it is printed."""
    text: str
    """Title and sections as they are written."""


@cache
def catalogue() -> Mapping[str, Page]:
    """Read all pages, in the order of their codes."""
    pages: dict[str, Page] = {}
    for path in sorted(FOLDER.glob("*.md")):
        head, *parts = _HEADING.split(path.read_text(encoding="utf-8"))
        subject = head.strip().removeprefix("# ").partition("\n")[0]
        for code, text in zip(parts[::2], parts[1::2], strict=True):
            pages[code] = _page(code, subject, text.strip())
    return dict(sorted(pages.items()))


def _page(code: str, subject: str, text: str) -> Page:
    title, *parts = _SECTION.split(text)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    cause, look, remedy = (" ".join(sections[name].split()) for name in ("Cause", "Look", "Remedy"))
    example = sections["Example"].strip().strip("`").removeprefix("text").strip()
    return Page(code, subject, title.strip(), cause, look, remedy, example, text)


def find(asked: str) -> list[Page]:
    """Return the page of a code, typed `CD0123`, `cd123` or `123`; else those with all the words.

    There are none where nothing fits. A number is looked for as a word of its own.
    """
    pages = catalogue()
    if (typed := _TYPED.fullmatch(asked.strip())) and (page := pages.get(_code(typed[1]))):
        return [page]
    words = [rf"\b{w}\b" if w.isdigit() else re.escape(w) for w in asked.lower().split()]
    return [page for page in pages.values() if all(re.search(w, page.text.lower()) for w in words)]


def nearest(asked: str) -> list[str]:
    """Return the codes that are nearest to one that there is not; none for words.

    Fewer than four digits alone are no code, but a number such as the exit code 137.
    """
    typed = _TYPED.fullmatch(asked.strip())
    if not typed or (asked.strip().isdigit() and len(asked.strip()) < 4):
        return []
    return sorted(catalogue(), key=lambda code: abs(int(code[2:]) - int(typed[1])))[:3]


def _code(digits: str) -> str:
    return f"CD{int(digits):04}"

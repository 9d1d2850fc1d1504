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

    There are none where nothing fits.
    """
    digits = re.fullmatch(r"\[?(?:CD)?0*(\d{1,4})\]?", asked.strip(), re.IGNORECASE)
    pages = catalogue()
    if digits:
        page = pages.get(f"CD{int(digits[1]):04}")
        return [page] if page else []
    words = asked.lower().split()
    return [page for page in pages.values() if all(word in page.text.lower() for word in words)]


def nearest(asked: str) -> list[str]:
    """Return the codes that are nearest to one that there is not; none for words."""
    digits = re.sub(r"\D", "", asked)[:4]
    if not digits:
        return []
    return sorted(catalogue(), key=lambda code: abs(int(code[2:]) - int(digits)))[:3]

"""Catalogue of codes: title, cause, check, remedy and an example of each.

The texts are Markdown files in this package, one per subject; docs/errors.md is generated from
them. A code keeps its meaning, and the number of a removed code is not reused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
_HEADING = re.compile(r"^## (CD\d{4})\n", re.MULTILINE)
_SECTION = re.compile(r"^(Cause|Check|Remedy|Example):\s", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """Explanation of one code."""

    code: str
    subject: str
    """Title of its file."""
    title: str
    cause: str
    check: str
    """Command that shows more."""
    remedy: str
    example: str
    """Printed message."""
    text: str
    """Title and sections in Markdown."""


@cache
def catalogue() -> Mapping[str, Page]:
    """Read all pages, ordered by code. A run's bundle has none."""
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
    cause, check, remedy = (" ".join(sections[n].split()) for n in ("Cause", "Check", "Remedy"))
    example = sections["Example"].strip().strip("`").removeprefix("text").strip()
    return Page(code, subject, title.strip(), cause, check, remedy, example, text)


def code_of(word: str) -> str:
    """Return the code typed as `CD0123`, `cd123`, `123` or `[CD0123]`; empty for other words."""
    digits = re.fullmatch(r"\[?(?:CD)?0*(\d{1,4})\]?", word.strip(), re.IGNORECASE)
    return f"CD{int(digits[1]):04}" if digits else ""


def find(typed: Sequence[str]) -> list[Page]:
    """Return the pages of the typed codes, or the pages that contain all the typed words."""
    known = catalogue()
    codes = [code_of(word) for word in typed]
    if typed and known.keys() >= set(codes):
        return [known[code] for code in codes]
    return with_words(typed)


def with_words(words: Sequence[str]) -> list[Page]:
    """Return the pages that contain all the words, ignoring case; all pages for no words.

    A number must match a whole word, a word the start of one: `oom` does not match `room`.
    """
    asked = [
        (r"\b" if w[0].isalnum() else "") + re.escape(w) + (r"\b" if w.isdigit() else "")
        for w in " ".join(words).lower().split()
    ]
    return [
        page
        for page in catalogue().values()
        if all(re.search(word, page.text.lower()) for word in asked)
    ]


def is_code(asked: str) -> bool:
    """Return whether a text has the form of a code; 137 is not one but an exit code."""
    return bool(code_of(asked)) and not (asked.strip().isdigit() and len(asked.strip()) < 4)

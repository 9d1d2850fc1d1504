"""The catalogue of codes: title, cause, where to look, remedy and an example of each.

The texts stand beside this module, a Markdown file for each subject; docs/errors.md is made of
them. A code keeps its meaning, and the number of one that is gone is not given again.
"""

import re
from collections.abc import Mapping, Sequence
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
    """Command that shows more."""
    remedy: str
    example: str
    """Message, or the lines of one, as it is printed."""
    text: str
    """Title and sections as they are written."""


@cache
def catalogue() -> Mapping[str, Page]:
    """Read all pages, in the order of their codes; none in a run's own file, which carries none."""
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


def code_of(word: str) -> str:
    """Return the code that is typed `CD0123`, `cd123`, `123` or `[CD0123]`; empty of a word."""
    digits = re.fullmatch(r"\[?(?:CD)?0*(\d{1,4})\]?", word.strip(), re.IGNORECASE)
    return f"CD{int(digits[1]):04}" if digits else ""


def find(typed: Sequence[str]) -> list[Page]:
    """Return the pages of the codes that were typed; of anything else those with all the words."""
    known = catalogue()
    codes = [code_of(word) for word in typed]
    if typed and known.keys() >= set(codes):
        return [known[code] for code in codes]
    return with_words(typed)


def with_words(words: Sequence[str]) -> list[Page]:
    """Return the pages that hold all the words, in any case; all pages for none.

    A number is looked for as a word of its own, a word as the beginning of one: `oom` is no room.
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
    """Return whether a text has the form of a code; 137 is a number, the exit code."""
    return bool(code_of(asked)) and not (asked.strip().isdigit() and len(asked.strip()) < 4)

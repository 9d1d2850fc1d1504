"""Holds how well the package can be lived in: `python -m benchmarks.house [DIR|COMMIT]`.

Prints each figure with its limit and what it is to come to, and ends with 1 where one is above its
limit, or where nothing was measured. A limit changes in the commit that needs it, with the reason.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import source, walks

_ENTERED = "files entered by "
_MAX_PARTS = 40
"""Parts of a figure that are listed where it is above its limit."""


@dataclass(frozen=True)
class Row:
    """A figure that is held."""

    label: str
    limit: int
    goal: int


HELD = (
    Row("code lines", 44_830, 31_500),
    Row("modules", 244, 185),
    Row("files of the largest package", 16, 16),
    Row("functions above 60 lines", 0, 0),
    Row(f"{_ENTERED}a submission", 34, 24),
    Row(f"{_ENTERED}the batch process", 35, 22),
    Row(f"{_ENTERED}rank 0", 57, 42),
    Row(f"{_ENTERED}another rank", 54, 36),
    Row(f"{_ENTERED}a COMMAND's task", 26, 16),
    Row("places that ask for a run's kind", 20, 20),
    Row("lines of tests", 69_290, 50_000),
    Row("lines of the rendered script", 27, 27),
    Row("dry run: calls of functions", 21_480, 18_000),
    Row("dry run: modules", 34, 34),
    Row("dry run: bytes of bytecode", 632_900, 500_000),
)
"""A dry run's costs are those beyond importing click and jinja2, as Python 3.11 has them."""


def main() -> None:
    """Print the figures of a directory that holds a checkout, or of a commit of this repository."""
    parser = argparse.ArgumentParser(description="Hold how well the package can be lived in.")
    parser.add_argument("checkout", nargs="?", default=".", help="a directory or a commit")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--more", action="store_true", help="print what is not held, too")
    parser.add_argument("--no-walks", action="store_true", help="count only the source")
    asked = parser.parse_args()
    with source.checkout(asked.checkout) as root:
        figures = source.measured(root)
        if not asked.no_walks:
            figures |= walked(root)
    if asked.json:
        print(json.dumps(figures, indent=2))
    else:
        print("\n".join(table(figures)))
    if asked.more:
        for label, figure in figures.items():
            if label not in {row.label for row in HELD}:
                print(label, *_parts(figure), sep="\n    ")
    above = list(broken(figures))
    print(*above, sep="\n", file=sys.stderr)
    sys.exit(1 if above else 0)


def walked(root: Path) -> dict[str, object]:
    """Give the figures that take running the package: what is entered, and a dry run's cost."""
    script, calls, modules, size = walks.dry_run(root)
    entered = {f"{_ENTERED}{walk}": files for walk, files in walks.entered(root).items()}
    return {
        **entered,
        "lines of the rendered script": len(script),
        "dry run: calls of functions": calls,
        "dry run: modules": modules,
        "dry run: bytes of bytecode": size,
    }


def table(figures: Mapping[str, object]) -> Iterator[str]:
    """Give a line for each figure that is held: today's, its limit, its goal."""
    yield f"{'':<38} {'now':>9} {'limit':>9} {'goal':>9}"
    for row in HELD:
        if row.label in figures:
            now = _size(figures[row.label])
            yield f"{row.label:<38} {now:>9,} {row.limit:>9,} {row.goal:>9,}"


def broken(figures: Mapping[str, object]) -> Iterator[str]:
    """Give a line for each figure above its limit, with its parts, or of which nothing was seen."""
    for row in HELD:
        if row.label not in figures:
            continue
        figure = figures[row.label]
        now = _size(figure)
        if now > row.limit:
            yield f"{row.label}: {now:,}, and the limit is {row.limit:,}"
            yield from (f"    {part}" for part in _parts(figure)[:_MAX_PARTS])
        elif not now and row.goal:
            yield f"{row.label}: nothing was measured"


def _size(figure: object) -> int:
    return figure if isinstance(figure, int) else len(_parts(figure))


def _parts(figure: object) -> list[str]:
    return figure if isinstance(figure, list) else [str(figure)]


if __name__ == "__main__":
    main()

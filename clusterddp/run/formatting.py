"""Figures as a person reads them, and texts that strangers may have written."""

from collections.abc import Sequence


def percent(value: float | None) -> str:
    """`99.65%`; `-` when unknown, like the others."""
    return "-" if value is None else f"{value:.2%}"


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def seconds(value: float | None) -> str:
    """`14.7 s`, `12:05 min`, `3:07:45 h`."""
    if value is None:
        return "-"
    if value < 100:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600:,}:{whole % 3600 // 60:02d}:{whole % 60:02d} h"


def duration(seconds: float | None) -> str:
    """`45s`, `12m05s`, `3h07m`, `2d04h`; `-` when unknown."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def rate(value: float | None) -> str:
    """Images per second: `8,422`."""
    return "-" if value is None else f"{value:,.0f}"


def memory(count: int | None) -> str:
    """`812 MiB`, `1.2 GiB`: powers of 1024, in which memory is sold."""
    if count is None:
        return "-"
    mebibytes = count / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 1000 else f"{mebibytes / 1024:,.1f} GiB"


def count(value: int, noun: str) -> str:
    """`1 rank`, `2,048 ranks`."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def some(items: Sequence[str], most: int) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return " ".join(items[:most]) + more


def line(text: str) -> str:
    """As one line that is safe on a terminal."""
    return clean(" ".join(text.splitlines()).replace("\t", " "))


def clean(text: str) -> str:
    """What neither moves a terminal's cursor nor turns its text around; line ends and tabs stay."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text
    )

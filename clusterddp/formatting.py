"""Formats of figures for users, and safe output of untrusted text."""

import re
import shlex
import time
from collections.abc import Sequence


def in_prose(word: str) -> str:
    """Quote a typed word for a sentence, if a shell would need quotes: `'a b'`, `"tr'ain.py"`."""
    return word if shlex.quote(word) == word else repr(word)


def percent(value: float | None) -> str:
    """Format a fraction as `99.65%`; `-` if unknown, as in the other functions."""
    return "-" if value is None else f"{value:.2%}"


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def steps(step: int | None, planned: int | None, percent_done: float | None) -> str:
    """Format steps as `40 of 400 (10%)`, or `40` if the total is unknown; `-` without a step."""
    if step is None or planned is None or percent_done is None:
        return "-" if step is None else str(step)
    # Rounded down: 100% only when done.
    return f"{step} of {planned} ({int(percent_done)}%)"


def duration(seconds: float | None) -> str:
    """Format a time as `14.7s`, `12m05s`, `3h07m`, `2d04h`."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{max(0.0, seconds):.1f}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
DURATION = "".join(rf"(?:([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?){unit})?" for unit in _UNITS)
"""Pattern of a duration: `10m`; it matches an empty text too."""


def setting(seconds: float) -> str:
    """Format a duration exactly, as an option takes it: `0`, `90s`, `10m`, `24h`, `7d`."""
    if seconds != int(seconds):
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    whole = int(seconds)
    # 24h and 60s read better than 1d and 1m.
    unit = next((u for u, s in _UNITS.items() if whole % s == 0 and whole >= 2 * s), "s")
    return f"{whole // _UNITS[unit]}{unit}" if whole else "0"


def seconds(text: str) -> float | None:
    """Return the seconds of `30s`, `1.5h` or `2d04h`, also as `duration` prints them, or of `0`.

    None for any other text.
    """
    if text == "0":
        return 0
    match = re.fullmatch(DURATION, text)
    if not match or not text:
        return None
    total = sum(float(n) * s for n, s in zip(match.groups(), _UNITS.values(), strict=True) if n)
    return int(total) if total == int(total) else total


def moment(when: float | None) -> str:
    """Format a time since the epoch as local time; empty for none."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else ""


def hours(value: float | None) -> str:
    """Format hours with a fitting precision: `0.0123`, `4.56`, `1,234.5`."""
    if value is None:
        return "-"
    return f"{value:,.{4 if value < 1 else 2 if value < 100 else 1}f}"


def rate(value: float | None) -> str:
    """Format images per second: `8,422`."""
    return "-" if value is None else f"{value:,.0f}"


def memory(count: int | None) -> str:
    """Format bytes as `812 MiB`, `1.2 GiB`: powers of 1024, as usual for memory."""
    if count is None:
        return "-"
    mebibytes = count / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 1000 else f"{mebibytes / 1024:,.1f} GiB"


def size(count: int) -> str:
    """Format bytes as `812 B`, `345.7 kB`, `1.2 GB`: powers of 1000, as usual for disks."""
    power = min((len(str(count)) - 1) // 3, 4)
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return f"{count / 1000**power:.1f} {unit}" if power else f"{count} B"


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; `signal N` for a real-time signal, which has no name."""
    import signal  # a dry run does without it

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def count(value: int, noun: str) -> str:
    """Format a count with its noun: `1 rank`, `2,048 ranks`."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def ranks(numbers: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    text = join_limited(["-".join(map(str, part)) for part in parts], 8, ", ")
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {text}"


def join_known(*figures: tuple[str, object]) -> str:
    """Join the known figures, each with its format: `("epoch {}", 3)`."""
    return ", ".join(form.format(value) for form, value in figures if value not in (None, "", "-"))


def join_limited(items: Sequence[str], most: int, separator: str = " ") -> str:
    """Join the first items, and append how many more there are."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return separator.join(items[:most]) + more


def job(job_id: str, launcher: str) -> str:
    """Name a job; for a rehearsal, which has no job, the local process that runs it."""
    return f"pid:{job_id}" if launcher == "local" else f"job {job_id}"


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Align columns to the left, two blanks apart, without trailing blanks."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def line(text: str) -> str:
    """Join the lines of a text into one that is safe on a terminal."""
    return clean(" ".join(text.splitlines()).replace("\t", " "))


def clean(text: str) -> str:
    """Escape characters that move the cursor or reverse text; line ends and tabs stay."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text
    )

"""Limits of a process that a job of many ranks reaches: open files and locked memory."""

import resource
from contextlib import suppress

from clusterddp.formatting import count

MAX_FILES = 65536
"""Highest soft limit of open files that is set: some programs close every descriptor below it."""
LOW_LOCKED_BYTES = 1 << 30
"""Locked memory below which InfiniBand's libraries may fail to register their buffers."""


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one, at most MAX_FILES; see setrlimit(2).

    The usual soft limit is 1,024, and rank 0's store has two connections per rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _known(soft) < (wanted := open_files()):
        with suppress(OSError, ValueError):  # a sandbox forbids it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files() -> int:
    """Return the hard limit of open files, to which a task raises its own; at most MAX_FILES."""
    return min(_known(resource.getrlimit(resource.RLIMIT_NOFILE)[1]), MAX_FILES)


def locked_bytes() -> int:
    """Return the soft limit of locked memory, `ulimit -l` in bytes; -1 without a limit."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def too_few_files(limit: float, ranks: int) -> str:
    """Return a sentence if a job's first rank needs more open files than `limit`; else empty."""
    needed = 2 * ranks + 200
    if not 0 <= limit < min(needed, MAX_FILES):
        return ""
    return (
        f"hard limit of {limit:,.0f} open files (ulimit -Hn), but {count(ranks, 'rank')} may need "
        f"{needed:,}"
    )


def too_little_locked(limit: float) -> str:
    """Return a sentence if so little memory may be locked that InfiniBand may fail; else empty."""
    if not 0 <= limit < LOW_LOCKED_BYTES:
        return ""
    return f"limit of {limit / 1024:,.0f} KiB of locked memory (ulimit -l): InfiniBand may fail"


def _known(limit: int) -> int:
    return MAX_FILES if limit == resource.RLIM_INFINITY else limit

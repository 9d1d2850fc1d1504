"""How much memory a process on this host could still take, its cgroup's limit included."""

from pathlib import Path

# Controller -> limit, usage, and what of the usage is file cache that the kernel gives up at need
# (cgroups(7): the unified hierarchy has no controller's name in /proc/self/cgroup).
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_bytes(root: Path = Path("/")) -> int | None:
    """What the host has available, or less where a cgroup above this process allows less.

    None where the host does not tell (not on Linux). root: of the file system that is asked.
    """
    available = _number(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        return None
    return min([available * 1024, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> list[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controller, path = line.split(":", 2)
        if controller not in _FILES:
            continue
        top = root / "sys/fs/cgroup" / controller
        own = top / path.lstrip("/")
        limit, usage, cache = _FILES[controller]
        for folder in [own, *own.parents]:
            if not folder.is_relative_to(top):
                break
            allowed, used = _number(folder / limit), _number(folder / usage)
            if allowed is not None and used is not None:
                given_up = _number(folder / "memory.stat", cache) or 0
                left.append(max(allowed - used + given_up, 0))
    return left


def _number(path: Path, name: str = "") -> int | None:
    """The number that follows `name` in a file, or that the file holds; None where there is none.

    A limit of `max` is none.
    """
    try:
        words = path.read_text().split()
        return int(words[words.index(name) + 1 if name else 0])
    except (OSError, ValueError, IndexError):
        return None

"""The folders in which a person's runs lie, noted as runs are made there."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path


def note(root: Path) -> None:
    """Note a folder of runs, where the home takes it."""
    with contextlib.suppress(OSError, ValueError):
        file, path = _file(os.environ), str(root.absolute())
        if file is None or "\n" in path or path in _lines(file):
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8", errors="surrogateescape") as lines:
            lines.write(f"{path}\n")


def known() -> list[Path]:
    """Return the folders that are there, the latest first."""
    file = _file(os.environ)
    lines = _lines(file) if file else []
    found = {os.path.realpath(line): Path(line) for line in lines if os.path.isdir(line)}  # noqa: PTH112
    return [*reversed(found.values())]


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return [line for line in text.split("\n") if line]


def _file(environ: Mapping[str, str]) -> Path | None:
    """Return the file with them, in the place of a user's state (XDG); None without a home."""
    home = environ.get("HOME")
    state = environ.get("XDG_STATE_HOME") or (f"{home}/.local/state" if home else "")
    return Path(state, "clusterddp", "output-roots") if state else None

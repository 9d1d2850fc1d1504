"""Finds a rank's output: in its own log, or among the lines of its node's log.

With `--log-per node`, srun writes one file per node and begins each line with its rank and a colon
(srun(1), --label).
"""

import re
from pathlib import Path

from clusterddp import files

_OF_RANK = re.compile(r"rank-(\d+)\.log")
_LABEL = re.compile(rb" *(\d+): ")
_LOOK_BYTES = 1 << 20


class RankLog:
    """Output of a rank, which need not exist yet; or any other log."""

    def __init__(self, log: Path) -> None:
        """log: a file, which may be absent, such as logs/rank-R.log."""
        self.path = log
        """The file that holds the output."""
        self._asked, self._rank = log, b""
        self.find()

    @property
    def is_shared(self) -> bool:
        """Return whether the file also has lines of other ranks."""
        return bool(self._rank)

    def find(self) -> bool:
        """Look for the file again; return whether it exists."""
        named = _OF_RANK.fullmatch(self._asked.name)
        if self.path.is_file() or not named:
            return self.path.is_file()
        rank = named[1].encode()
        for node in self._asked.parent.glob("node-*.log"):
            looked = _head(node).splitlines() + files.read_tail(node, _LOOK_BYTES).splitlines()
            if any(found and found[1] == rank for found in map(_LABEL.match, looked)):
                self.path, self._rank = node, rank
                return True
        return False

    def own(self, lines: list[bytes]) -> list[bytes]:
        """Return the rank's lines without their labels, and clusterddp's lines between attempts."""
        if not self._rank:
            return lines
        found = ((_LABEL.match(line), line) for line in lines)
        return [
            line[label.end() :] if label else line
            for label, line in found
            if (label and label[1] == self._rank) or line.startswith(b"--- attempt ")
        ]

    def read_tail(self, most: int) -> bytes:
        """Read the output in the last `most` bytes of the file; none if it cannot be read."""
        return b"".join(self.own(files.read_tail(self.path, most).splitlines(keepends=True)))


def _head(path: Path) -> bytes:
    """Read the first bytes: a rank that was silent for long has its lines there."""
    try:
        with path.open("rb") as file:
            return file.read(_LOOK_BYTES)
    except OSError:
        return b""

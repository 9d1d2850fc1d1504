"""Frames: what the two ends of a session write to each other, over ssh's stdin and stdout."""

import os
import struct

HEADER, INPUT, INTERRUPT, BEAT, MANIFEST, DATA = b"h", b"i", b"c", b"b", b"m", b"d"
"""To the cluster: the command; its stdin, empty at its end; Ctrl-C; a heartbeat; the files of a
tree; the content of one."""
OUT, ERR, TREE, WANTED, BEGUN, EXIT = b"o", b"e", b"t", b"w", b"r", b"x"
"""To the user: output; a tree that is missing; its missing files; the command's begin and end."""
BEAT_SECONDS, LOST_SECONDS = 15.0, 300.0
"""A suspended laptop is silent, too: the other end is patient."""
_HEAD = struct.Struct(">cI")


def frame(kind: bytes, content: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    return _HEAD.pack(kind, len(content)) + content


def write(descriptor: int, content: bytes) -> None:
    """Write all of it. Raises OSError."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


class Reader:
    """Reader of a descriptor's frames."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._buffer = descriptor, bytearray()

    def after_line(self, marker: bytes) -> bytes | None:
        """Read up to the line that begins with the marker; return its rest, None at the end.

        A login shell may print before it.
        """
        while True:
            _, found, rest = self._buffer.partition(b"\n" + marker + b" ")
            if found and b"\n" in rest:
                line, _, self._buffer = rest.partition(b"\n")
                return bytes(line)
            if not self._fill():
                return None

    def next(self) -> tuple[bytes, bytes] | None:
        """Wait for a frame; return its kind and content, None at the end."""
        while (frames := self.ready()) is None:
            if not self._fill():
                return None
        return frames

    def ready(self) -> tuple[bytes, bytes] | None:
        """Return a frame that has been read, if there is one."""
        if len(self._buffer) < _HEAD.size:
            return None
        kind, length = _HEAD.unpack_from(self._buffer)
        end = _HEAD.size + length
        if len(self._buffer) < end:
            return None
        content = bytes(self._buffer[_HEAD.size : end])
        del self._buffer[:end]
        return kind, content

    def _fill(self) -> bool:
        chunk = os.read(self._descriptor, 1 << 16)
        self._buffer += chunk
        return bool(chunk)

    def fill(self) -> bool:
        """Read what is there, or wait for some; return False at the end, also of a lost peer."""
        try:
            return self._fill()
        except OSError:
            return False

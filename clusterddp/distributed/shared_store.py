"""A node's one connection to rank 0's store, which the watchdogs of its ranks share.

The watchdog that comes first on a node connects, and makes the calls of the others, whose
heartbeats travel together. If it does not answer, another takes its place, or connects itself: a
process that hangs must not make its neighbours look lost.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any

from clusterddp.processes.node_socket import NodeSocket, check_user

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_MAX_REQUEST = 1 << 20
_CLOSE_SECONDS = 1.0


class SharedStore:
    """Store of a node's watchdogs, with the methods of a torch store that they use."""

    def __init__(
        self, name: str, open_store: "Callable[[], Store]", seconds: float, beat: float
    ) -> None:
        """Connect. Raises TimeoutError or RuntimeError, as open_store does.

        name: known to the ranks that meet on this node. open_store: connects to rank 0. seconds:
        time for the first watchdog to connect. beat: seconds between two heartbeats; the first one
        has to answer in that time, and gathers values for half of it.
        """
        self._beat = beat
        self._socket, self._open = NodeSocket(name, socket.SOCK_STREAM), open_store
        self._store: Store | None = None
        self._first: Connection | None = None
        self._pending: dict[str, str] = {}
        """Values that the other watchdogs have set, and rank 0 does not have yet."""
        self._over, self._end = Pipe(duplex=False)
        self._thread: threading.Thread | None = None
        self._join(seconds)

    def close(self) -> None:
        """Leave the others; the first watchdog sends the values that it has gathered."""
        if self._first:
            self._first.close()
        if self._thread:
            # Not by closing the pipe: forked workers may hold it, too.
            with suppress(OSError):
                self._end.send_bytes(b"close")
            self._thread.join(_CLOSE_SECONDS)
        self._end.close()

    def set(self, key: str, value: str) -> None:
        """Set a key, soon: the first watchdog gathers the others' values."""
        self._call("set", key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._call("check", keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        values: list[str | bytes] = self._call("multi_get", keys)
        return [each.encode() if isinstance(each, str) else bytes(each) for each in values]

    def _call(self, method: str, *arguments: object) -> Any:
        """Make a call, or have the first watchdog make it. Raises RuntimeError."""
        while self._first:
            with suppress(OSError, EOFError, ValueError):
                self._first.send_bytes(json.dumps([method, *arguments]).encode())
                if self._first.poll(self._beat):
                    answer, error = json.loads(self._first.recv_bytes())
                    break
            self._first.close()
            self._first = None
            while not (self._first or self._store):
                try:
                    self._join(self._beat)
                except TimeoutError:  # at once where no route leads to rank 0
                    time.sleep(self._beat)
        else:
            return getattr(self._store, method)(*arguments)
        if error:
            raise RuntimeError(error)
        return answer

    def _join(self, seconds: float) -> None:
        """Become the first watchdog, or connect to it, or to rank 0 if it does not answer."""
        if listener := self._socket.listen():
            try:
                self._store = self._open()
            except BaseException:
                listener.close()
                raise
            self._thread = threading.Thread(
                target=self._serve, args=(listener,), name="store", daemon=True
            )
            self._thread.start()
            return
        with suppress(OSError, EOFError):
            peer = self._socket.connect(seconds)
            peer.settimeout(None)  # Connection expects a blocking socket
            first = Connection(peer.detach())
            if first.poll(seconds) and first.recv_bytes():
                self._first = first
                return
            first.close()
        self._store = self._open()

    def _serve(self, listener: socket.socket) -> None:
        """Answer the other watchdogs of the node until `close`."""
        others: list[Connection] = []
        due, error, is_over = 0.0, "", False
        while not is_over:
            left = max(due - time.monotonic(), 0.0) if self._pending else None
            for ready in wait([listener, self._over, *others], left):
                if ready is self._over:
                    is_over, due = True, 0.0
                    continue
                if isinstance(ready, Connection):
                    due = due if self._pending else time.monotonic() + self._beat / 2
                    if not self._answer(ready, error):
                        others.remove(ready)
                        ready.close()
                        due = 0.0  # its last value is not kept waiting
                    continue
                with suppress(OSError):
                    other, _ = listener.accept()
                    check_user(other)
                    others.append(Connection(other.detach()))
                    others[-1].send_bytes(b"connected")
            if self._pending and time.monotonic() >= due:
                try:
                    self._direct.multi_set(list(self._pending), list(self._pending.values()))
                except RuntimeError as failed:  # rank 0 is gone; the next answers say why
                    error = str(failed)
                self._pending.clear()
        listener.close()
        for each in (self._over, *others):
            each.close()

    def _answer(self, other: Connection, error: str) -> bool:
        """Make a call for another watchdog; False if that has gone."""
        answer: object = None
        try:
            method, *arguments = json.loads(other.recv_bytes(_MAX_REQUEST))
            try:
                if method == "set":
                    self._pending[arguments[0]] = arguments[1]
                elif method == "check":
                    answer = self._direct.check(arguments[0])
                else:
                    values = self._direct.multi_get(arguments[0])
                    answer = [bytes(value).decode(errors="replace") for value in values]
            except RuntimeError as failed:
                error = str(failed)
            other.send_bytes(json.dumps([answer, error]).encode())
        except (OSError, EOFError, ValueError, TypeError, LookupError):
            return False
        return True

    @property
    def _direct(self) -> Any:  # multi_set is public, and unlisted
        assert self._store, "the first watchdog is connected to rank 0"
        return self._store

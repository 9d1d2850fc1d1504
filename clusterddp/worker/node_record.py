"""One record for the ranks of a node, written by the parent of the task that started first.

Hundreds of nodes share the directory of the records. So the parents of a node's tasks meet at a
Unix socket: the first one, the leader, writes what the others send, and answers when it is on disk.
If the leader is lost, another one takes its place; without an answer, a rank's parent writes its
record itself.
"""

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from clusterddp import files, polling
from clusterddp.processes.node_socket import NodeSocket, check_user
from clusterddp.run.outcome import RANKS

ANSWER_SECONDS = 10.0
"""Time for the leader to write, before a parent writes its record itself."""
# Records that arrive within this time are written at once; longest delay of the first of them.
_GATHER_SECONDS, _MAX_GATHER_SECONDS = 0.02, 0.2
_STAY_SECONDS = 1.0
"""Time for which a leader stays for the other ranks' ends: they usually end together."""
_MAX_MESSAGE = 1 << 18
_KEPT, _FAILED = b"+", b"-"


class NodeRecord:
    """Record of a node's ranks, for the parent of one of them."""

    def __init__(self, path: Path, write: Callable[[Path, object], None]) -> None:
        """path: the node's record. write: writes it durably; raises OSError."""
        self.path, self._write = path, write
        self._socket = NodeSocket(str(path.absolute()), socket.SOCK_SEQPACKET)
        self._peer: socket.socket | None = None
        self._leader: _Leader | None = None

    def keep(self, record: Mapping[str, object]) -> bool:
        """Have a rank's record written; False if the caller must write it."""
        message = json.dumps(record).encode()
        for _ in range(2):  # the second one after the loss of the leader
            with suppress(OSError, RuntimeError):  # RuntimeError: no thread can be started
                self._peer = self._peer or self._join()
                self._peer.sendall(message)
                if answer := self._peer.recv(1):
                    return answer == _KEPT
            self._leave()
        return False

    def close(self, failed: bool) -> None:
        """Leave the others; a leader stays for a moment, in which they usually end as well.

        After a failure it does not: srun names first the host whose task ends first.
        """
        self._leave()
        if leader := self._leader:
            seconds = 0 if failed else _STAY_SECONDS
            polling.wait_until(lambda: leader.is_alone, seconds, every=polling.CHILD_POLL_SECONDS)
            leader.writing.acquire(timeout=ANSWER_SECONDS)  # a write that has begun ends

    def _join(self) -> socket.socket:
        """Connect to the leader, or become it. Raises OSError."""
        if listener := self._socket.listen():
            self._leader = _Leader(listener, self.path, self._write)
        return self._socket.connect(ANSWER_SECONDS)

    def _leave(self) -> None:
        if self._peer:
            self._peer.close()
        self._peer = None


class _Leader:
    """Thread that writes the records of its node's ranks."""

    def __init__(
        self, listener: socket.socket, path: Path, write: Callable[[Path, object], None]
    ) -> None:
        self._listener, self._path, self._write = listener, path, write
        self._records: dict[object, dict[str, object]] = {}
        self._waiting: list[socket.socket] = []
        self.writing = threading.Lock()
        self._peers = selectors.DefaultSelector()
        self._peers.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="node-record", daemon=True).start()

    @property
    def is_alone(self) -> bool:
        """True if no parent is connected."""
        return len(self._peers.get_map()) <= 1

    def _serve(self) -> None:
        before = (files.read_json(self._path) or {}).get(RANKS)  # an earlier leader's
        for record in before if isinstance(before, list) else ():
            self._take(record)
        first = 0.0
        while True:
            ready = self._peers.select(_GATHER_SECONDS if self._waiting else None)
            if not self._waiting:
                first = time.monotonic()
            for key, _ in ready:
                self._answer(key.fileobj)
            if self._waiting and (not ready or time.monotonic() - first > _MAX_GATHER_SECONDS):
                self._keep()

    def _answer(self, ready: object) -> None:
        """Accept a parent, or take its record."""
        assert isinstance(ready, socket.socket)
        try:
            if ready is self._listener:
                peer, _ = ready.accept()
                with suppress(PermissionError):
                    check_user(peer)
                    self._peers.register(peer, selectors.EVENT_READ)
                return
            self._take(json.loads(ready.recv(_MAX_MESSAGE)))
            self._waiting.append(ready)
        except (OSError, ValueError):  # it has gone, or must write its record itself
            if ready is not self._listener:
                self._peers.unregister(ready)
                ready.close()

    def _take(self, record: object) -> None:
        if isinstance(record, dict):
            self._records[record.get("rank")] = record

    def _keep(self) -> None:
        """Write all records, and answer the parents that wait for it."""
        answer = _KEPT
        try:
            with self.writing:
                self._write(self._path, {RANKS: list(self._records.values())})
        except OSError:
            answer = _FAILED
        for peer in self._waiting:
            with suppress(OSError):
                peer.send(answer)
        self._waiting.clear()

"""Meeting point of the processes of one node: the first one listens, the others connect to it.

The address is a name in the abstract namespace (unix(7)): it needs no file, is free again when its
process ends, and is known only in this network namespace. Any user can bind it, so each side checks
the other's user.
"""

import os
import socket
import struct
from hashlib import sha256

from clusterddp import polling

_LISTEN_SECONDS = 1.0
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): process, user, group


class NodeSocket:
    """Meeting point of the processes that know its name."""

    def __init__(self, name: str, kind: socket.SocketKind) -> None:
        """kind: SOCK_SEQPACKET keeps messages apart, of at most 200 KB; or SOCK_STREAM."""
        digest = sha256(name.encode(errors="surrogateescape")).hexdigest()[:32]
        self._address, self._kind = f"\0clusterddp-{digest}", kind

    def listen(self) -> socket.socket | None:
        """Return a listening socket; None if another process has one. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, self._kind)
        try:
            listener.bind(self._address)
            listener.listen(128)
        except OSError:
            listener.close()
            return None
        return listener

    def connect(self, seconds: float) -> socket.socket:
        """Connect to the listening process. Raises OSError.

        seconds: timeout of the socket's operations.
        """
        for is_last in polling.poll(_LISTEN_SECONDS, every=polling.CHILD_POLL_SECONDS):
            peer = socket.socket(socket.AF_UNIX, self._kind)
            try:
                peer.settimeout(seconds)
                peer.connect(self._address)
                check_user(peer)
                return peer
            except OSError as error:
                peer.close()
                # Refused between the other's bind and listen, and if too many connect at once.
                if is_last or not isinstance(error, (ConnectionRefusedError, BlockingIOError)):
                    raise
        raise AssertionError("the last poll returns or raises")


def check_user(peer: socket.socket) -> None:
    """Raise PermissionError if the other side belongs to another user."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(found)[1] != os.geteuid():
        raise PermissionError("another user has bound this address")

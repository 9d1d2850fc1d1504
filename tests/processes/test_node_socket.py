"""The meeting point of a node's processes."""

import os
import socket

import pytest

from clusterddp.processes.node_socket import NodeSocket, check_user

KINDS = (socket.SOCK_SEQPACKET, socket.SOCK_STREAM)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["", "'; $(touch x)\n", "\udcff"])
def test_the_first_listens_and_the_others_connect(kind: socket.SocketKind, suffix: str) -> None:
    name = f"{os.getpid()} {suffix}"
    with pytest.raises(OSError, match="refused"):
        NodeSocket(name, kind).connect(1.0)
    listener = NodeSocket(name, kind).listen()
    assert listener
    with listener:
        assert NodeSocket(name, kind).listen() is None
        with NodeSocket(name, kind).connect(1.0) as peer, listener.accept()[0] as other:
            peer.sendall(b"hello")
            assert other.recv(99) == b"hello"
    again = NodeSocket(name, kind).listen()
    assert again, "its name is free when its process is gone"
    again.close()


def test_another_users_socket_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = NodeSocket(f"{os.getpid()} user", socket.SOCK_STREAM)
    own = os.geteuid()
    first, second = socket.socketpair()
    with first, second:
        check_user(first)
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        with pytest.raises(PermissionError):
            check_user(first)
    listener = meeting.listen()
    assert listener
    with listener, pytest.raises(PermissionError):
        meeting.connect(1.0)

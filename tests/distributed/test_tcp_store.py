import json
import socket
import threading

import pytest

from clusterddp.distributed import tcp_store
from clusterddp.distributed.rendezvous import open_store
from clusterddp.errors import PeerError, TrainingError
from tests.distributed.meetings import PATIENCE, env


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            TrainingError, match=rf"port {port} .* in use: .*second rank 0.*MASTER_PORT"
        ):
            open_store(env(0, 2, port), {}, PATIENCE)


def test_a_listener_that_is_no_store_does_not_hang_a_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(TrainingError, match="does not answer as rank 0's store"):
            open_store(env(1, 2, port), {}, 1.0)


def test_a_rank_that_finds_nobody_says_whom_it_waited_for(port: int) -> None:
    with pytest.raises(PeerError, match=rf"rank 1 .*waited for rank 0 at 127.0.0.1:{port}"):
        open_store(env(1, 2, port), {}, 0.2)


def test_a_master_address_that_does_not_resolve_is_named(port: int) -> None:
    with pytest.raises(TrainingError, match=r"'nowhere\.invalid'.*MASTER_ADDR"):
        open_store(env(1, 2, port, "nowhere.invalid"), {}, 1.0)


def test_a_loopback_address_is_the_only_one_listened_at(port: int) -> None:
    ours = env(0, 2, port)
    with tcp_store._bind(ours) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"


def test_bounded_gives_up_on_what_does_not_return() -> None:
    with pytest.raises(TimeoutError):
        tcp_store.bounded(threading.Event().wait, 0.01)
    assert tcp_store.bounded(lambda: json.dumps(1), PATIENCE) == "1"
    with pytest.raises(ZeroDivisionError):
        tcp_store.bounded(lambda: 1 // 0, PATIENCE)

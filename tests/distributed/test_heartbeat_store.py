import socket

import pytest

from clusterddp.distributed import heartbeat_store
from clusterddp.ranks.dist_env import DistEnv
from tests.distributed.meetings import env
from tests.waiting import PATIENCE


def test_the_store_sees_at_most_50_postings_a_second() -> None:
    assert heartbeat_store.default_beat(2) == heartbeat_store.default_beat(64) == 2
    assert 1000 / heartbeat_store.default_beat(1000) == pytest.approx(50)


def test_no_connection_is_made_where_nobody_answers_as_a_store() -> None:
    assert heartbeat_store.connect(DistEnv.from_environ({}), {}, PATIENCE) is None
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        ours = env(1, 2, stranger.getsockname()[1])
        assert heartbeat_store.connect(ours, {}, timeout=0.5) is None

import socket

import pytest

from clusterddp.distributed import heartbeat
from clusterddp.distributed.heartbeat import Heartbeat, Phase, Progress, ResponseTracker, Snapshot
from tests.distributed.meetings import env

DATA, BACKWARD = Phase.DATA, Phase.BACKWARD


def beat(
    step: int, phase: Phase, still: float = 40.0, left: bool = False, host: str = "h01"
) -> Heartbeat:
    return Heartbeat(host, heartbeat.TrainingPosition(step, 0, phase), still, 7, left)


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"[]", b"{}", b'{"host": 1}', b"null", b'"' + b"x" * 9]
)
def test_what_a_stranger_posts_is_passed_over(text: bytes) -> None:
    assert Heartbeat.from_json(text) is None


def test_a_posting_comes_back_as_it_was_but_cannot_forge_lines() -> None:
    sent = beat(58, DATA, host="h02\nwatchdog: all is well")
    read = Heartbeat.from_json(sent.to_json().encode())
    assert read == sent._replace(host="h02watchdog: all is well")


def test_a_rank_is_silent_by_what_the_store_says_and_not_for_the_want_of_its_answer() -> None:
    def snapshot(*numbers: int) -> Snapshot:
        seen = {rank: beat(9, DATA)._replace(number=n) for rank, n in enumerate(numbers)}
        return Snapshot(range(3), seen, "")

    responses = ResponseTracker(range(3), quiet=8)
    first = snapshot(5, 5)
    for now in (0, 9, 99):
        responses.update(first, now)
        assert not responses.ready() and not responses.silent(now, 30)
    responses.update(snapshot(6, 6), 100)
    responses.update(snapshot(9, 6), 107)
    assert responses.ready() and responses.silent(107, 130) == {2: 130}
    responses.update(snapshot(10, 6), 109)
    assert responses.silent(110, 133) == {1: 10, 2: 133}
    responses.update(snapshot(11, 7), 111)
    assert responses.silent(111, 134) == {2: 134}


def test_no_connection_is_made_where_nobody_answers_as_a_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        ours = env(1, 2, stranger.getsockname()[1])
        with pytest.raises((TimeoutError, RuntimeError)):
            heartbeat.connect(ours, {}, timeout=0.5, beat=0.5)


def test_a_place_only_grows_in_whatever_order_a_step_goes() -> None:
    progress, positions = Progress(), []
    for step, phase in (
        [(0, Phase.START)]
        + [(1, phase) for phase in (DATA, Phase.FORWARD, BACKWARD) * 2]  # gradients accumulated
        + [(1, Phase.UPDATE), (1, Phase.SAVE), (1, Phase.EVALUATE), (2, DATA)]
    ):
        progress.mark(step, phase)
        positions.append(progress.position)
    assert positions == sorted(set(positions))
    assert len(positions) == 11


def test_a_mark_that_changes_nothing_is_a_sign_of_life() -> None:
    progress = Progress()
    progress.mark(1, Phase.EVALUATE)
    before, position = progress.state, progress.position
    progress.mark(1, Phase.EVALUATE)
    assert progress.position == position and progress.state != before

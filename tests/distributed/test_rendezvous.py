import threading
from typing import Any

import pytest

from clusterddp.distributed import rendezvous
from clusterddp.distributed.messages import PeerError
from clusterddp.distributed.rendezvous import open_store
from clusterddp.errors import TrainingError
from clusterddp.ranks.dist_env import DistEnv
from tests.distributed.meetings import PATIENCE, client, count, env, in_background, meet, written_by


def test_every_rank_gets_the_verdict_on_all_hellos(port: int) -> None:
    verdict = {"ranks": [0, 1, 2]}
    assert meet([env(2, 3, port), env(0, 3, port), env(1, 3, port)], count) == [verdict] * 3


def test_a_single_process_needs_no_port() -> None:
    assert meet([DistEnv.from_environ({})], count) == [{"ranks": [0]}]


def test_rank_0s_error_is_everybodys(port: int) -> None:
    def refuse(hellos: list[dict[str, Any]]) -> dict[str, Any]:
        raise TrainingError("two ranks on one GPU")

    first, second = meet([env(0, 2, port), env(1, 2, port)], refuse)
    assert str(first) == "two ranks on one GPU"
    assert not getattr(first, "peer_lost", False)
    assert isinstance(second, PeerError) and "two ranks on one GPU" in str(second)


def test_a_rank_that_cannot_take_part_is_not_waited_for(port: int) -> None:
    ranks = [env(0, 3, port), env(1, 3, port)]

    def refuse() -> None:
        ours = env(2, 3, port)
        store = open_store(ours, {}, PATIENCE)
        rendezvous.decline(store, ours, TrainingError("no GPU here"))

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    results = meet(ranks, count)
    thread.join(PATIENCE)
    for result in results:
        assert isinstance(result, PeerError)
        assert "rank 2 cannot take part: no GPU here" in str(result)


def test_a_rank_0_that_cannot_take_part_calls_the_start_off(port: int) -> None:
    def refuse() -> None:
        ours = env(0, 2, port)
        store = open_store(ours, {}, PATIENCE)
        store.wait(["hello/1"])
        rendezvous.decline(store, ours, TrainingError("no GPU here"))

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    (result,) = meet([env(1, 2, port)], count)
    thread.join(PATIENCE)
    assert "rank 0 called the start off: no GPU here" in str(result)


def test_calling_a_start_off_does_not_look_for_ever_for_those_that_never_came() -> None:
    store = open_store(env(0, 1, 1), {}, PATIENCE)
    looks = []

    def check(keys: list[str]) -> bool:
        looks.append(keys)
        return False

    store.check = check  # type: ignore[method-assign]
    many = env(0, 10**15, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_HEARING_SECONDS", 0.1)
        rendezvous.decline(store, many, TrainingError("no GPU here"))
    assert 0 < len(looks) < 10**7


def test_ranks_that_never_came_are_listed(port: int) -> None:
    first, second = meet([env(0, 4, port), env(2, 4, port)], count, timeout=1.0)
    assert "2 of 4 ranks did not come" in str(first)
    assert "ranks 1, 3" in str(first)
    assert "ranks 1, 3" in str(second)


def test_two_processes_of_one_rank_are_refused(port: int) -> None:
    results = meet([env(0, 3, port), env(1, 3, port), env(1, 3, port)], count, timeout=1.0)
    assert any("two processes say that they are rank 1 of 3" in str(result) for result in results)


def test_ranks_of_different_world_sizes_are_named(port: int) -> None:
    first, _ = meet([env(0, 2, port), env(1, 3, port)], count)
    assert "rank 1 was started with a world size of 3, rank 0 with 2" in str(first)


def test_a_hello_without_a_world_size_is_refused_by_name(port: int) -> None:
    first = in_background(lambda: meet([env(0, 2, port)], count)[0])
    client(port).set("clusterddp/hello/1", written_by({}, "hello/1", {}))
    assert "rank 1 was started with a world size of None" in str(first())


@pytest.mark.parametrize("patient", [True, False])
def test_rank_0_may_take_its_time_to_decide_where_it_was_given_that(
    port: int, patient: bool
) -> None:
    """As it does where a person's own function has to fetch its data."""
    others_left = threading.Event()

    def decide(hellos: list[dict[str, Any]]) -> dict[str, Any]:
        others_left.wait(3.0)
        return count(hellos)

    ranks = [env(rank, 2, port) for rank in range(2)]
    first, second = meet(ranks, decide, 1.0, decision_seconds=PATIENCE if patient else 0.5)
    assert first == {"ranks": [0, 1]}
    if patient:
        assert second == first
    else:
        assert "was not told to start within 1.5 s" in str(second)

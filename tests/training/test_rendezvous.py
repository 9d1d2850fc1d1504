import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from clusterddp.dist_env import DistEnv
from clusterddp.errors import TrainingError
from clusterddp.training import rendezvous
from clusterddp.training.rendezvous import PeerError, agree, open_store

PATIENCE = 20


def env(rank: int, world_size: int, port: int, address: str = "127.0.0.1") -> DistEnv:
    return DistEnv.from_environ(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
    )


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


def meet(
    ranks: list[DistEnv],
    decide: Callable[[list[dict[str, Any]]], dict[str, Any]],
    timeout: float = PATIENCE,
    environ: Mapping[int, Mapping[str, str]] | None = None,
) -> list[Any]:
    """Each rank in a thread of its own; what each of them got, or the error it raised."""
    results: list[Any] = [None] * len(ranks)
    stores = []

    def run(position: int) -> None:
        ours = ranks[position]
        try:
            store = open_store(ours, (environ or {}).get(position, {}), timeout)
            stores.append(store)
            hello = {"rank": ours.rank, "world_size": ours.world_size}
            results[position] = agree(store, ours, hello, decide, timeout)
            rendezvous.leave(store, ours)
        except TrainingError as error:
            results[position] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    return results


def count(hellos: list[dict[str, Any]]) -> dict[str, Any]:
    return {"ranks": [hello["rank"] for hello in hellos]}


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


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TrainingError, match=rf"port {port} .*in use.*MASTER_PORT"):
            open_store(env(0, 2, port), {}, PATIENCE)


def test_a_listener_that_is_no_store_does_not_hang_a_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(TrainingError, match="does not answer as rank 0's store"):
            open_store(env(1, 2, port), {}, 1.0)


def test_ranks_that_never_came_are_listed(port: int) -> None:
    first, second = meet([env(0, 4, port), env(2, 4, port)], count, timeout=1.0)
    assert "2 of 4 ranks did not come" in str(first)
    assert "ranks 1, 3" in str(first)
    assert "ranks 1, 3" in str(second)


def test_a_rank_that_finds_nobody_says_whom_it_waited_for(port: int) -> None:
    with pytest.raises(PeerError, match=rf"rank 1 .*waited for rank 0 at 127.0.0.1:{port}"):
        open_store(env(1, 2, port), {}, 0.2)


def test_a_master_address_that_does_not_resolve_is_named(port: int) -> None:
    with pytest.raises(TrainingError, match=r"'nowhere\.invalid'.*MASTER_ADDR"):
        open_store(env(1, 2, port, "nowhere.invalid"), {}, 1.0)


def test_two_processes_of_one_rank_are_refused(port: int) -> None:
    results = meet([env(0, 3, port), env(1, 3, port), env(1, 3, port)], count, timeout=1.0)
    assert any("two processes say that they are rank 1 of 3" in str(result) for result in results)


def test_ranks_of_different_world_sizes_are_named(port: int) -> None:
    first, _ = meet([env(0, 2, port), env(1, 3, port)], count)
    assert "rank 1 was started with a world size of 3, rank 0 with 2" in str(first)


def test_another_jobs_store_is_not_joined(port: int) -> None:
    jobs = {0: {"SLURM_JOB_ID": "17"}, 1: {"SLURM_JOB_ID": "18"}}
    _, second = meet([env(0, 2, port), env(1, 2, port)], count, 1.0, jobs)
    assert "another job's rank 0" in str(second)
    assert "SLURM_JOB_ID=17" in str(second) and "SLURM_JOB_ID=18" in str(second)


def test_under_an_agent_every_rank_joins_the_agents_store() -> None:
    from torch.distributed import TCPStore

    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [env(0, 2, agent.port), env(1, 2, agent.port)]
    for restart in ("0", "1"):
        elastic = {
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": restart,
        }  # fmt: skip
        results = meet(ranks, count, PATIENCE, {0: elastic, 1: elastic})
        assert results == [{"ranks": [0, 1]}] * 2


def test_a_loopback_address_is_the_only_one_listened_at(port: int) -> None:
    ours = env(0, 2, port)
    with rendezvous._bind(ours) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_bounded_gives_up_on_what_does_not_return() -> None:
    with pytest.raises(TimeoutError):
        rendezvous.bounded(threading.Event().wait, 0.01)
    assert rendezvous.bounded(lambda: json.dumps(1), PATIENCE) == "1"
    with pytest.raises(ZeroDivisionError):
        rendezvous.bounded(lambda: 1 // 0, PATIENCE)

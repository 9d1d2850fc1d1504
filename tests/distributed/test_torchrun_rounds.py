import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import Store

from clusterddp.distributed import identity, messages, torchrun_rounds
from clusterddp.distributed.messages import PeerError
from clusterddp.distributed.rendezvous import open_store
from clusterddp.distributed.seal import Seal
from clusterddp.errors import TrainingError
from tests.distributed.meetings import PATIENCE, RUN_A, count, env, in_background, meet


@pytest.fixture
def agent() -> Store:
    """The store of torchrun's agents, which outlives the workers."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until a rank has looked for a later round twice more in vain."""
    in_vain = threading.Semaphore(0)
    wait = messages.wait

    def counted(*arguments: Any) -> None:
        try:
            wait(*arguments)
        except dist.DistStoreError:
            in_vain.release()
            raise

    monkeypatch.setattr(torchrun_rounds, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(messages, "wait", counted)

    def twice() -> None:
        while in_vain.acquire(blocking=False):
            pass  # of an earlier meeting
        for _ in range(2):
            assert in_vain.acquire(timeout=PATIENCE), "no look"

    return twice


def under_agent(restart: int = 0, **more: str) -> dict[str, str]:
    return {
        **RUN_A, "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restart), **more,
    }  # fmt: skip


def test_workers_meet_again_whatever_restarts_their_agents_count(agent: Any) -> None:
    """Seen with the c10d rendezvous: the agent whose own workers failed counts one, others not."""
    ranks = [env(0, 2, agent.port), env(1, 2, agent.port)]
    for restarts in ((0, 0), (0, 1), (1, 3)):
        environ = {rank: under_agent(restart) for rank, restart in enumerate(restarts)}
        assert meet(ranks, count, PATIENCE, environ) == [{"ranks": [0, 1]}] * 2


def test_a_restarted_worker_waits_for_rank_0_to_start_again(
    agent: Any, looks: Callable[[], None]
) -> None:
    ranks = [env(0, 2, agent.port), env(1, 2, agent.port)]
    environ = {0: under_agent(), 1: under_agent()}
    meet(ranks, count, PATIENCE, environ)
    second = in_background(lambda: meet([ranks[1]], count, PATIENCE, {0: under_agent()})[0])
    looks()
    first = meet([ranks[0]], count, PATIENCE, {0: under_agent()})[0]
    assert first == second() == {"ranks": [0, 1]}


def test_a_rank_0_that_died_before_all_had_come_is_followed_to_its_next_round(agent: Any) -> None:
    dead = torchrun_rounds.round_of(agent, agent.add("clusterddp/rounds", 1), _seal(under_agent()))
    identity.tell(dead)
    second = in_background(
        lambda: meet([env(1, 2, agent.port)], count, PATIENCE, {0: under_agent()})[0]
    )
    dead.wait(["enters/1"])
    first = meet([env(0, 2, agent.port)], count, PATIENCE, {0: under_agent()})[0]
    assert first == second() == {"ranks": [0, 1]}


def _seal(environ: Mapping[str, str]) -> Any:
    return Seal.from_environ(environ)


def test_ranks_that_never_came_to_an_agents_store_are_listed(agent: Any) -> None:
    ranks = [env(0, 4, agent.port), env(2, 4, agent.port)]
    first, second = meet(ranks, count, 1.0, {0: under_agent(), 1: under_agent()})
    assert "2 of 4 ranks did not come" in str(first) and "ranks 1, 3" in str(first)
    assert isinstance(second, PeerError) and "ranks 1, 3" in str(second)


def test_a_start_that_was_called_off_is_not_the_next_ones(
    agent: Any, looks: Callable[[], None]
) -> None:
    environ = {0: under_agent(), 1: under_agent()}
    meet([env(0, 2, agent.port)], count, 0.5, environ)
    second = in_background(lambda: meet([env(1, 2, agent.port)], count, PATIENCE, environ)[0])
    agent.wait(["clusterddp/1/enters/1"])
    looks()
    first = meet([env(0, 2, agent.port)], count, PATIENCE, environ)[0]
    assert first == second() == {"ranks": [0, 1]}


@pytest.mark.parametrize("rank", [0, 1])
def test_another_run_that_reaches_an_agents_store_writes_nothing(agent: Any, rank: int) -> None:
    environ = {0: under_agent(), 1: under_agent()}
    meet([env(0, 2, agent.port), env(1, 2, agent.port)], count, PATIENCE, environ)

    def written() -> tuple[Any, ...]:
        return (agent.num_keys(), *map(agent.get, ("clusterddp/rounds", "clusterddp/1/enters/1")))

    before = written()
    stranger = under_agent(SLURM_JOB_ID="18")
    with pytest.raises(TrainingError, match="SLURM_JOB_ID=17, this one SLURM_JOB_ID=18"):
        open_store(env(rank, 2, agent.port), stranger, 2.0)
    assert written() == before


def test_rank_0_refuses_the_entry_of_a_worker_of_another_run(agent: Any) -> None:
    first = in_background(
        lambda: meet([env(0, 2, agent.port)], count, PATIENCE, {0: under_agent()})[0]
    )
    agent.wait(["clusterddp/1/identity"])
    forged = _seal(under_agent(CLUSTERDDP_NONCE="77ab")).of_round(1)
    agent.set("clusterddp/1/enters/1", forged.wrap("enters/1", {"token": "00"}))
    assert "the entry of rank 1" in str(first()) and "lacks the proof" in str(first())


def test_a_worker_whose_rank_0_never_starts_again_ends(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "GRACE_SECONDS", 0.5)
    environ = {0: under_agent(), 1: under_agent()}
    meet([env(0, 2, agent.port), env(1, 2, agent.port)], count, PATIENCE, environ)
    with pytest.raises(PeerError, match=r"rank 1 waited for rank 0 .*did not come"):
        open_store(env(1, 2, agent.port), under_agent(), 0.5)

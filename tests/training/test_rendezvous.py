import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import Store

from clusterddp.dist_env import DistEnv
from clusterddp.errors import TrainingError
from clusterddp.training import listener, rendezvous
from clusterddp.training.rendezvous import PeerError, agree, open_store
from clusterddp.training.seal import Seal

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


def test_another_runs_store_is_not_joined(port: int) -> None:
    jobs = {0: {"SLURM_JOB_ID": "17"}, 1: {"SLURM_JOB_ID": "18"}}
    _, second = meet([env(0, 2, port), env(1, 2, port)], count, 1.0, jobs)
    assert "another run's rank 0" in str(second)
    assert "SLURM_JOB_ID=17" in str(second) and "SLURM_JOB_ID=18" in str(second)


def test_a_loopback_address_is_the_only_one_listened_at(port: int) -> None:
    ours = env(0, 2, port)
    with listener._bind(ours) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"


def test_bounded_gives_up_on_what_does_not_return() -> None:
    with pytest.raises(TimeoutError):
        rendezvous.bounded(threading.Event().wait, 0.01)
    assert rendezvous.bounded(lambda: json.dumps(1), PATIENCE) == "1"
    with pytest.raises(ZeroDivisionError):
        rendezvous.bounded(lambda: 1 // 0, PATIENCE)


NONCE = "5f0c" * 8
RUN_A = {"SLURM_JOB_ID": "17", "CLUSTERDDP_NONCE": NONCE}
RUN_B = {"SLURM_JOB_ID": "18", "CLUSTERDDP_NONCE": "77ab" * 8}
# Another attempt of A: were its nonce ever the same, its messages would still not pass.
RUN_A_AGAIN = {**RUN_A, "SLURM_RESTART_COUNT": "1"}
UNPROVEN = {name: value for name, value in RUN_A.items() if name != "CLUSTERDDP_NONCE"}


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start `call` in a thread; what is returned waits for it and gives what it returned."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(3 * PATIENCE)
        return results[0]

    return join


def client(port: int) -> Any:
    """Anybody who reaches the port: torch asks for no credential."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def written_by(environ: Mapping[str, str], key: str, content: dict[str, Any]) -> str:
    return Seal.from_environ(environ).wrap(key, content)


def test_the_nonce_is_in_no_message(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Store] = []
    listen = rendezvous._listen

    def listen_and_keep(*arguments: Any) -> Store:
        kept.append(listen(*arguments))
        return kept[0]

    monkeypatch.setattr(rendezvous, "_listen", listen_and_keep)
    assert meet([env(0, 2, port), env(1, 2, port)], count, environ={0: RUN_A, 1: RUN_A}) == [
        {"ranks": [0, 1]}
    ] * 2  # fmt: skip
    keys = ("identity", "hello/0", "hello/1", "verdict", "claim/0", "claim/1", "left/0", "left/1")
    messages = [kept[0].get(f"clusterddp/{key}").decode() for key in keys]
    assert kept[0].num_keys() <= len(keys) + 1  # torch's own
    assert not [text for text in messages if NONCE in text]
    proofs = [json.loads(text)["proof"] for text in messages[:4]]
    assert len(set(proofs)) == 4 and all(len(proof) == 64 for proof in proofs)


def test_two_runs_on_one_port_name_each_other_and_the_first_goes_on(port: int) -> None:
    first = in_background(
        lambda: meet(
            [env(0, 3, port), env(1, 3, port)], count, PATIENCE, dict.fromkeys((0, 1), RUN_A)
        )
    )
    client(port).wait(["clusterddp/hello/1"])
    began = time.monotonic()
    strangers = meet(
        [env(0, 3, port), env(1, 3, port), env(2, 3, port)], count, PATIENCE,
        dict.fromkeys((0, 1, 2), RUN_B),
    )  # fmt: skip
    assert time.monotonic() - began < PATIENCE
    last = meet([env(2, 3, port)], count, environ={0: RUN_A})
    assert f"port {port} " in str(strangers[0]) and "in use" in str(strangers[0])
    for rank in (1, 2):
        assert f"rank {rank} reached another run's rank 0" in str(strangers[rank])
        assert "that one is SLURM_JOB_ID=17, this one SLURM_JOB_ID=18." in str(strangers[rank])
    assert [*first(), *last] == [{"ranks": [0, 1, 2]}] * 3


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (RUN_A, UNPROVEN, "They differ in CLUSTERDDP_NONCE, not set here."),
        (UNPROVEN, RUN_A, "They differ in CLUSTERDDP_NONCE."),
        (RUN_A, {**RUN_A, "CLUSTERDDP_NONCE": "77ab"}, "They differ in CLUSTERDDP_NONCE."),
        (RUN_A, RUN_A_AGAIN, "this one SLURM_JOB_ID=17 SLURM_RESTART_COUNT=1."),
    ],
)
def test_a_store_that_does_not_prove_to_be_the_runs_own_is_not_joined(
    port: int, theirs: dict[str, str], ours: dict[str, str], said: str
) -> None:
    first, second = meet([env(0, 2, port), env(1, 2, port)], count, 1.0, {0: theirs, 1: ours})
    assert "rank 1 reached another run's rank 0" in str(second) and said in str(second)
    assert "ranks did not come" in str(first) and "rank 1" in str(first)


@pytest.mark.parametrize("identity", [b"garbage", b"\xff\x00", b'{"content": "[]", "proof": ""}'])
def test_a_store_that_is_somebody_elses_is_refused(port: int, identity: bytes) -> None:
    other: Any = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    other.set("clusterddp/identity", identity)
    with pytest.raises(TrainingError, match=r"rank 1: what names the run .*not what a rank writes"):
        open_store(env(1, 2, port), RUN_A, PATIENCE)
    assert not other.check(["clusterddp/claim/1"])


def test_an_identity_copied_from_an_earlier_attempt_proves_nothing(port: int) -> None:
    other = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    copied = json.loads(written_by(RUN_A, "identity", {}))
    copied["content"] = json.dumps({"run": "SLURM_JOB_ID=17 SLURM_RESTART_COUNT=1"})
    other.set("clusterddp/identity", json.dumps(copied))
    with pytest.raises(TrainingError, match="another run's rank 0"):
        open_store(env(1, 2, port), RUN_A_AGAIN, PATIENCE)


HELLO = {"rank": 1, "world_size": 2}


@pytest.mark.parametrize(
    "hello",
    [
        written_by(UNPROVEN, "hello/1", HELLO),
        written_by(RUN_B, "hello/1", HELLO),
        written_by(RUN_A_AGAIN, "hello/1", HELLO),
        Seal.from_environ(RUN_A).of_round(1).wrap("hello/1", HELLO),
        written_by(RUN_A, "hello/2", HELLO),
        written_by(RUN_A, "hello/1", {**HELLO, "device": "cpu"}).replace("cpu", "gpu"),
    ],
    ids=[
        "no nonce",
        "another nonce",
        "another attempt",
        "another start",
        "another rank's",
        "altered",
    ],
)
def test_rank_0_refuses_a_hello_that_none_of_its_ranks_wrote(port: int, hello: str) -> None:
    first = in_background(lambda: meet([env(0, 2, port)], count, environ={0: RUN_A})[0])
    client(port).set("clusterddp/hello/1", hello)
    assert "the hello of rank 1" in str(first()) and "lacks the proof" in str(first())


class Bomb:
    went_off = False

    @staticmethod
    def explode() -> None:
        Bomb.went_off = True

    def __reduce__(self) -> Any:
        return Bomb.explode, ()


@pytest.mark.parametrize("environ", [RUN_A, {}], ids=["with a nonce", "by hand"])
@pytest.mark.parametrize(
    "hello",
    [
        b"", b"garbage", b"\xff\xfe\x00", b"[]", b"17", b'{"content": 3, "proof": ""}',
        b'{"content": "{}", "proof": "\\ud800"}', b'{"content": "[]", "proof": ""}',
        b"[" * 100_000, b"9" * 10_000, pickle.dumps(Bomb()), b"\x1b[2Jnew screen\n",
    ],
)  # fmt: skip
def test_rank_0_names_the_rank_whose_hello_is_no_message(
    port: int, hello: bytes, environ: dict[str, str]
) -> None:
    first = in_background(lambda: meet([env(0, 2, port)], count, environ={0: environ})[0])
    client(port).set("clusterddp/hello/1", hello)
    error = str(first())
    assert "rank 0: the hello of rank 1" in error and "not what a rank writes" in error
    assert error.isprintable() and len(error) < 1500
    assert not Bomb.went_off


def test_a_hello_without_a_world_size_is_refused_by_name(port: int) -> None:
    first = in_background(lambda: meet([env(0, 2, port)], count)[0])
    client(port).set("clusterddp/hello/1", written_by({}, "hello/1", {}))
    assert "rank 1 was started with a world size of None" in str(first())


def test_a_verdict_that_rank_0_did_not_write_is_refused(port: int) -> None:
    def rank_0() -> None:
        store = open_store(env(0, 2, port), RUN_A, PATIENCE)
        store.set("verdict", written_by(RUN_B, "verdict", {"run_dir": "/elsewhere"}))
        store.wait(["hello/1"])
        rendezvous._wait(store, ["done"], PATIENCE)

    first = in_background(rank_0)
    (second,) = meet([env(1, 2, port)], count, environ={0: RUN_A})
    client(port).set("clusterddp/done", "")
    first()
    assert "rank 1: rank 0's verdict" in str(second) and "lacks the proof" in str(second)


def test_an_empty_nonce_is_no_nonce_and_refused(port: int) -> None:
    with pytest.raises(TrainingError, match="CLUSTERDDP_NONCE is empty"):
        open_store(env(0, 2, port), {"CLUSTERDDP_NONCE": ""}, PATIENCE)


def test_a_traceback_does_not_show_the_nonce() -> None:
    assert NONCE not in repr(Seal.from_environ(RUN_A))


@pytest.fixture
def agent() -> Store:
    """The store of torchrun's agents, which outlives the workers."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


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


def test_a_restarted_worker_waits_for_rank_0_to_start_again(agent: Any) -> None:
    ranks = [env(0, 2, agent.port), env(1, 2, agent.port)]
    environ = {0: under_agent(), 1: under_agent()}
    meet(ranks, count, PATIENCE, environ)
    second = in_background(lambda: meet([ranks[1]], count, PATIENCE, {0: under_agent()})[0])
    agent.wait(["clusterddp/1/enters/1"])
    time.sleep(1.5)  # longer than a look at the round that is over
    first = meet([ranks[0]], count, PATIENCE, {0: under_agent()})[0]
    assert first == second() == {"ranks": [0, 1]}


def test_a_rank_0_that_died_before_all_had_come_is_followed_to_its_next_round(agent: Any) -> None:
    dead = rendezvous._round(agent, agent.add("clusterddp/rounds", 1), _seal(under_agent()))
    rendezvous._identify(dead)
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


def test_a_start_that_was_called_off_is_not_the_next_ones(agent: Any) -> None:
    environ = {0: under_agent(), 1: under_agent()}
    meet([env(0, 2, agent.port)], count, 0.5, environ)
    second = in_background(lambda: meet([env(1, 2, agent.port)], count, PATIENCE, environ)[0])
    agent.wait(["clusterddp/1/enters/1"])
    time.sleep(1.5)
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
    monkeypatch.setattr(rendezvous, "_GRACE_SECONDS", 0.5)
    environ = {0: under_agent(), 1: under_agent()}
    meet([env(0, 2, agent.port), env(1, 2, agent.port)], count, PATIENCE, environ)
    with pytest.raises(PeerError, match=r"rank 1 waited for rank 0 .*did not come"):
        open_store(env(1, 2, agent.port), under_agent(), 0.5)

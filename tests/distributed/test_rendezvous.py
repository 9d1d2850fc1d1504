import json
import pickle
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import Store

from clusterddp.distributed import rendezvous, tcp_store
from clusterddp.distributed.rendezvous import Identity, RunStore, open_store
from clusterddp.errors import PeerError, TrainingError
from clusterddp.ranks.dist_env import DistEnv
from tests.distributed.meetings import (
    NONCE,
    PATIENCE,
    RUN_A,
    RUN_A_AGAIN,
    RUN_B,
    UNPROVEN,
    client,
    count,
    env,
    in_background,
    keys_of,
    meet,
)


def test_every_rank_gets_the_decision_on_all_hellos(port: int) -> None:
    decision = {"ranks": [0, 1, 2]}
    assert meet([env(2, 3, port), env(0, 3, port), env(1, 3, port)], count) == [decision] * 3


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
        rendezvous.report_refusal(store, ours, TrainingError("no GPU here"))

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    results = meet(ranks, count)
    thread.join(PATIENCE)
    for result in results:
        assert isinstance(result, PeerError)
        assert "rank 2 cannot join: no GPU here" in str(result)


def test_a_rank_0_that_cannot_take_part_calls_the_start_off(port: int) -> None:
    def refuse() -> None:
        ours = env(0, 2, port)
        store = open_store(ours, {}, PATIENCE)
        store.wait(["hello/1"])
        rendezvous.report_refusal(store, ours, TrainingError("no GPU here"))

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    (result,) = meet([env(1, 2, port)], count)
    thread.join(PATIENCE)
    assert "rank 0 aborted the start: no GPU here" in str(result)


def test_calling_a_start_off_does_not_look_for_ever_for_those_that_never_came() -> None:
    looks = []

    class Empty(rendezvous.RunStore):
        def check(self, keys: list[str]) -> bool:
            looks.append(keys)
            return False

    store = Empty(HashStore(), Identity("", ""))
    many = env(0, 10**15, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_HEARING_SECONDS", 0.1)
        rendezvous.report_refusal(store, many, TrainingError("no GPU here"))
    assert 0 < len(looks) < 10**7


@pytest.fixture
def come_first(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has rank 0 wait for others only once these keys are there, and then for a moment."""

    def wanted(*keys: str) -> None:
        await_ranks = rendezvous.await_ranks

        def later(store: Any, ours: Any, awaited: Any, timeout: float) -> None:
            rendezvous.wait(store, keys, PATIENCE)
            await_ranks(store, ours, awaited, 0.1)

        monkeypatch.setattr(rendezvous, "await_ranks", later)

    return wanted


def test_ranks_that_never_came_are_listed(port: int, come_first: Callable[..., None]) -> None:
    come_first("hello/2")
    second = in_background(lambda: meet([env(2, 4, port)], count)[0])
    [first] = meet([env(0, 4, port)], count)
    assert "2 of 4 ranks did not join" in str(first)
    assert "ranks 1, 3" in str(first)
    assert "ranks 1, 3" in str(second())


def test_two_processes_of_one_rank_are_refused(port: int) -> None:
    results = meet([env(rank, 3, port) for rank in (0, 1, 1, 2)], count)
    [refused] = [result for result in results if result != {"ranks": [0, 1, 2]}]
    assert "two processes have rank 1 of 3" in str(refused)


def test_ranks_of_different_world_sizes_are_named(port: int) -> None:
    first, _ = meet([env(0, 2, port), env(1, 3, port)], count)
    assert "rank 1 was started with a world size of 3, rank 0 with 2" in str(first)


def test_a_hello_without_a_world_size_is_refused_by_name(port: int) -> None:
    first = in_background(lambda: meet([env(0, 2, port)], count)[0])
    rendezvous.put(keys_of({}, client(port)), "hello/1", {})
    assert "rank 1 was started with a world size of None" in str(first())


@pytest.mark.parametrize("patient", [True, False])
def test_rank_0_may_take_its_time_to_decide_where_it_was_given_that(
    port: int, patient: bool
) -> None:
    """As it does where a person's own function has to fetch its data."""
    other_left = threading.Event()

    def decide(hellos: list[dict[str, Any]]) -> dict[str, Any]:
        other_left.wait(1.0 if patient else PATIENCE)
        return count(hellos)

    first = in_background(lambda: meet([env(0, 2, port)], decide)[0])
    client(port)
    second = meet([env(1, 2, port)], decide, 0.5, decision_seconds=PATIENCE if patient else 0.2)[0]
    other_left.set()
    assert first() == {"ranks": [0, 1]}
    if patient:
        assert second == first()
    else:
        assert "did not start the training within 0.7s" in str(second)


@pytest.fixture
def agent() -> Store:
    """The store of torchrun's agents, which outlives the workers."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until a rank has looked for a later round twice more in vain."""
    in_vain = threading.Semaphore(0)
    wait = rendezvous.wait

    def counted(*arguments: Any) -> None:
        try:
            wait(*arguments)
        except dist.DistStoreError:
            in_vain.release()
            raise

    monkeypatch.setattr(rendezvous, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "wait", counted)

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
    meet(ranks, count, PATIENCE, {0: under_agent(), 1: under_agent()})
    second = in_background(lambda: meet([ranks[1]], count, PATIENCE, {0: under_agent()})[0])
    looks()
    assert meet([ranks[0]], count, PATIENCE, {0: under_agent()})[0] == second() == {"ranks": [0, 1]}


def test_a_rank_0_that_died_before_all_had_come_is_followed_to_its_next_round(agent: Any) -> None:
    dead = replace(Identity.from_environ(under_agent()), round=agent.add("clusterddp/rounds", 1))
    dead.publish(agent)
    second = in_background(
        lambda: meet([env(1, 2, agent.port)], count, PATIENCE, {0: under_agent()})[0]
    )
    RunStore(agent, dead).wait(["enters/1"])
    first = meet([env(0, 2, agent.port)], count, PATIENCE, {0: under_agent()})[0]
    assert first == second() == {"ranks": [0, 1]}


def test_ranks_that_never_came_to_an_agents_store_are_listed(
    agent: Any, come_first: Callable[..., None]
) -> None:
    come_first("enters/2")
    second = in_background(
        lambda: meet([env(2, 4, agent.port)], count, environ={0: under_agent()})[0]
    )
    [first] = meet([env(0, 4, agent.port)], count, environ={0: under_agent()})
    assert "2 of 4 ranks did not join" in str(first) and "ranks 1, 3" in str(first)
    assert isinstance(second(), PeerError) and "ranks 1, 3" in str(second())


def test_a_start_that_was_called_off_is_not_the_next_ones(
    agent: Any, looks: Callable[[], None]
) -> None:
    environ = {0: under_agent(), 1: under_agent()}
    await_ranks = rendezvous.await_ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "await_ranks", lambda *given: await_ranks(*given[:3], 0.1))
        meet([env(0, 2, agent.port)], count, PATIENCE, environ)
    second = in_background(lambda: meet([env(1, 2, agent.port)], count, PATIENCE, environ)[0])
    keys_of(under_agent(), agent, 1).wait(["enters/1"])
    looks()
    first = meet([env(0, 2, agent.port)], count, PATIENCE, environ)[0]
    assert first == second() == {"ranks": [0, 1]}


@pytest.mark.parametrize("rank", [0, 1])
def test_another_run_that_reaches_an_agents_store_writes_nothing(agent: Any, rank: int) -> None:
    environ = {0: under_agent(), 1: under_agent()}
    meet([env(0, 2, agent.port), env(1, 2, agent.port)], count, PATIENCE, environ)

    entries = keys_of(under_agent(), agent, 1)

    def written() -> tuple[Any, ...]:
        return agent.num_keys(), agent.get("clusterddp/rounds"), entries.get("enters/1")

    before = written()
    stranger = under_agent(SLURM_JOB_ID="18")
    with pytest.raises(TrainingError, match="expected SLURM_JOB_ID=18, found SLURM_JOB_ID=17"):
        open_store(env(rank, 2, agent.port), stranger, 2.0)
    assert written() == before


@pytest.mark.parametrize(
    "written",
    [
        lambda _: '{"resume": "/theirs"}',
        lambda _: json.dumps({"content": '{"resume": "/theirs"}', "proof": ""}),
        lambda run: json.dumps(
            {"content": "{}", "proof": replace(run, nonce="77ab").prove("decision", "{}")}
        ),
        lambda run: json.dumps({"content": "{}", "proof": run.prove("hello/1", "{}")}),
        lambda run: json.dumps({"content": "[]", "proof": run.prove("decision", "[]")}),
    ],
    ids=["no proof", "an empty one", "another nonce's", "another message's", "no object"],
)
def test_what_a_stranger_writes_over_a_message_is_refused(
    written: Callable[[Identity], str],
) -> None:
    run = Identity.from_environ(under_agent())
    store = RunStore(HashStore(), run)
    rendezvous.put(store, "decision", {"resume": ""})
    assert rendezvous.take(store, env(1, 2, 1), "decision", "the decision") == {"resume": ""}
    store.set("decision", written(run))
    with pytest.raises(
        TrainingError, match=r"the decision in the store .* was not written by a rank"
    ):
        rendezvous.take(store, env(1, 2, 1), "decision", "the decision")


def test_the_entry_of_a_worker_of_another_run_is_none(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await_ranks, entered = rendezvous.await_ranks, threading.Event()

    def later(*given: Any) -> None:
        assert entered.wait(PATIENCE)
        await_ranks(*given[:3], 0.1)

    monkeypatch.setattr(rendezvous, "await_ranks", later)
    first = in_background(
        lambda: meet([env(0, 2, agent.port)], count, environ={0: under_agent()})[0]
    )
    agent.wait(["clusterddp/1/identity"])
    keys_of(under_agent(CLUSTERDDP_NONCE="77ab"), agent, 1).set("enters/1", '{"token": "00"}')
    entered.set()
    assert "1 of 2 ranks did not join" in str(first())


def test_a_worker_whose_rank_0_never_starts_again_ends(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.5)
    environ = {0: under_agent(), 1: under_agent()}
    meet([env(0, 2, agent.port), env(1, 2, agent.port)], count, PATIENCE, environ)
    with pytest.raises(PeerError, match=r"rank 1 waited for rank 0 .*did not join"):
        open_store(env(1, 2, agent.port), under_agent(), 0.5)


@pytest.mark.parametrize(
    ("sent", "told", "received", "ahead"),
    [
        (100.0, 100.2, 100.5, 0.0),
        (100.0, 105.2, 105.0 - 4.5, 4.95),
        (100.0, 95.1, 100.3, -5.05),
        (100.0, 100.4, 100.3, 0.25),
        (100.0, 100.0, 100.0, 0.0),
        # Nobody can tell a busy rank from a clock that is behind: the hosts' own are trusted.
        (100.0, 104.0, 110.0, 0.0),
    ],
)
def test_clocks_are_apart_by_what_the_round_trip_cannot_explain(
    sent: float, told: float, received: float, ahead: float
) -> None:
    assert rendezvous.clock_offset(sent, told, received) == pytest.approx(ahead)


def test_one_rank_of_each_other_host_tells_the_time() -> None:
    hosts = ["h01", "h01", "h02", "h02", "h03"]
    hellos = [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]
    assert rendezvous.clock_senders(hellos) == {2: "h02", 4: "h03"}
    assert rendezvous.clock_senders(hellos[:2]) == {}


HELLO = b'{"rank": 1, "world_size": 2}'


def test_the_nonce_is_in_no_key_and_in_no_message(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Store] = []
    listen = tcp_store.listen

    def listen_and_keep(*arguments: Any) -> Store:
        kept.append(listen(*arguments))
        return kept[0]

    monkeypatch.setattr(tcp_store, "listen", listen_and_keep)
    ranks = [env(0, 2, port), env(1, 2, port)]
    assert meet(ranks, count, environ={0: RUN_A, 1: RUN_A}) == [{"ranks": [0, 1]}] * 2
    ours = keys_of(RUN_A, kept[0])
    keys = ("hello/0", "hello/1", "decision", "claim/0", "claim/1", "left/0", "left/1")
    contents = [kept[0].get("clusterddp/0/identity"), *map(ours.get, keys)]
    assert kept[0].num_keys() <= len(contents) + 1  # torch's own
    assert not [content for content in contents if NONCE.encode() in content]
    # Nor does the identity, which anybody can read, name the keys of the messages.
    assert Identity.from_environ(RUN_A)._digest("keys").encode() not in contents[0]


@pytest.mark.parametrize(
    ("environ", "round"),
    [(UNPROVEN, 0), (RUN_B, 0), (RUN_A_AGAIN, 0), (RUN_A, 1)],
    ids=["no nonce", "another nonce", "another attempt", "another start"],
)
def test_what_none_of_its_ranks_wrote_is_not_read(
    port: int, environ: dict[str, str], round: int
) -> None:
    first = in_background(lambda: meet([env(0, 2, port)], count, environ={0: RUN_A})[0])
    stranger = client(port)
    for store in (keys_of(environ, stranger, round), stranger):
        store.set("hello/1", b'{"world_size": 3}')
        store.set("decision", b'{"run_dir": "/elsewhere"}')
    assert [*meet([env(1, 2, port)], count, environ={0: RUN_A}), first()] == [
        {"ranks": [0, 1]}
    ] * 2  # fmt: skip


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
        b"", b"garbage", b"\xff\xfe\x00", b"[]", b"17", b"[" * 100_000, b"9" * 10_000,
        pickle.dumps(Bomb()), b"\x1b[2Jnew screen\n",
    ],
)  # fmt: skip
def test_rank_0_names_the_rank_whose_hello_is_no_message(
    port: int, hello: bytes, environ: dict[str, str]
) -> None:
    first = in_background(lambda: meet([env(0, 2, port)], count, environ={0: environ})[0])
    keys_of(environ, client(port)).set("hello/1", hello)
    error = str(first())
    assert "rank 0: the hello of rank 1" in error and "not written by a rank" in error
    assert error.isprintable() and len(error) < 1500
    assert not Bomb.went_off


def test_two_runs_on_one_port_name_each_other_and_the_first_goes_on(port: int) -> None:
    first = in_background(
        lambda: meet(
            [env(0, 3, port), env(1, 3, port)], count, PATIENCE, dict.fromkeys((0, 1), RUN_A)
        )
    )
    keys_of(RUN_A, client(port)).wait(["hello/1"])
    strangers = meet(
        [env(0, 3, port), env(1, 3, port), env(2, 3, port)], count, PATIENCE,
        dict.fromkeys((0, 1, 2), RUN_B),
    )  # fmt: skip
    last = meet([env(2, 3, port)], count, environ={0: RUN_A})
    assert f"port {port} " in str(strangers[0]) and "uses the port" in str(strangers[0])
    for rank in (1, 2):
        assert f"rank {rank} reached another run's rank 0" in str(strangers[rank])
        assert "expected SLURM_JOB_ID=18, found SLURM_JOB_ID=17." in str(strangers[rank])
    assert [*first(), *last] == [{"ranks": [0, 1, 2]}] * 3


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (RUN_A, UNPROVEN, "They differ in CLUSTERDDP_NONCE, not set here."),
        (UNPROVEN, RUN_A, "They differ in CLUSTERDDP_NONCE."),
        (RUN_A, {**RUN_A, "CLUSTERDDP_NONCE": "77ab"}, "They differ in CLUSTERDDP_NONCE."),
        (RUN_A, RUN_A_AGAIN, "expected SLURM_JOB_ID=17 SLURM_RESTART_COUNT=1,"),
        ({"SLURM_JOB_ID": "17"}, {"SLURM_JOB_ID": "18"},
         "expected SLURM_JOB_ID=18, found SLURM_JOB_ID=17."),
    ],
)  # fmt: skip
def test_a_store_that_does_not_prove_to_be_the_runs_own_is_not_joined(
    port: int, theirs: dict[str, str], ours: dict[str, str], said: str
) -> None:
    first = in_background(lambda: meet([env(0, 2, port)], count, environ={0: theirs}))
    [stranger] = meet([env(1, 2, port)], count, environ={0: ours})
    assert "rank 1 reached another run's rank 0" in str(stranger) and said in str(stranger)
    last = meet([env(1, 2, port)], count, environ={0: theirs})
    assert [*first(), *last] == [{"ranks": [0, 1]}] * 2


@pytest.mark.parametrize("identity", [b"garbage", b"\xff\x00", b"[]"])
def test_a_store_that_is_somebody_elses_is_refused(port: int, identity: bytes) -> None:
    other: Any = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    other.set("clusterddp/0/identity", identity)
    with pytest.raises(TrainingError, match=r"rank 1: what names the run .*not written by a rank"):
        open_store(env(1, 2, port), RUN_A, PATIENCE)
    assert other.num_keys() <= 2  # torch's own


def test_an_identity_copied_from_an_earlier_attempt_proves_nothing(port: int) -> None:
    other = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    Identity.from_environ(RUN_A).publish(other)
    copied = json.loads(other.get("clusterddp/0/identity"))
    copied["run"] = "SLURM_JOB_ID=17 SLURM_RESTART_COUNT=1"
    other.set("clusterddp/0/identity", json.dumps(copied))
    with pytest.raises(TrainingError, match="another run's rank 0"):
        open_store(env(1, 2, port), RUN_A_AGAIN, PATIENCE)


def test_an_empty_nonce_is_no_nonce_and_refused(port: int) -> None:
    with pytest.raises(TrainingError, match="CLUSTERDDP_NONCE is empty"):
        open_store(env(0, 2, port), {"CLUSTERDDP_NONCE": ""}, PATIENCE)


def test_a_traceback_does_not_show_the_nonce() -> None:
    assert NONCE not in repr(Identity.from_environ(RUN_A))


def test_the_private_abort_of_a_group_is_where_it_was_seen() -> None:
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    assert callable(abort), f"seen in torch 2.15, here {torch.__version__}"

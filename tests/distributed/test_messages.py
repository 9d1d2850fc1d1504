import json
import pickle
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import Store

from clusterddp.distributed import tcp_store
from clusterddp.distributed.messages import Identity
from clusterddp.distributed.rendezvous import open_store
from clusterddp.errors import TrainingError
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
    keys = ("hello/0", "hello/1", "verdict", "claim/0", "claim/1", "left/0", "left/1")
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
        store.set("verdict", b'{"run_dir": "/elsewhere"}')
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
    assert "rank 0: the hello of rank 1" in error and "not what a rank writes" in error
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
        (
            {"SLURM_JOB_ID": "17"},
            {"SLURM_JOB_ID": "18"},
            "that one is SLURM_JOB_ID=17, this one SLURM_JOB_ID=18.",
        ),
    ],
)
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
    with pytest.raises(TrainingError, match=r"rank 1: what names the run .*not what a rank writes"):
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

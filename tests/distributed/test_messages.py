import json
import pickle
from typing import Any

import pytest
from torch.distributed.distributed_c10d import Store

from clusterddp.distributed import messages, tcp_store
from clusterddp.distributed.rendezvous import open_store
from clusterddp.distributed.seal import Seal
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
    meet,
    written_by,
)


def test_the_nonce_is_in_no_message(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Store] = []
    listen = tcp_store.listen

    def listen_and_keep(*arguments: Any) -> Store:
        kept.append(listen(*arguments))
        return kept[0]

    monkeypatch.setattr(tcp_store, "listen", listen_and_keep)
    assert meet([env(0, 2, port), env(1, 2, port)], count, environ={0: RUN_A, 1: RUN_A}) == [
        {"ranks": [0, 1]}
    ] * 2  # fmt: skip
    keys = ("identity", "hello/0", "hello/1", "verdict", "claim/0", "claim/1", "left/0", "left/1")
    messages = [kept[0].get(f"clusterddp/{key}").decode() for key in keys]
    assert kept[0].num_keys() <= len(keys) + 1  # torch's own
    assert not [text for text in messages if NONCE in text]
    proofs = [json.loads(text)["proof"] for text in messages[:4]]
    assert len(set(proofs)) == 4 and all(len(proof) == 64 for proof in proofs)


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


def test_a_verdict_that_rank_0_did_not_write_is_refused(port: int) -> None:
    def rank_0() -> None:
        store = open_store(env(0, 2, port), RUN_A, PATIENCE)
        store.set("verdict", written_by(RUN_B, "verdict", {"run_dir": "/elsewhere"}))
        store.wait(["hello/1"])
        messages.wait(store, ["done"], PATIENCE)

    first = in_background(rank_0)
    (second,) = meet([env(1, 2, port)], count, environ={0: RUN_A})
    client(port).set("clusterddp/done", "")
    first()
    assert "rank 1: rank 0's verdict" in str(second) and "lacks the proof" in str(second)

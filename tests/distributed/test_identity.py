import json
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, unlisted

from clusterddp.distributed.rendezvous import open_store
from clusterddp.errors import TrainingError
from tests.distributed.meetings import (
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


def test_another_runs_store_is_not_joined(port: int) -> None:
    jobs = {0: {"SLURM_JOB_ID": "17"}, 1: {"SLURM_JOB_ID": "18"}}
    _, second = meet([env(0, 2, port), env(1, 2, port)], count, 1.0, jobs)
    assert "another run's rank 0" in str(second)
    assert "SLURM_JOB_ID=17" in str(second) and "SLURM_JOB_ID=18" in str(second)


def test_two_runs_on_one_port_name_each_other_and_the_first_goes_on(port: int) -> None:
    first = in_background(
        lambda: meet(
            [env(0, 3, port), env(1, 3, port)], count, PATIENCE, dict.fromkeys((0, 1), RUN_A)
        )
    )
    client(port).wait(["clusterddp/hello/1"])
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

import socket

import pytest

from clusterddp.errors import RequestError
from clusterddp.ranks import from_flags


def place(**flags: int | str) -> from_flags.DistEnv | None:
    names = ("rank", "world_size", "master_addr", "master_port", "local_rank", "local_world_size")
    return from_flags.from_flags(**{name: flags.get(name) for name in names})  # type: ignore[arg-type]


def test_without_a_flag_nothing_is_decided() -> None:
    assert place() is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"rank": 0, "world_size": 1}, (0, 1, 0, 1, 0, 1, "127.0.0.1", 0)),
        (
            {"rank": 3, "world_size": 4, "master_port": 29500},
            (3, 4, 3, 4, 0, 1, "127.0.0.1", 29500),
        ),
        (
            {
                "rank": 3,
                "world_size": 4,
                "master_port": 1,
                "master_addr": "h",
                "local_world_size": 2,
            },
            (3, 4, 1, 2, 1, 2, "h", 1),
        ),
        (
            {"rank": 2, "world_size": 4, "master_port": 1, "local_world_size": 2, "local_rank": 0},
            (2, 4, 0, 2, 1, 2, "127.0.0.1", 1),
        ),
    ],
)
def test_flags_give_a_ranks_place(
    flags: dict[str, int | str], expected: tuple[object, ...]
) -> None:
    env = place(**flags)
    assert env is not None
    assert (
        env.rank, env.world_size, env.local_rank, env.local_world_size, env.node_rank,
        env.num_nodes, env.master_addr, env.master_port,
    ) == expected  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"rank": 0}, "--rank 0 without --world-size and --master-port"),
        ({"world_size": 2}, "--world-size 2 without --rank and --master-port"),
        ({"master_port": 7}, "--master-port 7 without --rank and --world-size"),
        ({"master_addr": "h"}, "--master-addr h without --rank and --world-size"),
        ({"rank": 0, "world_size": 2}, "--rank 0, --world-size 2 without --master-port:"),
        ({"rank": 4, "world_size": 4, "master_port": 7}, "--rank: 4 is not a number from 0 to 3"),
        ({"rank": -1, "world_size": 4, "master_port": 7}, "--rank: -1 is not"),
        ({"rank": 0, "world_size": 0}, "--world-size: 0 is not a number from 1 to 100000"),
        (
            {"rank": 0, "world_size": 99999999999999999999, "master_port": 7},
            "--world-size: 99999999999999999999 is not",
        ),
        ({"rank": 0, "world_size": 2, "master_port": 70000}, "--master-port: 70000 is not"),
        ({"rank": 0, "world_size": 1, "master_port": 0}, "--master-port: 0 is not"),
        ({"rank": 0, "world_size": 2, "master_port": 7, "master_addr": ""}, "--master-addr: ''"),
        ({"rank": 0, "world_size": 2, "master_port": 7, "master_addr": "a b"}, "--master-addr:"),
        ({"rank": 0, "world_size": 2, "master_port": 7, "local_rank": 0}, "--local-rank 0 without"),
        (
            {"rank": 0, "world_size": 2, "master_port": 7, "local_world_size": 3},
            "--local-world-size: 3 is not a number from 1 to 2",
        ),
        (
            {"rank": 0, "world_size": 3, "master_port": 7, "local_world_size": 2},
            "--world-size 3 is no multiple of --local-world-size 2",
        ),
        (
            {"rank": 3, "world_size": 4, "master_port": 7, "local_world_size": 2, "local_rank": 0},
            "--local-rank 0 against --rank 3 and --local-world-size 2: expected 1",
        ),
    ],
)
def test_halves_and_values_out_of_range_name_what_was_typed(
    flags: dict[str, int | str], said: str
) -> None:
    with pytest.raises(RequestError) as raised:
        place(**flags)
    assert said in str(raised.value)


def test_a_surrounding_jobs_variables_are_foreign() -> None:
    job = ["SLURM_JOB_ID", "SLURMD_NODENAME", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PMI_RANK"]
    own = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert from_flags.foreign({**dict.fromkeys(job, "1"), **own}) == job


def test_a_name_that_leads_nowhere_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    from_flags.check_address("127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(RequestError, match="--master-addr nohost: Name or service not known"):
        from_flags.check_address("nohost")

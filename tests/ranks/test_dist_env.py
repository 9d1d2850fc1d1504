"""Place of a task from its variables, a table for each way to set them, and from flags."""

import pickle
import socket
from collections.abc import Mapping

import pytest

from clusterddp.errors import DistEnvError, RequestError
from clusterddp.ranks import dist_env
from clusterddp.ranks.dist_env import DistEnv, master_port
from tests.counting import count_calls

TORCH = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}
TORCHRUN = {
    **TORCH,
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "8",
    "ROLE_NAME": "default",
    "TORCHELASTIC_RUN_ID": "none",
}
# The batch script's variables: it looks like a task and is none.
BATCH = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
    "SLURM_NODELIST": "gpu[01-04]",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "16",
    "SLURM_TASKS_PER_NODE": "4(x4)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
# A step on half of that job's nodes: its own variables differ from the job's.
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "3",
    "SLURM_STEPID": "3",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def place(env: DistEnv) -> tuple[int, ...]:
    return (
        env.rank, env.local_rank, env.node_rank, env.world_size, env.local_world_size,
        env.num_nodes,
    )  # fmt: skip


def test_a_slurm_task_is_derived_from_its_step_before_its_job() -> None:
    env = DistEnv.from_environ(STEP)
    assert place(env) == (5, 1, 1, 8, 4, 2)
    assert env.hostnames == ("gpu03", "gpu04")
    assert (env.master_addr, env.master_port) == ("gpu03", master_port(1234, 3, 0))
    assert env.origin == "slurm"
    assert env.sources == {
        "rank": "SLURM_PROCID",
        "local_rank": "SLURM_LOCALID",
        "node_rank": "SLURM_NODEID",
        "world_size": "SLURM_STEP_NUM_TASKS",
        "local_world_size": "SLURM_STEP_TASKS_PER_NODE (entry 1)",
        "num_nodes": "SLURM_STEP_NUM_NODES",
        "master_addr": "SLURM_STEP_NODELIST (first host)",
        "master_port": "computed from SLURM_JOB_ID, SLURM_STEP_ID",
        "hostnames": "SLURM_STEP_NODELIST",
    }


def test_job_variables_stand_in_where_the_step_has_none() -> None:
    env = DistEnv.from_environ({**BATCH, "SLURM_STEPID": "0", "SLURM_PROCID": "0"})
    assert place(env) == (0, 0, 0, 16, 4, 4)
    assert env.sources["world_size"] == "SLURM_NTASKS"
    assert env.sources["num_nodes"] == "SLURM_JOB_NODELIST (number of hosts)"
    oldest = without({**BATCH, "SLURM_STEPID": "0"}, "SLURM_JOB_NODELIST", "SLURM_NTASKS")
    env = DistEnv.from_environ({**oldest, "SLURM_NPROCS": "16"})
    assert env.sources["hostnames"] == "SLURM_NODELIST"
    assert env.sources["world_size"] == "SLURM_NPROCS"


@pytest.mark.parametrize(
    ("layout", "counts"), [("4(x2),3", [4, 4, 3]), ("4,2(x2)", [4, 2, 2]), ("1,5", [1, 5])]
)
@pytest.mark.parametrize("distribution", ["block", "cyclic"])
def test_every_task_of_uneven_nodes_knows_its_place(
    layout: str, counts: list[int], distribution: str
) -> None:
    slots = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    if distribution == "cyclic":
        slots.sort(key=lambda slot: (slot[1], slot[0]))
    envs = [
        DistEnv.from_environ(
            {
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
                "SLURM_STEP_NUM_NODES": str(len(counts)),
                "SLURM_STEP_NUM_TASKS": str(sum(counts)),
                "SLURM_STEP_TASKS_PER_NODE": layout,
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(local),
                "SLURM_NODEID": str(node),
            }
        )
        for rank, (node, local) in enumerate(slots)
    ]
    assert [env.rank for env in envs] == list(range(sum(counts)))
    assert [(env.node_rank, env.local_rank) for env in envs] == slots
    assert [env.local_world_size for env in envs] == [counts[node] for node, _ in slots]
    assert {(env.master_addr, env.master_port) for env in envs} == {("n1", master_port(7, 0, 0))}
    assert {(env.world_size, env.num_nodes) for env in envs} == {(sum(counts), len(counts))}


def test_presets_of_address_and_port_are_honoured_by_a_step_and_a_single_process() -> None:
    presets = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"}
    for environ in (STEP, {}, BATCH):
        env = DistEnv.from_environ({**environ, **presets})
        assert (env.master_addr, env.master_port) == ("10.0.0.1", 23456)
        assert (env.sources["master_addr"], env.sources["master_port"]) == tuple(presets)


def test_the_restart_count_moves_the_port() -> None:
    env = DistEnv.from_environ({**STEP, "SLURM_RESTART_COUNT": "2"})
    assert env.master_port == master_port(1234, 3, 2) != master_port(1234, 3, 0)
    assert "SLURM_RESTART_COUNT" in env.sources["master_port"]


def test_torchruns_variables_are_taken_as_they_are() -> None:
    env = DistEnv.from_environ(TORCHRUN)
    assert place(env) == (5, 1, 1, 8, 4, 2)
    assert (env.master_addr, env.master_port, env.origin) == ("gpu01", 29500, "torch")
    assert env.hostnames == ()
    assert env.sources["node_rank"] == "GROUP_RANK"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, (5, 5, 0, 8, 8, 1)),  # all ranks on one host
        ({"LOCAL_WORLD_SIZE": "4"}, (5, 1, 1, 8, 4, 2)),
        ({"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (5, 1, 1, 8, 4, 2)),
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "5"}, (5, 5, 0, 8, 8, 1)),
        ({"GROUP_WORLD_SIZE": "2"}, (5, 1, 1, 8, 4, 2)),
        ({"GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "3", "GROUP_RANK": "0"}, (5, 3, 0, 8, 4, 2)),
        ({"GROUP_WORLD_SIZE": "1", "LOCAL_RANK": "5"}, (5, 5, 0, 8, 8, 1)),
        ({"LOCAL_WORLD_SIZE": "4", "NODE_RANK": "1"}, (5, 1, 1, 8, 4, 2)),
        (  # uneven nodes, as torchrun states them
            {"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "0", "GROUP_RANK": "1"}
            | {"GROUP_WORLD_SIZE": "2"},
            (5, 0, 1, 8, 3, 2),
        ),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, (0, 0, 0, 1, 1, 1)),
    ],
)
def test_what_torchs_variables_leave_out_is_filled_in_where_it_is_beyond_doubt(
    extra: dict[str, str], expected: tuple[int, ...]
) -> None:
    env = DistEnv.from_environ({**TORCH, **extra})
    assert place(env) == expected
    assert all(env.sources[name] for name in ("local_rank", "local_world_size", "num_nodes"))


def test_the_assumption_of_one_host_is_stated() -> None:
    env = DistEnv.from_environ(TORCH)
    assert "all ranks on one host" in env.sources["local_rank"]
    assert env.hostnames == ("gpu01",)


@pytest.mark.parametrize("extra", [{}, {"LOCAL_RANK": "1"}, {"LOCAL_WORLD_SIZE": "4"}])
def test_a_wrapper_that_renamed_slurms_variables_is_completed_from_the_step(
    extra: dict[str, str],
) -> None:
    env = DistEnv.from_environ({**STEP, **TORCH, **extra})
    assert env.origin == "torch"
    assert place(env) == (5, 1, 1, 8, 4, 2)
    assert env.hostnames == ("gpu03", "gpu04")


def test_torchruns_workers_may_be_numbered_unlike_the_step() -> None:
    env = DistEnv.from_environ({**STEP, **TORCHRUN, "RANK": "4", "LOCAL_RANK": "0"})
    assert (env.rank, env.origin) == (4, "torch")


def test_workers_of_an_agent_that_is_one_task_of_the_step_keep_their_ranks() -> None:
    agents = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    launched = without(TORCHRUN, "TORCHELASTIC_RUN_ID")
    env = DistEnv.from_environ({**STEP, **agents, "SLURM_PROCID": "1", **launched})
    assert place(env) == (5, 1, 1, 8, 4, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        {**STEP, "SLURM_STEP_ID": "4294967290"},  # the interactive step of salloc
        {**STEP, "SLURM_STEP_ID": "4294967291"},  # batch
        {**STEP, "SLURM_STEP_ID": "4294967292"},  # extern
        {"SLURM_JOB_ID": "1234"},
        {"LOCAL_WORLD_SIZE": "4"},
    ],
)
def test_what_is_neither_a_step_nor_torchs_is_a_single_process(environ: dict[str, str]) -> None:
    env = DistEnv.from_environ(environ)
    assert env.origin == "single"
    assert place(env) == (0, 0, 0, 1, 1, 1)
    assert (env.master_addr, env.master_port) == ("127.0.0.1", 0)
    assert env.hostnames == ("localhost",)
    told = "SLURM_JOB_ID is set but this shell is not in a step; start tasks with srun"
    assert all((told in source) == ("SLURM_JOB_ID" in environ) for source in env.sources.values())


@pytest.mark.parametrize("environ", [{}, BATCH, STEP, TORCH, TORCHRUN], ids=str)
def test_every_field_has_a_source(environ: dict[str, str]) -> None:
    assert set(DistEnv.from_environ(environ).sources) == {
        "rank", "local_rank", "node_rank", "world_size", "local_world_size", "num_nodes",
        "master_addr", "master_port", "hostnames",
    }  # fmt: skip


CONTRADICTIONS: list[tuple[dict[str, str], list[str]]] = [
    # half a set: the missing are named
    ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"]),
    ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not"]),
    (without(TORCH, "MASTER_PORT"), ["RANK=5", "MASTER_PORT is not set"]),
    ({**STEP, "WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "RANK, MASTER_ADDR"]),
    # empty and malformed values
    ({**TORCH, "RANK": ""}, ["RANK is set but empty"]),
    ({**TORCH, "MASTER_ADDR": ""}, ["MASTER_ADDR is set but empty"]),
    ({**TORCH, "LOCAL_RANK": ""}, ["LOCAL_RANK is set but empty"]),
    ({"MASTER_ADDR": ""}, ["MASTER_ADDR is set but empty"]),
    ({**STEP, "SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST is set but empty"]),
    ({**STEP, "SLURM_PROCID": ""}, ["SLURM_PROCID is set but empty"]),
    ({**TORCH, "RANK": "-1"}, ["RANK=-1", "whole number"]),
    ({**TORCH, "RANK": "1.5"}, ["RANK=1.5", "whole number"]),
    ({**TORCH, "RANK": " 5"}, ["RANK=' 5'", "whole number"]),
    ({**TORCH, "RANK": "5\x1b[2J"}, [r"RANK='5\x1b[2J'", "whole number"]),
    ({**TORCH, "RANK": "\u0665"}, [r"RANK='\u0665'", "whole number"]),
    ({**TORCH, "RANK": "9" * 5000}, ["RANK=999", "whole number"]),
    ({**STEP, "SLURM_STEP_ID": "x"}, ["SLURM_STEP_ID=x", "whole number"]),
    ({**STEP, "SLURM_RESTART_COUNT": "once"}, ["SLURM_RESTART_COUNT=once", "whole number"]),
    ({**TORCH, "MASTER_ADDR": "a b"}, ["MASTER_ADDR='a b'", "host name"]),
    ({**TORCH, "MASTER_PORT": "65536"}, ["MASTER_PORT=65536", "port from 1 to 65535"]),
    ({**TORCH, "MASTER_PORT": "0"}, ["MASTER_PORT=0", "port from 1 to 65535"]),
    ({"MASTER_PORT": "0"}, ["MASTER_PORT=0", "port from 1 to 65535"]),
    ({**STEP, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "port from 1 to 65535"]),
    ({**STEP, "SLURM_STEP_NODELIST": "gpu[03-"}, ["SLURM_STEP_NODELIST", "never closed"]),
    ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4x2"}, ["SLURM_STEP_TASKS_PER_NODE", "4x2"]),
    # numbers that do not go together
    ({**TORCH, "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8", "from 0 to 7"]),
    ({**TORCH, "WORLD_SIZE": "0"}, ["WORLD_SIZE=0", "at least 1"]),
    ({**TORCHRUN, "LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4", "from 0 to 3"]),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0", "at least 1"]),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE=8", "GROUP_WORLD_SIZE=2"]),
    ({**TORCHRUN, "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, ["GROUP_WORLD_SIZE=1"]),
    ({**TORCHRUN, "GROUP_RANK": "2"}, ["GROUP_RANK=2", "GROUP_WORLD_SIZE=2", "from 0 to 1"]),
    ({**TORCHRUN, "NODE_RANK": "0"}, ["GROUP_RANK=1", "NODE_RANK=0", "the same"]),
    ({**TORCH, "LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "LOCAL_WORLD_SIZE, the number"]),
    ({**TORCH, "NODE_RANK": "1"}, ["NODE_RANK=1", "LOCAL_WORLD_SIZE, the number"]),
    ({**TORCH, "GROUP_WORLD_SIZE": "3"}, ["GROUP_WORLD_SIZE=3", "LOCAL_WORLD_SIZE, the number"]),
    ({**TORCH, "GROUP_WORLD_SIZE": "0"}, ["GROUP_WORLD_SIZE=0"]),
    ({**TORCH, "LOCAL_WORLD_SIZE": "3"}, ["LOCAL_WORLD_SIZE=3", "GROUP_WORLD_SIZE"]),
    ({**STEP, "SLURM_PROCID": "8"}, ["SLURM_PROCID=8", "SLURM_STEP_NUM_TASKS=8", "0 to 7"]),
    ({**STEP, "SLURM_LOCALID": "4"}, ["SLURM_LOCALID=4", "local_world_size=4", "0 to 3"]),
    ({**STEP, "SLURM_NODEID": "2"}, ["SLURM_NODEID=2", "SLURM_STEP_NODELIST=gpu[03-04]", "0 to 1"]),
    ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4,3"},
     ["SLURM_STEP_TASKS_PER_NODE=4,3", "SLURM_STEP_NUM_TASKS=8", "7"]),
    ({**STEP, "SLURM_STEP_NODELIST": "gpu[01-03]"},
     ["SLURM_STEP_NODELIST=gpu[01-03]", "SLURM_STEP_TASKS_PER_NODE=4(x2)", "3 and 2"]),
    ({**STEP, "SLURM_STEP_NUM_NODES": "3"}, ["SLURM_STEP_NUM_NODES=3", "gpu[03-04]"]),
    # what a step must have
    (without(STEP, "SLURM_PROCID"), ["SLURM_STEP_ID=3", "SLURM_PROCID is not set", "srun"]),
    (without(STEP, "SLURM_LOCALID"), ["SLURM_LOCALID is not set"]),
    (without(STEP, "SLURM_JOB_ID"), ["SLURM_JOB_ID and SLURM_JOBID are not set"]),
    # others' ranks
    ({**STEP, **TORCH, "RANK": "4"}, ["RANK=4", "SLURM_PROCID=5", "surrounding job"]),
    # heterogeneous jobs
    ({**STEP, "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_1": "2"}, ["PACK_GROUP_1", "heterogeneous"]),
    ({**STEP, "SLURM_HET_SIZE": "2"}, ["SLURM_HET_SIZE=2", "heterogeneous"]),
    ({**BATCH, "SLURM_JOB_NODELIST_HET_GROUP_0": "a"}, ["HET_GROUP_0=a", "heterogeneous"]),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "told"), CONTRADICTIONS, ids=[c[1][0] for c in CONTRADICTIONS])
def test_a_contradiction_is_refused_and_shows_both_sides(
    environ: dict[str, str], told: list[str]
) -> None:
    with pytest.raises(DistEnvError) as caught:
        DistEnv.from_environ(environ)
    message = str(caught.value)
    assert [part for part in told if part not in message] == [], message
    assert message.isprintable()
    assert len(message) < 600


def test_a_direct_construction_is_checked_as_well() -> None:
    with pytest.raises(DistEnvError, match="rank=1, world_size=1: expected rank from 0 to 0"):
        DistEnv(1, 0, 0, 1, 1, 1, "localhost", 1, ("localhost",), "single")


@pytest.mark.parametrize("environ", [{}, STEP, TORCH, TORCHRUN], ids=str)
def test_what_is_exported_derives_to_the_same_place(environ: dict[str, str]) -> None:
    env = DistEnv.from_environ(environ)
    again = DistEnv.from_environ({**environ, **env.to_environ()})
    assert place(again) == place(env)
    assert (again.master_addr, again.master_port) == (env.master_addr, env.master_port)
    assert again.to_environ() == env.to_environ()


def test_a_step_task_that_exported_itself_still_knows_the_hosts() -> None:
    env = DistEnv.from_environ(STEP)
    assert DistEnv.from_environ({**STEP, **env.to_environ()}).hostnames == ("gpu03", "gpu04")


def test_the_exported_variables_are_torchruns() -> None:
    assert DistEnv.from_environ(STEP).to_environ() == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(master_port(1234, 3, 0)),
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "ROLE_NAME": "default",
    }


@pytest.mark.parametrize(
    ("ids", "port"),
    [
        ((0, 0, 0), 12000),
        ((1, 0, 0), 12097),
        ((1, 2, 3, 0), 12122),
        ((206, 0, 0), 31982),
        ((207, 0, 0), 12079),
        ((1, 0, 0, 1), 16098),
        (
            (4294967295, 4294967279, 9, 3),
            12000 + (4294967295 * 97 + 4294967279 * 11 + 12012) % 20000,
        ),
    ],
)
def test_the_port_follows_its_formula(ids: tuple[int, ...], port: int) -> None:
    assert master_port(*ids) == port
    assert 12000 <= port <= 31999


def test_neighbouring_jobs_steps_restarts_and_candidates_get_different_ports() -> None:
    jobs = [master_port(job, 0, 0) for job in range(50_000, 70_000)]
    assert len(set(jobs)) == 20_000
    assert min(jobs) == 12000
    assert max(jobs) == 31999
    nearby = {master_port(job, step, n) for job in range(8) for step in range(8) for n in range(8)}
    assert len(nearby) == 8 * 8 * 8
    assert len({master_port(1, 0, 0, candidate) for candidate in range(20_000)}) == 20_000


def test_eighty_thousand_ranks_take_about_a_call_a_node() -> None:
    environ = {
        **STEP,
        "SLURM_STEP_NODELIST": "node[00001-10000]",
        "SLURM_STEP_NUM_NODES": "10000",
        "SLURM_STEP_NUM_TASKS": "80000",
        "SLURM_STEP_TASKS_PER_NODE": "8(x10000)",
        "SLURM_PROCID": "79999",
        "SLURM_LOCALID": "7",
        "SLURM_NODEID": "9999",
    }
    assert place(DistEnv.from_environ(environ)) == (79999, 7, 9999, 80000, 8, 10000)
    assert count_calls(lambda: DistEnv.from_environ(environ)) < 15_000


def test_it_travels_between_processes_and_is_hashable() -> None:
    env = DistEnv.from_environ(STEP)
    assert pickle.loads(pickle.dumps(env)) == env
    assert hash(env) == hash(DistEnv.from_environ(STEP))


def test_the_group_that_slurm_names_in_every_step_makes_no_heterogeneous_job() -> None:
    ordinary = {**STEP, "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0": "4(x2)"}
    assert DistEnv.from_environ(ordinary) == DistEnv.from_environ(STEP)


def placed(**flags: int | str) -> DistEnv | None:
    names = ("rank", "world_size", "master_addr", "master_port", "local_rank", "local_world_size")
    return dist_env.from_flags(**{name: flags.get(name) for name in names})  # type: ignore[arg-type]


def test_without_a_flag_nothing_is_decided() -> None:
    assert placed() is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"rank": 0, "world_size": 1}, (0, 1, 0, 1, 0, 1, "127.0.0.1", 0)),
        ({"rank": 3, "world_size": 4, "master_port": 29500},
         (3, 4, 3, 4, 0, 1, "127.0.0.1", 29500)),
        ({"rank": 3, "world_size": 4, "master_port": 1, "master_addr": "h", "local_world_size": 2},
         (3, 4, 1, 2, 1, 2, "h", 1)),
        ({"rank": 2, "world_size": 4, "master_port": 1, "local_world_size": 2, "local_rank": 0},
         (2, 4, 0, 2, 1, 2, "127.0.0.1", 1)),
    ],
)  # fmt: skip
def test_flags_give_a_ranks_place(
    flags: dict[str, int | str], expected: tuple[object, ...]
) -> None:
    env = placed(**flags)
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
        ({"rank": 0, "world_size": 99999999999999999999, "master_port": 7},
         "--world-size: 99999999999999999999 is not"),
        ({"rank": 0, "world_size": 2, "master_port": 70000}, "--master-port: 70000 is not"),
        ({"rank": 0, "world_size": 1, "master_port": 0}, "--master-port: 0 is not"),
        ({"rank": 0, "world_size": 2, "master_port": 7, "master_addr": ""}, "--master-addr: ''"),
        ({"rank": 0, "world_size": 2, "master_port": 7, "master_addr": "a b"}, "--master-addr:"),
        ({"rank": 0, "world_size": 2, "master_port": 7, "local_rank": 0}, "--local-rank 0 without"),
        ({"rank": 0, "world_size": 2, "master_port": 7, "local_world_size": 3},
         "--local-world-size: 3 is not a number from 1 to 2"),
        ({"rank": 0, "world_size": 3, "master_port": 7, "local_world_size": 2},
         "--world-size 3 is not a multiple of --local-world-size 2"),
        ({"rank": 3, "world_size": 4, "master_port": 7, "local_world_size": 2, "local_rank": 0},
         "--local-rank 0 conflicts with --rank 3 and --local-world-size 2: expected 1"),
    ],
)  # fmt: skip
def test_halves_and_values_out_of_range_name_what_was_typed(
    flags: dict[str, int | str], said: str
) -> None:
    with pytest.raises(RequestError) as raised:
        placed(**flags)
    assert said in str(raised.value)


def test_a_surrounding_jobs_variables_are_foreign() -> None:
    job = ["SLURM_JOB_ID", "SLURMD_NODENAME", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PMI_RANK"]
    own = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert dist_env.foreign_variables({**dict.fromkeys(job, "1"), **own}) == job


def test_a_name_that_leads_nowhere_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    dist_env.check_address("127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(RequestError, match="--master-addr nohost: Name or service not known"):
        dist_env.check_address("nohost")

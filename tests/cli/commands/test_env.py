"""`clusterddp env`, run as a person runs it: another process, its own environment."""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from clusterddp.ranks.dist_env import DistEnv, master_port

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def run_cli(
    *arguments: str, environ: Mapping[str, str], stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "clusterddp", *arguments],
        env={"PATH": "/usr/bin:/bin", **environ}, input=stdin, capture_output=True, check=False,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip


run_env = partial(run_cli, "env")


def test_the_table_shows_every_value_and_its_source() -> None:
    done = run_env(environ=STEP)
    assert done.returncode == 0, done.stderr
    rows = [line.split(maxsplit=2) for line in done.stdout.decode().splitlines()]
    assert rows == [
        ["NAME", "VALUE", "SOURCE"],
        ["origin", "slurm", "a task of a Slurm step"],
        ["rank", "5", "SLURM_PROCID"],
        ["local_rank", "1", "SLURM_LOCALID"],
        ["node_rank", "1", "SLURM_NODEID"],
        ["world_size", "8", "SLURM_STEP_NUM_TASKS"],
        ["local_world_size", "4", "SLURM_STEP_TASKS_PER_NODE (entry 1)"],
        ["num_nodes", "2", "SLURM_STEP_NUM_NODES"],
        ["master_addr", "gpu01", "SLURM_STEP_NODELIST (first host)"],
        ["master_port", str(master_port(1234, 0, 0)), "computed from SLURM_JOB_ID, SLURM_STEP_ID"],
        ["hostnames", "gpu01,gpu02", "SLURM_STEP_NODELIST"],
    ]


def test_the_columns_are_aligned() -> None:
    lines = run_env(environ=STEP).stdout.decode().splitlines()
    assert len({line.index("SLURM_", 10) for line in lines[2:9]}) == 1


def test_json_holds_every_field_its_source_and_what_would_be_exported() -> None:
    done = run_env("--json", environ=STEP)
    env = DistEnv.from_environ(STEP)
    assert json.loads(done.stdout) == {
        "origin": "slurm",
        "rank": 5,
        "local_rank": 1,
        "node_rank": 1,
        "world_size": 8,
        "local_world_size": 4,
        "num_nodes": 2,
        "master_addr": "gpu01",
        "master_port": env.master_port,
        "hostnames": ["gpu01", "gpu02"],
        "sources": env.sources,
        "environ": env.to_environ(),
    }


def test_a_pasted_environment_replaces_this_process_own(tmp_path: Path) -> None:
    pasted = "".join(f"{name}={value}\n" for name, value in STEP.items()).encode()
    (tmp_path / "pasted").write_bytes(pasted)
    own = {"RANK": "0"}  # half set: would be an error
    from_file = run_env("--from", str(tmp_path / "pasted"), "--json", environ=own)
    from_stdin = run_env("--from", "-", "--json", environ=own, stdin=pasted)
    assert json.loads(from_file.stdout)["rank"] == 5
    assert from_stdin.stdout == from_file.stdout


def test_a_contradiction_is_one_line_on_stderr_and_exit_code_1() -> None:
    done = run_env(environ={**STEP, "SLURM_PROCID": "8"})
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"clusterddp: SLURM_PROCID=8")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("arguments", [("--from", "no-such-file"), ("--from", "-"), ("surplus",)])
def test_a_wrong_request_exits_2(arguments: tuple[str, ...]) -> None:
    assert run_env(*arguments, environ={}).returncode == 2


def test_a_pasted_environment_in_no_encoding_is_read_all_the_same() -> None:
    done = run_env("--from", "-", environ={}, stdin=b"NOTE=\xff\xfe\nSLURM_JOB_ID=1\n")
    assert done.returncode == 0, done.stderr


def test_many_hosts_are_shortened_in_the_table_and_whole_in_json() -> None:
    many = {
        **STEP,
        "SLURM_STEP_NODELIST": "n[001-500]",
        "SLURM_STEP_NUM_NODES": "500",
        "SLURM_STEP_NUM_TASKS": "500",
        "SLURM_STEP_TASKS_PER_NODE": "1(x500)",
        "SLURM_LOCALID": "0",
    }
    assert b"n001,n002,...,n500 (500 hosts)" in run_env(environ=many).stdout
    assert len(json.loads(run_env("--json", environ=many).stdout)["hostnames"]) == 500

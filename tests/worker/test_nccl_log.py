"""NCCL's lines at its start: which are kept, and the warning about sockets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.files import read
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.run.attempt import Attempt, begin
from clusterddp.run.records import SlowNetwork
from clusterddp.run.run_dir import RunDir
from clusterddp.worker import nccl_log
from clusterddp.worker.nccl_log import NcclLog
from tests.cli.commands.test_exec import run_exec
from tests.processes.test_hardware import fast_device
from tests.waiting import wait_for

# Lines of NCCL 2.21 to 2.30, as two nodes without InfiniBand's library print them.
SAID = """\
NCCL version 2.30.7+cuda13.3
h01:7:7 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth
h01:7:7 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
h01:7:9 [0] NCCL INFO cudaDriverVersion 13000
h01:7:9 [0] NCCL INFO Failed to open libibverbs.so[.1]
h01:7:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.0.1.1<0>
h01:7:9 [0] NCCL INFO Using network Socket
h01:7:9 [0] NCCL INFO comm 0x55d0 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
h01:7:9 [0] NCCL INFO Channel 00/02 : 0 1 2 3
h01:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
h01:7:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
h01:7:9 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/Socket/0
h01:7:9 [0] NCCL INFO comm 0x99e0 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
h01:7:9 [0] NCCL INFO ncclCommInitRankConfig comm 0x55d0 rank 0 nranks 16 - Init COMPLETE

[2026-11-27 14:03:07] h01:7:9 [0] transport/net.cc:3 (connect) NCCL WARN Call to \x1b[2J failed
"""
KEPT = """\
NCCL version 2.30.7+cuda13.3
NCCL_SOCKET_IFNAME set by environment to eth
Bootstrap: Using eth0:10.0.0.1<0>
Failed to open libibverbs.so[.1]
NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.0.1.1<0>
Using network Socket
rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
WARN Call to \\x1b[2J failed
2 channels via P2P/CUMEM
1 channels via NET/Socket/0
"""
TWO_NODES = {
    "RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "h01", "MASTER_PORT": "29500",
}  # fmt: skip
LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
SLOW = (
    "NCCL on h02 uses sockets over eth0 although the node has InfiniBand (mlx5_0): exchanges "
    "between nodes can be ten times slower. To use it, "
)
VERBS = "give the tasks libibverbs and /dev/infiniband, which a container may lack."


def test_the_lines_that_matter_are_kept_once() -> None:
    assert nccl_log.summarize(SAID) == KEPT
    assert nccl_log.summarize("epoch 1\nh01:7:7 [0] NCCL INFO cudaDriverVersion 13000") == ""


def test_what_is_kept_is_a_few_kilobytes() -> None:
    many = (f"NCCL INFO NET/IB : {number} {'x' * 999}" for number in range(9999))
    assert len(nccl_log.summarize("\n".join(many))) < 20_000


@pytest.mark.parametrize(
    ("said", "devices", "warning"),
    [
        (SAID, {"mlx5_0": "mlx5_core"}, SLOW + VERBS),
        (SAID, {}, ""),
        (SAID.replace("network Socket", "network IB"), {"mlx5_0": "mlx5_core"}, ""),
        (SAID.replace("nNodes 2", "nNodes 1"), {"mlx5_0": "mlx5_core"}, ""),
        (
            SAID.replace("SOCKET_IFNAME set by environment to eth", "IB_DISABLE set to 1."),
            {"mlx5_0": "mlx5_core"},
            f"{SLOW}NCCL_IB_DISABLE=1 is set: unset it, or {VERBS}",
        ),
        (
            SAID, {"rdmap16s27": "efa"},
            SLOW.replace("InfiniBand (mlx5_0)", "EFA (rdmap16s27)")
            + "put the aws-ofi-nccl plugin (libnccl-net.so) on LD_LIBRARY_PATH.",
        ),
    ],
)  # fmt: skip
def test_sockets_on_a_node_with_a_fast_network_are_warned_of(
    said: str, devices: dict[str, str], warning: str, tmp_path: Path
) -> None:
    for name, driver in devices.items():
        fast_device(tmp_path, name, driver)
    assert nccl_log.slow_network(said, "h02", 1, tmp_path) == warning


@pytest.mark.parametrize(
    "other",
    [
        {"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG_FILE": "/tmp/own"}, {"NCCL_DEBUG_SUBSYS": "COLL"},
        {"LOCAL_RANK": "1", "RANK": "9"}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    ],
)  # fmt: skip
def test_nothing_is_set_on_other_tasks_or_over_the_users_own(other: dict[str, str]) -> None:
    environ = {**TWO_NODES, **other}
    before = dict(environ)
    made = NcclLog(environ, DistEnv.from_environ(environ), Attempt(RunDir(Path("a")), 1))
    assert (made.prefix, environ) == (Path(), before)


def test_a_run_started_by_a_run_has_its_own_file() -> None:
    env, environ, own = DistEnv.from_environ(TWO_NODES), dict[str, str](), Path("a")
    first, again = (NcclLog(environ, env, Attempt(RunDir(own), 1)).prefix for _ in range(2))
    assert first.name and again != first
    assert environ["NCCL_DEBUG_FILE"] == f"{again}%p"


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return begin(RunDir(tmp_path / "run"))


def test_the_lines_are_kept_while_it_runs_and_the_node_keeps_no_file(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(nccl_log, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(nccl_log, "NEXT_SECONDS", 0.01)
    fast_device(tmp_path, "mlx5_0", "mlx5_core")
    environ = {"SLURMD_NODENAME": "h02"}
    made = NcclLog(environ, DistEnv.from_environ(TWO_NODES), attempt, tmp_path)
    own = Path(f"{made.prefix}7")
    made.began()
    try:
        own.write_text(SAID)
        kept, warned = attempt.outcomes / "nccl-8.log", attempt.outcomes / "network-8.json"
        wait_for(warned.exists, "the warning")
        assert kept.read_text() == KEPT
    finally:
        made.close()
    assert not own.exists()
    assert read(SlowNetwork, warned) == SlowNetwork("h02", SLOW + VERBS)
    assert logged == [f"warning: {SLOW}{VERBS} [CD0910]"]


def test_files_of_a_killed_parent_are_removed_by_the_next(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = NcclLog({}, DistEnv.from_environ(TWO_NODES), attempt, tmp_path)
    made.prefix = tmp_path / made.prefix.name
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f"clusterddp-nccl-ab-{pid}" for pid in (ended.pid, os.getpid())]
    names += [f"clusterddp-nccl-new-{ended.pid}", "clusterddp-nccl-ab-c", f"other-{ended.pid}"]
    for name in names:
        (tmp_path / name).touch()
        if "new" not in name:
            os.utime(tmp_path / name, (0, 0))
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: -1)
        made.began()()
    assert sorted(names) == sorted(path.name for path in tmp_path.glob("*-*"))
    made.began()()
    assert sorted(names[1:]) == sorted(path.name for path in tmp_path.glob("*-*"))


def test_a_command_that_uses_nccl_leaves_its_lines_in_the_attempt(tmp_path: Path) -> None:
    library = [own for path in sys.path if (own := Path(path, LIBRARY)).is_file()]
    if not library:
        pytest.skip("there is no NCCL")
    attempt = begin(RunDir(tmp_path))
    call = (
        "import ctypes, os, sys\n"
        f"nccl = ctypes.CDLL({str(library[0])!r})\n"
        "nccl.ncclGetUniqueId(ctypes.create_string_buffer(128))\n"
        "print(os.environ['NCCL_DEBUG_FILE'])"
    )
    done = run_exec(
        "--run-dir", str(tmp_path), "--attempt", "1", "--", sys.executable, "-c", call,
        environ={**TWO_NODES, "NCCL_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (
        "NCCL_SOCKET_IFNAME set by environment to lo"
        in (attempt.outcomes / "nccl-8.log").read_text()
    )
    file = Path(done.stdout.strip())
    assert not list(file.parent.glob(file.name.replace("%p", "*")))


def test_without_nccl_there_is_no_file(tmp_path: Path) -> None:
    attempt = begin(RunDir(tmp_path))
    done = run_exec(
        "--run-dir", str(tmp_path), "--attempt", "1", "--", "sh", "-c", 'echo "$NCCL_DEBUG"',
        environ=TWO_NODES,
    )  # fmt: skip
    assert done.stdout == "INFO\n"
    assert not list(attempt.outcomes.glob("nccl-*"))

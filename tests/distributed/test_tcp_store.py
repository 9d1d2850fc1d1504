import json
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from clusterddp.distributed import tcp_store
from clusterddp.distributed.rendezvous import open_store
from clusterddp.errors import PeerError, TrainingError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.worker.workstation import free_port
from tests.distributed.meetings import PATIENCE, env


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            TrainingError, match=rf"port {port}.*second rank 0 uses the port.*.*MASTER_PORT"
        ):
            open_store(env(0, 2, port), {}, PATIENCE)


def test_a_listener_that_is_no_store_does_not_hang_a_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(TrainingError, match="does not respond like rank 0's store"):
            open_store(env(1, 2, port), {}, 1.0)


def test_a_rank_that_finds_nobody_says_whom_it_waited_for(port: int) -> None:
    with pytest.raises(PeerError, match=rf"rank 1 .*waited for rank 0 at 127.0.0.1:{port}"):
        open_store(env(1, 2, port), {}, 0.2)


def test_a_master_address_that_does_not_resolve_is_named(port: int) -> None:
    with pytest.raises(TrainingError, match=r"'nowhere\.invalid'.*MASTER_ADDR"):
        open_store(env(1, 2, port, "nowhere.invalid"), {}, 1.0)


def test_a_loopback_address_is_the_only_one_listened_at(port: int) -> None:
    ours = env(0, 2, port)
    with tcp_store._bind(ours) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"


def test_bounded_gives_up_on_what_does_not_return() -> None:
    with pytest.raises(TimeoutError):
        tcp_store.bounded(threading.Event().wait, 0.01)
    assert tcp_store.bounded(lambda: json.dumps(1), PATIENCE) == "1"
    with pytest.raises(ZeroDivisionError):
        tcp_store.bounded(lambda: 1 // 0, PATIENCE)


UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
ADDRESS = "10.99.0.1"
# A name server that counts what it is asked and never answers, and two ranks that meet at ADDRESS.
NETWORK = """
import json, os, socket, subprocess, sys, threading
folder, hosts, ranks = sys.argv[1], sys.argv[2], sys.argv[3:]
for argv in (["ip", "link", "set", "lo", "up"],
             ["ip", "address", "add", "10.99.0.1/32", "dev", "lo"]):
    subprocess.run(argv, check=True)
slowly = "nameserver 10.99.0.1\\noptions timeout:30 attempts:5"
for name, text in (("resolv.conf", slowly), ("hosts", hosts),
                   ("nsswitch.conf", "hosts: files dns")):
    with open(f"{folder}/{name}", "w") as file:
        file.write(text + chr(10))
    subprocess.run(["mount", "--bind", f"{folder}/{name}", f"/etc/{name}"], check=True)
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("10.99.0.1", 53))
asked = set()  # as a resolver asks again after half a minute, with the same number
def count():
    while True:
        asked.add(server.recv(4096))
threading.Thread(target=count, daemon=True).start()
started = [subprocess.Popen([sys.executable, "-c", ranks[0], str(rank)], stdout=subprocess.PIPE,
                            text=True) for rank in (0, 1)]
print(json.dumps({"ranks": [json.loads(rank.communicate()[0]) for rank in started],
                  "asked": len(asked)}))
"""
# Meets as a task does, and counts what this process has asked when and how.
RANK = """
import json, os, sys, threading
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.distributed import tcp_store
rank = int(sys.argv[1])
env = DistEnv.from_environ({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "10.99.0.1",
                            "MASTER_PORT": "23999"})
bound = tcp_store.bind(env, {})
asked = tcp_store.Lookups(env)
from clusterddp.distributed import rendezvous
import torch.distributed as dist
before = asked.master_answered
store = rendezvous.open_store(env, {}, 250.0, bound=bound, answered=lambda: asked.master_answered)
os.environ["GLOO_SOCKET_IFNAME"] = asked.gloo_interface()
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
dist.barrier()
after = asked.master_answered
print(json.dumps({"before": before, "after": after, "interface": asked.gloo_interface()}))
sys.stdout.flush()
os._exit(0)
"""
# How the watchdog has torch connect.
WATCHDOG = """
import json, sys, time
from clusterddp.distributed import heartbeat, tcp_store
from clusterddp.ranks.dist_env import DistEnv
env = DistEnv.from_environ({"RANK": sys.argv[1], "WORLD_SIZE": "2", "MASTER_ADDR": "10.99.0.1",
                            "MASTER_PORT": "23999"})
told, client = [], tcp_store.client
tcp_store.client = lambda *given, **more: told.append(more) or client(*given, **more)
if env.rank:
    tcp_store._await_listener(env, time.monotonic() + 250)
    heartbeat.connect(env, {}, 250.0, 0.1).set("is", "there")
else:
    tcp_store.listen(env, {}, 250.0, None, lambda: False).wait(["watchdog/0/is"])
print(json.dumps(told))
"""


def possible() -> bool:
    if not (shutil.which("ip") and shutil.which("unshare")):
        return False
    probe = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False)
    return probe.returncode == 0


pytestmark = pytest.mark.skipif(
    not possible(), reason="needs namespaces of its own (unshare, ip) on this machine"
)


def meet(folder: Path, hosts: str, rank: str = RANK) -> dict[str, Any]:
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-c", NETWORK, str(folder), hosts, rank],
        stdout=subprocess.PIPE, text=True, check=True, timeout=280,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param("127.0.0.1 localhost", id="the loopback"),
        # The form in which torch asks for it: some versions of glibc find it without this line.
        pytest.param("127.0.0.1 localhost\n::ffff:127.0.0.1 localhost",
         id="the loopback in IPv6's form", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ranks_meet_while_name_servers_keep_them_waiting(hosts: str, tmp_path: Path) -> None:
    seen = meet(tmp_path, hosts)
    # The look-ups that were made early are not answered yet when the ranks have met: nobody has
    # waited for one. They are all that was asked: an address and this host's name.
    assert [rank["before"] for rank in seen["ranks"]] == [False, False]
    assert [rank["after"] for rank in seen["ranks"]] == [False, False]
    assert [rank["interface"] for rank in seen["ranks"]] == ["lo", "lo"]
    assert 2 <= seen["asked"] <= 8, seen


def test_the_watchdog_waits_for_no_name_server(tmp_path: Path) -> None:
    assert meet(tmp_path, "", WATCHDOG)["ranks"] == [[], [{"ask_name_servers": False}]]


def address(master: str) -> DistEnv:
    return env(0, 2, free_port(), master)


@pytest.mark.parametrize(
    ("master", "family"),
    [
        ("10.99.0.1", socket.AF_INET),  # so that peers are what hosts files call them
        ("127.0.0.1", socket.AF_INET),
        ("fd00::1", socket.AF_INET6),
        ("no-such-name.invalid", socket.AF_INET6),
    ],
)
def test_rank_0_listens_for_the_kind_of_address_that_it_is_known_by(
    master: str, family: int
) -> None:
    bound = tcp_store.bind(address(master), {})
    assert bound is not None
    with bound:
        assert bound.family == family


def test_only_the_rank_that_serves_the_store_listens() -> None:
    ours = address("127.0.0.1")
    assert tcp_store.bind(ours, {"TORCHELASTIC_USE_AGENT_STORE": "True"}) is None
    assert tcp_store.bind(DistEnv.from_environ({}), {}) is None


def test_the_resolver_asks_again_afterwards() -> None:
    import ctypes

    libc = ctypes.CDLL(None)
    libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    libc.__res_init()
    tries = libc.__res_state()[1]
    assert tries > 0
    with tcp_store.without_name_servers():
        assert libc.__res_state()[1] == 0
    assert libc.__res_state()[1] == tries

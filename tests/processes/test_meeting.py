"""Whether a program's ranks meet, seen from outside of it in real processes."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusterddp.processes.table import RendezvousWatch, listening_ports
from tests.waiting import PATIENCE, wait_for

NOBODYS = 1
"""Port on which nobody listens, and that no connection gets by chance."""
# Loads what looks like torch, listens at an address, and lives until its input ends.
RANK = """
import mmap, socket, subprocess, sys
library, address, below = sys.argv[1:]
if below:
    sys.exit(subprocess.run([sys.executable, "-c", below, library, address, ""]).returncode)
with open(library, "rb") as file:
    loaded = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
listener = socket.create_server((address, 0)) if address else None
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def rank(library: Path, address: str = "", *, child: bool = False) -> Iterator[int]:
    """Rank 0's process; with `child` a process below it does what it would do."""
    library.write_bytes(b"x")
    argv = [sys.executable, "-c", RANK, str(library), address, RANK if child else ""]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process.pid
        finally:
            process.stdin.close()
            process.wait(PATIENCE)


@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize(
    ("library", "address", "seen"),
    [
        ("libtorch_cpu.so", "", [False]),
        ("libtorch_cpu.so", "127.0.0.1", [False]),  # a tool's, for its own children
        ("libtorch_cpu.so", "0.0.0.0", [True]),  # a port of the program's own choice
        ("libc.so", "", []),  # no training that anybody knows of
    ],
)
def test_a_program_with_torch_that_listens_to_nobody_has_not_met(
    tmp_path: Path, library: str, address: str, seen: list[bool], child: bool
) -> None:
    found: list[bool] = []
    with rank(tmp_path / library, address, child=child) as pid:
        RendezvousWatch(pid, NOBODYS, found.append).check()
    wait_for(lambda: not looking(), "the thread's end")
    assert list(dict.fromkeys(found)) == seen


def test_somebody_on_the_master_port_is_a_meeting(tmp_path: Path) -> None:
    """Who it is, is not looked at: a rank 0 in a container has its store there, too."""
    found: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as server, rank(tmp_path / "libtorch.so") as pid:
        port = server.getsockname()[1]
        assert port in listening_ports()
        RendezvousWatch(pid, port, found.append).check()
    assert found[-1] is True


def test_a_meeting_that_is_over_is_seen_at_the_end(tmp_path: Path) -> None:
    """The kernel keeps what was connected for a minute."""
    found: list[bool] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(server.getsockname()) as client:
            server.accept()[0].close()
            client.recv(1)
    assert port not in listening_ports()
    with rank(tmp_path / "libtorch.so") as pid:
        meeting = RendezvousWatch(pid, port, found.append)
    meeting.check()
    assert found[-1] is True


def looking() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "meeting"]

"""TensorBoard on a cluster, through a real ssh that forwards its port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from clusterddp.remote import board
from tests.remote.sshd import Host
from tests.remote.test_far import processes, started
from tests.remote.test_fleet import make_run
from tests.waiting import wait_for, wait_until

pytest.importorskip("tensorboard")
urlopen = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


@pytest.mark.parametrize("shared", [False, True])
def test_the_page_is_reached_until_ctrl_c(
    host: Host, tmp_path_factory: pytest.TempPathFactory, shared: bool
) -> None:
    run = make_run(host, f"board-{shared}")
    config, socket = host.folder / "config", tmp_path_factory.mktemp("s") / "s"
    whole = config.read_text()
    if shared:
        config.write_text(
            f"{whole} ControlMaster auto\n ControlPath {socket}\n ControlPersist 60\n"
        )
    process = started(host, "tensorboard", "--port=0", run.name, start_new_session=True)
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+", text := wait_until(process, "/\n"))
        assert found
        assert urlopen(text.strip(), timeout=60).status == 200
        told = Path("/tmp/.tensorboard-info").glob("*.info")  # TensorBoard's usual place
        secret = text.strip().split("/")[3]
        for path in told:
            with contextlib.suppress(OSError):  # another user's, or it has ended
                assert secret not in path.read_text()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urlopen(f"{found[0]}/", timeout=60)
        opened = [line for line in host.command_lines() if "-fNTx" in line]
        assert len(opened) == (0 if shared else 1), "a connection of its own only if needed"
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130, said
        with pytest.raises(urllib.error.URLError):
            urlopen(text.strip(), timeout=60)
        wait_for(lambda: not processes(host.there), "no process there")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=60)
        config.write_text(whole)
        subprocess.run(["ssh", "-S", socket, "-O", "exit", "near"], stderr=-3, check=False)


def test_a_run_that_is_unknown_there(host: Host) -> None:
    answer = host.run("tensorboard", "nothing")
    assert answer.returncode == 2
    assert "[CD0501]" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_python_without_it_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(board.RequestError, match=rf"(?s){python} -m pip install .*CD0803"):
        board.serve(tmp_path, str(python), 0, print)


def test_a_port_in_use_is_refused_and_the_usual_one_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with board.socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(board.RequestError, match=f"--port {port}"):
            board.free_port(port)
        monkeypatch.setattr(board, "_PORT", port)
        assert board.free_port(None) not in (0, port)

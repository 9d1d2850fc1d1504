"""What happens on the cluster if the connection or the user ends a command."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.remote.sshd import SSHD, Host
from tests.waiting import PATIENCE, wait_for

SUBMIT = ("submit", "--preflight", "none", "--force", "--run-name")


def started(host: Host, *argv: str, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "clusterddp", "--on", "big", *argv],
        cwd=host.work, env=host.environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, **more,
    )  # fmt: skip


def processes(folder: Path) -> list[int]:
    """Processes that work in a directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            cwd = (entry / "cwd").readlink()
        except OSError:
            continue
        if cwd.is_relative_to(folder):
            found.append(int(entry.name))
    return found


def ssh_of(process: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def with_sbatch(host: Host, lines: str) -> Path:
    """Put a sbatch and a squeue before the others there; return the list of sbatch's runs."""
    folder, calls = host.folder / "slurm", host.folder / "calls"
    folder.mkdir(exist_ok=True)
    calls.write_text("")
    programs = {"sbatch": f"echo x >>{calls}\n{lines}\necho 7", "squeue": "echo '7|PENDING|None|'"}
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    host.site(f"before = PATH={folder}:$PATH")
    return calls


def reading(host: Host) -> subprocess.Popen[str]:
    """A command that reads its stdin there; this end knows that it has begun."""
    process = started(host, "check", "-")
    assert process.stdin
    process.stdin.write("#!/bin/sh\n")
    process.stdin.flush()
    wait_for(lambda: not unread(process), "stdin is taken, which follows BEGUN")
    wait_for(lambda: processes(host.there / "trees"), "the command runs")
    return process


def unread(process: subprocess.Popen[str]) -> int:
    """How many bytes of its stdin a process has not yet read."""
    assert process.stdin
    return int.from_bytes(fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_ctrl_c_interrupts_the_command_there(host: Host) -> None:
    process = reading(host)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "interrupted" in said
    wait_for(lambda: not processes(host.there), "no process there")


def test_a_lost_connection_ends_what_only_shows(host: Host) -> None:
    process = reading(host)
    os.kill(ssh_of(process), signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was lost" in said
    assert "[CD1402]" in said
    wait_for(lambda: not processes(host.there), "no process there")


def test_a_submission_is_completed_without_its_connection(host: Host) -> None:
    begun, go = host.folder / "begun", host.folder / "go"
    ends = []
    for fifo in (begun, go):
        fifo.unlink(missing_ok=True)
        os.mkfifo(fifo)
        ends.append(os.open(fifo, os.O_RDWR))  # opened for both, neither end waits
    calls = with_sbatch(host, f"echo >{begun}; read line <{go}")
    process = started(host, *SUBMIT, "cut", "--", "true")
    assert select.select(ends[:1], [], [], PATIENCE)[0], "sbatch runs"
    os.kill(ssh_of(process), signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "clusterddp --on big status cut" in said
    os.write(ends[1], b"go\n")
    wait_for(lambda: not processes(host.there), "no process there")
    for end in ends:
        os.close(end)
    assert calls.read_text() == "x\n"
    assert '"7"' in (host.there / "jobs/cut/events.jsonl").read_text()
    again = host.run(*SUBMIT, "cut", "--", "true")
    assert "already exists" in again.stderr
    assert calls.read_text() == "x\n"


def test_suggested_commands_name_the_cluster(host: Host) -> None:
    with_sbatch(host, "")
    answer = host.run(*SUBMIT, "named", "--", "true")
    assert "  logs       clusterddp --on big logs -f named\n" in answer.stdout
    assert "clusterddp --on big" not in host.run("submit", "--dry-run", "--", "true").stdout
    assert "'clusterddp --on big runs'" in host.run("status", "another").stderr


CUT = """
import os, select, subprocess, sys
left, argv = int(sys.argv[1]), sys.argv[2:]
sshd = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
ends = {0: sshd.stdin.fileno(), sshd.stdout.fileno(): 1}
while True:
    for end in select.select([*ends], [], [])[0]:
        chunk = os.read(end, 4096)
        left -= len(chunk) * (end == 0)
        if not chunk or left < 0:
            sshd.stdin.close(); sshd.stdout.close(); sshd.wait(); os._exit(0)
        os.write(ends[end], chunk)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", range(2000, 40_000, 2000))
def test_a_cut_at_any_byte_submits_once_or_not_at_all(host: Host, sent: int) -> None:
    calls = with_sbatch(host, "")
    (host.work / "noise.bin").write_bytes(os.urandom(12_000))  # to be carried, too
    (host.folder / "cut.py").write_text(CUT)
    config, run = host.folder / "config", f"cut-{sent}"
    whole = config.read_text()
    config.write_text(
        whole.replace(SSHD, f"{sys.executable} {host.folder}/cut.py {sent} {SSHD}", 1)
    )
    try:
        answer = host.run(*SUBMIT, run, "--", "true")
    finally:
        config.write_text(whole)
    wait_for(lambda: not processes(host.there), "no process there")
    events = host.there / "jobs" / run / "events.jsonl"
    assert len(calls.read_text().split()) == events.is_file()
    if "Nothing was done" in answer.stderr:
        assert not events.exists()
    assert not [path for path in (host.there / "trees").iterdir() if "." in path.stem]
    assert answer.returncode == 0 or "[CD1402]" in answer.stderr
    if events.is_file():
        assert any(json.loads(line).get("job_id") for line in events.read_text().splitlines())

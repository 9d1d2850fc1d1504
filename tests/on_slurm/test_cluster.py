"""The harness itself: what it boots behaves as a cluster, and it leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.processes.signals import die_with_parent
from tests.on_slurm.cluster import FOLDER_PREFIX, ClusterError, SlurmCluster
from tests.waiting import PATIENCE, wait_for

pytestmark = [pytest.mark.usefixtures("slurm_available"), pytest.mark.slow]

NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files that nobody else uses: what is in it, this test has left.

    Not pytest's tmp_path, which is too long for the path of a socket.
    """
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_commands_do_not_inherit_a_surrounding_job(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaking = ("SLURM_JOB_ID", "SBATCH_PARTITION", "CLUSTERDDP_NODES", "RANK", "KEPT")
    for name in leaking:
        monkeypatch.setenv(name, "leaked")
    names = " ".join(f"${name}" for name in leaking)
    env = {"SLURM_JOB_ID": "given", "KEPT": None}
    shown = cluster.run(["sh", "-c", f"echo {names}"], env=env, check=True).stdout
    assert shown.split() == ["given"]
    assert cluster.run(["sh", "-c", "echo $KEPT"]).stdout == "leaked\n"


def test_cancel_all_mends_what_a_fault_test_broke(cluster: SlurmCluster) -> None:
    script = "#!/bin/sh\nsrun sleep 1000\n"
    job_id = cluster.sbatch(script, "-N2", "--output=/dev/null")
    saved = _job_state(cluster)
    wait_for(lambda: "/usr/bin/sleep 1000" in _commands(cluster, "h02"), "the step")
    # A slurmctld killed before it has saved the job (within 5 s) issues its id once more; a slurmd
    # that was told to end the first job then refuses the second's credential of the same second.
    wait_for(lambda: _job_state(cluster) != saved, "another saved state")
    cluster.kill_slurmd("h02", steps=True)
    assert "/usr/bin/sleep 1000" in _commands(cluster, "h02"), "an orphan, as on a real node"
    cluster.kill_host("h01")
    assert _commands(cluster, "h01") == []
    cluster.kill_slurmctld()
    cluster.cancel_all()
    assert "/usr/bin/sleep 1000" not in _commands(cluster, "h02")
    assert cluster.run(["squeue", "-h"], check=True).stdout == ""
    argv = ["srun", "-N2", "sh", "-c", "hostname; echo $SLURM_JOB_ID"]
    answer = cluster.run(argv, check=True).stdout.split()
    assert {"h01", "h02"} < set(answer)
    assert job_id not in answer, "an id is issued once"


def test_two_clusters_at_once_and_no_trace_of_either(own_tmp: Path) -> None:
    before = _machine(own_tmp)
    with SlurmCluster(hosts=2) as one, SlurmCluster(hosts=1, conf={"KillWait": "7"}) as two:
        argv = ["srun", "-l", "hostname"]
        jobs = [one.popen([*argv[:1], "-N2", *argv[1:]], stdout=subprocess.PIPE)]
        jobs.append(two.popen(argv, stdout=subprocess.PIPE))
        shown = [sorted(job.communicate(timeout=PATIENCE)[0].split("\n")) for job in jobs]
        assert shown == [["", "0: h01", "1: h02"], ["", "0: h01"]]
        assert two.run(["scontrol", "show", "config"]).stdout.count("7 sec") == 1
        left_running = two.popen(["sh", "-c", "echo up; sleep 1000"], stdout=subprocess.PIPE)
        assert left_running.stdout is not None
        assert left_running.stdout.readline() == "up\n"
        folders = [one.folder, two.folder]
    left_running.stdout.close()
    assert left_running.returncode == -signal.SIGKILL
    assert not any(folder.exists() for folder in folders)
    assert _left_in(own_tmp) == set()
    assert _machine(own_tmp) == before


def test_a_process_forked_meanwhile_keeps_no_cluster_up(own_tmp: Path) -> None:
    """It holds every descriptor that this process had: a function's rank for one."""
    with SlurmCluster(hosts=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of threads and forks
        own, pid = os.getpid(), os.fork()
        if pid == 0:
            die_with_parent(own)
            signal.pause()
            os._exit(1)
    try:
        assert _left_in(own_tmp) == set()
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it outlives the cluster"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_the_slurm_of_another_root_is_booted_and_the_root_left_as_it_was(own_tmp: Path) -> None:
    before = _machine(own_tmp)
    program = "import os, clusterddp; print(os.getuid(), os.path.exists('/run/written'))"
    python = shlex.join([*AS_NOBODY, sys.executable, "-c", program])
    argv = ["sh", "-c", f"touch /run/written; {python}"]
    with SlurmCluster(hosts=1, root=Path("/")) as other:
        assert other.run(["srun", *argv], check=True).stdout.split() == [str(NOBODY), "True"]
    assert not Path("/run/written").exists()
    assert _left_in(own_tmp) == set()
    assert _machine(own_tmp) == before


@pytest.mark.parametrize(
    ("conf", "reason"),
    [
        ({"SelectType": "select/none-such"}, r"slurmctld ended with 1(?s:.*)none-such"),
        ({"SlurmdSpoolDir": "/proc/none"}, r"h01 ended with 1(?s:.*)/proc/none"),
    ],
)
def test_a_boot_that_fails_says_why_and_leaves_nothing(
    own_tmp: Path, conf: dict[str, str], reason: str
) -> None:
    with pytest.raises(ClusterError, match=reason), SlurmCluster(hosts=1, conf=conf):
        pytest.fail("it booted")
    assert _left_in(own_tmp) == set()


def test_an_owner_that_was_killed_leaves_no_process_and_its_folder_is_swept(own_tmp: Path) -> None:
    program = (
        "from cluster import SlurmCluster\n"
        "with SlurmCluster(hosts=1) as c:\n"
        "    print(c.folder, flush=True); input()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert folder.name.startswith(FOLDER_PREFIX)
        with (folder / "owner.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner.kill()
    wait_for(lambda: _left_in(own_tmp) == {str(folder)}, "an empty directory")
    with SlurmCluster(hosts=1) as living:
        assert not folder.exists()
        with SlurmCluster(hosts=1):
            assert living.folder.exists()
    assert _left_in(own_tmp) == set()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_the_command_line_cleans_up_when_interrupted(own_tmp: Path, sig: signal.Signals) -> None:
    command = [sys.executable, "cluster.py", "--hosts", "1", "--", "sh", "-c"]
    owner = subprocess.Popen(
        [*command, "hostname; sleep 1000"], cwd=Path(__file__).parent, stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == "login\n"
        os.killpg(owner.pid, sig)  # as the terminal does
        assert owner.wait(timeout=PATIENCE) == 128 + sig
    finally:
        owner.kill()
        owner.wait(timeout=PATIENCE)
        owner.stdout.close()
    assert _left_in(own_tmp) == set()


def _commands(cluster: SlurmCluster, host: str) -> list[str]:
    return list(cluster.processes(host).values())


def _left_in(folder: Path) -> set[str]:
    """The directories that clusters left in `folder`, and the processes that know of it."""
    left = {str(path) for path in folder.iterdir()}
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if bytes(folder) in words:
            left.add(f"process {process.name}: {words[:100]!r}")
    return left


def _job_state(cluster: SlurmCluster) -> int:
    """When slurmctld last saved what it knows of its jobs, in nanoseconds; 0 if it never has."""
    path = cluster.folder / "state" / "job_state"
    return path.stat().st_mtime_ns if path.exists() else 0


# What a cluster's hosts and their parts of the network are called.
NAMES = {"login", "h01", "h02", "br0", "eth0"}


def _machine(own_tmp: Path) -> list[str]:
    """What of this machine's own network and mounts a cluster could have touched.

    Other tests may mount small disks and start containers meanwhile.
    """
    seen = [Path("/etc/hosts").read_text()]
    for argv in (["ip", "netns", "list"], ["ip", "-o", "-br", "link"]):
        shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        seen += [line for line in shown.splitlines() if line.split()[0].partition("@")[0] in NAMES]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[4] in ("/etc/hosts", "/proc") or str(own_tmp) in line:
            seen.append(line)
    return seen

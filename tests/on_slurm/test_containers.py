"""Runs in real containers, by the runtime that is installed here: podman, or apptainer in a root.

The image is a directory that holds little but links: /usr and this Python are mounted into it.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterddp.files import read_json
from clusterddp.processes.container import APPTAINER, PODMAN, PROGRAMS
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import read_outcomes
from clusterddp.run.run_dir import RunDir
from tests.on_slurm.cluster import DEFAULT_ROOT, SlurmCluster
from tests.on_slurm.held import LONG, Hold
from tests.on_slurm.test_cluster import AS_NOBODY, NOBODY
from tests.on_slurm.test_life import (
    HELD_AT,
    STEPS,
    TRAINING,
    train_to,
    uninterrupted,
    wait_held,
    weights,
)
from tests.on_slurm.test_submit import CLUSTERDDP
from tests.on_slurm.test_user import home
from tests.waiting import wait_for

__all__ = ["home", "uninterrupted"]
pytestmark = pytest.mark.timeout(600)  # starts of jobs whose tasks start in containers

SHARED = [*TRAINING, "--nodes", "2", "--tasks-per-node", "1"]


class Site:
    """A cluster whose hosts have a runtime, and an image for it."""

    def __init__(
        self, cluster: SlurmCluster, runtime: str, folder: Path, as_user: Sequence[str] = ()
    ) -> None:
        self.cluster, self.runtime, self.folder = cluster, runtime, folder
        self.as_user = as_user
        self.image = folder / "image"
        for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "root", "run", "var"):
            (self.image / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (self.image / name).symlink_to(f"usr/{name}")
        (self.image / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        (self.image / "etc/group").write_text("root:x:0:\n")
        (folder / "containers.conf").write_text("[containers]\ndefault_ulimits = []\n")
        self.env: dict[str, str | None] = {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "APPTAINER_NO_PRIVS": "1",  # this machine's root may lack some
        }
        if runtime == PODMAN:
            for host in cluster.hosts:
                cluster.run_on(host, ["sh", "-ec", _HOSTS_OWN, "sh", str(folder)], check=True)

    @property
    def options(self) -> list[str]:
        return [
            f"--python={sys.executable}",
            f"--container-image={self.image}",
            f"--container-runtime={self.runtime}",
            *(f"--container-mount={path}:{path}:ro" for path in _pythons()),
        ]

    def submit(self, folder: Path, name: str, *more: str, image: Path | None = None) -> str:
        argv = [
            *self.as_user, *CLUSTERDDP, "submit", *SHARED, "--run-name", name, "--json",
            *self.options, *more, *([f"--container-image={image}"] if image else []),
        ]  # fmt: skip
        done = self.cluster.run(argv, cwd=folder, timeout=240, env=self.env)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(json.loads(done.stdout)["job_id"])

    def left(self, records: bool = True) -> list[str]:
        """What runs on the hosts that is no daemon, and what podman still knows."""
        processes = [
            line
            for host in self.cluster.hosts
            for line in self.cluster.processes(host).values()
            if line and not line.startswith("slurmd")
        ]
        if self.runtime == PODMAN and records:
            listed = [*self.as_user, "podman", "ps", "--all", "--format", "{{.Names}}"]
            for host in self.cluster.hosts:
                processes += self.cluster.run_on(host, listed, env=self.env).stdout.split()
        return processes


PAUSES = {"/usr/bin/podman", "catatonit -P"}
"""Process that keeps a user's namespaces; podman takes catatonit for it where that is installed."""

# Hosts of a test share this machine's files: here each has its own storage and its own locks.
_HOSTS_OWN = """
umount /sys/fs/cgroup/unified 2>/dev/null || : # crun takes no two versions at once
for folder in /var/lib/containers /run/containers /run/libpod /run/crun /run/user /dev/shm; do
    mkdir -p "$folder"
    mount -t tmpfs -o mode=1777 tmpfs "$folder"
done
mkdir -p /dev/mqueue
mount -t mqueue mqueue /dev/mqueue # a user's podman mounts it with --ipc=host
mount --make-rshared /
if [ -d "$1/user" ]; then
    mount -t tmpfs -o mode=1777 tmpfs "$1/user"
    for file in /etc/subuid /etc/subgid; do mount --bind "$1/ids" "$file"; done
fi
"""


def _pythons() -> list[str]:
    """The directories of this Python, of the tree and of the system's libraries."""
    tree = Path(__file__).resolve().parents[2]
    paths = {Path("/usr"), tree, Path(sys.prefix), Path(sys.base_prefix)}
    paths |= {Path(entry).resolve() for entry in sys.path if Path(entry).is_dir()}
    return sorted(str(path) for path in paths if paths.isdisjoint(path.parents))


def _runtime(cluster: SlurmCluster) -> str:
    """Skips where none is installed; fails instead if CLUSTERDDP_REQUIRE_SLURM is 1."""
    for name in (APPTAINER, PODMAN):
        if cluster.run_on("h01", [name, "--version"]).returncode == 0:
            return name
    message = "no runtime of containers. To run these tests: apt-get install podman crun uidmap"
    if os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="module")
def site(slurm_available: None, tmp_path_factory: Any) -> Iterator[Site]:
    # The ranks of a cancelled job have the time to save on a busy machine.
    with SlurmCluster(hosts=2, root=DEFAULT_ROOT, conf={"KillWait": "60"}) as cluster:
        yield Site(cluster, _runtime(cluster), tmp_path_factory.mktemp("site"))


@pytest.fixture(autouse=True)
def nothing_left(site: Site, request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no process and no container is left on the hosts.

    Where Slurm ends a step that has not ended itself, it kills what is slow to leave: podman may
    keep the record of a container then, without a process.
    """
    yield
    name = str(request.node.name)
    killed = "what_one_host_lacks" in name or ("is_left" in name and "stop" not in name)
    wait_for(lambda: not site.left(records=not killed), "the end of all containers")
    if killed and site.runtime == PODMAN:
        for host in site.cluster.hosts:
            removal = ["podman", "rm", "--all", "--force", "--time=0"]
            site.cluster.run_on(host, removal, env=site.env)
    site.cluster.cancel_all()


def test_a_run_in_containers_of_two_hosts_trains_to_the_end(
    site: Site, tmp_path: Path, synthetic_dir: Path
) -> None:
    before = {path: path.stat().st_mtime for path in synthetic_dir.rglob("*")}
    job = site.submit(tmp_path, "box", "--data-dir", str(synthetic_dir))
    assert site.cluster.wait_job(job) == "COMPLETED", site.cluster.log_tail()
    assert {path: path.stat().st_mtime for path in synthetic_dir.rglob("*")} == before
    run = RunDir(tmp_path / "jobs/box")
    report = read_json(run.report)
    assert report is not None
    assert (report["steps"], report["hosts"]) == (STEPS, ["h01", "h02"])
    assert [outcome.exit_code for outcome in read_outcomes(Attempt(run, 1).outcomes)] == [0, 0]
    assert {path.stat().st_uid for path in run.path.rglob("*")} == {os.getuid()}


@pytest.mark.slow
@pytest.mark.release  # worker/test_container_parent.py has an agent in a container
def test_torchruns_agents_in_containers_start_the_ranks_of_their_hosts(
    site: Site, tmp_path: Path, synthetic_dir: Path
) -> None:
    options = ["--template", "torchrun", "--tasks-per-node", "2", "--max-steps", "4"]
    job = site.submit(tmp_path, "agents", "--data-dir", str(synthetic_dir), *options)
    run = RunDir(tmp_path / "jobs/agents")
    assert site.cluster.wait_job(job) == "COMPLETED", run.job_log.read_text()
    outcomes = read_outcomes(Attempt(run, 1).outcomes)
    assert [(outcome.rank, outcome.exit_code) for outcome in outcomes] == [(r, 0) for r in range(4)]


# As a site's srun with pyxis, of which the real one takes what is not for that plug-in.
_PYXIS = """#!/bin/sh
if [ "$1" = --help ]; then echo '  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'; exit; fi
printf '%s\\n' "$@" >{folder}/words
env >{folder}/environ
for word; do
    shift
    case $word in --container-* | --no-container-*) ;; *) set -- "$@" "$word" ;; esac
done
exec {srun} "$@"
"""


@pytest.mark.slow
def test_where_srun_has_pyxis_it_is_given_the_containers(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    real = cluster.run(["sh", "-c", "command -v srun"], check=True).stdout.strip()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(_PYXIS.format(folder=tmp_path, srun=real))
    (tmp_path / "bin/srun").chmod(0o755)
    argv = [
        *CLUSTERDDP, "submit", "--run-name", "px", "--json", "--python", sys.executable,
        "--container-image", "pytorch/pytorch:2.9", "--container-mount", "/scratch:/s:ro",
        "--env", "LD_LIBRARY_PATH=/mine", "--no-snapshot", "--", "true",
    ]  # fmt: skip
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": "/nowhere", "NCCL_DEBUG": "INFO"}
    job = str(json.loads(cluster.run(argv, cwd=tmp_path, env=env, check=True).stdout)["job_id"])
    assert cluster.wait_job(job) == "COMPLETED", cluster.log_tail()
    run = RunDir(tmp_path / "jobs/px")
    words = (tmp_path / "words").read_text().splitlines()
    for word in (
        "--container-image=pytorch/pytorch:2.9",
        f"--container-mounts={run.path}:{run.path},{tmp_path}:{tmp_path},/scratch:/s:ro",
        f"--container-workdir={tmp_path}",
        "--container-env=LD_LIBRARY_PATH",
    ):
        assert word in words
    passed = (tmp_path / "environ").read_text().splitlines()
    assert {"LD_LIBRARY_PATH=/mine", "NCCL_DEBUG=INFO"} <= {*passed}
    assert "PYTHONPATH=/nowhere" not in passed
    assert "host variables not passed to the containers: PYTHONPATH, " in run.job_log.read_text()


@pytest.mark.slow
def test_an_ordinary_users_containers_write_that_users_files(
    slurm_available: None, home: Path
) -> None:
    # This Python and the tree can lie where only root may enter: not on such a cluster.
    with SlurmCluster(hosts=2, root=DEFAULT_ROOT or Path("/")) as cluster:
        folder = home / "site"
        (folder / "user").mkdir(parents=True)
        (folder / "ids").write_text(f"{NOBODY}:200000:65536\n")
        site = Site(cluster, _runtime(cluster), folder, AS_NOBODY)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        site.env |= {"HOME": str(home), "USER": None, "LOGNAME": None}
        site.env |= {"XDG_DATA_HOME": str(folder / "user"), "XDG_RUNTIME_DIR": None}
        job = site.submit(home, "whole", *["--data-dir", str(home / "data")])
        assert cluster.wait_job(job) == "COMPLETED", cluster.log_tail()
        run = RunDir(home / "jobs/whole")
        report = read_json(run.report)
        assert report is not None
        assert (report["steps"], report["hosts"]) == (STEPS, ["h01", "h02"])
        assert {path.stat().st_uid for path in run.path.rglob("*")} == {NOBODY}
        # A user's podman leaves one idle process a host, which keeps the user's namespaces.
        wait_for(lambda: {*site.left()} <= PAUSES, "the end of all containers")


@pytest.mark.slow
@pytest.mark.release  # below, a debug run goes on in new ones; test_signals.py has requeues
def test_a_requeued_run_goes_on_in_new_containers_to_the_same_weights(
    site: Site, tmp_path: Path, synthetic_dir: Path, uninterrupted: str
) -> None:
    data = ["--data-dir", str(synthetic_dir)]
    hold = Hold(tmp_path, HELD_AT, until_told=True)
    job = site.submit(tmp_path, "again", *data, *_held(hold))
    run = RunDir(tmp_path / "jobs/again")
    wait_held(hold, run.path)
    site.cluster.run(["scontrol", "requeue", job], check=True)
    hold.release_after_requeue(run)
    assert site.cluster.wait_job(job) == "COMPLETED", site.cluster.log_tail()
    assert Attempt(run, 2).path.is_dir()
    assert weights(run.path) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "parent",  # a request to save: the debug run below
        *(
            pytest.param(how, marks=pytest.mark.release)
            for how in ("stop", "scancel", "runtime", "host")
        ),
    ],
)
def test_no_container_is_left(site: Site, tmp_path: Path, synthetic_dir: Path, how: str) -> None:
    hold = Hold(tmp_path, HELD_AT, until_told=how in ("stop", "scancel"))
    data = ["--data-dir", str(synthetic_dir)]
    job = site.submit(tmp_path, how, *data, *_held(hold), "--no-requeue")
    run = RunDir(tmp_path / "jobs" / how)
    wait_held(hold, run.path)
    if how == "stop":
        argv = [sys.executable, "-m", "clusterddp", "stop", how]
        site.cluster.run(argv, cwd=tmp_path, check=True, timeout=LONG)
    elif how == "scancel":
        site.cluster.run(["scancel", job], check=True)
    else:
        _kill(site, how)
        hold.release()
    state = site.cluster.wait_job(job)
    outcomes = {outcome.rank: outcome for outcome in read_outcomes(Attempt(run, 1).outcomes)}
    if how in ("stop", "scancel"):
        assert [outcome.exit_code for outcome in outcomes.values()] == [75, 75]
    else:
        assert state == "FAILED"
        assert "rank 1 on h02 failed first: killed by SIGKILL" in run.job_log.read_text()
    wait_for(lambda: not _running(site), "the end of all tasks")
    if how == "host":  # killed too was what would have removed it from podman's records
        job = site.submit(tmp_path, "another", *data, "--max-steps", "4")
        assert site.cluster.wait_job(job) == "COMPLETED", site.cluster.log_tail()


@pytest.mark.slow
def test_the_stacks_of_ranks_in_containers_are_read_from_their_hosts(
    site: Site, tmp_path: Path, synthetic_dir: Path
) -> None:
    hold = Hold(tmp_path, HELD_AT)
    job = site.submit(tmp_path, "seen", "--data-dir", str(synthetic_dir), *_held(hold))
    wait_held(hold, tmp_path / "jobs/seen")
    argv = [*CLUSTERDDP, "stacks", "seen", "--json"]
    told = site.cluster.run(argv, cwd=tmp_path, env=site.env, timeout=LONG)
    hold.release()
    assert told.returncode == 0, told.stdout + told.stderr
    for rank in json.loads(told.stdout):
        [program] = rank["programs"]
        functions = {frame["function"] for frame in program["threads"][0]["frames"]}
        assert {"run_task", "train"} <= functions, program
    assert site.cluster.wait_job(job) == "COMPLETED"


def _held(hold: Hold) -> list[str]:
    """Options for tasks in containers to wait."""
    return [*hold.options, f"--container-mount={hold.folder}:{hold.folder}"]


def _running(site: Site) -> list[str]:
    return [line for line in site.left() if "clusterddp" in line and " " in line]


def _kill(site: Site, what: str) -> None:
    """Kill, on the second host, what holds its container: by SIGKILL."""
    processes = site.cluster.processes("h02")
    tasks = {pid: line for pid, line in processes.items() if not line.startswith("slurm")}
    if what == "parent":
        tasks = {
            pid: line for pid, line in tasks.items()
            if line.startswith(sys.executable) and "--container=" in line
        }  # fmt: skip
    elif what == "runtime":
        names = ("/usr/bin/podman run", "Apptainer runtime parent")
        tasks = {pid: line for pid, line in tasks.items() if line.startswith(names)}
    assert tasks, processes
    for pid in sorted(tasks) if what == "host" else sorted(tasks)[:1]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # with another one
            continue


@pytest.mark.slow
def test_debug_trains_in_containers_and_a_ctrl_c_saves_and_leaves_none(
    site: Site, tmp_path: Path, synthetic_dir: Path
) -> None:
    training = [f"--data-dir={synthetic_dir}", "--dataset=synthetic", "--threads=1"]
    ranks = ["--procs=2", "--save-every=50steps", "--epochs=1000000"]
    argv = [sys.executable, "-m", "clusterddp", "debug", *training, *ranks, *site.options]
    argv.append("--run-dir=run")
    process = site.cluster.popen_on(
        "h01", argv, cwd=tmp_path, env=site.env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    with process:
        train_to(tmp_path / "run", 50)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=LONG)[1]
    assert process.returncode == 75, said
    again = shlex.split(said.partition("resume with: clusterddp ")[2].splitlines()[0])
    wait_for(lambda: not site.left(), "the end of all containers")
    checkpoints = sorted((tmp_path / "run/checkpoints").glob("step-*.pt"))
    more = [*again, "--allow-config-change", f"--max-steps={int(checkpoints[-1].stem[5:]) + 1}"]
    done = site.cluster.run_on(
        "h01", [sys.executable, "-m", "clusterddp", *more], cwd=tmp_path, env=site.env, timeout=LONG
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: test accuracy" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "image",  # the others: worker/test_container_parent.py
        *(pytest.param(what, marks=pytest.mark.release) for what in ("mount", "runtime", "torch")),
    ],
)
def test_what_one_host_lacks_is_named_and_nothing_starts_again(
    site: Site, tmp_path: Path, synthetic_dir: Path, what: str
) -> None:
    only_here = tmp_path / "mounted"
    only_here.mkdir()
    site.cluster.run_on("h01", ["mount", "--rbind", str(site.folder), str(only_here)], check=True)
    options, image, said = [], None, ""
    if what == "image":
        image = only_here / "image"
        said = f"h02 has no image {image}. Put it there"
    elif what == "mount":
        options = [f"--container-mount={only_here}/image:/mine"]
        said = f"h02 has no {only_here}/image to mount in the container of"
    elif what == "runtime":
        found = site.cluster.run_on("h02", ["sh", "-c", f"command -v {site.runtime}"], check=True)
        hide = ["mount", "--bind", "/dev/null", found.stdout.strip()]
        site.cluster.run_on("h02", hide, check=True)
        said = f"h02 has no {' or '.join(PROGRAMS[site.runtime])} on PATH to run the image"
    else:  # of both hosts
        options = ["--python=/usr/bin/python3"]
        said = f"cannot be imported by /usr/bin/python3 in the image {site.image} on h0"
        if site.cluster.run_on("h01", ["test", "-e", "/usr/bin/python3"]).returncode:
            said = " has no /usr/bin/python3 that runs"  # nor any other package
    data = ["--data-dir", str(synthetic_dir)]
    state = site.cluster.wait_job(site.submit(tmp_path, "lacks", *data, *options, image=image))
    if what == "runtime":
        site.cluster.run_on("h02", ["umount", hide[-1]], check=True)
    assert state == "FAILED"
    assert said in (tmp_path / "jobs/lacks/logs/job.log").read_text()
    for command in ("status", "report"):
        shown = site.cluster.run([*CLUSTERDDP, command, "lacks", "--json"], cwd=tmp_path).stdout
        assert said in shown, command
    assert not (tmp_path / "jobs/lacks/attempts/0002").exists()

"""Boots a real Slurm of several hosts on one machine, and takes it down without a trace.

Every host, and the login host, is a set of namespaces of its own: network, host name, mounts and
processes. Files are shared, as on a cluster's shared file system. The namespaces have no names;
they live as long as their first process does, which ends when this process closes a pipe or dies,
even by SIGKILL, and the kernel then kills whatever ran inside. So there is nothing to leak but one
temporary directory, and the next boot sweeps the directories of dead owners.

With another root file system (`root`, --root or CLUSTERDDP_SLURM_ROOT), the Slurm that is installed
there is booted: every host sees that root, and from this machine the Python that runs this, the
tree and the temporary directories. Nothing is written into the root itself.

By hand, from the repository's root:  python -m tests.on_slurm.cluster -- sinfo
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import select
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")

INSTALL_HINT = "apt-get install slurm-wlm munge iproute2, and run as root on Linux"
LOGIN = "login"
SUBNET = "10.77.0"
SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818
FOLDER_PREFIX = "clusterddp-slurm-"
STALE_AFTER_SECONDS = 3600
SLURM_PROGRAMS = (
    *("slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel", "scontrol"),
    "munged",
)
PROGRAMS = ("ip", "nsenter", "unshare", "mount", "pivot_root", "chroot")
ROOT_VARIABLE = "CLUSTERDDP_SLURM_ROOT"
# The root file system that clusters boot from; read once, as tests clear what they see of these.
DEFAULT_ROOT = Path(_root).resolve() if (_root := os.environ.get(ROOT_VARIABLE)) else None
DAEMON_PATH = "/usr/local/sbin:/usr/sbin:/sbin"  # often missing from a plain user's PATH

# What a surrounding job or a person's settings would otherwise leak into the commands under test.
LEAKING_PREFIXES = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_"),
    *("SCONTROL_", "SACCT_", "PMI", "CLUSTERDDP_"),
)
LEAKING_NAMES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})

# A job that will be requeued can be seen in these for a moment: believe them when seen twice.
PASSING_STATES = frozenset({"NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
FINAL_STATES = PASSING_STATES | {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}
FINAL_STATES |= {"OUT_OF_MEMORY", "DEADLINE"}


class ClusterError(RuntimeError):
    """The cluster could not be booted, used or waited for; the text ends with the daemons' logs."""


def why_unavailable(root: Path | None = None) -> str | None:
    """What keeps a cluster from booting here, in words, or None if nothing is known to.

    `root` is as of SlurmCluster.
    """
    root = root or DEFAULT_ROOT
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no Linux namespaces"
    if os.geteuid() != 0:
        return "namespaces and device files need root"
    missing = [name for name in PROGRAMS if _program(name) is None]
    missing += [name for name in SLURM_PROGRAMS if not _installed(name, root)]
    if missing:
        return f"not installed{f' in {root}' if root else ''}: {', '.join(missing)}"
    probe = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        return f"this machine allows no new namespaces: {probe.stderr.strip()}"
    return None


class Process(subprocess.Popen[str]):
    """A command inside a host. Signals reach the command, not the nsenter that waits for it.

    nsenter ends as the command did, so `returncode` is the command's own.
    """

    def send_signal(self, sig: int) -> None:
        """Sends `sig` to the command, or to nsenter while it has not started the command yet."""
        if self.poll() is not None:
            return
        for pid in _children(self.pid) or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)

    def kill_group(self) -> None:
        """Kills the command and what it started in its own process group, and reaps it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(timeout=60)


class SlurmCluster:
    """A real Slurm of `hosts` hosts named h01, h02, ..., up between `with` and its end.

    `conf` adds to or replaces lines of slurm.conf. A key is what stands before the value
    ("KillWait", or "PartitionName=main" for a line with a name); None drops the line.
    `root` is a root file system whose Slurm is booted in place of this machine's; without one,
    CLUSTERDDP_SLURM_ROOT names it. The root "/" is this machine's, with this Python and the tree
    open to every user. The partitions are `main` (the default) and `high`, which preempts it.
    """

    def __init__(
        self, hosts: int = 2, *, gpus_per_host: int = 4, gpu_type: str = "",
        cpus_per_host: int = 16, conf: Mapping[str, str | None] | None = None,
        root: Path | None = None,
    ) -> None:  # fmt: skip
        if not 1 <= hosts <= 99:
            raise ValueError(f"hosts is {hosts}, expected 1 to 99")
        self.hosts: list[str] = [f"h{number:02d}" for number in range(1, hosts + 1)]
        self.addresses: dict[str, str] = {LOGIN: f"{SUBNET}.1"} | {
            host: f"{SUBNET}.{10 + number}" for number, host in enumerate(self.hosts, start=1)
        }
        self.gpus_per_host = gpus_per_host
        self.gpu_type = gpu_type
        self.cpus_per_host = cpus_per_host
        self.root = root or DEFAULT_ROOT
        self._conf = dict(conf or {})
        self._folder: Path | None = None
        self._lock: int | None = None
        self._namespaces: dict[str, _Namespace] = {}
        self._daemons: dict[str, Process] = {}  # "munged", "slurmctld" and one per host's slurmd
        self._commands: list[Process] = []
        self._faulted: set[str] = set()

    # -- up and down -------------------------------------------------------------------------

    def __enter__(self) -> SlurmCluster:
        try:
            self._boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _boot(self) -> None:
        reason = why_unavailable(self.root)
        if reason is not None:
            raise ClusterError(f"no Slurm can be booted: {reason}. {INSTALL_HINT}")
        _sweep_stale_folders()
        self._folder, self._lock = _own_folder()
        self._write_files()
        for host in (LOGIN, *self.hosts):
            self._namespaces[host] = _Namespace(host, self.folder, self.root)
        for namespace in self._namespaces.values():
            namespace.wait_ready()
        self._connect_network()
        self._start_munged()
        self.start_slurmctld()
        for host in self.hosts:
            self._launch_slurmd(host)
        for host in self.hosts:
            self._wait_slurmd(host)

    def close(self) -> None:
        """Ends every process of the cluster and removes its directory. Safe to call twice."""
        for namespace in self._namespaces.values():
            namespace.end()
        for namespace in self._namespaces.values():
            namespace.wait_ended()
        # Their commands were killed with the namespaces; reap the nsenters that waited for them.
        for process in (*self._daemons.values(), *self._commands):
            process.wait(timeout=60)
        self._namespaces.clear()
        self._daemons.clear()
        self._commands.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def folder(self) -> Path:
        """The cluster's temporary directory: configuration, state, logs."""
        if self._folder is None:
            raise ClusterError("the cluster is not running: use it inside its 'with' block")
        return self._folder

    @property
    def slurm_conf(self) -> Path:
        """The slurm.conf that all daemons and commands of this cluster read."""
        return self.folder / "slurm.conf"

    # -- commands ----------------------------------------------------------------------------

    def run(
        self, argv: Sequence[str | os.PathLike[str]], *, cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str | None] | None = None, timeout: float = 60, check: bool = False,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Runs a command on the login host, with SLURM_CONF set, and captures its output.

        `env` adds to a clean copy of os.environ (a None removes); `check` raises ClusterError on
        a non-zero exit; a command that outlives `timeout` seconds is killed with its group.
        """
        return self.run_on(LOGIN, argv, cwd=cwd, env=env, timeout=timeout, check=check, input=input)

    def run_on(
        self, host: str, argv: Sequence[str | os.PathLike[str]], *,
        cwd: str | os.PathLike[str] | None = None, env: Mapping[str, str | None] | None = None,
        timeout: float = 60, check: bool = False, input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """The same as `run`, on any host of the cluster."""
        process = self.popen_on(
            host, argv, cwd=cwd, env=env,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        with process:
            try:
                stdout, stderr = process.communicate(input, timeout=timeout)
            except subprocess.TimeoutExpired as error:
                process.kill_group()
                raise self._error(
                    f"{shlex.join(_words(argv))} on {host} did not end within {timeout} s.\n"
                    f"stdout: {_text(error.stdout)}\nstderr: {_text(error.stderr)}"
                ) from error
            except BaseException:
                process.kill_group()
                raise
        if check and process.returncode != 0:
            raise self._error(
                f"{shlex.join(_words(argv))} on {host}: exit {process.returncode}, expected 0.\n"
                f"stdout: {stdout}\nstderr: {stderr}"
            )
        return subprocess.CompletedProcess(_words(argv), process.returncode, stdout, stderr)

    def popen(self, argv: Sequence[str | os.PathLike[str]], **options: Any) -> Process:
        """Starts a command on the login host; options as of `popen_on`."""
        return self.popen_on(LOGIN, argv, **options)

    def popen_on(
        self, host: str, argv: Sequence[str | os.PathLike[str]], *,
        cwd: str | os.PathLike[str] | None = None, env: Mapping[str, str | None] | None = None,
        start_new_session: bool = True, **options: Any,
    ) -> Process:  # fmt: skip
        """Starts a command on a host, with SLURM_CONF set; further options as of Popen.

        What is still running when the cluster goes down is killed.
        """
        self._commands = [command for command in self._commands if command.poll() is None]
        process = self._start(
            host, argv, cwd=cwd, env=env, start_new_session=start_new_session, **options
        )
        self._commands.append(process)
        return process

    def clean_env(self, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """os.environ without what a surrounding job leaks, plus SLURM_CONF and `extra`."""
        env: dict[str, str | None] = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(LEAKING_PREFIXES) and name not in LEAKING_NAMES
        }
        env["PATH"] = f"{env.get('PATH') or os.defpath}:{DAEMON_PATH}"
        env["SLURM_CONF"] = str(self.slurm_conf)
        # The hosts share this machine's processors, whose load would set them apart: only a test
        # that asks for it has its nodes compared.
        env["CLUSTERDDP_PREFLIGHT"] = "none"
        env |= extra or {}
        return {name: value for name, value in env.items() if value is not None}

    def processes(self, host: str) -> dict[int, str]:
        """The processes of a host: their ids on this machine (for os.kill) and command lines."""
        return {pid: _command_line(pid) for pid in self._namespaces[host].pids()}

    # -- jobs --------------------------------------------------------------------------------

    def sbatch(
        self, script: str, *options: str, cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> str:  # fmt: skip
        """Submits a script given as text and returns the job's id; its log goes to `cwd`."""
        argv = ["sbatch", "--parsable", *options]
        answer = self.run(argv, cwd=cwd, env=env, input=script, check=True)
        return answer.stdout.strip().split(";")[0]

    def job_state(self, job_id: str | int) -> str:
        """The job's state as one word; of an array, the state that says most about the whole.

        Asked of squeue, not `scontrol show job`, where a hostile job name can forge a state.
        """
        answer = self.run(["squeue", "-h", "-r", "-t", "all", "-j", str(job_id), "-o", "%T"])
        states = answer.stdout.split()
        if answer.returncode != 0 or not states:
            raise self._error(f"Slurm knows no job {job_id}: {answer.stderr.strip()}")
        going_on = [state for state in states if state not in FINAL_STATES]
        return (going_on or [state for state in states if state != "COMPLETED"] or states)[0]

    def wait_job(self, job_id: str | int, timeout: float = 240) -> str:
        """Waits until the job is over for good and returns its final state word."""
        before = ""

        def final_state() -> str | None:
            nonlocal before
            state, previous = self.job_state(job_id), before
            before = state
            if state in PASSING_STATES and previous != state:
                return None
            return state if state in FINAL_STATES else None

        try:
            return _until(final_state, timeout, "the job to end", pause=0.25)
        except TimeoutError as error:
            shown = self.run(["scontrol", "show", "job", str(job_id)]).stdout
            message = f"job {job_id} is {before} after {timeout} s, expected it to end.\n{shown}"
            raise self._error(message) from error

    def cancel_all(self, timeout: float = 180) -> None:
        """Makes the cluster as after boot: no job, every daemon up, every node idle.

        Job ids go on counting, and Slurm remembers the ended jobs for MinJobAge.
        """
        if self._daemons["slurmctld"].poll() is not None:
            self.start_slurmctld()
        broken = [
            host
            for host in self.hosts
            if host in self._faulted or self._daemons[host].poll() is not None
        ]
        for host in broken:
            self.kill_host(host)  # ranks that outlived their slurmd would meet the next test's
            self._launch_slurmd(host)
        for host in broken:
            self._wait_slurmd(host)
        self._faulted.clear()
        seen = ""

        def all_idle() -> bool:
            nonlocal seen
            jobs = self.run(["squeue", "-h", "-o", "%A %T"], check=True).stdout
            ids = sorted({line.split()[0] for line in jobs.splitlines()})
            if ids:
                self.run(["scancel", *ids])
                self._kill_tasks()
            nodes = self._node_states()
            for host, state in nodes.items():
                if state.startswith(("down", "drain")):
                    self.run(["scontrol", "update", f"nodename={host}", "state=resume"])
            seen = f"jobs: {jobs.split()}, nodes: {nodes}"
            return not ids and all(state == "idle" for state in nodes.values())

        try:
            _until(all_idle, timeout, "an idle cluster", pause=0.1)
        except TimeoutError as error:
            raise self._error(f"after {timeout} s the cluster was not idle: {seen}") from error

    def _kill_tasks(self) -> None:
        """Ends the tasks of cancelled jobs now: scancel has no signal that spares KillWait."""
        for host in self.hosts:
            for pid in self._namespaces[host].pids():
                if _name(pid) not in {"slurmd", "slurmstepd", ""}:
                    _kill(pid)

    # -- faults ------------------------------------------------------------------------------

    def kill_slurmd(self, host: str, *, steps: bool = False) -> None:
        """Kills a host's slurmd with SIGKILL; jobs on it go on.

        With `steps` its slurmstepd die too, and the tasks are orphans, as seen when a node's
        daemons are lost while the node lives.
        """
        self._stop(host)
        if steps:
            self._faulted.add(host)
            for pid in self._namespaces[host].pids():
                if _name(pid) == "slurmstepd":
                    _kill(pid)

    def kill_host(self, host: str) -> None:
        """Kills every process of a host at once, as a power cut does.

        kill(2) of -1 does so, since none may act on the end of another: a task's parent would
        record it, and an srun whose controller is gone ends the tasks of the other hosts.
        """
        namespace = self._namespaces[host]

        def empty() -> bool:
            self.run_on(host, ["sh", "-c", "kill -9 -1"])
            return not namespace.pids()

        try:
            _until(empty, 60, "the host's processes to end")
        except TimeoutError as error:
            message = f"{host} still runs {self.processes(host)} 10 s after SIGKILL"
            raise self._error(message) from error
        self._stop(host)

    def start_slurmd(self, host: str) -> None:
        """Starts a killed slurmd and waits until its node has registered."""
        self._launch_slurmd(host)
        self._wait_slurmd(host)

    def set_link(self, host: str, *, up: bool) -> None:
        """Takes a host's network cable out, or puts it back in."""
        self._namespaces[LOGIN].ip([f"link set {host} {'up' if up else 'down'}"])

    def kill_slurmctld(self) -> None:
        """Kills slurmctld with SIGKILL: what it has not saved (up to 5 s) is forgotten."""
        self._stop("slurmctld")

    def start_slurmctld(self) -> None:
        """Starts slurmctld and waits until it answers."""
        self._start_daemon("slurmctld", LOGIN, ["slurmctld", "-D"])

        def answers() -> bool:
            return "is UP" in self.run(["scontrol", "ping"]).stdout

        self._wait_daemon("slurmctld", answers)

    def restart_slurmctld(self) -> None:
        """Ends slurmctld in order (it saves its state) and starts it again."""
        self._stop("slurmctld", signal.SIGTERM)
        self.start_slurmctld()

    # -- what went wrong ---------------------------------------------------------------------

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of every daemon's log."""
        if self._folder is None:
            return "(the cluster is down and its logs are gone)"
        tails = []
        for stderr in sorted(self._folder.glob("*.stderr")):
            log = stderr.with_suffix(".log")
            # A daemon that dies over its configuration has no log yet, only its stderr.
            shown = log if log.exists() and log.stat().st_size else stderr
            text = shown.read_text(errors="replace").splitlines()[-lines:]
            tails.append("\n".join([f"--- {shown.name}", *text]))
        return "\n".join(tails)

    def _error(self, message: str) -> ClusterError:
        return ClusterError(f"{message}\n{self.log_tail()}")

    # -- parts of the boot -------------------------------------------------------------------

    def _write_files(self) -> None:
        folder = self.folder
        for name in ("state", "dev", "munge", *(f"spool/{host}" for host in self.hosts)):
            (folder / name).mkdir(parents=True)
        key = folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        names = [f"{address} {host}" for host, address in self.addresses.items()]
        local = ["127.0.0.1 localhost", "::1 localhost"]
        (folder / "hosts").write_text("\n".join([*local, *names]) + "\n")
        self.slurm_conf.write_text(self._slurm_conf_text())
        # Nothing here uses control groups, but slurmd refuses to start when it looks for them and
        # finds none; naming a plugin keeps it from looking.
        plugin = "cgroup/v1" if self.release < (23, 2) else "disabled"
        (folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        (folder / "gres.conf").write_text("")
        if self.gpus_per_host:
            for number in range(self.gpus_per_host):
                # Slurm only asks that the file be there; this one is /dev/null under a GPU's name.
                os.mknod(folder / "dev" / f"nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
            files = f"{folder}/dev/nvidia[0-{self.gpus_per_host - 1}]"
            kind = f"Type={self.gpu_type} " if self.gpu_type else ""
            (folder / "gres.conf").write_text(f"Name=gpu {kind}File={files}\n")

    @property
    def release(self) -> tuple[int, int]:
        """The installed Slurm's release, (22, 5) for 22.05.8."""
        argv = [*(["chroot", str(self.root)] if self.root else []), "slurmctld", "-V"]
        env = os.environ | {"PATH": f"{os.environ.get('PATH') or os.defpath}:{DAEMON_PATH}"}
        said = subprocess.run(argv, env=env, capture_output=True, text=True, check=False).stdout
        match = re.search(r"(\d+)\.(\d+)", said)
        if match is None:
            raise ClusterError(f"slurmctld -V says {said!r}, expected a version")
        return int(match[1]), int(match[2])

    def _slurm_conf_text(self) -> str:
        folder = self.folder
        kind = f"{self.gpu_type}:" if self.gpu_type else ""
        gres = f" Gres=gpu:{kind}{self.gpus_per_host}" if self.gpus_per_host else ""
        node = f"CPUs={self.cpus_per_host} RealMemory=64000 Port={SLURMD_PORT}{gres}"
        partition = "Nodes=ALL State=UP DefaultTime=10 MaxTime=7-00:00:00"
        lines: dict[str, str | None] = {
            "ClusterName": "test",
            "SlurmctldHost": f"{LOGIN}({self.addresses[LOGIN]})",
            "SlurmctldPort": str(SLURMCTLD_PORT),
            "SlurmdPort": str(SLURMD_PORT),
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            # A requeued job is held back until its old credential has expired: 121 s by default.
            "AuthInfo": f"socket={folder}/munge/socket,cred_expire=5",
            "StateSaveLocation": f"{folder}/state",
            "SlurmdSpoolDir": f"{folder}/spool/%n",
            "SlurmctldPidFile": f"{folder}/slurmctld.pid",
            "SlurmdPidFile": f"{folder}/slurmd.%n.pid",
            "SlurmctldLogFile": f"{folder}/slurmctld.log",
            "SlurmdLogFile": f"{folder}/slurmd.%n.log",
            "MailProg": "/bin/true",
            "MpiDefault": "none",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SlurmdParameters": "config_overrides",  # a small machine may claim many CPUs
            "GresTypes": "gpu",
            "ReturnToService": "2",
            "JobRequeue": "1",
            "KillWait": "5",
            "SlurmdTimeout": "20",
            "SchedulerParameters": "sched_interval=1,sched_min_interval=0,batch_sched_delay=0",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
        }
        for host in self.hosts:
            lines[f"NodeName={host}"] = f"NodeAddr={self.addresses[host]} {node}"
        lines["PartitionName=main"] = f"{partition} Default=YES PriorityTier=1 GraceTime=15"
        lines["PartitionName=high"] = f"{partition} PriorityTier=2 PreemptMode=OFF"
        lines |= self._conf
        return "".join(
            f"{key}{' ' if '=' in key else '='}{value}\n"
            for key, value in lines.items()
            if value is not None
        )

    def _connect_network(self) -> None:
        """A bridge on the login host, and from each host a cable (veth) into it."""
        login = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        login.append(f"address add {self.addresses[LOGIN]}/24 dev br0")
        for host in self.hosts:
            # The other end is made right in the host's own namespace, found by a process id.
            far_end = f"eth0 netns {self._namespaces[host].init.pid}"
            login.append(f"link add {host} type veth peer name {far_end}")
            login.append(f"link set {host} master br0 up")
        self._namespaces[LOGIN].ip(login)
        for host in self.hosts:
            address = f"address add {self.addresses[host]}/24 dev eth0"
            self._namespaces[host].ip(["link set lo up", address, "link set eth0 up"])

    def _start_munged(self) -> None:
        munge = self.folder / "munge"
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "seed")]
        files.append(f"--log-file={self.folder}/munged.log")
        # --force: munged would rather not run as root, nor below a directory like /tmp.
        argv = ["munged", "--foreground", "--force", f"--socket={munge}/socket", *files]
        self._start_daemon("munged", LOGIN, argv)

        def accepts() -> bool:
            with socket.socket(socket.AF_UNIX) as client:
                return client.connect_ex(f"{munge}/socket") == 0

        self._wait_daemon("munged", accepts)

    def _launch_slurmd(self, host: str) -> None:
        self._start_daemon(host, host, ["slurmd", "-D", "-N", host])

    def _wait_slurmd(self, host: str) -> None:
        def registered() -> bool:
            # Right after a restart slurmctld still shows the old state: look for the socket too.
            if not self._namespaces[host].listens(SLURMD_PORT):
                return False
            if self._daemons["slurmctld"].poll() is not None:
                return True  # a test wants the node up before its controller
            state = self._node_states().get(host, "unknown")
            return not state.endswith("*") and not state.startswith(("unknown", "down"))

        self._wait_daemon(host, registered)

    def _node_states(self) -> dict[str, str]:
        answer = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"])
        return dict(line.split()[:2] for line in answer.stdout.splitlines())

    # -- daemons -----------------------------------------------------------------------------

    def _start(
        self, host: str, argv: Sequence[str | os.PathLike[str]], *,
        cwd: str | os.PathLike[str] | None = None, env: Mapping[str, str | None] | None = None,
        **options: Any,
    ) -> Process:  # fmt: skip
        try:
            namespace = self._namespaces[host]
        except KeyError:
            known = ", ".join(self._namespaces) or "none: the cluster is not running"
            raise ClusterError(f"there is no host {host!r}; there are {known}") from None
        # A new mount namespace starts at its root: env takes the command to its directory. And a
        # shell starts what it puts into the background deaf to INT, which all below would inherit.
        place = ["env", "--default-signal", f"--chdir={Path.cwd() / (cwd or '')}", "--"]
        command = [*namespace.enter(), *place, *_words(argv)]
        return Process(command, env=self.clean_env(env), text=True, errors="replace", **options)

    def _start_daemon(self, name: str, host: str, argv: Sequence[str]) -> None:
        if name in self._daemons and self._daemons[name].poll() is None:
            raise ClusterError(f"{argv[0]} on {host} is already running")
        log = f"slurmd.{name}" if name in self.hosts else name
        with (self.folder / f"{log}.stderr").open("a") as output:
            self._daemons[name] = self._start(
                host, argv, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def _wait_daemon(self, name: str, ready: Callable[[], bool], timeout: float = 90) -> None:
        daemon = self._daemons[name]

        def ready_or_dead() -> bool:
            return daemon.poll() is not None or ready()

        try:
            _until(ready_or_dead, timeout, "ready")
        except TimeoutError as error:
            raise self._error(f"the daemon of {name} was not ready after {timeout} s") from error
        if daemon.returncode is not None:
            raise self._error(f"the daemon of {name} ended with {daemon.returncode}")

    def _stop(self, name: str, sig: signal.Signals = signal.SIGKILL, timeout: float = 90) -> None:
        daemon = self._daemons[name]
        daemon.send_signal(sig)
        try:
            daemon.wait(timeout)
        except subprocess.TimeoutExpired as error:
            message = f"the daemon of {name} was still there {timeout} s after {sig.name}"
            raise self._error(message) from error


_UNSHARE = (
    *("unshare", "--net", "--uts", "--mount", "--propagation", "slave"),
    *("--pid", "--fork", "--mount-proc", "--"),
)

# Waits for the end of its input as process 1 of a host. SIGCHLD is ignored so that the kernel
# reaps the orphans which a host's first process inherits.
_INIT = """
host=$1 hosts=$2 root=$3 stage=$4
if [ -z "$root" ]; then
    mount --bind "$hosts" /etc/hosts
else
    shift 4
    # The root is the lower layer of an overlay, so that nothing is written into it. Unbindable:
    # the temporary directory is bound into the overlay and holds its stage.
    mkdir -p "$stage"
    mount -t tmpfs -o mode=755 "$host" "$stage"
    cd "$stage"
    mkdir lower upper work new
    mount --bind "$root" lower
    mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work "$host" new
    mount --make-unbindable "$stage"
    mkdir -p new/proc new/sys new/dev new/tmp new/.old
    for path in "$@"; do
        folder=${path%/*}
        mkdir -p "new$folder"
        if [ -d "$path" ]; then mkdir -p "new$path"; else [ -e "new$path" ] || : >"new$path"; fi
        while [ "$folder" ]; do chmod a+x "new$folder"; folder=${folder%/*}; done
    done
    for path in "$@"; do mount --rbind "$path" "new$path"; done
    for path in /sys /dev; do mount --rbind "$path" "new$path"; done
    [ -e new/etc/hosts ] || : >new/etc/hosts
    mount --bind "$hosts" new/etc/hosts
    mount -t proc proc new/proc
    cd new
    pivot_root . .old
    umount --lazy .old
fi
echo "$host" >/proc/sys/kernel/hostname
echo ready
exec env --ignore-signal=CHLD cat
"""


class _Namespace:
    """One host: its namespaces, held by a first process that ends when its input closes."""

    def __init__(self, host: str, folder: Path, root: Path | None) -> None:
        self.host = host
        place = [str(root or ""), str(folder / "stage"), *(_brought_along() if root else [])]
        self.log = folder / f"init.{host}.stderr"
        with self.log.open("w") as errors:
            self.init = subprocess.Popen(
                [*_UNSHARE, "sh", "-ec", _INIT, "sh", host, str(folder / "hosts"), *place],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C is ours to handle
            )

    def wait_ready(self, timeout: float = 90) -> None:
        assert self.init.stdout is not None
        readable, _, _ = select.select([self.init.stdout], [], [], timeout)
        line = self.init.stdout.readline() if readable else ""
        if line != "ready\n":
            seen = f"it said {line!r} and {self.log.read_text()!r}"
            raise ClusterError(f"the namespaces of {self.host} were not ready: {seen}")

    def enter(self) -> list[str]:
        """The words before a command that put it onto this host."""
        proc = f"/proc/{self.init.pid}/ns"
        spaces = [f"--{name}={proc}/{file}" for name, file in _NAMESPACE_FILES.items()]
        return ["nsenter", *spaces, "--"]

    def ip(self, lines: Iterable[str]) -> None:
        """Applies lines of ip(8), in this host's network but seeing this machine's processes."""
        argv = ["nsenter", f"--net=/proc/{self.init.pid}/ns/net", "--", _program("ip") or "ip"]
        done = subprocess.run(
            [*argv, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True,
            timeout=30, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise ClusterError(f"the network of {self.host} was refused: {done.stderr.strip()}")

    def pids(self) -> list[int]:
        """This machine's ids of the host's processes, without its first."""
        space = _link(f"/proc/{self.init.pid}/ns/pid_for_children")
        first = _children(self.init.pid)
        return [
            pid
            for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*"))
            if pid not in first and space and _link(f"/proc/{pid}/ns/pid") == space
        ]

    def listens(self, port: int) -> bool:
        """Whether something on this host listens on the TCP port."""
        listening = re.compile(rf"^ *\d+: [0-9A-F]+:{port:04X} [0-9A-F]+:0000 0A ", re.MULTILINE)
        tables = [Path(f"/proc/{self.init.pid}/net/{name}") for name in ("tcp", "tcp6")]
        return any(table.exists() and listening.search(table.read_text()) for table in tables)

    def end(self) -> None:
        """Ends the first process. Its input alone would not do: a fork of this one may hold it."""
        assert self.init.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.init.stdin.close()
        for pid in _children(self.init.pid):
            _kill(pid)

    def wait_ended(self, timeout: float = 90) -> None:
        """Waits until the first process, and with it all others of the host, is gone."""
        assert self.init.stdout is not None
        try:
            self.init.wait(timeout)
        except subprocess.TimeoutExpired as error:
            left = {pid: _command_line(pid) for pid in self.pids()}
            message = f"{self.host} did not end within {timeout} s; it still runs {left}"
            raise ClusterError(message) from error
        finally:
            self.init.stdout.close()


_NAMESPACE_FILES = {"net": "net", "uts": "uts", "mount": "mnt", "pid": "pid_for_children"}


def _installed(name: str, root: Path | None) -> bool:
    if root is None:
        return _program(name) is not None
    folders = ("usr/sbin", "usr/bin", "usr/local/sbin", "usr/local/bin")
    return any((root / folder / name).is_file() for folder in folders)


def _brought_along() -> list[str]:
    """What hosts with another root see here: this Python, the tree, temporary directories.

    Links on the way to the interpreter are named as well, each by its own path.
    """
    tree = Path(__file__).resolve().parents[2]
    paths = {tree, Path.cwd(), Path(tempfile.gettempdir()), Path("/tmp")}
    paths |= {Path(name) for name in (sys.prefix, sys.base_prefix) if name != "/usr"}
    paths |= {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    paths |= {Path(entry) for entry in sys.path if entry}
    interpreter = Path(sys.executable)
    paths.add(interpreter)
    while interpreter.is_symlink():
        interpreter = interpreter.parent / interpreter.readlink()
        paths.add(interpreter)
    there = {Path(os.path.abspath(path)) for path in paths if path.exists()}
    return [str(path) for path in sorted(there) if there.isdisjoint(path.parents)]


def _own_folder() -> tuple[Path, int]:
    """A new directory and the descriptor whose lock says that its owner lives."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    folder.chmod(0o755)  # munged wants its socket within everybody's reach
    # Locked before it has the name that a sweep looks for: it is never seen without its lock.
    lock = os.open(folder / "owner.new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / "owner.new").rename(folder / "owner.lock")
    return folder, lock


def _sweep_stale_folders() -> None:
    """Removes what clusters left whose owner was killed; their processes died with it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        try:
            lock = os.open(folder / "owner.lock", os.O_RDWR)
        except OSError:
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > STALE_AFTER_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(lock)


def _until(
    probe: Callable[[], _Answer | None], timeout: float, what: str, pause: float = 0.03
) -> _Answer:
    """Polls until the probe's answer is true and returns it; TimeoutError after `timeout` s."""
    deadline = time.monotonic() + timeout
    while not (answer := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout} s for {what}")
        time.sleep(pause)
    return answer


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{DAEMON_PATH}")


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _name(pid: int) -> str:
    """The program's name as the kernel has it; a starting slurmstepd's command line differs."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _link(path: str) -> Path | None:
    try:
        return Path(path).readlink()
    except OSError:
        return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _words(argv: Sequence[str | os.PathLike[str]]) -> list[str]:
    return [os.fspath(word) for word in argv]


def _text(output: object) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else str(output or "")


def main(argv: Sequence[str] | None = None) -> int:
    """Boots a cluster, runs a command or a shell on its login host, and takes it down."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.on_slurm.cluster",
        description="Boot a real Slurm on this machine, run COMMAND on its login host "
        "(a shell without one), and take it down.",
    )
    parser.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--root", type=Path, metavar="DIR",
        help=f"boot the Slurm of this root file system; default: ${ROOT_VARIABLE}, or this "
        "machine's own",
    )  # fmt: skip
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="after --")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        root = arguments.root.resolve() if arguments.root else None
        with SlurmCluster(hosts=arguments.hosts, root=root) as cluster:
            command = arguments.command or [os.environ.get("SHELL", "/bin/sh")]
            process = cluster.popen(command, start_new_session=False)
            while True:
                try:
                    return process.wait()
                except KeyboardInterrupt:
                    if arguments.command:
                        raise  # the command had the Ctrl-C too; a shell handles its own
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

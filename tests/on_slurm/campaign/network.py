"""Faults between hosts: cables cut, ports taken, runs that meet on one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from sys import executable

from clusterddp.ranks.dist_env import master_port
from clusterddp.run.outcome import read_outcomes
from tests.on_slurm.campaign.fault import ENDS, fault
from tests.on_slurm.campaign.nodes import SOON
from tests.on_slurm.campaign.run import Differs, Run, Trial, slurm
from tests.on_slurm.cluster import Process

# Binds a port, listens there or not, and never says a word to who comes.
HOLDER = """
import socket, sys
s = socket.socket(socket.AF_INET6)
s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
s.bind(("", int(sys.argv[1])))
if sys.argv[2] == "listens":
    s.listen()
print("bound", flush=True)
sys.stdin.read()
"""


def take_port(trial: Trial, port: int, how: str) -> Process:
    argv = [executable, "-c", HOLDER, str(port), how]
    holder = trial.cluster.popen_on("h01", argv, stdin=PIPE, stdout=PIPE)
    assert holder.stdout is not None
    if holder.stdout.readline() != "bound\n":
        raise AssertionError(f"port {port} of h01 could not be taken")
    return holder


def free_port(holder: Process) -> None:
    holder.kill()
    holder.communicate()


def port_of(run: Run, rank: int = 0) -> int:
    environ = Path(f"/proc/{run.task(rank)}/environ").read_bytes().decode()
    found = re.search(r"\0MASTER_PORT=(\d+)\0", f"\0{environ}")
    if not found:
        raise run.differs("its tasks have no MASTER_PORT")
    return int(found[1])


@fault("network-cut-for-seconds", conf={})
def network_cut_for_seconds(trial: Trial) -> str:
    run = trial.start()
    run.wait_step(60)
    trial.cluster.set_link("h02", up=False)
    struck = run.struck()
    trial.stopping.wait(5)  # as long as the fault lasts
    stood = run.step
    trial.cluster.set_link("h02", up=True)
    if stood > struck.step + 15:
        raise run.differs(f"it trained from {struck.step} to {stood} without a network")
    return run.check_same(struck, causes=["done"])


SHORT = ["--process-group-timeout", "10s", "--hang-timeout", "4s"]


@fault("network-cut-for-good", conf=SOON, hosts=3)
def network_cut_for_good(trial: Trial) -> str:
    """Slurm gives the host up and requeues: the run goes on with a third."""
    run = trial.start(*SHORT)
    run.wait_step(60)
    struck = run.struck()
    trial.cluster.set_link("h02", up=False)
    run.wait_attempt(2)
    seen = run.check_same(struck)
    hosts = run.attempts[-1].read_record().hosts
    if "h02" in hosts:
        raise run.differs(f"it runs on {hosts}")
    return f"{seen}; on {' '.join(hosts)}"


@fault("network-cut-and-no-requeue", ENDS, conf=SOON)
def network_cut_and_no_requeue(trial: Trial) -> str:
    run = trial.start("--no-requeue", *SHORT)
    run.wait_step(60)
    trial.cluster.set_link("h02", up=False)
    # Slurm ends the script KillWait after the node: its last word may or may not come in time.
    seen = run.check_failed(
        "Node failure on h02", "clusterddp", within=90, states=("stopped", "failed"), usable=40
    )
    if "node" not in run.status()["detail"]:
        raise run.differs(f"status says {run.status()['detail']!r}: nothing of a node")
    return seen


# A host is not taken for lost while its cable is out.
LATE = {"SlurmdTimeout": "300"}


def _lose_exit_message(trial: Trial, run: Run, go: Callable[[], None]) -> None:
    """Takes h02 off the network while its task ends, until Slurm has given its message up.

    26.05 says nothing of it: there the host comes back when the step has been ended without it.
    """
    trial.cluster.set_link("h02", up=False)
    go()
    folder = run.attempts[0].outcomes
    run.wait(
        lambda: [bool(r.ended) for r in read_outcomes(folder)] == [True] * 2, "the ranks' ends"
    )
    log = trial.cluster.folder / "slurmd.h02.log"
    lost = "Failed to send MESSAGE_TASK_EXIT"
    run.wait(
        lambda: lost in log.read_text(errors="replace") or "exit message was lost" in run.log,
        "an exit message that is lost",
    )
    trial.cluster.set_link("h02", up=True)
    run.wait(lambda: run.causes, "the verdict")


def _exit_message_lost(trial: Trial, *options: str) -> str:
    trial.want("left")
    run = trial.start("--nodelist", "h[01-02]", *options)
    trial.held("left", 2)
    _lose_exit_message(trial, run, lambda: trial.release("left"))
    seen = run.check_same(causes=["done"])
    if "exit message was lost" not in run.log:
        raise run.differs("nobody says that a message was lost")
    return seen


@fault("exit-message-lost", conf=LATE, quick=True)
def exit_message_lost(trial: Trial) -> str:
    """srun waits for ever for a host that was off the network while its ranks ended."""
    return _exit_message_lost(trial)


@fault("exit-message-lost-submitit", conf=LATE)
def exit_message_lost_submitit(trial: Trial) -> str:
    return _exit_message_lost(trial, "--launcher", "submitit")


@fault("exit-message-lost-command", conf=LATE, needs=())
def exit_message_lost_command(trial: Trial) -> str:
    """The same of a person's own command, whose ranks write no report."""
    go = trial.folder / "go"
    wait = f"until [ -e {shlex.quote(str(go))} ]; do sleep 0.1; done"
    submitted = trial.clusterddp(
        *("submit", "--run-name", "run", "--nodes", "2", "--", "bash", "-c", wait)
    )
    if submitted.returncode:
        raise Differs(submitted.stderr)
    run = trial.adopt("run")
    run.wait(lambda: run.attempts and len(read_outcomes(run.attempts[0].outcomes)) == 2,
             "both tasks")  # fmt: skip
    _lose_exit_message(trial, run, go.touch)
    run.wait_over()
    state, shown = run.status()["state"], slurm(trial, "scontrol", "show", "job", run.job_id)
    if (state, run.causes) != ("done", ["done"]) or "ExitCode=0:0" not in shown.stdout:
        raise run.differs(f"status says {state}, Slurm {shown.stdout}")
    return "done"


@fault("port-taken-before", conf={})
def port_taken_before(trial: Trial) -> str:
    """Somebody listens at the run's first choice: it takes the next."""
    first = master_port(1, 0, 0)  # a fresh cluster counts its jobs from 1
    holder = take_port(trial, first, "listens")
    run = trial.start("--nodelist", "h[01-02]")
    port = port_of(run)
    seen = run.check_same(causes=["done"])
    free_port(holder)
    if (run.job_id, port) != ("1", master_port(1, 0, 0, candidate=1)):
        raise run.differs(f"job {run.job_id} met at port {port}, not at the next choice")
    return f"{seen}; port {port} in place of {first}"


def _taken_late(trial: Trial, how: str) -> str:
    """The port is taken between its choice and rank 0's own use of it."""
    trial.want("import")
    run = trial.start("--nodelist", "h[01-02]", "--retries", "1", "--rendezvous-timeout", "20s")
    trial.held("import", 2)
    struck = run.struck()
    port = port_of(run)
    holder = take_port(trial, port, how)
    trial.release("import")
    run.wait_attempt(2)
    free_port(holder)
    seen = run.check_same(struck, causes=["failed", "done"])
    if f"cannot listen on port {port}" not in run.rank_logs:
        raise run.differs("nobody names the port")
    return seen


@fault("port-taken")
def port_taken(trial: Trial) -> str:
    return _taken_late(trial, "holds")


@fault("port-mute-listener")
def port_mute_listener(trial: Trial) -> str:
    return _taken_late(trial, "listens")


@fault("two-jobs-on-the-same-nodes")
def two_jobs_on_the_same_nodes(trial: Trial) -> str:
    first = trial.start(name="first", pace=0.05)
    second = trial.start(name="second", pace=0.05)
    for run in (first, second):
        run.wait_step(20)
    if not (first.task(0) and second.task(0)):
        raise first.differs("they did not train at the same time")
    second.check_same(causes=["done"])
    return first.check_same(causes=["done"])


@fault("two-runs-on-one-port")
def two_runs_on_one_port(trial: Trial) -> str:
    """The second cannot start while the first holds the port, and says so; then it can."""
    trial.want("step-100")
    both = ["--nodelist", "h[01-02]", "--env", "MASTER_PORT=11999", "--retries", "1"]
    first = trial.start(*both, name="first")
    trial.held("step-100", 2)
    second = trial.start(*both, "--rendezvous-timeout", "20s", name="second")
    second.wait(lambda: second.causes, "the second's failure")
    if "port 11999" not in second.rank_logs:
        raise second.differs("its ranks do not name the port")
    trial.release("step-100")
    first.check_same(causes=["done"])
    return second.check_same(causes=["failed", "done"])

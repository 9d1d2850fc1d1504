"""A stand-in for srun in the local rehearsal: starts the tasks of one step on this workstation.

Each task gets the variables of a real step, with the hosts of SLURM_JOB_NODELIST. Exit codes,
forwarded signals and messages about failed tasks follow Slurm 22.05, as seen: the highest code
wins, USR1 and USR2 go to every task, and TERM to srun ends the tasks, and srun exits with 0.
"""

import argparse
import itertools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from clusterddp import files, polling
from clusterddp.processes.group import TaskGroup
from clusterddp.processes.signals import die_with_parent, set_subreaper
from clusterddp.processes.table import children
from clusterddp.ranks.variables import REHEARSAL_VARIABLE, VISIBLE_GPUS
from clusterddp.slurm.forms import expand_nodelist

KILL_WAIT_SECONDS = 30
"""Time between TERM and KILL: Slurm's default KillWait."""
CANCELLED = "cancelled"
"""File in the directory of the steps: no further step may start."""


def main() -> None:
    """Start the tasks, wait for them, and exit as srun does."""
    os.setsid()  # srun gets no signal sent to the batch script and its children
    die_with_parent(os.getppid(), signal.SIGTERM)  # but it ends with them: TERM ends the tasks
    options = parse(sys.argv[1:])
    steps = Path(os.environ[REHEARSAL_VARIABLE])
    if (steps / CANCELLED).exists():
        _say("srun: error: Unable to create step: the job is being cancelled")
        sys.exit(1)
    step_id = _next_step(steps)
    tasks = [task_environment(os.environ, options, rank, step_id) for rank in range(options.ntasks)]
    set_subreaper()  # for processes that the tasks leave
    code = run_step(options, tasks, steps / str(step_id))
    _end_what_is_left()
    sys.exit(code)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse srun's arguments; unsupported ones are reported and ignored."""
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    for flags in ("-N --nodes", "-n --ntasks", "--ntasks-per-node", "-c --cpus-per-task"):
        parser.add_argument(*flags.split(), type=int)
    parser.add_argument("-o", "--output")
    parser.add_argument("--open-mode", choices=["append", "truncate"], default="truncate")
    parser.add_argument("-K", "--kill-on-bad-exit", nargs="?", const="1", default="0")
    parser.add_argument("-l", "--label", action="store_true")
    parser.add_argument("-u", "--unbuffered", action="store_true")
    parser.add_argument("--export", default="ALL")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    cut = [*argv, "--"].index("--")
    options, unknown = parser.parse_known_args(argv[:cut])
    options.command = [*options.command, *argv[cut + 1 :]]
    if unknown:
        _say(f"srun (rehearsal): ignoring {' '.join(unknown)}")
    if not options.command:
        parser.error("No command given to execute.")
    options.nodes = options.nodes or int(os.environ["SLURM_JOB_NUM_NODES"])
    options.ntasks = options.ntasks or int(os.environ["SLURM_NTASKS"])
    return options


def task_environment(
    job: Mapping[str, str], options: argparse.Namespace, rank: int, step_id: int
) -> dict[str, str]:
    """Return the variables of one task, as in a real step: tasks in blocks, node by node."""
    hosts = expand_nodelist(job["SLURM_JOB_NODELIST"])[: options.nodes]
    each, rest = divmod(options.ntasks, len(hosts))
    counts = [each + (node < rest) for node in range(len(hosts))]
    node = next(n for n in range(len(hosts)) if rank < sum(counts[: n + 1]))
    local_rank = rank - sum(counts[:node])
    ranks = range(sum(counts[:node]), sum(counts[: node + 1]))
    nodelist = hosts[0] if len(hosts) == 1 else f"127.0.0.[1-{len(hosts)}]"
    of_task = {
        "SLURMD_NODENAME": hosts[node],
        "SLURM_DISTRIBUTION": "block",
        "SLURM_GTIDS": ",".join(map(str, ranks)),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_LOCALID": local_rank,
        "SLURM_NNODES SLURM_STEP_NUM_NODES": len(hosts),
        "SLURM_NODEID": node,
        "SLURM_NPROCS SLURM_NTASKS SLURM_STEP_NUM_TASKS": options.ntasks,
        "SLURM_PROCID": rank,
        "SLURM_STEPID SLURM_STEP_ID": step_id,
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE": _compressed(counts),
    }
    environ = {**job, **variables(of_task)}
    if options.ntasks_per_node:
        environ["SLURM_NTASKS_PER_NODE"] = str(options.ntasks_per_node)
    if options.cpus_per_task:
        environ["SLURM_CPUS_PER_TASK"] = str(options.cpus_per_task)
    gpus = [int(n) for n in job.get("SLURM_JOB_GPUS", "").split(",") if n]
    if gpus:
        # The hosts are one workstation, so each gets its own share of the workstation's GPUs. With
        # too few, hosts share them, and CUDA accepts no GPU twice in the list.
        numbers = ",".join(map(str, range(len(hosts) * len(gpus))))  # if setup lines unset it
        names, first = job.get(VISIBLE_GPUS, numbers).split(","), node * len(gpus)
        per_task = int(job.get("SLURM_GPUS_PER_TASK", "0"))
        given = range(local_rank * per_task, (local_rank + 1) * per_task) if per_task else gpus
        shown = dict.fromkeys(names[(first + gpu) % len(names)] for gpu in given)
        environ[VISIBLE_GPUS] = ",".join(shown)
        environ["SLURM_STEP_GPUS"] = ",".join(map(str, given))
        environ["SLURM_GPUS_ON_NODE"] = str(len(gpus))
        if per_task:
            environ["SLURMD_TRES_BIND"] = f"gpu:per_task:{per_task}"
    return environ


def variables(values: Mapping[str, object]) -> dict[str, str]:
    """Return the variables of an environment from keys that name one or more of them."""
    return {name: str(value) for names, value in values.items() for name in names.split()}


def run_step(options: argparse.Namespace, tasks: Sequence[Mapping[str, str]], note: Path) -> int:
    """Start the tasks, record their process ids and wait for them. Return srun's exit code."""
    terminated = False

    def report(rank: int, status: int) -> None:
        if status and not terminated:
            words = signal.strsignal(-status) if status < 0 else f"Exited with exit code {status}"
            _say(f"srun: error: {tasks[rank]['SLURMD_NODENAME']}: task {rank}: {words}")

    with TaskGroup(
        kill_on_bad_exit=options.kill_on_bad_exit != "0",
        kill_wait_seconds=KILL_WAIT_SECONDS,
        on_exit=report,
    ) as group:

        def terminate(*_: object) -> None:
            nonlocal terminated
            terminated = True
            group.signal_all(signal.SIGKILL)

        # Held back until every task has started, so that none misses a signal.
        held = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
        signal.pthread_sigmask(signal.SIG_BLOCK, held)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda received, _: group.signal_all(received))
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGINT, lambda *_: _say("srun: interrupt"))
        for environ in tasks:
            try:
                group.start(options.command, environ, _output(options, environ))
            except OSError as error:
                _say(f"slurmstepd: error: execve(): {options.command[0]}: {error.strerror}")
                return 2  # like slurmstepd: the errno of a missing file
        note.write_text(" ".join(map(str, group.pids)))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
        codes = [status if status >= 0 else 128 - status for status in group.wait()]
    note.unlink()
    return 0 if terminated else max(codes)


def _end_what_is_left() -> None:
    """Kill processes that the tasks left in separate sessions, as slurmstepd does.

    For example, the ranks of a torchrun agent that was ended while it started them.
    """
    with suppress(OSError):  # there are no more
        for _ in polling.poll(every=polling.CHILD_POLL_SECONDS):
            for pid in children(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def _output(options: argparse.Namespace, task: Mapping[str, str]) -> Path | None:
    if not options.output:
        return None
    name = options.output.replace("%t", task["SLURM_PROCID"]).replace("%n", task["SLURM_NODEID"])
    if options.open_mode != "append":
        Path(name).unlink(missing_ok=True)
    return Path(name)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 -- like srun itself


def signal_session(leader: int, number: int) -> None:
    """Signal every process of a task; its leader's id is also that of its process group."""
    with suppress(ProcessLookupError, PermissionError):  # it has ended
        os.killpg(leader, number)


def _next_step(steps: Path) -> int:
    """Take the next step number, from 0, by creating a file in the directory."""
    return next(n for n in itertools.count() if files.create(steps / f"{n}.taken"))


def _compressed(counts: Sequence[int]) -> str:
    """Return tasks per node in Slurm's form: `4(x2),3`."""
    parts = [(count, len([*equal])) for count, equal in itertools.groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in parts)


if __name__ == "__main__":
    main()

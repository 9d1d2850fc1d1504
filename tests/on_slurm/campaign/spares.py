"""Faults of hosts in jobs that have a spare: what is at fault is left out, and nothing else.

A `Kind` is one way to hit a host, a `Blow` one of these at a step. A row deals one or more to a
run; `--random` deals as many as one likes, one run after another, on one cluster and below one
output root. SlurmdTimeout is at its default throughout.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from clusterddp.formatting import table
from clusterddp.run.outcome import read_outcomes_of
from clusterddp.run.run_dir import newest_checkpoint
from clusterddp.slurm.forms import expand_nodelist
from tests.on_slurm import host_faults
from tests.on_slurm.campaign.fault import ENDS, SAME, Fault, fault
from tests.on_slurm.campaign.run import Differs, Run, Struck, Trial, slurm
from tests.on_slurm.host_faults import Undo

CONF = {"SlurmdTimeout": "300"}
HOSTS = 4
OPTIONS = [
    *("--spare-nodes", "1", "--preflight", "quick"),
    *("--retries", "30", "--max-requeues", "60"),
]
GOES_ON, NOBODY_RECORDED = "", "-"
_PATIENCE = 240.0
WITHIN_SECONDS = 60.0
"""From the fault to the next attempt in the job, where there is a spare."""
_LEFT_TO_LEAVE = 45.0
"""Seconds in which the last process of a run has left the hosts."""


@dataclass(frozen=True)
class Kind:
    """One way to hit a host, and what it has to lead to."""

    name: str
    deal: Callable[[Run, str], Undo]
    """Strikes a host while the ranks wait at a step, and returns what repairs it."""
    cause: str = GOES_ON
    """Cause of the attempt's end."""
    by: str = ""
    """What blames the host; empty where nobody may be blamed."""
    at_start: bool = False
    """Dealt before the run is submitted, to be found by the checks ahead of the tasks."""
    on: str = "others"
    """Which host: `others` of the step than the script's own, `any` of it, `batch`, `spare`."""
    lasts: float = 0.0
    """Seconds until it is repaired where the attempt goes on."""


@dataclass(frozen=True)
class Blow:
    """One fault to be dealt."""

    kind: Kind
    step: int = 0
    """Step after which it strikes; 0 of one that is there from the start on."""
    pick: float = 0.0
    """Which of the hosts that it can strike, from 0 to below 1."""


# -- kinds ---------------------------------------------------------------------------------------


def nothing() -> None:
    """Repairs what needs no repair."""


def kill_host(run: Run, host: str) -> Undo:
    run.trial.cluster.kill_host(host)
    return partial(run.trial.cluster.start_slurmd, host)


def reboot(run: Run, host: str) -> Undo:
    """Lost and back at once."""
    kill_host(run, host)()
    return nothing


def _take_down(run: Run, host: str) -> Undo:
    """Lost, seen by an operator, who sets it DOWN, and back: Slurm requeues its script at once.

    A slurmd that registers anew without it does not, as long as the kernel was up all the time.
    """
    run.trial.cluster.kill_host(host)
    slurm(run.trial, "scontrol", "update", f"NodeName={host}", "State=DOWN", "Reason=lost")
    run.trial.cluster.start_slurmd(host)
    return nothing


def _cut(run: Run, host: str) -> Undo:
    run.trial.cluster.set_link(host, up=False)
    return partial(run.trial.cluster.set_link, host, up=True)


def _restart_slurmd(run: Run, host: str) -> Undo:
    run.trial.cluster.kill_slurmd(host)
    run.trial.cluster.start_slurmd(host)
    return nothing


def _restart_slurmctld(run: Run, _: str) -> Undo:
    run.trial.cluster.restart_slurmctld()
    return nothing


def _of_cluster(put: Callable[..., Undo]) -> Callable[[Run, str], Undo]:
    return lambda run, host: put(run.trial.cluster, host)


def _clock_ahead(run: Run, host: str) -> Undo:
    mark = run.trial.holds / f"clock-ahead.{host}"
    mark.write_text("60")
    return mark.unlink


def _to_rank(number: int) -> Callable[[Run, str], Undo]:
    def deal(run: Run, host: str) -> Undo:
        run.gone(run.kill(rank_on(run, host), number))
        return nothing

    return deal


def _stop_rank(run: Run, host: str) -> Undo:
    pid = run.kill(rank_on(run, host), signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def _raise(run: Run, host: str) -> Undo:
    """The program raises at the step at which its ranks wait."""
    [held] = run.trial.holds.glob("want-step-*")
    mark = f"fail-{held.name.removeprefix('want-')}.{rank_on(run, host)}"
    (run.trial.holds / mark).write_text("once")
    return nothing


def _signal_script(run: Run, _: str) -> Undo:
    def had() -> int:
        return (run.log + run.rank_logs).count("got SIGUSR1")

    before = had()
    slurm(run.trial, "scancel", "--batch", "--signal=USR1", run.job_id)
    run.wait(lambda: had() > before, "the signal")
    return nothing


def _requeue(run: Run, _: str) -> Undo:
    slurm(run.trial, "scontrol", "requeue", run.job_id)
    return nothing


def rank_on(run: Run, host: str) -> int:
    """The rank that trains on a host."""
    ranks = read_outcomes_of(run.attempts[-1].outcomes, host)
    if not ranks:
        raise run.differs(f"no rank is on {host}")
    return ranks[0].rank


_LOST, _CHECKED = "node lost", "preflight"
KINDS = {
    kind.name: kind
    for kind in [
        Kind("node-killed", kill_host, _LOST, "lost"),
        Kind("node-frozen", _of_cluster(host_faults.frozen), _LOST, "lost"),
        Kind("sigbus-of-a-rank", _to_rank(signal.SIGBUS), "failed", "hardware", on="any"),
        Kind("slow-link", _of_cluster(host_faults.slow_link), _CHECKED, "preflight", True),
        Kind("blocked-port", _of_cluster(host_faults.blocked_port), _CHECKED, "preflight", True),
        Kind("full-local-disk", _of_cluster(host_faults.full_disk), _CHECKED, "preflight", True),
        Kind("skewed-clock", _clock_ahead, _CHECKED, "preflight", True),
        Kind("busy-core", _of_cluster(host_faults.busy_core), _CHECKED, "preflight", True),
        Kind("program-error", _raise, "failed", on="any"),
        Kind("rank-killed", _to_rank(signal.SIGKILL), "failed", on="any"),
        Kind("signal-to-the-script", _signal_script, "signal", on="batch"),
        Kind("requeue-from-outside", _requeue, "requeued", on="batch"),
        Kind("batch-host-taken-down", _take_down, NOBODY_RECORDED, on="batch"),
        Kind("idle-spare-rebooted", reboot, on="spare"),
        Kind("network-cut-for-seconds", _cut, lasts=5),
        Kind("rank-stopped-for-seconds", _stop_rank, on="any", lasts=5),
        Kind("slurmd-restarted", _restart_slurmd, on="any"),
        Kind("slurmctld-restarted", _restart_slurmctld, on="batch"),
    ]
}


# -- a run that is struck ------------------------------------------------------------------------

HEADER = ("FAULT", "HOST", "STEP", "BLAMED", "MET AGAIN", "FROM STEP", "IN")


def endure(
    trial: Trial, blows: Sequence[Blow], *, config: str, name: str = "run"
) -> list[tuple[str, ...]]:
    """Deals blows to a run and judges it from outside after each and at its end.

    Returns a line of the table for each. Raises Differs.
    """
    for folder in ("tmp", "jobs"):
        (trial.folder / folder).mkdir(exist_ok=True)
    here = ["--env", f"TMPDIR={trial.folder}/tmp"]
    later = [blow for blow in blows if blow.step]
    if later:
        trial.want(f"step-{later[0].step}")
    lines = []
    at_start = [(blow, *_deal_at_start(trial, blow, config)) for blow in blows if not blow.step]
    run = trial.start(*OPTIONS, *here, config=config, name=name)
    for blow, host, repair in at_start:
        began = run.wait(lambda: run.events("started"), "the first attempt", _PATIENCE)[0]["time"]
        struck = Struck(0, began, 1)
        lines.append(_judge(run, blow, host, repair, struck, has_spare=True))
    for blow, following in zip_longest(later, later[1:]):
        moment = f"step-{blow.step}"
        trial.held(moment, run.world_size, _PATIENCE)
        saved = newest_checkpoint(run.dir.checkpoints)
        struck = replace(run.struck(), step=saved[0] if saved else 0)
        has_spare = bool(run.events("started")[-1].get("spares"))
        host = _host(run, blow)
        repair = blow.kind.deal(run, host)
        if following:
            trial.want(f"step-{following.step}")
        trial.release(moment)
        lines.append(_judge(run, blow, host, repair, struck, has_spare))
    _judge_end(run, blows)
    return lines


def _deal_at_start(trial: Trial, blow: Blow, config: str) -> tuple[str, Undo]:
    """Strikes one of the hosts that the step will have, but for the script's own."""
    run = Run(trial, "", config, 0)
    hosts = trial.cluster.hosts[1 : run.world_size]
    host = hosts[int(blow.pick * len(hosts))]
    return host, blow.kind.deal(run, host)


def _host(run: Run, blow: Blow) -> str:
    started = run.events("started")[-1]
    shown = slurm(run.trial, "scontrol", "show", "job", "-o", run.job_id).stdout
    batch = shown.partition(" BatchHost=")[2].partition(" ")[0]
    step = expand_nodelist(started["nodelist"])
    hosts = {
        "others": [host for host in step if host != batch],
        "any": step,
        "batch": [batch],
        "spare": started.get("spares") or [],
    }[blow.kind.on]
    if not hosts:
        raise run.differs(f"there is no host for {blow.kind.name}")
    return hosts[int(blow.pick * len(hosts))]


def _judge(
    run: Run, blow: Blow, host: str, repair: Undo, struck: Struck, has_spare: bool
) -> tuple[str, ...]:
    """What became of a blow; repairs the host and takes it off the list.

    struck: with the step of the newest checkpoint.
    """
    kind, trial = blow.kind, run.trial
    took, step, where = "", "", "goes on"
    if kind.cause:
        if kind.by == "lost" and not has_spare:
            # Slurm holds the job back until a lost node is up again, or SlurmdTimeout is over.
            run.wait(
                lambda: struck.attempt in [each["attempt"] for each in run.events("requeued")],
                "the job in the queue",
                _PATIENCE,
            )
            repair()
            repair = nothing
        run.wait_attempt(struck.attempt + 1, _PATIENCE)
        took = f"{time.time() - struck.time:.0f} s"
        step = str(run.attempts[struck.attempt].read_record().step or 0)
        if int(step) < struck.step:
            raise run.differs(f"it resumed from step {step}, and had saved step {struck.step}")
        resumed = {event["attempt"]: event["time"] for event in run.events("resumed_in_job")}
        when = resumed.get(struck.attempt)
        where = "the job" if when else "the queue"
        if kind.by and has_spare and not (when and when - struck.time < WITHIN_SECONDS):
            raise run.differs(f"{kind.name} on {host}: not resumed in its job within a minute")
    else:
        trial.stopping.wait(kind.lasts)
    expected = {host: kind.by} if kind.by else {}
    if (marked_bad := blamed_hosts(trial)) != expected:
        raise run.differs(f"{kind.name} on {host}: blamed is {marked_bad}, expected {expected}")
    repair()
    if marked_bad and (done := trial.clusterddp("bad-nodes", "clear", host)).returncode:
        raise run.differs(f"bad-nodes clear {host}: exit {done.returncode}: {done.stderr}")
    return kind.name, host, str(blow.step or "start"), kind.by or "-", took, step, where


def blamed_hosts(trial: Trial) -> dict[str, str]:
    """Hosts that the runs of this output root leave out, and what blames them."""
    done = trial.clusterddp("bad-nodes", "--json")
    if done.returncode != 0:
        raise Differs(f"nodes: exit {done.returncode}: {done.stderr}")
    return {node["host"]: node["by"] for node in json.loads(done.stdout)}


def _judge_end(run: Run, blows: Sequence[Blow]) -> str:
    """The weights, the records, Slurm's word, and that nothing is left; returns the seen."""
    ends = [blow.kind.cause for blow in blows if blow.kind.cause not in (GOES_ON, NOBODY_RECORDED)]
    seen = run.check_same(causes=[*ends, "done"], seconds=_PATIENCE)
    if marked_bad := blamed_hosts(run.trial):
        raise run.differs(f"{marked_bad} blamed at the end")
    again = sum(bool(blow.kind.cause) for blow in blows) - len(run.events("resumed_in_job"))
    judge_job(run, " JobState=COMPLETED ", " ExitCode=0:0", f" Restarts={again} ")
    judge_left_over(run)
    return seen


def judge_job(run: Run, *words: str) -> None:
    shown = slurm(run.trial, "scontrol", "show", "job", "-o", run.job_id).stdout
    if missing := [word for word in words if word not in shown]:
        raise run.differs(f"{missing} expected of {shown}")


def judge_left_over(run: Run) -> None:
    """No process on the hosts, no file but the run's own."""
    cluster, folder = run.trial.cluster, run.trial.folder
    left: dict[str, list[str]] = {}

    def all_gone() -> bool:
        for host in cluster.hosts:
            lines = cluster.processes(host).values()
            left[host] = [line for line in lines if line and not line.startswith(("slurmd", "cat"))]
        return not any(left.values())

    try:
        run.trial.wait(all_gone, "the hosts are empty", _LEFT_TO_LEAVE)
    except Differs:
        raise run.differs(f"processes are left on the hosts: {left}") from None
    own = {"jobs", "holds", "tmp", "__pycache__"}
    files = [path for path in folder.iterdir() if path.name not in own and path.suffix != ".py"]
    # An empty one of torch's own apart.
    files += [path for path in (folder / "tmp").iterdir() if not path.name.startswith("torch")]
    files += run.dir.path.rglob(".*.*")
    if files:
        raise run.differs(f"files are left: {[str(path) for path in files]}")


# -- rows ----------------------------------------------------------------------------------------


def _register(name: str, *blows: Blow, config: str) -> None:
    def strike(trial: Trial) -> str:
        words = [
            f"{line[0]} on {line[1]}: blamed {line[3]}, {line[4]} in {line[6]}"
            for line in endure(trial, blows, config=config)
        ]
        return f"{'; '.join(words)}; same weights"

    strike.__module__ = __name__
    fault(name, conf=CONF, hosts=HOSTS, needs=(config,))(strike)


for _kind in KINDS.values():
    # Of two hosts, a slow or broken pair does not tell which of them it is.
    _register(
        f"spare-{_kind.name}",
        Blow(_kind, 0 if _kind.at_start else 60, 0.5),
        config="three" if _kind.at_start else "two",
    )
for _kind in (KINDS["node-killed"], KINDS["program-error"]):
    _register(f"loop-spare-{_kind.name}", Blow(_kind, 20), config="loop")


@fault("spare-program-error-at-every-start", ENDS, conf=CONF, hosts=HOSTS, needs=())
def program_error_at_every_start(trial: Trial) -> str:
    """It takes no spare, blames nobody, and ends when two starts fail at the same step."""
    (trial.holds / "fail-step-50.1").touch()
    run = trial.start(*OPTIONS, config="two")
    seen = run.check_failed("an error of the program at step-50", within=_PATIENCE, usable=40)
    if marked_bad := blamed_hosts(trial):
        raise run.differs(f"{marked_bad} blamed for an error of the program")
    if odd := [*run.events("resumed_in_job"), *run.events("nodes_excluded")]:
        raise run.differs(f"an error of the program led to {odd}")
    if [*run.causes] != ["failed", "failed"]:
        raise run.differs("it was not started again, once")
    judge_job(run, " JobState=FAILED ", " ExitCode=1:0 ")
    return f"{seen}; {len(run.causes)} attempts, nobody blamed"


@fault("spare-batch-host-lost-for-good", conf=CONF, hosts=HOSTS)
def batch_host_lost_for_good(trial: Trial) -> str:
    """The one loss that waits for SlurmdTimeout: Slurm requeues, and the run leaves it out."""
    run = trial.start(*OPTIONS, config="two")
    run.wait_step(60)
    struck, host = run.struck(), trial.cluster.hosts[0]
    trial.cluster.kill_host(host)
    run.wait_attempt(2, 300 + _PATIENCE)
    seen = run.check_same(struck, seconds=_PATIENCE)
    if (marked_bad := blamed_hosts(trial)) != {host: "lost"}:
        raise run.differs(f"blamed is {marked_bad}")
    if host in (hosts := run.attempts[-1].read_record().hosts):
        raise run.differs(f"it runs on {hosts}")
    return f"{seen}; on {' '.join(hosts)}"


# -- at random -----------------------------------------------------------------------------------


def draw(seed: int, count: int) -> list[tuple[str, list[Blow]]]:
    """Draws as many faults, dealt out to runs: each one's configuration and blows."""
    chance = random.Random(seed)
    runs: list[tuple[str, list[Blow]]] = []
    while count:
        blows: list[Blow] = []
        step = 0
        for first in (True, *[False] * (min(count, chance.randint(1, 3)) - 1)):
            has_spare = not any(blow.kind.by for blow in blows)
            kinds = [
                kind
                for kind in KINDS.values()
                if (first or not kind.at_start) and (has_spare or kind.on != "spare")
            ]
            kind = chance.choice(kinds)
            while kind.name == "busy-core":  # a busy machine has no core that stands apart
                kind = chance.choice(kinds)
            # Apart by more than the steps between two checkpoints: each attempt gains some.
            step += chance.randint(45, 70)
            blows.append(Blow(kind, 0 if kind.at_start else step, chance.random()))
        runs.append(("three" if blows[0].kind.at_start else chance.choice(["two", "three"]), blows))
        count -= len(blows)
    return runs


def at_random(seed: int, count: int) -> Fault:
    """A row of faults in a row."""

    def strike(trial: Trial) -> str:
        lines = []
        for number, (config, blows) in enumerate(draw(seed, count), 1):
            for line in endure(trial, blows, config=config, name=f"run-{number}"):
                lines.append((f"run-{number}", *line))
                print("  ".join(lines[-1]), flush=True)
        rows = table([("RUN", *HEADER), *lines])
        runs = len({line[0] for line in lines})
        return f"{len(lines)} faults in {runs} runs, same weights of each\n{rows}"

    return Fault(f"seed-{seed}", SAME, strike, "spares", CONF, HOSTS, ("two", "three"))

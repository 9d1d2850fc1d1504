"""Faults of runs that rarely save: they cost the steps since the latest snapshot in node memory.

Each strikes some steps after a snapshot. The next attempt begins at the newest snapshot that all
ranks had whole, or later, and not at the latest ordinary checkpoint.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp.run.run_dir import newest_checkpoint
from tests.on_slurm.campaign import ranks, stops
from tests.on_slurm.campaign.fault import SAME, UNHURRIED, Fault, fault
from tests.on_slurm.campaign.nodes import ON_BOTH, SOON
from tests.on_slurm.campaign.run import SCRIPTS, Run, Trial, slurm

PACE = {"two": 0.08, "four-buckets": 0.08, "loop": 0.25, "loop-fsdp": 0.25}
"""By configuration, so that a snapshot is taken each few steps."""
MARGIN = {"two": (10, 20), "four-buckets": (10, 20), "loop": (5, 10), "loop-fsdp": (5, 10)}
"""Steps from a snapshot to the strike, the least and the most."""
OPTIONS = ["--retries", "9", "--max-requeues", "9"]
RARELY = ["--save-every", "1000steps", "--snapshot-every", "1s"]
SPARE = ["--spare-nodes", "1", "--preflight", "quick"]
_FIRST_SAVE_SECONDS = 40.0
"""From an attempt's first step to its first ordinary checkpoint."""
_PATIENCE = 240.0


@dataclass(frozen=True)
class Blow:
    """One strike at a run whose ranks wait at a step."""

    kind: str
    pick: float = 0.5
    """Which rank and how many steps after a snapshot, from 0 to below 1."""


@dataclass
class Scene:
    """The moment at which a run is struck."""

    run: Run
    rank: int
    moment: str
    hosts: Sequence[str]
    undo: list[Callable[[], object]] = field(default_factory=list)
    """What is called when the next attempt is due."""

    @property
    def trial(self) -> Trial:
        return self.run.trial


# -- kinds ---------------------------------------------------------------------------------------


def _signalled(number: int) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        scene.run.gone(scene.run.kill(scene.rank, number))

    return strike


def _out_of_memory(scene: Scene) -> None:
    ranks.use_memory_up_beside(scene.run.task(scene.rank))


def _raises(scene: Scene) -> None:
    (scene.trial.holds / f"fail-{scene.moment}.{scene.rank}").write_text("once")


def _hangs(scene: Scene) -> None:
    """Stops a rank for good, in a run that ends what hangs."""
    pid = scene.run.kill(scene.rank, signal.SIGSTOP)
    scene.run.wait_said("is stopped (SIGSTOP)")
    scene.trial.release(scene.moment)
    scene.run.gone(pid)


def _two_killed(scene: Scene) -> None:
    pids = [scene.run.task(rank) for rank in (0, scene.run.world_size - 1)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        scene.run.gone(pid)


def _killed_at(moment: str) -> Callable[[Scene], None]:
    """Return a strike that kills a rank within a snapshot, with the others beyond it."""

    def strike(scene: Scene) -> None:
        scene.trial.want(f"{moment}.{scene.rank}")
        scene.trial.release(scene.moment)
        scene.trial.held(moment, 1)
        scene.run.gone(scene.run.kill(scene.rank))
        scene.trial.release(f"{moment}.{scene.rank}")
        scene.trial.release(moment)

    return strike


def _killed_while_saving(scene: Scene) -> None:
    """Kills a rank while rank 0 writes a checkpoint that a person has not waited for."""
    scene.trial.want("save")
    scene.trial.release(scene.moment)
    scene.trial.held("save", 1)
    scene.run.gone(scene.run.kill(scene.rank))
    scene.trial.release("save")


def _writer_killed(scene: Scene) -> None:
    """Kills the parent that saves the snapshot; the other node's saves it."""
    scene.trial.want("flush")
    scene.run.kill(scene.rank)
    scene.trial.held("flush", 1)
    [held] = scene.trial.holds.glob("held-flush.*")
    _, rank, inside = held.name.rsplit(".", 2)
    found = [
        pid
        for host in scene.hosts
        for pid in scene.run.processes(host, "")
        if _inside(pid) == int(inside) and _variable(pid, "SLURM_PROCID") == rank
    ]
    if len(found) != 1:
        raise scene.run.differs(f"the writer is one of {found}")
    os.kill(found[0], signal.SIGKILL)
    scene.run.gone(found[0])
    held.unlink()
    scene.trial.release("flush")


def _inside(pid: int) -> int:
    """Return a process's id on its host."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def _variable(pid: int, name: str) -> str:
    pairs = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return next((pair.partition("=")[2] for pair in pairs if pair.startswith(f"{name}=")), "")


def _node_lost(scene: Scene) -> None:
    """Loses a node, which comes back once the job is in the queue, unless a spare took over."""
    host, cluster = scene.hosts[scene.rank * len(scene.hosts) // scene.run.world_size], None
    cluster = scene.trial.cluster
    cluster.kill_host(host)
    if len(cluster.hosts) == 2:
        scene.run.wait(lambda: "PENDING" in " ".join(scene.run.queued()), "the job in the queue")
        cluster.start_slurmd(host)


def _cancelled(scene: Scene) -> None:
    slurm(scene.trial, "scancel", scene.run.job_id)
    scene.undo.append(lambda: _resume(scene.run))


def _cancelled_deaf(scene: Scene) -> None:
    """The ranks do not look at the request until they are killed."""
    _cancelled(scene)
    scene.run.wait_over(_PATIENCE)


def _resume(run: Run) -> None:
    run.wait_over(_PATIENCE)
    done = run.trial.clusterddp("resume", run.name)
    if done.returncode:
        raise run.differs(f"resume: exit {done.returncode}: {done.stderr}")


def _preempted(scene: Scene) -> None:
    wrap = ["--parsable", "--wrap", "true", "--output", "/dev/null"]
    high = slurm(scene.trial, "sbatch", "-p", "high", "-N2", "--exclusive", *wrap).stdout.strip()
    what = "the job that preempts"
    scene.run.wait(lambda: scene.trial.cluster.job_state(high) == "COMPLETED", what)


KINDS: dict[str, Callable[[Scene], None]] = {
    "killed": _signalled(signal.SIGKILL),
    "segmentation-fault": _signalled(signal.SIGSEGV),
    "aborted": _signalled(signal.SIGABRT),
    "out-of-memory": _out_of_memory,
    "exception": _raises,
    "hung": _hangs,
    "two-killed": _two_killed,
    "killed-in-a-copy": _killed_at("copy"),
    "killed-after-its-copy": _killed_at("copied"),
    "killed-while-saving": _killed_while_saving,
    "writer-killed": _writer_killed,
    "node-lost": _node_lost,
    "cancelled": _cancelled,
    "cancelled-deaf": _cancelled_deaf,
    "preempted-without-grace": _preempted,
}
OF_KIND = {
    "hung": ["--on-hang", "end", "--hang-timeout", "15s"],
    "killed-while-saving": ["--save-every", "2s"],
}
"""Options of a run that is struck so. Four rows at once import torch for more than 4 s."""


# -- a run that is struck ------------------------------------------------------------------------


def endure(
    trial: Trial, blows: Sequence[Blow], *options: str, config: str = "two", name: str = "run"
) -> tuple[str, list[tuple[str, ...]]]:
    """Strike a run, and judge where it goes on; returns the end in words and a line per blow."""
    run: Run | None = None
    lines = []
    more = [word for each in blows for word in OF_KIND.get(each.kind, [])]
    for number, blow in enumerate(blows, 1):
        if run is None:
            rarely = [] if config in SCRIPTS else RARELY
            (trial.holds / "rare-saves").touch()
            run = trial.start(
                *OPTIONS, *rarely, *more, *options, config=config, pace=PACE[config], name=name
            )
        run.wait_attempt(number, _PATIENCE)
        lines.append((blow.kind, config, *_strike(run, blow, number, saves="--save-every" in more)))
    assert run
    seen = run.check_same(seconds=_PATIENCE)
    _judge_left_over(run)
    return seen, lines


def _strike(run: Run, blow: Blow, number: int, *, saves: bool) -> tuple[str, ...]:
    """Strike after a snapshot; returns the steps at the strike, the resume, and their cost.

    saves: whether the run saves often.
    """
    trial, start = run.trial, run.attempts[-1].read_record().step or 0
    began = time.time()
    taken = run.wait(lambda: (t := newest_snapshot(run))[0] > start and t, "a snapshot", _PATIENCE)
    least, most = MARGIN[run.config]
    step = taken[0] + least + int(blow.pick * (most - least))
    trial.want(moment := f"step-{step}")
    trial.held(moment, run.world_size)
    at, struck = time.time(), run.struck()
    saved = newest_checkpoint(run.dir.checkpoints)
    is_early = at - began < _FIRST_SAVE_SECONDS - 10
    if saved and saved[0] > start and is_early and not saves:
        raise run.differs(f"step {saved[0]} was saved, with nothing wrong")
    taken = newest_snapshot(run)
    hosts = run.attempts[-1].read_record().hosts
    scene = Scene(run, int(blow.pick * run.world_size), moment, hosts)
    KINDS[blow.kind](scene)
    reached = max(step - 1, newest_snapshot(run, of_any=True)[0])
    trial.release(moment)
    for call in scene.undo:
        call()
    run.wait_attempt(number + 1, _PATIENCE)
    resumed = run.attempts[number].read_record().step or 0
    age = at - taken[1]
    if resumed < taken[0]:
        raise run.differs(f"{blow.kind}: from step {resumed}, but step {taken[0]} was in memory")
    cost = f"{max(0, reached - resumed)} steps"
    return str(struck.attempt), str(step), str(taken[0]), f"{age:.1f} s", str(resumed), cost


def newest_snapshot(run: Run, *, of_any: bool = False) -> tuple[int, float]:
    """Return the step of the newest snapshot that all ranks have whole, and when; else zeros.

    of_any: that any rank has, once all have one.
    """
    found = []
    for rank in range(run.world_size):
        try:
            text = (run.trial.holds / f"took.{rank}").read_text()
        except FileNotFoundError:
            return 0, 0.0
        *lines, _ = text.split("\n")  # behind the last newline is what is being written
        if not lines:
            return 0, 0.0
        step, when = lines[-1].split()
        found.append((int(step), float(when)))
    return max(found) if of_any else min(found)


def _judge_left_over(run: Run) -> None:
    """No process of the run, no memory with a name, and no file but checkpoints."""
    hosts = run.trial.cluster.hosts
    gone = "the end of its processes"
    run.wait(lambda: not any(run.processes(host, "") for host in hosts), gone, 60)
    tokens = [path.suffix[1:] for path in run.trial.holds.glob("memory.*")]
    named = [path for token in tokens for path in Path("/dev/shm").glob(f"*{token}")]
    if left := [str(path) for path in (*named, *run.dir.path.rglob(".*.*"))]:
        raise run.differs(f"files are left: {left}")


# -- rows ----------------------------------------------------------------------------------------

HEADER = ("FAULT", "CONFIG", "ATTEMPT", "STEP", "IN MEMORY", "AGE", "RESUMED", "LOST")


def _row(kinds: Sequence[str], config: str, *options: str, pick: float = 0.5) -> Callable[..., str]:
    def strike(trial: Trial) -> str:
        seen, lines = endure(trial, [Blow(k, pick) for k in kinds], *options, config=config)
        told = "; ".join(
            f"{line[0]} at step {line[3]}, {line[5]} after a snapshot, from {line[6]}: {line[7]}"
            for line in lines
        )
        return f"{told}; {seen}"

    strike.__module__ = __name__
    return strike


_ONE_NODE = ("--nodes", "1", "--tasks-per-node", "2")
_PREEMPT = {"PartitionName=main": stops.WITHOUT_GRACE}
_LOST = {"SlurmdTimeout": "300"}  # its default: a spare does not wait for Slurm to see the loss
_SHARED = (
    "killed", "segmentation-fault", "out-of-memory", "exception", "two-killed", "killed-in-a-copy",
    "killed-after-its-copy", "killed-while-saving", "writer-killed", "cancelled", "cancelled-deaf",
)  # fmt: skip
for _kind in _SHARED:
    fault(f"memory-{_kind}", quick=_kind == "killed")(_row([_kind], "two"))
fault("memory-hung", conf=UNHURRIED, quick=True)(_row(["hung"], "two"))
fault("memory-killed-first-rank")(_row(["killed"], "two", pick=0))
fault("memory-killed-in-the-first-ranks-copy")(_row(["killed-in-a-copy"], "two", pick=0))
# The ranks of one node share a snapshot: the one before it is whole.
fault("memory-torn-copy")(_row(["killed-in-a-copy"], "two", *_ONE_NODE))
fault("memory-killed-one-node")(_row(["killed"], "two", *_ONE_NODE))
fault("memory-saver-killed")(_row(["killed-while-saving"], "two", pick=0))
fault("memory-killed-twice")(_row(["killed", "exception"], "two"))
fault("memory-killed-four-buckets", needs=("four-buckets",))(_row(["killed"], "four-buckets"))
fault("memory-killed-in-a-copy-four-buckets", needs=("four-buckets",))(
    _row(["killed-in-a-copy"], "four-buckets")
)
fault("memory-preempted-without-grace", conf=_PREEMPT)(_row(["preempted-without-grace"], "two"))
fault("memory-node-lost", conf=SOON)(_row(["node-lost"], "two", *ON_BOTH))
fault("memory-first-node-lost", conf=SOON)(_row(["node-lost"], "two", *ON_BOTH, pick=0))
fault("memory-node-lost-spare", conf=_LOST, hosts=3)(_row(["node-lost"], "two", *SPARE))
fault("memory-killed-spare", conf=_LOST, hosts=3)(_row(["killed"], "two", *SPARE))
fault("memory-loop-killed", needs=("loop",))(_row(["killed"], "loop"))
fault("memory-loop-exception", needs=("loop",))(_row(["exception"], "loop"))
fault("memory-loop-writer-killed", needs=("loop",))(_row(["writer-killed"], "loop"))
fault("memory-loop-node-lost", conf=SOON, needs=("loop",))(_row(["node-lost"], "loop", *ON_BOTH))
fault("memory-loop-node-lost-spare", conf=_LOST, hosts=3, needs=("loop",))(
    _row(["node-lost"], "loop", *SPARE)
)
# Each of the two hosts has a copy of the other's shards.
_FSDP = {"needs": ("loop-fsdp",)}
fault("memory-fsdp-killed", **_FSDP)(_row(["killed"], "loop-fsdp"))
fault("memory-fsdp-writer-killed", **_FSDP)(_row(["writer-killed"], "loop-fsdp"))
fault("memory-fsdp-cancelled", **_FSDP)(_row(["cancelled"], "loop-fsdp"))
fault("memory-fsdp-node-lost", conf=SOON | UNHURRIED, **_FSDP)(
    _row(["node-lost"], "loop-fsdp", *ON_BOTH)
)
fault("memory-fsdp-first-node-lost", conf=SOON | UNHURRIED, **_FSDP)(
    _row(["node-lost"], "loop-fsdp", *ON_BOTH, pick=0)
)
fault("memory-fsdp-node-lost-spare", conf=_LOST, hosts=3, **_FSDP)(
    _row(["node-lost"], "loop-fsdp", *SPARE)
)


# -- at random -----------------------------------------------------------------------------------


def at_random(seed: int, count: int) -> list[Fault]:
    """Draw as many strikes, one or two per run; a run is a row."""
    chance = random.Random(seed)
    rows: list[Fault] = []
    while count > 0:
        kinds = [kind for kind in KINDS if not kind.startswith("preempted")]
        config = chance.choice(["two", "two", "four-buckets", "loop"])
        if config == "loop":  # it saves by the clock, and is over before many snapshots
            kinds = [k for k in kinds if "copy" not in k and "saving" not in k]
        drawn = chance.choices(kinds, k=1 if config == "loop" else min(count, chance.randint(1, 2)))
        if "node-lost" in drawn:  # a resume refuses a lost node that --nodelist asks for
            drawn = ["node-lost"]
        blows = [Blow(kind, chance.random()) for kind in drawn]
        own = SOON | UNHURRIED if "node-lost" in drawn else UNHURRIED if "hung" in drawn else None
        more = ON_BOTH if "node-lost" in drawn else []
        name = f"seed-{seed}-{len(rows) + 1}-{config}"
        rows.append(_drawn(name, blows, more, config, own))
        count -= len(blows)
    return rows


def _drawn(
    name: str, blows: Sequence[Blow], options: Sequence[str], config: str,
    conf: Mapping[str, str | None] | None,
) -> Fault:  # fmt: skip
    def strike(trial: Trial) -> str:
        seen, lines = endure(trial, blows, *options, config=config)
        return f"{'; '.join(' '.join(line) for line in lines)}; {seen}"

    return Fault(name, SAME, strike, "memory", conf, 2, (config,))

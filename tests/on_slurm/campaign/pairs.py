"""Two losses in one run that has two spares: the second at once, seconds later, or in the meeting.

Each unordered pair of the forms of loss is a row. What follows is the next attempt in the job where
enough good nodes are left, else the queue, and never a wait without end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

from clusterddp.slurm.forms import expand_nodelist
from tests.on_slurm import host_faults
from tests.on_slurm.campaign import spares
from tests.on_slurm.campaign.fault import fault
from tests.on_slurm.campaign.run import SCRIPTS, Run, Trial, slurm
from tests.on_slurm.host_faults import Undo

_CONF = {"SlurmdTimeout": "300"}
_CONF_OF_QUEUE = {"SlurmdTimeout": "60"}
"""A job in the queue waits for Slurm to see that a node is lost, which was not given back."""
HOSTS = 7
OPTIONS = ["--spare-nodes", "2", "--preflight", "none", "--max-requeues", "20"]
AT_ONCE, SOON, LATER, MEETING = "at once", "after 1 s", "after 10 s", "while they meet"
MOMENTS = (AT_ONCE, SOON, LATER, MEETING)
_SECONDS = {SOON: 1.0, LATER: 10.0}
_PATIENCE = 300.0
_CUT_SECONDS = 50.0
_LEFT_SECONDS = 15.0
"""For what a host still runs to end once it is back on the network."""
OTHERS, BATCH, SPARE = "others", "batch", "spare"


@dataclass(frozen=True)
class Form:
    """One way to lose a node, or to be told to save and leave."""

    name: str
    on: str
    """Which host: `others` of the step than the script's own, `batch`, `spare`."""
    deal: Callable[[Run, str], Undo]
    """Strikes, and returns what is to be done before the run's end is judged."""
    in_job: bool = True
    """Whether the next attempt can begin in the job."""


class Back:
    """Brings a host back on the network some time after it was cut off."""

    def __init__(self, run: Run, host: str) -> None:
        self._run, self._host = run, host
        self._until = time.monotonic() + _CUT_SECONDS
        self._ranks = self._processes()

    def __call__(self) -> None:
        trial = self._run.trial
        trial.stopping.wait(max(0.0, self._until - time.monotonic()))
        trial.cluster.set_link(self._host, up=True)
        if len(self._run.attempts) > 1:  # else it goes on with what was on its way meanwhile
            left = f"the end of the ranks that {self._host} had before"
            self._run.wait(lambda: not self._ranks & self._processes(), left, _LEFT_SECONDS)

    def _processes(self) -> set[int]:
        return {*self._run.processes(self._host, "")}


def _cut(run: Run, host: str) -> Undo:
    run.trial.cluster.set_link(host, up=False)
    return Back(run, host)


def _freeze(run: Run, host: str) -> Undo:
    return host_faults.frozen(run.trial.cluster, host)


def _tell(run: Run, _: str) -> Undo:
    """Returns at once: the script's word for it may wait for what struck before."""
    slurm(run.trial, "scancel", "--batch", "--signal=USR1", run.job_id)
    return spares.nothing


FORMS = (
    Form("killed", OTHERS, spares.kill_host), Form("frozen", OTHERS, _freeze),
    Form("cut-off", OTHERS, _cut), Form("spare-killed", SPARE, spares.kill_host),
    Form("script-killed", BATCH, spares.kill_host, in_job=False),
    Form("script-rebooted", BATCH, spares.reboot, in_job=False),
    Form("told", BATCH, _tell, in_job=False),
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two forms, when the second strikes, and what is struck."""

    first: Form
    second: Form
    moment: str
    config: str

    @property
    def name(self) -> str:
        return f"pair-{self.first.name}-{self.second.name}"

    @property
    def in_job(self) -> bool:
        """Whether the next attempt can begin in the job."""
        return self.first.in_job and self.second.in_job

    @property
    def is_by_hand(self) -> bool:
        """Whether a person resumes it: ranks that wait for rank 0 to listen fail of nothing."""
        return self.second.name == "script-rebooted" and self.moment == MEETING

    @property
    def conf(self) -> dict[str, str]:
        return _CONF if self.in_job else _CONF_OF_QUEUE


def pairs() -> list[Pair]:
    """Return all unordered pairs but those of one host with itself."""
    chosen = [
        (first, second)
        for first, second in combinations_with_replacement(FORMS, 2)
        if not (first.on == second.on == BATCH)
    ]
    made = []
    for number, (first, second) in enumerate(chosen):
        moment, config = MOMENTS[number % 4], _CONFIGS[number // 4 % 2]
        pair = Pair(first, second, moment, config)
        if first.on == SPARE and moment == MEETING:  # its loss alone has nobody meet
            pair = Pair(second, first, moment, config)
        made.append(pair)
    return made


_CONFIGS = ("loop-three", "three")


def _host(run: Run, form: Form, struck: Sequence[str]) -> str:
    """Choose a host that has not been struck; its own of a script that has none left."""
    started = run.events("started")[-1]
    shown = slurm(run.trial, "scontrol", "show", "job", "-o", run.job_id).stdout
    batch = shown.partition(" BatchHost=")[2].partition(" ")[0]
    step = [host for host in expand_nodelist(started["nodelist"]) if host not in struck]
    idle = [host for host in started.get("spares") or [] if host not in struck]
    hosts = {OTHERS: [h for h in step if h != batch], BATCH: [batch], SPARE: idle}[form.on]
    # A spare that has been taken is one of the step by now.
    return (hosts or [h for h in step if h != batch])[-1]


def endure(trial: Trial, pair: Pair) -> str:
    """Deals both to a run, and judges its end from outside."""
    for folder in ("tmp", "jobs"):
        (trial.folder / folder).mkdir(exist_ok=True)
    at = 20 if pair.config in SCRIPTS else 60
    here = ["--env", f"TMPDIR={trial.folder}/tmp"]
    run = trial.start_held(at, *OPTIONS, *here, config=pair.config)
    meeting = f"import.{run.world_size - 1}"
    if pair.moment == MEETING:
        trial.want(meeting)
    hosts = [_host(run, pair.first, [])]
    undo = [pair.first.deal(run, hosts[0])]
    began = time.time()
    if pair.moment != AT_ONCE:
        trial.release(f"step-{at}")
        if pair.moment == MEETING:
            run.wait(lambda: list(trial.holds.glob(f"held-{meeting}.*")), "the meeting", _PATIENCE)
        else:
            trial.stopping.wait(_SECONDS[pair.moment])
    hosts.append(_host(run, pair.second, hosts))
    undo.append(pair.second.deal(run, hosts[1]))
    trial.release(f"step-{at}")
    trial.release(meeting)
    back = [repair for repair in undo if isinstance(repair, Back)]
    for repair in back:
        repair()
    if pair.is_by_hand:
        _resume_by_hand(run)
    run.wait(lambda: "done" in run.causes, "the end of the training", _PATIENCE)
    for repair in undo:  # Slurm waits for each node of a job that has ended
        if repair not in back:
            repair()
    seen = run.check_same(seconds=_PATIENCE)
    restarts = _judge(run, pair, hosts)
    starts = [f"{event['time'] - began:.0f} s" for event in run.events("started")[1:]]
    what = f"starts after {', '.join(starts)}" if starts else "goes on"
    where = "the queue" if restarts else "the job"
    return f"{' and '.join(hosts)}, {pair.moment}: {what} in {where}; {seen}"


def _resume_by_hand(run: Run) -> None:
    """Does what `status` says of a run that is lost."""
    told = "status to say that it is lost"
    run.wait(lambda: run.status()["detail"].startswith("lost: "), told, _PATIENCE)
    _type(run, "cancel")
    run.wait_over(_PATIENCE)
    (run.trial.folder / f"slurm-{run.job_id}.out").unlink()  # left where a job gave no verdict
    _type(run, "resume")


def _type(run: Run, command: str) -> None:
    if (done := run.trial.clusterddp(command, run.name)).returncode:
        raise run.differs(f"{command}: exit {done.returncode}: {done.stderr}")


def _judge(run: Run, pair: Pair, hosts: Sequence[str]) -> int:
    """Slurm's word, who is blamed, and that nothing is left; returns the job's restarts."""
    in_job = [" Restarts=0 "] if pair.in_job else []
    spares.judge_job(run, " JobState=COMPLETED ", " ExitCode=0:0", *in_job)
    if wrong := {*spares.blamed_hosts(run.trial)} - {*hosts}:
        raise run.differs(f"blamed are {wrong}, struck were {hosts}")
    spares.judge_left_over(run)
    shown = slurm(run.trial, "scontrol", "show", "job", "-o", run.job_id).stdout
    return int(shown.partition(" Restarts=")[2].split()[0])


PAIRS = pairs()
for _pair in PAIRS:

    def _strike(trial: Trial, pair: Pair = _pair) -> str:
        return endure(trial, pair)

    fault(_pair.name, conf=_pair.conf, hosts=HOSTS, needs=(_pair.config,))(_strike)

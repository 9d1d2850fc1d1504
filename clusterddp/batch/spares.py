"""Spare nodes of a job: which of its nodes a step runs on, and which of them are lost.

slurmctld takes a node for lost after SlurmdTimeout, 300 s by default. The ranks' own records tell
within seconds: a rank has failed, or a node's small parent renews its record no more. Whether the
node is lost is then asked of its slurmd, by a connection to its port.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from clusterddp import log, patience
from clusterddp.batch import step_watch
from clusterddp.errors import EXIT_PAUSED, SlurmError
from clusterddp.run import bad_nodes
from clusterddp.run.attempt import Attempt
from clusterddp.run.bad_nodes import BadNode
from clusterddp.run.history import History
from clusterddp.run.outcome import RENEWAL_SECONDS, last_renewal, path_of, read_outcomes
from clusterddp.run.records import Outcome
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm.forms import expand_nodelist

LIVENESS_TIMEOUT = 3 * RENEWAL_SECONDS
"""Without a sign of life for so long, a node is asked for one."""
_LOOKS = 2
"""Looks in a row at which a lost node does not answer …"""
_LOOKS_REFUSED = 6
"""… and where its kernel answers: slurmd alone may be starting again."""
_MOST_AT_ONCE = 32


class Allocation:
    """Nodes of a job that has some to spare."""

    def __init__(self, nodelist: str, needed: int) -> None:
        """nodelist: SLURM_JOB_NODELIST. needed: nodes of a step. Raises RequestError."""
        self.nodes = expand_nodelist(nodelist)
        self.lost: set[str] = set()
        """Nodes that were lost since the job started."""
        self._needed = needed

    @property
    def left(self) -> list[str]:
        """Nodes that were not lost, in Slurm's order."""
        return [node for node in self.nodes if node not in self.lost]

    def choose(self, bad: Collection[str]) -> list[str]:
        """Choose the nodes of the next step, in Slurm's order; empty where too few are good."""
        good = [node for node in self.left if node not in bad]
        return good[: self._needed] if len(good) >= self._needed else []

    def choose_first(self, bad: Mapping[str, BadNode]) -> list[str]:
        """Choose the nodes of the job's first step: bad ones where Slurm gave too few others.

        Fewer than a step needs where Slurm gave no more at all.

        Those that were lost come last, as slurmctld may not know of it yet.
        """

        def sort_key(node: str) -> int:
            return (1 + (bad[node].by == bad_nodes.BY_LOSS)) if node in bad else 0

        chosen = sorted(self.left, key=sort_key)[: self._needed]
        return [node for node in self.left if node in chosen]


def await_loss(nodes: "NodeWatch", at_work: Callable[[], object]) -> dict[str, str]:
    """Wait until nodes of a job are lost; returns what was seen, by their names.

    Empty once `at_work` returns nothing, and once the attempt is superseded: the step of its number
    may be another one's by then.
    """
    looks = patience.looks(every=patience.STEP_PAUSE)
    next(looks)  # nobody is lost at once
    for _ in looks:
        if not at_work() or nodes.attempt.is_superseded:
            return {}
        if lost := nodes.look(time.monotonic()):
            return lost
    return {}


class NodeWatch:
    """Looks at the records of a step's ranks for nodes that show no life."""

    def __init__(self, attempt: Attempt, nodes: Sequence[str], idle: Collection[str] = ()) -> None:
        """idle: the job's further nodes, but for this one."""
        self.attempt, self._nodes, self._idle = attempt, nodes, {*idle}
        self._others = {*nodes, *idle}
        self._mute, self._mute_idle = _Mute(self._others), _Mute(self._others)
        self._idle_due = 0.0
        self._signs: dict[str, tuple[float, float]] = {}
        """Time of change of a node's records, and when that was seen first."""

    def look(self, now: float) -> dict[str, str]:
        """Return the nodes that did not answer at this look and those before, and the reason.

        now: seconds of a clock that nobody sets.
        """
        outcomes = read_outcomes(self.attempt.outcomes)
        failed = any(outcome.failed for outcome in outcomes)
        explained = any(_failed_by_itself(outcome) for outcome in outcomes)
        suspects = {}
        for node in self._nodes:
            of_node = [outcome for outcome in outcomes if outcome.host == node]
            sign = max((self._changed(outcome) for outcome in of_node), default=0.0)
            before, since = self._signs.get(node, (None, now))
            if sign != before:
                since = now
            self._signs[node] = sign, since
            ended = bool(of_node) and all(outcome.ended is not None for outcome in of_node)
            if failed and not (ended and explained):
                suspects[node] = (
                    f"ranks have failed, and its own have {'' if ended else 'not '}ended"
                )
            elif ended:
                continue
            elif now - since > LIVENESS_TIMEOUT:
                suspects[node] = f"it gave no sign of life for {LIVENESS_TIMEOUT:g} s"
        lost = {node: _and_no_answer(suspects[node]) for node in self._mute.look(suspects)}
        if now >= self._idle_due:
            self._idle_due = now + patience.SPARES_IDLE_PAUSE
            gone = self._mute_idle.look(self._idle)
            lost |= dict.fromkeys(gone, _and_no_answer("it was an idle spare"))
            self._idle.difference_update(gone)
            self._others.difference_update(gone)
        return lost

    def _changed(self, outcome: Outcome) -> float:
        with suppress(OSError):
            return last_renewal(path_of(self.attempt.outcomes, outcome.rank))
        return 0.0


class _Mute:
    """Counts the looks in a row at which nodes did not answer."""

    def __init__(self, others: AbstractSet[str]) -> None:
        """others: the job's nodes but for this one."""
        self._others = others
        self.looks: dict[str, int] = {}

    def look(self, suspects: Collection[str]) -> list[str]:
        """Ask nodes, and return those that are lost.

        None where no other node of several answers: it is then this host that may be cut off.
        """
        mute = unreachable_nodes(suspects) if suspects else {}
        rest = self._others - {*suspects}
        if mute and len(self._others) > 1 and len(mute) == len(suspects):
            mute = {} if {*unreachable_nodes(rest)} == rest else mute
        self.looks = {node: self.looks.get(node, 0) + 1 for node in mute}
        return [
            node
            for node, refuses in mute.items()
            if self.looks[node] >= (_LOOKS_REFUSED if refuses else _LOOKS)
        ]


def find_lost(
    attempt: Attempt, nodes: Sequence[str], exit_code: int, others: Collection[str] = ()
) -> dict[str, str]:
    """Return the nodes that a step which has ended has lost, and what was seen of them.

    nodes: those of the step, but for this one. exit_code: srun's. others: the job's further nodes.
    Where a rank has failed of an error of its own, only nodes are asked whose ranks left no record
    of an end.
    """
    if exit_code in (0, EXIT_PAUSED) or attempt.read_final_record():
        return {}
    outcomes = read_outcomes(attempt.outcomes)
    explained = any(_failed_by_itself(outcome) for outcome in outcomes)
    ended = {each.host for each in outcomes} - {o.host for o in outcomes if o.ended is None}
    suspects = [node for node in nodes if not explained or node not in ended]
    mute = _Mute({*nodes, *others})
    lost: list[str] = []
    for _ in patience.looks(every=patience.STEP_PAUSE):
        lost = mute.look(suspects)
        if len(lost) >= len(mute.looks):
            break
    return {node: _and_no_answer("its step has ended with a failure") for node in lost}


def _failed_by_itself(outcome: Outcome) -> bool:
    return outcome.failed and outcome.error is not None and not outcome.peer_lost


def _and_no_answer(why: str) -> str:
    return f"{why}, and its slurmd does not answer"


def unreachable_nodes(nodes: Collection[str]) -> dict[str, bool]:
    """Return the nodes whose slurmd takes no connection, and whether their kernel refuses it.

    None where slurmctld does not answer: it is then this host that may be cut off.
    """
    addresses = slurm.node_addresses(list(nodes)) if nodes else {}
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        refusals = pool.map(_refuses, addresses.values())
        return {
            node: refuses
            for node, refuses in zip(addresses, refusals, strict=True)
            if refuses is not None
        }


def _refuses(address: tuple[str, int]) -> bool | None:
    """Return whether a connection is refused; None where it is taken."""
    try:
        with socket.create_connection(address, patience.NODE_ANSWERS):
            return None
    except socket.gaierror:
        return None  # nothing was asked
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def end_step(
    attempt: Attempt, job: str, lost: Collection[str], srun: Callable[[], int | None]
) -> None:
    """End a step that has lost nodes, for which its srun would wait.

    job: the id that Slurm's commands take. srun: returns its process, None once that has ended.
    Nothing is ended where the attempt is superseded.
    """
    if attempt.is_superseded:
        return

    def at_work() -> int | None:
        left = (o for o in read_outcomes(attempt.outcomes) if o.host not in lost)
        return srun() if any(outcome.ended is None for outcome in left) else None

    step = step_watch.step_name(attempt, job)
    if not step and (pid := srun()):  # no task has recorded its start: srun alone knows of some
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        step_watch.await_end(srun, patience.LEFT_RANKS_LEAVE)
    try:
        if step:
            slurm.cancel(step)
            step_watch.await_end(at_work, patience.LEFT_RANKS_LEAVE)
        if step and at_work():
            slurm.kill_step(step)
            step_watch.await_end(at_work, patience.LEFT_RANKS_KILLED)
    except SlurmError as error:
        log.info(str(error))
    step_watch.kill(srun)


def mark_lost(
    attempt: Attempt, job_id: str, lost: Mapping[str, str], step: Collection[str]
) -> None:
    """Record nodes as lost; a record that cannot be written costs the record alone.

    step: nodes of the step, whose loss ends the attempt.
    """
    for node, why in lost.items():
        log.info(f"node {node} is lost: {why}")
    for is_idle in (False, True):
        with suppress(OSError):
            nodes = {node: why for node, why in lost.items() if (node not in step) == is_idle}
            bad_nodes.mark_bad(attempt, job_id, nodes, bad_nodes.BY_LOSS, is_remark=is_idle)


def release_nodes(job: str, allocation: Allocation) -> None:
    """Give a job's lost nodes back, for which Slurm would requeue it after SlurmdTimeout.

    Not by --no-kill: a job that has lost its script's node would then run to its time limit, with
    no script (seen on 22.05). A requeue asks for as many nodes as the job had at first there.
    Slurm refuses a second change until its accounting has recorded the first, and for good without
    accounting (seen on 22.05): it is asked again beside what comes next.
    """

    def shrink() -> str:
        try:
            slurm.give_back(job, allocation.left)
        except SlurmError as error:
            return str(error)
        return ""

    def try_again() -> None:
        problem = first
        for _ in patience.looks(patience.LOST_NODE_TAKEN_BACK, every=patience.STEP_PAUSE):
            if not (problem := shrink()):
                return
        log.info(f"{problem}; Slurm may requeue the job once it knows of the loss")

    if (first := shrink()) and "try again" in first:
        threading.Thread(target=try_again, daemon=True).start()
    elif first:
        log.info(f"{first}; Slurm may requeue the job once it knows of the loss")


def bad(run: RunDir) -> dict[str, BadNode]:
    """Return the nodes that a run avoids."""
    return bad_nodes.read_for(History.read(run))

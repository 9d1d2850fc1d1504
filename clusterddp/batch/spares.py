"""Spare nodes of a job: the nodes that a step uses, and those that are lost.

slurmctld marks a node DOWN after SlurmdTimeout, 300 s by default. The ranks' records show a loss
within seconds: a rank has failed, or the process above a node's ranks no longer renews its record.
A connection to the port of the node's slurmd then confirms the loss.
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
from pathlib import Path
from typing import NamedTuple

from clusterddp import files, log, polling
from clusterddp.batch import step_watch
from clusterddp.errors import EXIT_STOPPED, SlurmError
from clusterddp.formatting import line, setting
from clusterddp.run import bad_nodes
from clusterddp.run.attempt import Attempt
from clusterddp.run.bad_nodes import BadNode
from clusterddp.run.history import History
from clusterddp.run.outcome import (
    RENEWAL_SECONDS,
    last_renewal,
    load,
    newest,
    read_outcomes,
    record_paths,
    step_name,
)
from clusterddp.run.records import Outcome
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm.forms import expand_nodelist

LIVENESS_TIMEOUT = 3 * RENEWAL_SECONDS
"""Time without a renewed record after which a node's slurmd is contacted."""
_MAX_FAILED = 2
"""Failed connections in a row after which a node is lost …"""
_MAX_REFUSED = 6
"""… and if its kernel refuses them: slurmd may only be restarting."""
_MAX_CONNECTIONS = 32
_SAVE_BEGINS_SECONDS = 6.0
"""Time from a rank's end until its parent has begun to save a snapshot, if there is one."""


class Allocation:
    """Nodes of a job with spare nodes."""

    def __init__(self, nodelist: str, needed: int) -> None:
        """nodelist: SLURM_JOB_NODELIST. needed: nodes of a step. Raises RequestError."""
        self.nodes = expand_nodelist(nodelist)
        self.lost: set[str] = set()
        """Nodes lost since the job started."""
        self._needed = needed

    @property
    def left(self) -> list[str]:
        """Nodes that are not lost, in Slurm's order."""
        return [node for node in self.nodes if node not in self.lost]

    def choose(self, bad: Collection[str]) -> list[str]:
        """Choose the nodes of the next step, in Slurm's order; empty if too few are good.

        Nodes that an administrator drains come last, and each that matters is logged.
        """
        good = [node for node in self.left if node not in bad]
        if len(good) < self._needed:
            return []
        drained = slurm.drained_nodes(good)
        first = sorted(good, key=drained.__contains__)[: self._needed]
        for node in (node for node in drained if node in {*first, *good[: self._needed]}):
            is_used = "is used, because too few others are left" if node in first else "is left out"
            log.info(f"node {node} {is_used}: it is drained ({line(drained[node])})")
        return [node for node in good if node in first]

    def choose_first(self, bad: Mapping[str, BadNode]) -> list[str]:
        """Choose the nodes of the job's first step, with bad ones if there are too few others.

        Nodes marked bad for their loss come last, because slurmctld may not know of it yet. Returns
        fewer nodes than a step needs if Slurm gave no more.
        """

        def sort_key(node: str) -> int:
            return (1 + (bad[node].by == bad_nodes.BY_LOSS)) if node in bad else 0

        chosen = sorted(self.left, key=sort_key)[: self._needed]
        return [node for node in self.left if node in chosen]


def await_loss(nodes: "NodeWatch", at_work: Callable[[], object]) -> dict[str, str]:
    """Wait until nodes of a job are lost. Return what was observed, by node.

    Returns an empty dictionary once `at_work` returns false, or the attempt is superseded: the step
    of its number may then belong to another attempt.
    """
    polls = polling.poll(every=polling.STEP_POLL_SECONDS)
    next(polls)  # no node is lost at once
    for _ in polls:
        if not at_work() or nodes.attempt.is_superseded:
            return {}
        if lost := nodes.look(time.monotonic()):
            return lost
    return {}


class NodeWatch:
    """Watch of a step's rank records for nodes that no longer renew them."""

    def __init__(self, attempt: Attempt, nodes: Sequence[str], idle: Collection[str] = ()) -> None:
        """nodes, idle: the step's and the job's further nodes, both without this node."""
        self.attempt, self._nodes, self._idle = attempt, nodes, {*idle}
        self._others = {*nodes, *idle}
        self._failed_step = _FailedConnections(self._others)
        self._failed_idle = _FailedConnections(self._others)
        self._idle_due = 0.0
        self._signs: dict[str, tuple[float, float]] = {}
        """Latest change of a node's records, and when this process first saw it."""
        self._records: dict[Path, _Record] = {}

    def look(self, now: float) -> dict[str, str]:
        """Return the nodes that failed to answer often enough in a row, with the reason.

        now: a monotonic clock, in seconds.
        """
        records = self._read()
        outcomes = newest(outcome for record in records for outcome in record.outcomes)
        by_node: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            by_node.setdefault(outcome.host, []).append(outcome)
        changed: dict[str, float] = {}
        for record in records:
            for host in {outcome.host for outcome in record.outcomes}:
                changed[host] = max(record.changed, changed.get(host, 0.0))
        failed = any(outcome.failed for outcome in outcomes)
        explained = any(_has_own_error(outcome) for outcome in outcomes)
        suspects = {}
        for node in self._nodes:
            of_node, sign = by_node.get(node, ()), changed.get(node, 0.0)
            before, since = self._signs.get(node, (None, now))
            if sign != before:
                since = now
            self._signs[node] = sign, since
            ended = bool(of_node) and all(outcome.ended is not None for outcome in of_node)
            if failed and not (ended and explained):
                suspects[node] = (
                    f"ranks have failed, and those of this node have {'' if ended else 'not '}ended"
                )
            elif ended:
                continue
            elif now - since > LIVENESS_TIMEOUT:
                suspects[node] = f"its records have not changed for {setting(LIVENESS_TIMEOUT)}"
        lost = {node: _with_no_answer(suspects[node]) for node in self._failed_step.look(suspects)}
        if now >= self._idle_due:
            self._idle_due = now + polling.IDLE_SPARES_POLL_SECONDS
            gone = self._failed_idle.look(self._idle)
            lost |= dict.fromkeys(gone, _with_no_answer("it was an idle spare"))
            self._idle.difference_update(gone)
            self._others.difference_update(gone)
        return lost

    def _read(self) -> Collection["_Record"]:
        """Return the readable records: usually one per node, which renews it."""
        before = self._records
        read = {p: _Record.read(p, before.get(p)) for p in record_paths(self.attempt.outcomes)}
        self._records = {path: record for path, record in read.items() if record}
        return self._records.values()


class _Record(NamedTuple):
    """File with the records of a node's ranks."""

    changed: float
    """Its modification time, which its node renews."""
    content: bytes
    outcomes: Sequence[Outcome]

    @classmethod
    def read(cls, path: Path, before: "_Record | None") -> "_Record | None":
        """Read a record; None if it is gone or incomplete. before: the file's last one.

        It is opened, because a network file system answers stat from its cache.
        """
        with suppress(OSError), path.open("rb") as file:
            changed, content = os.fstat(file.fileno()).st_mtime, file.read()
            if before and before.content == content:
                return before._replace(changed=changed)
            if outcomes := load(path, content):
                return cls(changed, content, outcomes)
        return None


class _FailedConnections:
    """Counter of failed connections in a row, by node."""

    def __init__(self, others: AbstractSet[str]) -> None:
        """others: the job's nodes without this one."""
        self._others = others
        self.in_a_row: dict[str, int] = {}

    def look(self, suspects: Collection[str]) -> list[str]:
        """Contact nodes and return the lost ones.

        Returns none if no other node of several answers: this host may then be cut off.
        """
        unreachable = unreachable_nodes(suspects) if suspects else {}
        rest = self._others - {*suspects}
        if unreachable and len(self._others) > 1 and len(unreachable) == len(suspects):
            unreachable = {} if {*unreachable_nodes(rest)} == rest else unreachable
        self.in_a_row = {node: self.in_a_row.get(node, 0) + 1 for node in unreachable}
        return [
            node
            for node, refuses in unreachable.items()
            if self.in_a_row[node] >= (_MAX_REFUSED if refuses else _MAX_FAILED)
        ]


def find_lost(
    attempt: Attempt, nodes: Sequence[str], exit_code: int, others: Collection[str] = ()
) -> dict[str, str]:
    """Return the nodes that an ended step has lost, and what was observed.

    nodes: the step's nodes without this one. exit_code: srun's. others: the job's further nodes.
    If a rank failed with an error of its own, only nodes with ranks without a recorded end are
    contacted.
    """
    if exit_code in (0, EXIT_STOPPED) or attempt.read_final_record():
        return {}
    outcomes = read_outcomes(attempt.outcomes)
    explained = any(_has_own_error(outcome) for outcome in outcomes)
    ended = {each.host for each in outcomes} - {o.host for o in outcomes if o.ended is None}
    suspects = [node for node in nodes if not explained or node not in ended]
    unreachable = _FailedConnections({*nodes, *others})
    lost: list[str] = []
    for _ in polling.poll(every=polling.STEP_POLL_SECONDS):
        lost = unreachable.look(suspects)
        if len(lost) >= len(unreachable.in_a_row):
            break
    return {node: _with_no_answer("its step has ended with a failure") for node in lost}


def _has_own_error(outcome: Outcome) -> bool:
    return outcome.failed and outcome.error is not None and not outcome.peer_lost


def _with_no_answer(why: str) -> str:
    return f"{why}, and its slurmd does not answer"


def unreachable_nodes(nodes: Collection[str]) -> dict[str, bool]:
    """Return the nodes whose slurmd accepts no connection, and whether their kernel refuses it.

    Returns none if slurmctld does not answer: this host may then be cut off.
    """
    addresses = slurm.node_addresses(list(nodes)) if nodes else {}
    with ThreadPoolExecutor(_MAX_CONNECTIONS) as pool:
        refusals = pool.map(_refuses, addresses.values())
        return {
            node: refuses
            for node, refuses in zip(addresses, refusals, strict=True)
            if refuses is not None
        }


def _refuses(address: tuple[str, int]) -> bool | None:
    """Return whether a connection is refused; None if it is accepted."""
    try:
        with socket.create_connection(address, polling.SLURMD_CONNECT_SECONDS):
            return None
    except socket.gaierror:
        return None  # no node was contacted
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def end_step(
    attempt: Attempt, job: str, lost: Collection[str], srun: Callable[[], int | None]
) -> None:
    """End a step that has lost nodes; its srun would wait for them.

    job: the id that Slurm's commands take. srun: returns its process, None once it has ended.
    Does nothing if the attempt is superseded.
    """
    if attempt.is_superseded:
        return

    def at_work() -> int | None:
        left = [o for o in read_outcomes(attempt.outcomes) if o.host not in lost]
        is_active = attempt.is_saving_memory or any(outcome.ended is None for outcome in left)
        return srun() if is_active or _may_save(attempt, left) else None

    step = step_name(attempt.outcomes, job)
    if not step and (pid := srun()):  # no start is recorded, but srun may have started tasks
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        step_watch.await_end(srun, polling.LEFT_RANKS_EXIT_SECONDS)
    try:
        if step:
            step_watch.end_tasks(attempt, step, at_work)
    except SlurmError as error:
        log.info(str(error))
    step_watch.kill(srun)


def _may_save(attempt: Attempt, left: Collection[Outcome]) -> bool:
    """Return whether the parents of ranks that have just ended may begin to save a snapshot."""
    hosts = {outcome.host for outcome in left if outcome.step is not None}
    paths = {path for host in hosts for path in record_paths(attempt.outcomes, host)}
    records = [path for path in paths if any(each.host in hosts for each in load(path))]
    with suppress(OSError):
        latest = max(records, key=last_renewal, default=None)
        return latest is not None and files.age(latest, attempt.path) < _SAVE_BEGINS_SECONDS
    return False


def mark_lost(
    attempt: Attempt, job_id: str, lost: Mapping[str, str], step: Collection[str]
) -> None:
    """Record lost nodes. A record that cannot be written is skipped.

    step: nodes of the step, whose loss ends the attempt.
    """
    for node, why in lost.items():
        log.info(f"node {node} is lost: {why}")
    for is_idle in (False, True):
        with suppress(OSError):
            nodes = {node: why for node, why in lost.items() if (node not in step) == is_idle}
            bad_nodes.mark_bad(attempt, job_id, nodes, bad_nodes.BY_LOSS, is_remark=is_idle)


def release_nodes(job: str, allocation: Allocation) -> None:
    """Release a job's lost nodes, or Slurm would requeue the job after SlurmdTimeout.

    --no-kill is no alternative: a job that lost the node of its script would run without a script
    until its time limit (seen on 22.05), and a requeue there asks for as many nodes as the job had
    at first. Slurm refuses a second change until its accounting has recorded the first, and always
    without accounting (seen on 22.05), so a thread retries.
    """

    def shrink() -> str:
        try:
            slurm.release_nodes(job, allocation.left)
        except SlurmError as error:
            return str(error)
        return ""

    def try_again() -> None:
        problem = first
        for _ in polling.poll(polling.NODE_RELEASE_SECONDS, every=polling.STEP_POLL_SECONDS):
            if not (problem := shrink()):
                return
        log.info(f"{problem}; Slurm may requeue the job once it knows of the loss")

    if (first := shrink()) and "try again" in first:
        threading.Thread(target=try_again, daemon=True).start()
    elif first:
        log.info(f"{first}; Slurm may requeue the job once it knows of the loss")


def nodes_to_avoid(run: RunDir) -> dict[str, BadNode]:
    """Return the nodes that a run avoids."""
    return bad_nodes.read_for(History.read(run))

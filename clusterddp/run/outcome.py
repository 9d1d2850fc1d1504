"""Ends of ranks: their records, and which rank failed first.

A task's parent records how it ended. If both were killed, the end is known from srun's lines.
Errors that only follow from another rank's end are distinguished from the first one.
"""

import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from clusterddp import files
from clusterddp.errors import EXIT_FAILED
from clusterddp.run.events import Failure
from clusterddp.run.records import HungRanks, Outcome
from clusterddp.slurm import srun_lines
from clusterddp.slurm.srun_lines import TaskEnd

RENEWAL_SECONDS = 5.0
"""Interval at which a node renews its record in a job with spare nodes."""
HUNG = "hung.json"
RANKS = "ranks"
"""Field of a node's record with its ranks' records."""
_CLOCKS = "clocks.json"
_NODE, _RANK = "node-", "rank-"


def failure_of(outcome: Outcome) -> Failure:
    """Return the failure that a rank's own record describes."""
    reason, code = outcome.reason, outcome.exit_code
    if outcome.hung:  # how it ended in the end does not say why
        code = EXIT_FAILED
    elif outcome.signal == "SIGTERM":
        reason += " (cancelled, time limit or preempted)"
    return Failure(outcome.rank, outcome.host, reason, _log(outcome.rank), code)


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read the records of an attempt's ranks, ordered by rank."""
    outcomes = newest(each for path in record_paths(folder) for each in load(path))
    hung = files.read(HungRanks, folder / HUNG) or HungRanks()
    clocks = files.read_json(folder / _CLOCKS) or {}
    return [
        replace(
            outcome,
            hung=hung.reason if outcome.rank in hung.ranks else "",
            clock_ahead=files.number(clocks.get(outcome.host)),
        )
        for outcome in outcomes
    ]


def read_outcome(folder: Path, rank: int) -> Outcome | None:
    """Read the record of one rank; None if it is missing or unreadable.

    A rank can move to another node within its attempt (torchrun), so all nodes' records are read.
    """
    return next((each for each in read_outcomes(folder) if each.rank == rank), None)


def read_outcomes_of(folder: Path, host: str) -> list[Outcome]:
    """Read the records of a host's ranks, whatever the number of hosts."""
    outcomes = newest(each for path in record_paths(folder, host) for each in load(path))
    return [each for each in outcomes if each.host == host]


def record_paths(folder: Path, host: str = "") -> list[Path]:
    """Return the files with the ranks' records: of all hosts, or all that may be a host's."""
    nodes = f"{_NODE}{quote(host, safe='')}." if host else _NODE
    with suppress(OSError), os.scandir(folder) as entries:
        return [
            folder / entry.name
            for entry in entries
            if entry.name.endswith(".json") and entry.name.startswith((nodes, _RANK))
        ]
    return []


def load(path: Path, content: bytes | None = None) -> list[Outcome]:
    """Read the records in a file; none from an incomplete one. content: the file's, if known."""
    try:
        records = json.loads(files.read_file(path) if content is None else content)
    except (OSError, ValueError, RecursionError):
        return []
    if isinstance(records, dict):
        records = records.get(RANKS, [records])
    if not isinstance(records, list):
        return []
    return list(filter(None, (files.load(Outcome, each, strict=True) for each in records)))


def newest(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the newest record of each rank, ordered by rank.

    Older ones remain in the files of earlier nodes, and if a leader was lost.
    """
    latest: dict[int, Outcome] = {}
    for each in outcomes:
        known = latest.setdefault(each.rank, each)
        if (each.agent_restarts, each.written) > (known.agent_restarts, known.written):
            latest[each.rank] = each
    return [latest[rank] for rank in sorted(latest)]


def rank_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's own record, written if its node's cannot be."""
    return folder / f"{_RANK}{rank}.json"


def node_path(folder: Path, host: str) -> Path:
    """Return the path of the record of this host's ranks.

    Containers with separate networks cannot share a record, so its number is in the name.
    Raises OSError without /proc.
    """
    network = Path("/proc/self/ns/net").readlink().name.strip("net:[]")
    return folder / f"{_NODE}{quote(host, safe='')}.{network}.json"


def note_clocks(folder: Path, ahead: Mapping[str, float]) -> None:
    """Record the seconds by which each host's clock is ahead of rank 0's. Raises OSError."""
    files.write_record(folder / _CLOCKS, ahead)


def note_hung(folder: Path, ranks: Sequence[int], reason: str, *, ended: bool = False) -> None:
    """Record which ranks keep the others waiting, and where; without a reason, that none does.

    Without ranks, all hang at one place. A rank whose end is recorded does not hang: the others
    wait because of its end. ended: the job is ended because of the hang. Raises OSError.
    """
    done = {each.rank for each in read_outcomes(folder) if each.ended} if ranks else set()
    at_work = tuple(rank for rank in ranks if rank not in done)
    if at_work or ended or (reason and not ranks):
        files.write_record(folder / HUNG, HungRanks(at_work, reason, ended))
    else:
        (folder / HUNG).unlink(missing_ok=True)


def hang_that_ended_job(folder: Path) -> HungRanks | None:
    """Return the hang because of which the job was ended; None without one."""
    hung = files.read(HungRanks, folder / HUNG)
    return hung if hung and hung.ended else None


def any_began(folder: Path) -> bool:
    """Return whether a rank of the attempt has recorded its start."""
    return bool(record_paths(folder))


def last_renewal(path: Path) -> float:
    """Return when a file was last renewed. Raises OSError.

    The file is opened, because a network file system answers stat from its cache.
    """
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime


def first_failure(outcomes: Sequence[Outcome], job_log_text: str = "") -> Failure | None:
    """Find the rank that failed first; None if no rank is known to have failed.

    job_log_text: what srun and Slurm printed to the batch script's log. Order of precedence: a
    rank whose launcher was killed before srun saw any other end; errors of a rank's own, and tasks
    that srun reports as killed without a recorded end, whichever srun names first; exit codes and
    signals; ranks that hung; ranks that aborted; ranks without a recorded end; ranks that lost
    another one, including those that NCCL's watchdog ended because of it; ranks that got SIGTERM.
    """
    reports = srun_lines.task_ends(job_log_text)
    above = _killed_above(outcomes, reports)
    if above:
        return above
    failed = [outcome for outcome in outcomes if outcome.failed]
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    unrecorded = [report for report in reports if _is_missing(report, by_rank.get(report.rank))]
    if _are_agents(reports, failed):
        unrecorded = [report for report in unrecorded if report.exit_code is None]
    # A rank that hung until the others gave up is finally killed, which does not say why.
    hung = {outcome.rank for outcome in outcomes if outcome.hung} - {r.rank for r in reports[:1]}
    killed = [report for report in unrecorded if report.primary and report.rank not in hung]
    raised = [outcome for outcome in failed if outcome.error and not outcome.peer_lost]
    if killed and raised:
        order = [report.rank for report in reports]
        first = _earliest(raised, reports).rank
        place = order.index(first) if first in order else -1
        if place < order.index(killed[0].rank):
            killed = []
    if killed:
        return _from_srun(killed[0])
    if any(outcome.of_command for outcome in raised):
        # A command's output does not always show which errors follow from another rank's end.
        # There an error counts like an exit code or a signal, and the earliest one is first.
        raised = [o for o in failed if not o.peer_lost and o.signal != "SIGTERM"]
    lost_another = [o for o in outcomes if o.peer_lost]
    own_end = [o for o in failed if not o.error and o.signal != "SIGTERM"]
    for group in (
        raised,
        # A rank that aborted without a reason in its log may have waited for another in vain.
        # Slurm kills a rank together with its parent.
        [o for o in own_end if not o.hung and o.signal != "SIGABRT"],
        [o for o in outcomes if o.hung and failed and (o.failed or o.ended is None)],
        own_end,
        [o for o in outcomes if o.ended is None and failed],
        # Ranks that exited early with code 0 while others still needed them.
        [o for o in outcomes if o.exit_code == 0 and o.ended is not None and lost_another],
        [o for o in lost_another if o.failed],
        failed,
    ):
        if group:
            return failure_of(_earliest(group, reports))
    return _from_srun(unrecorded[0]) if unrecorded else None


def first_killed(outcomes: Sequence[Outcome], job_log_text: str = "") -> Failure | None:
    """Find the rank that was killed, itself or its launcher, before srun saw any other end.

    srun then ends the other ranks, which save and exit as on a request to stop.
    """
    reports = srun_lines.task_ends(job_log_text)
    first = _killed_at_first(reports)
    if first and any(o.rank == first.rank and _is_missing(first, o) for o in outcomes):
        return _from_srun(first)
    return _killed_above(outcomes, reports)


def _killed_above(outcomes: Sequence[Outcome], reports: Sequence[TaskEnd]) -> Failure | None:
    """Find a rank whose end is recorded although the first task that srun saw killed is above it.

    That task is then not a rank but a torchrun agent, submitit's process or a wrapper.
    """
    first = _killed_at_first(reports)
    if first is None:
        return None
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    if _is_missing(first, by_rank.get(first.rank)):
        return None  # killed together with the rank
    on_host = [o for o in outcomes if _short(o.host) == _short(first.host)]
    if any(o.signal not in (None, "SIGTERM") for o in on_host):
        return None  # a rank of this host was killed, not what is above it
    ended_for_it = [o for o in on_host if o.exit_code != 0]
    if all(o.exit_code == 0 for o in outcomes):
        ended_for_it = on_host  # a command that treats TERM as a request, and exits with 0
    if not ended_for_it:
        return None
    named = next((o for o in ended_for_it if o.rank == first.rank), ended_for_it[0])
    reason, code = first.explain()
    return Failure(named.rank, named.host, f"{_LAUNCHER} was {reason}", _log(named.rank), code)


def _killed_at_first(reports: Sequence[TaskEnd]) -> TaskEnd | None:
    first = next((report for report in reports if report.primary), None)
    return first if first and first.was_killed else None


def _earliest(group: Sequence[Outcome], reports: Sequence[TaskEnd]) -> Outcome:
    """Find the rank that ended first: by the clock on one host, by srun's order on several.

    If the ranks have not measured their clock offsets, the order of srun's lines decides. Hosts are
    compared, because under torchrun those lines name agents.
    """
    first_of_host: dict[str, Outcome] = {}
    for outcome in sorted(group, key=lambda o: (o.ended or 0.0, o.rank)):
        first_of_host.setdefault(_short(outcome.host), outcome)
    candidates = list(first_of_host.values())
    if all(outcome.clock_ahead is not None for outcome in candidates):
        return min(candidates, key=lambda o: ((o.ended or 0.0) - (o.clock_ahead or 0.0), o.rank))
    hosts = [_short(report.host) for report in reports if report.primary]
    order = [host for host in hosts if host in first_of_host]
    return first_of_host[order[0]] if len(candidates) > 1 and order else candidates[0]


def _short(host: str) -> str:
    """Return a host name without its domain, because Slurm and the host may differ in it."""
    return host if host.replace(".", "").isdigit() else host.partition(".")[0]


def _are_agents(reports: Sequence[TaskEnd], failed: Sequence[Outcome]) -> bool:
    """Return whether srun's tasks are known not to be ranks.

    srun names each of its tasks that ends with a code, and the code, but does not know the ranks
    below an agent. The agent's code is then not a rank's, even if the rank of the same number was
    ended before it left a record.
    """
    codes = {(report.rank, _short(report.host)): report.exit_code for report in reports}
    hosts = {host for _, host in codes}
    own_end = [
        (o, (o.rank, _short(o.host)))
        for o in failed
        if not o.peer_lost and o.signal != "SIGTERM" and _short(o.host) in hosts
    ]
    return any(codes.get(task, -1) not in (None, o.exit_code) for o, task in own_end)


def _is_missing(report: TaskEnd, outcome: Outcome | None) -> bool:
    """Return whether srun's line is the only record of a task's end.

    Under torchrun, srun's tasks are the agents: a line about agent 3 is not about rank 3.
    """
    if outcome is None:
        return True
    return outcome.ended is None and _short(outcome.host) == _short(report.host)


_LAUNCHER = "its launcher (an agent, submitit's process or a wrapper)"


def _from_srun(report: TaskEnd) -> Failure:
    reason, code = report.explain()
    return Failure(report.rank, report.host, reason, _log(report.rank), code)


def _log(rank: int) -> str:
    return f"logs/rank-{rank}.log"


def is_signalled(code: int) -> bool:
    """Return whether an exit code is a shell's for a command ended by a signal."""
    return 128 < code < 128 + signal.NSIG


def step_name(outcomes: Path, job: str) -> str:
    """Return the step id for scancel of the attempt with these records; empty if none has it.

    The job id without a step would cancel the whole job.
    """
    step_id = next((o.step_id for o in read_outcomes(outcomes) if o.step_id), "")
    return f"{job}.{step_id}" if step_id else ""

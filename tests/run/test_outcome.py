import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.attempt import Attempt
from clusterddp.run.events import Failure
from clusterddp.run.outcome import (
    LONGEST_MESSAGE,
    Outcome,
    failure_of,
    first_failure,
    first_killed,
    is_peer_loss,
    note_clocks,
    note_hung,
    parse_abort,
    parse_error_file,
    parse_traceback,
    read_outcomes,
)
from clusterddp.run.records import TaskError
from clusterddp.run.run_dir import RunDir
from clusterddp.status import end_codes
from tests.hostile import CARRIED, REFUSED
from tests.waiting import PATIENCE


def outcome(rank: int, **fields: Any) -> Outcome:
    known: dict[str, Any] = {
        "local_rank": rank % 2, "node_rank": rank // 2, "host": f"h0{1 + rank // 2}", "pid": 100,
        "job_id": "17", "restart": 0, "step_id": "0", "started": 10.0,
    }  # fmt: skip
    return Outcome(rank=rank, **{**known, **fields})


def done(rank: int) -> Outcome:
    return outcome(rank, ended=50.0, exit_code=0)


def raised(rank: int, ended: float, message: str = "boom", peer_lost: bool = False) -> Outcome:
    error = TaskError("RuntimeError", message, peer_lost)
    return outcome(rank, ended=ended, exit_code=1, error=error)


def of_command(rank: int, ended: float, message: str, peer_lost: bool = False) -> Outcome:
    """As it is pieced together from what a command has left."""
    error = TaskError("RuntimeError", message, peer_lost, of_command=True)
    return outcome(rank, ended=ended, exit_code=1, error=error)


def lost(rank: int, ended: float) -> Outcome:
    return raised(rank, ended, "Connection closed by peer", peer_lost=True)


def signalled(rank: int, ended: float, name: str) -> Outcome:
    return outcome(rank, ended=ended, exit_code={"SIGTERM": 143, "SIGKILL": 137}[name], signal=name)


def exited(rank: int, ended: float, code: int) -> Outcome:
    return outcome(rank, ended=ended, exit_code=code)


def on(host: str, ahead: float, outcome: Outcome) -> Outcome:
    """The same on this host, whose clock shows as many seconds more than rank 0's."""
    return replace(outcome, host=host, ended=(outcome.ended or 0.0) + ahead, clock_ahead=ahead)


ABOVE = "what had started it (an agent, submitit's process or a launch prefix)"
KILLED_3 = "srun: error: h02: task 3: Killed\nsrun: Terminating StepId=17.0\n"
CASES: dict[str, tuple[list[Outcome], str, tuple[int, str] | None]] = {
    "a host's clock is ahead, as was measured": (
        [on("h01", 0.0, raised(0, 20.5)), on("h02", 5.0, raised(2, 20.0))],
        "", (2, "RuntimeError: boom"),
    ),
    "a host's clock is behind, as was measured": (
        [on("h01", 0.0, exited(0, 20.0, 3)), on("h02", -5.0, exited(2, 20.5, 4))],
        "", (0, "exit code 3"),
    ),
    "a host's clock is ahead, and srun has seen the order": (
        [exited(0, 20.5, 3), exited(2, 25.0, 4)],
        "srun: error: h02: task 2: Exited with exit code 4\nsrun: Terminating StepId=17.0\n"
        "srun: error: h01: task 0: Exited with exit code 3\n",
        (2, "exit code 4"),
    ),
    "srun has seen agents end": (
        [signalled(0, 21.0, "SIGTERM"), exited(1, 20.5, 3), lost(2, 25.5), exited(3, 25.0, 4)],
        "srun: error: h02: task 1: Exited with exit code 1\n"
        "srun: error: h01: task 0: Exited with exit code 1\n",
        (3, "exit code 4"),
    ),
    "an agent ended a rank ahead of its first record": (
        [exited(1, 20.5, 3)],
        "srun: error: h01: task 0: Exited with exit code 1\n"
        "srun: error: h02: task 1: Exited with exit code 1\n",
        (1, "exit code 3"),
    ),
    "an agent ended a rank ahead of its first record, for one that was killed": (
        [signalled(1, 20.5, "SIGKILL")],
        "srun: error: h01: task 0: Exited with exit code 1\n",
        (1, "killed by SIGKILL"),
    ),
    "an agent ended the ranks of its host ahead of their first record": (
        [exited(0, 20.5, 3)],
        "srun: error: h02: task 1: Exited with exit code 1\n"
        "srun: error: h01: task 0: Exited with exit code 1\n",
        (0, "exit code 3"),
    ),
    "a task that came to no record, beside one that failed later": (
        [exited(1, 20.5, 3)],
        "srun: error: h01: task 0: Exited with exit code 1\n"
        "srun: error: h01: task 1: Exited with exit code 3\n",
        (0, "exit code 1"),
    ),
    "one host's clock is right by itself, whatever srun says": (
        [exited(0, 20.5, 3), exited(1, 20.0, 4)],
        "srun: error: h01: task 0: Exited with exit code 3\n"
        "srun: error: h01: task 1: Exited with exit code 4\n",
        (1, "exit code 4"),
    ),
    "nobody knows more than the clocks": (
        [exited(0, 20.5, 3), exited(2, 20.0, 4)], "", (2, "exit code 4"),
    ),
    "a rank that was told to end, on a host whose clock is a second behind": (
        [signalled(0, 19.0, "SIGTERM"), exited(2, 20.0, 3)], "", (2, "exit code 3"),
    ),
    "all did well": ([done(0), done(1)], "", None),
    "an exception, and what it led to": (
        [lost(0, 20.0), raised(1, 21.0), signalled(2, 22.0, "SIGTERM"), lost(3, 19.0)],
        "",
        (1, "RuntimeError: boom"),
    ),
    "the earlier of two exceptions": (
        [raised(0, 20.2), raised(1, 20.1)], "", (1, "RuntimeError: boom"),
    ),
    "an exit code": (
        [exited(0, 20.0, 3), signalled(1, 20.5, "SIGTERM")], "", (0, "exit code 3"),
    ),
    "a killed task whose parent lives": (
        [signalled(0, 20.0, "SIGKILL"), lost(1, 19.9)], "", (0, "killed by SIGKILL"),
    ),
    "a command's peers say nothing of why": (
        [signalled(0, 20.0, "SIGKILL"), exited(1, 20.1, 1)], "", (0, "killed by SIGKILL"),
    ),
    "a command's peers tell of it in words of their own": (
        [signalled(0, 20.0, "SIGKILL"), of_command(1, 20.1, "nobody there")],
        "", (0, "killed by SIGKILL"),
    ),
    "a command's exception, and what it led to": (
        [of_command(0, 20.0, "reset", peer_lost=True), of_command(1, 20.1, "boom"),
         exited(2, 20.2, 3)],
        "", (1, "RuntimeError: boom"),
    ),
    "a task killed with its parent, and a command's exception": (
        [of_command(0, 20.0, "nobody there"), outcome(3)],
        KILLED_3 + "srun: error: h01: task 0: Exited with exit code 1\n", (3, "killed by SIGKILL"),
    ),
    "a task killed with its parent": (
        [lost(0, 20.0), lost(1, 20.1), lost(2, 20.1), outcome(3)],
        "srun: error: h01: tasks 0-1: Exited with exit code 1\n" + KILLED_3,
        (3, "killed by SIGKILL"),
    ),
    "a task killed with its parent, peers ended by srun": (
        [signalled(0, 20.0, "SIGTERM"), outcome(3)],
        KILLED_3 + "srun: error: h01: task 0: Terminated\n",
        (3, "killed by SIGKILL"),
    ),
    "out of memory": (
        [lost(0, 20.0), outcome(1)],
        "srun: error: h01: task 1: Out Of Memory\n",
        (1, "out of memory (killed by the kernel)"),
    ),
    "an exception before a kill": (
        [raised(0, 20.0), outcome(3)],
        "srun: error: h01: task 0: Exited with exit code 1\n" + KILLED_3,
        (0, "RuntimeError: boom"),
    ),
    "a peer that did not end in KillWait is no first failure": (
        [raised(0, 20.0), outcome(3)],
        "srun: error: h01: task 0: Exited with exit code 1\n"
        "slurmstepd: error: *** STEP 17.0 ON h01 CANCELLED AT 2026-01-01T00:00:00 ***\n"
        "srun: error: h02: task 3: Killed\n",
        (0, "RuntimeError: boom"),
    ),
    **{
        f"a peer that did not end in KillWait, in the words of Slurm {version}": (
            [exited(0, 20.0, 1), outcome(3)],
            f"srun: error: h01: task 0: Exited with exit code 1\n{words}\n"
            "srun: error: h02: task 3: Killed\n",
            (0, "exit code 1"),
        )
        for version, words in {
            "22.05": "srun: launch/slurm: _step_signal: Terminating StepId=17.0",
            "23.02": "srun: Terminating StepId=17.0",
        }.items()
    },
    "a rank that hung, before those that gave up waiting for it": (
        [lost(0, 20.0), outcome(1, ended=25.0, exit_code=137, signal="SIGKILL", hung="in a loop")],
        "", (1, "hung: in a loop"),
    ),
    "a rank that hung, killed with its parent": (
        [
            lost(0, 20.0),
            outcome(1, hung="in a loop"),
            outcome(2, ended=20.1, exit_code=134, signal="SIGABRT"),
        ],
        "", (1, "hung: in a loop"),
    ),
    "a rank that hung, which Slurm killed with its parent once the others had left": (
        [lost(0, 20.0), outcome(1, hung="in a loop")],
        "srun: error: h01: task 0: Exited with exit code 1\nsrun: error: h01: task 1: Killed\n",
        (1, "hung: in a loop"),
    ),
    "a rank that hung, and was killed before any other end": (
        [lost(0, 20.0), outcome(1, hung="in a loop")],
        "srun: error: h01: task 1: Killed\nsrun: error: h01: task 0: Exited with exit code 1\n",
        (1, "killed by SIGKILL"),
    ),
    "a rank that is killed while another takes its time to save": (
        [replace(lost(0, 20.0), hung="saving"), signalled(1, 20.1, "SIGKILL")],
        "", (1, "killed by SIGKILL"),
    ),
    "an exception beside a rank that hung": (
        [raised(0, 20.0), outcome(1, hung="in a loop")], "", (0, "RuntimeError: boom"),
    ),
    "a rank that was suspected and ended well": (
        [outcome(0, ended=50.0, exit_code=0, hung="in a loop"), exited(1, 51.0, 3)],
        "", (1, "exit code 3"),
    ),
    "an agent, killed above two ranks that then saved": (
        [exited(rank, 21.0, 75) for rank in range(4)],
        "srun: error: h02: task 1: Killed\n"
        "slurmstepd: error: *** STEP 17.0 ON h01 CANCELLED AT 2026-01-01T00:00:00 ***\n",
        (2, f"{ABOVE} was killed by SIGKILL"),
    ),
    "submitit's process, killed above a command that took the signal for an end": (
        [signalled(0, 21.0, "SIGTERM"), signalled(1, 20.9, "SIGTERM")],
        "srun: error: h01: task 1: Segmentation fault (core dumped)\n"
        "srun: error: h01: task 0: Terminated\n",
        (1, f"{ABOVE} was killed by SIGSEGV"),
    ),
    "an agent, killed above a rank that lost its store": (
        [raised(0, 20.0, "the store is gone"), lost(2, 20.1)],
        "srun: error: h01: task 0: Killed\nsrun: error: h02: task 1: Exited with exit code 1\n",
        (0, f"{ABOVE} was killed by SIGKILL"),
    ),
    "a launch prefix, killed above a command that exits with 0 when it is told to end": (
        [done(0), done(1)], "srun: error: h01: task 1: Killed\n",
        (1, f"{ABOVE} was killed by SIGKILL"),
    ),
    "an agent of a rehearsal, whose hosts are addresses": (
        [outcome(rank, host=f"127.0.0.{1 + rank // 2}", ended=21.0, exit_code=75)
         for rank in range(4)],
        "srun: error: 127.0.0.2: task 1: Killed\n", (2, f"{ABOVE} was killed by SIGKILL"),
    ),
    "an agent that Slurm had to kill at the end": (
        [exited(0, 20.0, 3), *(signalled(rank, 21.0, "SIGTERM") for rank in (1, 2, 3))],
        "srun: error: h01: task 0: Exited with exit code 1\nsrun: error: h02: task 1: Killed\n",
        (0, "exit code 3"),
    ),
    "a launch prefix that took a signal meant for the ranks": (
        [exited(0, 20.0, 75), exited(1, 20.0, 75)],
        "srun: error: h01: tasks 0-1: User defined signal 1\n", None,
    ),
    "a rank that vanished without a word": (
        [lost(0, 20.0), outcome(1)], "", (1, "left no record of its end"),
    ),
    "only consequences": ([lost(0, 20.0), lost(1, 19.0)], "", (1, "RuntimeError: Connection")),
    "cancelled": (
        [signalled(0, 20.0, "SIGTERM"), signalled(1, 20.1, "SIGTERM")],
        "srun: error: h01: tasks 0-1: Terminated\n",
        (0, "killed by SIGTERM (cancelled, time limit or preempted)"),
    ),
    "no task could start": (
        [], "srun: error: h01: tasks 0,2: Exited with exit code 2\n", (0, "exit code 2"),
    ),
    "still running": ([outcome(0), outcome(1)], "", None),
    "an agent's line is not about the rank of that number": (
        [done(0), done(1), outcome(2, host="h02"), lost(3, 20.0)],
        "srun: error: h01: task 2: Killed\n",
        (2, "left no record of its end"),
    ),
}  # fmt: skip


# --- the same faults over gloo and over NCCL

TIMED_OUT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=58, OpType=ALLREDUCE, "
    "NumelIn=28938, NumelOut=28938, Timeout(ms)=660000) ran for 660012 milliseconds before timing "
    "out."
)
PEER_GONE = "NCCL error: remote process exited or there was a network error, NCCL version 2.30.7"
ASSERTED = "CUDA error: device-side assert triggered"


def log_of(rank: int, message: str, group: str = "[PG ID 0 PG GUID 0(default_pg) Rank {}]") -> str:
    """The log of a rank that NCCL's watchdog has ended, as torch 2.15 writes it."""
    name, at = group.format(rank), f"[rank{rank}]:[E1122 14:03:07.195 ProcessGroupNCCL.cpp"
    return (
        "step 57: loss 0.2114\n"
        f"{at}:689] [Rank {rank}] {message}\n"
        f"{at}:2241] {name} To avoid data inconsistency, we are taking the entire process down.\n"
        f"{at}:2068] {name} Process group watchdog thread terminated with exception: [Rank {rank}] "
        f"{message}\n"
        "Exception raised from checkTimeout at ProcessGroupNCCL.cpp:691 (most recent call first):\n"
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f in libc10.so)\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"  what():  {name} Process group watchdog thread terminated with exception: [Rank {rank}] "
        f"{message}\n"
        "Exception raised from checkTimeout at ProcessGroupNCCL.cpp:691 (most recent call first):\n"
    )


def aborted(rank: int, ended: float, message: str = TIMED_OUT) -> Outcome:
    """As its parent records it from the log; without a message, the log cannot be read."""
    error = parse_abort(log_of(rank, message)) if message else None
    return outcome(rank, ended=ended, exit_code=134, signal="SIGABRT", error=error)


def waited(rank: int, ended: float) -> Outcome:
    """As a rank reports that our own watchdog has told to leave."""
    message = f"rank {rank} on h01 has not moved for 600 s: rank 3 on h02 does not answer"
    error = TaskError("", message, peer_lost=True)
    return outcome(rank, ended=ended, exit_code=1, error=error)


def hung(outcome: Outcome, where: str = "fetching the batch of step 58") -> Outcome:
    return replace(outcome, hung=where)


NODE_LOST_LOG = "srun: error: Node failure on h02\nsrun: Terminating StepId=17.0\n"
ALL_LEFT = "srun: error: h01: tasks 0-1: Exited with exit code 134\n"
Seen = tuple[list[Outcome], str]
# Ranks 0 and 1 are on h01, 2 and 3 on h02: the fault, over gloo, over NCCL, who is named, and why.
FAULTS: dict[str, tuple[Seen, Seen, int, str]] = {
    "a node is lost": (
        ([lost(0, 20.0), lost(1, 20.1), outcome(2), outcome(3)], NODE_LOST_LOG),
        ([aborted(0, 20.0), aborted(1, 20.1), outcome(2), outcome(3)], NODE_LOST_LOG),
        2, "left no record of its end",
    ),
    "a node is lost, and its connections are": (
        ([lost(0, 20.0), lost(1, 20.1), outcome(2), outcome(3)], ""),
        ([aborted(0, 20.0, PEER_GONE), aborted(1, 20.1, PEER_GONE), outcome(2), outcome(3)], ""),
        2, "left no record of its end",
    ),
    "a node is lost, and the watchdog is first": (
        ([lost(0, 20.0), lost(1, 20.1), hung(outcome(2)), hung(outcome(3))], ""),
        ([waited(0, 620.0), waited(1, 620.1), hung(outcome(2)), hung(outcome(3))], ""),
        2, "hung: fetching the batch of step 58",
    ),
    "a rank is killed": (
        ([lost(0, 20.1), lost(1, 20.1), lost(2, 20.1), signalled(3, 20.0, "SIGKILL")], ""),
        ([aborted(0, 620.0), waited(1, 620.0), aborted(2, 620.0, PEER_GONE),
          signalled(3, 20.0, "SIGKILL")], ""),
        3, "killed by SIGKILL",
    ),
    "a rank is killed with its parent": (
        ([lost(0, 20.1), lost(1, 20.1), lost(2, 20.1), outcome(3)], KILLED_3),
        ([aborted(0, 20.1), signalled(1, 20.1, "SIGTERM"), aborted(2, 20.2), outcome(3)],
         KILLED_3 + ALL_LEFT),
        3, "killed by SIGKILL",
    ),
    "a rank hangs": (
        ([lost(0, 620.0), lost(1, 620.0), lost(2, 620.0),
          hung(signalled(3, 650.0, "SIGKILL"))], ""),
        ([waited(0, 620.0), waited(1, 620.0), waited(2, 620.0), hung(waited(3, 620.0))], ""),
        3, "hung: fetching the batch of step 58",
    ),
    "a rank hangs in native code, and NCCL is first": (
        ([lost(0, 620.0), lost(1, 620.0), lost(2, 620.0), hung(outcome(3))], ALL_LEFT),
        ([aborted(0, 660.0), aborted(1, 660.1), aborted(2, 660.0), hung(outcome(3))], ALL_LEFT),
        3, "hung: fetching the batch of step 58",
    ),
    "a rank hangs and there is no watchdog": (
        ([lost(0, 620.0), lost(1, 620.0), lost(2, 620.0), outcome(3)], ALL_LEFT),
        ([aborted(0, 620.0), aborted(1, 620.1), aborted(2, 620.0), outcome(3)], ALL_LEFT),
        3, "left no record of its end",
    ),
    "a rank hangs, and what the others logged is gone": (
        ([lost(0, 620.0), lost(1, 620.0), lost(2, 620.0), hung(outcome(3))], ""),
        ([aborted(0, 660.0, ""), aborted(1, 660.1, ""), aborted(2, 660.0, ""),
          hung(outcome(3))], ""),
        3, "hung: fetching the batch of step 58",
    ),
    "a rank raises an error of its own": (
        ([lost(0, 20.0), lost(1, 20.1), lost(2, 20.1), raised(3, 20.0)], ""),
        ([aborted(0, 20.0, PEER_GONE), waited(1, 620.0), aborted(2, 19.9, PEER_GONE),
          raised(3, 20.0)], ""),
        3, "RuntimeError: boom",
    ),
    "a rank exits with a code of its own": (
        ([lost(0, 20.0), lost(1, 20.1), lost(2, 20.1), exited(3, 20.0, 7)], ""),
        ([aborted(0, 19.9, PEER_GONE), aborted(1, 620.0), waited(2, 620.0), exited(3, 20.0, 7)],
         ""),
        3, "exit code 7",
    ),
    "a rank leaves early with exit code 0": (
        ([lost(0, 20.0), lost(1, 20.1), lost(2, 20.1), done(3)], ""),
        ([aborted(0, 20.0), aborted(1, 20.1), waited(2, 20.1), done(3)], ""),
        3, "exit code 0 before the others were done",
    ),
    "a rank's GPU fails": (
        ([lost(0, 20.0), lost(1, 20.1), lost(2, 20.1), raised(3, 20.0, ASSERTED)], ""),
        ([aborted(0, 19.9), aborted(1, 20.1), aborted(2, 20.1), aborted(3, 20.0, ASSERTED)], ""),
        3, ": CUDA error: device-side assert triggered",
    ),
    "the network is cut between all": (
        ([lost(0, 20.3), lost(1, 20.2), lost(2, 20.1), lost(3, 20.0)], ""),
        ([aborted(0, 20.3), aborted(1, 20.2), aborted(2, 20.1), aborted(3, 20.0)], ""),
        3, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_blamed_on_the_same_rank_over_gloo_and_over_nccl(
    fault: str, backend: str
) -> None:
    over_gloo, over_nccl, rank, reason = FAULTS[fault]
    outcomes, log = over_gloo if backend == "gloo" else over_nccl
    failure = first_failure(outcomes, log)
    assert failure is not None
    assert failure.rank == rank
    assert reason in failure.reason


@pytest.mark.parametrize(
    ("log", "message", "lost"),
    [
        (log_of(3, TIMED_OUT), TIMED_OUT, True),
        (log_of(3, TIMED_OUT, "[PG 0 Rank {}]"), TIMED_OUT, True),  # torch 2.4
        (log_of(3, PEER_GONE), PEER_GONE, True),
        (log_of(3, ASSERTED), ASSERTED, False),
        (
            "F1122 ProcessGroupNCCL.cpp:1557] [PG ID 0 Rank 1] Terminating the process after "
            "attempting to dump debug info, due to collective timeout or exception. ",
            "collective timeout or exception. ",
            True,
        ),
    ],
)
def test_why_nccls_watchdog_ended_a_process_is_read_off_its_log(
    log: str, message: str, lost: bool
) -> None:
    assert parse_abort(log) == TaskError("NCCL's watchdog", message, lost)


def test_what_nccls_watchdog_threw_says_more_than_that_it_ended_the_process() -> None:
    """The latter is said of any exception, in words that blame another rank."""
    threw = "[Rank 1] watchdog thread terminated with exception: CUDA error: illegal address"
    ended = (
        "Terminating the process after attempting to dump debug info, due to collective timeout or "
        "exception."
    )
    error = parse_abort(f"{threw}\n{ended}\n")
    assert error and not error.peer_lost and "illegal address" in error.message


@pytest.mark.parametrize(
    "log", ["", "free(): invalid pointer\n", "terminate called after throwing an instance of 'E'\n"]
)
def test_another_abort_is_not_put_down_to_nccl(log: str) -> None:
    assert parse_abort(log) is None


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("NCCL error in: NCCLUtils.cpp:95, remote process exited or there was a network error",
         True),
        ("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)\n"
         "ncclSystemError: System call (e.g. socket, malloc) or external library call failed\n"
         "Last error:\nsocketProgress: Connection closed by remote peer h02<41234>", True),
        ("NCCL error: unhandled system error\nLast error:\nError while creating shared memory "
         "segment /dev/shm/nccl-x (size 33030528), error: No space left on device (28)", False),
        ("[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
         "key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms",
         True),
        ("NCCL error: unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.",
         False),
        ("CUDA error: out of memory", False),
    ],
)  # fmt: skip
def test_nccls_errors_that_blame_another_rank_are_known(message: str, lost: bool) -> None:
    assert is_peer_loss(RuntimeError(message)) is lost


@pytest.mark.parametrize("name", CASES)
def test_the_rank_that_failed_first_is_named(name: str) -> None:
    outcomes, job_log, expected = CASES[name]
    failure = first_failure(outcomes, job_log)
    if expected is None:
        assert failure is None
    else:
        assert failure is not None
        assert failure.rank == expected[0]
        assert failure.reason.startswith(expected[1])


def test_the_failing_ranks_own_code_is_kept() -> None:
    for outcomes, job_log, code in (
        ([exited(0, 20.0, 3)], "", 3),
        ([signalled(0, 20.0, "SIGKILL")], "", 137),
        ([outcome(3)], KILLED_3, 137),
    ):
        failure = first_failure(outcomes, job_log)
        assert failure is not None and failure.exit_code == code


def test_a_failure_is_one_line_with_rank_host_reason_and_log() -> None:
    failure = first_failure([raised(3, 20.0, "boom\nand more")])
    assert failure == Failure(3, "h02", "RuntimeError: boom", "logs/rank-3.log", 1)
    assert failure.describe() == (
        "rank 3 on h02 failed first: RuntimeError: boom (logs/rank-3.log)"
    )


def test_the_records_of_one_start_are_read_by_rank(tmp_path: Path) -> None:
    for rank in (10, 0, 2):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(outcome(rank).__dict__))
    (tmp_path / "rank-7.json").write_text('{"rank": 7, "torn')
    (tmp_path / "rank-8.json").write_text('{"rank": 8}')
    (tmp_path / ".rank-9.json.draft").write_text("{}")
    assert [o.rank for o in read_outcomes(tmp_path)] == [0, 2, 10]
    assert read_outcomes(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"ended": "later"}, {"rank": "1"}, {"rank": None}, {"host": None}, {"exit_code": "1"},
        {"signal": 9}, {"error": "boom"}, {"local_rank": []}, {"hung": {}},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_holds_something_else_is_passed_over(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(vars(exited(rank, 20.0, 1))))
    (tmp_path / "rank-1.json").write_text(json.dumps({**vars(exited(1, 10.0, 1)), **wrong}))
    found = read_outcomes(tmp_path)
    assert [o.rank for o in found] == [0]
    assert first_failure(found) == failure_of(exited(0, 20.0, 1))


def test_the_clocks_of_hosts_are_read_with_the_ranks_ends(tmp_path: Path) -> None:
    for rank in (0, 2):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(outcome(rank).__dict__))
    note_clocks(tmp_path, {"h01": 0.0})
    assert [o.clock_ahead for o in read_outcomes(tmp_path)] == [0.0, None]
    (tmp_path / "clocks.json").write_text('{"h01": "later", "h02": [1]}')
    assert [o.clock_ahead for o in read_outcomes(tmp_path)] == [None, None]


def test_a_rank_that_hangs_is_noted_until_it_goes_on(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(outcome(rank).__dict__))
    note_hung(tmp_path, (1,), "fetching the batch of step 7")
    assert [o.hung for o in read_outcomes(tmp_path)] == ["", "fetching the batch of step 7"]
    note_hung(tmp_path, (), "")
    note_hung(tmp_path, (), "")
    assert [o.hung for o in read_outcomes(tmp_path)] == ["", ""]
    (tmp_path / "hung.json").write_text('{"ranks": 1}')
    assert [o.hung for o in read_outcomes(tmp_path)] == ["", ""]


def test_a_rank_whose_end_is_recorded_does_not_hang(tmp_path: Path) -> None:
    for each in (outcome(0), signalled(1, 20.0, "SIGKILL"), outcome(2)):
        (tmp_path / f"rank-{each.rank}.json").write_text(json.dumps(vars(each)))
    note_hung(tmp_path, (1, 2, 3), "it did not answer")
    assert [o.hung for o in read_outcomes(tmp_path)] == ["", "", "it did not answer"]
    note_hung(tmp_path, (1,), "it did not answer")
    assert [o.hung for o in read_outcomes(tmp_path)] == ["", "", ""]


def test_a_kill_that_srun_saw_first_is_told_apart_from_a_request_to_stop() -> None:
    saved = [exited(0, 20.0, 75), exited(1, 20.0, 75)]
    vanished = [exited(0, 20.0, 75), outcome(1)]
    killed = "srun: error: h01: task 1: Killed\n"
    for outcomes, log, rank in (
        (saved, killed, 1),
        (vanished, killed, 1),
        (saved, "", None),
        (saved, "srun: error: h01: task 1: Terminated\n", None),
        (saved, "srun: error: h01: task 1: User defined signal 1\n", None),
        (saved, "slurmstepd: error: *** STEP 17.0 ON h01 CANCELLED ***\n" + killed, None),
        (saved, "srun: error: h01: task 0: Exited with exit code 1\n" + killed, None),
    ):
        found = first_killed(outcomes, log)
        assert (found and found.rank) == rank, log


def test_a_rank_that_saved_and_left_has_not_failed() -> None:
    paused = exited(0, 20.0, 75)
    assert (paused.paused, paused.failed) == (True, False)
    assert first_failure([paused, exited(1, 20.0, 75)]) is None
    failure = first_failure([paused, exited(1, 21.0, 3)])
    assert failure is not None and failure.rank == 1


FRAMES = (
    'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\n    ~^^\n'
)


@pytest.mark.parametrize(
    ("log", "type_", "message"),
    [
        (f"epoch 1\n{FRAMES}ValueError: boom\n", "ValueError", "boom"),
        (f"{FRAMES}ValueError: boom\nof two lines\nTypeError: no\n", "ValueError", "boom"),
        (f"{FRAMES}OSError: a:\nTried b, got:\n<urlopen>\nx", "OSError",
         "a:\nTried b, got:\n<urlopen>"),
        (f"{FRAMES}KeyError: 'a'\n\nDuring handling …:\n\n{FRAMES}OSError: b", "OSError", "b"),
        (f"{FRAMES}AssertionError\n", "AssertionError", ""),
        (f"{FRAMES}torch.OutOfMemoryError: CUDA: x\n", "torch.OutOfMemoryError", "CUDA: x"),
        (f"{FRAMES}Grün: \x1b[31mred\n", "Grün", "\\x1b[31mred"),
        ("".join(f"[rank3]: {line}\n" for line in f"{FRAMES}ValueError: b".splitlines()),
         "ValueError", "b"),
        ('  File "t.py", line 1\n    )\n    ^\nSyntaxError: no\n', "SyntaxError", "no"),
    ],
)  # fmt: skip
def test_the_last_traceback_names_the_exception(log: str, type_: str, message: str) -> None:
    assert parse_traceback(log) == TaskError(type_, message, of_command=True)


CALLED = "subprocess.CalledProcessError: Command '['/bin/python', 't.py']' returned 1."
CHILD = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\nt.py FAILED\n"
CLOSED = "RuntimeError: [gloo/pair.cc:534] Connection closed by peer [10.77.0.3]:1"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (f"{FRAMES}ValueError: boom\n{FRAMES}{CALLED}\n", "ValueError: boom"),
        (f"{FRAMES}ValueError: boom\n{FRAMES}{CHILD}", "ValueError: boom"),
        (f"{FRAMES}OSError: a\n[rank1]: Late\n{FRAMES}{CLOSED}\n{FRAMES}{CHILD}\n{FRAMES}{CALLED}",
         "OSError: a"),
        (f"{FRAMES}{CLOSED}\n{FRAMES}{CALLED}", CLOSED),
        (f"/bin/python: No module named no_pkg\n{FRAMES}{CALLED}",
         "ModuleNotFoundError: No module named no_pkg"),
        (f"  File 't.py', line 1\nSyntaxError: no\n{FRAMES}{CALLED}", "SyntaxError: no"),
        (f"{FRAMES}{CALLED}", CALLED),
        (f"{FRAMES}OSError: a\n\nDuring handling of the above exception, another exception "
         f"occurred:\n\n{FRAMES}{CALLED}", CALLED),
        (f"{FRAMES}OSError: handled\n{FRAMES}{CALLED}".replace("/bin/python", "ffmpeg"),
         CALLED.replace("/bin/python", "ffmpeg")),
    ],
)  # fmt: skip
def test_the_error_of_a_launchers_child_stands_for_the_launchers_own(log: str, reason: str) -> None:
    error = parse_traceback(log)
    assert error is not None
    assert f"{error.type}: {error.message}" == reason


@pytest.mark.parametrize(
    "log",
    [
        "",
        "ValueError: of no traceback\n",
        FRAMES,
        f"{FRAMES}*** what is this\n",
        "my Traceback (most recent call last):\nValueError: x\n",
    ],
)
def test_what_is_no_traceback_names_nothing(log: str) -> None:
    assert parse_traceback(log) is None


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ("RuntimeError: [gloo/…/pair.cc:534] Connection closed by peer [10.77.0.3]:1", True),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1", True),
        ("RuntimeError: boom", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),  # a download's
        ("BrokenPipeError: [Errno 32] Broken pipe", False),
    ],
)
def test_the_loss_of_a_peer_is_told_from_an_error_of_its_own(words: str, lost: bool) -> None:
    error = parse_traceback(FRAMES + words)
    assert error is not None
    assert error.peer_lost is lost


@pytest.mark.parametrize(
    ("content", "type_", "message"),
    [
        ({"message": {"message": "ValueError: a\nb", "extraInfo": {}}}, "ValueError", "a\nb"),
        ({"message": "ValueError: a"}, "ValueError", "a"),
        ({"message": "all went wrong!"}, "", "all went wrong!"),
        ({"message": "E: " + "x" * 9999}, "E", "x" * LONGEST_MESSAGE),
    ],
)
def test_torchs_error_file_is_read(tmp_path: Path, content: Any, type_: str, message: str) -> None:
    path = tmp_path / "error-0.json"
    path.write_text(json.dumps(content))
    assert parse_error_file(path) == TaskError(type_, message, of_command=True)


@pytest.mark.parametrize(
    "content", ["", "{", "[" * 99999, "[]", "{}", '{"message": 3}', '{"message": {"message": " "}}']
)
def test_another_file_in_its_place_is_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "error-0.json"
    assert parse_error_file(path) is None
    path.write_text(content)
    assert parse_error_file(path) is None


def test_no_pipe_is_waited_for_no_link_followed_and_no_giant_read(tmp_path: Path) -> None:
    pipe, link, giant = tmp_path / "pipe", tmp_path / "link", tmp_path / "giant"
    os.mkfifo(pipe)
    (tmp_path / "real").write_text('{"message": "E: a"}')
    link.symlink_to("real")
    with giant.open("w") as file:
        file.write('{"message": "E: a"}' + " " * (1 << 21))
    assert [parse_error_file(path) for path in (pipe, link, giant, tmp_path)] == [None] * 4


@pytest.mark.parametrize("value", [value for value in CARRIED + REFUSED if "\0" not in value])
def test_every_message_is_carried_as_text(tmp_path: Path, value: str) -> None:
    path = tmp_path / "error-0.json"
    path.write_text(json.dumps({"message": f"E: {value}"}))
    error = parse_error_file(path)
    assert error is not None
    assert all(c.isprintable() or c == "\n" for c in error.type + error.message)


def outcome_of(tmp_path: Path, program: str, environ: dict[str, str] | None = None) -> Outcome:
    """How rank 0 of a command ended, whose log is a file as under srun."""
    run = RunDir(tmp_path / "run")
    run.make(run.logs, run.attempts, Attempt(run, 1).path, Attempt(run, 1).outcomes)
    argv = [sys.executable, "-m", "clusterddp", "exec", "--run-dir", str(run.path), "--attempt=1"]
    with run.rank_log(0).open("a") as log:
        log.write(f"{FRAMES}OfTheLastTime: x\n")
        log.flush()
        subprocess.run(
            [*argv, "--", sys.executable, "-c", program],
            stdout=log, stderr=log, check=False, env={**os.environ, **(environ or {})},
        )  # fmt: skip
    [outcome] = read_outcomes(Attempt(run, 1).outcomes)
    return outcome


def test_a_commands_exception_is_recorded(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, "raise ValueError('boom')")
    assert (outcome.exit_code, outcome.reason) == (1, "ValueError: boom")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit('no')", "exit code 1"),  # of this attempt there is no traceback
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import sys, traceback\ntry: 1/0\nexcept Exception: traceback.print_exc(); sys.exit(4)",
         "exit code 4"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("1/0", "ZeroDivisionError: division by zero"),
        ("raise RuntimeError('Error downloading a.gz:\\nTried b, got:\\n<urlopen error>\\nx')",
         "RuntimeError: Error downloading a.gz: Tried b, got: <urlopen error>"),
        ("import sys; print('x' * 999999, file=sys.stderr); raise OSError('late')",
         "OSError: late"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("import os; os.write(2, b'Process group watchdog thread terminated with exception: late')"
         "; os.abort()", "NCCL's watchdog: late"),
    ],
)  # fmt: skip
def test_only_an_exception_that_ended_the_command_counts(
    tmp_path: Path, program: str, reason: str
) -> None:
    assert outcome_of(tmp_path, program).reason == reason


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise LookupError("as torch\\nrecords it")
try:
    main()
except LookupError:
    raise SystemExit(5)
"""


def test_torchs_record_decorator_is_heard(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, RECORDED)
    assert (outcome.exit_code, outcome.reason) == (5, "LookupError: as torch")
    assert outcome.error is not None
    assert outcome.error.message == "as torch\nrecords it"


@pytest.mark.slow
def test_an_agents_own_error_file_is_left_to_it(tmp_path: Path) -> None:
    agents = tmp_path / "agents.json"
    outcome = outcome_of(tmp_path, RECORDED, {"TORCHELASTIC_ERROR_FILE": str(agents)})
    assert outcome.reason == "LookupError: as torch"
    assert agents.is_file()


@pytest.mark.parametrize("words", [["-m", "no_such_pkg"], ["-m", "no_such_pkg.train"]])
def test_a_module_that_python_does_not_find_is_the_error(words: list[str]) -> None:
    said = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert said.returncode == 1
    error = parse_traceback(said.stderr)
    assert error is not None
    assert error.type == "ModuleNotFoundError"
    assert "no_such_pkg" in error.message
    failure = Failure(0, "h01", f"{error.type}: {error.message}", "logs/rank-0.log", 1)
    assert end_codes.of_failure(failure) == "CD1217"

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.events import Failure
from clusterddp.run.outcome import (
    Outcome,
    failure_of,
    first_failure,
    first_killed,
    note_clocks,
    note_hung,
    read_outcomes,
)
from clusterddp.run.records import TaskError
from clusterddp.worker.supervise import is_peer_loss, parse_abort


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


ABOVE = "its launcher (an agent, submitit's process or a wrapper)"
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
        [signalled(1, 20.5, "SIGKILL")], "srun: error: h01: task 0: Exited with exit code 1\n",
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
        [lost(0, 20.0), raised(1, 21.0), signalled(2, 22.0, "SIGTERM"), lost(3, 19.0)], "",
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
        KILLED_3 + "srun: error: h01: task 0: Terminated\n", (3, "killed by SIGKILL"),
    ),
    "out of memory": (
        [lost(0, 20.0), outcome(1)], "srun: error: h01: task 1: Out Of Memory\n",
        (1, "out of memory (killed by the kernel)"),
    ),
    "an exception before a kill": (
        [raised(0, 20.0), outcome(3)],
        "srun: error: h01: task 0: Exited with exit code 1\n" + KILLED_3, (0, "RuntimeError: boom"),
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
            lost(0, 20.0), outcome(1, hung="in a loop"),
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
        "srun: error: h01: task 2: Killed\n", (2, "left no record of its end"),
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
    message = f"rank {rank} on h01 has not moved for 10m00s: rank 3 on h02 does not respond"
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
        ("F1122 ProcessGroupNCCL.cpp:1557] [PG ID 0 Rank 1] Terminating the process after "
         "attempting to dump debug info, due to collective timeout or exception. ",
         "collective timeout or exception. ", True),
    ],
)  # fmt: skip
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
    stopped = exited(0, 20.0, 75)
    assert (stopped.stopped, stopped.failed) == (True, False)
    assert first_failure([stopped, exited(1, 20.0, 75)]) is None
    failure = first_failure([stopped, exited(1, 21.0, 3)])
    assert failure is not None and failure.rank == 1

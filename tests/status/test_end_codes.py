"""Codes of failed ranks, by what is known of their ends."""

import dataclasses

import pytest

from clusterddp.explained import catalogue
from clusterddp.run.events import Failure
from clusterddp.run.outcome import _LAUNCHER, failure_of
from clusterddp.run.records import Outcome, TaskError
from clusterddp.status import end_codes

OUTCOME = Outcome(3, 1, 1, "h02", 4711, "89", 0, "0", 1.0, ended=2.0, exit_code=1)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TaskError("ValueError", "bad label"), "CD1209"),
        (TaskError("ValueError", "ProcessGroupNCCL is only supported with GPUs, no"), "CD0804"),
        (TaskError("torch.OutOfMemoryError", "CUDA out of memory. Tried to"), "CD1212"),
        (TaskError("RuntimeError", "CUDA out of memory. Tried to"), "CD1212"),
        (TaskError("AcceleratorError", "CUDA error: out of memory"), "CD1212"),
        (TaskError("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you"), "CD1211"),
        (
            TaskError("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed."),
            "CD1211",
        ),
        (TaskError("ModuleNotFoundError", "No module named 'einops'"), "CD1217"),
        (TaskError("RuntimeError", "No CUDA GPUs are available"), "CD0804"),
        (TaskError("OSError", "[Errno 28] No space left on device"), "CD0504"),
        (TaskError("DistBackendError", "NCCL error in: …"), "CD1215"),
        (TaskError("RuntimeError", "Connection closed by peer", peer_lost=True), "CD1215"),
        (TaskError("", "the loss is nan", code="CD0810"), "CD0810"),
        (TaskError("NCCL's watchdog", "Process group watchdog thread terminated"), "CD1215"),
        (TaskError("RuntimeError", "helper left with exit code 3"), "CD1209"),
        (TaskError("RuntimeError", "helper left with exit code 137"), "CD1209"),
        (TaskError("ValueError", "task was killed by SIGTERM"), "CD1209"),
        (TaskError("ValueError", "the helper was killed by SIGSEGV"), "CD1209"),
        (TaskError("ValueError", "set NCCL_DEBUG to INFO"), "CD1209"),
        (None, "CD1210"),
    ],
)
def test_a_failed_ranks_error_gives_the_code(error: TaskError | None, code: str) -> None:
    outcome = dataclasses.replace(OUTCOME, error=error)
    assert end_codes.code_of_failure(failure_of(outcome), [outcome]) == code
    assert code in catalogue()


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("killed by SIGKILL", "CD1211"),
        ("out of memory (killed by the kernel)", "CD1211"),
        ("killed by SIGSEGV", "CD1213"),
        ("exit code 137", "CD1211"),
        ("exit code 139", "CD1213"),
        ("killed by SIGBUS", "CD1216"),
        ("exit code 135", "CD1216"),
        (f"{_LAUNCHER} was killed by SIGKILL", "CD1211"),
        (f"{_LAUNCHER} was out of memory (killed by the kernel)", "CD1211"),
        (f"{_LAUNCHER} was killed by SIGABRT", "CD1213"),
        ("exit code 130", "CD1210"),
        ("RuntimeError: DataLoader worker (pid(s) 57) exited unexpectedly", "CD1211"),
        ("exit code 127", "CD0316"),
        ("exit code 3", "CD1210"),
        ("exit code 0 before the others were done", "CD1210"),
        ("killed by SIGTERM (cancelled, time limit or preempted)", "CD1210"),
        ("left no record of its end", "CD1219"),
    ],
)
def test_what_srun_says_gives_the_code(reason: str, code: str) -> None:
    assert end_codes.code_of_failure(Failure(3, "h02", reason, "logs/rank-3.log")) == code


def test_hardware_and_a_hang_come_before_the_error() -> None:
    outcome = dataclasses.replace(OUTCOME, error=TaskError("RuntimeError", "CUDA out of memory"))
    assert end_codes.code_of_failure(failure_of(outcome), [outcome], "Xid") == "CD1216"
    hung = dataclasses.replace(outcome, hung="no step for 600 s")
    assert end_codes.code_of_failure(failure_of(hung), [hung]) == "CD1214"

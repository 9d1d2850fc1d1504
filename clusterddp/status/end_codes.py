"""Error codes for how attempts, runs and jobs end.

`clusterddp explain CODE` explains each code.
"""

import re
from collections.abc import Sequence

from clusterddp.run.events import Cause, Failure
from clusterddp.run.records import Outcome
from clusterddp.slurm.states import State
from clusterddp.status.state import RunState

BY_CAUSE: dict[str, str] = {
    Cause.SUPERSEDED: "CD1201",
    Cause.NODE_LOST: "CD1202",
    Cause.CANCELLED: "CD1203",
    Cause.STOPPED: "CD1204",
    Cause.TIME_LIMIT: "CD1205",
    Cause.PREEMPTED: "CD1206",
    Cause.REQUEUED: "CD1207",
    Cause.SIGNAL: "CD1208",
    Cause.SUSPENDED: "CD1230",
    Cause.PREFLIGHT: "CD1301",
    Cause.NOT_LAUNCHED: "CD1231",
    Cause.NOT_DUE: "CD1106",
}
"""Error code of each cause; a failure's code depends on its reason, and done has none."""
BY_JOB_STATE = {
    State.FAILED: "CD1218",
    State.TIMEOUT: "CD1205",
    State.PREEMPTED: "CD1206",
    State.NODE_FAIL: "CD1202",
    State.OUT_OF_MEMORY: "CD1211",
    State.DEADLINE: "CD1205",
    State.BOOT_FAIL: "CD1202",
}
"""Codes of a job whose failure only Slurm reports."""
BY_RUN_STATE = {
    RunState.CANCELLED: "CD1203",
    RunState.STOPPED: "CD1208",
    RunState.UNKNOWN: "CD0509",
}
"""Codes of a run without a recorded end, by its state."""
NOT_SAVED = "CD1220"
"""Code of a command that was killed by the signal that asks it to save."""
EXITED_ON_SIGNAL = "CD1229"
"""Code of a command that exited with 0 because of a signal."""
HUNG, CRASH, EXIT_CODE = "CD1214", "CD1209", "CD1210"
NO_TASK, UNEXPLAINED = "CD1218", "CD1219"
NEVER_STARTS, NOT_RESUMED = "CD0408", "CD1225"
# Messages of clusterddp name a signal at the beginning or after the launcher (`outcome`); a user's
# exception can contain the same text anywhere.
_DIED = r"^(its launcher .* was )?"
_CODE_BY_REASON = (
    (
        r"OutOfMemoryError|(CUDA|HIP)( driver)?( error:)? out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "CD1212",
    ),
    (
        rf"{_DIED}(out of memory \(killed by the kernel\)|killed by SIGKILL)"
        r"|DataLoader worker .* (killed by signal: Killed|exited unexpectedly)"
        r"|MemoryError|(can't|Cannot) allocate memory",
        "CD1211",
    ),
    # A shell reports the signal that ended its child as exit code 128 + N.
    (rf"{_DIED}killed by SIGBUS|^exit code 135$", "CD1216"),
    (rf"{_DIED}killed by SIG(SEGV|ABRT|ILL|FPE)", "CD1213"),
    (r"^exit code 137$", "CD1211"),
    (r"^exit code 1(39|34|32|36)$", "CD1213"),
    (r"No space left on device|Disk quota exceeded", "CD0504"),
    (r"ModuleNotFoundError|ImportError|cannot open shared object file", "CD1217"),
    (r"(EADDRINUSE|[Aa]ddress already in use)", "CD0905"),
    (
        r"No CUDA GPUs are available|invalid device ordinal|NVIDIA driver"
        r"|ProcessGroupNCCL is only supported with GPUs",
        "CD0804",
    ),
    (r"DistStoreError|DistNetworkError|Timed out waiting .* clients? to join", "CD0902"),
    (
        r"^NCCL's watchdog: |DistBackendError|NCCL ([Ee]rror|communicator)|nccl\w+Error"
        r"|collective operation timeout|(closed|reset) by peer",
        "CD1215",
    ),
    (r"^exit code 12[67]$", "CD0316"),
    (rf"^exit code \d+|{_DIED}killed by SIG", EXIT_CODE),
    (r"^left no record of its end$", UNEXPLAINED),
)
"""Codes by a failed rank's reason; the first match counts."""


def code_of_failure(failure: Failure, outcomes: Sequence[Outcome] = (), hardware: str = "") -> str:
    """Return the code of the first failure: the error's own code, or one that fits its reason.

    outcomes: the ranks' records, if any. hardware: the hardware fault that was found, if any.
    """
    outcome = next((each for each in outcomes if each.rank == failure.rank), None)
    error = outcome.error if outcome else None
    if hardware:
        return "CD1216"
    if outcome and outcome.hung:
        return HUNG
    if error and error.code:
        return error.code
    found = (code for words, code in _CODE_BY_REASON if re.search(words, failure.reason))
    return next(found, "CD1215" if error and error.peer_lost else CRASH)

"""Errors that name hardware: of a rank that died of one, its node is blamed (docs/bad-nodes.md).

Only what a library or the kernel says of the hardware counts. A program's own exception, an error
that a wrong kernel gives as well, and the loss of a peer name no node.
"""

import re
import signal
from dataclasses import dataclass

from clusterddp.run.records import TaskError


@dataclass(frozen=True)
class Sign:
    """Words that name hardware, and who says so."""

    name: str
    pattern: re.Pattern[str]
    source: str


_TORCHS = re.compile(r"RuntimeError|(?:torch\.)?AcceleratorError|(?:torch\.distributed\.)?Dist\w+")
"""Exceptions by which torch passes on what CUDA and NCCL say."""
_CUDA = r"\A(?:CUDA error|NCCL error|Cuda failure)\b.*?"
_ENUM = "CUDA Runtime API, enum cudaError"
OF_TORCH = (
    Sign(
        "uncorrectable ECC error",
        re.compile(rf"{_CUDA}uncorrectable ECC error encountered", re.DOTALL),
        f"{_ENUM}: cudaErrorECCUncorrectable (214)",
    ),
    Sign(
        "uncorrectable NVLink error",
        re.compile(rf"{_CUDA}uncorrectable NVLink error detected", re.DOTALL | re.IGNORECASE),
        f"{_ENUM}: cudaErrorNvlinkUncorrectable (220)",
    ),
    Sign(
        "GPU system not initialized",
        re.compile(r"\ACUDA error: system not yet initialized"),
        f"{_ENUM}: cudaErrorSystemNotReady (802)",
    ),
    Sign(
        "NCCL system error of the InfiniBand adapter",
        re.compile(
            r"\ANCCL error.*(?:ncclSystemError|unhandled system error).*"
            r"(?:\bibv_\w+ failed|Got async event : (?:local|port|device) )",
            re.DOTALL,
        ),
        "NCCL, src/misc/ibvwrap.cc and src/transport/net_ib.cc",
    ),
)
"""Words of torch's exceptions. A plain ncclSystemError is what a lost peer gives as well."""
OF_LOG = (
    Sign(
        "Xid",
        re.compile(
            r"^.*NVRM: Xid \(PCI:[0-9a-fA-F:.]+\): (?:48|64|74|79|94|95|119|120|140),.*$",
            re.MULTILINE,
        ),
        "NVIDIA, XID Errors: those that it lays to hardware, not to the application",
    ),
)
"""The kernel's words at the end of a rank's log, where a program or a site prints them there."""
# Below these a path is of the node itself on usual sites; /scratch and /home are often shared.
_LOCAL_EIO = re.compile(
    r"\[Errno 5\] Input/output error: (?P<path>b?['\"]/(?:tmp|var/tmp|local|localscratch)/.*)"
)


def named(error: TaskError | None, exit_code: int | None, log: str) -> str:
    """Name the hardware of which a rank died; empty where nothing names any.

    error: what its parent recorded. exit_code: its own, as a shell gives it. log: the end of its
    log.
    """
    if exit_code == 128 + signal.SIGBUS:
        return "killed by SIGBUS"
    if exit_code in (None, 0):
        return ""
    if error and error.type == "OSError":
        local = _LOCAL_EIO.search(error.message)
        return f"I/O error of the local disk: {local['path'][:200]}" if local else ""
    if error and error.type and not _TORCHS.fullmatch(error.type):
        return ""  # the program's own
    if error and error.type:
        sign = next((each for each in OF_TORCH if each.pattern.search(error.message)), None)
        if sign:
            return f"{sign.name}: {error.message.splitlines()[0][:200]}"
    for sign in OF_LOG:
        if line := sign.pattern.search(log):
            return f"{sign.name}: {line[0].strip()[:200]}"
    return ""


_CRASHES = {128 + getattr(signal, f"SIG{name}") for name in ("SEGV", "ABRT", "ILL", "FPE", "BUS")}
_OF_DEVICE = re.compile(r"(?:RuntimeError|(?:torch\.)?AcceleratorError): (?:CUDA|cuDNN) error\b")


def may_be(reason: str, exit_code: int | None) -> bool:
    """Return whether a failure can be the hardware's, so that its repetition says something.

    reason: the failure's, as recorded. A signal of a crash and an error of the device can; an
    exception of the program, an exit code of its own and a kill cannot.
    """
    return exit_code in _CRASHES or _OF_DEVICE.match(reason) is not None

"""Claim on a run: only one process at a time may resume, clean or remove the run.

Claims are numbered files that are created exclusively on the shared file system. The highest number
counts: a live process holds it, or a dead process left it and the next number is free. A process
that is done removes its claim and all lower ones.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp import files, log
from clusterddp.errors import RequestError
from clusterddp.formatting import setting
from clusterddp.processes.table import process_alive
from clusterddp.request.spec import submission_comment
from clusterddp.run.records import ClaimHolder
from clusterddp.run.run_dir import RunDir

EXPIRES_SECONDS = 900.0
"""Age at which a claim from another host expires: its process cannot be checked from here."""
_NAME = re.compile(r"resume-(\d{1,9})\.claim", re.ASCII)


@contextlib.contextmanager
def claimed(run: RunDir) -> Iterator["Claim"]:
    """Hold the claim on a run while the body reads and changes the run.

    Raises RequestError if another process holds the claim or the claim cannot be written.
    """
    try:
        claim = _take(run)
    except OSError as error:
        raise RequestError(
            f"cannot write to {run.path}: {error.strerror}. Nothing was changed. "
            "Free space there or restore write permission. [CD0504]"
        ) from None
    try:
        yield claim
    finally:
        _release(claim)


@dataclass(frozen=True)
class Claim:
    """Claim on a run and, if its file is readable, the process that holds it."""

    run: RunDir
    number: int
    """Number of the claim, from 1."""
    holder: ClaimHolder

    @property
    def path(self) -> Path:
        return self.run.path / f"resume-{self.number:04d}.claim"

    def use(self) -> None:
        """Raise RequestError if another process has taken over the claim."""
        latest = _latest(self.run)
        if latest != self:
            problem = (
                latest.refusal if latest else f"{self.run.name} was resumed by another process."
            )
            raise RequestError(
                f"{problem} This process took longer than {setting(EXPIRES_SECONDS)} and submitted "
                "nothing. [CD0508]"
            )

    @property
    def refusal(self) -> str:
        """Message for another process that wants the claim."""
        holder = self.holder
        who = "another process"
        if holder.pid is not None:
            who = f"process {holder.pid} on {holder.host}"
        local = time.localtime(holder.time)
        when = f" since {time.strftime('%H:%M:%S', local)}" if holder.time else ""
        return (
            f"{self.run.name} is being resumed by {who}{when}; only one process at a time can "
            f"submit a run. Try again later; see 'clusterddp status {self.run.cli_name}'. If that "
            f"process no longer exists, remove {self.path}."
        )

    @property
    def is_held(self) -> bool:
        alive = process_alive(self.holder.pid, self.holder.host, self.holder.time)
        return files.age(self.path, self.run.path) < EXPIRES_SECONDS if alive is None else alive


def _take(run: RunDir) -> Claim:
    """Create the claim with the next number.

    Raises RequestError if the latest claim is held, and OSError.
    """
    while True:
        latest = _latest(run)
        if latest and latest.is_held:
            raise RequestError(latest.refusal, code="CD0508")
        holder = ClaimHolder(os.uname().nodename, os.getpid(), round(time.time(), 3))
        claim = Claim(run, latest.number + 1 if latest else 1, holder)
        if not files.create_record(claim.path, holder):
            continue
        # The numbers may be outdated: other processes may have taken and released claims.
        if any(each != latest and each.is_held for each in _claims(run) if each != claim):
            claim.path.unlink()
            continue
        if latest:
            log.warning(
                f"a process died while it resumed {run.name}. Its job may be queued: look for "
                f"the comment {submission_comment(run.name)} in: "
                "squeue --me -t all -o '%i %T %V %k' [CD0404]"
            )
        return claim


def _release(claim: Claim) -> None:
    with contextlib.suppress(OSError):  # the claim lapses anyway when this process ends
        for each in _claims(claim.run):
            if each == claim or each.number < claim.number:
                each.path.unlink(missing_ok=True)


def _latest(run: RunDir) -> Claim | None:
    return max(_claims(run), key=lambda claim: claim.number, default=None)


def _claims(run: RunDir) -> list[Claim]:
    with os.scandir(run.path) as entries:
        numbers = [int(name[1]) for entry in entries if (name := _NAME.fullmatch(entry.name))]
    unknown = ClaimHolder()
    claims = [Claim(run, number, unknown) for number in numbers]
    return [replace(each, holder=files.read(ClaimHolder, each.path) or unknown) for each in claims]

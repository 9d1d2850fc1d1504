"""The claim on a run: the right of one process at a time to submit it again, clean or remove it.

Claims are numbered files made by an exclusive create, which hosts share. The highest number counts:
it is held, or was left by a process that has died, after which the next number is free. A process
that is done removes its own and those before.
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
"""A process on another machine, which cannot be looked at, has given up its claim after so long."""
_NAME = re.compile(r"resume-(\d{1,9})\.claim", re.ASCII)


@contextlib.contextmanager
def claimed(run: RunDir) -> Iterator["Claim"]:
    """Hold the claim on a run while the body looks at it and changes it.

    Raises RequestError where another process holds it, or where it cannot be written.
    """
    try:
        claim = _take(run)
    except OSError as error:
        raise RequestError(
            f"{run.path} cannot be written: {error.strerror}. Make room, or give it back its write "
            "permission; nothing was submitted. [CD0504]"
        ) from None
    try:
        yield claim
    finally:
        _release(claim)


@dataclass(frozen=True)
class Claim:
    """Claim on a run, and the process that has it, where that can be read."""

    run: RunDir
    number: int
    """Number of the claim, from 1."""
    holder: ClaimHolder

    @property
    def path(self) -> Path:
        return self.run.path / f"resume-{self.number:04d}.claim"

    def use(self) -> None:
        """Raise RequestError where another process has taken the claim over meanwhile."""
        latest = _latest(self.run)
        if latest != self:
            who = latest.refusal if latest else f"{self.run.name} was resumed by another process."
            raise RequestError(
                f"{who} This process took longer than {setting(EXPIRES_SECONDS)}, and has "
                "submitted nothing. [CD0508]"
            )

    @property
    def refusal(self) -> str:
        """Return what to say to another process."""
        holder = self.holder
        who = f"process {holder.pid} on {holder.host}" if holder.pid is not None else "another"
        local = time.localtime(holder.time)
        when = f" since {time.strftime('%H:%M:%S', local)}" if holder.time else ""
        return (
            f"{self.run.name} is being resumed by {who}{when}: one run cannot be submitted "
            f"twice at once. See 'clusterddp status {self.run.cli_name}' in a moment. Where that "
            f"process is gone, remove {self.path}."
        )

    @property
    def is_held(self) -> bool:
        alive = process_alive(self.holder.pid, self.holder.host, self.holder.time)
        return files.age(self.path, self.run.path) < EXPIRES_SECONDS if alive is None else alive


def _take(run: RunDir) -> Claim:
    """Make the next number. Raises RequestError where the latest one is held, and OSError."""
    while True:
        latest = _latest(run)
        if latest and latest.is_held:
            raise RequestError(latest.refusal, code="CD0508")
        holder = ClaimHolder(os.uname().nodename, os.getpid(), round(time.time(), 3))
        claim = Claim(run, latest.number + 1 if latest else 1, holder)
        if not files.create_record(claim.path, holder):
            continue
        # A look at the numbers that was long ago: others have come and gone since.
        if any(each != latest and each.is_held for each in _claims(run) if each != claim):
            claim.path.unlink()
            continue
        if latest:
            log.warning(
                f"a process that resumed {run.name} ended in the midst of it. A job "
                f"of it may be queued: look with squeue --me -t all -o '%i %T %V %k' for the "
                f"comment {submission_comment(run.name)} [CD0404]"
            )
        return claim


def _release(claim: Claim) -> None:
    with contextlib.suppress(OSError):  # this process ends, by which the claim does as well
        for each in _claims(claim.run):
            if each == claim or each.number < claim.number:
                each.path.unlink(missing_ok=True)


def _latest(run: RunDir) -> Claim | None:
    return max(_claims(run), key=lambda claim: claim.number, default=None)


def _claims(run: RunDir) -> list[Claim]:
    with os.scandir(run.path) as entries:
        numbers = [int(name[1]) for entry in entries if (name := _NAME.fullmatch(entry.name))]
    nobody = ClaimHolder()
    claims = [Claim(run, number, nobody) for number in numbers]
    return [replace(each, holder=files.read(ClaimHolder, each.path) or nobody) for each in claims]

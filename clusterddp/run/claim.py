"""Claims on a run: files by which one process at a time resubmits it.

Claims are numbered and made by an exclusive create, which is atomic on network file systems too.
The highest number counts: it is held, done, or left by a process that has died, after which the
next number is free. No claim outlives its process for ever.
"""

import contextlib
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterddp import log
from clusterddp.errors import RequestError
from clusterddp.request.spec import submission_comment
from clusterddp.run import files
from clusterddp.run.files import write_atomically
from clusterddp.run.records import ClaimHolder
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import is_alive

EXPIRES_SECONDS = 900.0
"""A process on another machine, which cannot be looked at, has given up its claim after so long."""
_NAME = re.compile(r"resubmit-(\d{1,9})\.claim", re.ASCII)


@dataclass
class Claim:
    """Right to resubmit a run."""

    run: RunDir
    number: int
    """Number of the claim, from 1."""
    is_used: bool = False
    """True once a job may have been queued under it."""

    @property
    def path(self) -> Path:
        return self.run.path / f"resubmit-{self.number:04d}.claim"

    def use(self) -> None:
        """Note that a job is queued from here on.

        Raises RequestError when another process has taken the claim over meanwhile.
        """
        latest = _latest(self.run)
        if latest and latest.number > self.number:
            raise RequestError(
                f"{latest._refusal()} This process took longer than {EXPIRES_SECONDS:.0f} s, and "
                "has submitted nothing."
            )
        self.is_used = True

    def _refusal(self) -> str:
        holder = files.read(ClaimHolder, self.path) or ClaimHolder()
        who = f"process {holder.pid} on {holder.host}" if holder.pid is not None else "another"
        local = time.localtime(holder.time)
        when = f" since {time.strftime('%H:%M:%S', local)}" if holder.time else ""
        return (
            f"{self.run.name} is being resubmitted by {who}{when}: one run cannot be submitted "
            f"twice at once. See 'clusterddp status {self.run.shown}' in a moment. Where that "
            f"process is gone, remove {self.path}."
        )

    def _is_held(self) -> bool:
        holder = files.read(ClaimHolder, self.path)
        if holder is None and not self.path.exists():
            return False
        holder = holder or ClaimHolder()  # being written
        if holder.done:
            return False
        alive = is_alive(holder.pid, holder.host, holder.time)
        return self._age() < EXPIRES_SECONDS if alive is None else alive

    def _age(self) -> float:
        """Seconds since it was made, by the file system's own clock."""
        with tempfile.NamedTemporaryFile(dir=self.run.path, prefix=".now-") as probe:
            try:
                return os.fstat(probe.fileno()).st_mtime - self.path.stat().st_mtime
            except FileNotFoundError:
                return float("inf")


@contextlib.contextmanager
def claimed(run: RunDir) -> Iterator[Claim]:
    """Hold the claim on a run while the body looks at it and submits it.

    Raises RequestError where another process holds it, or where it cannot be written.
    """
    try:
        claim = _take(run)
    except OSError as error:
        raise RequestError(
            f"{run.path} cannot be written: {error.strerror}. Make room, or give it back its write "
            "permission; nothing was submitted."
        ) from None
    try:
        yield claim
    except BaseException as error:
        if claim.is_used and not isinstance(error, RequestError):
            _release(claim)
        else:
            with contextlib.suppress(OSError):
                claim.path.unlink()
        raise
    _release(claim)


def _take(run: RunDir) -> Claim:
    while True:
        latest = _latest(run)
        if latest and latest._is_held():
            raise RequestError(latest._refusal())
        former = files.read(ClaimHolder, latest.path) if latest else None
        left = latest is not None and not (former and former.done)
        claim = Claim(run, latest.number + 1 if latest else 1)
        try:
            descriptor = os.open(claim.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(_holder(), file)
        except BaseException:  # a full disk: an empty claim would be held until it expires
            claim.path.unlink(missing_ok=True)
            raise
        # A look at the numbers that was long ago: that number had been used, and removed.
        if _latest(run) != claim:
            claim.path.unlink()
            continue
        if left:
            log.warning(
                f"a process that resubmitted {run.name} ended in the midst of it. A job "
                f"of it may be queued: look with squeue --me -t all -o '%i %T %V %k' for the "
                f"comment {submission_comment(run.name)}"
            )
        return claim


def _release(claim: Claim) -> None:
    """Leave the number as used, and remove those before it."""
    with contextlib.suppress(OSError):  # this process ends, by which the claim does as well
        write_atomically(claim.path, json.dumps({**_holder(), "done": True}).encode())
        for number in _numbers(claim.run):
            if number < claim.number:
                Claim(claim.run, number).path.unlink(missing_ok=True)


def _holder() -> dict[str, object]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "time": round(time.time(), 3)}


def _latest(run: RunDir) -> Claim | None:
    numbers = _numbers(run)
    return Claim(run, max(numbers)) if numbers else None


def _numbers(run: RunDir) -> list[int]:
    with os.scandir(run.path) as entries:
        return [int(name[1]) for entry in entries if (name := _NAME.fullmatch(entry.name))]

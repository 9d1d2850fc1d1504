"""Ranks on this machine's GPUs, each a process that `clusterddp train` is, started by hand."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.run_dir import RunDir
from clusterddp.worker.workstation import free_port
from tests.gpu import machine
from tests.waiting import dying_with_us

START_SECONDS = 180
"""The start of a rank on a GPU that is used for the first time: imports, CUDA, NCCL, a capture."""
END_SECONDS = 30
"""Within which every rank has ended once one of them has, or was asked to."""
# Several ranks on one GPU (NCCL's src/init.cc, from 2.30 on).
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
_DEVICE = "--device=cuda"


class Rank:
    """A rank that was started, and what it has said so far."""

    def __init__(self, argv: list[str], environ: dict[str, str]) -> None:
        self.text = ""
        self.process = subprocess.Popen(
            argv,
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads here
        )

    def wait_until(self, word: str) -> None:
        """Read on until it has said the word."""
        while word not in self.text:
            assert self._read(START_SECONDS), f"it has not said {word!r}: {self.text}"

    def end(self, seconds: float) -> int:
        """Its exit code, once it has ended."""
        try:
            rest, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            said = self.text + (error.stdout or b"").decode()
            raise AssertionError(f"it has not ended within {seconds} s: {said}") from None
        self.text += rest.decode()
        return self.process.returncode

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def _read(self, seconds: float) -> bool:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return False
        chunk = os.read(self.process.stdout.fileno(), 1 << 16)
        self.text += chunk.decode()
        return bool(chunk)


@contextmanager
def started(
    digits: tuple[str, str], run: Path, *more: str, world_size: int = 1, **environ: str
) -> Iterator[list[Rank]]:
    """Start all ranks of a training; those that still run at the end are killed.

    digits: `--dataset` and `--data-dir`. Several ranks share a GPU where there are too few, and
    the test is skipped where NCCL cannot do that.
    """
    if world_size > machine().gpus:
        if "--backend=gloo" not in more:  # which exchanges on CPUs, and shares a GPU as it is
            skip_without_sharing()
        environ = {SHARE: "1", **environ}
    dataset, data_dir = digits
    argv = [
        sys.executable, "-m", "clusterddp", "train", f"--dataset={dataset}", "--threads=1",
        f"--data-dir={data_dir}", f"--run-dir={run}", _DEVICE, *more,
    ]  # fmt: skip
    port = str(free_port())
    ranks = list[Rank]()
    try:
        for rank in range(world_size):
            place = {
                "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }  # fmt: skip
            ranks.append(Rank(argv, {**(place if world_size > 1 else {}), **environ}))
        yield ranks
    finally:
        for each in ranks:
            each.kill()


def trained(
    digits: tuple[str, str], run: Path, *more: str, world_size: int = 1, **environ: str
) -> tuple[dict[str, Any], str]:
    """Train to the end; the report, and what all ranks have said."""
    with started(digits, run, *more, world_size=world_size, **environ) as ranks:
        codes = [rank.end(START_SECONDS) for rank in ranks]
        said = "\n".join(rank.text for rank in ranks)
    assert set(codes) == {0}, said
    report: dict[str, Any] = json.loads(RunDir(run).report.read_text())
    return report, said


def pid_of(run: Path, rank: int) -> int:
    """The task itself, not its small parent."""
    return int(json.loads((RunDir(run).outcomes / f"rank-{rank}.json").read_text())["pid"])


def warnings_in(said: str) -> list[str]:
    """The lines in which Python or torch warns."""
    return [line for line in said.splitlines() if re.search(r"\w*Warning\b|\[W\d", line)]


def skip_without_sharing() -> None:
    """Skip the test if this NCCL cannot share a GPU among ranks."""
    versions = [line for line in machine().lines if line.startswith("NCCL")]
    numbers = re.findall(r"\d+", versions[0]) if versions else []
    if tuple(map(int, numbers[:2])) < (2, 30):
        pytest.skip(f"needs two GPUs, or NCCL 2.30 to share one; {' '.join(versions) or 'no NCCL'}")

"""Several programs of several ranks each, started once and measured in turn."""

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from benchmarks.contenders.serving import Request
from clusterddp.worker.workstation import free_port

_ROOT = Path(__file__).resolve().parent.parent
_PATIENCE_SECONDS = 300.0
_CODE_ALONE = re.compile(r"(\[rank\d+\]: )?\[CD\d+\]")


@dataclass
class Contender:
    """One program, as many processes as it has ranks."""

    name: str
    module: str
    """In benchmarks.contenders."""
    request: Request
    ranks: int
    interpreter: Path = field(default_factory=lambda: Path(sys.executable))
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables for its processes, in addition to torch's."""
    seconds: list[float] = field(default_factory=list)
    """Of each sample: that of the slowest rank."""
    peak_mib: float = 0.0
    """Peak resident memory of one rank."""
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, log: IO[str]) -> None:
        """Start the processes; they answer once all of them have met."""
        port = free_port()
        for rank in range(self.ranks):
            environ = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
                "WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks),
                "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "benchmark", "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(_ROOT), **self.variables,
            }  # fmt: skip
            self._processes.append(
                subprocess.Popen(
                    [str(self.interpreter), "-m", f"benchmarks.contenders.{self.module}",
                     json.dumps(asdict(self.request))],
                    env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    text=True,
                )
            )  # fmt: skip
        for process in self._processes:
            self._read(process)

    def sample(self) -> None:
        """Have it train once, and note how long it took."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [json.loads(self._read(process)) for process in self._processes]
        self.seconds.append(max(answer["seconds"] for answer in answers))
        self.peak_mib = max(answer["peak_mib"] for answer in answers)

    @property
    def images(self) -> int:
        """Of all ranks together, in a sample."""
        return self.ranks * self.request.steps * self.request.batch_size

    def end(self) -> None:
        """Leave no process behind."""
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()

    def _read(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout
        ready, _, _ = select.select([process.stdout], [], [], _PATIENCE_SECONDS)
        if not ready:
            raise ContenderError(f"{self.name} did not answer within {_PATIENCE_SECONDS:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise ContenderError(f"{self.name} ended with {process.wait()} instead of an answer")
        return line


class ContenderError(Exception):
    """A program did not do what it was asked; the message names it."""


@contextmanager
def measured(
    contenders: Sequence[Contender],
    rounds: int,
    log: Path,
    excluded: Callable[[str], None] | None = None,
) -> Iterator[list[Contender]]:
    """Every contender once a round, in turn, after one round unseen; gone at the end.

    Yields those that were measured: all, or with `excluded`, which is called with the reason, those
    that did not fail.
    """
    with log.open("w") as said:

        def without_failures(act: Callable[[Contender], None]) -> None:
            for contender in list(well):
                try:
                    act(contender)
                except ContenderError as error:
                    if excluded is None:
                        raise
                    contender.end()
                    well.remove(contender)
                    # The code of an error can be on a separate line after the message.
                    lines = log.read_text().strip().splitlines()
                    words = [line for line in lines if not _CODE_ALONE.fullmatch(line)]
                    excluded(f"{error}{f': {words[-1]}' if words else ''}")

        well = list(contenders)
        try:
            without_failures(lambda contender: contender.start(said))
            for _ in range(rounds + 1):
                without_failures(lambda contender: contender.sample())
            for contender in well:
                del contender.seconds[0]
            yield well
        finally:
            for contender in contenders:
                contender.end()


def interpreters(peers: Mapping[str, str]) -> tuple[dict[str, Path], list[str]]:
    """Of each peer (module -> package) the interpreter, and a line for each that cannot be had."""
    from benchmarks import peers as environments

    found, missing = {}, []
    for module, package in peers.items():
        interpreter = environments.python([package])
        if interpreter:
            found[module] = interpreter
        else:
            missing.append(f"{package}: not measured: {environments.why_not([package])}")
    return found, missing

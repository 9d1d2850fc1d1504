"""Moments of a task that a fault can hold on to, and a pace for its steps.

Python imports this by itself wherever PYTHONPATH leads here. Nothing of the package is replaced: a
task waits at a moment while the file CAMPAIGN_HOLDS/want-MOMENT is there, and writes
held-MOMENT.RANK.PID meanwhile; then it raises where fail-MOMENT.RANK is there. A want file with the
words "until told" is removed by the first task that was asked to stop. The moments: `import` (of
torch), `step-N` (after the N-th step), `save` (a checkpoint's bytes on their way to
the disk), `copy` (a rank's part of a snapshot has begun), `copied` (it is whole), `flush` (as
`save`, in the parent that saves a snapshot), `last` (after the report), `left` (the other ranks,
for good). A rank appends the step and the time of each snapshot to took.RANK, and leaves the file
memory.TOKEN with the token of its node memory. With the file
rare-saves a loop of one's own saves each ten minutes, with a snapshot each second. On a host for
which clock-ahead.HOST is there when a process starts, its clock is ahead by so many seconds.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import select
import sys
import time
from pathlib import Path

HOLDS = os.environ.get("CAMPAIGN_HOLDS")
PACE_SECONDS = float(os.environ.get("CAMPAIGN_PACE") or 0)
RANK = os.environ.get("SLURM_PROCID", "0")


def hold(moment: str) -> None:
    """Wait while somebody wants it, then fail where somebody wants that."""
    wanted = [Path(f"{HOLDS}/want-{moment}"), Path(f"{HOLDS}/want-{moment}.{RANK}")]
    if any(path.exists() for path in wanted):
        held = Path(f"{HOLDS}/held-{moment}.{RANK}.{os.getpid()}")
        held.touch()
        while any(path.exists() for path in wanted):
            if was_told():
                let_go(wanted)
            time.sleep(0.02)
        held.unlink(missing_ok=True)
    fail = Path(f"{HOLDS}/fail-{moment}.{RANK}")
    if fail.exists():
        if fail.read_text() == "once":
            fail.unlink()
        raise RuntimeError(f"an error of the program at {moment}")


def was_told() -> bool:
    """Whether this task was asked to stop: what asks it may have come, and still be on its way."""
    stop = sys.modules.get("clusterddp.training.stop")
    return bool(stop and stop.requested.reason)


def let_go(wanted: list[Path]) -> None:
    for path in wanted:
        with contextlib.suppress(FileNotFoundError):  # another rank was told as well
            if path.read_text() == "until told":
                path.unlink()


def fsync(descriptor: int, _plain: object = os.fsync) -> None:
    name = Path(f"/proc/self/fd/{descriptor}").readlink().name
    if name.startswith(".step-") and ".sha256" not in name:
        # Only a parent that saves a snapshot has this module.
        hold("flush" if "clusterddp.checkpoints.from_memory" in sys.modules else "save")
    _plain(descriptor)  # type: ignore[operator]


def pace_steps(module: object) -> None:
    """Of the training and of a loop of one's own, before the ranks look whether to stop."""
    plain = module.Resumable.step  # type: ignore[attr-defined]

    def step(self: object, **metrics: object) -> None:
        time.sleep(PACE_SECONDS)
        hold(f"step-{self.steps + 1}")  # type: ignore[attr-defined]
        plain(self, **metrics)

    module.Resumable.step = step  # type: ignore[attr-defined]
    begin = module.Resumable.__init__  # type: ignore[attr-defined]

    def begin_rare(self: object, *args: object, **options: object) -> None:
        if "_objects" in vars(self) and Path(f"{HOLDS}/rare-saves").exists():  # a Loop
            options |= {"save_every": "10m", "snapshot_every": 1.0}
        begin(self, *args, **options)

    module.Resumable.__init__ = begin_rare  # type: ignore[attr-defined]


def hold_in_snapshots(module: object) -> None:
    plain = module.write_steps  # type: ignore[attr-defined]

    def write_steps(half: int, member: int, begun: int, finished: int) -> None:
        plain(half, member, begun, finished)
        Path(f"{HOLDS}/memory.{os.environ[module.VARIABLE].rpartition(':')[2]}").touch()  # type: ignore[attr-defined]
        if finished:
            with Path(f"{HOLDS}/took.{RANK}").open("a") as took:
                took.write(f"{finished - 1} {time.time()}\n")
        hold("copied" if finished else "copy")

    module.write_steps = write_steps  # type: ignore[attr-defined]


def hold_after_report(module: object) -> None:
    plain = module.write  # type: ignore[attr-defined]

    def write(*args: object) -> object:
        line = plain(*args)
        hold("last")
        return line

    module.write = write  # type: ignore[attr-defined]


def hold_after_leaving(module: object) -> None:
    plain = module.leave  # type: ignore[attr-defined]

    def leave(*args: object) -> None:
        plain(*args)
        hold("left")

    module.leave = leave  # type: ignore[attr-defined]


AFTER = {
    "clusterddp.distributed.rendezvous": hold_after_leaving,
    "clusterddp.run.node_memory": hold_in_snapshots,
    "clusterddp.training.resumable": pace_steps,
    "clusterddp.training.report": hold_after_report,
}


class Finder(importlib.abc.MetaPathFinder):
    """Lets every import pass; four modules are touched once they are loaded."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torch":
            hold("import")
        if fullname not in AFTER:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, None) for finder in others)  # type: ignore[arg-type]
        spec = next((each for each in found if each), None)
        if spec is None or spec.loader is None:
            return spec
        plain = spec.loader.exec_module

        def exec_module(module: object) -> None:
            plain(module)  # type: ignore[arg-type]
            if module.__name__ == fullname:  # type: ignore[attr-defined]
                AFTER[fullname](module)  # modules of one directory of a zip file share their loader

        spec.loader.exec_module = exec_module  # type: ignore[method-assign, assignment]
        return spec


def sleep(seconds: float) -> None:
    """libfaketime refuses clock_nanosleep(2) to an absolute time of an unfaked monotonic clock."""
    select.select([], [], [], seconds)


def shift_clock(host: str, seconds: float) -> None:
    """On one host the wall clock is ahead; what files show comes from the kernel, and stays."""
    plain = time.time
    if os.environ.get("SLURMD_NODENAME") == host:
        time.time = lambda: plain() + seconds


if "FAKETIME_TIMESTAMP_FILE" in os.environ:
    time.sleep = sleep
if HOLDS and "SLURM_STEP_ID" in os.environ:  # in tasks alone
    os.fsync = fsync
    if "CAMPAIGN_CLOCK" in os.environ:
        name, _, ahead = os.environ["CAMPAIGN_CLOCK"].partition(":")
        shift_clock(name, float(ahead))
    for path in Path(HOLDS).glob("clock-ahead.*"):
        shift_clock(path.suffix[1:], float(path.read_text()))
    sys.meta_path.insert(0, Finder())

"""What a killed rank costs with snapshots in node memory and without, and what they cost a step.

A run of two local ranks is killed five times at the same steps, with snapshots at the usual
interval and without. Its steps are paced, so that their number in an interval is the same on a busy
machine. Then single ranks train models of several sizes with Adam, with snapshots and without.

    python -m benchmarks --only losses
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.pairs import Row, note
from clusterddp.checkpoints.snapshots import _SHARE_OF_TIME

_EVERY = 10.0
_PACE, _STEPS = 0.2, 600
_DEADLY = (110, 230, 330, 430, 530)
_PAIRS = 1
_SIZES = {5: 10, 60: 5, 350: 3}
"""Pairs by millions of parameters: a snapshot of a large model is rarer."""
_PATIENCE_SECONDS = 1800


def measure() -> list[Row]:
    """Two rows on killed runs, and one on each size that the memory allows."""
    return [_killed(), *filter(None, map(_cost, _SIZES))]


def _killed() -> Row:
    walls: tuple[list[float], list[float]] = [], []
    redone: tuple[list[float], list[float]] = [], []
    for _ in range(_PAIRS):
        for side, every in enumerate((0.0, _EVERY)):
            seconds, steps = _run_killed(every)
            walls[side].append(seconds)
            redone[side].append(100 * (steps - _STEPS) / _STEPS)
    for interval, shares in zip(("none", f"each {_EVERY:.0f} s"), redone, strict=True):
        shown = ", ".join(f"{share:.1f}%" for share in shares)
        deadly = ", ".join(map(str, _DEADLY))
        note(
            f"losses: snapshots {interval}: {shown} of {_STEPS:,} steps redone (of {_PACE:g} s "
            f"each), killed at steps {deadly}; checkpoints every 10 minutes, the first after 40 s"
        )
    name = f"a run of two ranks, killed {len(_DEADLY)} times, snapshots each {_EVERY:.0f} s"
    return Row(name, "no snapshots", tuple(walls[0]), tuple(walls[1]))


def _run_killed(every: float) -> tuple[float, int]:
    """Return the seconds of a run, and the steps that it trained, those redone too."""
    arguments = [str(every), str(_PACE), str(_STEPS), *map(str, _DEADLY)]
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.perf_counter()
        done = _submit(folder, "--nodes", "2", module="killed", args=arguments)
        for _ in _DEADLY:
            if not (done.returncode and (folder / "trained").exists()):
                raise SystemExit(f"losses: not killed: {done.stdout}{done.stderr}")
            done = _clusterddp(folder, "resume", "a")
        if done.returncode:
            raise SystemExit(f"losses: {done.stdout}{done.stderr}")
        return time.perf_counter() - began, (folder / "trained").stat().st_size


def _cost(millions: int) -> Row | None:
    """Return the row of a model, unless the memory is too small for its snapshots."""
    with tempfile.TemporaryDirectory() as name:
        arguments = [str(millions), str(_SIZES[millions])]
        done = _submit(Path(name), "--nodes", "1", module="snapshots", args=arguments)
    lines = [line for line in done.stdout.splitlines() if "answer {" in line]
    if done.returncode or not lines:
        raise SystemExit(f"losses: {done.stdout}{done.stderr}")
    answer = json.loads(lines[0].partition("answer ")[2])
    model = f"{millions} million parameters"
    if answer["off"]:
        note(f"losses: {model} not measured: less than four times its state is free")
        return None
    seconds = statistics.median(answer["seconds"])
    every = max(_EVERY, seconds / _SHARE_OF_TIME)
    note(
        f"losses: {model}: a snapshot of {answer['bytes'] / 1e6:,.0f} MB takes "
        f"{1000 * seconds:.0f} ms (median), so there is one every {every:.0f} s: a step takes "
        f"{1 + seconds / every:.4f} times as long"
    )
    name = f"a step of {model}, a snapshot each 10 steps or more"
    return Row(name, "without", tuple(answer["without"]), tuple(answer["with"]))


def _submit(folder: Path, *options: str, module: str, args: list[str]) -> "_Done":
    program = [sys.executable, str(Path(__file__).parent / f"contenders/{module}.py"), *args]
    given = ["--launcher", "local", "--run-name", "a", "--no-snapshot", *options, "--", *program]
    return _clusterddp(folder, "submit", *given)


_Done = subprocess.CompletedProcess[str]


def _clusterddp(folder: Path, *argv: str) -> _Done:
    return subprocess.run(
        [sys.executable, "-m", "clusterddp", *argv],
        cwd=folder, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False,
    )  # fmt: skip

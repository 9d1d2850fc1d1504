"""What the lines of an integration cost per step: each framework with them and without, in turns.

Four ranks with a thread each train a tiny model; rank 0 measures its main thread's processor time.

    python -m benchmarks --only hooks
"""

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks.pairs import Row, note
from clusterddp.worker.workstation import free_port

_FRAMEWORKS = ("lightning", "transformers", "accelerate")
_PAIRS, _STEPS, _RANKS = 3, 400, 4
_SECONDS = 300


def measure() -> list[Row]:
    """One row for each framework that is installed."""
    rows = []
    for name in _FRAMEWORKS:
        if find_spec(name):
            pairs = [(_seconds(name, "off"), _seconds(name, "on")) for _ in range(_PAIRS)]
            before, after = zip(*pairs, strict=True)
            rows.append(Row(f"a step of {name}, with clusterddp", "without", before, after))
        else:
            note(f"hooks: {name} is not installed")
    return rows


def _seconds(name: str, hooked: str) -> float:
    """Return the processor seconds per step of one training."""
    command = [sys.executable, "-m", "benchmarks.contenders.hooked", name, hooked, str(_STEPS)]
    known = {"WORLD_SIZE": str(_RANKS), "LOCAL_WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1"}
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(__file__).parents[1])
        env = {**os.environ, **known, "MASTER_PORT": str(free_port()), "PYTHONPATH": root}
        ranks = [
            subprocess.Popen(
                command, cwd=folder, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(_RANKS)
        ]  # fmt: skip
        said = [rank.communicate(timeout=_SECONDS) for rank in ranks]
    for rank, (_, errors) in zip(ranks, said, strict=True):
        if rank.returncode:
            raise SystemExit(f"{name}: {errors}")
    return float(said[0][0].rpartition("seconds per step:")[2])

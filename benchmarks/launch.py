"""Two ranks from their start to the first optimizer step and to their end, against a bare script.

The bare script imports torch, joins the group (`env://`, gloo), wraps the ConvNet into DDP and
steps, on tensors it makes itself; it and `clusterddp train` are started as srun does it: two
processes, told who they are by variables. The rest is started by its own launcher. Ours also reads
a set of MNIST's size, evaluates, and writes a checkpoint and a report.

    python -m benchmarks.launch [--rounds N] [--slurm]

--slurm measures ours and the bare script as steps of a real Slurm, booted on this machine.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import launch_programs, peers
from benchmarks.pairs import Row

_ROUNDS = 5
BASELINE = "a bare env:// script"
_OURS = "clusterddp train"
_CHECKOUT = Path(__file__).parents[1]
_PATIENCE_SECONDS = 120


@dataclass(frozen=True)
class Life:
    """One start of two ranks."""

    first_step: float
    """Seconds from the start of the processes to the end of rank 0's first optimizer step."""
    whole: float
    """Seconds from the start to the end of the last process."""
    peak_mib: float
    """Of the largest process."""


Commands = list[tuple[list[str], dict[str, str]]]
Start = Callable[[Path, int], Commands]
"""What to start, given an empty directory and a free port: command lines and their variables."""


def measure() -> list[Row]:
    """Two rows a contender: to its first step, and its whole life."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launch_programs.write(folder)
        return rows(rounds(contenders(folder), folder, _ROUNDS))


def rows(
    lives: dict[str, list[Life]], against: str = BASELINE, *, memory: bool = True
) -> list[Row]:
    """First steps, then whole lives, each against the bare script's of the same round.

    against: what the table calls the bare script.
    memory: whether the processes that were started are the ranks' own, and not srun.
    """
    baseline = lives.pop(BASELINE)

    def peak(of: list[Life]) -> float | None:
        return statistics.median(life.peak_mib for life in of) if memory else None

    made = []
    for what, of in (
        ("to the first step", lambda life: life.first_step),
        ("the whole run", lambda life: life.whole),
    ):
        for name, ours in lives.items():
            made.append(
                Row(
                    f"{name}, {what}",
                    against,
                    tuple(map(of, baseline)),
                    tuple(map(of, ours)),
                    peak_mib=peak(ours),
                    baseline_peak_mib=peak(baseline),
                )
            )
    return made


def contenders(folder: Path) -> dict[str, Start]:
    """By name; a peer that cannot be had is told of and left out."""
    here = sys.executable
    program = {
        name: str(folder / f"{name}.py")
        for name in ("bare", "spawn", "submitit_", "lightning_", "accelerate_")
    }

    def ranks(argv: list[str]) -> Start:
        return lambda _, port: [(argv, rank_variables(rank, port)) for rank in (0, 1)]

    def ours(made: Path, port: int) -> Commands:
        argv = [here, "-m", "clusterddp", *_train(folder, made)]
        return [(argv, rank_variables(rank, port)) for rank in (0, 1)]

    def ours_in_a_rehearsal(made: Path, _: int) -> Commands:
        argv = [
            here, "-m", "clusterddp", "submit", "--launcher=local", "--tasks-per-node=2", "--wait",
            f"--runs-dir={made}", "--run-name=run", *_train(folder, None),
        ]  # fmt: skip
        return [(argv, {})]

    def torchrun(python: str, script: str) -> Start:
        return lambda _, port: [
            ([python, "-m", "torch.distributed.run", "--nproc-per-node=2",
              f"--master-port={port}", script], {})
        ]  # fmt: skip

    found: dict[str, Start] = {
        BASELINE: ranks([here, program["bare"]]),
        f"{BASELINE} again": ranks([here, program["bare"]]),
        _OURS: ours,
        "clusterddp submit --launcher local": ours_in_a_rehearsal,
        "torchrun": torchrun(here, program["bare"]),
        "mp.spawn": lambda _, port: [
            ([here, program["spawn"]], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        ],
        "submitit's local executor": lambda made, _: [
            ([here, program["submitit_"], str(made / "log")], {})
        ],
    }
    for name, package, start in (
        ("Lightning", "lightning", lambda python: lambda _, port: [
            ([python, program["lightning_"]], {"MASTER_PORT": str(port)})]),
        ("Accelerate under torchrun", "accelerate",
         lambda python: torchrun(python, program["accelerate_"])),
    ):  # fmt: skip
        python = peers.python([package])
        if python is None:
            print(f"{name}: not measured: {peers.why_not([package])}", file=sys.stderr)
        else:
            found[name] = start(str(python))
    return found


def _train(folder: Path, run: Path | None) -> list[str]:
    return [
        *(["train", f"--run-dir={run}"] if run else []),
        "--dataset=synthetic", f"--data-dir={folder / 'data'}", "--device=cpu", "--threads=1",
        f"--max-steps={launch_programs.STEPS}", f"--batch-size={launch_programs.BATCH}",
        "--log-every=1",
    ]  # fmt: skip


def rank_variables(rank: int, port: int, ranks: int = 2) -> dict[str, str]:
    """Variables of one task of `ranks` on this host."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def rounds(starts: dict[str, Start], folder: Path, count: int) -> dict[str, list[Life]]:
    """Every contender in turn, round after round, after one round unseen; who fails is left out.

    Raises RuntimeError with what it said when the baseline fails twice in a row.
    """
    lives: dict[str, list[Life]] = {name: [] for name in starts}
    for number in range(count + 1):
        for name, start in starts.items():
            if name not in lives:
                continue
            try:
                life = (_live_again if name == BASELINE else _live)(start, folder)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                if name == BASELINE:
                    raise
                print(f"{name}: not measured: {error}", file=sys.stderr)
                del lives[name]
                continue
            if number:
                lives[name].append(life)
    return lives


def _live_again(start: Start, folder: Path) -> Life:
    """Take one life, or, where it fails, another: gloo ends a rank by SIGABRT now and then."""
    try:
        return _live(start, folder)
    except RuntimeError as error:
        print(f"{BASELINE}: measured again: {error}", file=sys.stderr)
        return _live(start, folder)


def _live(start: Start, folder: Path) -> Life:
    made = Path(tempfile.mkdtemp(dir=folder))
    first, log = made / "first-step", made / "log.txt"
    environ = {
        **os.environ,
        "FIRST_STEP": str(first),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{_CHECKOUT}{os.pathsep}{folder}",
    }
    answer = subprocess.run(
        [
            sys.executable, "-S", "-E", "-c", launch_programs.STARTER,
            json.dumps(start(made, _free_port())), str(log),
        ],
        env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=_PATIENCE_SECONDS,
    )  # fmt: skip
    seen = json.loads(answer.stdout)
    if any(seen["codes"]):
        raise RuntimeError(f"exit codes {seen['codes']}: {log.read_text()[-400:]}")
    life = Life(
        first_step=_first_step(made) - seen["began"],
        whole=seen["ended"] - seen["began"],
        peak_mib=seen["peak_kib"] / 1024,
    )
    shutil.rmtree(made)
    return life


def _first_step(made: Path) -> float:
    """When rank 0 had done it: as the program has written, or by our run's own metrics."""
    stamp = made / "first-step"
    if stamp.exists():
        return float(stamp.read_text())
    for run in (made, made / "run"):
        if (run / "metrics.jsonl").exists():
            line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
            assert line["step"] == 1, line
            return float(line["time"])
    raise RuntimeError("nobody said when the first step was done")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _in_a_step(folder: Path) -> dict[str, Start]:
    """Inside a Slurm allocation: ours and the bare script as steps of one task on each node."""
    step = ["/usr/bin/env", "srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1"]
    bare = (
        "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS "
        'MASTER_ADDR="$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)"; '
        f"exec {sys.executable} {folder / 'bare.py'}"
    )
    return {
        BASELINE: lambda _, port: [
            ([*step, "bash", "-c", bare], {"MASTER_PORT": str(12000 + port % 8000)})
        ],
        _OURS: lambda made, port: [
            ([*step, sys.executable, "-m", "clusterddp", *_train(folder, made)],
             {"MASTER_PORT": str(12000 + port % 8000)})
        ],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    from benchmarks.__main__ import table

    parser = argparse.ArgumentParser(prog="python -m benchmarks.launch")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--only", nargs="*", help="contenders, by a part of their names")
    parser.add_argument("--slurm", action="store_true")
    parser.add_argument("--in-allocation", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.slurm:
        from tests.on_slurm import cluster

        if reason := cluster.why_unavailable():
            print(f"skipped: no Slurm can be booted here: {reason}")
            return
        again = [sys.executable, "-m", "benchmarks.launch", f"--rounds={options.rounds}"]
        with tempfile.TemporaryDirectory() as name:
            batch = ["salloc", "--nodes=2", "--ntasks=2", *again, f"--in-allocation={name}"]
            sys.exit(cluster.main(["--", *batch]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(options.in_allocation or name)
        launch_programs.write(folder)
        starts = _in_a_step(folder) if options.in_allocation else contenders(folder)
        if options.only:
            starts = {
                known: start for known, start in starts.items()
                if known == BASELINE or any(part in known for part in options.only)
            }  # fmt: skip
        lives = rounds(starts, folder, options.rounds)
        print(table(rows(lives, memory=not options.in_allocation)))


if __name__ == "__main__":
    main()

"""Sweeps as their trials grow: submission, `runs` and `report` of 10, 100 and 1,000 trials.

Slurm's commands are stand-ins that answer at once: the time is clusterddp's own. Of each sweep nine
trials of ten have ended, with 200 lines of metrics each, and the others are in the queue.
"""

import functools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import cli
from benchmarks.pairs import Row, Sample, alternate, note, timed
from clusterddp.run import events
from clusterddp.run.run_dir import RunDir, SweepDir

TRIALS = (10, 100, 1000)
PAIRS = 5
_LINES = 200
_LIMITS = "MaxArraySize            = 10001\nMaxJobCount             = 10000"


def measure() -> list[Row]:
    """Return a row for each command and number of trials; larger sweeps against the smallest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_slurm(folder / "bin")
        run = functools.partial(cli.run, folder=folder, environ=cli.environment(folder))
        for count in TRIALS:
            run(_submission(folder / str(count), count))
            _let_run(SweepDir(folder / str(count) / "s"))

        def submitting(count: int) -> Sample:
            return functools.partial(_submit, run, folder / "new", count)

        def asking(*words: str) -> Callable[[int], Sample]:
            def of(count: int) -> Sample:
                root = f"--runs-dir={folder / str(count)}"
                return timed(lambda: run([*cli.COMMAND, *words, root]))

            return of

        empty = timed(lambda: run(cli.BASELINE))
        return [
            _row(what, count, sample, empty)
            for what, sample in (
                ("submit --sweep", submitting),
                ("runs", asking("runs")),
                ("report", asking("report", "s")),
            )
            for count in TRIALS
        ]


def _row(what: str, count: int, sample: Callable[[int], Sample], empty: Sample) -> Row:
    few = TRIALS[0]
    baseline, name = (sample(few), f"of {few}") if count > few else (empty, cli.BASELINE_NAME)
    before, seconds = alternate(baseline, sample(count), PAIRS)
    row = Row(f"clusterddp {what}, {count:,} trials", name, before, seconds)
    if count > few:
        each = (row.figure - row.baseline_figure) / (count - few)
        note(f"{row.name}: {each:.2f} ms for each trial beyond {few}")
    return row


def _submission(root: Path, count: int) -> list[str]:
    words = [
        "--run-name=s",
        f"--sweep=seed=0..{count - 1}",
        "--no-snapshot",
        f"--runs-dir={root}",
    ]
    return [*cli.COMMAND, "submit", *words, "--", "/bin/true", "{seed}"]


def _submit(run: Callable[[Sequence[str]], None], root: Path, count: int) -> float:
    """Submit a sweep, and take it away again, which is not in the time that is returned."""
    began = time.perf_counter()
    run(_submission(root, count))
    seconds = time.perf_counter() - began
    shutil.rmtree(root)
    return seconds


def _let_run(sweep: SweepDir) -> None:
    """Let all trials have ended but the last tenth."""
    runs = sweep.trials
    for index, run in enumerate(runs[: -len(runs) // 10]):
        job_id = str(index + 100)
        events.note(run.events, events.Started(job_id=job_id, array_task=f"7_{index}"))
        events.note(run.events, events.Ended(job_id=job_id, exit_code=0, cause="done"))
        _measure(run)


def _measure(run: RunDir) -> None:
    lines: list[Mapping[str, object]] = [
        {"kind": "train", "step": step, "epoch": 1, "loss": 1 / step, "lr": 0.1, "seconds": step}
        for step in range(1, _LINES + 1)
    ]
    lines.append({"kind": "eval", "step": _LINES, "epoch": 1, "loss": 0.1, "accuracy": 0.9})
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _make_slurm(folder: Path) -> None:
    """Stand-ins on PATH; squeue knows all trials, and none that has ended is asked for."""
    folder.mkdir()
    queued = "".join(f"7_{index} 7|PENDING|Priority\n" for index in range(TRIALS[-1]))
    for name, answer in (("sbatch", "7\n"), ("scontrol", f"{_LIMITS}\n"), ("squeue", queued)):
        (folder / f"{name}.txt").write_text(answer)
        program = folder / name
        program.write_text(f"#!/bin/sh\nexec cat {folder / name}.txt\n")
        program.chmod(0o755)

"""The command as whole processes, against a Python that imports click and jinja2 and does nothing.

The processes get an environment, a home and a bytecode cache of their own, so that neither the
settings of this shell nor bytecode that could not be written take part.
"""

import functools
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.pairs import Row, Sample, alternate, timed
from clusterddp.run_dir import RunDir
from clusterddp.spec import JobSpec, Resources
from clusterddp.train_config import TrainConfig

_PAIRS = 40
_BASELINE_NAME = "import click, jinja2"
_BASELINE = [sys.executable, "-c", _BASELINE_NAME]
# What the installed `clusterddp` does, wherever it was installed.
_COMMAND = [sys.executable, "-c", "from clusterddp.__main__ import main; main()"]
_REQUEST = ["submit", "--nodes=2", "--gpus-per-node=4", "--run-name=x", "--dry-run"]

# Run by a small Python of its own: Linux counts the memory of the process that started a child
# into the child's ru_maxrss, and ours may hold torch.
_PEAK = """
import os, sys
null = os.open(os.devnull, os.O_WRONLY)
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ,
                       file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
_, status, usage = os.wait4(child, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def measure() -> list[Row]:
    """The rows of the table, the baseline against itself first: how far chance alone goes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RunDir.create(_spec(folder), "#!/bin/bash\n") as run:
            run.add_event("submitted", job_id="1", launcher="sbatch")
            run.add_event("started", job_id="1")
            run.add_event("ended", job_id="1", exit_code=0)
        status = ["status", "--output-root", str(run.path.parent), run.name]
        return [
            _row("the baseline against itself", _BASELINE, folder),
            _row("clusterddp submit --dry-run", [*_COMMAND, *_REQUEST], folder),
            # Also without the waiting for a processor that other work keeps busy.
            _row("the same, processor time", [*_COMMAND, *_REQUEST], folder, _processor_timed),
            _row("clusterddp --help", [*_COMMAND, "--help"], folder),
            _row("clusterddp status (of a run that is done)", [*_COMMAND, *status], folder),
        ]


def _spec(folder: Path) -> JobSpec:
    return JobSpec(
        run_name="x",
        run_dir=str(folder / "jobs" / "x"),
        resources=Resources(),
        python=sys.executable,
        train=TrainConfig(),
    )


def _row(
    name: str,
    argv: Sequence[str],
    folder: Path,
    timing: Callable[[Callable[[], object]], Sample] = timed,
) -> Row:
    environ = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "LC_ALL": "C.UTF-8",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
    }
    run = functools.partial(_run, folder=folder, environ=environ)
    baseline, seconds = alternate(
        timing(lambda: run(_BASELINE)), timing(lambda: run(argv)), pairs=_PAIRS
    )
    return Row(
        name=name,
        baseline=_BASELINE_NAME,
        baseline_seconds=baseline,
        seconds=seconds,
        peak_mib=_peak_mib(argv, folder, environ),
        baseline_peak_mib=_peak_mib(_BASELINE, folder, environ),
    )


def _run(argv: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
    subprocess.run(argv, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)


def _processor_timed(work: Callable[[], object]) -> Sample:
    """The work as a sample of the processor seconds that its child processes take."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def sample() -> float:
        before = spent()
        work()
        return spent() - before

    return sample


def _peak_mib(argv: Sequence[str], folder: Path, environ: Mapping[str, str]) -> float:
    """Peak resident memory of the process, MiB (ru_maxrss counts KiB on Linux, bytes on macOS)."""
    measuring = [sys.executable, "-S", "-E", "-c", _PEAK, *argv]
    answer = subprocess.run(
        measuring, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    return int(answer.stdout) / (2**20 if sys.platform == "darwin" else 2**10)

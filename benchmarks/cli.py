"""The command as whole processes, against a Python that imports click and jinja2 and does nothing.

Beside it what others take to show the same request (two nodes, four GPUs each), each installed
into a separate environment (`benchmarks.peers`); and, where a Slurm answers, a submission
against a bare sbatch of the same script. One that is booted for it, as root:

    python -m tests.on_slurm.cluster -- python -m benchmarks --only cli

The processes get an environment, a home and a bytecode cache of their own, so that neither the
settings of this shell nor bytecode that could not be written take part.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import peers
from benchmarks.pairs import Row, Sample, alternate, processor_timed, timed
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run import events
from clusterddp.run.run_dir import RunDir

_PAIRS = 40
BASELINE_NAME = "import click, jinja2"
BASELINE = [sys.executable, "-c", BASELINE_NAME]
# What the installed `clusterddp` does, wherever it was installed.
COMMAND = [sys.executable, "-c", "from clusterddp.__main__ import main; main()"]
_ASKED = ["--nodes=2", "--gpus-per-node=4"]
_REQUEST = ["submit", *_ASKED, "--run-name=x", "--dry-run"]
_RUNS = 1000

_SUBMITIT = """
from submitit.slurm.slurm import _make_sbatch_string
print(_make_sbatch_string(
    command="python train.py", folder="logs", nodes=2, ntasks_per_node=4, gpus_per_node=4))
"""
_TORCHX = "from torchx.cli.main import main; main()"
_TORCHX_REQUEST = "run --dryrun --scheduler slurm dist.ddp -j 2x4 --gpu 4 --script train.py"
_NEMO = """
import nemo_run as run
executor = run.SlurmExecutor(
    account="a", partition="p", nodes=2, ntasks_per_node=4, gpus_per_node=4,
    packager=run.Packager(), tunnel=run.LocalTunnel(job_dir="nemo"))
run.run(run.Script(inline="python train.py"), executor=executor, name="x", dryrun=True)
"""
# peer -> (what it does, arguments of its Python, pairs): the last takes seconds each time.
_PEERS: dict[str, tuple[str, list[str], int]] = {
    "submitit": ("its script as text", ["-c", _SUBMITIT], _PAIRS),
    "torchx": ("run --dryrun", ["-c", _TORCHX, *_TORCHX_REQUEST.split()], _PAIRS),
    "nemo-run": ("run(dryrun=True)", ["-c", _NEMO], 5),
}

# Run by a small separate Python: Linux counts the memory of the process that started a child
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
    """Return the rows; the first compares the baseline with itself and shows the noise."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        status = [*COMMAND, "status", "--runs-dir"]
        one, many = folder / "one", folder / "many"
        _make_run(one, 0, done=True)
        for number in range(_RUNS):
            _make_run(many, number, done=False)
        _make_squeue(folder / "bin")
        row = functools.partial(_row, folder=folder)
        rows = [
            row("the baseline against itself", BASELINE),
            row("clusterddp submit --dry-run", [*COMMAND, *_REQUEST]),
            # Also without the waiting for a processor that other work keeps busy.
            row("the same, CPU time", [*COMMAND, *_REQUEST], timing=processor_timed),
            row("clusterddp --help", [*COMMAND, "--help"]),
            row("clusterddp status (of a finished run)", [*status, str(one), "run-0"]),
            row(f"clusterddp status, the latest of {_RUNS:,} runs", [*status, str(many)], pairs=20),
            row(
                f"clusterddp runs, {_RUNS:,} runs, each in squeue",
                [*COMMAND, "runs", "--runs-dir", str(many)],
                pairs=20,
            ),
        ]
        return [*rows, *_peers(folder), *_submission(folder)]


def _make_run(root: Path, number: int, *, done: bool) -> None:
    name = f"run-{number}"
    spec = JobSpec(
        run_name=name,
        run_dir=str(root / name),
        resources=Resources(),
        python=sys.executable,
        train=TrainConfig(),
    )
    with RunDir.create(spec, "#!/bin/bash\n") as run:
        job_id = str(number + 1)
        events.add(run.events, events.Submitted(job_id=job_id, launcher="sbatch"))
        events.add(run.events, events.Started(job_id=job_id))
        if done:
            events.add(run.events, events.Ended(job_id=job_id, exit_code=0))


def _make_squeue(bin_folder: Path) -> None:
    """A squeue that knows every run's job, and takes no time itself."""
    bin_folder.mkdir()
    answer = bin_folder / "answer"
    answer.write_text("".join(f"{number + 1}|RUNNING|None|\n" for number in range(_RUNS)))
    program = bin_folder / "squeue"
    program.write_text(f"#!/bin/sh\nexec cat {answer}\n")
    program.chmod(0o755)


def _peers(folder: Path) -> Iterator[Row]:
    for name, (what, arguments, pairs) in _PEERS.items():
        interpreter = peers.python([name])
        if interpreter is None:
            print(f"not measured: {name}: {peers.why_not([name])}", file=sys.stderr)
            continue
        label = f"{name} {peers.versions([name])[name]}, {what}"
        try:
            yield _row(label, [str(interpreter), *arguments], folder=folder, pairs=pairs)
        except subprocess.CalledProcessError as error:
            print(f"not measured: {label}: exit code {error.returncode}", file=sys.stderr)


def _submission(folder: Path) -> Iterator[Row]:
    """From the typed command to the job id, compared with plain sbatch; jobs are held, none runs.

    --test-only has a separate row.
    """
    if not _slurm_answers():
        print("not measured: clusterddp submit: no Slurm answers here", file=sys.stderr)
        return
    held = [*COMMAND, "submit", "--nodes=1", "--sbatch=hold", "--runs-dir", str(folder / "e2e")]
    command = ["--no-snapshot", "--", "true"]
    script = folder / "held.sbatch"
    script.write_text(_printed([*held, "--run-name=x", "--dry-run", *command]))
    jobs: list[str] = []

    def bare() -> None:
        jobs.append(_printed(["sbatch", "--parsable", str(script)]).strip())

    def submit() -> None:
        named = [f"--run-name=run-{len(jobs)}", "--json"]
        jobs.append(json.loads(_printed([*held, *named, *command]))["job_id"])

    def ask() -> None:
        _printed(["sbatch", "--test-only", str(script)])

    try:
        for name, work in (
            ("clusterddp submit -- COMMAND", submit),
            ("sbatch --test-only", ask),
        ):
            baseline, seconds = alternate(timed(bare), timed(work), pairs=_PAIRS)
            yield Row(name, "sbatch of the same script", baseline, seconds)
    finally:
        subprocess.run(["scancel", *jobs], check=False)


def _slurm_answers() -> bool:
    if not shutil.which("scontrol"):
        return False
    return not subprocess.run(["scontrol", "ping"], capture_output=True, check=False).returncode


def _printed(argv: Sequence[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def _row(
    name: str,
    argv: Sequence[str],
    *,
    folder: Path,
    timing: Callable[[Callable[[], object]], Sample] = timed,
    pairs: int = _PAIRS,
) -> Row:
    environ = environment(folder)
    start = functools.partial(run, folder=folder, environ=environ)
    baseline, seconds = alternate(
        timing(lambda: start(BASELINE)), timing(lambda: start(argv)), pairs=pairs
    )
    return Row(
        name=name,
        baseline=BASELINE_NAME,
        baseline_seconds=baseline,
        seconds=seconds,
        peak_mib=_peak_mib(argv, folder, environ),
        baseline_peak_mib=_peak_mib(BASELINE, folder, environ),
    )


def environment(folder: Path) -> dict[str, str]:
    """Environment of the processes: programs of `folder/bin` first, home and bytecode in it."""
    return {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "HOME": str(folder),
        "LC_ALL": "C.UTF-8",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
    }


def run(argv: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
    """Run a process to its end, quietly. Raises CalledProcessError."""
    quiet = subprocess.DEVNULL
    subprocess.run(argv, cwd=folder, env=environ, stdout=quiet, stderr=quiet, check=True)


def _peak_mib(argv: Sequence[str], folder: Path, environ: Mapping[str, str]) -> float:
    """Peak resident memory of the process, MiB (ru_maxrss counts KiB on Linux, bytes on macOS)."""
    measuring = [sys.executable, "-S", "-E", "-c", _PEAK, *argv]
    answer = subprocess.run(
        measuring, cwd=folder, env=environ, text=True, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return int(answer.stdout) / (2**20 if sys.platform == "darwin" else 2**10)

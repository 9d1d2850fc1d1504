"""What a run's own clusterddp costs: a submission, and the start of its tasks.

Processor time of whole processes, so that other work on the machine takes no part, with an
installation's bytecode in place, as after its first use.

    python -m benchmarks --only bundle
"""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.pairs import Row, alternate, processor_timed
from clusterddp.data.synthetic import generate
from clusterddp.run.run_dir import RunDir
from clusterddp.submission import bundle

_PAIRS = 12
_CHECKOUT = Path(__file__).parents[1]
_SUBMIT = "from clusterddp.__main__ import main; main()"
_CARRIES_NONE = "from clusterddp.submission import bundle; bundle.bundle_into = lambda run: None; "
_COMMAND = ["--no-snapshot", "--", "true"]
_INSTALLED = [sys.executable, "-m", "clusterddp"]

Work = Callable[[], None]


def measure() -> list[Row]:
    """Submissions with and without it; tasks that start from it, and from an installation."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder / "bytecode"), False
        whole, bare = (_run(folder / name) for name in ("whole", "bare"))
        for file in bare.path.glob("__pycache__/*"):
            file.unlink()
        _make_sbatch(folder / "bin")
        start, names = partial(_start, folder=folder), itertools.count()

        def submit(code: str) -> None:
            start(sys.executable, "-c", code, "submit", f"--run-name=a{next(names)}", *_COMMAND)

        def row(what: str, how: str, run: RunDir, *task: str, pairs: int = _PAIRS) -> Row:
            theirs = partial(start, *_INSTALLED, *task)
            ours = partial(start, sys.executable, str(run.bundle), *task)
            return _row(f"{what} from the run's copy{how}", "installed", theirs, ours, pairs)

        generate(str(folder / "data"), train_images=64, test_images=64)
        trained = ["train", "--dataset=synthetic", f"--data-dir={folder / 'data'}", "--device=cpu"]
        trained += ["--max-steps=1", "--eval-every=100epochs", "--threads=1"]
        return [
            _row(
                "clusterddp submit -- COMMAND",
                "the same, carrying none",
                partial(submit, _CARRIES_NONE + _SUBMIT),
                partial(submit, _SUBMIT),
            ),
            row("clusterddp exec", "", whole, "exec", "--", "true"),
            row("clusterddp exec", ", no bytecode", bare, "exec", "--", "true"),
            row("clusterddp train, one step,", "", whole, *trained, pairs=6),
            row("clusterddp train, one step,", ", no bytecode", bare, *trained, pairs=6),
        ]


def _row(name: str, baseline: str, without: Work, measured: Work, pairs: int = _PAIRS) -> Row:
    return Row(
        name, baseline, *alternate(processor_timed(without), processor_timed(measured), pairs)
    )


def _run(path: Path) -> RunDir:
    path.mkdir()
    bundle.bundle_into(RunDir(path))
    return RunDir(path)


def _make_sbatch(folder: Path) -> None:
    """An sbatch that takes no time itself."""
    folder.mkdir()
    (folder / "sbatch").write_text("#!/bin/sh\ncat >/dev/null\necho 7\n")
    (folder / "sbatch").chmod(0o755)


def _start(*argv: str, folder: Path) -> None:
    environ = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "HOME": str(folder),
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(_CHECKOUT),
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
    }
    subprocess.run(argv, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)

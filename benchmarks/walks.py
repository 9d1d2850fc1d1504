"""Traces which files of the package a submission, a batch process and a task enter, and a dry run.

A file is entered where one of its functions runs. Tasks run from their run's own copy of the
package, so that files go by their path inside it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

_BOUND_SECONDS = 300
"""Time for one command; the tracing makes them slow."""

# Runs at the start of every Python with this on its path, and ends in each in its own way: in a
# submission as it starts sbatch, in a rank as its optimizer has stepped, in a batch process and in
# the parent of a COMMAND as they leave. Bodies of modules and classes are no functions, as their
# code lacks CO_OPTIMIZED, nor are comprehensions, which from Python 3.12 on are part of what they
# stand in.
_TRACER = """
import atexit, os, sys, threading
package, reports = os.environ["HOUSE_PACKAGE"], os.environ["HOUSE_REPORTS"]
entered, leave = set(), os._exit
def end(kind):
    sys.settrace(None)
    threading.settrace(None)
    files = {path.rpartition("/clusterddp/")[2] for path in entered}
    with open(os.path.join(reports, f"{kind}-{os.getpid()}"), "w") as file:
        file.write("\\n".join(sorted(files)))
    entered.clear()
def note(frame, event, argument):
    code = frame.f_code
    path = code.co_filename
    if path.startswith(package) or ".pyz/clusterddp/" in path:
        if code.co_flags & 1 and not code.co_name.endswith(("comp>", "genexpr>")):
            entered.add(path)
    elif code.co_name == "step" and "/torch/optim/" in path:
        return step
def step(frame, event, argument):
    if event == "return":
        end("rank" + os.environ.get("RANK", ""))
    return step
def watch(event, arguments):
    if event == "subprocess.Popen" and entered and os.path.basename(arguments[1][0]) == "sbatch":
        end("sbatch")
def at_exit():
    kind = sys.argv[1:2]
    if entered and kind in (["batch"], ["exec"]):
        end(*kind)
def exit_at_once(code):
    at_exit()
    leave(code)
os._exit = exit_at_once
atexit.register(at_exit)
sys.addaudithook(watch)
threading.settrace(note)
sys.settrace(note)
"""

# Counts what a dry run does beyond the imports that any such command pays for. Bytecode is that of
# the modules which are loaded at the end, as it lies in their files, less the path of the source,
# which each file holds once: it is as long as that of the checkout.
_COUNTED = """
import json, os, sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
import importlib.util, click, jinja2
def bytecode():
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    files = {spec.cached: spec.origin for spec in specs if spec and spec.cached}
    there = [(name, path) for name, path in files.items() if os.path.exists(name)]
    return sum(os.path.getsize(name) - len(path) for name, path in there)
before = len(sys.modules), bytecode()
def leave(code):
    sys.setprofile(None)
    after = len(sys.modules), bytecode()
    sys.stderr.write(json.dumps([calls, after[0] - before[0], after[1] - before[1]]))
    sys.stderr.flush()
    end(code)
end, os._exit = os._exit, leave
sys.argv = ["clusterddp", *sys.argv[1:]]
sys.setprofile(count)
from clusterddp.__main__ import main
try:
    main()
except SystemExit as leaving:
    leave(leaving.code or 0)
"""
_DRY_RUN = "submit --dry-run --nodes 2 --gpus-per-node 4 --run-name x"
# Its lines are wrapped: with paths of a person's, wherever the figures are taken.
_PATHS = (
    "--python /opt/venv/bin/python --controller-python /opt/venv/bin/python"
    " --runs-dir /shared/me/jobs --data-dir /shared/me/data"
)
_TRAINING = "--dataset synthetic --epochs 1"

WALKS = {
    "a submission": "sbatch",
    "the batch process": "batch",
    "rank 0": "rank0",
    "another rank": "rank1",
    "a COMMAND's task": "exec",
}


def entered(root: Path) -> dict[str, list[str]]:
    """Give the package's files that each of the walks enters.

    A submission's go from the start of `submit -- COMMAND` until it starts sbatch, a stand-in; the
    others' come of rehearsals of a training on two nodes and of a COMMAND. Raises
    CalledProcessError for one that fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reports, programs = folder / "reports", folder / "bin"
        for made in (reports, programs):
            made.mkdir()
        (folder / "sitecustomize.py").write_text(_TRACER)
        (programs / "sbatch").write_text("#!/bin/sh\ncat >/dev/null\necho 1\n")
        (programs / "sbatch").chmod(0o755)
        plain = _environ(root, folder) | {"PATH": f"{programs}:{os.environ['PATH']}"}
        watched = plain | {
            "PYTHONPATH": f"{root}:{folder}",
            "HOUSE_PACKAGE": f"{root / 'clusterddp'}{os.sep}",
            "HOUSE_REPORTS": str(reports),
        }
        clusterddp = [sys.executable, "-m", "clusterddp"]
        for environ, words in (
            (plain, "data generate --train-images 640 --test-images 64"),
            (watched, "submit --run-name one -- true"),
            (watched, "submit --launcher local --run-name two -- true"),
            (watched, f"submit --launcher local --run-name three --nodes 2 {_TRAINING}"),
        ):
            _run([*clusterddp, *words.split()], folder, environ)
        return {walk: _most(reports.glob(f"{kind}-*")) for walk, kind in WALKS.items()}


def dry_run(root: Path) -> tuple[list[str], int, int, int]:
    """Give the script that a dry run prints, and what it costs beyond importing click and jinja2.

    That is the number of calls of Python functions, of modules, and of bytes of their bytecode.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = _environ(root, folder)
        counted = [sys.executable, "-c", _COUNTED, *_DRY_RUN.split()]
        _run(counted, folder, environ)  # leaves the bytecode behind that is counted
        done = _run(counted, folder, environ)
        costs = json.loads(done.stderr.splitlines()[-1])
        shown = [sys.executable, "-m", "clusterddp", *_DRY_RUN.split(), *_PATHS.split()]
        return (_run(shown, folder, environ).stdout.splitlines(), *costs)


def _environ(root: Path, folder: Path) -> dict[str, str]:
    """Give an environment in which nothing of a person's or a job's own is set."""
    leaking = ("SLURM", "SBATCH_", "CLUSTERDDP_", "PYTHONDONTWRITEBYTECODE")
    own = {name: value for name, value in os.environ.items() if not name.startswith(leaking)}
    return own | {"PYTHONPATH": str(root), "HOME": str(folder)}


def _run(
    argv: list[str], folder: Path, environ: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        cwd=folder,
        env=environ,
        check=True,
        capture_output=True,
        text=True,
        timeout=_BOUND_SECONDS,
    )


def _most(reports: Iterable[Path]) -> list[str]:
    return max((report.read_text().splitlines() for report in reports), key=len, default=[])

"""The commands of examples/README.md do what it says, as they are written there."""

import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clusterddp.files import read_json
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from clusterddp.worker.workstation import free_port
from tests import forked

EXAMPLES = Path(__file__).parents[1] / "examples"
README = (EXAMPLES / "README.md").read_text()
COMMANDS = re.findall(r"^(clusterddp .*\bown_.*)$", README, re.MULTILINE)
FROM_ONE = (EXAMPLES.parent / "docs" / "from-one-device.md").read_text()
_ASKED = """
import runpy, signal, sys
from pathlib import Path

from clusterddp.loop import Loop

plain, asked = Loop.step, Path("asked")


def step(self, **metrics):
    if self.steps == 20 and self.rank == 1 and not asked.exists():
        asked.touch()
        signal.raise_signal(signal.SIGUSR1)
    plain(self, **metrics)


Loop.step = step
runpy.run_path(sys.argv[1], run_name="__main__")
"""
LOADS = re.findall(r"^(python -c .*)$", README, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the examples to type in."""
    path = tmp_path_factory.mktemp("own") / "examples"
    shutil.copytree(EXAMPLES, path, ignore=shutil.ignore_patterns("__pycache__", "jobs"))
    return path


def typed(folder: Path, line: str, *, code: int = 0, **more: str) -> str:
    """What a command line printed, which must end with this code."""
    words = shlex.split(line)
    if words[0] == "clusterddp":
        words[:1] = [sys.executable, "-m", "clusterddp"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=folder, timeout=280,
        env={**os.environ, "PATH": path, "PYTHONFAULTHANDLER": "1", **more},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    return done.stdout


def run_of(folder: Path, root: str) -> Path:
    [run] = (folder / root).iterdir()
    return run


def test_the_readme_has_a_command_for_each_file() -> None:
    assert len(COMMANDS) == 4 and len(LOADS) == 1
    for path in EXAMPLES.glob("own_*.py"):
        assert any(re.search(rf"\b{path.stem}\b", line) for line in COMMANDS), path.name


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow, pytest.mark.release] if index else [])
        for index, line in enumerate(COMMANDS)
        if " -- " not in line
    ],
)
def test_an_own_model_and_dataset_train(folder: Path, synthetic_dir: Path, line: str) -> None:
    root = f"runs-{COMMANDS.index(line)}"
    out = typed(folder, f"{line} --data-dir {synthetic_dir} --runs-dir {root}")
    run = run_of(folder, root)
    report = read_json(run / "report.json")
    assert report is not None and report["model"] == "own_model:build"
    if "own_dataset" in line:
        assert report["accuracy"] > 0.9, out
    assert (run / "code/own_model.py").is_file() == ("submit" in line)
    if line != COMMANDS[0]:
        return
    # Its checkpoint needs nothing of clusterddp.
    [newest] = (run / "checkpoints").glob("step-*.pt")
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['clusterddp'] = None\n")
    try:
        typed(folder, LOADS[0].replace("CHECKPOINT", str(newest)), PYTHONPATH=str(folder))
    finally:
        (folder / "sitecustomize.py").unlink()


@pytest.mark.slow
@pytest.mark.release  # submission/test_outside.py and on_slurm/test_own.py run copies
def test_a_script_runs_as_it_is_in_the_copy_of_its_folder(folder: Path) -> None:
    [line] = [line for line in COMMANDS if " -- " in line]
    options, _, command = line.partition(" -- ")
    assert "step 50, loss" in typed(folder, f"{options} --runs-dir runs-script -- {command}")
    assert (run_of(folder, "runs-script") / "code/own_script.pt").is_file()


@pytest.mark.parametrize(
    ("page", "before", "after", "count"),
    [
        ("from-one-device", "one_device", "many_devices", 8),
        ("resumable", "many_devices", "resumable", 2),
    ],
)
def test_the_steps_of_a_page_lead_from_one_script_to_the_next(
    page: str, before: str, after: str, count: int
) -> None:
    """Each block of the page is a change that fits in exactly one place."""
    text, result = ((EXAMPLES / f"{name}.py").read_text() for name in (before, after))
    steps = (EXAMPLES.parent / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"```diff\n(.*?)```", steps, re.DOTALL)
    assert len(blocks) == count
    for block in blocks:
        lines = [line or " " for line in block.splitlines()]
        before, after = (
            "".join(f"{line[1:]}\n" for line in lines if line[0] in signs) for signs in (" -", " +")
        )
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    assert text == result


def test_the_readme_shows_the_five_lines_of_a_loop_that_resumes() -> None:
    before, after = (
        (EXAMPLES / f"{name}.py").read_text().splitlines()[1:]  # without the line of the docstring
        for name in ("many_devices", "resumable")
    )
    [shown] = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    lines = list(difflib.unified_diff(before, after, lineterm=""))[2:]
    changed = [[each for each in part if each[:1] in "+-" and each[1:]]
               for part in (shown.splitlines(), lines)]  # fmt: skip
    assert changed[0] == changed[1]
    assert len([each for each in changed[0] if each[0] == "+"]) == 5


WITHOUT_US = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "clusterddp"]:
    del sys.modules[name]
sys.modules["clusterddp"] = None
runpy.run_path("resumable_fsdp.py", run_name="__main__")
"""


def test_a_script_goes_on_without_clusterddp_as_its_page_says(folder: Path) -> None:
    page = (EXAMPLES.parent / "docs/resumable.md").read_text()
    [shown] = re.findall(r"```python\n(try:.*?)```", page, re.DOTALL)
    assert shown in (EXAMPLES / "resumable_fsdp.py").read_text()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **alone, "MASTER_PORT": str(free_port())}
    done = forked.run("-c", WITHOUT_US, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    assert "epoch 3: loss 0." in done.stdout and "clusterddp" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.release  # tests/test_loop.py shows it of others, on_slurm/test_spares.py of this one
@pytest.mark.parametrize("script", ["resumable", "resumable_fsdp"])
def test_a_stopped_run_of_the_examples_loop_resumes_to_the_same_weights(
    folder: Path, script: str
) -> None:
    [line] = re.findall(rf"^(clusterddp submit .*-- python {script}.py)$", README, re.M)
    options, _, command = line.partition(" -- ")
    root = f"runs-{script}"
    options += f" --runs-dir {root} --env OMP_NUM_THREADS=1"
    out = typed(folder, f"{options} --run-name whole -- {command}")
    assert len(re.findall(r"^epoch 3: loss 0\.\d+$", out, re.M)) == 1, "one rank speaks"
    (folder / "asked.py").write_text(_ASKED)  # rank 1 gets a signal in the second epoch
    asked = command.replace("python ", "python asked.py ")
    typed(folder, f"{options} --run-name stopped -- {asked}", code=75)
    run = RunDir(folder / root / "stopped")
    assert "signal: the ranks saved a checkpoint and exited at step " in run.job_log.read_text()
    typed(folder, f"clusterddp resume stopped --runs-dir {root}")
    record = Attempt(run, 2).read_record()
    assert record and record.step and record.step > 20
    weights = [
        (folder / root / name / "code/model.pt").read_bytes() for name in ("whole", "stopped")
    ]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_the_script_for_many_devices_runs_as_its_page_says(folder: Path) -> None:
    [line] = re.findall(r"^(clusterddp submit --launcher local .*many_devices.py)$", FROM_ONE, re.M)
    options, _, command = line.partition(" -- ")
    out = typed(folder, f"{options} --runs-dir runs-many -- {command}")
    assert len(re.findall(r"^epoch 3: loss 0\.\d+$", out, re.M)) == 1, "one rank speaks"
    assert "epoch 3: loss 0." in typed(folder, "python one_device.py")
    # What both have saved is the plain module's.
    saved = [
        torch.load(path / "model.pt") for path in (folder, run_of(folder, "runs-many") / "code")
    ]
    assert saved[0].keys() == saved[1].keys()

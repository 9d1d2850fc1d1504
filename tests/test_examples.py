"""The commands of examples/README.md do what it says, as they are written there."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clusterddp.run.files import read_json

EXAMPLES = Path(__file__).parents[1] / "examples"
README = (EXAMPLES / "README.md").read_text()
COMMANDS = re.findall(r"^    (clusterddp .*\bown_.*)$", README, re.MULTILINE)
FROM_ONE = (EXAMPLES.parent / "docs" / "from-one-device.md").read_text()
LOADS = re.findall(r"^    (python -c .*)$", README, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the examples to type in."""
    path = tmp_path_factory.mktemp("own") / "examples"
    shutil.copytree(EXAMPLES, path, ignore=shutil.ignore_patterns("__pycache__", "jobs"))
    return path


def typed(folder: Path, line: str, **more: str) -> str:
    """What a command line printed, which must end well."""
    words = shlex.split(line)
    if words[0] == "clusterddp":
        words[:1] = [sys.executable, "-m", "clusterddp"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words, cwd=folder, timeout=280,
        env={**os.environ, "PATH": path, "PYTHONFAULTHANDLER": "1", **more},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
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
        pytest.param(line, marks=[pytest.mark.slow] if index else [])
        for index, line in enumerate(COMMANDS)
        if " -- " not in line
    ],
)
def test_an_own_model_and_dataset_train(folder: Path, synthetic_dir: Path, line: str) -> None:
    root = f"runs-{COMMANDS.index(line)}"
    out = typed(folder, f"{line} --data-dir {synthetic_dir} --output-root {root}")
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
def test_a_script_runs_as_it_is_in_the_copy_of_its_folder(folder: Path) -> None:
    [line] = [line for line in COMMANDS if " -- " in line]
    options, _, command = line.partition(" -- ")
    assert "step 50, loss" in typed(folder, f"{options} --output-root runs-script -- {command}")
    assert (run_of(folder, "runs-script") / "code/own_script.pt").is_file()


def test_the_steps_from_one_device_lead_to_the_script_for_many() -> None:
    """Each block of the page is a change that fits in exactly one place."""
    text = (EXAMPLES / "one_device.py").read_text()
    blocks = re.findall(r"```diff\n(.*?)```", FROM_ONE, re.DOTALL)
    assert len(blocks) > 5
    for block in blocks:
        lines = [line or " " for line in block.splitlines()]
        before, after = (
            "".join(f"{line[1:]}\n" for line in lines if line[0] in signs) for signs in (" -", " +")
        )
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    assert text == (EXAMPLES / "many_devices.py").read_text()


@pytest.mark.slow
def test_the_script_for_many_devices_runs_as_its_page_says(folder: Path) -> None:
    [line] = re.findall(
        r"^    (clusterddp submit --launcher local .*many_devices.py)$", FROM_ONE, re.M
    )
    options, _, command = line.partition(" -- ")
    out = typed(folder, f"{options} --output-root runs-many -- {command}")
    assert len(re.findall(r"^epoch 3: loss 0\.\d+$", out, re.M)) == 1, "one rank speaks"
    alone = typed(folder, "python one_device.py")
    assert "epoch 3: loss 0." in alone
    # What both have saved is the plain module's.
    saved = [
        torch.load(path / "model.pt") for path in (folder, run_of(folder, "runs-many") / "code")
    ]
    assert saved[0].keys() == saved[1].keys()

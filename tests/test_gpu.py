"""A test that needs a GPU: skipped without one, failed where one has to be there, summed up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import gpu

ROOT = Path(__file__).parents[1]
MARKED = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [0.97, 0.98], ids="ab")
def test_one(ratio, record_property):
    record_property("ratio", ratio)

@pytest.mark.gpu2
def test_two(): pass

def test_none(): pass
"""


@pytest.fixture
def tried(tmp_path: Path):
    """Runs the marked tests on a machine of so many GPUs; returns what pytest printed."""
    (tmp_path / "test_it.py").write_text(MARKED)

    def run(gpus: int, *words: str, required: str = "") -> str:
        (tmp_path / "machine.py").write_text(
            "from tests import gpu\n"
            f"gpu.machine = lambda: gpu.Machine({gpus}, ('torch 2.15, CUDA 13.2', 'NVIDIA H200'))\n"
        )
        command = [
            *[sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")],
            *[f"--rootdir={tmp_path}", "-p", "tests.gpu", "-p", "machine", *words],
            str(tmp_path / "test_it.py"),
        ]
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
        environ["CLUSTERDDP_REQUIRE_GPU"] = required
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        ).stdout

    return run


@pytest.mark.parametrize(
    ("gpus", "required", "counts"),
    [
        (0, "", "1 passed, 3 skipped"),
        (0, "1", "1 passed, 1 skipped, 2 errors"),
        (1, "2", "3 passed, 1 error"),
        (2, "2", "4 passed"),
    ],
)
def test_a_skip_is_a_failure_where_the_gpus_have_to_be_there(
    gpus: int, required: str, counts: str, tried
) -> None:
    printed = tried(gpus, required=required)
    assert f" {counts} in " in printed
    assert "to paste" not in printed, "the other tests are not about GPUs"


def test_what_asks_for_gpu_gets_all_of_them_and_a_summary(tried) -> None:
    printed = tried(1, "-m", "gpu")
    assert "2 passed, 1 skipped, 1 deselected" in printed
    pasted = printed.partition("to paste")[2]
    assert "`python -m pytest -m gpu`: 2 passed, 1 skipped." in pasted
    assert "On torch 2.15, CUDA 13.2; NVIDIA H200; Python " in pasted
    [one] = [line for line in pasted.splitlines() if "test_one" in line]
    assert one.split(" | ")[1::2] == ["2 passed", "a: ratio 0.97; b: ratio 0.98 |"]
    assert "test_two | 1 skipped | 0.0 | needs 2 GPUs, and torch sees 1 GPU here |" in pasted


def test_a_summary_without_a_gpu_says_so(tried) -> None:
    assert "no GPU: nothing below has run on one" in tried(0, "-m", "gpu")


def test_mnist_is_found_where_it_is_at_hand(tmp_path: Path) -> None:
    here = tmp_path / "b"
    (here / "MNIST" / "raw").mkdir(parents=True)
    assert gpu.digits(None, [tmp_path / "a", here]) == here
    assert gpu.digits(None, [tmp_path / "a"]) is None
    assert gpu.digits(str(tmp_path / "a"), [here]) is None, "the one that is named, no other"


@pytest.mark.parametrize("driver", ["NVIDIA", "AMD"])
def test_a_workstations_gpus_are_shown_to_tests_marked_gpu_alone(
    driver: str, tmp_path: Path
) -> None:
    """A driver that is made up; each test reports what a child of its own would see."""
    (tmp_path / "test_it.py").write_text(
        "import os, subprocess, sys, pytest\n"
        "def seen():\n"
        "    show = 'import os; print(os.environ.get(\"CUDA_VISIBLE_DEVICES\"),'\\\n"
        "        'os.environ.get(\"ROCR_VISIBLE_DEVICES\"))'\n"
        "    return subprocess.check_output([sys.executable, '-c', show], text=True).split()\n"
        "def test_plain(): assert seen() == []\n"
        "@pytest.mark.gpu\n"
        "def test_marked(): assert seen() == ['5', '6']\n"
    )
    (tmp_path / "made_up.py").write_text(
        "from clusterddp.processes import hardware\nfrom tests import gpu\n"
        f"hardware.gpu_driver = lambda: {driver!r}\n"
        "gpu.machine = lambda: gpu.Machine(1, ())\n"
    )
    command = [
        *[
            sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p",
            "no:cacheprovider",
        ],
        *[f"--rootdir={tmp_path}", "-p", "made_up", "-p", "tests.conftest"],
        str(tmp_path / "test_it.py"),
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    environ |= {"CUDA_VISIBLE_DEVICES": "5", "ROCR_VISIBLE_DEVICES": "6"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert " 2 passed in " in done.stdout, done.stdout

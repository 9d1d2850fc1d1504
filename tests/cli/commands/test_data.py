"""`clusterddp data` as it is typed: output, options, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from clusterddp.cli.commands.data import command
from clusterddp.errors import RequestError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_synthesise_then_check(tmp_path: Path) -> None:
    place = str(tmp_path)
    made = run(
        "generate", "--data-dir", place, "--train-images", "1200", "--test-images", "5",
        "--seed", "3",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert made.stdout == (
        f"synthetic is complete at {tmp_path}/synthetic/MNIST/raw\n"
        "  train images  1,200\n"
        "  test images   5\n"
        "  bytes         945,973\n"
        "  checksums     verified, the dataset's own SHA256SUMS\n"
    )
    assert made.stderr.startswith("clusterddp: rendering 1,200 and 5 digits")
    checked = run("check", "--data-dir", place, "--dataset", "synthetic")
    assert (checked.stdout, checked.stderr) == (made.stdout, "")


def test_check_as_json(synthetic_dir: Path) -> None:
    result = run("check", "--data-dir", str(synthetic_dir), "--dataset", "synthetic", "--json")
    assert json.loads(result.stdout) == {
        "name": "synthetic",
        "root": str(synthetic_dir / "synthetic"),
        "train_images": 2_000,
        "test_images": 500,
        "bytes": 48 + 2_500 * 785,
        "checksums_verified": True,
        "published": False,
    }


def test_check_of_the_real_mnist_through_the_environment(
    mnist_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERDDP_DATA_DIR", str(mnist_dir))
    assert "verified, MNIST as published" in run("check").stdout


def test_import(synthetic_dir: Path, tmp_path: Path) -> None:
    result = run("import", str(synthetic_dir), "--data-dir", str(tmp_path))
    assert result.stdout.startswith(f"mnist is complete at {tmp_path}/MNIST/raw\n")
    assert "not the published MNIST" in result.stderr


def test_import_of_a_file_that_is_not_there_is_a_wrong_request() -> None:
    result = run("import", "/nowhere/mnist.tgz")
    assert result.exit_code == 2
    assert "'/nowhere/mnist.tgz' does not exist" in result.stderr


def test_fetch_of_a_set_that_is_there_verifies_it(mnist_dir: Path) -> None:
    result = run("fetch", "--data-dir", str(mnist_dir))
    assert "verified, MNIST as published" in result.stdout
    assert "already contains the set" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--train-images", "0"),
        ("--test-images", "-3"),
        ("--train-images", "2000000000"),
        ("--train-images", "many"),
        ("--seed", "-1"),
        ("--seed", str(2**32)),
    ],
)
def test_counts_and_seeds_out_of_range_are_refused(
    arguments: tuple[str, str], tmp_path: Path
) -> None:
    result = run("generate", "--data-dir", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_empty_data_dir_is_refused() -> None:
    assert isinstance(run("check", "--data-dir", "").exception, RequestError)


@pytest.mark.parametrize("name", ["fetch", "check", "import", "generate"])
def test_help_shows_the_default_folder_and_its_variable(name: str) -> None:
    shown = run(name, "--help").stdout
    assert "[env var: CLUSTERDDP_DATA_DIR; default: data]" in " ".join(shown.split())
    _, _, options = shown.partition("\nOptions:\n")  # below no heading of a training's
    assert "--data-dir DIR" in options


def test_the_whole_command_exits_with_1_and_no_traceback(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "clusterddp", "data", "check", "--data-dir", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("clusterddp: the mnist dataset is missing")
    assert "Traceback" not in ran.stderr


def test_checking_loads_neither_torch_nor_numpy(synthetic_dir: Path) -> None:
    program = (
        "import sys; from clusterddp.cli.commands.data import command; "
        "command(sys.argv[1:], standalone_mode=False); "
        "print(sorted({'torch', 'torchvision', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    arguments = ["check", "--dataset", "synthetic", "--data-dir", str(synthetic_dir)]
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert ran.stderr == "[]\n"

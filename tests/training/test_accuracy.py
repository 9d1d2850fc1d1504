import json
import subprocess
import sys
from pathlib import Path


def test_the_defaults_reach_98_percent_on_mnist_with_eight_ranks(
    mnist_dir: Path, tmp_path: Path
) -> None:
    """Eight ranks take the fewest steps of the supported numbers, so they have it hardest."""
    argv = [
        sys.executable, "-m", "clusterddp", "debug", "--procs=8", "--threads=1",
        f"--data-dir={mnist_dir}", f"--run-dir={tmp_path}",
    ]  # fmt: skip
    process = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert process.returncode == 0, process.stderr
    assert json.loads((tmp_path / "report.json").read_text())["accuracy"] >= 0.98

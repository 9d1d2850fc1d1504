"""What docs/python.md says of notebooks, in a real kernel."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import dying_with_us, processes_in, wait_for

PATIENCE = 280
CELLS = [
    # The kernel computes first, so that OpenMP has threads which a copy of it does not get.
    """
import torch
torch.set_num_threads(2)
x = torch.randn(512, 512)
(x @ x).sum(), torch.exp(torch.randn(1_000_000)).sum()
""",
    """
import os
from clusterddp import ClusterDDPError, TrainConfig, launch

def sum_of_ranks(factor):
    import torch.distributed as dist
    (x @ x).sum(), torch.exp(torch.randn(1_000_000)).sum()
    dist.init_process_group("gloo")
    value = torch.tensor([factor * (1 + dist.get_rank())])
    dist.all_reduce(value)
    print("rank", dist.get_rank(), "is here")
    dist.destroy_process_group()
    return value.item()

launch(sum_of_ranks, args=(10,), procs=2)
""",
    """
def fails():
    raise ValueError(f"boom {os.environ['WORLD_SIZE']}")

try:
    launch(fails, procs=2)
except ClusterDDPError as error:
    print(error)
try:
    launch(fails, procs=2, start_method="spawn")
except ClusterDDPError as error:
    print(error)
""",
    """
config = TrainConfig(dataset="synthetic", data_dir="data", max_steps=2, threads=2, device="cpu")
report = launch(config, procs=2, start_method="fork", run_dir="jobs/one")
report["world_size"], report["steps"]
""",
]
# In a process of its own: what Jupyter warns of is not ours to turn into errors.
READER = """
import json, sys
import nbformat
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(source) for source in json.loads(sys.argv[1])]
book = nbformat.v4.new_notebook(cells=cells)
NotebookClient(book, timeout=int(sys.argv[2]), kernel_name="python3").execute()
def said(cell):
    return "".join(
        out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs
    )
print(json.dumps([said(cell) for cell in book.cells]))
"""


@pytest.fixture
def jupyter() -> None:
    """Skips where no kernel can be had; fails instead where CI has to run it."""
    missing = [name for name in ("nbclient", "ipykernel") if not importlib.util.find_spec(name)]
    if not missing:
        return
    message = f"{' and '.join(missing)} not installed: pip install -e '.[test]'"
    if os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1":
        pytest.fail(message)
    pytest.skip(message)


def test_a_notebook_launches_its_own_functions_and_trains(
    jupyter: None, synthetic_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").symlink_to(synthetic_dir)
    process = subprocess.run(
        [sys.executable, "-c", READER, json.dumps(CELLS), str(PATIENCE // 2)],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False,
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")},
        preexec_fn=dying_with_us(),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    _, summed, failed, trained = json.loads(process.stdout)
    assert "rank 0 is here" in summed and "rank 1 is here" in summed
    assert summed.endswith("[30, 30]")
    assert "failed first:\nTraceback" in failed and "ValueError: boom 2" in failed
    assert 'raise ValueError(f"boom' in failed  # the cell's own line
    assert "fails cannot be sent to another process: it is defined in a notebook's cell" in failed
    assert "rank 0 of 2" in trained and "rank 1 of 2" not in trained
    assert trained.endswith("(2, 2)")
    assert (tmp_path / "jobs" / "one" / "report.json").exists()
    wait_for(lambda: not processes_in(tmp_path), "no process left")

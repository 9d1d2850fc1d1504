"""An sbatch file and the line that `clusterddp import` gives for it do the same on a real Slurm."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.on_slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm
TELLS = """
import json, os, sys
names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK",
         "CUDA_VISIBLE_DEVICES", "FROM_ENV", "FROM_SETUP", "FROM_LINE")
told = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[2:]}
with open(f"{sys.argv[1]}-{os.environ['SLURM_PROCID']}.json", "w") as file:
    json.dump(told, file)
"""
JOB = """#!/bin/bash
#SBATCH --job-name="it's mine"  # with a remark
#SBATCH -N 2 --ntasks-per-node=2 --gpus-per-node=2 -c 3
#SBATCH --output=out-%j.txt
export FROM_ENV='a  "b"' MASTER_PORT=29500
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ -d / ]; then
    export FROM_SETUP="in $SLURM_JOB_NUM_NODES"
fi
ARGS="--job $SLURM_JOB_NUM_NODES"
MORE=("of an" "array $SLURM_JOB_NUM_NODES")
FROM_LINE=1 srun --cpus-per-task=$SLURM_CPUS_PER_TASK {python} tell.py $TOLD $ARGS 'c  d' \\
    "e\\"f" "${{MORE[@]}}" ~/x *.py $'g\\th' 'two
lines'
"""


RANKS = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
with open(f"{os.environ['TOLD']}-{os.environ['RANK']}", "w") as file:
    print(*(os.environ[name] for name in names), *sys.argv[1:], file=file)
"""
TORCHRUN = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=2 --cpus-per-task=2
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head=${{nodes[0]}}
srun {python} -m torch.distributed.run --nnodes 2 --nproc_per_node 2 --rdzv_id $SLURM_JOB_ID \\
    --rdzv_backend c10d --rdzv_endpoint $head:29500 ranks.py --lr 0.1
"""


def told(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(ranks)]


def test_the_file_and_the_line_start_the_same_tasks(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(TELLS)
    (tmp_path / "job.sbatch").write_text(JOB.format(python=sys.executable))
    for name in ("file", "line"):
        (tmp_path / name).mkdir()
    environ = {"TOLD": str(tmp_path / "file/told")}
    cluster.run(
        ["sbatch", "--wait", "job.sbatch"], cwd=tmp_path, env=environ, timeout=300, check=True
    )
    argv = [sys.executable, "-m", "clusterddp"]
    line = cluster.run([*argv, "import", "job.sbatch"], cwd=tmp_path, check=True).stdout
    typed = line.replace("clusterddp submit", f"{shlex.join(argv)} submit --wait", 1)
    environ = {"TOLD": str(tmp_path / "line/told")}
    done = cluster.run(["bash", "-c", typed], cwd=tmp_path, env=environ, timeout=300)
    assert done.returncode == 0, done.stderr
    assert told(tmp_path / "line", 4) == told(tmp_path / "file", 4)
    assert told(tmp_path / "line", 4)[3] == {
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_NTASKS": "4",
        "SLURM_CPUS_PER_TASK": "3",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "FROM_ENV": 'a  "b"',
        "FROM_SETUP": "in 2",
        "FROM_LINE": "1",
        "argv": [
            *("--job", "2", "c  d", 'e"f', "of an", "array 2", f"{Path.home()}/x"),
            *("tell.py", "g\th", "two\nlines"),
        ],
    }


@pytest.mark.slow
@pytest.mark.release  # such lines: scripts/test_submit_line.py; tasks of both: above
def test_the_ranks_of_torchrun_are_tasks_with_the_same_ranks(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "job.sbatch").write_text(TORCHRUN.format(python=sys.executable))
    argv = [sys.executable, "-m", "clusterddp"]
    line = cluster.run([*argv, "import", "job.sbatch"], cwd=tmp_path, check=True).stdout
    typed = line.replace("clusterddp submit", f"{shlex.join(argv)} submit --wait", 1)
    said = {}
    for name, command in (
        ("file", ["sbatch", "--wait", "job.sbatch"]),
        ("line", ["bash", "-c", typed]),
    ):
        (tmp_path / name).mkdir()
        environ = {"TOLD": str(tmp_path / name / "rank")}
        done = cluster.run(command, cwd=tmp_path, env=environ, timeout=300)
        assert done.returncode == 0, done.stderr
        said[name] = {path.name: path.read_text() for path in (tmp_path / name).iterdir()}
    assert "torch" not in line
    assert said["line"] == said["file"]
    assert said["line"]["rank-3"] == "3 4 1 2 --lr 0.1\n"

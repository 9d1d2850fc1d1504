"""What `check` says will go wrong does on a real Slurm, and the line that it gives is right."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterddp.scripts.check import check_texts
from tests.on_slurm.cluster import SlurmCluster

EACH = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
TWO_A_NODE = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n"

# The stand-in prints what a launcher would start with, or what a training would read.
STAND_IN = '#!/bin/sh\necho "$*" "rank=$RANK" "address=$MASTER_ADDR"\n'

CASES: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "batch-shell-rank": (
        f"{EACH}srun torchrun --nnodes=2 --node_rank=$SLURM_NODEID t.py",
        ["--nnodes=2 --node_rank=0 t.py"] * 2,
        ["--nnodes=2 --node_rank=0 t.py", "--nnodes=2 --node_rank=1 t.py"],
    ),
    "batch-shell-rank of a string": (
        f'{EACH}srun bash -c "torchrun --nnodes=2 --node_rank=$SLURM_PROCID t.py"',
        ["--nnodes=2 --node_rank=0 t.py"] * 2,
        ["--nnodes=2 --node_rank=0 t.py", "--nnodes=2 --node_rank=1 t.py"],
    ),
    "batch-shell-rank of an export": (
        f"{TWO_A_NODE}export RANK=$SLURM_PROCID; unset SLURM_EXPORT_ENV\nsrun python t.py",
        ["t.py rank=0"] * 4, [f"t.py rank={rank}" for rank in range(4)],
    ),
    "launcher-per-rank": (
        f"{TWO_A_NODE}srun torchrun --nnodes=2 --nproc_per_node=2 t.py",
        ["--nnodes=2 --nproc_per_node=2 t.py"] * 4, ["--nnodes=2 --nproc_per_node=2 t.py"] * 2,
    ),
    "srun-missing": (
        f"{EACH}torchrun --nnodes=2 --nproc_per_node=2 t.py",
        ["--nnodes=2 --nproc_per_node=2 t.py"], ["--rdzv-id="] * 2,
    ),
    "launch-node": (
        f"{EACH}export MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR\nsrun python t.py",
        ["t.py rank= address="] * 2, ["t.py rank= address=h01"] * 2,
    ),
    "rendezvous-host": (
        f"{EACH}export MASTER_ADDR=$SLURM_SUBMIT_HOST\nsrun python t.py",
        ["t.py rank= address=login"] * 2, ["t.py rank= address=h01"] * 2,
    ),
    "rendezvous-host of the list": (
        f"{EACH}export MASTER_ADDR=$SLURM_JOB_NODELIST\nsrun python t.py",
        ["t.py rank= address=h[01-02]"] * 2, ["t.py rank= address=h01"] * 2,
    ),
    "rendezvous-host of the last": (
        f"{EACH}export MASTER_ADDR=$(scontrol show hostnames | tail -n 1)\nsrun python t.py",
        ["t.py rank= address=h02"] * 2, ["t.py rank= address=h01"] * 2,
    ),
    "address-per-task": (
        f"{EACH}srun bash -c 'export MASTER_ADDR=$(hostname); python t.py'",
        ["t.py rank= address=h01", "t.py rank= address=h02"], ["t.py rank= address=h01"] * 2,
    ),
    "export-none": (
        f"{EACH}#SBATCH --export=NONE\nexport MASTER_ADDR=h01\nsrun $PWD/python t.py",
        ["t.py rank= address="] * 2, ["t.py rank= address=h01"] * 2,
    ),
    "directive-below-command": (
        "set -e\n#SBATCH --ntasks=3\nsrun python t.py", ["t.py"], ["t.py"] * 3,
    ),
    "ntasks-product": (
        "#SBATCH -N 2\n#SBATCH -n 2\n#SBATCH --ntasks-per-node=2\nsrun python t.py", ["t.py"] * 2,
        ["t.py"] * 4,
    ),
}  # fmt: skip
"""Scripts, and what their tasks print as they stand and as they are mended (prefixes)."""


def printed(cluster: SlurmCluster, folder: Path, script: str) -> list[str]:
    """Run a script; return what its tasks have printed, sorted."""
    log = folder / "job.log"
    log.unlink(missing_ok=True)
    first, rest = script.split("\n", 1)
    head = f"{first}\n#SBATCH --output={log}\n#SBATCH --chdir={folder}\n"
    body = rest.replace("srun ", f'PATH="{folder}:$PATH" srun ').replace(
        "\ntorchrun", f"\n{folder}/torchrun"
    )
    cluster.wait_job(cluster.sbatch(head + body))
    return sorted(log.read_text().splitlines())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("torchrun", "python"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    return tmp_path


FIRST = ("batch-shell-rank", "launcher-per-rank", "export-none")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([] if name in FIRST else [pytest.mark.slow]),
                *([pytest.mark.release] if " " in name else []),  # a rule's second form
            ],
        )
        for name in CASES
    ],
)
def test_what_is_said_happens_and_the_line_to_write_mends_it(
    cluster: SlurmCluster, folder: Path, name: str
) -> None:
    body, wrong, right = CASES[name]
    script = f"#!/bin/bash\n{body}\n"
    rule = name.partition(" ")[0]
    (found,) = [each for each in check_texts({"job.sh": script}) if each.rule == rule]
    assert found.is_sure
    lines = printed(cluster, folder, script)
    assert len(lines) == len(wrong)
    assert all(line.startswith(start) for line, start in zip(lines, sorted(wrong), strict=True))
    if not right:
        return
    mended = script.split("\n")
    mended[found.line - 1] = found.instead
    lines = printed(cluster, folder, "\n".join(mended))
    assert len(lines) == len(right)
    assert all(line.startswith(start) for line, start in zip(lines, sorted(right), strict=True))


def test_one_element_of_an_array_has_the_id_of_the_whole(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job_id = cluster.sbatch(
        f"#!/bin/bash\n#SBATCH --array=0-2\n#SBATCH --output={tmp_path}/%a\n"
        "echo $SLURM_JOB_ID $SLURM_ARRAY_JOB_ID\n"
    )
    for element in range(3):
        cluster.wait_job(f"{job_id}_{element}")
    ids = [(tmp_path / str(element)).read_text().split() for element in range(3)]
    assert [own for own, whole in ids].count(job_id) == 1
    assert {whole for _, whole in ids} == {job_id}


def test_a_task_of_its_own_gpu_sees_one(cluster: SlurmCluster, tmp_path: Path) -> None:
    log = tmp_path / "log"
    cluster.wait_job(
        cluster.sbatch(
            f"#!/bin/bash\n#SBATCH -N1 -n4 --gpus-per-task=1 --output={log}\n"
            "srun bash -c 'echo $SLURM_LOCALID:$CUDA_VISIBLE_DEVICES'\n"
        )
    )
    seen = [line.partition(":")[2] for line in log.read_text().splitlines()]
    assert len(seen) == 4
    assert all("," not in devices and devices for devices in seen)


def test_srun_sets_no_variable_of_torch(cluster: SlurmCluster, folder: Path) -> None:
    lines = printed(cluster, folder, f"#!/bin/bash\n{EACH}srun python t.py\n")
    assert lines == ["t.py rank= address="] * 2


@pytest.mark.slow
def test_a_step_in_the_background_ends_with_the_script(cluster: SlurmCluster, folder: Path) -> None:
    script = "#!/bin/bash\n#SBATCH -N 1\nsrun bash -c 'sleep 600; python t.py' &\n"
    (found,) = check_texts({"job.sh": script})
    assert (found.rule, found.is_sure) == ("step-not-waited-for", True)
    assert not any(line.startswith("t.py") for line in printed(cluster, folder, script))
    mended = script.replace(found.text, found.instead).replace("sleep 600; ", "")
    assert printed(cluster, folder, mended) == ["t.py rank= address="]


@pytest.mark.parametrize(
    ("script", "rule", "said"),
    [
        ("#!/bin/bash\nsrun a\r\nsrun b\n", "dos-line-ends", "DOS line breaks"),
        ("#!/bin/bash\n#SBATCH --gpu-per-node=4\nsrun a\n", "unknown-option", "gpu-per-node"),
    ],
)
def test_what_sbatch_refuses(cluster: SlurmCluster, script: str, rule: str, said: str) -> None:
    (found,) = check_texts({"job.sh": script})
    assert found.rule == rule
    asked = cluster.run(["sbatch", "/dev/stdin"], input=script)
    assert asked.returncode != 0
    assert said in asked.stderr


def test_more_tasks_than_the_nodes_take_are_refused(cluster: SlurmCluster) -> None:
    script = "#!/bin/bash\n#SBATCH -N2 -n8 --ntasks-per-node=2\nsrun python t.py\n"
    (found,) = [e for e in check_texts({"job.sh": script}) if e.rule == "ntasks-product"]
    assert "sbatch refuses the job" in found.why
    assert cluster.run(["sbatch", "/dev/stdin"], input=script).returncode != 0

"""Typical sbatch files: what is printed for each, typed into bash, asks for the same job.

Each file is of a kind that centres and projects publish. Beside it stand the directives and the
tasks' command that it asks for once its launcher is gone, and what is said of the rest.
"""

import json
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner

from clusterddp.cli.commands.import_script import refusal
from clusterddp.cli.main import cli
from clusterddp.scripts import sbatch_file
from tests.hostile import CARRIED
from tests.scripts.test_submit_line import line_of

OWN = {"job-name", "comment", "output"}
"""Directives that a run has in any case."""


@dataclass
class Kind:
    """A kind of file."""

    text: str
    command: str
    """What each task runs, as shlex joins it."""
    gone: set[str] = field(default_factory=set)
    """Directives that are not carried over."""
    changed: dict[str, str] = field(default_factory=dict)
    """Directives that differ."""
    said: list[str] = field(default_factory=list)
    """Begin of each note, in their order."""


KINDS = {
    "srun python, conda and modules": Kind(
        """
#SBATCH --job-name=resnet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --partition=gpu
#SBATCH --account=proj
#SBATCH --output=logs/%x-%j.out
module purge
module load cuda/12.4 nccl/2.21
source ~/miniconda3/etc/profile.d/conda.sh
conda activate torch
export OMP_NUM_THREADS=8
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
srun python train.py --epochs 90
""",
        "python train.py --epochs 90",
        said=[
            ": a failing setup line",
            "10 #SBATCH --output=logs/%x-%j.out: not carried over: logs",
        ],
    ),
    "torchrun over two nodes": Kind(
        """
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
nodes_array=($nodes)
head_node=${nodes_array[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
echo Node IP: $head_node_ip
srun torchrun \\
--nnodes 2 \\
--nproc_per_node 4 \\
--rdzv_id $RANDOM \\
--rdzv_backend c10d \\
--rdzv_endpoint $head_node_ip:29500 \\
/shared/multinode.py 50 10
""",
        "python /shared/multinode.py 50 10",
        changed={"ntasks-per-node": "4", "cpus-per-task": "8"},
        said=["11 torchrun: its ranks are now Slurm's tasks, 4 per node, with 8 CPUs each"],
    ),
    "accelerate launch in variables": Kind(
        """
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=160
export GPUS_PER_NODE=4
head_node_ip=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export LAUNCHER="accelerate launch \\
    --num_processes $((SLURM_NNODES * GPUS_PER_NODE)) \\
    --num_machines $SLURM_NNODES \\
    --rdzv_backend c10d \\
    --main_process_ip $head_node_ip \\
    --main_process_port 29500 \\
    "
export SCRIPT="$HERE/example.py"
export CMD="$LAUNCHER $SCRIPT --output_dir $HERE/out"
srun $CMD
""",
        "bash -c 'exec python $HERE/example.py --output_dir $HERE/out'",
        changed={"ntasks-per-node": "4", "cpus-per-task": "40"},
        said=["17 accelerate launch: its ranks are now Slurm's tasks"],
    ),
    "array": Kind(
        """
#SBATCH --array=0-3%2
#SBATCH --gres=gpu:1 --mem=32G
LRS=(0.1 0.03 0.01 0.003)
python train.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]}
""",
        "bash -c 'exec python train.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]}'",
        gone={"array"},
        said=["2 #SBATCH --array=0-3%2: not", "5 ${LRS[$SLURM_ARRAY_TASK_ID]}: not carried over"],
    ),
    "signal and a trap": Kind(
        """
#SBATCH --nodes=1 --gres=gpu:a100:2 --ntasks-per-node=2
#SBATCH --signal=B:USR1@120 --requeue
trap 'touch stop; wait' USR1
srun python train.py --resume auto &
wait
""",
        "python train.py --resume auto",
        said=["4 trap 'touch stop; wait' USR1: not carried over: clusterddp forwards signals"],
    ),
    "gpus-per-task": Kind(
        """
#SBATCH -N 2 --ntasks-per-node=4 --gpus-per-task=1 -c 6
srun --cpu-bind=cores python -u train.py
""",
        "python -u train.py",
    ),
    "mem, mail and exclusive": Kind(
        """
#SBATCH -N 1 --exclusive --mem=64G -t 2-00:00:00 --constraint='a100&ib'
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org
#SBATCH --hint=nomultithread
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
srun -n 1 python train.py
""",
        "python train.py",
    ),
    "export lines": Kind(
        """
#SBATCH -N 2 --ntasks-per-node=1
export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=^lo,docker
export TRITON_CACHE_DIR=/tmp/$SLURM_JOB_ID
export API_KEY=0123
export NAME="it's a \\"run\\""
srun --export=ALL python train.py --name "$NAME"
""",
        shlex.join(("python", "train.py", "--name", 'it\'s a "run"')),
        said=["5 API_KEY: looks secret, so the line omits its value"],
    ),
    "here-document": Kind(
        """
#SBATCH -N 2 --ntasks-per-node=2
cat > config.yaml <<EOF
lr: 0.1
EOF
srun python train.py --config config.yaml
""",
        "python train.py --config config.yaml",
        said=["3 cat > config.yaml <<EOF: not carried over: lines 3 to 5"],
    ),
    "loop over values": Kind(
        """
#SBATCH -N 1 --ntasks-per-node=2
for lr in 0.1 0.01; do
    srun python train.py --lr $lr
done
""",
        "bash -c 'exec python train.py --lr $lr'",
        said=["4 srun python train.py --lr $lr: was started", "4 $lr: not carried over: lr is"],
    ),
    "loop over nodes": Kind(
        """
#SBATCH -N 2 --ntasks-per-node=1 --gpus-per-node=8
hosts=($(scontrol show hostnames $SLURM_JOB_NODELIST))
for i in $(seq 0 $((SLURM_NNODES - 1))); do
    srun -N1 -n1 -w ${hosts[$i]} torchrun --nnodes $SLURM_NNODES --node_rank $i \\
        --nproc_per_node 8 --master_addr ${hosts[0]} train.py --fsdp &
done
wait
""",
        "python train.py --fsdp",
        changed={"ntasks-per-node": "8"},
        said=["5 torchrun: its ranks are", "5 srun -N1 -n1 -w ${hosts[$i]}"],
    ),
    "mpirun": Kind(
        """
#SBATCH -N 2 --ntasks-per-node=4
module load openmpi
mpirun -np 8 -x NCCL_DEBUG=INFO python train.py
""",
        "python train.py",
    ),
    "container of pyxis": Kind(
        """
#SBATCH -N 2 --ntasks-per-node=4 --gpus-per-node=4
srun --container-image=nvcr.io/x:1 --container-mounts=/data:/data:ro,$PWD:/work python train.py
""",
        "python train.py",
        said=["3 $PWD:/work: not carried over"],
    ),
    "apptainer": Kind(
        """
#SBATCH -N 2 --ntasks-per-node=4 --gpus-per-node=4
srun apptainer exec --nv --bind $PWD image.sif python train.py
""",
        "bash -c 'exec apptainer exec --nv --bind $PWD image.sif python train.py'",
    ),
}


def typed(text: str, folder: Path) -> list[str]:
    """The words behind `clusterddp` that bash makes of what `import` prints for a file."""
    (folder / "job.sbatch").write_text(text)
    printed = CliRunner().invoke(cli, ["import", str(folder / "job.sbatch")])
    assert printed.exit_code == 0, printed.output
    (folder / "bin").mkdir()
    program = folder / "bin/clusterddp"
    program.write_text("#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n")
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", printed.stdout],
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}, cwd=folder,
        capture_output=True, check=True,
    )  # fmt: skip
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_printed_line_rendered_again_asks_for_the_same(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "0123")
    words = typed(f"#!/bin/bash{kind.text}", tmp_path)
    rendered = CliRunner().invoke(cli, [*words[:1], "--dry-run", *words[1:]])
    assert rendered.exit_code == 0, rendered.output
    before = sbatch_file.read(f"#!/bin/bash{kind.text}")
    after = sbatch_file.read(rendered.stdout)
    wanted = {each.name: each.value for each in before.directives if each.name != "output"}
    wanted = {name: value for name, value in wanted.items() if name not in kind.gone}
    wanted |= kind.changed
    asked = {each.name: each.value for each in after.directives}
    assert {name: asked.get(name) for name in wanted} == wanted
    layout = {"nodes", "ntasks", "ntasks-per-node"}  # which a run always says
    assert asked.get("open-mode") == ("append" if "requeue" in asked else None)
    assert asked.keys() - wanted.keys() - {"open-mode"} <= OWN | layout
    of_task = after.steps[-1].texts
    assert shlex.join(of_task[of_task.index("--") + 1 :]) == kind.command


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_said_of_a_typical_file(kind: Kind) -> None:
    made = line_of(*kind.text.strip("\n").split("\n"))
    notes = [f"{note.line or ''} {note.source}: {note.why}".lstrip() for note in made.notes]
    assert len(notes) == len(kind.said), notes
    for note, said in zip(notes, kind.said, strict=True):
        assert note.startswith(said), notes


WORDS = [
    "~/x.py --data=~/d a*", "data/*.txt 'data/*.txt' \"data/*.txt\" none*",
    "{1..3} {a,b}.py '{a,b}' {} {a}", "$'a\\x41\\n\\'b' $'two\nlines'",
    "'two\nlines' \"and $V\nmore\"", "m[0]=1 d[0] 'd[0]'", '"${ARRAY[@]}" x"${ARRAY[@]}"y',
    "$TILDE/x \"$TILDE\" '$TILDE'", '$GLOB "$GLOB"', "$MANY last", '"$V" $V "a$V b" \\$V',
    'a\\ b "a\\"b" \'a"b\'', "--name=\"it's\" -- -x - ''",
    *(shlex.quote(value) for value in CARRIED), *(f'"$V"{shlex.quote(value)}' for value in CARRIED),
]  # fmt: skip


@pytest.mark.parametrize("words", WORDS)
def test_the_tasks_get_the_words_that_bash_had_given_them(words: str, tmp_path: Path) -> None:
    """A stand-in for srun starts its program, which writes its arguments down."""
    folder = tmp_path / "folder"
    for name in ("data", "home/d"):
        (folder / name).mkdir(parents=True)
    for name in ("data/1.txt", "data/2.txt", "ab", "a c", "d0"):
        (folder / name).touch()
    programs = {"srun": 'exec "$@"', "python": "for word; do printf '%s\\0' \"$word\"; done"}
    (tmp_path / "path").mkdir()
    for name, line in programs.items():
        (tmp_path / "path" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "path" / name).chmod(0o755)
    script = (
        'ARRAY=(one \'two words\' "a*" $V "x $W" ~/y)\n'
        "TILDE=~/t\nGLOB='data/*'\nMANY=\"1 2 $V\"\n"
        f"srun python t.py {words}\n"
    )
    environ = {
        "PATH": f"{tmp_path / 'path'}:/usr/bin:/bin",
        "HOME": str(folder / "home"),
        "LC_ALL": "C.UTF-8",
        "V": "of the shell",
        "W": "and  more",
    }

    def output(of: str) -> bytes:
        return subprocess.run(
            ["bash", "-c", of], env=environ, cwd=folder, capture_output=True, check=True
        ).stdout

    made = line_of("#SBATCH -N 1", *script.split("\n"))
    assert refusal(made) == ""
    setup = [value[0] for option, *value in made.options if option == "--setup"]
    assert output("\n".join((*setup, shlex.join(made.command)))) == output(script)


def test_the_json_has_what_bash_makes_of_the_line(tmp_path: Path) -> None:
    text = "#!/bin/bash\n#SBATCH -D '-a b'\nexport A='b c'\nsrun python t.py \"x\u2028\" '\x85'\n"
    (tmp_path / "-a b").mkdir()
    words = typed(text, tmp_path)
    said = CliRunner().invoke(cli, ["import", "--json", str(tmp_path / "job.sbatch")])
    assert json.loads(said.stdout)["argv"][1:] == words
    assert "x\u2028" in words and "\x85" in words

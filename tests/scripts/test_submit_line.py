"""The submit line for an sbatch file: what it carries over, what it says it does not."""

import itertools
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from clusterddp.cli.commands.import_script import refusal
from clusterddp.cli.main import cli
from clusterddp.errors import RequestError
from clusterddp.scripts import sbatch_file
from clusterddp.scripts.submit_line import SubmitLine, translate
from tests.hostile import CARRIED

SRUN = "srun python train.py"


def line_of(*lines: str) -> SubmitLine:
    """The submit line of a file with these lines behind its first."""
    return translate(sbatch_file.read("\n".join(("#!/bin/bash", *lines)), "job.sbatch"))


def options(*lines: str) -> str:
    """Its options alone, without --nodes 1."""
    made = line_of(*lines)
    assert refusal(made) == ""
    return (
        shlex.join(w for option in made.options for w in option).removeprefix("--nodes 1").strip()
    )


def notes(*lines: str) -> list[str]:
    return [f"{note.line}: {note.source}: {note.why}" for note in line_of(*lines).notes]


@pytest.mark.parametrize(
    ("directives", "typed"),
    [
        ("-N 2 --ntasks-per-node=4 --gpus-per-node=4", "--nodes 2 --gpus-per-node 4"),
        ("-N 2 --ntasks-per-node=4", "--nodes 2 --tasks-per-node 4"),
        ("-N 2 -n 8 -c 3", "--nodes 2 --tasks-per-node 4 --cpus-per-task 3"),
        ("-n 8 --ntasks-per-node=4", "--nodes 2 --tasks-per-node 4"),
        ("--gres=gpu:a100:2 -n2", "--gpus-per-node a100:2 --gpu-directive gres"),
        ("--gres=gpu", "--gpus-per-node 1 --gpu-directive gres"),
        ("--gres=nvme:1", "--sbatch gres=nvme:1"),
        ("-n 2 --gpus-per-task=a30:1", "--gpus-per-node a30:2 --gpu-directive gpus-per-task"),
        ("-N 2 -n 8 -G 8", "--nodes 2 --gpus-per-node 4"),
        ("-J 'two words' -p a,b -A x -q y",
         "--job-name 'two words' --partition a,b --account x --qos y"),
        ("-t 1-12 --mem=64GB -C 'a100&ib'", "--time 1-12 --mem 64G --constraint 'a100&ib'"),
        ("-w h[1] -x h2 -d singleton", "--nodelist 'h[1]' --exclude h2 --dependency singleton"),
        ("--exclusive --requeue", "--exclusive --requeue"),
        ("--no-requeue", "--no-requeue"),
        ("--signal=B:SIGUSR1@90", "--signal B:USR1@90"),
        ("--signal=10", "--signal USR1@60"),
        ("--mail-type=END --mail-type=FAIL --mail-user=a@b",
         "--mail-type END,FAIL --mail-user a@b"),
        ("--mem-per-cpu=4G --comment='a b' -H",
         "--sbatch mem-per-cpu=4G --sbatch 'comment=a b' --sbatch hold"),
        ("--export=NONE", "--export NONE"),
        ("--export=ALL,A=1", "--env A=1"),
        ("--export=HOME,A=1", "--export NONE --env HOME --env A=1"),
        ("--parsable", ""),
        ("--gres=gpu:a100", "--gpus-per-node a100:1 --gpu-directive gres"),
        ("-t 5 -t 9", "--time 9"),
    ],
)  # fmt: skip
def test_directives_become_options(directives: str, typed: str) -> None:
    assert options(f"#SBATCH {directives}", SRUN) == typed


@pytest.mark.parametrize(
    ("lines", "typed"),
    [
        (["module load cuda/12 nccl", "ml gcc"], "--module cuda/12 --module nccl --module gcc"),
        # In their order, where something comes first that modules would come before.
        (["module purge", "module load cuda"], "--setup 'module purge' --setup 'module load cuda'"),
        (["export A=1 B='x y'"], "--env A=1 --env 'B=x y'"),
        (["X=7", "export A=$X"], "--env A=7"),
        (["module load cuda", "export CUDA_HOME=/c"],
         "--module cuda --setup 'export CUDA_HOME=/c'"),
        (["module load cuda", "export NCCL_DEBUG=INFO"], "--env NCCL_DEBUG=INFO --module cuda"),
        (["export A=$'x\\x41' B=2"], """--env B=2 --setup 'export A=$'"'"'x\\x41'"'"''"""),
        (["export A=$SLURM_JOB_ID B=2"], "--env B=2 --setup 'export A=$SLURM_JOB_ID'"),
        (["source venv/bin/activate  # mine"], "--setup 'source venv/bin/activate'"),
        (["cd $SLURM_SUBMIT_DIR", "cd .", "set -eo pipefail"], ""),
        (["set -x"], "--setup 'set -x'"),
        (["a \\", "  b && c"], "--setup 'a  b && c'"),
        (["if [ -f a ]; then", "  . a  ", "else", "  b", "fi"],
         "--setup 'if [ -f a ]; then . a; else b; fi'"),
        (["for i in 1 2", "do", "a $i &", "done"], "--setup 'for i in 1 2; do a $i & done'"),
        (["f() {", "a", "}", "f"], "--setup 'f() { a; }' --setup f"),
        # What the rendezvous needs, and nothing else, clusterddp does.
        (["export MASTER_ADDR=$(hostname) MASTER_PORT=29500",
          "export WORLD_SIZE=8 RANK=$SLURM_PROCID"], ""),
        (["nodes=( $(scontrol show hostnames) )", "head=${nodes[0]}", "export MASTER_ADDR=$head"],
         ""),
        (["head=$(hostname)", "export MASTER_ADDR=$head", 'echo "at $head and $MASTER_ADDR"'], ""),
        (["mapfile -t h < <(scontrol show hostnames)", "ip=${h[0]}"], ""),
        (["if [ a ]; then", "ip=$(hostname)", 'echo "$ip"', "fi"], ""),
        (["if [ a ]; then", "ip=$(hostname)", 'echo "$ip" > f', "fi"],
         """--setup 'if [ a ]; then ip=$(hostname); echo "$ip" > f; fi'"""),
        (["where=$(pwd)", "mkdir -p $where/x"],
         "--setup 'where=$(pwd)' --setup 'mkdir -p $where/x'"),
        (["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"], ""),
        (["OMP_NUM_THREADS=8", "export OMP_NUM_THREADS"],
         "--setup OMP_NUM_THREADS=8 --setup 'export OMP_NUM_THREADS'"),
        (["set -a", "D=4", "set +a", "E=5"], "--setup 'set -a' --setup D=4 --setup 'set +a'"),
        (["set -o allexport; D=4"], "--setup 'set -o allexport; D=4'"),
        (["export PATH+=:/opt/bin"], "--setup 'export PATH+=:/opt/bin'"),
        (["D=${D:-4}", "export D"], "--setup 'D=${D:-4}' --setup 'export D'"),
        (["export CUDA_VISIBLE_DEVICES=0"], "--env CUDA_VISIBLE_DEVICES=0"),
        # Two constructs are two lines.
        (["if a; then", "b", "fi", "{ c", "d; }"],
         "--setup 'if a; then b; fi' --setup '{ c; d; }'"),
        # Functions are needed where something calls them, but for traps.
        (["f() { g; }", "g() { a; }", "f"], "--setup 'f() { g; }' --setup 'g() { a; }' --setup f"),
        (["f() { a; }; f"], "--setup 'f() { a; }; f'"),
        (["f() {", "echo x", "}", "trap f USR1"], ""),
        (["shift"], ""),
        (['if [ -z "$RANK" ]; then', "export RANK=0", "fi"], ""),
        (["a &&", "", "b |", "# c", "c"], "--setup 'a && b | c'"),
        (["a && {", "b", "} || {", "c", "}"], "--setup 'a && { b; } || { c; }'"),
        (["for i in 1; do", "a", "done | tee b"], "--setup 'for i in 1; do a; done | tee b'"),
        (["while read -r a; do", "b", "done <<< x", "c"],
         "--setup 'while read -r a; do b; done <<< x' --setup c"),
        (["cat <<< a", "case b in", "c) d;;", "esac", "e"], "--setup 'cat <<< a' --setup e"),
    ],
)  # fmt: skip
def test_what_stands_ahead_of_the_step_is_carried_over_where_it_is_needed(
    lines: list[str], typed: str
) -> None:
    assert options(*lines, SRUN) == typed


@pytest.mark.parametrize(
    ("step", "typed", "command"),
    [
        ("srun python train.py --lr 0.1", "", "python train.py --lr 0.1"),
        ("srun --ntasks=$SLURM_NTASKS -l -u python train.py", "", "python train.py"),
        ("time srun --cpu-bind=cores -K python -m t", "--srun-args=--cpu-bind=cores",
         "python -m t"),
        ("srun -n 4 --gpus-per-task=1 ./train", "--gpus-per-node 4 --gpu-directive gpus-per-task",
         "./train"),
        ("A=1 srun python train.py", "--env A=1", "python train.py"),
        ("A=1 python train.py", "--env A=1", "python train.py"),
        ("A=1 torchrun train.py", "--env A=1", "python train.py"),
        ("S=t.py\nL='srun python'\n$L $S --name='a b'", "", "python t.py '--name=a b'"),
        ("srun bash -c 'A=1 RANK=$SLURM_PROCID python train.py'", "--env A=1", "python train.py"),
        ("srun bash -c 'source x\n  python train.py'", "", "bash -c 'source x; python train.py'"),
        ("srun apptainer exec --nv i.sif python t.py", "", "apptainer exec --nv i.sif python t.py"),
        ("srun --container-image=i.sqsh --container-mounts=/a:/b,/c python t.py",
         "--container-image i.sqsh --container-runtime pyxis --container-mount /a:/b "
         "--container-mount /c", "python t.py"),
        ("python train.py", "", "python train.py"),
        ("CMD='python train.py'\neval $CMD", "", "python train.py"),
        ("srun hostname\nsrun python train.py\nsrun rsync a b",
         "--setup 'srun hostname' --teardown 'srun rsync a b'", "python train.py"),
        ("srun python prepare.py\nsrun python train.py\npython plot.py",
         "--setup 'srun python prepare.py' --teardown 'python plot.py'", "python train.py"),
        ('srun python train.py "$@"', "", "python train.py"),
        ("srun --export=ALL,A=1,B python train.py", "--env A=1", "python train.py"),
        ("srun python t.py &\nstep=$!\nwhile kill -0 $step; do wait $step; done\ncp a b",
         "--teardown 'cp a b'", "python t.py"),
        ("srun python t.py && python eval.py", "", "python t.py"),
        ("KEY=train\nexport KEY\nsrun python train.py", "--env KEY --setup 'export KEY'", SRUN[5:]),
        ("if a; then\nA=--resume\nfi\nsrun python t.py $A",
         "--setup 'if a; then A=--resume; fi' --setup 'export A'", "bash -c 'exec python t.py $A'"),
        ("A=$(a)\nif b; then\nA=--resume\nfi\nsrun python t.py $A ${A}",
         "--setup 'A=$(a)' --setup 'if b; then A=--resume; fi' --setup 'export A'",
         "bash -c 'exec python t.py $A ${A}'"),
        ("A=$(a)\nsrun python t.py $A\nA=$(b)\nc $A",
         "--setup 'A=$(a)' --setup 'export A' --teardown 'A=$(b)' --teardown 'c $A'",
         "bash -c 'exec python t.py $A'"),
        ("if grep a b; then\nA=$(c)\nelse\nA=2\nfi\nsrun python t.py $A",
         "--setup 'if grep a b; then A=$(c); else A=2; fi' --setup 'export A'",
         "bash -c 'exec python t.py $A'"),
        ("srun python a.py\nsrun python b.py\npython c.py",
         "--setup 'srun python a.py' --teardown 'python c.py'", "python b.py"),
        ("if a; then\nsrun python t.py\nfi\nif b; then\nc\nfi", "--teardown 'if b; then c; fi'",
         "python t.py"),
        ("train() {\nsrun python t.py\n}\n[ -e a ] || exit\ntrain\nexit\nb",
         "--setup '[ -e a ] || exit' --teardown b", "python t.py"),
        # Inside of `bash -c`, too, clusterddp sets these.
        ("srun bash -c 'export MASTER_ADDR=$(hostname); RANK=$SLURM_PROCID\n python t.py'", "",
         "python t.py"),
        ("srun bash -c 'a && export RANK=1 && python t.py; export RANK=2'", "",
         "bash -c 'a && python t.py; export RANK=2'"),
        ("srun bash -c 'if b\nthen\nRANK=2\nfi; python t.py'", "",
         "bash -c 'if b; then RANK=2; fi; python t.py'"),
        ("srun bash -c 'a && RANK=1; if b; then RANK=2; fi; export RANK=3 A=4; python t.py'", "",
         "bash -c 'a && RANK=1; if b; then RANK=2; fi; export RANK=3 A=4; python t.py'"),
    ],
)  # fmt: skip
def test_what_srun_starts_becomes_the_command(step: str, typed: str, command: str) -> None:
    assert options(step) == typed
    assert shlex.join(line_of(step).command) == command


def test_what_only_the_shell_knows_each_task_expands_with_the_variables_that_it_needs() -> None:
    made = line_of(
        "RUN=$(date +%s)", 'ARGS="--lr 0.1 --id $SLURM_JOB_ID"', "LR=5 unused=$(hostname)",
        'srun python train.py --run "$RUN" $ARGS --lr $LR "a b"',
    )  # fmt: skip
    assert made.command == (
        "bash", "-c", """exec python train.py --run "$RUN" $ARGS --lr 5 'a b'""",
    )  # fmt: skip
    assert [option for option in made.options if option[0] == "--setup"] == [
        ("--setup", "RUN=$(date +%s)"),
        ("--setup", "export RUN"),
        ("--setup", 'ARGS="--lr 0.1 --id $SLURM_JOB_ID"'),
        ("--setup", "export ARGS"),
    ]


@pytest.mark.parametrize(
    ("directives", "step", "typed", "command"),
    [
        ("-N 2 --gres=gpu:4 -c 32", "srun torchrun --nnodes 2 --nproc_per_node 4 --rdzv_id $RANDOM "
         "--rdzv_endpoint $(hostname):29500 train.py 50",
         "--nodes 2 --gpus-per-node 4 --gpu-directive gres --cpus-per-task 8",
         "python train.py 50"),
        ("-N 2 --gpus-per-node=4", "srun torchrun --nproc-per-node=gpu -m pkg.train",
         "--nodes 2 --gpus-per-node 4", "python -m pkg.train"),
        ("--gpus-per-node=4", "torchrun --standalone --nproc_per_node=$SLURM_GPUS_ON_NODE t.py",
         "--gpus-per-node 4", "python t.py"),
        ("-N 2", "srun torchrun t.py", "--nodes 2", "python t.py"),
        ("-N 2", "srun torchrun --nproc_per_node=2 --max-restarts=3 t.py",
         "--nodes 2 --tasks-per-node 2 --template torchrun --max-restarts 3", "python t.py"),
        ("-N 2 --gpus-per-node=2",
         "srun python -u -m torch.distributed.run --nproc_per_node 2 t.py",
         "--nodes 2 --gpus-per-node 2", "python -u t.py"),
        ("-N 2 --gpus-per-node=2",
         "srun accelerate launch --num_processes 4 --num_machines 2 --mixed_precision bf16 t.py",
         "--nodes 2 --gpus-per-node 2 --env ACCELERATE_MIXED_PRECISION=bf16", "python t.py"),
        ("-N 2 --gpus-per-node=2",
         "P=2\nN=$((SLURM_NNODES * P))\nsrun accelerate launch --num_processes $N t.py",
         "--nodes 2 --gpus-per-node 2", "python t.py"),
        ("-N 2 -n 4", "mpirun -np 4 python t.py", "--nodes 2 --tasks-per-node 2", "python t.py"),
        ("-N 1 --gpus-per-node=2", "deepspeed --num_gpus 2 t.py --deepspeed d.json",
         "--gpus-per-node 2", "python t.py --deepspeed d.json"),
        ("-N 2 --gpus-per-node=2",
         'L="python -m torch.distributed.run --nproc_per_node 2 --node_rank '
         '\\$SLURM_PROCID"\nsrun --jobid $SLURM_JOB_ID bash -c "$L t.py --x 1"',
         "--nodes 2 --gpus-per-node 2", "python t.py --x 1"),
        ("-N 2 --gpus-per-node=2", "srun bash -c 'source x && torchrun --nproc_per_node 2 t.py'",
         "--nodes 2 --gpus-per-node 2", "bash -c 'source x && python t.py'"),
        ("-N 2 --gpus-per-node=2", "for n in $(scontrol show hostnames); do\n  srun -N1 -n1 -w $n "
         "torchrun --nproc_per_node 2 t.py &\ndone\nwait", "--nodes 2 --gpus-per-node 2",
         "python t.py"),
    ],
)  # fmt: skip
def test_a_launcher_becomes_tasks(directives: str, step: str, typed: str, command: str) -> None:
    assert options(f"#SBATCH {directives}", step) == typed
    assert shlex.join(line_of(f"#SBATCH {directives}", step).command) == command


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["#SBATCH -o logs/%j.out", SRUN],
         "2: #SBATCH -o logs/%j.out: not carried over: logs are in the run's"),
        (["#SBATCH --array=0-3", SRUN], "2: #SBATCH --array=0-3: not carried over: use"),
        (["#SBATCH --array=0-3", "A=$SLURM_ARRAY_TASK_ID", SRUN],
         "'. Without one of them, SLURM_ARRAY_TASK_ID is empty"),
        (["#SBATCH --mem=lots", SRUN],
         "2: #SBATCH --mem=lots: not carried over: --mem: 'lots' is no"),
        (["#SBATCH -N 1", "a", "#SBATCH -N 2", SRUN],
         "4: #SBATCH -N 2: not carried over: sbatch ignores directives"),
        (["#SBATCH hetjob", SRUN],
         "2: #SBATCH hetjob: not carried over: use one 'clusterddp submit'"),
        (["#SBATCH -N 2-4", SRUN], "2: --nodes=2-4: a run has a fixed count: 2"),
        (["#SBATCH -n 7", SRUN], "2: --ntasks=7: Slurm chose the number of nodes; now it is one"),
        (["#SBATCH -N 2 -n 7", SRUN], "2: --ntasks=7: does not divide evenly over 2 nodes"),
        (["#SBATCH -N 2 -G 3", SRUN], "2: --gpus=3: does not divide evenly over 2 nodes"),
        (["#SBATCH --gres=gpu:2,nvme:1", SRUN], "not carried over: nvme:1, because"),
        (["cat <<EOF >f", "x", "EOF", SRUN], "2: cat <<EOF >f: not carried over: lines 2 to 4"),
        (["case $X in", "a) b;;", "esac", SRUN], "2: case $X in: not carried over: lines 2 to 4"),
        (["trap 'scontrol requeue $SLURM_JOB_ID' USR1", SRUN], "2: trap 'scontrol requeue"),
        ([f"{SRUN} > log 2>&1"], "2: >log 2>&1: not carried over: output goes to logs/rank-R.log"),
        ([f"{SRUN} | tee log"], "not carried over: output goes to logs/rank-R.log"),
        (["if true; then", SRUN, "fi"], f"3: {SRUN}: is inside `if`"),
        (["for i in 1 2; do", SRUN, "done"], f"3: {SRUN}: was started in a loop"),
        (["srun python prepare.py", SRUN],
         "2: srun python prepare.py: became --setup, because a run has one training"),
        (["#SBATCH -N 2", "python train.py"], "3: python train.py: ran once, on the first node"),
        (["srun --mem=$M python train.py"], "2: --mem=$M: not carried over: only the batch shell"),
        (['srun python train.py "$@"'], '2: "$@": arguments of the script itself'),
        (["srun python train.py $(date)"], "2: $(date): now every task runs this substitution"),
        (["#SBATCH -n 4", "srun torchrun --nproc_per_node 4 t.py"],
         "each of 4 tasks per node started it"),
        (["srun torchrun --nproc_per_node $N t.py"], "2: $N: the number of ranks is unknown"),
        (["srun torchrun --start-method spawn t.py"], "2: --start-method spawn: not carried over"),
        (["srun accelerate launch --config_file a.yaml t.py"],
         "2: --config-file a.yaml: not carried"),
        (["srun python -m torch.distributed.launch t.py"], "read LOCAL_RANK from the environment"),
        (["cd /else", SRUN], "0: cd /else: the tasks then run there, not in the run's copy"),
        (["source ../v/bin/activate", SRUN], "0: source ../v/bin/activate: is relative to"),
        (["A=~/x srun python train.py"], "2: A=~/x: not carried over: add --setup 'export A=~/x'"),
        (["conda activate x", SRUN], "a failing setup line ends the run"),
        ([SRUN, "cp a b"], "teardown lines run after every attempt"),
        (["export HF_TOKEN=abc", SRUN], "2: HF_TOKEN: looks secret, so the line omits its value"),
        ([f"cd src && {SRUN}"], "2: cd src: not carried over: part of the training's statement"),
        ([f"a; {SRUN}; cp a b"], "2: cp a b: not carried over: part of the training's statement"),
        ([f"a; {SRUN} | tee b; c"], "2: c: not carried over: part of the training's statement"),
        ([f"{SRUN} || {{ echo no; exit 1; }}"], "2: echo no: not carried over: part of the"),
        (["for i in 1 2; do", "A=$(a $i)", f"{SRUN} $A", "done"],
         "4: $A: not carried over: the training's statement sets A; write its value"),
        ([f"{SRUN}; a"], "part of the training's statement; add it with --teardown"),
        (["if a; then", "export A=1", SRUN, "fi"],
         "3: export A=…: not carried over: part of the training's statement; add it"),
        ([SRUN, "if [ $? = 0 ]; then", "a", "fi"], "$? is not the tasks' exit code here"),
        (["conda activate x && export HF_TOKEN=abc", SRUN],
         "2: HF_TOKEN: rest of its statement not carried over: add it with --setup LINE"),
        (["srun --export=A=1 python t.py"], "2: --export=A: not carried over: the tasks get all"),
        (["#SBATCH --gres=gpu:2 --gpus-per-task=1", SRUN],
         "2: --gpus-per-task=1: not carried over with --gres: each task sees all GPUs"),
        (["#SBATCH --gres=gpu:x:y", SRUN], "2: --gres=gpu:x:y: not carried over: the number"),
        ([f"#SBATCH --gres=gpu:{'1' * 5000}", SRUN], "not carried over: the number of GPUs"),
        (["#SBATCH --gpu-per-node 4", SRUN], "--gpu-per-node 4: not carried over from '4' on"),
        (["#SBATCH --gpus-per-node=2", "export CUDA_VISIBLE_DEVICES=0,1", SRUN],
         "3: CUDA_VISIBLE_DEVICES: not carried over: Slurm assigns the GPUs"),
        (["deepspeed --num_gpus 2 t.py"], "2: deepspeed: passed --local-rank to its program"),
        (["srun bash -c 'if a; then RANK=2; fi; python t.py'"],
         "2: RANK=…: overwrites the RANK that clusterddp sets"),
        ([f"f() {{ {SRUN} $1; }}", "f a"], "2: $1: an argument of the script or of a function"),
        ([f"f() {{ {SRUN} $1; }}", "f a"], "3: f a: called the function with the training command"),
        (["A=${1:-a}", f"{SRUN} $A"], "2: A=${1:-a}: an argument of the script"),
        (["a $#", SRUN], "2: a $#: an argument of the script"),
        (["a &&", SRUN], "2: a: not carried over: part of the training's statement"),
        (["srun python eval.py &", "srun python train.py"],
         "srun python eval.py: became --setup, because a run has one training"),
        (["srun python eval.py & srun python train.py"],
         "2: srun python eval.py: not carried over: a run has one training step"),
        ([f"{SRUN} <<E", "x", "E"], "2: <<: not carried over: put the input into a file"),
    ],
)  # fmt: skip
def test_what_is_not_carried_over_or_differs_is_said(lines: list[str], said: str) -> None:
    assert any(said.replace("--config_file", "--config-file") in note for note in notes(*lines)), (
        notes(*lines)
    )


def test_nothing_is_said_of_a_script_that_is_carried_over_whole() -> None:
    whole = ("#SBATCH -N 2 --gpus-per-node=4 -c 8", "set -e", "module load cuda", "source v", SRUN)
    assert notes(*whole) == []


@pytest.mark.parametrize(
    "lines",
    [
        [f"{SRUN} || exit 1"],
        [f"{SRUN} || true"],
        [SRUN, "if [ $? -ne 0 ]; then", "echo failed", "exit 1", "fi"],
        ["srun bash -c 'A=$(date) B=$1; python t.py'"],
        ["deepspeed --no_local_rank --num_gpus 1 t.py"],
        ["set -e", "ip=$(hostname -I | awk '{print $1}')", "export ip", SRUN],
    ],
)
def test_what_needs_no_note_has_none(lines: list[str]) -> None:
    assert notes(*lines) == []


def test_where_output_goes_is_said_once_and_not_of_each_program_behind_it() -> None:
    assert len(notes(f"{SRUN} 2>&1 | grep -v x | tee log")) == 1


def test_a_secret_is_passed_by_name_and_stands_nowhere_in_the_line() -> None:
    for lines in (
        ["export HF_TOKEN=abc A=1"],
        ["HF_TOKEN=abc", "export HF_TOKEN", "use $HF_TOKEN"],
        ["HF_TOKEN=abc", "export HF_TOKEN"],
        ["HF_TOKEN=abc", "srun python train.py --token $HF_TOKEN"],
        ["HF_TOKEN=abc", 'ARGS="--token $HF_TOKEN"', "srun python train.py $ARGS"],
        ["HF_TOKEN=abc", "export X=$HF_TOKEN"],
        ["export HF_TOKEN=${HF_TOKEN:-abc}"],
        ["if a; then export HF_TOKEN=abc; b; fi"],
        ["srun --export=ALL,HF_TOKEN=abc python train.py"],
        ["srun --export=HF_TOKEN=abc python train.py"],
        ["#SBATCH --export=ALL,HF_TOKEN=abc"],
        ["#SBATCH -N 2", "HF_TOKEN=abc python train.py | tee log"],
        ["for i in 1 2; do", "HF_TOKEN=abc srun python train.py", "done"],
        ["HF_TOKEN=abc srun python prepare.py", "srun python train.py"],
        ["HF_TOKEN=abc a && HF_TOKEN=abc srun python train.py"],
        ["train() { HF_TOKEN=abc srun python train.py; }", "HF_TOKEN=abc train 1"],
    ):
        made = line_of(*lines, *([] if "train.py" in "".join(lines) else [SRUN]))
        assert ("--env", "HF_TOKEN") in made.options
        assert "abc" not in made.shell + str(made.notes)


ROUND_TRIPS = [
    ["#SBATCH -N 2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8 --time=1:00:00", SRUN],
    ["#SBATCH --nodes=2 --ntasks-per-node=2 --gres=gpu:a100:2 --mem=64G --exclusive", SRUN],
    ["#SBATCH -N 1 --ntasks-per-node=2 --gpus-per-task=1 -p a,b --account=c --qos=d", SRUN],
    ["#SBATCH --nodes=3 --signal=B:USR1@120 --requeue --constraint='a&b' --nodelist=h[1-3]", SRUN],
    ["#SBATCH -N 1 --job-name='a b' --comment='c # d' --hint=nomultithread --mem-per-cpu=4G",
     "srun python train.py --name 'it is' \"a\\\"b\" 'c$d'"],
    ["#SBATCH -N 2 --mail-type=END,FAIL --mail-user=a@b.c --dependency=afterok:7 --no-requeue",
     "S=train.py", "srun -u python -u $S --lr 0.1"],
]  # fmt: skip


@pytest.mark.parametrize("lines", ROUND_TRIPS)
def test_rendered_again_the_directives_and_the_tasks_command_are_equal(lines: list[str]) -> None:
    before = sbatch_file.read("\n".join(("#!/bin/bash", *lines)))
    made = translate(before)
    assert made.notes == []
    rendered = CliRunner().invoke(cli, [*made.argv[:1], "--dry-run", *made.argv[1:]])
    assert rendered.exit_code == 0, rendered.output
    after = sbatch_file.read(rendered.stdout)
    for directive in before.directives:
        assert after.value(directive.name) == before.value(directive.name), directive.name
    # Beyond these it says nothing, but for the layout's own numbers and clusterddp's records.
    own = {"job-name", "comment", "output", "ntasks", "ntasks-per-node"}
    own |= {"open-mode"} if before.directive("requeue") else set()
    assert after.value("open-mode") == ("append" if before.directive("requeue") else None)
    assert {each.name for each in after.directives} - {d.name for d in before.directives} <= own
    words = after.steps[-1].texts
    assert words[words.index("--") + 1 :] == before.steps[-1].texts


@pytest.mark.parametrize("lines", ROUND_TRIPS)
def test_a_line_that_is_imported_again_is_the_same(lines: list[str]) -> None:
    made = line_of(*lines)
    words = [word for option in made.options for word in option]
    again = [f"#SBATCH {shlex.join(words)}" for words in _as_directives(made)]
    assert words and line_of(*again, f"srun {shlex.join(made.command)}").argv == made.argv


def _as_directives(made: SubmitLine) -> list[list[str]]:
    """The options as sbatch has them."""
    lines = []
    gres = dict(option for option in made.options if len(option) == 2).get("--gpu-directive", "")
    tasks = int(dict(o for o in made.options if len(o) == 2).get("--tasks-per-node", 0))
    for name, *value in made.options:
        if name in ("--gpu-directive", "--tasks-per-node"):
            continue
        if name == "--gpus-per-node":
            count = int(value[0].rpartition(":")[2])
            tasks = tasks or count
            kind = value[0].removesuffix(str(count))
            if gres == "gpus-per-task":
                lines.append([f"--gpus-per-task={kind}{count // tasks}"])
            else:
                lines.append([f"--gres=gpu:{value[0]}" if gres else f"--gpus-per-node={value[0]}"])
        elif name == "--sbatch":
            lines.append([f"--{value[0]}"])
        else:
            lines.append(["=".join((name, *value))])
    return [*lines, [f"--ntasks-per-node={tasks or 1}"]]


@pytest.mark.parametrize("value", CARRIED)
def test_a_hostile_value_is_carried_as_it_is_or_named(value: str, tmp_path: Path) -> None:
    """Whatever stands in the file is data: the shell that gets the line has the same words."""
    quoted = shlex.quote(value)
    made = line_of(f"export A={quoted}", f"srun python train.py {quoted}")
    program = tmp_path / "clusterddp"
    program.write_text("#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n")
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", made.shell], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, cwd=tmp_path,
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout.decode(errors="surrogateescape").split("\0")[:-1] == made.argv
    assert made.command == ("python", "train.py", value)
    assert [path.name for path in tmp_path.iterdir()] == ["clusterddp"]


def test_a_substitution_in_the_file_is_not_run(tmp_path: Path) -> None:
    touch = tmp_path / "touched"
    made = line_of(
        f"#SBATCH --job-name=$(touch {touch})",
        f"export A=$(touch {touch})",
        f"srun python train.py `touch {touch}`",
    )
    assert refusal(made) == "" and shlex.split(made.shell.replace("\\\n", ""))[1:] == made.argv
    assert not touch.exists()


def test_a_file_that_starts_nothing_is_refused() -> None:
    for lines in (["hostname"], ["mkdir x", "srun hostname"], [": srun python train.py"]):
        with pytest.raises(RequestError, match=r"job\.sbatch starts no training"):
            line_of(*lines)


def test_every_joined_line_is_shell() -> None:
    """Constructs within each other, in every order: joined, bash reads them."""
    blocks = [
        ["if a; then", "b", "elif c", "then", "d", "else", "e", "fi"],
        ["for i in 1 2; do", "b &", "done"],
        ["while a", "do", "b || ", "c", "done"],
        ["f() {", "a |", "b", "}"],
        ["(", "a", "b", ")"],
        ["{ a", "b; }"],
        ["a && {", "b", "}"],
        ["while a; do", "b", "done <<< c"],
        ["if a; then", "b", "fi |", "c"],
    ]
    for outer, inner in itertools.product(blocks, blocks):
        lines = (
            [*outer[:1], *inner, *outer[1:]]
            if outer[0].endswith(("then", "do", "{", "("))
            else outer
        )
        made = line_of(*lines, SRUN)
        for option, *value in made.options:
            if option == "--setup":
                read = subprocess.run(["bash", "-n"], input=value[0], text=True, check=False)
                assert read.returncode == 0, value[0]


@pytest.mark.parametrize("options_of_python", ["-m", "-um", "-u -m", "-X dev -um"])
def test_a_module_is_a_training_however_its_option_is_written(options_of_python: str) -> None:
    made = line_of(f"srun python {options_of_python} package.module --lr 1")
    typed = f"python {options_of_python} package.module --lr 1"
    assert made.command == tuple(typed.split())


def test_directives_below_the_first_command_are_carried_as_they_were_meant() -> None:
    below = ["#SBATCH --nodes=8 --gpus-per-node=4", "#SBATCH -p gpu", "#SBATCH --mem=8G"]
    lines = ["#SBATCH --time=5", "module load cuda", *below, "srun a.sh"]
    layout = "--nodes 8 --gpus-per-node 4 --tasks-per-node 1"
    others = "--time 5 --partition gpu --mem 8G --module cuda"
    assert options(*lines) == f"{layout} {others}"
    [note] = notes(*lines)
    assert note == (
        "4: #SBATCH --nodes=8 --gpus-per-node=4: sbatch ignores this (nor lines 5, 6), because it "
        "follows the first command. Carried over, because it was meant to be in force"
    )
    of_one = "3: #SBATCH -N 2: sbatch ignores this, because it follows the first command."
    assert any(note.startswith(of_one) for note in notes("a", "#SBATCH -N 2", SRUN))

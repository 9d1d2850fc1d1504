"""Each rule for sbatch files, on a script that has the mistake and on one that has not."""

import subprocess

import pytest

from clusterddp.scripts.check import check_texts
from clusterddp.scripts.findings import Finding, rule_name
from clusterddp.scripts.sbatch_rules import SBATCH_RULES

TWO_NODES = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n"
ONE_TASK_EACH = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n"
TORCHRUN = "torchrun --nnodes=2 --nproc_per_node=4"
ADDRESS = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
SHARED = "#SBATCH --gres=gpu:1\n"

BESIDE = "\n#!train.py\n"
"""Between an sbatch file and the training script that is checked with it."""
START = "import os\nimport torch\nimport torch.distributed as dist\n"
INIT = f'{BESIDE}{START}dist.init_process_group("nccl")\n'
LOCAL = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
CHOOSES = f"{BESIDE}{START}{LOCAL}"
SPAWN = 'if __name__ == "__main__":\n    mp.spawn(main, nprocs=torch.cuda.device_count())\n'
SPAWNS = f"{BESIDE}{START}import torch.multiprocessing as mp\n{SPAWN}"
ONE_NODE = "#SBATCH -N 1\n#SBATCH --gres=gpu:2\n"

WILL: dict[str, list[tuple[str, str]]] = {
    "launcher-per-rank": [
        (f"{TWO_NODES}srun {TORCHRUN} train.py", "srun --ntasks=2 --ntasks-per-node=1 torchrun"),
        (f"{TWO_NODES}srun python -m torch.distributed.run --nproc-per-node gpu t.py", "node=1"),
        (f"{TWO_NODES}RUN='{TORCHRUN}'\nsrun bash -c \"$RUN train.py\"", "--ntasks-per-node=1"),
        (
            f"{TWO_NODES}srun --ntasks-per-node=1 {TORCHRUN} train.py",
            "srun --ntasks=2 --ntasks-per",
        ),
        (f"{TWO_NODES}srun accelerate launch --num_processes 8 t.py", "--ntasks-per-node=1"),
        (
            "#SBATCH --ntasks-per-node=4\nsrun torchrun --nproc_per_node=4 t.py",  # on one node
            "srun --ntasks=1 --ntasks-per-node=1 torchrun",
        ),
    ],
    "no-rank-variables": [
        (f"{TWO_NODES}srun python train.py{INIT}", "srun clusterddp exec -- python train.py"),
        (
            f"{TWO_NODES}A=1 srun bash -c 'cd src; python train.py' >log &\nwait{INIT}",
            "A=1 srun bash -c 'cd src; clusterddp exec -- python train.py' >log &",
        ),
        (
            f"{TWO_NODES}{ADDRESS}srun python src/train.py{BESIDE}import torch.distributed as d\n"
            "def setup():\n    d.init_process_group(init_method='env://')\n"
            "def main():\n    setup()\nif __name__ == '__main__':\n    main()\n",
            "clusterddp exec -- python src/train.py",
        ),
    ],
    "step-not-waited-for": [
        (f"{TWO_NODES}srun python train.py &", "srun python train.py &\nwait"),
        (f"{TWO_NODES}srun torchrun t.py &\necho started\n# done\n", "echo started\nwait"),
        (f"{TWO_NODES}for i in 1 2; do\n  srun -n1 python t.py $i &\ndone\nexit 0", "wait\nexit 0"),
    ],
    "more-tasks-than-gpus": [
        (f"{ONE_NODE}#SBATCH --ntasks-per-node=4\nsrun python train.py{CHOOSES}", "-per-node=2"),
        (f"#SBATCH -n 8 -t 5\n{ONE_NODE}srun python train.py{CHOOSES}", "--ntasks=2 -t 5"),
        (
            f"{TWO_NODES}srun -n 16 python train.py &\nwait{CHOOSES}",
            "srun --ntasks=8 python train.py &",
        ),
    ],
    "dos-line-ends": [("#SBATCH --nodes=1\r\nsrun a", "#SBATCH --nodes=1")],
    "srun-missing": [
        (f"{ONE_TASK_EACH}{TORCHRUN} train.py", "srun torchrun --rdzv-id=$SLURM_JOB_ID"),
        (f"{TWO_NODES}{TORCHRUN} train.py", "srun --ntasks=2 --ntasks-per-node=1 torchrun --rdzv"),
        (f"{ONE_TASK_EACH}accelerate launch --num_machines $SLURM_NNODES t.py", "srun accelerate"),
    ],
    "batch-shell-rank": [
        (f"{ONE_TASK_EACH}srun {TORCHRUN} --node_rank=$SLURM_NODEID train.py", "\\$SLURM_NODEID"),
        (f'{ONE_TASK_EACH}srun bash -c "{TORCHRUN} --node_rank $SLURM_PROCID t.py"', "\\$SLURM"),
        (f"{ONE_TASK_EACH}R=${{SLURM_NODEID:-0}}\nsrun {TORCHRUN} --node-rank $R t.py", "R=\\${"),
        (f'{ONE_TASK_EACH}L="{TORCHRUN} --node_rank $SLURM_PROCID"\nsrun $L t.py', "\\$SLURM_PROC"),
        (f"{TWO_NODES}export RANK=$SLURM_PROCID\nsrun python train.py", "RANK=\\$SLURM_PROCID"),
        (
            f"{TWO_NODES}export RANK=$SLURM_PROCID\nexport LOCAL_RANK=$SLURM_LOCALID\n"
            "A=1 srun python train.py >log &\nwait",
            'A=1 srun bash -c "export RANK=\\$SLURM_PROCID LOCAL_RANK=\\$SLURM_LOCALID; exec '
            'python train.py" >log &',
        ),
        (
            f'{ONE_TASK_EACH}L="srun {TORCHRUN} --node_rank $SLURM_NODEID"\n$L t.py',
            f'srun bash -c "{TORCHRUN} --node_rank \\$SLURM_NODEID t.py"',
        ),
        (
            f'{ONE_TASK_EACH}srun {TORCHRUN} --node_rank=$SLURM_NODEID t.py \'$x\' "a\\"b" \\$Y',
            't.py \'\\$x\' \\"a\\\\\\"b\\" \\\\\\$Y"',
        ),
        (f"{ONE_TASK_EACH}srun {TORCHRUN} --node_rank=0 train.py", "--node_rank=\\$SLURM_NODEID"),
        (
            f"{ONE_TASK_EACH}srun {TORCHRUN} --rdzv-backend=c10d --local-addr=$(hostname) t.py",
            "\\$(",
        ),
    ],
    "address-per-task": [
        (
            f"{TWO_NODES}srun bash -c 'MASTER_ADDR=$(hostname) python train.py' &\nwait",
            "\nsrun bash -c 'MASTER_ADDR=$MASTER_ADDR python train.py' &",
        ),
        (
            f"{ONE_TASK_EACH}srun sh -c '{TORCHRUN} --rdzv_endpoint=$HOSTNAME:1234 t.py'",
            "--rdzv_endpoint=$MASTER_ADDR:1234 t.py'",
        ),
    ],
    "launch-node": [
        (f"{TWO_NODES}export MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR\nsrun python t.py", "head -n 1")
    ],
    "rendezvous-host": [
        (f"{TWO_NODES}export MASTER_ADDR=localhost\nsrun python train.py", "head -n 1"),
        (f"{TWO_NODES}export MASTER_ADDR=$SLURM_SUBMIT_HOST\nsrun python train.py", "head -n 1"),
        (f"{TWO_NODES}export MASTER_ADDR=$SLURM_JOB_NODELIST\nsrun python train.py", "head -n 1"),
        (
            f"{TWO_NODES}export MASTER_ADDR=$(scontrol show hostnames | tail -n 1)\n"
            "srun python train.py",
            "head -n 1",
        ),
        (
            f"{TWO_NODES}nodes=($(scontrol show hostnames))\nMASTER_ADDR=${{nodes[1]}}\n"
            "srun python train.py",
            "head -n 1",
        ),
        (f"{ONE_TASK_EACH}srun {TORCHRUN} --rdzv_endpoint=127.0.0.1:29500 t.py", "1):29500 t.py"),
    ],
    "signal-to-steps": [
        ("#SBATCH --signal=USR1@90\ntrap again USR1\npython train.py & wait", "B:USR1@90"),
        ("#SBATCH --signal=B:USR1@90\nsrun python train.py", "trap 'kill -USR1"),
        (
            "#SBATCH -N 1 --signal=USR1@9 -n 2\ntrap f USR1\n./a & wait",
            "-N 1 --signal=B:USR1@9 -n 2",
        ),
        ("#SBATCH --signal=SIGUSR1@90\npython3 train.py", "srun python3 train.py"),
        ("#SBATCH --signal=B:USR1@90\ntrap again USR1\npython train.py", "python train.py & step"),
        ("#SBATCH --signal=B:USR1@90\ntrap again SIGUSR1\nsrun python train.py", "& step=$!"),
    ],
    "ntasks-product": [
        ("#SBATCH -N 2\n#SBATCH -n 4\n#SBATCH --ntasks-per-node=4\nsrun a", "#SBATCH --ntasks=8"),
        (
            "#SBATCH -n 4 --ntasks-per-node=1 -N 2 -t 5\nsrun a",
            "--ntasks=2 --ntasks-per-node=1 -N 2 -t 5",
        ),
        ("#SBATCH -N 2\n#SBATCH -n 16\n#SBATCH --ntasks-per-node=4\nsrun a", "#SBATCH --ntasks=8"),
    ],
    "directive-below-command": [
        (
            "set -e\n#SBATCH --nodes=2\n#SBATCH -t 1\nsrun a",
            "#SBATCH --nodes=2\n#SBATCH -t 1\nset -e",
        ),
        ("cat <<EOF >f\n#SBATCH --time=1\nEOF\n#SBATCH --nodes=2\nsrun a", "--nodes=2"),
    ],
    "export-none": [
        ("#SBATCH --export=NONE\nexport MASTER_PORT=1\nsrun python train.py", "srun --export=ALL"),
        (
            "module load cuda\nsrun --export=NONE python train.py & wait",
            "=ALL python train.py & wait",
        ),
        (
            "#SBATCH --export=NONE\nL=srun\nexport A=1\n$L python t.py",
            "export SLURM_EXPORT_ENV=ALL\n$L",
        ),
    ],
    "array-requeue": [
        ("#SBATCH -a 0-3\nscontrol requeue $SLURM_JOB_ID", "${SLURM_ARRAY_TASK_ID}"),
        ("#SBATCH -a 0-3\nscontrol requeue $SLURM_JOBID", "${SLURM_ARRAY_TASK_ID}"),
        ("#SBATCH --array=0-3\ntrap 'scontrol requeue $SLURM_ARRAY_JOB_ID' USR1", "_${SLURM_ARRAY"),
    ],
    "local-rank-isolated": [
        (
            "#SBATCH -N 1\n#SBATCH -n 4\n#SBATCH --gpus-per-task=1\n"
            "srun bash -c 'CUDA_VISIBLE_DEVICES=$SLURM_LOCALID python train.py'",
            "remove CUDA_VISIBLE_DEVICES",
        )
    ],
}
"""Scripts with the mistake, and a part of the line to write in its place."""

MAY: dict[str, list[tuple[str, str]]] = {
    "unknown-option": [
        ("#SBATCH -N 1 --gpu-per-node 4\nsrun a", "#SBATCH -N 1 --gpus-per-node 4"),
        ("#SBATCH --ntask-per-node=4\nsrun a", "#SBATCH --ntasks-per-node=4"),
    ],
    "no-rank-variables": [
        (f"{TWO_NODES}srun python train.py{INIT}import utils", "srun clusterddp exec -- python"),
        (f"{TWO_NODES}source env.sh\nsrun python train.py{INIT}", "srun clusterddp exec -- python"),
        (
            f"{TWO_NODES}srun python train.py{BESIDE}import os, torch.distributed as dist\n"
            'dist.init_process_group("nccl", rank=int(os.environ["SLURM_PROCID"]), world_size=8)',
            "head -n 1) MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))\nsrun python train.py",
        ),
    ],
    "agents-apart": [
        (
            "#SBATCH --nodes=2\nsrun torchrun --nproc_per_node=4 train.py",
            "srun torchrun --nnodes=$SLURM_JOB_NUM_NODES --rdzv-id=$SLURM_JOB_ID",
        ),
        (
            f"{ONE_TASK_EACH}srun bash -c 'python -m torch.distributed.run train.py' &\nwait",
            "torch.distributed.run --nnodes=$SLURM_JOB_NUM_NODES",
        ),
        (
            "#SBATCH -N 2\nsrun torchrun --rdzv_backend c10d --rdzv_endpoint $head:1 train.py",
            "torchrun --nnodes=$SLURM_JOB_NUM_NODES --rdzv_backend c10d",
        ),
        (f"#SBATCH --nodes=2\nsrun {TORCHRUN} train.py", "srun torchrun --rdzv-id=$SLURM_JOB_ID"),
    ],
    "launcher-per-rank": [
        ("#SBATCH -N 1\n#SBATCH -n 2\nsrun torchrun --nproc_per_node=4 t.py", "--ntasks-per-node=1")
    ],
    "spawn-per-task": [
        (f"#SBATCH -n 4\nsrun python train.py{SPAWNS}", "--ntasks-per-node=1 python train.py"),
        (f"{TWO_NODES}srun python train.py{SPAWNS}", "srun --ntasks=2 --ntasks-per-node=1 python"),
    ],
    "srun-missing": [
        (f"{ONE_TASK_EACH}torchrun --standalone --nproc_per_node=4 train.py", "srun torchrun"),
        (f"{TWO_NODES}python train.py", "srun python train.py"),
    ],
    "batch-shell-rank": [
        (f"#SBATCH -n 4\nsrun {TORCHRUN} --node_rank $SLURM_NODEID t.py", "\\$"),
        (f"{TWO_NODES}export RANK=$SLURM_PROCID\nsrun ./run.sh", "RANK=\\$SLURM_PROCID"),
    ],
    "fixed-port": [
        (f"{SHARED}export MASTER_PORT=29500\nsrun python train.py", "SLURM_JOB_ID"),
        (f"{SHARED}torchrun --nproc_per_node=1 --master_port 29501 train.py", "SLURM_JOB_ID"),
        (f"{SHARED}deepspeed --master_port 29555 train.py", "SLURM_JOB_ID"),
    ],
    "launch-node": [
        (f"{ONE_TASK_EACH}srun sh -c '{TORCHRUN} --master_addr=$SLURM_LAUNCH_NODE_IPADDR'", "head")
    ],
    "rendezvous-host": [(f"{TWO_NODES}MASTER_ADDR=gpu17\nsrun python train.py", "head -n 1")],
    "cpus-for-srun": [
        ("#SBATCH -c 8\nsrun python train.py", 'srun --cpus-per-task="$SLURM_CPUS'),
        (
            "#SBATCH -c 8\nL=srun\n$L python t.py &\nwait",
            "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_T",
        ),
    ],
    "gpus-per-task-count": [
        ("#SBATCH --gpus-per-task=1\nsrun python train.py", "#SBATCH --ntasks=1"),
        ("#SBATCH -N 2\n#SBATCH --gpus-per-task=1\nsrun a", "#SBATCH --ntasks=2"),
    ],
    "gpu-bind-closest": [
        ("#SBATCH --gpu-bind=closest\nsrun python train.py", "--gpu-bind=none"),
        ("srun --accel-bind=gn python train.py", "srun python train.py"),
    ],
    "signal-to-steps": [
        ("#SBATCH --signal=USR1@90\ntrap again USR1\nsrun python train.py & wait", "B:USR1@90"),
        ("#SBATCH --signal=B:USR1@90\nsource traps.sh\nsrun python train.py", "trap 'kill -USR1"),
        ("#SBATCH --signal=B:USR1@90\ntrap again EXIT\nsrun python train.py", "trap 'kill -USR1"),
        ("#SBATCH --signal=B:USR1@90\ntrap again $SIGNAL\nsrun python t.py", "trap 'kill -USR1"),
    ],
    "log-overwritten": [
        ("#SBATCH --requeue\nsrun python train.py", "--open-mode=append"),
        ("scontrol requeue $SLURM_JOB_ID", "#!/bin/bash\n#SBATCH --open-mode=append"),
    ],
}

RIGHT: dict[str, list[str]] = {
    "unknown-option": [
        "#SBATCH --gpus-per-n=4 --cpus-per-t 2 --tasks-per-node=2 --wait -P\nsrun a",
        "#SBATCH --container-mounts=/a --comet\nsrun a", "srun a\n#SBATCH --gpu-per-node=4",
    ],
    "no-rank-variables": [
        f"{TWO_NODES}srun clusterddp exec -- python train.py{INIT}",
        f"{TWO_NODES}srun {TORCHRUN} train.py{INIT}",
        f"{TWO_NODES}srun ./wrapper.sh python train.py{INIT}",
        f"{TWO_NODES}srun python launch.py train.py{INIT}",
        f"{TWO_NODES}srun bash -c 'source env.sh; python train.py'{INIT}",
        f"{TWO_NODES}srun --task-prolog=ranks.sh python train.py{INIT}",
        f"{TWO_NODES}{ADDRESS}export MASTER_PORT=1 WORLD_SIZE=8\n"
        f"srun bash -c 'RANK=$SLURM_PROCID python train.py'{INIT}",
        f"{TWO_NODES}srun python other.py{INIT}",
        *(
            f"{TWO_NODES}srun python train.py{BESIDE}{START}{body}"
            for body in (
                'if "RANK" in os.environ:\n    dist.init_process_group("nccl")',
                'if args.single:\n    exit()\ndist.init_process_group("nccl")',
                'try:\n    dist.init_process_group("nccl")\nexcept ValueError:\n    pass',
                'dist.init_process_group("nccl", init_method=url)',
                'dist.init_process_group("nccl", "tcp://h01:1")',
                'dist.init_process_group("nccl", store=store, rank=0, world_size=2)',
                'def setup():\n    dist.init_process_group("nccl")',
                'for name in names:\n    os.environ[name] = "1"\ndist.init_process_group()',
                "os.environ.update(found)\ndist.init_process_group()",
                'os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", '
                '"MASTER_PORT": "1"})\ndist.init_process_group()',
                "import torch.multiprocessing as mp\ndef f(i):\n    dist.init_process_group()\n"
                "f(0)\nmp.spawn(f)",
                "import accelerate\ndist.init_process_group()",
            )
        ),
    ],
    "step-not-waited-for": [
        f"{TWO_NODES}srun python train.py &\nwait",
        f"{TWO_NODES}srun python train.py & pid=$!; wait $pid",
        f"{TWO_NODES}srun python train.py &\nsrun python serve.py",
        f"{TWO_NODES}srun python train.py &\nsleep 100", f"{TWO_NODES}srun nvidia-smi -l &",
        f"{TWO_NODES}trap 'wait' EXIT\nsrun python train.py &",
        f"{TWO_NODES}start() {{ srun python train.py & }}\nstart",
        f'{TWO_NODES}if [ -n "$A" ]; then srun python train.py & fi',
        f"{TWO_NODES}srun python train.py",
    ],
    "more-tasks-than-gpus": [
        f"{ONE_NODE}#SBATCH --ntasks-per-node=2\nsrun python train.py{CHOOSES}",
        f"{ONE_NODE}#SBATCH -n 4\n#SBATCH --exclusive\nsrun python train.py{CHOOSES}",
        f"#SBATCH -N 1 -n 4 --gres=gpu:a:2,gpu:b:2\nsrun python train.py{CHOOSES}",
        f"{ONE_NODE}#SBATCH -n 4\nsrun --gres=gpu:4 python train.py{CHOOSES}",
        f"{ONE_NODE}#SBATCH -n 4\nsrun {TORCHRUN} train.py{CHOOSES}",
        f"{ONE_NODE}#SBATCH -n 4\nexport CUDA_VISIBLE_DEVICES=0,1\nsrun python train.py{CHOOSES}",
        f"{ONE_NODE}#SBATCH -n 4\nsrun python train.py{CHOOSES}".replace('"]))', '"]) % 2)'),
        f"#SBATCH -n 4\nsrun python train.py{CHOOSES}",
    ],
    "spawn-per-task": [
        f"{ONE_TASK_EACH}srun python train.py{SPAWNS}", f"#SBATCH -n 4\npython train.py{SPAWNS}",
        f"#SBATCH -n 4\nsrun python train.py{SPAWNS}".replace(
            '__name__ == "__main__"', "args.many"
        ),
        f"#SBATCH -n 4\nsrun python train.py{SPAWNS}rank = os.environ['SLURM_PROCID']",
        f"#SBATCH -n 4\nsrun bash -c 'python train.py -nr $SLURM_PROCID'{SPAWNS}",
    ],
    "dos-line-ends": ["#SBATCH --nodes=1\necho a\rb\nsrun a"],
    "agents-apart": [
        f"#SBATCH --nodes=2\nsrun {TORCHRUN} --master_addr=$head train.py",
        "#SBATCH --nodes=1\nsrun torchrun --nproc_per_node=4 train.py",
        "#SBATCH --nodes=2\nexport PET_NNODES=2\nsrun torchrun train.py",
        "#SBATCH --nodes=2\nsrun torchrun --standalone train.py",
        "#SBATCH --nodes=2\nsrun bash -c 'torchrun train.py --fold $SLURM_PROCID'",
        "#SBATCH --nodes=2\nsrun -N 1 torchrun train.py",
        "#SBATCH --nodes=2\nsrun accelerate launch train.py", "srun torchrun train.py",
    ],
    "launcher-per-rank": [
        f"{ONE_TASK_EACH}srun {TORCHRUN} train.py",
        f"{TWO_NODES}srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 {TORCHRUN} train.py",
        f"#SBATCH --nodes=2\nsrun --ntasks-per-node=1 {TORCHRUN} train.py",
        f"{TWO_NODES}srun python train.py",
        "#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc_per_node=4 train.py",
        f"{TWO_NODES}srun -N 2 -n 2 {TORCHRUN} train.py",
        f"{TWO_NODES}unset SLURM_NTASKS SLURM_NPROCS\nsrun --ntasks-per-node=1 {TORCHRUN} train.py",
        f"{TWO_NODES}SLURM_NTASKS=2 srun {TORCHRUN} train.py",
        f"{TWO_NODES}#SBATCH hetjob\n#SBATCH -N 1\nsrun --het-group=1 {TORCHRUN} train.py",
        "#SBATCH -N 1\n#SBATCH -n 2\n#SBATCH --gpus-per-task=4\n"
        "srun torchrun --nnodes=2 --nproc_per_node=4 train.py",
        f"{TWO_NODES}srun torchrun --nnodes=$SLURM_NTASKS --nproc_per_node=1 train.py",
    ],
    "srun-missing": [
        f"{ONE_TASK_EACH}srun {TORCHRUN} train.py",
        "#SBATCH --nodes=1\ntorchrun --nproc_per_node=4 train.py",
        f"{ONE_TASK_EACH}mpirun -n 8 python train.py",
        f"{TWO_NODES}srun python train.py\npython report.py",
    ],
    "batch-shell-rank": [
        f"{ONE_TASK_EACH}srun bash -c '{TORCHRUN} --node_rank=$SLURM_NODEID train.py'",
        f'{ONE_TASK_EACH}srun bash -c "{TORCHRUN} --node_rank=\\$SLURM_NODEID train.py"',
        f"{ONE_TASK_EACH}L='{TORCHRUN} --node_rank $SLURM_PROCID'\nsrun bash -c \"$L t.py\"",
        f"{ONE_TASK_EACH}srun {TORCHRUN} --rdzv_backend c10d --node_rank=$SLURM_NODEID train.py",
        f"{ONE_TASK_EACH}srun {TORCHRUN} --rdzv_backend c10d --rdzv_endpoint=$(hostname):1 t.py",
        "#SBATCH -N 1\n#SBATCH -n 2\nsrun -n 1 torchrun --nnodes=1 --node_rank=0 train.py",
        f"{ONE_TASK_EACH}for i in 0 1; do srun -N1 -n1 {TORCHRUN} --node_rank=$i t.py & done",
        f"{TWO_NODES}srun bash -c 'export RANK=$SLURM_PROCID; python train.py'",
        f"{TWO_NODES}echo $SLURM_PROCID $(hostname)\nsrun python train.py",
        "#SBATCH -n 1\nexport RANK=$SLURM_PROCID\nsrun python train.py",
        "#SBATCH -N 2\n#SBATCH hetjob\n#SBATCH -N 1\n"
        f"srun --het-group=1 {TORCHRUN} --node_rank=0 t.py",
    ],
    "fixed-port": [
        f"{SHARED}export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))\nsrun python train.py",
        f"{SHARED}#SBATCH --exclusive\nexport MASTER_PORT=29500\nsrun python train.py",
        f"{SHARED}torchrun --standalone --nproc_per_node=1 train.py",
        f"{SHARED}export PORT=29500\nsrun python train.py",
        f"{SHARED}torchrun --nproc_per_node=1 --master_port=0 train.py",
        f"{SHARED}export MASTER_PORT=29500\nsrun ./simulation",
    ],
    "address-per-task": [
        f"{TWO_NODES}{ADDRESS}srun bash -c 'python train.py'",
        f"{TWO_NODES}export MASTER_ADDR=$(hostname)\nsrun python train.py",
        "#SBATCH -N 1\n#SBATCH -n 4\nsrun bash -c 'MASTER_ADDR=$(hostname) python train.py'",
    ],
    "launch-node": [f"{TWO_NODES}{ADDRESS}srun python train.py"],
    "rendezvous-host": [
        f"{TWO_NODES}{ADDRESS}srun python train.py",
        "#SBATCH --nodes=1\nexport MASTER_ADDR=localhost\nsrun python train.py",
        "#SBATCH -n 4\n#SBATCH --ntasks-per-node=4\nexport MASTER_ADDR=localhost\nsrun python t.py",
        f"{TWO_NODES}export MASTER_ADDR=$(hostname)\nsrun python train.py",
        f"{TWO_NODES}#SBATCH -w gpu17,gpu18\nMASTER_ADDR=gpu17\nsrun python train.py",
        f"{TWO_NODES}nodes=($(scontrol show hostnames))\nMASTER_ADDR=${{nodes[0]}}\nsrun python t",
        f"{TWO_NODES}MASTER_ADDR=${{hosts[1]}}\nsrun python train.py",
        f"{TWO_NODES}MASTER_ADDR=$(scontrol show hostnames | tail -n +1)\nsrun python train.py",
        f"{ONE_TASK_EACH}nodes=($(scontrol show hostnames))\n"
        f"srun {TORCHRUN} --rdzv_backend=c10d --rdzv_endpoint=${{nodes[1]}} t.py",
    ],
    "signal-to-steps": [
        "#SBATCH --signal=B:USR1@90\ntrap again USR1\nsrun python train.py & wait",
        "#SBATCH --signal=B:USR1@90\ntrap again 10\nsrun python train.py & wait",
        "#SBATCH --signal=USR1@90\nsrun python train.py", "srun python train.py",
        "#SBATCH --signal=B:USR1@90\ntrap again USR1\npython train.py & wait",
        "#SBATCH --signal=B:USR1@90\ntrap again USR1\npython prepare.py | tee log & wait",
        "#SBATCH --signal=B:TERM@90\nexec python train.py",
        "#SBATCH --signal=USR1@90\n./simulation",
        '#SBATCH --signal=USR1@90\ntrap again USR1\nrun() { srun "$@"; }\nrun srun python train.py',
        "#SBATCH --signal=B:USR1@90\ntrap again USR1\nsrun hostname\nsrun python train.py & wait",
    ],
    "cpus-for-srun": [
        '#SBATCH -c 8\nsrun --cpus-per-task="$SLURM_CPUS_PER_TASK" python train.py',
        "#SBATCH -c 8\nexport SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\nsrun python train.py",
        "#SBATCH -c 8\nsrun hostname\npython train.py", "#SBATCH -c 1\nsrun python train.py",
        "#SBATCH -c 8\nSRUN_CPUS_PER_TASK=8 srun python train.py",
    ],
    "ntasks-product": [
        "#SBATCH -N 2\n#SBATCH -n 8\n#SBATCH --ntasks-per-node=4\nsrun a",
        "#SBATCH -n 8\n#SBATCH --ntasks-per-node=4\nsrun a",
        "#SBATCH -N 1-2\n#SBATCH -n 4\n#SBATCH --ntasks-per-node=4\nsrun a",
        "#SBATCH -N1 --ntasks-per-node=1\n#SBATCH hetjob\n#SBATCH -N2 -n4\nsrun a",
    ],
    "gpus-per-task-count": [
        "#SBATCH --gpus-per-task=1\n#SBATCH --ntasks=4\nsrun a",
        "#SBATCH --gpus-per-task=1\n#SBATCH --gpus=4\nsrun a",
    ],
    "gpu-bind-closest": [
        "#SBATCH --gpu-bind=none\nsrun --accel-bind=n python train.py",
        "module load rocm/6.0\nsrun --gpu-bind=closest python train.py",
    ],
    "local-rank-isolated": [
        "#SBATCH -N1 -n4 --gpus-per-task=1 --gres-flags=allow-task-sharing\n"
        f"srun python train.py{CHOOSES}",
        "#SBATCH -n 4\n#SBATCH --gpus-per-node=4\n"
        "srun bash -c 'CUDA_VISIBLE_DEVICES=$SLURM_LOCALID python train.py'",
    ],
    "directive-below-command": [
        "\n# why\n#SBATCH --nodes=2\nset -e\n# #SBATCH --time=1\nsrun a",
        "cat > other.sh <<EOF\n#SBATCH --time=1\nEOF\nsbatch other.sh",
        "cat > other.sh <<'EOF'\n#!/bin/bash\n#SBATCH --time=1\nEOF\nsbatch other.sh",
        "echo '\n#SBATCH --nodes=2\n' > other.sh",
    ],
    "export-none": [
        "#SBATCH --export=NONE\nexport A=1\nsrun --export=ALL python train.py",
        "#SBATCH --export=NONE\nunset SLURM_EXPORT_ENV\nexport A=1\nsrun python train.py",
        "#SBATCH --export=ALL\nexport A=1\nsrun python train.py",
    ],
    "log-overwritten": [
        "#SBATCH --requeue\n#SBATCH --open-mode=append\nsrun python train.py",
        "#SBATCH --no-requeue\nsrun python train.py",
    ],
    "array-requeue": [
        "#SBATCH -a 0-3\nscontrol requeue ${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}",
        "scontrol requeue $SLURM_JOB_ID",
    ],
}  # fmt: skip


def check(script: str) -> list[Finding]:
    job, beside, python = script.partition(BESIDE)
    texts = {"job.sbatch": f"#!/bin/bash\n{job}\n"}
    return check_texts({**texts, "train.py": python} if beside else texts)


def cases(table: dict[str, list[tuple[str, str]]]) -> list[object]:
    return [
        pytest.param(rule, *case, id=f"{rule}-{number}")
        for rule, wrong in table.items()
        for number, case in enumerate(wrong)
    ]


@pytest.mark.parametrize(("rule", "script", "instead"), cases(WILL) + cases(MAY))
def test_only_what_the_script_proves_is_said_for_sure(rule: str, script: str, instead: str) -> None:
    (found,) = [finding for finding in check(script) if finding.rule == rule]
    assert found.is_sure == ((script, instead) in WILL.get(rule, ()))
    assert instead in found.instead
    if found.is_sure:
        assert found.text == f"#!/bin/bash\n{script}".split("\n")[found.line - 1].strip() != ""


@pytest.mark.parametrize(("rule", "script", "instead"), cases(WILL) + cases(MAY))
def test_the_line_to_write_is_right(rule: str, script: str, instead: str) -> None:
    (found,) = [finding for finding in check(script) if finding.rule == rule]
    job, beside, python = script.partition(BESIDE)
    lines = f"#!/bin/bash\n{job}".split("\n")
    lines[found.line - 1] = found.instead
    mended = "\n".join(lines)
    assert rule not in [each.rule for each in check(f"{mended}{beside}{python}")], mended
    asked = subprocess.run(
        ["bash", "-n"], input=mended, capture_output=True, text=True, check=False
    )
    assert (asked.returncode, asked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("rule", "script"),
    [
        pytest.param(rule, script, id=f"{rule}-{number}")
        for rule, right in RIGHT.items()
        for number, script in enumerate(right)
    ],
)
def test_what_is_right_is_left_alone(rule: str, script: str) -> None:
    assert rule not in [finding.rule for finding in check(script)]


def test_each_rule_has_a_script_with_the_mistake_and_one_without() -> None:
    rules = set(map(rule_name, SBATCH_RULES))
    assert rules == WILL.keys() | MAY.keys()
    assert rules == RIGHT.keys()


def test_the_finding_is_in_the_line_where_the_word_is_typed() -> None:
    script = (
        f"{ONE_TASK_EACH}srun torchrun \\\n  --nnodes=2 \\\n  --node_rank=$SLURM_NODEID \\\n  t.py"
    )
    lines = {finding.rule: finding.line for finding in check(script)}
    assert lines["batch-shell-rank"] == 7


def test_a_command_of_several_lines_is_shown_and_written_as_one_with_its_quotes() -> None:
    script = (
        f"{ONE_TASK_EACH}srun --nodes=$N \\\n  torchrun --nnodes=2 --node_rank=$SLURM_NODEID \\\n"
        '  t.py --name "a  b"'
    )
    (found,) = [each for each in check(script) if each.rule == "batch-shell-rank"]
    step = 'srun --nodes=$N torchrun --nnodes=2 --node_rank=$SLURM_NODEID t.py --name "a  b"'
    assert found.text == step
    assert found.instead == (
        'srun --nodes=$N bash -c "torchrun --nnodes=2 --node_rank=\\$SLURM_NODEID t.py '
        '--name \\"a  b\\""'
    )


def test_a_step_whose_quotes_go_over_lines_stays_in_the_background() -> None:
    script = "#SBATCH -c 8\nsrun bash -c 'cd a\npython t.py' &\nwait"
    (found,) = check(script)
    assert found.instead.endswith("bash -c 'cd a\npython t.py' &")


def test_a_host_in_a_variable_is_found_where_it_is_typed_and_once() -> None:
    script = f"{ONE_TASK_EACH}export MASTER_ADDR=localhost X=1\nRDZV=$MASTER_ADDR:29500\n"
    script += f"srun {TORCHRUN} --rdzv_endpoint=$RDZV t.py"
    (found,) = [each for each in check(script) if each.rule == "rendezvous-host"]
    assert found.text == "export MASTER_ADDR=localhost X=1"
    assert found.instead.startswith("export MASTER_ADDR=$(scontrol")
    assert found.instead.endswith(" X=1")


def test_without_b_a_training_in_the_foreground_is_said_at_once() -> None:
    script = "#SBATCH --signal=USR1@90\ntrap again USR1\nsrun python train.py"
    found = [(each.line, each.is_sure) for each in check(script) if each.rule == "signal-to-steps"]
    assert found == [(2, False), (4, False)]


def test_the_trap_to_write_stands_above_the_training_and_the_directives_stay() -> None:
    script = "#SBATCH --signal=B:TERM@60\n#SBATCH -n 2\nmodule load cuda\nsrun python train.py"
    (found,) = [each for each in check(script) if each.rule == "signal-to-steps"]
    assert (found.line, found.text) == (5, "srun python train.py")
    assert found.instead.startswith("trap 'kill -USR1 $step' TERM\nsrun python train.py & step=$!")


def test_a_local_rank_is_held_against_the_gpus_that_the_job_shows() -> None:
    job = (
        "#!/bin/bash\n#SBATCH -n 4\n#SBATCH -N 1\n#SBATCH --gpus-per-task=1\nsrun python src/t.py\n"
    )
    choosing = 'import os, torch\ntorch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
    counted = choosing.replace('"]))', '"]) % torch.cuda.device_count())')
    (found,) = check_texts({"job.sh": job, "/home/me/src/t.py": choosing})
    assert (found.rule, found.file, found.line, found.is_sure) == (
        *("local-rank-isolated", "job.sh", 5),
        True,
    )
    assert check_texts({"job.sh": job, "t.py": counted}) == []
    assert (
        check_texts({"job.sh": job.replace("-per-task=1", "-per-node=4"), "t.py": choosing}) == []
    )


def test_a_signal_is_held_against_the_handlers_of_the_training() -> None:
    job = "#!/bin/bash\n#SBATCH --signal=USR1@90\nsrun python train.py\n"
    (found,) = check_texts({"job.sh": job, "train.py": "import torch\n"})
    assert (found.rule, found.is_sure) == ("signal-to-steps", False)
    handled = "import signal\nsignal.signal(signal.SIGUSR1, print)\n"
    assert check_texts({"job.sh": job, "train.py": handled}) == []

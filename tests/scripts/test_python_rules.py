"""Each rule for training scripts, on a script that has the mistake and on one that has not."""

import ast
import re
import textwrap

import pytest

from clusterddp.errors import RequestError
from clusterddp.scripts.check import check_texts
from clusterddp.scripts.findings import Finding, rule_name
from clusterddp.scripts.python_rules import PYTHON_RULES

START = """\
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets
dist.init_process_group(args.backend)
rank = dist.get_rank()
model = DDP(net.cuda())
"""
FIT = "import lightning as L\ntrainer = L.Trainer(devices=1, num_nodes=2)\ntrainer.fit(model)"
HF = "from transformers import Trainer\nit = Trainer()\nresult = it.train(resume_from_checkpoint=a)"
PREPARED = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
PREPARED += "model, data = accelerator.prepare(model, data)\naccelerator.backward(loss)"
FABRIC = "from lightning.fabric import Fabric\nfabric = Fabric()\n"
FABRIC += "model, optimizer = fabric.setup(model, optimizer)\nfabric.backward(loss)"
OURS = "from clusterddp.integrations.transformers import resume\n"
BESIDE = "\n#!job.sbatch\n"
"""Between a training script and the sbatch file that is checked with it."""
EXEC = "srun clusterddp exec -- python train.py"
NODES = f"{BESIDE}#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=4\n{EXEC}"
NO_GPUS = f"{BESIDE}#SBATCH --ntasks=4\n{EXEC}"
SPAWNS = """\
import torch.multiprocessing as mp
def main():
    torch.save(1, args.path)
def start():
    if args.many:
        mp.spawn(work)
    else:
        work(0)
"""
"""The beginning of a script that starts its ranks itself with an option, or is started as them."""
LOADER = """\
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, sampler=sampler)
"""

WILL: dict[str, list[str]] = {
    "sampler-epoch": [
        LOADER + "for epoch in range(3):\n    for x, y in loader:\n        step(x, y)",
        LOADER + "for epoch in range(3):\n    for i, (x, y) in enumerate(loader):\n        pass",
    ],
    "save-per-rank": [
        'torch.save(model.state_dict(), "model.pt")',
        'def save():\n    torch.save(model.state_dict(), "model.pt")\nsave()',
    ],
    "collective-in-branch": [
        "if rank == 0:\n    dist.barrier()", "if not rank:\n    dist.barrier()",
        "if dist.get_rank() != 0:\n    pass\nelse:\n    dist.all_reduce(loss)",
        "def main():\n    if rank != 0:\n        return\n    dist.all_reduce(loss)",
        'if int(os.environ["RANK"]) == 0:\n    torch.distributed.broadcast(x, src=0)',
        "def main():\n    if done or rank != 0:\n        return\n    dist.all_reduce(loss)",
        "is_main = rank == 0\nif is_main:\n    dist.barrier()",
    ],
    "sync-batchnorm-late": ["model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"],
    "equal-seeds": ["sampler = DistributedSampler(dataset, seed=1 + rank)"],
    "global-rank-device": [
        f"torch.cuda.set_device(rank){NODES}",
        f'device = torch.device("cuda", int(os.environ["RANK"])){NODES}',
        f'r = dist.get_rank() if many else 0\nd = torch.device(f"cuda:{{r}}"){NODES}',
        f"model = DDP(net.to(rank), device_ids=[rank]){NODES}", f"model = DDP(net.to(rank)){NODES}",
        f"x = x.cuda(rank){NODES}", f"torch.accelerator.set_device_index(rank){NODES}",
    ],
    "jit-checkpoint": [
        f"{OURS}TrainingArguments(output_dir=out, enable_jit_checkpoint=True)",
        f"{OURS}TrainingArguments(enable_jit_checkpoint=True, output_dir=out)",
    ],
}  # fmt: skip

MAY: dict[str, list[str]] = {
    "global-rank-device": [f"torch.cuda.set_device(rank){NODES}".replace("4", "2", 1)],
    "sampler-epoch": [
        LOADER + "def train(loader):\n    for x in loader: pass\n"
        "for epoch in range(3):\n    train(loader)"
    ],
    "no-sampler": ["train_loader = DataLoader(train_set, batch_size=8, shuffle=True)"],
    "download-per-rank": ['train_set = datasets.MNIST("data", download=True)'],
    "save-per-rank": [
        "path = args.out\ntorch.save(model.state_dict(), path)",
        'if int(os.environ["LOCAL_RANK"]) == 0:\n    torch.save(model.state_dict(), "model.pt")',
        "class Trainer:\n    def __init__(self):\n"
        '        self.gpu_id = int(os.environ["LOCAL_RANK"])\n    def save(self):\n'
        "        torch.save(1, self.path)\n    def fit(self):\n"
        "        if self.gpu_id == 0 and epoch % self.every == 0:\n            self.save()",
        'def save():\n    torch.save(1, "model.pt")\nif args.local_rank in [-1, 0]:\n    save()',
        "is_first = not local_rank\nif is_first:\n    torch.save(1, 'model.pt')" + NODES,
        f"{SPAWNS}def work(gpu):\n"
        "    if not args.many or (args.many and args.rank % n == 0):\n        main()\nstart()",
    ],
    "nccl-without-gpus": [
        f'dist.init_process_group("nccl"){NO_GPUS}',
        f"BACKEND = 'nccl'\ndist.init_process_group(backend=BACKEND){NO_GPUS}",
    ],
    "load-map-location": [
        'state = torch.load("model.pt")\nmodel.load_state_dict(state["model"])',
        'model.load_state_dict(torch.load("model.pt"))',
    ],
    "collective-in-branch": [
        "def evaluate():\n    dist.all_reduce(x)\nif rank == 0:\n    evaluate()",
        "def main():\n    def closure():\n        if rank == 0:\n            dist.barrier()",
        "def a():\n    dist.barrier()\ndef b():\n    a()\nif rank == 0:\n    b()",
    ],
    "world-size": [
        'dist.init_process_group("gloo", rank=rank, world_size=4)',
        'WORLD = 8\ndist.init_process_group("gloo", rank=rank, world_size=WORLD)',
        'os.environ["WORLD_SIZE"] = "4"',
    ],
    "loss-not-reduced": [
        LOADER + "total = 0\nfor x, y in loader:\n    total += f(model(x), y).item()\n"
        'if rank == 0:\n    print("loss", total)'
    ],
    "find-unused": ["model = DDP(net, find_unused_parameters=True)"],
    "equal-seeds": [
        "torch.manual_seed(0)\nfor x in data:\n    noise = torch.randn(3)\n    f(noise).backward()"
    ],
    "address-in-script": [
        'os.environ["MASTER_ADDR"] = "localhost"',
        'import socket\nos.environ["MASTER_ADDR"] = socket.gethostname()',
    ],
    "trainer-of-one": [
        "import lightning as L\ntrainer = L.Trainer()",
        "from pytorch_lightning import Trainer\nTrainer(max_epochs=3).fit(model)",
        f"from lightning.pytorch import Trainer\ntrainer = Trainer(max_epochs=3){NODES}",
    ],
    "not-resumable": [
        FIT,
        "from pytorch_lightning import Trainer\nTrainer(max_epochs=3).fit(model)",
        "import lightning\ndef run(trainer):\n    trainer.fit(model)",
        "from transformers import Trainer\nclass Mine(Trainer):\n    pass\nit = Mine()\nit.train()",
        "from lightning.pytorch.cli import LightningCLI\ncli = LightningCLI(Model)",
        HF,
        "from trl import SFTTrainer\nself.it = SFTTrainer(model)\nself.it.train()",
        PREPARED,
        FABRIC,
    ],
}

RIGHT: dict[str, list[str]] = {
    "global-rank-device": [
        "torch.cuda.set_device(rank)",
        f"torch.cuda.set_device(rank){NODES}".replace("nodes=2", "nodes=1"),
        f"torch.cuda.set_device(rank % torch.cuda.device_count()){NODES}",
        f'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])){NODES}',
        f"rank = rank % 4\ntorch.cuda.set_device(rank){NODES}",
        f"def train(rank):\n    torch.cuda.set_device(gpu){NODES}",
        f"import torch.multiprocessing as mp\nmp.spawn(f)\ntorch.cuda.set_device(rank){NODES}",
        f"x = x.to(device){NODES}",
    ],
    "sampler-epoch": [
        LOADER + "for epoch in range(3):\n    sampler.set_epoch(epoch)\n    for x in loader: pass",
        LOADER + "for epoch in range(1):\n    for x in loader: pass",
        LOADER + "for x in loader: pass",
        LOADER.replace("(dataset)", "(dataset, shuffle=False)")
        + "for epoch in range(3):\n    for x in loader: pass",
        LOADER.replace("sampler =", "test_sampler =").replace("=sampler", "=test_sampler")
        + "for epoch in range(3):\n    for x in loader: pass",
    ],
    "no-sampler": [
        LOADER, LOADER + "other_loader = DataLoader(dataset, shuffle=True)",
        "test_loader = DataLoader(test_set, shuffle=True)",
        "val_loader = DataLoader(dataset, shuffle=True)",
        "loader = DataLoader(val_set, shuffle=True)",
        "loader = DataLoader(dataset.shard(rank, 4), shuffle=True)",
        "from accelerate import Accelerator\nloader = DataLoader(dataset, shuffle=True)",
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cuda', (4,))\nloader = DataLoader(dataset, shuffle=True)",
        "if rank == 0:\n    loader = DataLoader(dataset, shuffle=True)",
    ],
    "download-per-rank": [
        'if rank == 0:\n    datasets.MNIST("data", download=True)\n'
        'dist.barrier()\nd = datasets.MNIST("data", download=True)',
        'd = datasets.MNIST("data", download=rank == 0)',
        'from filelock import FileLock\nwith FileLock("l"):\n    datasets.MNIST("", download=True)',
        'def load():\n    return datasets.MNIST("data", download=True)',
        "import torch.multiprocessing as mp\ndef main():\n"
        '    datasets.MNIST("data", download=True)\n    mp.spawn(train, nprocs=2)\nmain()',
    ],
    "save-per-rank": [
        'if rank == 0:\n    torch.save(model.state_dict(), "model.pt")',
        'torch.save(model.state_dict(), f"model-{rank}.pt")',
        'path = f"model-{rank}.pt"\ntorch.save(model.state_dict(), path)',
        'def save():\n    torch.save(1, "model.pt")\nif args.rank in [-1, 0]:\n    save()',
        'if local_rank == 0 and rank == 0:\n    torch.save(1, "model.pt")',
        "if local_rank == 0:\n    torch.save(1, 'model.pt')" + NODES.replace("=2", "=1"),
        f"{SPAWNS}def work(gpu):\n    if not args.distributed or args.rank == 0:\n"
        "        main()\nstart()",
        'def save():\n    if not is_main_process():\n        return\n    torch.save(1, "")\nsave()',
        '@rank_zero_only\ndef save():\n    torch.save(1, "model.pt")\nsave()',
        "import io\nbuffer = io.BytesIO()\ntorch.save(1, buffer)",
    ],
    "load-map-location": [
        'model.load_state_dict(torch.load("model.pt", map_location="cpu"))',
        'model.load_state_dict(torch.load("model.pt", "cpu"))', 'images = torch.load("images.pt")',
        'if rank == 0:\n    model.load_state_dict(torch.load("model.pt"))',
    ],
    "collective-in-branch": [
        "dist.barrier()",
        "if rank != 0:\n    dist.barrier()\nload()\nif rank == 0:\n    dist.barrier()",
        "if rank == 0:\n    dist.broadcast(a, 0)\nelse:\n    dist.broadcast(b, 0)",
        "if rank == 0:\n    dist.send(x, 1)\nelse:\n    dist.recv(x, 0)",
        "if rank == 0:\n    dist.all_reduce(x, group=mine)",
        "if rank == 0:\n    dist.barrier(mine)", "if rank == 0:\n    dist.all_reduce(x, op, mine)",
        "for rank in range(4):\n    if rank == 0:\n        dist.barrier()",
        "x = [dist.all_reduce(x) for rank in range(4) if rank == 0]",
        "if rank == 0 and dist.get_world_size() == 1:\n    dist.barrier()",
        "if step % 10 == 0:\n    dist.barrier()",
        "def main():\n    if alone and rank != 0:\n        return\n    dist.barrier()",
        "if tp_rank == 0:\n    dist.all_reduce(x)",
        "def evaluate():\n    dist.all_reduce(x)\nevaluate()",
        "def lead():\n    if rank == 0:\n        dist.broadcast(x, 0)\n"
        "def follow():\n    if rank != 0:\n        dist.broadcast(x, 0)",
    ],
    "world-size": [
        'dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))',
        'dist.init_process_group("gloo", rank=0, world_size=1)',
        "import torch.multiprocessing as mp\nmp.spawn(main, nprocs=4)\n"
        'dist.init_process_group("gloo", rank=rank, world_size=4)',
    ],
    "loss-not-reduced": [
        LOADER + "total = 0\nfor x, y in loader:\n    total += f(x, y).item()\n"
        "t = torch.tensor(total)\ndist.all_reduce(t)\nprint(total)",
        LOADER + "total = 0\nfor x, y in loader:\n    total += f(x, y).item()\nprint(rank, total)",
        "loader = DataLoader(dataset)\n" + "sampler = DistributedSampler(dataset)\n"
        "total = 0\nfor x, y in loader:\n    total += f(x, y).item()\nprint(total)",
    ],
    "sync-batchnorm-late": [
        "def f(model):\n    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n"
        "    model = DDP(model)\n    torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
        "net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)\nmodel = DDP(net)",
    ],
    "find-unused": ["model = DDP(net, find_unused_parameters=args.unused)"],
    "equal-seeds": [
        "torch.manual_seed(rank)\nfor x in data:\n    noise = torch.randn(3)\n    f(x).backward()",
        "torch.manual_seed(0)\nx = torch.randn(3)",
        "seed = args.seed + rank\nsampler = DistributedSampler(dataset, seed=args.seed)",
    ],
    "nccl-without-gpus": [
        'dist.init_process_group("nccl")', f'dist.init_process_group("nccl"){NODES}',
        f'dist.init_process_group("nccl"){NO_GPUS.replace("srun", "srun --gpus=4")}',
        f'dist.init_process_group("gloo"){NO_GPUS}',
        f'if torch.cuda.is_available():\n    dist.init_process_group("nccl"){NO_GPUS}',
    ],
    "address-in-script": [
        'os.environ.setdefault("MASTER_ADDR", "localhost")',
        'os.environ["MASTER_ADDR"] = sys.argv[1]',
        'os.environ["MASTER_ADDR"] = "localhost"\nos.environ["MASTER_ADDR"] = hosts[0]',
        'os.environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "localhost")',
        'if "MASTER_ADDR" not in os.environ:\n    os.environ["MASTER_ADDR"] = "localhost"',
        'import torch.multiprocessing as mp\nos.environ["MASTER_ADDR"] = "localhost"\n'
        "mp.spawn(main, nprocs=4)",
    ],
    "trainer-of-one": [
        "import lightning as L\ntrainer = L.Trainer(devices=4, num_nodes=2)",
        "import lightning as L\ntrainer = L.Trainer(**options)",
        "from transformers import Trainer\ntrainer = Trainer(model=model)",
        "import lightning as L\ntrainer = L.Trainer()"
        f"{BESIDE}#SBATCH --gpus-per-node=4\nsrun python train.py",
        f"import lightning as L\ntrainer = L.Trainer(){NODES}".replace("nodes=2", "nodes=1"),
    ],
    "not-resumable": [
        f"{OURS}{HF}",
        f"from clusterddp.loop import Loop\n{PREPARED}",
        "from transformers import BertModel\nmodel = BertModel()\nmodel.train()",
        "import lightning as L\nscaler.fit(model)",
        "import transformers\nclass Trainer:\n    pass\ntrainer = Trainer()\ntrainer.train()",
        PREPARED.replace("backward", "gather"),
        "from lightning.pytorch.cli import LightningCLI\ncli = LightningCLI(Model, run=False)",
        "loss.backward()",
    ],
    "jit-checkpoint": [
        f"{OURS}TrainingArguments(output_dir=out)",
        "from transformers import Trainer\nTrainingArguments(enable_jit_checkpoint=True)",
    ],
}  # fmt: skip


def check(script: str) -> list[Finding]:
    script, beside, job = script.partition(BESIDE)
    texts = {"train.py": START + script}
    return check_texts({**texts, "job.sbatch": f"#!/bin/bash\n{job}\n"} if beside else texts)


def cases(table: dict[str, list[str]]) -> list[object]:
    return [
        pytest.param(rule, script, id=f"{rule}-{number}")
        for rule, scripts in table.items()
        for number, script in enumerate(scripts)
    ]


@pytest.mark.parametrize(("rule", "script"), cases(WILL) + cases(MAY))
def test_only_what_the_script_proves_is_said_for_sure(rule: str, script: str) -> None:
    (found,) = [finding for finding in check(script) if finding.rule == rule]
    assert found.is_sure == (script in WILL.get(rule, ()))
    assert found.text and found.text in script
    assert found.instead not in ("", found.text)


@pytest.mark.parametrize(("rule", "script"), cases(WILL) + cases(MAY))
def test_the_line_to_write_is_python(rule: str, script: str) -> None:
    long = re.sub(r"(\w+\()(?=[^)\n]*\)$)", r"\1\n    ", script, flags=re.MULTILINE)
    for text in (script, long):
        (found,) = [finding for finding in check(text) if finding.rule == rule]
        ast.parse(re.sub(r":\Z", ": pass", found.instead))


A_MOVE = ("collective-in-branch", "sync-batchnorm-late")
"""Rules whose line to write says where the line belongs."""


@pytest.mark.parametrize(("rule", "script"), cases(WILL) + cases(MAY))
def test_the_line_to_write_mends_the_script_however_it_is_spaced(rule: str, script: str) -> None:
    python, *beside = script.partition(BESIDE)
    spaced = re.sub(r"(?<=[a-z])=(?=[\w\"])", " = ", python)
    for text in (script, "".join([spaced, *beside])):
        (found,) = [finding for finding in check(text) if finding.rule == rule]
        assert found.instead != found.text
        if rule not in A_MOVE:
            python, *job = text.partition(BESIDE)
            lines = python.split("\n")
            at = found.line - 1 - START.count("\n")
            indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
            lines[at] = textwrap.indent(found.instead, indent)
            mended = check("".join(["\n".join(lines), *job]))
            assert rule not in [each.rule for each in mended], lines


@pytest.mark.parametrize(("rule", "script"), cases(RIGHT))
def test_what_is_right_is_left_alone(rule: str, script: str) -> None:
    assert rule not in [finding.rule for finding in check(script)]


def test_each_rule_has_a_script_with_the_mistake_and_one_without() -> None:
    rules = set(map(rule_name, PYTHON_RULES))
    assert rules == WILL.keys() | MAY.keys()
    assert rules == RIGHT.keys()


def test_text_that_looks_like_a_mistake_is_none() -> None:
    quoted = textwrap.indent("".join(f"{each}\n" for each in WILL["save-per-rank"]), "    ")
    script = f'{START}"""\n{quoted}\nif rank == 0:\n    dist.barrier()\n"""\n# dist.barrier()\n'
    assert check_texts({"train.py": script}) == []


@pytest.mark.parametrize(
    ("script", "instead"),
    [
        ('model.load_state_dict(torch.load("a.pt"))',
         'model.load_state_dict(torch.load("a.pt", map_location="cpu"))'),
        ('train_set = datasets.MNIST("data", download=True)',
         'dist.barrier()\ntrain_set = datasets.MNIST("data", download=False)'),
        (LOADER + "for epoch in range(3):\n    for x in loader: pass",
         "for epoch in range(3):\n    sampler.set_epoch(epoch)"),
        ('WORLD = 8\ndist.init_process_group("gloo", rank=rank, world_size=WORLD)',
         'WORLD = int(os.environ["WORLD_SIZE"])'),
        ('rank = int(os.environ["SLURM_PROCID"])\n'
         'dist.init_process_group("gloo", rank=rank, world_size=8)',
         'world_size=int(os.environ["SLURM_NTASKS"]))'),
        (LOADER + "total = 0\nfor x, y in loader:\n    total += f(x, y).item()\n"
         'if rank == 0:\n    print("loss", total)',
         'total = torch.as_tensor(total, device="cuda")\ndist.all_reduce(total)\n'
         "total = total.item()\nif rank == 0:"),
        (LOADER + "total = 0\nfor x, y in loader:\n    x = x.to(args.gpu).to(torch.half)\n"
         "    total += f(x, y).item()\nprint('loss', total / len(loader))",
         "total = torch.as_tensor(total, device=args.gpu)\ndist.all_reduce(total)\n"
         "total = total.item() / dist.get_world_size()\nprint('loss', total / len(loader))"),
        (LOADER + "right = 0\nfor x, y in loader:\n    right += f(x, y).sum()\n"
         "print('accuracy', right / len(loader.dataset))",
         "right = right.item()\nprint('accuracy', right / len(loader.dataset))"),
        ("def main():\n    if rank != 0:\n        return\n    dist.barrier()",
         "dist.barrier()  # move it above line 12, or make every rank exit early there"),
        (FIT, "from clusterddp.integrations.lightning import resume\nresume(trainer)\n"
         "trainer.fit(model)"),
        ("import lightning as L\nL.Trainer(devices=1, num_nodes=2).fit(model)",
         "import resume\ntrainer = L.Trainer(devices=1, num_nodes=2)\nresume(trainer)\n"
         "trainer.fit(model)"),
        (HF, "from clusterddp.integrations.transformers import resume\nresume(it)\n"
         "result = it.train(resume_from_checkpoint=a)"),
        (PREPARED, "accelerator.prepare(model, data)\nloop = Loop(accelerator=accelerator)\n"
         "# then use loop.epochs(…), loop.batches(loader) and loop.step()"),
    ],
)  # fmt: skip
def test_the_line_to_write_keeps_what_stands_around_the_mistake(script: str, instead: str) -> None:
    (found,) = check(script)
    assert found.instead.endswith(instead)


def test_on_the_cpu_no_device_is_named() -> None:
    (mistake,) = MAY["loss-not-reduced"]
    (found,) = check_texts({"train.py": f"{START}{mistake}".replace(".cuda()", "")})
    assert "torch.as_tensor(total)\n" in found.instead


@pytest.mark.parametrize(
    ("test", "reached", "fix"),
    [
        ("if rank == 0:\n        dist.barrier()",
         "only rank 0 reaches this call (guarded at line 12).",
         "move it out of the condition at line 12"),
        ("if rank in (-1, 0):\n        dist.barrier()",
         "only one rank reaches this call (guarded at line 12).",
         "move it out of the condition at line 12"),
        ("if rank != 0:\n        dist.barrier()",
         "only some ranks reach this call (guarded at line 12).",
         "move it out of the condition at line 12"),
        ("if rank != 0:\n        return\n    dist.barrier()",
         "only rank 0 reaches this call: the others exit early at line 12.",
         "move it above line 12, or make every rank exit early there"),
        ('if os.environ["RANK"] == "1":\n        raise ValueError\n    dist.barrier()',
         "some ranks exit early at line 12 and never reach it.",
         "move it above line 12, or make every rank exit early there"),
    ],
)  # fmt: skip
def test_it_says_which_ranks_reach_a_collective_and_how_all_can(
    test: str, reached: str, fix: str
) -> None:
    (found,) = check(f"def main():\n    {test}\n")
    assert found.why == f"barrier waits for every rank, but {reached}"
    assert found.instead == f"dist.barrier()  # {fix}"


def test_every_place_that_takes_the_global_rank_for_a_gpu_is_named_at_once() -> None:
    script = "torch.cuda.set_device(rank)\nx = x.to(rank)\nmodel = DDP(x, device_ids=[rank])"
    found = check(f"{script}{NODES}")
    assert [each.text for each in found if each.rule == "global-rank-device"] == script.split("\n")


@pytest.mark.parametrize("library", ["lightning", "accelerate", "deepspeed"])
def test_a_script_whose_ranks_a_library_handles_is_left_to_it(library: str) -> None:
    for rule in ("save-per-rank", "load-map-location", "download-per-rank", "no-sampler"):
        scripts = WILL.get(rule, []) + MAY.get(rule, [])
        for script in scripts:
            assert rule not in [finding.rule for finding in check(f"import {library}\n{script}")]


def test_a_world_size_is_held_against_the_tasks_that_the_job_starts() -> None:
    job = "#!/bin/bash\n#SBATCH -n 8\nexport RANK WORLD_SIZE MASTER_ADDR MASTER_PORT\n"
    job += "srun python train.py\n"
    script = f'{START}dist.init_process_group("gloo", rank=rank, world_size=4)\n'
    (found,) = check_texts({"job.sh": job, "train.py": script})
    assert (found.rule, found.is_sure) == ("world-size", True)
    assert "8 tasks" in found.why
    assert check_texts({"job.sh": job.replace("8", "4"), "train.py": script}) == []
    two = check_texts({"job.sh": f"{job}srun -n 2 python train.py\n", "train.py": script})
    assert [each.is_sure for each in two] == [False]


def test_two_scripts_of_one_name_are_not_told_apart() -> None:
    job = "#!/bin/bash\n#SBATCH -n 8\nsrun python a/train.py\n"
    script = f'{START}dist.init_process_group("gloo", rank=rank, world_size=4)\n'
    found = check_texts({"job.sh": job, "a/train.py": script, "b/train.py": script})
    assert {(each.rule, each.is_sure) for each in found} == {("world-size", False)}


def test_variables_that_stand_for_each_other_thousands_of_times_are_read() -> None:
    check("a = b\nb = a\n" * 2000 + "torch.cuda.set_device(a)")


@pytest.mark.parametrize(
    "line",
    [
        "torch.manual_seed({})\nfor x in y:\n    f(torch.randn(3)).backward()",
        "if rank == {}:\n    dist.barrier()",
        'os.environ["WORLD_SIZE"] = {}',
        'dist.init_process_group("gloo", world_size={})',
    ],
)
def test_a_number_of_thousands_of_digits_is_read(line: str) -> None:
    check(line.format("0x" + "f" * 5000))


@pytest.mark.parametrize(
    "script",
    [
        *("def f(:\n", "print 'hello'\n", "x = \0", "(" * 500),
        f"{START}torch.save(model, {'a + ' * 900}b)\n",
    ],
    ids=["syntax", "print", "nul", "parentheses", "sum"],
)
def test_what_is_no_python_is_refused_by_name(script: str) -> None:
    with pytest.raises(RequestError, match=r"^train\.py"):
        check_texts({"train.py": script})

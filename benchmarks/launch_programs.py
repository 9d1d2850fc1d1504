"""The programs that `launch` starts: the same five steps of the same network, started by others.

Each rank's program says when its first optimizer step was done: it writes the time (seconds of the
epoch) to the file FIRST_STEP names; rank 0's counts.
"""

import os
from pathlib import Path

from clusterddp.data import mnist

STEPS, BATCH = 5, 64
_TRAIN_IMAGES, _TEST_IMAGES = 60_000, 64

_COMMON = f"""
import os, time
import torch
from torch.nn.functional import cross_entropy

def batch():
    return torch.rand({BATCH}, 1, 28, 28), torch.randint(10, ({BATCH},))

def done(step, rank):
    if step == 0 and rank == 0:
        with open(os.environ["FIRST_STEP"], "w") as file:
            file.write(str(time.time()))
"""

BARE = f"""{_COMMON}
import torch.distributed as dist

def main(rank=None, world_size=None):
    torch.set_num_threads(1)
    if rank is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    from clusterddp.models.nets import ConvNet
    model = torch.nn.parallel.DistributedDataParallel(ConvNet())
    optimizer = torch.optim.Adam(model.parameters())
    for step in range({STEPS}):
        images, labels = batch()
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        done(step, dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
"""DDP as its tutorial has it: `env://`, gloo. Imported as `bare` by the two below."""

ALONE = f"""{_COMMON}
if __name__ == "__main__":
    from clusterddp.models.nets import ConvNet
    torch.set_num_threads(1)
    model = ConvNet().to("DEVICE")
    optimizer = torch.optim.Adam(model.parameters())
    images, labels = batch()
    cross_entropy(model(images.to("DEVICE")), labels.to("DEVICE")).backward()
    optimizer.step()
    if "DEVICE" == "cuda":
        torch.cuda.synchronize()
    done(0, 0)
"""
"""A single rank of one step, without a process group; DEVICE is `cpu` or `cuda`."""

SPAWN = """
import torch.multiprocessing as mp

def run(rank):
    import bare
    bare.main(rank, 2)

if __name__ == "__main__":
    mp.spawn(run, nprocs=2)
"""

SUBMITIT = """
import sys
import submitit

def run():
    from submitit.helpers import TorchDistributedEnvironment
    TorchDistributedEnvironment().export(overwrite=True)
    import bare
    bare.main()

if __name__ == "__main__":
    executor = submitit.LocalExecutor(folder=sys.argv[1])
    executor.update_parameters(tasks_per_node=2, timeout_min=5)
    executor.submit(run).results()
"""

LIGHTNING = f"""{_COMMON}
import warnings
warnings.simplefilter("ignore")
import lightning
from clusterddp.models.nets import ConvNet

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = ConvNet()

    def training_step(self, pair, index):
        return cross_entropy(self.model(pair[0]), pair[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

class Told(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, pair, index):
        done(index, trainer.global_rank)

class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (batch() for _ in range({STEPS}))

if __name__ == "__main__":
    torch.set_num_threads(1)
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps={STEPS}, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Told()],
    ).fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))
"""

ACCELERATE = f"""{_COMMON}
from accelerate import Accelerator
from clusterddp.models.nets import ConvNet

if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2, accelerator.num_processes
    model, optimizer = ConvNet(), None
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    for step in range({STEPS}):
        images, labels = batch()
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(images), labels))
        optimizer.step()
        done(step, accelerator.process_index)
    accelerator.wait_for_everyone()
    accelerator.end_training()
"""

# Started by a small separate Python: Linux counts the memory of the process that started a child
# into the child's ru_maxrss, and ours may hold torch. A child's ru_maxrss is that of the largest
# process among it and those it has waited for.
STARTER = """
import json, os, sys, time
began = time.time()
null = os.open(os.devnull, os.O_WRONLY)
log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
children = [
    os.posix_spawn(argv[0], argv, {**os.environ, **more},
                   file_actions=[(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)])
    for argv, more in json.loads(sys.argv[1])
]
ends = [os.wait4(child, 0) for child in children]
print(json.dumps({
    "began": began, "ended": time.time(), "peak_kib": max(usage.ru_maxrss for _, _, usage in ends),
    "codes": [os.waitstatus_to_exitcode(status) for _, status, _ in ends],
}))
"""


def write(folder: Path) -> None:
    """The programs, and a dataset in `data` with as many bytes to read as MNIST has.

    Its test set is small, so that little of a short life is evaluation.
    """
    for name, text in (
        ("bare", BARE),
        ("spawn", SPAWN),
        ("submitit_", SUBMITIT),
        ("lightning_", LIGHTNING),
        ("accelerate_", ACCELERATE),
    ):
        (folder / f"{name}.py").write_text(text)
    raw = folder / "data" / "synthetic" / mnist.RAW
    raw.mkdir(parents=True)
    for (images, labels), count in (
        (mnist.TRAIN_FILES, _TRAIN_IMAGES),
        (mnist.TEST_FILES, _TEST_IMAGES),
    ):
        (raw / images).write_bytes(mnist.image_header(count) + os.urandom(count * mnist.SIDE**2))
        (raw / labels).write_bytes(mnist.label_header(count) + bytes(i % 10 for i in range(count)))

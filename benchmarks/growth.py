"""Memory over a long training: a rank's resident memory 10,000 steps later.

One rank in a separate process, small batches, with everything that a training does on the side:
log lines, evaluation, checkpoints.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.pairs import Row

EARLY, LATE = 5_000, 15_000
"""Steps; before the first of them caches still fill."""


def measure() -> list[Row]:
    """One row, in MiB."""
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth"], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(answer.stdout)
    name = f"a rank's resident memory after {LATE:,} steps"
    return [Row(name, f"after {EARLY:,}", (found["early"],), (found["late"],), of_memory=True)]


def resident_mib() -> float:
    """Resident memory of this process (proc(5), statm counts pages)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main() -> None:
    """Train for that long; print the memory at either step."""
    import torch
    import torch.distributed as dist

    from clusterddp import log
    from clusterddp.data import mnist
    from clusterddp.data.loader import Images
    from clusterddp.data.synthetic import generate
    from clusterddp.request.train_config import TrainConfig
    from clusterddp.run.attempt import begin
    from clusterddp.run.records import Agreement
    from clusterddp.run.run_dir import RunDir
    from clusterddp.training.loop import Training, train
    from clusterddp.training.stop import StopRequest

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    seen: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name, log.to(lambda _: None):
        generate(name, train_images=8_000, test_images=200)
        held = mnist.read("synthetic", name)
        train_set, test_set = (Images(*held.tensors(train=train), cpu) for train in (True, False))
        attempt = begin(RunDir(Path(name, "run")))
        attempt.checkpoints.mkdir()
        config = TrainConfig(
            dataset="synthetic",
            batch_size=8,
            epochs=1000,
            max_steps=LATE,
            save_every="500steps",
            eval_every="500steps",
        )
        agreed = Agreement(
            backend="gloo",
            kind="cpu",
            threads=1,
            world_size=1,
            global_batch_size=8,
            reference_world_size=1,
        )
        training = Training(config, agreed, cpu, train_set, test_set, attempt, StopRequest())
        step = training.journal.step

        def counted() -> None:
            step()
            if training.position.step in (EARLY, LATE):
                seen[training.position.step] = resident_mib()

        training.journal.step = counted  # type: ignore[method-assign]
        train(training)
    dist.destroy_process_group()
    print(json.dumps({"early": seen[EARLY], "late": seen[LATE]}))


if __name__ == "__main__":
    main()

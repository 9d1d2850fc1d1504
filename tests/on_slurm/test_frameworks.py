"""Scripts of frameworks, and one with a Loop, that are told to end on a real Slurm."""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import submit
from tests.waiting import wait_for

LONG = 240.0
# The first start trains until it is told to end, the next one for three steps.
BEGINNING = """
import os
import torch
FIRST = not os.path.exists("up")
STEPS = 10**8 if FIRST else 3
def up(step):
    if step == 3 and os.environ["RANK"] == "0":
        open("up", "w").close()
"""
LIGHTNING = (
    BEGINNING
    + """
from lightning.pytorch import LightningModule, Trainer
class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        up(self.global_step)
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4)
nodes = int(os.environ["SLURM_NNODES"])
Trainer(accelerator="cpu", devices=1, num_nodes=nodes, max_steps=STEPS, max_epochs=-1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(Model(), loader)
"""
)
JIT_CHECKPOINT = (
    BEGINNING
    + """
from transformers import Trainer, TrainerCallback, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        return {"loss": self.layer(x).mean()}
class Up(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        up(state.global_step)
arguments = TrainingArguments(output_dir="out", use_cpu=True, max_steps=STEPS, report_to=[],
    save_strategy="no", enable_jit_checkpoint=True, disable_tqdm=True, ddp_backend="gloo")
Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(4)}] * 64, callbacks=[Up()]).train()
"""
)


@pytest.fixture(scope="module")
def with_grace(slurm_available: None) -> Iterator[SlurmCluster]:
    """Two hosts; what is preempted has the time to leave by itself on a busy machine."""
    partition = "Nodes=ALL State=UP DefaultTime=10 MaxTime=7-00:00:00 Default=YES PriorityTier=1"
    conf = {"KillWait": "60", "PartitionName=main": f"{partition} GraceTime=300"}
    with SlurmCluster(hosts=2, conf=conf) as booted:
        yield booted


@pytest.fixture
def frameworks() -> None:
    """Skips without the extra `frameworks`; fails instead where CI wants every test."""
    missing = [n for n in ("lightning", "transformers") if importlib.util.find_spec(n) is None]
    if missing and os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1":
        pytest.fail(f"{' and '.join(missing)} is missing: pip install -e '.[frameworks]'")
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: pip install -e '.[frameworks]'")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("frameworks")
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(LIGHTNING, id="Lightning"),
        pytest.param(JIT_CHECKPOINT, id="jit", marks=pytest.mark.release),
    ],
)
def test_a_framework_that_leaves_with_0_at_a_preemption_goes_back_and_is_done_in_the_end(
    with_grace: SlurmCluster, tmp_path: Path, script: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    # One rank: told at different steps, two of them can wait for each other for ever.
    done = submit(
        with_grace, tmp_path, "--nodes", "1", "--requeue", "--run-name", "own", "--no-snapshot",
        "--", sys.executable, "train.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "jobs" / "own")
    job_id = read_events(run)[0]["job_id"]
    after = with_grace.sbatch("#!/bin/sh\n", f"--dependency=afterok:{job_id}", "--output=/dev/null")
    wait_for((tmp_path / "up").exists, "its third step", LONG)
    with_grace.sbatch(
        "#!/bin/sh\n", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"
    )

    def ends() -> list[dict[str, object]]:
        return [event for event in read_events(run) if event["event"] == "ended"]

    wait_for(ends, "its first end", LONG)
    [end] = ends()
    log = run.job_log.read_text()
    assert (end["cause"], end["stop_signal"], end["exit_code"]) == ("preempted", "SIGTERM", 75), log
    assert "the command exited with code 0 on SIGTERM" in log
    method = "fit" if script == LIGHTNING else "train"
    place = f"o save and resume, add before Trainer(…).{method} (train.py:"
    assert place in done.stderr and place in log
    assert with_grace.job_state(after) == "PENDING"
    assert with_grace.wait_job(job_id, LONG) == "COMPLETED"
    assert [end["cause"] for end in ends()] == ["preempted", "done"]
    assert with_grace.wait_job(after, LONG) == "COMPLETED"


# The first attempt trains until it is told to leave, the next one for two steps more.
LOOP = """
import os, torch
from clusterddp.loop import Loop
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
loop = Loop(model=model)
steps = loop.steps + 2 if loop.is_resumed else 10**9
while loop.steps < steps:
    loop.step()
    if loop.steps == 3:
        open("up", "w").close()
loop.finish()
print("done at", loop.steps, flush=True)
"""


@pytest.mark.slow
def test_a_command_with_a_loop_that_is_preempted_goes_back_by_itself(
    with_grace: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    asked = ("--nodes", "2", "--run-name", "own", "--no-snapshot", "--json")
    done = submit(with_grace, tmp_path, *asked, "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    job_id = json.loads(done.stdout)["job_id"]
    wait_for((tmp_path / "up").exists, "its third step", LONG)
    with_grace.sbatch(
        "#!/bin/sh\n", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"
    )
    run = RunDir(tmp_path / "jobs/own")
    assert with_grace.wait_job(job_id) == "COMPLETED", run.job_log.read_text()
    first, last = (event for event in read_events(run) if event["event"] == "ended")
    assert (first["cause"], last["cause"]) == ("preempted", "done")
    assert f"done at {first['step'] + 2}" in run.rank_log(0).read_text()


# Each of the first two starts trains until it is told to save; the next one has nothing left to do.
REQUEUES_ITSELF = (
    LIGHTNING.replace(
        'FIRST = not os.path.exists("up")', 'START = os.environ.get("SLURM_RESTART_COUNT", "0")'
    )
    .replace("if FIRST", 'if START in "01"')
    .replace('step == 3 and os.environ["RANK"] == "0"', 'os.environ["RANK"] == "0"')
    .replace('"up"', '"up-" + START')
    .replace(
        "up(self.global_step)",
        "up(3)\n"
        # Its handlers exchange messages: a rank that waits for another one in a step would hang.
        "        while START in '01' and not self.trainer._signal_connector.received_sigterm:\n"
        "            __import__('time').sleep(0.1)",
    )
)


@pytest.mark.slow
@pytest.mark.release  # its handlers wait for other ranks, and can do so for ever
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("frameworks")
def test_lightning_that_requeues_its_job_by_itself_goes_on_as_often_as_it_does_so(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(REQUEUES_ITSELF)
    done = submit(
        cluster, tmp_path, "--nodes", "2", "--requeue", "--partition", "main", "--run-name", "own",
        "--no-snapshot", "--", sys.executable, "train.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "jobs" / "own")
    job_id = read_events(run)[0]["job_id"]
    after = cluster.sbatch("#!/bin/sh\n", f"--dependency=afterok:{job_id}", "--output=/dev/null")
    for start in ("0", "1"):
        wait_for((tmp_path / f"up-{start}").exists, f"start {start} to train", LONG)
        # As `--signal USR1@90` has Slurm do it: to the tasks, and not to the script.
        cluster.run(["scancel", "--signal=USR1", job_id], check=True)
    assert cluster.wait_job(job_id, LONG) == "COMPLETED", run.job_log.read_text()
    ends = [event for event in read_events(run) if event["event"] == "ended"]
    assert ends[-1]["cause"] == "done"
    assert "done" not in [end["cause"] for end in ends[:-1]], ends
    assert cluster.wait_job(after, LONG) == "COMPLETED"

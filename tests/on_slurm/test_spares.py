"""Jobs with spare nodes, on a real Slurm that takes a node for lost long after a test."""

import random
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clusterddp.files import append_json_line, read_json
from clusterddp.run.attempt import Attempt
from clusterddp.run.bad_nodes import FILE_NAME, BadNode
from clusterddp.run.run_dir import RunDir, newest_checkpoint
from tests.event_lines import read_events
from tests.on_slurm.campaign import pairs
from tests.on_slurm.campaign.fault import FAULTS
from tests.on_slurm.campaign.place import Site
from tests.on_slurm.campaign.run import STEPS as CAMPAIGN_STEPS
from tests.on_slurm.campaign.spares import draw
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.held import HOOKS, LONG, Hold
from tests.on_slurm.host_faults import frozen
from tests.on_slurm.test_life import told, train_to
from tests.on_slurm.test_submit import submit
from tests.training.trainings import weights_in_one_piece
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(600)  # losses are waited for

STEPS, SAVED_AT, HELD_AT = 150, 50, 60
TRAINING = [
    "--nodes", "2", "--dataset", "synthetic", "--threads", "1", "--batch-size", "32",
    "--warmup-steps", "2", "--epochs", "100", "--max-steps", str(STEPS),
    "--save-every", f"{SAVED_AT}steps", "--log-every", "50", "--eval-every", "1000epochs",
]  # fmt: skip
EXAMPLES = Path(__file__).parents[2] / "examples"
OF_A_COMMAND = [
    "--nodes", "2", "--env", f"PYTHONPATH={HOOKS}", "--env", "OMP_NUM_THREADS=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def four_hosts(slurm_available: None) -> Iterator[SlurmCluster]:
    with SlurmCluster(hosts=4, conf={"SlurmdTimeout": "3600"}) as booted:
        yield booted


@pytest.fixture
def hosts(four_hosts: SlurmCluster) -> Iterator[SlurmCluster]:
    yield four_hosts
    four_hosts.cancel_all()


def weights(run: RunDir) -> str:
    report = read_json(run.report)
    assert report is not None
    assert report["steps"] == STEPS
    return str(report["weights_sha256"])


def of_kind(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == kind]


def wait_ended(run: RunDir, count: int) -> None:
    wait_for(lambda: len(of_kind(run, "ended")) >= count, f"{count} ends", LONG)


def test_a_killed_node_is_replaced_in_the_same_job(
    hosts: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    hold = Hold(tmp_path, HELD_AT)
    done = submit(hosts, tmp_path, *TRAINING, "--data-dir", str(synthetic_dir), "--run-name",
                  "spare", "--spare-nodes", "1", env=hold.env)  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "jobs/spare")
    hold.wait(2)
    train_to(run.path, SAVED_AT)
    [first] = of_kind(run, "started")
    batch, lost = first["nodelist"].split(",")
    [spare] = first["spares"]
    hosts.kill_host(lost)
    hold.release()
    wait_for(Attempt(run, 2).read_record, "a second attempt", LONG)
    wait_ended(run, 2)

    log = run.job_log.read_text()
    assert weights(run) == weights_in_one_piece(
        tmp_path / "undisturbed", synthetic_dir, 2, batch_size=32, max_steps=STEPS,
        eval_every="1000epochs",
    ), log  # fmt: skip
    ended = of_kind(run, "ended")
    assert [(end["cause"], end["job_id"], end["restart"]) for end in ended] == [
        ("node lost", first["job_id"], 0),
        ("done", first["job_id"], 0),
    ]
    assert len(of_kind(run, "resumed_in_job")) == 1
    second = of_kind(run, "started")[1]
    assert (second["nodelist"], second.get("spares")) == (f"{batch},{spare}", None)
    shown = hosts.run(["scontrol", "show", "job", "-o", first["job_id"]]).stdout
    assert " NumNodes=2 " in shown  # the lost one was given back
    assert list(tmp_path.glob("slurm_job_*")) == []  # nor scripts of scontrol in the work directory
    assert list(of_kind(run, "nodes_marked_bad")[0]["nodes"]) == [lost]
    assert of_kind(run, "requeued") == []
    status = told(hosts, tmp_path, "spare")
    assert (status["state"], status["attempt"], status["hosts"]) == ("done", 2, [batch, spare])


# The looks at idle spares are half a minute apart.
OFTEN = """
import sys
if "batch" in sys.orig_argv:
    from clusterddp import polling
    polling.IDLE_SPARES_POLL_SECONDS = 1.0
"""
WAITS = "until [ -e go ]; do sleep 0.05; done"


@pytest.mark.slow
def test_the_loss_of_an_idle_spare_ends_no_job(hosts: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OFTEN)
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    submit(hosts, tmp_path, "--run-name", "a", "--nodes", "2", "--spare-nodes", "1",
           "--no-requeue", "--no-snapshot", "--preflight", "none", "--",
           "sh", "-c", WAITS, env=env, check=True)  # fmt: skip
    run = RunDir(tmp_path / "jobs/a")
    wait_for(lambda: of_kind(run, "started"), "the start")
    [first] = of_kind(run, "started")
    [spare] = first["spares"]
    hosts.kill_host(spare)

    def nodes_left() -> str:
        show = ["scontrol", "show", "job", "-o", first["job_id"]]
        return str(hosts.run(show, check=True).stdout).partition(" NumNodes=")[2].split()[0]

    wait_for(lambda: nodes_left() == "2", "that the spare is given back", LONG)
    assert f"node {spare} is lost: it was an idle spare, " in run.job_log.read_text()
    # As slurmctld does after SlurmdTimeout, with all jobs that still have the node.
    hosts.run(["scontrol", "update", f"NodeName={spare}", "State=DOWN", "Reason=lost"], check=True)
    (tmp_path / "go").touch()
    assert hosts.wait_job(first["job_id"]) == "COMPLETED", run.job_log.read_text()
    [end], [marked_bad] = of_kind(run, "ended"), of_kind(run, "nodes_marked_bad")
    assert (end["cause"], end["restart"]) == ("done", 0)
    assert (list(marked_bad["nodes"]), marked_bad["by"]) == ([spare], "lost")


# Done at its second start; rank 0's host is lost with the batch script at the first.
LOSES_ITS_SCRIPT = (
    '[ -e lost ] && exit 0; touch "up-$RANK"; until [ -e lost ]; do sleep 0.1; done; exit 1'
)


@pytest.mark.slow
def test_a_job_whose_script_is_lost_unseen_by_slurm_is_put_back_by_a_task(
    hosts: SlurmCluster, tmp_path: Path
) -> None:
    """All processes of the script's host end, and its slurmd is back at once."""
    submit(hosts, tmp_path, "--run-name", "a", "--nodes", "2", "--requeue", "--no-snapshot",
           "--", "sh", "-c", LOSES_ITS_SCRIPT, check=True)  # fmt: skip
    run = RunDir(tmp_path / "jobs/a")
    wait_for(lambda: all((tmp_path / f"up-{rank}").exists() for rank in (0, 1)), "both ranks")
    [first] = of_kind(run, "started")
    script_host = first["nodelist"].split(",")[0] if "," in first["nodelist"] else "h01"
    hosts.kill_host(script_host)
    hosts.start_slurmd(script_host)
    (tmp_path / "lost").touch()
    assert hosts.wait_job(first["job_id"]) == "COMPLETED", run.job_log.read_text()
    [requeued] = of_kind(run, "requeued")
    assert requeued["why"] == f"the batch script is lost with {script_host}"
    assert [start["restart"] for start in of_kind(run, "started")] == [0, 1]


@pytest.mark.slow
def test_a_start_with_fewer_nodes_than_a_step_needs_goes_back_for_all_of_them(
    hosts: SlurmCluster, tmp_path: Path
) -> None:
    hosts.run(["scontrol", "update", "PartitionName=main", "State=DOWN"], check=True)
    submit(hosts, tmp_path, "--run-name", "few", "--nodes", "2", "--spare-nodes", "1",
           "--requeue", "--", "true", check=True)  # fmt: skip
    run = RunDir(tmp_path / "jobs/few")
    [job] = of_kind(run, "submitted")
    fewer = ["NumNodes=1-1", "NumTasks=1"]
    hosts.run(["scontrol", "update", f"JobId={job['job_id']}", *fewer], check=True)
    hosts.run(["scontrol", "update", "PartitionName=main", "State=UP"], check=True)
    assert hosts.wait_job(job["job_id"]) == "COMPLETED", run.job_log.read_text()
    words = "Slurm assigned 1 node, and a step of the run needs 2"
    assert f"{words}: job {job['job_id']} is back in the queue, for 3" in run.job_log.read_text()
    assert [event["event"] for event in read_events(run)] == [
        "submitted", "not_started", "requeued", "started", "ended",
    ]  # fmt: skip
    [started] = of_kind(run, "started")
    assert (started["nodelist"], started["spares"]) == ("h01,h02", ["h03"])


@pytest.mark.slow
def test_a_node_that_froze_is_replaced_and_publishes_nothing_when_it_is_back(
    hosts: SlurmCluster, tmp_path: Path
) -> None:
    """Its ranks' peers wait for it and fail of nothing; the COMMAND has the resumable loop."""
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, tmp_path)
    argv = [*OF_A_COMMAND, "--", sys.executable, "resumable.py"]
    done = submit(hosts, tmp_path, "--run-name", "alone", *argv)
    assert done.returncode == 0, done.stderr
    alone = RunDir(tmp_path / "jobs/alone")
    [job] = of_kind(alone, "submitted")
    assert hosts.wait_job(job["job_id"]) == "COMPLETED"
    hold = Hold(tmp_path, 15)
    spare = ["--run-name", "spare", "--spare-nodes", "1"]
    done = submit(hosts, tmp_path, *spare, *argv, env=hold.env)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "jobs/spare")
    hold.wait(2)
    wait_for(lambda: newest_checkpoint(run.checkpoints), "a checkpoint")
    [first] = of_kind(run, "started")
    thaw = frozen(hosts, first["nodelist"].split(",")[1])
    hold.release()
    wait_for(Attempt(run, 2).read_record, "a second attempt", LONG)
    orphan = Attempt(run, 1)
    before = {path.name for path in orphan.checkpoints.iterdir()}
    thaw()
    wait_ended(run, 2)
    log = run.job_log.read_text()
    assert len(of_kind(run, "resumed_in_job")) == 1
    assert [end["cause"] for end in of_kind(run, "ended")] == ["node lost", "done"], log
    assert {event["job_id"] for event in of_kind(run, "started")} == {first["job_id"]}
    assert {path.name for path in orphan.checkpoints.iterdir()} <= before
    assert (run.code / "model.pt").read_bytes() == (alone.code / "model.pt").read_bytes()


@pytest.mark.slow
def test_a_program_error_takes_no_spare_and_a_bad_node_is_one(
    hosts: SlurmCluster, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    now = time.time()
    bad = BadNode("h02", "a test says so", "preflight", time=now, expires=now + 600)
    append_json_line(jobs / FILE_NAME, vars(bad))
    error = "import sys; sys.exit(3)"
    done = submit(hosts, tmp_path, "--run-name", "wrong", "--nodes", "3", "--spare-nodes", "1",
                  "--", sys.executable, "-c", error)  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunDir(jobs / "wrong")
    wait_ended(run, 1)
    assert hosts.wait_job(of_kind(run, "started")[0]["job_id"]) == "FAILED"
    [started], [ended] = of_kind(run, "started"), of_kind(run, "ended")
    assert (started["nodelist"], started["spares"]) == ("h01,h03,h04", ["h02"])
    assert (ended["cause"], ended["exit_code"]) == ("failed", 3)
    assert of_kind(run, "nodes_marked_bad") == []


# Rank 1 dies once both ranks are there; at its next start each is done.
BUS_ERROR = """
mkdir "up-$RANK" || exit 0
if [ "$RANK" = 1 ]; then until [ -e up-0 ]; do sleep 0.1; done; kill -BUS $$; fi
exec sleep 600
"""


@pytest.mark.slow
def test_a_rank_that_dies_of_hardware_has_its_node_replaced(
    hosts: SlurmCluster, tmp_path: Path
) -> None:
    """The campaign does the same to a training."""
    (tmp_path / "bus.sh").write_text(BUS_ERROR)
    submit(hosts, tmp_path, "--run-name", "bus", "--nodes", "2", "--spare-nodes", "1",
           "--retries", "1", "--no-snapshot", "--", "sh", "bus.sh",
           check=True)  # fmt: skip
    run = RunDir(tmp_path / "jobs/bus")
    [job] = of_kind(run, "submitted")
    assert hosts.wait_job(job["job_id"]) == "COMPLETED", run.job_log.read_text()
    first, second = of_kind(run, "started")
    batch, bad = first["nodelist"].split(",")
    [spare] = first["spares"]
    assert (second["nodelist"], second["job_id"]) == (f"{batch},{spare}", first["job_id"])
    assert [end["cause"] for end in of_kind(run, "ended")] == ["failed", "done"]
    [marked_bad] = of_kind(run, "nodes_marked_bad")
    assert (list(marked_bad["nodes"]), marked_bad["by"]) == ([bad], "hardware")
    assert of_kind(run, "requeued") == []


@pytest.mark.slow
def test_a_node_that_is_drained_meanwhile_is_left_out_of_the_next_attempt(
    hosts: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "bus.sh").write_text(BUS_ERROR.replace("-e up-0", "-e go"))
    submit(hosts, tmp_path, "--run-name", "drained", "--nodes", "2", "--spare-nodes", "2",
           "--retries", "1", "--no-snapshot", "--preflight", "none", "--", "sh", "bus.sh",
           check=True)  # fmt: skip
    run = RunDir(tmp_path / "jobs/drained")
    wait_for(lambda: all((tmp_path / f"up-{rank}").exists() for rank in (0, 1)), "both ranks")
    [job] = of_kind(run, "submitted")
    drain = ["NodeName=h01", "State=DRAIN", "Reason=fan 3 is loud"]
    hosts.run(["scontrol", "update", *drain], check=True)
    try:
        (tmp_path / "go").touch()
        assert hosts.wait_job(job["job_id"]) == "COMPLETED", run.job_log.read_text()
    finally:
        hosts.run(["scontrol", "update", "NodeName=h01", "State=RESUME"], check=True)
    first, second = of_kind(run, "started")
    assert (first["nodelist"], second["nodelist"]) == ("h01,h02", "h03,h04")
    assert second["job_id"] == first["job_id"]
    log = run.job_log.read_text()
    assert log.count("node h01 is left out: it is drained (fan 3 is loud)\n") == 1
    assert [list(event["nodes"]) for event in of_kind(run, "nodes_marked_bad")] == [["h02"]]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_losses_in_one_job_are_survived(slurm_available: None) -> None:
    """Ten pairs that are drawn anew; `python -m tests.on_slurm.campaign 'pair-*'` deals all."""
    chosen = random.SystemRandom().sample(pairs.PAIRS, 10)
    with Site(data_dir=None) as site, ThreadPoolExecutor(2) as pool:
        for result in pool.map(site.carry_out, [FAULTS[pair.name] for pair in chosen]):
            assert result.ok, f"{result.fault.name}: {result.seen}"


def test_faults_are_drawn_alike_by_a_seed_and_can_all_be_dealt() -> None:
    for seed in range(20):
        runs = draw(seed, 20)
        assert runs == draw(seed, 20)
        assert sum(len(blows) for _, blows in runs) == 20
        for config, blows in runs:
            steps = [blow.step for blow in blows]
            assert all(late - early >= 45 for early, late in pairwise(steps))
            assert steps[-1] < CAMPAIGN_STEPS - 20
            assert all(steps[1:])  # none that is there from the start on
            assert steps[0] or config == "three"
    assert draw(1, 20) != draw(2, 20)

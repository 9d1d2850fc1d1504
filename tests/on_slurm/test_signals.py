"""Signals on a real Slurm: whichever comes, the ranks save at one step and the run goes on.

Each run here is stopped by one signal, sent twice, requeued once, and ends with the weights of a
run in one piece.
"""

from pathlib import Path

import pytest

from clusterddp.errors import EXIT_STOPPED
from clusterddp.files import read_json
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import read_outcomes
from clusterddp.run.run_dir import RunDir
from tests.event_lines import kinds, read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.held import Hold
from tests.on_slurm.test_submit import submit
from tests.training.trainings import weights_in_one_piece
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # two starts of a job, or four

STEPS, HELD_AT = 120, 20
TRAINING = ["--dataset", "synthetic", "--threads", "1", "--batch-size", "32", "--epochs", "100",
            "--max-steps", str(STEPS), "--warmup-steps", "2", "--log-every", "10"]  # fmt: skip
TWO = ["--nodes", "2"]


def train(cluster: SlurmCluster, folder: Path, data: Path, *options: str) -> tuple[RunDir, Hold]:
    """Submit a training of two ranks, one a host, and wait until both are in the middle of it."""
    hold = Hold(folder, HELD_AT)
    done = submit(
        cluster, folder, *TWO, *TRAINING, "--data-dir", str(data), "--run-name", "a", *options,
        env=hold.env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    hold.wait(2)
    return RunDir(folder / "jobs/a"), hold


def job_of(run: RunDir) -> str:
    return str(read_events(run)[0]["job_id"])


def wait_done(cluster: SlurmCluster, run: RunDir) -> None:
    assert cluster.wait_job(job_of(run)) == "COMPLETED", logs(run)


def logs(run: RunDir) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in run.logs.iterdir())


def weights(run: RunDir) -> str:
    report = read_json(run.report)
    assert report, logs(run)
    return str(report["weights_sha256"])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, synthetic_dir: Path) -> str:
    whole = tmp_path_factory.mktemp("whole")
    return weights_in_one_piece(whole, synthetic_dir, 2, batch_size=32, max_steps=STEPS)


SCANCELS = [
    pytest.param(["--full", "--signal=USR1"], id="USR1 to the whole job"),
    pytest.param(["--signal=TERM"], id="TERM to the tasks"),
]


def stops_and_goes_on(
    cluster: SlurmCluster, run: RunDir, hold: Hold, scancel: list[str], whole: str, *,
    requeued: bool = True,
) -> None:  # fmt: skip
    """Signal a training run twice, and see it stop together, be requeued once, and end alike.

    requeued: whether it is our own script that puts the job back.
    """
    for _ in range(2):
        cluster.run(["scancel", *scancel, job_of(run)], check=True)
    hold.until_told()
    wait_done(cluster, run)
    first, second = Attempt(run, 1), Attempt(run, 2)
    left = read_json(first.end)
    assert left is not None
    assert left["cause"] == "stopped", logs(run)
    assert HELD_AT <= left["step"] < STEPS
    assert [each.exit_code for each in read_outcomes(first.outcomes)] == [EXIT_STOPPED] * 2
    assert second.read_record().step == left["step"]
    assert not Attempt(run, 3).path.exists()
    # The submission's own line comes from the login host, perhaps after the start's.
    told = sorted(kinds(run), key=lambda kind: kind != "submitted")
    back = ["requeued"] if requeued else []
    assert told == ["submitted", "started", "ended", *back, "started", "ended"], told
    assert weights(run) == whole


# Below under other launchers; of this one test_life.py has the batch script signalled and
# test_sweeps.py Slurm's own signal ahead of a limit, and CI preempts it on Slurm 24.11 (.ci/run).
@pytest.mark.release
@pytest.mark.parametrize("scancel", SCANCELS)
def test_a_signal_pauses_all_ranks_at_one_step_and_the_run_goes_on(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path, uninterrupted: str,
    scancel: list[str],
) -> None:  # fmt: skip
    run, hold = train(cluster, tmp_path, synthetic_dir)
    stops_and_goes_on(cluster, run, hold, scancel, uninterrupted)


RELEASE = (
    "torchrun, USR1 to the whole job", "submitit, TERM", "submitit, which knows no limit",
)  # fmt: skip
OTHERS = {
    "torchrun, TERM to the agents as well": (
        ["--template", "torchrun.sbatch.j2"], ["--signal=TERM"], True,
    ),
    "torchrun, USR1 to the whole job": (
        ["--template", "torchrun.sbatch.j2"], ["--full", "--signal=USR1"], True,
    ),
    # submitit requeues by itself, from the task of rank 0, once all ranks have left.
    "submitit, its signal": (
        ["--launcher", "submitit", "--time", "10"], ["--signal=USR1"], False,
    ),
    "submitit, TERM": (["--launcher", "submitit", "--time", "10"], ["--signal=TERM"], True),
    "submitit, which knows no limit": (["--launcher", "submitit"], ["--signal=USR1"], True),
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "scancel", "requeued"),
    [
        pytest.param(*row, id=name, marks=[pytest.mark.release] if name in RELEASE else [])
        for name, row in OTHERS.items()
    ],
)
def test_it_is_the_same_under_other_launchers(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path, uninterrupted: str,
    options: list[str], scancel: list[str], *, requeued: bool,
) -> None:  # fmt: skip
    run, hold = train(cluster, tmp_path, synthetic_dir, *options)
    stops_and_goes_on(cluster, run, hold, scancel, uninterrupted, requeued=requeued)


def test_submitit_starts_no_job_again_that_a_person_cancelled(
    slurm_available: None, tmp_path: Path, synthetic_dir: Path
) -> None:
    submitit = ["--launcher", "submitit", "--time", "10"]
    # The ranks of a cancelled job have the time to save on a busy machine.
    with SlurmCluster(hosts=2, conf={"KillWait": "90"}) as cluster:
        run, hold = train(cluster, tmp_path, synthetic_dir, *submitit)
        cluster.run(["scancel", "--signal=USR1", job_of(run)], check=True)
        cluster.run(["scancel", job_of(run)], check=True)
        hold.until_told()
        assert cluster.wait_job(job_of(run)) == "CANCELLED"
        wait_for(lambda: "ended" in kinds(run), "the last word")
    assert read_events(run)[-1]["cause"] == "cancelled", logs(run)
    assert read_json(Attempt(run, 1).end), "the ranks have saved all the same"

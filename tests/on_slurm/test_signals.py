"""Signals on a real Slurm: whichever comes, the ranks save at one step and the run goes on.

Each run here is stopped by one signal, sent twice, requeued once, and ends with the weights of a
run in one piece.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusterddp.errors import EXIT_PAUSED
from clusterddp.run.attempt import Attempt
from clusterddp.run.files import read_json
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import submit
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

STEPS, HELD_AT = 120, 20
HOOKS = Path(__file__).parent / "campaign/hooks"
TRAINING = ["--dataset", "synthetic", "--threads", "1", "--batch-size", "32", "--epochs", "100",
            "--max-steps", str(STEPS), "--warmup-steps", "2", "--log-every", "10"]  # fmt: skip
TWO = ["--nodes", "2"]


def train(cluster: SlurmCluster, folder: Path, data: Path, name: str, *options: str) -> RunDir:
    """Submit a training of two ranks, one a host; `trains` lets it go on."""
    holds = folder / "holds"
    holds.mkdir()
    (holds / f"want-step-{HELD_AT}").touch()
    hooks = {"PYTHONPATH": str(HOOKS), "CAMPAIGN_HOLDS": str(holds), "CAMPAIGN_PACE": "0.02"}
    done = submit(
        cluster, folder, *TWO, *TRAINING, "--data-dir", str(data), "--run-name", name, *options,
        env=hooks,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return RunDir(folder / "jobs" / name)


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


@contextmanager
def training(run: RunDir) -> Iterator[None]:
    """Both ranks are in the middle of the first attempt's training, and go on afterwards."""
    holds = run.path.parents[1] / "holds"
    held = f"held-step-{HELD_AT}.*"
    wait_for(lambda: len(list(holds.glob(held))) == 2, f"training: {run.path}")
    yield
    (holds / f"want-step-{HELD_AT}").unlink()


@pytest.fixture(scope="module")
def uninterrupted(
    cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory, synthetic_dir: Path
) -> str:
    run = train(cluster, tmp_path_factory.mktemp("whole"), synthetic_dir, "whole")
    with training(run):
        pass
    wait_done(cluster, run)
    return weights(run)


SCANCELS = {
    "USR1 to the whole job": ["--full", "--signal=USR1"],
    "TERM to the tasks": ["--signal=TERM"],
}


def stops_and_goes_on(
    cluster: SlurmCluster,
    run: RunDir,
    scancel: list[str],
    whole: str,
    *,
    requeued: bool = True,
) -> None:
    """Signal a training run twice, and see it stop together, be requeued once, and end alike.

    requeued: whether it is our own script that puts the job back.
    """
    with training(run):
        for _ in range(2):
            cluster.run(["scancel", *scancel, job_of(run)], check=True)
    wait_done(cluster, run)
    first, second = Attempt(run, 1), Attempt(run, 2)
    left = read_json(first.end)
    assert left is not None
    assert left["cause"] == "stopped", logs(run)
    assert HELD_AT <= left["step"] < STEPS
    paused = [read_json(first.outcomes / f"rank-{rank}.json") for rank in range(2)]
    assert [(one or {}).get("exit_code") for one in paused] == [EXIT_PAUSED] * 2
    assert second.read_record().step == left["step"]
    assert not Attempt(run, 3).path.exists()
    told = [event["event"] for event in read_events(run)]
    back = ["requeued"] if requeued else []
    assert told == ["submitted", "started", "ended", *back, "started", "ended"], told
    assert weights(run) == whole


@pytest.mark.parametrize("scancel", SCANCELS.values(), ids=SCANCELS)
def test_a_signal_pauses_all_ranks_at_one_step_and_the_run_goes_on(
    cluster: SlurmCluster,
    tmp_path: Path,
    synthetic_dir: Path,
    uninterrupted: str,
    scancel: list[str],
) -> None:
    run = train(cluster, tmp_path, synthetic_dir, "a")
    stops_and_goes_on(cluster, run, scancel, uninterrupted)


RELEASE = ("torchrun, USR1 to the whole job", "submitit, TERM")
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
    cluster: SlurmCluster,
    tmp_path: Path,
    synthetic_dir: Path,
    uninterrupted: str,
    options: list[str],
    scancel: list[str],
    *,
    requeued: bool,
) -> None:
    run = train(cluster, tmp_path, synthetic_dir, "a", *options)
    stops_and_goes_on(cluster, run, scancel, uninterrupted, requeued=requeued)


def test_submitit_starts_no_job_again_that_a_person_cancelled(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    run = train(cluster, tmp_path, synthetic_dir, "a", "--launcher", "submitit", "--time", "10")
    with training(run):
        cluster.run(["scancel", "--signal=USR1", job_of(run)], check=True)
        cluster.run(["scancel", job_of(run)], check=True)
    assert cluster.wait_job(job_of(run)) == "CANCELLED"
    wait_for(lambda: "ended" in [event["event"] for event in read_events(run)], "the last word")
    assert read_events(run)[-1]["cause"] == "cancelled", logs(run)
    assert read_json(Attempt(run, 1).end), "the ranks have saved all the same"

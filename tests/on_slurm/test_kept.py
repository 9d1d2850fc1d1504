"""What released versions stopped goes on with this one, on a real Slurm; see tests/kept."""

import json
from pathlib import Path

import pytest

from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from tests.kept.reading import VERSIONS, Kept
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP

STOPPED = {"stopped": "finished", "loop": "requeued", "sharded": "requeued"}
"""Runs that were stopped, each with one of the same training that came to its end."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_kept_runs_resume_at_their_step_and_a_kept_script_runs(
    slurm_available: None, tmp_path: Path, version: Path
) -> None:
    with SlurmCluster(hosts=2, conf={"FirstJobId": "1000"}) as cluster:  # none of the kept ids
        resume(cluster, Kept.unpack(version, tmp_path))


def resume(cluster: SlurmCluster, kept: Kept) -> None:
    told = kept.expected["seen"]["runs"]
    jobs = [_typed(cluster, kept, "resume", name, "--json")["job_id"] for name in STOPPED]
    script = RunDir(kept.folder / "jobs/finished").script.read_text()
    script = script.replace("/jobs/finished", "/jobs/again")
    jobs.append(cluster.sbatch(script, "--parsable", cwd=kept.folder))
    for job in jobs:
        cluster.wait_job(job, timeout=500)
    for name, whole in STOPPED.items():
        run = RunDir(kept.folder / "jobs" / name)
        status = _typed(cluster, kept, "status", name, "--json")
        assert (status["state"], status["attempt"]) == ("done", 2), run.job_log.read_text()
        second = Attempt(run, 2).read_record()
        assert second and second.step == told[name]["status"]["checkpoint_step"]
        report = _typed(cluster, kept, "report", name, "--json")[0]
        assert report["loss"] == pytest.approx(told[whole]["report"]["loss"], rel=1e-3)
    again = _typed(cluster, kept, "report", "again", "--json")[0]
    assert again["loss"] == pytest.approx(told["finished"]["report"]["loss"], rel=1e-3)


def _typed(cluster: SlurmCluster, kept: Kept, *argv: str):  # type: ignore[no-untyped-def]
    done = cluster.run([*CLUSTERDDP, *argv], cwd=kept.folder, timeout=120, check=True)
    return json.loads(done.stdout)

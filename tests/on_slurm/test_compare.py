"""A comparison as jobs on a real Slurm: one rank, and four on two hosts."""

import json
from pathlib import Path

import pytest

from clusterddp.files import read_json
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.held import LONG
from tests.on_slurm.test_submit import CLUSTERDDP

# cli/commands/test_compare.py has jobs that wait for each other, and the runs themselves.
pytestmark = [pytest.mark.slow, pytest.mark.release, pytest.mark.timeout(600)]


def test_one_rank_and_four_are_compared_job_after_job(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    compare = [
        *CLUSTERDDP, "compare", "--launcher=sbatch", "--run-name=a", "--world-sizes=4",
        "--strategies=single,ddp", "--tasks-per-node=2", "--dataset=synthetic", "--threads=1",
        f"--data-dir={synthetic_dir}", "--max-steps=20", "--batch-size=16",
    ]  # fmt: skip
    uneven = cluster.run([*compare, "--world-sizes=3"], cwd=tmp_path, timeout=LONG)
    assert uneven.returncode == 2
    assert "3 ranks cannot fill nodes of 2 evenly" in uneven.stderr
    assert cluster.run(["squeue", "-h"]).stdout == ""

    done = cluster.run([*compare, "--json"], cwd=tmp_path, timeout=2 * LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    seen = [(row["strategy"], row["ranks"], row["nodes"], row["state"]) for row in rows]
    assert seen == [("single", 1, 1, "done"), ("ddp", 4, 2, "done")]
    assert [row["baseline"] for row in rows] == [True, False]
    assert all(row["images_per_second"] > 0 and row["steps"] == 20 for row in rows)
    assert "[2/2] ddp, 4 ranks: " in done.stderr

    ends: dict[str, float] = {}
    for name, hosts in (("a-single", 1), ("a-ddp-4", 2)):
        run = RunDir(tmp_path / "jobs" / name)
        events = {event["event"]: event["time"] for event in read_events(run)}
        assert all(events["started"] >= end for end in ends.values()), "two at once"
        ends[name] = events["ended"]
        assert len((read_json(run.report) or {})["hosts"]) == hosts
    again = cluster.run([*CLUSTERDDP, "compare", "--of=a", "--json"], cwd=tmp_path, timeout=LONG)
    assert json.loads(again.stdout) == rows

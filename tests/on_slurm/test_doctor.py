"""`doctor` on a real Slurm: what it says of a site is so, and nothing is queued."""

import json
from pathlib import Path
from typing import Any

import pytest

from clusterddp.doctor.site_checks import ERROR, OK, WARNING
from tests.on_slurm.cluster import DEFAULT_ROOT, SlurmCluster
from tests.on_slurm.test_bad_nodes import home
from tests.on_slurm.test_cluster import AS_NOBODY
from tests.on_slurm.test_submit import CLUSTERDDP

__all__ = ["home"]

PARTITION = "Nodes=ALL State=UP DefaultTime=10 MaxTime=1-00:00:00 PriorityTier=1"


def diagnosis(cluster: SlurmCluster, folder: Path, *argv: str, who: tuple[str, ...] = ()) -> Any:
    """The checks by name, with the exit code; torch's import is not what is tried here."""
    python = folder / "python"
    if not python.exists():
        python.write_text(
            """#!/bin/sh\necho '{"python": "3.12", "torch": "2", "cuda": "13", "hip": null, """
            """"nccl": ""}'\n"""
        )
        python.chmod(0o755)
    words = [*who, *CLUSTERDDP, "doctor", "--json", "--python", str(python), *argv]
    env = {"HOME": str(folder), "USER": None, "LOGNAME": None}
    got = cluster.run(words, cwd=folder, env=env, timeout=200)
    assert got.stdout, got.stderr
    record = json.loads(got.stdout)
    return {"code": got.returncode, **{check["name"]: check for check in record["checks"]}}


def results(checks: Any) -> dict[str, str]:
    return {name: check["result"] for name, check in checks.items() if name != "code"}


def test_a_sites_partitions_forms_and_settings_are_seen_and_no_job_is_queued(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    def jobs() -> set[str]:
        return {*cluster.run(["squeue", "-h", "-t", "all", "-o", "%i"], check=True).stdout.split()}

    before = jobs()
    checks = diagnosis(cluster, tmp_path)
    assert checks["code"] == 0, checks
    seen = results(checks)
    assert seen["slurm"] == seen["submission"] == seen["GPUs"] == seen["preemption"] == OK
    assert seen["signals"] == OK
    assert seen["partition main"] == seen["partition high"] == OK
    assert seen["accounting"] == WARNING  # no slurmdbd
    facts = checks["partition main"]["facts"]
    assert (facts["nodes"], facts["cpus"], facts["gpus"]) == (2, 16, 4)
    assert (facts["default"], facts["limit"]) == (True, "7-00:00:00")
    assert checks["GPUs"]["facts"]["forms"] == [
        "--gpus-per-node=1", "--gres=gpu:1", "--gpus-per-task=1",
    ]  # fmt: skip
    assert checks["preemption"]["facts"]["partitions"] == {
        "main": {"PreemptMode": "REQUEUE", "GraceTime": 15}
    }
    refused = diagnosis(cluster, tmp_path, "--partition", "gone", "--write", "site.cfg")
    assert refused["code"] == 1 and refused["submission"]["result"] == ERROR
    shown = cluster.run([*CLUSTERDDP, "site", "--site", str(tmp_path / "site.cfg")])
    assert shown.returncode == 0, shown.stderr
    assert jobs() <= before  # Slurm forgets ended ones meanwhile
    assert not (tmp_path / "jobs").exists()


@pytest.mark.slow
def test_a_slurmctld_that_is_down_is_named_and_the_folders_are_checked(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    cluster.kill_slurmctld()
    checks = diagnosis(cluster, tmp_path)
    assert checks["code"] == 1 and checks["slurm"]["result"] == ERROR
    assert checks["runs directory"]["result"] in (OK, WARNING)
    assert "submission" not in checks


@pytest.mark.slow
def test_drained_nodes_are_no_refusal(cluster: SlurmCluster, tmp_path: Path) -> None:
    argv = ["scontrol", "update", f"nodename={','.join(cluster.hosts)}", "state=drain", "reason=x"]
    cluster.run(argv, check=True)
    checks = diagnosis(cluster, tmp_path)
    assert checks["code"] == 0, checks
    assert checks["submission"]["result"] == checks["GPUs"]["result"] == WARNING


@pytest.mark.slow
def test_an_ordinary_user_sees_what_is_open_to_them_and_a_site_of_another_kind(
    slurm_available: None, home: Path
) -> None:
    conf = {
        "JobRequeue": "0",
        "KillWait": "5",
        "RequeueExit": "75",
        "PreemptMode": "CANCEL",
        "PartitionName=main": f"{PARTITION} Default=YES PreemptMode=CANCEL",
        "PartitionName=high": f"{PARTITION.replace('Tier=1', 'Tier=2')} AllowGroups=root",
    }
    # This Python and the tree can lie where only root may enter: not on such a cluster.
    with SlurmCluster(hosts=1, conf=conf, root=DEFAULT_ROOT or Path("/")) as site:
        checks = diagnosis(site, home, who=AS_NOBODY)
        assert checks["code"] == 0, checks
        seen = results(checks)
        assert seen["submission"] == seen["partition main"] == OK
        assert seen["partition high"] == seen["requeue"] == seen["preemption"] == WARNING
        assert seen["signals"] == WARNING  # KillWait=5
        assert "JobRequeue=0" in checks["requeue"]["found"]
        assert "RequeueExit=75" in checks["requeue"]["found"]
        assert "PreemptMode=CANCEL" in checks["preemption"]["found"]
        # 24.11 queues such a job, which waits for ever; 22.05 refuses it.
        closed = diagnosis(site, home, "--partition", "high", who=AS_NOBODY)
        assert closed["code"] == 1 and closed["submission"]["result"] == ERROR
        elsewhere = diagnosis(site, home, "--runs-dir", "/root-of-others", who=AS_NOBODY)
        assert elsewhere["code"] == 1 and elsewhere["runs directory"]["result"] == ERROR
        assert site.run(["squeue", "-h", "-t", "all"], check=True).stdout == ""
        assert results(diagnosis(site, home))["partition high"] == OK

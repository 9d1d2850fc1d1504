"""A run that is submitted from another host by ssh, on a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.on_slurm.cluster import LOGIN, SlurmCluster
from tests.remote.sshd import SSHD, Host, require
from tests.waiting import wait_for

LAPTOP = "h02"
TRAIN = """
import pathlib, time
print("begun", flush=True)
while not pathlib.Path({go!r}).exists():
    time.sleep(0.05)
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_link_that_goes_down_ends_logs_and_not_the_run(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    require()
    host = Host(tmp_path)
    address = cluster.addresses[LOGIN]
    host.listen(address, f"SetEnv SLURM_CONF={cluster.slurm_conf}")
    sshd = cluster.popen([SSHD, "-D", "-f", tmp_path / "sshd_config", "-E", tmp_path / "log"])
    (host.work / "train.py").write_text(TRAIN.format(go=str(tmp_path / "go")))
    on = [sys.executable, "-m", "clusterddp", "--on", "big"]
    places = {"cwd": host.work, "env": {**host.environ(), "SLURM_CONF": None}}
    try:
        wait_for(lambda: not cluster.run_on(LAPTOP, ["ssh", "near", "true"], **places).returncode,
                 "sshd answers")  # fmt: skip
        submit = [*on, "submit", "--nodelist=h01", "--run-name=far", "--", "python", "train.py"]
        submitted = cluster.run_on(LAPTOP, submit, **places)
        assert submitted.returncode == 0, submitted.stderr
        logs = cluster.popen_on(LAPTOP, [*on, "logs", "-f", "far"], stdout=-1, stderr=-1, **places)
        assert logs.stdout and logs.stdout.readline() == "begun\n"
        cluster.run_on(LAPTOP, ["ip", "link", "set", "eth0", "down"], check=True)
        _, said = logs.communicate(timeout=120)
        assert logs.returncode == 1
        assert "[CD1402]" in said
        cluster.run_on(LAPTOP, ["ip", "link", "set", "eth0", "up"], check=True)
        (tmp_path / "go").touch()
        cluster.wait_job(submitted.stdout.split("job ")[1].split(":")[0])
        status = cluster.run_on(LAPTOP, [*on, "status", "far"], **places)
        assert "state       done" in status.stdout, status.stdout + status.stderr
        assert cluster.run_on(LAPTOP, submit, **places).returncode == 2
    finally:
        cluster.run_on(LAPTOP, ["ip", "link", "set", "eth0", "up"])
        sshd.kill_group()

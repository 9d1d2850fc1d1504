"""Runs that are submitted from another host by ssh, on a real Slurm, and on two of them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.on_slurm import versions
from tests.on_slurm.cluster import LOGIN, ROOT_VARIABLE, SlurmCluster
from tests.on_slurm.test_cluster import NOBODY
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


@pytest.fixture
def two_clusters(slurm_available: None) -> Iterator[dict[str, SlurmCluster]]:
    """Clusters of one host: this machine's Slurm, and Debian 13's."""
    require()
    roots = Path(os.environ.get(ROOT_VARIABLE) or versions.DEFAULT_ROOTS / "trixie")
    if not roots.is_dir():
        made = f"{roots} is missing: python -m tests.on_slurm.versions --only-roots"
        (pytest.fail if os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1" else pytest.skip)(made)
    # "/": an overlay in which other accounts can enter the directories of this Python.
    with SlurmCluster(hosts=1, root=Path("/")) as own, SlurmCluster(hosts=1, root=roots) as other:
        yield {"own": own, "other": other}


def serve_all(host: Host, clusters: Mapping[str, SlurmCluster], home: Path) -> None:
    """Let ssh reach each cluster by its name, `own` in the account of an ordinary user."""
    account = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups env HOME={home}"
    config, site = "", ""
    for name, cluster in clusters.items():
        enter = [*cluster._namespaces[LOGIN].enter(), account if name == "own" else ""]
        host.serve(f"{' '.join(enter)} env SLURM_CONF={cluster.slurm_conf} sh -c")
        for file in ("login", "sshd_config"):
            (host.folder / file).rename(host.folder / f"{file}-{name}")
        server = host.folder / f"sshd_config-{name}"
        server.write_text(server.read_text().replace("/login", f"/login-{name}"))
        known = (host.folder / "config").read_text().replace("Host near", f"Host {name}")
        config += known.replace("/sshd_config", f"/sshd_config-{name}")
        folder = home if name == "own" else host.there
        site += f"[cluster:{name}]\nhost = {name}\nfolder = {folder}/runs\n"
        site += f"python = {sys.executable}\n"
    (host.folder / "config").write_text(config)
    (host.folder / "home/.config/clusterddp/site.cfg").write_text(site)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_sooner_of_two_clusters_gets_the_run(
    two_clusters: dict[str, SlurmCluster], tmp_path: Path
) -> None:
    """Of two versions of Slurm, one as an ordinary user, of which one is drained in turn."""
    host = Host(tmp_path)
    with tempfile.TemporaryDirectory() as home:
        os.chown(home, NOBODY, NOBODY)
        serve_all(host, two_clusters, Path(home))
        for chosen, drained in (("own", "other"), ("other", "own")):
            for name, state in ((drained, "DRAIN"), (chosen, "RESUME")):
                cluster = two_clusters[name]
                node = [f"NodeName={cluster.hosts[0]}", f"State={state}", "Reason=test"]
                cluster.run(["scontrol", "update", *node])  # an idle node has nothing to resume
            submit = ["submit", "--wait", "--run-name", chosen, "--", "sh", "-c", "id -u"]
            done = host.run(*submit, on="any")
            assert done.returncode == 0, done.stderr
            assert done.stdout.endswith(f"\n{NOBODY if chosen == 'own' else 0}\n")
            rows = [line.split()[:2] for line in done.stderr.splitlines()]
            assert [chosen, "0.0s"] in rows, done.stderr
            assert [drained, "?"] in rows, done.stderr
        runs = json.loads(host.run("runs", "--json", on="all").stdout)
    found = {(run["cluster"], run["name"], run["state"]) for run in runs}
    assert found == {("own", "own", "done"), ("other", "other", "done")}

"""A host that ssh reaches, with a client that was carried once."""

import os
from pathlib import Path

import pytest

from tests.remote.sshd import Host, why_unavailable


@pytest.fixture(scope="session")
def ssh_available() -> None:
    """Skips without OpenSSH; fails instead if CLUSTERDDP_REQUIRE_SLURM is 1."""
    if missing := why_unavailable():
        message = f"not installed: {missing}. apt-get install openssh-server openssh-client"
        if os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1":
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="session")
def shared_host(ssh_available: None, tmp_path_factory: pytest.TempPathFactory) -> Host:
    host = Host(tmp_path_factory.mktemp("ssh"))
    first = host.run("runs")
    assert first.returncode == 0, first.stderr
    assert "carrying clusterddp" in first.stderr
    assert host.connections() == 1
    return host


@pytest.fixture
def host(shared_host: Host) -> Host:
    shared_host.serve("sh -c")
    shared_host.site()
    shared_host.connections()
    for path in [*shared_host.work.iterdir()]:
        if path.name != "train.py":
            path.unlink()
    return shared_host


@pytest.fixture
def fresh(ssh_available: None, tmp_path: Path) -> Host:
    """A host to which nothing has been carried."""
    return Host(tmp_path)

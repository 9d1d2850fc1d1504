"""A host that ssh reaches, with a client that was carried once."""

import shutil

import pytest

from tests.remote.sshd import Host, require


@pytest.fixture(scope="session")
def shared_host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    require()
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
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return shared_host

"""One real Slurm cluster per test session, made idle again after every test that used it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.on_slurm.cluster import INSTALL_HINT, SlurmCluster, why_unavailable

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slurm: needs a real Slurm, booted on this machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook is given the whole session's tests, not only those beside this file.
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def slurm_available() -> None:
    """Skips where no Slurm can be booted; fails instead if CLUSTERDDP_REQUIRE_SLURM is 1."""
    reason = why_unavailable()
    if reason is None:
        return
    message = f"no Slurm can be booted here: {reason}. To run these tests: {INSTALL_HINT}"
    if os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def cluster(slurm_available: None) -> Iterator[SlurmCluster]:
    """A cluster of two hosts with four fake GPUs each, booted once a session.

    What it ends has as long as Slurm gives by default, as this machine can be busy.
    """
    with SlurmCluster(hosts=2, conf={"KillWait": "30"}) as booted:
        yield booted


@pytest.fixture(autouse=True)
def idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leaves the session's cluster without a job and with every daemon up, whatever a test did."""
    if "cluster" not in request.fixturenames:
        yield
        return
    booted: SlurmCluster = request.getfixturevalue("cluster")
    yield
    booted.cancel_all()

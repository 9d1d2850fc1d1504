"""The files for public clusters, at a real sbatch: it takes a dry run with each of them.

The partitions, features and GPUs that they name are made up on hosts of this machine, so what is
shown is the form of the directives, not that the cluster has them.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from clusterddp.cli.main import cli
from clusterddp.request.options import read_site
from clusterddp.request.sites import FOLDER, read_sites
from clusterddp.request.spec import OPTIONS
from tests.on_slurm.cluster import SUBNET, SlurmCluster

REQUESTS: list[tuple[str, str | None]] = [
    (name, section)
    for name in read_sites()
    for section in (None, *read_site(FOLDER / f"{name}.cfg", None, OPTIONS).clusters)
]
PARAMETERS = [
    pytest.param(*request, marks=[pytest.mark.slow] * bool(request[1])) for request in REQUESTS
]


def settings(name: str, section: str | None) -> dict[str, str]:
    return dict(read_site(FOLDER / f"{name}.cfg", section, OPTIONS).values)


@pytest.fixture(scope="module")
def large(slurm_available: None) -> Iterator[SlurmCluster]:
    """A cluster of two large nodes with the partitions and features of all files."""
    asked = [settings(*request) for request in REQUESTS]
    partitions = {each["partition"] for each in asked if "partition" in each}
    features = {word for each in asked for word in each.get("constraint", "").split("&") if word}
    node = f"CPUs=384 RealMemory=2000000 Gres=gpu:gh200:8 Feature={','.join(sorted(features))}"
    conf: dict[str, str | None] = {
        f"NodeName=h0{number}": f"NodeAddr={SUBNET}.{10 + number} {node}" for number in (1, 2)
    }
    conf |= {f"PartitionName={name}": "Nodes=ALL State=UP" for name in sorted(partitions)}
    with SlurmCluster(hosts=2, gpus_per_host=8, gpu_type="gh200", conf=conf) as booted:
        yield booted


@pytest.mark.parametrize(("name", "section"), PARAMETERS)
def test_sbatch_takes_a_dry_run_with_each_file(
    name: str, section: str | None, large: SlurmCluster, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    argv = ["submit", "--dry-run", "--site", str(FOLDER / f"{name}.cfg"), "--nodes", "2"]
    argv += ["--cluster", section] if section else []
    argv += [] if "gpus-per-node" in settings(name, section) else ["--gpus-per-node", "2"]
    shown = CliRunner().invoke(cli, [*argv, "--", "python3", "-c", "1"])
    assert shown.exit_code == 0, shown.stderr
    # sbatch asks the accounting daemon, which is not here, for other clusters.
    script = re.sub(r"^#SBATCH --clusters=\w+\n", "", shown.stdout, flags=re.MULTILINE)
    tried = large.run(["sbatch", "--test-only"], input=script, cwd=tmp_path)
    assert tried.returncode == 0, tried.stderr

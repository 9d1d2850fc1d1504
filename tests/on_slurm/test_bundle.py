"""A run's own clusterddp on a real Slurm: what was submitted runs, whatever is installed later."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clusterddp.launchers.sbatch import shipped_folder
from clusterddp.run.run_dir import RunDir
from clusterddp.version import __version__
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_own import start
from tests.submission.test_bundle import bare

__all__ = ["bare"]

TRAINING = ["--nodes", "2", "--dataset", "synthetic", "--max-steps", "3", "--threads", "1"]


class Site:
    """An installation of clusterddp of the test's own, with what a submission needs beside it."""

    def __init__(self, cluster: SlurmCluster, folder: Path, python: Path) -> None:
        self.cluster, self.folder, self.python = cluster, folder, str(python)
        self.path = folder / "site"
        for name in ("clusterddp", "click", "jinja2", "markupsafe", "submitit", "cloudpickle"):
            spec = find_spec(name)
            assert spec and spec.origin
            exclude = shutil.ignore_patterns("__pycache__")
            shutil.copytree(Path(spec.origin).parent, self.path / name, ignore=exclude)
        shutil.copytree(shipped_folder(), self.path / "templates", dirs_exist_ok=True)
        spec = find_spec("typing_extensions")
        assert spec and spec.origin
        shutil.copy(spec.origin, self.path)

    def submit(self, *options: str) -> Any:
        argv = [self.python, "-m", "clusterddp", "submit", "--run-name", "a", *options]
        done = self.cluster.run(
            argv, cwd=self.folder, timeout=240, env={"PYTHONPATH": str(self.path)}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def upgrade(self) -> str:
        """The shell's words that make another version of the installation."""
        return f"sed -i s/{__version__}/9.9/ '{self.path}/clusterddp/version.py'"


@pytest.fixture
def site(cluster: SlurmCluster, tmp_path: Path, bare: Path) -> Site:
    return Site(cluster, tmp_path, bare)


def who_started(run: RunDir) -> list[str]:
    """The clusterddp of each attempt."""
    return [event["clusterddp"] for event in read_events(run) if event["event"] == "started"]


def carried(run: RunDir) -> str:
    """The clusterddp that a run carries, as its events name it."""
    return f"{__version__} ({run.bundle.resolve().stem.rpartition('-')[2]})"


def test_a_queued_job_outlives_the_installation_that_submitted_it(
    site: Site, synthetic_dir: Path
) -> None:
    answer = site.submit(*TRAINING, "--data-dir", str(synthetic_dir), "--sbatch", "hold", "--json")
    run = RunDir(site.folder / "jobs/a")
    shutil.rmtree(site.path)
    assert start(site.cluster, answer) == "COMPLETED", run.job_log.read_text()
    assert json.loads(run.report.read_text())["world_size"] == 2
    assert who_started(run) == [carried(run)]


@pytest.mark.slow
def test_the_ranks_of_a_job_of_submitits_run_what_was_submitted(
    site: Site, synthetic_dir: Path
) -> None:
    """submitit's own program starts them, and needs submitit and clusterddp to be installed."""
    answer = site.submit(
        *TRAINING, "--data-dir", str(synthetic_dir), "--launcher", "submitit",
        "--sbatch", "hold", "--json",
    )  # fmt: skip
    run = RunDir(site.folder / "jobs/a")
    assert site.cluster.run(["sh", "-c", site.upgrade()]).returncode == 0
    assert start(site.cluster, answer) == "COMPLETED", run.job_log.read_text()
    assert json.loads(run.report.read_text())["versions"]["clusterddp"] == __version__
    assert who_started(run) == [carried(run)]


def altered(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_job_whose_clusterddp_was_altered_fails_and_says_why_in_slurms_file(site: Site) -> None:
    answer = site.submit("--sbatch", "hold", "--json", "--", "true")
    run = RunDir(site.folder / "jobs/a")
    altered(run.bundle.resolve())
    assert start(site.cluster, answer) == "FAILED"
    job_id = json.loads(answer)["job_id"]
    shown = site.cluster.run(["scontrol", "show", "job", job_id], check=True).stdout
    assert " ExitCode=1:0\n" in shown
    said = (site.folder / f"slurm-{job_id}.out").read_text()
    assert "was altered or damaged" in said
    assert f"clusterddp resume {run.path} --upgrade-clusterddp" in said
    assert who_started(run) == []


def test_a_job_whose_clusterddp_has_gone_uses_the_installed_one(site: Site) -> None:
    answer = site.submit("--sbatch", "hold", "--json", "--", "true")
    run = RunDir(site.folder / "jobs/a")
    run.bundle.resolve().unlink()
    assert start(site.cluster, answer) == "COMPLETED"
    assert [words.partition(" ")[2] for words in who_started(run)] == ["(installed)"]
    assert run.bundle.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sbatch", "name"),
    [((), "a"), pytest.param(("--array=0",), "a-0", marks=pytest.mark.release)],
    ids=["by hand", "array"],
)
def test_a_run_that_was_sent_by_hand_requeues_with_what_ran_its_first_attempt(
    site: Site, sbatch: tuple[str, ...], name: str
) -> None:
    upgrade = f"[ ! -e up ] || exit 0; touch up; {site.upgrade()}; exit 75"
    script = site.submit("--requeue", "--dry-run", "--", "sh", "-c", upgrade)
    job_id = site.cluster.sbatch(
        script, *sbatch, cwd=site.folder, env={"PYTHONPATH": str(site.path)}
    )
    run = RunDir(site.folder / "jobs" / name)
    assert site.cluster.wait_job(job_id) == "COMPLETED", run.job_log.read_text()
    assert who_started(run) == [f"{__version__} (installed)", carried(run)]
    assert f"the run now uses its own copy of clusterddp, {carried(run)}" in run.job_log.read_text()

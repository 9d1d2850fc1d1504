"""Makes the kept state of this version: runs on a real Slurm, and what the commands say of them."""

import contextlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterddp.run.run_dir import RunDir
from clusterddp.version import __version__
from tests.kept.reading import ARCHIVE, EXPECTED, HERE, Kept, losses, seen
from tests.on_slurm.cluster import SlurmCluster
from tests.waiting import wait_for

TWO = ["--nodes=2", "--time=10"]
BUILT_IN = [
    *TWO, "--model=tiny:net", "--dataset=tiny:pairs", "--threads=1", "--device=cpu", "--lr=0.01",
    "--precision=fp32", "--batch-size=4", "--warmup-steps=5", "--keep-last=1", "--log-every=20",
]  # fmt: skip
OWN = ["--", "python", "own.py"]
STATES = {
    "finished": "done", "second": "done", "stopped": "stopped", "loop": "stopped",
    "sharded": "stopped", "crashed": "failed", "requeued": "done", "trials-0": "done",
    "trials-1": "done", "held": "done", "lab": "stopped",
}  # fmt: skip
"""What the runs are made to come to, by name."""
PATIENCE = 170
OWN_PLACES = (str(HERE.parents[1]), os.path.realpath(sys.prefix), f'"{os.uname().nodename}"')
"""What no kept file may name."""


def make() -> None:
    """Write this version's directory of tests/kept, in place of an earlier one."""
    with _neutral_folder() as folder:
        maker = Maker(folder)
        with SlurmCluster(hosts=2, conf={"KillWait": "30"}) as maker.cluster:
            maker.submit_all()
        target = HERE / __version__
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        with tarfile.open(target / ARCHIVE, "w:xz", preset=9) as archive:
            archive.add(folder / "project", ".", filter=_without_bundle)
        _check_places(target / ARCHIVE)
        origin = {"folder": str(folder), "python": maker.python}
    expect(target, origin)


def expect(target: Path, origin: dict[str, Any]) -> None:
    """Write what the commands say of the kept runs of a directory; made in the paths of origin."""
    (target / EXPECTED).write_text(json.dumps(origin))
    with tempfile.TemporaryDirectory() as elsewhere:
        kept = Kept.unpack(target, Path(elsewhere))
        expected = origin | {"losses": losses(kept), "seen": seen(kept)}
    (target / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")
    states = {name: each["status"]["state"] for name, each in expected["seen"]["runs"].items()}
    assert states == STATES, states
    sizes = [f"{path} {path.stat().st_size:,} bytes" for path in target.iterdir()]
    print(*sizes, sep="\n")


class Maker:
    """A user's directory on a cluster."""

    cluster: SlurmCluster

    def __init__(self, folder: Path) -> None:
        self.work = folder / "project"
        shutil.copytree(HERE / "programs", self.work, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "venv").symlink_to(sys.prefix)
        self.python = str(folder / "venv/bin" / Path(sys.executable).name)
        self.environ = {
            "PATH": f"{folder}/venv/bin:{os.environ['PATH']}", "VIRTUAL_ENV": None,
            "XDG_STATE_HOME": str(folder / "state"), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def submit_all(self) -> None:
        """Submit each run and bring it to its end."""
        self.submit("finished", *BUILT_IN, "--preflight=quick", "--save-config=request.toml")
        self.submit("second", "--after=finished", "--time=10", "--", "python", "--version")
        sweep = ["--sweep=lr=0.1,0.3", "--time=10", "--log-per=node"]
        self.submit("trials", *sweep, "--", "echo", "lr {lr}")
        self.typed("hold", "--run-name=lab", "--time=10")
        self.submit("held", "--in-hold=lab", "--wait", "--", "echo", "in a hold")
        self.typed("release", "lab")
        self.wait_for_jobs()
        self.submit("requeued", *TWO, *OWN, pace=0.03)
        self.submit("loop", *TWO, *OWN, pace=0.1)
        self.submit("sharded", *TWO, *OWN, "--shard", pace=0.1)
        self.submit("stopped", *BUILT_IN, pace=0.1)
        self.wait_for_steps("requeued")
        job = json.loads(self.typed("status", "requeued", "--json"))["job_id"]
        self.cluster.run(["scontrol", "requeue", job], check=True)
        for name in ("loop", "sharded", "stopped"):
            self.wait_for_steps(name)
            self.typed("stop", name)
        self.submit("crashed", *TWO, *OWN, "--crash")
        self.wait_for_jobs()

    def typed(self, *argv: str, pace: float = 0) -> str:
        """Run a command of clusterddp; return what it prints. pace: seconds of a step."""
        command = [self.python, "-m", "clusterddp", *argv]
        env = {**self.environ, "KEPT_PACE": str(pace)}
        done = self.cluster.run(command, cwd=self.work, env=env, timeout=PATIENCE, check=True)
        return str(done.stdout)

    def submit(self, name: str, *words: str, pace: float = 0) -> None:
        self.typed("submit", f"--run-name={name}", *words, pace=pace)

    def wait_for_steps(self, name: str) -> None:
        metrics = RunDir(self.work / "jobs" / name).metrics
        wait_for(lambda: metrics.exists() and metrics.stat().st_size, f"{name}'s steps", PATIENCE)

    def wait_for_jobs(self) -> None:
        queue = ["squeue", "--noheader", "--format=%j %T"]
        wait_for(lambda: not self.cluster.run(queue, check=True).stdout, "all jobs", PATIENCE)


@contextlib.contextmanager
def _neutral_folder() -> Iterator[Path]:
    """Give a directory whose path names no workplace, with the same name for each maker."""
    folder = Path("/tmp/clusterddp-kept")
    folder.mkdir()  # another maker's, or left by a killed one: to be looked at
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _without_bundle(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out clusterddp itself, a megabyte: the scripts then use the installed one."""
    if member.name.endswith((".pyz", "__pycache__")):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _check_places(path: Path) -> None:
    """Refuse an archive that names this workplace."""
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            content = file.read() if file else os.fsencode(member.linkname)
            named = [place for place in OWN_PLACES if place.encode() in content]
            assert not named, f"{member.name} names {named}"

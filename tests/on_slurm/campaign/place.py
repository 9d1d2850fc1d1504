"""Where a campaign's runs live: directories, datasets, a copy of the package, clusters, disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import clusterddp
from clusterddp.data.synthetic import generate
from tests.on_slurm.campaign.fault import UNHURRIED, Fault
from tests.on_slurm.campaign.run import (
    CONFIGURATIONS,
    PACE,
    REAL_DATA,
    SCRIPT_PACE,
    SCRIPTS,
    Baseline,
    Differs,
    Place,
    Trial,
    world_size_of,
)
from tests.on_slurm.cluster import SlurmCluster

DISK_BYTES = 24 << 20
SLOW_DISK_BYTES = 5 << 30
SLOW_BYTES_PER_SECOND = 50 << 20
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
"""Limits what the processes of the root control group write, the kernel's own among them."""


@dataclass(frozen=True)
class Result:
    """What became of a row."""

    fault: Fault
    seen: str
    ok: bool
    lost_seconds: float | None
    wall_seconds: float


class Site:
    """Everything that faults share; close it at the end."""

    def __init__(self, data_dir: Path | None, keep: Path | None = None) -> None:
        """data_dir: one that holds the real MNIST. keep: where directories of differing rows go."""
        self._stack = contextlib.ExitStack()
        self._keep = keep
        self.stopping = threading.Event()
        self.baselines: dict[str, Baseline] = {}
        self._measuring, self._booting = threading.Lock(), threading.Lock()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="campaign-"))
        self.folder = Path(folder)
        package = Path(clusterddp.__file__).parent
        self.package = self.folder / "package"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, self.package / "clusterddp", ignore=ignored)
        if not (package / "templates").is_dir():  # an editable install: they lie beside it
            shutil.copytree(package.parent / "templates", self.package / "templates")
        synthetic = self.folder / "data"
        generate(str(synthetic), train_images=2_000, test_images=500)
        self.synthetic = ["--dataset", "synthetic", "--data-dir", str(synthetic)]
        has_mnist = data_dir and (data_dir / "MNIST/raw/train-images-idx3-ubyte").is_file()
        self.mnist = ["--dataset", "mnist", "--data-dir", str(data_dir)] if has_mnist else None
        self._shared: SlurmCluster | None = None

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._stack.close()

    def data(self) -> dict[str, Sequence[str]]:
        return {
            name: self.mnist if self.mnist and name in REAL_DATA else self.synthetic
            for name in CONFIGURATIONS
        }

    def shared_cluster(self) -> SlurmCluster:
        """That of the baselines, and of all faults that need none of their own; booted once."""
        with self._booting:
            if self._shared is None:
                self._shared = self._stack.enter_context(SlurmCluster(hosts=2, conf=UNHURRIED))
            return self._shared

    def place(self, cluster: SlurmCluster, folder: Path) -> Place:
        folder.mkdir(parents=True, exist_ok=True)
        return Place(cluster, folder, self.package, self.data(), self.baselines, self.stopping)

    def measure(self, config: str) -> Baseline:
        """The uninterrupted run of a configuration, once."""
        with self._measuring:
            if config not in self.baselines:
                with contextlib.ExitStack() as stack:
                    if world_size_of(config) == 3:
                        cluster = stack.enter_context(SlurmCluster(hosts=3))
                    else:
                        cluster = self.shared_cluster()
                    self.baselines[config] = self._measure(config, cluster)
            return self.baselines[config]

    def _measure(self, config: str, cluster: SlurmCluster) -> Baseline:
        trial = Trial(self.place(cluster, self.folder / f"baseline-{config}"))
        pace = SCRIPT_PACE if config in SCRIPTS else PACE
        run = trial.start(config=config, name=f"baseline-{config}", pace=pace)
        run.wait_over(600)  # nothing is shown by how long it takes beside other work
        result = run.result()
        if result is None or result[0] != run.steps or run.causes != ["done"]:
            words = f"the uninterrupted run ended as {result}, expected step {run.steps}"
            raise run.differs(words)
        return Baseline(result[1], run.wall_seconds())

    def carry_out(self, fault: Fault) -> Result:
        """One row, on a cluster of its own where it asks for one."""
        began = time.monotonic()
        folder = self.folder / fault.name
        trial: Trial | None = None
        try:
            with contextlib.ExitStack() as stack:
                for config in fault.needs:
                    self.measure(config)
                if fault.disk:
                    stack.enter_context(DISKS[fault.disk](folder))
                if fault.conf is None:
                    cluster = self.shared_cluster()
                else:
                    booted = SlurmCluster(hosts=fault.hosts, conf=fault.conf)
                    cluster = stack.enter_context(booted)
                trial = Trial(self.place(cluster, folder))
                try:
                    seen, ok = fault.strike(trial), True
                except BaseException:
                    self._save(fault, folder, cluster)
                    raise
                finally:
                    if fault.conf is None:
                        _cancel(trial)
        except Exception as error:
            seen, ok = str(error) or type(error).__name__, False
            if not isinstance(error, Differs):
                seen = traceback.format_exc()
        lost = trial.lost_seconds if trial else None
        return Result(fault, seen, ok, lost, time.monotonic() - began)

    def _save(self, fault: Fault, folder: Path, cluster: SlurmCluster) -> None:
        if self._keep:
            target = self._keep / fault.name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(folder, target, symlinks=True, ignore_dangling_symlinks=True)
            (target / "daemons.log").write_text(cluster.log_tail(100))


def _cancel(trial: Trial) -> None:
    """Leaves the shared cluster without a job of this trial."""
    for run in trial.runs:
        with contextlib.suppress(Exception):
            jobs = [job.split()[0] for job in run.queued()]
            if jobs:
                trial.cluster.run(["scancel", *jobs])


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A small disk as the directory; mounted before the hosts boot, so that all see it."""
    folder.mkdir(parents=True)
    size = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "campaign", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def disk_of_jobs(folder: Path, size: int = DISK_BYTES) -> Iterator[None]:
    """A small disk of its own for the runs below the directory, which an error turns read-only."""
    runs = folder / "jobs"
    runs.mkdir(parents=True)
    image = folder / "disk"
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    options = "loop,errors=remount-ro"
    subprocess.run(["mount", "-o", options, str(image), str(runs)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(runs)], check=True)


@contextlib.contextmanager
def disk_beside_jobs(folder: Path) -> Iterator[None]:
    """A small disk of its own as the directory; that of the runs below it is another."""
    with small_disk(folder), small_disk(folder / "jobs"):
        yield


@contextlib.contextmanager
def slow_disk_of_jobs(folder: Path) -> Iterator[None]:
    """A disk of its own for the runs below the directory, which writes 50 MB per second."""
    if not THROTTLE.exists():
        raise Differs(f"no {THROTTLE}: a slow disk needs the blkio controller of cgroup v1")
    with disk_of_jobs(folder, SLOW_DISK_BYTES):
        disk = (folder / "jobs").stat().st_dev
        device = f"{os.major(disk)}:{os.minor(disk)}"
        THROTTLE.write_text(f"{device} {SLOW_BYTES_PER_SECOND}")
        try:
            yield
        finally:
            THROTTLE.write_text(f"{device} 0")


DISKS = {
    **{"tmpfs": small_disk, "ext4": disk_of_jobs, "node": disk_beside_jobs},
    "slow": slow_disk_of_jobs,
}

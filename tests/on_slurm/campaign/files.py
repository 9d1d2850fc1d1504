"""Faults of disks and files: checkpoints damaged, disks full, directories gone, clocks set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from clusterddp.checkpoints.catalog import files
from clusterddp.files import read_json_lines
from clusterddp.run.run_dir import newest_checkpoint
from tests.on_slurm.campaign.fault import ENDS, fault
from tests.on_slurm.campaign.run import PATIENCE, STEPS, Differs, Run, Trial, slurm

FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
REPOSITORY = Path(__file__).parents[3]


def tear(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def empty(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(0)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _between_starts(trial: Trial, options: list[str], strike: Callable[[Run], None]) -> Run:
    """A run whose second start waits while its files are struck."""
    run = trial.start_held(90, "--retries", "3", *options)
    run.wait(lambda: _has(run, 80), "the checkpoint of step 80")
    trial.want("import")
    run.gone(run.kill(1))
    trial.release("step-90")
    trial.held("import", 2)
    strike(run)
    trial.release("import")
    return run


def _has(run: Run, step: int) -> bool:
    """Whether the newest checkpoint, written beside the training, is of that step."""
    newest = newest_checkpoint(run.dir.checkpoints)
    return newest is not None and newest[0] == step


def _damage(trial: Trial, harm: Callable[[Path], None]) -> str:
    newest: list[Path] = []

    def strike(run: Run) -> None:
        newest.append(files(run.attempts[0].checkpoints)[0])
        harm(newest[0])

    run = _between_starts(trial, [], strike)
    struck = run.struck()
    run.wait_attempt(2)
    seen = run.check_same(struck, causes=["failed", "done"])
    if f"skipping {newest[0].name}" not in run.rank_logs:
        raise run.differs(f"nobody says that {newest[0].name} is damaged")
    if run.attempts[1].read_record().step != 40:
        raise run.differs("it did not go on from the one before, step 40")
    return seen


@fault("newest-torn", quick=True)
def newest_torn(trial: Trial) -> str:
    return _damage(trial, tear)


@fault("newest-empty")
def newest_empty(trial: Trial) -> str:
    return _damage(trial, empty)


@fault("newest-flipped")
def newest_flipped(trial: Trial) -> str:
    return _damage(trial, flip)


def _odd(path: Path, put: Callable[[Path], object]) -> None:
    path.unlink()
    put(path)


@fault("newest-dangling")
def newest_dangling(trial: Trial) -> str:
    return _damage(trial, lambda path: _odd(path, lambda path: path.symlink_to("/gone.pt")))


@fault("newest-fifo")
def newest_fifo(trial: Trial) -> str:
    return _damage(trial, lambda path: _odd(path, os.mkfifo))


@fault("all-gone", ENDS)
def all_gone(trial: Trial) -> str:
    """A run without its checkpoints ends, and begins anew only where that is asked for."""

    def strike(run: Run) -> None:
        for path in files(run.attempts[0].checkpoints):
            path.unlink()

    run = _between_starts(trial, [], strike)
    seen = run.check_failed("the checkpoints of run are gone", "resume run --from-scratch")
    refused = trial.clusterddp("resume", "run")
    if refused.returncode != 2 or "are gone" not in refused.stderr:
        raise run.differs(f"resume: exit {refused.returncode}: {refused.stderr}")
    again = trial.clusterddp("resume", "run", "--from-scratch")
    if again.returncode != 0:
        raise run.differs(f"resume --from-scratch: {again.stderr}")
    return f"{seen}; anew: {run.check_same()}"


@fault("all-torn", ENDS)
def all_torn(trial: Trial) -> str:
    def strike(run: Run) -> None:
        for path in files(run.attempts[0].checkpoints):
            tear(path)

    run = _between_starts(trial, [], strike)
    seen = run.check_failed("no checkpoint of run is valid", "clusterddp checkpoints run")
    if len(run.attempts) > 3:
        raise run.differs(f"{len(run.attempts)} attempts")
    return f"{seen}; {len(run.attempts)} attempts"


@fault("dataset-changed", ENDS)
def dataset_changed(trial: Trial) -> str:
    data = trial.folder / "data"
    shutil.copytree(trial.data["two"][-1], data)
    images = next(data.rglob("train-images-idx3-ubyte"))
    options = ["--data-dir", str(data)]
    run = _between_starts(trial, options, lambda _: flip(images))
    seen = run.check_failed("has changed since this run first started", usable=80)
    if len(run.attempts) > 3:
        raise run.differs(f"{len(run.attempts)} attempts")
    return f"{seen}; {len(run.attempts)} attempts"


class Filler:
    """A file that takes what is left of a disk."""

    def __init__(self, folder: Path, leave: int) -> None:
        self.path = folder / "filler"
        status = os.statvfs(folder)
        size = max(status.f_bavail * status.f_frsize - leave, 0)
        with self.path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def remove(self) -> None:
        self.path.unlink()


@fault("disk-full-at-a-save", conf={}, disk="tmpfs")
def disk_full_at_a_save(trial: Trial) -> str:
    """Room for lines, but not for a checkpoint."""
    run = trial.start()
    run.wait_step(45)
    filler = Filler(trial.folder, leave=64 << 10)
    struck = run.struck()
    run.wait_said("was not written")
    run.wait_step(struck.step + 50)
    if len(files(run.attempts[0].checkpoints)) != 1:
        raise run.differs("a checkpoint was written onto a full disk, or the old one is gone")
    filler.remove()
    seen = run.check_same(struck, causes=["done"])
    run.check_usable(STEPS)
    return seen


@fault("disk-full-at-the-metrics", conf={}, disk="tmpfs")
def disk_full_at_the_metrics(trial: Trial) -> str:
    """Not a byte left, for a long while of training."""
    trial.want("step-200")
    run = trial.start()
    run.wait_step(45)
    filler = Filler(trial.folder, leave=0)
    struck = run.struck()
    trial.held("step-200", 2)
    lines = {line["step"] for line in read_json_lines(run.dir.metrics)}
    lost = [step for step in range(5, 200, 5) if step not in lines]
    if not lost:
        raise run.differs("no line of metrics was lost: the disk was not full")
    filler.remove()
    trial.release("step-200")
    seen = run.check_same(struck, causes=["done"])
    run.check_usable(STEPS)
    return f"{seen}; {len(lost)} lines of metrics lost"


@fault("disk-full-at-the-signal", conf={}, disk="tmpfs", quick=True)
def disk_full_at_the_signal(trial: Trial) -> str:
    """Not a byte left when Slurm's signal comes; there is room again before the next start."""
    run = trial.start_held(60, until_told=True)
    run.wait(lambda: _has(run, 40), "the checkpoint of step 40")
    filler = Filler(trial.folder, leave=0)
    struck = run.struck()
    slurm(trial, "scancel", "--batch", "--signal=USR1", run.job_id)
    run.wait(lambda: any(job.endswith(" PENDING") for job in run.queued()), "the requeue")
    slurm(trial, "scontrol", "hold", run.job_id)
    status = run.status()
    if status["state"] != "queued" or "No space left on device" not in status["detail"]:
        raise run.differs(f"status says {status['state']}: {status['detail']}")
    out = trial.folder / f"slurm-{run.job_id}.out"
    verdict = run.log + (out.read_text() if out.exists() else "")
    if "their last checkpoint is from step 40" not in verdict:
        raise run.differs(f"the verdict does not say that nothing was saved: {verdict}")
    filler.remove()
    slurm(trial, "scontrol", "release", run.job_id)
    seen = run.check_same(struck, causes=["signal", "done"])
    if run.attempts[1].read_record().step != 40:
        raise run.differs("it did not go on from its last checkpoint, step 40")
    return seen


@fault("disk-of-the-node-full", conf={}, disk="node")
def disk_of_the_node_full(trial: Trial) -> str:
    """Not a byte for the script's lines and temporary files; the runs lie elsewhere."""
    filler = Filler(trial.folder, leave=0)
    options = ["--setup", "echo staged", "--env", f"TMPDIR={trial.folder}"]
    run = trial.start(*options)
    run.wait_step(60)
    struck = run.struck()
    slurm(trial, "scancel", "--batch", "--signal=USR1", run.job_id)
    seen = run.check_same(struck, causes=["signal", "done"])
    try:
        filler.path.with_name("probe").write_text("x")
    except OSError:
        return seen
    raise run.differs("there was room")


@fault("disk-read-only", ENDS, conf={}, disk="ext4")
def disk_read_only(trial: Trial) -> str:
    """The disk of the runs turns read-only while they train; that of the submission does not."""
    run = trial.start()
    run.wait_step(60)
    job_id = run.job_id
    runs = trial.folder / "jobs"
    argv = ["findmnt", "-no", "SOURCE", str(runs)]
    device = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("1")
    try:
        (runs / "probe").touch()
    except OSError:
        pass
    else:
        raise run.differs("the disk can still be written")
    run.wait_over(PATIENCE)
    out = trial.folder / f"slurm-{job_id}.out"
    said = out.read_text() if out.exists() else ""
    if "Read-only file system" not in said:
        raise run.differs(f"{out.name} says {said!r}")
    shown = slurm(trial, "scontrol", "show", "job", job_id).stdout
    if "JobState=FAILED" not in shown:
        raise run.differs(shown)
    state = run.status()["state"]
    if state != "failed":
        raise run.differs(f"status says {state}")
    trial.lost_seconds = None
    return f"failed: {said.strip().splitlines()[-1]}"


@fault("run-directory-removed", ENDS)
def run_directory_removed(trial: Trial) -> str:
    run = trial.start("--retries", "3", pace=0.2)
    run.wait_step(20)
    job_id, task = run.job_id, run.task(0)
    shutil.rmtree(run.dir.path)
    began = time.monotonic()
    run.gone(task)
    quick = time.monotonic() - began
    run.wait_over(60)
    log = trial.folder / f"slurm-{job_id}.out"
    said = log.read_text() if log.exists() else ""
    if "removed" not in said and "gone" not in said:
        raise run.differs(f"slurm-{job_id}.out says {said!r}: nobody says that it is gone")
    if run.dir.report.exists():
        raise run.differs("there is a report.json")
    trial.lost_seconds = None
    return f"ended in {quick:.0f} s: {said.strip().splitlines()[-1]}"


@fault("clock-set")
def clock_set(trial: Trial) -> str:
    """The tasks' clock goes an hour ahead, then two hours back."""
    if not FAKETIME.exists():
        raise Differs(f"no {FAKETIME}: apt-get install libfaketime")
    clock = trial.folder / "clock"
    clock.write_text("+0")

    def set_clock(offset: str) -> None:
        fresh = clock.with_suffix(".new")
        fresh.write_text(offset)
        fresh.rename(clock)

    variables = [
        f"LD_PRELOAD={FAKETIME}", f"FAKETIME_TIMESTAMP_FILE={clock}", "FAKETIME_NO_CACHE=1",
        "FAKETIME_DONT_FAKE_MONOTONIC=1",  # a clock that is set leaves that one alone
    ]  # fmt: skip
    run = trial.start("--wrapper", f"/usr/bin/env {' '.join(variables)}")
    for step, offset, ahead in ((60, "+3600", 1800), (130, "-3600", -1800)):
        run.wait_step(step)
        set_clock(offset)

        def struck(ahead: int = ahead) -> bool:
            latest = list(read_json_lines(run.dir.metrics))[-1]["time"] - time.time()
            return latest > ahead if ahead > 0 else latest < ahead

        run.wait(struck, f"lines of metrics at {offset} s")
    return run.check_same(causes=["done"])


@fault("killed-at-20-moments-of-a-save", needs=())
def killed_at_20_moments(trial: Trial) -> str:
    """The unit test of the saver: kill -9 at twenty random moments, a whole one is always left."""
    name = "test_killed_at_any_moment_of_a_save_a_whole_one_is_left"
    test = f"tests/checkpoints/test_writer.py::{name}"
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(
        argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False
    )
    if done.returncode != 0 or "1 passed" not in done.stdout:
        raise Differs(done.stdout + done.stderr)
    return "a whole checkpoint after each (unit test of the saver)"

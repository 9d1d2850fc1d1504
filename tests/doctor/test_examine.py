"""Checks of a login node that need no Slurm: directories, dataset, Python; and their time limit."""

import dataclasses
import os
import resource
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterddp.doctor import examine
from clusterddp.doctor.examine import dataset, python, runs_directory
from clusterddp.doctor.site_checks import ERROR, OK, WARNING
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from tests.waiting import has_gone


def spec(folder: Path, **fields: object) -> JobSpec:
    fields = {"train": TrainConfig(dataset="synthetic", data_dir=str(folder / "data")), **fields}
    run_dir = str(folder / "jobs" / "doctor")
    return JobSpec("doctor", run_dir, Resources(), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("free", "inodes", "counted", "kind", "result", "words"),
    [
        (2**40, 10**6, 10**7, "nfs4", OK, "1,024.0 GiB, 1,000,000 inodes"),
        (2**40, 0, 0, "lustre", OK, "inodes not counted"),
        (2**32, 10**6, 10**7, "nfs4", WARNING, "free disk space"),
        (2**40, 5_000, 10**7, "nfs4", WARNING, "free disk space"),
        (2**20, 10**6, 10**7, "nfs4", ERROR, "too little"),
        (2**40, 10, 10**7, "nfs4", ERROR, "too little"),
        (2**40, 10**6, 10**7, "ext4", WARNING, "ext4 is usually local to one machine"),
        (2**40, 10**6, 10**7, "strangefs", WARNING, "strangefs is an unknown file system"),
    ],
)
def test_the_runs_directory_is_judged_by_its_room_and_by_who_shares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    free: int, inodes: int, counted: int, kind: str, result: str, words: str,
) -> None:  # fmt: skip
    room = SimpleNamespace(f_bavail=free, f_frsize=1, f_files=counted, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    monkeypatch.setattr(examine, "file_system_type", lambda *_: kind)
    check = runs_directory(str(tmp_path / "runs" / "doctor"), must_share=True)
    assert check.result == result
    assert words in f"{check.found} {check.advice}"
    assert check.facts["free_bytes"] == free and check.facts["exists"] is False
    assert bool(check.advice) == (result != OK)
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_slurm_a_local_folder_is_no_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "LOW_BYTES", 0)
    monkeypatch.setattr(examine, "LOW_INODES", 0)
    monkeypatch.setattr(examine, "file_system_type", lambda *_: "ext4")
    assert runs_directory(str(tmp_path / "doctor"), must_share=False).result == OK


def test_an_runs_dir_that_is_a_file_is_bad(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("")
    check = runs_directory(str(tmp_path / "jobs" / "doctor"), must_share=False)
    assert check.result == ERROR and "cannot be written" in check.found


def test_a_dataset_is_whole_missing_or_damaged(tmp_path: Path, synthetic_dir: Path) -> None:
    whole = TrainConfig(dataset="synthetic", data_dir=str(synthetic_dir))
    assert dataset(spec(tmp_path, train=whole), must_share=False).result == OK
    made = dataset(spec(tmp_path), must_share=False)
    assert made.result == OK and "the submission generates it" in made.found
    real = TrainConfig(data_dir=str(tmp_path / "data"))
    missing = dataset(spec(tmp_path, train=real), must_share=False)
    assert missing.result == WARNING and "clusterddp data fetch" in missing.advice
    raw = tmp_path / "data" / "synthetic" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for path in (synthetic_dir / "synthetic" / "MNIST" / "raw").iterdir():
        content = bytearray(path.read_bytes())
        content[-1] ^= path.name.startswith("train-images")
        (raw / path.name).write_bytes(content)
    damaged = dataset(spec(tmp_path), must_share=False)
    assert damaged.result == ERROR and "SHA-256" in damaged.found


def program(folder: Path, body: str) -> str:
    """An interpreter that answers as the body says."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def answer(version: str = "3.12.1", cuda: str = '"13.0"') -> str:
    return (
        f'echo a remark; echo \'{{"python": "{version}", "torch": "2.9", "cuda": {cuda}, '
        '"hip": null, "nccl": ""}\''
    )


@pytest.mark.parametrize(
    ("body", "result", "words"),
    [
        (answer(), OK, "Python 3.12.1, torch 2.9, CUDA 13.0, imported in"),
        (answer(cuda="null"), OK, "no CUDA"),
        (answer(version="3.9.2"), ERROR, "the tasks need Python 3.10"),
        ("echo 'ModuleNotFoundError: no torch' >&2; exit 1", ERROR, "no torch"),
        ("exit 3", ERROR, "exit code 3"),
        ("echo '{}'", ERROR, "does not import torch"),
        ("echo 7", ERROR, "does not import torch"),
    ],
)
def test_the_python_is_judged_by_what_it_answers(
    tmp_path: Path, body: str, result: str, words: str
) -> None:
    check = python(spec(tmp_path, python=program(tmp_path, body)))
    assert check.result == result and words in check.found
    assert bool(check.advice) == (result != OK)


def test_a_python_that_is_not_there_is_bad_unless_the_jobs_modules_may_bring_it(
    tmp_path: Path,
) -> None:
    gone = spec(tmp_path, python=str(tmp_path / "gone"))
    assert python(gone).result == ERROR
    assert python(dataclasses.replace(gone, modules=("torch",))).result == WARNING
    assert python(dataclasses.replace(gone, wrapper=("env",))).result == WARNING


def test_this_python_imports_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "IMPORT_SECONDS", 240.0)  # on a busy machine
    check = python(spec(tmp_path, python=sys.executable))
    assert check.facts["torch"] and check.result in (OK, WARNING)


def test_an_import_that_hangs_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "IMPORT_SECONDS", 0.5)
    pid = tmp_path / "pid"
    check = python(spec(tmp_path, python=program(tmp_path, f"sleep 600 & echo $! >{pid}; wait")))
    assert check.result == WARNING and "within 0.5s" in check.found
    if pid.exists():  # on a busy machine it was killed before
        assert has_gone(int(pid.read_text()))


def test_limits_too_low_for_the_jobs_ranks_or_its_gpus_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = {resource.RLIMIT_NOFILE: (256, 4096), resource.RLIMIT_MEMLOCK: (8 << 20, -1)}
    monkeypatch.setattr(resource, "getrlimit", allowed.__getitem__)

    def limits(**asked: int) -> examine.Check:
        return examine.process_limits(
            dataclasses.replace(spec(tmp_path), resources=Resources(**asked))
        )

    assert limits().result == OK and "4,096" in limits().found
    many = limits(nodes=512, tasks_per_node=4)
    assert many.result == WARNING and "2,048 ranks may need 4,296" in many.found and many.advice
    gpus = limits(gpus_per_node=1)
    assert gpus.result == WARNING and "8,192 KiB of locked memory (ulimit -l)" in gpus.found


def test_a_check_that_hangs_costs_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(examine, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(examine, "runs_directory", lambda *_, **__: released.wait(600))
    monkeypatch.setattr(examine, "python", lambda _: examine.Check("python", OK, "here"))
    try:
        diagnosis = examine.examine(spec(tmp_path))
    finally:
        released.set()
    results = {check.name: check.result for check in diagnosis.checks}
    assert results["runs directory"] == ERROR and results["slurm"] == WARNING
    assert diagnosis.result == ERROR and "python" in results

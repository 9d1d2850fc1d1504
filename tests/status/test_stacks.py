"""Equal stacks are told once; what hosts answer comes whole or not at all."""

import base64
import os
import random
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import RequestError, SlurmError
from clusterddp.files import write_record
from clusterddp.processes.stacks import Frame, Program, Thread
from clusterddp.processes.table import start_ticks
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from clusterddp.status import stacks
from clusterddp.status.stacks import (
    RankStacks,
    code_locations,
    decode_lines,
    encode_lines,
    format_stacks,
    gather,
)
from tests.data.made_sets import NOBODY
from tests.event_lines import add_event
from tests.waiting import wait_for

LIBRARY = "/opt/venv/lib/python3.11/site-packages"
TORCH = f"{LIBRARY}/torch"
MAIN = Frame("main", "/home/me/train.py", 41)
REDUCES = (Frame("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 2810), MAIN)
LOADS = (
    Frame("select", "/usr/lib/python3.11/selectors.py", 415),
    Frame("get", "/usr/lib/python3.11/multiprocessing/queues.py", 113),
    Frame("_try_get_data", f"{TORCH}/utils/data/dataloader.py", 1293),
    Frame("__next__", f"{TORCH}/utils/data/dataloader.py", 725),
    Frame("main", "/home/me/train.py", 40),
)


def at(rank: int, frames: tuple[Frame, ...] = REDUCES, host: str = "gpu01") -> RankStacks:
    program = Program(100 + rank, "python train.py", (Thread("MainThread", frames),), "py-spy")
    return RankStacks(rank, host, (program,))


def test_the_most_frequent_stack_is_told_once_and_the_odd_rank_is_named() -> None:
    found = [at(17, LOADS, "gpu03"), *(at(rank) for rank in range(64) if rank not in (17, 30, 31))]
    found += [RankStacks(30, "gpu04", note="its host has not answered")]
    found += [RankStacks(31, "gpu04", note="its host has not answered")]
    assert format_stacks(found).splitlines() == [
        "61 of 64 (ranks 0-16, 18-29, 32-63) in all_reduce "
        "(torch/distributed/distributed_c10d.py:2810), called from main (train.py:41) (py-spy)",
        '  File "/home/me/train.py", line 41, in main',
        f'  File "{TORCH}/distributed/distributed_c10d.py", line 2810, in all_reduce',
        "2 of 64 (ranks 30-31): its host has not answered",
        "rank 17 on gpu03 in DataLoader (torch/utils/data/dataloader.py:1293), called from main "
        "(train.py:40) (py-spy)",
        '  File "/home/me/train.py", line 40, in main',
        f'  File "{TORCH}/utils/data/dataloader.py", line 725, in __next__',
        f'  File "{TORCH}/utils/data/dataloader.py", line 1293, in _try_get_data',
        '  File "/usr/lib/python3.11/multiprocessing/queues.py", line 113, in get',
        '  File "/usr/lib/python3.11/selectors.py", line 415, in select',
    ]
    assert [len(ranks) for _, ranks in code_locations(found)] == [61, 1]


def test_all_in_one_place_are_all() -> None:
    assert format_stacks([at(0), at(1)]).startswith("all 2 (ranks 0-1) in all_reduce")


def test_ranks_are_grouped_by_their_whole_stack_whatever_their_host() -> None:
    elsewhere = (REDUCES[0], Frame("main", "/home/me/train.py", 44))
    found = [at(0, host="gpu01"), at(1, elsewhere, "gpu01"), at(2, host="gpu02")]
    lines = format_stacks(found).splitlines()
    assert lines[0].startswith("2 of 3 (ranks 0, 2) in all_reduce")
    assert lines[3].startswith("rank 1 on gpu01 in all_reduce")
    assert lines[3].endswith("called from main (train.py:44) (py-spy)")


def test_the_import_systems_own_calls_are_left_out() -> None:
    frames = (
        Frame("fit", "/home/me/model.py", 3), Frame("_load", "<frozen importlib._b>", 9), MAIN,
    )  # fmt: skip
    assert "frozen" not in format_stacks([at(0, frames)])


def test_a_rank_is_told_whole_with_every_thread_and_process() -> None:
    threads = (Thread("MainThread", REDUCES), Thread("reader", LOADS))
    found = RankStacks(
        2,
        "gpu01",
        (
            Program(7, "python train.py --text a\nb " + 99 * "x", threads, "py-spy"),
            Program(8, "python train.py", note="no py-spy on its PATH"),
        ),
    )
    told = format_stacks([found], whole=True).splitlines()
    words = "python train.py --text a b " + 53 * "x"
    assert told[0] == f"rank 2 on gpu01, process 7, {words}… (py-spy):"
    assert " MainThread (most recent call last):" in told
    assert " reader (most recent call last):" in told
    assert told[-1] == "rank 2 on gpu01, process 8: no py-spy on its PATH"
    assert not found.is_known


def test_the_ranks_of_an_agent_are_told_by_their_own_numbers() -> None:
    thread = (Thread("MainThread", REDUCES),)
    inner = [Program(rank, "python t.py", thread, "handler", rank=rank) for rank in (2, 3)]
    assert format_stacks([RankStacks(1, "h02", tuple(inner))]).startswith("all 2 (ranks 2-3)")


def test_what_a_program_is_called_moves_no_terminals_cursor() -> None:
    evil = Frame("\x1b[2J\x1b]0;owned\x07", "/tmp/\u202egnp.py", 1)
    for text in (format_stacks([at(0, (evil,))]), format_stacks([at(0, (evil,))], whole=True)):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_answers_come_through_whatever_order_their_lines_have() -> None:
    deep = tuple(Frame(f"f{n}", f"/home/me/é{random.random()}.py", n) for n in range(150))
    one, other = [at(0, deep)], [at(4, deep, "gpu02"), RankStacks(5, "gpu02", note="gone")]
    lines = [[*encode_lines(one, "gpu01")], [*encode_lines(other, "gpu02")]]
    assert all(len(line) < 1000 for each in lines for line in each)  # srun passes these on whole
    mixed = ["Loading a module ...", "clusterddp-stacks x"]
    while any(lines):
        mixed.append(random.choice([each for each in lines if each]).pop(0))
    assert sorted(decode_lines("\n".join(mixed)), key=lambda each: each.rank) == one + other


@pytest.mark.parametrize("damage", [slice(0, -1), slice(1, None), slice(1, 2)])
def test_a_torn_answer_is_none(damage: slice) -> None:
    deep = tuple(Frame(f"f{n}", f"/home/me/{random.random()}.py", n) for n in range(150))
    lines = [*encode_lines([at(0, deep)], "gpu01")]
    assert len(lines) > 2
    whole = [*encode_lines([at(1, host="gpu02")], "gpu02")]
    assert decode_lines("\n".join([*lines[damage], *whole])) == [at(1, host="gpu02")]


HOSTILE = [
    "", "clusterddp-stacks h eJwDAAAAAAE=", "clusterddp-stacks h .",
    f"clusterddp-stacks h {base64.b64encode(zlib.compress(b'7')).decode()}",
    f"clusterddp-stacks h {base64.b64encode(zlib.compress(b'[7, {}, null]')).decode()}",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_nonsense_is_no_answer(text: str) -> None:
    assert decode_lines(text) == []


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "jobs/a")
    Attempt(made, 1).outcomes.mkdir(parents=True)
    return made


def record(run: RunDir, rank: int, **fields: object) -> None:
    process = {"pid": os.getpid(), "ticks": start_ticks(os.getpid())}
    write_record(
        Attempt(run, 1).outcomes / f"rank-{rank}.json",
        {
            **{"rank": rank, "local_rank": rank, "node_rank": 0, "host": os.uname().nodename},
            **{"job_id": "", "restart": 0, "step_id": "", "started": 1.0, **process, **fields},
        },
    )


def test_ranks_that_are_not_at_work_say_why(run: RunDir) -> None:
    record(run, 0, ticks=1)
    record(run, 1, ended=2.0, exit_code=3)
    record(run, 2, ended=2.0, exit_code=0)
    record(run, 3, ticks=None)
    record(run, 4, host="elsewhere")
    notes = {each.rank: each.note for each in gather(run, world_size=6)}
    assert notes == {
        0: "its process has ended",
        1: "has ended: exit code 3",
        2: "has ended: exit code 0 before the others were done",
        3: "its record was written by an older clusterddp and does not name its process",
        4: "runs on elsewhere: try there",
        5: "has no record yet",
    }


def test_a_rank_of_a_rehearsal_that_has_ended_is_told_once(run: RunDir) -> None:
    host = os.uname().nodename
    add_event(run, "submitted", job_id="7", launcher="local", pid=os.getpid(), host=host)
    record(run, 0, ticks=1, job_id="7")
    record(run, 1, ended=2.0, exit_code=3, job_id="7")
    assert gather(run) == [
        RankStacks(0, host, note="its process has ended"),
        RankStacks(1, host, note="has ended: exit code 3"),
    ]


def test_only_the_ranks_that_are_asked_for_are_looked_at(run: RunDir) -> None:
    for rank in range(3):
        record(run, rank, ticks=1)
    assert [each.rank for each in gather(run, [1], world_size=3)] == [1]


def test_another_users_run_is_refused(run: RunDir) -> None:
    if os.geteuid():
        pytest.skip("another user's directory takes root")
    os.chown(run.path, NOBODY, NOBODY)
    with pytest.raises(RequestError, match="belongs to another user"):
        gather(run)


def fake_srun(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder.mkdir()
    (folder / "srun").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_slurms_own_words_are_passed_on_where_no_host_answers(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_srun(tmp_path / "bin", monkeypatch, "echo 'srun: error: Job 7 has expired' >&2; exit 1")
    record(run, 0, job_id="7", host="h01", python="/usr/bin/python3")
    with pytest.raises(SlurmError, match=r"no host of job 7 .* Job 7 has expired"):
        gather(run)


def test_a_host_that_does_not_answer_in_time_costs_its_own_ranks_alone(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def later(srun: "subprocess.Popen[str]") -> tuple[str, str]:
        wait_for((tmp_path / "shown").exists, "the answer of the other host")
        return communicate(srun)

    communicate = stacks._communicate
    monkeypatch.setattr(stacks, "_communicate", later)
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.05)
    (tmp_path / "answer").write_text("\n".join(encode_lines([at(0, host="h01")], "h01")))
    script = f"cat {tmp_path}/answer\n: >{tmp_path}/shown\nexec sleep 1000"
    fake_srun(tmp_path / "bin", monkeypatch, script)
    for rank in range(2):
        record(run, rank, job_id="7", host=f"h0{rank + 1}", python="/usr/bin/python3")
    found = gather(run)
    assert found == [at(0, host="h01"), RankStacks(1, "h02", note="its host has not answered")]


def test_it_asks_by_a_step_that_takes_nothing_from_the_job(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "99")  # of the shell in which it is typed
    lines = "\n".join(encode_lines([at(0, host="h01")], "h01"))
    fake_srun(
        tmp_path / "bin", monkeypatch,
        f"echo \"$@\" > {tmp_path}/asked; env > {tmp_path}/env; echo '{lines}'",
    )  # fmt: skip
    record(run, 0, job_id="7", host="h01", python="/opt/python")
    record(run, 1, job_id="7", host="h02", python="/opt/python")
    gather(run, [0, 1], workers=True)
    asked = (tmp_path / "asked").read_text().split()
    step = ["--jobid=7", "--overlap", "--nodelist=h01,h02", "--nodes=2", "--ntasks=2"]
    assert asked[:5] == step
    assert {"--mem=0", "--gres=none", "--kill-on-bad-exit=0"} <= {*asked}
    tail = ["stacks", "--here", str(run.path), "--workers", "--rank=0", "--rank=1"]
    assert asked[-9:] == ["/opt/python", "-m", "clusterddp", *tail]
    assert "SLURM_JOB_ID" not in (tmp_path / "env").read_text()


@pytest.mark.parametrize("asked", [{"container_image": "torch.sif"}, {"wrapper": ("spack",)}])
def test_ranks_of_an_image_are_looked_at_by_their_hosts_python(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    spec = JobSpec(
        run_name="a", run_dir=str(run.path), resources=Resources(), python="/image/python",
        controller_python="/usr/bin/python3", command=("train",), **asked,
    )  # fmt: skip
    run.spec.write_text(spec.to_json())
    run.bundle.touch()
    lines = "\n".join(encode_lines([at(0, host="h01")], "h01"))
    fake_srun(tmp_path / "bin", monkeypatch, f"echo \"$@\" > {tmp_path}/asked; echo '{lines}'")
    record(run, 0, job_id="7", host="h01", python="/image/python")
    gather(run)
    words = (tmp_path / "asked").read_text().split()
    assert "/image/python" not in words
    at_python = words.index("/usr/bin/python3")
    assert words[at_python + 1 : at_python + 3] == [str(run.bundle), "stacks"]

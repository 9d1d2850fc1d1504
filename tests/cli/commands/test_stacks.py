"""`clusterddp stacks`, on rehearsals of two hosts: their ranks go on to their end."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from clusterddp.processes.stacks import Frame, Program, Thread
from clusterddp.processes.table import read_process
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import read_outcomes
from clusterddp.run.run_dir import RunDir
from clusterddp.status import stacks
from clusterddp.status.stacks import RankStacks
from tests.cli.made_runs import Workplace, ended, started, submitted, workplace
from tests.waiting import dying_with_us, wait_for

__all__ = ["workplace"]

CLUSTERDDP = [sys.executable, "-m", "clusterddp"]
PACKAGE = Path(__file__).parents[3]
HOOKS = PACKAGE / "tests/on_slurm/campaign/hooks"
# Rank 1 is elsewhere than the others. All go on once somebody writes to the pipe `go`.
SCRIPT = """\
import os, pathlib
def waits():
    open("go")
def loads():
    open("go")
pathlib.Path(f"up-{os.environ['RANK']}").touch()
(loads if os.environ["RANK"] == "1" else waits)()
"""
SHELL = ["bash", "-c", "touch up-$RANK; : <go"]
# Half an hour of silence passes once there is a file `quiet`.
JUMPS = """\
import pathlib
from clusterddp import polling
plain = polling.pause
def pause(seconds):
    while seconds == 30 and not pathlib.Path({quiet!r}).exists():
        plain(0.02)
    if seconds != 30:
        plain(seconds)
polling.pause = pause
"""


class Rehearsal:
    """A run of four ranks on two hosts, in a directory of its own."""

    def __init__(self, folder: Path, options: Sequence[str], env: dict[str, str]) -> None:
        self.folder, self.run = folder, RunDir(folder / "jobs/a")
        os.mkfifo(folder / "go")
        self.submit = subprocess.Popen(
            [*CLUSTERDDP, "submit", "--launcher", "local", "--nodes", "2", "--tasks-per-node", "2",
             "--run-name", "a", *options],
            cwd=folder, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads
        )  # fmt: skip

    def stacks(self, *options: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*CLUSTERDDP, "stacks", "a", *options],
            cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def is_up(self) -> bool:
        """Whether all ranks wait for somebody to write."""
        records = read_outcomes(Attempt(self.run, 1).outcomes)
        asleep = [p for r in records if (p := read_process(r.pid)) and p.state == "S"]
        return len(list(self.folder.glob("up-*"))) == len(asleep) == 4

    def ends_well(self) -> None:
        writer = os.open(self.folder / "go", os.O_RDWR)
        said, _ = self.submit.communicate()
        os.close(writer)
        assert self.submit.returncode == 0, said


Begin = Callable[..., Rehearsal]


@pytest.fixture
def rehearse(tmp_path: Path) -> Iterator[Begin]:
    begun = []

    def begin(*options: str, env: dict[str, str] | None = None) -> Rehearsal:
        begun.append(Rehearsal(tmp_path, options, {**os.environ, **(env or {})}))
        return begun[-1]

    yield begin
    for rehearsal in begun:
        with rehearsal.submit:
            rehearsal.submit.terminate()


def test_each_rank_of_a_command_is_shown_and_goes_on(rehearse: Begin, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = rehearse("--no-snapshot", "--", sys.executable, "train.py")
    wait_for(run.is_up, "all ranks")
    told = run.stacks()
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert lines[0] == "a: 4 ranks on 2 hosts"
    assert lines[1].startswith("3 of 4 (ranks 0, 2-3) in waits (train.py:3), called from")
    assert any(line.startswith("rank 1 on 127.0.0.1 in loads (train.py:5)") for line in lines)
    assert told.stdout.count("line 3, in waits") == 1
    [rank] = json.loads(run.stacks("--rank", "1", "--json").stdout)
    assert (rank["rank"], rank["host"]) == (1, "127.0.0.1")
    assert [frame["function"] for frame in rank["programs"][0]["threads"][0]["frames"]] == [
        "loads", "<module>",
    ]  # fmt: skip
    assert "rank 1 on 127.0.0.1, process" in run.stacks("--rank", "1").stdout
    wrong = run.stacks("--rank", "4")
    assert wrong.returncode == 2
    assert "has ranks 0 to 3." in wrong.stderr
    run.ends_well()


def test_a_command_without_stacks_says_why_and_goes_on(rehearse: Begin) -> None:
    run = rehearse("--no-snapshot", "--", *SHELL)
    wait_for(run.is_up, "all ranks")
    told = run.stacks()
    assert told.returncode == 1
    assert "no Python in it (bash" in told.stdout
    run.ends_well()


def test_our_own_training_always_shows_its_stacks(
    rehearse: Begin, tmp_path: Path, synthetic_dir: Path
) -> None:
    holds = tmp_path / "holds"
    holds.mkdir()
    (holds / "want-step-3").touch()
    hooks = {"PYTHONPATH": f"{HOOKS}:{PACKAGE}", "CAMPAIGN_HOLDS": str(holds)}
    run = rehearse(
        "--nodes", "1", "--dataset", "synthetic", "--data-dir", str(synthetic_dir),
        "--threads", "1", "--max-steps", "5", "--batch-size", "32", env=hooks,
    )  # fmt: skip
    wait_for(lambda: len(list(holds.glob("held-step-3.*"))) == 2, "step 3")
    told = run.stacks("--json")
    (holds / "want-step-3").unlink()
    assert told.returncode == 0, told.stdout + told.stderr
    programs = [rank["programs"][0] for rank in json.loads(told.stdout)]
    assert [program["how"] for program in programs] == ["handler"] * 2
    for program in programs:
        functions = {frame["function"] for frame in program["threads"][0]["frames"]}
        assert {"hold", "step", "run_task"} <= functions
    run.ends_well()


def test_a_silent_command_has_its_stacks_in_the_jobs_log(rehearse: Begin, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    hooks, quiet = tmp_path / "hooks", tmp_path / "quiet"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(JUMPS.format(quiet=str(quiet)))
    run = rehearse(
        "--no-snapshot", "--", sys.executable, "train.py",
        env={"PYTHONPATH": f"{hooks}:{PACKAGE}"},
    )  # fmt: skip
    wait_for(run.is_up, "all ranks")
    quiet.touch()
    last = "--on-hang end"  # is in the last line
    wait_for(lambda: last in run.run.job_log.read_text(), last)
    log = run.run.job_log.read_text()
    assert log.count("no rank has printed anything for 30m") == 1
    assert "3 of 4 (ranks 0, 2-3) in waits" in log
    assert "rank 1 on 127.0.0.1 in loads" in log
    run.ends_well()


def test_a_run_that_does_not_run_has_no_stacks(workplace: Workplace) -> None:
    workplace.run("one", submitted("12"), started("12"), ended("12", 0, cause="done"))
    told = workplace.invoke("stacks", "one")
    assert told.code == 2
    assert "one is not running but done" in told.err
    assert "clusterddp logs one" in told.err


def test_a_run_that_waits_has_no_stacks_yet(workplace: Workplace) -> None:
    workplace.command("squeue", "echo '12|PENDING|Resources'")
    workplace.run("one", submitted("12"))
    told = workplace.invoke("stacks", "one")
    assert told.code == 2
    assert "one is not running but queued" in told.err
    assert "Try again when it is running" in told.err
    assert "clusterddp logs" not in told.err


@pytest.mark.parametrize("other", [Program(7, "sh", note="no Python in it (sh)"), None])
def test_one_rank_whose_stack_is_not_known_is_told_by_the_exit_code(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, other: Program | None
) -> None:
    known = Program(6, "python", (Thread("MainThread", (Frame("f", "/a.py", 1),)),), "handler")
    found = [RankStacks(0, "h01", (known,)), RankStacks(1, "h01", (other,) if other else ())]
    monkeypatch.setattr(stacks, "gather", lambda *_, **__: found)
    workplace.run("one", submitted("12", launcher="local", pid=os.getpid()), started("12"))
    told = workplace.invoke("stacks", "one")
    assert told.code == 1, told.err
    assert "rank 0 on h01 in f (a.py:1)" in told.out


def test_a_run_of_another_machine_is_looked_at_there(workplace: Workplace) -> None:
    workplace.run("one", submitted("12", launcher="local", pid=1, host="elsewhere"), started("12"))
    told = workplace.invoke("stacks", "one")
    assert told.code == 2
    assert "one runs on elsewhere: run this command there" in told.err

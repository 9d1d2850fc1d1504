"""The controller of an attempt, behind the very script, with a stand-in for srun."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clusterddp.batch import controller, step_watch
from clusterddp.launchers import sbatch
from clusterddp.ranks.dist_env import MAX_PORT, MIN_PORT, master_port
from clusterddp.request.resources import Resources
from clusterddp.run import preflight
from clusterddp.run.attempt import Attempt
from clusterddp.run.history import History
from clusterddp.run.records import PreflightRecord
from clusterddp.run.run_dir import RunDir
from clusterddp.status.status import run_status
from clusterddp.submission import bundle
from clusterddp.version import __version__
from tests.event_lines import read_events
from tests.request.test_spec import spec
from tests.waiting import has_gone, wait_for

# What the script starts in place of srun. USR1 ends it with 75, as it does a step that has saved.
STEP = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
names = (word for word in sys.argv[1:] if word[0] != "-")
print("step with", *(f"{name}={os.environ.get(name)}" for name in names), flush=True)
open("up", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
"""


class Job:
    """A batch script of this user's, started as slurmd starts it."""

    def __init__(self, folder: Path, script: str, environ: dict[str, str]) -> None:
        self.folder, self.run = folder, RunDir(folder / "jobs/a")
        (folder / "step.py").write_text(STEP)
        (folder / "script").write_text(script)
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(
                ["bash", "script"],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={
                    **os.environ,
                    "SLURM_JOB_ID": "17",
                    "SLURM_JOB_NODELIST": "h01",
                    "SLURM_SUBMIT_DIR": str(folder),
                    "CLUSTERDDP_LOCAL_STEPS": str(folder),  # no Slurm is there to be asked
                    **environ,
                },
            )

    @property
    def out(self) -> Path:
        return self.folder / "slurm-17.out"

    @property
    def log(self) -> str:
        return self.run.job_log.read_text() if self.run.job_log.exists() else ""

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait for its end; it is reaped once its group is killed, whose number is its own then."""
        assert has_gone(self.process.pid), "the script has not ended"
        end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def ended(self) -> dict[str, Any]:
        (event,) = [event for event in read_events(self.run) if event["event"] == "ended"]
        return event


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = []

    def start(
        *words: str, environ: dict[str, str] | None = None, python: str = sys.executable,
        change: Callable[[str], str] = lambda script: script, line: str = "{}", **fields: Any,
    ) -> Job:  # fmt: skip
        pythons = {"python": python, "controller_python": python}
        request = spec(run_name="a", run_dir=str(tmp_path / "jobs/a"), **fields, **pythons)
        script = change(sbatch.render(request).partition("\nsrun ")[0])
        words = words or (sys.executable, "step.py")
        if "step.py" in words:  # by its words the controller knows what starts the tasks
            words = (*words, f"--run-dir={request.run_dir}")
        step = shlex.join(words)
        jobs.append(Job(tmp_path, f"{script}\n{line.format(step)}\n", environ or {}))
        return jobs[-1]

    yield start
    for each in jobs:
        with suppress(ProcessLookupError):  # none of its processes is left
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait()


COMMAND = {"command": ("true",), "train": None}
A_TASK = {
    **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID"), "0"),
    **dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), "1"),
    "SLURM_STEP_NODELIST": "h01",
}
"""Variables of the one task of a step; a batch script has them only where a test says so."""


class Heard(controller.Signals):
    """Signals that a test sends."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.were_blocked = True

    def wait(self, seconds: float | None) -> None:
        pass

    def take(self) -> list[str]:
        taken, self.names = self.names, []
        return taken


class NoOutput(controller.ScriptOutput):
    """Output of a script that prints nothing."""

    def __init__(self) -> None:
        self._file = None


def test_the_step_gets_its_port_its_attempt_and_a_nonce(job: Callable[..., Job]) -> None:
    names = ("MASTER_PORT", "CLUSTERDDP_ATTEMPT", "CLUSTERDDP_NONCE", "RANK")
    started = job(sys.executable, "step.py", *names, environ={"RANK": "7"}, **COMMAND)
    (started.folder / "go").touch()
    started.end()
    (line,) = [line for line in started.log.splitlines() if line.startswith("step with")]
    port, attempt, nonce, rank = line.split()[2:]
    assert port == f"MASTER_PORT={master_port(17, 0, 0)}"
    assert attempt == "CLUSTERDDP_ATTEMPT=1"
    assert len(nonce) == len("CLUSTERDDP_NONCE=") + 32
    assert rank == "RANK=None"
    assert not started.out.exists()


def test_a_port_where_somebody_listens_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(*ports: int) -> str:
        return "head\n" + "".join(
            f" 0: 00000000:{p:04X} 00000000:0000 0A 0:0 0:0 0 0 0 77 more\n" for p in ports
        )

    for taken in range(3):
        ports = [master_port(7, 0, 3, candidate) for candidate in range(taken)]
        tables = {"/proc/net/tcp": lines(*ports[:1]), "/proc/net/tcp6": lines(*ports[1:])}
        monkeypatch.setattr(Path, "read_text", lambda path, tables=tables: tables[str(path)])
        assert controller.free_master_port(7, 3) == master_port(7, 0, 3, taken)


def test_preflight_takes_no_port_that_the_ranks_of_a_job_can_take() -> None:
    for_ranks = {master_port(7, start, 3, n) for start in range(9) for n in range(5)}
    for start in range(9):
        ports = controller.preflight_ports(7, 3, start)
        assert all(MIN_PORT <= port <= MAX_PORT for port in ports)
        assert for_ranks.isdisjoint(ports)


@pytest.mark.parametrize("line", ["exit 4", "(exit 4)", "sh -c 'exit 4'"])
def test_a_line_of_the_set_up_that_fails_has_a_verdict_and_a_tear_down(
    line: str, job: Callable[..., Job]
) -> None:
    started = job(
        setup=("unexported=here; echo early", line), teardown=('echo "tear $unexported"',)
    )
    assert started.end() == 4
    assert (started.ended()["cause"], started.ended()["exit_code"]) == ("failed", 4)
    assert started.log.index("\nearly\n") < started.log.index("\ntear here\n")
    assert not started.out.exists()


def test_a_set_up_that_ends_the_script_well_does_not_claim_that_tasks_ran(
    job: Callable[..., Job],
) -> None:
    started = job(setup=("exit 0",), **COMMAND)
    assert started.end() == 0
    assert "done: exit code 0; no task has recorded its end" in started.log


@pytest.mark.parametrize(
    ("lines", "words"),
    [(("false",), "its setup line: false"), (("x=1", "false"), "setup lines: x=1; false")],
)
def test_a_set_up_that_fails_is_named(
    job: Callable[..., Job], lines: tuple[str, ...], words: str
) -> None:
    started = job(setup=lines, **COMMAND)
    assert started.end() == 1
    assert f"the script ended with exit code 1 before it reached its step: {words}" in (
        started.log.replace("one of its ", "")
    )
    assert started.ended()["remark"] == "no task has started: ended with exit code 1"


def test_tear_down_lines_cannot_take_the_verdict_away(job: Callable[..., Job]) -> None:
    started = job(sys.executable, "-c", "raise SystemExit(3)", teardown=("echo last", "exit 9"))
    assert started.end() == 3
    assert "\nlast\n" in started.log
    assert started.ended()["exit_code"] == 3


def test_without_its_interpreter_the_reason_is_in_slurms_file_and_nothing_else_is_left(
    job: Callable[..., Job],
) -> None:
    started = job(python="/nowhere/python", teardown=("touch torn-down",))
    assert started.end() == 127
    assert re.search("/nowhere/python.*: No such file or directory", started.out.read_text())
    names = ["script", "slurm-17.out", "step.py"]
    assert sorted(path.name for path in started.folder.iterdir()) == names


def test_a_broken_interpreter_says_why_in_slurms_file(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no module named clusterddp' >&2\nexit 1\n")
    broken.chmod(0o755)
    started = job(python=str(broken))
    assert started.end() == 1
    assert started.out.read_text() == "no module named clusterddp\n"
    assert not started.run.path.exists()


def test_a_run_directory_that_cannot_be_made_is_named_in_slurms_file(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "jobs").write_text("")
    started = job()
    assert started.end() == controller.EXIT_NO_RUN
    assert "cannot create the run directory" in started.out.read_text()


def test_a_run_directory_that_is_gone_is_not_made_anew_for_a_later_start(
    job: Callable[..., Job],
) -> None:
    started = job(environ={"SLURM_RESTART_COUNT": "1"})
    assert started.end() == controller.EXIT_NO_RUN
    assert "is gone, so the run cannot resume" in started.out.read_text()
    assert not started.run.path.exists()


def test_the_outputs_of_both_attempts_lie_below_their_dividers(job: Callable[..., Job]) -> None:
    assert job("false", setup=("echo first",)).end() == 1
    second = job("false", setup=("echo second",), environ={"SLURM_RESTART_COUNT": "1"})
    second.end()
    text = second.log
    assert text.index("\nfirst\n") < text.index("--- attempt 2, job 17") < text.index("\nsecond\n")


def test_what_a_process_of_the_set_up_prints_later_is_kept(job: Callable[..., Job]) -> None:
    started = job(setup=("(while [ ! -e up ]; do sleep 0.02; done; echo late; touch go) &",))
    started.end()
    assert "\nlate\n" in started.log
    assert not started.out.exists()


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_a_training_is_asked_to_stop_by_a_mark_and_no_signal(
    name: str, job: Callable[..., Job]
) -> None:
    started = job()
    wait_for((started.folder / "up").exists, "the step")
    started.signal(getattr(signal, f"SIG{name}"))
    wait_for((started.run.path / "attempts/0001/stop").exists, "the mark")
    (started.folder / "go").touch()
    started.end()
    assert f"job 17 got SIG{name}, asking the ranks to stop" in started.log


def test_a_command_gets_the_signal_itself(job: Callable[..., Job]) -> None:
    started = job(**COMMAND)
    wait_for((started.folder / "up").exists, "the step")
    started.signal(signal.SIGUSR1)
    assert started.end() == 75
    assert started.ended()["cause"] == "signal"


def test_a_training_gets_the_signal_itself_where_no_mark_can_be_made(
    job: Callable[..., Job],
) -> None:
    """As on a disk that has turned read-only."""
    started = job()
    wait_for((started.folder / "up").exists, "the step")
    shutil.rmtree(started.run.path / "attempts/0001")
    started.signal(signal.SIGUSR1)
    assert started.end() == 75


WAIT = "touch reached; while [ ! -e on ]; do sleep 0.01; done"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("when", ["set-up", "interpreter"])
def test_a_signal_ahead_of_the_step_is_kept(
    when: str, number: int, job: Callable[..., Job], tmp_path: Path
) -> None:
    """A COMMAND that was asked before there was anything to stop does not start."""
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/bash\n{WAIT}\nexec {shlex.quote(sys.executable)} "$@"\n')
    slow.chmod(0o755)
    where: dict[str, Any] = {"python": str(slow)} if when == "interpreter" else {"setup": (WAIT,)}
    run_dir = f"--run-dir={tmp_path}/jobs/a"
    words = (sys.executable, "-m", "clusterddp", "exec", run_dir, "--", "touch", "started")
    started = job(*words, environ=A_TASK, **where, **COMMAND)
    wait_for((tmp_path / "reached").exists, "the moment")
    started.signal(number)
    started.signal(number)
    if when == "set-up":
        wait_for((started.run.path / "attempts/0001/stop").exists, "the mark")
    (tmp_path / "on").touch()
    assert started.end() == 75
    assert started.ended()["cause"] == "signal"
    assert "asking the ranks to stop" in started.log
    assert not (tmp_path / "started").exists()


def test_where_env_cannot_hold_signals_back_they_do_not_end_the_script(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """As in coreutils before 8.31."""
    real = shutil.which("env")
    old = tmp_path / "bin/env"
    old.parent.mkdir()
    refuse = "echo \"env: unrecognized option '$1'\" >&2; exit 125"
    old.write_text(f'#!/bin/sh\ncase $1 in --block*) {refuse};; esac\nexec {real} "$@"\n')
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/bash\n{WAIT}\nexec {shlex.quote(sys.executable)} "$@"\n')
    for program in (old, slow):
        program.chmod(0o755)
    path = {"PATH": f"{old.parent}:{os.environ['PATH']}"}
    started = job(python=str(slow), environ=path, **COMMAND)
    wait_for((tmp_path / "reached").exists, "the interpreter")
    started.signal(signal.SIGUSR1)  # nobody hears it
    (tmp_path / "on").touch()
    wait_for((started.folder / "up").exists, "the step")
    started.signal(signal.SIGUSR1)
    assert started.end() == 75
    assert "unrecognized" not in started.log
    assert not started.out.exists()


def test_a_signal_that_came_before_python_could_hear_it_counts_near_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 1:59\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(step_watch, "watch", lambda *_: None)
    for were_blocked, code in ((True, 3), (False, 75)):
        own, attempt = controller_of(tmp_path / str(were_blocked), monkeypatch, signal="B:USR1@120")
        own._signals.were_blocked = were_blocked
        assert own._start(attempt) == code


def test_the_lines_begin_with_no_signal_blocked_or_ignored(job: Callable[..., Job]) -> None:
    """Also where slurmd ignores some: a shell has what it starts by & ignore INT and QUIT."""
    ignored = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGPIPE, signal.SIGRTMIN)
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in ignored]
    try:
        started = job(setup=("grep -E 'Sig(Blk|Ign)' /proc/self/status >masks", "exit 4"))
    finally:
        for number, action in before:
            signal.signal(number, action)
    assert started.end() == 4
    lines = (started.folder / "masks").read_text().splitlines()
    assert [int(line.split()[1], 16) for line in lines] == [0, 0]


def test_a_job_that_was_submitted_from_inside_another_one_is_its_own(
    job: Callable[..., Job],
) -> None:
    started = job(setup=("exit 4",), environ={"CLUSTERDDP_BATCH": "16"})
    assert started.end() == 4
    assert started.ended()["exit_code"] == 4


def test_slurms_commands_are_found_where_they_were_at_submission(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """As on a site where a module brings them, which the set-up lines load."""
    slurm, path = tmp_path / "slurm", tmp_path / "path"
    for folder in (slurm, path):
        folder.mkdir()
    (slurm / "scontrol").write_text("#!/bin/sh\n")
    (slurm / "scontrol").chmod(0o755)
    for program in ("bash", "env"):
        (path / program).symlink_to(str(shutil.which(program)))
    fields = {"slurm_folder": str(slurm), "setup": ("command -v scontrol >found", "exit 4")}
    assert job(environ={"PATH": str(path)}, **fields).end() == 4
    assert (tmp_path / "found").read_text() == f"{slurm}/scontrol\n"


def test_a_set_up_line_may_start_an_srun_of_its_own_that_gets_no_signal(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/bash\ntrap 'touch hit' USR1\n" + WAIT + "\n")
    srun.chmod(0o755)
    started = job(setup=("./srun copy",), **COMMAND)
    wait_for((tmp_path / "reached").exists, "the set-up")
    started.signal(signal.SIGUSR1)
    wait_for((started.run.path / "attempts/0001/stop").exists, "the mark")
    (tmp_path / "on").touch()
    assert started.end() == 75  # of the step, which listens
    assert not (tmp_path / "hit").exists()


def test_a_term_does_not_end_the_script_before_its_verdict(job: Callable[..., Job]) -> None:
    started = job(teardown=("touch tearing; while [ ! -e on ]; do sleep 0.01; done",))
    wait_for((started.folder / "up").exists, "the step")
    started.signal(signal.SIGTERM)  # to the tasks it is Slurm that sends it
    wait_for(lambda: "got SIGTERM" in started.log, "the word of it")
    (started.folder / "go").touch()
    wait_for((started.folder / "tearing").exists, "the tear-down")
    os.killpg(started.process.pid, signal.SIGTERM)  # every process of the batch step
    (started.folder / "on").touch()
    started.end()
    assert started.ended()["attempt"] == 1


def test_a_killed_controller_takes_its_lines_along_and_leaves_the_verdict_to_the_next_start(
    job: Callable[..., Job],
) -> None:
    started = job(teardown=("touch torn",))
    wait_for((started.folder / "up").exists, "the step")
    (lines,) = children(started.process.pid)
    started.signal(signal.SIGKILL)  # Slurm then ends the step
    assert started.end() == -signal.SIGKILL
    assert has_gone(lines)
    assert not (started.folder / "torn").exists()
    assert [event["event"] for event in read_events(started.run)] == ["started"]


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.mark.parametrize("name", ["HUP", "INT"])
def test_a_hang_up_asks_the_ranks_to_save_and_leave_as_a_stop_does(
    name: str, job: Callable[..., Job]
) -> None:
    started = job(teardown=("echo torn",), **COMMAND)
    wait_for((started.folder / "up").exists, "the step")
    started.signal(getattr(signal, f"SIG{name}"))
    assert started.end() == 75
    assert (started.ended()["exit_code"], started.ended()["cause"]) == (75, "stopped")
    assert f"job 17 got SIG{name}, asking the ranks to stop" in started.log
    assert "\ntorn\n" in started.log
    assert Attempt(started.run, 1).stop_reason() == "stop"
    status = run_status(started.run, {})
    assert (status.state, status.detail) == ("stopped", f"by SIG{name} to its batch script")


@pytest.mark.parametrize(("line", "code"), [("{} | cat", 3), ("({})", 3)])
def test_an_own_template_that_starts_its_tasks_in_a_subshell_has_one_attempt(
    line: str, code: int, job: Callable[..., Job]
) -> None:
    tear = ("echo torn >>tears",)
    started = job(sys.executable, "-c", "raise SystemExit(3)", line=line, teardown=tear)
    assert started.end() == code
    assert (started.folder / "tears").read_text() == "torn\n"
    assert [event["event"] for event in read_events(started.run)] == ["started", "ended"]


def test_an_own_template_that_starts_its_tasks_in_the_background_does_not_end_well(
    job: Callable[..., Job],
) -> None:
    assert job(line="{} & until [ -e up ]; do sleep 0.01; done").end() == 1


@pytest.mark.parametrize("more", [{}, {"POSIXLY_CORRECT": "1"}])
def test_where_the_folder_of_submission_takes_nothing_the_log_has_the_lines_of_the_set_up(
    more: dict[str, str], job: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "jobs/a/logs").mkdir(parents=True)
    started = job(setup=("echo early", "exit 4"), environ={"SLURM_SUBMIT_DIR": "/nowhere", **more})
    assert started.end() == 4
    assert "early\n" in started.log


def test_a_set_up_line_keeps_its_descriptors_and_its_names(job: Callable[..., Job]) -> None:
    lines = ("exec 3>three 4>four", "batch=64 from=/data to=four script=a answer=5 own=6", "set -x")
    started = job(
        sys.executable, "-c", "", setup=lines, teardown=('echo torn >&3; echo "$from" "$to" >&4',),
        **COMMAND,
    )  # fmt: skip
    assert started.end() == 0
    assert (started.folder / "three").read_text() == "torn\n"
    assert (started.folder / "four").read_text() == "/data four\n"


def test_a_request_longer_than_an_argument_can_be_is_carried(job: Callable[..., Job]) -> None:
    command = ("true", *(f"/scratch/data/shard-{number:05}.tar" for number in range(5000)))
    started = job(sys.executable, "-c", "", command=command, train=None)
    assert started.end() == 0
    assert started.run.load_spec().command == command


def test_what_an_interpreter_prints_as_it_starts_is_no_answer(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\necho Loading\nexec {shlex.quote(sys.executable)} "$@"\n')
    wrapper.chmod(0o755)
    started = job(sys.executable, "-c", "raise SystemExit(3)", python=str(wrapper))
    assert started.end() == 3
    assert started.ended()["exit_code"] == 3


def test_an_element_of_an_array_knows_that_it_is_one(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "3"}
    assert job(sys.executable, "-c", "", environ=array, **COMMAND).end() == 0
    assert RunDir(tmp_path / "jobs/a-3").array_index == "3"


def test_a_file_of_its_own_that_is_gone_is_replaced_by_the_installed_one(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "jobs/a")
    run.path.mkdir(parents=True)
    run.bundle.symlink_to("clusterddp-0.1.1-000000000000.pyz")
    assert job(sys.executable, str(run.bundle), "--version", **COMMAND).end() == 0
    assert run.bundle.exists()


def test_a_script_is_found_by_a_relative_path_from_another_folder(job: Callable[..., Job]) -> None:
    assert job(sys.executable, "-c", "", setup=("mkdir else; cd else",), **COMMAND).end() == 0


def test_a_script_whose_request_was_damaged_says_so(job: Callable[..., Job]) -> None:
    started = job(change=lambda script: script.replace('#REQUEST {"format"', "#REQUEST {format"))
    assert started.end() == 2
    assert "the script's #REQUEST is not a valid record of a run" in started.out.read_text()


def test_a_fault_of_the_controller_costs_the_step_and_not_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise LookupError("a fault")

    monkeypatch.setattr(controller, "free_master_port", fail)
    own, _ = controller_of(tmp_path, monkeypatch)
    assert own.run(lambda _: [], lambda _: None) == 1
    (ended,) = [event for event in read_events(RunDir(tmp_path / "a")) if event["event"] == "ended"]
    assert (ended["cause"], ended["exit_code"]) == ("failed", 1)


def controller_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *heard: str, lines: str = "exit 3", **fields: Any
) -> tuple[controller.Controller, Attempt]:
    """Return the controller of a COMMAND's job on two hosts, and an attempt of its run."""
    for variable, value in (("JOB_ID", "17"), ("JOB_NODELIST", "h[01-02]")):
        monkeypatch.setenv(f"SLURM_{variable}", value)
    run = RunDir(folder / "a")
    request = spec(run_dir=str(run.path), resources=Resources(nodes=2), **COMMAND, **fields)
    script = folder / "script"
    folder.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/bash\n{lines}\n")
    controller.make_records(run, request, script)
    attempt = Attempt(run, 1)
    attempt.outcomes.mkdir(parents=True)
    made = controller.Controller(request, run, script, Heard(*heard), NoOutput())
    made._attempt = attempt
    return made, attempt


@pytest.mark.parametrize("name", ["TERM", "HUP", "USR1"])
def test_a_job_that_is_ended_while_its_nodes_are_checked_starts_no_task(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that answers nothing would keep the checks longer than KillWait."""
    heard = []

    def check(*arguments: Any) -> PreflightRecord:
        heard.append(arguments[-1]())
        return PreflightRecord("failed: h02", 0.1, {"h02": "slow"})

    monkeypatch.setattr(preflight, "check", check)
    monkeypatch.setattr(step_watch, "watch", lambda *_: None)
    touch = f"touch {tmp_path}/started"
    made, attempt = controller_of(tmp_path, monkeypatch, name, lines=touch, preflight="quick")
    code = made._start(attempt)
    assert heard == [name != "USR1"]
    assert code == {"USR1": 1, "HUP": 75, "TERM": 143}[name]
    assert not (tmp_path / "started").exists()
    assert bool(blamed_in(attempt)) == (name == "USR1")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), [("USR1", "$$"), ("TERM", "0")])
def test_a_signal_ahead_of_any_line_of_the_script_does_not_end_it(
    name: str, to: str, job: Callable[..., Job], tmp_path: Path
) -> None:
    """Bash sends it to itself ahead of its second command, its third, and so on to its last.

    0: to every process of the batch step, as scancel and the time limit do.
    """
    (tmp_path / "go").touch()  # a step that starts is done
    codes = []
    for number in range(1, 1000):
        once = f"[ -e sent ] || {{ ((++n != {number})) || {{ touch sent; kill -{name} {to}; }}; }}"
        started = job(
            change=partial(insert, ahead="trap ''", line=f"trap '{once}' DEBUG\n"), setup=("true",),
            teardown=("true",), **COMMAND,
        )  # fmt: skip
        codes.append(started.end())
        assert [event["event"] for event in read_events(started.run)] == ["started", "ended"]
        if not (tmp_path / "sent").exists():
            break
        (tmp_path / "sent").unlink()
        shutil.rmtree(started.run.path)
    assert len(codes) > 8
    # What is at work in the moment may end by it: a line of the set-up, a step at its start.
    assert {*codes} <= {0, 75, 128 + signal.Signals[f"SIG{name}"]}


def test_a_run_that_was_sent_by_hand_carries_the_clusterddp_of_its_first_attempt(
    job: Callable[..., Job],
) -> None:
    header = f"rendered by clusterddp {__version__}: "
    started = job(
        sys.executable, "-c", "raise SystemExit(0)",
        change=lambda script: script.replace(header, "rendered by clusterddp 0.1.0: "), **COMMAND,
    )  # fmt: skip
    assert started.end() == 0
    carried = bundle.find(started.run)
    assert carried and carried.version == __version__
    assert f"\nclusterddp: the run now uses its own copy of clusterddp, {carried}\n" in started.log
    assert (
        "the script is from clusterddp 0.1.0; it runs with this version's defaults" in started.log
    )


def test_where_there_is_no_room_for_its_clusterddp_the_attempt_runs_all_the_same(
    job: Callable[..., Job],
) -> None:
    limit = partial(insert, ahead="trap ''", line="ulimit -f 1000\n")
    started = job(sys.executable, "-c", "print('at work')", change=limit, **COMMAND)
    assert started.end() == 0
    assert "the run uses the installed clusterddp: cannot write" in started.log
    assert "\nat work\n" in started.log
    assert not list(started.run.path.glob("*.pyz"))


def insert(script: str, ahead: str, line: str) -> str:
    """Put a line behind the one that begins with some words."""
    end = script.index("\n", script.index(ahead)) + 1
    return script[:end] + line + script[end:]


def blamed_in(attempt: Attempt) -> set[str]:
    return History.read(attempt.run).marked_bad(attempt.number)

"""The controller of an attempt, behind the very script, with a stand-in for srun."""

import os
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
from clusterddp.ranks.dist_env import HIGHEST_PORT, LOWEST_PORT, master_port
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
print("step with", *(f"{name}={os.environ.get(name)}" for name in sys.argv[1:]), flush=True)
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
        self.process = subprocess.Popen(
            ["bash", "script"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
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
        *words: str,
        environ: dict[str, str] | None = None,
        python: str = sys.executable,
        change: Callable[[str], str] = lambda script: script,
        line: str = "launch {}",
        **fields: Any,
    ) -> Job:
        pythons = {"python": python, "batch_python": python}
        request = spec(run_name="a", run_dir=str(tmp_path / "jobs/a"), **fields, **pythons)
        script = change(sbatch.render(request).partition("\nlaunch srun")[0])
        step = shlex.join(words or (sys.executable, "step.py"))
        jobs.append(Job(tmp_path, f"{script}\n{line.format(step)}\n", environ or {}))
        return jobs[-1]

    yield start
    for each in jobs:
        with suppress(ProcessLookupError):  # none of its processes is left
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait()


COMMAND = {"command": ("true",), "train": None}


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
        assert all(LOWEST_PORT <= port <= HIGHEST_PORT for port in ports)
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
    [(("false",), "its line of set-up: false"), (("x=1", "false"), "lines of set-up: x=1; false")],
)
def test_a_set_up_that_fails_is_named(
    job: Callable[..., Job], lines: tuple[str, ...], words: str
) -> None:
    started = job(setup=lines, **COMMAND)
    assert started.end() == 1
    assert f"the script ended with exit code 1 before it came to its step: {words}" in (
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
    assert "/nowhere/python: No such file or directory" in started.out.read_text()
    assert sorted(path.name for path in started.folder.iterdir()) == [
        "script", "slurm-17.out", "step.py", "torn-down",
    ]  # fmt: skip


def test_a_broken_interpreter_says_why_in_slurms_file(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no module named clusterddp' >&2\nexit 1\n")
    broken.chmod(0o755)
    started = job(python=str(broken))
    assert started.end() == 1
    assert started.out.read_text().endswith("\nno module named clusterddp\n")
    assert not started.run.path.exists()


def test_a_run_directory_that_cannot_be_made_is_named_in_slurms_file(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "jobs").write_text("")
    started = job()
    assert started.end() == controller.EXIT_NO_RUN
    assert "cannot make the run directory" in started.out.read_text()


def test_a_run_directory_that_is_gone_is_not_made_anew_for_a_later_start(
    job: Callable[..., Job],
) -> None:
    started = job(environ={"SLURM_RESTART_COUNT": "1"})
    assert started.end() == controller.EXIT_NO_RUN
    assert "is gone, so the run cannot resume" in started.out.read_text()
    assert not started.run.path.exists()


def test_the_outputs_of_both_attempts_lie_below_their_dividers(job: Callable[..., Job]) -> None:
    first = job("false", setup=("echo first",))
    assert first.end() == 1
    second = job("false", setup=("echo second",), environ={"SLURM_RESTART_COUNT": "1"})
    second.end()
    text = second.log
    assert text.index("\nfirst\n") < text.index("--- attempt 2, job 17") < text.index("\nsecond\n")


def test_what_a_process_of_the_set_up_prints_later_is_kept(job: Callable[..., Job]) -> None:
    late = "(while [ ! -e up ]; do sleep 0.02; done; echo late; touch go) &"
    started = job(setup=(late,))
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
    started = job(**where, **COMMAND)
    wait_for((tmp_path / "reached").exists, "the moment")
    started.signal(number)
    started.signal(number)
    (tmp_path / "on").touch()
    assert started.end() == 75
    assert "asking the ranks to stop" in started.log
    assert "step with" not in started.log


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


def test_a_killed_controller_takes_its_step_along_and_the_tear_down_still_runs(
    job: Callable[..., Job],
) -> None:
    started = job(sys.executable, "step.py", teardown=("echo torn; touch torn",))
    wait_for((started.folder / "up").exists, "the step")
    (pid,) = children(started.process.pid)
    (step,) = children(pid)
    os.kill(pid, signal.SIGKILL)
    assert started.end() == 137
    assert has_gone(step)
    assert "torn" in started.out.read_text() and "Killed" in started.out.read_text()
    assert [event["event"] for event in read_events(started.run)] == ["started"]


def test_a_killed_script_takes_the_step_along_and_leaves_the_verdict_to_the_next_start(
    job: Callable[..., Job],
) -> None:
    started = job()
    wait_for((started.folder / "up").exists, "the step")
    (pid,) = children(started.process.pid)
    (step,) = children(pid)
    started.signal(signal.SIGKILL)
    assert has_gone(step) and has_gone(pid)
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
    assert Attempt(started.run, 1).asked_to_stop() == "stop"
    status = run_status(started.run, {})
    assert (status.state, status.detail) == ("stopped", f"by SIG{name} to its batch script")


@pytest.mark.parametrize(("line", "code"), [("launch {} | cat", 3), ("(launch {})", 3)])
def test_an_own_template_that_launches_in_a_subshell_has_one_attempt(
    line: str, code: int, job: Callable[..., Job]
) -> None:
    tear = ("echo torn >>tears",)
    started = job(sys.executable, "-c", "raise SystemExit(3)", line=line, teardown=tear)
    assert started.end() == code
    assert (started.folder / "tears").read_text() == "torn\n"
    assert [event["event"] for event in read_events(started.run)] == ["started", "ended"]


def test_an_own_template_that_launches_in_the_background_does_not_end_well(
    job: Callable[..., Job],
) -> None:
    started = job(line="launch {} & until [ -e up ]; do sleep 0.01; done")
    assert started.end() == 1


@pytest.mark.parametrize("more", [{}, {"POSIXLY_CORRECT": "1"}])
def test_where_the_folder_of_submission_takes_nothing_the_log_has_the_lines_of_the_set_up(
    more: dict[str, str], job: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "jobs/a/logs").mkdir(parents=True)
    environ = {"SLURM_SUBMIT_DIR": "/nowhere", **more}
    started = job(setup=("echo early", "exit 4"), environ=environ)
    assert started.end() == 4
    assert "early\n" in started.log


def test_a_set_up_line_keeps_its_descriptors_and_its_names(job: Callable[..., Job]) -> None:
    lines = ("exec 3>three 4>four", "batch=64 from=/data to=four script=a answer=5 own=6", "set -x")
    started = job(
        sys.executable,
        "-c",
        "",
        setup=lines,
        teardown=('echo torn >&3; echo "$from" "$to" >&4',),
        **COMMAND,
    )
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
    started = job(sys.executable, "-c", "", environ=array, **COMMAND)
    assert started.end() == 0
    assert RunDir(tmp_path / "jobs/a-3").array_index == "3"


def test_a_file_of_its_own_that_is_gone_is_replaced_by_the_installed_one(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "jobs/a")
    run.path.mkdir(parents=True)
    run.bundle.symlink_to("clusterddp-0.1.1-000000000000.pyz")
    started = job(sys.executable, str(run.bundle), "--version", **COMMAND)
    assert started.end() == 0
    assert run.bundle.exists()


def test_a_script_is_found_by_a_relative_path_from_another_folder(job: Callable[..., Job]) -> None:
    started = job(sys.executable, "-c", "", setup=("mkdir else; cd else",), **COMMAND)
    assert started.end() == 0


def test_a_script_whose_request_was_damaged_says_so(job: Callable[..., Job]) -> None:
    started = job(change=lambda script: script.replace('#REQUEST {"format"', "#REQUEST {format"))
    assert started.end() == 2
    assert "the script's #REQUEST is no record of a run" in started.out.read_text()


def test_a_signal_that_comes_in_two_parts_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    (signals, to), (answers, requests) = os.pipe(), os.pipe()
    try:
        script = controller.Script(signals, requests, requests, requests)
        heard = []
        for part in (b"TERM\nUS", b"R1\ntorn-", b"down\n"):
            os.write(to, part)
            heard += script.read_signals()
        assert heard == ["TERM", "USR1"]
        assert script.is_torn_down
    finally:
        for descriptor in (signals, to, answers, requests):
            os.close(descriptor)


def test_tasks_use_the_installed_clusterddp_where_none_can_be_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = str(tmp_path / "a/clusterddp.pyz")
    assert controlled(tmp_path, monkeypatch, [sys.executable, own, "--version"]) == 0


def test_a_fault_of_the_controller_costs_the_step_and_not_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise LookupError("a fault")

    monkeypatch.setattr(controller, "free_master_port", fail)
    assert controlled(tmp_path, monkeypatch, ["true"]) == 1
    events = read_events(RunDir(tmp_path / "a"))
    (ended,) = [event for event in events if event["event"] == "ended"]
    assert (ended["cause"], ended["exit_code"]) == ("failed", 1)


def controlled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> int:
    """Run a COMMAND's attempt in this process; the script is at its tear-down already."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("CLUSTERDDP_LOCAL_STEPS", str(tmp_path))
    run = RunDir(tmp_path / "a")
    request = spec(run_dir=str(run.path), command=("true",))
    (tmp_path / "script").touch()
    controller.make_records(run, request, tmp_path / "script")
    (signals, to), (answers, requests) = os.pipe(), os.pipe()
    try:
        script = controller.Script(signals, requests, requests, requests)
        attempt = controller.Controller(request, run, script)
        os.write(to, b"torn-down\n")
        return attempt.run(argv, None, lambda _: [], lambda _: None)
    finally:
        for descriptor in (signals, to, answers, requests):
            os.close(descriptor)


@pytest.mark.parametrize("name", ["TERM", "HUP", "USR1"])
def test_a_job_that_is_ended_while_its_nodes_are_checked_starts_no_task(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that answers nothing would keep the checks longer than KillWait."""
    heard = []

    def check(*arguments: Any) -> PreflightRecord:
        os.write(to, f"{name}\n".encode())
        heard.append(arguments[-1]())
        return PreflightRecord("failed: h02", 0.1, {"h02": "slow"})

    monkeypatch.setattr(preflight, "check", check)
    monkeypatch.setattr(step_watch, "watch", lambda *_: None)
    for variable, value in (("JOB_ID", "17"), ("JOB_NODELIST", "h[01-02]")):
        monkeypatch.setenv(f"SLURM_{variable}", value)
    run = RunDir(tmp_path / "a")
    attempt = Attempt(run, 1)
    attempt.outcomes.mkdir(parents=True)
    request = spec(
        run_dir=str(run.path), resources=Resources(nodes=2), preflight="quick", **COMMAND
    )
    (signals, to), (answers, requests) = os.pipe(), os.pipe()
    try:
        script = controller.Script(signals, requests, requests, requests)
        made = controller.Controller(request, run, script)
        made._attempt = attempt
        code = made._start(attempt, ["touch", str(tmp_path / "started")])
    finally:
        for descriptor in (signals, to, answers, requests):
            os.close(descriptor)
    assert heard == [name != "USR1"]
    assert code == {"USR1": 1, "HUP": 75, "TERM": 143}[name]
    assert not (tmp_path / "started").exists()
    assert bool(blamed_in(attempt)) == (name == "USR1")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), [("USR1", "$$"), ("TERM", "0")])
def test_a_signal_ahead_of_any_line_of_the_script_is_neither_lost_nor_ends_it(
    name: str, to: str, job: Callable[..., Job], tmp_path: Path
) -> None:
    """Bash sends it to itself ahead of its first command, its second, and so on to its last.

    0: to every process of the batch step, as scancel and the time limit do.
    """
    (tmp_path / "go").touch()  # a step that starts is done
    heard = []
    for number in range(1, 1000):
        once = f"((++n == {number})) && touch sent && kill -{name} {to}"
        at, line = "listen() {", "set -o functrace; trap '{}' DEBUG\n"
        started = job(
            change=partial(insert, ahead=at, line=line.format(once)),
            setup=("true",),
            teardown=("true",),
            **COMMAND,
        )
        code = started.end()
        assert [event["event"] for event in read_events(started.run)] == ["started", "ended"]
        heard.append(f"got SIG{name}" in started.log)
        has_begun = "step with" in started.log
        # While the script waits for its controller it runs some lines every two seconds. On a busy
        # machine a signal finds a step at its start there, which has no handlers yet.
        if not (heard[-1] and code == 128 + signal.Signals[f"SIG{name}"]):
            assert (code, has_begun) in ((0, True), (75, False)), (number, started.log)
            assert (code == 75) == (heard[-1] and name == "USR1" and not has_begun)
        if not (tmp_path / "sent").exists():
            break
        (tmp_path / "sent").unlink()
        shutil.rmtree(started.run.path)
    # Behind the tear-down the verdict is on its way, and nothing depends on it any more. While the
    # controller is born, TERM is ignored, as it reaches all processes of the job: Slurm's own
    # records tell of it.
    assert len(heard) > 25 and heard[:22].count(False) <= (3 if name == "TERM" else 0)


def test_a_run_that_was_sent_by_hand_carries_the_clusterddp_of_its_first_attempt(
    job: Callable[..., Job],
) -> None:
    header = f"rendered by clusterddp {__version__}: "
    started = job(
        sys.executable,
        "-c",
        "raise SystemExit(0)",
        change=lambda script: script.replace(header, "rendered by clusterddp 0.1.0: "),
        **COMMAND,
    )
    assert started.end() == 0
    carried = bundle.find(started.run)
    assert carried and carried.version == __version__
    assert f"\nclusterddp: the run carries clusterddp {carried} from now on\n" in started.log
    assert "its script is of clusterddp 0.1.0; what that leaves out is as in this" in started.log


def test_where_there_is_no_room_for_its_clusterddp_the_attempt_runs_all_the_same(
    job: Callable[..., Job],
) -> None:
    started = job(sys.executable, "-c", "print('at work')", setup=("ulimit -f 1000",), **COMMAND)
    assert started.end() == 0
    assert "the run uses the clusterddp that is installed: cannot put" in started.log
    assert "\nat work\n" in started.log
    assert not list(started.run.path.glob("*.pyz"))


def insert(script: str, ahead: str, line: str) -> str:
    """Put a line behind the one that begins with some words."""
    begin = script.index(ahead)
    end = script.index("\n", begin) + 1
    return script[:end] + line + script[end:]


def blamed_in(attempt: Attempt) -> set[str]:
    return History.read(attempt.run).blamed(attempt.number)

import fcntl
import json
import os
import pty
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterddp.checkpoints.catalog import name_of
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import read_outcomes
from clusterddp.run.run_dir import RunDir
from clusterddp.status.status import run_status
from clusterddp.worker.workstation import free_port
from tests.cli.made_runs import Workplace, workplace
from tests.event_lines import read_events
from tests.waiting import PATIENCE, dying_with_us, has_gone, wait_for, wait_until

__all__ = ["workplace"]

MORE = [pytest.mark.slow, pytest.mark.release]

# A model whose construction stops as a breakpoint does: it asks the person who typed the command.
ASKING_MODEL = """
import os, sys
import clusterddp.models.nets as models
convnet = models.MODELS["convnet"]
def asking():
    print("in process", os.getpid(), "asked for", input("what? "), flush=True)
    return convnet()
models.MODELS["convnet"] = asking
from clusterddp.__main__ import main
main()
"""

# A training that fails while the thread which writes its checkpoint is inside torch, for ever.
FAILS_WHILE_IT_SAVES = """
import io, threading, torch
from clusterddp.checkpoints import writer
from clusterddp.worker import task
begun = threading.Event()
def without_end(content):
    while True:
        begun.set()
        torch.save(content, io.BytesIO())
class Failing(writer.Saver):
    def save(self, *arguments):
        super().save(*arguments)
        begun.wait()
        raise ValueError("the batch is odd")
writer.to_bytes, writer.Saver = without_end, Failing
task._SAVE_SECONDS = 0.1
from clusterddp.__main__ import main
main()
"""


@pytest.fixture
def debug(synthetic_dir: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(
        *argv: str,
        program: tuple[str, ...] = ("-m", "clusterddp"),
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [
                    sys.executable, *program, "debug", "--dataset=synthetic", "--threads=1",
                    f"--data-dir={synthetic_dir}", f"--run-dir={tmp_path / 'run'}", *argv,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads here
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


LONG = ("--epochs=5000", "--log-every=20")


def rank_pids(run: RunDir) -> list[int]:
    return [each.pid for each in read_outcomes(Attempt(run, 1).outcomes)]


def end_of(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "attempts/0001/end.json").read_text())
    return content


def events_of(run: Path, event: str) -> list[dict[str, Any]]:
    return [each for each in read_events(RunDir(run)) if each["event"] == event]


@pytest.mark.slow  # a person at a breakpoint, below, is in this very process, too
def test_one_process_is_this_very_process_with_its_input_whatever_job_is_around(debug: Any) -> None:
    job = {
        "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "8",
        "RANK": "3", "WORLD_SIZE": "8",
    }  # fmt: skip
    process = debug("--max-steps=2", program=("-c", ASKING_MODEL), env=job)
    out, err = process.communicate("the loss\n", timeout=PATIENCE)
    assert process.returncode == 0, err
    assert f"in process {process.pid} asked for the loss" in out
    assert "rank 0 of 1" in out
    assert "done: test accuracy" in out


STOPPING_MODEL = """
import pdb
from torch import nn

class Net(nn.Sequential):
    steps = 0

    def forward(self, images):
        Net.steps += 1
        if Net.steps == 60:
            {stop}
        return super().forward(images)

def build():
    {at_once}
    return Net(nn.Flatten(), nn.Linear(784, 10))
"""


BAR = "%|"
"""What only the progress bar shows."""


class Terminal:
    """The terminal of a program: what it shows, and a person's keys."""

    def __init__(self, argv: list[str], folder: Path) -> None:
        self.keys, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        self.shown = ""
        self.process = subprocess.Popen(
            argv, cwd=folder, stdin=other, stdout=other, stderr=other, start_new_session=True,
            preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads here
        )  # fmt: skip
        os.close(other)

    def read_until(self, text: str) -> str:
        """What comes up to `text`, or to the end of the program."""
        begin = len(self.shown)
        while text not in self.shown[begin:]:
            ready, _, _ = select.select([self.keys], [], [], PATIENCE)
            assert ready, f"{text!r} has not come: {self.shown}"
            try:
                chunk = os.read(self.keys, 1 << 16)
            except OSError:  # Linux's way to say that nobody has it open any more
                break
            self.shown += chunk.decode()
        return self.shown[begin:]

    def type(self, line: str) -> None:
        os.write(self.keys, f"{line}\n".encode())

    def line_of(self, text: str) -> str:
        """The last line with `text`, as it stands on the screen after all carriage returns."""
        [*_, line] = [row for row in self.shown.split("\n") if text in row]
        seen = ""
        for part in line.rstrip("\r").split("\r"):
            seen = part + seen[len(part) :]
        return seen.rstrip()


@pytest.mark.parametrize(
    ("stop", "at_once"),
    [
        pytest.param("breakpoint()", "pass", id="breakpoint"),
        pytest.param("pdb.set_trace()", "pass", id="set_trace", marks=MORE),
        pytest.param("pass", "breakpoint()", id="as the model is made", marks=pytest.mark.slow),
    ],
)
def test_q_at_a_breakpoint_is_no_failure_and_no_bar_shares_the_prompts_line(
    stop: str, at_once: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "nets.py").write_text(STOPPING_MODEL.format(stop=stop, at_once=at_once))
    terminal = Terminal(
        [
            sys.executable, "-m", "clusterddp", "debug", "--dataset=synthetic", "--threads=1",
            f"--data-dir={synthetic_dir}", "--model=nets:build", "--run-name=one", "--epochs=50",
            "--log-every=5",
        ],
        tmp_path,
    )  # fmt: skip
    try:
        terminal.read_until("(Pdb) ")
        if stop != "pass":
            assert "step/s" in terminal.shown  # there was a bar
        for text, begin in (("nets.py(", "> "), ("-> ", "-> "), ("(Pdb)", "(Pdb)")):
            assert terminal.line_of(text).startswith(begin)
        for _ in range(8):  # out of the model, and through the loop that draws
            terminal.type("up" if at_once != "pass" else "return")
            assert BAR not in terminal.read_until("(Pdb) ")
            assert terminal.line_of("(Pdb)") == "(Pdb)"
        terminal.type("q")
        terminal.read_until("no such text")
        assert terminal.process.wait(PATIENCE) == 130
    finally:
        if terminal.process.poll() is None:
            os.killpg(terminal.process.pid, signal.SIGKILL)
            terminal.process.wait()
        os.close(terminal.keys)
    status = run_status(RunDir(tmp_path / "jobs/one"), {})
    assert (status.state, status.first_failure) == ("stopped", "")


@pytest.mark.parametrize(
    ("procs", "method", "number", "code", "reason"),
    [
        (2, "", signal.SIGINT, 130, "interrupt"),
        # compare's test has a single process; test_articles.py trains in spawned ones.
        pytest.param(1, "", signal.SIGINT, 130, "interrupt", marks=MORE),
        pytest.param(2, "spawn", signal.SIGTERM, 75, "SIGTERM", marks=MORE),
        pytest.param(2, "forkserver", signal.SIGHUP, 75, "SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_the_first_request_has_it_save_leave_and_say_how_to_go_on(
    procs: int, method: str, number: int, code: int, reason: str, debug: Any, tmp_path: Path
) -> None:
    chosen = [f"--start-method={method}"] if method else []
    process = debug(f"--procs={procs}", *chosen, *LONG, env={"SLURM_STEP_ID": "0", "RANK": "3"})
    out = wait_until(process)
    run = tmp_path / "run"
    pids = rank_pids(RunDir(run)) if procs > 1 else []
    if method == "forkserver":
        os.killpg(process.pid, number)  # as a terminal that closes: to all of the session
    else:
        process.send_signal(number)
    more, err = process.communicate(timeout=PATIENCE)
    out += more
    assert process.returncode == code, err
    end = end_of(run)
    assert (end["cause"], end["reason"]) == ("stopped", reason)
    assert f"stopped at step {end['step']} ({reason})" in out
    assert ("Ctrl-C again ends" in err) == (number == signal.SIGINT or procs > 1)
    assert (run / "checkpoints" / name_of(end["step"])).exists()
    assert all(has_gone(pid) for pid in pids)
    assert [event["exit_code"] for event in events_of(run, "ended")] == [code]
    if procs > 1:  # each has its log
        logs = [RunDir(run).rank_log(rank).read_text() for rank in (0, 1)]
        assert logs[0] == out
        assert "rank 1 of 2" in logs[1] and "rank 1 of 2" not in out

    (said,) = [line for line in err.splitlines() if "resume with: " in line]
    argv = shlex.split(said.partition("resume with: ")[2])
    assert argv[:2] == ["clusterddp", "debug"] and set(chosen) <= set(argv)
    argv = [sys.executable, "-m", *argv, f"--max-steps={end['step'] + 1}"]
    again = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert again.returncode == 0, again.stderr
    assert f"resuming from {run}/attempts/0002/checkpoints/{name_of(end['step'])}" in again.stdout
    assert f"rank 0 of {procs}" in again.stdout
    assert json.loads((run / "report.json").read_text())["world_size"] == procs
    assert "done: test accuracy" in again.stdout
    dividers = [log.read_text().count("--- attempt 2, job ") for log in run.glob("logs/*.log")]
    assert dividers == [1] * (procs if procs > 1 else 0)


# A training whose steps after the thirtieth never end: it cannot save.
HANGING = """
import os, time
from clusterddp.data.loader import Images
batches, seen = Images.batches, []
def hang(self, *order):
    for batch in batches(self, *order):
        seen.append(1)
        if len(seen) > 30:
            os.write(1, b"it hangs\\n")
        while len(seen) > 30:
            time.sleep(0.02)
        yield batch
Images.batches = hang
from clusterddp.__main__ import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("procs", [pytest.param(1, marks=pytest.mark.release), 2])
def test_the_second_ctrl_c_ends_at_once(procs: int, debug: Any, tmp_path: Path) -> None:
    program = ("-c", HANGING) if procs == 1 else ("-m", "clusterddp")
    process = debug(f"--procs={procs}", *LONG, program=program)
    wait_until(process, "it hangs" if procs == 1 else "images/s")
    run = RunDir(tmp_path / "run")
    pids = rank_pids(run) if procs > 1 else []
    if pids:
        os.kill(pids[1], signal.SIGSTOP)  # so rank 0 waits for it, and neither can save
    process.send_signal(signal.SIGINT)
    seen = b""
    while b"Ctrl-C again ends" not in seen:
        assert select.select([process.stderr], [], [], PATIENCE)[0], seen
        seen += os.read(process.stderr.fileno(), 1 << 16)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert not Attempt(run, 1).end.exists()
    assert all(has_gone(pid) for pid in pids)
    assert [event["exit_code"] for event in events_of(run.path, "ended")] == [130]


@pytest.mark.slow
def test_ranks_that_do_not_leave_are_ended_after_a_while(debug: Any, tmp_path: Path) -> None:
    program = (
        "import clusterddp.worker.workstation as here; here._SAVING_SECONDS = 0.5\n"
        "from clusterddp.__main__ import main; main()"
    )
    process = debug("--procs=2", *LONG, program=("-c", program))
    wait_until(process)
    pids = rank_pids(RunDir(tmp_path / "run"))
    os.kill(pids[1], signal.SIGSTOP)
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert "ended before it had saved" in err and "resume with" not in err
    assert all(has_gone(pid) for pid in pids)


@pytest.mark.slow
def test_ctrl_c_at_a_question_before_the_training_ends_it(debug: Any, tmp_path: Path) -> None:
    process = debug("--max-steps=2", program=("-c", ASKING_MODEL))
    wait_until(process, "what?")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Traceback" not in err and "Ctrl-C again" not in err
    assert not list(tmp_path.rglob("*.pt"))


# Python runs it where PYTHONPATH leads to it: no rank gets beyond its import of torch.
NEVER_MEET = """
import os, sys, threading
class Held:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            threading.Event().wait()
if "RANK" in os.environ:
    sys.meta_path.insert(0, Held())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.release)],
)
def test_before_the_ranks_have_met_a_request_ends_them(
    number: int, code: int, debug: Any, tmp_path: Path
) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(NEVER_MEET)
    process = debug("--procs=2", *LONG, env={"PYTHONPATH": str(hooks)})
    first = Attempt(RunDir(tmp_path / "run"), 1)
    wait_for(lambda: len(read_outcomes(first.outcomes)) == 2, "both ranks")
    pids = rank_pids(first.run)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert not first.end.exists()
    assert all(has_gone(pid) for pid in pids)


def test_a_wrong_request_starts_nothing(workplace: Workplace) -> None:
    run = workplace.folder / "run"
    for argv in (
        ["--procs=0"], ["--start-method=clone"], ["--epochs=-1"], ["--run-name=x"], ["--run-dir="],
    ):  # fmt: skip
        assert workplace.invoke("debug", "--dataset=synthetic", f"--run-dir={run}", *argv).code == 2
        assert not run.exists()


@pytest.mark.parametrize("name", ["", "a/b", "../a", "-a", "x" * 101])
def test_a_name_that_no_run_can_have_is_refused(name: str, workplace: Workplace) -> None:
    got = workplace.invoke("debug", "--dataset=synthetic", f"--run-name={name}")
    assert got.code == 2
    assert f"--run-name: {name!r} is not a valid run name" in got.err
    assert list(workplace.root.iterdir()) == []


def test_a_free_port_lies_below_the_ephemeral_range() -> None:
    with socket.socket() as probe:
        port = free_port()
        assert 12000 <= port < 32000
        probe.bind(("127.0.0.1", port))


@pytest.mark.slow
def test_a_debug_run_is_known_to_the_other_commands(synthetic_dir: Path, tmp_path: Path) -> None:
    def clusterddp(*argv: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "clusterddp", *argv],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip

    train = ["debug", "--dataset=synthetic", f"--data-dir={synthetic_dir}", "--max-steps=1"]
    first = clusterddp(*train, "--run-name=one")
    assert first.returncode == 0, first.stderr
    status = json.loads(clusterddp("status", "one", "--json").stdout)
    assert (status["state"], status["world_size"], status["step"]) == ("done", 1, 1)
    assert (tmp_path / "jobs/one").stat().st_mode & 0o777 == 0o700
    again = clusterddp(*train, "--run-name=one")
    assert again.returncode == 2
    assert "already exists" in again.stderr
    broken = clusterddp("debug", "--dataset=mnist", "--data-dir=none", "--run-name=two")
    assert broken.returncode == 2
    assert not (tmp_path / "jobs/two").exists()


@pytest.mark.slow
def test_a_failure_while_a_checkpoint_is_written_is_no_crash(debug: Any) -> None:
    process = debug("--save-every=1steps", program=("-c", FAILS_WHILE_IT_SAVES))
    _, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "ValueError: the batch is odd" in error) == (1, True), error

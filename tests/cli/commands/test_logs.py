"""`clusterddp logs`, and following a run to its end."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterddp import polling
from clusterddp.cli.commands import logs
from clusterddp.cli.runs import follow
from clusterddp.run.run_dir import RunDir
from clusterddp.status.follow import LogTail
from tests.cli.made_runs import BOOM, FAILURE, Workplace, ended, started, submitted, workplace
from tests.event_lines import add_event, kinds

__all__ = ["workplace"]


def write_logs(run: RunDir, **logs: str) -> None:
    for name, text in logs.items():
        (run.logs / f"{name.replace('_', '-')}.log").write_text(text)


# -- what is there now -----------------------------------------------------------------------


def test_rank_0s_log_is_shown(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("1"), started("1"), ended("1", 0))
    write_logs(run, rank_0="step 1\nstep 2\n", job="job\n")
    got = workplace.invoke("logs")
    assert (got.code, got.out, got.err) == (0, "step 1\nstep 2\n", "")


def test_a_failed_runs_job_log_is_shown_instead(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("1"), started("1"), ended("1", 1))
    write_logs(run, rank_0="step 1\n", job="rank 3 failed first\n")
    assert workplace.invoke("logs").out == "rank 3 failed first\n"
    assert workplace.invoke("logs", "--rank", "0").out == "step 1\n"


def test_several_logs_name_their_file_before_each_line(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("1"), started("1"), ended("1", 0))
    write_logs(run, rank_1="a\n\nb", rank_3="c\n", job="d\n")
    got = workplace.invoke("logs", "one", "--rank", "1", "--rank", "3", "--job")
    assert got.out == "job | d\nrank-1 | a\nrank-1 | \nrank-1 | b\nrank-3 | c\n"


@pytest.mark.parametrize(
    ("text", "lines", "shown"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\n", 5, "a\nb\n"),
        ("a\nb\n", 2, "a\nb\n"),
        ("\n\n\n", 2, "\n\n"),
        ("a\n", 0, ""),
        ("", 3, ""),
        ("x" * 200_000 + "\ny\n", 1, "y\n"),
        ("x" * 200_000 + "\ny\n", 2, "x" * 200_000 + "\ny\n"),
    ],
)
def test_only_the_last_lines(tmp_path: Path, text: str, lines: int, shown: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    assert LogTail(path, lines).read().decode() == shown


def test_bytes_that_are_no_text_pass_unchanged(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("1"), started("1"), ended("1", 0))
    run.rank_log(0).write_bytes(b"\xff\x00\r50%")
    got = subprocess.run(
        [sys.executable, "-m", "clusterddp", "logs", "one"], capture_output=True, check=False
    )
    assert (got.returncode, got.stdout) == (0, b"\xff\x00\r50%")


def test_a_missing_log_says_how_the_run_is_and_what_there_is(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("1"), started("1"))
    workplace.command("squeue", "echo '1|RUNNING|None'")
    write_logs(run, job="", rank_1="", node_0="")
    got = workplace.invoke("logs", "one")
    assert got.code == 2
    assert "no rank-0.log (yet): it is running and has job.log, node-0.log, rank-1.log" in got.err
    assert "logs -f one" in got.err


def test_of_a_run_that_has_ended_no_log_is_awaited(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("1"))
    add_event(run, "cancelled", job_id="1")
    workplace.command("squeue", "echo '1|CANCELLED|None'")
    for argv in (["one"], ["one", "--job"], ["one", "--rank", "0"]):
        got = workplace.invoke("logs", *argv)
        assert got.code == 2
        assert "one has no logs: it never started; it is cancelled" in got.err
    (workplace.folder / "slurm-1.out").write_text("/nowhere/python: No such file or directory")
    add_event(run, "submitted", job_id="1", folder=str(workplace.folder))
    add_event(run, "cancelled", job_id="1")
    got = workplace.invoke("logs", "one", "--job")
    assert f"The output of its script is in {workplace.folder}/slurm-1.out." in got.err
    write_logs(workplace.run("two", submitted("2"), started("2"), ended("2", 0)), job="")
    got = workplace.invoke("logs", "two", "--rank", "1")
    assert "two has no rank-1.log: it is done and has job.log. See" in got.err


def test_a_rank_beyond_the_last_is_a_wrong_request(workplace: Workplace) -> None:
    workplace.run("one", submitted("1"), started("1"), ended("1", 0))
    got = workplace.invoke("logs", "-f", "--rank", "8")
    assert got.code == 2
    assert "--rank 8: one has ranks 0 to 7. [CD0102]" in got.err


def test_a_log_that_is_emptied_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert tail.read() == b""
    path.write_bytes(b"first\n")
    assert tail.read() == b"first\n"
    path.write_bytes(b"two\n")
    assert tail.read() == b"two\n"
    assert tail.read() == b""


def test_a_ranks_lines_of_its_nodes_log_are_followed(tmp_path: Path) -> None:
    node = tmp_path / "node-0.log"
    tail = LogTail(tmp_path / "rank-1.log")
    assert tail.read() == b""
    node.write_bytes(b"0: a\n1: a\n1: to")
    assert tail.read() == b"a\n"
    with node.open("ab") as file:
        file.write(b"rn\n0: b\n")
    assert tail.read() == b"torn\n"
    for lines, shown in ((None, b"a\ntorn\n"), (1, b"torn\n"), (0, b"")):
        assert LogTail(tmp_path / "rank-1.log", lines).read() == shown


# -- following -------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "FOLLOW_FILES_POLL_SECONDS", 0.01)
    monkeypatch.setattr(polling, "FOLLOW_SLURM_POLL_SECONDS", (0.01, 0.02))


def story(workplace: Workplace, run: RunDir, *steps: str) -> None:
    """A squeue that does one shell step a call, then the last for ever: asking makes time pass."""
    folder = workplace.folder / "story"
    folder.mkdir()
    for number, step in enumerate(steps):
        (folder / str(number)).write_text(f"cd {run.path}\n{step}\n")
    body = (
        f"cd {folder}\nn=0\n[ -f at ] && read n <at\n[ -f $((n + 1)) ] && echo $((n + 1)) >at\n"
        "[ -f at ] || echo 0 >at\n. ./$n"
    )
    workplace.command("squeue", body)


HOSTS = "h[01-02]"


def record(event: str, **fields: object) -> str:
    line = {"event": event, "time": 5, "job_id": "7", "restart": 0, **fields}
    return f"echo '{json.dumps(line)}' >>events.jsonl"


def say(state: str, reason: str = "None") -> str:
    return f"echo '7|{state}|{reason}'"


@pytest.mark.usefixtures("quick")
def test_follow_tells_the_states_and_ends_with_the_run(
    workplace: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    run = workplace.run("one", submitted("7"))
    story(
        workplace, run, say("PENDING", "(Resources)"), say("PENDING", "(Resources)"),
        f"{record('started', nodelist=HOSTS)}; echo hello >logs/rank-0.log; {say('RUNNING')}",
        f"echo bye >>logs/rank-0.log; {record('ended', exit_code=0)}; {say('COMPLETING')}",
    )  # fmt: skip
    assert follow(run) == 0
    out, err = capfd.readouterr()
    assert out == "hello\nbye\n"
    assert [line.removeprefix("clusterddp: one: ") for line in err.splitlines()] == [
        "queued as job 7: Resources", "running on h01 h02", "done: took 0.0s",
    ]  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_follow_names_the_command_for_a_hang_once(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clusterddp.status.follow._SILENT_SECONDS", 0.0)
    run = workplace.run("one", submitted("7"))
    begin = f"{record('started', nodelist=HOSTS)}; {say('RUNNING')}"
    more = f"echo hello >>logs/rank-1.log; {say('RUNNING')}"
    end = f"{record('ended', exit_code=0)}; {say('COMPLETING')}"
    story(workplace, run, say("PENDING"), begin, more, *[say("RUNNING")] * 9, end)
    assert follow(run) == 0
    err = capfd.readouterr().err
    assert err.count(f"If it hangs: clusterddp stacks {run.cli_name}\n") == 1
    assert err.index("running on") < err.index("If it hangs")


def test_follow_of_a_run_that_was_never_submitted_says_so(workplace: Workplace) -> None:
    run = workplace.run("x")
    workplace.monkeypatch.setattr(logs, "follow", lambda *_, **__: 0)
    waits = f"x waits: no submission is recorded. Next: clusterddp rm {run.cli_name}"
    assert waits in workplace.invoke("logs", "-f", "x").err


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ("/bin/rm -r {}",
         "its directory {} is gone: removed or renamed; its job 7 may still be running [CD0512]"),
        ("/bin/mv {0} {0}-x",
         "its directory {} is gone: removed or renamed; its job 7 may still be running [CD0512]"),
        ("/bin/rm {}/events.jsonl",
         "its records, {}/events.jsonl, are gone; its job 7 may still be running [CD0505]"),
        (">{}/events.jsonl",
         "its records, {}/events.jsonl, are gone; its job 7 may still be running [CD0505]"),
    ],
)  # fmt: skip
def test_follow_ends_with_the_records_of_the_run(
    workplace: Workplace, capfd: pytest.CaptureFixture[str], loss: str, why: str
) -> None:
    run = workplace.run("one", submitted("7"), started("7"))
    story(workplace, run, say("RUNNING"), f"{loss.format(run.path)}; {say('RUNNING')}")
    assert follow(run) == 1
    assert f"one: unknown: {why.format(run.path)}\n  squeue -j 7\n" in capfd.readouterr().err


@pytest.mark.usefixtures("quick")
def test_follow_of_a_run_whose_records_had_gone_before_returns(
    workplace: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    run = workplace.run("one", submitted("7"), started("7"))
    run.events.unlink()
    (run.attempts / "0001").mkdir(parents=True)
    assert follow(run) == 1
    assert f"its records, {run.events}, are gone [CD0505]" in capfd.readouterr().err


@pytest.mark.usefixtures("quick")
def test_follow_of_a_failed_run_names_the_failure(
    workplace: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    run = workplace.run("one", submitted("7"), started("7"))
    write_logs(run, job="Traceback: boom\n")
    end = record("ended", exit_code=1, first_failure=FAILURE, code="CD1209")
    story(workplace, run, f"{end}; {say('COMPLETING')}", say("FAILED", "NonZeroExitCode"))
    assert follow(run) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert f"failed: {BOOM} [CD1209]\n  clusterddp logs --rank 3 one" in err
    assert "Traceback: boom" in err  # no rank said anything: the job log is the next best


@pytest.mark.usefixtures("quick")
def test_follow_goes_on_over_a_requeue(
    workplace: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    run = workplace.run("one", submitted("7"), started("7"))
    story(
        workplace, run, say("RUNNING"), say("NODE_FAIL"), say("PENDING", "BeginTime"),
        say("RUNNING"), f"{record('ended', exit_code=143)}; {say('COMPLETING')}",
        say("PENDING", "BeginTime"), f"{record('started', restart=1)}; {say('RUNNING')}",
        f"{record('ended', restart=1, exit_code=0)}; {say('RUNNING')}",
    )  # fmt: skip
    assert follow(run) == 0
    assert capfd.readouterr().err.splitlines()[-1].startswith("clusterddp: one: done")


def attempt(event: str, number: int, **fields: object) -> str:
    """A record of an attempt, as the scripts of now write it."""
    return record(event, attempt=number, **fields)


def told(err: str) -> list[str]:
    return [line.removeprefix("clusterddp: one: ") for line in err.splitlines()]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("passing", ["COMPLETING", "COMPLETED", "FAILED", "PREEMPTED"])
def test_follow_tells_why_a_run_was_requeued(
    workplace: Workplace, capfd: pytest.CaptureFixture[str], passing: str
) -> None:
    run = workplace.run("one", submitted("7"))
    now = time.time()
    left = attempt("ended", 1, exit_code=75, cause="time limit", why="")
    story(
        workplace,
        run,
        f"{attempt('started', 1, nodelist=HOSTS)}; echo one >logs/rank-0.log; {say('RUNNING')}",
        f"{left}; {say('RUNNING')}",
        f"{attempt('requeued', 1, why='time limit', time=now)}; {say(passing)}",
        *[say(passing)] * 3,  # seen as final again and again: the record settles it
        say("PENDING", "BeginTime"),
        f"{attempt('started', 2, restart=1, nodelist=HOSTS)}; {say('RUNNING')}",
        say("NODE_FAIL"),
        say("PENDING", "BeginTime"),
        f"{attempt('started', 3, restart=2, nodelist='h03')}; {say('RUNNING')}",
        f"echo three >>logs/rank-0.log; "
        f"{attempt('ended', 3, restart=2, exit_code=0, cause='done', why='')}; {say('RUNNING')}",
    )
    assert follow(run) == 0
    out, err = capfd.readouterr()
    assert out == "one\nthree\n"
    said = told(err)
    assert said.count("requeued: time limit") == 1
    assert said.count("requeued: killed by a requeue or node failure") == 1
    for line in (
        "running on h01 h02",
        "queued as job 7: resumes after the time limit: BeginTime",
        "running on h01 h02, attempt 2",
        "queued as job 7: requeued by Slurm: BeginTime",
        "running on h03, attempt 3",
    ):
        assert line in said, said
    assert said.index("requeued: time limit") < said.index("running on h01 h02, attempt 2")
    assert said[-1].startswith("done")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ({"first_failure": FAILURE}, f": {BOOM}"),
        ({"how": "the job was ended: all hang"}, ": the job was ended: all hang"),
        ({}, ""),
    ],
)
def test_follow_tells_the_failure_for_which_a_run_was_requeued(
    workplace: Workplace, capfd: pytest.CaptureFixture[str], end: dict[str, object], shown: str
) -> None:
    run = workplace.run("one", submitted("7"))
    story(
        workplace, run, f"{attempt('started', 1, nodelist=HOSTS)}; {say('RUNNING')}",
        f"{attempt('ended', 1, exit_code=1, cause='failed', **end)}; {say('RUNNING')}",
        f"{attempt('requeued', 1, why='failed')}; {say('PENDING', 'BeginTime')}",
        f"{attempt('started', 2, restart=1, nodelist=HOSTS)}; {say('RUNNING')}",
        f"{attempt('ended', 2, restart=1, exit_code=0, cause='done')}; {say('COMPLETED')}",
    )  # fmt: skip
    assert follow(run) == 0
    assert told(capfd.readouterr().err).count(f"requeued: failed{shown}") == 1


@pytest.mark.usefixtures("quick")
def test_follow_goes_over_to_the_next_job(
    workplace: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    run = workplace.run("one", submitted("7"), {**started("7"), "attempt": 1})
    left = attempt("ended", 1, exit_code=75, cause="signal", why="")
    next_job = record("submitted", attempt=1, in_place_of="7", why="signal").replace(
        '"job_id": "7"', '"job_id": "8"'
    )
    begun, done = (
        attempt(event, 2, nodelist="h03", **fields).replace('"job_id": "7"', '"job_id": "8"')
        for event, fields in (
            ("started", {}),
            ("ended", {"exit_code": 0, "cause": "done", "why": ""}),
        )
    )
    both = "echo '7|COMPLETED|None'; echo '8|%s|None'"
    story(
        workplace, run, say("RUNNING"), f"{left}; {next_job}; {both % 'PENDING'}",
        *[both % "PENDING"] * 3, f"{begun}; {both % 'RUNNING'}", f"{done}; {both % 'COMPLETING'}",
    )  # fmt: skip
    assert follow(run) == 0
    said = told(capfd.readouterr().err)
    assert "requeued: signal" in said
    assert "queued as job 8: resumes after a signal" in said
    assert "running on h03, attempt 2" in said


@pytest.mark.usefixtures("quick")
def test_follow_ends_with_a_run_that_is_stopped(
    workplace: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    run = workplace.run("one", submitted("7"), {**started("7"), "attempt": 1})
    left = attempt("ended", 1, exit_code=75, cause="stopped", why="stopped", step=40)
    asked = attempt("stop_requested", 1)
    story(
        workplace, run, say("RUNNING"), f"{asked}; {say('RUNNING')}",
        f"{left}; {say('COMPLETING')}", say("FAILED"),
    )  # fmt: skip
    assert follow(run) == 75
    said = told(capfd.readouterr().err)
    assert said[1].startswith("running on h01 h02: asked to save a checkpoint and exit")
    assert said[-2:] == [
        "stopped: by 'clusterddp stop' at step 40 [CD1204]",
        "  clusterddp resume one",
    ]


@pytest.mark.usefixtures("quick")
def test_earlier_requeues_are_no_news(
    workplace: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    start = {**started("7"), "attempt": 1}
    end = {**ended("7", 75), "attempt": 1, "cause": "time limit", "why": ""}
    again = {**started("7", restart=1), "attempt": 2}
    run = workplace.run("one", submitted("7"), start, end, again)
    story(
        workplace, run, say("RUNNING"),
        f"{attempt('ended', 2, restart=1, exit_code=0, cause='done', why='')}; {say('RUNNING')}",
    )  # fmt: skip
    assert follow(run) == 0
    assert "requeued" not in capfd.readouterr().err


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (say("TIMEOUT"), "failed: the job reached its time limit [CD1205]"),
        (say("CANCELLED"), "cancelled"),
        (say("NODE_FAIL"), "failed: a node of the job failed [CD1202]"),
        ("exit 0", "unknown: Slurm no longer knows the job"),
    ],
)
def test_follow_takes_slurms_word_when_the_run_recorded_no_end(
    workplace: Workplace, capfd: pytest.CaptureFixture[str], answer: str, words: str
) -> None:
    run = workplace.run("one", submitted("7"), started("7"))
    story(workplace, run, say("RUNNING"), answer)
    assert follow(run) == 1
    assert f"one: {words}" in capfd.readouterr().err


@pytest.mark.usefixtures("quick")
def test_follow_outlasts_a_controller_that_is_down(
    workplace: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    run = workplace.run("one", submitted("7"), started("7"))
    down = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    story(workplace, run, *[down] * 6, f"{record('ended', exit_code=0)}; {down}")
    assert follow(run) == 0
    assert capfd.readouterr().err.count("Slurm cannot be queried") == 1


@pytest.mark.usefixtures("quick")
def test_follow_of_an_ended_run_returns_at_once(workplace: Workplace) -> None:
    assert follow(workplace.run("one", submitted("7"), started("7"), ended("7", 0))) == 0
    assert workplace.calls == []


class Follower:
    """`clusterddp logs -f` as a process of its own, read with a bound."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "clusterddp", "logs", "-f", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.seen = b""

    def wait_for(self, text: str, timeout: float = 90) -> None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while text.encode() not in self.seen:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self.process.stdout], [], [], max(left, 0))
            piece = os.read(self.process.stdout.fileno(), 65536) if readable else b""
            assert piece, f"no {text!r} in {self.seen!r}"
            self.seen += piece

    def end(self) -> int:
        self.process.kill()
        rest, _ = self.process.communicate()
        self.seen += rest
        return self.process.returncode


def test_logs_f_follows_files_that_do_not_exist_yet(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("7", launcher="local", pid=os.getpid(), time=time.time()))
    follower = Follower("--rank", "0", "--rank", "1")
    try:
        follower.wait_for("one: starting")
        write_logs(run, rank_1="late\nhalf")
        follower.wait_for("rank-1 | late\n")
        write_logs(run, rank_0="zero\n")
        follower.wait_for("rank-0 | zero\n")
        assert b"half" not in follower.seen  # a line is shown whole
        add_event(run, "ended", job_id="7", restart=0, exit_code=0)
        follower.wait_for("rank-1 | half\n")
        follower.wait_for("one: done")
        assert follower.process.wait(timeout=90) == 0
    finally:
        follower.end()


def test_ctrl_c_ends_the_following_and_not_the_run(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("7", launcher="local", pid=os.getpid(), time=time.time()))
    write_logs(run, rank_0="hello\n")
    follower = Follower()
    try:
        follower.wait_for("hello")
        follower.process.send_signal(signal.SIGINT)
        follower.wait_for("one continues")
        assert follower.process.wait(timeout=90) == 130
    finally:
        follower.end()
    assert kinds(run) == ["submitted"]

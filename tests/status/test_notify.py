"""The program that is told a run's end: once, bounded, and without a part in the verdict."""

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from clusterddp import log, polling
from clusterddp.errors import RequestError
from clusterddp.files import read_json
from clusterddp.launchers import notice_job
from clusterddp.request.spec import JobSpec
from clusterddp.run.run_dir import RunDir
from clusterddp.status import notify
from clusterddp.status.status import run_status
from tests.cli.made_runs import Workplace, ended, started, submitted, workplace
from tests.event_lines import kinds
from tests.hostile import CARRIED
from tests.waiting import PATIENCE, dying_with_us, has_gone, wait_for

__all__ = ["workplace"]

HISTORY = [submitted("1"), {**started("1"), "attempt": 1}]
DONE = [*HISTORY, ended("1", 0, cause="done", attempt=1)]


def asking(run: RunDir, *words: str) -> JobSpec:
    return dataclasses.replace(run.load_spec(), notify=words)


def python(*lines: str) -> tuple[str, ...]:
    text = "\n".join(lines)
    return (sys.executable, "-c", f"exec({text!r})")


def noted(run: RunDir) -> dict[str, object]:
    [mark] = run.path.glob("notified-*.json")
    return read_json(mark) or {}


def test_whoever_is_first_tells_and_the_words_arrive_as_they_are(workplace: Workplace) -> None:
    run = workplace.run("one", *DONE)
    tell = python(
        "import json, sys",
        "content = json.dumps([json.load(sys.stdin), sys.argv[1:]])",
        f"open({str(workplace.folder / 'told')!r}, 'a').write(content + chr(10))",
    )
    spec = asking(run, *tell, *CARRIED)
    status = run_status(run, {})
    was_run: list[bool] = []
    threads = [
        threading.Thread(target=lambda: was_run.append(notify.send(run, spec, status, "script")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(was_run) == [False, False, False, True]
    [line] = (workplace.folder / "told").read_text().splitlines()
    verdict, words = json.loads(line)
    assert words == CARRIED
    assert (verdict["state"], verdict["name"], verdict["notified_by"]) == ("done", "one", "script")
    assert noted(run)["exit_code"] == 0
    assert not list(workplace.folder.rglob("pwned"))
    with pytest.raises(RequestError, match="--notify: the first word is empty"):
        asking(run, "", "x")


def test_each_submission_of_a_persons_has_an_end_of_its_own(workplace: Workplace) -> None:
    again = [
        {"event": "resume_requested", "changes": []},
        submitted("2"),
        {**started("2"), "attempt": 2},
    ]
    in_place = {**submitted("3"), "in_place_of": "2", "why": "signal"}
    for name, history, number in (
        ("a", DONE, 1),
        ("b", [*DONE, *again], 2),
        ("c", [*DONE, *again, in_place], 2),
        ("d", [], 1),
        ("e", [started("1"), {"event": "resume_requested", "changes": []}], 2),
    ):
        run = workplace.run(name, *history)
        assert notify.marker(run).name == f"notified-{number:04d}.json", name


@pytest.mark.parametrize(
    ("name", "history", "is_told"),
    [
        ("done", DONE, True),
        ("failed", [*HISTORY, ended("1", 3, cause="failed", why="no restart", attempt=1)], True),
        ("running", HISTORY, False),
        ("requeued",
         [*HISTORY, ended("1", 75, cause="signal"), {"event": "requeued", "job_id": "1"}], False),
        ("next", [*HISTORY, ended("1", 75, cause="signal"), {**submitted("2"), "in_place_of": "1"}],
         False),
        ("undecided", [*HISTORY, ended("1", 75, cause="signal")], False),
    ],
)  # fmt: skip
def test_the_script_tells_an_end_for_good_alone(
    workplace: Workplace, name: str, history: list[dict[str, object]], is_told: bool
) -> None:
    run = workplace.run(name, *history)
    notify.notify_at_end(run, asking(run, "true"))
    assert bool(list(run.path.glob("notified-*.json"))) is is_told


def test_a_program_that_fails_hangs_or_is_not_there_is_noted(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Killed before it was deaf is as well.
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'])"
    for name, words, code, problem in (
        ("fails", python("import sys", "print('words')", "sys.exit(3)"), 3, ""),
        ("hangs", python(deaf, child, "time.sleep(600)"), (137, 143), "ended after the timeout of"),
        ("gone", ("/nowhere/tell",), None, "/nowhere/tell does not start: No such file"),
        ("loud", python("print('x' * (3 << 20))"), 0, ""),
    ):
        run = workplace.run(name, *DONE)
        hangs = name == "hangs"
        monkeypatch.setattr(polling, "NOTIFY_PROGRAM_SECONDS", 1.0 if hangs else PATIENCE)
        monkeypatch.setattr(polling, "NOTIFY_PROGRAM_EXIT_SECONDS", 0.5 if hangs else PATIENCE)
        lines: list[str] = []
        with log.to(lines.append):
            notify.notify_at_end(run, asking(run, *words))
        mark = noted(run)
        assert mark["exit_code"] in (code if isinstance(code, tuple) else (code,)), (name, mark)
        assert str(mark["problem"]).startswith(problem), (name, mark)
        assert any(f"--notify for {name} (done): " in line for line in lines)
        printed = run.notify_log.read_text()
        assert len(printed) < (1 << 20) + 200
    assert "words" in RunDir(workplace.root / "fails").notify_log.read_text()
    assert "bytes more" in printed


def test_its_group_is_killed_while_its_number_is_its_own(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, kill = list[bool](), os.killpg

    def noted_kill(group: int, number: int) -> None:
        killed.append(Path(f"/proc/{group}").exists())
        kill(group, number)

    monkeypatch.setattr(os, "killpg", noted_kill)
    run = workplace.run("one", *DONE)
    notify.notify_at_end(run, asking(run, sys.executable, "-c", "raise SystemExit(3)"))
    assert (killed, noted(run)["exit_code"]) == ([True], 3)


def test_what_has_left_its_group_prints_to_no_file_but_the_log(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "NOTIFY_PROGRAM_EXIT_SECONDS", 0.05)
    folder = workplace.folder
    late = f"/usr/bin/touch {folder}/up; until [ -e {folder}/go ]; do /bin/sleep 0.02; done"
    leaves = (
        f"/usr/bin/setsid /bin/sh -c '{late}; echo late' & until [ -e {folder}/up ]; do :; done"
    )
    run = workplace.run("one", *DONE)
    notify.notify_at_end(run, asking(run, "/bin/sh", "-c", leaves))
    others = [(folder / f"other-{number}").open("w+b") for number in range(9)]
    try:
        (folder / "go").touch()
        wait_for(lambda: "late" in run.notify_log.read_text(), "its last word")
        assert [other.read() for other in others] == [b""] * 9
    finally:
        for other in others:
            other.close()


@pytest.mark.parametrize("how", ["too late", "Ctrl-C"])
def test_what_it_has_started_ends_with_it_in_sessions_of_their_own_too(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = workplace.folder
    stays = "/bin/sh -c 'echo $$ >$0.new; mv $0.new $0; exec sleep 600'"
    ways = (
        f"{stays} {folder}/group &",
        f"setsid {stays} {folder}/session &",
        f"(setsid {stays} {folder}/orphan &);",
    )
    names = ("group", "session", "orphan")
    monkeypatch.setattr(polling, "NOTIFY_PROGRAM_EXIT_SECONDS", 0.5)

    def ends(_program: object, seconds: float) -> bool:
        wait_for(lambda: all((folder / name).exists() for name in names), "what it starts")
        if how == "Ctrl-C":
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(notify, "_ends", ends)
    monkeypatch.setenv("PATH", os.defpath)
    other = subprocess.Popen(["sleep", "600"], preexec_fn=dying_with_us())  # noqa: PLW1509
    run = workplace.run("one", *DONE)
    spec = asking(run, "/bin/sh", "-c", " ".join([*ways, "sleep 600"]))
    try:
        with contextlib.suppress(KeyboardInterrupt):
            notify.notify_at_end(run, spec)
        assert all(has_gone(int((folder / name).read_text())) for name in names)
        assert other.poll() is None  # no other child of ours
    finally:
        other.kill()
        other.wait()
        for name in names:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.kill(int((folder / name).read_text()), signal.SIGKILL)


def test_a_fault_of_ours_is_logged_and_no_more(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workplace.run("one", *DONE)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(notify, "send", fail)
    lines: list[str] = []
    with log.to(lines.append):
        notify.notify_at_end(run, asking(run, "true"))
    assert lines == ["--notify: ZeroDivisionError: a bug"]


def test_the_job_waits_for_the_next_one_where_the_run_goes_on(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "NOTIFY_POLL_SECONDS", 0.01)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    in_place = {**submitted("2"), "in_place_of": "1", "why": "signal"}
    queued = {"event": "notice_queued", "job_id": "1", "notice_job": "9"}
    run = workplace.run("one", *HISTORY, queued, ended("1", 75, cause="signal"), in_place)
    run.spec.write_text(asking(run, "true").to_json())
    run.notice_script.write_text(notice_job.render(run.load_spec()))
    workplace.command("squeue", "echo '2 2|PENDING|Priority|'")
    workplace.command("sbatch", "cat >/dev/null; echo 10")
    notify.notify_from_job(run)
    assert [line for line in workplace.calls if line.startswith("sbatch")] == [
        "sbatch --parsable --dependency=afterany:2"
    ]
    assert not list(run.path.glob("notified-*.json"))
    workplace.command("squeue", "echo '2 2|CANCELLED|None|'")
    workplace.command("scontrol", "exit 1")
    notify.notify_from_job(run)
    assert (noted(run)["state"], noted(run)["by"]) == ("cancelled", "dependent job")
    before = len(workplace.calls)
    notify.notify_from_job(run)  # it has been told
    assert len(workplace.calls) == before


@pytest.mark.parametrize(
    ("name", "history"),
    [
        ("queued", [submitted("1")]),
        ("requeued", [*HISTORY, ended("1", 75, cause="signal"),
                      {"event": "requeued", "job_id": "1", "why": "signal"}]),
        ("killed", HISTORY),
    ],
)  # fmt: skip
def test_a_job_that_scancel_has_ended_is_cancelled_after_slurm_has_forgotten_it(
    workplace: Workplace, name: str, history: list[dict[str, object]]
) -> None:
    run = workplace.run(name, *history)
    run.spec.write_text(asking(run, "/usr/bin/tee", str(workplace.folder / "told")).to_json())
    workplace.command("squeue", "echo '1 1|CANCELLED|None|'")
    shown = "JobState=CANCELLED Reason=None Dependency=(null) Requeue=0 Reboot=0 ExitCode=0:0"
    workplace.command("scontrol", f"echo 'JobId=1 {shown} RunTime=00:00:00'")
    notify.notify_from_job(run)
    assert noted(run)["state"] == "cancelled"
    code = json.loads((workplace.folder / "told").read_text())["exit_code"]
    assert code == {"queued": None, "requeued": 75, "killed": 0}[name]
    assert json.loads(workplace.invoke("status", name, "--json").out)["exit_code"] == code
    [mark] = run.path.glob("notified-*.json")
    mark.unlink()
    notify.notify_from_job(run)
    assert kinds(run).count("cancelled") == 1  # however often it looks
    workplace.command("squeue", "echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1")
    workplace.command("sacct", "exit 1")
    assert json.loads(workplace.invoke("status", name, "--json").out)["state"] == "cancelled"
    got = workplace.invoke("submit", f"--after={name}:failed", "--no-snapshot", "--", "/bin/true")
    assert (got.code, "cancelled" in got.err) == (2, True), got


@pytest.mark.parametrize("folder", ["logs", "notify.log"])
def test_a_full_disk_keeps_nobody_from_being_told(workplace: Workplace, folder: str) -> None:
    run = workplace.run("one", *DONE)
    if folder == "logs":
        run.logs.rmdir()
        run.logs.write_text("in the way")
    else:
        run.notify_log.symlink_to("/dev/full")
    notify.notify_at_end(run, asking(run, "/usr/bin/touch", str(workplace.folder / "told")))
    assert (workplace.folder / "told").exists()
    assert noted(run)["exit_code"] == 0


def test_where_nothing_can_be_started_the_next_one_tells(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workplace.run("one", *DONE)
    spec = asking(run, "/usr/bin/touch", str(workplace.folder / "told"))

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as failing:
        failing.setattr(notify.tempfile, "TemporaryFile", fail)
        notify.notify_at_end(run, spec)
    assert not list(run.path.glob("notified-*.json"))
    notify.notify_at_end(run, spec)
    assert (workplace.folder / "told").exists()


def test_a_slurm_that_does_not_answer_is_no_end(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "NOTIFY_POLL_SECONDS", 0.01)
    monkeypatch.setattr(polling, "NOTIFY_SETTLE_SECONDS", 0.0)
    goes_on = [
        ended("1", 75, cause="time limit"),
        {"event": "requeued", "job_id": "1", "why": "it"},
    ]
    run = workplace.run("one", *HISTORY, *goes_on)
    run.spec.write_text(asking(run, "true").to_json())
    workplace.command("sacct", "exit 1")
    # It never answers; the second time the run is done.
    line = json.dumps(ended("1", 0, cause="done", attempt=1))
    asked = workplace.folder / "asked"
    workplace.command(
        "squeue",
        f"if [ -e {asked} ]; then echo '{line}' >>{run.events}; fi; : >{asked}\n"
        "echo 'Unable to contact slurm controller' >&2; exit 1",
    )
    notify.notify_from_job(run)
    assert noted(run)["state"] == "done"


def test_the_jobs_script_holds_no_word_of_the_program(workplace: Workplace) -> None:
    run = workplace.run("one", partition="gpu", account="lab", time="10:00", mem="64G")
    spec = asking(run, *CARRIED)
    script = notice_job.render(dataclasses.replace(spec, omit_directives=("account",)))
    assert "#SBATCH --partition=gpu" in script
    assert "#SBATCH --ntasks=1" in script
    assert "gpus" not in script
    assert "account" not in script
    assert "64G" not in script
    assert "pwned" not in script
    assert Path(workplace.folder, "jobs/one").as_posix() in script

"""`clusterddp clean`."""

import dataclasses
import hashlib
import json
import os
import threading
import time
from io import StringIO
from pathlib import Path

import pytest

from clusterddp.checkpoints import catalog
from clusterddp.run.run_dir import RunDir
from clusterddp.status import notify
from clusterddp.status.find import find_run
from clusterddp.submission import clean
from clusterddp.submission.claim import claimed
from tests.checkpoints.made_checkpoints import DAMAGE, attempt, make
from tests.cli.made_runs import Workplace, ended, started, submitted, workplace
from tests.event_lines import read_events

__all__ = ["workplace"]

HISTORY = [submitted("1"), {**started("1"), "attempt": 1}]
DONE = [*HISTORY, ended("1", 0, cause="done", attempt=1)]
STOPPED = [*HISTORY, ended("1", 75, cause="stopped", why="asked for", attempt=1)]
FAILED = [*HISTORY, ended("1", 1, cause="failed", why="a failed run", attempt=1)]
BUNDLE = "clusterddp-0.1.1-0123456789ab.pyz"


@pytest.fixture(autouse=True)
def slurm(workplace: Workplace) -> None:
    """A Slurm that has forgotten every job."""
    workplace.command("squeue", "exit 0")
    workplace.command("sacct", "exit 1")


def with_code(run: RunDir, **files: str) -> None:
    """A copy of code with its record."""
    run.code.mkdir()
    for name, text in files.items():
        (run.code / f"{name}.py").write_text(text)
    digests = {f"{n}.py": hashlib.sha256(t.encode()).hexdigest() for n, t in files.items()}
    record = {"files": len(digests), "bytes": 9, "commit": "", "digests": digests, "large": []}
    run.code_record.write_text(json.dumps(record))


def with_clusterddp(run: RunDir, *earlier: str) -> None:
    """A clusterddp of its own, with bytecode, and earlier ones."""
    (run.path / "__pycache__").mkdir()
    for name in (BUNDLE, *earlier):
        (run.path / name).write_bytes(b"x" * 100)
        (run.path / "__pycache__" / f"{name[:-4]}.6f0d-0123456789ab.zip").write_bytes(b"y" * 10)
    run.bundle.symlink_to(BUNDLE)


def tree(folder: Path) -> list[str]:
    """All that lies in a directory, but for the claim of whoever cleaned."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return sorted(name for name in names if not name.endswith(".claim"))


def checkpoints(run: RunDir) -> list[str]:
    return sorted(p.relative_to(run.attempts).as_posix() for p in run.attempts.rglob("*.pt"))


def test_a_run_that_is_done_keeps_the_last_and_the_best_checkpoint_and_its_records(
    workplace: Workplace,
) -> None:
    run = workplace.run("one", *DONE)
    first = attempt(run, 1, 100, 200, 300)
    second = attempt(run, 2, 400, 500, start=300, best=200)
    os.link(first.checkpoints / "step-00000200.pt", second.checkpoints / "step-00000200.pt")
    os.link(
        first.checkpoints / "step-00000200.pt.sha256",
        second.checkpoints / "step-00000200.pt.sha256",
    )
    with_code(run, train="print()", lib="x = 1")
    (run.code / "model.pt").write_text("a result")
    (run.code / "lib.py").write_text("the run's own")
    with_clusterddp(run, "clusterddp-0.1.0-abcdef012345.pyz")
    before = tree(run.path)
    told = json.loads(workplace.invoke("clean", "--dry-run", "--json").out)
    assert tree(run.path) == before
    got = workplace.invoke("clean", "--yes")
    assert (got.code, got.err) == (0, "")
    assert checkpoints(run) == [
        "0002/checkpoints/step-00000200.pt", "0002/checkpoints/step-00000500.pt",
    ]  # fmt: skip
    assert tree(run.code) == ["lib.py", "model.pt"]
    assert not [p.name for p in run.path.iterdir() if p.suffix in (".pyz", ".claim")]
    assert (run.spec.is_file(), run.code_record.is_file()) == (True, True)
    [event] = [e for e in read_events(run) if e["event"] == "cleaned"]
    assert event["checkpoints"] == [100, 200, 300, 400]
    assert event["code_files"] == 1
    assert f"removed 7 items of 1 run, {event['bytes'] / 1000:.1f} kB" in got.out
    [entry] = told
    assert (entry["name"], entry["bytes"], entry["removed"]) == ("one", event["bytes"], False)
    # The second name of step 200 stays, so its bytes do.
    gives_back = {(i["kind"], i["step"]): i["bytes"] > 0 for i in entry["items"]}
    assert gives_back[("checkpoint", 200)] is False
    assert gives_back[("checkpoint", 100)] is gives_back[("code", None)] is True


def test_afterwards_the_commands_say_what_is_gone(workplace: Workplace) -> None:
    run = workplace.run("one", *FAILED)
    with_code(run, train="print()")
    with_clusterddp(run)
    assert workplace.invoke("clean", "--yes").code == 0
    assert "cleaned     1 file of the code, its clusterddp (" in workplace.invoke("status").out
    assert workplace.invoke("report", "one").code == 0
    done = workplace.run("done", *DONE)
    attempt(done, 1, 100, 200, best=100)
    make(done.attempts / "0001/checkpoints", 150)
    assert workplace.invoke("clean", "done", "--yes").code == 0
    listed = workplace.invoke("checkpoints", "done")
    assert [line.split()[0] for line in listed.out.splitlines()] == ["STEP", "100", "200"]
    assert listed.err == "removed by 'clusterddp clean': step 150\n"
    assert "1 checkpoint (" in workplace.invoke("status", "done").out


@pytest.mark.parametrize(
    ("state", "history", "word"),
    [
        ("stopped", STOPPED, "stopped, can resume"),
        ("failed", FAILED, "failed, can resume from step 300"),
        ("unknown", HISTORY, "unknown, can resume"),
        ("created", [], "created, never submitted"),
    ],
)
def test_a_run_that_could_go_on_is_left_alone_unless_named(
    workplace: Workplace, state: str, history: list[dict[str, object]], word: str
) -> None:
    run = workplace.run("one", *history)
    attempt(run, 1, 100, 200, 300, best=200)
    run.current.symlink_to("attempts/0001")
    run.checkpoints.symlink_to("current/checkpoints")
    if not history:
        run.events.unlink()
        (run.attempts / "0001/attempt.json").unlink()
    with_code(run, train="print()")
    with_clusterddp(run, "clusterddp-0.1.0-abcdef012345.pyz")
    before = tree(run.path)
    got = workplace.invoke("clean", "--yes")
    assert (got.code, tree(run.path)) == (0, before)
    assert f"skipped: 1 {word}" in got.err
    assert workplace.invoke("clean", "one", "--yes").code == 0
    assert [name[-6:] for name in checkpoints(run)] == ["200.pt", "300.pt"]
    assert (run.code / "train.py").exists()
    assert (run.path / BUNDLE).exists()
    assert not (run.path / "clusterddp-0.1.0-abcdef012345.pyz").exists()


def test_the_only_copy_of_the_code_of_a_run_that_can_restart_stays(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("1"), {"event": "cancelled", "job_id": "1"})
    with_code(run, mine="def build(): ...")
    assert "1 file of its copy of the code" in workplace.invoke("clean", "--dry-run").out
    spec = run.load_spec()
    assert spec.train
    own = dataclasses.replace(spec, train=dataclasses.replace(spec.train, model="mine:build"))
    run.spec.write_text(own.to_json())
    assert "skipped: 1 cancelled, can start again" in workplace.invoke("clean", "--yes").err
    assert (run.code / "mine.py").exists()


def test_the_clusterddp_stays_that_is_to_tell_the_end(workplace: Workplace) -> None:
    run = workplace.run("one", *DONE, {"event": "notice_queued", "job_id": "1", "notice_job": "2"})
    run.spec.write_text(dataclasses.replace(run.load_spec(), notify=("true",)).to_json())
    with_clusterddp(run)
    assert workplace.invoke("clean", "one", "--yes").code == 0
    assert (run.path / BUNDLE).exists()
    notify.marker(run).touch()
    assert workplace.invoke("clean", "one", "--yes").code == 0
    assert not (run.path / BUNDLE).exists()


def test_a_running_run_that_is_named_keeps_all_of_its_present_attempt(workplace: Workplace) -> None:
    workplace.command("squeue", 'echo "1 1|RUNNING|None|"')
    run = workplace.run("one", *HISTORY)
    attempt(run, 1, 100, 200)
    attempt(run, 2, 250, 300, start=200)
    assert "skipped: 1 running" in workplace.invoke("clean", "--yes").err
    assert workplace.invoke("clean", "one", "--yes").code == 0
    assert [name[-6:] for name in checkpoints(run)] == ["250.pt", "300.pt"]


def test_it_asks_once_and_takes_no_answer_for_a_no(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        attempt(workplace.run(name, *DONE), 1, 100, 200)
    before = tree(workplace.root)
    got = workplace.invoke("clean")
    assert (got.code, "no terminal to confirm on" in got.err) == (2, True)
    monkeypatch.setattr("sys.stdin", stdin := StringIO("n\ny\n"))
    stdin.isatty = lambda: True  # type: ignore[method-assign]
    got = workplace.invoke("clean")
    assert (got.code, got.err.count("Remove 2 items of 2 runs")) == (2, 1)
    assert "nothing was removed. [CD0109]" in got.err
    assert tree(workplace.root) == before
    assert workplace.invoke("clean").code == 0
    assert len(checkpoints(RunDir(workplace.root / "a"))) == 1
    assert "--json needs --yes or --dry-run" in workplace.invoke("clean", "--json").err


def test_only_runs_that_ended_long_enough_ago(workplace: Workplace) -> None:
    old, new = workplace.run("old", *DONE, age=40 * 86400), workplace.run("new", *DONE, age=60)
    for run in (old, new):
        attempt(run, 1, 100, 200)
    assert workplace.invoke("clean", "--older-than", "30d", "--yes").code == 0
    assert (len(checkpoints(old)), len(checkpoints(new))) == (1, 2)
    for wrong in ("d", "-3d", "3 d", "\u0661d", "3y", "$(id)d"):
        got = workplace.invoke("clean", "--older-than", wrong, "--dry-run")
        assert (got.code, "is not a valid duration" in got.err) == (2, True), wrong
    got = workplace.invoke("clean", "--older-than", "30", "--dry-run")
    assert (got.code, "--older-than: '30' is not a valid duration. Use " in got.err) == (2, True)


def test_no_link_is_followed_out_of_a_run(workplace: Workplace, tmp_path: Path) -> None:
    """Links in the place of each directory on the way, hostile names in the records."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for step in (100, 200, 300):
        make(outside, step)
    (outside / "train.py").write_text("print()")
    one = workplace.run("one", *DONE)  # its attempt's directory of checkpoints
    attempt(one, 1, 400).checkpoints.rename(one.path / "moved")
    (one.attempts / "0001/checkpoints").symlink_to(outside)
    two = workplace.run("two", *DONE)  # its attempt
    attempt(two, 1, 100, 200).path.rename(tmp_path / "attempt")
    (two.attempts / "0001").symlink_to(tmp_path / "attempt")
    three = workplace.run("three", *DONE)  # code, and a name in its record that leads out
    with_code(three, train="print()")
    (three.code / "train.py").unlink()
    three.code.rmdir()
    three.code.symlink_to(outside)
    four = workplace.run("four", *DONE)
    with_code(four, train="print()")
    names = ["../../../outside/train.py", str(outside / "train.py"), "sub/train.py", "..", "", "."]
    (four.code / "sub").symlink_to(outside)
    record = json.loads(four.code_record.read_text())
    digest = record["digests"]["train.py"]
    four.code_record.write_text(json.dumps({**record, "digests": dict.fromkeys(names, digest)}))
    before = tree(outside), tree(tmp_path / "attempt")
    got = workplace.invoke("clean", "--yes")
    assert got.code == 0, got.err
    assert (tree(outside), tree(tmp_path / "attempt")) == before
    assert (four.code / "train.py").exists()
    # A run that is a link is cleaned where it is named.
    five = workplace.run("five", *DONE)
    attempt(five, 1, 100, 200)
    five.path.rename(tmp_path / "far")
    five.path.symlink_to(tmp_path / "far")
    assert "its directory is a link" in workplace.invoke("clean", "--yes").err
    assert len(checkpoints(five)) == 2
    workplace.invoke("clean", "five", "--yes")
    assert len(checkpoints(five)) == 1


def test_damaged_checkpoints_are_no_last_one_and_all_stay_where_none_is_valid(
    workplace: Workplace,
) -> None:
    run = workplace.run("one", *DONE)
    made = attempt(run, 1, 100, 200, best=100)
    DAMAGE["flipped"][0](make(made.checkpoints, 300))
    assert workplace.invoke("clean", "--yes").code == 0
    assert [name[-6:] for name in checkpoints(run)] == ["100.pt", "200.pt"]
    for path in made.checkpoints.glob("*.pt"):
        DAMAGE["torn"][0](path)
    assert "nothing to remove" in workplace.invoke("clean", "--yes").err
    assert len(checkpoints(run)) == 2


def test_a_checkpoint_that_another_run_resumes_stays(workplace: Workplace) -> None:
    run, other = workplace.run("one", *DONE), workplace.run("other", submitted("2"))
    path = attempt(run, 1, 100, 200, 300).checkpoints / "step-00000100.pt"
    spec = json.loads(other.spec.read_text())
    spec["train"]["init_from"] = str(path)
    other.spec.write_text(json.dumps(spec))
    workplace.invoke("clean", "one", "--yes")
    assert [name[-6:] for name in checkpoints(run)] == ["100.pt", "300.pt"]


def test_two_at_once_and_a_start_in_the_midst(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workplace.run("one", *DONE)
    attempt(run, 1, *range(100, 1000, 100))
    with claimed(run):
        got = workplace.invoke("clean", "--yes")
    assert got.code == 2
    assert "one is being resumed" in got.err
    assert len(checkpoints(run)) == 9
    remove, removed = clean._remove, []

    def start_after_two(at: RunDir, item: clean.Item) -> None:
        remove(at, item)
        removed.append(item)
        if len(removed) == 2:
            attempt(run, 2, start=900)

    monkeypatch.setattr(clean, "_remove", start_after_two)
    got = workplace.invoke("clean", "--yes")
    assert got.code == 2
    assert "one has started meanwhile" in got.err
    assert len(checkpoints(run)) == 7
    [event] = [e for e in read_events(run) if e["event"] == "cleaned"]
    assert len(event["checkpoints"]) == 2
    monkeypatch.undo()
    found = [find_run(workplace.root, "one")]
    codes: list[object] = []

    def clean_it() -> None:
        try:
            clean.clean(found[0], named=True, now=time.time())
            codes.append(0)
        except Exception as error:
            codes.append(error)

    threads = [threading.Thread(target=clean_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert catalog.find_newest(run) == run.attempts / "0001/checkpoints/step-00000900.pt"
    assert 0 in codes


def test_what_cannot_be_removed_is_said_and_the_others_go(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = workplace.run("bad", *DONE), workplace.run("good", *DONE)
    for run in (bad, good):
        attempt(run, 1, 100, 200)
    remove = clean._remove

    def refuse(run: RunDir, item: clean.Item) -> None:
        if run.name == "bad":
            raise PermissionError(13, "Permission denied", item.path)
        remove(run, item)

    monkeypatch.setattr(clean, "_remove", refuse)
    got = workplace.invoke("clean", "--yes")
    assert got.code == 1
    path = "attempts/0001/checkpoints/step-00000100.pt"
    assert f"bad: cannot remove {path}: Permission denied" in got.err
    assert (len(checkpoints(bad)), len(checkpoints(good))) == (2, 1)
    assert [e["event"] for e in read_events(bad)].count("cleaned") == 0

"""`clusterddp checkpoints`."""

import json
import os
import time

import pytest

from tests.checkpoints.made_checkpoints import DAMAGE, attempt, make
from tests.cli.made_runs import Workplace, submitted, workplace

__all__ = ["workplace"]


def test_checkpoints_are_listed_and_verified(workplace: Workplace) -> None:
    made = attempt(workplace.run("one", submitted("1")), 1, 100, 200, best=100)
    then = time.time() - 125
    os.utime(made.checkpoints / "step-00000100.pt", (then, then))
    damages = [
        "flipped", "torn", "empty", "no checksum",
        "a dangling link", "a link elsewhere", "a FIFO", "another format",
    ]  # fmt: skip
    steps = list(range(300, 1100, 100))
    for step, damage in zip(steps, damages, strict=True):
        DAMAGE[damage][0](make(made.checkpoints, step))
    got = workplace.invoke("checkpoints", "one")
    header, *rows = got.out.splitlines()
    assert header.split() == ["STEP", "AGE", "SIZE", "STATE"]
    assert [row.split()[0] for row in rows] == ["100", "200", *map(str, steps)]
    assert rows[0].split() == ["100", "2m05s", "2.1", "kB", "best", "verified"]
    assert rows[1].split()[-2:] == ["next", "verified"]
    assert rows[2].endswith("SHA-256 differs")
    assert rows[3].endswith("1.0 kB        cut off")
    assert rows[4].endswith("0 B           empty")
    assert [row.rpartition("  ")[2] for row in rows[5:]] == [
        "no checksum", "a dangling link", "a link", "cannot be read: not a regular file",
        "format 99",
    ]  # fmt: skip
    assert (got.code, got.err) == (0, "")


def test_the_latest_run_is_meant_without_a_name(workplace: Workplace) -> None:
    workplace.run("old", age=60)
    attempt(workplace.run("new"), 1, 7, best=7)
    assert workplace.invoke("checkpoints").out.splitlines()[1].split()[-2:] == [
        "best,next", "verified",
    ]  # fmt: skip


def test_what_a_superseded_attempt_wrote_is_named(workplace: Workplace) -> None:
    run = workplace.run("one")
    attempt(run, 1, 100, 200)
    attempt(run, 2, start=100)
    lines = workplace.invoke("checkpoints", "one").out.splitlines()
    assert "next" in lines[1]
    assert lines[2].endswith("superseded: attempt 2 resumed from step 100")


def test_json_has_every_field(workplace: Workplace) -> None:
    made = attempt(workplace.run("one"), 3, 100, best=100)
    [entry] = json.loads(workplace.invoke("checkpoints", "one", "--json").out)
    path = made.checkpoints / "step-00000100.pt"
    assert entry == {
        "path": str(path.relative_to(workplace.folder)),
        "step": 100,
        "bytes": path.stat().st_size,
        "modified": path.stat().st_mtime,
        "problem": "",
        "is_best": True,
        "is_next": True,
        "from_memory": False,
        "attempt": 3,
    }


def test_none_are_no_error(workplace: Workplace) -> None:
    workplace.run("one")
    got = workplace.invoke("checkpoints", "one")
    assert (got.code, got.out, got.err) == (0, "", "one has no checkpoints\n")
    assert workplace.invoke("checkpoints", "one", "--json").out.strip() == "[]"


def test_checkpoints_that_are_gone_are_told_from_none_yet(workplace: Workplace) -> None:
    attempt(workplace.run("one"), 1).renew_liveness(50, saved=40)
    got = workplace.invoke("checkpoints", "one")
    assert (got.code, got.out) == (0, "")
    assert "the checkpoints of one are gone: it had saved step 40" in got.err
    assert "clusterddp resume one --from-scratch" in got.err


@pytest.mark.parametrize("words", ["checkpoints oen", "report one oen"])
def test_no_such_run_is_a_wrong_request(words: str, workplace: Workplace) -> None:
    workplace.run("one")
    got = workplace.invoke(*words.split())
    assert (got.code, got.out) == (2, "")
    assert "Did you mean one?" in got.err


def test_a_folder_that_cannot_be_read_is_an_error(workplace: Workplace) -> None:
    made = attempt(workplace.run("one"), 1)
    made.checkpoints.rmdir()
    made.checkpoints.write_text("")
    got = workplace.invoke("checkpoints", "one")
    assert got.code == 1 and "cannot read the directory" in got.err

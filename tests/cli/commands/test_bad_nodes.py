"""`clusterddp bad-nodes`: the bad nodes of an output root, listed and cleared."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from clusterddp.files import append_json_line
from clusterddp.run import bad_nodes
from tests.cli.made_runs import Workplace, ended, started, submitted, workplace
from tests.event_lines import add_event
from tests.hostile import CARRIED, REFUSED

__all__ = ["workplace"]

DAY = 24 * 3600.0


def marked_bad(root: Path, host: str, age: float = 60, **fields: Any) -> None:
    line = {"host": host, "reason": "lost", "by": "lost", "run": "a", "attempt": 1}
    then = time.time() - age
    line |= {"time": then, "expires": then + DAY, **fields}
    append_json_line(root / bad_nodes.FILE_NAME, line)


def test_the_latest_blamed_stands_first(workplace: Workplace) -> None:
    marked_bad(workplace.root, "h01", age=3600)
    marked_bad(workplace.root, "h02", by="preflight", reason="link at 90 Mb/s")
    marked_bad(workplace.root, "old", age=2 * DAY)
    answer = workplace.invoke("bad-nodes")
    assert answer.code == 0
    header, *rows = [line.split(maxsplit=6) for line in answer.out.splitlines()]
    assert header == ["NODE", "CAUSE", "AGE", "EXPIRES", "RUN", "ATTEMPT", "REASON"]
    assert [row[0] for row in rows] == ["h02", "h01"]
    assert rows[0][1:] == ["preflight", "1m00s", "23h58m", "a", "1", "link at 90 Mb/s"]
    shown = json.loads(workplace.invoke("bad-nodes", "--json").out)
    assert [node["host"] for node in shown] == ["h02", "h01"]
    assert shown[0]["reason"] == "link at 90 Mb/s"


def test_without_bad_nodes_it_says_so(workplace: Workplace) -> None:
    answer = workplace.invoke("bad-nodes")
    assert (answer.code, answer.out, answer.err) == (0, "", "no bad nodes in jobs\n")
    assert workplace.invoke("bad-nodes", "--json").out == "[]\n"


def test_nodes_are_cleared_by_name_by_list_and_all(workplace: Workplace) -> None:
    for host in ("h01", "h02", "h03", "h04"):
        marked_bad(workplace.root, host)
    assert workplace.invoke("bad-nodes", "clear", "h01").out == "cleared h01\n"
    assert workplace.invoke("bad-nodes", "clear", "h[02-03]").out == "cleared h02, h03\n"
    assert list(bad_nodes.read(workplace.root)) == ["h04"]
    assert workplace.invoke("bad-nodes", "clear", "--all").out == "cleared h04\n"
    assert workplace.invoke("bad-nodes", "clear", "--all").out == "no bad nodes to clear\n"
    assert bad_nodes.read(workplace.root) == {}


def test_the_folder_can_stand_before_clear_and_behind_it(
    workplace: Workplace, tmp_path: Path
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        marked_bad(tmp_path / folder, "h01")
    assert workplace.invoke("bad-nodes", "--runs-dir", "one", "clear", "h01").code == 0
    assert workplace.invoke("bad-nodes", "clear", "h01", "--runs-dir", "two").code == 0
    assert not bad_nodes.read(tmp_path / "one") and not bad_nodes.read(tmp_path / "two")


def test_of_a_list_those_that_are_there_are_cleared_and_the_others_named(
    workplace: Workplace,
) -> None:
    marked_bad(workplace.root, "h02")
    answer = workplace.invoke("bad-nodes", "clear", "h[02-04]", "h03")
    assert (answer.code, answer.out) == (0, "cleared h02\n")
    assert answer.err == "clusterddp: not marked bad: h03, h04\n"
    assert bad_nodes.read(workplace.root) == {}


@pytest.mark.parametrize("words", [[], ["clear", "--all"], ["clear", "h01"]])
def test_a_folder_that_is_not_there_is_refused_unless_it_is_the_usual_one(
    workplace: Workplace, words: list[str]
) -> None:
    answer = workplace.invoke("bad-nodes", "--runs-dir", "jbos", *words)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("clusterddp: --runs-dir: the directory 'jbos' does not exist.")
    assert answer.err.endswith(" [CD0501]\n")
    workplace.root.rmdir()
    assert workplace.invoke("bad-nodes").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["h09"], "h09 is not marked bad in 'jobs'. Marked bad: h01."),
        ([], "name the nodes to clear, or give --all."),
        (["h01", "--all"], "Name the nodes to clear, or give --all."),
    ],
)
def test_a_wrong_request_clears_nothing(
    workplace: Workplace, words: list[str], message: str
) -> None:
    marked_bad(workplace.root, "h01")
    answer = workplace.invoke("bad-nodes", "clear", *words)
    assert answer.code == 2
    assert message in answer.err
    assert list(bad_nodes.read(workplace.root)) == ["h01"]


@pytest.mark.parametrize("text", [*CARRIED, *(each for each in REFUSED if "\0" not in each)])
def test_a_hostile_name_is_refused_and_clears_nothing(workplace: Workplace, text: str) -> None:
    marked_bad(workplace.root, "h01")
    answer = workplace.invoke("bad-nodes", "clear", "--", text)
    assert answer.code == 2
    assert answer.err.startswith(("clusterddp: ", "Usage"))
    assert "Traceback" not in answer.err and "\x1b" not in answer.err
    assert list(bad_nodes.read(workplace.root)) == ["h01"]


def test_what_a_stranger_wrote_moves_no_cursor(workplace: Workplace) -> None:
    marked_bad(workplace.root, "h01", reason="up\x1b[2J\nnew", run="\x1b[31m")
    shown = workplace.invoke("bad-nodes").out
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 2


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 1e300])
def test_times_that_are_none_do_no_harm(workplace: Workplace, number: float) -> None:
    for name in ("expires", "time"):
        marked_bad(workplace.root, "h01", **{name: number})
        assert (
            workplace.invoke("bad-nodes").code == workplace.invoke("bad-nodes", "--json").code == 0
        )


def test_a_list_that_cannot_be_read_is_named(workplace: Workplace) -> None:
    (workplace.root / bad_nodes.FILE_NAME).symlink_to("/proc/self/mem")
    answer = workplace.invoke("bad-nodes")
    assert answer.code == 1
    assert "jobs/bad-nodes.jsonl: Input/output error" in answer.err


def test_status_shows_what_a_run_leaves_out_until_it_is_cleared(workplace: Workplace) -> None:
    run = workplace.run("a", submitted("17"))
    marked_bad(workplace.root, "h02")
    add_event(run, "nodes_excluded", job_id="17", nodes={"h02": "lost during attempt 1"})
    assert "excluded    h02: lost during attempt 1\n" in workplace.invoke("status", "a").out
    shown = json.loads(workplace.invoke("status", "a", "--json").out)
    assert shown["excluded_nodes"] == {"h02": "lost during attempt 1"}
    workplace.invoke("bad-nodes", "clear", "h02")
    assert "excluded" not in workplace.invoke("status", "a").out


def test_status_shows_what_a_new_job_of_a_run_that_has_ended_leaves_out(
    workplace: Workplace,
) -> None:
    for name, code, cause in (("a", 1, "preflight"), ("b", 0, "done")):
        end = ended("17", code, attempt=1, cause=cause, why="requeue is off")
        run = workplace.run(name, submitted("17"), {**started("17"), "attempt": 1}, end)
        add_event(run, "nodes_excluded", job_id="17", nodes={"h01": "lost"})
    marked_bad(workplace.root, "h03", reason="/dev/shm: full")
    assert "\nexcluded    h03: /dev/shm: full\n" in workplace.invoke("status", "a").out
    assert "excluded" not in workplace.invoke("status", "b").out


def test_status_shows_the_spares_that_were_asked_for(workplace: Workplace) -> None:
    workplace.run("a", submitted("17"), spare_nodes=1)
    asked = "2 nodes x 4 tasks = 8 ranks, and 1 spare node"
    assert f"\nrequested   {asked}\n" in workplace.invoke("status", "a").out
    assert json.loads(workplace.invoke("status", "a", "--json").out)["spare_nodes"] == 1

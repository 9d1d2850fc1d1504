"""The records of a hold: its requests, and what its events say of its nodes."""

from pathlib import Path

import pytest

from clusterddp.errors import RequestError
from clusterddp.run import events, hold
from clusterddp.run.events import Ended, Event, LostInHold, RunInHold, Started, Submitted
from clusterddp.run.hold import Request, Room
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import hosts_of

BEGAN = Started(time=10.0, nodelist="h[01-03]")
A = RunInHold(time=20.0, run="/jobs/a", request="a-1.json", nodelist="h01")
A_ENDED = RunInHold(time=30.0, run="/jobs/a", request="a-1.json")
REFUSED = RunInHold(time=25.0, run="/jobs/b", request="b-1.json", why="no node is free")


@pytest.mark.parametrize(
    ("history", "free", "idle_since"),
    [
        ([], [], None),
        ([BEGAN], ["h01", "h02", "h03"], 10.0),
        ([BEGAN, A], ["h02", "h03"], None),
        ([BEGAN, A, REFUSED], ["h02", "h03"], None),
        ([BEGAN, REFUSED], ["h01", "h02", "h03"], 10.0),
        ([BEGAN, A, LostInHold(nodes=("h02",)), A_ENDED], ["h01", "h03"], 30.0),
        ([BEGAN, A, Started(time=50.0, nodelist="h04")], ["h04"], 50.0),
    ],
)
def test_the_events_tell_which_nodes_are_free(
    history: list[Event], free: list[str], idle_since: float | None
) -> None:
    room = Room.of(history)
    assert (room.free, room.idle_since) == (free, idle_since)


@pytest.mark.parametrize(
    ("nodes", "nodelist", "usable", "chosen"),
    [
        (1, "", "h[01-03]", ["h02"]),
        (1, "", "h[01,03]", ["h03"]),
        (2, "", "h[01-03]", ["h02", "h03"]),
        (1, "h03", "h03,h01,h02", ["h03"]),
        (2, "h03", "h03,h01,h02", ["h03", "h02"]),
    ],
)
def test_a_run_gets_whole_free_nodes_that_it_can_use(
    nodes: int, nodelist: str, usable: str, chosen: list[str]
) -> None:
    request = Request("/jobs/b", nodes, nodelist, tuple(hosts_of(usable)))
    assert Room.of([BEGAN, A]).choose(request) == chosen


@pytest.mark.parametrize(
    ("nodes", "nodelist", "usable", "why"),
    [
        (3, "", "h[01-03]", "3 nodes requested; a on h01; free: h02, h03"),
        (2, "", "h[01-02]", "2 nodes of h01, h02 requested; a on h01; free: h02, h03"),
        (1, "h01", "h[01-03]", "h01 requested; a on h01"),
        (1, "h99", "h[01-03]", "h99 requested"),
    ],
)
def test_a_run_without_free_nodes_is_refused(
    nodes: int, nodelist: str, usable: str, why: str
) -> None:
    request = Request("/jobs/b", nodes, nodelist, tuple(hosts_of(usable)))
    with pytest.raises(RequestError, match=why):
        Room.of([BEGAN, A]).choose(request)


def test_a_description_names_runs_free_and_lost_nodes() -> None:
    room = Room.of([BEGAN, A, LostInHold(nodes=("h02",))])
    assert room.describe() == "a on h01; free: h03; lost: h02"


def test_a_request_is_taken_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "h")
    assert not hold.is_hold(run)
    hold.prepare(run)
    request = Request("/jobs/a", 2, "h01", ("h01", "h02"), "/home", {"TOKEN": "s'e\ncret"})
    name = hold.ask(run, request)
    assert hold.is_hold(run)
    assert (run.path / "requests" / name).stat().st_mode & 0o777 == 0o600
    (run.path / "requests" / "broken.json").write_text("[")
    assert list(hold.take(run)) == [(name, request)]
    assert list(hold.take(run)) == []


def test_a_withdrawn_request_is_not_taken_and_a_taken_one_not_withdrawn(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "h")
    hold.prepare(run)
    first, second = (hold.ask(run, Request(f"/jobs/{name}")) for name in "ab")
    assert hold.withdraw(run, first)
    assert [name for name, _ in hold.take(run)] == [second]
    assert not hold.withdraw(run, second)


def test_a_run_whose_keeper_died_has_failed_and_a_recorded_end_stays(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    run.path.mkdir()
    events.add(run.events, Submitted(job_id="7", launcher="held"))
    for code in (-9, 1):  # the second one changes nothing
        hold.record_end(run, "7", code)
    [end] = [event for event in events.read(run.events) if isinstance(event, Ended)]
    assert (end.job_id, end.cause, end.exit_code, end.attempt) == ("7", "failed", 137, None)
    assert end.why  # else `status` expects another start
    events.add(run.events, Submitted(job_id="7", launcher="held"))
    hold.record_end(run, "7", 0)  # of a resumed run
    assert [type(event) for event in events.read(run.events)][-2:] == [Submitted, Ended]

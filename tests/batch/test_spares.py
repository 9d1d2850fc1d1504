"""Nodes of a job with spares: which are chosen, and which are taken for lost."""

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp import files, polling
from clusterddp.batch import spares
from clusterddp.batch.controller import Controller
from clusterddp.errors import SlurmError
from clusterddp.reporting.usage import measure_usage
from clusterddp.request.resources import Resources
from clusterddp.run import bad_nodes, events, outcome, preflight
from clusterddp.run.attempt import Attempt
from clusterddp.run.history import History
from clusterddp.run.records import PreflightRecord
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client
from clusterddp.slurm.forms import expand_nodelist
from clusterddp.slurm.states import JobState, State
from clusterddp.status.state import judge, latest_submission
from clusterddp.worker import task_record
from tests.batch.test_controller import Heard, NoOutput
from tests.made_events import ended, started, submitted
from tests.request.test_spec import spec
from tests.waiting import wait_for

RAISED = {"type": "ValueError", "message": "boom"}
PEER_LOST = {"type": "RuntimeError", "message": "closed by peer", "peer_lost": True}


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = Attempt(RunDir(tmp_path / "jobs/a run's"), 1)
    made.outcomes.mkdir(parents=True)
    return made


def record(attempt: Attempt, rank: int, host: str, **fields: object) -> None:
    outcome.rank_path(attempt.outcomes, rank).write_text(json.dumps(content(rank, host, **fields)))


def content(rank: int, host: str, **fields: object) -> dict[str, object]:
    return {
        "rank": rank, "local_rank": 0, "node_rank": rank, "host": host, "pid": 1, "job_id": "17",
        "restart": 0, "step_id": "3", "started": 1.0, **fields,
    }  # fmt: skip


def failed(error: object = None) -> dict[str, object]:
    return {"ended": 2.0, "exit_code": 1, "error": error}


class Nodes:
    """Nodes of which some answer, and which of them were asked."""

    def __init__(self, *answering: str) -> None:
        self.answering, self.asked = set(answering), set[str]()
        self.refuse = False

    def __call__(self, nodes: Collection[str]) -> dict[str, bool]:
        self.asked |= set(nodes)
        return dict.fromkeys(sorted(set(nodes) - self.answering), self.refuse)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    nodes = Nodes("h02")
    monkeypatch.setattr(spares, "unreachable_nodes", nodes)
    monkeypatch.setattr(polling, "STEP_POLL_SECONDS", 0.0)
    return nodes


def controller_of(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, nodes: str = "h[01-03]", **fields: Any
) -> Controller:
    """A controller on h01, at work on an attempt that has the nodes but for the last one."""
    for name, value in (("JOB_ID", "17"), ("JOB_NODELIST", nodes)):
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "h01")
    hosts = expand_nodelist(nodes)
    asked = Resources(nodes=len(hosts) - 1, spare_nodes=1)
    request = spec(run_dir=str(attempt.run.path), resources=asked, **fields)
    made = Controller(request, attempt.run, Path("script"), Heard(), NoOutput())
    made._attempt, made._nodes = attempt, hosts[:-1]
    return made


def test_the_threads_of_an_attempt_have_ended_before_the_next_one_starts_a_process(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ended = controller_of(attempt, monkeypatch), threading.Event()
    alive = list[bool]()
    own._watch(ended.wait)
    [thread] = own._watches
    monkeypatch.setattr(
        own, "_preflight", lambda *_: alive.append(thread.is_alive()) or {"h02": ""}
    )
    threading.Timer(0.2, ended.set).start()
    own._start(attempt)
    assert alive == [False]


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Nodes that Slurm shows as drained, with the reason."""
    nodes: dict[str, str] = {}
    monkeypatch.setattr(client, "drained_nodes", lambda _: nodes)
    return nodes


def test_drained_nodes_are_used_only_where_too_few_others_are_left(
    drained: dict[str, str], logged: list[str]
) -> None:
    allocation = spares.Allocation("h[01-04]", 2)
    drained["h04"] = "not needed"
    assert allocation.choose(()) == ["h01", "h02"]
    assert logged == []
    drained["h02"] = "a\nfan"
    assert allocation.choose(()) == ["h01", "h03"]
    assert logged.pop() == "node h02 is left out: it is drained (a fan)"
    assert allocation.choose(("h01", "h04")) == ["h02", "h03"]
    assert logged == ["node h02 is used, because too few others are left: it is drained (a fan)"]


def test_bad_and_lost_nodes_are_passed_over_in_slurms_order(drained: dict[str, str]) -> None:
    allocation = spares.Allocation("h[01-04]", 2)
    assert allocation.choose(()) == ["h01", "h02"]
    assert allocation.choose(("h01", "elsewhere")) == ["h02", "h03"]
    allocation.lost.add("h03")
    assert allocation.choose(("h01",)) == ["h02", "h04"]
    assert allocation.choose(("h01", "h04")) == []


def test_at_first_bad_nodes_do_where_there_are_no_others() -> None:
    allocation = spares.Allocation("h[01-04]", 2)
    lost, slow = bad_nodes.BadNode("h01", by="lost"), bad_nodes.BadNode("h03", by="preflight")
    assert allocation.choose_first({}) == ["h01", "h02"]
    assert allocation.choose_first({"h01": lost, "h03": slow}) == ["h02", "h04"]
    assert allocation.choose_first({"h01": lost, "h02": lost, "h03": slow}) == ["h03", "h04"]
    assert allocation.choose_first(dict.fromkeys(allocation.nodes, lost)) == ["h01", "h02"]


FAILED = {"h02": "sends at most 1 MB/s"}


@pytest.mark.parametrize(
    ("slow", "spare_nodes", "requeue", "starts"),
    [
        (("h02",), 0, False, True),
        (("h02",), 0, True, False),
        (("h02",), 1, False, False),
        ((), 0, False, False),
    ],
)
def test_a_merely_slow_node_does_not_end_a_run_that_nothing_would_start_again(
    slow: tuple[str, ...], spare_nodes: int, requeue: bool, starts: bool,
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    own = controller_of(attempt, monkeypatch, preflight="quick", requeue=requeue)
    if not spare_nodes:
        own._allocation = None
    monkeypatch.setattr(preflight, "check", lambda *_: PreflightRecord("", 1.0, FAILED, slow=slow))
    assert own._preflight(attempt, ["h01", "h02"]) == ({} if starts else FAILED)
    assert list(spares.nodes_to_avoid(attempt.run)) == ["h02"]
    assert blamed_in(attempt) == (set() if starts else {"h02"})


def test_a_node_that_the_request_demands_is_used_at_once_and_the_record_says_so(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = controller_of(attempt, monkeypatch, preflight="quick", requeue=True)
    own._allocation = None
    resources = dataclasses.replace(own._spec.resources, spare_nodes=0, nodelist="h[01-02]")
    own._spec = dataclasses.replace(own._spec, resources=resources)
    record = PreflightRecord("failed: h02", 1.0, {"h02": "/dev/shm: full"})
    monkeypatch.setattr(preflight, "check", lambda *_: record)
    files.write_record(attempt.preflight, record)
    assert own._preflight(attempt, ["h01", "h02"]) == {}
    assert list(spares.nodes_to_avoid(attempt.run)) == ["h02"]
    kept = files.read(PreflightRecord, attempt.preflight)
    assert kept and kept.summary == "failed: h02; required by --nodelist, used anyway: h02"
    assert kept.failed == record.failed


def test_an_idle_spare_is_checked_too_and_one_that_fails_is_never_chosen(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = controller_of(attempt, monkeypatch, preflight="quick")
    checked = []

    def check(_: Attempt, nodes: list[str], *__: object) -> PreflightRecord:
        checked.append(nodes)
        return PreflightRecord("", 1.0, {"h03": "/dev/shm: full"})

    monkeypatch.setattr(preflight, "check", check)
    monkeypatch.setattr(own, "_run_script", lambda *_: 0)
    assert [own._start(attempt) for _ in range(2)] == [0, 0]
    assert checked == [["h01", "h02", "h03"], ["h01", "h02"]]
    assert (list(spares.nodes_to_avoid(attempt.run)), blamed_in(attempt)) == (["h03"], set())
    assert own._allocation and own._allocation.choose(spares.nodes_to_avoid(attempt.run)) == [
        "h01",
        "h02",
    ]


def test_a_node_is_lost_that_is_asked_twice_and_does_not_answer(
    attempt: Attempt, asked: Nodes
) -> None:
    nodes = asked
    watch = spares.NodeWatch(attempt, ["h02", "h03"])
    assert watch.look(0.0) == {}
    for rank, host in enumerate(("h01", "h02", "h03")):
        record(attempt, rank, host)
    assert watch.look(1.0) == {}
    assert not nodes.asked
    record(attempt, 0, "h01", **failed(PEER_LOST))
    assert watch.look(2.0) == {}
    assert nodes.asked == {"h02", "h03"}
    assert list(watch.look(3.0)) == ["h03"]
    nodes.answering.add("h03")
    assert watch.look(4.0) == {}


def test_a_node_without_a_sign_of_life_is_asked(attempt: Attempt, asked: Nodes) -> None:
    watch = spares.NodeWatch(attempt, ["h02", "h03"])
    record(attempt, 0, "h01")
    record(attempt, 1, "h02")
    late = 1.5 * spares.LIVENESS_TIMEOUT
    assert [watch.look(now) for now in (0.0, late / 2)] == [{}, {}]
    os.utime(attempt.outcomes / "rank-1.json", (5, 5))
    assert [watch.look(now) for now in (late / 2, late)] == [{}, {}]
    [(lost, why)] = watch.look(late + 1).items()  # it has not even recorded a start
    assert (lost, asked.asked) == ("h03", {"h02", "h03"})  # h02 as a witness
    assert why == "its records have not changed for 15s, and its slurmd does not answer"


def test_a_look_reads_one_record_of_each_node(
    attempt: Attempt, asked: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every two seconds, for as long as the job runs."""
    opened = list[str]()
    read = spares._Record.read

    def counted(path: Path, before: Any) -> Any:
        opened.append(path.name)
        return read(path, before)

    def look() -> list[str]:
        opened.clear()
        assert watch.look(0.0) == {}
        return sorted(opened)

    monkeypatch.setattr(spares._Record, "read", counted)
    monkeypatch.setattr(spares, "read_outcomes", None)
    watch = spares.NodeWatch(attempt, [f"h{node:02}" for node in range(2, 34)])
    paths = []
    for node in range(2, 34):
        host = f"h{node:02}"
        paths.append(outcome.node_path(attempt.outcomes, host))
        ranks = [content(8 * node + local, host) for local in range(8)]
        files.write_record(paths[-1], {outcome.RANKS: ranks})
    assert look() == look() == sorted(path.name for path in paths)


def test_an_error_of_the_program_has_no_node_asked(attempt: Attempt, asked: Nodes) -> None:
    asked.answering.clear()
    watch = spares.NodeWatch(attempt, ["h02"])
    record(attempt, 0, "h01", **failed(RAISED))
    record(attempt, 1, "h02", **failed(PEER_LOST))
    assert [watch.look(now) for now in range(3)] == [{}, {}, {}]
    assert not asked.asked
    record(attempt, 0, "h01", **failed(PEER_LOST))
    assert [list(watch.look(now)) for now in range(2)] == [[], ["h02"]]


def test_an_orphan_takes_nothing_for_lost_and_ends_no_step(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, asked: Nodes
) -> None:
    """Its job was requeued, and starts the steps of the next attempt from number 0 again."""
    cancelled = list[str]()
    monkeypatch.setattr(client, "terminate_step", cancelled.append)
    asked.answering.clear()
    record(attempt, 0, "h01", **failed(PEER_LOST))
    Attempt(attempt.run, 2).path.mkdir(parents=True)
    assert spares.await_loss(spares.NodeWatch(attempt, ["h02"]), lambda: 1) == {}
    spares.end_step(attempt, "17", ["h02"], lambda: None)
    assert cancelled == []


@pytest.mark.parametrize(
    ("age", "step", "saves"), [(1.0, 40, True), (9.0, 40, False), (1.0, None, False)]
)
def test_a_parent_may_save_for_a_while_after_its_ranks_recorded_end(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, age: float, step: int | None, saves: bool
) -> None:
    """Between the record and the claim of the snapshot, nothing else shows that it is at work."""
    at_work = list[object]()
    monkeypatch.setattr(spares.step_watch, "end_tasks", lambda _, __, ask: at_work.append(ask()))
    monkeypatch.setattr(spares.step_watch, "kill", lambda _: None)
    record(attempt, 0, "h01", **failed(PEER_LOST), step=step)
    record(attempt, 1, "h02", **failed(), step=40)  # lost: its parent saves nothing
    then = time.time() - age
    os.utime(outcome.rank_path(attempt.outcomes, 0), (then, then))
    spares.end_step(attempt, "17", ["h02"], lambda: 7)
    assert at_work == [7 if saves else None]


@pytest.mark.parametrize("why", ["superseded", "the job is ending"])
def test_a_controller_whose_start_is_over_notes_no_loss(
    why: str, attempt: Attempt, monkeypatch: pytest.MonkeyPatch, asked: Nodes
) -> None:
    own = controller_of(attempt, monkeypatch)
    word = client.Ending.REQUEUED if why == "the job is ending" else client.Ending.NONE
    monkeypatch.setattr(client, "ending", lambda *_: word)
    if why == "superseded":
        Attempt(attempt.run, 2).path.mkdir(parents=True)
        own._record_lost(attempt, {"h02": "gone"})
    assert not own._resumes_in_job(1)
    assert own._allocation and (asked.asked, own._allocation.lost) == (set(), set())


@pytest.mark.parametrize("others", [["h02", "h03"], ["h02"]])
def test_where_no_other_node_of_several_answers_none_is_lost(
    others: list[str], attempt: Attempt, asked: Nodes
) -> None:
    """It is this host that may be cut off; an idle spare is a witness too."""
    asked.answering.clear()
    idle = [node for node in ("h02", "h03") if node not in others]
    watch = spares.NodeWatch(attempt, others, idle)
    record(attempt, 0, "h01", **failed(PEER_LOST))
    assert [watch.look(now) for now in range(9)] == [{}] * 9
    assert spares.find_lost(attempt, others, 143, idle) == {}
    asked.answering.add("h03")
    assert [list(watch.look(now)) for now in (9, 10)] == [[], ["h02"]]


def test_an_idle_spare_is_asked_now_and_then_and_lost_once(attempt: Attempt, asked: Nodes) -> None:
    watch = spares.NodeWatch(attempt, ["h02"], ["h03"])
    looks = [(now, watch.look(float(now))) for now in range(0, 100, 2)]
    why = "it was an idle spare, and its slurmd does not answer"
    assert [(now, lost) for now, lost in looks if lost] == [(30, {"h03": why})]
    asked.answering.clear()  # the spare is no witness any more
    record(attempt, 0, "h01", **failed(PEER_LOST))
    assert [list(watch.look(now)) for now in (100.0, 102.0)] == [[], ["h02"]]


def test_the_loss_of_an_idle_spare_is_no_part_of_an_attempt(attempt: Attempt) -> None:
    spares.mark_lost(attempt, "17", {"h03": "gone"}, ["h01", "h02"])
    assert (blamed_in(attempt), list(spares.nodes_to_avoid(attempt.run))) == (set(), ["h03"])


def test_a_slurmd_whose_kernel_answers_is_asked_more_often(attempt: Attempt, asked: Nodes) -> None:
    asked.refuse = True
    watch = spares.NodeWatch(attempt, ["h02", "h03"])
    record(attempt, 0, "h01", **failed(PEER_LOST))
    assert [list(watch.look(now)) for now in range(6)] == [[]] * 5 + [["h03"]]


def test_a_step_that_ended_badly_has_its_nodes_asked(attempt: Attempt, asked: Nodes) -> None:
    record(attempt, 0, "h01", **failed(PEER_LOST))
    record(attempt, 1, "h02", **failed(PEER_LOST))
    assert spares.find_lost(attempt, ["h02", "h03"], 0) == {}
    assert spares.find_lost(attempt, ["h02", "h03"], 75) == {}
    assert not asked.asked
    assert list(spares.find_lost(attempt, ["h02", "h03"], 143)) == ["h03"]


def test_after_an_error_of_the_program_only_a_node_is_asked_that_left_no_end(
    attempt: Attempt, asked: Nodes
) -> None:
    record(attempt, 0, "h01", **failed(RAISED))
    record(attempt, 1, "h03", **failed(PEER_LOST))
    assert spares.find_lost(attempt, ["h03"], 1) == {}
    assert not asked.asked
    record(attempt, 1, "h03")
    assert list(spares.find_lost(attempt, ["h03"], 1)) == ["h03"]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_node_answers_whose_port_takes_a_connection(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = listener.getsockname()[1]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # held, so that nobody else listens there
        addresses = {"h01": ("127.0.0.1", port), "h02": closed.getsockname()}
        monkeypatch.setattr(client, "node_addresses", lambda _: addresses)
        assert spares.unreachable_nodes(["h01", "h02", "h03"]) == {"h02": True}
        addresses["h02"] = "no name.invalid", 1  # a name that nobody knows tells nothing
        assert spares.unreachable_nodes(["h01", "h02"]) == {}


def test_where_slurmctld_does_not_answer_no_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "output_of", lambda *_: "")
    monkeypatch.setattr(client, "slurm_conf", lambda: "")
    assert spares.unreachable_nodes(["h01", "h02"]) == {}


def test_addresses_are_slurms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = (
        "NodeName=h01 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=h01 State=IDLE\n"
        "NodeName=h02 NodeAddr=10.0.0.2 NodeHostName=h02 Port=7002 State=DOWN\n"
    )
    monkeypatch.setattr(client, "output_of", lambda *_: shown)
    monkeypatch.setattr(client, "slurm_conf", lambda: "SlurmdPort              = 7000\n")
    assert client.node_addresses(["h01", "h02"]) == {
        "h01": ("10.0.0.1", 7000),
        "h02": ("10.0.0.2", 7002),
    }


def test_blamed_and_bad_nodes_are_read_from_the_records(attempt: Attempt) -> None:
    assert (blamed_in(attempt), spares.nodes_to_avoid(attempt.run)) == (set(), {})
    spares.mark_lost(attempt, "17", {"h02": "gone"}, ["h01", "h02"])
    assert (blamed_in(attempt), list(spares.nodes_to_avoid(attempt.run))) == ({"h02"}, ["h02"])
    assert blamed_in(Attempt(attempt.run, 2)) == set()
    [event] = [e for e in events.read(attempt.run.events) if isinstance(e, events.NodesMarkedBad)]
    assert event.by == bad_nodes.BY_LOSS


@pytest.mark.parametrize(("local_rank", "renews"), [(0, True), (1, False)])
def test_one_task_of_each_node_renews_its_record(
    local_rank: int, renews: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clusterddp.ranks.dist_env import DistEnv
    from tests.waiting import wait_for

    monkeypatch.setenv("CLUSTERDDP_SPARE_NODES", "1")
    monkeypatch.setattr(task_record, "RENEWAL_SECONDS", 0.01)
    env = DistEnv(
        rank=local_rank, local_rank=local_rank, node_rank=0, world_size=2, local_world_size=2,
        num_nodes=1, master_addr="h01", master_port=1, hostnames=(), origin="slurm",
    )  # fmt: skip
    run = RunDir(tmp_path / "a")
    task_record.TaskRecord(run, env, None).record_start(1)
    path = run.outcomes / f"rank-{local_rank}.json"
    os.utime(path, (5, 5))
    if renews:
        wait_for(lambda: path.stat().st_mtime > time.time() - 60, "a sign of life")
        (run.outcomes).rename(tmp_path / "gone")  # it costs nobody anything
    else:
        assert path.stat().st_mtime == 5


def test_the_nodes_without_tasks_are_summed_up_in_node_hours(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a")
    run.path.mkdir()
    lines = [
        started(time=1000, attempt=1, spares=["h03", "h04"]), ended(1, time=2800, attempt=1),
        started(time=2800, attempt=2, spares=["h04"]), ended(1, time=6400, attempt=2),
        started(time=6400, restart=1, attempt=3), ended(0, time=10000, restart=1, attempt=3),
    ]  # fmt: skip
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for number in (1, 2, 3):
        Attempt(run, number).path.mkdir(parents=True)
    usage = measure_usage(History.read(run), spec(resources=Resources(nodes=2, spare_nodes=2)))
    assert usage is not None and (usage.idle, usage.node_hours) == (2.0, 2 * 2.5 + 2.0)
    without = measure_usage(History.read(run), spec(resources=Resources(nodes=2)))
    assert without is not None and without.idle is None


def test_between_the_attempts_of_a_job_the_run_is_running() -> None:
    lost = ended(1, cause="node lost", attempt=1)
    resumed = {"event": "resumed_in_job", "job_id": "7", "attempt": 1, "nodelist": "h01,h03"}
    history = [events.parse(e) for e in (submitted(), started(attempt=1), lost, resumed)]
    state, _ = judge(latest_submission(history), None, JobState(State.RUNNING), None, 180.0)
    assert state == "running"


def test_a_lost_node_that_slurm_does_not_take_back_yet_is_offered_again(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    asked: list[Collection[str]] = []

    def release_nodes(_: str, kept: Collection[str]) -> None:
        asked.append(kept)
        if len(asked) < 3:
            raise SlurmError("the DB index is being set, try again in a bit for job 7")

    monkeypatch.setattr(polling, "STEP_POLL_SECONDS", 0.01)
    monkeypatch.setattr(spares.slurm, "release_nodes", release_nodes)
    allocation = spares.Allocation("h[01-03]", 2)
    allocation.lost.add("h02")
    spares.release_nodes("7", allocation)
    wait_for(lambda: len(asked) == 3, "the third offer")
    assert asked[-1] == ["h01", "h03"]
    assert logged == []


def blamed_in(attempt: Attempt) -> set[str]:
    return History.read(attempt.run).marked_bad(attempt.number)

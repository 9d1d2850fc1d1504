"""Bad nodes: their file, which of them a job leaves out, and what blames one."""

import dataclasses
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterddp.batch import begin as beginning
from clusterddp.batch import finish, spares
from clusterddp.batch.job import JobStart
from clusterddp.errors import RequestError
from clusterddp.request.resources import Resources
from clusterddp.run import bad_nodes
from clusterddp.run.attempt import Attempt, StartRefused
from clusterddp.run.bad_nodes import LOG_SIGNS, TORCH_SIGNS, BadNode, named_hardware
from clusterddp.run.events import Failure
from clusterddp.run.history import History, PastAttempt, Policy
from clusterddp.run.records import SlowRank, TaskError
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.site import Node
from tests.batch.attempts import begin_attempt, finish_attempt
from tests.cli.made_runs import Workplace, submitted, workplace
from tests.event_lines import add_event, kinds, read_events
from tests.hostile import CARRIED, REFUSED

__all__ = ["workplace"]

DAY = 24 * 3600.0


def run_in(root: Path, name: str = "a") -> Attempt:
    run = RunDir(root / name)
    run.path.mkdir(parents=True)
    return Attempt(run, 1)


# -- the file ----------------------------------------------------------------------------------


def test_a_blamed_node_is_read_until_it_is_cleared(tmp_path: Path) -> None:
    attempt = run_in(tmp_path)
    bad_nodes.mark_bad(attempt, "7", {"h02": "lost", "h03": "slow"}, bad_nodes.BY_LOSS)
    bad = bad_nodes.read(tmp_path)
    assert sorted(bad) == ["h02", "h03"]
    assert (bad["h02"].reason, bad["h02"].run, bad["h02"].attempt) == ("lost", "a", 1)
    assert bad["h02"].expires - bad["h02"].time == DAY
    bad_nodes.clear(tmp_path, ["h02"])
    assert list(bad_nodes.read(tmp_path)) == ["h03"]
    assert bad_nodes.known_to(History.read(attempt.run)) == {"h02", "h03"}
    bad_nodes.mark_bad(attempt, "7", {"h02": "lost again"}, bad_nodes.BY_LOSS)
    assert bad_nodes.read(tmp_path)["h02"].reason == "lost again"
    assert [event["event"] for event in read_events(attempt.run)] == ["nodes_marked_bad"] * 2


def test_a_node_is_used_again_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_nodes.mark_bad(run_in(tmp_path), "7", {"h02": "lost"}, bad_nodes.BY_LOSS)
    later = time.time() + DAY + 1
    monkeypatch.setattr(time, "time", lambda: later)
    assert bad_nodes.read(tmp_path) == {}


def test_the_time_is_that_which_the_run_asks_for(workplace: Workplace) -> None:
    run = workplace.run("a")
    run.spec.write_text(dataclasses.replace(run.load_spec(), avoid_bad_nodes_for=1800).to_json())
    bad_nodes.mark_bad(Attempt(run, 1), "7", {"h02": "lost"}, bad_nodes.BY_LOSS)
    node = bad_nodes.read(workplace.root)["h02"]
    assert node.expires - node.time == 1800


def test_torn_and_foreign_lines_take_nothing_from_the_others(tmp_path: Path) -> None:
    attempt, path = run_in(tmp_path), tmp_path / bad_nodes.FILE_NAME
    bad_nodes.mark_bad(attempt, "7", {"h01": "lost"}, bad_nodes.BY_LOSS)
    with path.open("ab") as file:
        file.write(b'[1]\n{"reason": "no host"}\n\xff\xfe\n{"host": "h02", "expi')
    bad_nodes.mark_bad(attempt, "7", {"h03": "lost"}, bad_nodes.BY_LOSS)
    assert sorted(bad_nodes.read(tmp_path)) == ["h01", "h03"]


def test_without_a_file_no_node_is_bad(tmp_path: Path) -> None:
    assert bad_nodes.read(tmp_path) == {}


def test_runs_that_write_at_once_lose_no_line(tmp_path: Path) -> None:
    attempts = [run_in(tmp_path, f"run-{n}") for n in range(8)]

    def mark_bad(attempt: Attempt) -> None:
        for n in range(5):
            host = f"{attempt.run.name}-{n}"
            bad_nodes.mark_bad(attempt, "7", {host: "x" * 2000}, bad_nodes.BY_LOSS)

    threads = [threading.Thread(target=mark_bad, args=[attempt]) for attempt in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(bad_nodes.read(tmp_path)) == 40


@pytest.mark.parametrize("text", CARRIED + REFUSED)
def test_a_hostile_reason_stays_what_it_is(text: str, tmp_path: Path) -> None:
    bad_nodes.mark_bad(run_in(tmp_path), "7", {"h02": text}, bad_nodes.BY_LOSS)
    assert bad_nodes.read(tmp_path)["h02"].reason == text


# -- which of them a job leaves out --------------------------------------------------------------


def bad(*hosts: str) -> Mapping[str, BadNode]:
    """Bad nodes, the latest blamed last."""
    return {host: BadNode(host, "lost", time=float(n)) for n, host in enumerate(hosts)}


def cluster(count: int, **states: str) -> list[Node]:
    names = [f"h{n:02}" for n in range(1, count + 1)]
    return [Node(name, states.get(name, "idle"), 16, {"": 4}, memory=64000) for name in names]


def chosen(asked: Resources, nodes: list[Node], *hosts: str) -> list[str]:
    return list(bad_nodes.select_excluded(bad(*hosts), asked, nodes, asked.nodes).nodes)


def test_bad_nodes_are_left_out_as_far_as_enough_others_stay() -> None:
    asked = Resources(nodes=2)
    assert chosen(asked, cluster(4), "h01", "h02") == ["h02", "h01"]
    choice = bad_nodes.select_excluded(bad("h01", "h02"), asked, cluster(3), 2)
    assert list(choice.nodes) == ["h02"]  # the latest
    assert choice.remarks == (
        "h01 is bad (lost), but is not excluded: of 3 nodes that fit, the job needs 2",
    )
    assert chosen(asked, cluster(2), "h01") == []


def test_nodes_that_slurm_cannot_give_leave_less_room() -> None:
    asked = Resources(nodes=2)
    assert chosen(asked, cluster(3, h01="down*"), "h01") == ["h01"]  # it takes no room
    assert chosen(asked, cluster(2, h01="down*"), "h01") == []  # the job needs it once it is back


@pytest.mark.parametrize(
    "state",
    [
        *("down*", "drained", "draining", "idle*", "maint", "fail", "reserved", "blocked"),
        *("power_down", "powering_down", "no_respond", "perfctrs", "reboot_issued", "unknown"),
        *("idle!", "idle%", "idle$", "allocated$", "mixed@", "idle^", "completing*"),
    ],
)
def test_a_state_in_which_slurm_gives_a_node_to_nobody_leaves_less_room(state: str) -> None:
    assert chosen(Resources(nodes=2), cluster(3, h03=state), "h01") == []


@pytest.mark.parametrize(
    "state",
    [
        *("idle", "allocated", "mixed", "completing", "allocated+", "planned", "idle-"),
        *("idle~", "idle#", "powered_down", "powering_up"),
    ],
)
def test_a_state_in_which_slurm_gives_a_node_in_time_leaves_room(state: str) -> None:
    assert chosen(Resources(nodes=2), cluster(3, h03=state), "h01") == ["h01"]


def test_only_nodes_that_fit_count_as_others() -> None:
    small = Node("h04", "idle", 2, {})
    assert chosen(Resources(nodes=3), [*cluster(3), small], "h01") == ["h01"]
    assert chosen(Resources(nodes=3, gpus_per_node=1), [*cluster(3), small], "h01") == []
    assert chosen(Resources(nodes=3, cpus_per_task=4), [*cluster(3), small], "h01") == []
    assert chosen(Resources(nodes=3, constraint="big&(x|y)"), [*cluster(3), small], "h01") == []
    assert chosen(Resources(nodes=3, mem="2G"), [*cluster(3), small], "h01") == []
    assert chosen(Resources(nodes=2, mem="62G"), cluster(3), "h01") == ["h01"]
    assert chosen(Resources(nodes=2, mem="63G"), cluster(3), "h01") == []
    assert chosen(Resources(nodes=3, exclude="h04"), [*cluster(3), small], "h01") == []


def test_nodes_that_are_demanded_unwanted_or_elsewhere_are_passed_over() -> None:
    asked = Resources(nodes=1, nodelist="h01", exclude="h02")
    choice = bad_nodes.select_excluded(bad("h01", "h02", "gone"), asked, cluster(4), 1)
    assert choice.nodes == {}
    assert choice.remarks == ("h01 is bad (lost), but --nodelist requires it",)


def test_what_is_left_out_is_merged_with_the_persons_and_forgets_the_cleared() -> None:
    asked = Resources(exclude="h[07-08]")
    before, known = ["h07", "h05", "h03"], {"h03", "h02"}  # h03 was cleared
    assert bad_nodes.merge_excludes(asked, before, ["h02"], known) == ["h07", "h08", "h05", "h02"]


def test_sinfo_is_asked_once_and_only_where_a_node_is_bad(workplace: Workplace) -> None:
    lines = [
        f"h0{n}|{where}|idle|16|gpu:4|(null)|64000" for n in (1, 2, 3) for where in ("main*", "big")
    ]
    workplace.command("sinfo", "\n".join(f"echo '{line}'" for line in lines))
    asked = Resources(nodes=2, gpus_per_node=4)
    assert bad_nodes.choose(workplace.root, asked, os.environ).nodes == {}
    assert workplace.calls == []
    bad_nodes.mark_bad(run_in(workplace.root), "7", {"h02": "lost"}, bad_nodes.BY_LOSS)
    choice = bad_nodes.choose(workplace.root, asked, os.environ)
    assert choice.line == "excluded as bad: h02 (lost). 'clusterddp bad-nodes' lists them"
    assert len(workplace.calls) == 1
    three = Resources(nodes=3)
    assert "the job needs 3" in bad_nodes.choose(workplace.root, three, os.environ).remarks[0]


def test_with_several_partitions_each_keeps_enough_others(workplace: Workplace) -> None:
    places = [("h01", "a"), ("h02", "a"), ("h03", "a"), ("h01", "b"), ("h02", "b"), ("h04", "c")]
    lines = [f"echo '{host}|{name}|idle|16|gpu:4|x|64000'" for host, name in places]
    workplace.command("sinfo", "\n".join(lines))
    bad_nodes.mark_bad(
        run_in(workplace.root), "7", {"h01": "slow", "h03": "lost"}, bad_nodes.BY_LOSS
    )
    asked = Resources(nodes=2, partition="a,b")
    choice = bad_nodes.choose(workplace.root, asked, os.environ)
    assert list(choice.nodes) == ["h03"]  # b has no other than h01 and h02
    assert choice.remarks == (
        "h01 is bad (slow), but is not excluded: of 2 nodes that fit in b, the job needs 2",
    )
    # A job that has got one of them may get the other at its next start.
    assert bad_nodes.choose(workplace.root, asked, os.environ, partition="a") == choice
    one = Resources(nodes=1, partition="a,b")
    assert {*bad_nodes.choose(workplace.root, one, os.environ).nodes} == {"h01", "h03"}


@pytest.mark.parametrize(
    ("sinfo", "asked", "words"),
    [
        ("echo no >&2; exit 1", {}, "h02 cannot be excluded: sinfo: no"),
        (None, {}, "h02 cannot be excluded: no sinfo on PATH"),
        ("", {"reservation": "night"}, "it is not known which nodes reservation night has"),
    ],
)
def test_where_nothing_can_be_told_nothing_is_left_out_and_it_says_so(
    workplace: Workplace, sinfo: str | None, asked: dict[str, Any], words: str
) -> None:
    if sinfo is not None:
        workplace.command("sinfo", sinfo)
    bad_nodes.mark_bad(run_in(workplace.root), "7", {"h02": "lost"}, bad_nodes.BY_LOSS)
    choice = bad_nodes.choose(workplace.root, Resources(**asked), os.environ)
    assert choice.nodes == {}
    assert words in choice.remarks[0]


def test_an_option_that_decides_which_nodes_fit_has_none_left_out(workplace: Workplace) -> None:
    bad_nodes.mark_bad(run_in(workplace.root), "7", {"h02": "lost"}, bad_nodes.BY_LOSS)
    choice = bad_nodes.choose(workplace.root, Resources(), os.environ, others=["gres", "nice"])
    assert choice.nodes == {}
    assert "it is not known which nodes can serve --gres" in choice.remarks[0]


def test_a_nodelist_that_demands_a_bad_node_is_refused(tmp_path: Path) -> None:
    bad_nodes.mark_bad(run_in(tmp_path), "7", {"h02": "lost"}, bad_nodes.BY_LOSS)
    bad_nodes.reject_bad_nodelist(tmp_path, Resources(nodes=2, nodelist="h[03-04]"))
    with pytest.raises(
        RequestError, match=r"h02 .*: lost.* 'clusterddp bad-nodes clear h02'"
    ) as said:
        bad_nodes.reject_bad_nodelist(tmp_path, Resources(nodes=2, nodelist="h[01-02]"))
    assert said.value.code == "CD1303"


# -- what names hardware -------------------------------------------------------------------------

TORCH, ACCELERATOR = "RuntimeError", "torch.AcceleratorError"
HINT = "\nCUDA kernel errors might be asynchronously reported at some other API call"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error (run with NCCL_DEBUG=INFO "
XID = "[ 7.1] NVRM: Xid (PCI:0000:3b:00): {}, pid=1, name=python, GPU has fallen off the bus.\n"

NAMED = {
    "ecc": (TORCH, f"CUDA error: uncorrectable ECC error encountered{HINT}", 1, ""),
    "ecc, newer torch": (ACCELERATOR, "CUDA error: uncorrectable ECC error encountered", 1, ""),
    "ecc, in NCCL": (
        "torch.distributed.DistBackendError",
        "NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\n"
        "Cuda failure 214 'uncorrectable ECC error encountered'",
        1, "",
    ),
    "nvlink": (
        TORCH, "CUDA error: uncorrectable NVLink error detected during the execution", 1, "",
    ),
    "fabric manager": (TORCH, "CUDA error: system not yet initialized", 1, ""),
    "ib verbs": (
        "torch.distributed.DistBackendError",
        f"{NCCL})\nncclSystemError: System call failed\nLast error:\nCall to ibv_reg_mr failed",
        1, "",
    ),
    "ib event": (
        "DistBackendError",
        f"{NCCL})\nncclSystemError\nNET/IB : mlx5_0:1 Got async event : port error",
        1, "",
    ),
    "xid 79": ("", "", 134, XID.format(79)),
    "xid 48": (TORCH, "CUDA error: unspecified launch failure", 1, XID.format(48)),
    "xid 95": ("", "", 1, XID.format(95)),
    "bus error": ("", "", 128 + signal.SIGBUS, ""),
    "local disk": ("OSError", "[Errno 5] Input/output error: '/tmp/cache/a.bin'", 1, ""),
}  # fmt: skip
NEAR = {
    "a program: its own words": (
        "ValueError", "CUDA error: uncorrectable ECC error encountered", 1, ""
    ),
    "a program that only mentions it": (
        TORCH, "I have seen: CUDA error: uncorrectable ECC error encountered", 1, ""
    ),
    "a program's failure beside an old xid": ("ValueError", "boom", 1, XID.format(79)),
    "launch failure": (TORCH, f"CUDA error: unspecified launch failure{HINT}", 1, ""),
    "illegal address": (TORCH, "CUDA error: an illegal memory access was encountered", 1, ""),
    "assert": (TORCH, "CUDA error: device-side assert triggered", 1, ""),
    "out of memory": ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate", 1, ""),
    "busy": (TORCH, "CUDA error: CUDA-capable device(s) is/are busy or unavailable", 1, ""),
    "no device": (TORCH, "CUDA error: no CUDA-capable device is detected", 1, ""),
    "a lost peer": (
        "torch.distributed.DistBackendError",
        f"{NCCL})\nncclSystemError: System call (e.g. socket, malloc) or external library call "
        "failed or device error.\nLast error:\nsocketStartConnect: Connect to 10.0.0.1<5> failed : "
        "Connection refused",
        1, "",
    ),
    "a full /dev/shm": (
        "torch.distributed.DistBackendError",
        f"{NCCL})\nncclSystemError\nLast error:\nError while creating shared memory segment "
        "/dev/shm/nccl-abc (size 9637888)",
        1, "",
    ),
    "completion with an error of a peer": (
        "torch.distributed.DistBackendError",
        "NCCL error in: x.cpp:1, remote process exited or there was a network error\n"
        "NET/IB : Got completion from peer 10.0.0.2<5> with status=12",
        1, "",
    ),
    "a loader's worker": (
        TORCH, "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.", 1, "",
    ),
    "xid of a program, 31": ("", "", 1, XID.format(31)),
    "xid of a program, 13": (TORCH, "CUDA error: an illegal memory access", 1, XID.format(13)),
    "a number that begins like one": ("", "", 1, XID.format(790)),
    "a shared disk": ("OSError", "[Errno 5] Input/output error: '/home/me/data.bin'", 1, ""),
    "a full local disk": ("OSError", "[Errno 28] No space left on device: '/tmp/a.bin'", 1, ""),
    "killed": ("", "", 137, ""),
    "segmentation fault": ("", "", 139, ""),
    "an end that is none": ("", "", 0, XID.format(79)),
    "nobody knows": ("", "", None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_what_names_hardware_is_named(name: str) -> None:
    kind, message, code, log = NAMED[name]
    assert named_hardware(TaskError(kind, message) if kind else None, code, log)


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_name_none(name: str) -> None:
    kind, message, code, log = NEAR[name]
    assert named_hardware(TaskError(kind, message) if kind else None, code, log) == ""


def test_each_sign_has_its_source_in_the_documentation() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs/bad-nodes.md").read_text().split())
    for sign in (*TORCH_SIGNS, *LOG_SIGNS):
        assert sign.source in text


# -- ranks that crash there again ----------------------------------------------------------------

SEGV = ("killed by SIGSEGV", 139)
LAUNCH = ("RuntimeError: CUDA error: unspecified launch failure", 1)
BOOM = ("ValueError: boom", 1)


def trial(hosts: str, reached: int | None, failure: tuple[str, int] | None = None) -> PastAttempt:
    names = hosts.split()
    made = Failure(3, names[-1], failure[0], "logs/rank-3.log", failure[1]) if failure else None
    return PastAttempt(0, steps_gained=reached, nodes=names, failure=made)


@pytest.mark.parametrize("how", [SEGV, LAUNCH])
def test_ranks_that_crash_there_again_and_got_further_elsewhere_blame_the_node(
    how: tuple[str, int],
) -> None:
    twice = [trial("h01 h02", 40, how), trial("h03 h02", 40, how)]
    assert bad_nodes.find_repeat_offender([*twice, trial("h01 h03", 80)]) == "h02"
    assert bad_nodes.find_repeat_offender([*twice, trial("h01 h03", 80, BOOM)]) == ""
    assert bad_nodes.find_repeat_offender([trial("h01 h03", 80), *twice]) == "h02"


@pytest.mark.parametrize(
    "trials",
    [
        [trial("h01 h02", 40, SEGV), trial("h01 h03", 80)],
        [trial("h01 h02", 40, SEGV), trial("h01 h02", 40, SEGV)],
        [trial("h01 h02", 40, SEGV), trial("h01 h02", 40, SEGV), trial("h01 h03", 40)],
        [trial("h02", 40, SEGV), trial("h02", 40, SEGV), trial("h01", 80)],
        [trial("h01 h02", 40, SEGV), trial("h01 h02", 80), trial("h01 h02", 40, SEGV),
         trial("h01 h03", 99)],
        [trial("h01 h02", 40, SEGV), trial("h02 h01", 40, SEGV), trial("h03 h04", 80)],
        [trial("h01 h02", 40, BOOM), trial("h01 h02", 40, BOOM), trial("h01 h03", 80)],
        [trial("h01 h02", 40, SEGV), trial("h01 h02", 40, BOOM), trial("h01 h03", 80)],
        [trial("h01 h02", None, SEGV), trial("h01 h02", None, SEGV), trial("h01 h03", 80)],
        [],
    ],
    ids=["once", "nowhere else", "no further", "no other host", "not in a row", "two nodes",
         "program", "program once", "no steps", "none"],
)  # fmt: skip
def test_what_may_be_the_programs_blames_nobody(trials: list[PastAttempt]) -> None:
    assert bad_nodes.find_repeat_offender(trials) == ""


def slow(hosts: str, *named: tuple[int, str] | tuple[int, str, float]) -> PastAttempt:
    """An attempt on hosts; of each slow rank: its host, and when it kept up again."""
    ranks = [SlowRank(n, host, 0.4, until=until[0] if until else None) for n, host, *until in named]
    return PastAttempt(0, nodes=hosts.split(), slow=ranks)


@pytest.mark.parametrize(
    ("trials", "host"),
    [
        ([slow("a b c d", (2, "b"), (3, "b"))], "b"),
        ([slow("a b", (2, "b"), (3, "b"))], "b"),
        ([slow("a b c", (1, "b", 9.0)), slow("b c d", (0, "b", 9.0))], "b"),
        ([slow("a b c", (1, "b")), slow("a b c"), slow("b c d", (0, "b"))], "b"),
        # Rank 5 is slow wherever it is, and the node's own two are as well.
        ([slow("a b c", (5, "c")), slow("a b c", (5, "b"), (2, "b"), (3, "b"))], "b"),
    ],
)
def test_a_node_that_is_slow_with_several_ranks_is_blamed(
    trials: list[PastAttempt], host: str
) -> None:
    [(marked_bad, reason)] = bad_nodes.find_slow_nodes(trials).items()
    assert marked_bad == host
    assert reason.endswith(", in the last attempt at 40% of the other ranks' median speed")


@pytest.mark.parametrize(
    "trials",
    [
        [],
        [slow("a b c")],
        [slow("a b c", (1, "b"))],
        # The same rank: it may be its data, wherever it is.
        [slow("a b c", (1, "b")), slow("a b c", (1, "b"))],
        [slow("a b c", (1, "b")), slow("a c d", (1, "c")), slow("b a c", (1, "a"))],
        [slow("a b c", (1, "b")), slow("b c d", (0, "b")), slow("d c b", (0, "d"))],
        [slow("a b c", (1, "b"), (4, "c")), slow("a b c", (1, "c"), (4, "b"))],
        # Slow at once, and no more: a moment's load.
        [slow("a b c", (2, "b", 9.0), (3, "b", 9.0))],
        # Not slow in the last attempt: it may have been cleared since.
        [slow("a b c", (2, "b"), (3, "b")), slow("a b c")],
        # Slow everywhere, or on the only node.
        [slow("a b c", (0, "a"), (1, "a"), (2, "b"), (3, "b"))],
        [slow("a", (0, "a"), (1, "a"))],
        # No record says where the ranks were.
        [slow("a b c", (2, ""), (3, ""))],
    ],
)
def test_slow_ranks_that_tell_of_no_node_blame_nobody(trials: list[PastAttempt]) -> None:
    assert bad_nodes.find_slow_nodes(trials) == {}


# -- what a job does -----------------------------------------------------------------------------

LOST = "srun: error: Node failure on h02\n"


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """`finish` is the last call of a batch script, and is deaf from then on."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


def begun(place: Workplace, launched: str = "") -> RunDir:
    """A run whose first attempt has started on h01 and h02."""
    run = place.run("a", submitted("17"))
    Attempt(run, 1).outcomes.mkdir(parents=True)
    add_event(run, "started", job_id="17", restart=0, attempt=1, nodelist="h[01-02]")
    run.job_log.write_text(f"clusterddp: a, job 17 on h[01-02], today\n{launched}")
    return run


def cluster_says(
    place: Workplace, excluded: str = "(null)", down: str = "", requeue: str = "exit 0",
    update: str = "exit 0",
) -> None:  # fmt: skip
    job = (
        "JobId=17 JobName=x JobState=RUNNING Restarts=0 RunTime=00:01:00 TimeLimit=00:10:00 "
        f"PreemptTime=None Partition=main ExcNodeList={excluded} Command=y"
    )
    place.command(
        "scontrol", f'case "$1" in requeue) {requeue};; update) {update};; *) echo "{job}";; esac'
    )
    states = {name: "down*" if name == down else "idle" for name in ("h01", "h02", "h03", "h04")}
    lines = [f"echo '{name}|main*|{state}|64|gpu:4|x|64000'" for name, state in states.items()]
    place.command("sinfo", "\n".join(lines))


def finished(place: Workplace, run: RunDir, code: int, **policy: int) -> str:
    return finish_attempt(place, run, code, requeue=True, **policy).out


def begin(place: Workplace, run: RunDir, nodelist: str = "h[01-02]") -> str:
    """Number of the attempt that began; empty where none did."""
    return begin_attempt(place, run, nodelist=nodelist).out


def updates(place: Workplace) -> list[str]:
    return [call for call in place.calls if call.startswith("scontrol update")]


def test_a_lost_node_is_blamed_and_left_out_once_the_job_is_back(workplace: Workplace) -> None:
    run = begun(workplace, LOST)
    cluster_says(workplace, excluded="h[07-08]")
    finished(workplace, run, 1)
    assert bad_nodes.read(workplace.root)["h02"].by == bad_nodes.BY_LOSS
    assert updates(workplace) == ["scontrol update JobId=17 ExcNodeList=h07,h08,h02"]
    order = [call for call in workplace.calls if "requeue" in call or "update" in call]
    assert order[0] == "scontrol requeue 17"  # while it runs Slurm would refuse the other
    assert read_events(run)[-1]["nodes"] == {"h02": "lost during attempt 1"}


def test_a_job_without_bad_nodes_asks_slurm_nothing_more(workplace: Workplace) -> None:
    run = begun(workplace)
    cluster_says(workplace)
    Attempt(run, 1).end.write_text('{"cause": "stopped", "reason": "signal", "step": 40}')
    finished(workplace, run, 75)
    assert "scontrol requeue 17" in workplace.calls
    assert not any(call.startswith("sinfo") for call in workplace.calls)
    assert updates(workplace) == []


def test_a_cleared_node_comes_back(workplace: Workplace) -> None:
    run = begun(workplace, LOST)
    cluster_says(workplace, excluded="h[03,09]")
    bad_nodes.mark_bad(Attempt(run, 1), "17", {"h03": "slow"}, bad_nodes.BY_PREFLIGHT)
    bad_nodes.clear(workplace.root, ["h03"])
    finished(workplace, run, 1)
    assert updates(workplace) == ["scontrol update JobId=17 ExcNodeList=h09,h02"]


def test_a_list_that_cannot_be_had_leaves_a_run_its_own_blames(workplace: Workplace) -> None:
    """As in an output root that two people share, or on a file system that has gone stale."""
    run = begun(workplace, LOST)
    cluster_says(workplace, requeue="echo disabled >&2; exit 1")
    workplace.command("sbatch", "echo 18")
    workplace.monkeypatch.setenv("SLURM_SUBMIT_DIR", str(workplace.folder))
    run.script.write_text("#!/bin/bash\n")
    (workplace.root / bad_nodes.FILE_NAME).mkdir()
    workplace.monkeypatch.setattr(bad_nodes, "_latest", unreadable)
    finished(workplace, run, 1)
    assert list(spares.nodes_to_avoid(run)) == ["h02"]
    assert "sbatch --parsable --exclude=h02" in workplace.calls
    cluster_says(workplace)
    assert begin(workplace, run) == ""


def unreadable(*_: object) -> dict[str, BadNode]:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_a_cleared_or_expired_node_is_bad_no_more_though_the_run_has_blamed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = run_in(tmp_path)
    bad_nodes.mark_bad(attempt, "7", {"h02": "lost", "h03": "slow"}, bad_nodes.BY_LOSS)
    bad_nodes.clear(tmp_path, ["h02"])
    assert list(bad_nodes.read_for(History.read(attempt.run))) == ["h03"]
    later = time.time() + DAY + 1
    monkeypatch.setattr(time, "time", lambda: later)
    assert bad_nodes.read_for(History.read(attempt.run)) == {}
    assert bad_nodes.known_to(History.read(attempt.run)) == {"h02", "h03"}


def test_the_list_is_for_all_whom_the_umask_admits(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        bad_nodes.mark_bad(run_in(tmp_path), "7", {"h02": "lost"}, bad_nodes.BY_LOSS)
    finally:
        os.umask(before)
    assert (tmp_path / bad_nodes.FILE_NAME).stat().st_mode & 0o777 == 0o664


def test_a_refused_update_costs_the_exclusion_alone(workplace: Workplace) -> None:
    run = begun(workplace, LOST)
    cluster_says(workplace, update="echo 'Job is no longer pending execution' >&2; exit 1")
    said = finished(workplace, run, 1)
    assert "bad nodes cannot be excluded" in said and "no longer pending" in said
    assert [e["event"] for e in read_events(run)][-1] == "requeued"


def test_the_job_in_its_place_leaves_it_out_and_the_script_stays(workplace: Workplace) -> None:
    run = begun(workplace, LOST)
    cluster_says(workplace, requeue="echo disabled >&2; exit 1")
    workplace.command("sbatch", "/bin/cat >sent; echo 18")
    workplace.monkeypatch.setenv("SLURM_SUBMIT_DIR", str(workplace.folder))
    run.script.write_text("#!/bin/bash\n")
    finished(workplace, run, 1)
    assert "sbatch --parsable --exclude=h02" in workplace.calls
    assert (workplace.folder / "sent").read_text() == run.script.read_text() == "#!/bin/bash\n"
    assert read_events(run)[-1]["job_id"] == "18"


def died_of_hardware(run: RunDir) -> None:
    error = {"type": TORCH, "message": "CUDA error: uncorrectable ECC error encountered"}
    content = {
        "rank": 3, "local_rank": 1, "node_rank": 1, "host": "h02", "pid": 1, "job_id": "17",
        "restart": 0, "step_id": "0", "started": 1.0, "ended": 2.0, "exit_code": 1, "error": error,
    }  # fmt: skip
    (Attempt(run, 1).outcomes / "rank-3.json").write_text(json.dumps(content))


def test_a_rank_that_dies_of_hardware_blames_its_node(workplace: Workplace) -> None:
    run = begun(workplace)
    cluster_says(workplace)
    died_of_hardware(run)
    finished(workplace, run, 1)
    node = bad_nodes.read(workplace.root)["h02"]
    assert node.by == bad_nodes.BY_HARDWARE
    assert node.reason.startswith("rank 3 died: uncorrectable ECC error: CUDA error")
    assert updates(workplace) == ["scontrol update JobId=17 ExcNodeList=h02"]


@pytest.mark.parametrize("spare", [["h03"], []])
def test_a_rank_that_dies_of_hardware_has_its_node_replaced_within_the_job(
    spare: list[str], workplace: Workplace
) -> None:
    """It is blamed ahead of the choice of nodes, and once, whichever way the run goes on."""
    run = begun(workplace)
    cluster_says(workplace)
    died_of_hardware(run)
    known = []

    def choose() -> list[str]:
        known.extend(bad_nodes.read(workplace.root))
        return ["h01", *spare] if spare else []

    policy = Policy(requeue=False, max_requeues=20, retries=0)
    nodes = finish.resume_in_job(JobStart(run, "17"), Attempt(run, 1), 1, policy, choose)
    assert known == ["h02"]
    assert list(nodes) == (["h01", *spare] if spare else [])
    if not spare:
        finished(workplace, run, 1)
    assert kinds(run).count("nodes_marked_bad") == 1
    assert ("resumed_in_job" in kinds(run), "requeued" in kinds(run)) == (bool(spare), not spare)


PROLOG = "srun: error: Task launch for StepId=17.0 failed on node h02: Job prolog failed\n"
BUSY = "srun: error: Unable to create step for job 17: Requested nodes are busy\n"
TOO_MANY = "srun: error: Unable to create step for job 17: More processors requested than permitted"


@pytest.mark.parametrize(
    ("launched", "cause", "bad"),
    [(PROLOG, "not launched", ["h02"]), (BUSY, "not launched", []), (TOO_MANY, "failed", [])],
)
def test_tasks_that_slurm_could_not_start_restart_without_the_node(
    launched: str, cause: str, bad: list[str], workplace: Workplace
) -> None:
    run = begun(workplace, launched)
    cluster_says(workplace)
    finished(workplace, run, 1)
    ended = next(event for event in read_events(run) if event["event"] == "ended")
    assert ended["cause"] == cause
    assert list(bad_nodes.read(workplace.root)) == bad
    assert ("scontrol requeue 17" in workplace.calls) == (cause == "not launched")


def test_the_fourth_requeue_in_ten_minutes_waits_in_the_queue(workplace: Workplace) -> None:
    run = begun(workplace, LOST)
    for number in (2, 3, 4):
        Attempt(run, number).outcomes.mkdir(parents=True)
        add_event(run, "started", job_id="17", attempt=number, time=time.time())
    cluster_says(workplace)
    out = finish_attempt(workplace, run, 1, requeue=True, number=4).out
    assert [e["wait"] for e in read_events(run) if e["event"] == "requeued"] == [30]
    assert any(call.startswith("scontrol update JobId=17 StartTime=2") for call in workplace.calls)
    assert "it waits for at least 30s" in out


def test_a_start_on_a_bad_node_is_given_back_twice_at_most(workplace: Workplace) -> None:
    run = begun(workplace)
    add_event(run, "ended", job_id="17", attempt=1, cause="requeued", exit_code=1)
    bad_nodes.mark_bad(Attempt(run, 1), "17", {"h02": "slow"}, bad_nodes.BY_PREFLIGHT)
    cluster_says(workplace)
    assert [begin(workplace, run) for _ in range(3)] == ["", "", "2"]
    kinds = [event["event"] for event in read_events(run)]
    assert kinds.count("not_started") == kinds.count("requeued") == 2
    assert kinds[-1] == "started"
    assert workplace.calls.count("scontrol requeue 17") == 2
    assert updates(workplace) == ["scontrol update JobId=17 ExcNodeList=h02"] * 2
    assert sum(call.startswith("sinfo") for call in workplace.calls) == 3  # one a start
    assert begin(workplace, run, "h[03-04]") == "3"


def begin_needing(place: Workplace, run: RunDir, needed: int) -> str:
    """Begin an attempt on two nodes; returns what it says."""
    place.monkeypatch.setenv("SLURM_JOB_ID", "17")
    try:
        job = JobStart(run, "17", 0, "h[01-02]")
        beginning.begin_attempt(job, 20, 1.0, lambda _: (), needed=needed)
    except StartRefused as error:
        return str(error)
    return "begun"


def test_a_start_with_too_few_nodes_is_given_back_twice_and_then_refused(
    workplace: Workplace,
) -> None:
    run = begun(workplace)
    add_event(run, "ended", job_id="17", attempt=1, cause="requeued", exit_code=1)
    cluster_says(workplace)
    said = [begin_needing(workplace, run, 3) for _ in range(3)]
    words = "Slurm assigned 2 nodes, and a step of the run needs 3"
    assert said[:2] == [f"{words}: job 17 is back in the queue, for 2"] * 2
    assert said[2].startswith(f"{words}, for 3 starts in a row. Resume with: clusterddp resume")
    kinds = [event["event"] for event in read_events(run)]
    assert kinds[-6:] == ["not_started", "requeued"] * 2 + ["started", "ended"]
    assert workplace.calls.count("scontrol requeue 17") == 2
    assert updates(workplace) == ["scontrol update JobId=17 NumNodes=2-2 NumTasks=8"] * 2
    assert begin_needing(workplace, run, 2) == "begun"


def test_a_start_with_too_few_nodes_asks_for_as_many_tasks_a_node_as_the_job_did(
    workplace: Workplace,
) -> None:
    """Torchrun's template asks for one a node, which starts the others."""
    run = begun(workplace)
    cluster_says(workplace)
    workplace.monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    assert begin_needing(workplace, run, 3).endswith("is back in the queue, for 2")
    assert updates(workplace) == ["scontrol update JobId=17 NumNodes=2-2 NumTasks=2"]


@pytest.mark.parametrize(
    ("requeue", "words"),
    [("exit 0", "and requeue is off"), ("exit 1", "the job cannot be requeued: ")],
)
def test_a_start_with_too_few_nodes_that_cannot_go_back_is_refused(
    workplace: Workplace, requeue: str, words: str
) -> None:
    run = begun(workplace)
    add_event(run, "ended", job_id="17", attempt=1, cause="requeued", exit_code=1)
    if requeue == "exit 0":
        run.spec.write_text(json.dumps({**json.loads(run.spec.read_text()), "requeue": False}))
    cluster_says(workplace, requeue=requeue)
    assert words in begin_needing(workplace, run, 3)
    assert [event["event"] for event in read_events(run)][-2:] == ["started", "ended"]


@pytest.mark.parametrize("why", ["requeue refused", "not enough nodes", "cleared", "cancelled"])
def test_a_start_on_a_bad_node_goes_on_where_giving_it_back_is_of_no_use(
    workplace: Workplace, why: str
) -> None:
    run = begun(workplace)
    add_event(run, "ended", job_id="17", attempt=1, cause="requeued", exit_code=1)
    bad_nodes.mark_bad(Attempt(run, 1), "17", {"h02": "slow"}, bad_nodes.BY_PREFLIGHT)
    cluster_says(workplace, requeue="exit 1" if why == "requeue refused" else "exit 0")
    if why == "not enough nodes":
        workplace.monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    if why == "cleared":
        bad_nodes.clear(workplace.root, ["h02"])
    if why == "cancelled":
        add_event(run, "cancelled", job_id="17")
    assert begin(workplace, run) == ("" if why == "cancelled" else "2")
    assert "not_started" not in [event["event"] for event in read_events(run)]


@pytest.mark.parametrize("how", ["its node is down", "srun has said so", "neither"])
def test_the_node_of_a_script_that_was_lost_is_blamed_at_the_next_start(
    workplace: Workplace, how: str
) -> None:
    run = begun(workplace, LOST if how == "srun has said so" else "")
    cluster_says(workplace, down="h02" if how == "its node is down" else "h04")
    assert begin(workplace, run, "h[01,03]") == "2"
    marked_bad = [
        event["nodes"] for event in read_events(run) if event["event"] == "nodes_marked_bad"
    ]
    reason = "lost during attempt 1, whose end is not recorded"
    assert marked_bad == ([] if how == "neither" else [{"h02": reason}])

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from clusterddp import log
from clusterddp.distributed import heartbeat
from clusterddp.distributed.heartbeat import Heartbeat, Phase, Progress, Snapshot
from clusterddp.distributed.shared_store import SharedStore
from clusterddp.distributed.watchdog import Finding, Watchdog, judge, periods
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.worker.workstation import free_port
from tests.distributed.meetings import env
from tests.distributed.test_heartbeat import beat
from tests.forked import CONTEXT
from tests.waiting import PATIENCE, wait_for

# A rank whose processor is given to other tests is not to look like one that hangs.
SILENT_SECONDS = 2.5
BEAT_SECONDS = 0.25

DATA, BACKWARD = Phase.DATA, Phase.BACKWARD


# --- one rank alone, its clock in our hands


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def alone(clock: Clock, progress: Progress, **more: Any) -> Watchdog:
    ours = DistEnv.from_environ({})
    return Watchdog(
        None, ours, progress, silent_seconds=30, beat_seconds=2, host="h00", clock=clock, **more
    )


def test_a_single_rank_says_so_and_prints_its_stack_once_a_stall(
    capfd: pytest.CaptureFixture[str], logged: list[str]
) -> None:
    clock, progress = Clock(), Progress()
    dog = alone(clock, progress)
    progress.mark(58, DATA)
    for _ in range(35):
        clock.now += 1
        dog._tick()
    assert logged == [
        "watchdog: no progress for 30.0s: fetching the batch of step 58; this log has the stack"
    ]
    for _ in range(10):
        progress.mark(58, BACKWARD)
        clock.now += 1
        dog._tick()
    assert logged[1:] == ["watchdog: training continues after 35.0s"]
    assert dog.suspect == ""
    for _ in range(35):
        clock.now += 1
        dog._tick()
    assert len(logged) == 3 and "exchanging the gradients of step 58" in logged[2]

    printed = capfd.readouterr().err
    assert printed.count("has not moved for") == 2
    assert "in test_a_single_rank_says_so_and_prints_its_stack_once_a_stall" in printed


def test_no_time_counts_in_code_of_a_ranks_own(
    capfd: pytest.CaptureFixture[str], logged: list[str]
) -> None:
    clock, progress = Clock(), Progress()
    dog = alone(clock, progress, has_own_code=True)
    for phase, told in ((Phase.USER_CODE, 0), (Phase.FORWARD, 1), (Phase.USER_CODE, 2)):
        progress.mark(58, phase)
        for _ in range(35):
            clock.now += 1
            dog._tick()
        assert len(logged) == told, "the second line says that it goes on"
    assert capfd.readouterr().err.count("has not moved for") == 1


@pytest.mark.parametrize(
    ("other", "silent", "words"),
    [
        (Phase.USER_CODE, False, ""),
        (Phase.FORWARD, False, "rank 1 on h01 is behind: in the forward pass of step 58"),
        (Phase.USER_CODE, True, "rank 1 on h01 does not respond"),
    ],
)
def test_nobody_hangs_who_waits_for_a_rank_in_code_of_its_own(
    other: Phase, silent: bool, words: str, capfd: pytest.CaptureFixture[str], logged: list[str]
) -> None:
    clock, progress, number = Clock(), Progress(), 0
    dog = Watchdog(
        dist.HashStore, env(0, 2, 1), progress, silent_seconds=30, beat_seconds=2, host="h00",
        has_own_code=True, clock=clock,
    )  # fmt: skip
    exchange = dog._exchange
    assert exchange is not None
    progress.mark(58, BACKWARD)
    for _ in range(50):
        clock.now += 1
        number += not silent
        beats = {0: beat(58, BACKWARD, host="h00"), 1: beat(58, other)}
        exchange.snapshot = Snapshot(
            range(2), {r: b._replace(number=number) for r, b in beats.items()}, ""
        )
        exchange.rounds += 1
        dog._tick()
    assert bool(logged) == bool(words) == ("has not moved for" in capfd.readouterr().err)
    assert words in "".join(logged)


def test_the_time_for_which_a_process_was_stopped_is_no_silence(logged: list[str]) -> None:
    clock, progress = Clock(), Progress()
    dog = alone(clock, progress)
    for _ in range(5):
        clock.now += 600
        dog._tick()
    assert not logged


@pytest.mark.parametrize(
    ("watchdog", "group_timeout", "world_size", "expected"),
    [
        (60, 600, 2, (60, 2.0)),
        (60, 600, 64, (60, 2.0)),
        (60, 600, 3000, (60, 3.0)),  # the store sees at most 1,000 beats a second …
        (60, 600, 100_000, (60, 3.5)),  # … unless the finding would come after 90 s
        (60, 60, 2, (20, 2.0)),
        (60, 12, 2, (4, 0.5)),
        (60, 12, 3000, (4, 3.0)),  # no rank posts so often that the store gets too much
        (4, 12, 2, (4, 0.5)),
        (1, 12, 2, (1, 0.125)),
    ],
)
def test_the_verdict_comes_before_the_groups_time_out(
    watchdog: float, group_timeout: float, world_size: int, expected: tuple[float, float]
) -> None:
    assert periods(watchdog, group_timeout, world_size) == expected


class CountingStore:
    """Store of one process, which counts the calls and the keys of each reader."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls = self.keys = self.most = 0

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self._count(keys)
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count(keys)
        return [self.values[key] for key in keys]

    def _count(self, keys: list[str]) -> None:
        self.calls, self.keys = self.calls + 1, self.keys + len(keys)
        self.most = max(self.most, len(keys))


def beats_until(
    found: Callable[[Watchdog], bool], rank: int, silent: Collection[int], world_size: int
) -> tuple[float, list[tuple[int, int]], CountingStore]:
    """Lets a rank wait for silent ones; the seconds until the finding, and what each beat read."""
    clock, store, beats = Clock(), CountingStore(), list[tuple[int, int]]()
    silence, seconds = periods(60, 600, world_size)
    dog = Watchdog(
        lambda: store, env(rank, world_size, 1), Progress(), silent_seconds=silence,  # type: ignore
        beat_seconds=seconds, host="h00", clock=clock, has_own_code=True,
    )  # fmt: skip
    exchange, began = dog._exchange, clock.now
    assert exchange
    while not found(dog):
        assert clock.now < began + 1000
        for other in {*range(world_size)} - {*silent, rank}:
            store.set(f"progress/{other}", beat(3, BACKWARD)._replace(number=len(beats)).to_json())
        store.calls = store.keys = 0
        exchange._round(store)  # type: ignore[arg-type]
        beats.append((store.calls, store.keys))
        due = clock.now + seconds
        while clock.now < due and not found(dog):
            clock.now += min(1.0, due - clock.now)
            dog._tick()
    return clock.now - began, beats, store


@pytest.mark.parametrize("world_size", [64, 4096])
def test_the_finding_takes_at_most_90_seconds_whatever_the_number_of_ranks(
    world_size: int, logged: list[str]
) -> None:
    took, beats, store = beats_until(lambda _: bool(logged), 0, {7, 9}, world_size)
    assert took <= 90 and "ranks 7, 9 do not respond" in logged[0]
    calls, keys = beats[-1]
    assert keys <= world_size + 8 and calls <= world_size / 1024 + 8
    # Whoever never posted is found by halving, and no call keeps the store from the others long.
    assert max(beat[0] for beat in beats) <= 60 and store.most <= 1024


def test_a_waiting_rank_reads_few_others() -> None:
    """All ranks read at once; the lowest 16 may be those of a lost node."""

    def knows_more(dog: Watchdog) -> bool:
        snapshot = dog._exchange.snapshot if dog._exchange else None
        return snapshot is not None and len(snapshot.ranks) > 16

    _, beats, _ = beats_until(knows_more, 2000, range(16), 2048)
    assert max(keys for _, keys in beats) <= 400


def test_a_store_that_does_not_answer_at_first_is_tried_again(logged: list[str]) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, progress, may_connect = env(1, 2, store.port), Progress(), threading.Event()

    def connect() -> SharedStore:
        if not may_connect.is_set():
            raise TimeoutError
        return heartbeat.connect(ours, {}, PATIENCE, 0.02)

    def said(words: str) -> Callable[[], bool]:
        return lambda: any(words in line for line in logged)

    with Watchdog(connect, ours, progress, silent_seconds=0.2, beat_seconds=0.02, host="h01"):
        wait_for(said("the state of other ranks is unknown"), "the finding of a rank alone")
        may_connect.set()
        wait_for(said("rank 0 does not respond"), "the finding by what the store holds")
    assert logged[0] == (
        f"watchdog: rank 0's store at 127.0.0.1:{store.port} did not respond to rank 1 "
        "(no answer in time), which retries; until then it knows of no other rank"
    )
    assert sum("which retries" in line for line in logged) == 1


def test_a_rank_leaves_once_for_a_suspect_and_never_without_one(logged: list[str]) -> None:
    clock, progress, told = Clock(), Progress(), list[str]()
    ours = env(1, 2, 1)
    dog = Watchdog(
        dist.HashStore, ours, progress, silent_seconds=30, beat_seconds=2, host="h01",
        leave=told.append, leave_seconds=100, clock=clock,
    )  # fmt: skip

    def pass_time(seconds: int) -> None:
        for _ in range(seconds):
            clock.now += 1
            dog._tick()

    progress.mark(58, BACKWARD)
    pass_time(200)
    assert not told, "nobody is suspected"
    exchange = dog._exchange
    assert exchange is not None
    exchange.failure = "Broken pipe"
    progress.mark(59, BACKWARD)
    pass_time(100)
    assert not told, "it has moved since"
    pass_time(50)
    assert told == [
        "rank 1 on h01 has not moved for 1m40s, exchanging the gradients of step 59: rank 0 cannot "
        "be reached at 127.0.0.1:1 (Broken pipe): it has ended, or the network is cut"
    ]


def test_a_rank_that_has_left_is_not_waited_for(logged: list[str]) -> None:
    clock, told = Clock(), list[str]()
    dog = Watchdog(
        dist.HashStore, env(1, 2, 1), Progress(), silent_seconds=30, beat_seconds=2, host="h01",
        leave=told.append, leave_seconds=600, clock=clock,
    )  # fmt: skip
    for kind in ("behind", "left"):
        dog._log_finding(Finding(kind, (0,), "rank 0 on h00 is gone"))
        for _ in range(40):
            clock.now += 1
            dog._tick()
        assert bool(told) is (kind == "left")
    [why] = told
    assert why.endswith("starting: rank 0 on h00 is gone")


def test_a_log_that_is_closed_does_not_end_the_watchdog() -> None:
    def closed(line: str) -> None:
        raise BrokenPipeError

    clock = Clock()
    dog = alone(clock, Progress())
    with log.to(closed):
        for _ in range(36):
            clock.now += 1
            dog._tick()
    assert dog._logged


# --- real ranks, each a process of its own


def spin_for_ever() -> None:
    while True:
        pass


class Ranks:
    """Processes that exchange over gloo in an endless loop, each with a watchdog and a log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Any] = []

    def start(
        self, world_size: int, port: int = 0, hang: Callable[[], None] | None = None,
        hanging_rank: int = -1, leave_seconds: float = 0,
    ) -> None:  # fmt: skip
        """At `port` listens a store that outlives the ranks; without one, rank 0 keeps it.

        Those that wait for `leave_seconds` are told to leave; 0 is never.
        """
        keeper = not port
        if keeper:
            port = free_port()
        for rank in range(world_size):
            process = CONTEXT.Process(
                target=train,
                args=(
                    rank, world_size, port, keeper and rank == 0, self.folder,
                    hang if rank == hanging_rank else None, leave_seconds,
                ),
            )  # fmt: skip
            process.start()
            self.processes.append(process)
        for rank in range(world_size):
            self.await_line(rank, "trains")

    def send(self, rank: int, sign: int) -> None:
        os.kill(self.processes[rank].pid, sign)

    def log(self, rank: int) -> str:
        path = self.folder / f"{rank}.log"
        return path.read_text() if path.exists() else ""

    def await_line(self, rank: int, *parts: str, after: int = 0) -> None:
        def seen() -> bool:
            lines = self.log(rank)[after:].splitlines()
            return any(all(part in line for part in parts) for line in lines)

        try:
            wait_for(seen, f"{parts} in the log of rank {rank}")
        except AssertionError as error:
            logs = [f"rank {i}:\n{self.log(i)}" for i in range(len(self.processes))]
            raise AssertionError("\n".join([str(error), *logs])) from None

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path)
    yield started
    started.end()


def train(
    rank: int, world_size: int, port: int, keeps_store: bool, folder: Path,
    hang: Callable[[], None] | None, leave_seconds: float,
) -> None:  # fmt: skip
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    kept = [  # noqa: F841 -- it listens as long as it is kept
        TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        for _ in range(keeps_store)
    ]
    ours = env(rank, world_size, port)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "group"), world_size), rank=rank,
        world_size=world_size, timeout=timedelta(seconds=10 * PATIENCE),
    )  # fmt: skip
    progress = Progress()
    dog = Watchdog(
        partial(heartbeat.connect, ours, {}, PATIENCE, BEAT_SECONDS), ours, progress,
        silent_seconds=SILENT_SECONDS, beat_seconds=BEAT_SECONDS, host=f"h{rank:02}",
        note=lambda finding: tell(f"notes {finding and finding.ranks}"),
        leave=(lambda why: tell(f"leaves: {why}")) if leave_seconds else None,
        leave_seconds=leave_seconds,
    )  # fmt: skip
    threading.Thread(target=tell_suspects, args=(dog,), daemon=True).start()
    with dog:
        heartbeats = dog._exchange
        assert heartbeats is not None
        wait_for(lambda: heartbeats.rounds > 0, "this rank's first heartbeat")
        tell("trains")
        try:
            exchange(progress, hang)
        except RuntimeError:
            tell(f"lost a peer, suspect: {dog.suspect}")
            wait_for(lambda: dog._unreachable or (folder / "over").exists(), "the end of the store")
            progress.mark(10**6, Phase.DONE)
    tell("ends")


def tell_suspects(dog: Watchdog) -> None:
    told = ""
    while True:
        if (suspect := dog.suspect) != told:
            told = suspect
            tell(f"suspects {told or 'nobody'}")
        time.sleep(0.02)


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def exchange(progress: Progress, hang: Callable[[], None] | None) -> None:
    gradient = torch.ones(4)
    step = 0
    while True:
        step += 1
        progress.mark(step, DATA)
        if hang and step == 20:
            hang()
        time.sleep(0.01)  # so that the ranks share two cores with the other tests
        progress.mark(step, BACKWARD)
        dist.all_reduce(gradient)


def test_a_stopped_rank_is_named_by_rank_0_until_it_goes_on(ranks: Ranks) -> None:
    ranks.start(3)
    ranks.send(2, signal.SIGSTOP)
    ranks.await_line(0, "watchdog: no progress for", "rank 2 on h02 does not respond")
    ranks.send(2, signal.SIGCONT)
    ranks.await_line(0, "notes (2,)")
    ranks.await_line(0, "watchdog: training continues after")
    ranks.await_line(0, "notes None")
    assert "notes" not in ranks.log(1)
    assert "watchdog: no progress" not in ranks.log(1)
    assert "in exchange" in ranks.log(1), "each rank that waits prints its stack"


@pytest.mark.slow
def test_every_waiting_rank_learns_the_suspect(ranks: Ranks) -> None:
    ranks.start(3)
    ranks.send(2, signal.SIGSTOP)
    ranks.await_line(1, "suspects rank 2 on h02 does not respond")
    ranks.send(2, signal.SIGKILL)
    ranks.await_line(1, "lost a peer, suspect: rank 2 on h02 does not respond")
    (ranks.folder / "over").touch()


def test_all_that_wait_in_vain_leave_and_name_the_rank_that_is_stopped(ranks: Ranks) -> None:
    ranks.start(3, leave_seconds=2 * SILENT_SECONDS)
    ranks.send(2, signal.SIGSTOP)
    for rank in (0, 1):
        ranks.await_line(rank, f"leaves: rank {rank} on h0{rank} has not moved for", "rank 2 on")


def test_a_rank_that_loops_for_ever_is_behind_and_prints_where(ranks: Ranks) -> None:
    ranks.start(2, hang=spin_for_ever, hanging_rank=1)
    ranks.await_line(
        0, "rank 1 on h01 is behind: fetching the batch of step 20, while others are exchanging"
    )
    ranks.await_line(1, "in spin_for_ever")
    assert "in spin_for_ever" not in ranks.log(0)


@pytest.mark.slow
def test_rank_1_speaks_where_rank_0_and_its_store_are_stopped(ranks: Ranks) -> None:
    ranks.start(3)
    ranks.send(0, signal.SIGSTOP)
    ranks.await_line(1, "watchdog: no progress for", "rank 0 on", "its store", "have not responded")
    ranks.send(0, signal.SIGCONT)
    ranks.await_line(1, "watchdog: training continues after")
    assert "watchdog: no progress" not in ranks.log(2)


class StoreProcess:
    def __init__(self) -> None:
        code = (
            "import sys, tests.distributed.meetings; from torch.distributed import TCPStore\n"
            "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
            "print(store.port, flush=True); sys.stdin.read()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())


@pytest.fixture
def agent() -> Iterator[StoreProcess]:
    started = StoreProcess()
    with started.process as process:
        yield started
        process.kill()


@pytest.mark.slow
def test_rank_1_speaks_for_a_stopped_rank_0_until_the_store_is_gone(
    ranks: Ranks, agent: StoreProcess
) -> None:
    ranks.start(3, agent.port)
    ranks.send(0, signal.SIGSTOP)
    ranks.await_line(1, "watchdog: no progress", "rank 0 on h00", "rank 0 last responded")
    ranks.send(0, signal.SIGCONT)
    ranks.await_line(1, "watchdog: training continues after")

    agent.process.kill()
    for rank in range(3):
        ranks.await_line(rank, f"watchdog: rank 0 cannot be reached at 127.0.0.1:{agent.port}")
    ranks.send(2, signal.SIGKILL)  # ends the exchange of the others
    for rank in range(2):
        ranks.await_line(rank, "ends")
        ranks.processes[rank].join(PATIENCE)
        assert ranks.processes[rank].exitcode == 0
        assert ranks.log(rank).count("watchdog: rank 0 cannot be reached") == 1
        assert "Traceback" not in ranks.log(rank)


@pytest.mark.slow
def test_a_process_ends_although_its_store_is_stopped(agent: StoreProcess, tmp_path: Path) -> None:
    program = f"""
import os, time
from functools import partial
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.distributed.heartbeat import Progress
from clusterddp.distributed.heartbeat import connect
from clusterddp.distributed.watchdog import Watchdog
env = DistEnv.from_environ({{"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": "{agent.port}"}})
dog = Watchdog(partial(connect, env, {{}}, {PATIENCE}, 0.1), env, Progress(), silent_seconds=0.2,
               beat_seconds=0.1, host="h01")
with dog:
    while not dog._exchange.rounds:
        time.sleep(0.02)
    os.kill({agent.process.pid}, {int(signal.SIGSTOP)})
    deadline = time.monotonic() + {PATIENCE}
    while not dog.suspect and time.monotonic() < deadline:
        time.sleep(0.02)
print("stopped")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True,
        timeout=2 * PATIENCE,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "watchdog: no progress" in ended.stderr and "rank 0 on" in ended.stderr
    assert ended.stdout.endswith("stopped\n")


DATA, BACKWARD = Phase.DATA, Phase.BACKWARD


@pytest.mark.parametrize(
    ("beats", "silent", "kind", "ranks", "words"),
    [
        pytest.param([beat(57, BACKWARD), beat(57, BACKWARD), beat(56, BACKWARD,
          host="h02")], {2: 31.4}, "silent", (2,),
         ["rank 2 on h02 does not respond",
          "rank 2 last responded 31.4s ago, exchanging the gradients of step 56"],
         id="stopped"),
        pytest.param([beat(57, BACKWARD), beat(58, BACKWARD)], {1: 31}, "silent", (1,),
         ["rank 1 on h01 does not respond"], id="stopped where it is ahead"),
        pytest.param([beat(58, BACKWARD), beat(58, DATA, host="h02"), beat(58, BACKWARD)],
         {}, "behind", (1,),
         ["rank 1 on h02 is behind: fetching the batch of step 58, while others are "
          "exchanging the gradients of step 58", "its log has its stack"], id="behind"),
        pytest.param([beat(58, Phase.SAVE), beat(59, BACKWARD), beat(59, BACKWARD)], {},
         "behind", (0,), ["rank 0 on h01 is behind: saving after step 58"],
         id="rank 0's save comes before the next step"),
        pytest.param([beat(58, Phase.COUNT), beat(58, Phase.EVALUATE, still=3.0)], {},
         "behind", (1,),
         ["rank 1 on h01 is behind: evaluating after step 58", "last moved 3.0s ago"], id="slow"),
        pytest.param([beat(1, DATA), beat(0, Phase.START), beat(0, Phase.START,
          host="h02")], {}, "behind", (1, 2),
         ["rank 1 on h01 and rank 2 on h02 are behind: starting,", "their logs have"],
         id="two behind"),
        pytest.param([beat(58, BACKWARD)] * 3, {}, "level", (),
         ["all 3 ranks are at the same position, exchanging the gradients of step 58"], id="level"),
        pytest.param([beat(58, BACKWARD), beat(57, Phase.UPDATE, left=True), beat(58,
          BACKWARD)], {}, "left", (1,),
         ["rank 1 on h01 left the training, updating the weights in step 57", "log of rank 1"],
         id="left"),
        pytest.param([beat(58, BACKWARD), beat(58, BACKWARD), beat(58, BACKWARD,
          left=True)], {1: 31}, "silent", (1,), ["rank 1 on h01 does not respond"],
         id="left for the want of the silent one"),
        pytest.param([beat(60, Phase.DONE, left=True), beat(60, Phase.SAVE)], {}, "behind",
         (1,), ["rank 1 on h01 is behind: saving after step 60, while others are done"],
         id="done is no desertion"),
    ],
)  # fmt: skip
def test_the_rank_to_blame_is_named(
    beats: list[Heartbeat], silent: dict[int, float], kind: str, ranks: tuple[int, ...],
    words: list[str],
) -> None:  # fmt: skip
    finding = judge(dict(enumerate(beats)), silent, len(beats), silent_seconds=30)
    assert (finding.kind, finding.ranks) == (kind, ranks)
    for some in words:
        assert some in finding.text
    assert bool(finding.reason) == (kind in ("silent", "behind"))
    assert "rank" not in finding.reason


def test_a_rank_that_never_posted_is_named() -> None:
    finding = judge({0: beat(1, BACKWARD)}, {1: 31}, 2, 30)
    assert finding.ranks == (1,)
    assert "rank 1 does not respond" in finding.text and "never responded" in finding.text


def test_many_silent_ranks_fit_in_a_line() -> None:
    seen = {rank: beat(9, BACKWARD, host=f"h{rank // 8:03}") for rank in range(1000)}
    finding = judge(seen, dict.fromkeys(range(8, 1000), 31.0), 1000, 30)
    assert "ranks 8, 9, 10, 11, 12, 13, 14, 15 on h001 and ranks 16" in finding.text
    assert "and 976 more do not respond" in finding.text
    assert len(finding.text) < 500


def test_it_shows_its_parent_that_python_runs_until_it_leaves() -> None:
    alone, beats = DistEnv.from_environ({}), list[float]()
    with Watchdog(
        None, alone, Progress(), silent_seconds=30, beat_seconds=2, host="h00", beat=beats.append
    ):
        pass
    assert beats[0] == 30 + 4 * 2
    assert beats[-1] == 0

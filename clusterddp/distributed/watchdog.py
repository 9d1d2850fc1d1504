"""Finds the rank that blocks all others, and prints the stack of every rank that can.

The process group's timeout ends the wait if it raises an error, as gloo's does. NCCL's timeout
ends the process without calling Python, so a rank that waits for a suspect exits before it. Each
rank posts its position to a store from time to time; the heartbeats are read only after a stall.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from clusterddp import log
from clusterddp.distributed import heartbeat
from clusterddp.distributed.heartbeat import Exchange, Heartbeat, Phase, Progress, ResponseTracker
from clusterddp.distributed.shared_store import SharedStore
from clusterddp.formatting import duration
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.run.outcome import note_hung

# A rank without a heartbeat for this many beats does not respond.
_BEATS_OF_SILENCE = 4
_LONGEST_BEAT_SECONDS = 3.5
# Number of lower ranks that a waiting rank reads, to see whether one of them reports for all. If
# none of them responds, it reads so many times as many.
_POSSIBLE_SPEAKERS, _MORE_SPEAKERS = 16, 4
# Seconds for which stop() waits for the thread.
_STOP_SECONDS = 1.0
_STDERR = 2
# Beats from the detection of a stall to its finding, including those of silence.
_BEATS_TO_FINDING = 8


class Finding(NamedTuple):
    """Finding of the watchdog: which ranks cause a stall, and how."""

    kind: str
    """silent, left, behind, level, or alone: the rank knows nothing of the others."""
    ranks: tuple[int, ...]
    text: str
    reason: str = ""
    """The text without the ranks; empty if none of them is known to hang."""


def periods(watchdog: float, group_timeout: float, num_nodes: int) -> tuple[float, float]:
    """Return `silent_seconds` and `beat_seconds`, so that the finding precedes the timeout.

    If the process group's timeout came first, the waiting ranks would end before the hanging one
    is found. Then a third of the timeout is used, with more frequent heartbeats. The store receives
    those of at most 1,000 nodes per second, or one per node in 3.5 s: it takes about 280,000 values
    (torch 2.14). So the finding comes within 28 s after `silent_seconds` at any size.
    """
    fastest = min(num_nodes / 1000, _LONGEST_BEAT_SECONDS)
    beat = max(2.0, fastest)
    if watchdog + _BEATS_TO_FINDING * beat <= group_timeout:
        return watchdog, beat
    silent = min(watchdog, group_timeout / 3)
    return silent, max(fastest, min(beat, silent / _BEATS_TO_FINDING))


class Watchdog:
    """Watches `progress` and posts heartbeats from its own threads while its context is open.

    Without progress for `silent_seconds`, this rank prints its stacks to stderr, and one rank logs
    the cause for all: rank 0, or the lowest that still responds.

    connect: returns a private store, perhaps slowly; None without other ranks.
    note: called with the finding on the rank that logs it, and with None when training continues.
    host: this rank's host, as shown to the others.
    beat: tells this task's parent that Python runs, and after how many seconds without a beat to
    print the stacks; 0 is never.
    leave: called once with the reason if this rank cannot continue: no progress for
    `leave_seconds` and a suspected rank, or a rank that others wait for has left.

    In user code (`Phase.USER_CODE`), whose length is unknown, no time counts, and a rank that waits
    for one in user code does not hang. A training with such code (`has_own_code`) prints stacks
    only once a rank is suspected.
    """

    def __init__(
        self,
        connect: Callable[[], SharedStore] | None,
        env: DistEnv,
        progress: Progress,
        *,
        silent_seconds: float,
        beat_seconds: float,
        host: str,
        note: Callable[[Finding | None], None] = lambda _: None,
        beat: Callable[[float], None] = lambda _: None,
        leave: Callable[[str], None] | None = None,
        leave_seconds: float = 0.0,
        has_own_code: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._note, self._tell_parent = note, beat
        self._leave, self._leave_seconds = leave, leave_seconds
        self._has_own_code, self._has_printed = has_own_code, False
        self._env, self._progress, self._clock = env, progress, clock
        self._host, self._silent_seconds, self._beat_seconds = host, silent_seconds, beat_seconds
        self._tick_seconds = min(self._beat_seconds, 1.0)
        self._quiet = _BEATS_OF_SILENCE * self._beat_seconds
        self._exchange = (
            Exchange(connect, env.rank, self._beat_seconds, self._heartbeat) if connect else None
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

        # Seconds in which this process was able to run: a rank that was stopped must not find the
        # others slow.
        self._now, self._read_at = 0.0, clock()
        self._marks, self._moved_at = progress.state[0], 0.0
        self._rounds, self._round_at = 0, 0.0
        self._responses: ResponseTracker | None = None  # during a stall
        self._logged: tuple[str, tuple[int, ...]] | None = None
        self._unreachable = ""  # error of the store, once it is gone for good
        self._said_unconnected = self._deserted = False
        self.suspect = ""
        """Description of the rank that blocks this one; empty without a suspect."""

    @classmethod
    def of_ranks(
        cls,
        env: DistEnv,
        progress: Progress,
        *,
        silent_seconds: float,
        group_seconds: float,
        **more: Any,
    ) -> "Watchdog":
        """Return the watchdog of a rank, with or without others; group_seconds: see `periods`."""
        silent, beat = periods(silent_seconds, group_seconds, env.num_nodes)
        connect = partial(heartbeat.connect, env, os.environ, 10.0, beat)
        return cls(
            connect if env.world_size > 1 else None,
            env,
            progress,
            silent_seconds=silent,
            beat_seconds=beat,
            **more,
        )

    def __enter__(self) -> "Watchdog":
        self._tell_parent(self._silent_seconds + self._quiet)
        self._thread.start()
        if self._exchange:
            self._exchange.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Tell the others that this rank leaves; return within about two seconds."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        if self._logged and self._progress.state[0] != self._marks:
            self._resume()  # it has moved since the last check
        if self._exchange:
            self._exchange.stop()
        self._tell_parent(0)

    def _watch(self) -> None:
        while not self._stopping.wait(self._tick_seconds):
            self._tell_parent(self._silent_seconds + self._quiet)
            self._tick()

    def _tick(self) -> None:
        read_at = self._clock()
        self._now += min(read_at - self._read_at, 2 * self._tick_seconds)
        self._read_at = read_at
        exchange = self._exchange
        if exchange and exchange.rounds != self._rounds:
            self._rounds, self._round_at = exchange.rounds, self._now
        if exchange and exchange.failure and not self._unreachable:
            self._give_up(exchange.failure)
        if exchange and exchange.unconnected and not self._said_unconnected:
            self._say_unconnected(exchange.unconnected)
        is_own = self._progress.position.phase == Phase.USER_CODE
        if self._progress.state[0] != self._marks or is_own:
            self._resume()
        elif self._still_seconds >= self._silent_seconds:
            self._stall()

    @property
    def _still_seconds(self) -> float:
        return self._now - self._moved_at

    def _heartbeat(self, number: int, left: bool) -> Heartbeat:
        return Heartbeat(self._host, self._progress.position, self._still_seconds, number, left)

    def _resume(self) -> None:
        logged, still = self._logged, self._still_seconds
        self._marks, self._moved_at = self._progress.state[0], self._now
        self._logged, self._responses, self.suspect, self._deserted = None, None, "", False
        self._has_printed = False
        if self._exchange:
            self._exchange.wanted, self._exchange.suspect = range(0), ""
        if logged:
            self._note(None)
            log.info(f"watchdog: training continues after {duration(still)}")

    def _stall(self) -> None:
        if self._responses is None:
            self._look_at(range(min(self._env.rank, _POSSIBLE_SPEAKERS)))
            if not self._has_own_code:
                self._print_stacks()
        exchange, position = self._exchange, self._progress.position.words()
        if exchange is None or self._unreachable or not exchange.rounds:
            others = "" if self._env.world_size == 1 else "; the state of other ranks is unknown"
            self._log_finding(Finding("alone", (), f"{position}; this log has the stack{others}"))
        elif self._now - self._round_at > self._quiet + self._beat_seconds:
            self._suspect_rank_0(exchange)
        else:
            self._compare(exchange)
        self.suspect = self.suspect or self._unreachable
        if self._has_own_code and not self._has_printed and (self.suspect or self._logged):
            self._has_printed = True
            self._print_stacks()
        waited = self._deserted or self._still_seconds >= self._leave_seconds
        if self._leave and self.suspect and waited:
            leave, self._leave = self._leave, None
            still = f"has not moved for {duration(self._still_seconds)}, {position}"
            leave(f"rank {self._env.rank} on {self._host} {still}: {self.suspect}")

    def _print_stacks(self) -> None:
        # A single write to the descriptor is not mixed with other ranks' lines, and avoids the
        # locks of sys.stderr, which the hanging thread may hold.
        without = {self._thread.ident, self._exchange.thread.ident if self._exchange else None}
        text = (
            f"watchdog: rank {self._env.rank} on {self._host} has not moved for "
            f"{duration(self._still_seconds)}, {self._progress.position.words()}. Its threads:\n"
            f"{_stacks(without)}"
        )
        with suppress(OSError):  # stderr is closed
            os.write(_STDERR, text.encode(errors="replace"))

    def _compare(self, exchange: Exchange) -> None:
        """Check whether this rank reports for all; if so, report the rank that all wait for."""
        snapshot, responses, env = exchange.snapshot, self._responses, self._env
        assert responses is not None, "the other ranks are read during a stall"
        if snapshot is None or snapshot.ranks != responses.ranks:
            return  # no answer yet
        responses.update(snapshot, self._now)
        if not responses.ready():
            return
        gone = {rank for rank, beat in snapshot.beats.items() if beat.left}
        silent = {
            rank: seconds
            for rank, seconds in responses.silent(self._now, self._still_seconds).items()
            if rank not in gone and rank != env.rank
        }
        own = [each for each in snapshot.beats.values() if each.position.phase == Phase.USER_CODE]
        if any(
            rank < env.rank and rank not in silent and rank not in gone for rank in responses.ranks
        ):
            self.suspect = snapshot.suspect  # the reporting rank's suspect
        elif len(responses.ranks) < env.rank:  # each rank would read all others' heartbeats
            self._look_at(range(min(env.rank, _MORE_SPEAKERS * len(responses.ranks))))
        elif len(responses.ranks) < env.world_size:
            self._look_at(range(env.world_size))
        elif silent or all(each.left for each in own):
            self._log_finding(judge(snapshot.beats, silent, env.world_size, self._silent_seconds))
            exchange.suspect = self.suspect

    def _look_at(self, ranks: range) -> None:
        if self._env.rank == 0:
            ranks = range(self._env.world_size)
        self._responses = ResponseTracker(ranks, self._quiet)
        if self._exchange:
            self._exchange.wanted = ranks

    def _suspect_rank_0(self, exchange: Exchange) -> None:
        """Report rank 0, because its store does not respond.

        Without a store no rank can be elected to report: rank 1 does it, and the first rank of the
        second host, because rank 1 may be lost with rank 0's host.
        """
        env = self._env
        speaks = env.rank == 1 or (env.node_rank == 1 and env.local_rank == 0)
        beat = exchange.snapshot.beats.get(0) if exchange.snapshot else None
        host = beat.host if beat else (*env.hostnames, env.master_addr)[0]
        finding = Finding(
            "silent",
            (0,),
            f"rank 0 on {host} (stopped or cut off) and its store at "
            f"{env.master_addr}:{env.master_port} have not responded for "
            f"{duration(self._now - self._round_at)}",
            "it did not respond, nor did its store (stopped or cut off)",
        )
        self._log_finding(finding, aloud=speaks)
        # When the store responds again, the others' heartbeats were delayed as well.
        self._look_at(self._responses.ranks if self._responses else range(0))

    def _give_up(self, failure: str) -> None:
        env = self._env
        self._unreachable = (
            f"rank 0 cannot be reached at {env.master_addr}:{env.master_port} ({failure}): it has "
            "ended, or the network is cut"
        )
        if not self._stopping.is_set():
            self.suspect = self._unreachable
            log.info(f"watchdog: {self.suspect}")

    def _say_unconnected(self, reason: str) -> None:
        self._said_unconnected = True
        env = self._env
        log.info(
            f"watchdog: rank 0's store at {env.master_addr}:{env.master_port} did not respond to "
            f"rank {env.rank} ({reason}), which retries; until then it knows of no other rank"
        )

    def _log_finding(self, finding: Finding, aloud: bool = True) -> None:
        if finding.kind != "alone":
            self._deserted = finding.kind == "left"
            self.suspect = "" if finding.kind == "level" else finding.text
        if aloud and (finding.kind, finding.ranks) != self._logged:
            self._logged = finding.kind, finding.ranks
            log.info(f"watchdog: no progress for {duration(self._still_seconds)}: {finding.text}")
            self._note(finding)


def noting(folder: Path) -> Callable[[Finding | None], None]:
    """Return a `note` that records which ranks hang in a directory of outcomes, and their recovery.

    The attempt's result then names this rank instead of those that gave up waiting.
    """

    def note(finding: Finding | None) -> None:
        if finding and finding.kind == "alone":
            return  # a rank without contact to the others
        hang = finding if finding and (finding.reason or finding.kind == "level") else None
        with suppress(OSError):
            note_hung(folder, hang.ranks if hang else (), hang.reason or hang.text if hang else "")

    return note


def judge(
    beats: Mapping[int, Heartbeat],
    silent: Mapping[int, float],
    world_size: int,
    silent_seconds: float,
) -> Finding:
    """Find the ranks that block the others after `silent_seconds` without progress.

    beats: the newest of each rank that ever posted. silent: seconds since the last response of
    each rank that no longer responds.
    """
    if silent:
        # Before the ranks that left: they may have left because of this one.
        return _silence(beats, silent)
    left = [r for r, each in beats.items() if each.left and each.position.phase != Phase.DONE]
    if left:
        position = beats[min(left)].position
        return Finding(
            "left",
            tuple(sorted(left)),
            f"{_names(left, beats)} left the training, {position.words()}; "
            f"the log of rank {min(left)} says why",
        )
    positions = [beat.position for beat in beats.values()]
    lowest, highest = min(positions), max(positions)
    if lowest == highest:
        return Finding(
            "level",
            (),
            f"all {world_size} ranks are at the same position, {lowest.words()}; "
            "their logs have their stacks",
        )
    behind = sorted(rank for rank, beat in beats.items() if beat.position == lowest)
    moved = min(beats[rank].still_seconds for rank in behind)
    if moved < silent_seconds:
        hint = f"last moved {duration(moved)} ago"
    else:
        hint = "its log has its stack" if len(behind) == 1 else "their logs have their stacks"
    where = f"{lowest.words()}, while others are {highest.words()}"
    return Finding(
        "behind",
        tuple(behind),
        f"{_names(behind, beats)} {'is' if len(behind) == 1 else 'are'} behind: {where}; {hint}",
        where,
    )


def _silence(beats: Mapping[int, Heartbeat], silent: Mapping[int, float]) -> Finding:
    first = min(silent)
    sign = (
        f"rank {first} last responded {duration(silent[first])} ago, "
        f"{beats[first].position.words()}"
        if first in beats
        else f"rank {first} never responded"
    )
    why = "not respond (stopped, cut off, or stuck in native code)"
    return Finding(
        "silent",
        tuple(sorted(silent)),
        f"{_names(silent, beats)} {'does' if len(silent) == 1 else 'do'} {why}: {sign}",
        f"it did {why}",
    )


def _names(ranks: Sequence[int] | Mapping[int, object], beats: Mapping[int, Heartbeat]) -> str:
    """Format ranks: `rank 2 on h02`, `ranks 8, 9 on h02 and rank 12 on h03`."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(ranks)[:16]:
        hosts.setdefault(f" on {beats[rank].host}" if rank in beats else "", []).append(rank)
    groups = [
        f"{'rank' if len(some) == 1 else 'ranks'} {', '.join(map(str, some))}{host}"
        for host, some in hosts.items()
    ]
    return " and ".join([*groups, *([f"{len(ranks) - 16} more"] if len(ranks) > 16 else [])])


def _stacks(without: set[int | None]) -> str:
    """Return the Python stack of every other thread.

    The traceback module would read the sources, whose file system may be the cause of the hang.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident in without:
            continue
        lines.append(f"Thread {names.get(ident, ident)} (most recent call last):")
        called = [
            f'  File "{inner.f_code.co_filename}", line {line}, in {inner.f_code.co_name}'
            for inner, line in traceback.walk_stack(frame)
        ]
        lines += reversed(called)
    return "\n".join(lines) + "\n"

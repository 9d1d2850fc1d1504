"""Names the rank that keeps all others waiting, and prints the stack of every rank that still can.

Ending the wait is left to the process group's timeout where that raises an error, as gloo's does.
NCCL's ends the process without asking Python, so there a rank that waits for a suspect is told to
leave before that. Each rank posts its place in a store now and then; nobody reads the postings
until nothing moves any more.
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

from torch.distributed.distributed_c10d import Store

from clusterddp import log
from clusterddp.distributed import heartbeat
from clusterddp.distributed.heartbeat import Board, Phase, Posting, Progress, Signs
from clusterddp.formatting import duration
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.run.outcome import note_hung

# A rank that posted nothing for so many beats does not answer.
_BEATS_OF_SILENCE = 4
# The ranks that a waiting rank looks at, to learn whether one below it speaks for all.
_POSSIBLE_SPEAKERS = 16
# Seconds for which stop() waits for the thread.
_STOP_SECONDS = 1.0
_STDERR = 2
# Beats until a stall that is looked at has a verdict: those of silence, and what comes before.
_BEATS_TO_A_VERDICT = 8


class Verdict(NamedTuple):
    """Finding of the watchdog: the ranks to blame, and for what."""

    kind: str
    """silent, left, behind, level, or alone: a rank that knows only about itself."""
    ranks: tuple[int, ...]
    text: str
    reason: str = ""
    """The same without the ranks; empty where none of them is known to hang."""


def periods(watchdog: float, group_timeout: float, world_size: int) -> tuple[float, float]:
    """Give `silent_seconds` and `beat_seconds`, so that the verdict precedes the time-out.

    A process group whose time-out comes first ends the ranks that wait before anybody has looked
    for the one that hangs. Then a third of that time-out counts, and ranks post more often; at most
    50 postings a second reach the store in all.
    """
    fastest = world_size / 50
    beat = max(2.0, fastest)
    if watchdog + _BEATS_TO_A_VERDICT * beat <= group_timeout:
        return watchdog, beat
    silent = min(watchdog, group_timeout / 3)
    return silent, max(fastest, min(beat, silent / _BEATS_TO_A_VERDICT))


class Watchdog:
    """Watches `progress` and posts heartbeats from threads of its own while its context is open.

    Where it has not moved for `silent_seconds`, this rank's stacks go to stderr. One rank logs
    for all which one is to blame: rank 0, or the lowest that still answers. `connect` gives a store
    that nobody else uses, and may take long; None where there are no other ranks. `note` takes the
    verdict of the rank that logs it, and None when the training goes on. `host` is this rank's, as
    the others shall read it. `beat` tells this task's parent that Python runs here, and after how
    many seconds without such a sign the stacks are wanted; 0 for never. `leave` takes, once, why
    this rank cannot go on: nothing has moved for `leave_seconds` and a rank is suspected, or one
    that others wait for has left.

    In code of a rank's own (`Phase.OWN`), of which nothing is known, no time counts, and nobody
    hangs who waits for a rank there. A training that has such code (`has_own_code`) prints stacks
    only once a rank is suspected.
    """

    def __init__(
        self,
        connect: Callable[[], Store] | None,
        env: DistEnv,
        progress: Progress,
        *,
        silent_seconds: float,
        beat_seconds: float,
        host: str,
        note: Callable[[Verdict | None], None] = lambda _: None,
        beat: Callable[[float], None] = lambda _: None,
        leave: Callable[[str], None] | None = None,
        leave_seconds: float = 0.0,
        has_own_code: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._note, self._renew_liveness = note, beat
        self._leave, self._leave_seconds = leave, leave_seconds
        self._has_own_code, self._has_printed = has_own_code, False
        self._env, self._progress, self._clock = env, progress, clock
        self._host, self._silent_seconds, self._beat = host, silent_seconds, beat_seconds
        self._tick_seconds = min(self._beat, 1.0)
        self._quiet = _BEATS_OF_SILENCE * self._beat
        self._board = Board(connect, env.rank, self._beat, self._posting) if connect else None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

        # Seconds during which this process could run, and not those for which it was stopped:
        # a rank that was stopped has no reason to find the others slow.
        self._now, self._read_at = 0.0, clock()
        self._marks, self._moved_at = progress.state[0], 0.0
        self._rounds, self._round_at = 0, 0.0
        self._signs: Signs | None = None  # while nothing moves
        self._logged: tuple[str, tuple[int, ...]] | None = None
        self._unreachable = ""  # of the store, once it is gone for good
        self._said_unconnected = self._deserted = False
        self.suspect = ""
        """The rank that keeps this one waiting, described; empty when none is suspected."""

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
        """Make that of a rank which has others, or none; group_seconds: see `periods`."""
        silent, beat = periods(silent_seconds, group_seconds, env.world_size)
        connect = partial(heartbeat.connect, env, os.environ, 10.0) if env.world_size > 1 else None
        return cls(connect, env, progress, silent_seconds=silent, beat_seconds=beat, **more)

    def __enter__(self) -> "Watchdog":
        self._renew_liveness(self._silent_seconds + self._quiet)
        self._thread.start()
        if self._board:
            self._board.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Tell the others that this rank leaves; returns within about two seconds in any case."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        if self._logged and self._progress.state[0] != self._marks:
            self._resume()  # it has gone on since the last look: nobody hangs
        if self._board:
            self._board.stop()
        self._renew_liveness(0)

    def _watch(self) -> None:
        while not self._stopping.wait(self._tick_seconds):
            self._renew_liveness(self._silent_seconds + self._quiet)
            self._tick()

    def _tick(self) -> None:
        read_at = self._clock()
        self._now += min(read_at - self._read_at, 2 * self._tick_seconds)
        self._read_at = read_at
        board = self._board
        if board and board.rounds != self._rounds:
            self._rounds, self._round_at = board.rounds, self._now
        if board and board.failure and not self._unreachable:
            self._give_up(board.failure)
        if board and board.unconnected and not self._said_unconnected:
            self._say_unconnected(board.unconnected)
        is_own = self._progress.place.phase == Phase.OWN
        if self._progress.state[0] != self._marks or is_own:
            self._resume()
        elif self._still_seconds >= self._silent_seconds:
            self._stall()

    @property
    def _still_seconds(self) -> float:
        return self._now - self._moved_at

    def _posting(self, number: int, left: bool) -> Posting:
        return Posting(self._host, self._progress.place, self._still_seconds, number, left)

    def _resume(self) -> None:
        logged, still = self._logged, self._still_seconds
        self._marks, self._moved_at = self._progress.state[0], self._now
        self._logged, self._signs, self.suspect, self._deserted = None, None, "", False
        self._has_printed = False
        if self._board:
            self._board.wanted, self._board.suspect = range(0), ""
        if logged:
            self._note(None)
            log.info(f"watchdog: goes on after {duration(still)}")

    def _stall(self) -> None:
        if self._signs is None:
            self._look_at(range(min(self._env.rank, _POSSIBLE_SPEAKERS)))
            if not self._has_own_code:
                self._print_stacks()
        board, place = self._board, self._progress.place.words()
        if board is None or self._unreachable or not board.rounds:
            others = "" if self._env.world_size == 1 else "; nothing is known of the other ranks"
            self._log_verdict(Verdict("alone", (), f"{place}; this log has the stack{others}"))
        elif self._now - self._round_at > self._quiet + self._beat:
            self._suspect_rank_0(board)
        else:
            self._compare(board)
        self.suspect = self.suspect or self._unreachable
        if self._has_own_code and not self._has_printed and (self.suspect or self._logged):
            self._has_printed = True
            self._print_stacks()
        waited = self._deserted or self._still_seconds >= self._leave_seconds
        if self._leave and self.suspect and waited:
            leave, self._leave = self._leave, None
            still = f"has not moved for {duration(self._still_seconds)}, {place}"
            leave(f"rank {self._env.rank} on {self._host} {still}: {self.suspect}")

    def _print_stacks(self) -> None:
        # One write to the descriptor: whole between the lines of other ranks, and past the locks
        # of sys.stderr, which the thread that hangs may hold.
        without = {self._thread.ident, self._board.thread.ident if self._board else None}
        text = (
            f"watchdog: rank {self._env.rank} on {self._host} has not moved for "
            f"{duration(self._still_seconds)}, {self._progress.place.words()}. Its threads:\n"
            f"{_stacks(without)}"
        )
        with suppress(OSError):  # stderr is closed
            os.write(_STDERR, text.encode(errors="replace"))

    def _compare(self, board: Board) -> None:
        """Find out whether this rank speaks for all; if so, name the rank that all wait for."""
        look, signs, env = board.look, self._signs, self._env
        assert signs is not None, "nothing moves, so the others are looked at"
        if look is None or look.ranks != signs.ranks:
            return  # the answer is under way
        signs.update(look, self._now)
        if not signs.ready():
            return
        gone = {rank for rank, posting in look.postings.items() if posting.left}
        silent = {
            rank: seconds
            for rank, seconds in signs.silent(self._now, self._still_seconds).items()
            if rank not in gone and rank != env.rank
        }
        own = [each for each in look.postings.values() if each.place.phase == Phase.OWN]
        if any(rank < env.rank and rank not in silent and rank not in gone for rank in signs.ranks):
            self.suspect = look.suspect  # that rank speaks
        elif len(signs.ranks) < env.world_size:
            self._look_at(range(env.world_size))
        elif silent or all(each.left for each in own):
            self._log_verdict(judge(look.postings, silent, env.world_size, self._silent_seconds))
            board.suspect = self.suspect

    def _look_at(self, ranks: range) -> None:
        if self._env.rank == 0:
            ranks = range(self._env.world_size)
        self._signs = Signs(ranks, self._quiet)
        if self._board:
            self._board.wanted = ranks

    def _suspect_rank_0(self, board: Board) -> None:
        """Blame rank 0, as its store does not answer.

        Without a store no rank can be chosen to speak: it is rank 1, and the first rank of the
        second host, as rank 1 may be gone together with rank 0's host.
        """
        env = self._env
        speaks = env.rank == 1 or (env.node_rank == 1 and env.local_rank == 0)
        posting = board.look.postings.get(0) if board.look else None
        host = posting.host if posting else (*env.hostnames, env.master_addr)[0]
        verdict = Verdict(
            "silent",
            (0,),
            f"rank 0 on {host} does not answer (stopped, or cut off), nor does its store at "
            f"{env.master_addr}:{env.master_port}, for {duration(self._now - self._round_at)}",
            "it did not answer, nor did its store (stopped, or cut off)",
        )
        self._log_verdict(verdict, aloud=speaks)
        # When the store answers again, the others' postings have been held up with it.
        self._look_at(self._signs.ranks if self._signs else range(0))

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
            f"watchdog: rank 0's store at {env.master_addr}:{env.master_port} did not answer "
            f"rank {env.rank} ({reason}), which tries again; until then it knows of no other rank"
        )

    def _log_verdict(self, verdict: Verdict, aloud: bool = True) -> None:
        if verdict.kind != "alone":
            self._deserted = verdict.kind == "left"
            self.suspect = "" if verdict.kind == "level" else verdict.text
        if aloud and (verdict.kind, verdict.ranks) != self._logged:
            self._logged = verdict.kind, verdict.ranks
            log.info(f"watchdog: nothing moved for {duration(self._still_seconds)}: {verdict.text}")
            self._note(verdict)


def noting(folder: Path) -> Callable[[Verdict | None], None]:
    """Return what records in a folder of outcomes which rank hangs, and that none does any more.

    How an attempt has ended then names it before those that gave up waiting.
    """

    def note(verdict: Verdict | None) -> None:
        if verdict and verdict.kind == "alone":
            return  # a rank that sees no other
        hang = verdict if verdict and verdict.reason else None
        with suppress(OSError):
            note_hung(folder, hang.ranks if hang else (), hang.reason if hang else "")

    return note


def judge(
    postings: Mapping[int, Posting],
    silent: Mapping[int, float],
    world_size: int,
    silent_seconds: float,
) -> Verdict:
    """Find the ranks that keep the others waiting, when nothing moved for `silent_seconds`.

    `postings` has the newest of each rank that ever posted, `silent` the seconds since the last
    sign of each rank that does not answer any more.
    """
    if silent:
        # Before those that left: they may have done so for the want of this one.
        return _silence(postings, silent)
    left = [r for r, each in postings.items() if each.left and each.place.phase != Phase.DONE]
    if left:
        place = postings[min(left)].place
        return Verdict(
            "left",
            tuple(sorted(left)),
            f"{_names(left, postings)} left the training, {place.words()}; "
            f"the log of rank {min(left)} says why",
        )
    places = [posting.place for posting in postings.values()]
    lowest, highest = min(places), max(places)
    if lowest == highest:
        return Verdict(
            "level",
            (),
            f"all {world_size} ranks are at the same place, {lowest.words()}; "
            "their logs have their stacks",
        )
    behind = sorted(rank for rank, posting in postings.items() if posting.place == lowest)
    moved = min(postings[rank].still_seconds for rank in behind)
    if moved < silent_seconds:
        hint = f"last moved {duration(moved)} ago"
    else:
        hint = "its log has its stack" if len(behind) == 1 else "their logs have their stacks"
    where = f"{lowest.words()}, while others are {highest.words()}"
    return Verdict(
        "behind",
        tuple(behind),
        f"{_names(behind, postings)} {'is' if len(behind) == 1 else 'are'} behind: {where}; {hint}",
        where,
    )


def _silence(postings: Mapping[int, Posting], silent: Mapping[int, float]) -> Verdict:
    first = min(silent)
    sign = (
        f"the last sign of rank {first} came {duration(silent[first])} ago, "
        f"{postings[first].place.words()}"
        if first in postings
        else f"rank {first} never gave a sign"
    )
    why = "not answer (stopped, cut off, or stuck in native code)"
    return Verdict(
        "silent",
        tuple(sorted(silent)),
        f"{_names(silent, postings)} {'does' if len(silent) == 1 else 'do'} {why}: {sign}",
        f"it did {why}",
    )


def _names(ranks: Sequence[int] | Mapping[int, object], postings: Mapping[int, Posting]) -> str:
    """Write `rank 2 on h02`, `ranks 8, 9 on h02 and rank 12 on h03`."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(ranks)[:16]:
        hosts.setdefault(f" on {postings[rank].host}" if rank in postings else "", []).append(rank)
    groups = [
        f"{'rank' if len(some) == 1 else 'ranks'} {', '.join(map(str, some))}{host}"
        for host, some in hosts.items()
    ]
    more = [f"{len(ranks) - 16} more"] if len(ranks) > 16 else []
    return " and ".join([*groups, *more])


def _stacks(without: set[int | None]) -> str:
    """Give the Python stack of every other thread.

    Not traceback's, which would read the sources: their file system may be what hangs.
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

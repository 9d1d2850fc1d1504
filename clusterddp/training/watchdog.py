"""Names the rank that keeps all others waiting, and prints the stack of every rank that still can.

It only tells: ending the wait is left to the process group's timeout. Each rank posts its place
in a store now and then; nobody reads the postings until nothing moves any more.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import PrefixStore, Store

from clusterddp.dist_env import DistEnv
from clusterddp.training import rendezvous

# A rank that posted nothing for so many beats does not answer.
_BEATS_OF_SILENCE = 4
# The ranks that a waiting rank looks at, to learn whether one below it speaks for all.
_POSSIBLE_SPEAKERS = 16
# How long stop() waits for each of the two threads.
_STOP_SECONDS = 1.0
_STDERR = 2


class Phase(IntEnum):
    """What a rank does in a step, in the order in which it does it."""

    START = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    UPDATE = 4
    LOG = 5
    EVALUATE = 6
    COUNT = 7
    SAVE = 8
    DONE = 9


_WORDS = {
    Phase.START: "starting, after step {}",
    Phase.DATA: "fetching the batch of step {}",
    Phase.FORWARD: "in the forward pass of step {}",
    Phase.BACKWARD: "exchanging the gradients of step {}",
    Phase.UPDATE: "updating the weights in step {}",
    Phase.LOG: "adding up the figures of step {}",
    Phase.EVALUATE: "evaluating after step {}",
    Phase.COUNT: "adding up the evaluation after step {}",
    Phase.SAVE: "saving after step {}",
    Phase.DONE: "done after step {}",
}


class Place(NamedTuple):
    """Where a rank is; a rank that is further has the greater place."""

    step: int
    turn: int
    """How often the step went back to an earlier phase, as it does to accumulate gradients."""
    phase: int

    def words(self) -> str:
        if self.phase == Phase.START and not self.step:
            return "starting"
        return _WORDS[Phase(self.phase)].format(self.step)


class Progress:
    """Where this rank is: written by its training loop, read by the watchdog's threads."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        # The number of marks, and the place. Replaced as a whole, so that no reader needs a lock.
        self.state = (0, 0, 0, int(Phase.START))

    def mark(self, step: int, phase: int) -> None:
        """Say what this rank does from now on: a Phase of the step with this number.

        The first step is number 1. What comes after a step (EVALUATE, SAVE) has its number, and
        START that of the last finished one. All ranks mark the same; a mark that changes nothing
        shows that a long phase goes on.
        """
        marks, last_step, turn, last_phase = self.state
        if step != last_step:
            turn = 0
        elif phase < last_phase:
            turn += 1
        self.state = (marks + 1, step, turn, phase)

    @property
    def place(self) -> Place:
        return Place(*self.state[1:])


class Posting(NamedTuple):
    """What a rank tells the others about itself."""

    host: str
    place: Place
    still_seconds: float
    """How long it has not moved."""
    number: int
    """Of this posting: where it does not grow, the rank does not answer."""
    left: bool = False

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: bytes) -> "Posting | None":
        """None where it is no posting, as the store takes anything from anybody."""
        try:
            fields = json.loads(text)
            step, turn, phase = map(int, fields["place"])
            return cls(
                host=_printable(str(fields["host"])),
                place=Place(step, turn, Phase(phase)),
                still_seconds=float(fields["still_seconds"]),
                number=int(fields["number"]),
                left=bool(fields["left"]),
            )
        except (ValueError, KeyError, TypeError):
            return None


class Verdict(NamedTuple):
    """What is wrong, and with which ranks."""

    kind: str
    """silent, left, behind, level, or alone: a rank that knows only about itself."""
    ranks: tuple[int, ...]
    text: str


def judge(
    postings: Mapping[int, Posting],
    silent: Mapping[int, float],
    world_size: int,
    silent_seconds: float,
) -> Verdict:
    """Who keeps the others waiting, when nothing has moved for `silent_seconds`.

    `postings` has the newest of each rank that ever posted, `silent` the seconds since the last
    sign of each rank that does not answer any more.
    """
    if silent:
        # Before those that left: they may have done so for the want of this one.
        first = min(silent)
        sign = (
            f"the last sign of rank {first} came {silent[first]:.0f} s ago, "
            f"{postings[first].place.words()}"
            if first in postings
            else f"rank {first} never gave a sign"
        )
        return Verdict(
            "silent",
            tuple(sorted(silent)),
            f"{_who(silent, postings)} {'does' if len(silent) == 1 else 'do'} not answer (stopped, "
            f"cut off, or stuck in native code): {sign}",
        )
    left = [rank for rank, seen in postings.items() if seen.left and seen.place.phase < Phase.DONE]
    if left:
        place = postings[min(left)].place
        return Verdict(
            "left",
            tuple(sorted(left)),
            f"{_who(left, postings)} left the training, {place.words()}; "
            f"the log of rank {min(left)} says why",
        )
    lowest = min(seen.place for seen in postings.values())
    highest = max(seen.place for seen in postings.values())
    if lowest == highest:
        return Verdict(
            "level",
            (),
            f"all {world_size} ranks are at the same place, {lowest.words()}; "
            "their logs have their stacks",
        )
    behind = sorted(rank for rank, seen in postings.items() if seen.place == lowest)
    moved = min(postings[rank].still_seconds for rank in behind)
    if moved < silent_seconds:
        hint = f"last moved {moved:.0f} s ago"
    else:
        hint = "its log has its stack" if len(behind) == 1 else "their logs have their stacks"
    return Verdict(
        "behind",
        tuple(behind),
        f"{_who(behind, postings)} {'is' if len(behind) == 1 else 'are'} behind: "
        f"{lowest.words()}, while others are {highest.words()}; {hint}",
    )


def default_beat(world_size: int) -> float:
    """Seconds between a rank's postings: the store gets at most 50 a second from all together."""
    return max(2.0, world_size / 50)


def connect(env: DistEnv, environ: Mapping[str, str], timeout: float) -> Store | None:
    """Connect to rank 0's store for the watchdog alone, within `timeout` seconds.

    A connection of its own, as a call of torch's that waits keeps a shared one from all others.
    None in a world of one, and where rank 0 does not answer: the training does not depend on it.
    """
    if env.world_size == 1:
        return None

    def reach() -> Store:
        store: Store = TCPStore(
            env.master_addr,
            env.master_port,
            None,  # older versions of torch sleep up to a millisecond for each rank they know of
            is_master=False,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
        return store

    try:
        store = rendezvous.bounded(reach, timeout)
    except (TimeoutError, RuntimeError):
        return None
    # torchrun starts failed workers anew against the same store.
    return PrefixStore(f"watchdog/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class Watchdog:
    """Watches `progress` from a thread of its own, between start() and stop() or in a `with`.

    Where it has not moved for `silent_seconds`, this rank's stacks go to stderr. One rank says
    for all which one is to blame: rank 0, or the lowest that still answers. `store` is used by
    nobody else; None means that nothing is known of the other ranks. `say` takes a line, in the
    watchdog's thread. `host` is this rank's, as the others shall read it.
    """

    def __init__(
        self,
        store: Store | None,
        env: DistEnv,
        progress: Progress,
        *,
        silent_seconds: float,
        say: Callable[[str], None],
        beat_seconds: float | None = None,
        host: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._env, self._progress, self._say_line, self._clock = env, progress, say, clock
        self._host = host or socket.gethostname()
        self._silent_seconds = silent_seconds
        self._beat = beat_seconds or default_beat(env.world_size)
        self._tick_seconds = min(self._beat, 1.0)
        self._quiet = _BEATS_OF_SILENCE * self._beat
        self._board: _Board | None = None
        if store is not None and env.world_size > 1:
            self._board = _Board(store, env.rank, self._beat, self._posting)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

        # Seconds during which this process could run, and not those for which it was stopped:
        # a rank that was stopped has no reason to find the others slow.
        self._now, self._read_at = 0.0, clock()
        self._marks, self._moved_at = progress.state[0], 0.0
        self._rounds, self._round_at = 0, 0.0
        self._signs: _Signs | None = None  # while nothing moves
        self._told: tuple[str, tuple[int, ...]] | None = None
        self._gave_up = False
        self._suspect = ""

    def start(self) -> None:
        self._arm()
        self._thread.start()
        if self._board:
            self._board.thread.start()

    def stop(self) -> None:
        """Tell the others that this rank leaves; returns within about two seconds in any case."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        if self._board:
            self._board.stop()
        faulthandler.cancel_dump_traceback_later()

    def __enter__(self) -> "Watchdog":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def latest_suspect(self) -> str:
        """What is known of the rank that keeps this one waiting; empty when none is suspected."""
        return self._suspect

    def _watch(self) -> None:
        while not self._stopping.wait(self._tick_seconds):
            self._arm()
            self._tick()

    def _arm(self) -> None:
        """Have the stacks printed should this thread not come here again for long.

        It cannot while native code keeps Python's lock, which faulthandler's timer does not need.
        """
        faulthandler.dump_traceback_later(self._silent_seconds + self._quiet, file=_STDERR)

    def _tick(self) -> None:
        read_at = self._clock()
        self._now += min(read_at - self._read_at, 2 * self._tick_seconds)
        self._read_at = read_at
        board = self._board
        if board and board.rounds != self._rounds:
            self._rounds, self._round_at = board.rounds, self._now
        if board and board.failure and not self._gave_up:
            self._give_up(board.failure)
        if self._progress.state[0] != self._marks:
            self._go_on()
        elif self._still_seconds >= self._silent_seconds:
            self._stall()

    @property
    def _still_seconds(self) -> float:
        return self._now - self._moved_at

    def _posting(self, number: int, left: bool) -> Posting:
        return Posting(self._host, self._progress.place, self._still_seconds, number, left)

    def _go_on(self) -> None:
        told, still = self._told, self._still_seconds
        self._marks, self._moved_at = self._progress.state[0], self._now
        self._told, self._signs, self._suspect = None, None, ""
        if self._board:
            self._board.wanted, self._board.suspect = range(0), ""
        if told:
            self._say(f"goes on after {still:.0f} s")

    def _stall(self) -> None:
        if self._signs is None:
            self._look_at(range(min(self._env.rank, _POSSIBLE_SPEAKERS)))
            self._print_stacks()
        board, place = self._board, self._progress.place.words()
        if board is None or self._gave_up:
            others = "" if self._env.world_size == 1 else "; nothing is known of the other ranks"
            self._tell(Verdict("alone", (), f"{place}; this log has the stack{others}"))
        elif self._now - self._round_at > self._quiet + self._beat:
            self._suspect_rank_0(board)
        else:
            self._compare(board)

    def _print_stacks(self) -> None:
        # One write to the descriptor: whole between the lines of other ranks, and past the locks
        # of sys.stderr, which the thread that hangs may hold.
        own = {self._thread.ident, self._board.thread.ident if self._board else None}
        text = (
            f"watchdog: rank {self._env.rank} on {self._host} has not moved for "
            f"{self._still_seconds:.0f} s, {self._progress.place.words()}. Its threads:\n"
            f"{_stacks(own)}"
        )
        try:
            os.write(_STDERR, text.encode(errors="replace"))
        except OSError:
            pass  # stderr is closed

    def _compare(self, board: "_Board") -> None:
        """Find out whether it is this rank that speaks; if so, say whom all are waiting for."""
        look, signs, env = board.look, self._signs, self._env
        assert signs is not None, "nothing moves, so the others are looked at"
        if look is None or look.ranks != signs.ranks:
            return  # the answer is under way
        signs.update(look, self._now)
        if not signs.ready():
            return
        gone = {rank for rank, seen in look.postings.items() if seen.left}
        silent = {
            rank: seconds
            for rank, seconds in signs.silent(self._now, self._still_seconds).items()
            if rank not in gone and rank != env.rank
        }
        if any(rank < env.rank and rank not in silent and rank not in gone for rank in signs.ranks):
            self._suspect = look.suspect  # that rank speaks
        elif len(signs.ranks) < env.world_size:
            self._look_at(range(env.world_size))
        else:
            self._tell(judge(look.postings, silent, env.world_size, self._silent_seconds))
            board.suspect = self._suspect

    def _look_at(self, ranks: range) -> None:
        if self._env.rank == 0:
            ranks = range(self._env.world_size)
        self._signs = _Signs(ranks, self._quiet)
        if self._board:
            self._board.wanted = ranks

    def _suspect_rank_0(self, board: "_Board") -> None:
        """Say that rank 0 does not answer, as its store does not.

        Without a store no rank can be chosen to speak: it is rank 1, and the first rank of the
        second host, as rank 1 may be gone together with rank 0's host.
        """
        env = self._env
        speaks = env.rank == 1 or (env.node_rank == 1 and env.local_rank == 0)
        seen = board.look.postings.get(0) if board.look else None
        host = seen.host if seen else (*env.hostnames, env.master_addr)[0]
        verdict = Verdict(
            "silent",
            (0,),
            f"rank 0 on {host} does not answer (stopped, or cut off), nor does its store at "
            f"{env.master_addr}:{env.master_port}, for {self._now - self._round_at:.0f} s",
        )
        self._tell(verdict, aloud=speaks)
        # When the store answers again, the others' postings have been held up with it.
        self._look_at(self._signs.ranks if self._signs else range(0))

    def _give_up(self, failure: str) -> None:
        self._gave_up = True
        if self._stopping.is_set():
            return
        env = self._env
        self._suspect = (
            f"rank 0 cannot be reached at {env.master_addr}:{env.master_port} ({failure}): it has "
            "ended, or the network is cut"
        )
        self._say(self._suspect)

    def _tell(self, verdict: Verdict, aloud: bool = True) -> None:
        if verdict.kind != "alone":
            self._suspect = "" if verdict.kind == "level" else verdict.text
        if aloud and (verdict.kind, verdict.ranks) != self._told:
            self._told = verdict.kind, verdict.ranks
            self._say(f"nothing moved for {self._still_seconds:.0f} s: {verdict.text}")

    def _say(self, text: str) -> None:
        try:
            self._say_line(f"watchdog: {text}")
        except (OSError, ValueError):
            pass  # the log is closed or full


class _Look(NamedTuple):
    """What the store held of some ranks at one moment."""

    ranks: range
    postings: Mapping[int, Posting]
    suspect: str
    """What the speaking rank has found."""


class _Signs:
    """Which of some ranks still answer: those whose postings' number grows."""

    def __init__(self, ranks: range, quiet: float) -> None:
        self.ranks, self._quiet = ranks, quiet
        self._began = self._looked_at = 0.0
        self._look: _Look | None = None
        # For each rank its number, when that was first seen, whether it has grown since we look.
        self._seen: dict[int, tuple[int | None, float, bool]] = {}

    def update(self, look: _Look, now: float) -> None:
        if look is self._look:
            return  # the store has not answered again; that alone silences nobody
        if self._look is None:
            self._began = now
        self._look, self._looked_at = look, now
        for rank in self.ranks:
            number = look.postings[rank].number if rank in look.postings else None
            if rank not in self._seen:
                self._seen[rank] = number, now, False
            elif number != self._seen[rank][0]:
                self._seen[rank] = number, now, True

    def ready(self) -> bool:
        return self._looked_at - self._began >= self._quiet

    def silent(self, now: float, still_seconds: float) -> dict[int, float]:
        """Each rank that does not answer, with the seconds since its last sign.

        One that has given none since we look stopped about when everything did.
        """
        return {
            rank: now - at if grown else still_seconds
            for rank, (_, at, grown) in self._seen.items()
            if self._looked_at - at >= self._quiet
        }


class _Board:
    """Posts to the store and reads from it, in a thread of its own.

    A call to a store whose process is stopped does not return, whatever its timeout: whoever
    looks at `rounds` sees that.
    """

    def __init__(
        self, store: Store, rank: int, beat: float, posting: Callable[[int, bool], Posting]
    ) -> None:
        self.wanted = range(0)
        self.suspect = ""
        self.look: _Look | None = None
        self.rounds = 0
        self.failure = ""
        """Why the store is gone for good."""
        self.thread = threading.Thread(target=self._run, name="watchdog-store", daemon=True)
        self._store, self._rank, self._beat, self._posting = store, rank, beat, posting
        self._stopping = threading.Event()
        self._present: set[str] = set()
        self._published = ""

    def stop(self) -> None:
        self._stopping.set()
        if self.thread.is_alive():
            self.thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._round()
                self._stopping.wait(self._beat)
            self._post(left=True)
        except Exception as error:  # the training goes on without
            self.failure = _printable(str(error).split("\n", maxsplit=1)[0]) or repr(error)

    def _round(self) -> None:
        self._post(left=False)
        if self.suspect != self._published:
            self._published = self.suspect
            self._store.set("suspect", self._published)
        if wanted := self.wanted:
            try:
                self.look = self._read(wanted)
            except dist.DistStoreError:
                pass  # late, and the next round tries again
        self.rounds += 1

    def _post(self, left: bool) -> None:
        posting = self._posting(self.rounds, left)
        self._store.set(f"progress/{self._rank}", posting.to_json())

    def _read(self, ranks: range) -> _Look:
        # Reading a key that nobody has set would wait for it.
        keys = {f"progress/{rank}": rank for rank in ranks}
        missing = [key for key in (*keys, "suspect") if key not in self._present]
        if missing and self._store.check(missing):
            self._present.update(missing)
        else:
            self._present.update(key for key in missing if self._store.check([key]))
        asked = [key for key in (*keys, "suspect") if key in self._present]
        values = dict(zip(asked, self._store.multi_get(asked) if asked else [], strict=True))
        suspect = _printable(bytes(values.pop("suspect", b"")).decode(errors="replace"))
        postings = {keys[key]: Posting.from_json(bytes(value)) for key, value in values.items()}
        return _Look(
            ranks, {rank: seen for rank, seen in postings.items() if seen is not None}, suspect
        )


def _who(ranks: Sequence[int] | Mapping[int, object], postings: Mapping[int, Posting]) -> str:
    """`rank 2 on h02`, `ranks 8, 9 on h02 and rank 12 on h03`."""
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
    """The Python stack of every other thread.

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


def _printable(text: str) -> str:
    return "".join(character for character in text if character.isprintable())[:1000]

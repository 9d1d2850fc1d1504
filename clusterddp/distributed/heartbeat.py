"""Heartbeats: the training position of each rank, posted to rank 0's store for all watchdogs."""

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from clusterddp.distributed import tcp_store
from clusterddp.distributed.shared_store import SharedStore
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import host_name

# Seconds for which stop() waits for the thread.
_STOP_SECONDS = 1.0
# Keys in one call of the store, which serves no other rank meanwhile.
_KEYS_AT_ONCE = 1024


class Phase(IntEnum):
    """Phases of a step in order, after those of the preflight checks."""

    words: str
    """Description of the activity, with a placeholder for the step."""

    def __new__(cls, number: int, words: str = "") -> "Phase":
        phase = int.__new__(cls, number)
        phase._value_, phase.words = number, words
        return phase

    MULTIPLY = -4, "multiplying matrices in its preflight"
    NODE = -3, "communicating with the ranks of its node in its preflight"
    PAIR = -2, "communicating with a rank of another node in its preflight"
    TOGETHER = -1, "waiting for all ranks in its preflight"
    START = 0, "starting, after step {}"
    DATA = 1, "fetching the batch of step {}"
    FORWARD = 2, "in the forward pass of step {}"
    BACKWARD = 3, "exchanging the gradients of step {}"
    UPDATE = 4, "updating the weights in step {}"
    LOG = 5, "adding up the figures of step {}"
    EVALUATE = 6, "evaluating after step {}"
    COUNT = 7, "adding up the evaluation after step {}"
    SAVE = 8, "saving after step {}"
    DONE = 9, "done after step {}"
    USER_CODE = 10, "in user code after step {}"


class TrainingPosition(NamedTuple):
    """Position of a rank in its training; later positions compare greater."""

    step: int
    turn: int
    """Number of returns to an earlier phase within the step, for gradient accumulation."""
    phase: int

    def words(self) -> str:
        """Describe the position: `in the forward pass of step 3`."""
        if self.phase == Phase.START and not self.step:
            return "starting"
        return Phase(self.phase).words.format(self.step)


class Progress:
    """Position of this rank, written by its training loop and read by the watchdog's threads."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        # Number of marks and position, replaced as one tuple, so that readers need no lock.
        self.state = (0, 0, 0, int(Phase.START))

    def mark(self, step: int, phase: int) -> None:
        """Set this rank's current phase and step.

        The first step is number 1. A phase after a step (EVALUATE, SAVE) has its number, START the
        number of the last finished step. All ranks mark the same; repeating a mark shows that a
        long phase makes progress.
        """
        marks, last_step, turn, last_phase = self.state
        if step != last_step:
            turn = 0
        elif phase < last_phase:
            turn += 1
        self.state = (marks + 1, step, turn, phase)

    @property
    def position(self) -> TrainingPosition:
        """Position at the last mark."""
        return TrainingPosition(*self.state[1:])


class Heartbeat(NamedTuple):
    """Heartbeat of a rank."""

    host: str
    position: TrainingPosition
    still_seconds: float
    """Seconds since it last moved."""
    number: int
    """Number of this heartbeat; if it does not grow, the rank does not respond."""
    left: bool = False

    def to_json(self) -> str:
        """Serialize for `from_json`."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: bytes) -> "Heartbeat | None":
        """Parse a heartbeat; None for other content, because any client can write to the store."""
        try:
            fields = json.loads(text)
            step, turn, phase = map(int, fields["position"])
            return cls(
                host=printable(str(fields["host"])),
                position=TrainingPosition(step, turn, Phase(phase)),
                still_seconds=float(fields["still_seconds"]),
                number=int(fields["number"]),
                left=bool(fields["left"]),
            )
        except (ValueError, KeyError, TypeError):
            return None


class Snapshot(NamedTuple):
    """Postings of some ranks, read from the store at one moment."""

    ranks: range
    beats: Mapping[int, Heartbeat]
    suspect: str
    """The suspected rank, as posted by the reporting rank."""


class ResponseTracker:
    """Tracks which ranks respond: those whose heartbeat numbers grow."""

    def __init__(self, ranks: range, quiet: float) -> None:
        self.ranks, self._quiet = ranks, quiet
        self._began = self._snapshot_time = 0.0
        self._snapshot: Snapshot | None = None
        # For each rank: number, time it was first read, whether it has grown since the start.
        self._numbers: dict[int, tuple[int | None, float, bool]] = {}

    def update(self, snapshot: Snapshot, now: float) -> None:
        """Add the store's latest answer, read at `now`."""
        if snapshot is self._snapshot:
            return  # no new answer from the store, which is no evidence against a rank
        if self._snapshot is None:
            self._began = now
        self._snapshot, self._snapshot_time = snapshot, now
        for rank in self.ranks:
            number = snapshot.beats[rank].number if rank in snapshot.beats else None
            if rank not in self._numbers:
                self._numbers[rank] = number, now, False
            elif number != self._numbers[rank][0]:
                self._numbers[rank] = number, now, True

    def ready(self) -> bool:
        """Return whether the store was watched long enough to call a rank silent."""
        return self._snapshot_time - self._began >= self._quiet

    def silent(self, now: float, still_seconds: float) -> dict[int, float]:
        """Return the seconds since the last response of each rank that does not respond.

        A rank without a response since the watch began stopped about when the training did.
        """
        return {
            rank: now - at if grown else still_seconds
            for rank, (_, at, grown) in self._numbers.items()
            if self._snapshot_time - at >= self._quiet
        }


def address_of_group() -> tuple[str, int] | None:
    """Return the address of the default process group's store; None unless it is a TCPStore."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, unlisted
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def connect(env: DistEnv, environ: Mapping[str, str], timeout: float, beat: float) -> SharedStore:
    """Connect the watchdog to rank 0's store, by one connection of the node.

    It is separate from the training's, which a waiting call of torch blocks. beat: see SharedStore.
    Raises TimeoutError or RuntimeError.
    """
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    def reach() -> Store:
        address = tcp_store.listener_address(env)
        # A connection in place of one that is gone must not be late: rank 0 would look silent.
        answer = tcp_store.name_servers_answer(address, beat / 2)
        store = tcp_store.client(address, env.master_port, timeout, ask_name_servers=answer)
        # torchrun restarts failed workers against the same store.
        return PrefixStore(f"watchdog/{restart}", store)

    job = (environ.get(f"SLURM_{word}", "") for word in ("JOB_ID", "STEP_ID"))
    names = (host_name(environ), env.master_addr, str(env.master_port), *job, restart)
    return SharedStore("/".join(names), reach, timeout, beat)


class Exchange:
    """Connects to the store, posts and reads in a separate thread.

    The training does not depend on it and does not wait for the connection; a failed one is
    retried. A call to a store of a stopped process never returns, whatever its timeout: readers
    see that `rounds` stops growing.
    """

    def __init__(
        self,
        connect: Callable[[], SharedStore],
        rank: int,
        beat: float,
        heartbeat: Callable[[int, bool], Heartbeat],
    ) -> None:
        self.wanted = range(0)
        self.suspect = ""
        self.snapshot: Snapshot | None = None
        self.rounds = 0
        """Rounds of heartbeats; 0 until the store responds."""
        self.unconnected = ""
        """Error of the first attempt to connect."""
        self.failure = ""
        """Error after which the store is gone for good."""
        self.thread = threading.Thread(target=self._run, name="watchdog-store", daemon=True)
        self._connect, self._rank, self._beat, self._heartbeat = connect, rank, beat, heartbeat
        self._stopping = threading.Event()
        self._present: set[str] = set()
        self._published = ""

    def stop(self) -> None:
        """Post that this rank has left; wait at most a second."""
        self._stopping.set()
        if self.thread.is_alive():
            self.thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        store = None
        try:
            store = self._open()
            while store and not self._stopping.wait(self.rounds and self._beat):
                self._round(store)
            if store:
                self._post(store, left=True)
        except Exception as error:  # training continues without the watchdog
            self.failure = _reason(error)
            self._stopping.wait()  # the store still answers the node's other watchdogs
        if store:  # its thread, calling rank 0 during Python's exit, would end the process: SIGABRT
            store.close()

    def _open(self) -> SharedStore | None:
        while not self._stopping.is_set():
            try:
                return self._connect()
            except (TimeoutError, RuntimeError) as error:
                self.unconnected = self.unconnected or _reason(error)
            self._stopping.wait(self._beat)
        return None

    def _round(self, store: SharedStore) -> None:
        self._post(store, left=False)
        if self.suspect != self._published:
            self._published = self.suspect
            store.set("suspect", self._published)
        if wanted := self.wanted:
            with suppress(dist.DistStoreError):  # late; the next round retries
                self.snapshot = self._read(store, wanted)
        self.rounds += 1

    def _post(self, store: SharedStore, left: bool) -> None:
        store.set(f"progress/{self._rank}", self._heartbeat(self.rounds, left).to_json())

    def _read(self, store: SharedStore, ranks: range) -> Snapshot:
        # Reading a missing key would wait for it.
        keys = {f"progress/{rank}": rank for rank in ranks}
        self._find(store, [key for key in keys if key not in self._present])
        self._find(store, ["suspect"] if "suspect" not in self._present else [])
        present = [key for key in (*keys, "suspect") if key in self._present]
        values: dict[str, bytes] = {}
        for start in range(0, len(present), _KEYS_AT_ONCE):
            some = present[start : start + _KEYS_AT_ONCE]
            values |= zip(some, store.multi_get(some), strict=True)
        suspect = printable(bytes(values.pop("suspect", b"")).decode(errors="replace"))
        read = {keys[key]: Heartbeat.from_json(bytes(value)) for key, value in values.items()}
        beats = {rank: heartbeat for rank, heartbeat in read.items() if heartbeat is not None}
        return Snapshot(ranks, beats, suspect)

    def _find(self, store: SharedStore, keys: list[str]) -> None:
        """Note the keys that exist; halving their list takes few calls where few are missing."""
        if not keys:
            return
        if len(keys) <= _KEYS_AT_ONCE and store.check(keys):
            self._present.update(keys)
        elif len(keys) > 1:
            self._find(store, keys[: len(keys) // 2])
            self._find(store, keys[len(keys) // 2 :])


def _reason(error: Exception) -> str:
    said = printable(str(error).split("\n", maxsplit=1)[0])
    return said or ("no answer in time" if isinstance(error, TimeoutError) else repr(error))


def printable(text: str) -> str:
    """Return the printable characters, at most 1,000."""
    return "".join(character for character in text if character.isprintable())[:1000]

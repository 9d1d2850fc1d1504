"""Where the ranks post: rank 0's store, over a connection and in a thread for that alone."""

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import PrefixStore, Store

from clusterddp.distributed.heartbeat import Look, Posting, printable
from clusterddp.distributed.timeout import bounded
from clusterddp.ranks.dist_env import DistEnv

# How long stop() waits for the thread.
_STOP_SECONDS = 1.0


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
        store = bounded(reach, timeout)
    except (TimeoutError, RuntimeError):
        return None
    # torchrun starts failed workers anew against the same store.
    return PrefixStore(f"watchdog/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class Board:
    """Posts to the store and reads from it, in a thread of its own.

    A call to a store whose process is stopped does not return, whatever its timeout: whoever
    looks at `rounds` sees that.
    """

    def __init__(
        self, store: Store, rank: int, beat: float, posting: Callable[[int, bool], Posting]
    ) -> None:
        self.wanted = range(0)
        self.suspect = ""
        self.look: Look | None = None
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
            self.failure = printable(str(error).split("\n", maxsplit=1)[0]) or repr(error)

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

    def _read(self, ranks: range) -> Look:
        # Reading a key that nobody has set would wait for it.
        keys = {f"progress/{rank}": rank for rank in ranks}
        missing = [key for key in (*keys, "suspect") if key not in self._present]
        if missing and self._store.check(missing):
            self._present.update(missing)
        else:
            self._present.update(key for key in missing if self._store.check([key]))
        asked = [key for key in (*keys, "suspect") if key in self._present]
        values = dict(zip(asked, self._store.multi_get(asked) if asked else [], strict=True))
        suspect = printable(bytes(values.pop("suspect", b"")).decode(errors="replace"))
        postings = {keys[key]: Posting.from_json(bytes(value)) for key, value in values.items()}
        return Look(
            ranks, {rank: seen for rank, seen in postings.items() if seen is not None}, suspect
        )

"""Ranks meet before torch's process group, in a store, with a roll call; and part after it.

Every wait has a deadline of its own, as torch's TCPStore could not say which rank never came.

Under torchrun the ranks meet in the store of its agents, which outlives the workers. There rank 0
begins a round for each start; the others enter rounds until one begins with them in it. The
agents' restart counts cannot name a start: with the c10d rendezvous an agent whose workers still
ran when it was asked to start again does not count that.

Whoever reaches the port can list, read and write the store. So each message between the ranks of
one start carries a proof that its writer holds the run's nonce, an HMAC over its key and what it
says, and nothing but JSON is read. This keeps strangers from being taken for a rank; it does not
keep them from disturbing a start, which then ends with an error.

As they meet, rank 0 measures how far each host's wall clock is ahead of its own: the times at which
ranks end are compared across hosts, to tell which of them failed first.
"""

import hashlib
import hmac
import itertools
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import PrefixStore, Store

from clusterddp import log
from clusterddp.distributed import tcp_store
from clusterddp.errors import ClusterDDPError, PeerError, TrainingError
from clusterddp.formatting import setting
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.slurm.forms import NONCE_VARIABLE

Message = dict[str, object]
"""JSON object that one rank leaves for others."""

# Seconds for which a rank waits for the verdict beyond those that rank 0 waits for the last rank.
GRACE_SECONDS = 10.0
# Before the keys of a run, in a store that may hold other things.
PREFIX = "clusterddp"
# Seconds for which rank 0 stays for the others to read that the start is called off.
_HEARING_SECONDS = 2.0
# Seconds for the flight recorder of NCCL.
_DUMP_SECONDS = 5.0
# Seconds for which a rank under an agent waits in one round before it looks for a later one.
_LOOK_SECONDS = 1.0
# Seconds for a host's clock. The ranks have just met: a host that takes longer is left out.
_ANSWER_SECONDS = 2.0
_PART_SECONDS = 30.0


def open_store(
    env: DistEnv,
    environ: Mapping[str, str],
    timeout: float,
    *,
    bound: socket.socket | None = None,
    answered: Callable[[], bool] = lambda: True,
) -> "RunStore":
    """Open the store of this start: rank 0 listens at the master address, the others connect.

    Under a torchrun agent, which listens there itself, all connect, and return once all are there.
    A single process needs no port. No rank writes to a store before it has found its own run's
    identity there.

    timeout: seconds to listen or connect within.
    bound: rank 0's socket where `tcp_store.bind` has made it already; taken over.
    answered: whether name servers answer; where they do not, none is asked from here on.

    Raises TrainingError with the rank, the address and the remedy.
    """
    identity = Identity.from_environ(environ)
    if env.world_size == 1:
        return RunStore(HashStore(), identity)
    deadline = time.monotonic() + timeout
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agents = tcp_store.connect(env, deadline, answered)
        meet = _enter_round if env.rank else _begin_round
        return meet(agents, env, identity, timeout)
    if env.rank == 0:
        store = tcp_store.listen(env, environ, timeout, bound, answered)
        identity.publish(store)
    else:
        store = tcp_store.connect(env, deadline, answered)
        try:
            identity.await_in(store, env, max(deadline - time.monotonic(), 1.0))
        except dist.DistStoreError:
            raise nobody(env) from None
    return RunStore(store, identity)


def agree(
    store: "RunStore",
    env: DistEnv,
    hello: Message,
    decide: Callable[[list[Message]], Message],
    timeout: float,
    decision_seconds: float = GRACE_SECONDS,
) -> Message:
    """Collect every rank's `hello`, let rank 0 `decide`, and return its verdict on every rank.

    A hello holds at least the rank's `world_size`. decision_seconds: the time that rank 0 has to
    decide, once all have come.

    An error raised by `decide` is raised on all ranks: there as it is, elsewhere as PeerError.
    Raises TrainingError where ranks do not come within `timeout` seconds, naming them.
    """
    if store.add(f"claim/{env.rank}", 1) > 1:
        raise TrainingError(
            f"two processes say that they are rank {env.rank} of {env.world_size}: this is the "
            "second one. Give each process a RANK of its own. [CD0907]"
        )
    put(store, f"hello/{env.rank}", hello)
    if env.rank == 0:
        try:
            verdict = decide(_roll_call(store, env, timeout))
        except BaseException as error:
            is_ours = isinstance(error, ClusterDDPError)
            _call_off(store, env, str(error) if is_ours else "its log says why.")
            raise
        put(store, "verdict", verdict)
        return verdict
    patience = timeout + decision_seconds
    try:
        wait(store, ["verdict"], patience)
    except dist.DistStoreError:
        raise PeerError(
            f"rank {env.rank} met rank 0 at {env.master_addr}:{env.master_port}, but was not told "
            f"to start within {setting(patience)}. The log of rank 0 says what it did."
        ) from None
    verdict = take(store, env, "verdict", "rank 0's verdict")
    if "error" in verdict:
        store.set(f"heard/{env.rank}", "")
        raise PeerError(f"rank 0 called the start off: {verdict['error']}")
    return verdict


def decline(store: "RunStore", env: DistEnv, error: BaseException) -> None:
    """Tell rank 0, which would wait, that this rank cannot take part; rank 0 tells all others."""
    if env.rank == 0:
        _call_off(store, env, str(error))
    else:
        put(store, f"hello/{env.rank}", {"declines": str(error)})


def leave(store: "RunStore", env: DistEnv, timeout: float = 5.0) -> None:
    """Keep rank 0's store open until every rank has left, or for `timeout` seconds."""
    store.set(f"left/{env.rank}", "1")
    if env.rank == 0:
        with suppress(dist.DistStoreError):  # one of them takes its time; the work is done
            wait(store, [f"left/{rank}" for rank in range(env.world_size)], timeout)


def break_off(env: DistEnv) -> None:
    """Leave the process group without waiting for ranks that may be gone.

    The process ends soon after and takes its sockets with it; a destructor that hangs must not
    keep it, so it gets a few seconds.
    """
    if not dist.is_initialized():
        return
    # Private; of torch 2.4 to 2.15. Without it the group is left as any other.
    abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    leave_group = abort if dist.get_backend() == "nccl" else dist.destroy_process_group
    _leave_group(leave_group, 1.0 if env.world_size == 1 else 5.0)


def part() -> None:
    """Leave the process group when all is done: for half a minute at most, whatever NCCL or a rank
    that is gone by now keeps it waiting for.
    """
    _leave_group(dist.destroy_process_group, _PART_SECONDS)


def _leave_group(leave_group: Callable[[], None], seconds: float) -> None:
    try:
        tcp_store.bounded(leave_group, seconds)
    except Exception as error:
        log.info(f"leaving the process group: {str(error) or 'it did not answer'}")


def dump_flight_recorder(path: Path) -> None:
    """Write NCCL's latest exchanges of this rank, for torchfrtrace; nothing where there are none.

    Waits a few seconds at most for the file. A CUDA that hangs while it is asked for them holds up
    every thread of Python, as torch keeps its lock meanwhile: whatever must be done comes before.
    """
    # Private; of torch 2.4 to 2.15, with NCCL.
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump:
        try:
            tcp_store.bounded(lambda: path.write_bytes(dump()), _DUMP_SECONDS)
        except Exception as error:
            log.info(f"NCCL's flight recorder: {str(error) or 'it did not answer'}")


def time_tellers(hellos: Sequence[Message]) -> dict[int, str]:
    """Give the first rank of each host but rank 0's, with the host: these tell their time."""
    first: dict[str, int] = {}
    for rank, hello in enumerate(hellos):
        first.setdefault(str(hello["host"]), rank)
    return {rank: host for host, rank in first.items() if rank != 0}


def tell_time(store: "RunStore", env: DistEnv, now: float) -> None:
    """Tell rank 0 this host's time; `now` is that at which its verdict came."""
    put(store, f"clock/{env.rank}", {"time": now})


def collect_clocks(
    store: "RunStore", env: DistEnv, tellers: Mapping[int, str], sent: float
) -> dict[str, float]:
    """Give, on rank 0, the seconds by which each host's clock is ahead of this host's.

    tellers: as of `time_tellers`. sent: the time at which the verdict was on its way to them.
    A host that does not answer is left out.
    """
    keys = {f"clock/{rank}": host for rank, host in tellers.items()}
    with suppress(dist.DistStoreError):
        wait(store, list(keys), _ANSWER_SECONDS)
    ahead = {}
    for key, host in keys.items():
        with suppress(TrainingError, dist.DistStoreError):
            shown = (ask(store, env, key, f"the clock of {host}") or {}).get("time")
            if isinstance(shown, float):
                ahead[host] = clock_offset(sent, shown, time.time())
    return ahead


def clock_offset(sent: float, shown: float, received: float) -> float:
    """Give the seconds by which a clock that showed `shown` between two times of ours is ahead.

    It is known to within the round trip: 0 where that allows it, as hosts usually keep their
    clocks together more closely than a busy rank answers; else the middle.
    """
    least, most = shown - received, shown - sent
    return 0.0 if least <= 0 <= most else (least + most) / 2


@dataclass(frozen=True)
class Identity:
    """Identity of one start of a run: its job and attempt, its nonce, and torchrun's round.

    Rank 0 publishes it, and every other rank checks it before it writes anything: a reused port can
    lead to another run's store. What is published proves the nonce without telling it.
    """

    run: str
    nonce: str = field(repr=False)
    round: int = 0
    """Number of torchrun's round, from 1; 0 without torchrun."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Identity":
        """Read it from the environment of a task; raises TrainingError for an empty nonce."""
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
        run = " ".join(f"{name}={environ[name]}" for name in names if name in environ)
        if environ.get(NONCE_VARIABLE) == "":
            raise TrainingError(
                f"{NONCE_VARIABLE} is empty: expected the random hex digits that all ranks of a "
                "run share. Unset it to start ranks without. [CD0801]"
            )
        return cls(run, environ.get(NONCE_VARIABLE, ""))

    def prove(self, key: str, text: str) -> str:
        """Give the proof of what is written under a key; empty without a nonce."""
        return self._digest(key, text) if self.nonce else ""

    def publish(self, store: Store) -> None:
        """Publish it, as rank 0 of this start."""
        store.set(self.key, json.dumps({"run": self.run, "proof": self._digest("proof")}))

    def await_in(self, store: Store, env: DistEnv, seconds: float) -> None:
        """Wait for rank 0's, and check it; raises DistStoreError where none comes in time."""
        wait(store, [self.key], seconds)
        self.check(store, env)

    def check(self, store: Store, env: DistEnv) -> None:
        """Raise TrainingError where another run, or no run, has published its identity there."""
        published = _object_in(store.get(self.key), env, "what names the run")
        if published.get("proof") == self._digest("proof"):
            return
        hint = ""
        if published.get("run") == self.run:
            hint = f" They differ in {NONCE_VARIABLE}" + ("." if self.nonce else ", not set here.")
        theirs = printable(str(published.get("run", ""))) or "no Slurm step"
        raise TrainingError(
            f"rank {env.rank} reached another run's rank 0 at {env.master_addr}:{env.master_port}: "
            f"that one is {theirs}, this one {self.run or 'no Slurm step'}.{hint} Set MASTER_PORT "
            "to another port for this job. [CD0906]"
        )

    @property
    def key(self) -> str:
        """Key under which rank 0 publishes it."""
        return f"{PREFIX}/{self.round}/identity"

    def _digest(self, *words: str) -> str:
        """Return the HMAC of what this start is and of some words, by the nonce, if it has one."""
        scope = json.dumps([self.run, self.round, *words])
        secret = self.nonce.encode(errors="surrogateescape")
        return hmac.new(secret, scope.encode(), hashlib.sha256).hexdigest()


class RunStore(PrefixStore):
    """Part of a store in which the ranks of one start leave messages for each other."""

    def __init__(self, store: Store, identity: Identity) -> None:
        super().__init__(f"{PREFIX}/{identity._digest('keys')}", store)
        self.identity = identity


def nobody(env: DistEnv) -> PeerError:
    """Give the error of a rank to which rank 0 did not come."""
    return PeerError(
        f"rank {env.rank} waited for rank 0 at {env.master_addr}:{env.master_port}, but rank "
        "0 did not come. Its log says whether it started. [CD0903]"
    )


def put(store: RunStore, key: str, content: Mapping[str, object]) -> None:
    """Leave a message for other ranks of this run, with its proof."""
    text = json.dumps(dict(content))
    store.set(key, json.dumps({"content": text, "proof": store.identity.prove(key, text)}))


def ask(store: RunStore, env: DistEnv, key: str, what: str) -> Message | None:
    """Take a message that was left before now, or None."""
    return take(store, env, key, what) if store.check([key]) else None


def take(store: RunStore, env: DistEnv, key: str, what: str) -> Message:
    """Read a message; raises TrainingError, naming it `what`, where no rank wrote it."""
    message = store.get(key)
    sealed = _object_in(message, env, what)
    text, proof = str(sealed.get("content")), str(sealed.get("proof"))
    if not hmac.compare_digest(proof.encode(), store.identity.prove(key, text).encode()):
        raise strange(env, what, message)
    return _object_in(text.encode(), env, what)


def _object_in(message: bytes, env: DistEnv, what: str) -> Message:
    try:
        content = json.loads(message)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise strange(env, what, message)
    return content


def wait(store: Store, keys: Sequence[str], seconds: float) -> None:
    """Wait for all keys; raises DistStoreError when they are not there in time."""
    patience = timedelta(seconds=seconds)
    try:
        tcp_store.bounded(lambda: store.wait(list(keys), patience), seconds + GRACE_SECONDS)
    except TimeoutError:
        raise dist.DistStoreError("the store does not answer") from None
    except dist.DistNetworkError as error:
        raise PeerError(f"rank 0's store went away: {str(error).splitlines()[0]}") from None


def await_ranks(store: RunStore, env: DistEnv, keys: Sequence[str], timeout: float) -> None:
    """Wait until all ranks have written, each its key NAME/RANK; name those that have not."""
    try:
        wait(store, keys, timeout)
    except dist.DistStoreError:
        absent = [int(key.rpartition("/")[2]) for key in keys if not store.check([key])]
        raise TrainingError(
            f"{len(absent)} of {env.world_size} ranks did not come to "
            f"{env.master_addr}:{env.master_port} within {setting(timeout)}: {_listing(absent)}. "
            "Their logs say whether they started; --rendezvous-timeout makes rank 0 wait "
            "longer. [CD0902]"
        ) from None


def strange(env: DistEnv, what: str, message: bytes) -> TrainingError:
    """Give the error for content that no rank of any run writes."""
    return TrainingError(
        f"rank {env.rank}: {what} in the store at {env.master_addr}:{env.master_port} is not what "
        f"a rank writes: {printable(message.decode(errors='replace'))}. Somebody else "
        "reached the port: set MASTER_PORT to another. [CD0906]"
    )


def printable(text: str) -> str:
    """Give at most a line of what a stranger may have written, safe for a log."""
    return text if text.isprintable() and len(text) <= 200 else ascii(text[:200])


def _roll_call(store: RunStore, env: DistEnv, timeout: float) -> list[Message]:
    """Collect every rank's hello, in the order of the ranks."""
    keys = [f"hello/{rank}" for rank in range(env.world_size)]
    await_ranks(store, env, keys, timeout)
    hellos = [take(store, env, key, f"the hello of rank {rank}") for rank, key in enumerate(keys)]
    for rank, hello in enumerate(hellos):
        if "declines" in hello:
            raise PeerError(f"rank {rank} cannot take part: {hello['declines']}")
        if hello.get("world_size") != env.world_size:
            raise TrainingError(
                f"rank {rank} was started with a world size of {hello.get('world_size')}, rank 0 "
                f"with {env.world_size}. Give every rank the same WORLD_SIZE. [CD0907]"
            )
    return hellos


def _call_off(store: RunStore, env: DistEnv, reason: str) -> None:
    """Publish an error, and stay until the ranks that wait for the verdict have read it."""
    put(store, "verdict", {"error": reason})
    # As far as a look at each gets within the time that they have.
    deadline = time.monotonic() + _HEARING_SECONDS
    ranks = itertools.takewhile(lambda _: time.monotonic() < deadline, range(1, env.world_size))
    waiting = [rank for rank in ranks if _waits(store, env, rank)]
    if waiting:
        # They find the store gone, which tells them as much.
        with suppress(TrainingError, dist.DistStoreError):
            wait(store, [f"heard/{rank}" for rank in waiting], _HEARING_SECONDS)


def _waits(store: RunStore, env: DistEnv, rank: int) -> bool:
    try:
        hello = ask(store, env, f"hello/{rank}", "a hello")
    except TrainingError:
        return False  # no rank of this run
    return hello is not None and "declines" not in hello


def _begin_round(agents: Store, env: DistEnv, identity: Identity, timeout: float) -> RunStore:
    """Begin a new round, as rank 0, and wait for all to enter it."""
    last = replace(identity, round=_last_round(agents, env))
    if last.round and agents.check([last.key]):
        last.check(agents, env)
    this = replace(identity, round=agents.add(f"{PREFIX}/rounds", 1))
    this.publish(agents)
    store = RunStore(agents, this)
    keys = {rank: f"enters/{rank}" for rank in range(1, env.world_size)}
    failure: TrainingError | None = None
    try:
        await_ranks(store, env, list(keys.values()), timeout)
    except PeerError:
        raise
    except TrainingError as absence:
        failure = absence
    tokens = {}
    for rank, key in keys.items():
        try:
            entry = ask(store, env, key, f"the entry of rank {rank}") or {}
            tokens[str(rank)] = entry.get("token")
        except TrainingError as forgery:
            failure = failure or forgery
    put(store, "begins", {**tokens, "error": str(failure or "")})
    if failure:
        raise failure
    return store


def _enter_round(agents: Store, env: DistEnv, identity: Identity, timeout: float) -> RunStore:
    """Enter rounds until rank 0 begins one with this very process in it."""
    token, number, entered = secrets.token_hex(8), 1, 0
    deadline = time.monotonic() + timeout
    while True:
        number = max(number, _last_round(agents, env))
        this = replace(identity, round=number)
        store = RunStore(agents, this)
        try:
            if number != entered:
                this.await_in(agents, env, _LOOK_SECONDS)
                put(store, f"enters/{env.rank}", {"token": token})
                entered, deadline = number, time.monotonic() + timeout + GRACE_SECONDS
            wait(store, ["begins"], _LOOK_SECONDS)
        except dist.DistStoreError:
            if time.monotonic() > deadline:
                raise nobody(env) from None
            continue
        begins = take(store, env, "begins", "what rank 0 wrote")
        if begins.get(str(env.rank)) != token:
            number += 1  # that round's processes are gone
        elif error := begins.get("error"):
            raise PeerError(f"rank 0 called the start off: {error}")
        else:
            return store


def _last_round(agents: Store, env: DistEnv) -> int:
    """Read the number of the last round, 0 before the first."""
    key = f"{PREFIX}/rounds"
    count = agents.get(key) if agents.check([key]) else b"0"
    if not count.isdigit() or len(count) > 18:
        raise strange(env, "the count of rounds", count)
    return int(count)


def _listing(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"

"""Rendezvous of the ranks in a store before torch's process group starts, and its end.

Every wait has its own deadline, because torch's TCPStore does not report which rank is missing.

Under torchrun the ranks meet in the store of its agents, which outlives the workers. Rank 0 opens
a round for each start; the others enter rounds until one starts with them in it. The agents'
restart counts cannot identify a start: with the c10d rendezvous an agent does not count a restart
that it is asked for while its workers still run.

Any client that reaches the port can list, read and write the store. Each message between the ranks
of a start therefore carries an HMAC over its key and content, made with the run's nonce, and only
JSON is read. An unauthenticated client cannot pass for a rank. It can disturb a start, which then
fails with an error.

Rank 0 also measures the offset of each host's wall clock from its own: comparing the end times of
ranks across hosts shows which failed first.
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
"""JSON object from one rank to others."""

# Seconds that a rank waits for the decision after rank 0's wait for the last rank ends.
GRACE_SECONDS = 10.0
# Prefix of a run's keys in a shared store.
PREFIX = "clusterddp"
# Seconds that rank 0 waits for the others to read its abort.
_HEARING_SECONDS = 2.0
# Seconds for the flight recorder of NCCL.
_DUMP_SECONDS = 5.0
# Seconds that a rank under an agent waits in one round before it looks for a later one.
_LOOK_SECONDS = 1.0
# Seconds to wait for a host's clock. The ranks have just met; a slower host is skipped.
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

    Under a torchrun agent, which listens at the address, all ranks connect and return once all are
    present. A single process needs no port. No rank writes to a store before it has checked the
    run's identity in it.

    timeout: seconds to listen or connect.
    bound: rank 0's socket, if `tcp_store.bind` has created it; this function takes ownership.
    answered: returns whether name servers respond; if not, they are no longer used.

    Raises TrainingError with the rank, the address and the remedy.
    """
    identity = Identity.from_environ(environ)
    if env.world_size == 1:
        return RunStore(HashStore(), identity)
    deadline = time.monotonic() + timeout
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agents = tcp_store.connect(env, deadline, answered)
        return (_enter_round if env.rank else _begin_round)(agents, env, identity, timeout)
    if env.rank == 0:
        store = tcp_store.listen(env, environ, timeout, bound, answered)
        identity.publish(store)
    else:
        store = tcp_store.connect(env, deadline, answered)
        try:
            identity.await_in(store, env, max(deadline - time.monotonic(), 1.0))
        except dist.DistStoreError:
            raise rank_0_missing(env) from None
    return RunStore(store, identity)


def agree(
    store: "RunStore",
    env: DistEnv,
    hello: Message,
    decide: Callable[[list[Message]], Message],
    timeout: float,
    decision_seconds: float = GRACE_SECONDS,
) -> Message:
    """Collect every rank's `hello`, let rank 0 `decide`, and return the decision on every rank.

    hello: holds at least the rank's `world_size`. decision_seconds: time for rank 0 to decide once
    all ranks are present.

    An error in `decide` is raised on rank 0, and as PeerError on the others. Raises TrainingError
    with the missing ranks if they do not join within `timeout` seconds.
    """
    if store.add(f"claim/{env.rank}", 1) > 1:
        raise TrainingError(
            f"two processes have rank {env.rank} of {env.world_size}; this is the second one. "
            "Give each process a different RANK. [CD0907]"
        )
    put(store, f"hello/{env.rank}", hello)
    if env.rank == 0:
        try:
            decision = decide(_roll_call(store, env, timeout))
        except BaseException as error:
            is_ours = isinstance(error, ClusterDDPError)
            _abort_start(store, env, str(error) if is_ours else "its log says why.")
            raise
        put(store, "decision", decision)
        return decision
    patience = timeout + decision_seconds
    try:
        wait(store, ["decision"], patience)
    except dist.DistStoreError:
        raise PeerError(
            f"rank {env.rank} reached rank 0 at {env.master_addr}:{env.master_port}, but rank 0 "
            f"did not start the training within {setting(patience)}. See the log of rank 0."
        ) from None
    decision = take(store, env, "decision", "rank 0's decision")
    if "error" in decision:
        store.set(f"heard/{env.rank}", "")
        raise PeerError(f"rank 0 aborted the start: {decision['error']}")
    return decision


def report_refusal(store: "RunStore", env: DistEnv, error: BaseException) -> None:
    """Report to rank 0 that this rank cannot join; rank 0 aborts the start on all ranks."""
    if env.rank == 0:
        _abort_start(store, env, str(error))
    else:
        put(store, f"hello/{env.rank}", {"declines": str(error)})


def leave(store: "RunStore", env: DistEnv, timeout: float = 5.0) -> None:
    """Keep rank 0's store open until every rank has left, or for `timeout` seconds."""
    store.set(f"left/{env.rank}", "1")
    if env.rank == 0:
        with suppress(dist.DistStoreError):  # a rank is slow; the work is done
            wait(store, [f"left/{rank}" for rank in range(env.world_size)], timeout)


def abort_group(env: DistEnv) -> None:
    """Abort the process group without waiting for ranks that may be gone.

    Limited to a few seconds, so that a hanging destructor cannot block the exit.
    """
    if not dist.is_initialized():
        return
    # Private, in torch 2.4 to 2.15. Without it the group is destroyed normally.
    abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    leave_group = abort if dist.get_backend() == "nccl" else dist.destroy_process_group
    _destroy_group(leave_group, 1.0 if env.world_size == 1 else 5.0)


def leave_group() -> None:
    """Destroy the process group at the end of the training, for at most half a minute.

    NCCL or a missing rank could block it for longer.
    """
    _destroy_group(dist.destroy_process_group, _PART_SECONDS)


def _destroy_group(leave_group: Callable[[], None], seconds: float) -> None:
    try:
        tcp_store.bounded(leave_group, seconds)
    except Exception as error:
        log.info(f"cannot leave the process group: {str(error) or 'it did not respond'}")


def dump_flight_recorder(path: Path) -> None:
    """Write this rank's latest NCCL collectives for torchfrtrace, if there are any.

    Waits at most a few seconds for the file. If CUDA hangs in this call, every Python thread is
    blocked, because torch holds the interpreter lock: do everything else before.
    """
    # Private, in torch 2.4 to 2.15, with NCCL.
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump:
        try:
            tcp_store.bounded(lambda: path.write_bytes(dump()), _DUMP_SECONDS)
        except Exception as error:
            log.info(f"NCCL's flight recorder: {str(error) or 'it did not respond'}")


def clock_senders(hellos: Sequence[Message]) -> dict[int, str]:
    """Return the first rank of each host except rank 0's, with the host: these send their time."""
    first: dict[str, int] = {}
    for rank, hello in enumerate(hellos):
        first.setdefault(str(hello["host"]), rank)
    return {rank: host for host, rank in first.items() if rank != 0}


def send_clock(store: "RunStore", env: DistEnv, now: float) -> None:
    """Send this host's time to rank 0; now: the time at which the decision arrived."""
    put(store, f"clock/{env.rank}", {"time": now})


def collect_clocks(
    store: "RunStore", env: DistEnv, senders: Mapping[int, str], sent: float
) -> dict[str, float]:
    """Return, on rank 0, the seconds by which each host's clock is ahead of this host's.

    senders: as of `clock_senders`. sent: time at which rank 0 published the decision. Hosts without
    an answer are omitted.
    """
    keys = {f"clock/{rank}": host for rank, host in senders.items()}
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
    """Return the seconds by which a clock that showed `shown` between two local times is ahead.

    The round trip limits the precision. Returns 0 if it is possible, because clocks usually agree
    more closely than a busy rank responds, else the middle of the interval.
    """
    least, most = shown - received, shown - sent
    return 0.0 if least <= 0 <= most else (least + most) / 2


@dataclass(frozen=True)
class Identity:
    """Identity of one start of a run: its job and attempt, its nonce, and torchrun's round.

    Rank 0 publishes it, and every other rank checks it before it writes, because a reused port can
    lead to another run's store. The published proof does not reveal the nonce.
    """

    run: str
    nonce: str = field(repr=False)
    round: int = 0
    """Number of the torchrun round, from 1; 0 without torchrun."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Identity":
        """Read the identity from a task's environment. Raises TrainingError for an empty nonce."""
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
        run = " ".join(f"{name}={environ[name]}" for name in names if name in environ)
        if environ.get(NONCE_VARIABLE) == "":
            raise TrainingError(
                f"{NONCE_VARIABLE} is empty; expected random hex digits, the same for all ranks of "
                "a run. Unset it to start without a nonce. [CD0801]"
            )
        return cls(run, environ.get(NONCE_VARIABLE, ""))

    def prove(self, key: str, text: str) -> str:
        """Return the proof for a key and its content; empty without a nonce."""
        return self._digest(key, text) if self.nonce else ""

    def publish(self, store: Store) -> None:
        """Publish the identity, as rank 0."""
        store.set(self.key, json.dumps({"run": self.run, "proof": self._digest("proof")}))

    def await_in(self, store: Store, env: DistEnv, seconds: float) -> None:
        """Wait for rank 0's identity and check it. Raises DistStoreError on a timeout."""
        wait(store, [self.key], seconds)
        self.check(store, env)

    def check(self, store: Store, env: DistEnv) -> None:
        """Raise TrainingError unless this run's identity is published in the store."""
        published = _object_in(store.get(self.key), env, "what names the run")
        if published.get("proof") == self._digest("proof"):
            return
        hint = ""
        if published.get("run") == self.run:
            hint = f" They differ in {NONCE_VARIABLE}" + ("." if self.nonce else ", not set here.")
        theirs = printable(str(published.get("run", ""))) or "no Slurm step"
        raise TrainingError(
            f"rank {env.rank} reached another run's rank 0 at {env.master_addr}:{env.master_port}: "
            f"expected {self.run or 'no Slurm step'}, found {theirs}.{hint} Set MASTER_PORT "
            "to another port for this job. [CD0906]"
        )

    @property
    def key(self) -> str:
        """Key of the published identity."""
        return f"{PREFIX}/{self.round}/identity"

    def _digest(self, *words: str) -> str:
        """Return the HMAC of this identity and the given words, keyed with the nonce, if any."""
        scope = json.dumps([self.run, self.round, *words])
        secret = self.nonce.encode(errors="surrogateescape")
        return hmac.new(secret, scope.encode(), hashlib.sha256).hexdigest()


class RunStore(PrefixStore):
    """Part of a store for the messages between the ranks of one start."""

    def __init__(self, store: Store, identity: Identity) -> None:
        super().__init__(f"{PREFIX}/{identity._digest('keys')}", store)
        self.identity = identity


def rank_0_missing(env: DistEnv) -> PeerError:
    """Return the error of a rank that waited for rank 0 without success."""
    return PeerError(
        f"rank {env.rank} waited for rank 0 at {env.master_addr}:{env.master_port}, but rank "
        "0 did not join. See its log. [CD0903]"
    )


def put(store: RunStore, key: str, content: Mapping[str, object]) -> None:
    """Write a message for other ranks of this run, with its proof."""
    text = json.dumps(dict(content))
    store.set(key, json.dumps({"content": text, "proof": store.identity.prove(key, text)}))


def ask(store: RunStore, env: DistEnv, key: str, what: str) -> Message | None:
    """Read a message if it is present, else return None."""
    return take(store, env, key, what) if store.check([key]) else None


def take(store: RunStore, env: DistEnv, key: str, what: str) -> Message:
    """Read a message. Raises TrainingError, calling it `what`, if no rank of the run wrote it."""
    message = store.get(key)
    sealed = _object_in(message, env, what)
    text, proof = str(sealed.get("content")), str(sealed.get("proof"))
    if not hmac.compare_digest(proof.encode(), store.identity.prove(key, text).encode()):
        raise foreign_content(env, what, message)
    return _object_in(text.encode(), env, what)


def _object_in(message: bytes, env: DistEnv, what: str) -> Message:
    try:
        content = json.loads(message)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise foreign_content(env, what, message)
    return content


def wait(store: Store, keys: Sequence[str], seconds: float) -> None:
    """Wait for all keys. Raises DistStoreError on a timeout."""
    patience = timedelta(seconds=seconds)
    try:
        tcp_store.bounded(lambda: store.wait(list(keys), patience), seconds + GRACE_SECONDS)
    except TimeoutError:
        raise dist.DistStoreError("the store does not respond") from None
    except dist.DistNetworkError as error:
        raise PeerError(f"rank 0's store was closed: {str(error).splitlines()[0]}") from None


def await_ranks(store: RunStore, env: DistEnv, keys: Sequence[str], timeout: float) -> None:
    """Wait until every rank has written its key NAME/RANK. Raises TrainingError with the others."""
    try:
        wait(store, keys, timeout)
    except dist.DistStoreError:
        absent = [int(key.rpartition("/")[2]) for key in keys if not store.check([key])]
        raise TrainingError(
            f"{len(absent)} of {env.world_size} ranks did not join at "
            f"{env.master_addr}:{env.master_port} within {setting(timeout)}: {_listing(absent)}. "
            "See their logs; --rendezvous-timeout makes rank 0 wait longer. [CD0902]"
        ) from None


def foreign_content(env: DistEnv, what: str, message: bytes) -> TrainingError:
    """Return the error for content that no rank has written."""
    return TrainingError(
        f"rank {env.rank}: {what} in the store at {env.master_addr}:{env.master_port} was not "
        f"written by a rank: {printable(message.decode(errors='replace'))}. Another client "
        "reached the port. Set MASTER_PORT to another port. [CD0906]"
    )


def printable(text: str) -> str:
    """Return at most a line of untrusted text, safe for a log."""
    return text if text.isprintable() and len(text) <= 200 else ascii(text[:200])


def _roll_call(store: RunStore, env: DistEnv, timeout: float) -> list[Message]:
    """Collect every rank's hello, in the order of the ranks."""
    keys = [f"hello/{rank}" for rank in range(env.world_size)]
    await_ranks(store, env, keys, timeout)
    hellos = [take(store, env, key, f"the hello of rank {rank}") for rank, key in enumerate(keys)]
    for rank, hello in enumerate(hellos):
        if "declines" in hello:
            raise PeerError(f"rank {rank} cannot join: {hello['declines']}")
        if hello.get("world_size") != env.world_size:
            raise TrainingError(
                f"rank {rank} was started with a world size of {hello.get('world_size')}, rank 0 "
                f"with {env.world_size}. Give every rank the same WORLD_SIZE. [CD0907]"
            )
    return hellos


def _abort_start(store: RunStore, env: DistEnv, reason: str) -> None:
    """Publish an error and wait until the ranks that expect the decision have read it."""
    put(store, "decision", {"error": reason})
    # Only the ranks that can be checked within the time.
    deadline = time.monotonic() + _HEARING_SECONDS
    ranks = itertools.takewhile(lambda _: time.monotonic() < deadline, range(1, env.world_size))
    waiting = [rank for rank in ranks if _waits(store, env, rank)]
    if waiting:
        # The others find the store closed, which has the same effect.
        with suppress(TrainingError, dist.DistStoreError):
            wait(store, [f"heard/{rank}" for rank in waiting], _HEARING_SECONDS)


def _waits(store: RunStore, env: DistEnv, rank: int) -> bool:
    try:
        hello = ask(store, env, f"hello/{rank}", "a hello")
    except TrainingError:
        return False  # not a rank of this run
    return hello is not None and "declines" not in hello


def _begin_round(agents: Store, env: DistEnv, identity: Identity, timeout: float) -> RunStore:
    """Open a new round as rank 0 and wait for all ranks to enter it."""
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
    """Enter rounds until rank 0 starts one that includes this process."""
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
                raise rank_0_missing(env) from None
            continue
        begins = take(store, env, "begins", "what rank 0 wrote")
        if begins.get(str(env.rank)) != token:
            number += 1  # the processes of that round are gone
        elif error := begins.get("error"):
            raise PeerError(f"rank 0 aborted the start: {error}")
        else:
            return store


def _last_round(agents: Store, env: DistEnv) -> int:
    """Read the number of the last round, 0 before the first."""
    key = f"{PREFIX}/rounds"
    count = agents.get(key) if agents.check([key]) else b"0"
    if not count.isdigit() or len(count) > 18:
        raise foreign_content(env, "the count of rounds", count)
    return int(count)


def _listing(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"

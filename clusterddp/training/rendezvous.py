"""Where the ranks meet before torch's process group: a store, a roll call, one verdict for all.

Every wait has a deadline of its own. torch's TCPStore alone would hang for minutes on a listener
that is no store, and could not say which rank never came.

Whoever reaches the port can read and write the store. So each message carries a proof that its
writer holds the run's nonce, and nothing but JSON is read. It keeps strangers from being taken for
a rank; it does not keep them from disturbing a start, which then ends with an error.
"""

import errno
import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import PrefixStore, Store

from clusterddp.dist_env import DistEnv
from clusterddp.errors import ClusterDDPError, TrainingError

T = TypeVar("T")

# How long a rank waits for the verdict beyond the time that rank 0 waits for the last rank.
_GRACE_SECONDS = 10.0
# How long a rank under an agent waits in one round before it looks for a later one.
_LOOK_SECONDS = 1.0
_NONCE = "CLUSTERDDP_NONCE"
_PREFIX = "clusterddp"


class PeerError(TrainingError):
    """This rank fails only because another one did; it is not the first to be named."""

    peer_lost = True


class RunStore(PrefixStore):
    """The keys of one meeting of the ranks, and the seal that their messages carry."""

    def __init__(self, prefix: str, store: Store, seal: "_Seal") -> None:
        super().__init__(prefix, store)
        self.seal = seal


def open_store(env: DistEnv, environ: Mapping[str, str], timeout: float) -> "RunStore":
    """Rank 0 listens at the master address and the others connect, within `timeout` seconds.

    Under a torchrun agent, which listens there itself, all connect, and return once all are there.
    A single process needs no port. No rank writes to a store before it knows that it is its own
    run's: the same CLUSTERDDP_NONCE, which never leaves the process, or without one the same job.

    Raises TrainingError with the rank, the address and what to do.
    """
    seal = _Seal.from_environ(environ)
    if env.world_size == 1:
        return RunStore(_PREFIX, HashStore(), seal)
    deadline = time.monotonic() + timeout
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agents = _join(env, deadline)
        if env.rank == 0:
            return _open_round(agents, env, seal, timeout)
        return _enter_round(agents, env, seal, timeout)
    store = RunStore(
        _PREFIX, _listen(env, timeout) if env.rank == 0 else _join(env, deadline), seal
    )
    if env.rank == 0:
        _identify(store)
    else:
        _await_identity(store, env, deadline)
        _check_identity(store, env)
    return store


def agree(
    store: Store,
    env: DistEnv,
    hello: Mapping[str, Any],
    decide: Callable[[list[dict[str, Any]]], dict[str, Any]],
    timeout: float,
) -> dict[str, Any]:
    """Collect every rank's `hello`, let rank 0 `decide`, and return its verdict on every rank.

    A hello holds at least the rank's `world_size`.

    An error raised by `decide` is raised on all ranks: there as it is, elsewhere as PeerError.
    Raises TrainingError where ranks do not come within `timeout` seconds, naming them.
    """
    if store.add(f"claim/{env.rank}", 1) > 1:
        raise TrainingError(
            f"two processes say that they are rank {env.rank} of {env.world_size}: this is the "
            "second one. Give each process a RANK of its own."
        )
    _put(store, f"hello/{env.rank}", dict(hello))
    if env.rank == 0:
        try:
            verdict = decide(_roll_call(store, env, timeout))
        except ClusterDDPError as error:
            _call_off(store, env, str(error))
            raise
        except BaseException:
            _call_off(store, env, "its log says why.")
            raise
        _put(store, "verdict", verdict)
        return verdict
    try:
        _wait(store, ["verdict"], timeout + _GRACE_SECONDS)
    except dist.DistStoreError:
        raise PeerError(
            f"rank {env.rank} met rank 0 at {env.master_addr}:{env.master_port}, but was not told "
            f"to start within {timeout + _GRACE_SECONDS:g} s. The log of rank 0 says what it did."
        ) from None
    content = _take(store, env, "verdict", "rank 0's verdict")
    if "error" in content:
        store.set(f"heard/{env.rank}", "")
        raise PeerError(f"rank 0 called the start off: {content['error']}")
    return content


def decline(store: Store, env: DistEnv, error: BaseException) -> None:
    """Tell rank 0, which would wait, that this rank cannot take part; rank 0 tells all others."""
    if env.rank == 0:
        _call_off(store, env, str(error))
    else:
        _put(store, f"hello/{env.rank}", {"declines": str(error)})


def leave(store: Store, env: DistEnv, timeout: float = 5.0) -> None:
    """Keep rank 0's store open until every rank has left, or for `timeout` seconds."""
    store.set(f"left/{env.rank}", "1")
    if env.rank == 0:
        try:
            _wait(store, [f"left/{rank}" for rank in range(env.world_size)], timeout)
        except dist.DistStoreError:
            pass  # one of them takes its time; the work is done


def bounded(call: Callable[[], T], seconds: float) -> T:
    """Return what `call` returns; raise TimeoutError when it takes longer, leaving it behind.

    It runs in a thread of its own, so that Ctrl-C works while torch waits in C++.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # handed to the caller below
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError
    return outcome[0]


def _listen(env: DistEnv, timeout: float) -> Store:
    # Bound here and handed over, so that the error is Python's own and names its reason.
    try:
        listener = _bind(env)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TrainingError(
                f"rank 0 cannot listen on port {env.master_port} of {socket.gethostname()}: the "
                "port is in use, perhaps by another run on this host. Unset MASTER_PORT to have "
                "one derived, or set it to a free port for every rank."
            ) from None
        raise TrainingError(
            f"rank 0 cannot listen on port {env.master_port} of {socket.gethostname()}: "
            f"{error.strerror}. Set MASTER_PORT to a port from 1024 to 65535."
        ) from None
    store: Store = TCPStore(
        env.master_addr,
        env.master_port,
        env.world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store


def _bind(env: DistEnv) -> socket.socket:
    """On every address, as the others may know this host by any of them; or on the loopback."""
    try:
        address = ipaddress.ip_address(env.master_addr)
    except ValueError:
        address = None
    if address is not None and address.is_loopback:
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        return socket.create_server((env.master_addr, env.master_port), family=family, backlog=2048)
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", env.master_port),
        family=socket.AF_INET6 if dual else socket.AF_INET,
        dualstack_ipv6=dual,
        backlog=2048,
    )


def _join(env: DistEnv, deadline: float) -> Store:
    _await_listener(env, deadline)
    return _connect(env, max(deadline - time.monotonic(), 1.0))


def _await_listener(env: DistEnv, deadline: float) -> None:
    """Return once somebody listens at the master address."""
    where = f"{env.master_addr}:{env.master_port}"
    pause = 0.02
    while True:
        try:
            socket.create_connection((env.master_addr, env.master_port), timeout=5.0).close()
            return
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or time.monotonic() > deadline:
                raise TrainingError(
                    f"rank {env.rank} on {socket.gethostname()} cannot look up the master address "
                    f"{env.master_addr!r}: {error.strerror}. Set MASTER_ADDR to a name or address "
                    "of rank 0's host that this host knows."
                ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"rank {env.rank} on {socket.gethostname()} waited for rank 0 at {where}, but "
                    f"nobody answered: {error.strerror or error}. The log of rank 0 says whether "
                    "it started; a firewall between the hosts looks the same."
                ) from None
        time.sleep(pause)  # rank 0 is still importing torch: there is no event to wait for
        pause = min(pause * 1.5, 0.5)


def _connect(env: DistEnv, seconds: float) -> Store:
    def connect() -> Store:
        store: Store = TCPStore(
            env.master_addr,
            env.master_port,
            env.world_size,
            is_master=False,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        return store

    try:
        return bounded(connect, seconds)
    except (TimeoutError, RuntimeError) as error:
        seen = f": {error}" if str(error) else f" within {seconds:.0f} s"
        raise TrainingError(
            f"rank {env.rank} on {socket.gethostname()}: something listens at "
            f"{env.master_addr}:{env.master_port}, but it does not answer as rank 0's store "
            f"does{seen}. Another program holds the port: set MASTER_PORT to a free one."
        ) from None


def _open_round(agents: Store, env: DistEnv, seal: "_Seal", timeout: float) -> RunStore:
    """Rank 0's side of a start under torchrun: begin a new round and wait for all to enter it.

    The agents' store outlives the workers, so a round of its own keeps each start apart from
    what an earlier one left. The agents' restart counts cannot name it: with the c10d rendezvous
    an agent whose workers still ran when it was asked to start again does not count that.
    """
    last = _last_round(agents, env)
    if last and (earlier := _round(agents, last, seal)).check(["identity"]):
        _check_identity(earlier, env)
    store = _round(agents, agents.add(f"{_PREFIX}/rounds", 1), seal)
    _identify(store)
    keys = [f"enters/{rank}" for rank in range(1, env.world_size)]
    error: TrainingError | None = None
    try:
        _await_ranks(store, env, keys, timeout)
    except PeerError:
        raise
    except TrainingError as absence:
        error = absence
    begins = {}
    for rank, key in enumerate(keys, start=1):
        try:
            if store.check([key]):
                begins[str(rank)] = _take(store, env, key, f"the entry of rank {rank}").get("token")
        except TrainingError as forgery:
            error = error or forgery
    _put(store, "begins", {**begins, "error": str(error or "")})
    if error:
        raise error
    return store


def _enter_round(agents: Store, env: DistEnv, seal: "_Seal", timeout: float) -> RunStore:
    """The other ranks' side: enter rounds until rank 0 begins one with this very process in it."""
    token, number, entered = secrets.token_hex(8), 1, 0
    deadline = time.monotonic() + timeout
    while True:
        number = max(number, _last_round(agents, env))
        store = _round(agents, number, seal)
        try:
            if number != entered:
                _wait(store, ["identity"], _LOOK_SECONDS)
                _check_identity(store, env)
                _put(store, f"enters/{env.rank}", {"token": token})
                entered, deadline = number, time.monotonic() + timeout + _GRACE_SECONDS
            _wait(store, ["begins"], _LOOK_SECONDS)
        except dist.DistStoreError:
            if time.monotonic() > deadline:
                raise _nobody(env) from None
            continue
        begins = _take(store, env, "begins", "what rank 0 wrote")
        if begins.get(str(env.rank)) != token:
            number += 1  # that round's processes are gone
        elif error := begins.get("error"):
            raise PeerError(f"rank 0 called the start off: {error}")
        else:
            return store


def _round(agents: Store, number: int, seal: "_Seal") -> RunStore:
    return RunStore(f"{_PREFIX}/{number}", agents, seal.of_round(number))


def _last_round(agents: Store, env: DistEnv) -> int:
    """0 before the first. Read without a proof: a round proves itself by its identity."""
    key = f"{_PREFIX}/rounds"
    count = agents.get(key) if agents.check([key]) else b"0"
    if not count.isdigit() or len(count) > 18:
        raise _strange(env, "the count of rounds", count)
    return int(count)


def _identify(store: RunStore) -> None:
    """Rank 0 says whose store it is."""
    _put(store, "identity", {"run": store.seal.run})


def _await_identity(store: Store, env: DistEnv, deadline: float) -> None:
    try:
        _wait(store, ["identity"], max(deadline - time.monotonic(), 1.0))
    except dist.DistStoreError:
        raise _nobody(env) from None


def _nobody(env: DistEnv) -> PeerError:
    return PeerError(
        f"rank {env.rank} waited for rank 0 at {env.master_addr}:{env.master_port}, but rank "
        "0 did not come. Its log says whether it started."
    )


def _check_identity(store: RunStore, env: DistEnv) -> None:
    """Refuse the store of another run, which a reused port can lead to."""
    message, own = store.get("identity"), store.seal.run or "no Slurm step"
    hint = ""
    try:
        content = store.seal.open("identity", message)
        if content.get("run") == store.seal.run:
            return
    except _UnprovenError as error:
        content = error.content
        if content.get("run") == store.seal.run:
            hint = f" They differ in {_NONCE}" + ("." if store.seal.key else ", not set here.")
    except ValueError:
        raise _strange(env, "what names the run", message) from None
    theirs = _printable(str(content.get("run", ""))) or "no Slurm step"
    raise TrainingError(
        f"rank {env.rank} reached another run's rank 0 at {env.master_addr}:{env.master_port}: "
        f"that one is {theirs}, this one {own}.{hint} Set MASTER_PORT to another port for this job."
    )


def _roll_call(store: Store, env: DistEnv, timeout: float) -> list[dict[str, Any]]:
    """Every rank's hello, in the order of the ranks."""
    keys = [f"hello/{rank}" for rank in range(env.world_size)]
    _await_ranks(store, env, keys, timeout)
    hellos = [_take(store, env, key, f"the hello of rank {rank}") for rank, key in enumerate(keys)]
    for rank, hello in enumerate(hellos):
        if "declines" in hello:
            raise PeerError(f"rank {rank} cannot take part: {hello['declines']}")
        if hello.get("world_size") != env.world_size:
            raise TrainingError(
                f"rank {rank} was started with a world size of {hello.get('world_size')}, rank 0 "
                f"with {env.world_size}. Give every rank the same WORLD_SIZE."
            )
    return hellos


def _await_ranks(store: Store, env: DistEnv, keys: Sequence[str], timeout: float) -> None:
    """Wait until all ranks have written, each its key NAME/RANK; name those that have not."""
    try:
        _wait(store, list(keys), timeout)
    except dist.DistStoreError:
        absent = [int(key.rpartition("/")[2]) for key in keys if not store.check([key])]
        raise TrainingError(
            f"{len(absent)} of {env.world_size} ranks did not come to "
            f"{env.master_addr}:{env.master_port} within {timeout:g} s: {_listing(absent)}. "
            "Their logs say whether they started; --rendezvous-timeout makes rank 0 wait longer."
        ) from None


def _call_off(store: Store, env: DistEnv, reason: str) -> None:
    """Publish an error, and stay until those who have come have heard it."""
    _put(store, "verdict", {"error": reason})
    present = [rank for rank in range(1, env.world_size) if store.check([f"hello/{rank}"])]
    waiting = [rank for rank in present if not _declined(store, rank)]
    if waiting:
        try:
            _wait(store, [f"heard/{rank}" for rank in waiting], 2.0)
        except (TrainingError, dist.DistStoreError):
            pass  # they find the store gone, which tells them as much


def _declined(store: Store, rank: int) -> bool:
    try:
        key = f"hello/{rank}"
        return "declines" in _seal_of(store).open(key, store.get(key))
    except ValueError:
        return True  # not a rank of ours: it waits for nothing


def _listing(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _wait(store: Store, keys: list[str], seconds: float) -> None:
    """Wait for all keys; raises DistStoreError when they are not there in time."""

    def wait() -> bool:
        store.wait(keys, timedelta(seconds=seconds))
        return True

    try:
        bounded(wait, seconds + _GRACE_SECONDS)
    except TimeoutError:
        raise dist.DistStoreError("the store does not answer") from None
    except dist.DistNetworkError as error:
        raise PeerError(f"rank 0's store went away: {str(error).splitlines()[0]}") from None


def _put(store: Store, key: str, content: dict[str, Any]) -> None:
    store.set(key, _seal_of(store).wrap(key, content))


def _take(store: Store, env: DistEnv, key: str, what: str) -> dict[str, Any]:
    """What a rank of this run put there; raises TrainingError, naming it `what`, for all else."""
    message = store.get(key)
    try:
        return _seal_of(store).open(key, message)
    except _UnprovenError:
        raise TrainingError(
            f"rank {env.rank}: {what} in the store at {env.master_addr}:{env.master_port} lacks "
            "the proof that it comes from this run: its writer was not started with this "
            f"attempt's {_NONCE}. Start all ranks from one script; if a stranger reached the port, "
            "set MASTER_PORT to another."
        ) from None
    except ValueError:
        raise _strange(env, what, message) from None


def _strange(env: DistEnv, what: str, message: bytes) -> TrainingError:
    return TrainingError(
        f"rank {env.rank}: {what} in the store at {env.master_addr}:{env.master_port} is not what "
        f"a rank writes: {_printable(message.decode(errors='replace'))}. Somebody else reached "
        "the port: set MASTER_PORT to another."
    )


def _seal_of(store: Store) -> "_Seal":
    assert isinstance(store, RunStore), "not from open_store"
    return store.seal


def _printable(text: str) -> str:
    """At most a line of what a stranger may have written, safe for a log."""
    return text if text.isprintable() and len(text) <= 200 else ascii(text[:200])


class _UnprovenError(ValueError):
    """A message without the right proof; `content` is what it says."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__("no proof")
        self.content = content


@dataclass(frozen=True)
class _Seal:
    """Writes messages with a proof that this run wrote them under this key, and checks them.

    The proof is an HMAC keyed by the nonce. It covers the run's identity and the round, so that a
    message of another attempt does not pass; without a nonce it is empty.
    """

    run: str
    key: bytes = field(repr=False)
    round: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "_Seal":
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
        run = " ".join(f"{name}={environ[name]}" for name in names if name in environ)
        if environ.get(_NONCE) == "":
            raise TrainingError(
                f"{_NONCE} is empty: expected the random hex digits that all ranks of a run "
                "share. Unset it to start ranks without."
            )
        return cls(run, environ.get(_NONCE, "").encode(errors="surrogateescape"))

    def of_round(self, number: int) -> "_Seal":
        return _Seal(self.run, self.key, number)

    def wrap(self, name: str, content: dict[str, Any]) -> str:
        text = json.dumps(content)
        return json.dumps({"content": text, "proof": self._proof(name, text)})

    def open(self, name: str, message: bytes) -> dict[str, Any]:
        """What was wrapped under `name`; raises ValueError, or _UnprovenError where it is one."""
        try:
            outer = json.loads(message)
            text, proof = outer["content"], outer["proof"].encode()
            proven = hmac.compare_digest(proof, self._proof(name, text).encode())
            content = json.loads(text)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError("no message of a rank") from error
        if not isinstance(content, dict):
            raise ValueError("no message of a rank")
        if not proven:
            raise _UnprovenError(content)
        return content

    def _proof(self, name: str, text: str) -> str:
        if not self.key:
            return ""
        scope = json.dumps([self.run, self.round, name, text])
        return hmac.new(self.key, scope.encode(), hashlib.sha256).hexdigest()

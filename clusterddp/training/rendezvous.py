"""Where the ranks meet before torch's process group: a store, a roll call, one verdict for all.

Every wait has a deadline of its own. torch's TCPStore alone would hang for minutes on a listener
that is no store, and could not say which rank never came.

Whoever reaches the port can read and write the store. So each message carries a proof (`seal`).
It keeps strangers from being taken for a rank; it does not keep them from disturbing a start, which
then ends with an error.
"""

import contextlib
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import PrefixStore, Store

from clusterddp.dist_env import DistEnv
from clusterddp.errors import ClusterDDPError, TrainingError
from clusterddp.training import listener, lookups
from clusterddp.training.seal import NONCE, Seal, UnprovenError, printable

T = TypeVar("T")

# How long a rank waits for the verdict beyond the time that rank 0 waits for the last rank.
_GRACE_SECONDS = 10.0
# How long a rank under an agent waits in one round before it looks for a later one.
_LOOK_SECONDS = 1.0
_PREFIX = "clusterddp"


class PeerError(TrainingError):
    """This rank fails only because another one did; it is not the first to be named."""

    peer_lost = True


class RunStore(PrefixStore):
    """The keys of one meeting of the ranks, and the seal that their messages carry."""

    def __init__(self, prefix: str, store: Store, seal: Seal) -> None:
        super().__init__(prefix, store)
        self.seal = seal


def open_store(
    env: DistEnv,
    environ: Mapping[str, str],
    timeout: float,
    *,
    bound: socket.socket | None = None,
    answered: Callable[[], bool] = lambda: True,
) -> "RunStore":
    """Rank 0 listens at the master address and the others connect, within `timeout` seconds.

    Under a torchrun agent, which listens there itself, all connect, and return once all are there.
    A single process needs no port. No rank writes to a store before it knows that it is its own
    run's: the same CLUSTERDDP_NONCE, which never leaves the process, or without one the same job.

    bound: rank 0's socket where `listener.bind` has made it already; taken over.
    answered: whether name servers answer; where they do not, none is asked from here on.

    Raises TrainingError with the rank, the address and what to do.
    """
    seal = Seal.from_environ(environ)
    if env.world_size == 1:
        return RunStore(_PREFIX, HashStore(), seal)
    deadline = time.monotonic() + timeout
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agents = _join(env, deadline, answered)
        if env.rank == 0:
            return _open_round(agents, env, seal, timeout)
        return _enter_round(agents, env, seal, timeout)
    if env.rank == 0:
        store = RunStore(_PREFIX, _listen(env, environ, timeout, bound, answered), seal)
        _identify(store)
    else:
        store = RunStore(_PREFIX, _join(env, deadline, answered), seal)
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


def tell(store: Store, key: str, content: Mapping[str, Any]) -> None:
    """Leave a message for other ranks of this run."""
    _put(store, key, dict(content))


def ask(store: Store, env: DistEnv, key: str, what: str) -> dict[str, Any] | None:
    """A message that was left before now, or None; raises TrainingError for a stranger's."""
    return _take(store, env, key, what) if store.check([key]) else None


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


def _listen(
    env: DistEnv,
    environ: Mapping[str, str],
    timeout: float,
    bound: socket.socket | None,
    answered: Callable[[], bool],
) -> Store:
    bound = bound or listener.bind(env, environ)
    assert bound is not None, "this rank listens"
    silent = not answered()
    with lookups.without_name_servers() if silent else nullcontext():
        if silent:
            _have_torch_ask_nobody()
        store: Store = TCPStore(
            _own_address(bound),
            env.master_port,
            None,  # older versions of torch sleep up to a millisecond for each rank they know of
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=bound.detach(),
        )
    return store


def _own_address(bound: socket.socket) -> str:
    """Where rank 0 itself reaches its store: no name to look up, and no other host's way to it."""
    address = ipaddress.ip_address(str(bound.getsockname()[0]))
    if not address.is_unspecified:
        return str(address)
    # A socket for both kinds of addresses takes IPv4 as well.
    return "127.0.0.1"


def _have_torch_ask_nobody() -> None:
    """Let torch find now that name servers do not answer, before a rank waits for it.

    It looks up every peer's name, and gives that up for good after the first that is not answered
    (c10d's formatSockAddr, since torch 2.9). In this thread nobody is asked, so it takes no time;
    the thread in which rank 0's store serves the others would wait. The peer is an IPv4 loopback,
    which every hosts file has.
    """
    with contextlib.suppress(RuntimeError, OSError):
        bound = socket.create_server(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        TCPStore(
            "127.0.0.1", port, 1, is_master=True, wait_for_workers=False,
            master_listen_fd=bound.detach(),
        )  # fmt: skip


def _join(env: DistEnv, deadline: float, answered: Callable[[], bool]) -> Store:
    address = _await_listener(env, deadline)
    return _connect(env, address, max(deadline - time.monotonic(), 1.0), answered)


def _await_listener(env: DistEnv, deadline: float) -> str:
    """Return the master's numeric address once somebody listens there.

    The kernel accepts the connection as soon as rank 0 has bound its socket, which it does first
    of all; so this asks again only where rank 0's process began later, and the pauses are short.
    """
    where = f"{env.master_addr}:{env.master_port}"
    pause = 0.02
    while True:
        try:
            address = (env.master_addr, env.master_port)
            with socket.create_connection(address, timeout=5.0) as probe:
                return str(probe.getpeername()[0])
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
        time.sleep(pause)  # rank 0 has not begun: there is no event to wait for
        pause = min(pause * 1.5, 0.5)


def _connect(env: DistEnv, address: str, seconds: float, answered: Callable[[], bool]) -> Store:
    def connect() -> Store:
        with nullcontext() if answered() else lookups.without_name_servers():
            store: Store = TCPStore(
                address,
                env.master_port,
                None,
                is_master=False,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
            )
        return store

    began = time.monotonic()
    try:
        return bounded(connect, seconds)
    except (TimeoutError, RuntimeError) as error:
        if not _somebody_listens(env):
            raise PeerError(
                f"rank {env.rank} on {socket.gethostname()} reached rank 0 at {env.master_addr}:"
                f"{env.master_port}, but it has ended since. Its log says why."
            ) from None
        seen = f": {error}" if str(error) else f" within {time.monotonic() - began:.0f} s"
        raise TrainingError(
            f"rank {env.rank} on {socket.gethostname()}: something listens at "
            f"{env.master_addr}:{env.master_port}, but it does not answer as rank 0's store "
            f"does{seen}. Another program holds the port: set MASTER_PORT to a free one; or rank 0 "
            "is still starting, as its log tells."
        ) from None


def _somebody_listens(env: DistEnv) -> bool:
    try:
        socket.create_connection((env.master_addr, env.master_port), timeout=5.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass
    return True


def _open_round(agents: Store, env: DistEnv, seal: Seal, timeout: float) -> RunStore:
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


def _enter_round(agents: Store, env: DistEnv, seal: Seal, timeout: float) -> RunStore:
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


def _round(agents: Store, number: int, seal: Seal) -> RunStore:
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
    except UnprovenError as error:
        content = error.content
        if content.get("run") == store.seal.run:
            hint = f" They differ in {NONCE}" + ("." if store.seal.key else ", not set here.")
    except ValueError:
        raise _strange(env, "what names the run", message) from None
    theirs = printable(str(content.get("run", ""))) or "no Slurm step"
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
    except UnprovenError:
        raise TrainingError(
            f"rank {env.rank}: {what} in the store at {env.master_addr}:{env.master_port} lacks "
            "the proof that it comes from this run: its writer was not started with this "
            f"attempt's {NONCE}. Start all ranks from one script; if a stranger reached the port, "
            "set MASTER_PORT to another."
        ) from None
    except ValueError:
        raise _strange(env, what, message) from None


def _strange(env: DistEnv, what: str, message: bytes) -> TrainingError:
    return TrainingError(
        f"rank {env.rank}: {what} in the store at {env.master_addr}:{env.master_port} is not what "
        f"a rank writes: {printable(message.decode(errors='replace'))}. Somebody else reached "
        "the port: set MASTER_PORT to another."
    )


def _seal_of(store: Store) -> Seal:
    assert isinstance(store, RunStore), "not from open_store"
    return store.seal

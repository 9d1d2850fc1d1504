"""Where the ranks meet before torch's process group: a store, a roll call, one verdict for all.

Every wait has a deadline of its own. torch's TCPStore alone would hang for minutes on a listener
that is no store, and could not say which rank never came.
"""

import errno
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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


class PeerError(TrainingError):
    """This rank fails only because another one did; it is not the first to be named."""

    peer_lost = True


def open_store(env: DistEnv, environ: Mapping[str, str], timeout: float) -> Store:
    """Rank 0 listens at the master address and the others connect, within `timeout` seconds.

    Under a torchrun agent, which listens there itself, all connect. A single process needs no
    port. Raises TrainingError with the rank, the address and what to do.
    """
    if env.world_size == 1:
        alone: Store = HashStore()
        return alone
    deadline = time.monotonic() + timeout
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: Store
    if env.rank == 0 and not agent:
        store = _listen(env, timeout)
    else:
        _await_listener(env, deadline)
        store = _connect(env, max(deadline - time.monotonic(), 1.0))
    # torchrun starts failed workers anew against the same store.
    store = PrefixStore(f"clusterddp/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    _check_identity(store, env, environ, deadline)
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
    store.set(f"hello/{env.rank}", json.dumps(dict(hello)))
    if env.rank == 0:
        try:
            verdict = decide(_roll_call(store, env, timeout))
        except ClusterDDPError as error:
            _call_off(store, env, str(error))
            raise
        except BaseException:
            _call_off(store, env, "its log says why.")
            raise
        store.set("verdict", json.dumps(verdict))
        return verdict
    try:
        _wait(store, ["verdict"], timeout + _GRACE_SECONDS)
    except dist.DistStoreError:
        raise PeerError(
            f"rank {env.rank} met rank 0 at {env.master_addr}:{env.master_port}, but was not told "
            f"to start within {timeout + _GRACE_SECONDS:g} s. The log of rank 0 says what it did."
        ) from None
    content: dict[str, Any] = json.loads(store.get("verdict"))
    if "error" in content:
        store.set(f"heard/{env.rank}", "")
        raise PeerError(f"rank 0 called the start off: {content['error']}")
    return content


def decline(store: Store, env: DistEnv, error: BaseException) -> None:
    """Tell rank 0, which would wait, that this rank cannot take part; rank 0 tells all others."""
    if env.rank == 0:
        _call_off(store, env, str(error))
    else:
        store.set(f"hello/{env.rank}", json.dumps({"declines": str(error)}))


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


def _check_identity(
    store: Store, env: DistEnv, environ: Mapping[str, str], deadline: float
) -> None:
    """Refuse the store of another job, which a reused port can lead to."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
    own = " ".join(f"{name}={environ[name]}" for name in names if name in environ)
    if env.rank == 0:
        store.set("identity", own)
        return
    try:
        _wait(store, ["identity"], max(deadline - time.monotonic(), 1.0))
    except dist.DistStoreError:
        raise PeerError(
            f"rank {env.rank} waited for rank 0 at {env.master_addr}:{env.master_port}, but rank "
            "0 did not come. Its log says whether it started."
        ) from None
    seen = store.get("identity").decode()
    if seen != own:
        raise TrainingError(
            f"rank {env.rank} reached another job's rank 0 at {env.master_addr}:{env.master_port}: "
            f"that one is {seen or 'no Slurm step'}, this one {own or 'no Slurm step'}. "
            "Set MASTER_PORT to another port for this job."
        )


def _roll_call(store: Store, env: DistEnv, timeout: float) -> list[dict[str, Any]]:
    """Every rank's hello, in the order of the ranks."""
    keys = [f"hello/{rank}" for rank in range(env.world_size)]
    try:
        _wait(store, keys, timeout)
    except dist.DistStoreError:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise TrainingError(
            f"{len(absent)} of {env.world_size} ranks did not come to "
            f"{env.master_addr}:{env.master_port} within {timeout:g} s: {_listing(absent)}. "
            "Their logs say whether they started; --rendezvous-timeout makes rank 0 wait longer."
        ) from None
    hellos = [json.loads(store.get(key)) for key in keys]
    for rank, hello in enumerate(hellos):
        if "declines" in hello:
            raise PeerError(f"rank {rank} cannot take part: {hello['declines']}")
        if hello["world_size"] != env.world_size:
            raise TrainingError(
                f"rank {rank} was started with a world size of {hello['world_size']}, rank 0 with "
                f"{env.world_size}. Give every rank the same WORLD_SIZE."
            )
    return hellos


def _call_off(store: Store, env: DistEnv, reason: str) -> None:
    """Publish an error, and stay until those who have come have heard it."""
    store.set("verdict", json.dumps({"error": reason}))
    present = [rank for rank in range(1, env.world_size) if store.check([f"hello/{rank}"])]
    waiting = [rank for rank in present if b"declines" not in store.get(f"hello/{rank}")]
    if waiting:
        try:
            _wait(store, [f"heard/{rank}" for rank in waiting], 2.0)
        except (TrainingError, dist.DistStoreError):
            pass  # they find the store gone, which tells them as much


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

"""The store at the master address: rank 0 listens there, and the others connect.

torch's TCPStore alone would hang for minutes on a listener that is no store.
"""

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import Store

from clusterddp.distributed import listener, name_lookups
from clusterddp.distributed.timeout import bounded
from clusterddp.errors import PeerError, TrainingError
from clusterddp.ranks.dist_env import DistEnv

_NAMELESS = "127.93.41.7"  # Linux answers on all of 127.0.0.0/8


def listen(
    env: DistEnv,
    environ: Mapping[str, str],
    timeout: float,
    bound: socket.socket | None,
    answered: Callable[[], bool],
) -> Store:
    """Rank 0's side; the arguments are those of `rendezvous.open_store`."""
    bound = bound or listener.bind(env, environ)
    assert bound is not None, "this rank listens"
    silent = not answered()
    with name_lookups.without_name_servers() if silent else nullcontext():
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


def connect(env: DistEnv, deadline: float, answered: Callable[[], bool]) -> Store:
    """The other ranks' side: connect by `deadline`, a moment of the monotonic clock.

    Raises PeerError where nobody listens until then, and TrainingError where the master address
    cannot be looked up or what listens is no store.
    """
    address = _await_listener(env, deadline)
    return _connect_to(env, address, max(deadline - time.monotonic(), 1.0), answered)


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
    the thread in which rank 0's store serves the others would wait. The peer is a loopback address
    that no hosts file has: torch asks for its IPv6 form, ::ffff:127.…, by which glibc 2.41 finds
    127.0.0.1 there, and 2.36 does not.
    """
    with contextlib.suppress(RuntimeError, OSError):
        bound = socket.create_server((_NAMELESS, 0))
        port = bound.getsockname()[1]
        TCPStore(
            _NAMELESS, port, 1, is_master=True, wait_for_workers=False,
            master_listen_fd=bound.detach(),
        )  # fmt: skip


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


def _connect_to(env: DistEnv, address: str, seconds: float, answered: Callable[[], bool]) -> Store:
    def connect() -> Store:
        with nullcontext() if answered() else name_lookups.without_name_servers():
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

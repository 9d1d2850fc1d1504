"""Opens torch's store at the master address: rank 0 listens, the others connect.

torch's TCPStore hangs for minutes on a listener that is not a store. torch takes seconds to
import, so rank 0's socket is bound before: the kernel then accepts the other ranks' connections
and none of them has to retry.

torch looks up the name of the address it connects to, for its messages (c10d's formatSockAddr),
and gloo looks up this host's name. On an isolated compute node without name servers, each lookup
that no hosts file answers takes 5 to 30 seconds (resolv.conf(5): timeout x attempts x name
servers). Lookups therefore start early, during the imports, and unanswered ones are not repeated.
"""

import array
import ctypes
import errno
import fcntl
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from clusterddp.errors import PeerError, TrainingError
from clusterddp.ranks.dist_env import DistEnv

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

_BACKLOG = 2048
# netdevice(7): all IPv4 addresses of this host, as `struct ifreq`: the name of the interface, then
# a struct sockaddr_in, whose address is its bytes 4 to 8.
_SIOCGIFCONF = 0x8912
_REQUEST_BYTES, _NAME_BYTES, _MOST = 40, 16, 256
_NAMELESS = "127.93.41.7"  # Linux answers on all of 127.0.0.0/8


def bind(env: DistEnv, environ: Mapping[str, str]) -> socket.socket | None:
    """Bind the socket on which this rank listens; None if it does not listen.

    Binds every address, because the others may know this host by any of them, or only the
    loopback. Under a torchrun agent the agent listens, and a single process needs no port. Raises
    TrainingError with the port and the remedy.
    """
    agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if env.rank or env.world_size == 1 or agents:
        return None
    try:
        return _bind(env)
    except OSError as error:
        cause = f"{error.strerror}. Set MASTER_PORT to a port from 1024 to 65535."
        if error.errno == errno.EADDRINUSE:
            cause = (
                "another run or a second rank 0 uses the port. Give every rank another "
                "--master-port (MASTER_PORT); in a job, unset MASTER_PORT to derive one."
            )
        raise TrainingError(
            f"rank 0 cannot listen on port {env.master_port} of {socket.gethostname()}: "
            f"{cause} [CD0905]"
        ) from None


def listen(
    env: DistEnv,
    environ: Mapping[str, str],
    timeout: float,
    bound: socket.socket | None,
    answered: Callable[[], bool],
) -> "Store":
    """Open the store as rank 0; the arguments are those of `rendezvous.open_store`."""
    bound = bound or bind(env, environ)
    assert bound is not None, "this rank listens"
    silent = not answered()
    with without_name_servers() if silent else nullcontext():
        if silent:
            _have_torch_ask_nobody()
        return _tcp_store(_own_address(bound), env.master_port, timeout, bound)


def connect(env: DistEnv, deadline: float, answered: Callable[[], bool]) -> "Store":
    """Open the store as another rank: connect by `deadline`, a time of the monotonic clock.

    Raises PeerError if nothing listens by then, and TrainingError if the master address cannot be
    looked up or another program listens at it.
    """
    address = _await_listener(env, deadline)
    seconds = max(deadline - time.monotonic(), 1.0)
    began = time.monotonic()
    try:
        return client(address, env.master_port, seconds, ask_name_servers=answered())
    except (TimeoutError, RuntimeError) as error:
        try:
            with suppress(TimeoutError):
                listener_address(env)
        except RuntimeError:
            raise PeerError(
                f"rank {env.rank} on {socket.gethostname()} reached rank 0 at {env.master_addr}:"
                f"{env.master_port}, but it has ended since. See its log. [CD0903]"
            ) from None
        answer = f": {error}" if str(error) else f" within {time.monotonic() - began:.0f} s"
        raise TrainingError(
            f"rank {env.rank} on {socket.gethostname()}: the listener at "
            f"{env.master_addr}:{env.master_port} does not respond like rank 0's store"
            f"{answer}. Another program uses the port, or rank 0 is still starting: see its log, "
            "or set MASTER_PORT to a free port. [CD0906]"
        ) from None


def client(address: str, port: int, seconds: float, *, ask_name_servers: bool) -> "Store":
    """Connect to a store. Raises TimeoutError or RuntimeError if none responds in time."""

    def reach() -> "Store":
        with nullcontext() if ask_name_servers else without_name_servers():
            return _tcp_store(address, port, seconds)

    return bounded(reach, seconds)


def listener_address(env: DistEnv) -> str:
    """Return the numeric address of what listens at the master address.

    Raises RuntimeError if nothing does, because torch would try for long, and TimeoutError if the
    address cannot be looked up or reached for now.
    """
    try:
        return _reach(env)
    except ConnectionRefusedError as error:
        raise RuntimeError(error.strerror) from None
    except OSError as error:
        raise TimeoutError(error.strerror or error) from None


def bounded(call: Callable[[], T], seconds: float) -> T:
    """Return the result of `call`; raise TimeoutError and abandon it after `seconds`.

    It runs in a separate thread, so that Ctrl-C works while torch waits in C++.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # raised in the caller below
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError
    return outcome[0]


class Lookups:
    """Name lookups of a rendezvous, started early in background threads."""

    def __init__(self, env: DistEnv) -> None:
        self.master_answered = False
        """Set once the lookup of the master's name is done, with or without a result."""
        self._env, self._own_name_is_known = env, False
        for look_up in (self._look_up_master, self._look_up_own_name):
            threading.Thread(target=look_up, name="look-up", daemon=True).start()

    def gloo_interface(self) -> str:
        """Find the network interface for gloo if this host's name has no usable address.

        gloo would fall back to the loopback, which no other host reaches. Empty if gloo needs no
        interface or none is known.
        """
        return "" if self._own_name_is_known else _interface_towards(self._env)

    def _look_up_master(self) -> None:
        with suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(self._env.master_addr, self._env.master_port)
            _look_up_name(str(found[0][4][0]))
        self.master_answered = True

    def _look_up_own_name(self) -> None:
        """Look up a bindable address of this host's name, as gloo does."""
        with suppress(OSError, UnicodeError):
            for family, kind, protocol, _, where in socket.getaddrinfo(
                socket.gethostname(), None, type=socket.SOCK_STREAM
            ):
                with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                    probe.bind(where)
                    self._own_name_is_known = True
                    return


def name_servers_answer(address: str, seconds: float) -> bool:
    """Return whether the lookup of an address's name ends within `seconds`, found or not."""
    try:
        bounded(partial(_look_up_name, address), seconds)
    except OSError as error:
        return not isinstance(error, TimeoutError)
    return True


def _look_up_name(address: str) -> None:
    # The same query as torch's, which prefers IPv6. Not getnameinfo, for which Python 3.10 stops
    # all threads.
    socket.gethostbyaddr(address if ":" in address else f"::ffff:{address}")


@contextmanager
def without_name_servers() -> Iterator[None]:
    """Make this thread's lookups read only the hosts file.

    Sets the resolver's per-thread settings (resolver(3), `_res.retry`); only glibc has them.
    """
    try:
        libc = ctypes.CDLL(None)
        state = libc.__res_state
        state.restype = ctypes.POINTER(ctypes.c_int)
        libc.__res_init()
        settings = state()
    except (OSError, AttributeError):
        yield
        return
    before = settings[1]  # struct __res_state { int retrans; int retry; …
    settings[1] = 0
    try:
        yield
    finally:
        settings[1] = before


def _bind(env: DistEnv) -> socket.socket:
    with suppress(ValueError):  # a name, not an address
        address = ipaddress.ip_address(env.master_addr)
        if address.is_loopback:
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            where = (env.master_addr, env.master_port)
            return socket.create_server(where, family=family, backlog=_BACKLOG)
    dual = socket.has_dualstack_ipv6() and not _is_ipv4(env.master_addr)
    return socket.create_server(
        ("", env.master_port),
        family=socket.AF_INET6 if dual else socket.AF_INET,
        dualstack_ipv6=dual,
        backlog=_BACKLOG,
    )


def _is_ipv4(master_addr: str) -> bool:
    """Return whether the other ranks reach this host only by IPv4, according to its lookups.

    A dual-stack socket shows an IPv4 peer as ::ffff:10.0.0.1. torch looks up each peer's name
    (c10d's formatSockAddr), and no hosts file has addresses of that form, so that every lookup
    would go to a name server.
    """
    try:
        entries = socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    # A host that maps its name only to the loopback (Debian's 127.0.1.1) does not know.
    return all(address.version == 4 and not address.is_loopback for address in addresses)


def _tcp_store(
    address: str, port: int, seconds: float, bound: socket.socket | None = None
) -> "Store":
    """Connect to a store, or serve one on a bound socket, which it takes over."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, unlisted

    minor = tuple(map(int, torch.__version__.split(".")[:2]))
    store: Store = TCPStore(
        address,
        port,
        None,  # older versions of torch sleep up to a millisecond per known rank
        is_master=bound is not None,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=bound.detach() if bound else None,
        use_libuv=minor >= (2, 8),  # before, libuv's server refuses a bound socket
    )
    return store


def _own_address(bound: socket.socket) -> str:
    """Return a local address for rank 0 to reach its store without a lookup."""
    address = ipaddress.ip_address(str(bound.getsockname()[0]))
    # A dual-stack socket accepts IPv4 as well.
    return "127.0.0.1" if address.is_unspecified else str(address)


def _have_torch_ask_nobody() -> None:
    """Make torch give up name lookups now, before a rank has to wait for one.

    torch looks up every peer's name and stops permanently after the first failure (c10d's
    formatSockAddr, since torch 2.9). This thread asks no name server, so the failure is immediate;
    the thread that serves rank 0's store would wait. The peer is a loopback address that no hosts
    file has: torch looks up its IPv6 form, ::ffff:127.…, for which glibc 2.41 would find 127.0.0.1
    in the hosts file, and 2.36 would not.
    """
    with suppress(RuntimeError, OSError):
        bound = socket.create_server((_NAMELESS, 0))
        _tcp_store(_NAMELESS, bound.getsockname()[1], 300, bound)


def _await_listener(env: DistEnv, deadline: float) -> str:
    """Return the master's numeric address once something listens at it.

    The kernel accepts connections as soon as rank 0 has bound its socket, which it does first.
    Retries are therefore needed only if rank 0 starts later, and the pauses are short.
    """
    pause = 0.02
    while True:
        try:
            return _reach(env)
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN or time.monotonic() > deadline:
                raise TrainingError(
                    f"rank {env.rank} on {socket.gethostname()} cannot look up the master address "
                    f"{env.master_addr!r}: {error.strerror}. Set MASTER_ADDR to a name or address "
                    "of rank 0's host that this host knows. [CD0904]"
                ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"rank {env.rank} on {socket.gethostname()} waited for rank 0 at "
                    f"{env.master_addr}:{env.master_port}, but got no answer: "
                    f"{error.strerror or error}. Rank 0 has not started (see its log), or a "
                    "firewall blocks the port. [CD0903]"
                ) from None
        time.sleep(pause)  # there is no event for the start of rank 0
        pause = min(pause * 1.5, 0.5)


def _reach(env: DistEnv) -> str:
    with socket.create_connection((env.master_addr, env.master_port), timeout=5.0) as probe:
        # With the scope of a link-local one, which getpeername omits.
        numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
        return socket.getnameinfo(probe.getpeername(), numeric)[0]


def _interface_towards(env: DistEnv) -> str:
    """Return the interface of the IPv4 address by which this host reaches the master, if any."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((env.master_addr, env.master_port))  # sends nothing
        address = probe.getsockname()[0]
        table = array.array("B", bytes(_REQUEST_BYTES * _MOST))
        where, size = table.buffer_info()
        request = struct.pack("iP", size, where)  # struct ifconf
        filled, _ = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
        for begin in range(0, filled, _REQUEST_BYTES):
            entry = table[begin : begin + _REQUEST_BYTES].tobytes()
            if socket.inet_ntoa(entry[_NAME_BYTES + 4 : _NAME_BYTES + 8]) == address:
                return entry[:_NAME_BYTES].partition(b"\0")[0].decode()
    return ""

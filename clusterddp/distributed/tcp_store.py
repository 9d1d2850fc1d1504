"""Opens torch's store at the master address: rank 0 listens there, and the others connect.

torch's TCPStore alone would hang for minutes on a listener that is no store. torch takes seconds to
import, so rank 0's socket is bound before: from then on the kernel accepts the other ranks'
connections, and none of them has to try again.

torch looks up the name of the address it connects to, for its messages (c10d's formatSockAddr),
and gloo the addresses of this host's own name. Where no hosts file knows them and the name servers
do not answer, as on many an isolated compute node, each such look-up lasts 5 to 30 seconds
(resolv.conf(5): timeout x attempts x name servers). So they are made early, beside the imports;
what is not answered when these are done is not asked again.
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
from typing import TYPE_CHECKING, TypeVar

from clusterddp.errors import PeerError, TrainingError
from clusterddp.ranks.dist_env import DistEnv

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_BACKLOG = 2048
# netdevice(7): all IPv4 addresses of this host, as `struct ifreq`: the name of the interface, then
# a struct sockaddr_in, whose address is its bytes 4 to 8.
_SIOCGIFCONF = 0x8912
_REQUEST_BYTES, _NAME_BYTES, _MOST = 40, 16, 256
_NAMELESS = "127.93.41.7"  # Linux answers on all of 127.0.0.0/8


def bind(env: DistEnv, environ: Mapping[str, str]) -> socket.socket | None:
    """Bind the socket on which this rank listens; None where it is not the one that does.

    On every address, as the others may know this host by any of them; or on the loopback alone.
    Under a torchrun agent the agent listens, and a single process needs no port. Raises
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
                "the port is in use: another run, or a second rank 0. Give every rank another "
                "--master-port (MASTER_PORT); in a job unset MASTER_PORT to have one derived."
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
    """Open the store as another rank: connect by `deadline`, a moment of the monotonic clock.

    Raises PeerError where nobody listens until then, and TrainingError where the master address
    cannot be looked up or where another program listens there.
    """
    address = _await_listener(env, deadline)
    seconds = max(deadline - time.monotonic(), 1.0)
    began = time.monotonic()
    try:
        return client(address, env.master_port, seconds, ask_name_servers=answered())
    except (TimeoutError, RuntimeError) as error:
        if not _somebody_listens(env):
            raise PeerError(
                f"rank {env.rank} on {socket.gethostname()} reached rank 0 at {env.master_addr}:"
                f"{env.master_port}, but it has ended since. Its log says why. [CD0903]"
            ) from None
        answer = f": {error}" if str(error) else f" within {time.monotonic() - began:.0f} s"
        raise TrainingError(
            f"rank {env.rank} on {socket.gethostname()}: something listens at "
            f"{env.master_addr}:{env.master_port}, but it does not answer as rank 0's store "
            f"does{answer}. Another program holds the port: set MASTER_PORT to a free one; or rank "
            "0 is still starting, as its log tells. [CD0906]"
        ) from None


def client(address: str, port: int, seconds: float, *, ask_name_servers: bool = True) -> "Store":
    """Connect to a store; raises TimeoutError or RuntimeError where none answers in time."""

    def reach() -> "Store":
        with nullcontext() if ask_name_servers else without_name_servers():
            return _tcp_store(address, port, seconds)

    return bounded(reach, seconds)


def bounded(call: Callable[[], T], seconds: float) -> T:
    """Return the result of `call`; raise TimeoutError when it takes longer, leaving it behind.

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


class Lookups:
    """Look-ups that a rendezvous of the ranks leads to, in threads that nothing waits for."""

    def __init__(self, env: DistEnv) -> None:
        self.master_answered = False
        """True once the look-up of the master's name is over, be it that there is none."""
        self._env, self._own_name_is_known = env, False
        for look_up in (self._look_up_master, self._look_up_own_name):
            threading.Thread(target=look_up, name="look-up", daemon=True).start()

    def gloo_interface(self) -> str:
        """Find the network interface to name to gloo, where this host's own name is of no use.

        gloo would fall back to the loopback, on which no other host reaches it. Empty where it
        needs none, or none can be told.
        """
        return "" if self._own_name_is_known else _interface_towards(self._env)

    def _look_up_master(self) -> None:
        with suppress(OSError, UnicodeError):
            address = str(socket.getaddrinfo(self._env.master_addr, self._env.master_port)[0][4][0])
            # In the form in which torch asks: it connects by IPv6 where it can. Not getnameinfo,
            # for which Python 3.10 stops all threads.
            socket.gethostbyaddr(address if ":" in address else f"::ffff:{address}")
        self.master_answered = True

    def _look_up_own_name(self) -> None:
        """Look up, as gloo does, an address of this host's name to which a socket can be bound."""
        with suppress(OSError, UnicodeError):
            for family, kind, protocol, _, where in socket.getaddrinfo(
                socket.gethostname(), None, type=socket.SOCK_STREAM
            ):
                with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                    probe.bind(where)
                    self._own_name_is_known = True
                    return


@contextmanager
def without_name_servers() -> Iterator[None]:
    """Have this thread's look-ups read the hosts file and ask nobody.

    Sets the resolver's own per-thread settings (resolver(3), `_res.retry`); another C library than
    glibc goes on asking.
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
    with suppress(ValueError):  # a name, and no address
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
    """Return whether the others know this host by IPv4 alone, as far as this host can tell.

    A socket for both kinds shows an IPv4 peer as ::ffff:10.0.0.1. Of each peer torch looks up the
    name (c10d's formatSockAddr), and no hosts file has addresses of that form: every one of these
    look-ups would go to a name server.
    """
    try:
        entries = socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    # A host that knows itself by its loopback alone (Debian's 127.0.1.1) cannot tell.
    return all(address.version == 4 and not address.is_loopback for address in addresses)


def _tcp_store(
    address: str, port: int, seconds: float, bound: socket.socket | None = None
) -> "Store":
    """Connect to a store, or serve one on a bound socket, which is taken over."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, unlisted

    store: Store = TCPStore(
        address,
        port,
        None,  # older versions of torch sleep up to a millisecond for each rank they know
        is_master=bound is not None,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=bound.detach() if bound else None,
    )
    return store


def _own_address(bound: socket.socket) -> str:
    """Give rank 0's own way to its store: no name to look up, and no other host's way to it."""
    address = ipaddress.ip_address(str(bound.getsockname()[0]))
    # A socket for both kinds of addresses takes IPv4 as well.
    return "127.0.0.1" if address.is_unspecified else str(address)


def _have_torch_ask_nobody() -> None:
    """Let torch find now that name servers do not answer, before a rank waits for it.

    It looks up every peer's name, and gives that up for good after the first that is not answered
    (c10d's formatSockAddr, since torch 2.9). In this thread nobody is asked, so it takes no time;
    the thread in which rank 0's store serves the others would wait. The peer is a loopback address
    that no hosts file has: torch asks for its IPv6 form, ::ffff:127.…, by which glibc 2.41 finds
    127.0.0.1 there, and 2.36 does not.
    """
    with suppress(RuntimeError, OSError):
        bound = socket.create_server((_NAMELESS, 0))
        _tcp_store(_NAMELESS, bound.getsockname()[1], 300, bound)


def _await_listener(env: DistEnv, deadline: float) -> str:
    """Return the master's numeric address once somebody listens there.

    The kernel accepts the connection as soon as rank 0 has bound its socket, which it does first
    of all; so this tries again only where rank 0's process began later, and the pauses are short.
    """
    address, pause = (env.master_addr, env.master_port), 0.02
    while True:
        try:
            with socket.create_connection(address, timeout=5.0) as probe:
                return str(probe.getpeername()[0])
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
                    f"{address[0]}:{address[1]}, but nobody answered: {error.strerror or error}. "
                    "The log of rank 0 says whether it started; a firewall between the hosts looks "
                    "the same. [CD0903]"
                ) from None
        time.sleep(pause)  # rank 0 has not begun: there is no event to wait for
        pause = min(pause * 1.5, 0.5)


def _somebody_listens(env: DistEnv) -> bool:
    try:
        socket.create_connection((env.master_addr, env.master_port), timeout=5.0).close()
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)
    return True


def _interface_towards(env: DistEnv) -> str:
    """Find the interface of the IPv4 address from which this host reaches the master, or none."""
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

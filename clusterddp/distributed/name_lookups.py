"""Makes the name look-ups of torch's rendezvous early, so that nobody waits for them.

torch looks up the name of the address it connects to, for its messages (c10d's formatSockAddr),
and gloo the addresses of this host's own name. Where no hosts file knows them and the name servers
do not answer, as on many an isolated compute node, each such look-up lasts 5 to 30 seconds
(resolv.conf(5): timeout x attempts x name servers). Here they are made beside the imports; what is
not answered when these are done is not asked again.
"""

import array
import contextlib
import ctypes
import fcntl
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from clusterddp.ranks.dist_env import DistEnv

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
# netdevice(7): all IPv4 addresses of this host, as `struct ifreq`: the name of the interface, then
# a struct sockaddr_in, whose address is its bytes 4 to 8.
_SIOCGIFCONF = 0x8912
_REQUEST_BYTES, _NAME_BYTES, _MOST = 40, 16, 256


class Lookups:
    """Look-ups that a rendezvous of the ranks leads to, under way."""

    def __init__(self, env: DistEnv) -> None:
        self.env = env
        self._master = _LookUp(lambda: _look_up_master(env))
        self._own = _LookUp(_own_name_is_known)

    @property
    def master_answered(self) -> bool:
        """True once the look-up of the master's name is over, be it that there is none."""
        return self._master.over

    @property
    def own_name_known(self) -> bool:
        """True where this host's name leads to an address of its own."""
        return self._own.answer is True

    def gloo_interface(self) -> str:
        """Find the network interface to name to gloo, where this host's own name is of no use.

        gloo would fall back to the loopback, on which no other host reaches it. Empty where it
        needs none, or none can be told.
        """
        return "" if self.own_name_known else _interface_towards(self.env)


class _LookUp:
    """Look-up in a thread of its own, which nothing waits for."""

    def __init__(self, call: Callable[[], bool]) -> None:
        self.over = False
        self.answer: bool | None = None
        self._call = call
        threading.Thread(target=self._run, name="look-up", daemon=True).start()

    def _run(self) -> None:
        try:
            self.answer = self._call()
        except (OSError, UnicodeError):
            self.answer = False
        self.over = True


@contextlib.contextmanager
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


def _look_up_master(env: DistEnv) -> bool:
    address = str(socket.getaddrinfo(env.master_addr, env.master_port)[0][4][0])
    # In the form in which torch asks: it connects by IPv6 where it can.
    mapped = address if ":" in address else f"::ffff:{address}"
    socket.getnameinfo((mapped, env.master_port, 0, 0), socket.NI_NUMERICSERV)
    return True


def _own_name_is_known() -> bool:
    """Look up, as gloo does, an address of this host's name to which a socket can be bound."""
    for family, kind, protocol, _, where in socket.getaddrinfo(
        socket.gethostname(), None, type=socket.SOCK_STREAM
    ):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
            return True
    return False


def _interface_towards(env: DistEnv) -> str:
    """Find the interface of the IPv4 address from which this host reaches the master, or none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
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
    except OSError:
        pass
    return ""

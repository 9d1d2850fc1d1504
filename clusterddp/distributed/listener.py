"""Rank 0's listening socket, bound before torch is imported: it takes seconds to import.

From then on the kernel accepts the other ranks' connections, so none of them has to ask again.
"""

import errno
import ipaddress
import socket
from collections.abc import Mapping

from clusterddp.errors import TrainingError
from clusterddp.ranks.dist_env import DistEnv

_BACKLOG = 2048


def bind(env: DistEnv, environ: Mapping[str, str]) -> socket.socket | None:
    """The socket on which this rank listens, or None where it is not the one that does.

    On every address, as the others may know this host by any of them; or on the loopback alone.
    Under a torchrun agent the agent listens, and a single process needs no port. Raises
    TrainingError with the port and what to do.
    """
    agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if env.rank or env.world_size == 1 or agents:
        return None
    try:
        return _bind(env)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TrainingError(
                f"rank 0 cannot listen on port {env.master_port} of {socket.gethostname()}: the "
                "port is in use: another run, or a second rank 0. Give every rank another "
                "--master-port (MASTER_PORT); in a job unset MASTER_PORT to have one derived."
            ) from None
        raise TrainingError(
            f"rank 0 cannot listen on port {env.master_port} of {socket.gethostname()}: "
            f"{error.strerror}. Set MASTER_PORT to a port from 1024 to 65535."
        ) from None


def _bind(env: DistEnv) -> socket.socket:
    try:
        address = ipaddress.ip_address(env.master_addr)
    except ValueError:
        address = None
    if address is not None and address.is_loopback:
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
    """Whether the others know this host by IPv4 alone, as far as this host can tell.

    A socket for both kinds shows an IPv4 peer as ::ffff:10.0.0.1. Of each peer torch looks up the
    name (c10d's formatSockAddr), and no hosts file has addresses of that form: every one of these
    look-ups would go to a name server.
    """
    try:
        found = socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    # A host that knows itself by its loopback alone (Debian's 127.0.1.1) cannot tell.
    return all(address.version == 4 and not address.is_loopback for address in addresses)

"""Addresses of the mesh's services, as seen from another service: the route to them, and whether a process listens.

Every function, blocking or not, returns within a time limit.
"""

from __future__ import annotations

import socket

import anyio

from pdmesh.errors import ConfigError
from pdmesh.host import is_loopback

#: Time limit for a host to refuse a connection. A host that is off the network never does.
DIAL_LIMIT_S = 2.0


def split_address(address: str) -> tuple[str, int]:
    """Return the host and port of a gRPC target: ``name:port``, ``dns:///name:port`` or the first of ``ipv4:a:1,b:2``.

    Raises ValueError if there is no port.
    """
    scheme, separator, rest = address.partition(":")
    if separator and scheme in ("dns", "ipv4", "ipv6"):
        address = rest.rpartition("/")[2]
    host, _, port = address.partition(",")[0].rpartition(":")
    if not host:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def own_host_towards(address: str) -> str:
    """Return this host's address on the interface that leads to a service's address, without sending anything.

    Raises ConfigError if the name cannot be resolved now, or leads to this machine's loopback.
    """
    try:
        host, port = split_address(address)
        family, _, _, _, peer = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(peer)
            own = str(route.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot find this host's own address from a route to {address}: {error}") from error
    if is_loopback(own):
        raise ConfigError(f"{address} is reached inside this machine, which does not show its address to others")
    return own


def is_wildcard(host: str) -> bool:
    """Whether a bind to ``host`` listens on all interfaces, so that no peer can dial it."""
    return host in ("", "0.0.0.0", "::", "[::]")


async def is_refused(address: str) -> bool:
    """Whether a connection to ``address`` is refused: the host is up, but no process listens there."""
    try:
        host, port = split_address(address)
        with anyio.move_on_after(DIAL_LIMIT_S):
            async with await anyio.connect_tcp(host, port):
                return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError) as error:
        return isinstance(error.__cause__, ConnectionRefusedError)
    return False

"""Addresses of our services as another service sees them: from where they are dialled, and whether a process listens.

Blocking or not, nothing here waits for longer than a limit.
"""

from __future__ import annotations

import socket

import anyio

from pdmesh.errors import ConfigError
from pdmesh.host import is_loopback

#: For a host to refuse a connection; one that is off the network never does.
DIAL_LIMIT_S = 2.0


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a gRPC target such as ``name:port``, ``dns:///name:port`` or the first of ``ipv4:a:1,b:2``.

    Raises ValueError for what has no port.
    """
    scheme, separator, rest = address.partition(":")
    if separator and scheme in ("dns", "ipv4", "ipv6"):
        address = rest.rpartition("/")[2]
    host, _, port = address.partition(",")[0].rpartition(":")
    if not host:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def own_host_towards(address: str) -> str:
    """Return the address of the interface by which this host reaches a service's. It sends nothing.

    Raises ConfigError if the name cannot be looked up now, or names this machine alone.
    """
    try:
        host, port = split_address(address)
        family, _, _, _, peer = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(peer)
            own = str(route.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"no route to {address} tells this host's own address: {error}") from error
    if is_loopback(own):
        raise ConfigError(f"{address} is reached on this machine alone, which tells nothing of its address to others")
    return own


def is_wildcard(host: str) -> bool:
    """Whether a bind to ``host`` listens on all interfaces, so that it is no address to dial."""
    return host in ("", "0.0.0.0", "::", "[::]")


async def is_refused(address: str) -> bool:
    """Whether a connection to ``address`` is refused: its host lives, but no process listens there any more."""
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

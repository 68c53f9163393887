"""Access to the HTTP edge from browsers.

Any web page can send requests to a server on its reader's machine. The page's owner can also point the page's own name
at that server's address (DNS rebinding) and read the answers. An API key that the page does not know prevents both.
Without keys, a request must name this server by an address or by a name that no other party can own. The request must
also come from a page of this server, or from an allowed origin.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from pdmesh.errors import RequestRejected

_METHODS = b"GET, POST, DELETE, OPTIONS"
_PREFLIGHT_AGE_S = 600


class Origins:
    """Checker of host names and origins.

    ``hosts`` are accepted besides the machine's own names; pages of ``cors`` may read answers.

    Both are lists with commas; ``*`` accepts all.
    """

    def __init__(self, *, hosts: str, cors: str, has_keys: bool) -> None:
        self._hosts = {*_names(hosts), socket.gethostname().lower(), socket.getfqdn().lower()}
        self._cors = _names(cors)
        self._has_keys = has_keys

    def check(self, host: str | None, origin: str | None) -> None:
        """Raise RequestRejected (403) for a foreign host or origin, unless keys are required."""
        if self._has_keys:
            return
        if host is not None and not self._is_ours(host):
            raise RequestRejected(
                f"This server does not accept the host name {host[:200]!r}: add it to gateway.allowed_hosts, or "
                "require API keys (security.api_keys_file).",
                status=403,
                code="unknown_host",
            )
        if origin is not None and not self.may_read(origin) and origin.partition("://")[2] != host:
            raise RequestRejected(
                f"Pages of {origin[:200]!r} may not use this server: add this origin to gateway.cors_origins.",
                status=403,
                code="foreign_origin",
            )

    def may_read(self, origin: str) -> bool:
        """Return whether a browser may show our answers to pages of ``origin``."""
        return "*" in self._cors or origin.lower() in self._cors

    def response_headers(self, origin: str) -> list[tuple[bytes, bytes]]:
        """Return the headers of an answer to a page that `may_read` it."""
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"x-request-id, retry-after, x-ignored-fields"),
            (b"vary", b"origin"),
        ]

    def preflight_headers(self, requested: str | None) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer to a preflight, besides `response_headers`.

        ``requested`` are the headers that the request will have. All are allowed.
        """
        return [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", (requested or "").encode("latin-1")),
            (b"access-control-max-age", str(_PREFLIGHT_AGE_S).encode()),
        ]

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if "*" in self._hosts or name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            # A name without a dot, or under .localhost, belongs to the network or the machine.
            return "." not in name or name.endswith(".localhost")
        return True


def _names(text: str) -> set[str]:
    return {name.strip().lower() for name in text.split(",") if name.strip()}

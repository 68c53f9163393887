"""Names that clients give their sessions, in the headers and fields that agents and benchmarks send today.

A name becomes a hash of the tenant and the name under the mesh's key. So two tenants with one name have two sessions,
and no other process learns a client's text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pdmesh.model import SessionKey, SessionName
from pdmesh.prefixes import PrefixHasher

#: Characters of a name that count.
MAX_NAME_CHARS = 256

#: Headers that name a session, each with the header that names its parent, in the order of precedence.
HEADERS: Final[tuple[tuple[str, str | None], ...]] = (
    ("x-dynamo-session-id", "x-dynamo-parent-session-id"),
    ("x-claude-code-agent-id", "x-claude-code-session-id"),
    ("x-claude-code-session-id", None),
    ("x-session-id", "x-parent-session-id"),
    ("session-id", None),
    ("x-session-affinity", None),
    ("x-smg-routing-key", None),
    ("x-correlation-id", None),
)

#: Header of the last request of a session.
FINAL_HEADER = "x-dynamo-session-final"

#: Leases that ``cache_control.ttl`` can name, in seconds.
LEASES_S: Final = {"5m": 300.0, "1h": 3600.0}


def lease_s(cache_control: Any) -> float:
    """Return the lease that a ``cache_control`` asks for: 5 minutes without ``ttl``, 0 if it is no ephemeral one."""
    if not isinstance(cache_control, dict) or cache_control.get("type") != "ephemeral":
        return 0.0
    ttl = cache_control.get("ttl", "5m")
    return LEASES_S.get(ttl, 0.0) if isinstance(ttl, str) else 0.0


class SessionNames:
    """Maker of one mesh's session keys."""

    def __init__(self, mesh_token: str) -> None:
        self._hasher = PrefixHasher(mesh_token)

    def key(self, tenant: str, name: str) -> SessionKey:
        """Return the key of a tenant's session."""
        words = (word.encode("utf-8", "surrogatepass") for word in (tenant, name[:MAX_NAME_CHARS]))
        return SessionKey(self._hasher.root(b"session", *words))

    def find(
        self, tenant: str, header: Callable[[str], str | None], *fields: str | None, lease_s: float = 0.0
    ) -> SessionName | None:
        """Return the session of a request, with the lease that it asks for; None if it names none.

        Headers precede ``fields``, the values of fields in the order of precedence.
        """
        for own, parent in HEADERS:
            if name := header(own):
                above = None if parent is None else header(parent)
                return SessionName(
                    key=self.key(tenant, name),
                    parent=self.key(tenant, above) if above and above != name else None,
                    is_last=(header(FINAL_HEADER) or "").lower() == "true",
                    lease_s=lease_s,
                )
        given = next(filter(None, fields), None)
        return None if given is None else SessionName(key=self.key(tenant, given), lease_s=lease_s)

"""Roles in certificates: what a service may be, as the authority that signed its certificate says.

A role is a URI among the certificate's subject alternative names, ``spiffe://pdmesh/worker``. A certificate that names
none says nothing of roles: with `SecurityConfig.tls_roles` its owner is refused, else it may be anything.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from pdmesh.wire.rejected_peers import Strangers

PREFIX = "spiffe://pdmesh/"


class ServiceRole(StrEnum):
    """Roles that open streams to others."""

    WORKER = "worker"
    GATEWAY = "gateway"

    @property
    def uri(self) -> str:
        return PREFIX + self


class RoleRule(NamedTuple):
    """Which roles may open a stream of one kind."""

    role: ServiceRole
    is_needed: bool  # also of those whose certificate names no role
    strangers: Strangers  # counts those that may not

    def why_not(self, context: Any) -> str | None:
        """Why the peer of a gRPC call may not, if so. Without TLS of both sides, only the mesh token counts."""
        facts = context.auth_context()
        if "x509_common_name" not in facts and "x509_subject_alternative_name" not in facts:
            return None
        names = [bytes(name).decode(errors="replace") for name in facts.get("x509_subject_alternative_name", ())]
        roles = [name for name in names if name.startswith(PREFIX)]
        if self.role.uri in roles or (not roles and not self.is_needed):
            return None
        return f"the certificate is not a {self.role}'s: it names {', '.join(roles) or 'no role'}, not {self.role.uri}"

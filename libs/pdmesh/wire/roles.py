"""Roles in certificates: the permissions of a service, as set by the authority that signed its certificate.

A role is a URI among the certificate's subject alternative names, ``spiffe://pdmesh/worker``. A certificate without a
role is refused with `SecurityConfig.tls_roles`; otherwise its owner may have any role.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from pdmesh.wire.rejected_peers import RejectedPeers

PREFIX = "spiffe://pdmesh/"


class ServiceRole(StrEnum):
    """Roles of services that open streams to others."""

    WORKER = "worker"
    GATEWAY = "gateway"

    @property
    def uri(self) -> str:
        return PREFIX + self


class RoleRule(NamedTuple):
    """The role that may open a stream of one kind.

    With ``is_needed``, certificates without any role are refused, too. ``rejected_peers`` counts refused peers.
    """

    role: ServiceRole
    is_needed: bool
    rejected_peers: RejectedPeers

    def why_not(self, context: Any) -> str | None:
        """Return why the peer of a gRPC call is refused; None if it is accepted.

        Without mutual TLS every peer is accepted here, because only the mesh token counts.
        """
        facts = context.auth_context()
        if "x509_common_name" not in facts and "x509_subject_alternative_name" not in facts:
            return None
        names = [bytes(name).decode(errors="replace") for name in facts.get("x509_subject_alternative_name", ())]
        roles = [name for name in names if name.startswith(PREFIX)]
        if self.role.uri in roles or (not roles and not self.is_needed):
            return None
        return f"the certificate is not a {self.role}'s: it names {', '.join(roles) or 'no role'}, not {self.role.uri}"

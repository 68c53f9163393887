"""How fast KV moves from one instance to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdmesh.policy.views import InstanceView


class LinkRates(Protocol):
    """Rates of the links between instances."""

    def bytes_per_s(self, source: InstanceView, destination: InstanceView | None) -> float:
        """Return the bytes a second from ``source`` to ``destination``; None: to any other instance."""
        ...


@dataclass(frozen=True, slots=True)
class EqualLinks:
    """Links that all have the configured rate."""

    rate_bytes_per_s: float

    def bytes_per_s(self, source: InstanceView, destination: InstanceView | None) -> float:
        return self.rate_bytes_per_s

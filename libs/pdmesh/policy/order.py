"""Prefill orders."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.model import Request


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served: the core's own tie-break, by arrival and then by id, is the whole order."""

    def key(self, request: Request) -> tuple[float, ...]:
        return ()

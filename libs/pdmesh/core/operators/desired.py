"""Operators' wishes that still hold, for the next scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdmesh.core.operator_events import (
    BatchingChangeRequested,
    BundleChangeRequested,
    OperationRequested,
    OperatorEvent,
    ResizeRequested,
    RollingRequested,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """Operators' wishes that still hold. Stored as JSON: a renamed field must be read under both names.

    None means: the configured bundle, the configured batching mode or the bundle's own, the pools as started.
    `replacements` are of processes that are no instances.
    """

    bundle: str | None = None
    batching: BatchingChangeRequested | None = None
    operations: tuple[OperationRequested, ...] = ()
    pools: ResizeRequested | None = None
    replacements: tuple[OperationRequested, ...] = ()
    rolling: RollingRequested | None = None

    def events(self) -> Iterator[OperatorEvent]:
        """Yield the events that ask for all of it again, in the order in which a core needs them."""
        if self.bundle is not None:
            yield BundleChangeRequested(self.bundle)
        if self.batching is not None:
            yield self.batching
        for requested in self.operations:
            yield replace(requested, again=True)
        for requested in self.replacements:
            yield replace(requested, again=True, of_service=True)
        if self.pools is not None:
            yield replace(self.pools, again=True)
        if self.rolling is not None:
            yield replace(self.rolling, again=True)

"""What operators asked for that still holds: for the scheduler that comes after this one."""

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
    """See the module's docstring. It is kept as JSON: a field that is renamed has to be read under both names."""

    bundle: str | None = None  # None: the configured one
    batching: BatchingChangeRequested | None = None  # None: as configured, or the bundle's own
    operations: tuple[OperationRequested, ...] = ()
    pools: ResizeRequested | None = None  # None: as they were started
    replacements: tuple[OperationRequested, ...] = ()  # of processes that are no instances
    rolling: RollingRequested | None = None

    def events(self) -> Iterator[OperatorEvent]:
        """Ask for all of it again, in the order in which a core has to hear of it."""
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

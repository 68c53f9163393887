"""The decisions of the last minutes, for `pdmesh pool advise`."""

from __future__ import annotations

import msgspec

from pdmesh.decisions import RecentDecisions
from pdmesh.eventlog import Header
from pdmesh.wire.messages import LatestDecisions
from pdmesh_scheduler.observing import Handled


class DecisionKeeper:
    """The latest decisions, in memory. Implements `Observer`."""

    def __init__(self, header: Header, max_decisions: int) -> None:
        """``max_decisions`` is the largest number kept; 0 keeps none."""
        self._header = msgspec.msgpack.encode(msgspec.to_builtins(header))
        self._recent = RecentDecisions(header.bundle, max_decisions)

    def observe(self, handled: Handled) -> None:
        """Add the event and its commands to the latest decisions."""
        self._recent.record(handled.now_s, handled.event, handled.commands)

    def page(self, start: int) -> LatestDecisions:
        """Return a page of decisions from number ``start`` on, or from the oldest one kept if ``start`` was dropped.

        The bundle and the profiles are the mesh's before the oldest decision kept. ``next_start`` is None after the
        last page.
        """
        decisions, next_start = self._recent.page(start)
        before = self._recent.before
        return LatestDecisions(
            header=self._header,
            bundle=before.bundle,
            profiles=tuple(before.profiles.values()),
            decisions=tuple(decisions),
            next_start=next_start,
        )

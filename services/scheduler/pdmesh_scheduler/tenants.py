"""Tenants' use of the mesh: tokens charged to each key in the last minute, and requests that wait and run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from heapq import nlargest

from pdmesh.core.scheduler import SchedulerCore
from pdmesh.core.waiting.fairness import TenantView
from pdmesh.wire.messages import TenantStatus
from pdmesh_scheduler.observing import Handled

#: The recent past in seconds, and the interval at which counters are read.
LATE_S = 60.0
NOTCH_S = 10.0

#: Number of tenants listed alone. `OTHERS` stands for the rest.
MAX_TOLD = 20

#: Name of all other tenants together. No key has this name.
OTHERS = "(others)"


class TenantUsage:
    """Tenants' recent use: the core's counters compared with earlier readings."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core
        self._now_s = 0.0
        self._seen: deque[tuple[float, Mapping[str, int]]] = deque()  # times, and tokens charged by then

    def observe(self, handled: Handled) -> None:
        """Read the counters if `NOTCH_S` have passed since the last reading."""
        self._now_s = handled.now_s
        if not self._seen or handled.now_s >= self._seen[-1][0] + NOTCH_S:
            self._seen.append((handled.now_s, {view.tenant: view.num_tokens for view in self._core.tenants}))
            while len(self._seen) > 1 and self._seen[1][0] <= handled.now_s - LATE_S:
                self._seen.popleft()

    @property
    def statuses(self) -> tuple[TenantStatus, ...]:
        """Statuses of the `MAX_TOLD` largest recent users, the largest first, then of all others together.

        Empty without keys.
        """
        views = self._core.tenants
        if not any(view.tenant for view in views):
            return ()
        used = self._recent_tokens(views)
        total = sum(used.values())
        told = nlargest(MAX_TOLD, views, key=lambda view: (used[view.tenant], view.num_waiting, view.tenant))
        rest = [view for view in views if view not in told] if len(views) > MAX_TOLD else []

        def status(tenant: str, share: int, *views: TenantView) -> TenantStatus:
            num_tokens = sum(used[view.tenant] for view in views)
            return TenantStatus(
                tenant=tenant,
                share=share,
                num_waiting=sum(view.num_waiting for view in views),
                num_running=sum(view.num_running for view in views),
                recent_share=num_tokens / total if total else 0.0,
            )

        statuses = [status(view.tenant, view.share, view) for view in told]
        return (*statuses, status(OTHERS, 0, *rest)) if rest else tuple(statuses)

    def _recent_tokens(self, views: list[TenantView]) -> dict[str, int]:
        """Return the tokens charged to each tenant lately.

        Charges for expected outputs are partly refunded later, so the least number is 0.
        """
        before = self._seen[0][1] if self._seen else {}
        return {view.tenant: max(0, view.num_tokens - before.get(view.tenant, 0)) for view in views}

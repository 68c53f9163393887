"""Responses that are kept, so that the next request can go on from one: in bounded memory, each for its key alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pdmesh_gateway.http.responses.background_responses import EventLog

#: How long a response is kept if there is room.
KEPT_S = 3600.0

#: What a response takes beside its bytes.
_OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponse:
    """A response, as JSON, and what it answered."""

    response_id: str
    response: bytes
    input_items: bytes  # a list: those of its own request
    conversation: bytes  # a list: all items up to its own output
    output_items: Mapping[str, bytes]  # by id
    events: EventLog | None = None  # of one that was answered in the background

    @property
    def num_bytes(self) -> int:
        """Number of bytes that it counts for."""
        items = sum(map(len, self.output_items.values()))
        events = 0 if self.events is None else self.events.num_bytes
        return len(self.response) + len(self.input_items) + len(self.conversation) + items + events + _OVERHEAD_BYTES


@dataclass(slots=True)
class _Shelf:
    """What is kept for one key, the oldest first."""

    responses: OrderedDict[str, tuple[float, KeptResponse]] = field(
        default_factory=OrderedDict[str, tuple[float, KeptResponse]]
    )
    num_bytes: int = 0

    def remove(self, response_id: str) -> int:
        """Return how many bytes that makes free."""
        _, kept = self.responses.pop(response_id)
        self.num_bytes -= kept.num_bytes
        return kept.num_bytes


class KeptResponses:
    """Keeps responses by tenant. Where there is no room, the tenant that has most gives up its oldest."""

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}
        self.num_bytes = 0

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_bytes > 0

    def put(self, tenant: str, kept: KeptResponse) -> None:
        """Keep a response, unless it alone is too large."""
        if kept.num_bytes > self._max_bytes:
            return
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.responses[kept.response_id] = (self._clock(), kept)
        shelf.num_bytes += kept.num_bytes
        self.num_bytes += kept.num_bytes
        self._expire()
        while self.num_bytes > self._max_bytes:
            most = max(self._shelves, key=lambda name: self._shelves[name].num_bytes)
            self._remove(most, next(iter(self._shelves[most].responses)))

    def put_events(self, tenant: str, response_id: str, events: EventLog) -> None:
        """Keep the events of a response with it, if it is kept and there is room for both."""
        if (kept := self.get(tenant, response_id)) is None:
            return
        whole = replace(kept, events=events)
        if whole.num_bytes <= self._max_bytes:
            self._remove(tenant, response_id)
            self.put(tenant, whole)

    def get(self, tenant: str, response_id: str) -> KeptResponse | None:
        """Return a response of the tenant's own; None if it is not kept, or not any more."""
        shelf = self._shelves.get(tenant)
        entry = None if shelf is None else shelf.responses.get(response_id)
        return None if entry is None or entry[0] < self._oldest_s else entry[1]

    def item(self, tenant: str, item_id: str) -> bytes | None:
        """Return an output item of the tenant's own, as JSON; the latest responses are looked at first."""
        shelf = self._shelves.get(tenant)
        if shelf is None:
            return None
        latest = reversed(shelf.responses.values())
        found = (kept.output_items.get(item_id) for kept_s, kept in latest if kept_s >= self._oldest_s)
        return next((item for item in found if item is not None), None)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; False if there is none of the tenant's."""
        if self.get(tenant, response_id) is None:
            return False
        self._remove(tenant, response_id)
        return True

    @property
    def _oldest_s(self) -> float:
        """When those that are not too old were put here, at the earliest."""
        return self._clock() - KEPT_S

    def _expire(self) -> None:
        oldest_s = self._oldest_s
        for tenant, shelf in list(self._shelves.items()):
            while shelf.responses and next(iter(shelf.responses.values()))[0] < oldest_s:
                self._remove(tenant, next(iter(shelf.responses)))

    def _remove(self, tenant: str, response_id: str) -> None:
        shelf = self._shelves[tenant]
        self.num_bytes -= shelf.remove(response_id)
        if not shelf.responses:
            del self._shelves[tenant]

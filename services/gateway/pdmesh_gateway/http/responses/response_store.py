"""Responses that are kept, so that the next request can go on from one: in bounded memory, each for its key alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

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


class ResponseStore:
    """Keeps responses by tenant. Where there is no room, the tenant that has most gives up its oldest."""

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        #: The key is tenant and id; the oldest comes first.
        self._responses: dict[tuple[str, str], tuple[float, KeptResponse]] = {}
        self._items: dict[tuple[str, str], str] = {}  # id of the latest response by tenant and output item
        self._num_bytes: Counter[str] = Counter()  # the key is the tenant

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Number of bytes that all responses count for."""
        return self._num_bytes.total()

    def put(self, tenant: str, kept: KeptResponse) -> None:
        """Keep a response, unless it alone is too large."""
        if kept.num_bytes > self._max_bytes:
            return
        self._responses[tenant, kept.response_id] = (self._clock(), kept)
        self._items.update(((tenant, item_id), kept.response_id) for item_id in kept.output_items)
        self._num_bytes[tenant] += kept.num_bytes
        while next(iter(self._responses.values()))[0] < self._oldest_s:
            self._remove(next(iter(self._responses)))
        while self.num_bytes > self._max_bytes:
            [(most, _)] = self._num_bytes.most_common(1)
            self._remove(next(key for key in self._responses if key[0] == most))

    def put_events(self, tenant: str, response_id: str, events: EventLog) -> None:
        """Keep the events of a response with it, if it is kept and there is room for both."""
        if (kept := self.get(tenant, response_id)) is None:
            return
        whole = replace(kept, events=events)
        if whole.num_bytes <= self._max_bytes:
            self._remove((tenant, response_id))
            self.put(tenant, whole)

    def get(self, tenant: str, response_id: str) -> KeptResponse | None:
        """Return a response of the tenant's own; None if it is not kept, or not any more."""
        kept_s, kept = self._responses.get((tenant, response_id), (-math.inf, None))
        return kept if kept_s >= self._oldest_s else None

    def item(self, tenant: str, item_id: str) -> bytes | None:
        """Return an output item of the tenant's own, as JSON; None if it is not kept, or not any more."""
        kept = self.get(tenant, self._items.get((tenant, item_id), ""))
        return None if kept is None else kept.output_items.get(item_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; False if there is none of the tenant's."""
        if self.get(tenant, response_id) is None:
            return False
        self._remove((tenant, response_id))
        return True

    @property
    def _oldest_s(self) -> float:
        """When those that are not too old were put here, at the earliest."""
        return self._clock() - KEPT_S

    def _remove(self, key: tuple[str, str]) -> None:
        _, kept = self._responses.pop(key)
        for item_id in kept.output_items:
            self._items.pop((key[0], item_id), None)
        self._num_bytes[key[0]] -= kept.num_bytes
        if not self._num_bytes[key[0]]:
            del self._num_bytes[key[0]]

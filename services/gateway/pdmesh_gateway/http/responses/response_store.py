"""Store of responses, which later requests may continue: in bounded memory, separate for each key."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pdmesh_gateway.http.responses.background_responses import EventLog

#: How long a response is stored if there is room.
KEPT_S = 3600.0

#: Memory that a response takes in addition to its bytes.
_OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A stored response as JSON, with its input.

    ``thread`` is the id of the conversation's first response. ``input_items`` is the list of items of the response's
    own request. ``conversation`` is the list of all items up to and including its output. ``output_items`` is by id.
    ``events`` is set for a response in the background.
    """

    response_id: str
    thread: str
    response: bytes
    input_items: bytes
    conversation: bytes
    output_items: Mapping[str, bytes]
    events: EventLog | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the response counts for."""
        items = sum(map(len, self.output_items.values()))
        events = 0 if self.events is None else self.events.num_bytes
        return len(self.response) + len(self.input_items) + len(self.conversation) + items + events + _OVERHEAD_BYTES


class ResponseStore:
    """Store of responses by tenant. If there is no room, the tenant with the most bytes loses its oldest response."""

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        #: Responses by tenant and id, oldest first, with the time of storing.
        self._responses: dict[tuple[str, str], tuple[float, StoredResponse]] = {}
        #: Id of the latest response by tenant and output item.
        self._items: dict[tuple[str, str], str] = {}
        #: Bytes by tenant.
        self._num_bytes: Counter[str] = Counter()

    @property
    def keeps(self) -> bool:
        """Whether anything is stored at all."""
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Number of bytes that all responses count for."""
        return self._num_bytes.total()

    def put(self, tenant: str, kept: StoredResponse) -> None:
        """Store a response in place of one with its id, unless it alone is too large. Remove old ones to make room."""
        if kept.num_bytes > self._max_bytes:
            return
        if (key := (tenant, kept.response_id)) in self._responses:
            self._remove(key)
        self._responses[key] = (self._clock(), kept)
        self._items.update(((tenant, item_id), kept.response_id) for item_id in kept.output_items)
        self._num_bytes[tenant] += kept.num_bytes
        while next(iter(self._responses.values()))[0] < self._oldest_s:
            self._remove(next(iter(self._responses)))
        while self.num_bytes > self._max_bytes:
            [(most, _)] = self._num_bytes.most_common(1)
            self._remove(next(key for key in self._responses if key[0] == most))

    def put_events(self, tenant: str, response_id: str, events: EventLog) -> None:
        """Store the events of a stored response, if there is room for both."""
        if (kept := self.get(tenant, response_id)) is not None:
            self.put(tenant, replace(kept, events=events))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response of the tenant; None if it is not stored or too old."""
        kept_s, kept = self._responses.get((tenant, response_id), (-math.inf, None))
        return kept if kept_s >= self._oldest_s else None

    def item(self, tenant: str, item_id: str) -> bytes | None:
        """Return an output item of the tenant as JSON; None if it is not stored or too old."""
        kept = self.get(tenant, self._items.get((tenant, item_id), ""))
        return None if kept is None else kept.output_items.get(item_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Remove a response of the tenant; return False if there is none."""
        if self.get(tenant, response_id) is None:
            return False
        self._remove((tenant, response_id))
        return True

    @property
    def _oldest_s(self) -> float:
        """Time, by the store's clock in seconds, before which a stored response is too old."""
        return self._clock() - KEPT_S

    def _remove(self, key: tuple[str, str]) -> None:
        _, kept = self._responses.pop(key)
        for item_id in kept.output_items:
            self._items.pop((key[0], item_id), None)
        self._num_bytes[key[0]] -= kept.num_bytes
        if not self._num_bytes[key[0]]:
            del self._num_bytes[key[0]]

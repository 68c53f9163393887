"""Requests whose KV is computed where it cannot stay, and that have no receiver.

A receiver that dies, refuses or times out takes nothing with it: what is computed stays where it is, keeps the rank of
its first offer, and is granted to the next instance with room; or it decodes where it is, if that instance may. It is
computed again only if its own instance fails, if its receivers fail too often, or if none was found for a time limit.
While one waits, room to decode goes to nobody who has no place yet.
"""

from __future__ import annotations

from math import inf

from pdmesh.core.books import Books
from pdmesh.core.openings import Openings
from pdmesh.core.requests import RequestState
from pdmesh.model import RequestKey


class HandOvers:
    """Finds receivers; what has none for ``limit_s`` starts again."""

    def __init__(self, books: Books, limit_s: float) -> None:
        self._books = books
        self._limit_s = limit_s
        self._due_s: dict[RequestKey, float] = {}  # of some that have a receiver again, too
        self._closed: set[str] = set()  # KV groups where somebody waits for room

    @property
    def closed_groups(self) -> set[str]:
        """KV groups whose room to decode is for requests that are computed already."""
        return self._closed if self._books.unreceived else set()

    @property
    def next_deadline_s(self) -> float:
        """Infinite if nobody waits."""
        return min(self._due_s.values(), default=inf)

    def find_receivers(self, openings: Openings, now_s: float) -> None:
        """Give those that have none what room there is, strictly in the order of their first offers."""
        books = self._books
        self._closed.clear()
        self._due_s = {key: self._due_s.get(key, now_s + self._limit_s) for key in books.unreceived}
        for state in sorted(books.unreceived.values(), key=_turn):
            source = books.instances[state.prefill_ids[0]]
            if source.kv_group in self._closed:
                continue
            receiver = openings.decoders.firsts(state.request).get(source.kv_group)
            if receiver is not None:
                books.receive(state, receiver)
            elif source.can_keep(state.request):
                books.keep(state)
            else:
                self._closed.add(source.kv_group)
                continue
            del self._due_s[state.key]
            openings.refresh([source] if receiver is None else [source, receiver])

    def expire(self, now_s: float) -> None:
        """Start those again that nobody took in time."""
        for key in [key for key, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[key]
            if (state := self._books.unreceived.get(key)) is not None:
                self._books.restart(state, f"no instance took its KV for {self._limit_s:g} s")


def _turn(state: RequestState) -> tuple[float, float, str]:
    """By first offer; what is not offered yet comes after that, by arrival."""
    rank = inf if state.rank_of_offer is None else state.rank_of_offer
    return rank, state.request.arrival_s, state.request.request_id

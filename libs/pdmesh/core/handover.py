"""Requests whose KV is computed where it cannot stay, and that have no receiver.

Some are computed ahead of room to decode (`pdmesh.policy.handover`). Others had a receiver: one that dies, refuses or
times out takes nothing with it. What is computed stays where it is, keeps the rank of its first offer, and is granted
to the next instance with room; or it decodes where it is, if that instance may. It is computed again only if its own
instance fails, if its receivers fail too often, or if none was found for a time limit. While one needs room, room to
decode goes to nobody who has no place yet.

KV that waits to move away is bounded on each instance, and that bound holds back new prompts there.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from pdmesh.core.books import Books
from pdmesh.core.decoding import DecodingSums
from pdmesh.core.openings import Openings
from pdmesh.core.receivers import keep, receive
from pdmesh.core.requests import RequestState
from pdmesh.core.state import InstanceBooks
from pdmesh.model import Request, RequestKey, Role
from pdmesh.policy.base import Bundle


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

    def find_receivers(self, openings: Openings, bundle: Bundle, now_s: float) -> None:
        """Give those that need one now what room there is, strictly in the order of their first offers."""
        books = self._books
        self._closed.clear()
        line = sorted(books.unreceived.values(), key=_turn)
        due = [state.key for state in line if state.num_lost_receivers or state.is_computed]
        self._due_s = {key: self._due_s.get(key, now_s + self._limit_s) for key in due}
        for index, state in enumerate(line):
            source = books.instances[state.prefill_ids[0]]
            if source.kv_group in self._closed:
                continue
            receiver = openings.decoders.firsts(state.request).get(source.kv_group)
            if self._may_yet_wait(state, bundle) and not self._needs_room(
                state, source, line[:index], None if receiver is not None else openings.decoders.sums, bundle
            ):
                continue
            if receiver is not None:
                receive(books, state, receiver)
            elif source.can_keep(state.request):
                keep(books, state)
            else:
                self._closed.add(source.kv_group)
                continue
            state.roomed_s = now_s
            self._due_s.pop(state.key, None)
            openings.refresh([source] if receiver is None else [source, receiver])

    def expire(self, now_s: float) -> None:
        """Start those again that nobody took in time."""
        for key in [key for key, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[key]
            if (state := self._books.unreceived.get(key)) is not None:
                self._books.restart(state, f"no instance took its KV for {self._limit_s:g} s")

    # --- ahead of room to decode ---

    def holds_back(self, prefill: InstanceBooks, bundle: Bundle) -> bool:
        """Whether as much KV waits there as may."""
        return not prefill.may_add_waiting(0, bundle.waiting_kv_share)

    def begins_ahead(
        self, request: Request, prefill: InstanceBooks, sums: DecodingSums, bundle: Bundle, now_s: float
    ) -> bool:
        """Whether to compute a prompt there that has no room to decode now."""
        ahead = bundle.run_ahead
        if ahead is None or not self._may_wait(request, prefill, bundle):
            return False
        decoding = sums.decoding(prefill.kv_group, self._books.growth.mean_tokens, request)
        if decoding is None:
            return False
        before = [s.request for s in self._books.unreceived.values() if self._group_of(s) == prefill.kv_group]
        num_requests, num_blocks = len(before) + 1, _num_blocks(prefill, [*before, request])
        return ahead.begins(request, prefill.view, room_s=decoding.room_s(num_requests, num_blocks), now_s=now_s)

    def promises_later(self, request: Request, prefill: InstanceBooks, bundle: Bundle) -> bool:
        """Whether a long prompt leaves the room that there is to those who wait behind it, until it needs it."""
        ahead = bundle.run_ahead
        if ahead is None or not bundle.is_long(request) or len(self._books.queue) < 2:
            return False
        if not self._may_wait(request, prefill, bundle):
            return False
        return not ahead.needs_room(request, 0, _kv_bytes(request, prefill), 0.0)

    def _may_wait(self, request: Request, prefill: InstanceBooks, bundle: Bundle) -> bool:
        return prefill.role is Role.PREFILL and prefill.may_add_waiting(
            prefill.num_prefill_blocks(request), bundle.waiting_kv_share
        )

    def _may_yet_wait(self, state: RequestState, bundle: Bundle) -> bool:
        """Whether it may leave room to others while it is computed."""
        is_open = bundle.run_ahead is not None and not state.is_planned
        return is_open and bundle.is_long(state.request) and bool(len(self._books.queue))

    def _needs_room(
        self,
        state: RequestState,
        source: InstanceBooks,
        before: Iterable[RequestState],
        sums: DecodingSums | None,
        bundle: Bundle,
    ) -> bool:
        """Whether it is time to promise it room; without ``sums`` there is some now."""
        ahead, request = bundle.run_ahead, state.request
        assert ahead is not None
        decoding = None if sums is None else sums.decoding(source.kv_group, self._books.growth.mean_tokens)
        room_s = 0.0
        if decoding is not None:
            line = [*(other.request for other in before if other.key in self._books.unreceived), request]
            room_s = decoding.room_s(len(line), _num_blocks(source, line))
        return ahead.needs_room(request, state.num_planned_tokens, _kv_bytes(request, source), room_s)

    def _group_of(self, state: RequestState) -> str:
        return self._books.instances[state.prefill_ids[0]].kv_group


def _num_blocks(instance: InstanceBooks, requests: Iterable[Request]) -> int:
    """That they begin to decode with."""
    return sum([instance.num_first_blocks(request) for request in requests])


def _kv_bytes(request: Request, instance: InstanceBooks) -> float:
    """Of its prompt."""
    layout = instance.profile.kv_layout
    return request.num_prompt_tokens * layout.num_layers * layout.block_bytes / layout.block_size


def _turn(state: RequestState) -> tuple[float, float, str]:
    """By first offer; what is not offered yet comes after that, by arrival."""
    rank = inf if state.rank_of_offer is None else state.rank_of_offer
    return rank, state.request.arrival_s, state.request.request_id

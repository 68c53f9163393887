"""Line of one tenant: its requests that wait for a place, in the order of the policy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf

from pdmesh.core.requests.request import RequestState
from pdmesh.core.waiting.fairness import priced_tokens
from pdmesh.model import Epoch, RequestId
from pdmesh.policy.seams import PrefillOrder
from pdmesh.policy.views import Rank

#: Position of a request within its bucket, unique.
_Place = tuple[float, float, RequestId]

#: Key of a bucket's first request, its arrival, a unique number and the request: entries compare without requests.
_Head = tuple[tuple[float, ...], tuple[float, RequestId, Epoch], int, RequestState]

#: Lower bound of the key of a bucket's first request until `_bounded_until_s`, a unique number and the request.
_Bound = tuple[tuple[float, ...], int, RequestState]

#: Period for which the bounds hold. A shorter one computes bounds more often; a longer one makes them weaker.
BOUND_S = 0.1

#: Number of first requests whose current keys are computed together.
NUM_ASKED = 4

#: Number of outdated heap entries tolerated beyond twice the number of buckets.
SPARE = 64


class Line:
    """Waiting requests in the order's buckets. Each bucket stays sorted, so only first requests are compared.

    Most first requests have a key that stays the same for some time (*steady*). The others (*moving*) are sorted by the
    keys that they will have `BOUND_S` later. Keys never grow with time, so these are lower bounds: only a moving
    request with a small enough bound has its current key computed.

    Each tenant's line asks the order by itself: urgency is relative within one tenant.
    """

    def __init__(self) -> None:
        # Each bucket is sorted, and none is empty. `_places` has the same requests' positions.
        self._buckets: dict[float, list[RequestState]] = {}
        self._places: dict[float, list[_Place]] = {}
        # Buckets whose first request must be classified again.
        self._changed_buckets: dict[float, None] = {}
        # Heap of steady first requests, with outdated entries; per bucket, the time until which the key holds; the
        # least of these times, or an earlier one. Then a heap of the moving first requests whose current keys are
        # computed.
        self._steady: list[_Head] = []
        self._steady_until_s: dict[float, float] = {}
        self._next_s = inf
        self._moving: list[_Head] = []
        self._moving_buckets: dict[float, None] = {}
        # The moving first requests sorted by their lower bounds, with outdated entries, and how many from the start
        # have current keys. Requests in `_unbounded` buckets became first after the time last moved; they get a bound
        # when it moves again.
        self._bounds: list[_Bound] = []
        self._bounded_until_s = -inf
        self._num_asked = 0
        self._unbounded: dict[float, None] = {}
        self._numbers = count()
        self._order: PrefillOrder | None = None
        self._now_s = -inf
        # Buckets that `defer` passes over; the second names the ones removed from the heaps.
        self._waiting_buckets: set[float] = set()
        self._passed_over: list[float] = []
        self._work_us: dict[float, int] = {}
        self.num_requests = 0
        self.num_priced_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def __iter__(self) -> Iterator[RequestState]:
        for bucket in self._buckets.values():
            yield from bucket

    def head(self, order: PrefillOrder, now_s: float) -> RequestState | None:
        """Return the first request at ``now_s`` outside deferred buckets; None if there is none."""
        if order is not self._order or now_s < self._now_s or len(self._steady) > 2 * len(self._buckets) + SPARE:
            self._forget_keys()
        if now_s != self._now_s:
            self._order, self._now_s = order, now_s
            if self._next_s <= now_s:
                self._see_who_moves()
            if now_s > self._bounded_until_s or len(self._bounds) > 2 * len(self._buckets) + SPARE:
                self._bound_all(order, now_s + BOUND_S)
            elif self._unbounded:
                self._bound_others(order)
            self._moving.clear()
            self._num_asked = 0
        if self._changed_buckets:
            self._look_up_firsts(order, now_s)
        steady = self._top(self._steady, self._steady_until_s)
        while True:
            moving = self._top(self._moving, self._moving_buckets)
            first = steady or moving if steady is None or moving is None else min(steady, moving)
            num_asked, bounds = self._num_asked, self._bounds
            if num_asked == len(bounds) or (first is not None and first[0] < bounds[num_asked][0]):
                return None if first is None else first[3]
            self._num_asked = min(num_asked + NUM_ASKED, len(bounds))
            self._ask([state for _, _, state in bounds[num_asked : self._num_asked]])

    def _ask(self, states: Sequence[RequestState]) -> None:
        """Compute the current keys of the states that are still first in a moving bucket, and push them to the heap."""
        buckets, moving = self._buckets, self._moving_buckets
        firsts = [s for s in states if s.rank.bucket in moving and buckets[s.rank.bucket][0] is s]
        for head in self._keyed(firsts):
            heappush(self._moving, head)

    def _bound_all(self, order: PrefillOrder, until_s: float) -> None:
        """Sort all moving first requests by their keys at ``until_s``."""
        self._bounded_until_s = until_s
        self._bounds = self._bounded(self._moving_buckets, order)
        self._bounds.sort()
        self._unbounded.clear()

    def _bound_others(self, order: PrefillOrder) -> None:
        """Insert the bounds of requests that became first after the time last moved."""
        for bound in self._bounded(self._unbounded, order):
            insort(self._bounds, bound)
        self._unbounded.clear()

    def _bounded(self, buckets: Iterable[float], order: PrefillOrder) -> list[_Bound]:
        """Return a bound for the first request of each of ``buckets`` that is moving and has not changed.

        A bound has the request's key at `_bounded_until_s`. Keys never grow, so the key is no smaller until then.
        """
        moving, changed = self._moving_buckets, self._changed_buckets
        firsts = [self._buckets[bucket][0] for bucket in buckets if bucket in moving and bucket not in changed]
        keys = order.keys([state.rank for state in firsts], self._bounded_until_s)
        numbers = self._numbers
        return [(key, next(numbers), state) for key, state in zip(keys, firsts, strict=True)]

    def _look_up_firsts(self, order: PrefillOrder, now_s: float) -> None:
        moving: list[RequestState] = []
        for state in [self._buckets[bucket][0] for bucket in self._changed_buckets]:
            bucket = state.rank.bucket
            until_s = order.keeps_key_until_s(state.rank)
            if until_s > now_s:
                self._moving_buckets.pop(bucket, None)
                self._unbounded.pop(bucket, None)
                self._steady_until_s[bucket] = until_s
                self._next_s = min(self._next_s, until_s)
                heappush(self._steady, self._keyed([state])[0])
            else:
                self._steady_until_s.pop(bucket, None)
                self._moving_buckets[bucket] = None
                self._unbounded[bucket] = None
                moving.append(state)
        self._changed_buckets.clear()
        for head in self._keyed(moving):
            heappush(self._moving, head)

    def _see_who_moves(self) -> None:
        """Mark the buckets whose steady key expires by now as changed."""
        for bucket in [bucket for bucket, until_s in self._steady_until_s.items() if until_s <= self._now_s]:
            del self._steady_until_s[bucket]
            self._changed_buckets[bucket] = None
        self._next_s = min(self._steady_until_s.values(), default=inf)

    def _forget_keys(self) -> None:
        """Drop all computed keys, so that every bucket is classified again."""
        self._steady.clear()
        self._steady_until_s.clear()
        self._moving.clear()
        self._moving_buckets.clear()
        self._bounds.clear()
        self._unbounded.clear()
        self._bounded_until_s, self._num_asked = -inf, 0
        self._passed_over.clear()
        self._changed_buckets = dict.fromkeys(self._buckets)
        self._next_s, self._now_s = inf, -inf

    def _top(self, heap: list[_Head], buckets: Container[float]) -> _Head | None:
        """Return the heap's first entry that leads its bucket, is in ``buckets`` and is not deferred; None without one.

        Other entries are removed; deferred buckets are remembered for `call_all`.
        """
        while heap:
            state = heap[0][3]
            bucket = state.rank.bucket
            if bucket not in buckets or self._buckets[bucket][0] is not state:
                heappop(heap)
            elif bucket in self._waiting_buckets:
                heappop(heap)
                self._passed_over.append(bucket)
            else:
                return heap[0]
        return None

    def _keyed(self, states: Sequence[RequestState]) -> list[_Head]:
        assert self._order is not None, "only `head` asks for keys"
        keys = self._order.keys([state.rank for state in states], self._now_s)
        numbers = self._numbers
        return [(key, state.arrival, next(numbers), state) for key, state in zip(keys, states, strict=True)]

    def defer(self, bucket: float) -> None:
        """Pass over a bucket until `call_all`."""
        self._waiting_buckets.add(bucket)

    def defer_from(self, num_work_tokens: int) -> None:
        """Pass over the buckets whose first request has at least ``num_work_tokens`` to compute."""
        for bucket, states in self._buckets.items():
            if states[0].num_work_tokens >= num_work_tokens:
                self._waiting_buckets.add(bucket)

    def call_all(self) -> None:
        """Let `head` consider all buckets again, also the buckets that `defer` and `defer_from` passed over."""
        self._waiting_buckets.clear()
        for bucket in self._passed_over:
            if bucket in self._buckets:
                self._changed_buckets[bucket] = None
        self._passed_over.clear()

    @property
    def work_us(self) -> int:
        """Predicted work of all requests in the line."""
        return sum(self._work_us.values())

    def work_before_us(self, rank: Rank, order: PrefillOrder, now_s: float) -> int:
        """Return the predicted work of the requests before a new one of this rank, as of ``now_s``.

        A bucket whose first request comes before the new one counts as a whole. Of the new one's own bucket the share
        of requests before it counts.
        """
        buckets = list(self._buckets)
        own, *firsts = order.keys([rank, *(self._buckets[bucket][0].rank for bucket in buckets)], now_s)
        work_us = 0
        for bucket, first in zip(buckets, firsts, strict=True):
            if bucket == rank.bucket:
                states = self._buckets[bucket]
                num_before = bisect_right(states, rank.place, key=_rank_place)
                work_us += self._work_us[bucket] * num_before // len(states)
            elif first <= own:
                work_us += self._work_us[bucket]
        return work_us

    def reorder(self, order: PrefillOrder) -> None:
        """Rank all requests by another order."""
        states = list(self)
        self._buckets.clear()
        self._places.clear()
        self._work_us.clear()
        self._waiting_buckets.clear()
        self.num_requests = self.num_priced_tokens = 0
        self._forget_keys()
        for state in states:
            state.rank_by(order)
            self.join(state)

    def join(self, state: RequestState) -> None:
        bucket, place = state.rank.bucket, _place(state)
        places = self._places.get(bucket)
        if places is None:
            self._places[bucket], self._buckets[bucket], self._work_us[bucket] = [place], [state], state.work_us
            self._changed_buckets[bucket] = None
        else:
            index = bisect_right(places, place)
            places.insert(index, place)
            self._buckets[bucket].insert(index, state)
            self._work_us[bucket] += state.work_us
            if index == 0:
                self._changed_buckets[bucket] = None
        self.num_requests += 1
        self.num_priced_tokens += _num_priced_tokens(state)

    def leave(self, state: RequestState) -> None:
        bucket = state.rank.bucket
        states, places = self._buckets[bucket], self._places[bucket]
        index = bisect_left(places, _place(state))
        assert states[index] is state, f"{state.key} is not in line where its rank says"
        del states[index], places[index]
        self.num_requests -= 1
        self.num_priced_tokens -= _num_priced_tokens(state)
        self._work_us[bucket] -= state.work_us
        if states:
            if index == 0:
                self._changed_buckets[bucket] = None
        else:
            del self._buckets[bucket], self._places[bucket], self._work_us[bucket]
            self._changed_buckets.pop(bucket, None)
            self._steady_until_s.pop(bucket, None)
            self._moving_buckets.pop(bucket, None)
            self._unbounded.pop(bucket, None)

    def check_integrity(self) -> None:
        assert self.num_requests == sum(1 for _ in self), "the number is not that of the requests in line"
        num_priced_tokens = sum(_num_priced_tokens(state) for state in self)
        assert self.num_priced_tokens == num_priced_tokens, "the tokens are not those of the prompts in line"
        work_us = {bucket: sum(state.work_us for state in states) for bucket, states in self._buckets.items()}
        assert work_us == self._work_us, "the work is not that of the prompts in line"
        assert self._buckets.keys() == self._places.keys(), "a bucket has no places"
        for bucket, states in self._buckets.items():
            places = [_place(state) for state in states]
            assert places, "a bucket is empty"
            assert places == sorted(places) == self._places[bucket], "the line is out of order"


def _num_priced_tokens(state: RequestState) -> int:
    return priced_tokens(state.request.num_prompt_tokens, state.num_reused_tokens)


def _rank_place(state: RequestState) -> float:
    return state.rank.place


def _place(state: RequestState) -> _Place:
    arrival_s, request_id, _ = state.arrival
    return state.rank.place, arrival_s, request_id

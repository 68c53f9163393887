"""The line of one tenant: its requests that wait for a place, in the order of the policy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from pdmesh.core.state import RequestState
from pdmesh.model import Epoch, RequestId
from pdmesh.policy.base import PrefillOrder, Rank

#: The first of a lane behind its key and its arrival, which no two share: so entries compare without the requests.
_Head = tuple[tuple[float, ...], tuple[float, RequestId, Epoch], RequestState]


class Line:
    """Kept in the lanes of the order, each sorted for good: only the first of each are compared with each other.

    The order is asked for a line by itself: what is urgent for one tenant is not so for another.
    """

    def __init__(self) -> None:
        self._lanes: dict[float, list[RequestState]] = {}  # each sorted, none empty
        # The first of each lane, with its rank and its arrival; lanes where that is to be looked up.
        self._firsts: dict[float, tuple[Rank, tuple[float, RequestId, Epoch], RequestState]] = {}
        # A heap of them, and of some that were; and what it was made for.
        self._heads: list[_Head] = []
        self._passed_over: list[_Head] = []  # taken out of the heap, in lanes that wait
        self._changed_lanes: dict[float, None] = {}
        self._compared_for: tuple[PrefillOrder, float] | None = None
        self._waiting_lanes: set[float] = set()  # for their turn
        self._work_us: dict[float, int] = {}  # of each lane
        self.num_requests = 0
        self.num_prompt_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __iter__(self) -> Iterator[RequestState]:
        for lane in self._lanes.values():
            yield from lane

    def head(self, order: PrefillOrder, now_s: float) -> RequestState | None:
        """The first now, but for lanes that were told to wait for their turn."""
        changed = self._changed_lanes
        for lane in changed:
            state = self._lanes[lane][0]
            self._firsts[lane] = state.rank, arrival(state), state
        if self._compared_for != (order, now_s):
            self._compared_for = order, now_s
            self._heads = self._keyed(self._firsts, order, now_s)
            heapify(self._heads)
            self._passed_over.clear()
        elif changed:
            for head in self._keyed(changed, order, now_s):
                heappush(self._heads, head)
        changed.clear()
        heads = self._heads
        while heads:
            state = heads[0][2]
            if not self._is_first(state):
                heappop(heads)
            elif state.rank.lane in self._waiting_lanes:
                self._passed_over.append(heappop(heads))
            else:
                return state
        return None

    def let_wait(self, lane: float) -> None:
        """Pass over a lane, which waits for its turn, until `call_all`."""
        self._waiting_lanes.add(lane)

    def let_wait_from(self, num_prompt_tokens: int) -> None:
        """The lanes whose first request has at least so many prompt tokens."""
        for lane, states in self._lanes.items():
            if states[0].request.num_prompt_tokens >= num_prompt_tokens:
                self._waiting_lanes.add(lane)

    def call_all(self) -> None:
        """No lane waits for its turn any more."""
        self._waiting_lanes.clear()
        for head in self._passed_over:
            heappush(self._heads, head)
        self._passed_over.clear()

    def _keyed(self, lanes: Iterable[float], order: PrefillOrder, now_s: float) -> list[_Head]:
        firsts = [self._firsts[lane] for lane in lanes]
        keys = order.keys([rank for rank, _, _ in firsts], now_s)
        return [(key, arrived, state) for key, (_, arrived, state) in zip(keys, firsts, strict=True)]

    def _is_first(self, state: RequestState) -> bool:
        """Whether it is the first of its lane."""
        lane = self._lanes.get(state.rank.lane)
        return lane is not None and lane[0] is state

    @property
    def work_us(self) -> int:
        """Predicted, of all in it."""
        return sum(self._work_us.values())

    def work_before_us(self, rank: Rank, order: PrefillOrder, now_s: float) -> int:
        """Predicted work of those that come before one of this rank, as things are now.

        A lane whose first comes before it counts as a whole, its own by the share of those that come before it.
        """
        lanes = list(self._lanes)
        own, *firsts = order.keys([rank, *(self._lanes[lane][0].rank for lane in lanes)], now_s)
        work_us = 0
        for lane, first in zip(lanes, firsts, strict=True):
            if lane == rank.lane:
                states = self._lanes[lane]
                num_before = bisect_right(states, rank.place, key=_rank_place)
                work_us += self._work_us[lane] * num_before // len(states)
            elif first <= own:
                work_us += self._work_us[lane]
        return work_us

    def reorder(self, order: PrefillOrder) -> None:
        """Another order: all get their rank in it."""
        states = list(self)
        self._lanes.clear()
        self._work_us.clear()
        self._firsts.clear()
        self._heads.clear()
        self._passed_over.clear()
        self._changed_lanes.clear()
        self._waiting_lanes.clear()
        self.num_requests = self.num_prompt_tokens = 0
        for state in states:
            state.rank_by(order)
            self.join(state)

    def join(self, state: RequestState) -> None:
        insort(self._lanes.setdefault(state.rank.lane, []), state, key=_place)
        self._work_us[state.rank.lane] = self._work_us.get(state.rank.lane, 0) + state.work_us
        self._changed_lanes[state.rank.lane] = None
        self.num_requests += 1
        self.num_prompt_tokens += state.request.num_prompt_tokens

    def leave(self, state: RequestState) -> None:
        lane = self._lanes[state.rank.lane]
        index = bisect_left(lane, _place(state), key=_place)
        assert lane[index] is state, f"{state.key} is not in line where its rank says"
        del lane[index]
        self.num_requests -= 1
        self.num_prompt_tokens -= state.request.num_prompt_tokens
        self._work_us[state.rank.lane] -= state.work_us
        if lane:
            self._changed_lanes[state.rank.lane] = None
        else:
            del self._lanes[state.rank.lane], self._work_us[state.rank.lane]
            self._firsts.pop(state.rank.lane, None)
            self._changed_lanes.pop(state.rank.lane, None)

    def check_integrity(self) -> None:
        assert self.num_requests == sum(1 for _ in self), "the number is not that of the requests in line"
        num_prompt_tokens = sum(state.request.num_prompt_tokens for state in self)
        assert self.num_prompt_tokens == num_prompt_tokens, "the tokens are not those of the prompts in line"
        work_us = {lane: sum(state.work_us for state in states) for lane, states in self._lanes.items()}
        assert work_us == self._work_us, "the work is not that of the prompts in line"
        for lane in self._lanes.values():
            places = [_place(state) for state in lane]
            assert places, "a lane is empty"
            assert places == sorted(places), "the line is out of order"


def arrival(state: RequestState) -> tuple[float, RequestId, Epoch]:
    """What decides between requests that the order finds equal. A resumed one may have come at the same time."""
    return state.request.arrival_s, state.request.request_id, state.request.epoch


def _rank_place(state: RequestState) -> float:
    return state.rank.place


def _place(state: RequestState) -> tuple[float, float, RequestId]:
    return state.rank.place, state.request.arrival_s, state.request.request_id

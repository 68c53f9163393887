"""Requests that wait for a place, in the order of the policy, with their time limit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from operator import itemgetter

from pdmesh.core.lengths import Lengths
from pdmesh.core.state import RequestState
from pdmesh.model import RequestId, RequestKey
from pdmesh.policy.base import PrefillOrder, Rank

#: The first of a lane behind its key and its arrival, which no two share: so entries compare without the requests.
_Head = tuple[tuple[float, ...], tuple[float, RequestId], RequestState]


class WaitingQueue:
    """The line, and those *parked* beside it because no instance that is there now could ever take them.

    A parked request keeps its time limit but does not hold up those behind it. The line is kept in the lanes of the
    order, each sorted for good: however many wait, only the first of each lane are compared with each other.
    """

    def __init__(self) -> None:
        self._lanes: dict[float, list[RequestState]] = {}  # each sorted, none empty
        # The first of each lane, with its rank and its arrival; lanes where that is to be looked up.
        self._firsts: dict[float, tuple[Rank, tuple[float, RequestId], RequestState]] = {}
        # A heap of them, and of some that were; and what it was made for.
        self._heads: list[_Head] = []
        self._passed_over: list[_Head] = []  # taken out of the heap, in lanes that wait
        self._changed_lanes: dict[float, None] = {}
        self._compared_for: tuple[PrefillOrder, float] | None = None
        self._work_us: dict[float, int] = {}  # of each lane
        self._parked: dict[RequestKey, RequestState] = {}
        # The limit is the same for all, so the order of arrival is the order of deadlines. (An OrderedDict, unlike a
        # dict, finds its first entry at once after many deletions at the front.)
        self._deadlines: OrderedDict[RequestKey, tuple[float, RequestState]] = OrderedDict()
        self.num_tokens = 0
        self._prompt_tokens = Lengths()  # of all that wait

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._deadlines

    @property
    def has_line(self) -> bool:
        """Whether anyone waits in line."""
        return bool(self._lanes)

    def head(self, order: PrefillOrder, now_s: float, waiting_lanes: Collection[float] = ()) -> RequestState | None:
        """The first in line now, but for ``waiting_lanes``: from one call to the next these only grow, or are none."""
        changed = self._changed_lanes
        for lane in changed:
            state = self._lanes[lane][0]
            self._firsts[lane] = state.rank, _arrival(state), state
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
        if not waiting_lanes:
            for head in self._passed_over:
                heappush(heads, head)
            self._passed_over.clear()
        while heads:
            state = heads[0][2]
            if not self._is_first(state):
                heappop(heads)
            elif state.rank.lane in waiting_lanes:
                self._passed_over.append(heappop(heads))
            else:
                return state
        return None

    def _keyed(self, lanes: Iterable[float], order: PrefillOrder, now_s: float) -> list[_Head]:
        firsts = [self._firsts[lane] for lane in lanes]
        keys = order.keys([rank for rank, _, _ in firsts], now_s)
        return [(key, arrival, state) for key, (_, arrival, state) in zip(keys, firsts, strict=True)]

    def _is_first(self, state: RequestState) -> bool:
        """Whether it is the first of its lane."""
        lane = self._lanes.get(state.rank.lane)
        return lane is not None and lane[0] is state

    def work_before_s(self, rank: Rank, order: PrefillOrder, now_s: float) -> float:
        """Predicted work, in seconds, of those in line that come before one of this rank, as things are now.

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
        return work_us / 1e6

    @property
    def least_prompt_tokens(self) -> int:
        """Nobody who waits has a shorter prompt."""
        return self._prompt_tokens.least

    def lanes_from(self, num_prompt_tokens: int) -> set[float]:
        """The lanes whose first request has at least so many prompt tokens."""
        return {
            lane for lane, states in self._lanes.items() if states[0].request.num_prompt_tokens >= num_prompt_tokens
        }

    @property
    def next_deadline_s(self) -> float:
        """Of who has waited longest; infinite if nobody waits."""
        return next(iter(self._deadlines.values()))[0] if self._deadlines else inf

    def first_due(self, now_s: float) -> RequestState | None:
        """The request that has waited longest, if its time is over."""
        if not self._deadlines:
            return None
        deadline_s, state = next(iter(self._deadlines.values()))
        return state if deadline_s <= now_s else None

    def add(self, state: RequestState, deadline_s: float) -> None:
        self._join_line(state)
        self._deadlines[state.key] = deadline_s, state
        self.num_tokens += state.request.num_prompt_tokens
        self._prompt_tokens.add(state.request.num_prompt_tokens)

    def remove(self, state: RequestState) -> None:
        del self._deadlines[state.key]
        self.num_tokens -= state.request.num_prompt_tokens
        self._prompt_tokens.remove(state.request.num_prompt_tokens)
        if self._parked.pop(state.key, None) is None:
            self._leave_line(state)

    def park(self, state: RequestState) -> None:
        self._leave_line(state)
        self._parked[state.key] = state

    def unpark(self) -> None:
        """The mesh changed: all wait in line again."""
        for state in self._parked.values():
            self._join_line(state)
        self._parked.clear()

    def reorder(self, order: PrefillOrder) -> None:
        """Another order: all get their rank in it."""
        in_line = [state for lane in self._lanes.values() for state in lane]
        self._lanes.clear()
        self._work_us.clear()
        self._firsts.clear()
        self._heads.clear()
        self._passed_over.clear()
        self._changed_lanes.clear()
        for _, state in self._deadlines.values():
            state.rank_by(order)
        for state in in_line:
            self._join_line(state)

    def _join_line(self, state: RequestState) -> None:
        insort(self._lanes.setdefault(state.rank.lane, []), state, key=_place)
        self._work_us[state.rank.lane] = self._work_us.get(state.rank.lane, 0) + state.work_us
        self._changed_lanes[state.rank.lane] = None

    def _leave_line(self, state: RequestState) -> None:
        lane = self._lanes[state.rank.lane]
        index = bisect_left(lane, _place(state), key=_place)
        assert lane[index] is state, f"{state.key} is not in line where its rank says"
        del lane[index]
        self._work_us[state.rank.lane] -= state.work_us
        if lane:
            self._changed_lanes[state.rank.lane] = None
        else:
            del self._lanes[state.rank.lane], self._work_us[state.rank.lane]
            self._firsts.pop(state.rank.lane, None)
            self._changed_lanes.pop(state.rank.lane, None)

    def check_integrity(self) -> None:
        num_in_line = sum(len(lane) for lane in self._lanes.values())
        assert num_in_line + len(self._parked) == len(self._deadlines), (
            f"{num_in_line} in line and {len(self._parked)} parked are not {len(self._deadlines)} waiting"
        )
        prompt_tokens = sorted(state.request.num_prompt_tokens for _, state in self._deadlines.values())
        num_tokens = sum(prompt_tokens)
        assert prompt_tokens == self._prompt_tokens.all(), "the lengths are not those of the prompts that wait"
        assert num_tokens == self.num_tokens, f"{num_tokens} tokens wait, books say {self.num_tokens}"
        work_us = {lane: sum(state.work_us for state in states) for lane, states in self._lanes.items()}
        assert work_us == self._work_us, "the work is not that of the prompts in line"
        for lane in self._lanes.values():
            places = [_place(state) for state in lane]
            assert places, "a lane is empty"
            assert places == sorted(places), "the line is out of order"


def first_of(order: PrefillOrder, states: Sequence[RequestState], now_s: float) -> RequestState:
    """The first of what `in_order` gives."""
    keys = order.keys([state.rank for state in states], now_s)
    first = min(keys)
    return min((state for key, state in zip(keys, states, strict=True) if key == first), key=_arrival)


def in_order(order: PrefillOrder, states: Sequence[RequestState], now_s: float) -> list[RequestState]:
    """Sorted by what the order makes of them now, then by arrival, then by id."""
    if len(states) < 2:
        return list(states)
    keys = order.keys([state.rank for state in states], now_s)
    keyed = [(key, _arrival(state), state) for key, state in zip(keys, states, strict=True)]
    return [state for *_, state in sorted(keyed, key=itemgetter(0, 1))]


def _arrival(state: RequestState) -> tuple[float, RequestId]:
    return state.request.arrival_s, state.request.request_id


def _rank_place(state: RequestState) -> float:
    return state.rank.place


def _place(state: RequestState) -> tuple[float, float, RequestId]:
    return state.rank.place, state.request.arrival_s, state.request.request_id

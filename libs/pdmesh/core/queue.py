"""Requests that wait for a place, in the order of the policy, with their time limit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict

from pdmesh.core.state import OrderKey, RequestKey, RequestState, order_key
from pdmesh.policy.base import PrefillOrder


class WaitingQueue:
    """The line, and those *parked* beside it because no instance that is there now could ever take them.

    A parked request keeps its time limit but does not hold up those behind it.
    """

    def __init__(self) -> None:
        self._line: list[RequestState] = []  # sorted by order key
        self._parked: dict[RequestKey, RequestState] = {}
        # The limit is the same for all, so the order of arrival is the order of deadlines. (An OrderedDict, unlike a
        # dict, finds its first entry at once after many deletions at the front.)
        self._deadlines: OrderedDict[RequestKey, tuple[float, RequestState]] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._deadlines

    @property
    def head(self) -> RequestState | None:
        return self._line[0] if self._line else None

    @property
    def next_deadline_s(self) -> float | None:
        return next(iter(self._deadlines.values()))[0] if self._deadlines else None

    def first_due(self, now_s: float) -> RequestState | None:
        """The request that has waited longest, if its time is over."""
        if not self._deadlines:
            return None
        deadline_s, state = next(iter(self._deadlines.values()))
        return state if deadline_s <= now_s else None

    def add(self, state: RequestState, deadline_s: float) -> None:
        insort(self._line, state, key=_key)
        self._deadlines[state.key] = deadline_s, state
        self.num_tokens += state.request.num_prompt_tokens

    def remove(self, state: RequestState) -> None:
        del self._deadlines[state.key]
        self.num_tokens -= state.request.num_prompt_tokens
        if self._parked.pop(state.key, None) is None:
            self._leave_line(state)

    def park(self, state: RequestState) -> None:
        self._leave_line(state)
        self._parked[state.key] = state

    def unpark(self) -> None:
        """The mesh changed: all wait in line again."""
        for state in self._parked.values():
            insort(self._line, state, key=_key)
        self._parked.clear()

    def reorder(self, order: PrefillOrder) -> None:
        for _, state in self._deadlines.values():
            state.order_key = order_key(order, state.request)
        self._line.sort(key=_key)

    def _leave_line(self, state: RequestState) -> None:
        index = bisect_left(self._line, state.order_key, key=_key)
        assert self._line[index] is state, f"{state.key} is not in line where its order key says"
        del self._line[index]

    def check_integrity(self) -> None:
        assert len(self._line) + len(self._parked) == len(self._deadlines), (
            f"{len(self._line)} in line and {len(self._parked)} parked are not {len(self._deadlines)} waiting"
        )
        num_tokens = sum(state.request.num_prompt_tokens for _, state in self._deadlines.values())
        assert num_tokens == self.num_tokens, f"{num_tokens} tokens wait, books say {self.num_tokens}"
        keys = [state.order_key for state in self._line]
        assert keys == sorted(keys), "the line is out of order"


def _key(state: RequestState) -> OrderKey:
    return state.order_key

"""Placed requests whose KV has no receiver: in the order in which they get one, and summed, as they come and go."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from math import inf
from typing import NamedTuple

from pdmesh.core.requests.request import RequestState
from pdmesh.model import RequestKey

#: By first offer; what is not offered yet comes after that, by arrival.
Turn = tuple[float, float, str]


class Wanted(NamedTuple):
    """What so many requests begin to decode with."""

    num_requests: int = 0
    num_blocks: int = 0

    def plus(self, num_blocks: int, sign: int = 1) -> Wanted:
        """Return the sums with one more request, or one fewer."""
        return Wanted(self.num_requests + sign, self.num_blocks + sign * num_blocks)


class _Entry(NamedTuple):
    """One of them, and what it wants; entries compare by their turns, which no two share."""

    turn: Turn
    state: RequestState
    kv_group: str
    num_blocks: int


class AwaitingDecode(Mapping[RequestKey, RequestState]):
    """Requests waiting for an instance to decode on; the deadline starts when nothing else delays them."""

    def __init__(self) -> None:
        self._entries: dict[RequestKey, _Entry] = {}
        self._line: list[_Entry] = []
        self._wanted: dict[str, Wanted] = {}  # by KV group; none empty
        self._ready: dict[RequestKey, None] = {}  # wait for nothing else, since their limits were last set
        self._due_s: OrderedDict[RequestKey, float] = OrderedDict()  # the limit is the same for all: the first is least

    def __getitem__(self, key: RequestKey) -> RequestState:
        return self._entries[key].state

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_kv_groups(self) -> int:
        """Number of KV groups in which a request waits."""
        return len(self._wanted)

    def in_turn(self) -> list[_Entry]:
        """Return a copy of the line, since requests may come and go meanwhile."""
        return list(self._line)

    def wanted(self, kv_group: str) -> Wanted:
        """Return what all waiting requests of a KV group want."""
        return self._wanted.get(kv_group, Wanted())

    # --- they come and go ---

    def add(self, state: RequestState, kv_group: str, num_blocks: int) -> None:
        """Its KV is computed in ``kv_group``, and it begins to decode with ``num_blocks``."""
        entry = self._entries[state.key] = _Entry(turn_of(state), state, kv_group, num_blocks)
        insort(self._line, entry)
        self._wanted[kv_group] = self.wanted(kv_group).plus(num_blocks)

    def discard(self, key: RequestKey) -> None:
        """Remove a request that has a receiver, needs none, or has ended."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        del self._line[bisect_left(self._line, entry)]
        wanted = self._wanted.pop(entry.kv_group).plus(entry.num_blocks, -1)
        if wanted.num_requests:
            self._wanted[entry.kv_group] = wanted
        self._ready.pop(key, None)
        self._due_s.pop(key, None)

    def offered(self, key: RequestKey) -> None:
        """Note the rank of a request's first offer, if it waits here."""
        entry = self._entries.get(key)
        if entry is not None:
            del self._line[bisect_left(self._line, entry)]
            entry = self._entries[key] = entry._replace(turn=turn_of(entry.state))
            insort(self._line, entry)

    # --- and wait no longer than may be ---

    def is_ready(self, key: RequestKey) -> None:
        """Note that a request, if it waits here, waits for nothing else: it is computed, or had a receiver before."""
        if key in self._entries:
            self._ready[key] = None

    def set_limits(self, due_s: float) -> None:
        """Set the deadlines of requests that became ready since the last call."""
        for key in self._ready:
            self._due_s.setdefault(key, due_s)
        self._ready.clear()

    @property
    def next_due_s(self) -> float:
        """Infinite if nobody has a limit."""
        return next(iter(self._due_s.values())) if self._due_s else inf

    def overdue(self, now_s: float) -> list[RequestState]:
        """Return requests whose deadlines have passed, in turn."""
        found: list[_Entry] = []
        for key, due_s in self._due_s.items():
            if due_s > now_s:
                break
            found.append(self._entries[key])
        return [entry.state for entry in sorted(found)]

    def check_integrity(self) -> None:
        """AssertionError names what does not balance."""
        assert self._line == sorted(self._entries.values()), "the line is not that of those without a receiver"
        wanted: dict[str, Wanted] = {}
        for key, entry in self._entries.items():
            assert entry.turn == turn_of(entry.state), (
                f"{key} stands in line at {entry.turn}, not {turn_of(entry.state)}"
            )
            wanted[entry.kv_group] = wanted.get(entry.kv_group, Wanted()).plus(entry.num_blocks)
            is_ready = bool(entry.state.num_lost_receivers) or entry.state.is_computed
            assert is_ready == (key in self._ready or key in self._due_s), f"{key} has a time limit: {not is_ready}"
        assert wanted == self._wanted, f"they want {wanted}, recorded: {self._wanted}"
        assert self._due_s.keys() <= self._entries.keys(), f"{self._due_s.keys()} have limits"


def turn_of(state: RequestState) -> Turn:
    rank = inf if state.rank_of_offer is None else state.rank_of_offer
    return rank, state.request.arrival_s, state.request.request_id

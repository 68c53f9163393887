"""Placed requests whose KV has no receiver, in the order in which they get one, with sums per KV group."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from math import inf
from typing import NamedTuple

from pdmesh.core.requests.request import RequestState
from pdmesh.model import RequestKey

#: Rank of the first offer (infinite before it), arrival, request id.
Turn = tuple[float, float, str]


class Wanted(NamedTuple):
    """Number of waiting requests, and of the blocks that they begin to decode with."""

    num_requests: int = 0
    num_blocks: int = 0

    def plus(self, num_blocks: int, sign: int = 1) -> Wanted:
        """Return the sums after adding one request (``sign`` 1) or removing one (-1)."""
        return Wanted(self.num_requests + sign, self.num_blocks + sign * num_blocks)


class _Entry(NamedTuple):
    """A waiting request with its demand. Entries compare by their turns, which are unique."""

    turn: Turn
    state: RequestState
    kv_group: str
    num_blocks: int


class AwaitingDecode(Mapping[RequestKey, RequestState]):
    """Requests waiting for an instance to decode on. A deadline starts once nothing else delays a request."""

    def __init__(self) -> None:
        self._entries: dict[RequestKey, _Entry] = {}
        self._line: list[_Entry] = []
        # By KV group, without empty sums.
        self._wanted: dict[str, Wanted] = {}
        # Requests that became ready after the last `set_limits`.
        self._ready: dict[RequestKey, None] = {}
        # The time limit is the same for all, so the first deadline is the least.
        self._due_s: OrderedDict[RequestKey, float] = OrderedDict()

    def __getitem__(self, key: RequestKey) -> RequestState:
        return self._entries[key].state

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_kv_groups(self) -> int:
        """Number of KV groups with at least one waiting request."""
        return len(self._wanted)

    def in_turn(self) -> list[_Entry]:
        """Return a copy of the line, so that a caller may change the line while iterating."""
        return list(self._line)

    def wanted(self, kv_group: str) -> Wanted:
        """Return the summed demand of the KV group's waiting requests."""
        return self._wanted.get(kv_group, Wanted())

    # --- coming and leaving ---

    def add(self, state: RequestState, kv_group: str, num_blocks: int) -> None:
        """Add a request whose KV is computed in ``kv_group`` and that begins to decode with ``num_blocks``."""
        entry = self._entries[state.key] = _Entry(turn_of(state), state, kv_group, num_blocks)
        insort(self._line, entry)
        self._wanted[kv_group] = self.wanted(kv_group).plus(num_blocks)

    def discard(self, key: RequestKey) -> None:
        """Remove a request that has a receiver, needs none, or has ended. A request that does not wait is ignored."""
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
        """Move a request to its turn after its first offer, if it waits here."""
        entry = self._entries.get(key)
        if entry is not None:
            del self._line[bisect_left(self._line, entry)]
            entry = self._entries[key] = entry._replace(turn=turn_of(entry.state))
            insort(self._line, entry)

    # --- deadlines ---

    def is_ready(self, key: RequestKey) -> None:
        """Mark a waiting request as ready: its prompt is computed, or it had a receiver before."""
        if key in self._entries:
            self._ready[key] = None

    def set_limits(self, due_s: float) -> None:
        """Give the deadline ``due_s`` to each request that became ready after the last call."""
        for key in self._ready:
            self._due_s.setdefault(key, due_s)
        self._ready.clear()

    @property
    def next_due_s(self) -> float:
        """First deadline; infinite if there is none."""
        return next(iter(self._due_s.values())) if self._due_s else inf

    def overdue(self, now_s: float) -> list[RequestState]:
        """Return the requests whose deadlines have passed, in the order of their turns."""
        found: list[_Entry] = []
        for key, due_s in self._due_s.items():
            if due_s > now_s:
                break
            found.append(self._entries[key])
        return [entry.state for entry in sorted(found)]

    def check_integrity(self) -> None:
        """Raise AssertionError if the sums, the order or the deadlines are inconsistent."""
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

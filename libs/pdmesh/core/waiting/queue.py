"""Requests that wait for a place, with their time limits: one line per tenant, served in fair turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from math import inf
from operator import attrgetter, itemgetter

from pdmesh.core.instances.lengths import Lengths
from pdmesh.core.requests.request import RequestState
from pdmesh.core.waiting.fairness import TokenCounters
from pdmesh.core.waiting.line import Line
from pdmesh.model import RequestKey
from pdmesh.policy.seams import PrefillOrder


class WaitingQueue:
    """Lines of all tenants, the *parked* requests, which no present instance could ever take, and turns *set aside*.

    A turn that is set aside waits until the whole session has room (`pdmesh.core.admission.aside`). Parked requests and
    turns set aside keep their time limits and do not block the requests behind them.
    """

    def __init__(self) -> None:
        self.counters = TokenCounters()
        self._lines: dict[str, Line] = {}
        # Whether `defer` has passed over a bucket since `call_all`.
        self._lets_wait = False
        # Requests removed from their lines by `skip`, during one round of placing.
        self._skipped: list[RequestState] = []
        self._parked: dict[RequestKey, RequestState] = {}
        #: Turns that are set aside, with the time since when; after `sort_turns_aside` the longest waiting first.
        self.turns_aside: dict[RequestKey, tuple[RequestState, float]] = {}
        self._sorts_aside = False
        # The limit is the same for all, so the order of arrival is the order of deadlines. (An OrderedDict, unlike a
        # dict, finds its first entry at once after many deletions at the front.)
        self._deadlines: OrderedDict[RequestKey, tuple[float, RequestState]] = OrderedDict()
        # Deadline of the longest waiting request; infinite if none waits.
        self.next_deadline_s = inf
        # Prompt tokens to compute of all waiting requests: their sum and their lengths.
        self.num_tokens = 0
        self._work_tokens = Lengths()

    def __len__(self) -> int:
        return len(self._deadlines)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._deadlines

    @property
    def has_line(self) -> bool:
        """Whether any request waits in line."""
        return bool(self._lines)

    def head(self, order: PrefillOrder, now_s: float) -> RequestState | None:
        """Return the first request of the first tenant in turn that has one which is not deferred; None if all are."""
        for tenant in self.counters.in_turn():
            if (head := self._lines[tenant].head(order, now_s)) is not None:
                return head
        return None

    def defer(self, head: RequestState, *, as_long: bool) -> None:
        """Pass over the head's bucket until `call_all`.

        ``as_long``: also pass over every tenant's buckets whose first request has at least as many tokens to compute,
        so that no request for the same room overtakes the head.
        """
        self._lets_wait = True
        self._lines[head.request.tenant].defer(head.rank.bucket)
        if as_long:
            for line in self._lines.values():
                line.defer_from(head.num_work_tokens)

    def skip(self, head: RequestState) -> None:
        """Take the head alone out of its line until `restore_skipped`, during one round of placing."""
        self._lines[head.request.tenant].leave(head)
        self._skipped.append(head)

    def restore_skipped(self) -> None:
        """Put every skipped request back into its line."""
        for state in self._skipped:
            self._lines[state.request.tenant].join(state)
        self._skipped.clear()

    def call_all(self) -> None:
        """Let `head` consider all buckets again, also the buckets that `defer` passed over."""
        if self._lets_wait:
            self._lets_wait = False
            for line in self._lines.values():
                line.call_all()

    def work_before_s(self, state: RequestState, order: PrefillOrder, now_s: float) -> float:
        """Predict the work, in seconds, that is served before a new request.

        All of the own tenant's work that comes first counts. Another tenant's work counts up to its turns until then,
        and at most the whole line.
        """
        tenant = state.request.tenant
        own = self._lines.get(tenant)
        own_us = 0 if own is None else own.work_before_us(state.rank, order, now_s)
        work_us = own_us
        if len(self._lines) > (own is not None):
            num_units = 0 if own is None else own_us * self._price(tenant, own) // max(1, own.work_us)
            for other, units in self.counters.before(tenant, num_units):
                line = self._lines[other]
                work_us += min(line.work_us, units * line.work_us // self._price(other, line))
        return work_us / 1e6

    def _price(self, tenant: str, line: Line) -> int:
        """Estimate the charge for all requests in a tenant's line; at least 1."""
        return max(1, self.counters.price(tenant, line.num_requests, line.num_priced_tokens))

    @property
    def least_work_tokens(self) -> int:
        """Least number of tokens to compute among the waiting prompts; 0 if none waits."""
        return self._work_tokens.least

    @property
    def first(self) -> RequestState | None:
        """The waiting request with the earliest deadline; None if none waits."""
        return next(iter(self._deadlines.values()))[1] if self._deadlines else None

    def first_due(self, now_s: float) -> RequestState | None:
        """Return the request with the earliest deadline if that has passed, else None."""
        if not self._deadlines:
            return None
        deadline_s, state = next(iter(self._deadlines.values()))
        return state if deadline_s <= now_s else None

    def add(self, state: RequestState, deadline_s: float) -> None:
        self._join_line(state)
        self._deadlines[state.key] = deadline_s, state
        if len(self._deadlines) == 1:
            self.next_deadline_s = deadline_s
        self.num_tokens += state.num_work_tokens
        self._work_tokens.add(state.num_work_tokens)

    def postpone(self, state: RequestState, deadline_s: float) -> None:
        """Let a request wait until ``deadline_s``, which is later than any other deadline."""
        del self._deadlines[state.key]
        self._deadlines[state.key] = deadline_s, state
        self._look_up_deadline()

    def remove(self, state: RequestState) -> None:
        deadline_s, _ = self._deadlines.pop(state.key)
        if deadline_s == self.next_deadline_s:
            self._look_up_deadline()
        self.num_tokens -= state.num_work_tokens
        self._work_tokens.remove(state.num_work_tokens)
        if self._parked.pop(state.key, None) is None:
            self._leave_line(state)

    def _look_up_deadline(self) -> None:
        self.next_deadline_s = next(iter(self._deadlines.values()))[0] if self._deadlines else inf

    def set_aside(self, state: RequestState, since_s: float) -> None:
        """Take a session's turn out of its line, which counts as set aside since ``since_s``."""
        self._leave_line(state)
        if self.turns_aside and next(reversed(self.turns_aside.values()))[1] > since_s:
            self._sorts_aside = True
        self.turns_aside[state.key] = state, since_s

    def sort_turns_aside(self) -> None:
        """Put the longest waiting turn first. Submissions after a change of schedulers come in any order."""
        if self._sorts_aside:
            self._sorts_aside = False
            self.turns_aside = dict(sorted(self.turns_aside.items(), key=lambda item: item[1][1]))

    def come_back(self, state: RequestState) -> float:
        """Put a turn that was set aside into its line, and return since when it was set aside."""
        _, since_s = self.turns_aside.pop(state.key)
        self._join_line(state)
        return since_s

    def is_parked(self, state: RequestState) -> bool:
        """Whether a waiting request is parked: no present instance could ever take it."""
        return state.key in self._parked

    def park(self, state: RequestState) -> None:
        self._leave_line(state)
        self._parked[state.key] = state

    def unpark(self) -> None:
        """Put all parked requests back in line, because the mesh changed."""
        for state in self._parked.values():
            self._join_line(state)
        self._parked.clear()

    def reorder(self, order: PrefillOrder) -> None:
        """Rank all waiting requests by another order."""
        for state in chain(self._parked.values(), [state for state, _ in self.turns_aside.values()]):
            state.rank_by(order)
        for line in self._lines.values():
            line.reorder(order)

    def _join_line(self, state: RequestState) -> None:
        tenant = state.request.tenant
        if (line := self._lines.get(tenant)) is None:
            line = self._lines[tenant] = Line()
        line.join(state)
        self.counters.joined(state.request)

    def _leave_line(self, state: RequestState) -> None:
        tenant = state.request.tenant
        line = self._lines[tenant]
        line.leave(state)
        if not line and all(each.request.tenant != tenant for each in self._skipped):
            del self._lines[tenant]
        self.counters.left(state.request)

    def check_integrity(self) -> None:
        num_in_line = sum(1 for _ in chain.from_iterable(self._lines.values()))
        num_elsewhere = len(self._parked) + len(self.turns_aside)
        assert num_in_line + num_elsewhere == len(self._deadlines), (
            f"{num_in_line} in line and {num_elsewhere} elsewhere are not {len(self._deadlines)} waiting"
        )
        work_tokens = sorted(state.num_work_tokens for _, state in self._deadlines.values())
        num_tokens = sum(work_tokens)
        assert work_tokens == self._work_tokens.all(), "the lengths are not those of the prompts that wait"
        assert num_tokens == self.num_tokens, f"{num_tokens} tokens wait, recorded: {self.num_tokens}"
        deadline_s = min((deadline_s for deadline_s, _ in self._deadlines.values()), default=inf)
        assert deadline_s == self.next_deadline_s, f"the first waits until {deadline_s}, not {self.next_deadline_s}"
        self.counters.check_integrity()
        num_waiting = {view.tenant: view.num_waiting for view in self.counters.views if view.num_waiting}
        assert num_waiting == {tenant: sum(1 for _ in line) for tenant, line in self._lines.items()}, "not in line"
        for tenant, line in self._lines.items():
            line.check_integrity()
            assert all(state.request.tenant == tenant for state in line), f"a stranger is in the line of {tenant!r}"


def first_of(order: PrefillOrder, states: Sequence[RequestState], now_s: float) -> RequestState:
    """Return the first request of `in_order`, without sorting the others."""
    keys = order.keys([state.rank for state in states], now_s)
    first = min(keys)
    return min([state for key, state in zip(keys, states, strict=True) if key == first], key=attrgetter("arrival"))


def in_order(order: PrefillOrder, states: Sequence[RequestState], now_s: float) -> list[RequestState]:
    """Sort by the order's keys at ``now_s``, then by arrival, then by id."""
    if len(states) < 2:
        return list(states)
    keys = order.keys([state.rank for state in states], now_s)
    keyed = [(key, state.arrival, state) for key, state in zip(keys, states, strict=True)]
    return [state for *_, state in sorted(keyed, key=itemgetter(0, 1))]

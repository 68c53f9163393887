"""Pipelined prefill: a long prompt's chunks computed by several instances in turn, each passing its KV on to the
others.

A chunk can begin while the one before it is still computed elsewhere: at each layer it waits for the KV of the tokens
before it, which is written one layer ahead. So the chunks of ``size`` instances overlap but for a layer's time, nobody
has to begin together, and what a group of them costs is its end: while the last chunks are computed, not everyone has
one. Chunks therefore taper, down to those whose constant time is still a small part of their step. And its beginning:
each member's first chunk begins a layer of the one before it later than that one. So chunks grow first.

Or as a *parallel prefill* (Tetris): all members begin at once, each with a slice of the next tokens, and end at once:
slices are of equal time, the later ones shorter, as they attend to more. (Tetris has slices of equal length, the first
and the last of them for one member and so on, as its ring passes equal shards; here each is sent to everybody.) So a
slice needs only those before it, as a chunk does. Everyone must be there for it, and waits for the slowest before it;
but there is no end at which some have none. So it is for prompts of few chunks, and for more members than layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise

from pdmesh.model import InstanceId
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.packing import CHUNK_UNIT_TOKENS, NOTHING, ChunkSizer
from pdmesh.policy.sequence_parallel import (
    ElasticPlanner,
    FreeAt,
    GroupLatency,
    SequenceParallelPlanner,
    tokens_within,
)

#: So fast chunks grow: 2 to 4 are alike for 4 to 16 members, and 5 % better for 8 than to begin with long ones.
_GROWTH = 3

#: Halvings of the time that slices are given: a millionth of it is left.
_HALVINGS = 20


class Schedule(StrEnum):
    """How the members of a group share a prompt."""

    PIPELINED = "pipelined"
    PARALLEL = "parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """Chooses the helpers of a prompt's leader, and the lengths of the chunks."""

    latency: LinearLatencyModel  # of one instance
    max_members: int  # of a group; 1: never together
    #: By which more members must bring the first token forward; None: it follows the load.
    improvement_rate: float | None
    bytes_per_s: float  # that an instance sends to others
    min_step_s: float  # a chunk is so long, but for a prompt's last
    step_overhead: float  # of the constant time of steps, as a share of them
    #: Makes the planner of groups with such latencies, an improvement rate, and the fewest tokens of a chunk.
    planner: Callable[[GroupLatency, float, int], SequenceParallelPlanner] = ElasticPlanner
    doubles: bool = False  # 1, 2, 4, ... members, and not those between
    schedule: Schedule = Schedule.PIPELINED
    #: Of every group, formed as its prompt is placed, whatever that gains (PecSched); 1: the planner says.
    group_size: int = 1
    #: Members take chunks also while they decode, and their decodes into the same steps.
    beside_decodes: bool = False
    #: By bytes of a token's KV, the most members, and the improvement rate.
    _planners: dict[tuple[float, int, float], SequenceParallelPlanner] = field(
        default_factory=dict[tuple[float, int, float], SequenceParallelPlanner]
    )

    def helpers(
        self,
        num_tokens: int,
        num_done_tokens: int,
        members: Collection[InstanceId],
        pool: Sequence[FreeAt],
        token_bytes: float,
        max_members: int,
        rate_for_load: float,
    ) -> tuple[InstanceId, ...]:
        """Return the instances of the ``pool`` that should help ``members``, also in it, with the rest of a prompt.

        Instances of the pool are free in so many seconds. A token's KV has ``token_bytes``. ``rate_for_load`` is the
        improvement rate that the load of the mesh suggests, for where none is set. Those named are worth their
        part now; they need not be free yet, and one that is not will be asked about again at the next chunk.
        """
        rate = rate_for_load if self.improvement_rate is None else self.improvement_rate
        planner = self._planner(token_bytes, min(max_members, self.max_members), rate)
        if not any(len(members) < size <= len(pool) for size in planner.latency):
            return ()
        copy_s = num_done_tokens * token_bytes / self.bytes_per_s  # of all that was computed before
        arriving = sorted([(free_s if name in members else max(free_s, copy_s), name) for free_s, name in pool])
        largest = planner.plan(num_tokens, num_done_tokens, members, arriving)[-1].members
        return tuple([name for name in largest if name not in members])

    def copy_s(self, num_tokens: int, token_bytes: float) -> float:
        """Return the seconds until a member that joins has the KV of so many tokens."""
        return num_tokens * token_bytes / self.bytes_per_s

    def chunk_tokens(self, start: int, num_left: int, num_members: int, most: int) -> int:
        """The next chunk of a prompt with ``num_members``, of whom one has a step for ``most`` tokens.

        At most a member's part of what is left: shorter ones would even the end out no better, since each ends after
        the one before it, and every chunk costs its constant time and its pieces. And at most a member's part of
        `_GROWTH` times what was planned before: everybody begins a layer of a chunk after the one before. Two do not
        wait long for that, and longer chunks are worth more (5 % of a 16K prompt, 82M on two EPYC cores, 2026-11-23).
        """
        num_together = num_left if num_members == 2 else min(num_left, _GROWTH * start)
        part = num_together // num_members
        return min(most, max(self._least_tokens(start, num_left), part))

    def first_chunk_tokens(self, num_tokens: int, num_members: int, most: int) -> int:
        """The first chunk of a prompt for which so many are free, where one has a step for ``most`` tokens.

        Those that compute at once wait for it: then it is twice as long as its constant time.
        """
        if self.schedule is not Schedule.PIPELINED:
            sizer = ChunkSizer(self.latency, num_tokens)
            return min(most, max(CHUNK_UNIT_TOKENS, sizer.largest(NOTHING, 0, num_tokens, 2 * self.latency.a_s)))
        return min(most, max(self._least_tokens(0, num_tokens), most // num_members))

    def most_members(self, num_layers: int) -> int:
        """Return the largest useful number of members; in turn, one for each layer can compute at a time."""
        return num_layers if self.schedule is Schedule.PIPELINED else self.max_members

    def last_slices(self, start: int, num_tokens: int, begin_s: Sequence[float], unit: int) -> list[int]:
        """All that is left of a prompt: as many slices as there are members, of which the last one ends the soonest.

        They begin in ``begin_s`` seconds, in their order. Multiples of ``unit`` tokens, but for the last one, which is
        not empty; others may be.
        """

        def until(end_s: float) -> list[int]:
            """How many tokens each can compute by then. A unit more would keep all waiting that come after it."""
            found: list[int] = []
            for each_s in begin_s:
                num = tokens_within(self.latency, start + sum(found), end_s - each_s)
                found.append(num if len(found) == len(begin_s) - 1 else num // unit * unit)
            return found

        latest_s = max(begin_s) + _chunk_s(self.latency, start, num_tokens)
        ends = accumulate(self._soonest(until, num_tokens, latest_s)[:-1])
        most = (num_tokens - 1) // unit * unit
        return [after - before for before, after in pairwise([0, *(min(end, most) for end in ends), num_tokens])]

    def slices(
        self, start: int, num_tokens: int, begin_s: Sequence[float], unit: int, lag_s: float, most: int
    ) -> list[int]:
        """Cut ``num_tokens`` or a little more, at most ``most``, into slices for which no member waits.

        They begin in ``begin_s`` seconds, in their order, and each ends ``lag_s`` or more after the one before it, by
        up to a unit's time: whoever ends sooner begins the next ones sooner. Multiples of ``unit`` tokens; the last
        one is not empty.
        """

        def until(end_s: float) -> list[int]:
            """How many tokens each computes if the first one ends by then."""
            first = tokens_within(self.latency, start, end_s - begin_s[0]) // unit * unit
            found = [first]
            before_s = begin_s[0] + _chunk_s(self.latency, start, first) if first else end_s
            for each_s in begin_s[1:]:
                at = start + sum(found)
                num = -(-tokens_within(self.latency, at, before_s + lag_s - each_s) // unit) * unit
                if num:
                    before_s = max(before_s + lag_s, each_s + _chunk_s(self.latency, at, num))
                found.append(num)
            return found

        found = self._soonest(until, num_tokens, max(begin_s) + _chunk_s(self.latency, start, num_tokens + unit))
        ends = [min(end, most - unit) for end in accumulate(found[:-1])]
        last = min(max(found[-1], unit), most - max(ends, default=0))
        return [*(after - before for before, after in pairwise([0, *ends])), last]

    @staticmethod
    def _soonest(until: Callable[[float], list[int]], num_tokens: int, latest_s: float) -> list[int]:
        """The slices for the earliest time for which they are as many tokens."""
        low_s, high_s = 0.0, latest_s
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if sum(until(middle_s)) >= num_tokens else (middle_s, high_s)
        return until(high_s)

    def _least_tokens(self, start: int, num_left: int) -> int:
        return max(
            CHUNK_UNIT_TOKENS, ChunkSizer(self.latency, num_left).largest(NOTHING, start, num_left, self.min_step_s)
        )

    def _planner(self, token_bytes: float, most: int, rate: float) -> SequenceParallelPlanner:
        known = self._planners.get((token_bytes, most, rate))
        if known is None:
            sizes = [size for size in range(1, most + 1) if not (self.doubles and size & (size - 1))]
            in_turn = self.schedule is Schedule.PIPELINED
            latency = {size: self._of_size(size, token_bytes, self._tail_s(size) if in_turn else 0.0) for size in sizes}
            known = self.planner(latency, rate, CHUNK_UNIT_TOKENS)
            self._planners[token_bytes, most, rate] = known
        return known

    def _tail_s(self, size: int) -> float:
        """Return the seconds lost at a pipelined group's end, where not every member has a chunk."""
        return self.min_step_s * (1 - 1 / size)

    def _of_size(self, size: int, token_bytes: float, more_s: float) -> LinearLatencyModel:
        """Each member computes its part of the tokens, and sends their KV to each other one meanwhile."""
        model = self.latency
        linear_s = model.b_s * (1 + self.step_overhead)
        sent_s = token_bytes * (size - 1) / self.bytes_per_s
        return replace(
            model,
            a_s=model.a_s + more_s,
            b_s=max(linear_s, sent_s) / size,
            c_s=model.c_s / size,
            d_s=model.d_s / size,
        )


def _chunk_s(model: LinearLatencyModel, start: int, num_tokens: int) -> float:
    return model.step_s(StepShape((ChunkShape(num_tokens, start),), 0, 0))

"""Prefill groups: several instances compute one long prompt and send each other the KV.

In a *pipelined prefill* the members compute chunks in turn. A chunk can begin while the previous one is still computed
elsewhere: at each layer it waits for the KV of earlier tokens, which is written one layer ahead. So the chunks of the
members overlap except for a layer's time, and members need not begin together. Time is lost at the end, where not every
member has a chunk. So chunks shrink there, as long as a step's constant time stays a small part. Time is also lost at
the beginning, because each member's first chunk begins a layer after the previous one. So chunks grow at first.

In a *parallel prefill* (Tetris) all members begin at once, each with a slice of the next tokens, and end at once. All
slices take equal time, so later ones are shorter, since they attend to more tokens. (Tetris has slices of equal length
and gives one member the first and the last, and so on, because its ring passes equal shards. Here each slice is sent to
all members.) A slice needs only earlier slices, as a chunk does. All members must be free at the same time, and wait
for the slowest earlier slice. But no member is without work at the end. So parallel prefill suits prompts of few chunks
and groups with more members than layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from math import frexp, inf, ldexp

from pdmesh.model import InstanceId
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh.policy.links import LinkRates
from pdmesh.policy.packing import CHUNK_UNIT_TOKENS, NOTHING, ChunkSizer
from pdmesh.policy.sequence_parallel import (
    ElasticPlanner,
    FreeAt,
    GroupLatency,
    SequenceParallelPlanner,
    tokens_within,
)
from pdmesh.policy.views import InstanceView

#: Growth of chunks: each is at most this multiple of the tokens before it, shared by the members. Values of 2 to 4 are
#: alike for 4 to 16 members, and 5 % better for 8 members than beginning with long chunks.
_GROWTH = 3

#: Least number of instances for each long prompt with which members compute at once (`GroupPolicy.at_once`). With
#: fewer, members are often busy, and slices that must begin together make them wait.
AT_ONCE_SHARE = 4

#: Most members of a group that takes turns where another one computes at once: with more, the start and the end of the
#: turns take longer than the members save.
MAX_IN_TURN = 4

#: Bisection steps in the search for the end of slices: the error is a millionth of the first bound.
_HALVINGS = 20


class Schedule(StrEnum):
    """How the members of a group share a prompt."""

    PIPELINED = "pipelined"
    PARALLEL = "parallel"


#: Value of `policy.sequence_parallel` for groups that compute at once while instances are spare, and else in turn.
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """Rule that chooses the helpers of a prompt's leader, and the lengths of the chunks.

    ``latency``: step times of one instance.
    ``max_members``: most members of a group; 1: no groups.
    ``improvement_rate``: share by which more members must bring the first token forward; None: by the load.
    ``links``: rates at which members send KV to each other.
    ``min_step_s``: shortest step of a chunk, except a prompt's last one.
    ``step_overhead``: share of steps that is their constant time.
    ``planner``: builds a planner from latencies by group size, an improvement rate and the fewest tokens of a chunk.
    ``doubles``: whether groups have only 1, 2, 4, ... members.
    ``group_size``: size of every group, formed when its prompt is placed (PecSched); 1: the planner chooses.
    ``beside_decodes``: whether members compute chunks while they decode, in the same steps.
    ``at_once``: rule in force while there are `AT_ONCE_SHARE` instances for each long prompt. With such a rule, a group
    has at most the prompt's share of the instances. None: this rule is always in force, and groups have no such limit.
    """

    latency: LinearLatencyModel
    max_members: int
    improvement_rate: float | None
    links: LinkRates
    min_step_s: float
    step_overhead: float
    planner: Callable[[GroupLatency, float, int], SequenceParallelPlanner] = ElasticPlanner
    doubles: bool = False
    schedule: Schedule = Schedule.PIPELINED
    group_size: int = 1
    beside_decodes: bool = False
    at_once: GroupPolicy | None = None
    #: By seconds to send a token's KV, the most members, and the improvement rate.
    _planners: dict[tuple[float, int, float], SequenceParallelPlanner] = field(
        default_factory=dict[tuple[float, int, float], SequenceParallelPlanner]
    )

    def helpers(
        self,
        num_tokens: int,
        num_done_tokens: int,
        members: Collection[InstanceId],
        pool: Sequence[FreeAt],
        links_s: Mapping[InstanceId, float],
        max_members: int,
        rate_for_load: float,
    ) -> tuple[InstanceId, ...]:
        """Return the instances of the ``pool`` that should help ``members`` with the rest of a prompt.

        ``pool`` has the seconds until each instance is free, and ``links_s`` how long one token's KV takes to it
        (`link_s`); ``members`` are included. ``rate_for_load`` is the improvement rate that the load of the
        mesh suggests, used where none is configured. The helpers need not be free yet; the choice is made anew for each
        chunk.

        All members receive all KV, so the slowest link sets the group's pace. Instances behind a slower link are taken
        only if a plan with them ends earlier by the improvement rate. Of instances that are free at the same time,
        those behind the fastest links come first, and of these the first ones of the ``pool``.
        """
        rate = rate_for_load if self.improvement_rate is None else self.improvement_rate
        most = min(max_members, self.max_members)
        of_members_s = max(links_s[name] for _, name in pool if name in members)
        best: tuple[InstanceId, ...] = ()
        best_s = inf
        for pace_s in sorted({max(of_members_s, each_s) for each_s in links_s.values()}):
            planner = self._planner(pace_s, most, rate)
            near = [(free_s, name) for free_s, name in pool if links_s[name] <= pace_s]
            if not any(len(members) < size <= len(near) for size in planner.latency):
                continue
            arriving = [
                (free_s if name in members else max(free_s, num_done_tokens * links_s[name]), name)
                for free_s, name in near
            ]
            arriving.sort(key=lambda entry: (entry[0], links_s[entry[1]]))
            last = planner.plan(num_tokens, num_done_tokens, members, arriving)[-1]
            if last.end_s < best_s * (1 - rate):
                best, best_s = last.members, last.end_s
        return tuple([name for name in best if name not in members])

    def link_s(self, leader: InstanceView, member: InstanceView, token_bytes: float) -> float:
        """Return the predicted seconds in which the KV of one token moves between two members, the slower way.

        A rate other than the configured one is rounded down to a power of two, which bounds the number of planners.
        """
        configured = self.links.bytes_per_s(leader, None)
        rates = self.links.bytes_per_s(leader, member), self.links.bytes_per_s(member, leader)
        rate = configured if leader is member else min(rates)
        return token_bytes / (rate if rate == configured else ldexp(1.0, frexp(rate)[1] - 1))

    def chunk_tokens(self, start: int, num_left: int, num_members: int, most: int) -> int:
        """Return the size of a group's next chunk, for a member with a step for at most ``most`` tokens.

        The chunk is a member's share of the ``num_left`` tokens: shorter chunks cost more and do not end more evenly.
        With three or more members, the chunk is at most a member's share of `_GROWTH` times ``start``. Then no member
        waits long for the previous chunk's layers. Two members gain more by long chunks (5 % of a 16K prompt, 82M on
        two EPYC cores, 2026-11-23).

        A chunk shorter than fits into ``min_step_s`` is lengthened to that time, and at least to `CHUNK_UNIT_TOKENS`.
        So the result may exceed ``num_left``, but not ``most``.
        """
        num_together = num_left if num_members == 2 else min(num_left, _GROWTH * start)
        part = num_together // num_members
        return min(most, max(self._least_tokens(start, num_left), part))

    def first_chunk_tokens(self, num_tokens: int, num_members: int, most: int) -> int:
        """Return the size of a prompt's first chunk, for a member with a step for ``most`` tokens.

        In a pipelined prefill the chunk is an even share of ``most`` for ``num_members``, but no shorter than a step
        is worth. In a parallel one all members wait for this chunk, so its step is only twice as long as the constant
        time.
        """
        if self.schedule is not Schedule.PIPELINED:
            sizer = ChunkSizer(self.latency, num_tokens)
            most_s = 2 * self.latency.a_s + self.latency.weights_s
            return min(most, max(CHUNK_UNIT_TOKENS, sizer.largest(NOTHING, 0, num_tokens, most_s)))
        return min(most, max(self._least_tokens(0, num_tokens), most // num_members))

    def most_members(self, num_layers: int) -> int:
        """Return the largest useful number of members; in a pipeline, one for each layer can compute at a time."""
        return num_layers if self.schedule is Schedule.PIPELINED else self.max_members

    def last_slices(self, start: int, num_tokens: int, begin_s: Sequence[float], unit: int) -> list[int]:
        """Cut the rest of a prompt into one slice for each member so that the last slice ends as soon as possible.

        The slices begin in ``begin_s`` seconds, in order. All but the last are multiples of ``unit`` tokens and may be
        empty; the last one is not empty.
        """

        def until(end_s: float) -> list[int]:
            """Return how many tokens each member can compute by ``end_s``, rounded down so that no later one waits."""
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

        The slices begin in ``begin_s`` seconds, in order. Each ends ``lag_s`` after the previous one, or later by up to
        the time of a unit. A member that ends sooner begins its next slice sooner. All slices are multiples of ``unit``
        tokens, and the last one is not empty.
        """

        def until(end_s: float) -> list[int]:
            """Return how many tokens each member computes if the first one ends by ``end_s``."""
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
        """Return the slices of ``until`` for the earliest end at which they have at least ``num_tokens`` together."""
        low_s, high_s = 0.0, latest_s
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if sum(until(middle_s)) >= num_tokens else (middle_s, high_s)
        return until(high_s)

    def _least_tokens(self, start: int, num_left: int) -> int:
        return max(
            CHUNK_UNIT_TOKENS, ChunkSizer(self.latency, num_left).largest(NOTHING, start, num_left, self.min_step_s)
        )

    def _planner(self, send_s: float, most: int, rate: float) -> SequenceParallelPlanner:
        known = self._planners.get((send_s, most, rate))
        if known is None:
            sizes = [size for size in range(1, most + 1) if not (self.doubles and size & (size - 1))]
            in_turn = self.schedule is Schedule.PIPELINED
            latency = {size: self._of_size(size, send_s, self._tail_s(size) if in_turn else 0.0) for size in sizes}
            known = self.planner(latency, rate, CHUNK_UNIT_TOKENS)
            self._planners[send_s, most, rate] = known
        return known

    def _tail_s(self, size: int) -> float:
        """Return the seconds lost at a pipelined group's end, where not every member has a chunk."""
        return self.min_step_s * (1 - 1 / size)

    def _of_size(self, size: int, send_s: float, more_s: float) -> LinearLatencyModel:
        """Return the latency model of a group whose members compute equal parts and send their KV to all others."""
        model = self.latency
        linear_s = model.b_s * (1 + self.step_overhead)
        return replace(
            model,
            a_s=model.a_s + more_s,
            b_s=max(linear_s, send_s * (size - 1)) / size,
            c_s=model.c_s / size,
            d_s=model.d_s / size,
        )


def _chunk_s(model: LinearLatencyModel, start: int, num_tokens: int) -> float:
    return model.step_s(StepShape((ChunkShape(num_tokens, start),), 0, 0))

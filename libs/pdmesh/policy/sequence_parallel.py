"""How many instances compute each chunk of a long prompt together, and when: sequence-parallel planning.

A plan is a sequence of chunks. Each chunk's group contains the groups of earlier chunks. It begins when all its
instances are free and the chunk before it is done, and takes the time that Eq. 1 of Tetris (`pdmesh.policy.latency`)
gives for its size. Instances that already hold a part of the prompt come first, then the others in the order in which
they become free. The planner assumes equal instances that are equally far from each other (one host, or one switch).

`ElasticPlanner` finds the best of all chains of sizes by a dynamic program: of two ways to have a group free at the
same time, the one with more tokens done is never worse, so one number for each size is enough. Tetris's own search and
groups of a fixed size, which it is compared with, are in `pdmesh_lab.studies.planners`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, Protocol

from pdmesh.model import InstanceId
from pdmesh.policy.latency import LinearLatencyModel

#: Predicted time of a chunk, by how many instances compute it.
GroupLatency = Mapping[int, LinearLatencyModel]


#: When an instance has computed what it was given, in seconds from now. A plain tuple: these are sorted for every plan.
FreeAt = tuple[float, InstanceId]
_FREE_S = itemgetter(0)


class PlannedChunk(NamedTuple):
    """Tokens computed together, from ``start_s`` to ``end_s`` (seconds from now)."""

    num_tokens: int
    members: tuple[InstanceId, ...]
    start_s: float
    end_s: float


class SequenceParallelPlanner(Protocol):
    """Spreads the rest of a prompt over instances."""

    @property
    def latency(self) -> GroupLatency:
        """Latency models by the sizes that groups may have."""
        ...

    def plan(
        self, num_tokens: int, num_done_tokens: int, held: Collection[InstanceId], pool: Sequence[FreeAt]
    ) -> tuple[PlannedChunk, ...]:
        """Chunks for the tokens from ``num_done_tokens`` to ``num_tokens``, of which only the first one binds.

        ``pool`` (not empty) are the instances that may take part, ``held`` those of them that hold the tokens before;
        every group contains these. Raises ValueError if none of the sizes can be had.
        """
        ...


class _Size(NamedTuple):
    """A size that groups may have, with Eq. 1 for it, and what its root takes of that."""

    size: int
    a_s: float
    b_s: float
    c_s: float
    d_s: float
    square: float  # four times d_s


@dataclass(frozen=True, slots=True)
class ElasticPlanner:
    """The chain of sizes with the earliest first token, over sizes that are worth their instances.

    A size is worth them if the chain that ends on it is earlier than every smaller one's by ``improvement_rate``, or if
    the paper's rule says so of single chunks (Tetris, Algorithm 2): otherwise instances go to requests that gain more
    from them. So the first token never comes later than Tetris's own search has it, with the same rate.
    ``min_chunk_tokens`` keeps chunks worth their step.
    """

    latency: GroupLatency
    improvement_rate: float = 0.0
    min_chunk_tokens: int = 1
    _sizes: tuple[_Size, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        models = sorted(self.latency.items())
        rows = tuple([_Size(size, model.a_s, model.b_s, model.c_s, model.d_s, 4 * model.d_s) for size, model in models])
        object.__setattr__(self, "_sizes", rows)

    def plan(
        self, num_tokens: int, num_done_tokens: int, held: Collection[InstanceId], pool: Sequence[FreeAt]
    ) -> tuple[PlannedChunk, ...]:
        """Return the plan that ends first among the group sizes that reach the improvement rate."""
        line = line_of(held, pool)
        num_instances, num_least = len(line), len(held) or 1
        held_s = line[num_least - 1][0]
        num_left, least_tokens, kept = num_tokens - num_done_tokens, self.min_chunk_tokens, 1 - self.improvement_rate

        # Of each size, as far as it may be of use: its constants, when it is free, the most tokens that can be done by
        # then, and which size does the last of them. Whoever is free after a chain has ended is of no use.
        sizes: list[_Size] = []
        frees_s: list[float] = []
        done: list[int] = []
        before: list[int] = []
        # What the root of Eq. 1 needs of those sizes, the largest first: when the first chunk of one has paid its
        # constant, what is done by then, and the rest of Eq. 1 behind that. Spelt out because it is most of the cost.
        roots: list[tuple[float, int, float, float, int]] = []
        ends_s: list[float] = []
        earliest_s = math.inf
        # The last end that is earlier than all before it by the rate, and its index: of chains and of single chunks.
        chain_s = single_s = math.inf
        chain = single = -1
        index = 0
        for row in self._sizes:
            size, a_s, b_s, c_s, d_s, square = row
            if not num_least <= size <= num_instances:
                continue
            free_s = line[size - 1][0]
            if free_s < held_s:
                free_s = held_s
            end_s = free_s + a_s + num_left * (b_s + c_s * num_done_tokens + d_s * num_left)
            if end_s < single_s * kept:
                single_s, single = end_s, index
            index += 1
            if free_s >= earliest_s:
                continue
            most, last = num_done_tokens, -1
            for paid_s, done_before, linear, squares, i in roots:
                spare_s = free_s - paid_s
                # No more than without the square: that is quickly said.
                if spare_s > 0 and spare_s >= (most - done_before) * linear:
                    chunk = int(2 * spare_s / (linear + math.sqrt(linear * linear + squares * spare_s)))
                    if chunk >= least_tokens and done_before + chunk >= most:
                        most, last = done_before + chunk, i
            if most >= num_tokens:
                earliest_s = free_s
                continue
            left = num_tokens - most
            end_s = free_s + a_s + left * (b_s + c_s * most + d_s * left)
            if end_s < earliest_s:
                earliest_s = end_s
            if end_s < chain_s * kept:
                chain_s, chain = end_s, len(sizes)
            roots.insert(0, (free_s + a_s, most, b_s + c_s * most, square, len(sizes)))
            sizes.append(row)
            frees_s.append(free_s)
            done.append(most)
            before.append(last)
            ends_s.append(end_s)
        if not sizes:
            raise no_size(self.latency, num_least, num_instances)
        j = min(range(min(max(chain, single) + 1, len(sizes))), key=ends_s.__getitem__)
        names = [name for _, name in line[: sizes[j].size]]
        chunks: list[PlannedChunk] = []
        until = num_tokens
        while j >= 0:
            size, a_s, b_s, c_s, d_s, _ = sizes[j]
            start, free_s = done[j], frees_s[j]
            tokens = until - start
            end_s = free_s + a_s + tokens * (b_s + c_s * start + d_s * tokens)
            chunks.append(PlannedChunk(tokens, tuple(names[:size]), free_s, end_s))
            until, j = start, before[j]
        chunks.reverse()
        return tuple(chunks)


def line_of(held: Collection[InstanceId], pool: Sequence[FreeAt]) -> list[FreeAt]:
    """The instances in the order in which groups take them; of those that are free together, in the pool's."""
    if not held:
        return sorted(pool, key=_FREE_S)
    members = sorted([entry for entry in pool if entry[1] in held], key=_FREE_S)
    return members + sorted([entry for entry in pool if entry[1] not in held], key=_FREE_S)


def no_size(latency: GroupLatency, least: int, most: int) -> ValueError:
    """The error of a planner that knows no group of ``least`` to ``most`` instances."""
    return ValueError(f"no group of {least} to {most} instances has a latency model; sizes {sorted(latency)} do")


def tokens_within(model: LinearLatencyModel, history: int, budget_s: float) -> int:
    """The longest chunk behind ``history`` tokens that ends within ``budget_s``: the root of Eq. 1, rounded down.

    A token must cost something (``b_s`` above 0), as in every model that was fitted.
    """
    spare_s = budget_s - model.a_s
    if spare_s <= 0:
        return 0
    linear = model.b_s + model.c_s * history
    # 2 s / (b + sqrt(b² + 4 d s)) does not cancel where the square is small.
    return int(2 * spare_s / (linear + math.sqrt(linear * linear + 4 * model.d_s * spare_s)))

"""Sequence-parallel planning: how many instances compute each chunk of a long prompt together, and when.

A plan is a sequence of chunks. Each chunk's group contains the groups of earlier chunks. A chunk begins when all
instances of its group are free and the previous chunk is done. Eq. 1 of Tetris (`pdmesh.policy.latency`) gives its
duration for the group's size. Instances that already hold a part of the prompt come first, then the others in the order
in which they become free. The planner assumes equal instances and links; `pdmesh.policy.prefill_groups` plans anew with
each further kind of link.

`ElasticPlanner` finds the best of all chains of sizes by dynamic programming. One number for each size is enough: of
two ways to have a group free at the same time, the one with more tokens done is never worse. For comparison,
`pdmesh_lab.studies.planners` has Tetris's own search and groups of a fixed size.
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


#: Seconds until an instance is free, and its id. A plain tuple, because these are sorted for every plan.
FreeAt = tuple[float, InstanceId]
_FREE_S = itemgetter(0)


class PlannedChunk(NamedTuple):
    """Tokens that ``members`` compute together, from ``start_s`` to ``end_s`` (seconds from now)."""

    num_tokens: int
    members: tuple[InstanceId, ...]
    start_s: float
    end_s: float


class SequenceParallelPlanner(Protocol):
    """Planner that spreads the rest of a prompt over instances."""

    @property
    def latency(self) -> GroupLatency:
        """Latency models by the sizes that groups may have."""
        ...

    def plan(
        self, num_tokens: int, num_done_tokens: int, held: Collection[InstanceId], pool: Sequence[FreeAt]
    ) -> tuple[PlannedChunk, ...]:
        """Return chunks for the tokens from ``num_done_tokens`` to ``num_tokens``; only the first chunk is binding.

        ``pool`` (not empty) are the instances that may take part. The instances ``held`` hold the earlier tokens and
        are in every group. Raises ValueError if no size of a group is possible.
        """
        ...


class _Size(NamedTuple):
    """A size that groups may have, with the coefficients of Eq. 1. ``square`` is 4 ``d_s``, for the root of Eq. 1."""

    size: int
    a_s: float
    b_s: float
    c_s: float
    d_s: float
    square: float


@dataclass(frozen=True, slots=True)
class ElasticPlanner:
    """Planner of the chain of sizes with the earliest first token, over sizes that are worth their instances.

    A size is worth its instances if the chain ending on it is earlier than the chains of all smaller sizes by
    ``improvement_rate``. The paper's rule for single chunks (Tetris, Algorithm 2) admits further sizes. Otherwise the
    instances are left to requests that gain more. So the first token never comes later than in Tetris's own search at
    the same rate. ``min_chunk_tokens`` is the least number of tokens that is worth a step.
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
        """Return the plan that ends first among the group sizes that reach the improvement rate.

        Raises ValueError if no size is possible.
        """
        line = line_of(held, pool)
        num_instances, num_least = len(line), len(held) or 1
        held_s = line[num_least - 1][0]
        num_left, least_tokens, kept = num_tokens - num_done_tokens, self.min_chunk_tokens, 1 - self.improvement_rate

        # For each useful size: its constants, when its group is free, the most tokens that can be done by then, and the
        # index of the size that does the last of these. Groups that are free after a chain has ended are of no use.
        sizes: list[_Size] = []
        frees_s: list[float] = []
        done: list[int] = []
        before: list[int] = []
        # Inputs to the root of Eq. 1 for these sizes, the largest first: when the first chunk has paid its constant,
        # the tokens done by then, the linear and square terms, and the index. Precomputed because the root is hot.
        roots: list[tuple[float, int, float, float, int]] = []
        ends_s: list[float] = []
        earliest_s = math.inf
        # The last end that is earlier than all previous ones by the rate, and its index: for chains, for single chunks.
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
                # The bound without the square term is cheap to check first.
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
    """Return the pool in the order in which groups take instances: the held ones first, then by when they are free."""
    if not held:
        return sorted(pool, key=_FREE_S)
    members = sorted([entry for entry in pool if entry[1] in held], key=_FREE_S)
    return members + sorted([entry for entry in pool if entry[1] not in held], key=_FREE_S)


def no_size(latency: GroupLatency, least: int, most: int) -> ValueError:
    """Return the error of a planner without a latency model for groups of ``least`` to ``most`` instances."""
    return ValueError(f"no group of {least} to {most} instances has a latency model; sizes {sorted(latency)} do")


def tokens_within(model: LinearLatencyModel, history: int, budget_s: float) -> int:
    """Return the longest chunk after ``history`` tokens that ends within ``budget_s``: the root of Eq. 1, rounded down.

    A chunk bound by reading the weights has another root, and the smaller root holds. ``b_s`` must be above 0, as in
    every fitted model. 0 if the budget is no longer than an empty step.
    """
    spare_s, attention = budget_s - model.a_s, model.c_s * history
    if spare_s <= model.weights_s:
        return 0
    num_tokens = _root(model.b_s + attention, model.d_s, spare_s)
    if model.b_s * num_tokens < model.weights_s:
        spare_s -= model.weights_s
        most = model.weights_s / model.b_s
        return int(min(most, _root(attention, model.d_s, spare_s))) if attention or model.d_s else int(most)
    return int(num_tokens)


def _root(linear: float, square: float, seconds: float) -> float:
    """Return n with ``linear`` n + ``square`` n² = ``seconds``."""
    # 2 s / (b + sqrt(b² + 4 d s)) does not cancel where the square is small.
    return 2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds))

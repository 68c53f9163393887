"""How many instances compute each chunk of a long prompt together, and when: sequence-parallel planning.

A plan is a sequence of chunks. Each chunk's group holds those of the chunks before it, begins when all its instances
are free and the chunk before it is done, and takes what Eq. 1 of Tetris (`pdmesh.policy.latency`) says for its size.
Instances are taken in the order in which they become free; those that already hold a part of the prompt come first.
They are taken as equal, and as equally far from each other (one host, or one switch).

`ChunkwisePlanner` is Tetris's own search (Algorithms 1 to 3), kept as the reference. `ElasticPlanner` finds the best of
all chains of sizes by a dynamic program: of two ways to have a group free at the same time, the one with more tokens
done is never worse, so one number for each size is enough.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pdmesh.model import InstanceId
from pdmesh.policy.latency import LinearLatencyModel

#: Predicted time of a chunk, by how many instances compute it.
GroupLatency = Mapping[int, LinearLatencyModel]


#: When an instance has computed what it was given, in seconds from now. A plain tuple: these are sorted for every plan.
FreeAt = tuple[float, InstanceId]


class PlannedChunk(NamedTuple):
    """Tokens computed together, from ``start_s`` to ``end_s`` (seconds from now)."""

    num_tokens: int
    members: tuple[InstanceId, ...]
    start_s: float
    end_s: float


class SequenceParallelPlanner(Protocol):
    """Spreads the rest of a prompt over instances."""

    def plan(
        self, num_tokens: int, num_done_tokens: int, held: Collection[InstanceId], pool: Sequence[FreeAt]
    ) -> tuple[PlannedChunk, ...]:
        """Chunks for the tokens from ``num_done_tokens`` to ``num_tokens``, of which only the first one binds.

        ``pool`` (not empty) are the instances that may take part, ``held`` those of them that hold the tokens before;
        every group contains these. Raises ValueError if none of the sizes can be had.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedPlanner:
    """Always ``size`` instances (1: never together), or all where there are fewer of a size that is known."""

    latency: GroupLatency
    size: int = 1

    def plan(
        self, num_tokens: int, num_done_tokens: int, held: Collection[InstanceId], pool: Sequence[FreeAt]
    ) -> tuple[PlannedChunk, ...]:
        line = _line(held, pool)
        sizes = _sizes(self.latency, len(held), len(line))
        size = max((size for size in sizes if size <= self.size), default=sizes[0])
        start_s = _free_s(line, size)
        end_s = start_s + _chunk_s(self.latency[size], num_done_tokens, num_tokens - num_done_tokens)
        return (PlannedChunk(num_tokens - num_done_tokens, _names(line, size), start_s, end_s),)


@dataclass(frozen=True, slots=True)
class ElasticPlanner:
    """The chain of sizes with the earliest first token, over sizes that are worth their instances.

    A size is worth them if the chain that ends on it is earlier than every smaller one's by ``improvement_rate``, or if
    the paper's rule says so of single chunks (Tetris, Algorithm 2): otherwise instances go to requests that gain more
    from them. So the first token never comes later than Tetris's own search has it. ``min_chunk_tokens`` keeps chunks
    worth their step.
    """

    latency: GroupLatency
    improvement_rate: float = 0.0
    min_chunk_tokens: int = 1

    def plan(
        self, num_tokens: int, num_done_tokens: int, held: Collection[InstanceId], pool: Sequence[FreeAt]
    ) -> tuple[PlannedChunk, ...]:
        line = _line(held, pool)
        sizes = _sizes(self.latency, len(held), len(line))
        models = [self.latency[size] for size in sizes]
        frees_s = [_free_s(line, size) for size in sizes] if held else [line[size - 1][0] for size in sizes]

        # done[j]: the most tokens that can be done when group j is free; before[j]: the size that did the last of them.
        done: list[int] = []
        before: list[int | None] = []
        ends_s: list[float] = []
        single_s: list[float] = []
        # What `_tokens_within` needs of each smaller size: when its first chunk has paid its constant, and the rest of
        # Eq. 1 behind what is done by then. Spelt out here because this loop is most of a plan's cost.
        roots: list[tuple[float, float, float]] = []
        for model, free_s in zip(models, frees_s, strict=True):
            most, last = num_done_tokens, None
            for i, (paid_s, linear, square) in enumerate(roots):
                spare_s = free_s - paid_s
                if spare_s > 0:
                    chunk = int(2 * spare_s / (linear + math.sqrt(linear * linear + square * spare_s)))
                    if chunk >= self.min_chunk_tokens and done[i] + chunk > most:
                        most, last = done[i] + chunk, i
            done.append(min(most, num_tokens))
            before.append(last)
            roots.append((free_s + model.a_s, model.b_s + model.c_s * most, 4 * model.d_s))
            # A prompt that is done before group j is free needs no group j.
            ends_s.append(free_s + _chunk_s(model, most, num_tokens - most) if most < num_tokens else math.inf)
            single_s.append(free_s + _chunk_s(model, num_done_tokens, num_tokens - num_done_tokens))
        largest = max(_worthwhile(ends_s, self.improvement_rate), _worthwhile(single_s, self.improvement_rate))
        chain = [min(range(largest + 1), key=ends_s.__getitem__)]
        while (previous := before[chain[-1]]) is not None:
            chain.append(previous)
        chain.reverse()
        ends = [*(done[j] for j in chain[1:]), num_tokens]
        chunks: list[PlannedChunk] = []
        start = num_done_tokens
        for j, end in zip(chain, ends, strict=True):
            end_s = frees_s[j] + _chunk_s(models[j], start, end - start)
            chunks.append(PlannedChunk(end - start, _names(line, sizes[j]), frees_s[j], end_s))
            start = end
        return tuple(chunks)


@dataclass(frozen=True, slots=True)
class ChunkwisePlanner:
    """Chunk-wise dynamic sequence parallelism as Tetris has it (§5.1), the reference for `ElasticPlanner`."""

    latency: GroupLatency
    improvement_rate: float = 0.0
    min_chunk_tokens: int = 1
    single_chunk: bool = False  # the paper's ablation: Algorithm 2 alone

    def plan(
        self, num_tokens: int, num_done_tokens: int, held: Collection[InstanceId], pool: Sequence[FreeAt]
    ) -> tuple[PlannedChunk, ...]:
        line = _line(held, pool)
        sizes = _sizes(self.latency, len(held), len(line))
        return self._schedule(num_tokens, num_done_tokens, 0.0, line, sizes)

    def _schedule(
        self, num_tokens: int, done: int, now_s: float, line: Sequence[FreeAt], sizes: Sequence[int]
    ) -> tuple[PlannedChunk, ...]:
        """Algorithm 1. ``line`` has the queues that are left at ``now_s``, seconds from the plan's own start."""
        single_s = [_free_s(line, size) + _chunk_s(self.latency[size], done, num_tokens - done) for size in sizes]
        index = _worthwhile(single_s, self.improvement_rate)
        best_s, best_size = single_s[index], sizes[index]
        start_s = now_s + _free_s(line, best_size)
        best: tuple[PlannedChunk, ...] = (
            PlannedChunk(num_tokens - done, _names(line, best_size), start_s, now_s + best_s),
        )
        if self.single_chunk:
            return best
        candidates = [size for size in sizes if size <= best_size]
        for index, current in enumerate(candidates):
            for following in candidates[index + 1 :]:
                queue_s = _free_s(line, current)  # Algorithm 3
                budget_s = _free_s(line, following) - queue_s
                chunk = min(_tokens_within(self.latency[current], done, budget_s), num_tokens - done)
                if chunk < self.min_chunk_tokens or done + chunk >= num_tokens:
                    continue
                chunk_s = _chunk_s(self.latency[current], done, chunk)
                first = PlannedChunk(chunk, _names(line, current), now_s + queue_s, now_s + queue_s + chunk_s)
                passed_s = queue_s + chunk_s
                rest = [(max(0.0, free_s - passed_s), name) for free_s, name in line[:best_size]]
                larger = [size for size in candidates if size >= following]
                plan = (first, *self._schedule(num_tokens, done + chunk, now_s + passed_s, rest, larger))
                if plan[-1].end_s < best[-1].end_s:
                    best = plan
        return best


def _line(held: Collection[InstanceId], pool: Sequence[FreeAt]) -> list[FreeAt]:
    """The instances in the order in which groups take them."""
    if not held:
        return sorted(pool)
    return sorted(pool, key=lambda entry: (entry[1] not in held, entry))


def _sizes(latency: GroupLatency, num_held: int, num_instances: int) -> list[int]:
    sizes = sorted(size for size in latency if max(num_held, 1) <= size <= num_instances)
    if not sizes:
        wanted = f"{max(num_held, 1)} to {num_instances} instances"
        raise ValueError(f"no group of {wanted} has a latency model; sizes {sorted(latency)} do")
    return sizes


def _free_s(line: Sequence[FreeAt], size: int) -> float:
    """When the first ``size`` of the line are all free."""
    return max(line[:size])[0]


def _names(line: Sequence[FreeAt], size: int) -> tuple[InstanceId, ...]:
    return tuple([name for _, name in line[:size]])


def _chunk_s(model: LinearLatencyModel, history: int, num_tokens: int) -> float:
    return model.a_s + num_tokens * (model.b_s + model.c_s * history + model.d_s * num_tokens)


def _tokens_within(model: LinearLatencyModel, history: int, budget_s: float) -> int:
    """The longest chunk behind ``history`` tokens that ends within ``budget_s``: the root of Eq. 1, rounded down.

    A token must cost something (``b_s`` above 0), as in every model that was fitted.
    """
    spare_s = budget_s - model.a_s
    if spare_s <= 0:
        return 0
    linear = model.b_s + model.c_s * history
    # 2 s / (b + sqrt(b² + 4 d s)) does not cancel where the square is small.
    return int(2 * spare_s / (linear + math.sqrt(linear * linear + 4 * model.d_s * spare_s)))


def _worthwhile(ends_s: Sequence[float], rate: float) -> int:
    """The index of the last end that is earlier than all before it by ``rate`` (Tetris, Algorithm 2)."""
    best_s, best = math.inf, 0
    for index, end_s in enumerate(ends_s):
        if end_s < best_s * (1 - rate):
            best_s, best = end_s, index
    return best

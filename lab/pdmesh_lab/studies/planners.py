"""Tetris's own search, the planner with which `ElasticPlanner` is compared."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pdmesh.model import InstanceId
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh.policy.sequence_parallel import FreeAt, GroupLatency, PlannedChunk, line_of, no_size, tokens_within


@dataclass(frozen=True, slots=True)
class ChunkwisePlanner:
    """Chunk-wise dynamic sequence parallelism as in Tetris (§5.1), the reference for `ElasticPlanner`.

    With `single_chunk` only Algorithm 2 runs, the paper's ablation.
    """

    latency: GroupLatency
    improvement_rate: float = 0.0
    min_chunk_tokens: int = 1
    single_chunk: bool = False

    def plan(
        self, num_tokens: int, num_done_tokens: int, held: Collection[InstanceId], pool: Sequence[FreeAt]
    ) -> tuple[PlannedChunk, ...]:
        line = line_of(held, pool)
        sizes = _sizes(self.latency, len(held), len(line))
        return self._schedule(num_tokens, num_done_tokens, 0.0, line, sizes)

    def _schedule(
        self, num_tokens: int, done: int, now_s: float, line: Sequence[FreeAt], sizes: Sequence[int]
    ) -> tuple[PlannedChunk, ...]:
        """Run Algorithm 1. ``line`` has the queues that are left at ``now_s``, in seconds from the plan's own start."""
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
                chunk = min(tokens_within(self.latency[current], done, budget_s), num_tokens - done)
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


def _sizes(latency: GroupLatency, num_held: int, num_instances: int) -> list[int]:
    sizes = sorted(size for size in latency if max(num_held, 1) <= size <= num_instances)
    if not sizes:
        raise no_size(latency, max(num_held, 1), num_instances)
    return sizes


def _free_s(line: Sequence[FreeAt], size: int) -> float:
    """Return when the first ``size`` instances of the line are all free."""
    return max(line[:size])[0]


def _names(line: Sequence[FreeAt], size: int) -> tuple[InstanceId, ...]:
    return tuple([name for _, name in line[:size]])


def _chunk_s(model: LinearLatencyModel, history: int, num_tokens: int) -> float:
    return model.a_s + num_tokens * (model.b_s + model.c_s * history + model.d_s * num_tokens)


def _worthwhile(ends_s: Sequence[float], rate: float) -> int:
    """Return the index of the last end that is earlier than all before it by ``rate`` (Tetris, Algorithm 2)."""
    best_s, best = math.inf, 0
    for index, end_s in enumerate(ends_s):
        if end_s < best_s * (1 - rate):
            best_s, best = end_s, index
    return best

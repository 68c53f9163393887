"""The smallest pools that serve a workload within its targets, and the targets that no pools could meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdmesh.metrics import Slo
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh_lab.sim.workload import Arrival


class PoolSizes(NamedTuple):
    """Instances of each role."""

    num_prefill: int
    num_decode: int

    def __str__(self) -> str:
        return f"{self.num_prefill} prefill + {self.num_decode} decode"


class ContextRoom(NamedTuple):
    """Room for contexts, and the length beyond which they are spread over several instances.

    `num_kv_tokens` is the room of one instance. Longer contexts than `max_kv_tokens` are spread while they decode; 0:
    none are. Then a decode step takes `exchange_s` longer. At most `max_instances` hold one context.
    """

    num_kv_tokens: int
    max_kv_tokens: int = 0
    exchange_s: float = 0.0
    max_instances: int = 1

    @property
    def longest(self) -> int:
        """Largest number of tokens of a context."""
        return max(self.num_kv_tokens, self.max_kv_tokens * self.max_instances)

    def decode_s(self, model: LinearLatencyModel, num_tokens: int) -> float:
        """Return the seconds of a decode step of one request alone, with ``num_tokens`` of context."""
        if not 0 < self.max_kv_tokens < num_tokens:
            return model.step_s(StepShape((), 1, num_tokens))
        return model.step_s(StepShape((), 1, self.max_kv_tokens)) + self.exchange_s


@dataclass(slots=True)
class Search:
    """The pools that were tried, in order, and the answer. `sizes` is None if the largest pools were not enough."""

    sizes: PoolSizes | None = None
    attainments: dict[PoolSizes, float] = field(default_factory=dict[PoolSizes, float])


def smallest_pools(attainment: Callable[[PoolSizes], float], wanted: float, max_instances: int) -> Search:
    """Return the search for the pools with the fewest instances whose ``attainment``, 0 to 1, is ``wanted`` or more.

    Neither pool gets more than ``max_instances``. The search is exact if more instances never do worse. The least
    number of each kind that is enough beside ``max_instances`` of the other bounds the answer from below. From there
    totals are tried in order. Pools no larger than insufficient ones are skipped.
    """
    search = Search()

    def is_enough(sizes: PoolSizes) -> bool:
        if sizes not in search.attainments:
            if any(
                sizes.num_prefill <= tried.num_prefill and sizes.num_decode <= tried.num_decode
                for tried, reached in search.attainments.items()
                if reached < wanted
            ):
                return False
            search.attainments[sizes] = attainment(sizes)
        return search.attainments[sizes] >= wanted

    if not is_enough(PoolSizes(max_instances, max_instances)):
        return search
    num_prefill = _least(lambda number: is_enough(PoolSizes(number, max_instances)), max_instances)
    num_decode = _least(lambda number: is_enough(PoolSizes(max_instances, number)), max_instances)
    for total in range(num_prefill + num_decode, 2 * max_instances + 1):
        for number in range(num_prefill, total - num_decode + 1):
            sizes = PoolSizes(number, total - number)
            if max(sizes) <= max_instances and is_enough(sizes):
                search.sizes = sizes
                return search
    raise AssertionError("the largest pools are enough")


def _least(is_enough: Callable[[int], bool], most: int) -> int:
    """Return the least number that is enough; ``most`` is. Double, then bisect: small numbers are likely."""
    low, high = 0, 1  # `low` is never enough
    while high < most and not is_enough(high):
        low, high = high, 2 * high
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def unattainable(
    arrivals: Sequence[Arrival], model: LinearLatencyModel, slo: Slo, wanted: float, room: ContextRoom
) -> str | None:
    """Return why no number of instances serves a share of ``wanted`` within the targets; None if one might."""
    reasons: list[str] = []
    for arrival in arrivals:
        reason = _reason(arrival, model, slo, room)
        if reason is not None:
            reasons.append(reason)
    reachable = 1 - len(reasons) / len(arrivals)
    if reachable >= wanted:
        return None
    return (
        f"{len(reasons)} of {len(arrivals)} requests miss their targets on any number of instances, so at most "
        f"{reachable:.2%} can meet them, not {wanted:.2%}: {reasons[0]}"
    )


def _reason(arrival: Arrival, model: LinearLatencyModel, slo: Slo, room: ContextRoom) -> str | None:
    """Return why a request misses its targets even alone on the mesh; None if it does not."""
    own = slo.with_own(arrival.slo_ttft_s, arrival.slo_tpot_s)
    num_tokens, num_output_tokens = arrival.num_prompt_tokens, arrival.num_output_tokens
    num_total_tokens = num_tokens + (arrival.max_tokens or num_output_tokens)
    if num_tokens > room.num_kv_tokens and not room.max_kv_tokens:
        return f"a prompt of {num_tokens:,} tokens fits no instance of {room.num_kv_tokens:,}, where it is computed"
    if num_total_tokens > room.longest:
        return f"{num_total_tokens:,} tokens of prompt and output are more than a context's most, {room.longest:,}"
    prefill_s = _least_prefill_s(model, num_tokens, room)
    if own.ttft_s is not None and prefill_s > own.ttft_s:
        return (
            f"the prefill of a prompt of {num_tokens:,} tokens takes {prefill_s:.3g} s by itself, "
            f"its TTFT target is {own.ttft_s:g} s"
        )
    decode_s = room.decode_s(model, num_tokens + 1)
    if own.tpot_s is not None and num_output_tokens > 1 and decode_s > own.tpot_s:
        return (
            f"a decode step alone, with {num_tokens:,} tokens of context, takes {decode_s:.3g} s, "
            f"its TPOT target is {own.tpot_s:g} s"
        )
    return None


def _least_prefill_s(model: LinearLatencyModel, num_tokens: int, room: ContextRoom) -> float:
    """Return the least time of a prefill in any number of chunks.

    In small chunks, attention to earlier tokens replaces most of the attention within a chunk. If a prompt does not fit
    one instance, other instances attend to the earlier tokens.
    """
    if num_tokens > room.num_kv_tokens:
        return model.a_s + model.b_s * num_tokens
    whole_s = model.step_s(StepShape((ChunkShape(num_tokens, 0),), 0, 0))
    saved_s = max(0.0, model.d_s - model.c_s / 2) * num_tokens**2
    return whole_s - saved_s

"""Exclusive and mixed batching in saturation: throughput, the best threshold, and a safe batch size.

An instance has N slots, each busy or idle, and some request always waits. Under *exclusive* batching a decode phase
ends when k slots are idle. A prefill phase then fills the idle slots while the others pause. Under *mixed* batching
every step carries a chunk and all decodes.

The formulas come from the EB+ paper (§3), keep the paper's numbers and were derived again. Two of them failed a check
against an exact Markov chain of finite N and are replaced here: the correction for growing hazards (5), and the memory
bound (6).

Everything here is a pure function of measured constants and observed lengths. Terms that every request pays under any
threshold cancel in comparisons. So thresholds depend only on the constants of steps and on output lengths.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from statistics import NormalDist
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Costs of the steps of both modes, in seconds.

    A prefill phase takes ``switch_s`` and ``prompt_token_s`` for each token. ``switch_s`` is the whole cost of a
    switch, with further passes and bubbles, and not the intercept of a fit. A step of D decodes takes
    ``decode_step_s + D * decode_token_s``. A mixed step of L prompt tokens and D decodes takes ``mixed_step_s``, both
    token terms, and ``interference_s * L * D / (L + D)``.
    """

    switch_s: float
    decode_step_s: float
    mixed_step_s: float
    prompt_token_s: float
    decode_token_s: float
    interference_s: float = 0.0

    @property
    def mixing_costs(self) -> bool:
        """Whether a mixed step takes longer than separate steps; otherwise exclusive batching gains nothing."""
        return self.interference_s > 0 or self.mixed_step_s > self.decode_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthMoments:
    """Moments of the lengths of requests, in tokens.

    ``mean_prompt_tokens`` counts computed tokens, and ``mean_reused_tokens`` the cached rest of the prompts.
    ``var_prompt_tokens`` is the variance of whole prompts.
    """

    mean_prompt_tokens: float
    mean_output_tokens: float
    var_prompt_tokens: float = 0.0
    mean_reused_tokens: float = 0.0

    @property
    def num_tokens(self) -> float:
        """Mean number of tokens that are computed for a request, prompt and output."""
        return self.mean_prompt_tokens + self.mean_output_tokens


class StepLimit(NamedTuple):
    """Longest duration and most prompt tokens of a mixed step. `LEAST_TOKENS` are allowed whatever the limit."""

    seconds: float = math.inf
    num_tokens: float = math.inf


NO_LIMIT = StepLimit()

#: Prompt tokens of a mixed step whatever its limit, so that a prompt progresses beside any number of decodes.
LEAST_TOKENS = 32.0

#: Mean number of chunks of a prompt below which prompts count as not cut.
_HARDLY_CUT = 1.001


class MixedState(NamedTuple):
    """Long-run means of mixed batching: requests a second, and the duration and the decodes of a step."""

    throughput: float
    step_s: float
    num_decodes: float


class Threshold(NamedTuple):
    """The end of a decode phase: ``idle_share`` of the slots idle, after about ``num_steps`` steps.

    Several requests may end in one step. So the mean number of idle slots is ``excess`` times the threshold.
    """

    idle_share: float
    num_steps: float
    excess: float = 1.0


def renewal_threshold(costs: StepCosts, output_tokens: Sequence[int]) -> Threshold:
    """Return the best threshold for outputs of any distribution, given a sample of lengths (not empty).

    A request with O output tokens that joins at the start of a phase of T steps stays for ceil(O / T) phases. The mean
    is G(T) = sum over j >= 0 of P(O > j T). So a phase frees N / G(T) slots, and the best T minimises
    (switch + step * T) * G(T). T is searched on a grid of 2 % (the minimum is flat), then step by step around the best
    point of the grid.
    """
    lengths = sorted(output_tokens)
    cost = _PhaseCost(costs, lengths)
    longest = max(lengths[-1], 1)
    grid: list[int] = []
    num_steps = 1
    while num_steps < longest:
        grid.append(num_steps)
        num_steps = max(num_steps + 1, round(num_steps * 1.02))
    grid.append(longest)
    best = min(range(len(grid)), key=lambda index: cost.of(grid[index]))
    around = range(grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)] + 1)
    phase = min(around, key=cost.of)
    return Threshold(1 / cost.mean_phases(phase), float(phase))


def tried_threshold(num_slots: int, costs: StepCosts, output_tokens: Sequence[int], around: Threshold) -> Threshold:
    """Return the best of several thresholds ``around`` a given one, by simulating these outputs (not empty) in order.

    Where many outputs have one length, requests that began together also end together. Such a cohort may just miss the
    threshold ``around`` and make the phase wait for the next cohort. So the simulation follows the slots through as
    many phases as the outputs fill, and uses some outputs twice. Only steps and phases are counted, so only the
    constants of steps matter.
    """
    number = max(len(output_tokens), _TURNOVERS * num_slots)
    nearest = round(around.idle_share * num_slots)
    tried = sorted({min(num_slots, max(1, round(nearest * factor))) for factor in _TRIED})
    best, best_s = around, math.inf
    for num_idle in tried:
        num_phases, num_steps, num_ended = _phases_of(num_slots, num_idle, output_tokens, number)
        cost_s = (costs.switch_s * num_phases + costs.decode_step_s * num_steps) / num_ended
        if cost_s < best_s:
            mean_ended = num_ended / num_phases
            best = Threshold(num_idle / num_slots, max(1.0, num_steps / num_phases), mean_ended / num_idle)
            best_s = cost_s
    return best


#: Multiples of the nearest number of idle slots that are tried as thresholds.
_TRIED = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4)

#: Least number of outputs per slot over which thresholds are tried.
_TURNOVERS = 4


def _phases_of(num_slots: int, num_idle: int, output_tokens: Sequence[int], number: int) -> tuple[int, int, int]:
    """Return the phases, steps and ended requests until ``number`` requests have begun.

    The slots are filled whenever ``num_idle`` of them are idle. At first each slot has a different part of an output
    left, as in the long run.
    """
    ends = [1 + int(output_tokens[slot % len(output_tokens)] * (slot + 0.5) / num_slots) for slot in range(num_slots)]
    heapify(ends)
    num_begun, num_phases, step, size = num_slots, 0, 0, len(output_tokens)
    while num_begun < number + num_slots:
        ended = 0
        while ended < num_idle or (ends and ends[0] == step):
            step = heappop(ends)
            ended += 1
        for _ in range(ended):
            heappush(ends, step + output_tokens[num_begun % size])
            num_begun += 1
        num_phases += 1
    return num_phases, step, num_begun - num_slots


@dataclass(frozen=True, slots=True)
class _PhaseCost:
    """Cost of decode phases for each request that they end, by their number of steps. ``lengths`` are sorted."""

    costs: StepCosts
    lengths: Sequence[int]

    def mean_phases(self, num_steps: int) -> float:
        """Return G(T): the mean number of phases through which a request stays."""
        lengths, count = self.lengths, len(self.lengths)
        total, bound = count, num_steps
        while bound < lengths[-1]:
            total += count - bisect_right(lengths, bound)
            bound += num_steps
        return total / count

    def of(self, num_steps: int) -> float:
        return (self.costs.switch_s + self.costs.decode_step_s * num_steps) * self.mean_phases(num_steps)


def exclusive_throughput(num_slots: float, threshold: Threshold, costs: StepCosts, lengths: LengthMoments) -> float:
    """Return the requests a second under exclusive batching: N θ over the duration of a cycle.

    At the best threshold for geometric outputs this is (4), within 0.8 % of an exact chain of 64 slots or more.
    """
    work_s = costs.prompt_token_s * lengths.mean_prompt_tokens + costs.decode_token_s * lengths.mean_output_tokens
    cycle_s = costs.switch_s + costs.decode_step_s * threshold.num_steps
    return 1 / (work_s + cycle_s / (num_slots * threshold.idle_share * threshold.excess))


def mixed_state(
    num_slots: float, costs: StepCosts, lengths: LengthMoments, limit: StepLimit = NO_LIMIT, together: float = 1.0
) -> MixedState:
    """Predict mixed batching with steps of a limited size.

    Without a limit, a request holds a slot for one step of its prompt and one for each output token. So
    N / (1 + mean output) requests begin in every step, one by one at random. A Poisson distribution with this mean says
    how many steps have no chunk and how large the other chunks are. Taking the mean for all steps would overstate
    interference by up to a third where less than two requests begin in a step.

    ``together`` is the mean number of requests that begin at once. Requests that began at once with outputs of one
    length keep ending at once, so fewer steps have a chunk.

    A limit cuts prompts, whose lengths are taken as geometric, into chunks, and more steps have one. If the prompts
    need more chunks than there are steps, every step has one, and prompts under way hold slots. The number of decodes
    is then the highest at which a step has room for the prompt tokens of the requests that replace ended ones.
    """
    starts = num_slots / (1 + lengths.mean_output_tokens)
    num_decodes = starts * lengths.mean_output_tokens
    chunk_tokens = _chunk_tokens(num_decodes, costs, limit)
    num_chunks = -1 / math.expm1(-chunk_tokens / lengths.mean_prompt_tokens)
    work_s = costs.prompt_token_s * lengths.mean_prompt_tokens + costs.decode_token_s * lengths.mean_output_tokens
    if num_chunks < _HARDLY_CUT:
        with_chunks = -math.expm1(-starts / together)
        mixing = _mean_mixing(starts / together, num_decodes, together * lengths.mean_prompt_tokens)
    else:
        filled = starts * lengths.mean_prompt_tokens / chunk_tokens
        if filled > 1:
            num_decodes = _decodes_that_leave_room(num_decodes, costs, lengths, limit)
            starts = num_decodes / lengths.mean_output_tokens
        with_chunks = min(1.0, max(filled, -math.expm1(-starts * num_chunks)))
        num_prompt_tokens = starts * lengths.mean_prompt_tokens / with_chunks
        mixing = with_chunks * num_prompt_tokens * num_decodes / (num_prompt_tokens + num_decodes)
    constants_s = (1 - with_chunks) * costs.decode_step_s + with_chunks * costs.mixed_step_s
    step_s = constants_s + costs.interference_s * mixing + work_s * starts
    return MixedState(starts / step_s, step_s, num_decodes)


def _mean_mixing(starts: float, num_decodes: float, mean_tokens: float) -> float:
    """Return the mean of L D / (L + D) where whole prompts begin at random, ``starts`` in a step in the mean."""
    chance = math.exp(-starts)
    mixing = 0.0
    begun = 0
    while begun < starts or chance > 1e-12:
        begun += 1
        chance *= starts / begun
        num_prompt_tokens = begun * mean_tokens
        mixing += chance * num_prompt_tokens * num_decodes / (num_prompt_tokens + num_decodes)
    return mixing


def _chunk_tokens(num_decodes: float, costs: StepCosts, limit: StepLimit) -> float:
    """Return how many prompt tokens, at least `LEAST_TOKENS`, a mixed step of ``num_decodes`` decodes has room for."""
    left_s = limit.seconds - costs.mixed_step_s - costs.decode_token_s * num_decodes
    if left_s <= 0 or left_s == math.inf:
        return LEAST_TOKENS if left_s <= 0 else limit.num_tokens
    # The root of token L + interference L D / (L + D) = left.
    token_s = costs.prompt_token_s
    rest = (token_s + costs.interference_s) * num_decodes - left_s
    root = math.sqrt(rest * rest + 4 * token_s * left_s * num_decodes)
    half = rest + root
    num_tokens = 2 * left_s * num_decodes / half if half > 0 else math.inf
    return min(limit.num_tokens, max(LEAST_TOKENS, num_tokens))


def _decodes_that_leave_room(most: float, costs: StepCosts, lengths: LengthMoments, limit: StepLimit) -> float:
    """Return the most decodes, at most ``most``, that leave room in a step for the prompts of the next requests.

    In the long run each ended request is replaced by one prompt.
    """
    tokens_per_decode = lengths.mean_prompt_tokens / lengths.mean_output_tokens
    low = 0.0
    for _ in range(40):
        middle = (low + most) / 2
        if _chunk_tokens(middle, costs, limit) >= middle * tokens_per_decode:
            low = middle
        else:
            most = middle
    return low


def max_safe_slots(
    capacity_tokens: float, risk: float, threshold: Threshold, lengths: LengthMoments, *, at_most: int = 1 << 20
) -> int:
    """Return the largest N whose KV exceeds ``capacity_tokens`` in a decode phase with a chance of at most ``risk``.

    A normal bound on the total KV of the slots, at the moments when the total can be largest: the start of the phase,
    the end, and where growth and releases balance. The bound held in 41 of 42 cases (the miss: 0.0104 for 0.01), and
    the paper's bound (6) in 2. Returns 0 if not even one slot is safe.
    """
    idle_share = threshold.idle_share
    mean_output, mean_held = lengths.mean_output_tokens, lengths.mean_prompt_tokens + lengths.mean_reused_tokens
    phase_tokens = -math.log1p(-idle_share) * mean_output if idle_share < 1 else threshold.num_steps
    # The age of a survivor is the number of tokens that it has drawn when the phase starts.
    age = (1 - idle_share) * phase_tokens / idle_share
    age_variance = phase_tokens**2 * (1 - idle_share) / idle_share**2
    balanced = min(max(mean_output - mean_held - age, 0.0), phase_tokens)
    score = NormalDist().inv_cdf(1 - risk) + 0.5

    def holds(num_slots: int) -> bool:
        for tokens in (0.0, balanced / 2, balanced, phase_tokens):
            survival = math.exp(-tokens / mean_output)
            held = mean_held + age + tokens
            mean = survival * held
            variance = survival * (held**2 + lengths.var_prompt_tokens + age_variance) - mean**2
            bound = num_slots * (mean + 1) + score * math.sqrt(num_slots * max(variance, 0.0))
            if bound > capacity_tokens:
                return False
        return True

    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low

"""Exact exclusive batching of N slots: the Markov chain whose limit the fluid formulas of `batching_theory` are.

Every busy slot ends with the same probability p at each step, whatever its age. So the number of busy slots is a Markov
chain. It begins each decode phase at N, and falls by a binomial number at each step until k slots are idle; then all
are filled. Nothing is approximated. Schedulers do not use the chain, since it takes about N² operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdmesh.policy.batching_theory import LengthMoments, StepCosts, Threshold


def geometric_threshold(costs: StepCosts, mean_output_tokens: float) -> Threshold:
    """Return the best threshold for outputs that end with equal chance at any token: (3) of the EB+ paper.

    The exponent is the root of e^x - 1 - x = switch / (step * mean output), by Newton's method from above.
    """
    if mean_output_tokens <= 1:
        return Threshold(1.0, 1.0)
    rho = costs.switch_s / (costs.decode_step_s * mean_output_tokens)
    exponent = min(math.sqrt(2 * rho), math.log(1 + rho + math.sqrt(2 * rho)))
    for _ in range(20):
        exponent -= (math.expm1(exponent) - exponent - rho) / math.expm1(exponent)
    return Threshold(-math.expm1(-exponent), exponent / -math.log1p(-1 / mean_output_tokens))


def exact_throughputs(num_slots: int, costs: StepCosts, lengths: LengthMoments) -> Sequence[float]:
    """Return the requests per second under EB(k), for k = 1 to N, with geometric output lengths.

    A request costs its prompt's tokens and its decodes under any k; a cycle costs one switch and the constants of its
    steps. So the rate is E[ended] / (switch + step E[steps] + E[ended] work). The mean output has at least one token.
    """
    ends = 1 / lengths.mean_output_tokens
    flow = [_binomial(num_busy, 1 - ends) for num_busy in range(num_slots + 1)]
    visits = _visits(num_slots, flow)
    work_s = costs.prompt_token_s * lengths.mean_prompt_tokens + costs.decode_token_s * lengths.mean_output_tokens
    rates: list[float] = []
    for k in range(1, num_slots + 1):
        going_on = range(num_slots - k + 1, num_slots + 1)
        num_steps = math.fsum(visits[num_busy] for num_busy in going_on)
        # Each step ends its busy count times p in the mean, also the last one, which may pass k.
        num_ended = ends * math.fsum(visits[num_busy] * num_busy for num_busy in going_on)
        cycle_s = costs.switch_s + costs.decode_step_s * num_steps + work_s * num_ended
        rates.append(num_ended / cycle_s)
    return rates


def _visits(num_slots: int, flow: Sequence[Sequence[float]]) -> list[float]:
    """Return the expected number of steps that begin with n busy slots, by n, in a phase until all slots are idle."""
    visits = [0.0] * (num_slots + 1)
    #: Expected entries from larger numbers.
    arrivals = [0.0] * (num_slots + 1)
    arrivals[num_slots] = 1.0
    for num_busy in range(num_slots, 0, -1):
        stays = flow[num_busy][num_busy]
        number = visits[num_busy] = arrivals[num_busy] / (1 - stays) if stays < 1 else math.inf
        for left, chance in enumerate(flow[num_busy][:num_busy]):
            arrivals[left] += number * chance
    return visits


def _binomial(number: int, chance: float) -> list[float]:
    """Return the probabilities of 0 to ``number`` successes."""
    if chance <= 0:
        return [1.0] + [0.0] * number
    log_yes, log_no = math.log(chance), math.log1p(-chance)
    whole = math.lgamma(number + 1)
    return [
        math.exp(
            whole
            - math.lgamma(count + 1)
            - math.lgamma(number - count + 1)
            + count * log_yes
            + (number - count) * log_no
        )
        for count in range(number + 1)
    ]

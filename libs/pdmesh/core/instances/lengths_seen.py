"""Lengths of the requests that ended lately, and the step costs and threshold of exclusive batching for them."""

from __future__ import annotations

import math
from collections import deque

from pdmesh.policy.batching_theory import LengthMoments, StepCosts, Threshold, renewal_threshold, tried_threshold
from pdmesh.policy.latency import LinearLatencyModel

#: Number of remembered requests.
WINDOW = 500

#: Least number of remembered requests for a decision.
MIN_REQUESTS = 32

#: New requests after which thresholds are searched again: a tenth of the lengths has changed.
_PER_SEARCH = 50


class LengthsSeen:
    """Sliding window of request lengths. Sums are whole numbers, so they do not depend on the order."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int, int]] = deque()
        self._computed = self._computed_squares = self._histories = 0
        self._prompts = self._prompt_squares = self._outputs = self._output_squares = 0
        self._num_seen = 0
        #: Best thresholds by slots and rounds, valid for `_ratio` and about `_computed_at` requests.
        self._thresholds: dict[tuple[int, float], Threshold] = {}
        self._computed_at = 0
        self._ratio = 0.0

    def add(self, num_reused_tokens: int, num_computed_tokens: int, num_decoded_tokens: int) -> None:
        """Count a request. ``num_decoded_tokens``: output tokens without the first one, which prefill draws."""
        self._count(num_reused_tokens, num_computed_tokens, num_decoded_tokens, 1)
        self._lengths.append((num_reused_tokens, num_computed_tokens, num_decoded_tokens))
        self._num_seen += 1
        if len(self._lengths) > WINDOW:
            self._count(*self._lengths.popleft(), -1)

    def _count(self, reused: int, computed: int, output: int, sign: int) -> None:
        prompt = reused + computed
        self._computed += sign * computed
        self._computed_squares += sign * computed * computed
        self._histories += sign * reused * computed
        self._prompts += sign * prompt
        self._prompt_squares += sign * prompt * prompt
        self._outputs += sign * output
        self._output_squares += sign * output * output

    @property
    def is_enough(self) -> bool:
        """Whether enough was seen to decide."""
        return len(self._lengths) >= MIN_REQUESTS and self._outputs > 0

    @property
    def moments(self) -> LengthMoments:
        """Moments of the lengths. Requires `is_enough`."""
        number = len(self._lengths)
        mean = self._prompts / number
        mean_computed = self._computed / number
        return LengthMoments(
            mean_prompt_tokens=mean_computed,
            mean_reused_tokens=mean - mean_computed,
            mean_output_tokens=self._outputs / number,
            var_prompt_tokens=max(0.0, self._prompt_squares / number - mean * mean),
        )

    def costs(self, model: LinearLatencyModel, switch_s: float, num_slots: float) -> StepCosts:
        """Return the costs of steps for these lengths, with ``num_slots`` decodes. Requires `is_enough`.

        A constant includes the time by which reading the weights exceeds the arithmetic of such a step.
        """
        number = len(self._lengths)
        prompt = self._prompts / number
        computed = max(1, self._computed)
        squares, history = self._computed_squares / computed, self._histories / computed
        # Mean number of drawn tokens at a decode, over the decodes of all requests.
        age = self._output_squares / (2 * self._outputs)
        return StepCosts(
            switch_s=switch_s,
            decode_step_s=model.decode_a_s + model.idle_s(0, num_slots),
            mixed_step_s=model.mixed_a_s + model.idle_s(round(self._computed / number), num_slots),
            prompt_token_s=model.b_s + model.d_s * squares + model.c_s * history,
            decode_token_s=model.decode_s + model.decode_context_s * (prompt + age),
            interference_s=model.interference_s,
        )

    def threshold(self, costs: StepCosts, num_slots: float, rounds: float = 1.0) -> Threshold:
        """Return the best threshold for these outputs, whatever their distribution.

        Of ``costs`` only the ratio of switch and decode step matters; a result is cached while that ratio is about the
        same. Each computed prompt is followed by ``rounds`` outputs, one after the other: requests whose prompts other
        instances compute take seats without a prefill phase.
        """
        ratio = costs.switch_s / costs.decode_step_s
        if self._num_seen - self._computed_at >= _PER_SEARCH or abs(ratio - self._ratio) > 0.1 * self._ratio:
            self._thresholds.clear()
            self._computed_at, self._ratio = self._num_seen, ratio
        slots, rounds = _rounded(num_slots), 1.08 ** round(math.log(rounds) / math.log(1.08))
        found = self._thresholds.get((slots, rounds))
        if found is None:
            outputs = [max(1, round(rounds * output)) for _, _, output in self._lengths]
            found = tried_threshold(slots, costs, outputs, renewal_threshold(costs, outputs))
            self._thresholds[slots, rounds] = found
        return found


def _rounded(num_slots: float) -> int:
    """Round to the nearest power of 1.08 above 12, so that instances with nearly as many slots share a result."""
    return max(1, round(num_slots if num_slots < 12 else 1.08 ** round(math.log(num_slots) / math.log(1.08))))

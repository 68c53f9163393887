"""Lengths of the requests that ended lately, and what exclusive batching makes of them."""

from __future__ import annotations

import math
from collections import deque

from pdmesh.policy.batching_theory import LengthMoments, StepCosts, Threshold, renewal_threshold, tried_threshold
from pdmesh.policy.latency import LinearLatencyModel

#: Requests that are remembered.
WINDOW = 500

#: With fewer nothing is decided.
MIN_REQUESTS = 32

#: New ones after which thresholds are looked for again: a tenth of the lengths has changed.
_PER_SEARCH = 50


class LengthsSeen:
    """A sliding window, in whole numbers, so that sums do not depend on their order."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int, int]] = deque()
        self._computed = self._computed_squares = self._histories = 0  # of prompts
        self._prompts = self._prompt_squares = self._outputs = self._output_squares = 0
        self._num_seen = 0
        self._thresholds: dict[tuple[int, float], Threshold] = {}  # the best by slots and rounds, and computed for what
        self._computed_at = 0
        self._ratio = 0.0

    def add(self, num_reused_tokens: int, num_computed_tokens: int, num_decoded_tokens: int) -> None:
        """Count a request. ``num_decoded_tokens`` are the output but for its first token."""
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
        """Return the moments of a window in which enough was seen."""
        number = len(self._lengths)
        mean = self._prompts / number
        mean_computed = self._computed / number
        return LengthMoments(
            mean_prompt_tokens=mean_computed,
            mean_reused_tokens=mean - mean_computed,
            mean_output_tokens=self._outputs / number,
            var_prompt_tokens=max(0.0, self._prompt_squares / number - mean * mean),
        )

    def costs(self, model: LinearLatencyModel, switch_s: float) -> StepCosts:
        """Return the costs of steps of these lengths."""
        number = len(self._lengths)
        prompt = self._prompts / number
        computed = max(1, self._computed)
        squares, history = self._computed_squares / computed, self._histories / computed
        age = self._output_squares / (2 * self._outputs)  # mean of a decode, over the decodes of all requests
        return StepCosts(
            switch_s=switch_s,
            decode_step_s=model.decode_a_s,
            mixed_step_s=model.mixed_a_s,
            prompt_token_s=model.b_s + model.d_s * squares + model.c_s * history,
            decode_token_s=model.decode_s + model.decode_context_s * (prompt + age),
            interference_s=model.interference_s,
        )

    def threshold(self, costs: StepCosts, num_slots: float, rounds: float = 1.0) -> Threshold:
        """Return the best threshold for these outputs, whatever their law. Only the ratio of two costs matters to it.

        Each prompt that is computed makes room for ``rounds`` outputs, one after the other: where other instances
        compute some prompts, these take seats without a prefill phase.
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
    """Round to the nearest twelfth, so that instances with nearly as many slots share a result."""
    return max(1, round(num_slots if num_slots < 12 else 1.08 ** round(math.log(num_slots) / math.log(1.08))))

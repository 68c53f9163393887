"""Lengths of the requests that ended lately, and what exclusive batching makes of them."""

from __future__ import annotations

from collections import deque

from pdmesh.policy.batching_theory import LengthMoments, StepCosts, Threshold, renewal_threshold, threshold_after
from pdmesh.policy.latency import LinearLatencyModel

#: Requests that are remembered.
WINDOW = 500

#: With fewer nothing is decided.
MIN_REQUESTS = 32

#: New ones after which the best phase is looked for again: a fifth of the survival function may have changed.
_PER_SEARCH = 100


class LengthsSeen:
    """A sliding window, in whole numbers, so that sums do not depend on their order."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque()
        self._prompts = self._prompt_squares = self._outputs = self._output_squares = 0
        self._num_seen = 0
        self._phase_steps: float | None = None  # the best, and what it was computed for
        self._phase_at = 0
        self._phase_ratio = 0.0

    def add(self, num_prompt_tokens: int, num_decoded_tokens: int) -> None:
        """``num_decoded_tokens`` are the output but for its first token."""
        self._count(num_prompt_tokens, num_decoded_tokens, 1)
        self._lengths.append((num_prompt_tokens, num_decoded_tokens))
        self._num_seen += 1
        if len(self._lengths) > WINDOW:
            self._count(*self._lengths.popleft(), -1)

    def _count(self, prompt: int, output: int, sign: int) -> None:
        self._prompts += sign * prompt
        self._prompt_squares += sign * prompt * prompt
        self._outputs += sign * output
        self._output_squares += sign * output * output

    @property
    def is_enough(self) -> bool:
        """To decide on something."""
        return len(self._lengths) >= MIN_REQUESTS and self._outputs > 0

    @property
    def moments(self) -> LengthMoments:
        """Of a window that is enough."""
        number = len(self._lengths)
        mean = self._prompts / number
        return LengthMoments(
            mean_prompt_tokens=mean,
            mean_output_tokens=self._outputs / number,
            var_prompt_tokens=max(0.0, self._prompt_squares / number - mean * mean),
        )

    def costs(self, model: LinearLatencyModel, switch_s: float) -> StepCosts:
        """Of steps of these lengths."""
        number = len(self._lengths)
        prompt = self._prompts / number
        squares = self._prompt_squares / max(1, self._prompts)
        age = self._output_squares / (2 * self._outputs)  # mean of a decode, over the decodes of all requests
        return StepCosts(
            switch_s=switch_s,
            decode_step_s=model.decode_a_s,
            mixed_step_s=model.mixed_a_s,
            prompt_token_s=model.b_s + model.d_s * squares,
            decode_token_s=model.decode_s + model.decode_context_s * (prompt + age),
            interference_s=model.interference_s,
        )

    def threshold(self, costs: StepCosts) -> Threshold:
        """The best for these outputs, whatever their law. Only the ratio of two costs matters to it."""
        ratio = costs.switch_s / costs.decode_step_s
        outputs = [max(1, output) for _, output in self._lengths]
        if (
            self._phase_steps is None
            or self._num_seen - self._phase_at >= _PER_SEARCH
            or abs(ratio - self._phase_ratio) > 0.1 * self._phase_ratio
        ):
            self._phase_steps = renewal_threshold(costs, outputs).num_steps
            self._phase_at, self._phase_ratio = self._num_seen, ratio
        # The share that such a phase frees is that of the lengths as they are now, as all else in a prediction is.
        return threshold_after(self._phase_steps, outputs)

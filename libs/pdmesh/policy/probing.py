"""Short probes of the other batching mode near a tie, which measure the error of the predictions.

Two predictions that are each a percent wrong cannot tell apart modes that differ by a percent. So every `PROBE_EVERY`
cycles the other mode runs for a few cycles, and both modes are compared by *work*: the predicted seconds of the prompt
tokens and decodes of their steps, without the constants of steps. A request has equal work under any mode.

The measure of a cycle is the time of a decode: the time beyond work per decode, plus the work of a decode and its share
of prompts at the mean lengths. So neither the lengths that a cycle met by chance nor its number of prompts matter.
Everything is a function of the reported steps, in order.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from pdmesh.policy.batching_theory import LengthMoments, StepCosts
from pdmesh.policy.latency import LinearLatencyModel, StepShape

#: Cycles in the home mode between two probes, and the factor on them where the faster mode is already clear.
PROBE_EVERY = 40
_WHERE_CLEAR = 4

#: Cycles of a probe. The first cycle after a change of mode is not counted.
PROBE_CYCLES = 3

#: Largest predicted log ratio of throughputs that counts as a tie for probes to decide.
NEAR = 0.02

#: Number of cycles in the home mode before a probe that are compared with it.
_COMPARED = 4

#: Number of probes that are remembered.
_MEMORY = 16

#: For requests that begin at once: the decay of observations at each cycle, and the fewest steps with a begin.
_FADING, _ENOUGH_STEPS = 0.95, 24

#: Standard deviations of log ratios: of the predictions' error, and the assumed noise of a probe. The assumption weighs
#: as much as `_NOISE_WORTH` probes.
_WRONG, _NOISE, _NOISE_WORTH = 0.01, 0.015, 2.0


class Correction(NamedTuple):
    """Correction of the predicted log ratio of throughputs, exclusive over mixed.

    ``deviation`` is the standard deviation, 0 before the first probe.
    """

    log_gain: float = 0.0
    deviation: float = 0.0


NO_CORRECTION = Correction()


class StepTotals(NamedTuple):
    """Totals of the steps of an instance over some time.

    ``num_history_tokens``: sum over chunks of the new tokens times the tokens before them.
    ``num_squares``: sum over chunks of the squared number of new tokens.
    ``num_begun``: number of prompts that began in steps with decodes.
    ``num_steps``: number of steps with decodes; prompts began in ``num_with_begun`` of them.
    """

    wall_s: float = 0.0
    num_prompt_tokens: float = 0.0
    num_history_tokens: float = 0.0
    num_squares: float = 0.0
    num_decodes: float = 0.0
    num_context_tokens: float = 0.0
    num_begun: float = 0.0
    num_steps: float = 0.0
    num_with_begun: float = 0.0

    def plus(self, other: StepTotals) -> StepTotals:
        return StepTotals(*(one + two for one, two in zip(self, other, strict=True)))

    def work_s(self, model: LinearLatencyModel) -> float:
        prompts_s = model.b_s * self.num_prompt_tokens + model.c_s * self.num_history_tokens
        decodes_s = model.decode_s * self.num_decodes + model.decode_context_s * self.num_context_tokens
        return prompts_s + model.d_s * self.num_squares + decodes_s

    def decode_s(self, model: LinearLatencyModel, costs: StepCosts, lengths: LengthMoments) -> float | None:
        """Return the seconds per output token, including the prompt tokens to compute per output token.

        The measured time beyond ``model``'s prediction is added in equal shares. None without decodes or a positive
        result.
        """
        if self.num_decodes <= 0:
            return None
        prompts_s = costs.prompt_token_s * lengths.mean_prompt_tokens / lengths.mean_output_tokens
        cost_s = prompts_s + costs.decode_token_s + (self.wall_s - self.work_s(model)) / self.num_decodes
        return cost_s if cost_s > 0 else None


class CycleMeter:
    """Totals over the whole cycles of one instance's steps, given in order and on the instance's clock.

    A cycle begins where a step of prompts alone follows other steps, and at each step with prompts and decodes.
    ``_sums`` are the fields of `StepTotals` for the open cycle, without the first.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._ended_s = 0.0
        self._in_phase = False
        self._sums = [0.0] * 8
        self._whole = StepTotals()

    def step(self, began_s: float, ended_s: float, shape: StepShape, num_steps: int = 1) -> None:
        """Add ``num_steps`` equal steps. An empty step is ignored, and a step inside another opens no cycle."""
        if ended_s <= began_s:
            return
        if began_s >= self._ended_s and shape.chunks and (shape.num_decodes or not self._in_phase):
            if self._began_s is not None:
                self._whole = self._whole.plus(StepTotals(began_s - self._began_s, *self._sums))
            self._sums = [0.0] * 8
            self._began_s = began_s
        self._in_phase = bool(shape.chunks) and not shape.num_decodes
        self._ended_s = max(self._ended_s, ended_s)
        sums = self._sums
        for chunk in shape.chunks:
            sums[0] += chunk.num_tokens
            sums[1] += chunk.num_tokens * chunk.num_history_tokens
            sums[2] += chunk.num_tokens * chunk.num_tokens
        sums[3] += num_steps * shape.num_decodes
        sums[4] += num_steps * shape.num_decode_context_tokens
        if shape.num_decodes:
            num_begun = sum([chunk.num_history_tokens == 0 for chunk in shape.chunks])
            sums[5] += num_begun
            sums[6] += num_steps
            sums[7] += num_begun > 0

    def forget(self) -> None:
        """Forget the present cycle, because no request is there to continue it."""
        self._began_s = None

    def take(self) -> StepTotals:
        """Return the totals of the cycles that were completed since the last call."""
        whole, self._whole = self._whole, StepTotals()
        return whole


class SimultaneousStarts:
    """Mean number of requests that begin at once under mixed batching: 1 where they begin one by one, at random.

    Requests that began together with equal outputs end together, and so do the requests that replace them. Then fewer
    steps have a chunk than a Poisson distribution of the same mean says, and mixed batching is faster than predicted.
    """

    def __init__(self) -> None:
        self._begun = self._steps = self._with_begun = 0.0

    def note(self, tally: StepTotals) -> None:
        """Add a cycle of mixed batching; earlier ones fade."""
        self._begun = _FADING * self._begun + tally.num_begun
        self._steps = _FADING * self._steps + tally.num_steps
        self._with_begun = _FADING * self._with_begun + tally.num_with_begun

    @property
    def number(self) -> float:
        """Mean size of a group of requests that begin together, if the groups begin at random; at least 1.

        The number is 1 until enough steps with new requests were observed, and if every step had new requests.
        """
        if not _ENOUGH_STEPS <= self._with_begun < self._steps:
            return 1.0
        number = -self._begun / self._steps / math.log1p(-self._with_begun / self._steps)
        return max(1.0, number)


class Probing:
    """Schedule and results of an instance's probes of the mode that is not its *home*.

    A residual is the measured minus the predicted log ratio. The correction is the mean of the residuals, shrunk
    towards 0 by their spread.
    """

    def __init__(self) -> None:
        self.correction = NO_CORRECTION
        self._residuals: deque[float] = deque(maxlen=_MEMORY)
        self._at_home: deque[StepTotals] = deque(maxlen=_COMPARED)
        self._probed = StepTotals()
        self._num_at_home = 0
        self._num_left = 0

    @property
    def is_on(self) -> bool:
        """Whether the other mode is being probed."""
        return self._num_left > 0

    def restart(self) -> None:
        """Abandon a running probe and its measurements, because home has changed or probes are not allowed."""
        self._at_home.clear()
        self._num_at_home = self._num_left = 0

    def passed(self, tally: StepTotals, log_gain: float) -> StepTotals | None:
        """Add a completed cycle and begin or end a probe. ``log_gain`` is predicted, with the correction.

        Returns the tally of the probe that this cycle ended, else None. `is_on` says which mode the next cycle has.
        """
        if not self._num_left:
            self._num_at_home += 1
            if self._num_at_home > 1:
                self._at_home.append(tally)
            if self._is_due(log_gain):
                self._num_left, self._probed = PROBE_CYCLES, StepTotals()
            return None
        if self._num_left < PROBE_CYCLES:
            self._probed = self._probed.plus(tally)
        self._num_left -= 1
        if self._num_left:
            return None
        self._num_at_home = 0
        return self._probed

    def _is_due(self, log_gain: float) -> bool:
        if min(abs(log_gain), abs(log_gain - self.correction.log_gain)) > NEAR:
            return False
        is_clear = len(self._residuals) > 1 and abs(log_gain) > 3 * self.correction.deviation
        return self._num_at_home >= PROBE_EVERY * (_WHERE_CLEAR if is_clear else 1)

    @property
    def at_home(self) -> StepTotals:
        """Totals of the last cycles before a probe."""
        total = StepTotals()
        for tally in self._at_home:
            total = total.plus(tally)
        return total

    def learn(self, residual: float) -> None:
        """Add the residual of a probe and update the correction."""
        self._residuals.append(residual)
        number = len(self._residuals)
        mean = math.fsum(self._residuals) / number
        squares = math.fsum((value - mean) ** 2 for value in self._residuals)
        variance = (_NOISE_WORTH * _NOISE**2 + squares) / (_NOISE_WORTH + number - 1) / number
        share = _WRONG**2 / (_WRONG**2 + variance)
        self.correction = Correction(share * mean, math.sqrt(share * variance))

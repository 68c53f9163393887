"""Short probes of the other batching mode, near a tie: what a prediction is wrong by, from what both modes were.

Two predictions that are each a percent wrong say nothing of modes that are a percent apart. So every `PROBE_EVERY`
cycles the other mode is done for a few, and both are compared by *work*: the seconds that the prompt tokens and decodes
of their steps are predicted to cost, without the constants of steps. A request costs the same of it under any mode. A
cycle is judged by the time for each decode that was not work, beside the work of a decode and its share of prompts for
the lengths that are known: so neither the lengths that a cycle met by chance matter, nor how many prompts it had.
Everything is a function of reported steps, in their order.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from pdmesh.policy.batching_theory import LengthMoments, StepCosts
from pdmesh.policy.latency import LinearLatencyModel, StepShape

#: Cycles at home from one probe to the next; so many times as many where it is clear by now which mode is faster.
PROBE_EVERY = 40
_WHERE_CLEAR = 4

#: Of a probe. The first one after a change of mode is not counted.
PROBE_CYCLES = 3

#: Predicted log ratio of throughputs, up to which it is a tie that probes may decide.
NEAR = 0.02

#: Of the cycles at home, so many before a probe are compared with it.
_COMPARED = 4

#: Probes that are remembered.
_MEMORY = 16

#: Of what was seen of requests that begin at once, at each cycle; and steps in which some did, to tell.
_FADING, _ENOUGH_STEPS = 0.95, 24

#: Standard deviations, of log ratios: of what predictions are wrong by, and of one probe until several were made, which
#: is worth so many of them.
_WRONG, _NOISE, _NOISE_WORTH = 0.01, 0.015, 2.0


class Correction(NamedTuple):
    """A correction of the predicted log ratio of throughputs, exclusive over mixed, and its standard deviation."""

    log_gain: float = 0.0
    deviation: float = 0.0  # standard; 0 while nothing was probed


NO_CORRECTION = Correction()


class Tally(NamedTuple):
    """What an instance did in some time."""

    wall_s: float = 0.0
    num_prompt_tokens: float = 0.0
    num_history_tokens: float = 0.0  # of chunks: new tokens times those before them
    num_squares: float = 0.0  # of chunks' new tokens
    num_decodes: float = 0.0
    num_context_tokens: float = 0.0
    num_begun: float = 0.0  # prompts, in steps with decodes beside them
    num_steps: float = 0.0  # with decodes
    num_with_begun: float = 0.0  # of these, that such prompts began in

    def plus(self, other: Tally) -> Tally:
        return Tally(*(one + two for one, two in zip(self, other, strict=True)))

    def work_s(self, model: LinearLatencyModel) -> float:
        prompts_s = model.b_s * self.num_prompt_tokens + model.c_s * self.num_history_tokens
        decodes_s = model.decode_s * self.num_decodes + model.decode_context_s * self.num_context_tokens
        return prompts_s + model.d_s * self.num_squares + decodes_s

    def decode_s(self, model: LinearLatencyModel, costs: StepCosts, lengths: LengthMoments) -> float | None:
        """Seconds for a decode and its share of prompts and constants; None if there was none."""
        if self.num_decodes <= 0:
            return None
        prompts_s = costs.prompt_token_s * lengths.mean_prompt_tokens / lengths.mean_output_tokens
        cost_s = prompts_s + costs.decode_token_s + (self.wall_s - self.work_s(model)) / self.num_decodes
        return cost_s if cost_s > 0 else None


class Meter:
    """Follows one instance's steps, in their order, on its own clock, and tallies whole cycles of them.

    A tally begins and ends where a step of prompts alone begins after decodes, or any step of both.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None  # of what is open
        self._ended_s = 0.0
        self._in_phase = False  # of prefill alone
        self._sums = [0.0] * 8  # open, as in `Tally`
        self._whole = Tally()

    def step(self, began_s: float, ended_s: float, shape: StepShape, num_steps: int = 1) -> None:
        """Steps that are alike; one that ran inside another, or did nothing, opens no tally."""
        if ended_s <= began_s:
            return
        if began_s >= self._ended_s and shape.chunks and (shape.num_decodes or not self._in_phase):
            if self._began_s is not None:
                self._whole = self._whole.plus(Tally(began_s - self._began_s, *self._sums))
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

    def take(self) -> Tally:
        """What is whole, since it was last asked for."""
        whole, self._whole = self._whole, Tally()
        return whole


class Together:
    """How many requests begin at once on an instance that is mixed: 1 where they begin at random, one by one.

    Who began together and wants as many tokens ends together, and so on: then fewer steps have a chunk than a Poisson
    law of the same mean says, and mixed batching is faster than predicted from it.
    """

    def __init__(self) -> None:
        self._begun = self._steps = self._with_begun = 0.0

    def note(self, tally: Tally) -> None:
        """Add a cycle of mixed batching; earlier ones fade."""
        self._begun = _FADING * self._begun + tally.num_begun
        self._steps = _FADING * self._steps + tally.num_steps
        self._with_begun = _FADING * self._with_begun + tally.num_with_begun

    @property
    def number(self) -> float:
        """Return how many requests begin together, as the observed share of steps in which some begin explains it."""
        if not _ENOUGH_STEPS <= self._with_begun < self._steps:
            return 1.0
        number = -self._begun / self._steps / math.log1p(-self._with_begun / self._steps)
        return max(1.0, number)


class Probing:
    """Decides when an instance probes the mode that is not its *home*, and keeps what came of it.

    A residual is what was measured beyond what was predicted, as log ratios. The correction is their mean, drawn to 0
    as far as their spread leaves room for chance.
    """

    def __init__(self) -> None:
        self.correction = NO_CORRECTION
        self._residuals: deque[float] = deque(maxlen=_MEMORY)
        self._at_home: deque[Tally] = deque(maxlen=_COMPARED)
        self._probed = Tally()
        self._num_at_home = 0
        self._num_left = 0  # cycles of the probe

    @property
    def is_on(self) -> bool:
        """Whether the other mode is being probed."""
        return self._num_left > 0

    def restart(self) -> None:
        """Home has changed, or nothing may be probed: what was measured of a probe that is on is of no use."""
        self._at_home.clear()
        self._num_at_home = self._num_left = 0

    def passed(self, tally: Tally, log_gain: float) -> Tally | None:
        """Note a cycle; `is_on` says what the next one is to be. ``log_gain`` is predicted, with the correction.

        The tally of a probe that is over, to be given to `learn`.
        """
        if not self._num_left:
            self._num_at_home += 1
            if self._num_at_home > 1:
                self._at_home.append(tally)
            if self._is_due(log_gain):
                self._num_left, self._probed = PROBE_CYCLES, Tally()
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
    def at_home(self) -> Tally:
        """Return the tally of the last cycles before a probe."""
        total = Tally()
        for tally in self._at_home:
            total = total.plus(tally)
        return total

    def learn(self, residual: float) -> None:
        """Take a probe into account."""
        self._residuals.append(residual)
        number = len(self._residuals)
        mean = math.fsum(self._residuals) / number
        squares = math.fsum((value - mean) ** 2 for value in self._residuals)
        variance = (_NOISE_WORTH * _NOISE**2 + squares) / (_NOISE_WORTH + number - 1) / number
        share = _WRONG**2 / (_WRONG**2 + variance)
        self.correction = Correction(share * mean, math.sqrt(share * variance))

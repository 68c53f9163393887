"""Learning a latency model from the steps that ran, beside the prior that it starts from.

Regularised least squares in relative error with forgetting. A coefficient is learnt as a multiple of its prior, and the
prior's covariance says what goes wrong in practice: mostly all coefficients by one factor (another clock, busy cores),
each a little by itself. So a few steps of any kind set the scale of all predictions, and terms that no step exercises
follow it and keep their proportions. Pure arithmetic in a fixed order: the same steps give the same model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape, features

#: Of earlier steps at each new one: what happened 200 steps ago counts a third.
FORGETTING = 0.995

#: Standard deviations: of a step's time around its prediction, of the factor that all coefficients of the prior are
#: wrong by, of each one's own, and of interference in multiples of what a token costs, where the prior has none.
_NOISE, _COMMON, _OWN, _NEW_INTERFERENCE = 0.1, 1.0, 0.5, 2.0

#: A step that took so much more or less than predicted, relative to the prediction, has no more say than this.
_OUTLIER = 0.5

#: Between two looks at what was learnt.
_STEPS_PER_LOOK = 8

#: A new model is worth new tables when one of these predictions is off by more than `_MOVED`.
_MOVED = 0.1
_REFERENCE = (
    *(StepShape((ChunkShape(*chunk),), 0, 0) for chunk in ((32, 0), (512, 0), (512, 8192), (2048, 0))),
    *(StepShape((), num_decodes, 512 * num_decodes) for num_decodes in (1, 32)),
    *(StepShape((ChunkShape(num_tokens, 0),), 32, 512 * 32) for num_tokens in (64, 512)),
)

#: A coefficient never falls below this part of its prior: nothing is free. But there may be no interference.
_FLOOR = 0.02

#: Where interference stands among the coefficients.
_INTERFERENCE = 8


class Refinement:
    """A model that follows what it observes.

    ``estimate`` is what the last look made of all that was seen; ``model`` follows it only where that moves
    predictions, since tables are made of it.
    """

    def __init__(self, prior: LinearLatencyModel) -> None:
        self.model = self.estimate = prior
        self._prior = _proper(prior)
        # Interference that the prior knows nothing of is looked for from 0 on, and has no part in the common factor.
        self._expected = [1.0] * len(self._prior)
        self._trusts = [(_NOISE / _OWN) ** 2] * len(self._prior)
        if not prior.interference_s:
            self._expected[_INTERFERENCE] = 0.0
            self._trusts[_INTERFERENCE] = (_NOISE / _NEW_INTERFERENCE) ** 2
        self._floors = [_FLOOR * expected for expected in self._expected]
        self._factors = self._expected  # learnt so far, of each coefficient
        self._precision = [[0.0] * len(self._prior) for _ in self._prior]
        self._target = [0.0] * len(self._prior)
        self._num_unseen = 0
        self._growth = 1.0  # of each step's say, instead of making all earlier ones less each time; 1 after each look

    def observe(self, shape: StepShape, seconds: float) -> bool:
        """Learn from a step; True if `model` is another one now. What cannot be a step's time is left out."""
        terms = [coefficient * value for coefficient, value in zip(self._prior, features(shape), strict=True)]
        predicted_s = sum(factor * term for factor, term in zip(self._factors, terms, strict=True))
        if not (isfinite(seconds) and seconds > 0 and predicted_s > 0):
            return False
        ratio = seconds / predicted_s
        self._growth /= FORGETTING
        weight = self._growth * _OUTLIER / max(_OUTLIER, abs(ratio - 1))
        used = [(index, term / predicted_s) for index, term in enumerate(terms) if term]
        for i, share in used:
            say = weight * share
            self._target[i] += say * ratio
            row = self._precision[i]
            for j, other in used:
                row[j] += say * other
        self._num_unseen += 1
        return self._num_unseen >= _STEPS_PER_LOOK and self.look()

    def look(self) -> bool:
        """Make what was observed the model, if that moves its predictions; True if it does."""
        self._num_unseen = 0
        kept, self._growth = 1 / self._growth, 1.0
        self._target = [kept * value for value in self._target]
        self._precision = [[kept * value for value in row] for row in self._precision]
        expected, trust = self._expected, (_NOISE / _OWN) ** 2
        num_common = sum(expected)
        shared = _COMMON**2 / (_OWN**2 + num_common * _COMMON**2)  # of the inverse of _OWN² I + _COMMON² eeᵀ
        matrix = [
            [value - trust * shared * expected[i] * expected[j] for j, value in enumerate(row)]
            for i, row in enumerate(self._precision)
        ]
        for i, own in enumerate(self._trusts):
            matrix[i][i] += own
        anchor = trust * (1 - num_common * shared)  # the prior: every factor is as expected
        solved = _solve(matrix, [value + anchor * e for value, e in zip(self._target, expected, strict=True)])
        self._factors = list(map(max, self._floors, solved))
        learnt = self.estimate = LinearLatencyModel.of(
            factor * coefficient for factor, coefficient in zip(self._factors, self._prior, strict=True)
        )
        moved = any(
            abs(learnt.step_s(shape) / predicted_s - 1) > _MOVED
            for shape in _REFERENCE
            if (predicted_s := self.model.step_s(shape)) > 0
        )
        if moved:
            self.model = learnt
        return moved


def _proper(prior: LinearLatencyModel) -> tuple[float, ...]:
    """Coefficients to take multiples of. A fit leaves out what it could not see; it may show yet."""
    a_s, b_s = prior.a_s, max(prior.b_s, prior.a_s / 1e4)
    least = (a_s, b_s, b_s / 1e5, b_s / 2e5, a_s, b_s, b_s / 1e3, a_s, b_s)
    return tuple(map(max, prior.coefficients, least))


def _solve(matrix: list[list[float]], right: Sequence[float]) -> list[float]:
    """Gauss, in place; the matrix is symmetric and positive definite, so that no row need be exchanged."""
    size = len(matrix)
    values = list(right)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            scale = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, size):
                matrix[row][column] -= scale * matrix[pivot][column]
            values[row] -= scale * values[pivot]
    for row in reversed(range(size)):
        known = sum(matrix[row][column] * values[column] for column in range(row + 1, size))
        values[row] = (values[row] - known) / matrix[row][row]
    return values

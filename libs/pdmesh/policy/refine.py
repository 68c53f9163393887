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

#: Of earlier steps at each new one: what happened 100 steps ago counts a third.
FORGETTING = 0.99

#: Standard deviations: of a step's time around its prediction, of the factor that all coefficients of the prior are
#: wrong by, and of each one's own.
_NOISE, _COMMON, _OWN = 0.1, 1.0, 0.5

#: A step that took so much more or less than predicted, relative to the prediction, has no more say than this.
_OUTLIER = 0.5

#: Between two looks at what was learnt.
_STEPS_PER_LOOK = 8

#: A new model is worth new tables when one of these predictions is off by more than `_MOVED`.
_MOVED = 0.1
_REFERENCE = (
    *(StepShape((ChunkShape(*chunk),), 0, 0) for chunk in ((32, 0), (512, 0), (512, 8192), (2048, 0))),
    *(StepShape((), num_decodes, 512 * num_decodes) for num_decodes in (1, 32)),
)

#: A coefficient never falls below this part of its prior: nothing is free.
_FLOOR = 0.02


class Refinement:
    """A model that follows what it observes."""

    def __init__(self, prior: LinearLatencyModel) -> None:
        self.model = prior
        self._prior = _proper(prior)
        self._factors = [1.0] * len(self._prior)  # learnt so far, of each coefficient
        self._precision = [[0.0] * len(self._prior) for _ in self._prior]
        self._target = [0.0] * len(self._prior)
        self._num_unseen = 0

    def observe(self, shape: StepShape, seconds: float) -> bool:
        """Learn from a step; True if `model` is another one now. What cannot be a step's time is left out."""
        terms = [coefficient * value for coefficient, value in zip(self._prior, features(shape), strict=True)]
        predicted_s = sum(factor * term for factor, term in zip(self._factors, terms, strict=True))
        if not (isfinite(seconds) and seconds > 0 and predicted_s > 0):
            return False
        ratio = seconds / predicted_s
        weight = _OUTLIER / max(_OUTLIER, abs(ratio - 1))
        used = [(index, term / predicted_s) for index, term in enumerate(terms) if term]
        for row in self._precision:
            row[:] = [FORGETTING * value for value in row]
        self._target = [FORGETTING * value for value in self._target]
        for i, share in used:
            self._target[i] += weight * share * ratio
            row = self._precision[i]
            for j, other in used:
                row[j] += weight * share * other
        self._num_unseen += 1
        return self._num_unseen >= _STEPS_PER_LOOK and self.look()

    def look(self) -> bool:
        """Make what was observed the model, if that moves its predictions; True if it does."""
        self._num_unseen = 0
        size = len(self._prior)
        shared = _COMMON**2 / (_OWN**2 + size * _COMMON**2)  # of the inverse of _OWN² I + _COMMON² 11ᵀ
        trust = (_NOISE / _OWN) ** 2
        matrix = [
            [value + trust * ((i == j) - shared) for j, value in enumerate(row)]
            for i, row in enumerate(self._precision)
        ]
        anchor = trust * (1 - size * shared)  # the prior: every factor is 1
        solved = _solve(matrix, [value + anchor for value in self._target])
        self._factors = [max(_FLOOR, factor) for factor in solved]
        learnt = LinearLatencyModel.of(
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
    least = (a_s, b_s, b_s / 1e5, b_s / 2e5, a_s, b_s, b_s / 1e3)
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

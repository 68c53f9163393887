"""Learning a latency model from a prior and the steps that ran.

Regularised least squares in relative error with forgetting. A coefficient is learnt as a multiple of its prior. The
prior's covariance describes errors in practice: mostly all coefficients are wrong by one factor (another clock, busy
cores), and each one a little by itself. So a few steps of any kind set the scale of all predictions, and terms that no
step exercises follow the scale and keep their proportions. The arithmetic has a fixed order: the same steps give the
same model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape, features

#: Factor on the weight of earlier steps at each new one: a step 200 steps ago counts a third.
FORGETTING = 0.995

#: Standard deviations: of a step's relative time around its prediction, of the common factor on the prior's
#: coefficients, of each coefficient's own factor, and, where the prior has no interference, of the interference in
#: multiples of a token's cost.
_NOISE, _COMMON, _OWN, _NEW_INTERFERENCE = 0.1, 1.0, 0.5, 2.0

#: Relative error above which a step is an outlier, and weighs less in proportion.
_OUTLIER = 0.5

#: Steps become predictable below the first mean relative error of predictions, and unpredictable at the second. The
#: mean is over about `_ERROR_STEPS` steps with chunks; the first value takes three times as many to forget.
PREDICTABLE, UNPREDICTABLE = 0.05, 0.1
_FIRST_ERROR, _ERROR_STEPS = 0.5, 64

#: Number of steps between two updates of the model.
_STEPS_PER_LOOK = 8

#: Predictions on which a new model must differ by more than `_MOVED` to be worth new tables.
_MOVED = 0.1
_REFERENCE = (
    *(StepShape((ChunkShape(*chunk),), 0, 0) for chunk in ((32, 0), (512, 0), (512, 8192), (2048, 0))),
    *(StepShape((), num_decodes, 512 * num_decodes) for num_decodes in (1, 32)),
    *(StepShape((ChunkShape(num_tokens, 0),), 32, 512 * 32) for num_tokens in (64, 512)),
)

#: Least share of its prior that a coefficient may have, since nothing is free. Unknown interference may be 0.
_FLOOR = 0.02

#: Indices among the coefficients.
_INTERFERENCE, _WEIGHTS = 8, 9


class Refinement:
    """A latency model that follows observed steps.

    ``estimate`` is the last solution for all observed steps. ``model`` follows only where predictions change enough,
    since tables are built from it. ``is_predictable``: whether steps with chunks take about the estimated time.
    """

    def __init__(self, prior: LinearLatencyModel, estimate: LinearLatencyModel | None = None) -> None:
        """``estimate``: a model that tells better than ``prior`` whether a step reads for longer than it computes."""
        self.model = self.estimate = prior if estimate is None else estimate
        self._prior = _proper(prior)
        # Without interference in the prior, it is learnt from 0 on, and has no part in the common factor. A prior
        # without a time for reading the weights stays a sum.
        self._expected = [1.0] * len(self._prior)
        self._trusts = [(_NOISE / _OWN) ** 2] * len(self._prior)
        if not prior.weights_s:
            self._expected[_WEIGHTS] = 0.0
        if not prior.interference_s:
            self._expected[_INTERFERENCE] = 0.0
            self._trusts[_INTERFERENCE] = (_NOISE / _NEW_INTERFERENCE) ** 2
        self._floors = [_FLOOR * expected for expected in self._expected]
        self._factors = self._expected
        self._precision = [[0.0] * len(self._prior) for _ in self._prior]
        self._target = [0.0] * len(self._prior)
        self.is_predictable = False
        self._error = _FIRST_ERROR
        self._num_unseen = 0
        # The weight of new steps grows, which equals shrinking all earlier weights each time; 1 after each `look`.
        self._growth = 1.0

    def observe(self, shape: StepShape, seconds: float) -> bool:
        """Learn from a step; return whether `model` or ``is_predictable`` has changed.

        Times that no step can have are ignored.
        """
        reads_longer = self.estimate.idle_s(shape.num_tokens, shape.num_decodes) > 0
        values = features(shape, reads_longer=reads_longer)
        terms = [coefficient * value for coefficient, value in zip(self._prior, values, strict=True)]
        predicted_s = sum(factor * term for factor, term in zip(self._factors, terms, strict=True))
        if not (seconds > 0 and predicted_s > 0 and isfinite(ratio := seconds / predicted_s)):
            return False
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
        moved = self._num_unseen >= _STEPS_PER_LOOK and self.look()
        return self._note_error(abs(ratio - 1)) or moved if shape.chunks else moved

    def _note_error(self, error: float) -> bool:
        """Count a prediction's relative error, and return whether ``is_predictable`` has changed."""
        before = self.is_predictable
        self._error += (min(error, 1.0) - self._error) / _ERROR_STEPS
        self.is_predictable = self._error < (UNPREDICTABLE if before else PREDICTABLE)
        return self.is_predictable is not before

    def look(self) -> bool:
        """Solve for the observed steps, and return whether `model` has changed because predictions moved enough."""
        self._num_unseen = 0
        kept, self._growth = 1 / self._growth, 1.0
        self._target = [kept * value for value in self._target]
        self._precision = [[kept * value for value in row] for row in self._precision]
        expected, trust = self._expected, (_NOISE / _OWN) ** 2
        num_common = sum(expected)
        # The inverse of the prior's covariance _OWN² I + _COMMON² eeᵀ is (I - shared eeᵀ) / _OWN².
        shared = _COMMON**2 / (_OWN**2 + num_common * _COMMON**2)
        matrix = [
            [value - trust * shared * expected[i] * expected[j] for j, value in enumerate(row)]
            for i, row in enumerate(self._precision)
        ]
        for i, own in enumerate(self._trusts):
            matrix[i][i] += own
        anchor = trust * (1 - num_common * shared)
        right = [value + anchor * e for value, e in zip(self._target, expected, strict=True)]
        self._factors = _solve_above(matrix, right, self._floors)
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
    """Return the prior's coefficients, raised where a fit left out terms that may still appear."""
    a_s, b_s = prior.a_s, max(prior.b_s, prior.a_s / 1e4)
    least = (a_s, b_s, b_s / 1e5, b_s / 2e5, a_s, b_s, b_s / 1e3, a_s, b_s, 0.0)
    return tuple(map(max, prior.coefficients, least))


def _solve_above(matrix: Sequence[Sequence[float]], right: Sequence[float], floors: Sequence[float]) -> list[float]:
    """Solve for values that are no less than their floors.

    A value below its floor is held at the floor, the worst first, and the others are solved again: a value raised alone
    would raise the predictions of all steps with its term.
    """
    indices, held = range(len(floors)), set[int]()
    while True:
        rows = [[float(i == j) for j in indices] if i in held else list(matrix[i]) for i in indices]
        values = _solve(rows, [floors[i] if i in held else right[i] for i in indices])
        worst = min(indices, key=lambda i: values[i] - floors[i])
        if values[worst] >= floors[worst] or worst in held:
            return values
        held.add(worst)


def _solve(matrix: list[list[float]], right: Sequence[float]) -> list[float]:
    """Solve by Gaussian elimination, in place. A positive definite matrix, or one with held rows, needs no exchange."""
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

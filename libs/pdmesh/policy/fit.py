"""Fitting a latency model to measured steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdmesh.policy.latency import LinearLatencyModel, StepShape, features

#: Shorter than a step on any machine. Relative errors of damaged times below it would overflow.
MIN_STEP_S = 1e-9


#: Numbers of tokens up to which steps are first taken to read the weights for longer than they compute. With 0, the
#: model is a sum.
_KNEES = (0, 32, 128, 512)

#: Share of the least error that another guess must reach, so that noise makes no sum a maximum.
_WORTH = 0.99

#: Most times that steps are taken anew for what the last solution says of them.
_PASSES = 8


def fit(samples: Sequence[tuple[StepShape, float]]) -> LinearLatencyModel:
    """Return the model with the least squared *relative* error on measured (step, seconds).

    No coefficient is negative: terms that would be are left out, the worst first. Terms that no sample exercises are 0,
    with two exceptions. Without a chunk that has history, a history pair costs twice a squared token: a causal chunk
    has L²/2 pairs of its own and C·L with its history. Without a mixed step, the constant of mixed steps is the
    constant of chunks alone. Raises ValueError without samples and where a time is below `MIN_STEP_S`.

    The steps that read the weights for longer than they compute are not known before. So several guesses are tried,
    each is improved until a solution agrees with its guess, and the solution with the least error is returned.
    """
    if not samples or not all(seconds >= MIN_STEP_S for _, seconds in samples):
        raise ValueError(f"a fit needs samples, each of at least {MIN_STEP_S:g} s")
    shapes = [shape for shape, _ in samples]
    seconds = np.array([seconds for _, seconds in samples])
    best, least = None, np.inf
    for knee in _KNEES:
        reading = [shape.num_tokens + shape.num_decodes <= knee for shape in shapes]
        model = _solved(shapes, seconds, reading)
        for _ in range(_PASSES):
            found = [model.idle_s(shape.num_tokens, shape.num_decodes) > 0 for shape in shapes]
            if found == reading:
                break
            reading = found
            model = _solved(shapes, seconds, reading)
        error = float(np.square([model.step_s(shape) for shape in shapes] / seconds - 1).sum())
        if error < least * _WORTH and (model.b_s > 0 or knee == 0):
            best, least = model, error
    assert best is not None
    return best


def _solved(
    shapes: Sequence[StepShape], seconds: npt.NDArray[np.float64], reading: Sequence[bool]
) -> LinearLatencyModel:
    """Return the model with the least error, where the steps ``reading`` do so for longer than they compute."""
    values = np.array([features(shape, reads_longer=each) for shape, each in zip(shapes, reading, strict=True)], float)
    has_history, has_mixed = bool(values[:, 2].any()), bool(values[:, 7].any())
    scale = np.abs(values).max(axis=0)
    used = scale > 0
    found = np.zeros(values.shape[1])
    while True:
        relative = values[:, used] / scale[used] / seconds[:, None]
        solution, *_ = np.linalg.lstsq(relative, np.ones(len(shapes)), rcond=None)
        if (solution >= 0).all():
            break
        used[np.flatnonzero(used)[solution.argmin()]] = False
    found[used] = solution / scale[used]
    if not has_history:
        found[2] = 2 * found[3]
    if not has_mixed:
        found[7] = found[0]
    return LinearLatencyModel.of(found.tolist())

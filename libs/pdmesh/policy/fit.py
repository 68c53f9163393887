"""Fitting a latency model to measured steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdmesh.policy.latency import LinearLatencyModel, StepShape, features

#: Shorter than a step on any machine. Relative errors of damaged times below it would overflow.
MIN_STEP_S = 1e-9


def fit(samples: Sequence[tuple[StepShape, float]]) -> LinearLatencyModel:
    """Return the model with the least squared *relative* error on measured (step, seconds).

    No coefficient is negative: terms that would be are left out, the worst first. Terms that no sample exercises are 0,
    with two exceptions. Without a chunk that has history, a history pair costs twice a squared token: a causal chunk
    has L²/2 pairs of its own and C·L with its history. Without a mixed step, the constant of mixed steps is the
    constant of chunks alone. Raises ValueError without samples and where a time is below `MIN_STEP_S`.
    """
    if not samples or not all(seconds >= MIN_STEP_S for _, seconds in samples):
        raise ValueError(f"a fit needs samples, each of at least {MIN_STEP_S:g} s")
    values = np.array([features(shape) for shape, _ in samples], dtype=float)
    seconds = np.array([seconds for _, seconds in samples])
    has_history, has_mixed = bool(values[:, 2].any()), bool(values[:, 7].any())
    scale = np.abs(values).max(axis=0)
    used = scale > 0
    found = np.zeros(values.shape[1])
    while True:
        relative = values[:, used] / scale[used] / seconds[:, None]
        solution, *_ = np.linalg.lstsq(relative, np.ones(len(samples)), rcond=None)
        if (solution >= 0).all():
            break
        used[np.flatnonzero(used)[solution.argmin()]] = False
    found[used] = solution / scale[used]
    if not has_history:
        found[2] = 2 * found[3]
    if not has_mixed:
        found[7] = found[0]
    return LinearLatencyModel.of(found.tolist())

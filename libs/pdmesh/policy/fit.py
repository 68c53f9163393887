"""Fitting a latency model to measured steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdmesh.policy.latency import LinearLatencyModel, StepShape


def fit(samples: Sequence[tuple[StepShape, float]]) -> LinearLatencyModel:
    """The model with the least squared *relative* error on measured (step, seconds).

    Terms that no sample exercises are 0, but for history: without a chunk that has one, its cost is twice that of a new
    pair of tokens, since a causal chunk has L²/2 pairs of its own and C·L with its history. Raises ValueError where a
    time is not positive.
    """
    if not samples or not all(seconds > 0 for _, seconds in samples):
        raise ValueError("a fit needs samples, each of a positive time")
    features = np.array([_features(shape) for shape, _ in samples], dtype=float)
    seconds = np.array([seconds for _, seconds in samples])
    has_history = bool(features[:, 2].any())
    scale = np.abs(features).max(axis=0)
    used = scale > 0
    relative = features[:, used] / scale[used] / seconds[:, None]
    solution, *_ = np.linalg.lstsq(relative, np.ones(len(samples)), rcond=None)
    found = np.zeros(features.shape[1])
    found[used] = solution / scale[used]
    a_s, b_s, c_s, d_s, decode_a_s, decode_s, decode_context_s = (float(value) for value in found)
    return LinearLatencyModel(
        a_s=a_s,
        b_s=b_s,
        c_s=c_s if has_history else 2 * d_s,
        d_s=d_s,
        decode_a_s=decode_a_s,
        decode_s=decode_s,
        decode_context_s=decode_context_s,
    )


def _features(shape: StepShape) -> tuple[float, ...]:
    """What each coefficient of `LinearLatencyModel` is multiplied with, in the order of its fields."""
    return (
        bool(shape.chunks),
        sum(chunk.num_tokens for chunk in shape.chunks),
        sum(chunk.num_tokens * chunk.num_history_tokens for chunk in shape.chunks),
        sum(chunk.num_tokens**2 for chunk in shape.chunks),
        not shape.chunks and shape.num_decodes > 0,
        shape.num_decodes,
        shape.num_decode_context_tokens,
    )

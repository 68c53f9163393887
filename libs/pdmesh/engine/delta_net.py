"""Gated delta nets: attention whose past is one matrix per head, advanced token by token.

All operations are elementwise, and sums over keys are trees of fixed shape. So results depend neither on chunks nor on
the rows beside a token. `pdmesh.engine.states` says which states a step reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.kernels import by_value
from pdmesh.engine.recurrence import Recurrence, RecurrentRows, Stop, tree_sum
from pdmesh.engine.state_sizes import DeltaNet
from pdmesh.engine.states import StatePath, StateSlice
from pdmesh.engine.weights import DeltaWeights

_EPSILON = 1e-6

#: Number of rows whose convolution is computed at once: their inputs stay in a core's cache.
_TILE_ROWS = 64


def delta_net(
    products: Tensor,
    cache: Tensor,
    slices: Sequence[StateSlice],
    config: DeltaNet,
    weights: DeltaWeights,
    recurrence: Recurrence,
) -> Tensor:
    """Return the results (num_tokens, value heads, value_dim) in fp32 before the norm, and write the states.

    ``products`` has a row for each token: inputs of the convolution, and the decays' and the updates' inputs. An
    additive layer has one input of both.
    Raise RuntimeError if the state before a slice is not in the cache.
    """
    inputs, steps = products.float().tensor_split((config.num_channels,), dim=-1)
    update, decay = steps[:, : config.num_value_heads], steps[:, -config.num_value_heads :]
    lengths = by_value(functional.softplus, decay + weights.decay_bias)
    beta = lengths if config.is_additive else by_value(torch.sigmoid, update)
    decays = by_value(torch.exp, -(lengths * weights.decay_rates))
    states = _States(cache, config)
    paths = [StatePath.begun(part, cache.shape[3], states.positions) for part in slices]
    known = _known(inputs, slices, paths, states)
    heads = _heads(known, slices, weights, config)
    rows = [
        RecurrentRows(
            part.row,
            part.num_tokens,
            None if path.source is None else states.matrix(*path.source),
            [Stop(stop.num_tokens, states.matrix(*stop.place)) for stop in path.stops],
        )
        for part, path in zip(slices, paths, strict=True)
    ]
    results = recurrence(rows, *heads, decays, beta, is_additive=config.is_additive)
    if weights.skip is not None:
        results += heads.value * weights.skip[:, None]
    _keep_inputs(known, slices, paths, states)
    for part, path in zip(slices, paths, strict=True):
        path.end(part.start, states.positions)
    return results


class _Heads(NamedTuple):
    """Normalised queries and keys (num_tokens, key heads, key_dim), and values (num_tokens, value heads, value_dim).

    With tiled heads, each value head has its own copy of a query and a key.
    """

    query: Tensor
    key: Tensor
    value: Tensor


class _States:
    """The states in a layer's pages: positions, matrices of heads, and latest inputs of the convolution, in fp32."""

    def __init__(self, cache: Tensor, config: DeltaNet) -> None:
        memory = cache.flatten(2).view(torch.uint8)
        values = memory[:, :, 8 : config.num_bytes].view(torch.float32)
        self.positions = memory[:, :, :8].view(torch.int64)[..., 0].numpy()
        self.inputs = values[:, :, config.num_matrix_values :]
        self._matrices = values
        self._shape = config.num_value_heads, config.key_dim, config.value_dim

    def matrix(self, page: int, slot: int) -> Tensor:
        """Return a view of the matrices of a state (value heads, key_dim, value_dim)."""
        heads, keys, values = self._shape
        return self._matrices[page, slot, : heads * keys * values].view(self._shape)


def _known(inputs: Tensor, slices: Sequence[StateSlice], paths: Sequence[StatePath], states: _States) -> Tensor:
    """Return the inputs of all slices, each with the inputs of the ``num_taps`` - 1 tokens before in front."""
    num_channels = inputs.shape[1]
    parts: list[Tensor] = []
    for part, path in zip(slices, paths, strict=True):
        kept = states.inputs.shape[2] // num_channels
        before = inputs.new_zeros(kept, num_channels)
        if path.source is not None:
            before = states.inputs[path.source].view(kept, num_channels)
        parts += [before, inputs[part.row : part.row + part.num_tokens]]
    return torch.cat(parts)


def _keep_inputs(known: Tensor, slices: Sequence[StateSlice], paths: Sequence[StatePath], states: _States) -> None:
    """Write the latest inputs at each stop."""
    num_before = states.inputs.shape[2] // known.shape[1]
    for number, (part, path) in enumerate(zip(slices, paths, strict=True)):
        first = part.row + number * num_before
        for stop in path.stops:
            latest = known[first + stop.num_tokens : first + stop.num_tokens + num_before]
            states.inputs[stop.place] = latest.flatten()


def _heads(known: Tensor, slices: Sequence[StateSlice], weights: DeltaWeights, config: DeltaNet) -> _Heads:
    """Return the heads of the activated convolution."""
    num_before, size = config.num_taps - 1, config.num_key_heads * config.key_dim
    num_rows = len(known) - num_before * len(slices)
    query, key = (torch.empty(num_rows, config.num_key_heads, config.key_dim) for _ in range(2))
    value = torch.empty(num_rows, config.num_value_heads, config.value_dim)
    # Convolutions that reach into another slice are computed and dropped.
    places = np.concatenate([np.full(part.num_tokens, number) for number, part in enumerate(slices)])
    places = np.arange(num_rows) + num_before * places
    for first in range(0, num_rows, _TILE_ROWS):
        rows = slice(first, min(first + _TILE_ROWS, num_rows))
        start, end = int(places[rows.start]), int(places[rows.stop - 1]) + 1
        convolved = _convolved(known[start : end + num_before], end - start, weights)
        if end - start != rows.stop - rows.start:
            convolved = convolved[places[rows] - start]
        mixed = by_value(functional.silu, convolved)
        both = mixed[:, : 2 * size].reshape(-1, 2, *query.shape[1:])
        queries, key[rows] = (both if config.is_additive else _normalised(both)).unbind(1)
        query[rows] = queries if config.is_additive else queries * config.key_dim**-0.5
        value[rows] = mixed[:, 2 * size :].reshape(-1, *value.shape[1:])
    if config.tiles_heads:
        repeats = config.num_value_heads // config.num_key_heads
        query, key = query.repeat(1, repeats, 1), key.repeat(1, repeats, 1)
    return _Heads(query, key, value)


def _convolved(known: Tensor, num_rows: int, weights: DeltaWeights) -> Tensor:
    """Return the convolution of the last ``num_rows`` of the inputs."""
    first = len(known) - num_rows
    total = torch.zeros(num_rows, known.shape[1])
    for tap, factors in enumerate(weights.taps):
        total += known[first - tap : first - tap + num_rows] * factors
    return total if weights.taps_bias is None else total + weights.taps_bias


def _normalised(rows: Tensor) -> Tensor:
    """Return rows of heads, each divided by its length."""
    return rows * torch.rsqrt(tree_sum((rows * rows)[..., None]) + _EPSILON)

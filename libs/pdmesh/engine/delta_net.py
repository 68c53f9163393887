"""Gated delta nets and Mamba-2: attention whose past is one matrix per head, advanced token by token.

Compiled kernels compute a layer between its matrix products. The reference in torch has the same bits. Results depend
neither on chunks nor on the rows beside a token. `pdmesh.engine.states` says which states a step reads and writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.engine.levels import FOLDER, CpuLevel, open_library, processor_levels
from pdmesh.engine.recurrence import (
    RecurrentRows,
    Stop,
    exp,
    normed,
    recur,
    sigmoid,
    silu,
    softplus,
    tree_sum,
)
from pdmesh.engine.state_sizes import DeltaNet
from pdmesh.engine.states import StatePath, StateSlice
from pdmesh.engine.weights import DeltaWeights

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64

#: Added to the square of a query's or key's length.
_EPSILON = 1e-6

#: The kernel's sums begin with this number of keys.
_NUM_LEAVES = 8


class DeltaLayer(NamedTuple):
    """Sizes and weights of a layer, and the epsilon of its norm."""

    config: DeltaNet
    weights: DeltaWeights
    epsilon: float


#: Rows of one sequence, and the places of their states.
StatePart = tuple[StateSlice, StatePath]


class DeltaCompute(Protocol):
    """Computation of a layer between its matrix products."""

    def __call__(self, products: Tensor, states: Tensor, parts: Sequence[StatePart], layer: DeltaLayer) -> Tensor:
        """Return the gated results (num_tokens, values), and write the states at the parts' stops.

        ``products`` has a row for each token: gates of the results, inputs of the convolution, and the updates' and the
        decays' inputs. An additive layer has one input of both. ``states`` (pages, 2, size) in fp32 are the matrices of
        all heads, and behind these the inputs of the last tokens. ``parts`` are in the order of their rows.
        """
        ...


def delta_net(
    products: Tensor, cache: Tensor, slices: Sequence[StateSlice], layer: DeltaLayer, compute: DeltaCompute
) -> Tensor:
    """Return `DeltaCompute`'s results, and write the states to the layer's pages.

    Raise RuntimeError if the state before a slice is not in the cache.
    """
    memory = cache.flatten(2).view(torch.uint8)
    states = memory[:, :, : layer.config.num_bytes - 8].view(torch.float32)
    # A position follows its state, so that the state begins at a cache line.
    positions = memory[:, :, -8:].view(torch.int64)[..., 0].numpy()
    parts = [(part, StatePath.begun(part, cache.shape[3], positions)) for part in slices]
    results = compute(products, states, parts, layer)
    for part, path in parts:
        path.end(part.start, positions)
    return results


def compute_by_torch(products: Tensor, states: Tensor, parts: Sequence[StatePart], layer: DeltaLayer) -> Tensor:
    """Compute as `DeltaCompute` describes: the reference."""
    config, weights, epsilon = layer
    sizes = (config.num_values, config.num_channels)
    gates, inputs, steps = products.float().tensor_split((sizes[0], sum(sizes)), dim=-1)
    lengths = softplus(steps[:, -config.num_value_heads :] + weights.decay_bias)
    beta = lengths if config.is_additive else sigmoid(steps[:, : config.num_value_heads])
    matrices, kept = states.tensor_split((config.num_matrix_values,), dim=-1)
    matrices = matrices.view(*states.shape[:2], config.num_value_heads, config.key_dim, config.value_dim)
    kept = kept.view(*states.shape[:2], config.num_taps - 1, config.num_channels)
    known = [_known(inputs, part, path, kept) for part, path in parts]
    query, key, value = _heads(torch.cat([silu(_convolved(each, weights)) for each in known]), config)
    rows = [
        RecurrentRows(
            part.row,
            part.num_tokens,
            None if path.source is None else matrices[path.source],
            [Stop(stop.num_tokens, matrices[stop.place]) for stop in path.stops],
        )
        for part, path in parts
    ]
    decays = exp(-(lengths * weights.decay_rates))
    results = recur(rows, query, key, value, decays, beta, is_additive=config.is_additive)
    for (_, path), own in zip(parts, known, strict=True):
        for stop in path.stops:
            kept[stop.place] = own[stop.num_tokens : stop.num_tokens + config.num_taps - 1]
    if not config.is_additive:
        return (normed(results, weights.norm.weight, epsilon).flatten(1) * silu(gates)).to(products.dtype)
    if weights.skip is not None:
        results += value * weights.skip[:, None]
    groups = (results.flatten(1) * silu(gates)).view(len(gates), config.num_key_heads, -1)
    factors = weights.norm.weight.view(groups.shape[1:])
    return normed(groups, factors, epsilon).flatten(1).to(products.dtype)


def _known(inputs: Tensor, part: StateSlice, path: StatePath, kept: Tensor) -> Tensor:
    """Return the inputs of a sequence, with the inputs of the ``num_taps`` - 1 tokens before in front."""
    before = torch.zeros_like(kept[0, 0]) if path.source is None else kept[path.source]
    return torch.cat((before, inputs[part.row : part.row + part.num_tokens]))


def _convolved(known: Tensor, weights: DeltaWeights) -> Tensor:
    first = len(weights.taps) - 1
    total = torch.zeros_like(known[first:])
    for tap, factors in enumerate(weights.taps):
        total += known[first - tap : len(known) - tap] * factors
    return total if weights.taps_bias is None else total + weights.taps_bias


def _heads(channels: Tensor, config: DeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each (num_tokens, value heads, dim)."""
    size, repeats = config.num_key_heads * config.key_dim, config.num_value_heads // config.num_key_heads
    both = channels[:, : 2 * size].reshape(len(channels), 2, config.num_key_heads, config.key_dim)
    if not config.is_additive:
        both = both * torch.rsqrt(tree_sum((both * both)[..., None]) + _EPSILON)
    both = both.repeat(1, 1, repeats, 1) if config.tiles_heads else both.repeat_interleave(repeats, dim=2)
    query, key = both.unbind(1)
    value = channels[:, 2 * size :].reshape(len(channels), config.num_value_heads, config.value_dim)
    return (query if config.is_additive else query * config.key_dim**-0.5), key, value


@dataclass(frozen=True, slots=True)
class DeltaKernel:
    """`DeltaCompute` by one level's ``csrc/ordered/delta_net.cpp``. All levels give the same bits."""

    level: CpuLevel
    function: Callable[..., None]

    def __call__(self, products: Tensor, states: Tensor, parts: Sequence[StatePart], layer: DeltaLayer) -> Tensor:
        config, weights, epsilon = layer
        if config.key_dim < _NUM_LEAVES:
            return compute_by_torch(products, states, parts, layer)
        output = products.new_empty(len(products), config.num_values)
        first, (of_page, of_slot, _) = states.data_ptr(), states.stride()
        slices: list[int] = []
        stops: list[int] = []
        for part, path in parts:
            source, num_before = path.source, len(stops) // 2
            before = 0 if source is None else first + 4 * (source.page * of_page + source.slot * of_slot)
            slices += (part.row, part.num_tokens, before, num_before, len(path.stops))
            for num_tokens, (page, slot) in path.stops:
                stops += (num_tokens, first + 4 * (page * of_page + slot * of_slot))
        fields = np.array(slices + stops, dtype=np.int64)
        own = (
            weights.taps,
            weights.taps_bias,
            weights.decay_rates,
            weights.decay_bias,
            weights.norm.weight,
            weights.skip,
        )
        self.function(
            products.data_ptr(),
            fields.ctypes.data,
            len(parts),
            fields[len(slices) :].ctypes.data,
            output.data_ptr(),
            len(products),
            *(None if each is None else each.data_ptr() for each in own),
            config.num_taps,
            config.num_key_heads,
            config.num_value_heads,
            config.key_dim,
            config.value_dim,
            config.is_additive,
            config.tiles_heads,
            epsilon,
            torch.get_num_threads(),
        )
        return output


@cached
def fastest_delta_compute(dtype: torch.dtype) -> DeltaCompute:
    """Return the fastest compiled kernel for this processor, or the reference if none was compiled."""
    name = next(name for name, each in TORCH_DTYPES.items() if each == dtype)
    found = (load_delta_kernel(level, name) for level in processor_levels() if level.is_ordered)
    return next((kernel for kernel in found if kernel is not None), compute_by_torch)


def delta_kernel(config: DeltaNet, dtype: torch.dtype) -> DeltaKernel | None:
    """Return the compiled kernel that computes these layers here; None if the reference does."""
    found = fastest_delta_compute(dtype)
    return found if isinstance(found, DeltaKernel) and config.key_dim >= _NUM_LEAVES else None


def load_delta_kernel(level: CpuLevel, dtype: str, folder: Path = FOLDER) -> DeltaKernel | None:
    """Load an ordered level's kernel, or return None if it was not compiled. The processor must have the level."""
    library = open_library(level, folder)
    if library is None or not hasattr(library, "pdmesh_delta_net"):
        return None
    function = library[f"pdmesh_delta_net{'_f32' if dtype == 'float32' else level.suffixes[dtype]}"]
    pointers, ints = [_POINTER] * 6, [_INT] * 7
    function.argtypes = [_POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT, *pointers, *ints, ctypes.c_float, _INT]
    function.restype = None
    return DeltaKernel(level, function)

"""Gated delta nets: attention whose past is one matrix per head, advanced token by token.

A layer's page of a block holds two states, each with its *position*: the number of tokens that it covers. A step reads
the state that covers the tokens before its first, and writes the state after each block and after its last token. The
state that was read stays, so a step may be computed again. A state of another position is never read.

All operations are elementwise, and sums over keys are trees of fixed shape. So results depend neither on chunks nor on
the rows beside a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pdmesh.engine.kernels import by_value
from pdmesh.engine.model_config import DeltaNet
from pdmesh.engine.weights import DeltaWeights

_EPSILON = 1e-6
_NO_POSITION = -1


class StateSlice(NamedTuple):
    """Rows of a step of one sequence: ``num_tokens`` tokens from ``start`` on, in rows from ``row`` on.

    ``pages`` are the layer's pages of the sequence's blocks, from the block of the token before ``start`` on, or from
    the first block. With ``is_timing``, the state before may be missing.
    """

    row: int
    start: int
    num_tokens: int
    pages: Sequence[int]
    is_timing: bool = False


class _State(NamedTuple):
    """State behind a token: a matrix per value head (keys, values), and the last inputs of the convolution, in fp32."""

    matrix: Tensor
    inputs: Tensor


def delta_net(
    products: Tensor, cache: Tensor, slices: Sequence[StateSlice], config: DeltaNet, weights: DeltaWeights
) -> Tensor:
    """Return the results (num_tokens, value heads, value_dim) in fp32 before the norm, and write the states.

    ``products`` has a row for each token: inputs of the convolution, and the decays' and the updates' inputs.
    """
    sizes = (config.num_channels, config.num_value_heads, config.num_value_heads)
    inputs, update, decay = products.float().split(sizes, dim=-1)  # type: ignore[no-untyped-call]
    beta = by_value(torch.sigmoid, update)
    rates = by_value(functional.softplus, decay + weights.decay_bias) * by_value(torch.exp, weights.decay_log)
    decays = by_value(torch.exp, -rates)
    results = torch.empty(len(products), config.num_value_heads, config.value_dim)
    for part in slices:
        rows = slice(part.row, part.row + part.num_tokens)
        pages = _Pages(cache, part, config)
        state = pages.read()
        known = torch.cat((state.inputs, inputs[rows]))
        query, key, value = _heads(_convolved(known, part.num_tokens, weights), config)
        matrix = state.matrix
        for token in range(part.num_tokens):
            matrix = matrix * decays[part.row + token, :, None, None]
            own_key = key[token, :, :, None]
            delta = (value[token] - _tree_sum(matrix * own_key)) * beta[part.row + token, :, None]
            matrix = matrix + own_key * delta[:, None]
            results[part.row + token] = _tree_sum(matrix * query[token, :, :, None])
            if pages.is_kept(token):
                pages.write(token, _State(matrix, known[token + 1 : token + config.num_taps]))
    return results


def _convolved(known: Tensor, num_tokens: int, weights: DeltaWeights) -> Tensor:
    """Return the activated convolution of the last ``num_tokens`` of the inputs."""
    first = len(known) - num_tokens
    total = torch.zeros(num_tokens, known.shape[1])
    for tap, factors in enumerate(weights.taps):
        total += known[first - tap : first - tap + num_tokens] * factors
    return by_value(functional.silu, total)


def _heads(mixed: Tensor, config: DeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised queries and keys, and values, each (num_tokens, value heads, dim)."""
    size = config.num_key_heads * config.key_dim
    query, key, value = mixed.split((size, size, mixed.shape[1] - 2 * size), dim=-1)  # type: ignore[no-untyped-call]
    repeats = config.num_value_heads // config.num_key_heads

    def normalised(heads: Tensor) -> Tensor:
        rows = heads.reshape(len(heads), config.num_key_heads, config.key_dim)
        lengths = torch.rsqrt(_tree_sum((rows * rows)[..., None]) + _EPSILON)
        return (rows * lengths).repeat_interleave(repeats, dim=1)

    values: Tensor = value.reshape(len(value), config.num_value_heads, config.value_dim)
    return normalised(query) * config.key_dim**-0.5, normalised(key), values


def _tree_sum(terms: Tensor) -> Tensor:
    """Return the sum over the dimension before the last, a power of two, in one order."""
    while (half := terms.shape[-2] // 2) > 0:
        terms = terms[..., :half, :] + terms[..., half:, :]
    return terms[..., 0, :]


class _Pages:
    """The pages of one sequence's states in a layer: two states each."""

    def __init__(self, cache: Tensor, part: StateSlice, config: DeltaNet) -> None:
        self._memory = cache.flatten(2).view(torch.uint8)
        self._part = part
        self._config = config
        self._block_size = cache.shape[3]
        self._first_block = max(0, part.start - 1) // self._block_size
        self._read: tuple[int, int] | None = None

    def read(self) -> _State:
        """Return the state before the slice. Raise RuntimeError if no page has it."""
        config = self._config
        if self._part.start == 0 or self._part.is_timing:
            matrix = torch.zeros(config.num_value_heads, config.key_dim, config.value_dim)
            return _State(matrix, torch.zeros(config.num_taps - 1, config.num_channels))
        page = self._part.pages[0]
        for slot in range(2):
            position, state = self._place(page, slot)
            if int(position) == self._part.start:
                self._read = page, slot
                return state
        raise RuntimeError(f"a layer's state behind token {self._part.start} is not here")

    def is_kept(self, token: int) -> bool:
        """Return whether the state behind a token of the slice is written: the last one, and each block's last."""
        end = self._part.start + token + 1
        return token == self._part.num_tokens - 1 or end % self._block_size == 0

    def write(self, token: int, state: _State) -> None:
        """Write the state behind a token beside the state that was read, and forget others in that page."""
        end = self._part.start + token + 1
        page = self._part.pages[(end - 1) // self._block_size - self._first_block]
        slot = 1 if self._read == (page, 0) else 0
        other, _ = self._place(page, 1 - slot)
        if self._read != (page, 1 - slot):
            other.fill_(_NO_POSITION)
        position, place = self._place(page, slot)
        position.fill_(_NO_POSITION)
        place.matrix.copy_(state.matrix)
        place.inputs.copy_(state.inputs)
        position.fill_(end)

    def _place(self, page: int, slot: int) -> tuple[Tensor, _State]:
        """Return the position of a state in a page, and the state."""
        config, memory = self._config, self._memory[page, slot]
        values = memory[8 : config.num_bytes].view(torch.float32)
        matrix, inputs = values.split((config.num_matrix_values, config.num_input_values))  # type: ignore[no-untyped-call]
        return memory[:8].view(torch.int64), _State(
            matrix.view(config.num_value_heads, config.key_dim, config.value_dim),
            inputs.view(config.num_taps - 1, config.num_channels),
        )

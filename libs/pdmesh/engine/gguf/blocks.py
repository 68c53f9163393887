"""What blocks of quantised values stand for, by GGML's definition of each type."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def _halves(data: Tensor, first: int) -> Tensor:
    """A float16 in each block, (n, 1)."""
    return data[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """The lower halves of the bytes, then the upper ones."""
    return torch.cat((data & 15, data >> 4), dim=1).float()


def _fifth_bits(data: Tensor) -> Tensor:
    """32 bits as 32 values of 16 or 0."""
    bits = (data[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(1).float() * 16


def _q4_0(data: Tensor) -> Tensor:
    return (_nibbles(data[:, 2:]) - 8) * _halves(data, 0)


def _q4_1(data: Tensor) -> Tensor:
    return _nibbles(data[:, 4:]) * _halves(data, 0) + _halves(data, 2)


def _q5_0(data: Tensor) -> Tensor:
    return (_nibbles(data[:, 6:]) + _fifth_bits(data[:, 2:6]) - 16) * _halves(data, 0)


def _q5_1(data: Tensor) -> Tensor:
    return (_nibbles(data[:, 8:]) + _fifth_bits(data[:, 4:8])) * _halves(data, 0) + _halves(data, 2)


def _q8_0(data: Tensor) -> Tensor:
    return data[:, 2:].contiguous().view(torch.int8).float() * _halves(data, 0)


def _scales_and_minima(data: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of a block's eight parts, 6 bits each, from 12 bytes; (n, 8, 1), by the block's own factors."""
    low, middle, high = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=1)
    return (scales.float() * _halves(data, 0))[..., None], (minima.float() * _halves(data, 2))[..., None]


def _pairs_of_parts(data: Tensor) -> Tensor:
    """128 bytes as 8 parts of 32 values: of 32 bytes each, the lower halves, then the upper ones."""
    chunks = data.view(-1, 4, 1, 32)
    return torch.cat((chunks & 15, chunks >> 4), dim=2).view(-1, 8, 32).float()


def _q4_k(data: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(data)
    return (_pairs_of_parts(data[:, 16:].contiguous()) * scales - minima).flatten(1)


def _q5_k(data: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(data)
    bits = (data[:, 16:48][:, None, :] >> torch.arange(8, dtype=torch.uint8)[None, :, None]) & 1
    values = _pairs_of_parts(data[:, 48:].contiguous()) + bits.float() * 16
    return (values * scales - minima).flatten(1)


def _q6_k(data: Tensor) -> Tensor:
    low, high = data[:, :128].reshape(-1, 2, 2, 32), data[:, 128:192].reshape(-1, 2, 1, 32)
    scales = data[:, 192:208].contiguous().view(torch.int8).float() * _halves(data, 208)
    lower = torch.cat((low & 15, low >> 4), dim=2)  # (n, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[None, None, :, None]
    values = (lower | (((high >> shifts) & 3) << 4)).float() - 32
    return (values.view(-1, 16, 16) * scales[..., None]).flatten(1)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda data: data.contiguous().view(dtype).float()


#: Blocks (n, bytes) of bytes to values (n, values) in fp32, by the numbers of `pdmesh.engine.gguf.reader.TYPES`.
VALUES: Mapping[int, Callable[[Tensor], Tensor]] = {
    0: _plain(torch.float32),
    1: _plain(torch.float16),
    2: _q4_0,
    3: _q4_1,
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
    30: _plain(torch.bfloat16),
}

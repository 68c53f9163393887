"""What blocks of quantised values stand for, by GGML's definition of each type."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pdmesh.engine.gguf.small_blocks import SMALL
from pdmesh.engine.grouped import CodeKind, Factors, GroupedWeight, of_mxfp4

_PART = 32  # values of most types' groups


def _halves(data: Tensor, first: int) -> Tensor:
    """A float16 in each block, (n, 1)."""
    return data[:, first : first + 2].contiguous().view(torch.float16)


def _nibbles(data: Tensor) -> Tensor:
    """The lower halves of the bytes, then the upper ones."""
    return torch.cat((data & 15, data >> 4), dim=1)


def _fifth_bits(data: Tensor) -> Tensor:
    """32 bits as 32 values of 16 or 0."""
    return ((data[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1) << 4


def _signed(codes: Tensor, bits: int, scales: Tensor) -> GroupedWeight:
    """Values from which half of their range is taken away."""
    codes = codes ^ (1 << (bits - 1))
    return GroupedWeight(codes=codes, bits=bits, kind=CodeKind.SIGNED, group_size=_PART, scales=Factors(scales, 1))


def _shifted(codes: Tensor, bits: int, scales: Tensor, added: Tensor) -> GroupedWeight:
    """Values that something is added to."""
    return GroupedWeight(
        codes=codes,
        bits=bits,
        kind=CodeKind.UNSIGNED,
        group_size=_PART,
        scales=Factors(scales, 1),
        minima=Factors(-added, 1),
    )


def _q4_0(data: Tensor) -> GroupedWeight:
    return _signed(_nibbles(data[:, 2:]), 4, _halves(data, 0))


def _q4_1(data: Tensor) -> GroupedWeight:
    return _shifted(_nibbles(data[:, 4:]), 4, _halves(data, 0), _halves(data, 2))


def _q5_0(data: Tensor) -> GroupedWeight:
    return _signed(_nibbles(data[:, 6:]) | _fifth_bits(data[:, 2:6]), 5, _halves(data, 0))


def _q5_1(data: Tensor) -> GroupedWeight:
    return _shifted(_nibbles(data[:, 8:]) | _fifth_bits(data[:, 4:8]), 5, _halves(data, 0), _halves(data, 2))


def _q8_0(data: Tensor) -> GroupedWeight:
    scales = Factors(_halves(data, 0), 1)
    return GroupedWeight(codes=data[:, 2:].contiguous(), bits=8, kind=CodeKind.SIGNED, group_size=_PART, scales=scales)


def _with_parts(data: Tensor, codes: Tensor, bits: int) -> GroupedWeight:
    """Blocks of eight parts with scales and minima of 6 bits each, in 12 bytes, and factors of the block's own."""
    low, middle, high = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=1).view(torch.int8)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=1).view(torch.int8)
    return GroupedWeight(
        codes=codes.flatten(1),
        bits=bits,
        kind=CodeKind.UNSIGNED,
        group_size=_PART,
        scales=Factors(_halves(data, 0), 8, scales),
        minima=Factors(_halves(data, 2), 8, minima),
    )


def _pairs_of_parts(data: Tensor) -> Tensor:
    """128 bytes as 8 parts of 32 values: of 32 bytes each, the lower halves, then the upper ones."""
    chunks = data.reshape(-1, 4, 1, 32)
    return torch.cat((chunks & 15, chunks >> 4), dim=2).view(-1, 8, 32)


def _q4_k(data: Tensor) -> GroupedWeight:
    return _with_parts(data, _pairs_of_parts(data[:, 16:]), 4)


def _q5_k(data: Tensor) -> GroupedWeight:
    bits = (data[:, 16:48][:, None, :] >> torch.arange(8, dtype=torch.uint8)[None, :, None]) & 1
    return _with_parts(data, _pairs_of_parts(data[:, 48:]) | (bits << 4), 5)


def _q6_k(data: Tensor) -> GroupedWeight:
    low, high = data[:, :128].reshape(-1, 2, 2, 32), data[:, 128:192].reshape(-1, 2, 1, 32)
    lower = torch.cat((low & 15, low >> 4), dim=2)  # (n, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[None, None, :, None]
    codes = (lower | (((high >> shifts) & 3) << 4)).flatten(1) ^ 32
    scales = Factors(_halves(data, 208), 16, data[:, 192:208].contiguous().view(torch.int8))
    return GroupedWeight(codes=codes, bits=6, kind=CodeKind.SIGNED, group_size=16, scales=scales)


def _mxfp4(data: Tensor) -> GroupedWeight:
    return of_mxfp4(_nibbles(data[:, 1:]), data[:, :1])


#: Blocks (n, bytes) of bytes as a weight of n outputs, by the numbers of `pdmesh.engine.gguf.gguf_reader.TYPES`.
GROUPED: Mapping[int, Callable[[Tensor], GroupedWeight]] = {
    2: _q4_0,
    3: _q4_1,
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
    39: _mxfp4,
    **SMALL,
}
_PLAIN: Mapping[int, torch.dtype] = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


def values_of(type_number: int, data: Tensor) -> Tensor:
    """Blocks (n, bytes) of bytes as values (n, values) in fp32."""
    if type_number in _PLAIN:
        return data.contiguous().view(_PLAIN[type_number]).float()
    return GROUPED[type_number](data).values()

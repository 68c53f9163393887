"""Decoding of blocks of quantised values, by GGML's definition of each type.

Each becomes a `GroupedWeight` of codes times a scale, with the same bits as GGML's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from pdmesh.engine.gguf.grids import IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, Grid
from pdmesh.engine.grouped import CodeKind, Factors, GroupedWeight, of_mxfp4

_PART = 32
#: NVFP4's byte for a scale of zero.
_NO_SCALE = 0x7F
#: Values of IQ4's codes.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: Number of codes per level of IQ1. A value is a level of the grid plus or minus one eighth.
_IQ1_LEVELS = 8


def _half(data: Tensor, first: int) -> Tensor:
    """Return the float16 at byte ``first`` of each block, (n, 1)."""
    return data[:, first : first + 2].contiguous().view(torch.float16)


def _words(data: Tensor, num_bytes: int) -> Tensor:
    """Return groups of ``num_bytes`` little-endian bytes as integers, int32."""
    parts = data.reshape(len(data), -1, num_bytes).int()
    return (parts << (8 * torch.arange(num_bytes, dtype=torch.int32))).sum(-1, dtype=torch.int32)


def _fields(data: Tensor, bits: int, count: int) -> Tensor:
    """Split each integer into ``count`` numbers of ``bits`` along a new last dimension, lowest bits first."""
    shifts = torch.arange(0, bits * count, bits, dtype=data.dtype)
    return (data[..., None] >> shifts) & ((1 << bits) - 1)


def _planes(data: Tensor, bits: int, width: int) -> Tensor:
    """Return numbers of ``bits`` (n, values). A chunk of ``width`` bytes has all lowest numbers, then the next."""
    chunks = data.reshape(len(data), -1, 1, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return ((chunks >> shifts) & ((1 << bits) - 1)).flatten(1)


def _signed(codes: Tensor, bits: int, group_size: int, scales: Factors) -> GroupedWeight:
    """Return a weight of signed integers (n, values) that fit ``bits``."""
    return GroupedWeight(
        codes=codes.to(torch.uint8) & ((1 << bits) - 1),
        bits=bits,
        kind=CodeKind.SIGNED,
        group_size=group_size,
        scales=scales,
    )


def _unsigned(codes: Tensor, bits: int, group_size: int, scales: Factors, minima: Factors) -> GroupedWeight:
    """Return a weight of codes (n, values). Each value is a code times a scale, minus a minimum."""
    return GroupedWeight(
        codes=codes, bits=bits, kind=CodeKind.UNSIGNED, group_size=group_size, scales=scales, minima=minima
    )


def _q4_0(data: Tensor) -> GroupedWeight:
    return _signed(_planes(data[:, 2:], 4, 16) - 8, 4, _PART, Factors(_half(data, 0), 1))


def _q4_1(data: Tensor) -> GroupedWeight:
    codes = _planes(data[:, 4:], 4, 16)
    return _unsigned(codes, 4, _PART, Factors(_half(data, 0), 1), Factors(-_half(data, 2), 1))


def _fifth_bits(data: Tensor) -> Tensor:
    """Return 32 bits as 32 values of 16 or 0."""
    return _fields(data, 1, 8).flatten(1) << 4


def _q5_0(data: Tensor) -> GroupedWeight:
    codes = _planes(data[:, 6:], 4, 16) | _fifth_bits(data[:, 2:6])
    return _signed(codes - 16, 5, _PART, Factors(_half(data, 0), 1))


def _q5_1(data: Tensor) -> GroupedWeight:
    codes = _planes(data[:, 8:], 4, 16) | _fifth_bits(data[:, 4:8])
    return _unsigned(codes, 5, _PART, Factors(_half(data, 0), 1), Factors(-_half(data, 2), 1))


def _q8_0(data: Tensor) -> GroupedWeight:
    return _signed(data[:, 2:], 8, _PART, Factors(_half(data, 0), 1))


def _with_parts(data: Tensor, codes: Tensor, bits: int) -> GroupedWeight:
    """Return a weight of blocks of eight parts. Their scales and minima have 6 bits each, packed in 12 bytes."""
    low, middle, high = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=1).view(torch.int8)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=1).view(torch.int8)
    return _unsigned(codes, bits, _PART, Factors(_half(data, 0), 8, scales), Factors(_half(data, 2), 8, minima))


def _q4_k(data: Tensor) -> GroupedWeight:
    return _with_parts(data, _planes(data[:, 16:], 4, 32), 4)


def _q5_k(data: Tensor) -> GroupedWeight:
    return _with_parts(data, _planes(data[:, 48:], 4, 32) | (_planes(data[:, 16:48], 1, 32) << 4), 5)


def _q6_k(data: Tensor) -> GroupedWeight:
    codes = _planes(data[:, :128], 4, 64) | (_planes(data[:, 128:192], 2, 32) << 4)
    scales = Factors(_half(data, 208), 16, data[:, 192:208].contiguous().view(torch.int8))
    return _signed(codes - 32, 6, 16, scales)


def _mxfp4(data: Tensor) -> GroupedWeight:
    return of_mxfp4(_planes(data[:, 1:], 4, 16), data[:, :1])


def _q1_0(data: Tensor) -> GroupedWeight:
    signs = _fields(data[:, 2:], 1, 8).flatten(1).to(torch.int8)
    return _signed(2 * signs - 1, 4, 128, Factors(_half(data, 0), 1))


def _q2_0(data: Tensor) -> GroupedWeight:
    codes = _fields(data[:, 2:], 2, 4).flatten(1).to(torch.int8)
    return _signed(codes - 1, 4, 64, Factors(_half(data, 0), 1))


def _q2_k(data: Tensor) -> GroupedWeight:
    scales = data[:, :16]
    return _unsigned(
        _planes(data[:, 16:80], 2, 32),
        4,
        16,
        Factors(_half(data, 80), 16, (scales & 15).to(torch.int8)),
        Factors(_half(data, 82), 16, (scales >> 4).to(torch.int8)),
    )


def _q3_k(data: Tensor) -> GroupedWeight:
    low = _planes(data[:, 96:104], 4, 8) | (_planes(data[:, 104:108], 2, 4) << 4)
    codes = _planes(data[:, 32:96], 2, 32).to(torch.int8) + 4 * _planes(data[:, :32], 1, 32).to(torch.int8) - 4
    return _signed(codes, 4, 16, Factors(_half(data, 108), 16, low.to(torch.int8) - 32))


def _tq1_0(data: Tensor) -> GroupedWeight:
    """Return a weight of three levels. Bytes have five values each, and the last four bytes have four."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None]
    parts = [
        (data[:, first:last].reshape(len(data), 1, -1) * powers[:count]).flatten(1)
        for first, last, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    codes = ((torch.cat(parts, dim=1).int() * 3) >> 8).to(torch.int8) - 1
    return _signed(codes, 4, 128, Factors(_half(data, 52), 2))


def _tq2_0(data: Tensor) -> GroupedWeight:
    codes = _planes(data[:, :64], 2, 32).to(torch.int8) - 1
    return _signed(codes, 4, 128, Factors(_half(data, 64), 2))


def _iq4_nl(data: Tensor) -> GroupedWeight:
    codes = torch.tensor(_IQ4_VALUES, dtype=torch.int8)[_planes(data[:, 2:], 4, 16).int()]
    return _signed(codes, 8, 32, Factors(_half(data, 0), 1))


def _iq4_xs(data: Tensor) -> GroupedWeight:
    low, high = _fields(data[:, 4:8], 4, 2).flatten(1), _fields(data[:, 2:4], 2, 4).flatten(1)
    codes = torch.tensor(_IQ4_VALUES, dtype=torch.int8)[_planes(data[:, 8:], 4, 16).int()]
    return _signed(codes, 8, 32, Factors(_half(data, 0), 8, (low | (high << 4)).to(torch.int8) - 32))


def _nvfp4(data: Tensor) -> GroupedWeight:
    codes = _planes(data[:, 4:], 4, 8)
    scales = _nvfp4_scales()[data[:, :4].int()]
    return GroupedWeight(codes=codes, bits=4, kind=CodeKind.FLOAT, group_size=16, scales=Factors(scales, 1))


@cache
def _nvfp4_scales() -> Tensor:
    """Return the scale of each byte: half of its E4M3 value without a sign, because codes are twice their values."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    exponents, mantissas = ((bytes_ >> 3) & 15).float(), (bytes_ & 7).float()
    normal = (1 + mantissas / 8) * 2.0 ** (exponents - 7)
    values = torch.where(exponents == 0, mantissas * 2.0**-9, normal) / 2
    return torch.where(bytes_ == _NO_SCALE, 0.0, values).bfloat16()


@cache
def _points(grid: Grid) -> Tensor:
    return torch.from_numpy(grid.points)


@cache
def _signs() -> Tensor:
    """Return the signs (256, 8) for each byte: -1 where a bit is 1, lowest bit first."""
    return 1 - 2 * _fields(torch.arange(256), 1, 8).to(torch.int8)


def _lattice(
    grid: Grid, numbers: Tensor, signs: Tensor, scales: Factors, *, bits: int, group_size: int
) -> GroupedWeight:
    """Return points of a grid by ``numbers`` (n, points). ``signs`` has a bit per value, as bytes (n, values / 8)."""
    values = _points(grid)[numbers.int()].flatten(1) * _signs()[signs.int()].flatten(1)
    return _signed(values, bits, group_size, scales)


def _with_parity(numbers: Tensor) -> Tensor:
    """Return numbers of seven bits as bytes whose highest bit makes the number of ones even."""
    folded = numbers ^ (numbers >> 4)
    folded = folded ^ (folded >> 2)
    return numbers | (((folded ^ (folded >> 1)) & 1) << 7)


def _odd_multipliers(halves: Tensor) -> Tensor:
    """Return 2 x + 1. The file's scales are x + 1/2."""
    return (2 * halves + 1).to(torch.int8)


def _iq2_xxs(data: Tensor) -> GroupedWeight:
    pairs = data[:, 2:].reshape(len(data), 8, 8)
    words = _words(pairs[:, :, 4:].flatten(1), 4)
    scales = Factors(_half(data, 0).float() / 8, 8, _odd_multipliers((words >> 28) & 15))
    signs = _with_parity(_fields(words, 7, 4).flatten(1))
    return _lattice(IQ2_XXS, pairs[:, :, :4].flatten(1), signs, scales, bits=8, group_size=32)


def _iq2_xs(data: Tensor) -> GroupedWeight:
    words = _words(data[:, 2:66], 2)
    scales = Factors(_half(data, 0).float() / 8, 16, _odd_multipliers(_fields(data[:, 66:74], 4, 2).flatten(1)))
    return _lattice(IQ2_XS, words & 511, _with_parity(words >> 9), scales, bits=8, group_size=16)


def _iq2_s(data: Tensor) -> GroupedWeight:
    numbers = data[:, 2:34].int() | (_fields(data[:, 66:74], 2, 4).flatten(1).int() << 8)
    scales = Factors(_half(data, 0).float() / 8, 16, _odd_multipliers(_fields(data[:, 74:82], 4, 2).flatten(1)))
    return _lattice(IQ2_S, numbers, data[:, 34:66], scales, bits=8, group_size=16)


def _iq3_xxs(data: Tensor) -> GroupedWeight:
    words = _words(data[:, 66:98], 4)
    scales = Factors(_half(data, 0).float() / 4, 8, _odd_multipliers((words >> 28) & 15))
    return _lattice(
        IQ3_XXS, data[:, 2:66], _with_parity(_fields(words, 7, 4).flatten(1)), scales, bits=8, group_size=32
    )


def _iq3_s(data: Tensor) -> GroupedWeight:
    numbers = data[:, 2:66].int() | (_fields(data[:, 66:74], 1, 8).flatten(1).int() << 8)
    scales = Factors(_half(data, 0), 8, _odd_multipliers(_fields(data[:, 106:110], 4, 2).flatten(1)))
    return _lattice(IQ3_S, numbers, data[:, 74:106], scales, bits=5, group_size=32)


def _iq1(numbers: Tensor, shifts_down: Tensor, scales: Factors, group_size: int) -> GroupedWeight:
    """Return points by ``numbers`` (n, points), an eighth lower if ``shifts_down`` (n, points), else higher."""
    values = _IQ1_LEVELS * _points(IQ1_S)[numbers.int()] + (1 - 2 * shifts_down.to(torch.int8))[..., None]
    return _signed(values.flatten(1), 5, group_size, scales)


def _iq1_s(data: Tensor) -> GroupedWeight:
    words = _words(data[:, 34:50], 2)
    numbers = data[:, 2:34].int() | (_fields(words, 3, 4).flatten(1) << 8)
    scales = Factors(_half(data, 0).float() / 8, 8, _odd_multipliers((words >> 12) & 7))
    return _iq1(numbers, ((words >> 15) & 1).repeat_interleave(4, dim=1), scales, 32)


def _iq1_m(data: Tensor) -> GroupedWeight:
    words = _words(data[:, 48:56], 2)
    base = (words >> 12 << torch.tensor([0, 4, 8, 12], dtype=torch.int32)).sum(1, keepdim=True, dtype=torch.int32)
    halves = base.to(torch.int16).view(torch.float16)
    high = _fields(data[:, 32:48], 4, 2).flatten(1).int()
    scales = Factors(halves.float() / 8, 16, _odd_multipliers(_fields(words, 3, 4).flatten(1)))
    return _iq1(data[:, :32].int() | ((high & 7) << 8), high >> 3, scales, 16)


#: Functions from blocks (n, bytes) to a weight of n outputs, by the numbers in `pdmesh.engine.gguf.gguf_reader.TYPES`.
GROUPED: Mapping[int, Callable[[Tensor], GroupedWeight]] = {
    2: _q4_0,
    3: _q4_1,
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    10: _q2_k,
    11: _q3_k,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
    16: _iq2_xxs,
    17: _iq2_xs,
    18: _iq3_xxs,
    19: _iq1_s,
    20: _iq4_nl,
    21: _iq3_s,
    22: _iq2_s,
    23: _iq4_xs,
    29: _iq1_m,
    34: _tq1_0,
    35: _tq2_0,
    39: _mxfp4,
    40: _nvfp4,
    41: _q1_0,
    42: _q2_0,
}
_PLAIN: Mapping[int, torch.dtype] = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}


def values_of(type_number: int, data: Tensor) -> Tensor:
    """Return the values (n, values) of blocks (n, bytes), in fp32."""
    if type_number in _PLAIN:
        return data.contiguous().view(_PLAIN[type_number]).float()
    return GROUPED[type_number](data).values()

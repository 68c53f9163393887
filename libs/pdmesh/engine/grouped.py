"""Weights as codes of a few bits, groups of which share a scale: the form that quantised formats are brought into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional

#: Codes have so many bits.
CODE_BITS = (4, 5, 6, 8)
#: Inputs of a group are one of these; larger groups are several that share a scale.
_GROUP_SIZES = (128, 64, 32, 16)
_MXFP4_GROUP = 32
#: Twice the values of E2M1's numbers, which are integers; of those with a sign, without it.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_NO_EXPONENT = 255
_NO_FLOAT8 = 0x7F  # of either sign
#: Of E4M3's scales, below this: kernels multiply them by 2^120 first.
_FLOAT8_SCALES = 2.0**7


class CodeKind(IntEnum):
    """What codes are; numbers are those of ``csrc/packed.h``."""

    UNSIGNED = 0
    SIGNED = 1  # two's complement
    FLOAT = 2  # of 4 bits: twice the values of a sign, two bits of exponent and one of mantissa (E2M1)
    FLOAT8 = 3  # of 8 bits: a sign, four bits of exponent and three of mantissa (E4M3)
    TABLE = 4  # of 4 bits: which of 16 numbers

    @property
    def is_rounded(self) -> bool:
        """Whether codes are no integers: kernels round each weight, and give the bits of a plain linear layer."""
        return self in (CodeKind.FLOAT8, CodeKind.TABLE)


@dataclass(frozen=True, slots=True)
class Factors:
    """A number for each output and group: a base, times a multiplier if there are any.

    With a table, multipliers say which of its values they are, and each output's offset is added.
    """

    #: (outputs, bases), bf16, float16, fp32, or uint8: exponents of powers of two, of which 128 is 1 and 255 no number.
    bases: Tensor
    groups_per_base: int
    multipliers: Tensor | None = None  # (outputs, groups), int8; uint8 with a table
    table: Tensor | None = None  # (256,), fp32
    offsets: Tensor | None = None  # (outputs,), fp32; where there is a table

    def by_group(self, num_groups: int) -> Tensor:
        """(outputs, groups), fp32."""
        bases = _powers_of_two(self.bases) if self.bases.dtype == torch.uint8 else self.bases.float()
        factors = bases.repeat_interleave(self.groups_per_base, dim=1)[:, :num_groups]
        if self.multipliers is None:
            return factors
        if self.table is None or self.offsets is None:
            return factors * self.multipliers
        return factors * self.table[self.multipliers.int()] + self.offsets[:, None]

    def rows(self, rows: Tensor) -> Factors:
        multipliers = None if self.multipliers is None else self.multipliers[rows]
        offsets = None if self.offsets is None else self.offsets[rows]
        return Factors(self.bases[rows], self.groups_per_base, multipliers, self.table, offsets)

    def times(self, factor: float) -> Factors:
        """Return all factors times a number; there is no table."""
        bases = _powers_of_two(self.bases) if self.bases.dtype == torch.uint8 else self.bases.float()
        return replace(self, bases=bases * factor)

    @property
    def is_finite(self) -> bool:
        """Whether all are numbers."""
        if self.bases.dtype == torch.uint8:
            return bool((self.bases != _NO_EXPONENT).all())
        return all(bool(each.isfinite().all()) for each in (self.bases, self.table, self.offsets) if each is not None)

    @property
    def form(self) -> tuple[object, ...]:
        """What factors that are joined have in common."""
        form = (self.bases.dtype, self.bases.shape[1], self.groups_per_base, self.multipliers is None)
        return (*form, _values_of(self.table))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """code * scale - minimum, of a matrix (outputs, inputs); scales and minima are those of groups of inputs."""

    codes: Tensor  # (outputs, inputs), uint8; the lower bits
    bits: int
    kind: CodeKind  # signed or floats, of 8 bits
    group_size: int
    scales: Factors
    minima: Factors | None = None
    order: Tensor | None = None  # which of the layer's inputs each column is for; None: as they come
    table: Tensor | None = None  # (16,), fp32: what codes of this kind stand for

    @property
    def num_groups(self) -> int:
        return -(-self.codes.shape[1] // self.group_size)

    @property
    def is_finite(self) -> bool:
        """Whether all factors are numbers, and all that codes stand for."""
        if self.kind is CodeKind.FLOAT8 and bool(((self.codes & _NO_FLOAT8) == _NO_FLOAT8).any()):
            return False
        if self.table is not None and not bool(self.table.isfinite().all()):
            return False
        return all(each.is_finite for each in (self.scales, self.minima) if each is not None)

    def rows(self, rows: Tensor) -> GroupedWeight:
        """Some outputs."""
        minima = None if self.minima is None else self.minima.rows(rows)
        return replace(self, codes=self.codes[rows], scales=self.scales.rows(rows), minima=minima)

    def values(self) -> Tensor:
        """What the codes stand for, in the codes' order of inputs; fp32."""
        values = self._numbers() * self._by_input(self.scales)
        return values if self.minima is None else values - self._by_input(self.minima)

    def _numbers(self) -> Tensor:
        match self.kind:
            case CodeKind.UNSIGNED:
                return self.codes.float()
            case CodeKind.SIGNED:
                half = 1 << (self.bits - 1)
                return ((self.codes.short() ^ half) - half).float()
            case CodeKind.FLOAT:
                return torch.tensor([*_DOUBLED, *(-value for value in _DOUBLED)]).float()[self.codes.int()]
            case CodeKind.FLOAT8:
                return self.codes.view(torch.float8_e4m3fn).float()
            case CodeKind.TABLE:
                assert self.table is not None
                return self.table[self.codes.int()]

    def _by_input(self, factors: Factors) -> Tensor:
        each = factors.by_group(self.num_groups)
        return each.repeat_interleave(self.group_size, dim=1)[:, : self.codes.shape[1]]


def of_blocks(blocks: GroupedWeight, num_outputs: int) -> GroupedWeight:
    """A weight whose outputs are so many blocks each, from blocks that come as outputs."""

    def factors(each: Factors) -> Factors:
        multipliers = None if each.multipliers is None else each.multipliers.view(num_outputs, -1)
        return Factors(each.bases.view(num_outputs, -1), each.groups_per_base, multipliers)

    minima = None if blocks.minima is None else factors(blocks.minima)
    codes = blocks.codes.view(num_outputs, -1)
    return replace(blocks, codes=codes, scales=factors(blocks.scales), minima=minima)


def of_mxfp4(numbers: Tensor, exponents: Tensor) -> GroupedWeight:
    """A weight of 4-bit floats (outputs, inputs); 32 of them share an exponent, as a byte, of which 127 is 1."""
    return GroupedWeight(
        codes=numbers, bits=4, kind=CodeKind.FLOAT, group_size=_MXFP4_GROUP, scales=Factors(exponents.contiguous(), 1)
    )


def _powers_of_two(exponents: Tensor) -> Tensor:
    """2^(exponent - 128), in fp32."""
    bits = (exponents.int() - 1) << 23
    bits = torch.where(exponents > 1, bits, 0x200000 << exponents.clamp(max=1).int())  # the smallest two are subnormal
    return torch.where(exponents == _NO_EXPONENT, 0x7FC00000, bits).view(torch.float32)


def join_rows(weights: Sequence[GroupedWeight]) -> list[GroupedWeight]:
    """The weights of one input, neighbours that have one form as one."""
    joined: list[GroupedWeight] = []
    for weight in weights:
        if joined and _form(joined[-1]) == _form(weight) and weight.order is None:
            joined[-1] = _joined(joined[-1], weight)
        else:
            joined.append(weight)
    return joined


def _form(weight: GroupedWeight) -> tuple[object, ...]:
    minima = None if weight.minima is None else weight.minima.form
    form = (weight.bits, weight.kind, weight.group_size, weight.order is None, weight.scales.form, minima)
    return (*form, _values_of(weight.table))


def _values_of(table: Tensor | None) -> list[float] | None:
    return None if table is None else table.tolist()


def _joined(first: GroupedWeight, second: GroupedWeight) -> GroupedWeight:
    def factors(one: Factors, other: Factors) -> Factors:
        def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
            return None if first is None or second is None else torch.cat((first, second))

        bases, multipliers = torch.cat((one.bases, other.bases)), both(one.multipliers, other.multipliers)
        return Factors(bases, one.groups_per_base, multipliers, one.table, both(one.offsets, other.offsets))

    minima = None
    if first.minima is not None and second.minima is not None:
        minima = factors(first.minima, second.minima)
    codes = torch.cat((first.codes, second.codes))
    return replace(first, codes=codes, scales=factors(first.scales, second.scales), minima=minima)


def grouped(
    values: Tensor, scales: Tensor, zeros: Tensor | None, group_of: Tensor, *, bits: int
) -> GroupedWeight | None:
    """(values - zeros) * scales, of integers of ``bits`` (outputs, inputs), without a sign unless they are int8.

    ``scales`` and ``zeros`` are (outputs, groups). None where groups are of sizes that are not served.
    """
    num_inputs, num_groups = values.shape[1], scales.shape[1]
    form = _grouping(group_of, num_groups)
    if form is None:
        return None
    group_size, groups_per_base, order = form
    half = 0 if values.dtype == torch.int8 else 1 << (bits - 1)
    code_bits = max(bits, CODE_BITS[0])
    codes = (values.short() - half).to(torch.int8).view(torch.uint8) & ((1 << code_bits) - 1)
    bases = Factors(_narrowest(scales), groups_per_base)
    minima = None
    if zeros is not None and bool((zeros != half).any()):
        each = (zeros - half).to(torch.int8).repeat_interleave(groups_per_base, dim=1)
        minima = replace(bases, multipliers=each[:, : -(-num_inputs // group_size)].contiguous())
    return GroupedWeight(
        codes=codes if order is None else codes[:, order],
        bits=code_bits,
        kind=CodeKind.SIGNED,
        group_size=group_size,
        scales=bases,
        minima=minima,
        order=order,
    )


def of_float8(values: Tensor, scales: Tensor, group_of: Tensor) -> GroupedWeight | None:
    """values * scales, of E4M3's floats (outputs, inputs); ``scales`` are (outputs, groups).

    None where groups are of sizes that are not served, or scales larger than those of any weight.
    """
    form = _grouping(group_of, scales.shape[1])
    if form is None or form[2] is not None or bool((scales.abs() >= _FLOAT8_SCALES).any()):
        return None
    group_size, groups_per_base, _ = form
    return GroupedWeight(
        codes=values.view(torch.uint8),
        bits=8,
        kind=CodeKind.FLOAT8,
        group_size=group_size,
        scales=Factors(_narrowest(scales), groups_per_base),
    )


def _grouping(group_of: Tensor, num_groups: int) -> tuple[int, int, Tensor | None] | None:
    """Inputs of a group, how many share a base, and the order in which groups lie together."""
    num_inputs = len(group_of)
    if num_groups == 1:
        size = _GROUP_SIZES[0]
        return size, -(-num_inputs // size), None
    in_order, order = group_of.sort(stable=True)
    size = int((in_order == 0).sum())
    if not torch.equal(in_order, torch.arange(num_inputs) // max(size, 1)):
        return None
    part = math.gcd(size, _GROUP_SIZES[0])
    if part not in _GROUP_SIZES:
        return None
    return part, size // part, None if torch.equal(group_of, in_order) else order


def _narrowest(values: Tensor) -> Tensor:
    """Values in fp32, in 16 bits where these hold them exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = values.to(dtype)
        if torch.equal(narrow.float(), values):
            return narrow.contiguous()
    return values.contiguous()


def padded_factors(factors: Factors, num_outputs: int, num_groups: int) -> Factors:
    """With zeros for outputs and groups that are not there."""

    def pad(values: Tensor, num_columns: int) -> Tensor:
        return functional.pad(values, (0, num_columns - values.shape[1], 0, num_outputs - values.shape[0]))

    bases = pad(factors.bases, -(-num_groups // factors.groups_per_base))
    multipliers = None if factors.multipliers is None else pad(factors.multipliers, num_groups)
    offsets = None if factors.offsets is None else pad(factors.offsets[:, None], 1)[:, 0]
    return Factors(bases, factors.groups_per_base, multipliers, factors.table, offsets)

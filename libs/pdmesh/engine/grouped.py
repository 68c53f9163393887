"""Weights as codes of a few bits with a scale for each group: the common form of quantised formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional

#: Numbers of bits that codes may have.
CODE_BITS = (4, 5, 6, 8)
#: Sizes of groups that kernels serve. A larger group becomes several groups that share a scale.
_GROUP_SIZES = (128, 64, 32, 16)
_MXFP4_GROUP = 32
#: Doubled values of E2M1's numbers without a sign. These are integers.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_NO_EXPONENT = 255
#: E4M3's code for no number, without its sign bit.
_NO_FLOAT8 = 0x7F
#: Upper bound of E4M3's scales: kernels multiply them by 2^120 first.
_FLOAT8_SCALES = 2.0**7


class CodeKind(IntEnum):
    """Meaning of codes, numbered as in ``csrc/packed.h``.

    SIGNED is two's complement. FLOAT is E2M1, with doubled values: a sign, two bits of exponent, one of mantissa.
    FLOAT8 is E4M3. TABLE codes are indices into 16 numbers.
    """

    UNSIGNED = 0
    SIGNED = 1
    FLOAT = 2
    FLOAT8 = 3
    TABLE = 4

    @property
    def is_rounded(self) -> bool:
        """Whether codes are no integers. Kernels then round weights, and results have a plain linear layer's bits."""
        return self in (CodeKind.FLOAT8, CodeKind.TABLE)


@dataclass(frozen=True, slots=True)
class Factors:
    """A factor for each output and group: a base, times a multiplier if there are any.

    ``bases`` are (outputs, bases) in bf16, float16 or fp32, or exponents of powers of two as uint8: 128 is 1, and 255
    is no number. ``multipliers`` are (outputs, groups), int8. With a ``table`` (256 values, fp32), they are uint8
    indices into it, and ``offsets`` (outputs,) are added to the products.
    """

    bases: Tensor
    groups_per_base: int
    multipliers: Tensor | None = None
    table: Tensor | None = None
    offsets: Tensor | None = None

    def by_group(self, num_groups: int) -> Tensor:
        """Return the factors (outputs, groups), fp32."""
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
        """Return all factors times ``factor``. There must be no table."""
        bases = _powers_of_two(self.bases) if self.bases.dtype == torch.uint8 else self.bases.float()
        return replace(self, bases=bases * factor)

    @property
    def is_finite(self) -> bool:
        """Whether all factors are finite numbers."""
        if self.bases.dtype == torch.uint8:
            return bool((self.bases != _NO_EXPONENT).all())
        return all(bool(each.isfinite().all()) for each in (self.bases, self.table, self.offsets) if each is not None)

    @property
    def form(self) -> tuple[object, ...]:
        """Properties that must be equal to join two factors."""
        form = (self.bases.dtype, self.bases.shape[1], self.groups_per_base, self.multipliers is None)
        return (*form, _values_of(self.table))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """A matrix (outputs, inputs): code * scale - minimum. Scales and minima are for groups of inputs.

    ``codes`` are uint8, in the lower ``bits``. ``order`` has the layer's input of each column; None means unchanged.
    ``table`` (16 values, fp32) is set for `CodeKind.TABLE`.
    """

    codes: Tensor
    bits: int
    kind: CodeKind
    group_size: int
    scales: Factors
    minima: Factors | None = None
    order: Tensor | None = None
    table: Tensor | None = None

    @property
    def num_groups(self) -> int:
        return -(-self.codes.shape[1] // self.group_size)

    @property
    def is_finite(self) -> bool:
        """Whether all factors, and all values of codes, are finite numbers."""
        if self.kind is CodeKind.FLOAT8 and bool(((self.codes & _NO_FLOAT8) == _NO_FLOAT8).any()):
            return False
        if self.table is not None and not bool(self.table.isfinite().all()):
            return False
        return all(each.is_finite for each in (self.scales, self.minima) if each is not None)

    def rows(self, rows: Tensor) -> GroupedWeight:
        """Return the weight of some outputs."""
        minima = None if self.minima is None else self.minima.rows(rows)
        return replace(self, codes=self.codes[rows], scales=self.scales.rows(rows), minima=minima)

    def values(self) -> Tensor:
        """Return the values in fp32, with inputs in the order of the codes."""
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
    """Return a weight of ``num_outputs`` outputs from blocks that are given as outputs."""

    def factors(each: Factors) -> Factors:
        multipliers = None if each.multipliers is None else each.multipliers.view(num_outputs, -1)
        return Factors(each.bases.view(num_outputs, -1), each.groups_per_base, multipliers)

    minima = None if blocks.minima is None else factors(blocks.minima)
    codes = blocks.codes.view(num_outputs, -1)
    return replace(blocks, codes=codes, scales=factors(blocks.scales), minima=minima)


def of_mxfp4(numbers: Tensor, exponents: Tensor) -> GroupedWeight:
    """Return a weight of 4-bit floats (outputs, inputs). 32 of them share an exponent in a byte, where 127 means 1."""
    return GroupedWeight(
        codes=numbers, bits=4, kind=CodeKind.FLOAT, group_size=_MXFP4_GROUP, scales=Factors(exponents.contiguous(), 1)
    )


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^(exponent - 128) in fp32, NaN for 255."""
    bits = (exponents.int() - 1) << 23
    bits = torch.where(exponents > 1, bits, 0x200000 << exponents.clamp(max=1).int())  # the smallest two are subnormal
    return torch.where(exponents == _NO_EXPONENT, 0x7FC00000, bits).view(torch.float32)


def join_rows(weights: Sequence[GroupedWeight]) -> list[GroupedWeight]:
    """Join weights of the same input: neighbours of the same form become one."""
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
    """Return (values - zeros) * scales, or None if kernels do not serve the groups' sizes.

    ``values`` are integers of ``bits`` (outputs, inputs), unsigned unless int8. ``scales`` and ``zeros`` are (outputs,
    groups). ``group_of`` has the group of each input.
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
    """Return values * scales for E4M3's floats (outputs, inputs). ``scales`` are (outputs, groups).

    None means that kernels do not serve the groups' sizes or order, or that scales are too large for them.
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
    """Return a group's inputs, the groups that share a base, and the order of inputs that makes groups contiguous.

    The order is None if they are. None alone means that kernels do not serve the groups.
    """
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
    """Return fp32 values in 16 bits if this loses nothing, else unchanged."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = values.to(dtype)
        if torch.equal(narrow.float(), values):
            return narrow.contiguous()
    return values.contiguous()


def padded_factors(factors: Factors, num_outputs: int, num_groups: int) -> Factors:
    """Return the factors with zeros for missing outputs and groups."""

    def pad(values: Tensor, num_columns: int) -> Tensor:
        return functional.pad(values, (0, num_columns - values.shape[1], 0, num_outputs - values.shape[0]))

    bases = pad(factors.bases, -(-num_groups // factors.groups_per_base))
    multipliers = None if factors.multipliers is None else pad(factors.multipliers, num_groups)
    offsets = None if factors.offsets is None else pad(factors.offsets[:, None], 1)[:, 0]
    return Factors(bases, factors.groups_per_base, multipliers, factors.table, offsets)

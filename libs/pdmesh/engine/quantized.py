"""Formats of quantised checkpoints, and their values.

Each format is a `Layout`: the tensors and shapes that store a weight, and a function that reads these into a
`QuantizedWeight`. Layouts follow the documentation and readers of compressed-tensors, AutoAWQ, GPTQ and DeepSeek's fp8.
The layouts of bitsandbytes are in `pdmesh.engine.bitsandbytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pdmesh.engine.grouped import GroupedWeight, grouped, of_float8
from pdmesh.engine.model_config import Quantization, QuantizedFormat

Shape = tuple[int, ...]

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_INT32, _INT8, _FLOAT8 = frozenset({"I32"}), frozenset({"I8"}), frozenset({"F8_E4M3"})

#: Number of values that are written at once. Their fp32 copy is small beside the weight.
_PANEL_VALUES = 1 << 22
#: Place of each of eight neighbouring columns in AWQ's words.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A `Weight` of (values - zeros) * scales. ``values`` are integers or E4M3's floats."""

    values: Tensor  # (outputs, inputs)
    scales: Tensor  # (outputs, groups), fp32
    zeros: Tensor | None
    group_of: Tensor  # (inputs,)

    def grouped(self, bits: int) -> GroupedWeight | None:
        if self.values.is_floating_point():
            return of_float8(self.values, self.scales, self.group_of)
        return grouped(self.values, self.scales, self.zeros, self.group_of, bits=bits)

    def write(self, out: Tensor) -> None:
        num_outputs, num_inputs = self.values.shape
        panel = max(1, _PANEL_VALUES // num_inputs)
        for first in range(0, num_outputs, panel):
            rows = slice(first, first + panel)
            values = self.values[rows].float()
            if self.zeros is not None:
                values -= self.zeros[rows][:, self.group_of]
            out[rows] = values * self.scales[rows][:, self.group_of]


class Weight(Protocol):
    """A matrix (outputs, inputs) as a checkpoint stores it."""

    def grouped(self, bits: int) -> GroupedWeight | None:
        """Return the weight as codes of ``bits``, or None if kernels cannot multiply it in this form."""
        ...

    def write(self, out: Tensor) -> None:
        """Write the weight to ``out`` (outputs, inputs), computed in fp32 and rounded once."""
        ...


class Stored(NamedTuple):
    """A stored tensor of a weight: its possible shapes, and safetensors' names of its possible types.

    If ``most`` is not 0, one dimension of at most this size is allowed, too.
    """

    shapes: tuple[Shape, ...]
    dtypes: frozenset[str]
    is_optional: bool = False
    most: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Storage of a weight in a format: its tensors, by the ends of their names after the layer's, and how to read them.

    A weight with none of the tensors ``markers`` is plain.
    """

    markers: tuple[str, ...]
    tensors: Callable[[int, int], Mapping[str, Stored]]
    weight: Callable[[Mapping[str, Tensor], int, int], Weight]


def layout_of(quantization: Quantization) -> Layout:
    """Return the format's layout. Raise ValueError for a format that another module reads."""
    match quantization.format:
        case QuantizedFormat.INT8:
            return _int8(quantization)
        case QuantizedFormat.PACKED:
            return _packed(quantization)
        case QuantizedFormat.FLOAT8:
            return _float8()
        case QuantizedFormat.FLOAT8_BLOCKS:
            return _float8_blocks(*quantization.block)
        case QuantizedFormat.AWQ:
            return _awq(quantization)
        case QuantizedFormat.GPTQ:
            return _gptq(quantization)
        case QuantizedFormat.BITSANDBYTES_4 | QuantizedFormat.BITSANDBYTES_8:
            raise ValueError("bitsandbytes' layouts are in pdmesh.engine.bitsandbytes")
        case QuantizedFormat.MXFP4:
            raise ValueError("MXFP4 is of fused experts: it is read by pdmesh.engine.fused_experts")
        case QuantizedFormat.GGUF:
            raise ValueError("a GGUF file has no layout of tensors: it is read by pdmesh.engine.gguf")


class LayoutError(Exception):
    """Error in a weight's tensors."""


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return values of ``bits`` from words of 32, lowest first, along the last dimension, as uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _num_groups(quantization: Quantization, num_inputs: int) -> int:
    return -(-num_inputs // (quantization.group_size or num_inputs))


def _group_of(quantization: Quantization, num_inputs: int, index: Tensor | None = None) -> Tensor:
    """Return each input's group, by the file's ``index`` if it has one. Raise LayoutError for a wrong index."""
    if index is None:
        return torch.arange(num_inputs) // (quantization.group_size or num_inputs)
    index = index.long()
    if int(index.min()) < 0 or int(index.max()) >= _num_groups(quantization, num_inputs):
        raise LayoutError("names groups that are none")
    return index


def _int8(quantization: Quantization) -> Layout:
    def tensors(outputs: int, inputs: int) -> Mapping[str, Stored]:
        groups = _num_groups(quantization, inputs)
        shapes = ((outputs, groups), (outputs,), (1,), ())[: None if groups == 1 else 1]
        zeros = {"weight_zero_point": Stored(shapes, _INT8)} if quantization.has_zeros else {}
        return {"weight": Stored(((outputs, inputs),), _INT8), "weight_scale": Stored(shapes, FLOATS), **zeros}

    def weight(found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        groups = _num_groups(quantization, inputs)
        scales, zeros = found["weight_scale"], found.get("weight_zero_point")
        return QuantizedWeight(
            found["weight"],
            _by_output(scales, outputs, groups),
            None if zeros is None else _by_output(zeros, outputs, groups),
            _group_of(quantization, inputs),
        )

    return Layout(("weight_scale",), tensors, weight)


def _by_output(scales: Tensor, outputs: int, groups: int) -> Tensor:
    """Return scales of the whole weight, of channels or of groups as (outputs, groups)."""
    return scales.float().reshape(-1, groups if scales.numel() > 1 else 1).expand(outputs, groups)


def _packed(quantization: Quantization) -> Layout:
    per_word = 32 // quantization.bits
    offset = 1 << (quantization.bits - 1)  # values are signed, and stored with this offset

    def tensors(outputs: int, inputs: int) -> Mapping[str, Stored]:
        groups = _num_groups(quantization, inputs)
        words = (outputs, -(-inputs // per_word))
        zeros = {"weight_zero_point": Stored(((-(-outputs // per_word), groups),), _INT32)}
        return {
            "weight_packed": Stored((words,), _INT32),
            "weight_scale": Stored(((outputs, groups),), FLOATS),
            "weight_g_idx": Stored(((inputs,),), _INT32, is_optional=True),
            **(zeros if quantization.has_zeros else {}),
        }

    def weight(found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        values = unpack(found["weight_packed"], quantization.bits)[:, :inputs]
        packed_zeros = found.get("weight_zero_point")
        if packed_zeros is None:
            zeros = torch.full(found["weight_scale"].shape, float(offset))
        else:  # packed along outputs
            zeros = unpack(packed_zeros.t(), quantization.bits)[:, :outputs].t().float()
        group_of = _group_of(quantization, inputs, found.get("weight_g_idx"))
        return QuantizedWeight(values, found["weight_scale"].float(), zeros, group_of)

    return Layout(("weight_packed",), tensors, weight)


def _float8() -> Layout:
    def tensors(outputs: int, inputs: int) -> Mapping[str, Stored]:
        shapes = ((outputs, 1), (outputs,), (1, 1), (1,), ())
        return {"weight": Stored(((outputs, inputs),), _FLOAT8), "weight_scale": Stored(shapes, FLOATS)}

    def weight(found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        scales = _by_output(found["weight_scale"], outputs, 1)
        return QuantizedWeight(found["weight"], scales, None, torch.zeros(inputs, dtype=torch.int64))

    return Layout(("weight_scale",), tensors, weight)


def _float8_blocks(block_outputs: int, block_inputs: int) -> Layout:
    names = ("weight_scale_inv", "weight_scale")  # the names by DeepSeek and by compressed-tensors

    def tensors(outputs: int, inputs: int) -> Mapping[str, Stored]:
        scales = Stored(((-(-outputs // block_outputs), -(-inputs // block_inputs)),), FLOATS, is_optional=True)
        return {"weight": Stored(((outputs, inputs),), _FLOAT8), **dict.fromkeys(names, scales)}

    def weight(found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        scales = (
            next(found[name] for name in names if name in found)
            .float()
            .repeat_interleave(block_outputs, dim=0)[:outputs]
        )
        return QuantizedWeight(found["weight"], scales, None, torch.arange(inputs) // block_inputs)

    return Layout(names, tensors, weight)


def _awq(quantization: Quantization) -> Layout:
    def tensors(outputs: int, inputs: int) -> Mapping[str, Stored]:
        groups, words = _num_groups(quantization, inputs), -(-outputs // 8)
        return {
            "qweight": Stored(((inputs, words),), _INT32),
            "qzeros": Stored(((groups, words),), _INT32),
            "scales": Stored(((groups, outputs),), FLOATS),
        }

    def columns(packed: Tensor, outputs: int) -> Tensor:
        values = unpack(packed, 4).view(packed.shape[0], -1, 8)
        ordered = torch.empty_like(values)
        ordered[..., list(_AWQ_ORDER)] = values
        return ordered.flatten(1)[:, :outputs].t()

    def weight(found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        return QuantizedWeight(
            columns(found["qweight"], outputs).contiguous(),
            found["scales"].float().t(),
            columns(found["qzeros"], outputs).float(),
            _group_of(quantization, inputs),
        )

    return Layout(("qweight",), tensors, weight)


def _gptq(quantization: Quantization) -> Layout:
    bits, per_word = quantization.bits, 32 // quantization.bits

    def tensors(outputs: int, inputs: int) -> Mapping[str, Stored]:
        groups = _num_groups(quantization, inputs)
        return {
            "qweight": Stored(((-(-inputs // per_word), outputs),), _INT32),
            "qzeros": Stored(((groups, -(-outputs // per_word)),), _INT32),
            "scales": Stored(((groups, outputs),), FLOATS),
            "g_idx": Stored(((inputs,),), _INT32, is_optional=True),
        }

    def weight(found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        zeros = unpack(found["qzeros"], bits)[:, :outputs].float() + quantization.zero_offset
        zeros = zeros.remainder(1 << bits)  # a zero of 0 was stored as the highest value
        return QuantizedWeight(
            unpack(found["qweight"].t().contiguous(), bits)[:, :inputs],
            found["scales"].float().t(),
            zeros.t(),
            _group_of(quantization, inputs, found.get("g_idx")),
        )

    return Layout(("qweight",), tensors, weight)

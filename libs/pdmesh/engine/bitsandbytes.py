"""Weights in bitsandbytes' formats of 4 and 8 bits.

4-bit values are entries of a table, with a scale for each block. 8-bit values have a scale for each output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdmesh.engine.grouped import CodeKind, Factors, GroupedWeight
from pdmesh.engine.model_config import Quantization, QuantizedFormat
from pdmesh.engine.quantized import FLOATS, Layout, LayoutError, QuantizedWeight, Stored

_BYTES, _INT8, _FP32 = frozenset({"U8"}), frozenset({"I8"}), frozenset({"F32"})

#: Number of values that share a scale, and of scales that share a second one: bitsandbytes' defaults, the only ones
#: served.
_BLOCK, _NESTED_BLOCK = 64, 256

#: Largest accepted size of a weight's JSON state.
_MAX_STATE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Scales of a weight's blocks.

    ``bases`` are the scales, in fp32. If ``numbers`` (uint8) is set, a scale is the numbered ``table`` entry, times the
    base of its group of `_NESTED_BLOCK` blocks, plus ``offset``.
    """

    bases: Tensor
    numbers: Tensor | None = None
    table: Tensor | None = None
    offset: float = 0.0

    def by_block(self) -> Tensor:
        """Return the scales (blocks,), fp32."""
        if self.numbers is None or self.table is None:
            return self.bases
        of_block = self.bases.repeat_interleave(_NESTED_BLOCK)[: len(self.numbers)]
        return self.table[self.numbers.int()] * of_block + self.offset

    def factors(self, num_outputs: int) -> Factors:
        """Return the scales as factors of a weight whose outputs are whole blocks."""
        num_groups = -1 if self.numbers is None else len(self.numbers) // num_outputs
        # Groups that share a base, whatever the output. For one group, base and number are larger than the scale.
        shared = math.gcd(num_groups, _NESTED_BLOCK)
        if self.numbers is None or shared == 1:
            return Factors(self.by_block().view(num_outputs, -1), 1)
        bases = self.bases[torch.arange(0, len(self.numbers), shared) // _NESTED_BLOCK]
        numbers, offsets = self.numbers.view(num_outputs, -1), torch.full((num_outputs,), self.offset)
        return Factors(bases.view(num_outputs, -1), shared, numbers, self.table, offsets)


@dataclass(frozen=True, slots=True)
class TableWeight:
    """A `Weight` of table entries times block scales. A block may span two outputs."""

    codes: Tensor  # (outputs, inputs), uint8
    table: Tensor  # (16,), fp32
    scales: BlockScales

    def grouped(self, bits: int) -> GroupedWeight | None:
        num_outputs, num_inputs = self.codes.shape
        if num_inputs % _BLOCK:
            return None
        scales = self.scales.factors(num_outputs)
        return GroupedWeight(
            codes=self.codes, bits=bits, kind=CodeKind.TABLE, group_size=_BLOCK, scales=scales, table=self.table
        )

    def write(self, out: Tensor) -> None:
        values = self.table[self.codes.int()].flatten()
        out.copy_((values * self.scales.by_block().repeat_interleave(_BLOCK)[: len(values)]).view(out.shape))


def layout(quantization: Quantization) -> Layout:
    """Return the format's layout: 4 or 8 bits."""
    return _four_bits(quantization) if quantization.format is QuantizedFormat.BITSANDBYTES_4 else _eight_bits()


def _four_bits(quantization: Quantization) -> Layout:
    state_name = f"weight.quant_state.bitsandbytes__{quantization.table}"

    def tensors(outputs: int, inputs: int) -> Mapping[str, Stored]:
        num_bytes, num_blocks = -(-outputs * inputs // 2), -(-outputs * inputs // _BLOCK)
        nested = {
            "weight.nested_absmax": Stored(((-(-num_blocks // _NESTED_BLOCK),),), _FP32),
            "weight.nested_quant_map": Stored(((256,),), _FP32),
        }
        return {
            "weight": Stored(((num_bytes, 1), (1, num_bytes)), _BYTES),
            "weight.absmax": Stored(((num_blocks,),), _BYTES if quantization.has_nested_scales else FLOATS),
            "weight.quant_map": Stored(((16,),), _FP32),
            state_name: Stored((), _BYTES, most=_MAX_STATE_BYTES),
            **(nested if quantization.has_nested_scales else {}),
        }

    def weight(found: Mapping[str, Tensor], outputs: int, inputs: int) -> TableWeight:
        state = _state(found[state_name])
        packed = found["weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[: outputs * inputs].view(outputs, inputs)
        if quantization.has_nested_scales:
            bases, table = found["weight.nested_absmax"], found["weight.nested_quant_map"]
            scales = BlockScales(bases, found["weight.absmax"], table, _nested_offset(state))
        else:
            scales = BlockScales(found["weight.absmax"].float())
        return TableWeight(codes, found["weight.quant_map"], scales)

    return Layout(("weight.quant_map",), tensors, weight)


def _state(stored: Tensor) -> Mapping[str, object]:
    """Return a weight's JSON state. Raise LayoutError unless this is an object, and its block sizes are served."""
    try:
        state = json.loads(bytes(stored.tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise LayoutError("has a state that is not a JSON object")
    sizes = state.get("blocksize"), state.get("nested_blocksize", _NESTED_BLOCK)
    if sizes != (_BLOCK, _NESTED_BLOCK):
        raise LayoutError(
            f"has blocks of {sizes[0]} values and {sizes[1]} scales; supported are {_BLOCK} and {_NESTED_BLOCK}"
        )
    return state


def _nested_offset(state: Mapping[str, object]) -> float:
    offset = state.get("nested_offset")
    if not isinstance(offset, float) or not abs(offset) < float("inf"):
        raise LayoutError(f"has a nested_offset of {offset!r}")
    return offset


def _eight_bits() -> Layout:
    def tensors(outputs: int, inputs: int) -> Mapping[str, Stored]:
        return {
            "weight": Stored(((outputs, inputs),), _INT8),
            "SCB": Stored(((outputs,),), _FP32),
            "weight_format": Stored(((),), _BYTES, is_optional=True),
        }

    def weight(found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        if "weight_format" in found and int(found["weight_format"]) != 0:
            raise LayoutError("is not stored by rows")
        return QuantizedWeight(
            found["weight"], found["SCB"].view(outputs, 1) / 127, None, torch.zeros(inputs, dtype=torch.int64)
        )

    return Layout(("SCB",), tensors, weight)

"""Weights as bitsandbytes stores them: in 4 bits, by a table and blocks of values, or in 8, by outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from pdmesh.engine.model_config import Quantization, QuantizedFormat
from pdmesh.engine.quantized import FLOATS, Layout, LayoutError, QuantizedWeight, Stored

_BYTES, _INT8, _FP32 = frozenset({"U8"}), frozenset({"I8"}), frozenset({"F32"})

#: Values that share a scale, and scales that share one of their own: what the library has by default, and asks for.
_BLOCK, _NESTED_BLOCK = 64, 256

#: Of what a file says of a weight, in JSON.
_MAX_STATE_BYTES = 4096


def layout(quantization: Quantization) -> Layout:
    """The format's layout."""
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

    def weight(found: Mapping[str, Tensor], outputs: int, inputs: int) -> QuantizedWeight:
        state = _state(found[state_name])
        scales = found["weight.absmax"]
        if quantization.has_nested_scales:
            of_block = found["weight.nested_absmax"].repeat_interleave(_NESTED_BLOCK)[: len(scales)]
            scales = found["weight.nested_quant_map"][scales.long()] * of_block + _nested_offset(state)
        packed, table = found["weight"].flatten(), found["weight.quant_map"]
        pairs = torch.stack((table[(packed >> 4).long()], table[(packed & 15).long()]), dim=1)
        # Blocks go on from one output to the next.
        values = pairs.flatten()[: outputs * inputs] * scales.float().repeat_interleave(_BLOCK)[: outputs * inputs]
        everything = torch.zeros(inputs, dtype=torch.int64)
        return QuantizedWeight(values.view(outputs, inputs), torch.ones(outputs, 1), None, everything)

    return Layout(("weight.quant_map",), tensors, weight)


def _state(stored: Tensor) -> Mapping[str, object]:
    """What a file says of a weight's blocks."""
    try:
        state = json.loads(bytes(stored.tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise LayoutError("has a state that is no JSON object")
    sizes = state.get("blocksize"), state.get("nested_blocksize", _NESTED_BLOCK)
    if sizes != (_BLOCK, _NESTED_BLOCK):
        raise LayoutError(
            f"has blocks of {sizes[0]} values and {sizes[1]} scales; served are {_BLOCK} and {_NESTED_BLOCK}"
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

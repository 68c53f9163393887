"""The ``quantization_config`` of a ``config.json``. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdmesh.engine.config_fields import Fields
from pdmesh.engine.model_config import Quantization, QuantizedFormat
from pdmesh.engine.tensor_names import TensorNames

_SERVED = "compressed-tensors (int8, packed int4 and int8, fp8), fp8, awq, gptq, bitsandbytes, and gpt-oss's mxfp4"


def quantization_of(fields: Fields) -> Quantization | None:
    """Read ``quantization_config``. None means plain weights. Raise ConfigError for a format that is not served."""
    found = fields.part("quantization_config") or fields.part("compression_config")
    if found is None:
        return None
    match found.raw.get("quant_method"):
        case "compressed-tensors":
            return _compressed_tensors(found)
        case "fp8":
            return _fp8(found)
        case "awq":
            return _awq(found)
        case "gptq":
            return _gptq(found)
        case "bitsandbytes":
            return _bitsandbytes(found)
        case "mxfp4":
            return Quantization(format=QuantizedFormat.MXFP4)
        case "gguf":  # written by `pdmesh.engine.gguf.directory`
            biases = found.raw.get("biases") or []
            if not isinstance(biases, list) or not set(map(str, biases)) <= {"qkv", "output", "mlp"}:
                raise found.error(f"biases is {biases!r}; it must list projections")
            return Quantization(
                format=QuantizedFormat.GGUF,
                interleaves_rotation=found.boolean("interleaves_rotation"),
                tiles_heads=found.boolean("tiles_heads"),
                biases=frozenset(map(str, biases)),
                names=_names(found),
                has_codes=found.boolean("has_codes", default=True),
            )
        case other:
            raise fields.error(
                f"the checkpoint is quantised by {other!r}, which is not supported; use one of {_SERVED}, or a "
                "checkpoint in float32, bfloat16 or float16"
            )


def _names(fields: Fields) -> tuple[tuple[str, Any], ...]:
    """Return the fields of `TensorNames` that a GGUF file changes, with values of the same type."""
    found = fields.part("names") or Fields({}, fields.where)
    names: dict[str, Any] = {}
    for name, value in found.raw.items():
        usual = getattr(TensorNames(), name, None)
        names[name] = tuple(value) if isinstance(value, list) else value
        parts = names[name] if isinstance(usual, tuple) else (names[name],)
        if not usual or type(names[name]) is not type(usual) or not all(isinstance(part, str) for part in parts):
            raise found.error(f"{name} is {value!r}; it must be a name of a tensor, or a list of names")
    return tuple(names.items())


def _compressed_tensors(fields: Fields) -> Quantization:
    groups = fields.raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise fields.error("config_groups is missing")
    schemes = [Fields(group, fields.where).part("weights") for group in groups.values() if isinstance(group, Mapping)]
    first = schemes[0] if schemes else None
    if first is None or any(scheme is None or _scheme(scheme) != _scheme(first) for scheme in schemes):
        raise fields.error("config_groups quantise weights differently; only one scheme for all weights is supported")
    for unserved in ("sparsity_config", "transform_config"):
        part = fields.raw.get(unserved)
        if isinstance(part, Mapping) and part and part.get("format", "") != "dense":
            raise fields.error(f"{unserved} is set, which is not supported; use a checkpoint without it")
    name, strategy, kind = fields.raw.get("format"), first.raw.get("strategy"), first.raw.get("type", "int")
    bits, group_size = first.integer("num_bits", default=8), first.optional_integer("group_size")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise fields.error(f"the strategy of weights is {strategy!r}; supported are tensor, channel, group and block")
    if strategy == "group" and group_size is None:
        raise fields.error("group_size is missing")
    has_zeros = not first.boolean("symmetric", default=True)
    group_size = group_size if strategy == "group" else None
    match (name, kind, bits):
        case ("int-quantized" | "naive-quantized", "int", 8) if strategy != "block":
            return Quantization(format=QuantizedFormat.INT8, group_size=group_size, has_zeros=has_zeros)
        case ("pack-quantized", "int", 4 | 8) if strategy in ("channel", "group"):
            return Quantization(format=QuantizedFormat.PACKED, bits=bits, group_size=group_size, has_zeros=has_zeros)
        case ("float-quantized" | "naive-quantized", "float", 8) if strategy in ("tensor", "channel") and not has_zeros:
            return Quantization(format=QuantizedFormat.FLOAT8)
        case ("float-quantized" | "naive-quantized", "float", 8) if strategy == "block":
            return Quantization(format=QuantizedFormat.FLOAT8_BLOCKS, block=_block(first, "block_structure"))
        case _:
            raise fields.error(
                f"format {name!r} with {bits} bits of type {kind!r} by {strategy} is not supported; use one of "
                f"{_SERVED}"
            )


def _scheme(weights: Fields) -> tuple[Any, ...]:
    names = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")
    return tuple(repr(weights.raw.get(name)) for name in names)


def _fp8(fields: Fields) -> Quantization:
    if fields.raw.get("weight_block_size") is None:
        return Quantization(format=QuantizedFormat.FLOAT8)
    return Quantization(format=QuantizedFormat.FLOAT8_BLOCKS, block=_block(fields, "weight_block_size"))


def _awq(fields: Fields) -> Quantization:
    bits, version = fields.raw.get("bits", fields.raw.get("w_bit", 4)), fields.raw.get("version", "gemm")
    if bits != 4 or str(version).lower() != "gemm":
        raise fields.error(
            f"AWQ of {bits} bits, version {version!r}, is not supported; only 4 bits, version 'gemm', is"
        )
    if not fields.boolean("zero_point", default=True):
        raise fields.error("AWQ without zero points is not supported; use a checkpoint with zero_point")
    group_size = fields.raw.get("group_size", fields.raw.get("q_group_size", 128))
    return Quantization(format=QuantizedFormat.AWQ, bits=4, group_size=_group_size(fields, group_size), has_zeros=True)


def _gptq(fields: Fields) -> Quantization:
    bits = fields.integer("bits")
    if bits not in (2, 4, 8):
        raise fields.error(f"GPTQ of {bits} bits is not supported; use 2, 4 or 8")
    version = fields.raw.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise fields.error(f"checkpoint_format is {version!r}; supported are 'gptq' and 'gptq_v2'")
    return Quantization(
        format=QuantizedFormat.GPTQ,
        bits=bits,
        group_size=_group_size(fields, fields.raw.get("group_size", 128)),
        has_zeros=True,
        zero_offset=1 if version == "gptq" else 0,  # the first version stored zeros minus one
    )


def _bitsandbytes(fields: Fields) -> Quantization:
    if fields.boolean("load_in_8bit"):
        return Quantization(format=QuantizedFormat.BITSANDBYTES_8)
    kind = fields.raw.get("bnb_4bit_quant_type", "fp4")
    if not fields.boolean("load_in_4bit") or kind not in ("nf4", "fp4"):
        raise fields.error(f"bitsandbytes with weights of type {kind!r} is not supported; use nf4, fp4 or 8 bits")
    nested = fields.boolean("bnb_4bit_use_double_quant")
    return Quantization(format=QuantizedFormat.BITSANDBYTES_4, bits=4, table=kind, has_nested_scales=nested)


def _group_size(fields: Fields, value: object) -> int | None:
    """Return a group's size, or None for -1: all inputs."""
    return None if value == -1 else Fields({"group_size": value}, fields.where).integer("group_size")


def _block(fields: Fields, name: str) -> tuple[int, int]:
    value = fields.raw.get(name)
    if not isinstance(value, list) or len(value) != 2:
        raise fields.error(f"{name} is {value!r}; it must be a block's numbers of outputs and inputs")
    outputs, inputs = (Fields({name: size}, fields.where).integer(name) for size in value)
    return outputs, inputs

"""Quantised copies of small checkpoints, packed by the formats' documentation, and what their weights stand for.

Independent of `pdmesh.engine.quantized`, which is held to it: this packs, that unpacks. Imports torch late.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree
from typing import Any, Literal

from pdmesh_testing.transformers_checkpoints import write_transformers_checkpoint

#: Torch tensors by name.
Tensors = dict[str, Any]
Format = Literal[
    "int8-channel", "int8-group", "int8-zeros", "int4-group", "int4-zeros", "int4-order", "fp8-tensor", "fp8-channel",
    "fp8-blocks", "fp8-ct-blocks", "awq", "gptq", "gptq-order", "gptq-v2", "gptq-8",
    "bnb-nf4", "bnb-nested", "bnb-int8",
]  # fmt: skip

GROUP = 16
BLOCK = (32, 48)
#: MXFP4 values by code.
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_BNB_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_quantized(source: Path, directory: Path, quantized_format: Format) -> tuple[Path, Path]:
    """Write ``quantized`` and ``plain`` below ``directory``: of one value, the layers of ``source`` rounded."""
    import torch
    from safetensors.torch import load_file, save_file

    quantize, config = _FORMATS[quantized_format]
    tensors: Tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    quantized: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and ".layers." in name and "router" not in name and ".gate.weight" not in name:
            parts, meaning = quantize(tensor, generator)
            quantized |= {f"{name.removesuffix('weight')}{end}": part.contiguous() for end, part in parts.items()}
            plain[name] = meaning.contiguous()
        else:
            quantized[name] = plain[name] = tensor
    paths = directory / "quantized", directory / "plain"
    for path, weights in zip(paths, (quantized, plain), strict=True):
        copytree(source, path)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((paths[0] / "config.json").read_text())
    (paths[0] / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    return paths


def _in_mxfp4(weights: Any) -> tuple[Tensors, Any]:
    """(experts, inputs, outputs) as bytes and exponents, and what these stand for."""
    import torch

    values = torch.tensor(_MXFP4_VALUES)
    turned = weights.transpose(1, 2)
    blocks = turned.reshape(*turned.shape[:2], -1, 32)
    exponents = (blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    codes = (blocks[..., None] / 2 ** exponents[..., None] - values).abs().argmin(-1)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    meaning = (values[codes] * 2**exponents).view(turned.shape).transpose(1, 2)
    return {"blocks": packed.to(torch.uint8), "scales": (exponents[..., 0] + 127).to(torch.uint8)}, meaning


def write_mxfp4(directory: Path) -> tuple[Path, Path]:
    """Write ``quantized``, a gpt-oss with experts in MXFP4, and ``plain``, what its weights stand for."""
    from safetensors.torch import load_file, save_file

    plain = write_transformers_checkpoint(
        directory / "plain", "gpt_oss", num_local_experts=3, num_experts_per_tok=2, head_dim=16
    )
    quantized = directory / "quantized"
    quantized.mkdir()
    stored: Tensors = {}
    tensors: Tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            parts, meaning = _in_mxfp4(tensor)
            stored |= {f"{name}_{end}": part.contiguous() for end, part in parts.items()}
            tensors[name] = meaning.contiguous()
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**fields, "quantization_config": {"quant_method": "mxfp4"}}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (quantized / name).write_bytes((plain / name).read_bytes())
    return quantized, plain


def pack(values: Any, bits: int) -> Any:
    """Pack values along the last dimension into 32-bit words, lowest first; the last word is filled with zeros."""
    import torch

    per_word = 32 // bits
    missing = -values.shape[-1] % per_word
    padded = torch.nn.functional.pad(values.to(torch.int64), (0, missing))
    padded = padded.reshape(*values.shape[:-1], -1, per_word)
    words = (padded << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _rounded(tensor: Any, bits: int, group: int, *, has_zeros: bool, groups: Any = None) -> tuple[Any, Any, Any, Any]:
    """Quantize a tensor in groups.

    Return unsigned values, scales and zeros (outputs, groups), and the dequantized tensor.
    """
    import torch

    outputs, inputs = tensor.shape
    groups = torch.arange(inputs) // group if groups is None else groups
    num_groups, highest = int(groups.max()) + 1, (1 << bits) - 1
    low, high = torch.zeros(outputs, num_groups), torch.zeros(outputs, num_groups)
    for number in range(num_groups):
        part = tensor[:, groups == number]
        low[:, number], high[:, number] = part.amin(1), part.amax(1)
    if has_zeros:
        scales = ((high - low) / highest).half().float()
        zeros = (-low / scales).round().clamp(0, highest)
    else:
        scales = (torch.maximum(high, -low) / (highest >> 1)).half().float()
        zeros = torch.full_like(scales, (highest + 1) >> 1)
    values = (tensor / scales[:, groups] + zeros[:, groups]).round().clamp(0, highest)
    return values.to(torch.int64), scales, zeros.to(torch.int64), (values - zeros[:, groups]) * scales[:, groups]


def _compressed(bits: int, group: int | None, *, has_zeros: bool = False, orders: bool = False) -> Callable[..., Any]:
    def quantize(tensor: Any, generator: Any) -> tuple[Tensors, Any]:
        import torch

        outputs, inputs = tensor.shape
        size, half = group or inputs, 1 << (bits - 1)
        groups = torch.arange(inputs)[torch.randperm(inputs, generator=generator)] // size if orders else None
        values, scales, zeros, meaning = _rounded(tensor, bits, size, has_zeros=has_zeros, groups=groups)
        if bits == 8:
            # Each value takes a byte.
            parts = {"weight": (values - half).to(torch.int8), "weight_scale": scales.half()}
            zero_points = {"weight_zero_point": (zeros - half).to(torch.int8)}
        else:
            parts = {
                "weight_packed": pack(values, bits),
                "weight_scale": scales.half(),
                "weight_shape": torch.tensor([outputs, inputs]),
            }
            zero_points = {"weight_zero_point": pack(zeros.t(), bits).t()}
        if has_zeros:
            parts |= zero_points
        if groups is not None:
            parts["weight_g_idx"] = groups.to(torch.int32)
        return parts, meaning

    return quantize


def _fp8(scaled: Literal["tensor", "channel", "blocks"], name: str) -> Callable[..., Any]:
    def quantize(tensor: Any, generator: Any) -> tuple[Tensors, Any]:
        import torch

        outputs, inputs = tensor.shape
        block = {"tensor": (outputs, inputs), "channel": (1, inputs), "blocks": BLOCK}[scaled]
        rows, columns = torch.arange(outputs) // block[0], torch.arange(inputs) // block[1]
        scales = torch.zeros(int(rows.max()) + 1, int(columns.max()) + 1)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                scales[row, column] = tensor[rows == row][:, columns == column].abs().max() / 448
        each = scales[rows][:, columns]
        values = (tensor / each).to(torch.float8_e4m3fn)
        stored = scales.reshape(()) if scaled == "tensor" else scales
        return {"weight": values, name: stored}, values.float() * each

    return quantize


def _awq(tensor: Any, generator: Any) -> tuple[Tensors, Any]:
    values, scales, zeros, meaning = _rounded(tensor, 4, GROUP, has_zeros=True)

    def words(columns: Any) -> Any:
        # Shape (…, outputs); each word has columns in AWQ's order.
        return pack(columns.reshape(*columns.shape[:-1], -1, 8)[..., list(_AWQ_ORDER)].flatten(-2), 4)

    return {"qweight": words(values.t()), "qzeros": words(zeros.t()), "scales": scales.t().half()}, meaning


def _gptq(bits: int, *, version: int = 1, orders: bool = False) -> Callable[..., Any]:
    def quantize(tensor: Any, generator: Any) -> tuple[Tensors, Any]:
        import torch

        inputs = tensor.shape[1]
        order = torch.randperm(inputs, generator=generator) if orders else torch.arange(inputs)
        groups = order // GROUP
        values, scales, zeros, meaning = _rounded(tensor, bits, GROUP, has_zeros=True, groups=groups)
        stored = (zeros - (2 - version)) % (1 << bits)
        return {
            "qweight": pack(values, bits).t(),
            "qzeros": pack(stored.t(), bits),
            "scales": scales.t().half(),
            "g_idx": groups.to(torch.int32),
        }, meaning

    return quantize


def _bnb(*, nested: bool) -> Callable[..., Any]:
    def quantize(tensor: Any, generator: Any) -> tuple[Tensors, Any]:
        import torch

        flat = tensor.flatten()
        blocks = torch.arange(len(flat)) // 64
        table, scales = (
            torch.tensor(_NF4),
            torch.zeros(int(blocks[-1]) + 1).scatter_reduce(0, blocks, flat.abs(), "amax"),
        )
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*tensor.shape]}
        parts: Tensors = {"weight.absmax": scales, "weight.quant_map": table}
        if nested:
            map_, offset = torch.linspace(-1, 1, 256), float(scales.mean())
            groups = torch.arange(len(scales)) // 256
            most = torch.zeros(int(groups[-1]) + 1).scatter_reduce(0, groups, (scales - offset).abs(), "amax")
            codes = ((scales - offset) / most[groups])[:, None].sub(map_).abs().argmin(1)
            scales = map_[codes] * most[groups] + offset
            parts |= {
                "weight.absmax": codes.to(torch.uint8),
                "weight.nested_absmax": most,
                "weight.nested_quant_map": map_,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        codes = (flat / scales[blocks])[:, None].sub(table).abs().argmin(1)
        pairs = torch.nn.functional.pad(codes, (0, len(codes) % 2)).view(-1, 2)
        parts["weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        return parts, (table[codes] * scales[blocks]).view(tensor.shape)

    return quantize


def _bnb_int8(tensor: Any, generator: Any) -> tuple[Tensors, Any]:
    import torch

    scales = tensor.abs().amax(1)
    values = (tensor * (127 / scales[:, None])).round()
    parts = {
        "weight": values.to(torch.int8),
        "SCB": scales,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return parts, values * (scales / 127)[:, None]


def _compressed_config(name: str, **weights: Any) -> dict[str, Any]:
    scheme = {"weights": {"num_bits": 8, "type": "int", "symmetric": True, **weights}, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


def _gptq_config(bits: int, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False, **fields}


_GROUPED = {"strategy": "group", "group_size": GROUP}
_FORMATS: Mapping[Format, tuple[Callable[..., tuple[Tensors, Any]], dict[str, Any]]] = {
    "int8-channel": (_compressed(8, None), _compressed_config("int-quantized", strategy="channel")),
    "int8-group": (_compressed(8, GROUP), _compressed_config("int-quantized", **_GROUPED)),
    "int8-zeros": (
        _compressed(8, GROUP, has_zeros=True),
        _compressed_config("int-quantized", symmetric=False, **_GROUPED),
    ),
    "int4-group": (_compressed(4, GROUP), _compressed_config("pack-quantized", num_bits=4, **_GROUPED)),
    "int4-zeros": (
        _compressed(4, GROUP, has_zeros=True),
        _compressed_config("pack-quantized", num_bits=4, symmetric=False, **_GROUPED),
    ),
    "int4-order": (
        _compressed(4, GROUP, orders=True),
        _compressed_config("pack-quantized", num_bits=4, actorder="group", **_GROUPED),
    ),
    "fp8-tensor": (
        _fp8("tensor", "weight_scale"),
        _compressed_config("float-quantized", type="float", strategy="tensor"),
    ),
    "fp8-channel": (
        _fp8("channel", "weight_scale"),
        _compressed_config("float-quantized", type="float", strategy="channel"),
    ),
    "fp8-blocks": (
        _fp8("blocks", "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
    ),
    "fp8-ct-blocks": (
        _fp8("blocks", "weight_scale"),
        _compressed_config("float-quantized", type="float", strategy="block", block_structure=list(BLOCK)),
    ),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (_gptq(4), _gptq_config(4)),
    "gptq-order": (_gptq(4, orders=True), _gptq_config(4, desc_act=True)),
    "gptq-v2": (_gptq(4, version=2), _gptq_config(4, checkpoint_format="gptq_v2")),
    "gptq-8": (_gptq(8), _gptq_config(8)),
    "bnb-nf4": (_bnb(nested=False), _BNB_CONFIG),
    "bnb-nested": (_bnb(nested=True), {**_BNB_CONFIG, "bnb_4bit_use_double_quant": True}),
    "bnb-int8": (_bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
FORMATS: tuple[Format, ...] = tuple(_FORMATS)

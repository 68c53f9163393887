"""Weights of a GGUF file, dequantised when they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.gguf.gguf_architectures import ARCHITECTURES, GgufModel
from pdmesh.engine.gguf.gguf_blocks import GROUPED, values_of
from pdmesh.engine.gguf.gguf_reader import F32, TYPES, StoredTensor, read_parts
from pdmesh.engine.grouped import GroupedWeight, of_blocks
from pdmesh.engine.unused import check_unused
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import IndexRange

_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
_LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
#: An expert's matrices are parts of one tensor of all experts: (experts, outputs, inputs). Biases are stored likewise.
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.(weight|bias)")
_EXPERT_NAMES: Mapping[str, str] = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
#: Biases that a layer may lack. llama.cpp adds each one that exists.
_BIAS = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down))\.bias")
#: Ending of a delta net's decays, stored as negative numbers instead of the logarithms of their sizes.
_DECAY = ".ssm_a"
#: Number of values that are dequantised at once. Their fp32 copy is small beside the weight.
_PANEL_VALUES = 1 << 22


class GgufTensors:
    """`pdmesh.engine.tensors.Tensors` of a GGUF file. Values are in ``dtype`` unless stored in fp32."""

    def __init__(self, files: Sequence[Path], dtype: torch.dtype) -> None:
        self._file = files[0]
        self._dtype = dtype
        header = read_parts(files, strings=False)
        self._tensors = header.tensors
        name = str(header.metadata.get("general.architecture"))
        architecture, self._model = ARCHITECTURES.get(name), GgufModel(name, header, str(self._file))
        self._layer_names = {**_LAYER_NAMES, **(architecture.names if architecture is not None else {})}

    def __contains__(self, name: str) -> bool:
        return self._own_name(name) in self._tensors

    def check(self, name: str, shape: tuple[int, ...]) -> Sequence[str]:
        own_name = self._own_name(name)
        if own_name is not None and self._is_absent_bias(own_name):
            return ()
        found = self._find(name)
        if found.shape not in (shape, tuple(size for size in shape if size > 1)):
            raise ConfigError(f"{self._file}: tensor {name!r} has shape {found.shape}; its header needs {shape}")
        kind = TYPES[found.type_number]
        if len(shape) == 1 and kind.num_values > 1:
            raise ConfigError(f"{self._file}: tensor {name!r} is a vector in {kind.name}; only matrices are quantised")
        assert own_name is not None
        scale = _scale_of(own_name)
        return (own_name, scale) if scale in self._tensors else (own_name,)

    def check_all_used(self, used: Set[str]) -> None:
        unused = {name for name in self._tensors.keys() - used if not self._is_of_draft_layer(name)}
        check_unused(unused, str(self._file), lambda name: self._values(self._tensors[name]))

    def read(self, name: str, shape: tuple[int, ...], rows: IndexRange | None = None) -> Tensor:
        self.check(name, shape)
        own_name = self._own_name(name)
        if own_name is not None and self._is_absent_bias(own_name):
            return torch.zeros(shape if rows is None else (rows.size,))
        stored = replace(self._find(name), shape=shape)
        values = self._values(stored, rows).view(-1, *shape[1:])
        if own_name is not None and own_name.endswith(_DECAY):
            values = (-values).log()
        return values if (scale := self._scale(own_name)) is None else (values.float() * scale).to(values.dtype)

    def grouped(self, name: str, shape: tuple[int, ...], rows: IndexRange | None = None) -> GroupedWeight | None:
        self.check(name, shape)
        stored = self._find(name)
        if stored.type_number not in GROUPED:
            return None
        data = _blocks(stored, rows)
        kind = TYPES[stored.type_number]
        weight = of_blocks(GROUPED[stored.type_number](data), len(data) * kind.num_values // shape[1])
        if (scale := self._scale(self._own_name(name))) is not None:
            weight = replace(weight, scales=weight.scales.times(scale))
        if not weight.is_finite:
            raise ConfigError(
                f"{self._file}: tensor {name!r} has scales that are not finite numbers; download it again"
            )
        return weight

    def _values(self, stored: StoredTensor, rows: IndexRange | None = None) -> Tensor:
        """Return a tensor's values, or some of its rows: in fp32 if stored so, else in the dtype of the computation."""
        data, kind = _blocks(stored, rows), TYPES[stored.type_number]
        dtype = torch.float32 if stored.type_number == F32 else self._dtype
        out = torch.empty(len(data), kind.num_values, dtype=dtype)
        panel = _PANEL_VALUES // kind.num_values
        for begin in range(0, len(data), panel):
            blocks = slice(begin, begin + panel)
            out[blocks] = values_of(stored.type_number, data[blocks])
        return out.view(-1, *stored.shape[1:])

    def _scale(self, own_name: str | None) -> float | None:
        """Return NVFP4's factor of a whole weight; None without one. Raise ConfigError if it is malformed."""
        stored = None if own_name is None else self._tensors.get(_scale_of(own_name))
        if stored is None:
            return None
        if stored.shape != (1,) or stored.type_number != F32:
            raise ConfigError(f"{self._file}: tensor {_scale_of(str(own_name))!r} is not one number in fp32")
        return float(self._values(stored))

    def _is_absent_bias(self, own_name: str) -> bool:
        """Return whether a tensor is a bias that this layer lacks, and other layers or projections may have."""
        return own_name not in self._tensors and _BIAS.fullmatch(own_name) is not None

    def _is_of_draft_layer(self, own_name: str) -> bool:
        """Return whether a tensor is of the last layers, which draft further tokens and are not computed."""
        found, num_drafts = re.match(r"blk\.(\d+)\.", own_name), self._model.num_draft_layers
        return bool(num_drafts) and found is not None and int(found[1]) >= self._model.num_layers

    def _find(self, name: str) -> StoredTensor:
        own_name = self._own_name(name)
        if own_name is not None and (expert := _EXPERT.fullmatch(name)) is not None:
            return self._find_expert(own_name, int(expert[2]))
        if own_name is None or own_name not in self._tensors:
            raise ConfigError(f"{self._file} holds no tensor {own_name or name!r}")
        return self._tensors[own_name]

    def _find_expert(self, own_name: str, number: int) -> StoredTensor:
        stacked = self._tensors.get(own_name)
        if stacked is None:
            raise ConfigError(f"{self._file} holds no tensor {own_name!r} with all experts of a layer")
        num_experts, *shape = stacked.shape
        if not shape or number >= num_experts:
            raise ConfigError(f"{self._file}: tensor {own_name!r} has shape {stacked.shape}, without expert {number}")
        num_bytes = stacked.num_bytes // num_experts
        return StoredTensor(
            tuple(shape), stacked.type_number, stacked.file, stacked.offset + number * num_bytes, num_bytes
        )

    def _own_name(self, name: str) -> str | None:
        """Return the file's name of a tensor; None if the file has no such kind.

        An expert's tensor is a part of the tensor of all experts.
        """
        if (expert := _EXPERT.fullmatch(name)) is not None and expert[3] in _EXPERT_NAMES:
            return f"blk.{expert[1]}.{_EXPERT_NAMES[expert[3]]}.{expert[4]}"
        whole, _, end = name.rpartition(".")
        if end not in ("weight", "bias"):
            whole, end = name, ""
        if whole in _NAMES:
            return f"{_NAMES[whole]}.{end}"
        layer, _, part = whole.removeprefix("model.layers.").partition(".")
        own = f"blk.{layer}.{self._layer_names[part]}" if part in self._layer_names else None
        return f"{own}.{end}" if own and end else own


def _blocks(stored: StoredTensor, rows: IndexRange | None) -> Tensor:
    """Return a tensor's blocks (n, bytes), or the blocks of some rows."""
    kind = TYPES[stored.type_number]
    first, stop = rows or (0, stored.shape[0])
    row_blocks = stored.num_bytes // kind.num_bytes // stored.shape[0]
    num_blocks = (stop - first) * row_blocks
    offset = stored.offset + first * row_blocks * kind.num_bytes
    data = np.memmap(stored.file, dtype=np.uint8, mode="c", offset=offset, shape=(num_blocks, kind.num_bytes))
    return torch.from_numpy(data)


def _scale_of(own_name: str) -> str:
    return own_name.removesuffix("weight") + "scale"

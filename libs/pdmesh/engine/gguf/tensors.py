"""Weights of a GGUF file, dequantised as they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pdmesh.engine.gguf.architectures import ARCHITECTURES
from pdmesh.engine.gguf.blocks import GROUPED, values_of
from pdmesh.engine.gguf.reader import F32, TYPES, StoredTensor, read_header
from pdmesh.engine.grouped import GroupedWeight, of_blocks
from pdmesh.errors import ConfigError
from pdmesh.model import IndexRange

_NAMES: Mapping[str, str] = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
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
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
#: An expert's matrices are parts of one tensor of all experts: (experts, outputs, inputs); so are its biases.
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.(weight|bias)")
_EXPERT_NAMES: Mapping[str, str] = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
#: Values dequantised at once: what they take in fp32 stays small beside the weight.
_PANEL_VALUES = 1 << 22


class GgufTensors:
    """Implements `pdmesh.engine.tensors.Tensors`, in ``dtype`` where values are not in fp32."""

    def __init__(self, file: Path, dtype: torch.dtype) -> None:
        self._file = file
        self._dtype = dtype
        header = read_header(file)
        self._tensors = header.tensors
        architecture = ARCHITECTURES.get(str(header.metadata.get("general.architecture")))
        self._layer_names = {**_LAYER_NAMES, **(architecture.names if architecture is not None else {})}

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._find(name)
        if found.shape != shape:
            raise ConfigError(f"{self._file}: tensor {name!r} has shape {found.shape}; its header needs {shape}")
        kind = TYPES[found.type_number]
        if len(shape) == 1 and kind.num_values > 1:
            raise ConfigError(f"{self._file}: tensor {name!r} is a vector in {kind.name}; only matrices are quantised")

    def read(self, name: str, shape: tuple[int, ...], rows: IndexRange | None = None) -> Tensor:
        type_number, data = self._blocks(name, shape, rows)
        dtype = torch.float32 if type_number == F32 else self._dtype
        out = torch.empty(len(data), TYPES[type_number].num_values, dtype=dtype)
        panel = _PANEL_VALUES // TYPES[type_number].num_values
        for begin in range(0, len(data), panel):
            blocks = slice(begin, begin + panel)
            out[blocks] = values_of(type_number, data[blocks])
        return out.view(-1, *shape[1:])

    def grouped(self, name: str, shape: tuple[int, ...], rows: IndexRange | None = None) -> GroupedWeight | None:
        type_number, data = self._blocks(name, shape, rows)
        if type_number not in GROUPED:
            return None
        weight = of_blocks(GROUPED[type_number](data), len(data) * TYPES[type_number].num_values // shape[1])
        if not weight.is_finite:
            raise ConfigError(f"{self._file}: tensor {name!r} has scales that are no numbers; download it again")
        return weight

    def _blocks(self, name: str, shape: tuple[int, ...], rows: IndexRange | None) -> tuple[int, Tensor]:
        """A tensor's type, and its blocks (n, bytes)."""
        self.check(name, shape)
        stored = self._find(name)
        kind = TYPES[stored.type_number]
        first, stop = rows or (0, shape[0])
        row_blocks = stored.num_bytes // kind.num_bytes // shape[0]
        num_blocks = (stop - first) * row_blocks
        offset = stored.offset + first * row_blocks * kind.num_bytes
        data = np.memmap(self._file, dtype=np.uint8, mode="c", offset=offset, shape=(num_blocks, kind.num_bytes))
        return stored.type_number, torch.from_numpy(data)

    def _find(self, name: str) -> StoredTensor:
        if (expert := _EXPERT.fullmatch(name)) is not None and expert[3] in _EXPERT_NAMES:
            return self._find_expert(f"blk.{expert[1]}.{_EXPERT_NAMES[expert[3]]}.{expert[4]}", int(expert[2]))
        own_name = self._own_name(name)
        if own_name is None or own_name not in self._tensors:
            raise ConfigError(f"{self._file} holds no tensor {own_name or name!r}")
        return self._tensors[own_name]

    def _find_expert(self, own_name: str, number: int) -> StoredTensor:
        stacked = self._tensors.get(own_name)
        if stacked is None:
            raise ConfigError(f"{self._file} holds no tensor {own_name!r}, which has all experts of a layer")
        num_experts, *shape = stacked.shape
        if not shape or number >= num_experts:
            raise ConfigError(f"{self._file}: tensor {own_name!r} has shape {stacked.shape}, without expert {number}")
        num_bytes = stacked.num_bytes // num_experts
        return StoredTensor(tuple(shape), stacked.type_number, stacked.offset + number * num_bytes, num_bytes)

    def _own_name(self, name: str) -> str | None:
        """What the file calls a tensor."""
        whole, _, end = name.rpartition(".")
        if end not in ("weight", "bias"):
            whole, end = name, "weight"
        if whole in _NAMES:
            return f"{_NAMES[whole]}.{end}"
        layer, _, part = whole.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{self._layer_names[part]}.{end}" if part in self._layer_names else None

"""Fused experts (one tensor per layer, in gpt-oss, Qwen3-VL and Gemma 4), presented as one tensor for each expert.

Plain tensors are (experts, inputs, outputs), or in Gemma 4 (experts, outputs, inputs). MXFP4 has (experts, outputs,
inputs / 32, 16) bytes of two values each, and (experts, outputs, inputs / 32) exponents. Files alternate gates and ups,
or have all gates first. Here, gates are first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.grouped import GroupedWeight, of_mxfp4
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.quantized import FLOATS, Shape, Stored
from pdmesh.engine.stored import FileTensors, StoredFiles
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import IndexRange

_GATE_UP = "gate_up_proj"
_NAME = re.compile(rf"(.+\.experts)\.(\d+)\.({_GATE_UP}|down_proj)\.(weight|bias)")
_BLOCK = 32
_BYTES = frozenset({"U8"})


class _Expert(NamedTuple):
    prefix: str
    number: int
    projection: str
    end: str

    @property
    def fused_name(self) -> str:
        """Name of the tensor of all experts that contains this one."""
        return f"{self.prefix}.{self.projection}{'' if self.end == 'weight' else '_bias'}"


class FusedExpertTensors(FileTensors):
    """`pdmesh.engine.tensors.Tensors` for models whose experts are fused."""

    def __init__(self, directory: Path, files: StoredFiles, config: ModelConfig) -> None:
        super().__init__(directory, files)
        self._config = config

    def check(self, name: str, shape: Shape) -> Sequence[str]:
        if (expert := _expert(name)) is None:
            return super().check(name, shape)
        parts = self._stored(expert, shape)
        for part, stored in parts.items():
            self.check_stored(part, stored)
        return tuple(parts)

    def read(self, name: str, shape: Shape, rows: IndexRange | None = None) -> Tensor:
        if (expert := _expert(name)) is None:
            return super().read(name, shape, rows)
        if (weight := self.grouped(name, shape, rows)) is not None:
            return weight.values()
        self.check(name, shape)
        tensor = self.read_stored(expert.fused_name, IndexRange(expert.number, expert.number + 1))[0]
        is_stored_plainly = (
            expert.end == "bias" or self._config.names.outputs_first or (tensor.shape == shape and shape[0] != shape[1])
        )
        values = self._gates_first(tensor if is_stored_plainly else tensor.t(), expert)
        return values if rows is None else values[slice(*rows)]

    def grouped(self, name: str, shape: Shape, rows: IndexRange | None = None) -> GroupedWeight | None:
        expert = _expert(name)
        if expert is None or not self._is_quantized(expert):
            return None
        self.check(name, shape)
        of_expert = IndexRange(expert.number, expert.number + 1)
        blocks, exponents = (
            self._gates_first(self.read_stored(part, of_expert)[0], expert) for part in self._stored(expert, shape)
        )
        numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)  # the lower half is the first value
        weight = of_mxfp4(numbers, exponents)
        if not weight.is_finite:
            raise ConfigError(f"{name}: its scale exponents are out of range; download the checkpoint again")
        return weight if rows is None else weight.rows(torch.arange(*rows))

    def _gates_first(self, outputs: Tensor, expert: _Expert) -> Tensor:
        if expert.projection != _GATE_UP or self._config.names.gates_first:
            return outputs
        return torch.cat((outputs[0::2], outputs[1::2]))

    def _is_quantized(self, expert: _Expert) -> bool:
        return expert.end == "weight" and f"{expert.fused_name}_blocks" in self

    def _stored(self, expert: _Expert, shape: Shape) -> dict[str, Stored]:
        """Return the stored tensors of an expert, with the shapes of all experts."""
        experts = max((each.experts.num_experts for each in self._config.layers if each.experts), default=0)
        name = expert.fused_name
        if expert.end == "bias":
            return {name: Stored(((experts, *shape),), FLOATS)}
        outputs, inputs = shape
        if not self._is_quantized(expert):
            names = self._config.names
            shapes = [] if names.outputs_first else [(experts, inputs, outputs)]
            if names.gates_first:  # transformers 5 writes this order
                shapes.append((experts, outputs, inputs))
            return {name: Stored(tuple(shapes), FLOATS)}
        blocks = (experts, outputs, -(-inputs // _BLOCK))
        return {
            f"{name}_blocks": Stored(((*blocks, _BLOCK // 2),), _BYTES),
            f"{name}_scales": Stored((blocks,), _BYTES),
        }


def _expert(name: str) -> _Expert | None:
    found = _NAME.fullmatch(name)
    return None if found is None else _Expert(found[1], int(found[2]), found[3], found[4])

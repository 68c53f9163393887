"""Weights of a Hugging Face directory: single or sharded safetensors, checked against the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pdmesh.engine.experts import Experts, Mlp
from pdmesh.engine.levels import KernelLibrary
from pdmesh.engine.linear import Linear, PlainLinear, Vocabulary, WeightMemory, fastest_linear, fastest_vocabulary
from pdmesh.engine.model_config import ExpertsConfig, LayerConfig, ModelConfig, QkNorm
from pdmesh.engine.rope import rotation_order
from pdmesh.engine.tensors import RandomTensors, Tensors, UnreadTensors, open_tensors


class Norm(NamedTuple):
    """Of a norm. In fp32 where the model multiplies by it before it rounds."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One transformer layer; q, k and v are fused in this order, and so are gate and up. Norms that it lacks are None.

    Queries and keys are in `pdmesh.engine.rope.rotation_order`.
    """

    input_norm: Norm | None
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear
    attention_output_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Experts
    mlp_output_norm: Norm | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights, in the dtype and on the device of the computation. A tied ``lm_head`` is the embedding itself."""

    embedding: Vocabulary
    layers: tuple[LayerWeights, ...]
    norm: Norm
    lm_head: Vocabulary
    dtype: torch.dtype
    device: torch.device


def load_weights(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool = True,
    library: KernelLibrary | None = None,
) -> ModelWeights:
    """Read every tensor the configuration asks for. Raises ConfigError for one that is missing or misshapen.

    All are compared by name and shape before memory is taken for any.

    ``packed`` allows projections in the order that their products read fastest; ``library`` has kernels for them.
    """
    with open_tensors(directory, config.quantization, dtype) as tensors:
        _Reader(config, UnreadTensors(tensors), dtype, torch.device("meta"), False, None).model()
        return _Reader(config, tensors, dtype, device, packed, library).model()


def random_weights(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool = True,
    library: KernelLibrary | None = None,
    seed: int = 0,
) -> ModelWeights:
    """Weights of the configuration's shape, drawn where they will be used: for benchmarks."""
    return _Reader(config, RandomTensors(dtype, device, seed), dtype, device, packed, library).model()


#: Where rows of a weight come from; None: as they are.
Order = Sequence[int] | None


@dataclass(frozen=True, slots=True)
class _Reader:
    config: ModelConfig
    tensors: Tensors
    dtype: torch.dtype
    device: torch.device
    packed: bool
    library: KernelLibrary | None
    memory: WeightMemory = field(default_factory=WeightMemory)

    def model(self) -> ModelWeights:
        config, names = self.config, self.config.names
        vocabulary = (config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings
        embedding = self._vocabulary(f"{names.embedding}.weight", vocabulary, multiplies=tied)
        return ModelWeights(
            embedding=embedding,
            layers=tuple(self._layer(names.layer.format(number), layer) for number, layer in enumerate(config.layers)),
            norm=self._norm(names.norm, config.hidden_size),
            lm_head=embedding if tied else self._vocabulary(f"{names.lm_head}.weight", vocabulary, multiplies=True),
            dtype=self.dtype,
            device=self.device,
        )

    def _layer(self, prefix: str, layer: LayerConfig) -> LayerWeights:
        config, names = self.config, self.config.names
        hidden = config.hidden_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def norm(name: str | None) -> Norm | None:
            return None if name is None else self._norm(f"{prefix}.{name}", hidden)

        return LayerWeights(
            input_norm=norm(names.input_norm),
            qkv=self._linear(
                prefix,
                names.qkv,
                [q_size, kv_size, kv_size],
                hidden,
                has_bias=config.qkv_bias,
                order=self._rotation_order(),
            ),
            q_norm=self._head_norm(f"{prefix}.{names.q_norm}", config.num_heads),
            k_norm=self._head_norm(f"{prefix}.{names.k_norm}", config.num_kv_heads),
            output=self._linear(prefix, (names.output,), [hidden], q_size, has_bias=config.output_bias),
            attention_output_norm=norm(names.attention_output_norm),
            mlp_norm=norm(names.mlp_norm),
            mlp=(
                self._mlp(prefix, names.gate_up, names.down, config.intermediate_size)
                if layer.experts is None
                else self._experts(prefix, layer.experts)
            ),
            mlp_output_norm=norm(names.mlp_output_norm),
        )

    def _mlp(self, prefix: str, gate_up: tuple[str, ...], down: str, inner: int) -> Mlp:
        config = self.config
        gates, has_bias = [inner, inner] if config.is_gated else [inner], config.mlp_bias
        return Mlp(
            self._linear(prefix, gate_up, gates, config.hidden_size, has_bias=has_bias),
            self._linear(prefix, (down,), [config.hidden_size], inner, has_bias=has_bias),
        )

    def _experts(self, prefix: str, experts: ExpertsConfig) -> Experts:
        names = self.config.names
        prefixes = [f"{prefix}.{names.expert.format(number)}" for number in range(experts.num_experts)]
        return Experts(
            experts,
            self._linear(prefix, (names.router,), [experts.num_experts], self.config.hidden_size),
            tuple(
                self._mlp(each, names.expert_gate_up, names.expert_down, experts.intermediate_size) for each in prefixes
            ),
        )

    def _rotation_order(self, num_heads: int | None = None) -> Order:
        """Of the rows of queries, keys and values; or of so many heads that are rotated."""
        config = self.config
        head_dim = config.head_dim
        order = rotation_order(head_dim, config.rotary_dim or head_dim, interleaves=config.interleaves_rotation)
        if order is None:
            return None
        num_rotated = config.num_heads + config.num_kv_heads if num_heads is None else num_heads
        rows = [head * head_dim + dim for head in range(num_rotated) for dim in order]
        if num_heads is None:
            rows += range(len(rows), len(rows) + config.num_kv_heads * head_dim)
        return rows

    def _linear(
        self,
        prefix: str,
        names: tuple[str, ...],
        sizes: Sequence[int],
        num_inputs: int,
        *,
        has_bias: bool = False,
        order: Order = None,
    ) -> Linear:
        """Projections of one input, with outputs of ``sizes`` in one or several tensors, as one; rows in ``order``."""
        if len(names) == 1:
            sizes = [sum(sizes)]
        outputs = {f"{prefix}.{name}": size for name, size in zip(names, sizes, strict=True)}
        for name, num_outputs in outputs.items():
            self.tensors.check(f"{name}.weight", (num_outputs, num_inputs))
        weight = torch.empty(sum(outputs.values()), num_inputs, dtype=self.dtype, device=self.device)
        bias = torch.empty(weight.shape[0], dtype=self.dtype, device=self.device) if has_bias else None
        row = 0
        for name, num_outputs in outputs.items():
            weight[row : row + num_outputs] = self.tensors.read(f"{name}.weight", (num_outputs, num_inputs))
            if bias is not None:
                bias[row : row + num_outputs] = self.tensors.read(f"{name}.bias", (num_outputs,))
            row += num_outputs
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        return fastest_linear(weight, bias, self.memory, self.library) if self.packed else PlainLinear(weight, bias)

    def _vocabulary(self, name: str, shape: tuple[int, ...], *, multiplies: bool) -> Vocabulary:
        weight = self._tensor(name, shape)
        if self.packed and multiplies:
            return fastest_vocabulary(weight, self.memory, self.library)
        return PlainLinear(weight, None)

    def _norm(self, name: str, size: int, order: Order = None) -> Norm:
        kind = self.config.norm
        weight = self._tensor(f"{name}.weight", (size,), torch.float32 if kind.offset else None)
        if kind.offset:
            weight += kind.offset
        bias = self._tensor(f"{name}.bias", (size,)) if kind.has_bias else None
        return Norm(weight, bias) if order is None else Norm(weight[order], None if bias is None else bias[order])

    def _head_norm(self, name: str, num_heads: int) -> Norm | None:
        """Of queries or keys."""
        match self.config.qk_norm:
            case QkNorm.NONE:
                return None
            case QkNorm.HEAD:
                return self._norm(name, self.config.head_dim, self._rotation_order(1))
            case QkNorm.ALL_HEADS:
                return self._norm(name, num_heads * self.config.head_dim, self._rotation_order(num_heads))

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        # copy: the file's mapping is closed after loading
        return self.tensors.read(name, shape).to(device=self.device, dtype=dtype or self.dtype, copy=True)

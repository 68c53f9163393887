"""Weights of a Hugging Face directory: single or sharded safetensors, checked against the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdmesh.engine.files import weight_files
from pdmesh.engine.levels import KernelLibrary
from pdmesh.engine.linear import Linear, PlainLinear, Vocabulary, WeightMemory, fastest_linear, fastest_vocabulary
from pdmesh.engine.model_config import ModelConfig
from pdmesh.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One transformer layer; q, k and v are fused in this order, and so are gate and up."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights, in the dtype and on the device of the computation. A tied ``lm_head`` is the embedding itself."""

    embedding: Vocabulary
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Vocabulary


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

    ``packed`` allows projections in the order that their products read fastest; ``library`` has kernels for them.
    """
    with _open_tensors(directory) as tensors:
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
    return _Reader(config, _RandomTensors(dtype, device, seed), dtype, device, packed, library).model()


class _Tensors(Protocol):
    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ConfigError unless there is such a tensor: before memory is taken for what config.json claims."""
        ...

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


class _RandomTensors:
    """Matrices of deviation 1 / sqrt(inputs), so that activations neither vanish nor grow; vectors of ones."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        pass

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        device = self._generator.device
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=device)
        tensor = torch.empty(shape, dtype=self._dtype, device=device)
        return tensor.normal_(0, shape[1] ** -0.5, generator=self._generator)


class _FileTensors:
    """Names of all tensors, each with the open file that holds it."""

    def __init__(self, directory: Path, files: dict[str, Any]) -> None:
        self._directory = directory
        self._files = files

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        file = self._files.get(name)
        if file is None:
            raise ConfigError(f"{self._directory}: the weights hold no tensor {name!r}")
        try:
            found = tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ConfigError(f"{self._directory}: tensor {name!r} cannot be read: {error}") from error
        if found != shape:
            raise ConfigError(f"{self._directory}: tensor {name!r} has shape {found}; config.json needs {shape}")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.check(name, shape)
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{self._directory}: tensor {name!r} cannot be read: {error}") from error
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ConfigError(f"{self._directory}: tensor {name!r} is {tensor.dtype}; quantized weights are not served")
        return tensor


@contextmanager
def _open_tensors(directory: Path) -> Iterator[_FileTensors]:
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in weight_files(directory):
            file = stack.enter_context(safe_open(path, framework="pt"))
            files |= dict.fromkeys(file.keys(), file)
        yield _FileTensors(directory, files)


@dataclass(frozen=True, slots=True)
class _Reader:
    config: ModelConfig
    tensors: _Tensors
    dtype: torch.dtype
    device: torch.device
    packed: bool
    library: KernelLibrary | None
    memory: WeightMemory = field(default_factory=WeightMemory)

    def model(self) -> ModelWeights:
        config = self.config
        vocabulary = (config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings
        embedding = self._vocabulary("model.embed_tokens.weight", vocabulary, multiplies=tied)
        return ModelWeights(
            embedding=embedding,
            layers=tuple(self._layer(f"model.layers.{layer}") for layer in range(config.num_layers)),
            norm=self._tensor("model.norm.weight", (config.hidden_size,)),
            lm_head=embedding if tied else self._vocabulary("lm_head.weight", vocabulary, multiplies=True),
        )

    def _layer(self, prefix: str) -> LayerWeights:
        config = self.config
        hidden, heads = (config.hidden_size,), (config.head_dim,)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        gate_up = {f"{mlp}.gate_proj": config.intermediate_size, f"{mlp}.up_proj": config.intermediate_size}
        return LayerWeights(
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._fused(qkv, config.hidden_size, has_bias=config.qkv_bias),
            q_norm=self._tensor(f"{attention}.q_norm.weight", heads) if config.qk_norm else None,
            k_norm=self._tensor(f"{attention}.k_norm.weight", heads) if config.qk_norm else None,
            output=self._fused({f"{attention}.o_proj": config.hidden_size}, q_size, has_bias=config.output_bias),
            post_attention_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._fused(gate_up, config.hidden_size, has_bias=config.mlp_bias),
            down=self._fused(
                {f"{mlp}.down_proj": config.hidden_size}, config.intermediate_size, has_bias=config.mlp_bias
            ),
        )

    def _fused(self, outputs: dict[str, int], num_inputs: int, *, has_bias: bool) -> Linear:
        """Projections of one input side by side, as one."""
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
        return fastest_linear(weight, bias, self.memory, self.library) if self.packed else PlainLinear(weight, bias)

    def _vocabulary(self, name: str, shape: tuple[int, ...], *, multiplies: bool) -> Vocabulary:
        weight = self._tensor(name, shape)
        if self.packed and multiplies:
            return fastest_vocabulary(weight, self.memory, self.library)
        return PlainLinear(weight, None)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        # copy: the file's mapping is closed after loading
        return self.tensors.read(name, shape).to(device=self.device, dtype=self.dtype, copy=True)

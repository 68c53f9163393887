"""Weights of a Hugging Face directory: single or sharded safetensors, checked against the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdmesh.engine.experts import Experts, Mlp
from pdmesh.engine.files import weight_files
from pdmesh.engine.levels import KernelLibrary
from pdmesh.engine.linear import Linear, PlainLinear, Vocabulary, WeightMemory, fastest_linear, fastest_vocabulary
from pdmesh.engine.model_config import ExpertsConfig, LayerConfig, ModelConfig, QkNorm
from pdmesh.engine.rope import rotation_order
from pdmesh.errors import ConfigError


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
    with _open_tensors(directory) as tensors:
        _Reader(config, _Unread(tensors), dtype, torch.device("meta"), False, None).model()
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


#: Where rows of a weight come from; None: as they are.
Order = Sequence[int] | None


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
    """Names of all tensors, each with the open file that holds it, and its name there."""

    def __init__(self, directory: Path, files: dict[str, tuple[Any, str]]) -> None:
        self._directory = directory
        self._files = files

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        file, own_name = self._files.get(name, (None, ""))
        if file is None:
            raise ConfigError(f"{self._directory}: the weights hold no tensor {name!r}")
        try:
            found = tuple(file.get_slice(own_name).get_shape())
        except SafetensorError as error:
            raise ConfigError(f"{self._directory}: tensor {name!r} cannot be read: {error}") from error
        if found != shape:
            raise ConfigError(f"{self._directory}: tensor {name!r} has shape {found}; config.json needs {shape}")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.check(name, shape)
        try:
            file, own_name = self._files[name]
            tensor: Tensor = file.get_tensor(own_name)
        except SafetensorError as error:
            raise ConfigError(f"{self._directory}: tensor {name!r} cannot be read: {error}") from error
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ConfigError(f"{self._directory}: tensor {name!r} is {tensor.dtype}; quantized weights are not served")
        return tensor


@dataclass(frozen=True, slots=True)
class _Unread:
    """Stands for tensors that are compared only: none is read."""

    tensors: _Tensors

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        self.tensors.check(name, shape)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.check(name, shape)
        return torch.empty(shape, device="meta")


@contextmanager
def _open_tensors(directory: Path) -> Iterator[_FileTensors]:
    with ExitStack() as stack:
        files: dict[str, tuple[Any, str]] = {}
        for path in weight_files(directory):
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                # Checkpoints for embeddings are of the bare model, whose names have no prefix.
                is_bare = not name.startswith(("model.", "lm_head."))
                files[f"model.{name}" if is_bare else name] = file, name
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

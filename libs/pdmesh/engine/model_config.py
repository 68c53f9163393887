"""The shape and parts of a decoder as data, from a checkpoint's description. Torch-free.

`pdmesh.engine.architectures` makes a `ModelConfig` from a checkpoint's ``config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pdmesh.engine.latent import Latent
from pdmesh.engine.rope_config import RopeConfig
from pdmesh.engine.state_sizes import DeltaNet
from pdmesh.engine.tensor_names import TensorNames
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import KvLayout, PageShape

DTYPES = ("float32", "bfloat16", "float16")


class QuantizedFormat(StrEnum):
    """Storage format of weights; see `pdmesh.engine.quantized`.

    INT8 and PACKED are formats of compressed-tensors: a byte per value, or several values in 32 bits along inputs.
    FLOAT8 has scales of channels or of the whole weight. FLOAT8_BLOCKS has scales of blocks of outputs and inputs.
    BITSANDBYTES_4 codes are indices into a table of 16 numbers, with a scale for each block. In MXFP4, of gpt-oss's
    experts, 32 values of 4 bits share a power of two. In a GGUF file, each tensor has its own type.
    """

    INT8 = "int8"
    PACKED = "packed"
    FLOAT8 = "float8"
    FLOAT8_BLOCKS = "float8 blocks"
    AWQ = "awq"
    GPTQ = "gptq"
    BITSANDBYTES_4 = "bitsandbytes 4 bits"
    BITSANDBYTES_8 = "bitsandbytes 8 bits"
    MXFP4 = "mxfp4"
    GGUF = "gguf"


_NO_INTEGERS = (QuantizedFormat.FLOAT8, QuantizedFormat.FLOAT8_BLOCKS, QuantizedFormat.BITSANDBYTES_4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Storage of linear layers, except layers with plain weights.

    ``group_size`` inputs share a scale; None means all inputs. ``zero_offset`` is added to stored zeros. ``block`` is
    (outputs, inputs). ``table`` names bitsandbytes' table of numbers, and ``has_nested_scales`` marks its quantised
    scales.

    ``interleaves_rotation``: neighbouring rows of queries and keys rotate together. ``tiles_heads``: see
    `pdmesh.engine.state_sizes.DeltaNet`. ``biases`` are the projections with biases in a GGUF file: "qkv", "output",
    "mlp". ``names`` has fields of `pdmesh.engine.tensor_names.TensorNames` whose values differ in a GGUF file.
    ``has_codes`` is false if a GGUF file has plain tensors only.
    """

    format: QuantizedFormat
    bits: int = 8
    group_size: int | None = None
    has_zeros: bool = False
    zero_offset: int = 0
    block: tuple[int, int] = (0, 0)
    table: str = ""
    has_nested_scales: bool = False
    interleaves_rotation: bool = False
    tiles_heads: bool = False
    biases: frozenset[str] = frozenset()
    names: tuple[tuple[str, Any], ...] = ()
    has_codes: bool = True

    @property
    def has_integers(self) -> bool:
        """Whether weights are scaled integers. If these stay packed, sums are scaled, and no weight is rounded."""
        return self.format not in _NO_INTEGERS and self.has_codes


class NormKind(StrEnum):
    """Kind of normalisation of hidden states.

    RMS divides by the root of the mean square. LAYER subtracts the mean and divides by the deviation, and may have
    biases.
    """

    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """Parameters of norms. ``offset`` is added to weights. ``in_float32``: weights multiply before rounding."""

    epsilon: float
    kind: NormKind = NormKind.RMS
    offset: float = 0.0
    in_float32: bool = False
    has_bias: bool = False


class QkNorm(StrEnum):
    """Scope of the norm of queries and keys before the rotation.

    HEAD normalises each head by itself. ALL_HEADS normalises all query heads of a token together, and all key heads.
    """

    NONE = "none"
    HEAD = "head"
    ALL_HEADS = "all heads"


class Activation(StrEnum):
    """Activation between the two products of an MLP. Values are transformers' names.

    CLAMPED_SWISH is gpt-oss's: values are clamped to a limit, and 1 is added to the ups. RELU2 is a squared ReLU.
    """

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"
    CLAMPED_SWISH = "clamped swish"
    RELU2 = "relu2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Parameters of a layer with several MLPs. Each token goes through a few of them.

    ``intermediate_size`` is one expert's. ``normalizes``: a token's shares sum to 1. ``has_bias``: the router and the
    experts have biases. ``is_beside_mlp``: the layer has a dense MLP, too, and the sum of both is added. The experts
    then have norms of their own, and factors that multiply the shares.

    ``by_sigmoid``: each share is a sigmoid, otherwise all are a softmax. ``has_preferences``: terms are added to the
    shares to choose experts. ``epsilon`` is added to the sum that normalises. ``scale`` multiplies the shares. Experts
    are chosen from the ``num_chosen_groups`` best of ``num_groups``, by the sum of a group's two highest shares.
    ``routes_in_fp32``: the router's products are not rounded to the model's dtype.

    Each token also goes through a shared MLP of ``shared_size``; 0 means none. ``gates_shared``: a sigmoid of one more
    projection multiplies the shared MLP's result.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalizes: bool
    has_bias: bool = False
    is_beside_mlp: bool = False
    by_sigmoid: bool = False
    routes_in_fp32: bool = False
    has_preferences: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    shared_size: int = 0
    gates_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """Parameters of a causal convolution, channel by channel, over a token and the ``num_taps`` - 1 before."""

    num_taps: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """Parameters that may differ between layers.

    ``rope`` is None if queries and keys are not rotated. ``window`` is the number of latest tokens that a token attends
    to, itself included; None means all. ``experts`` is None for one MLP. ``page`` and ``intermediate_size`` are the
    model's if None. ``keys_are_values``: values are the key projection before norm and rotation. ``reads`` is the
    number of an earlier layer whose KV this layer reads instead of its own.

    ``conv`` is a convolution instead of attention. Its pages hold the inputs of each token: the first half of the
    channels as keys, the other as values. Its ``window`` is the number of taps. ``delta`` is a gated delta net instead
    of attention, whose pages hold states. Its ``window`` is `STATE_WINDOW`. ``latent`` is attention over latents.

    ``has_mlp``: an MLP or experts follow. ``stored_as`` are the numbers of the mixer and of the MLP in files if they
    are layers of their own there.
    """

    rope: RopeConfig | None
    window: int | None = None
    experts: ExpertsConfig | None = None
    page: PageShape | None = None
    intermediate_size: int | None = None
    keys_are_values: bool = False
    reads: int | None = None
    conv: ShortConv | None = None
    delta: DeltaNet | None = None
    latent: Latent | None = None
    has_mlp: bool = True
    stored_as: tuple[int, int] | None = None

    @property
    def has_dense_mlp(self) -> bool:
        return self.has_mlp and (self.experts is None or self.experts.is_beside_mlp)

    @property
    def attends(self) -> bool:
        """Whether the layer has attention over keys and values."""
        return self.conv is None and self.delta is None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEmbedding:
    """Sizes of a table with an embedding of each token for each layer."""

    vocab_size: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The shape of a decoder, whatever computes its layers.

    ``architecture`` is transformers' class name. ``max_model_len`` is the longest context. ``dtype`` is the
    checkpoint's: "float32", "bfloat16" or "float16". ``is_gated``: an MLP multiplies its activation by another product.
    ``attention_scale`` multiplies attention scores; 0 means 1 / sqrt(head_dim). ``score_cap`` squeezes them into -cap
    ... cap. ``quantization`` is None for plain weights. ``embedding_by_layer`` is None if layers have no input but the
    hidden states.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_model_len: int
    dtype: str
    is_gated: bool = True
    attention_scale: float = 0.0
    score_cap: float | None = None
    quantization: Quantization | None = None
    embedding_by_layer: LayerEmbedding | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def scale(self) -> float:
        """Factor of attention scores."""
        return self.attention_scale or 1 / math.sqrt(self.head_dim)

    def page(self, layer: LayerConfig) -> PageShape:
        """Return the heads and width of the KV that a layer attends to."""
        return layer.page or PageShape(self.num_kv_heads, self.head_dim)

    def inner_size(self, layer: LayerConfig) -> int:
        """Return the size of a layer's dense MLP."""
        return layer.intermediate_size or self.intermediate_size

    @property
    def has_equal_layers(self) -> bool:
        """Whether each layer has the model's key-value heads, and KV and inputs of its own alone."""
        has_equal_kv = all(layer.page is None and layer.delta is None for layer in self.layers)
        return has_equal_kv and not self.reads_across_layers

    @property
    def has_states(self) -> bool:
        """Whether some layers have states instead of keys and values."""
        return any(layer.delta for layer in self.layers)

    @property
    def attention_pages(self) -> tuple[PageShape, ...]:
        """Different shapes of the pages of layers with attention."""
        return tuple(dict.fromkeys(self.page(layer) for layer in self.layers if layer.attends))

    @property
    def reads_across_layers(self) -> bool:
        """Whether some layers read the KV of others, or inputs that are not the hidden states."""
        return self.embedding_by_layer is not None or any(layer.reads is not None for layer in self.layers)

    @property
    def kv_layers(self) -> tuple[LayerConfig, ...]:
        """Layers with KV of their own, in order: the layers of the KV cache."""
        return tuple(layer for layer in self.layers if layer.reads is None)

    @property
    def masks_more(self) -> bool:
        """Whether attention has windows or capped scores."""
        has_window = any(layer.window is not None and layer.attends for layer in self.layers)
        return has_window or self.score_cap is not None

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """Distinct rotations of the layers in the order of their first layers; None for layers without rotation."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))

    @property
    def max_fixed_rope_tokens(self) -> int | None:
        """Longest prompt whose tokens' KV depends on the tokens before alone. None: no limit.

        In longer prompts, the KV depends on the prompt's length, too.
        """
        lengths = [rope.original_max_position_embeddings for rope in self.ropes if rope and rope.depends_on_length]
        return min(lengths, default=None)

    @property
    def num_parameters(self) -> int:
        """Number of weights that multiply a token: layers and vocabulary, without input embedding, biases and norms."""
        return self._num_weights(lambda experts: experts.num_per_token)

    @property
    def num_weights(self) -> int:
        """Number of weights in memory: `num_parameters` with all experts of each layer."""
        return self._num_weights(lambda experts: experts.num_experts)

    def _num_weights(self, num_experts: Callable[[ExpertsConfig], int]) -> int:
        num_matrices = 3 if self.is_gated else 2
        columns, others = self.vocab_size, 0
        for layer in self.layers:
            page = self.page(layer)
            num_projections = 0 if layer.reads is not None else 1 if layer.keys_are_values else 2
            if layer.conv is not None:
                columns += 4 * self.hidden_size
            elif layer.delta is not None:
                columns += layer.delta.num_channels + 2 * (layer.delta.num_values + layer.delta.num_value_heads)
            elif layer.latent is not None:
                others += layer.latent.num_weights(self.hidden_size, self.num_heads)
            else:
                columns += (2 * self.num_heads + num_projections * page.num_kv_heads) * page.head_dim
            if layer.has_dense_mlp:
                columns += num_matrices * self.inner_size(layer)
            if layer.experts is not None:
                experts = layer.experts
                size = num_experts(experts) * experts.intermediate_size + experts.shared_size
                columns += experts.num_experts + experts.gates_shared + num_matrices * size
        return self.hidden_size * columns + others

    def compute_dtype(self, dtype: str) -> str:
        """Return the dtype to compute in for the setting ``dtype``. "auto" is the checkpoint's. Raise ConfigError."""
        if dtype == "auto":
            return self.dtype
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype!r}: use auto, {' or '.join(DTYPES)}")
        return dtype

    def context(self, max_model_len: int | None) -> int:
        """Return the context to serve: ``max_model_len``, or the model's if None. Raise ConfigError if longer."""
        if max_model_len is not None and max_model_len > self.max_model_len:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but the model has a context of {self.max_model_len} tokens"
            )
        return max_model_len or self.max_model_len

    def kv_layout(self, *, dtype: str, block_size: int, frees_windows: bool = False) -> KvLayout:
        """Return the layout of this model's KV cache. ``dtype`` is as in `compute_dtype`.

        With ``frees_windows``, layers with a window free the KV outside it, or outside the widest window if they
        differ.
        """
        layers, whole = self.kv_layers, {PageShape(self.num_kv_heads, self.head_dim)}
        windows = {number: layer.window for number, layer in enumerate(layers) if layer.window and frees_windows}
        pages = tuple(
            self.page(layer) if layer.delta is None else layer.delta.page(block_size, self.compute_dtype(dtype))
            for layer in layers
        )
        return KvLayout(
            num_layers=len(layers),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=self.compute_dtype(dtype),
            window=max(windows.values(), default=0),
            windowed_layers=tuple(windows),
            pages=pages if set(pages) != whole or any(layer.latent for layer in layers) else (),
            has_states=self.has_states and frees_windows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderShape):
    """The complete description of a decoder-only transformer.

    ``rotary_dim`` is the rotated part of a head; 0 means all. ``interleaves_rotation``: pairs that rotate are
    neighbours, otherwise from the two halves of the rotated dims. ``activation_limit`` is a clamped activation's.
    ``has_sinks``: each head's softmax has one more score, without a value. ``norms_values``: values are normalised head
    by head, without weights. ``gates_attention``: a sigmoid of one more projection multiplies each head's result.
    ``scales_layers``: a factor of its own multiplies each layer's result.

    ``num_learned_positions`` is the number of position embeddings, which are added to the tokens' embeddings.
    ``num_guessing_layers`` are stored behind the model's layers and guess further tokens, which is not done here.
    ``transposes_weights``: files have linear layers as (inputs, outputs). ``residual_scale`` multiplies the results of
    attention and MLP before they are added.
    """

    norm: NormConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    norms_values: bool = False
    gates_attention: bool = False
    scales_layers: bool = False
    rotary_dim: int = 0
    interleaves_rotation: bool = False
    activation: Activation = Activation.SILU
    activation_limit: float = 0.0
    has_sinks: bool = False
    num_learned_positions: int = 0
    num_guessing_layers: int = 0
    transposes_weights: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    names: TensorNames = field(default_factory=TensorNames)

    @property
    def inner_sizes(self) -> frozenset[int]:
        """Sizes of the layers' MLPs, of one expert and of shared ones."""
        dense = {self.inner_size(layer) for layer in self.layers if layer.has_dense_mlp}
        experts = {layer.experts for layer in self.layers if layer.experts}
        shared = {each.shared_size for each in experts if each.shared_size}
        return frozenset(dense | shared | {each.intermediate_size for each in experts})

    @property
    def max_taps(self) -> int:
        """Largest number of taps of a layer's convolution; 0 without convolutions."""
        return max((layer.conv.num_taps for layer in self.layers if layer.conv), default=0)

    @property
    def mixes_by_torch(self) -> bool:
        """Whether torch computes a part of attention although kernels were compiled."""
        return any(layer.latent for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        return any(layer.experts for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class UndescribedModel(DecoderShape):
    """A decoder whose layers are transformers' own modules; see `pdmesh.engine.fallback`.

    Heads, windows, scale and caps are guesses until the modules are probed. ``is_wrapped``: the model is the text part
    of a vision-language model.
    """

    is_wrapped: bool = False

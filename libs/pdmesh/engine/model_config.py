"""What a decoder is made of, as data: what checkpoints are described by, and what the engine computes. Torch-free.

`pdmesh.engine.architectures` makes a `ModelConfig` of a checkpoint's ``config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pdmesh.errors import ConfigError
from pdmesh.model import KvLayout

DTYPES = ("float32", "bfloat16", "float16")


class QuantizedFormat(StrEnum):
    """How a weight is stored; see `pdmesh.engine.quantized`."""

    INT8 = "int8"  # compressed-tensors: a byte a value, scales of channels, groups or the whole
    PACKED = "packed"  # compressed-tensors: several values in 32 bits, along inputs
    FLOAT8 = "float8"  # scales of channels, or of the whole
    FLOAT8_BLOCKS = "float8 blocks"  # scales of blocks of outputs and inputs
    AWQ = "awq"
    GPTQ = "gptq"
    BITSANDBYTES_4 = "bitsandbytes 4 bits"  # numbers of a table of 16, blocks of values share a scale
    BITSANDBYTES_8 = "bitsandbytes 8 bits"
    MXFP4 = "mxfp4"  # gpt-oss's experts: values of 4 bits, 32 of which share a power of two
    GGUF = "gguf"  # a file of its own; each tensor has a type


_NO_INTEGERS = (QuantizedFormat.FLOAT8, QuantizedFormat.FLOAT8_BLOCKS, QuantizedFormat.BITSANDBYTES_4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How linear layers are stored, unless a layer has a plain weight."""

    format: QuantizedFormat
    bits: int = 8
    group_size: int | None = None  # inputs that share a scale; None: all
    has_zeros: bool = False
    zero_offset: int = 0  # what is added to stored zeros
    block: tuple[int, int] = (0, 0)  # outputs, inputs
    table: str = ""  # bitsandbytes': which numbers codes stand for
    has_nested_scales: bool = False  # bitsandbytes': scales are quantised, too
    interleaves_rotation: bool = False  # rows of queries and keys are stored as neighbours that rotate
    biases: frozenset[str] = frozenset()  # GGUF's: projections that have some: "qkv", "output", "mlp"
    has_codes: bool = True  # some tensor is quantised: of a GGUF file, all may be plain

    @property
    def has_integers(self) -> bool:
        """Whether weights are scaled integers: where they stay packed, sums are scaled, and no weight is rounded."""
        return self.format not in _NO_INTEGERS and self.has_codes


class RopeType(StrEnum):
    """How rotary frequencies follow from the base; see `pdmesh.engine.rope`."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; which fields matter depends on ``rope_type``."""

    rope_type: RopeType = RopeType.DEFAULT
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope; None: follows from factor and mscale
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope, of each frequency up to the original length
    long_factors: tuple[float, ...] = ()  # longrope, beyond it

    @property
    def depends_on_length(self) -> bool:
        """Whether a token is rotated by the length of its sequence, too."""
        return self.rope_type in (RopeType.DYNAMIC, RopeType.LONGROPE)


class NormKind(StrEnum):
    """How hidden states are normalised."""

    RMS = "rms"  # over the root of the mean square
    LAYER = "layer"  # mean taken away, over the deviation; weights may come with biases


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """All norms of a model."""

    epsilon: float
    kind: NormKind = NormKind.RMS
    offset: float = 0.0  # what is added to the checkpoint's weights
    in_float32: bool = False  # hidden states are multiplied by weights before they are rounded
    has_bias: bool = False


class QkNorm(StrEnum):
    """What queries and keys are normalised over before they are rotated."""

    NONE = "none"
    HEAD = "head"  # each head by itself
    ALL_HEADS = "all heads"  # all query heads together, all key heads together


class Activation(StrEnum):
    """What lies between the two products of an MLP; values are transformers' names."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU = "gelu"
    CLAMPED_SWISH = "clamped swish"  # gpt-oss's: of values up to a limit, and 1 is added to the other product


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Many MLPs instead of one, of which each token goes through a few."""

    num_experts: int
    num_per_token: int
    intermediate_size: int  # of each
    normalizes: bool  # the shares of a token's experts sum to 1
    has_bias: bool = False  # the router, and the experts' products


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer."""

    rope: RopeConfig | None  # None: queries and keys are not rotated
    window: int | None = None  # the latest tokens that a token attends to, itself among them; None: all
    experts: ExpertsConfig | None = None  # None: one MLP of the model's ``intermediate_size``


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Where a checkpoint keeps its weights: names behind the layer's prefix, without ``.weight``. None: it has none.

    One name for several projections: they lie there one after the other. ``renames`` are beginnings that names of a
    file may have, and what they are here.
    """

    renames: tuple[tuple[str, str], ...] = ()
    embedding: str = "model.embed_tokens"
    positions: str = ""
    layer: str = "model.layers.{}"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    input_norm: str | None = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    attention_output_norm: str | None = None  # before it is added to the residual stream
    mlp_norm: str | None = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_output_norm: str | None = None
    sinks: str = "self_attn.sinks"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")  # behind the expert's prefix
    expert_down: str = "down_proj"
    fuses_experts: bool = False  # a layer's experts are one tensor (experts, inputs, outputs)
    gates_first: bool = False  # gates of fused experts precede ups; else both alternate


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """What is known of a decoder whatever computes its layers."""

    architecture: str  # transformers' class name
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_model_len: int  # tokens that the model can attend to
    dtype: str  # of the checkpoint: "float32" | "bfloat16" | "float16"
    is_gated: bool = True  # the activation of one product times another one
    attention_scale: float = 0.0  # the factor of attention scores; 0: 1 / sqrt(head_dim)
    score_cap: float | None = None  # attention scores are squeezed into -cap ... cap
    quantization: Quantization | None = None  # None: weights are stored as they are

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return self.attention_scale or 1 / math.sqrt(self.head_dim)

    @property
    def masks_more(self) -> bool:
        """Whether attention is more than causal and scaled: windows, or capped scores."""
        return self.score_cap is not None or any(layer.window is not None for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The different rotations of layers, in the order in which they come first."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))

    @property
    def max_fixed_rope_tokens(self) -> int | None:
        """A token's KV depends on the tokens up to it; in prompts longer than this, on their length, too.

        None: never.
        """
        lengths = [rope.original_max_position_embeddings for rope in self.ropes if rope and rope.depends_on_length]
        return min(lengths, default=None)

    @property
    def num_parameters(self) -> int:
        """Weights that a token is multiplied with: layers and vocabulary, no input embedding, no biases and norms."""
        return self._num_weights(lambda experts: experts.num_per_token)

    @property
    def num_weights(self) -> int:
        """Weights that are held in memory: `num_parameters`, and experts that a token does not go through."""
        return self._num_weights(lambda experts: experts.num_experts)

    def _num_weights(self, num_experts: Callable[[ExpertsConfig], int]) -> int:
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        num_matrices = 3 if self.is_gated else 2
        columns = self.vocab_size
        for layer in self.layers:
            columns += attention
            if layer.experts is None:
                columns += num_matrices * self.intermediate_size
            else:
                each = num_matrices * layer.experts.intermediate_size
                columns += layer.experts.num_experts + num_experts(layer.experts) * each
        return self.hidden_size * columns

    def compute_dtype(self, dtype: str) -> str:
        """The dtype to compute in when ``dtype`` is asked for; "auto" is the checkpoint's."""
        if dtype == "auto":
            return self.dtype
        if dtype not in DTYPES:
            raise ConfigError(f"dtype is {dtype!r}: use auto, {' or '.join(DTYPES)}")
        return dtype

    def context(self, max_model_len: int | None) -> int:
        """Return the context length to serve: ``max_model_len``, or else the model's. Raises ConfigError."""
        if max_model_len is not None and max_model_len > self.max_model_len:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but the model has a context of {self.max_model_len} tokens"
            )
        return max_model_len or self.max_model_len

    def kv_layout(self, *, dtype: str, block_size: int, frees_windows: bool = False) -> KvLayout:
        """Layout of this model's KV cache; ``dtype`` as in `compute_dtype`.

        With ``frees_windows`` the KV of layers with a window is given up behind it: behind the widest, if they differ.
        """
        windows = {number: layer.window for number, layer in enumerate(self.layers) if layer.window and frees_windows}
        return KvLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=self.compute_dtype(dtype),
            window=max(windows.values(), default=0),
            windowed_layers=tuple(windows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderShape):
    """Shape and make-up of a decoder-only transformer: all that is needed to compute it."""

    norm: NormConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    rotary_dim: int = 0  # of a head, what is rotated; 0: all
    interleaves_rotation: bool = False  # neighbours are the pairs that are rotated, else the halves of the rotated dims
    activation: Activation = Activation.SILU
    activation_limit: float = 0.0  # of a clamped one
    has_sinks: bool = False  # each head's scores compete with one more, of no value
    num_learned_positions: int = 0  # embeddings of positions, which are added to those of tokens
    transposes_weights: bool = False  # matrices of linear layers lie in the file as (inputs, outputs)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    logit_cap: float | None = None
    names: TensorNames = TensorNames()

    @property
    def inner_sizes(self) -> frozenset[int]:
        """Sizes of the layers' MLPs."""
        return frozenset(
            layer.experts.intermediate_size if layer.experts else self.intermediate_size for layer in self.layers
        )

    @property
    def has_experts(self) -> bool:
        return any(layer.experts for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class UndescribedModel(DecoderShape):
    """A decoder whose layers are transformers' own modules; see `pdmesh.engine.fallback`.

    Heads, windows, scale and caps are guesses until the modules were asked.
    """

    is_wrapped: bool = False  # the text model of one that sees images, too

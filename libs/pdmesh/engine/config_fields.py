"""Typed access to a ``config.json``, and the fields that most architectures share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from pdmesh.engine.model_config import DTYPES, Activation, ExpertsConfig, LayerConfig, ModelConfig, NormConfig
from pdmesh.engine.rope_config import RopeConfig, RopeType
from pdmesh.engine.state_sizes import DeltaNet
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import PageShape

#: Bounds of counts in a file: no model has more layers, and nothing is allocated from a larger number.
MAX_LAYERS = 1024
_MAX_EXPERTS = 1024
#: Bounds of the number of heads and of their size, for the lists of reordered query and key rows.
_MAX_HEADS = _MAX_HEAD_DIM = 4096
_MAX_TAPS = 64
_MAX_CHANNELS = 1 << 20
#: Spellings of a ``time_step_limit`` that limits nothing.
NO_LIMITS = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])

_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object. A wrong value raises ConfigError that names ``where`` and the field. null means absent."""

    raw: Mapping[str, Any]
    where: str

    def integer(self, name: str, *, default: int | None = None, most: int | None = None) -> int:
        """Return a positive integer, ``most`` at most. Raise ConfigError for any other value."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{self.where}: {name} is {value!r}; it must be a positive integer")
        if most is not None and value > most:
            raise ConfigError(f"{self.where}: {name} is {value}; at most {most} are supported")
        return value

    def count(self, name: str, *, default: int, most: int | None = None) -> int:
        """Return an integer that may be zero, ``most`` at most. Raise ConfigError for any other value."""
        return 0 if self._value(name, default) == 0 else self.integer(name, default=default, most=most)

    def optional_integer(self, name: str, *, default: int | None = None, most: int | None = None) -> int | None:
        """Return a positive integer, ``most`` at most, or None if it is null, or absent without a default."""
        if name in self.raw and self.raw[name] is None:
            return None
        return None if name not in self.raw and default is None else self.integer(name, default=default, most=most)

    def number(self, name: str, *, default: float | None = None) -> float:
        """Return a positive, finite number: the field, or ``default`` if absent. Raises ConfigError without one."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ConfigError(f"{self.where}: {name} is {value!r}; it must be a positive number")
        return float(value)

    def optional_number(self, name: str, *, default: float | None = None) -> float | None:
        """Return a positive number, or None if the field is null, or absent without a default."""
        if name in self.raw and self.raw[name] is None:
            return None
        return None if name not in self.raw and default is None else self.number(name, default=default)

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} is {value!r}; it must be true or false")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Return a list of ``length`` positive numbers. Raise ConfigError for any other value."""
        values = self._value(name, None)
        if not isinstance(values, list) or len(values) != length:
            raise ConfigError(f"{self.where}: {name} must be a list of {length} numbers")
        return tuple(Fields({name: value}, self.where).number(name) for value in values)

    def choice(self, name: str, choices: type[_Choice], *, default: _Choice) -> _Choice:
        """Return the member of ``choices`` with the field's value. Raise ConfigError if none has it."""
        value = self._value(name, default.value)
        if value not in [choice.value for choice in choices]:
            served = " and ".join(repr(choice.value) for choice in choices)
            raise ConfigError(f"{self.where}: {name} is {value!r}; supported are {served}")
        return choices(value)

    def part(self, name: str) -> Fields | None:
        """Return the object in this field; None if it is absent. Raise ConfigError for any other value."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {name} is {value!r}; it must be an object")
        return None if value is None else Fields(value, f"{self.where}: {name}")

    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", most=MAX_LAYERS)

    def layer_flags(self, name: str, meanings: Mapping[Any, bool], num_layers: int) -> tuple[bool, ...] | None:
        """Return the meaning of each layer's value in a list; None if there is no list.

        Raise ConfigError unless the list has one of the ``meanings`` for each layer.
        """
        values = self.raw.get(name)
        if values is None:
            return None
        known = isinstance(values, list) and all(isinstance(value, int | str) for value in values)
        if not known or len(values) != num_layers or not set(values) <= set(meanings):
            served = " and ".join(map(str, meanings))
            raise ConfigError(f"{self.where}: {name} must say one of {served} for each of {num_layers} layers")
        return tuple(meanings[value] for value in values)

    def error(self, what: str) -> ConfigError:
        """Return an error about this object."""
        return ConfigError(f"{self.where}: {what}")

    def _value(self, name: str, default: object) -> object:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing")
        return value


def dense(
    fields: Fields,
    architecture: str,
    *,
    head_dim: int | None = None,
    max_position_embeddings: int = 2048,
    epsilon: float = 1e-6,
    theta: float = 10_000.0,
    tied: bool = False,
    partial: float = 1.0,
    biases: Sequence[str] = (),
) -> ModelConfig:
    """Describe a Llama with these fields. Other dense models are described by their differences.

    Arguments are defaults of absent fields, as in transformers' configuration class. ``partial`` is the default of
    ``partial_rotary_factor``. ``biases`` names the boolean fields that are read: "attention_bias", "mlp_bias". Raise
    ConfigError for fields that are missing, malformed or not served.
    """
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    num_kv_heads, head_dim = _page_of(fields, num_heads, num_heads, head_dim or max(1, hidden_size // num_heads))
    max_position_embeddings = fields.integer("max_position_embeddings", default=max_position_embeddings)
    rotary_dim = _rotary_dim(fields, head_dim, partial)
    rope = rope_of(fields, max_position_embeddings, theta=theta, rotary_dim=rotary_dim)
    has_bias = {name: name in biases and fields.boolean(name) for name in ("attention_bias", "mlp_bias")}
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(LayerConfig(rope=rope),) * fields.num_layers(),
        norm=NormConfig(epsilon=fields.number("rms_norm_eps", default=epsilon)),
        max_position_embeddings=max_position_embeddings,
        max_model_len=_max_model_len(rope, max_position_embeddings),
        dtype=dtype_of(fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=tied),
        qkv_bias=has_bias["attention_bias"],
        output_bias=has_bias["attention_bias"],
        mlp_bias=has_bias["mlp_bias"],
        rotary_dim=rotary_dim,
        activation=fields.choice("hidden_act", Activation, default=Activation.SILU),
    )


def page_of(fields: Fields, config: ModelConfig) -> PageShape:
    """Return the heads of a layer's KV, by default the model's."""
    return _page_of(fields, config.num_heads, config.num_kv_heads, config.head_dim)


def _page_of(fields: Fields, num_heads: int, num_kv_heads: int, head_dim: int) -> PageShape:
    """Return the key-value heads and their width. ``num_kv_heads`` and ``head_dim`` are defaults of absent fields."""
    num_kv_heads = fields.integer("num_key_value_heads", default=num_kv_heads)
    if num_heads % num_kv_heads:
        raise fields.error(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    head_dim = fields.integer("head_dim", default=head_dim)
    if head_dim % 2:
        raise fields.error(f"head_dim is {head_dim}; rotary embeddings need an even one")
    if num_heads > _MAX_HEADS or head_dim > _MAX_HEAD_DIM:
        raise fields.error(
            f"there are {num_heads} attention heads of {head_dim}; at most {_MAX_HEADS} of {_MAX_HEAD_DIM} are "
            "supported"
        )
    return PageShape(num_kv_heads, head_dim)


def experts_of(fields: Fields, *, intermediate_size: str, normalizes: bool) -> ExpertsConfig:
    """Return the experts of a layer. ``intermediate_size`` names the field with one expert's size."""
    number = "num_local_experts" if "num_local_experts" in fields.raw else "num_experts"
    num_experts, num_per_token = fields.integer(number), fields.integer("num_experts_per_tok")
    if num_experts > _MAX_EXPERTS or num_per_token > num_experts:
        raise fields.error(
            f"{number} is {num_experts} and num_experts_per_tok is {num_per_token}; at most {_MAX_EXPERTS} "
            "experts are supported, and no more of them per token than there are"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=num_per_token,
        intermediate_size=fields.integer(intermediate_size),
        normalizes=normalizes,
    )


def gated_experts_of(fields: Fields, *, normalizes: bool) -> ExpertsConfig:
    """Return the experts of a layer with a shared one, which a sigmoid gates."""
    experts = experts_of(fields, intermediate_size="moe_intermediate_size", normalizes=normalizes)
    return replace(experts, shared_size=fields.integer("shared_expert_intermediate_size"), gates_shared=True)


def sigmoid_experts_of(fields: Fields, *, num_groups: int) -> ExpertsConfig:
    """Return the experts of a layer as in DeepSeek V3, beside a shared one. ``num_groups`` is a default."""
    raw = {**fields.raw, "num_local_experts": fields.raw.get("n_routed_experts")}
    fields = Fields(raw, fields.where)
    normalizes = fields.boolean("norm_topk_prob", default=True)
    experts = replace(
        experts_of(fields, intermediate_size="moe_intermediate_size", normalizes=normalizes),
        by_sigmoid=True,
        routes_in_fp32=True,
        has_preferences=True,
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", default=1.0),
        num_groups=fields.integer("n_group", default=num_groups),
        num_chosen_groups=fields.integer("topk_group", default=1),
    )
    size = experts.num_experts // experts.num_groups
    num_experts = experts.num_chosen_groups * size
    is_small = experts.num_groups > 1 and size < 2
    if experts.num_experts % experts.num_groups or num_experts < experts.num_per_token or is_small:
        raise fields.error(
            f"n_group is {experts.num_groups} and topk_group is {experts.num_chosen_groups}; groups must have equal "
            f"sizes of 2 or more, and the chosen ones {experts.num_per_token} experts of {experts.num_experts}"
        )
    return replace(experts, shared_size=experts.intermediate_size * fields.count("n_shared_experts", default=1))


def delta_net_of(fields: Fields) -> DeltaNet:
    """Return the gated delta net of the layers that have one."""
    delta = DeltaNet(
        num_key_heads=fields.integer("linear_num_key_heads", default=16),
        num_value_heads=fields.integer("linear_num_value_heads", default=32),
        key_dim=fields.integer("linear_key_head_dim", default=128),
        value_dim=fields.integer("linear_value_head_dim", default=128),
        num_taps=fields.integer("linear_conv_kernel_dim", default=4),
    )
    return check_delta_net(fields, delta)


def check_delta_net(fields: Fields, delta: DeltaNet) -> DeltaNet:
    """Return a delta net's sizes. Raise ConfigError if they are not served."""
    sizes = (delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim)
    if max(sizes) > _MAX_HEADS or delta.num_value_heads % delta.num_key_heads or delta.num_taps > _MAX_TAPS:
        raise fields.error(
            f"a delta net has {delta.num_key_heads} and {delta.num_value_heads} heads of {delta.key_dim} and "
            f"{delta.value_dim} and {delta.num_taps} taps; served are multiples of heads, at most {_MAX_HEADS} of each "
            f"and {_MAX_TAPS} taps"
        )
    if delta.num_channels > _MAX_CHANNELS:
        raise fields.error(f"a convolution has {delta.num_channels} channels; at most {_MAX_CHANNELS} are supported")
    if delta.key_dim & (delta.key_dim - 1):
        raise fields.error(f"a state has {delta.key_dim} values a key; it must be a power of two")
    return delta


def windowed(config: ModelConfig, window: int | None, windows: Sequence[bool] = ()) -> tuple[LayerConfig, ...]:
    """Return the layers, with ``window`` in the layers that ``windows`` marks. An empty ``windows`` marks all.

    A window as long as the model's context is omitted.
    """
    if window is None or window >= config.max_model_len:
        return config.layers
    marked = zip(config.layers, windows or [True] * config.num_layers, strict=True)
    return tuple(replace(layer, window=window if has_window else None) for layer, has_window in marked)


def listed_windows(fields: Fields, num_layers: int, unlisted: Callable[[int], bool]) -> Sequence[bool]:
    """Return whether each layer has a window: by ``layer_types``, or else by ``unlisted(layer_number)``."""
    listed = fields.layer_flags("layer_types", {"full_attention": False, "sliding_attention": True}, num_layers)
    return listed or [unlisted(number) for number in range(num_layers)]


def with_layered_ropes(
    fields: Fields, config: ModelConfig, windows: Sequence[bool], *, theta: float, local_theta: float | None
) -> ModelConfig:
    """Return the model with one rotation for the layers that ``windows`` marks, and another for the rest.

    ``rope_parameters`` has an entry for each (transformers 5). Older files scale only the layers without a window, with
    base ``rope_theta``. The other layers' base is ``rope_local_base_freq``, by default ``local_theta``; None means
    ``rope_theta``.
    """
    nested = fields.part("rope_parameters")
    found = [nested.part(name) if nested is not None else None for name in ("sliding_attention", "full_attention")]
    theta = fields.number("rope_theta", default=theta)
    thetas = (fields.number("rope_local_base_freq", default=local_theta or theta), theta)
    scaled = (None, fields.part("rope_scaling"))
    length = config.max_position_embeddings
    sliding, full = (
        rope_parameters(
            part := own or before or Fields({}, fields.where),
            length,
            theta=part.number("rope_theta", default=base),
            original=part.integer("original_max_position_embeddings", default=length),
            rotary_dim=config.rotary_dim,
        )
        for own, before, base in zip(found, scaled, thetas, strict=True)
    )
    marked = zip(config.layers, windows, strict=True)
    layers = [replace(layer, rope=sliding if has_window else full) for layer, has_window in marked]
    return replace(config, layers=tuple(layers))


def dtype_of(fields: Fields) -> str:
    """Return the dtype of the checkpoint's weights; float32 if absent. Raise ConfigError for one that is not served."""
    dtype = fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"{fields.where}: dtype is {dtype!r}; supported are {', '.join(DTYPES)}")
    return str(dtype)


def rope_of(fields: Fields, max_position_embeddings: int, *, theta: float, rotary_dim: int) -> RopeConfig:
    """Read the rotation: ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (before).

    Raise ConfigError if it is malformed or not served.
    """
    raw = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{fields.where}: the RoPE parameters are {raw!r}; they must be an object")
    rope = Fields(raw, f"{fields.where}: RoPE parameters")
    # In transformers a top-level value has precedence, then the value beside the factor, then the context length.
    original = fields.integer(
        "original_max_position_embeddings",
        default=rope.integer("original_max_position_embeddings", default=max_position_embeddings),
    )
    theta = rope.number("rope_theta", default=fields.number("rope_theta", default=theta))
    return rope_parameters(rope, max_position_embeddings, theta=theta, original=original, rotary_dim=rotary_dim)


def rope_parameters(
    rope: Fields, max_position_embeddings: int, *, theta: float, original: int, rotary_dim: int
) -> RopeConfig:
    """Return the rotation that one object describes. ``original`` is the context length before scaling.

    Raise ConfigError if the scaling is malformed or not served.
    """
    name = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if name == "su":
        name = "longrope"
    if not isinstance(name, str) or name not in {rope_type.value for rope_type in RopeType}:
        served = ", ".join(rope_type.value for rope_type in RopeType)
        raise ConfigError(f"{rope.where}: RoPE scaling {name!r} is not supported; use one of {served}")
    rope_type = RopeType(name)
    match rope_type:
        case RopeType.DEFAULT:
            return RopeConfig(theta=theta)
        case RopeType.LINEAR | RopeType.DYNAMIC:
            return RopeConfig(
                rope_type=rope_type,
                theta=theta,
                factor=rope.number("factor"),
                original_max_position_embeddings=max_position_embeddings,
            )
        case RopeType.LLAMA3:
            return RopeConfig(
                rope_type=rope_type,
                theta=theta,
                factor=rope.number("factor"),
                original_max_position_embeddings=original,
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
            )
        case RopeType.PROPORTIONAL:
            share = rope.number("partial_rotary_factor", default=1.0)
            if share > 1:
                raise rope.error(f"partial_rotary_factor is {share}; at most 1 is supported")
            return RopeConfig(
                rope_type=rope_type, theta=theta, factor=rope.number("factor", default=1.0), rotated_share=share
            )
        case RopeType.YARN:
            return RopeConfig(
                rope_type=rope_type,
                theta=theta,
                factor=rope.number("factor", default=max_position_embeddings / original),
                original_max_position_embeddings=original,
                attention_factor=rope.optional_number("attention_factor"),
                beta_fast=rope.number("beta_fast", default=32.0),
                beta_slow=rope.number("beta_slow", default=1.0),
                mscale=rope.optional_number("mscale"),
                mscale_all_dim=rope.optional_number("mscale_all_dim"),
                truncate=rope.boolean("truncate", default=True),
            )
        case RopeType.LONGROPE:
            return RopeConfig(
                rope_type=rope_type,
                theta=theta,
                factor=rope.number("factor", default=max_position_embeddings / original),
                original_max_position_embeddings=original,
                attention_factor=rope.optional_number("attention_factor"),
                short_factors=rope.numbers("short_factor", rotary_dim // 2),
                long_factors=rope.numbers("long_factor", rotary_dim // 2),
            )


def _rotary_dim(fields: Fields, head_dim: int, partial: float) -> int:
    """Return the number of rotated dims of a head. Raise ConfigError unless it is even and above 0."""
    rope = fields.raw.get("rope_parameters")
    for scope in (rope if isinstance(rope, Mapping) else {}, fields.raw):
        if scope.get("partial_rotary_factor") is not None:
            partial = Fields(scope, fields.where).number("partial_rotary_factor")
            break
    rotary_dim = int(head_dim * partial) if partial <= 1 else 0
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ConfigError(
            f"{fields.where}: partial_rotary_factor is {partial}; it must make an even part of the {head_dim} of a head"
        )
    return rotary_dim


def _max_model_len(rope: RopeConfig, max_position_embeddings: int) -> int:
    """Return the context as RoPE scaling stretches it, as in vLLM. For llama3 and longrope it is stretched already."""
    match rope.rope_type:
        case RopeType.DEFAULT | RopeType.LLAMA3 | RopeType.LONGROPE | RopeType.PROPORTIONAL:
            return max_position_embeddings
        case RopeType.LINEAR | RopeType.DYNAMIC:
            return int(max_position_embeddings * rope.factor)
        case RopeType.YARN:
            return int(rope.original_max_position_embeddings * rope.factor)

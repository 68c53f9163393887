"""gpt-oss: experts with biases, heads with sinks, windows in every second layer."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense, experts_of, listed_windows, windowed
from pdmesh.engine.model_config import Activation, ModelConfig
from pdmesh.engine.tensor_names import TensorNames

_NAME = "GptOssForCausalLM"
_ALPHA = 1.702


def _describe(fields: Fields) -> ModelConfig:
    config = dense(fields, _NAME, head_dim=64, max_position_embeddings=131072, epsilon=1e-5, theta=150_000.0)
    if (alpha := fields.number("swiglu_alpha", default=_ALPHA)) != _ALPHA:
        raise fields.error(f"swiglu_alpha is {alpha}; only {_ALPHA} is supported")
    window = fields.optional_integer("sliding_window", default=128)
    windows = listed_windows(fields, config.num_layers, lambda number: number % 2 == 0)
    experts = replace(experts_of(fields, intermediate_size="intermediate_size", normalizes=True), has_bias=True)
    has_bias = fields.boolean("attention_bias", default=True)
    return replace(
        config,
        layers=tuple(replace(layer, experts=experts) for layer in windowed(config, window, windows)),
        qkv_bias=has_bias,
        output_bias=has_bias,
        has_sinks=True,
        activation=Activation.CLAMPED_SWISH,
        activation_limit=fields.number("swiglu_limit", default=7.0),
        names=TensorNames(router="mlp.router", expert_gate_up=("gate_up_proj",), fuses_experts=True),
    )


ARCHITECTURE = Architecture(_NAME, "gpt_oss", _describe)

"""StarCoder2: layer norms with biases, biases everywhere, and an MLP without gates."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.engine.architectures.description import Architecture
from pdmesh.engine.config_fields import Fields, dense, windowed
from pdmesh.engine.model_config import Activation, ModelConfig, NormConfig, NormKind
from pdmesh.engine.tensor_names import TensorNames

_NAME = "Starcoder2ForCausalLM"


def _describe(fields: Fields) -> ModelConfig:
    config = dense(fields, _NAME, max_position_embeddings=4096, tied=True)
    has_biases = fields.boolean("use_bias", default=True)
    return replace(
        config,
        layers=windowed(config, fields.optional_integer("sliding_window")),
        norm=NormConfig(epsilon=fields.number("norm_epsilon", default=1e-5), kind=NormKind.LAYER, has_bias=True),
        activation=fields.choice("hidden_act", Activation, default=Activation.GELU_TANH),
        is_gated=False,
        qkv_bias=has_biases,
        output_bias=has_biases,
        mlp_bias=has_biases,
        names=TensorNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
    )


ARCHITECTURE = Architecture(_NAME, "starcoder2", _describe)

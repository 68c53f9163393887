"""Small random checkpoints of any architecture, made and saved by transformers itself, which is imported late.

A model has odd sizes and, where its architecture allows them, windows shorter than the tests' prompts. Weights are
drawn as in `pdmesh_testing.checkpoints`, so that greedy output wanders over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdmesh.engine.architectures import architectures, undescribed_architectures
from pdmesh.engine.architectures.description import Architecture
from pdmesh_testing.tokenizers import write_tokenizer

#: Of every architecture, unless its options say otherwise.
_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
_GAIN, _LOGITS_STD = 1.5, 3.0

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
    "long_factor": [1.5 + 0.7 * pair for pair in range(6)],
    # Passed while 75 + 12 tokens are computed.
    "original_max_position_embeddings": 80,
    "partial_rotary_factor": 0.75,
}

_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40, "mscale": 1.0,
}  # fmt: skip

#: Beyond each architecture's defaults: fields of its configuration.
_MULTIPLIERS = {
    "embedding_multiplier": 1.7, "logits_scaling": 0.8, "residual_multiplier": 0.6, "attention_multiplier": 0.2,
}  # fmt: skip
_GRANITE = {**_MULTIPLIERS, "attention_bias": True, "mlp_bias": True}

#: Layers of Gemma 4, whose last has no window.
_GEMMA4_LAYERS = {
    "num_hidden_layers": 6, "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_GEMMA4_WIDE = {
    **_GEMMA4_LAYERS, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip

_VARIANTS: dict[str, list[dict[str, Any]]] = {
    "deepseek_v3": [
        {"n_group": 3, "topk_group": 2, "n_routed_experts": 9, "rope_parameters": {**_YARN, "mscale_all_dim": 0.7}},
        {"q_lora_rank": None, "first_k_dense_replace": 3},
    ],
    "gemma": [{"head_dim": 16}],
    "gemma2": [
        {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
        {"head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0},
    ],
    "gemma3_text": [{"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24, "num_hidden_layers": 7}],
    "gemma4_text": [
        {
            **_GEMMA4_WIDE,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
        _GEMMA4_WIDE,
        {**_GEMMA4_LAYERS, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    ],
    "gemma4_unified_text": [_GEMMA4_WIDE],
    "glm": [{"head_dim": 16, "attention_bias": False}],
    "glm4_moe": [{"use_qk_norm": True, "attention_bias": True}],
    "glm4": [{"head_dim": 16}],
    "granite": [_GRANITE],
    "granitemoehybrid": [
        {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 5, "mamba_n_groups": 2, **_MULTIPLIERS},
        {"layer_types": ["mamba", "mamba", "attention", "mamba"], "position_embedding_type": "rope"},
    ],
    "minimax_m2": [{"rotary_dim": 8, "num_local_experts": 5}],
    "ministral": [
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 24},
    ],
    "gpt_oss": [
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "head_dim": 16,
            "swiglu_limit": 1.5,
            "tie_word_embeddings": True,
        }
    ],
    "lfm2": [
        {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_bias": True, "block_multiple_of": 16},
        {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False},
        {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 2, "block_auto_adjust_ff_dim": False},
    ],
    "lfm2_moe": [
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        }
    ],
    "mixtral": [{"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24}],
    "nemotron_h": [
        {
            "layers_block_type": [
                "linear_attention",
                "linear_attention",
                "moe",
                "full_attention",
                "mlp",
                "linear_attention",
            ],
            "n_group": 3,
            "topk_group": 2,
        }
    ],
    "olmoe": [{"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True}],
    "qwen3_moe": [
        {
            "num_experts": 9,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "head_dim": 24,
        },
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "decoder_sparse_step": 2},
    ],
    "olmo2": [{"attention_bias": True}],
    "olmo3": [{"sliding_window": 24}],
    "qwen3_5_text": [
        {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 1, "attention_bias": True}
    ],
    "qwen3_5_moe_text": [{"layer_types": ["linear_attention", "full_attention"] * 2}],
    "qwen3_next": [{"layer_types": ["linear_attention", "full_attention"] * 2, "mlp_only_layers": [1]}],
    "smollm3": [{"no_rope_layers": [1, 0, 1, 1], "use_sliding_window": True, "sliding_window": 24}],
    "starcoder2": [{"use_bias": False}, {"sliding_window": 24}],
    "mistral": [{"sliding_window": 24}, {"head_dim": 24, "sliding_window": None, "tie_word_embeddings": True}],
    "phi3": [
        {"sliding_window": 24, "num_key_value_heads": 4},
        {
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 80,
            "max_position_embeddings": 320,
            "tie_word_embeddings": True,
        },
    ],
    "cohere": [{"use_qk_norm": True, "logit_scale": 0.7}],
    "cohere2": [{"sliding_window": 24}],
    "exaone4": [{"sliding_window": 24}],
    "gpt_neox": [{"use_parallel_residual": False, "attention_bias": False}],
    "granitemoe": [{**_GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2}],
    "opt": [{"word_embed_proj_dim": 32, "ffn_dim": 96}],
    "vaultgemma": [{"head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 2.0}],
    "qwen2": [{"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}],
    "qwen3": [{"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "head_dim": 16}],
}

_DELTA_NET = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip
_GATED_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24,
}  # fmt: skip

_SIGMOID_EXPERTS = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    **_SIGMOID_EXPERTS, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 24, "num_key_value_heads": 4,
}  # fmt: skip

#: What an architecture's configuration class cannot do without.
_NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_LATENT, "n_group": 2, "topk_group": 1},
    "glm4_moe": {**_SIGMOID_EXPERTS, "head_dim": 16},
    "glm4_moe_lite": _LATENT,
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 48,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
    },
    "gemma4_unified_text": {"head_dim": 16, "global_head_dim": 32},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 48,
        "num_local_experts": 0,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "attention_multiplier": 0.25,
    },
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_experts": 5},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, **_GATED_EXPERTS},
    "qwen3_next": {**_DELTA_NET, **_GATED_EXPERTS},
    "ministral": {"head_dim": 24},
    # Steps of prompts have a lower limit in transformers, but not in other implementations or steps of decodes.
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "routed_scaling_factor": 1.5,
        "moe_shared_expert_intermediate_size": 24,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "time_step_min": 1e-9,
        "time_step_floor": 1e-9,
    },
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16},
}


#: The part of a model that sees images, as small as its class allows.
_GEMMA4_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
_QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [], "fullatt_block_indexes": [0],
}  # fmt: skip
_VISION: dict[str, dict[str, Any]] = {
    "Gemma4ForConditionalGeneration": {"model_type": "gemma4_vision", **_GEMMA4_VISION},
    "Mistral3ForConditionalGeneration": {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    },
    "Qwen2_5_VLForConditionalGeneration": _QWEN_VISION,
    "Qwen3_5ForConditionalGeneration": _QWEN_VISION,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_VISION,
    "Qwen3VLForConditionalGeneration": _QWEN_VISION,
    "Qwen3VLMoeForConditionalGeneration": _QWEN_VISION,
}  # fmt: skip


def model_variants() -> dict[str, list[dict[str, Any]]]:
    """Options of models of each architecture that is described, the most particular first, its defaults last."""
    return _variants_of(architectures())


def undescribed_variants() -> dict[str, list[dict[str, Any]]]:
    """The same of each one that transformers' own modules compute."""
    return _variants_of(undescribed_architectures())


def _variants_of(served: Mapping[str, Architecture]) -> dict[str, list[dict[str, Any]]]:
    return {
        architecture.model_type: [
            {**_NEEDED.get(architecture.model_type, {}), **options}
            for options in [*_VARIANTS.get(architecture.model_type, []), {}]
        ]
        for architecture in served.values()
    }


def transformers_config(model_type: str, **options: Any) -> Any:
    """Return the configuration of a small model, transformers' own; ``options`` are its fields."""
    import transformers

    hf: Any = transformers
    return hf.AutoConfig.for_model(model_type, **{**_SHAPE, **options})


def write_transformers_checkpoint(
    directory: Path, model_type: str, *, seed: int = 0, sharded: bool = False, dtype: str = "float32", **options: Any
) -> Path:
    """Write a whole model directory and return it; ``options`` are fields of the architecture's configuration."""
    import torch
    import transformers

    hf: Any = transformers
    hf.logging.disable_progress_bar()
    config = transformers_config(model_type, **options)
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _save(model, directory, config.vocab_size, seed, dtype, "64KB" if sharded else "5GB")
    write_tokenizer(directory, vocab_size=config.vocab_size, model_max_length=config.max_position_embeddings)
    return directory


def write_wrapped_checkpoint(directory: Path, class_name: str, *, seed: int = 0, **text: Any) -> Path:
    """Write a model that sees images, too, by transformers' class of it; ``text`` are fields of its text model."""
    import torch
    import transformers

    hf: Any = transformers
    hf.logging.disable_progress_bar()
    kind = getattr(hf, class_name)
    shape = {**_SHAPE, **text}
    config = kind.config_class(text_config=shape, vision_config=_VISION[class_name], tie_word_embeddings=False)
    torch.manual_seed(seed)
    model = kind._from_config(config, dtype=torch.float32)
    _save(model, directory, shape["vocab_size"], seed, "float32", "5GB")
    write_tokenizer(directory, vocab_size=shape["vocab_size"], model_max_length=shape["max_position_embeddings"])
    return directory


def _save(model: Any, directory: Path, vocab_size: int, seed: int, dtype: str, shard_size: str) -> None:
    """Draw a model's weights, and save it."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            noise = torch.empty_like(parameter).normal_(generator=generator)
            if name.endswith(".sinks"):
                # Transformers leaves these and some biases uninitialized.
                parameter.copy_(noise)
            elif name.endswith(".bias"):
                parameter.copy_(noise * 0.3)
            elif parameter.dim() == 1:
                parameter.add_(noise, alpha=0.1)
            else:
                deviation = _LOGITS_STD if parameter.shape[0] == vocab_size else _GAIN
                parameter.copy_(noise * (deviation / parameter.shape[-1] ** 0.5))
        for name, buffer in model.named_buffers():
            if name.endswith((".layer_scalar", ".expert_bias", ".e_score_correction_bias")):
                buffer.add_(torch.empty_like(buffer).normal_(generator=generator), alpha=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=shard_size)

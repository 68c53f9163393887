"""GGUF's architectures: transformers' class of each, and the fields of its ``config.json``. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdmesh.engine.gguf.gguf_model import GgufModel, are_positive
from pdmesh.engine.gguf.gguf_names import (
    GATE_UP,
    GEMMA4,
    LATENT,
    LFM2,
    MAMBA,
    NORMS_AROUND,
    PREFERENCES,
    QWEN35,
    shared_expert,
)
from pdmesh.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFields:
    """Fields of a model with experts in ``config.json``. ``number`` is the field of the number of experts.

    ``reads``: fields of the file that the architecture's ``more`` returns. Other architectures are refused with them.
    """

    class_name: str
    number: str = "num_experts"
    normalizes: bool = True
    reads: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """A GGUF architecture and its counterpart in transformers.

    ``class_name`` is transformers' name, empty if the architecture always has experts. ``interleaves_rotation``: the
    file's rows are ordered so that neighbours rotate together. ``tiles_heads``: the value heads of delta nets are
    ordered so that each key head serves every n-th one. ``more`` returns fields beyond a Llama's.

    ``names`` maps names of tensors in a layer to the file's names where these differ from a Llama's. Both lack their
    ending, unless the name here is of neither a weight nor a bias. An expert's or a head's number is left out: the file
    has one tensor for all. ``divides`` returns fields of `pdmesh.engine.tensor_names.TensorNames` with other values
    than in transformers, because the file has parts of a tensor.
    """

    class_name: str = ""
    interleaves_rotation: bool = False
    tiles_heads: bool = False
    rotates_partly: bool = False
    more: Callable[[GgufModel], dict[str, Any]] = lambda _: {}
    experts: ExpertFields | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    divides: Callable[[GgufModel], dict[str, Any]] = lambda _: {}


#: Value of ``expert_gating_func``: each share is a sigmoid.
_SIGMOID = 2
#: Smallest divisor of a frequency that stops a rotation.
_STILL = 1e30


def _gemma2(model: GgufModel) -> dict[str, Any]:
    return {
        **model.windows(period=2, default=4096),
        "attn_logit_softcapping": model.of("attn_logit_softcapping") or 50.0,
        "final_logit_softcapping": model.of("final_logit_softcapping") or 30.0,
        "query_pre_attn_scalar": _query_scalar(model, num_layers_27b=46),
    }


def _gemma3(model: GgufModel) -> dict[str, Any]:
    return {
        **model.windows(period=6),
        "final_logit_softcapping": model.of("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(model, num_layers_27b=62),
        **_ropes(model, of_windows=model.of("rope.freq_base_swa") or 10_000.0),
    }


def _query_scalar(model: GgufModel, *, num_layers_27b: int) -> Any:
    """Return the number whose root divides attention scores. No file states it, and the 27B model has another one."""
    hidden_size, num_heads = model.of("embedding_length"), model.of("attention.head_count")
    if model.of("block_count") == num_layers_27b and are_positive(hidden_size, num_heads):
        return hidden_size // num_heads
    return model.head_dim


def _ropes(model: GgufModel, *, of_windows: float) -> dict[str, Any]:
    """Return the RoPE parameters of both kinds of layers. Layers with a window have their own base, without scaling."""
    local = {"rope_type": "default", "rope_theta": of_windows}
    return {"rope_parameters": {"full_attention": model.rope(), "sliding_attention": local}}


def _olmo2(model: GgufModel) -> dict[str, Any]:
    if not model.of("attention.sliding_window"):
        return {}
    rope = _ropes(model, of_windows=model.of("rope.freq_base") or 10_000.0)
    return {"architectures": ["Olmo3ForCausalLM"], **model.windows(period=4), **rope}


def _phi3(model: GgufModel) -> dict[str, Any]:
    return {"sliding_window": model.of("attention.sliding_window") or None}


def _granite(model: GgufModel) -> dict[str, Any]:
    scale, head_dim = model.of("attention.scale"), model.head_dim
    return {
        "attention_multiplier": scale or (head_dim**-0.5 if are_positive(head_dim) else None),
        "embedding_multiplier": model.of("embedding_scale") or 1.0,
        "residual_multiplier": model.of("residual_scale") or 1.0,
        "logits_scaling": model.of("logit_scale") or 1.0,
    }


def _starcoder2(model: GgufModel) -> dict[str, Any]:
    epsilon = model.of("attention.layer_norm_epsilon")
    return {"norm_epsilon": epsilon, "sliding_window": None}


def _lfm2(model: GgufModel) -> dict[str, Any]:
    """Return the fields of LFM2 alone. Layers with key-value heads attend; the others are convolutions."""
    listed = model.listed("attention.head_count_kv")
    fields = {
        "norm_eps": model.of("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": model.of("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }
    if not listed:
        return fields
    kinds = ["full_attention" if number else "conv" for number in listed]
    return {**fields, "num_key_value_heads": max(listed), "layer_types": kinds}


def _lfm2_moe(model: GgufModel) -> dict[str, Any]:
    return {
        **_lfm2(model),
        "num_dense_layers": model.of("leading_dense_block_count"),
        "use_expert_bias": model.has_tensor(PREFERENCES),
        "routed_scaling_factor": model.of("expert_weights_scale") or 1.0,
    }


def _qwen35(model: GgufModel) -> dict[str, Any]:
    num_heads, size = model.of("ssm.time_step_rank"), model.of("ssm.inner_size")
    fields = {
        "linear_num_key_heads": model.of("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": model.of("ssm.state_size"),
        "linear_value_head_dim": size // num_heads if are_positive(size, num_heads) else None,
        "linear_conv_kernel_dim": model.of("ssm.conv_kernel"),
        "shared_expert_intermediate_size": model.of("expert_shared_feed_forward_length"),
    }
    are_linear = model.has_by_layer("ssm_a")
    kinds = ["linear_attention" if linear else "full_attention" for linear in are_linear]
    return {**fields, "layer_types": kinds or None}


def _glm4_moe(model: GgufModel) -> dict[str, Any]:
    normalizes = model.of("expert_weights_norm")
    return {
        "use_qk_norm": model.has_tensor("attn_q_norm.weight"),
        "first_k_dense_replace": model.of("leading_dense_block_count"),
        "n_shared_experts": model.of("expert_shared_count"),
        "n_group": model.of("expert_group_count") or 1,
        "topk_group": model.of("expert_group_used_count") or 1,
        "norm_topk_prob": normalizes is None or bool(normalizes),
        "routed_scaling_factor": model.of("expert_weights_scale") or 1.0,
    }


def _latent(model: GgufModel) -> dict[str, Any]:
    """Return the fields of DeepSeek V3. Raise ConfigError for experts that it does not have.

    Older files state the sizes of a head's keys and values under the usual keys. In newer files, these keys have the
    latents' sizes, and the head's sizes have keys of their own.
    """
    rotated = model.of("rope.dimension_count")
    key, value = (
        model.of(f"attention.{name}_length_mla") or model.of(f"attention.{name}_length") for name in ("key", "value")
    )
    gating = model.of("expert_gating_func") or (_SIGMOID if model.has_tensor(PREFERENCES) else None)
    if gating != _SIGMOID:
        raise ConfigError(
            f"{model.where}: experts of {model.name!r} that no sigmoid chooses (DeepSeek V2) are not supported"
        )
    rope, multiplier = model.rope(), model.of("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn" and multiplier:
        rope |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    return {
        **_glm4_moe(model),
        "norm_topk_prob": bool(model.of("expert_weights_norm")),
        "kv_lora_rank": model.of("attention.kv_lora_rank"),
        "q_lora_rank": model.of("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated if are_positive(key, rotated) else None,
        "v_head_dim": value,
        "partial_rotary_factor": 1.0,  # all of the rotated part, whose size is stated, is rotated
        "rope_parameters": rope,
    }


def _divided_latent(model: GgufModel) -> dict[str, Any]:
    is_whole = model.has_tensor("attn_kv_b.weight")
    return {} if is_whole else {"keys_and_values": ["self_attn.k_b_proj", "self_attn.v_b_proj"]}


def _granite_hybrid(model: GgufModel) -> dict[str, Any]:
    has_states = model.has_by_layer("ssm_a")
    size, heads, width = model.of("ssm.inner_size"), model.of("ssm.time_step_rank"), model.of("embedding_length")
    rotates = model.of("rope.scaling.finetuned")
    shared = "expert_shared_feed_forward_length" if model.of("expert_count") else "feed_forward_length"
    return {
        **_granite(model),
        "num_local_experts": model.of("expert_count") or 0,
        "shared_intermediate_size": model.of(shared),
        "num_key_value_heads": max(model.listed("attention.head_count_kv"), default=None),
        "layer_types": ["mamba" if has_state else "attention" for has_state in has_states] or None,
        "position_embedding_type": "rope" if rotates or rotates is None else None,
        "mamba_n_heads": heads,
        "mamba_n_groups": model.of("ssm.group_count"),
        "mamba_d_state": model.of("ssm.state_size"),
        "mamba_d_conv": model.of("ssm.conv_kernel"),
        "mamba_d_head": size // heads if are_positive(size, heads) else None,
        "mamba_expand": size // width if are_positive(size, width) else None,
        "mamba_conv_bias": model.has_tensor("ssm_conv1d.bias"),
    }


def _divided_granite(_: GgufModel) -> dict[str, Any]:
    return {
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": "mlp.down_proj",
        "shared_gate_up": ["shared_mlp.gate_proj", "shared_mlp.up_proj"],
        "shared_down": "shared_mlp.down_proj",
    }


def _divided_qwen3_next(model: GgufModel) -> dict[str, Any]:
    parts = ["linear_attn.in_proj_z", "linear_attn.in_proj_qkv", "linear_attn.in_proj_ba"]
    return {} if model.has_tensor("ssm_in.weight") else {"delta_in": parts}


def _gemma4(model: GgufModel) -> dict[str, Any]:
    """Return the fields of Gemma 4 alone. Layers without a window have other heads, and perhaps no values."""
    windows = model.windows(period=6)
    are_full = [kind == "full_attention" for kind in windows.get("layer_types", [])]
    kv_heads, sizes = model.listed("attention.head_count_kv"), model.listed("feed_forward_length")
    of_windows = model.of("attention.key_length_swa") or model.head_dim
    if model.of("rope.dimension_count_swa") not in (None, of_windows):
        raise ConfigError(f"{model.where}: partial rotary embeddings of layers with a window are not supported")
    table = model.header.tensors.get("per_layer_token_embd.weight")
    has_keys, has_values = model.has_by_layer("attn_k.weight"), model.has_by_layer("attn_v.weight")
    own = {"head_dim": model.head_dim}
    return {
        **windows,
        "intermediate_size": sizes[0] if sizes else None,
        "use_double_wide_mlp": len(set(sizes)) > 1,
        "head_dim": of_windows,
        "num_key_value_heads": next((heads for heads, full in zip(kv_heads, are_full, strict=False) if not full), None),
        "per_layer_config": {
            str(number): {**own, "num_key_value_heads": heads}
            for number, (heads, is_full) in enumerate(zip(kv_heads, are_full, strict=False))
            if is_full
        },
        "attention_k_eq_v": any(key and not value for key, value in zip(has_keys, has_values, strict=True)),
        "num_kv_shared_layers": model.of("attention.shared_kv_layers") or 0,
        "hidden_size_per_layer_input": model.of("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": table.shape[0] if table else None,
        "enable_moe_block": bool(model.of("expert_count")),
        "top_k_experts": model.of("expert_used_count"),
        "final_logit_softcapping": model.of("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": model.of("rope.freq_base"),
                "partial_rotary_factor": _rotated_share(model),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": model.of("rope.freq_base_swa") or 10_000.0},
        },
    }


def _rotated_share(model: GgufModel) -> float:
    """Return the share of a head that rotates: the file has divisors of frequencies, 1 or too large to rotate by."""
    divisors = model.vector("rope_freqs.weight") or []
    num_rotated = divisors.count(1.0)
    if not num_rotated or min(divisors[num_rotated:], default=_STILL) < _STILL:
        raise ConfigError(f"{model.where}: 'rope_freqs.weight' must have ones, and behind them {_STILL:g} or more")
    return num_rotated / len(divisors)


def _gpt2(model: GgufModel) -> dict[str, Any]:
    return {"layer_norm_epsilon": model.of("attention.layer_norm_epsilon")}


def _minimax_m2(model: GgufModel) -> dict[str, Any]:
    return {
        "intermediate_size": model.of("expert_feed_forward_length"),
        "rotary_dim": model.of("rope.dimension_count"),
    }


def _gpt_oss(model: GgufModel) -> dict[str, Any]:
    rope = model.rope()
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # no field says so; transformers does not truncate
    return {**model.windows(period=2), "rope_parameters": rope}


#: Architectures by GGUF's name.
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        class_name="LlamaForCausalLM",
        interleaves_rotation=True,
        experts=ExpertFields(class_name="MixtralForCausalLM", number="num_local_experts"),
    ),
    "qwen2": GgufArchitecture(class_name="Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture(class_name="Qwen3ForCausalLM"),
    "qwen3moe": GgufArchitecture(experts=ExpertFields(class_name="Qwen3MoeForCausalLM")),
    # Text models of vision models: a text token has one position.
    "qwen2vl": GgufArchitecture(class_name="Qwen2ForCausalLM"),
    "qwen3vl": GgufArchitecture(class_name="Qwen3ForCausalLM"),
    "qwen3vlmoe": GgufArchitecture(experts=ExpertFields(class_name="Qwen3MoeForCausalLM")),
    "gpt-oss": GgufArchitecture(
        more=_gpt_oss,
        experts=ExpertFields(class_name="GptOssForCausalLM", number="num_local_experts"),
        names={"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    ),
    "olmoe": GgufArchitecture(experts=ExpertFields(class_name="OlmoeForCausalLM", normalizes=False)),
    "gemma": GgufArchitecture(class_name="GemmaForCausalLM"),
    "gemma2": GgufArchitecture(class_name="Gemma2ForCausalLM", more=_gemma2, names=NORMS_AROUND),
    "gemma3": GgufArchitecture(class_name="Gemma3ForCausalLM", more=_gemma3, names=NORMS_AROUND),
    "gemma4": GgufArchitecture(
        class_name="Gemma4ForCausalLM",
        more=_gemma4,
        experts=ExpertFields(class_name="Gemma4ForCausalLM"),
        names=GEMMA4,
    ),
    "phi3": GgufArchitecture(
        class_name="Phi3ForCausalLM",
        rotates_partly=True,
        more=_phi3,
        names=GATE_UP,
    ),
    "olmo2": GgufArchitecture(class_name="Olmo2ForCausalLM", more=_olmo2, names=NORMS_AROUND),
    "granite": GgufArchitecture(class_name="GraniteForCausalLM", interleaves_rotation=True, more=_granite),
    "granitehybrid": GgufArchitecture(
        class_name="GraniteMoeHybridForCausalLM",
        interleaves_rotation=True,
        more=_granite_hybrid,
        experts=ExpertFields(class_name="GraniteMoeHybridForCausalLM", number="num_local_experts"),
        names={**MAMBA, **shared_expert("shared_mlp"), "block_sparse_moe.router.layer": "ffn_gate_inp"},
        divides=_divided_granite,
    ),
    "chatglm": GgufArchitecture(
        class_name="GlmForCausalLM", interleaves_rotation=True, rotates_partly=True, names=GATE_UP
    ),
    "glm4": GgufArchitecture(
        class_name="Glm4ForCausalLM",
        interleaves_rotation=True,
        rotates_partly=True,
        names={
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            **GATE_UP,
        },
    ),
    "smollm3": GgufArchitecture(class_name="SmolLM3ForCausalLM", interleaves_rotation=True),
    "lfm2": GgufArchitecture(
        class_name="Lfm2ForCausalLM",
        more=_lfm2,
        names=LFM2,
    ),
    "lfm2moe": GgufArchitecture(
        more=_lfm2_moe,
        experts=ExpertFields(class_name="Lfm2MoeForCausalLM", reads=frozenset({"expert_weights_scale"})),
        names={**LFM2, "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": PREFERENCES},
    ),
    "qwen35": GgufArchitecture(
        class_name="Qwen3_5ForCausalLM", rotates_partly=True, tiles_heads=True, more=_qwen35, names=QWEN35
    ),
    "qwen35moe": GgufArchitecture(
        rotates_partly=True,
        tiles_heads=True,
        more=_qwen35,
        experts=ExpertFields(class_name="Qwen3_5MoeForCausalLM"),
        names={**QWEN35, **shared_expert("mlp.shared_expert"), "mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
    ),
    "qwen3next": GgufArchitecture(
        rotates_partly=True,
        more=_qwen35,
        experts=ExpertFields(class_name="Qwen3NextForCausalLM"),
        names={
            **QWEN35,
            "linear_attn.in_proj_qkvz": "ssm_in",
            "linear_attn.in_proj_ba": "ssm_ba",
            **shared_expert("mlp.shared_expert"),
            "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        },
        divides=_divided_qwen3_next,
    ),
    "deepseek2": GgufArchitecture(
        interleaves_rotation=True,
        rotates_partly=True,
        more=_latent,
        experts=ExpertFields(
            class_name="DeepseekV3ForCausalLM",
            number="n_routed_experts",
            reads=frozenset({"expert_shared_count", "expert_group_count", "expert_weights_scale"}),
        ),
        names={
            **LATENT,
            "mlp.gate.e_score_correction_bias": PREFERENCES,
            **shared_expert("mlp.shared_experts"),
        },
        divides=_divided_latent,
    ),
    "glm4moe": GgufArchitecture(
        rotates_partly=True,
        more=_glm4_moe,
        experts=ExpertFields(
            class_name="Glm4MoeForCausalLM",
            number="n_routed_experts",
            reads=frozenset({"expert_shared_count", "expert_group_count", "expert_weights_scale"}),
        ),
        names={
            "post_attention_layernorm": "post_attention_norm",
            "mlp.gate.e_score_correction_bias": PREFERENCES,
            **shared_expert("mlp.shared_experts"),
        },
    ),
    "minimax-m2": GgufArchitecture(
        rotates_partly=True,
        more=_minimax_m2,
        experts=ExpertFields(class_name="MiniMaxM2ForCausalLM", number="num_local_experts"),
        names={"block_sparse_moe.e_score_correction_bias": PREFERENCES},
    ),
    "starcoder2": GgufArchitecture(
        class_name="Starcoder2ForCausalLM",
        more=_starcoder2,
        names={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    ),
    "gpt2": GgufArchitecture(
        class_name="GPT2LMHeadModel",
        more=_gpt2,
        names={
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            "attn.c_proj": "attn_output",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
    ),
}

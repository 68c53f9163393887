"""Places of a checkpoint's values in a GGUF file, by llama.cpp's rules for each architecture."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
#: Numbers of a tensor's values, in the shape of a tensor in a file.
Places = npt.NDArray[np.intp]

_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.sinks": "attn_sinks.weight",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.gate_up_proj": "ffn_up",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "self_attn.out_proj": "attn_output", "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down", "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj", "model.embedding_norm": "token_embd_norm",
    "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{shared}.{name}_proj": f"ffn_{name}_shexp"
       for shared in ("shared_expert", "shared_experts") for name in ("gate", "up", "down")},
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_ba": "ssm_ba",
    "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.A_log": "ssm_a", "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias", "mamba.norm": "ssm_norm", "mamba.out_proj": "ssm_out",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
}  # fmt: skip
#: Kinds of models whose norm behind attention has the name that others use for the norm before the MLP.
_NORMS_BEHIND = (
    "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "olmo2", "olmo3", "gpt_oss", "qwen3_5_text",
    "qwen3_5_moe_text", "qwen3_next", "glm4_moe",
)  # fmt: skip
#: Kinds of models whose checkpoints have norms' weights minus one, and whose files have the weights themselves.
_NORMS_BEYOND_ONE = ("gemma", "gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
#: Kinds of models whose converters reorder rows, so that neighbouring rows are rotated together.
_TURNS = ("llama", "mixtral", "granite", "granitemoehybrid", "smollm3")
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")


def stored_values(name: str, tensor: Floats, kind: str) -> Floats:
    """Return a tensor's values as files of this kind of model have them."""
    if name.endswith(".A_log"):
        return -np.exp(tensor)
    is_beyond_one = kind in _NORMS_BEYOND_ONE and name.endswith("norm.weight") and "linear_attn" not in name
    return tensor + np.float32(1) if is_beyond_one else tensor


def places_of(name: str, shape: tuple[int, ...], config: dict[str, Any]) -> dict[str, Places]:
    """Return a tensor's places by the names of the tensors in the file."""
    values = np.arange(np.prod(shape, dtype=np.intp)).reshape(shape)
    found = _LAYER.fullmatch(name)
    if found is None:
        whole, _, end = name.rpartition(".")
        return {f"{_NAMES[whole]}.{end}": values}
    layer, part = found[1], found[2]
    if (divided := _divided(part, values, config)) is not None:
        return {f"blk.{layer}.{own}": places for own, places in divided.items()}
    whole, _, end = part.rpartition(".")
    if end not in ("weight", "bias"):
        return {f"blk.{layer}.{_NAMES[part]}": _ordered(part, values, config)}
    is_behind = whole == "post_attention_layernorm" and config["model_type"] in _NORMS_BEHIND
    own = "post_attention_norm" if is_behind else _NAMES[whole]
    return {f"blk.{layer}.{own}.{end}": _ordered(whole, values, config)}


def _divided(part: str, values: Places, config: dict[str, Any]) -> dict[str, Places] | None:
    """Return a layer's tensor as files divide it; None for one that stays whole."""
    half = values.shape[-2] // 2 if values.ndim > 1 else 0
    shared = "_shexp" if config.get("num_local_experts") else ""
    match part:
        case "mlp.experts.gate_up_proj" | "mlp.experts.gate_up_proj_bias":  # of gpt-oss
            end = "bias" if part.endswith("bias") else "weight"
            rows = {"gate": values[..., 0::2], "up": values[..., 1::2]}
            return {f"ffn_{key}_exps.{end}": each if end == "bias" else _t(each) for key, each in rows.items()}
        case "mlp.experts.down_proj":
            return {"ffn_down_exps.weight": _t(values)}
        case "mlp.experts.down_proj_bias":
            return {"ffn_down_exps.bias": values}
        case "experts.gate_up_proj":
            return {"ffn_gate_up_exps.weight": values}
        case "experts.down_proj" | "block_sparse_moe.output_linear.weight":
            return {"ffn_down_exps.weight": values}
        case "block_sparse_moe.input_linear.weight":
            return {"ffn_gate_exps.weight": values[:, :half], "ffn_up_exps.weight": values[:, half:]}
        case "shared_mlp.input_linear.weight":
            return {f"ffn_gate{shared}.weight": values[:half], f"ffn_up{shared}.weight": values[half:]}
        case "shared_mlp.output_linear.weight":
            return {f"ffn_down{shared}.weight": values}
        case "self_attn.kv_b_proj.weight":
            heads = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            keys, rest = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
            return {"attn_k_b.weight": _t(keys), "attn_v_b.weight": rest}
        case "linear_attn.in_proj_qkvz.weight":
            size, num_keys = config["linear_key_head_dim"], config["linear_num_key_heads"]
            of_values = config["linear_value_head_dim"] * config["linear_num_value_heads"] // num_keys
            heads = values.reshape(num_keys, -1, values.shape[1])
            parts = np.split(heads, np.cumsum([size, size, of_values]), axis=1)
            *qkv, gates = (each.reshape(-1, values.shape[1]) for each in parts)
            return {"attn_qkv.weight": np.concatenate(qkv), "attn_gate.weight": gates}
        case _:
            return None


def _ordered(whole: str, values: Places, config: dict[str, Any]) -> Places:
    """Return the places of a tensor that files have in another order or shape."""
    kind = config["model_type"]
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    num_heads = heads.get(whole.rpartition(".")[2])
    if num_heads and kind in _TURNS:  # the halves of a head in turns, as GGML's Llama rotates them
        return values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if kind == "gpt2" and values.ndim == 2:
        return values.T
    if whole in ("mamba.A_log", "mamba.D"):
        return values[:, None]
    if whole == "mamba.norm":
        return values.reshape(config["mamba_n_groups"], -1)
    if whole.startswith("linear_attn.") and kind != "qwen3_next" and not whole.endswith("norm"):
        axis = int(whole.endswith("out_proj"))
        values = values.take(_value_order(whole, config, values.shape[axis]), axis)
    # without the middle size of a convolution
    return values.reshape([size for size in values.shape if size > 1] or [1])


def _value_order(whole: str, config: dict[str, Any], size: int) -> Places:
    """Return the source of each row of a delta net's tensor. Each key head serves every n-th value head of a file."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first = 2 * num_keys * config["linear_key_head_dim"] if "qkv" in whole or "conv1d" in whole else 0
    heads = np.arange(first, size).reshape(num_keys, num_values // num_keys, -1).swapaxes(0, 1)
    return np.concatenate([np.arange(first), heads.ravel()])


def _t(values: Places) -> Places:
    return values.swapaxes(-1, -2)

"""Names of tensors in GGUF files, by the names here. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

#: Names outside layers, without their ending.
NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "lm_head": "output",
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
}
_EXPERT_NAMES: Mapping[str, str] = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "gate_up_proj": "ffn_gate_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
#: Names in a layer, unless an architecture has others.
LAYER_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{
        f"{prefix}experts.{name}": own
        for prefix in ("", "mlp.", "feed_forward.", "block_sparse_moe.")
        for name, own in _EXPERT_NAMES.items()
    },
}
NORMS_AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GATE_UP = {"mlp.gate_up_proj": "ffn_up"}
LFM2 = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
}
QWEN35 = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
#: Name of the terms that are added to shares when experts are chosen.
PREFERENCES = "exp_probs_b.bias"


GEMMA4 = {
    **NORMS_AROUND,
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
MAMBA = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.A_log": "ssm_a",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.D": "ssm_d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}


def shared_expert(prefix: str) -> dict[str, str]:
    """Return the names of a shared expert's projections, which have this prefix here."""
    return {f"{prefix}.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}

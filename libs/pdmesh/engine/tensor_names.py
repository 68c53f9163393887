"""Names of a checkpoint's tensors. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of a checkpoint's tensors after the layer's prefix, without ``.weight``.

    None: the model has no such tensor. A single name for several projections is a tensor of all of them, one after the
    other. ``renames`` has pairs of a prefix in files and its replacement here. Output norms apply before the result is
    added to the residual stream. ``expert_gate_up`` and ``expert_down`` follow the expert's prefix.

    ``delta_in`` has four projections, two whose rows are by key head, or one of an additive layer. Of three, the rows
    of the last are by key head. ``keys_and_values`` is one projection of latents, or one of keys, transposed, and one
    of values, with a matrix for each head. ``parts`` has pairs of a part of names in files and its replacement here.

    ``fuses_experts``: a layer's experts are one tensor (experts, inputs, outputs). ``gates_first``: gates of fused
    experts precede ups, and a file may have single experts instead; otherwise gates and ups alternate.
    ``outputs_first``: fused experts are (experts, outputs, inputs).
    """

    renames: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
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
    attention_output_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_output_norm: str | None = None
    sinks: str = "self_attn.sinks"
    router: str = "mlp.gate"
    preferences: str = "mlp.expert_bias"
    expert: str = "mlp.experts.{}"
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    fuses_experts: bool = False
    gates_first: bool = False
    outputs_first: bool = False
    experts_norm: str = "pre_feedforward_layernorm_2"
    router_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    mlp_own_norm: str = "post_feedforward_layernorm_1"
    experts_own_norm: str = "post_feedforward_layernorm_2"
    delta_in: tuple[str, ...] = (
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )
    delta_conv: str = "linear_attn.conv1d"
    decay_log: str = "linear_attn.A_log"
    decay_bias: str = "linear_attn.dt_bias"
    delta_norm: str = "linear_attn.norm"
    delta_out: str = "linear_attn.out_proj"
    delta_skip: str = "mamba.D"
    conv_in: str = "conv.in_proj"
    conv: str = "conv.conv"
    conv_out: str = "conv.out_proj"
    latent_in: tuple[str, ...] = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    query_latent_norm: str = "self_attn.q_a_layernorm"
    queries: str = "self_attn.q_b_proj"
    latent_norm: str = "self_attn.kv_a_layernorm"
    keys_and_values: tuple[str, ...] = ("self_attn.kv_b_proj",)
    layer_scale: str = "layer_scalar"
    layer_embedding: str = "model.embed_tokens_per_layer"
    layer_input: str = "model.per_layer_model_projection"
    layer_input_norm: str = "model.per_layer_projection_norm"
    layer_gate: str = "per_layer_input_gate"
    layer_output: str = "per_layer_projection"
    layer_output_norm: str = "post_per_layer_input_norm"

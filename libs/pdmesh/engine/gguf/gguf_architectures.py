"""GGUF's architectures: transformers' class of each, and the fields of its ``config.json``. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdmesh.engine.gguf.gguf_reader import F32, GgufHeader
from pdmesh.errors import ConfigError

#: Largest vector that is read: more than half of any head.
_MAX_VECTOR = 1 << 16
#: Most layers for which windows are listed: more than any model has.
_MAX_LISTED_LAYERS = 1024
#: Tensors with a layer's biases, by the projections of `pdmesh.engine.model_config.Quantization.biases`.
_BIASES = {
    "qkv": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias"),
    "output": ("attn_output.bias",),
    "mlp": ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model's metadata and tensors in a GGUF file. ``name`` is the architecture's."""

    name: str
    header: GgufHeader
    where: str

    def of(self, key: str) -> Any:
        """Return a field of the architecture, or None if it is absent."""
        return self.header.metadata.get(f"{self.name}.{key}")

    @property
    def head_dim(self) -> Any:
        hidden_size, num_heads = self.of("embedding_length"), self.of("attention.head_count")
        if self.of("attention.key_length") or not _are_positive(hidden_size, num_heads):
            return self.of("attention.key_length")
        return hidden_size // num_heads

    @property
    def num_draft_layers(self) -> int:
        """Number of last layers that draft further tokens and are not computed."""
        number = self.of("nextn_predict_layers")
        return number if _are_positive(number, self.of("block_count")) and number < self.of("block_count") else 0

    @property
    def num_layers(self) -> Any:
        number = self.of("block_count")
        return number - self.num_draft_layers if _are_positive(number) else number

    def has_tensor(self, name: str) -> bool:
        """Return whether some layer has a tensor of this name."""
        return any(tensor.startswith("blk.") and tensor.endswith(f".{name}") for tensor in self.header.tensors)

    def biases(self) -> list[str]:
        """Return the projections with biases. Some published models have more than their architecture."""
        names = {
            name.split(".", 2)[2] for name in self.header.tensors if name.startswith("blk.") and name.count(".") > 2
        }
        return [place for place, tensors in _BIASES.items() if not names.isdisjoint(tensors)]

    def vector(self, name: str) -> list[float] | None:
        """Return the values of a vector in fp32, or None if there is no such tensor.

        Raises ConfigError for a tensor of another type or shape, or with more than `_MAX_VECTOR` values.
        """
        stored = self.header.tensors.get(name)
        if stored is None:
            return None
        if stored.type_number != F32 or len(stored.shape) != 1 or stored.shape[0] > _MAX_VECTOR:
            raise ConfigError(f"{self.where}: {name!r} must be a vector in fp32 of at most {_MAX_VECTOR} values")
        import numpy as np

        values: list[float] = np.fromfile(
            stored.file, dtype="<f4", count=stored.shape[0], offset=stored.offset
        ).tolist()
        return values

    def rope(self) -> dict[str, Any]:
        """Return the RoPE parameters. Llama 3.1's scaling is a tensor of frequency divisors, Phi's is two.

        Raise ConfigError for a scaling that is not served.
        """
        kind, context = self.of("rope.scaling.type") or "none", self.of("context_length")
        original = self.of("rope.scaling.original_context_length") or context
        base = {"rope_theta": self.of("rope.freq_base") or 10_000.0}
        if kind in ("linear", "yarn"):
            if factors := [name for name in self.header.tensors if name.startswith("rope_f")]:
                raise ConfigError(f"{self.where}: RoPE scaling {kind!r} together with {factors[0]!r} is not supported")
            yarn = {
                "attention_factor": self.of("rope.scaling.yarn_attn_factor"),
                "beta_fast": self.of("rope.scaling.yarn_beta_fast"),
                "beta_slow": self.of("rope.scaling.yarn_beta_slow"),
            }
            return {
                **base,
                "rope_type": kind,
                "factor": self.of("rope.scaling.factor"),
                "original_max_position_embeddings": original,
                **({name: value for name, value in yarn.items() if value is not None} if kind == "yarn" else {}),
            }
        if kind not in ("none", "longrope"):
            raise ConfigError(
                f"{self.where}: RoPE scaling {str(kind)[:64]!r} is not supported from GGUF; give the "
                "safetensors directory"
            )
        long, short = self.vector("rope_factors_long.weight"), self.vector("rope_factors_short.weight")
        if long is not None and short is not None:
            factor = self.of("rope.scaling.attn_factor")
            return {
                **base,
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "original_max_position_embeddings": original,
                **({} if factor is None else {"attention_factor": factor}),
            }
        if kind == "longrope":
            raise ConfigError(f"{self.where} holds no 'rope_factors_long.weight' and '…short.weight' of its longrope")
        divisors = self.vector("rope_freqs.weight")
        if divisors is None:
            return {**base, "rope_type": "default"}
        return {
            **base,
            "rope_type": "longrope",  # a special case of longrope: the same divisors for every length
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }

    def windows(self, *, period: int, default: int | None = None) -> dict[str, Any]:
        """Return which layers have a window: as listed in the file, or all but the last of every ``period`` layers."""
        window = self.of("attention.sliding_window") or default
        pattern, num_layers = self.of("attention.sliding_window_pattern"), self.num_layers
        if not window or not _are_positive(num_layers) or num_layers > _MAX_LISTED_LAYERS:
            return {"sliding_window": None}
        if not isinstance(pattern, list):
            period = pattern if _are_positive(pattern) else period
            pattern = [number % period < period - 1 for number in range(num_layers)]
        kinds = ["sliding_attention" if has_window else "full_attention" for has_window in pattern[:num_layers]]
        return {"sliding_window": window, "layer_types": kinds}

    def partial_rotation(self) -> dict[str, Any]:
        """Return the rotated part of a head as ``partial_rotary_factor``, or nothing if the file does not state it."""
        rotated = self.of("rope.dimension_count")
        return {"partial_rotary_factor": rotated / self.head_dim} if _are_positive(rotated, self.head_dim) else {}


def _are_positive(*values: object) -> bool:
    return all(isinstance(value, int) and value > 0 for value in values)


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
    ending, unless the name here is of neither a weight nor a bias.
    """

    class_name: str = ""
    interleaves_rotation: bool = False
    tiles_heads: bool = False
    rotates_partly: bool = False
    more: Callable[[GgufModel], dict[str, Any]] = lambda _: {}
    experts: ExpertFields | None = None
    names: Mapping[str, str] = field(default_factory=dict[str, str])


_NORMS_AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GATE_UP = {"mlp.gate_up_proj": "ffn_up"}
_LFM2 = {
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
_QWEN35 = {
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
_PREFERENCES = "exp_probs_b.bias"


def _shared_expert(prefix: str) -> dict[str, str]:
    return {f"{prefix}.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}


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
    if model.of("block_count") == num_layers_27b and _are_positive(hidden_size, num_heads):
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
        "attention_multiplier": scale or (head_dim**-0.5 if _are_positive(head_dim) else None),
        "embedding_multiplier": model.of("embedding_scale") or 1.0,
        "residual_multiplier": model.of("residual_scale") or 1.0,
        "logits_scaling": model.of("logit_scale") or 1.0,
    }


def _starcoder2(model: GgufModel) -> dict[str, Any]:
    epsilon = model.of("attention.layer_norm_epsilon")
    return {"norm_epsilon": epsilon, "sliding_window": None}


def _lfm2(model: GgufModel) -> dict[str, Any]:
    """Return the fields of LFM2 alone. Layers with key-value heads attend; the others are convolutions."""
    listed = model.of("attention.head_count_kv")
    fields = {
        "norm_eps": model.of("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": model.of("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }
    if not isinstance(listed, list) or len(listed) > _MAX_LISTED_LAYERS or not _are_positive(*filter(None, listed)):
        return fields
    kinds = ["full_attention" if number else "conv" for number in listed]
    return {**fields, "num_key_value_heads": max(listed, default=None), "layer_types": kinds}


def _lfm2_moe(model: GgufModel) -> dict[str, Any]:
    return {
        **_lfm2(model),
        "num_dense_layers": model.of("leading_dense_block_count"),
        "use_expert_bias": model.has_tensor(_PREFERENCES),
        "routed_scaling_factor": model.of("expert_weights_scale") or 1.0,
    }


def _qwen35(model: GgufModel) -> dict[str, Any]:
    num_heads, size = model.of("ssm.time_step_rank"), model.of("ssm.inner_size")
    fields = {
        "linear_num_key_heads": model.of("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": model.of("ssm.state_size"),
        "linear_value_head_dim": size // num_heads if _are_positive(size, num_heads) else None,
        "linear_conv_kernel_dim": model.of("ssm.conv_kernel"),
        "shared_expert_intermediate_size": model.of("expert_shared_feed_forward_length"),
    }
    if not _are_positive(model.num_layers) or model.num_layers > _MAX_LISTED_LAYERS:
        return fields
    are_linear = [f"blk.{number}.ssm_a" in model.header.tensors for number in range(model.num_layers)]
    return {**fields, "layer_types": ["linear_attention" if linear else "full_attention" for linear in are_linear]}


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
    "gemma2": GgufArchitecture(class_name="Gemma2ForCausalLM", more=_gemma2, names=_NORMS_AROUND),
    "gemma3": GgufArchitecture(class_name="Gemma3ForCausalLM", more=_gemma3, names=_NORMS_AROUND),
    "phi3": GgufArchitecture(
        class_name="Phi3ForCausalLM",
        rotates_partly=True,
        more=_phi3,
        names={"self_attn.qkv_proj": "attn_qkv", **_GATE_UP},
    ),
    "olmo2": GgufArchitecture(class_name="Olmo2ForCausalLM", more=_olmo2, names=_NORMS_AROUND),
    "granite": GgufArchitecture(class_name="GraniteForCausalLM", interleaves_rotation=True, more=_granite),
    "glm4": GgufArchitecture(
        class_name="Glm4ForCausalLM",
        interleaves_rotation=True,
        rotates_partly=True,
        names={
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            **_GATE_UP,
        },
    ),
    "smollm3": GgufArchitecture(class_name="SmolLM3ForCausalLM", interleaves_rotation=True),
    "lfm2": GgufArchitecture(
        class_name="Lfm2ForCausalLM",
        more=_lfm2,
        names=_LFM2,
    ),
    "lfm2moe": GgufArchitecture(
        more=_lfm2_moe,
        experts=ExpertFields(class_name="Lfm2MoeForCausalLM", reads=frozenset({"expert_weights_scale"})),
        names={**_LFM2, "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": _PREFERENCES},
    ),
    "qwen35": GgufArchitecture(
        class_name="Qwen3_5ForCausalLM", rotates_partly=True, tiles_heads=True, more=_qwen35, names=_QWEN35
    ),
    "qwen35moe": GgufArchitecture(
        rotates_partly=True,
        tiles_heads=True,
        more=_qwen35,
        experts=ExpertFields(class_name="Qwen3_5MoeForCausalLM"),
        names={**_QWEN35, **_shared_expert("mlp.shared_expert"), "mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
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
            "mlp.gate.e_score_correction_bias": _PREFERENCES,
            **_shared_expert("mlp.shared_experts"),
        },
    ),
    "minimax-m2": GgufArchitecture(
        rotates_partly=True,
        more=_minimax_m2,
        experts=ExpertFields(class_name="MiniMaxM2ForCausalLM", number="num_local_experts"),
        names={"block_sparse_moe.e_score_correction_bias": _PREFERENCES},
    ),
    "starcoder2": GgufArchitecture(
        class_name="Starcoder2ForCausalLM",
        more=_starcoder2,
        names={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    ),
}

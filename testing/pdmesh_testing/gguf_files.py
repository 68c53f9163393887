"""Small GGUF files of checkpoints, made by the format's documentation and llama.cpp's rules for each architecture."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from pdmesh.engine.gguf.gguf_reader import read_header
from pdmesh_testing.gguf_places import Floats, places_of, stored_values

#: More value heads than key heads, whose order differs in a file.
_DELTA_NETS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 32,
}  # fmt: skip
_SIGMOID_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1, "head_dim": 16,
}  # fmt: skip
_STATES: dict[str, Any] = {
    "intermediate_size": 64, "shared_intermediate_size": 64, "mamba_n_heads": 4, "mamba_d_state": 16,
    "embedding_multiplier": 1.7, "logits_scaling": 0.8, "residual_multiplier": 0.6, "attention_multiplier": 0.2,
}  # fmt: skip
_LATENTS: dict[str, Any] = {
    **{key: value for key, value in _SIGMOID_EXPERTS.items() if key != "head_dim"}, "kv_lora_rank": 32,
    "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip
#: Wider heads and fewer of them in layers without a window, whose keys are values.
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6, "sliding_window": 24, "head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
}  # fmt: skip
#: Configuration options that a file can express, by transformers' name of the architecture.
MODELS: dict[str, list[dict[str, Any]]] = {
    "qwen3_moe": [{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
                   "head_dim": 24}],
    "mixtral": [{"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}],
    "olmoe": [{"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": False}],
    "gpt_oss": [
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24, "head_dim": 16},
        {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24, "head_dim": 16, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 256}},
    ],
    "gemma": [{"head_dim": 16}],
    "gemma2": [{"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 5.0}],
    "gemma3_text": [{"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "num_hidden_layers": 7,
                     "rope_parameters": {
                         "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}],
    "phi3": [
        {"sliding_window": 24, "num_key_value_heads": 4},
        {"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
            "long_factor": [1.5 + 0.7 * pair for pair in range(6)], "original_max_position_embeddings": 80,
            "partial_rotary_factor": 0.75},
         "original_max_position_embeddings": 80, "max_position_embeddings": 320},
    ],
    "olmo2": [{}],
    "olmo3": [{"sliding_window": 24}],
    "granite": [{"embedding_multiplier": 1.7, "logits_scaling": 0.8, "residual_multiplier": 0.6,
                 "attention_multiplier": 0.2, "attention_bias": True, "mlp_bias": True}],
    "glm4": [{"head_dim": 16, "attention_bias": True}],
    "smollm3": [{}],
    "starcoder2": [{"sliding_window": None, "tie_word_embeddings": True}],
    "lfm2": [{"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False}],
    "lfm2_moe": [{"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1, "num_experts": 6,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5}],
    "qwen3_5_text": [_DELTA_NETS],
    "qwen3_5_moe_text": [{**_DELTA_NETS, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                          "shared_expert_intermediate_size": 64}],
    "glm4_moe": [
        {**_SIGMOID_EXPERTS, "use_qk_norm": True, "attention_bias": True},
        {**_SIGMOID_EXPERTS, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    ],
    "minimax_m2": [{"rotary_dim": 8, "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2}],
    "qwen3_next": [{**_DELTA_NETS, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                    "shared_expert_intermediate_size": 64}],
    "granitemoehybrid": [
        {**_STATES, "layer_types": ["mamba", "attention"] * 2, "mamba_n_groups": 2, "num_local_experts": 5,
         "num_experts_per_tok": 2},
        {**_STATES, "layer_types": ["mamba", "mamba", "attention", "mamba"], "position_embedding_type": "rope",
         "num_local_experts": 0},
    ],
    "deepseek_v3": [
        {**_LATENTS, "n_group": 2, "topk_group": 1, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40,
            "mscale": 0.7, "mscale_all_dim": 0.7}},
        {**_LATENTS, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "norm_topk_prob": False},
    ],
    "glm4_moe_lite": [_LATENTS],
    "gemma4_text": [
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 64},
        {**_GEMMA4, "attention_k_eq_v": False, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320,
         "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    ],
    "gemma4_unified_text": [_GEMMA4],
    "glm": [{"head_dim": 16, "attention_bias": True}],
    "gpt2": [{}],
}  # fmt: skip
#: What matrices are stored as; vectors are in fp32.
GgufType = Literal["F32", "F16", "Q8_0", "Q4_0", "MXFP4"]
_NUMBERS: dict[GgufType, int] = {"F32": 0, "F16": 1, "Q8_0": 8, "Q4_0": 2, "MXFP4": 39}
_ALIGNMENT = 32
#: MXFP4 values by code.
_MXFP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_ARCHITECTURES = {
    "mixtral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "gemma3_text": "gemma3", "olmo3": "olmo2",
    "lfm2_moe": "lfm2moe", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2", "qwen3_next": "qwen3next", "granitemoehybrid": "granitehybrid", "glm": "chatglm",
    "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2", "gemma4_text": "gemma4", "gemma4_unified_text": "gemma4",
}  # fmt: skip
#: Parts of names of small matrices, which are in fp32.
_SMALL = ("gate_inp", "ssm_conv1d", "shortconv.conv", "ssm_norm")
#: GPT-2's names of fields.
_FIELDS = {
    "n_embd": "hidden_size", "n_positions": "max_position_embeddings", "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers", "n_inner": "intermediate_size", "layer_norm_epsilon": "norm_epsilon",
}  # fmt: skip


class _Stored(NamedTuple):
    shape: tuple[int, ...]
    #: Number of the tensor's type in a file.
    number: int
    data: bytes


def write_gguf(source: Path, file: Path, gguf_type: GgufType = "F32") -> dict[str, Floats]:
    """Write ``file`` from a checkpoint in fp32; return what its tensors stand for, by the checkpoint's names.

    ``MXFP4`` is of experts; other matrices are in fp32 then.
    """
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    kind: str = config["model_type"]
    meanings: dict[str, Floats] = {}
    stored: dict[str, _Stored] = {}
    experts: defaultdict[str, dict[int, _Stored]] = defaultdict(dict)

    def made(own_name: str, values: Floats) -> tuple[_Stored, Floats]:
        is_matrix = values.ndim > 1 and own_name.endswith("weight") and not any(each in own_name for each in _SMALL)
        may_be = gguf_type != "MXFP4" or "_exps." in own_name
        stored_type: GgufType = gguf_type if is_matrix and may_be else "F32"
        data, meaning = _quantized(values, stored_type)
        return _Stored(values.shape, _NUMBERS[stored_type], data), meaning

    for full_name, tensor in load_file(source / "model.safetensors").items():
        meaning = meanings[full_name] = np.ascontiguousarray(tensor.copy())
        if expert := _EXPERT.fullmatch(full_name):
            own_name = f"blk.{expert[1]}.ffn_{_EXPERT_NAMES[expert[3]]}_exps.weight"
            experts[own_name][int(expert[2])], meanings[full_name] = made(own_name, tensor)
            continue
        values = stored_values(full_name, tensor, kind)
        for own_name, places in places_of(full_name, tensor.shape, config).items():
            stored[own_name], meant = made(own_name, np.ascontiguousarray(values.ravel()[places]))
            if values is tensor:
                meaning.ravel()[places] = meant
    for own_name, parts in experts.items():
        each = [parts[number] for number in sorted(parts)]
        data = b"".join(part.data for part in each)
        stored[own_name] = _Stored((len(each), *each[0].shape), each[0].number, data)
    for length in ("long", "short"):
        if (factors := (config.get("rope_parameters") or {}).get(f"{length}_factor")) is not None:
            data = np.array(factors, dtype="<f4").tobytes()
            stored[f"rope_factors_{length}.weight"] = _Stored((len(factors),), 0, data)
    rope = (config.get("rope_parameters") or {}).get("full_attention", {})
    if rope.get("rope_type") == "proportional":
        head_dim = next(iter(config["per_layer_config"].values()))["head_dim"]
        num_rotated = int(rope["partial_rotary_factor"] * head_dim) // 2
        divisors = [1.0] * num_rotated + [1e30] * (head_dim // 2 - num_rotated)
        stored["rope_freqs.weight"] = _Stored((len(divisors),), 0, np.array(divisors, dtype="<f4").tobytes())
    name = _ARCHITECTURES.get(kind, kind)
    file.write_bytes(encoded(_metadata(name, config) | _tokenizer(source, config), dict(stored)))
    return meanings


def _metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a model's file."""
    config = {_FIELDS.get(key, key): value for key, value in config.items()}
    num_heads, rope = config["num_attention_heads"], config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    num_experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    num_dense = config.get("mlp_layer_types", []).count("dense") or None
    fields = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"] or 4 * config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": num_heads,
        "attention.head_count_kv": config.get("num_key_value_heads") if name != "gpt2" else None,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps") or config.get("norm_eps"),
        "rope.freq_base": full.get("rope_theta", config.get("rope_theta")),
        "expert_count": num_experts,
        "expert_used_count": config.get("num_experts_per_tok", config.get("top_k_experts")) if num_experts else None,
        "expert_feed_forward_length": (
            config.get("moe_intermediate_size") or config["intermediate_size"] if num_experts else None
        ),
        "leading_dense_block_count": config.get("first_k_dense_replace", config.get("num_dense_layers", num_dense)),
        "expert_shared_count": config.get("n_shared_experts"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_weights_scale": config.get("routed_scaling_factor"),
        "expert_weights_norm": config.get("norm_topk_prob") if name in ("glm4moe", "deepseek2") else None,
        "expert_shared_feed_forward_length": config.get(
            "shared_expert_intermediate_size", config.get("shared_intermediate_size")
        ),
        "attention.layer_norm_epsilon": config.get("norm_epsilon"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": config.get("logits_scaling"),
    }
    if name in ("gemma2", "gemma3", "gemma4", "olmo2", "gpt-oss", "phi3"):
        fields["attention.sliding_window"] = config.get("sliding_window")
    if name.startswith("lfm2"):
        kv_heads = [config["num_key_value_heads"] * (kind == "full_attention") for kind in config["layer_types"]]
        fields |= {"attention.head_count_kv": kv_heads, "shortconv.l_cache": config["conv_L_cache"]}
    if name in ("olmo2", "gemma4") and config.get("sliding_window"):
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        fields["attention.sliding_window_pattern"] = kinds
    if "linear_num_value_heads" in config:
        values = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        fields |= {
            "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": values,
        }
    if "linear_num_value_heads" in config or name in ("glm4moe", "minimax-m2"):
        fields["rope.dimension_count"] = int(full["partial_rotary_factor"] * head_dim)
    if name == "granitehybrid":
        fields |= {
            "attention.head_count_kv": [
                0 if kind in ("mamba", "linear_attention") else config["num_key_value_heads"]
                for kind in config["layer_types"]
            ],
            "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
            "ssm.conv_kernel": config["mamba_d_conv"],
            "ssm.state_size": config["mamba_d_state"],
            "ssm.group_count": config["mamba_n_groups"],
            "ssm.time_step_rank": config["mamba_n_heads"],
            "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        }
    if name == "deepseek2":
        rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
        fields |= {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": config["q_lora_rank"],
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": rotated,
            "expert_gating_func": 2,
            "rope.scaling.yarn_log_multiplier": 0.1 * full["mscale_all_dim"] if "mscale_all_dim" in full else None,
        }
    if name == "gemma4":
        fields |= _gemma4_fields(config)
    if name in ("phi3", "glm4", "chatglm"):
        partial = full.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        fields["rope.dimension_count"] = int(partial * head_dim)
        del fields["attention.key_length"]
    match full.get("rope_type"):
        case "longrope":
            original = config["original_max_position_embeddings"]
            stretch = math.log(config["max_position_embeddings"] / original)
            fields["rope.scaling.type"] = "longrope"
            fields["rope.scaling.original_context_length"] = original
            fields["rope.scaling.attn_factor"] = math.sqrt(1 + stretch / math.log(original))
        case "yarn" | "linear" as scaling:
            fields["rope.scaling.type"] = scaling
            fields["rope.scaling.factor"] = full["factor"]
            fields["rope.scaling.original_context_length"] = full.get("original_max_position_embeddings")
        case _:
            pass
    given = {f"{name}.{key}": value for key, value in fields.items() if value is not None}
    return {"general.architecture": name, **given}


def _gemma4_fields(config: dict[str, Any]) -> dict[str, Any]:
    num_layers, size = config["num_hidden_layers"], config["intermediate_size"]
    of_layers, num_sharing = config["per_layer_config"], config["num_kv_shared_layers"]
    head_dim, wide = next(iter(of_layers.values()))["head_dim"], 1 + config["use_double_wide_mlp"]
    heads = [
        of_layers.get(str(number), {}).get("num_key_value_heads", config["num_key_value_heads"])
        for number in range(num_layers)
    ]
    return {
        "attention.head_count_kv": heads,
        "attention.key_length": head_dim,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length": head_dim,
        "attention.value_length_swa": config["head_dim"],
        "attention.shared_kv_layers": num_sharing,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": [size] * (num_layers - num_sharing) + [size * wide] * num_sharing,
        "rope.dimension_count": head_dim,
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }


class GgufContent(NamedTuple):
    """What a file holds; a tensor is its shape, its type's number, and its data."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]]


def content_of(file: Path) -> GgufContent:
    """Return what a file holds, to be changed and `encoded` again."""
    header, data = read_header(file), file.read_bytes()
    tensors = {
        name: (each.shape, each.type_number, data[each.offset : each.offset + each.num_bytes])
        for name, each in header.tensors.items()
    }
    return GgufContent(dict(header.metadata), tensors)


def encoded(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    """Return the bytes of a GGUF file with this metadata, and tensors by name as (shape, type number, bytes)."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _value(value)
    data = bytearray()
    for name, (shape, number, content) in tensors.items():
        data += bytes(-len(data) % _ALIGNMENT)
        out += _string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", number, len(data))
        data += content
    return bytes(out + bytes(-len(out) % _ALIGNMENT) + data)


def write_parts(directory: Path, content: GgufContent, count: int, *, doubled: str = "") -> list[Path]:
    """Write a model split into files as llama.cpp splits it, and return their paths.

    All parts hold the tensor ``doubled``.
    """
    directory.mkdir(exist_ok=True)
    names = [*content.tensors]
    paths = [directory / f"model-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    for number, path in enumerate(paths):
        split = {
            # llama.cpp insists on these types.
            "split.no": np.uint16(number),
            "split.count": np.uint16(count),
            "split.tensors.count": np.int32(len(names)),
        }
        fields = content.metadata if number == 0 else {}
        tensors = {name: content.tensors[name] for name in names if name in (*names[number::count], doubled)}
        path.write_bytes(encoded({**fields, **split}, tensors))
    return paths


def _tokenizer(source: Path, config: dict[str, Any]) -> dict[str, Any]:
    content = json.loads((source / "tokenizer.json").read_text())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["content"] for token in content["added_tokens"] if token["special"]}
    template = json.loads((source / "tokenizer_config.json").read_text())["chat_template"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }


def _quantized(tensor: Floats, kind: GgufType) -> tuple[bytes, Floats]:
    """Return the bytes of a quantized tensor, and the values that they represent."""
    if kind == "F32":
        return tensor.astype("<f4").tobytes(), tensor
    if kind == "F16":
        return tensor.astype("<f2").tobytes(), tensor.astype(np.float16).astype(np.float32)
    blocks = tensor.reshape(-1, 32)
    if kind == "MXFP4":
        return _in_mxfp4(blocks, tensor.shape)
    highest = 127 if kind == "Q8_0" else 7
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / highest).astype(np.float16)
    values = np.rint(blocks / scales.astype(np.float32)).clip(-highest - 1, highest).astype(np.int8)
    meaning = (values.astype(np.float32) * scales.astype(np.float32)).reshape(tensor.shape)
    if kind == "Q8_0":
        parts = values.view(np.uint8)
    else:
        unsigned = (values + 8).astype(np.uint8)
        parts = unsigned[:, :16] | (unsigned[:, 16:] << 4)
    return np.concatenate([scales.view(np.uint8).reshape(-1, 2), parts], axis=1).tobytes(), meaning


def _in_mxfp4(blocks: Floats, shape: tuple[int, ...]) -> tuple[bytes, Floats]:
    """A byte of an exponent for 32 values; the first 16 of them are the lower halves of 16 bytes."""
    exponents = np.ceil(np.log2(np.abs(blocks).max(axis=1, keepdims=True) / 6))
    codes = np.abs(blocks[..., None] / 2 ** exponents[..., None] - _MXFP4_VALUES).argmin(-1).astype(np.uint8)
    parts = codes[:, :16] | codes[:, 16:] << 4
    meaning: Floats = (_MXFP4_VALUES[codes] * 2**exponents).astype(np.float32).reshape(shape)
    return np.concatenate([(exponents + 127).astype(np.uint8), parts], axis=1).tobytes(), meaning


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case np.integer():
            number, form = {np.dtype(np.uint16): (2, "<IH"), np.dtype(np.int32): (5, "<Ii")}[value.dtype]
            return struct.pack(form, number, int(value))
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [bool(), *_]:
            return struct.pack("<IIQ", 9, 7, len(value)) + struct.pack(f"<{len(value)}?", *value)
        case [float(), *_]:
            return struct.pack("<IIQ", 9, 6, len(value)) + struct.pack(f"<{len(value)}f", *value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case _:
            return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)

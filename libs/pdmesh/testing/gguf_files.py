"""Small GGUF files of checkpoints, made by the format's documentation: dense ones, Qwen3-MoE's, Mixtral's."""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
#: What matrices are stored as; vectors are in fp32.
GgufType = Literal["F32", "F16", "Q8_0", "Q4_0"]
_NUMBERS: dict[GgufType, int] = {"F32": 0, "F16": 1, "Q8_0": 8, "Q4_0": 2}
_ALIGNMENT = 32
_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}


def write_gguf(source: Path, file: Path, gguf_type: GgufType = "F32") -> dict[str, Floats]:
    """Write ``file`` from a checkpoint in fp32; return what its tensors stand for, by the checkpoint's names."""
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    name = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    num_heads = config["num_attention_heads"]
    theta = config["rope_theta"] if "rope_theta" in config else config["rope_parameters"]["rope_theta"]
    num_experts = config.get("num_local_experts") or config.get("num_experts")
    metadata: dict[str, Any] = {
        "general.architecture": name,
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.attention.head_count": num_heads,
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config.get("head_dim") or config["hidden_size"] // num_heads,
        f"{name}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{name}.rope.freq_base": float(theta),
        **_tokenizer(source, config),
    }
    if num_experts:
        inner = config.get("moe_intermediate_size") or config["intermediate_size"]
        metadata |= {
            f"{name}.expert_count": num_experts,
            f"{name}.expert_used_count": config["num_experts_per_tok"],
            f"{name}.expert_feed_forward_length": inner,
        }
    meanings: dict[str, Floats] = {}
    stored: dict[str, tuple[tuple[int, ...], int, bytes]] = {}
    experts: defaultdict[str, dict[int, tuple[bytes, tuple[int, ...]]]] = defaultdict(dict)
    for full_name, tensor in load_file(source / "model.safetensors").items():
        kind: GgufType = gguf_type if tensor.ndim == 2 and _NAMES.get(_part(full_name)) != "ffn_gate_inp" else "F32"
        heads = {"q_proj": num_heads, "k_proj": config["num_key_value_heads"]}.get(full_name.split(".")[-2], 0)
        turned = _turned(tensor, heads) if heads and name == "llama" else tensor
        data, meaning = _quantized(turned, kind)
        meanings[full_name] = _turned_back(meaning, heads) if heads and name == "llama" else meaning
        if expert := _EXPERT.fullmatch(full_name):
            experts[f"blk.{expert[1]}.ffn_{_EXPERT_NAMES[expert[3]]}_exps.weight"][int(expert[2])] = (
                data,
                tensor.shape,
            )
        else:
            stored[_own_name(full_name)] = (tensor.shape, _NUMBERS[kind], data)
    for own_name, parts in experts.items():
        datas, shapes = zip(*(parts[number] for number in sorted(parts)), strict=True)
        stored[own_name] = ((len(datas), *shapes[0]), _NUMBERS[gguf_type], b"".join(datas))
    file.write_bytes(encoded(metadata, stored))
    return meanings


def encoded(metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    """A file; a tensor is its shape, its type's number, and its data."""
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


def _own_name(name: str) -> str:
    end = name.rpartition(".")[2]
    if not name.startswith("model.layers."):
        return f"{_NAMES[_part(name)]}.{end}"
    layer = name.split(".")[2]
    return f"blk.{layer}.{_NAMES[_part(name)]}.{end}"


def _part(name: str) -> str:
    """A tensor's name without its layer and its end."""
    name = name.rpartition(".")[0]
    return name.split(".", 3)[3] if name.startswith("model.layers.") else name


def _turned(tensor: Floats, num_heads: int) -> Floats:
    """Rows of heads as GGML's Llama rotates them: the halves of a head in turns."""
    return tensor.reshape(num_heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _turned_back(tensor: Floats, num_heads: int) -> Floats:
    return tensor.reshape(num_heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _quantized(tensor: Floats, kind: GgufType) -> tuple[bytes, Floats]:
    """A tensor's bytes, and what they stand for."""
    if kind == "F32":
        return tensor.astype("<f4").tobytes(), tensor
    if kind == "F16":
        return tensor.astype("<f2").tobytes(), tensor.astype(np.float16).astype(np.float32)
    blocks = tensor.reshape(-1, 32)
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


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case _:
            return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)

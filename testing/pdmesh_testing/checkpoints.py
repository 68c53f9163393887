"""Small random Hugging Face checkpoints, written without torch or transformers, and loadable by both.

Weights are drawn so that greedy output wanders over the vocabulary: layers add more to the residual stream than the
embedding does (tied weights would otherwise repeat their input), and the logits' standard deviation is about 3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pdmesh_testing.tokenizers import CHAT_TEMPLATE, EOS_TOKEN, SPECIAL_TOKENS, write_tokenizer

Family = Literal["llama", "qwen2", "qwen3"]

_CLASS_NAMES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LOGITS_STD = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointShape:
    """Size of a random model. The tokenizer fills ``vocab_size`` exactly; 272 (bytes, words, specials) is the least."""

    vocab_size: int = 320
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 8192
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False


TINY = CheckpointShape()

#: The model of ``benchmarks/``: 82M parameters.
LLAMA_82M = CheckpointShape(
    vocab_size=8192,
    hidden_size=768,
    intermediate_size=2048,
    num_layers=12,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    max_position_embeddings=32768,
    rope_theta=500_000.0,
    tie_word_embeddings=True,
)

#: The shape of Llama 3 8B; too large for a random checkpoint in a file, see `write_config`.
LLAMA_3_8B = CheckpointShape(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rope_theta=500_000.0,
)


def write_config(directory: Path, *, shape: CheckpointShape, dtype: Literal["float32", "bfloat16"]) -> Path:
    """Write ``config.json`` alone, of a Llama: for an engine that draws its own weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _config("llama", shape, dtype, None, False, attention_bias=False, mlp_bias=False)
    _write_json(directory / "config.json", config)
    return directory


def write_checkpoint(
    directory: Path,
    *,
    architecture: Family = "llama",
    shape: CheckpointShape = TINY,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seed: int = 0,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_parameters_key: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    sharded: bool = False,
    initializer_gain: float = 1.5,
    template: str = CHAT_TEMPLATE,
    pools: bool = False,
    **shape_changes: Any,
) -> Path:
    """Write a whole model directory and return it; ``shape_changes`` are fields of `CheckpointShape`.

    ``rope_parameters_key`` writes the RoPE settings as transformers 5 does, else as 4 did. ``attention_bias`` and
    ``mlp_bias`` are Llama's. ``initializer_gain`` over the square root of the fan-in is the weights' deviation.
    ``template`` is the chat template. ``pools``: the checkpoint is one for embeddings, of the last token; as such ones
    are, it has no head, and no ``model.`` before its tensors' names.
    """
    shape = replace(shape, **shape_changes)
    if pools:
        shape = replace(shape, tie_word_embeddings=True)
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(
        architecture, shape, dtype, rope_scaling, rope_parameters_key, attention_bias=attention_bias, mlp_bias=mlp_bias
    )
    _write_json(directory / "config.json", config)
    eos_token_id = config["eos_token_id"]
    _write_json(directory / "generation_config.json", {"bos_token_id": 256, "eos_token_id": [eos_token_id, 256]})
    write_tokenizer(
        directory, vocab_size=shape.vocab_size, model_max_length=shape.max_position_embeddings, template=template
    )

    draw = _Draw(np.random.default_rng(seed), initializer_gain)
    tensors = _tensors(
        draw,
        shape,
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=architecture == "qwen3",
    )
    if pools:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        _write_modules(directory)
    if sharded:
        _write_shards(directory, tensors, dtype)
    else:
        write_safetensors(directory / "model.safetensors", tensors, dtype)
    return directory


def _write_modules(directory: Path) -> None:
    """Say as sentence-transformers does that a text's embedding is its last token's, normalised."""
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (path, kind) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    _write_json(directory / "1_Pooling" / "config.json", pooling)


def write_safetensors(
    path: Path, tensors: Mapping[str, npt.NDArray[np.float32]], dtype: Literal["float32", "bfloat16"]
) -> None:
    """Write tensors in the safetensors format: header length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.size * (4 if dtype == "float32" else 2)
        header[name] = {
            "dtype": "F32" if dtype == "float32" else "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values():
            file.write((tensor if dtype == "float32" else _to_bfloat16(tensor)).tobytes())


def _to_bfloat16(tensor: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16, ties to even."""
    bits = tensor.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True, slots=True)
class _Draw:
    rng: np.random.Generator
    gain: float

    def matrix(self, rows: int, columns: int) -> npt.NDArray[np.float32]:
        return self.rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(self.gain / columns**0.5)

    def logit_matrix(self, rows: int, columns: int) -> npt.NDArray[np.float32]:
        return self.rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(_LOGITS_STD / columns**0.5)

    def bias(self, size: int) -> npt.NDArray[np.float32]:
        return self.rng.standard_normal(size, dtype=np.float32) * np.float32(0.3)

    def norm(self, size: int) -> npt.NDArray[np.float32]:
        return np.float32(1) + self.rng.standard_normal(size, dtype=np.float32) * np.float32(0.1)


def _tensors(
    draw: _Draw, shape: CheckpointShape, *, qkv_bias: bool, output_bias: bool, mlp_bias: bool, qk_norm: bool
) -> dict[str, npt.NDArray[np.float32]]:
    hidden, q_size, kv_size = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": draw.logit_matrix(shape.vocab_size, hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        projections = [
            ("self_attn.q_proj", q_size, hidden, qkv_bias),
            ("self_attn.k_proj", kv_size, hidden, qkv_bias),
            ("self_attn.v_proj", kv_size, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, q_size, output_bias),
            ("mlp.gate_proj", shape.intermediate_size, hidden, mlp_bias),
            ("mlp.up_proj", shape.intermediate_size, hidden, mlp_bias),
            ("mlp.down_proj", hidden, shape.intermediate_size, mlp_bias),
        ]
        for name, rows, columns, has_bias in projections:
            tensors[f"{prefix}.{name}.weight"] = draw.matrix(rows, columns)
            if has_bias:
                tensors[f"{prefix}.{name}.bias"] = draw.bias(rows)
        tensors[f"{prefix}.input_layernorm.weight"] = draw.norm(hidden)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = draw.norm(hidden)
        if qk_norm:
            tensors[f"{prefix}.self_attn.q_norm.weight"] = draw.norm(shape.head_dim)
            tensors[f"{prefix}.self_attn.k_norm.weight"] = draw.norm(shape.head_dim)
    tensors["model.norm.weight"] = draw.norm(hidden)
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = draw.logit_matrix(shape.vocab_size, hidden)
    return tensors


def _config(
    architecture: Family,
    shape: CheckpointShape,
    dtype: str,
    rope_scaling: Mapping[str, Any] | None,
    rope_parameters_key: bool,
    *,
    attention_bias: bool,
    mlp_bias: bool,
) -> dict[str, Any]:
    fields = asdict(shape)
    rope_theta = fields.pop("rope_theta")
    config: dict[str, Any] = {
        "architectures": [_CLASS_NAMES[architecture]],
        "model_type": architecture,
        "num_hidden_layers": fields.pop("num_layers"),
        "num_attention_heads": fields.pop("num_heads"),
        "num_key_value_heads": fields.pop("num_kv_heads"),
        **fields,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "bos_token_id": 256 + SPECIAL_TOKENS.index("<|endoftext|>"),
        "eos_token_id": 256 + SPECIAL_TOKENS.index(EOS_TOKEN),
        "dtype" if rope_parameters_key else "torch_dtype": dtype,
    }
    if architecture == "llama":
        config |= {"attention_bias": attention_bias, "mlp_bias": mlp_bias}
    if rope_parameters_key:
        config["rope_parameters"] = {"rope_type": "default", **(rope_scaling or {}), "rope_theta": rope_theta}
    else:
        config |= {"rope_theta": rope_theta, "rope_scaling": None if rope_scaling is None else dict(rope_scaling)}
    return config


def _write_shards(
    directory: Path, tensors: Mapping[str, npt.NDArray[np.float32]], dtype: Literal["float32", "bfloat16"]
) -> None:
    names = sorted(tensors)
    shards = (names[::2], names[1::2])
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / file_name, {name: tensors[name] for name in shard}, dtype)
        weight_map |= dict.fromkeys(shard, file_name)
    total = sum(tensor.size for tensor in tensors.values()) * (4 if dtype == "float32" else 2)
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

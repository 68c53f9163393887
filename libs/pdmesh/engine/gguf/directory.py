"""A GGUF file as a directory that looks like a checkpoint: ``config.json``, tokenizer, template, and the file itself.

Every service that is given the file makes the directory, or finds it made: it lies under the user's cache, by the
file's path, size and time. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pdmesh.engine.gguf.reader import GgufHeader, read_header
from pdmesh.engine.gguf.tokenizer import write_tokenizer
from pdmesh.errors import ConfigError

#: What a directory's weights are called.
WEIGHTS = "model.gguf"

#: Of what a directory has in it: another number makes it anew.
_VERSION = 2

#: GGUF's architectures: transformers' class name, and whether the pairs that are rotated lie side by side.
_ARCHITECTURES: Mapping[str, tuple[str, bool]] = {
    "llama": ("LlamaForCausalLM", True),
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
    "qwen3moe": ("Qwen3MoeForCausalLM", False),
}

#: Where a file has experts: transformers' class name, and what its ``config.json`` calls their number.
_WITH_EXPERTS: Mapping[str, tuple[str, str]] = {
    "llama": ("MixtralForCausalLM", "num_local_experts"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "num_experts"),
}


def gguf_directory(file: Path) -> Path:
    """The directory of a file. Raises ConfigError for what cannot be served."""
    status = file.stat()
    identity = f"{_VERSION} {file.resolve()} {status.st_size} {status.st_mtime_ns}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pdmesh" / "gguf"
    directory = cache / f"{file.stem}-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}"
    if (directory / "config.json").exists():
        return directory
    header = read_header(file)
    config = config_of(header, str(file))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache))
    except OSError as error:
        raise ConfigError(f"{cache} cannot be written: {error.strerror}; set XDG_CACHE_HOME") from error
    try:
        (made / "config.json").write_text(json.dumps(config, indent=2))
        write_tokenizer(made, header.metadata, str(file))
        (made / WEIGHTS).symlink_to(file.resolve())
        try:
            made.rename(directory)
        except OSError:  # another service was first
            if not (directory / "config.json").exists():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return directory


def config_of(header: GgufHeader, where: str) -> dict[str, Any]:
    """The ``config.json`` that transformers would have for it."""
    fields = header.metadata
    name = fields.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        served = ", ".join(_ARCHITECTURES)
        raise ConfigError(
            f"{where}: the GGUF architecture is {str(name)[:64]!r}, which is not served; served are {served}, or give "
            "the model's safetensors directory"
        )
    class_name, interleaves = _ARCHITECTURES[name]
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{where}: there is no matrix 'token_embd.weight'")

    def of(key: str) -> Any:
        return fields.get(f"{name}.{key}")

    experts: dict[str, Any] = {}
    if of("expert_count"):
        class_name, number = _experts_of(name, of, where)
        experts = {
            number: of("expert_count"),
            "num_experts_per_tok": of("expert_used_count"),
            "moe_intermediate_size": of("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    num_heads, context = of("attention.head_count"), of("context_length")
    return {
        "architectures": [class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": of("attention.head_count_kv") or num_heads,
        "head_dim": of("attention.key_length") or _head_dim(of("embedding_length"), num_heads),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "rope_parameters": _rope(header, name, context, where),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float16" if embedding.type_number == 1 else "bfloat16",
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "quantization_config": {"quant_method": "gguf", "interleaves_rotation": interleaves},
        **experts,
    }


def _experts_of(name: str, of: Callable[[str], Any], where: str) -> tuple[str, str]:
    """The class with experts of a GGUF architecture, and its name of their number."""
    others = [key for key in ("expert_shared_count", "expert_group_count") if of(key)]
    if of("expert_weights_scale") not in (None, 0.0, 1.0):
        others.append("expert_weights_scale")
    if name not in _WITH_EXPERTS or others:
        what = f"experts with {', '.join(others)}" if others else f"experts of {name!r}"
        served = ", ".join(_WITH_EXPERTS)
        raise ConfigError(
            f"{where}: {what} are not served from GGUF; served are plain ones of {served}, or give the model's "
            "safetensors directory"
        )
    return _WITH_EXPERTS[name]


def _head_dim(hidden_size: object, num_heads: object) -> int | None:
    if not isinstance(hidden_size, int) or not isinstance(num_heads, int) or num_heads < 1:
        return None
    return hidden_size // num_heads


def _rope(header: GgufHeader, name: str, context: object, where: str) -> dict[str, Any]:
    """Llama 3.1's scaling lies in a tensor of divisors of frequencies, which the file has in fp32."""
    theta = header.metadata.get(f"{name}.rope.freq_base", 10_000.0)
    kind = header.metadata.get(f"{name}.rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        return {
            "rope_type": kind,
            "rope_theta": theta,
            "factor": header.metadata.get(f"{name}.rope.scaling.factor"),
            "original_max_position_embeddings": header.metadata.get(
                f"{name}.rope.scaling.original_context_length", context
            ),
        }
    if kind != "none":
        raise ConfigError(
            f"{where}: RoPE scaling {str(kind)[:64]!r} is not served from GGUF; give the safetensors directory"
        )
    divisors = header.tensors.get("rope_freqs.weight")
    if divisors is None:
        return {"rope_type": "default", "rope_theta": theta}
    if divisors.type_number != 0 or len(divisors.shape) != 1:
        raise ConfigError(f"{where}: 'rope_freqs.weight' is no vector in fp32")
    import numpy as np

    values = np.fromfile(where, dtype="<f4", count=divisors.shape[0], offset=divisors.offset).tolist()
    return {
        "rope_type": "longrope",  # of which this is a case: the same divisors for every length
        "rope_theta": theta,
        "short_factor": values,
        "long_factor": values,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }

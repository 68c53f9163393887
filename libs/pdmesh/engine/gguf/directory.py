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
from pathlib import Path
from typing import Any

from pdmesh.engine.gguf.architectures import ARCHITECTURES, ExpertFields, GgufModel
from pdmesh.engine.gguf.reader import TYPES, GgufHeader, read_header
from pdmesh.engine.gguf.tokenizer import end_tokens, write_tokenizer
from pdmesh.errors import ConfigError

#: What a directory's weights are called.
WEIGHTS = "model.gguf"

#: Letters of a file's name in its directory's, whose own may be as long.
_MAX_STEM = 48

#: Of what a directory has in it: another number makes it anew.
_VERSION = 4


def gguf_directory(file: Path) -> Path:
    """The directory of a file. Raises ConfigError for what cannot be served."""
    status = file.stat()
    identity = f"{_VERSION} {file.resolve()} {status.st_size} {status.st_mtime_ns}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pdmesh" / "gguf"
    directory = cache / f"{file.stem[:_MAX_STEM]}-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}"
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
        made.rename(directory)
    except OSError as error:
        if not (directory / "config.json").exists():  # else another service was first
            raise ConfigError(f"{directory} cannot be written: {error.strerror}; set XDG_CACHE_HOME") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return directory


def config_of(header: GgufHeader, where: str) -> dict[str, Any]:
    """The ``config.json`` that transformers would have for it."""
    fields = header.metadata
    name = fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{where}: the GGUF architecture is {str(name)[:64]!r}, which is not served; served are {served}, or give "
            "the model's safetensors directory"
        )
    architecture, model = ARCHITECTURES[name], GgufModel(name, header, where)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{where}: there is no matrix 'token_embd.weight'")
    if not architecture.rotates_partly and model.of("rope.dimension_count") not in (None, model.head_dim):
        raise ConfigError(f"{where}: a part of a head is rotated, which is not served of {name!r} from GGUF")
    num_heads = model.of("attention.head_count")
    return {
        "architectures": [architecture.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": model.of("embedding_length"),
        "intermediate_size": model.of("feed_forward_length"),
        "num_hidden_layers": model.of("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": model.of("attention.head_count_kv") or num_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.of("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": model.of("context_length"),
        "rope_parameters": model.rope(),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float16" if embedding.type_number == 1 else "bfloat16",
        "eos_token_id": end_tokens(fields),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "quantization_config": {
            "quant_method": "gguf",
            "interleaves_rotation": architecture.interleaves_rotation,
            "has_codes": any(TYPES[tensor.type_number].num_values > 1 for tensor in header.tensors.values()),
        },
        **(model.partial_rotation() if architecture.rotates_partly else {}),
        **_experts(model, architecture.experts),
        **architecture.more(model),
    }


def _experts(model: GgufModel, experts: ExpertFields | None) -> dict[str, Any]:
    """What is said of experts."""
    number = model.of("expert_count")
    if not number and (experts is None or ARCHITECTURES[model.name].class_name):
        return {}
    others = [key for key in ("expert_shared_count", "expert_group_count") if model.of(key)]
    if model.of("expert_weights_scale") not in (None, 0.0, 1.0):
        others.append("expert_weights_scale")
    if experts is None or others:
        what = f"experts with {', '.join(others)}" if others else f"experts of {model.name!r}"
        served = ", ".join(name for name, each in ARCHITECTURES.items() if each.experts is not None)
        raise ConfigError(
            f"{model.where}: {what} are not served from GGUF; served are plain ones of {served}, or give the model's "
            "safetensors directory"
        )
    return {
        "architectures": [experts.class_name],
        experts.number: number,
        "num_experts_per_tok": model.of("expert_used_count"),
        "moe_intermediate_size": model.of("expert_feed_forward_length"),
        "norm_topk_prob": experts.normalizes,
    }

"""A GGUF model as a checkpoint's directory: ``config.json``, tokenizer, template, and links to its files.

Every service that gets the model finds or makes the directory in the user's cache. Paths, sizes and times of the files
identify it. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdmesh.engine.gguf.gguf_architectures import ARCHITECTURES, ExpertFields
from pdmesh.engine.gguf.gguf_model import GgufModel
from pdmesh.engine.gguf.gguf_reader import TYPES, GgufHeader, part_paths, read_parts
from pdmesh.engine.gguf.gguf_tokenizer import end_tokens, write_tokenizer
from pdmesh.engine.json_files import read_json_object
from pdmesh.errors import ConfigError

#: Name of a directory's weights, or of the first part if the model is split.
WEIGHTS = "model.gguf"

#: Length of a file name's beginning in the directory's name.
_MAX_STEM = 48

#: Version of the directories' content. Another number makes every directory anew.
_VERSION = 6

#: Prefix of files that contain an image encoder instead of a model.
_OF_IMAGES = "mmproj"

#: Names in sentence-transformers of the numbers of ``pooling_type``. 0 means no embeddings.
_POOLINGS = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken", 4: "rank"}

#: llama.cpp's sampling settings, used if neither the request nor the file has any.
_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_SAMPLING_KEYS = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip
_GENERATION = "generation_config.json"

#: Number of models that an error lists.
_MAX_SHOWN = 12


def gguf_directory(file: Path) -> Path:
    """Return the directory of a model, given its file or one part.

    The directory is made unless it exists. Raise ConfigError for a model that cannot be served.
    """
    paths = [path.resolve() for path in part_paths(file.absolute())]
    beside = file.absolute().with_name(_GENERATION)
    identity = " ".join([str(_VERSION), *map(_identity_of, [*paths, beside])])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pdmesh" / "gguf"
    directory = cache / f"{file.stem[:_MAX_STEM]}-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}"
    if (directory / "config.json").exists():
        return directory
    header = read_parts(paths)
    config = config_of(header, str(file))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache))
    except OSError as error:
        raise ConfigError(f"{cache} cannot be written: {error.strerror}; set XDG_CACHE_HOME") from error
    try:
        (made / "config.json").write_text(json.dumps(config, indent=2))
        write_tokenizer(made, header.metadata, str(file))
        _write_pooling(made, header.metadata)
        sampling = _sampling(header.metadata, beside)
        (made / _GENERATION).write_text(json.dumps(sampling, indent=2))
        for link, path in zip(_links(made, len(paths)), paths, strict=True):
            link.symlink_to(path)
        made.rename(directory)
    except OSError as error:
        if not (directory / "config.json").exists():  # otherwise another service was first
            raise ConfigError(f"{directory} cannot be written: {error.strerror}; set XDG_CACHE_HOME") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return directory


def find_model(folder: Path) -> Path | None:
    """Return a file of the only GGUF model in a folder, or None if the folder has another checkpoint or none.

    Raise ConfigError for several models.
    """
    if any(folder.glob("*.safetensors")) or _is_made(folder):
        return None
    files = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith(_OF_IMAGES))
    models = {part_paths(path)[0].name: path for path in files}
    if len(models) > 1:
        names = ", ".join([*models][:_MAX_SHOWN]) + (", …" if len(models) > _MAX_SHOWN else "")
        raise ConfigError(f"{folder} holds {len(models)} GGUF models; give the path of one of them: {names}")
    return next(iter(models.values()), None)


def _sampling(metadata: Mapping[str, Any], beside: Path) -> dict[str, Any]:
    """Return the sampling settings of a ``generation_config.json`` beside the file.

    Without one, return the model's own settings, completed by llama.cpp's.
    """
    if beside.is_file():
        given = read_json_object(beside)
        return {name: given[name] for name in (*_SAMPLING, "repetition_penalty") if name in given}
    own = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING_KEYS.items()}
    own = {name: value for name, value in own.items() if isinstance(value, int | float)}
    return {**_SAMPLING, **own, "source": "the model file and llama.cpp" if own else "llama.cpp"}


def _write_pooling(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write sentence-transformers' files if the file names a pooling. As in llama.cpp, embeddings are normalised."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if not isinstance(kind, int) or kind not in _POOLINGS:
        return
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{_POOLINGS[kind]}": True}))


def _links(folder: Path, count: int) -> list[Path]:
    """Return the paths of a folder's links to weights, in the names that `pdmesh.engine.files.weight_files` finds."""
    return [folder / WEIGHTS, *(folder / f"model-{number:05d}.gguf" for number in range(2, count + 1))]


def _is_made(folder: Path) -> bool:
    """Return whether `gguf_directory` wrote ``config.json``. Some models are published with one beside the file."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return bool(config["quantization_config"]["quant_method"] == "gguf")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _identity_of(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:  # reading the part reports the error
        return f"{path} is missing"
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def config_of(header: GgufHeader, where: str) -> dict[str, Any]:
    """Return the ``config.json`` that transformers would have. Raise ConfigError for models that are not served."""
    fields = header.metadata
    name = fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{where}: the GGUF architecture is {str(name)[:64]!r}, which is not supported; give one of {served}, or "
            "the model's safetensors directory"
        )
    architecture, model = ARCHITECTURES[name], GgufModel(name, header, where)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{where}: tensor 'token_embd.weight' is missing; download the file again")
    if not architecture.rotates_partly and model.of("rope.dimension_count") not in (None, model.head_dim):
        raise ConfigError(f"{where}: partial rotary embeddings of {name!r} are not supported from GGUF")
    num_heads, experts = model.of("attention.head_count"), _experts(model, architecture.experts)
    return {
        "architectures": [architecture.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": model.of("embedding_length"),
        "intermediate_size": model.of("feed_forward_length"),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": model.of("attention.head_count_kv") or num_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.of("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": model.of("context_length"),
        "rope_parameters": model.rope(),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float16" if embedding.type_number == 1 else "bfloat16",
        "eos_token_id": end_tokens(fields, where) if "tokenizer.ggml.tokens" in fields else [],
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "quantization_config": {
            "quant_method": "gguf",
            "interleaves_rotation": architecture.interleaves_rotation,
            "tiles_heads": architecture.tiles_heads,
            "biases": model.biases(),
            "names": {**model.fused(), **architecture.divides(model)},
            "has_codes": any(TYPES[tensor.type_number].num_values > 1 for tensor in header.tensors.values()),
        },
        **(model.partial_rotation() if architecture.rotates_partly else {}),
        **experts,
        **architecture.more(model),
    }


def _experts(model: GgufModel, experts: ExpertFields | None) -> dict[str, Any]:
    """Return the fields of ``config.json`` about experts, empty if there are none. Raise ConfigError if not served."""
    number = model.of("expert_count")
    if not number and (experts is None or ARCHITECTURES[model.name].class_name):
        return {}
    others = [key for key in ("expert_shared_count", "expert_group_count") if model.of(key)]
    if model.of("expert_weights_scale") not in (None, 0.0, 1.0):
        others.append("expert_weights_scale")
    others = [key for key in others if experts is None or key not in experts.reads]
    if experts is None or others:
        what = f"experts with {', '.join(others)}" if others else f"experts of {model.name!r}"
        served = ", ".join(name for name, each in ARCHITECTURES.items() if each.experts is not None)
        raise ConfigError(
            f"{model.where}: {what} are not supported from GGUF; give one of {served} with plain experts, or the "
            "model's safetensors directory"
        )
    return {
        "architectures": [experts.class_name],
        experts.number: number,
        "num_experts_per_tok": model.of("expert_used_count"),
        "moe_intermediate_size": model.of("expert_feed_forward_length"),
        "norm_topk_prob": experts.normalizes,
    }

"""Paths and metadata of a model's files. Torch-free, for gateways."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from safetensors import SafetensorError, safe_open

from pdmesh.engine.architectures import parse_model_config, text_fields
from pdmesh.engine.json_files import read_json_object
from pdmesh.engine.known_models import KNOWN_MODELS, known_model
from pdmesh.engine.model_config import ModelConfig, UndescribedModel
from pdmesh.errors import ConfigError

log = structlog.get_logger()

#: Hub files that serving needs. Weights in other formats are not downloaded.
_HUB_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "*.txt", "*.model"]

#: First bytes of a file that Git LFS has not fetched.
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultSampling:
    """Default sampling settings from ``generation_config.json`` for requests without their own. None: not set there.

    ``source`` names the origin of the settings.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    source: str = "generation_config.json"

    @property
    def fields(self) -> dict[str, float]:
        """The settings that are set, by name."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {value:g}" for name, value in self.fields.items())
        return f"{shown} of {self.source}" if shown else "temperature 1, top_p 1 of OpenAI's API"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Properties of a model that gateways need. ``fingerprint`` is a digest of its ``config.json``."""

    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: DefaultSampling
    fingerprint: bytes
    #: Longest prompt whose tokens' KV depends on the tokens before alone. In longer prompts, it depends on the prompt's
    #: length, too. None: no limit.
    max_fixed_rope_tokens: int | None = None


def resolve_model(model: str, say: Callable[[str], None] | None = None) -> Path:
    """Return the directory of ``model``: a directory, a GGUF file, a name of `KNOWN_MODELS` or a hub id.

    Blocking: models of the latter two kinds are downloaded unless they are cached. ``say`` announces the download of a
    known model, and logs by default. Hugging Face's environment variables (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN,
    HF_ENDPOINT) apply. Raise ConfigError if there is no such model.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _of_folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model {model!r} is a file; give the directory that holds config.json, or a .gguf file")
        return _of_folder(path)
    if model in KNOWN_MODELS:
        return _of_folder(known_model(model, say or log.info))
    check_hub_id(model)

    import huggingface_hub  # imported late: only a hub id needs it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except HFValidationError as error:
        raise _no_model(model) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model {model!r} is not a directory and not in the Hugging Face cache, and the hub cannot be reached;"
            " give a directory, or check the network and HF_HUB_OFFLINE"
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"model {model!r} is not a directory and the Hugging Face hub refuses it;"
            " check the name, and HF_TOKEN if the model is gated"
        ) from error
    except OSError as error:
        raise ConfigError(f"model {model!r} could not be downloaded: {error}") from error


def _of_folder(path: Path) -> Path:
    """Return the folder itself, or the folder made from a GGUF model: the file, or the only one in the folder."""
    if path.is_dir() and not any(path.glob("*.gguf")):
        return path
    from pdmesh.engine.gguf.directory import find_model, gguf_directory  # imported late: only GGUF models need them

    model = find_model(path) if path.is_dir() else path
    return path if model is None else gguf_directory(model)


def check_hub_id(model: str) -> None:
    """Raise ConfigError if ``model``, which is no file or directory, cannot be a hub id: "name" or "owner/name"."""
    if model.endswith((".gguf", ".safetensors")):
        raise ConfigError(f"model {model!r}: there is no such file")
    if model.count("/") > 1 or model.startswith((".", "/", "~")):
        raise ConfigError(f"model {model!r}: there is no such file or directory")
    if ":" in model:
        raise ConfigError(
            f"model {model!r} is another tool's name for a model: give a Hugging Face hub id such as "
            f"'Qwen/Qwen3-0.6B', a directory, a .gguf file, or {' or '.join(KNOWN_MODELS)}"
        )
    if not model:
        raise _no_model(model)


def _no_model(model: str) -> ConfigError:
    return ConfigError(f"model {model!r} is neither a directory nor a Hugging Face hub id")


def with_adapter(name: str, lora: Path | None) -> str:
    """Return the model's name with the merged adapter's name, if any, appended: other weights need another name."""
    return name if lora is None else f"{name}+{lora.absolute().name}"


def served_name(model: str) -> str:
    """Return the default name of ``model`` for clients: the name of the directory or file, else ``model`` itself."""
    path = Path(model).expanduser()
    if path.is_file():
        return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return path.resolve().name if path.is_dir() else model


def load_model_config(directory: Path) -> ModelConfig | UndescribedModel:
    """Read and check ``config.json``. Raise ConfigError for a model that cannot be served."""
    path = directory / "config.json"
    return parse_model_config(read_json_object(path), str(path))


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint's weights: safetensors or GGUF.

    Raise ConfigError for a file that is missing, a Git LFS pointer or unreadable.
    """
    if (first := directory / "model.gguf").exists():  # written by `pdmesh.engine.gguf.directory`
        return [first, *sorted(directory.glob("model-?????.gguf"))]
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        paths = [single]
    elif index.exists():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(f"{index} holds no weight_map of tensor names to file names")
        # Only names of plain files are used: an index cannot point outside its directory.
        paths = [directory / Path(name).name for name in sorted(set(weight_map.values()))]
    else:
        others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in directory.glob(pattern))
        found = (
            f" but {others[0]}: save the checkpoint as safetensors" if others else ": download all files of the model"
        )
        raise ConfigError(f"{directory} holds no model.safetensors and no model.safetensors.index.json{found}")
    for path in paths:
        try:
            with path.open("rb") as file:
                is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
        except FileNotFoundError as error:
            raise ConfigError(f"{path} is missing, but {index.name} names it: download it again") from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if is_pointer:
            raise ConfigError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in {directory}")
        try:
            with safe_open(path, framework="np"):
                pass  # reads the header, and compares the sizes with the file's length
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} is not a readable safetensors file: {error}; download it again") from error
    return paths


def load_model_info(directory: Path) -> ModelInfo:
    """Read ``config.json`` and, if present, ``generation_config.json``. Raise ConfigError for wrong content."""
    raw_config = read_json_object(directory / "config.json")
    config = parse_model_config(raw_config, str(directory / "config.json"))
    path = directory / "generation_config.json"
    generation = read_json_object(path) if path.exists() else {}
    text = text_fields(raw_config) or {}
    eos = generation.get("eos_token_id", raw_config.get("eos_token_id", text.get("eos_token_id")))
    eos_token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token_id, int) for token_id in eos_token_ids):
        raise ConfigError(f"{directory}: eos_token_id is {eos!r}; it must be token ids")
    return ModelInfo(
        architecture=config.architecture,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(eos_token_ids),
        default_sampling=_default_sampling(generation, str(path)),
        fingerprint=hashlib.blake2b(json.dumps(raw_config, sort_keys=True).encode(), digest_size=16).digest(),
        max_fixed_rope_tokens=config.max_fixed_rope_tokens,
    )


def _default_sampling(generation: dict[str, Any], where: str) -> DefaultSampling:
    top_k = _number(generation, "top_k", where)
    return DefaultSampling(
        temperature=_number(generation, "temperature", where),
        top_p=_number(generation, "top_p", where),
        top_k=None if top_k is None else int(top_k),
        min_p=_number(generation, "min_p", where),
        repetition_penalty=_number(generation, "repetition_penalty", where),
        source=str(generation.get("source") or "generation_config.json")[:64],
    )


def _number(raw: dict[str, Any], name: str, where: str) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{where}: {name} is {value!r}; it must be a number")
    return float(value)

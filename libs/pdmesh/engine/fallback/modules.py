"""Loading of transformers' modules from a checkpoint, and a probe of their attention."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from pdmesh.engine.architectures import text_fields
from pdmesh.engine.fallback.fallback_attention import IMPLEMENTATION, Attended, passing, register
from pdmesh.engine.files import weight_files
from pdmesh.engine.json_files import read_json_object
from pdmesh.engine.model_config import UndescribedModel
from pdmesh.engine.unused import check_unused
from pdmesh.errors import ConfigError

#: Largest total size of the tensors that modules create themselves, such as masks. No known model needs more.
_MAX_BUFFER_BYTES = 1 << 28

#: Configuration fields by which a checkpoint could choose code.
_CODE = ("auto_map", "attn_implementation", "experts_implementation")

#: Renaming of a wrapped text model's tensors for its modules, by regular expression.
_RENAMES = {
    r"^(model\.)?language_model\.(model\.)?(?=embed_tokens|layers|norm)": "model.",
    r"^language_model\.lm_head": "lm_head",
}

#: Length of transformers' messages in our errors: some list every tensor.
_MAX_MESSAGE = 300


def probed(directory: Path, model: UndescribedModel) -> UndescribedModel:
    """Return the model with the heads, windows, scale and cap that its modules use, without allocating weights.

    The modules are made on the meta device, and one token goes through. Raise ConfigError if this fails, or the
    attention cannot be served.
    """
    config = _config(directory, model)
    try:
        with _quiet(), torch.device("meta"), torch.inference_mode(), passing(probe := _Probe()):
            modules = _class(model)._from_config(config, attn_implementation=IMPLEMENTATION, dtype=torch.bfloat16)
            _check_size(directory, model, modules)
            modules(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    except ConfigError:
        raise
    except Exception as error:
        raise _refusal(directory, model, f"transformers cannot make it: {sentence_of(error)}") from error
    return probe.shape_of(model, directory)


def load_modules(directory: Path, model: UndescribedModel, dtype: torch.dtype) -> Any:
    """Return transformers' modules with the checkpoint's weights. No code of the checkpoint is run.

    Raise ConfigError for weights that are missing, misshapen or not used.
    """
    try:
        with _quiet():
            modules, found = _class(model).from_pretrained(
                directory,
                config=_config(directory, model),
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                key_mapping=_RENAMES if model.is_wrapped else None,
                ignore_mismatched_sizes=True,  # refused below, in a sentence
                output_loading_info=True,
            )
    except Exception as error:
        raise _refusal(directory, model, f"transformers cannot load it: {sentence_of(error)}") from error
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(f"{directory}: the weights hold no tensor {missing[0]!r}")
    for name, shape, needed in sorted(found["mismatched_keys"]):
        raise ConfigError(f"{directory}: tensor {name!r} has shape {tuple(shape)}; config.json needs {tuple(needed)}")
    check_unused(found["unexpected_keys"], str(directory), partial(_tensor, directory))
    return modules.eval().requires_grad_(False)


def _tensor(directory: Path, name: str) -> Tensor:
    """Read one tensor of a checkpoint's files. Raise ConfigError if no file has it."""
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                tensor: Tensor = file.get_tensor(name)
                return tensor
    raise ConfigError(f"{directory}: the weights hold no tensor {name!r}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' output inside the block. Errors are still raised."""
    hf: Any = transformers  # only partly typed
    level = hf.logging.get_verbosity()
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf.logging.set_verbosity(level)


def sentence_of(error: Exception) -> str:
    """Return transformers' error message on one line, shortened."""
    return " ".join(str(error).split())[:_MAX_MESSAGE] or type(error).__name__


class _Probe:
    """Recorder of the layers' calls of attention. Nothing is computed."""

    def __init__(self) -> None:
        self._calls: list[Attended] = []

    def attend(self, call: Attended) -> Tensor:
        self._calls.append(call)
        _, num_heads, num_tokens, _ = call.query.shape
        return call.query.new_empty(1, num_tokens, num_heads, call.value.shape[-1])

    def shape_of(self, model: UndescribedModel, directory: Path) -> UndescribedModel:
        calls = self._calls
        if not calls or len(calls) != model.num_layers:
            raise _refusal(directory, model, f"{len(calls)} of its {model.num_layers} layers attend")
        first = calls[0]
        if any(_kind(call) != _kind(first) for call in calls):
            raise _refusal(directory, model, "its layers' keys and values differ in shape")
        num_heads, num_kv_heads = first.query.shape[1], first.key.shape[1]
        if first.has_more or first.key.shape != first.value.shape or num_heads % num_kv_heads:
            raise _refusal(directory, model, "its queries, keys and values differ in size")
        return replace(
            model,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=first.key.shape[3],
            layers=tuple(
                replace(layer, window=_window(call, model)) for layer, call in zip(model.layers, calls, strict=True)
            ),
            attention_scale=first.scale,
            score_cap=first.score_cap,
        )


def _kind(call: Attended) -> Sequence[object]:
    """Return the properties that must be equal in all layers."""
    return call.query.shape, call.key.shape, call.value.shape, call.has_more, call.scale, call.score_cap


def _window(call: Attended, model: UndescribedModel) -> int | None:
    return None if call.window is None or call.window >= model.max_model_len else call.window


def _refusal(directory: Path, model: UndescribedModel, why: str) -> ConfigError:
    return ConfigError(f"{directory}: this {model.architecture} is not supported: {why}")


def _class(model: UndescribedModel) -> Any:
    register()
    found = getattr(transformers, model.architecture, None)
    if found is None:
        raise ConfigError(
            f"transformers {transformers.__version__} has no {model.architecture}: install a newer one "
            '(pip install -U "transformers")'
        )
    return found


def _config(directory: Path, model: UndescribedModel) -> Any:
    raw = read_json_object(directory / "config.json")
    if model.is_wrapped:
        raw = text_fields(raw) or raw
    shape = {name: value for name, value in raw.items() if name not in _CODE and not name.startswith("_")}
    try:
        return _class(model).config_class.from_dict(shape)
    except Exception as error:
        raise _refusal(directory, model, f"transformers cannot read config.json: {sentence_of(error)}") from error


def _check_size(directory: Path, model: UndescribedModel, modules: Any) -> None:
    """Raise ConfigError if the modules need more parameters than the files hold, or large buffers."""
    buffer_bytes = sum(buffer.numel() * buffer.itemsize for buffer in modules.buffers())
    if buffer_bytes > _MAX_BUFFER_BYTES:
        raise _refusal(directory, model, f"its modules need {buffer_bytes / (1 << 30):.1f} GiB besides the weights")
    wanted, held = sum(parameter.numel() for parameter in modules.parameters()), _num_values(weight_files(directory))
    if wanted > held:
        raise ConfigError(f"{directory}: config.json needs {wanted} weights, and the files hold {held}")


def _num_values(paths: Sequence[Path]) -> int:
    total = 0
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                values = 1
                for size in file.get_slice(name).get_shape():
                    values *= size
                total += values
    return total

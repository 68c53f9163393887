"""Loading of a checkpoint, or of one rank's part, and its computation."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import structlog
from torch import Tensor

from pdmesh.engine.architectures.undescribed import check_installed
from pdmesh.engine.calibration import FLOAT16_LIMIT, largest_activation, num_calibration_blocks
from pdmesh.engine.checkpoint import load_weights, random_weights
from pdmesh.engine.choosing import choose_compute, choose_library
from pdmesh.engine.compute import Cache, Compute, ComputeOptions, Loaded
from pdmesh.engine.files import load_model_config
from pdmesh.engine.kv_cache import TORCH_DTYPES
from pdmesh.engine.levels import KernelChoice
from pdmesh.engine.model_config import DecoderShape, ModelConfig, QuantizedFormat, UndescribedModel
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.engine.ranks.share import WHOLE, RankShare, check_divisible, check_stages
from pdmesh.errors import ConfigError
from pdmesh.kv_layout import KvLayout

log = structlog.get_logger()


class LoadedModel(Protocol):
    """A checkpoint, or a rank's part of it, in memory."""

    @property
    def config(self) -> DecoderShape:
        """Shape of the whole model."""
        ...

    @property
    def layout(self) -> KvLayout:
        """Layout of the whole KV cache."""
        ...

    @property
    def max_model_len(self) -> int: ...

    def compute(self, num_blocks: int, memory: Tensor | None = None, num_frames: int | None = None) -> Compute:
        """Return the computation of the model over a cache of ``num_blocks`` blocks.

        The cache uses ``memory`` if other processes compute on it, too. Layers with a window have ``num_frames``
        frames; None means one for each block.
        """
        ...


class LoadedWeights(Loaded):
    """A `LoadedModel` with a description here."""

    def compute(self, num_blocks: int, memory: Tensor | None = None, num_frames: int | None = None) -> Compute:
        return choose_compute(self, Cache(num_blocks, memory, num_frames))


class ModelPlan(NamedTuple):
    """Properties of a checkpoint that are known before its weights are read. ``layout`` is of the whole cache."""

    config: DecoderShape
    layout: KvLayout
    max_model_len: int


def plan_model(checkpoint_dir: Path, options: ComputeOptions) -> ModelPlan:
    """Return a checkpoint's configuration, KV layout and context length without reading weights. Raise ConfigError.

    Models without a description here free no KV outside windows: their windows are not known yet.
    """
    config = load_model_config(checkpoint_dir)
    check_installed(config)
    if isinstance(config, UndescribedModel):
        _check_served(config, options)
    if not config.has_equal_layers:
        _check_unequal_layers(config, options)
    max_model_len = config.context(options.max_model_len)
    frees_windows = options.frees_windows and isinstance(config, ModelConfig)
    layout = config.kv_layout(dtype=options.dtype, block_size=options.block_size, frees_windows=frees_windows)
    return ModelPlan(config, layout, max_model_len)


def load_model(
    checkpoint_dir: Path, options: ComputeOptions, share: RankShare = WHOLE, group: RankGroup | None = None
) -> LoadedModel:
    """Load a rank's ``share`` of a checkpoint. ``group`` are the ranks of its stage, if there are several.

    An undecided dtype becomes float16 if the model's activations fit, else bfloat16. Raise ConfigError.
    """
    if _is_undecided(load_model_config(checkpoint_dir), options):
        if share == WHOLE:
            return _load_in_fitting_dtype(checkpoint_dir, options)
        options = replace(options, dtype=decided_dtype(checkpoint_dir, options))
    (config, layout, max_model_len), device = plan_model(checkpoint_dir, options), options.device
    check_divisible(config, share.num_ranks)
    check_stages(config, share.num_stages)
    if isinstance(config, UndescribedModel):
        return _load_undescribed(checkpoint_dir, config, options)
    assert isinstance(config, ModelConfig)
    kernels = KernelChoice(None, "the reference")
    if options.native:
        part = share.config_of(config)
        kernels = choose_library(part, layout, device, cpu_level=options.cpu_level, ordered=options.ordered)
    load = random_weights if options.has_random_weights else partial(load_weights, checkpoint_dir, lora=options.lora)
    weights = load(
        config,
        dtype=TORCH_DTYPES[layout.dtype],
        device=device,
        packed=options.native,
        library=kernels.library,
        group=group,
        share=share,
    )
    give_back_freed_memory()
    return LoadedWeights(
        options=options,
        config=config,
        layout=layout,
        max_model_len=max_model_len,
        weights=weights,
        kernels=kernels,
        share=share,
    )


def decided_dtype(checkpoint_dir: Path, options: ComputeOptions) -> str:
    """Return the dtype that `load_model` uses for a whole model.

    With dtype ``auto``, some quantised models on a CPU are loaded to find out: float16 if their activations fit.
    """
    config = load_model_config(checkpoint_dir)
    if not _is_undecided(config, options):
        return config.compute_dtype(options.dtype)
    return load_model(checkpoint_dir, options).layout.dtype


def _is_undecided(config: DecoderShape, options: ComputeOptions) -> bool:
    """Return whether a quantised model is computed in float16 on a CPU if its activations fit."""
    return (
        options.dtype == "auto"
        and options.device.type == "cpu"
        and options.native
        and isinstance(config, ModelConfig)
        and config.quantization is not None
        and config.quantization.has_integers
        and (config.dtype == "bfloat16" or config.quantization.format is QuantizedFormat.GGUF)
    )


def _load_in_fitting_dtype(checkpoint_dir: Path, options: ComputeOptions) -> LoadedModel:
    model = load_model(checkpoint_dir, replace(options, dtype="float16"))
    assert isinstance(model, LoadedWeights)
    compute = model.compute(num_calibration_blocks(options.block_size))
    largest = largest_activation(compute, model.config, options.block_size, model.max_model_len)
    fits = largest <= FLOAT16_LIMIT
    log.info(
        "dtype of a quantised model chosen",
        dtype="float16" if fits else "bfloat16",
        largest_activation=round(largest, 2),
    )
    if fits:
        return model
    del compute, model
    return load_model(checkpoint_dir, replace(options, dtype="bfloat16"))


def give_back_freed_memory() -> None:
    """Return freed memory to the system.

    Reading weights allocates and frees as much as their size. glibc's malloc would keep up to a third of a model's
    size. Other C libraries have no such call.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _check_served(model: UndescribedModel, options: ComputeOptions) -> None:
    """Raise ConfigError for an option that is not served for models computed by transformers' own modules."""
    refused = {
        "worker.deterministic": options.deterministic,
        "worker.lora": options.lora is not None,
        "worker.load_format = dummy": options.has_random_weights,
        "worker.max_kv_tokens_per_instance": options.range_tokens > 0,
    }
    for name in (name for name, is_asked in refused.items() if is_asked):
        raise ConfigError(
            f"{name} is not supported for a {model.architecture}, which transformers' own modules compute"
        )


def _check_unequal_layers(model: DecoderShape, options: ComputeOptions) -> None:
    """Raise ConfigError for an option that is not served for models whose layers differ in their KV."""
    if options.device.type != "cpu":
        raise ConfigError(
            f"worker.device is {options.device}, but a {model.architecture}, whose layers differ in their KV, is "
            "computed on CPUs only so far: set worker.device to cpu"
        )
    if options.range_tokens:
        raise ConfigError(
            f"worker.max_kv_tokens_per_instance is {options.range_tokens}, but contexts of a {model.architecture}, "
            "whose layers differ in their KV, are not spread so far: set it to 0"
        )


def _load_undescribed(checkpoint_dir: Path, model: UndescribedModel, options: ComputeOptions) -> LoadedModel:
    """Load a model that transformers' own modules compute."""
    from pdmesh.engine.fallback.fallback_loading import load_undescribed  # transformers takes seconds to import

    return load_undescribed(
        checkpoint_dir,
        model,
        device=options.device,
        dtype=options.dtype,
        block_size=options.block_size,
        max_model_len=options.max_model_len or model.max_model_len,
    )

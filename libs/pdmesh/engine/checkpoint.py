"""Weights of a checkpoint directory, checked against the configuration."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from pdmesh.engine.levels import KernelLibrary
from pdmesh.engine.lora import adapted
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.ranks.group import RankGroup
from pdmesh.engine.ranks.share import WHOLE, RankShare
from pdmesh.engine.tensor_names import TensorNames
from pdmesh.engine.tensors import RandomTensors, Tensors, UnreadTensors, open_tensors
from pdmesh.engine.weight_reader import WeightReader
from pdmesh.engine.weights import ModelWeights


def load_weights(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool = True,
    library: KernelLibrary | None = None,
    group: RankGroup | None = None,
    lora: Path | None = None,
    share: RankShare = WHOLE,
) -> ModelWeights:
    """Read every tensor that the configuration requires.

    Raise ConfigError for a tensor that is missing, misshapen or not used. All names and shapes are compared before
    memory is allocated. A tied head that differs from the embedding is loaded as untied.

    ``packed`` allows layouts that products read faster; ``library`` has kernels for these. A rank reads its ``share``,
    and exchanges results with its ``group`` if other ranks compute the same layers. ``lora`` is the directory of an
    adapter to merge.
    """
    with ExitStack() as stack:
        tensors = stack.enter_context(open_tensors(directory, config, dtype))
        config = _unfused_if_single(_untied_if_unlike(config, tensors), tensors)
        if lora is not None:
            tensors = stack.enter_context(adapted(tensors, lora, config, dtype))
        unread = UnreadTensors(tensors)
        WeightReader(config, unread, dtype, torch.device("meta"), False, None, None, WHOLE).model()
        if (head := f"{config.names.lm_head}.weight") in tensors:  # also read if it equals the embedding
            unread.check(head, (config.vocab_size, config.hidden_size))
        tensors.check_all_used(unread.used | _never_read(config))
        return WeightReader(config, tensors, dtype, device, packed, library, group, share).model()


def _never_read(config: ModelConfig) -> set[str]:
    """Return names of the keys' and values' weights in layers that read another layer's KV. Some files have them."""
    names = (*config.names.qkv[1:], config.names.k_norm)
    readers = [number for number, layer in enumerate(config.layers) if layer.reads is not None]
    return {f"{config.names.layer.format(number)}.{name}.weight" for number in readers for name in names}


def _untied_if_unlike(config: ModelConfig, tensors: Tensors) -> ModelConfig:
    """Return the configuration, untied if the checkpoint has another head than the embedding, as transformers does."""
    head = f"{config.names.lm_head}.weight"
    if not config.tie_word_embeddings or head not in tensors:
        return config
    shape = (config.vocab_size, config.hidden_size)
    is_same = torch.equal(tensors.read(head, shape), tensors.read(f"{config.names.embedding}.weight", shape))
    return replace(config, tie_word_embeddings=is_same)


def _unfused_if_single(config: ModelConfig, tensors: Tensors) -> ModelConfig:
    """Return the configuration with names of single experts if the checkpoint has these instead of fused ones."""
    names = config.names
    if not names.fuses_experts or not names.gates_first:
        return config
    expert = names.expert.format(0)
    layers = [names.layer.format(number) for number, layer in enumerate(config.layers) if layer.experts]
    ends = ("weight", "qweight", "weight_packed")
    if not layers or not any(f"{layers[0]}.{expert}.{names.expert_down}.{end}" in tensors for end in ends):
        return config
    return replace(config, names=replace(names, expert_gate_up=TensorNames().expert_gate_up, fuses_experts=False))


def random_weights(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool = True,
    library: KernelLibrary | None = None,
    group: RankGroup | None = None,
    share: RankShare = WHOLE,
    seed: int = 0,
) -> ModelWeights:
    """Return random weights of the configuration's shape, on the device of the computation. Meant for benchmarks."""
    tensors = RandomTensors(dtype, device, seed, config.quantization)
    return WeightReader(config, tensors, dtype, device, packed, library, group, share).model()

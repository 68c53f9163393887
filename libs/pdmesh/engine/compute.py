"""What an engine computes with, and what it is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pdmesh.engine.checkpoint import ModelWeights
from pdmesh.engine.forward import Forward
from pdmesh.engine.kernels import Kernels
from pdmesh.engine.levels import KernelChoice
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.ranks.share import WHOLE, RankShare
from pdmesh.engine.transformer_model import Transformer
from pdmesh.kv.store import KvStore
from pdmesh.model import IndexRange, KvLayout


class PagedStore(KvStore, Protocol):
    """A KV store whose memory the engine computes on."""

    @property
    def layers(self) -> Sequence[Tensor]:
        """One tensor a layer: (blocks, 2, num_kv_heads, block_size, head_dim)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """How a checkpoint is computed; `pdmesh.engine.runner.TorchEngine` says what each means."""

    device: torch.device
    block_size: int = 16
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    prefill_attention: str = "auto"
    deterministic: bool = False
    native: bool = True
    has_random_weights: bool = False
    cpu_level: str = "auto"
    ordered: bool = False
    lora: Path | None = None
    range_tokens: int = 0
    frees_windows: bool = False


class Cache(NamedTuple):
    """The KV cache of a model.

    ``memory`` is shared with the other ranks; None: the cache has its own. ``num_frames`` is the number of frames of
    layers with a window; None: one for each block.
    """

    num_blocks: int
    memory: Tensor | None = None
    num_frames: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model in memory, or a rank's part of it."""

    options: ComputeOptions
    config: ModelConfig
    weights: ModelWeights
    layout: KvLayout  # the whole cache's
    max_model_len: int
    kernels: KernelChoice  # compiled ones, for the CPU
    share: RankShare = WHOLE  # what of the model this is

    @property
    def rank_config(self) -> ModelConfig:
        """The configuration of a model that is as large as this part of it."""
        return self.share.config_of(self.config)

    @property
    def layers(self) -> IndexRange:
        """The model's layers that are computed here."""
        return self.share.layers(self.config.num_layers)

    @property
    def rank_layout(self) -> KvLayout:
        """The layout of a cache of the rank's own heads alone."""
        return replace(self.layout, num_kv_heads=self.rank_config.num_kv_heads)

    def transformer(self, kernels: Kernels) -> Transformer:
        config, layers = self.rank_config, self.layers
        return Transformer(
            replace(config, layers=config.layers[slice(*layers)]),
            self.weights,
            kernels,
            deterministic=self.options.deterministic,
            cache_heads=None if self.share.is_whole else self.share.kv_heads(self.config),
            first_layer=layers.start,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What computes a checkpoint on one device: how a step passes the layers, and the paged cache."""

    name: str  # for the log
    arithmetic: str  # its class, as in `pdmesh.model.InstanceProfile`
    reason: str = ""  # why this and nothing faster
    forward: Forward
    kv: PagedStore

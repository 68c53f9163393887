"""The parts of an engine's computation, and the options and loaded model that they are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pdmesh.engine.forward import Forward
from pdmesh.engine.kernels import Kernels
from pdmesh.engine.levels import KernelChoice
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.ranks.share import WHOLE, RankShare
from pdmesh.engine.transformer_model import Transformer
from pdmesh.engine.weights import ModelWeights
from pdmesh.kv.store import KvStore
from pdmesh.kv_layout import IndexRange, KvLayout, PageShape


class PagedStore(KvStore, Protocol):
    """A KV store whose memory the engine computes on."""

    @property
    def layers(self) -> Sequence[Tensor]:
        """Tensor of each layer: (blocks, 2, num_kv_heads, block_size, head_dim).

        A layer with a window may have frames in place of blocks (`pdmesh.kv.frames`).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """Options of a checkpoint's computation. `pdmesh.engine.runner.TorchEngine` documents each."""

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
    """Size and memory of a model's KV cache.

    ``memory`` is shared with the other ranks; None allocates a cache. ``num_frames`` is the number of frames of layers
    with a window; None means one for each block.
    """

    num_blocks: int
    memory: Tensor | None = None
    num_frames: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model in memory, or one rank's ``share`` of it. ``layout`` is of the whole cache. ``kernels`` are for CPUs."""

    options: ComputeOptions
    config: ModelConfig
    weights: ModelWeights
    layout: KvLayout
    max_model_len: int
    kernels: KernelChoice
    share: RankShare = WHOLE

    @property
    def rank_config(self) -> ModelConfig:
        """Configuration of a model of this share's size."""
        return self.share.config_of(self.config)

    @property
    def layers(self) -> IndexRange:
        """Numbers of the model's layers that are computed here."""
        return self.share.layers(self.config.num_layers)

    @property
    def rank_layout(self) -> KvLayout:
        """Layout of a cache with only the rank's own heads."""
        pages = tuple(map(self.share.page_of, self.layout.pages))
        return replace(self.layout, num_kv_heads=self.rank_config.num_kv_heads, pages=pages)

    @property
    def cache_heads(self) -> Mapping[PageShape, int]:
        """Number of heads in the whole cache, by the rank's part of a layer's pages."""
        return {self.share.page_of(page): page.num_kv_heads for page in self.layout.distinct_pages}

    def transformer(self, kernels: Kernels) -> Transformer:
        config, layers = self.rank_config, self.layers
        whole = [self.config.page(layer).num_kv_heads for layer in self.config.layers[slice(*layers)]]
        return Transformer(
            replace(config, layers=config.layers[slice(*layers)]),
            self.weights,
            kernels,
            deterministic=self.options.deterministic,
            cache_heads=None if self.share.is_whole else list(map(self.share.kv_heads_of, whole)),
            first_layer=layers.start,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A checkpoint's computation on one device: the forward pass and the paged cache.

    ``name`` and ``reason`` (why no faster way was chosen) are for the log. ``arithmetic`` is the class, as in
    `pdmesh.model.InstanceProfile`.
    """

    name: str
    arithmetic: str
    reason: str = ""
    forward: Forward
    kv: PagedStore

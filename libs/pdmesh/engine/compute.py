"""What an engine computes with, and what it is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

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
class Loaded:
    """A model in memory, and the cache it is to have."""

    config: ModelConfig
    weights: ModelWeights
    layout: KvLayout
    num_blocks: int
    max_model_len: int
    max_num_seqs: int  # decodes of one step
    prefill_attention: str  # which of a device's ways, by name; "auto": by the chunk's length
    deterministic: bool
    kernels: KernelChoice  # compiled ones, for the CPU
    share: RankShare = WHOLE  # what of the model this is
    range_tokens: int = 0  # of ranges of a context that are attended to apart; 0: none
    num_frames: int | None = None  # of layers with a window; None: one for each block
    memory: Tensor | None = None  # of the cache, shared with the other ranks; None: its own

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return self.config.scale

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
            deterministic=self.deterministic,
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

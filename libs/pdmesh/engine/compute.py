"""What an engine computes with, and what it is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdmesh.engine.checkpoint import ModelWeights
from pdmesh.engine.forward import Forward
from pdmesh.engine.kernels import Kernels
from pdmesh.engine.levels import KernelChoice
from pdmesh.engine.model import Transformer
from pdmesh.engine.model_config import ModelConfig
from pdmesh.kv.store import KvStore
from pdmesh.model import KvLayout


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

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return self.config.scale

    def transformer(self, kernels: Kernels) -> Transformer:
        return Transformer(self.config, self.weights, kernels, deterministic=self.deterministic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What computes a checkpoint on one device: the layers, how a step passes them, and the paged cache."""

    name: str  # for the log
    arithmetic: str  # its class, as in `pdmesh.model.InstanceProfile`
    reason: str = ""  # why this and nothing faster
    transformer: Transformer
    forward: Forward
    kv: PagedStore

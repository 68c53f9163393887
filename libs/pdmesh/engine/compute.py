"""What an engine computes with: chosen once, for a model and a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.engine.attention import AttentionBackend, TorchAttention
from pdmesh.engine.checkpoint import ModelWeights
from pdmesh.engine.forward import DirectForward, Forward
from pdmesh.engine.kernels import Kernels, TorchKernels
from pdmesh.engine.kv_cache import TorchKvStore
from pdmesh.engine.model import Transformer
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.native import NativeAttention, NativeKernels, load_kernels, suits
from pdmesh.engine.tiled_attention import TiledAttention
from pdmesh.kv.store import KvStore
from pdmesh.model import KvLayout


class PagedStore(KvStore, Protocol):
    """A KV store whose memory the engine computes on."""

    @property
    def layers(self) -> Sequence[Tensor]:
        """Per layer (blocks, 2, num_kv_heads, block_size, head_dim)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model in memory, and the cache it is to have."""

    config: ModelConfig
    weights: ModelWeights
    layout: KvLayout
    num_blocks: int
    max_model_len: int
    deterministic: bool

    @property
    def scale(self) -> float:
        """Of attention scores."""
        return 1 / math.sqrt(self.config.head_dim)

    def transformer(self, kernels: Kernels) -> Transformer:
        return Transformer(self.config, self.weights, kernels, deterministic=self.deterministic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    name: str  # for the log
    transformer: Transformer
    forward: Forward
    kv: PagedStore


def choose_compute(loaded: Loaded, device: torch.device, *, native: bool) -> Compute:
    """The fastest that there is for this model here; without ``native`` the reference, plain torch."""
    if device.type == "cuda":
        from pdmesh.engine.cuda.compute import cuda_compute  # only where there is a device

        return cuda_compute(loaded, device, native=native)
    config, layout = loaded.config, loaded.layout
    attention: AttentionBackend = (
        TiledAttention(layout, loaded.scale) if loaded.deterministic else TorchAttention(layout, loaded.scale, device)
    )
    kernels: Kernels = TorchKernels(config.rms_norm_eps)
    name = "torch"
    aligned = config.hidden_size % 16 == 0 and config.intermediate_size % 16 == 0
    if native and aligned and suits(layout, device) and (library := load_kernels()) is not None:
        attention = NativeAttention(library, layout, loaded.scale)
        kernels = NativeKernels(library, config.rms_norm_eps)
        name = "native"
    transformer = loaded.transformer(kernels)
    store = TorchKvStore(layout, loaded.num_blocks)
    forward = DirectForward(transformer, attention, store.layers, block_size=layout.block_size, device=device)
    return Compute(name=name, transformer=transformer, forward=forward, kv=store)

"""Which of the ways to compute an engine takes: chosen once, for a model and a device."""

from __future__ import annotations

import torch

from pdmesh.engine.attention import AttentionBackend, TorchAttention
from pdmesh.engine.compute import Compute, Loaded
from pdmesh.engine.forward import DirectForward
from pdmesh.engine.kernels import Kernels, TorchKernels
from pdmesh.engine.kv_cache import TorchKvStore
from pdmesh.engine.native import NativeAttention, NativeKernels, load_kernels, suits
from pdmesh.engine.tiled_attention import TiledAttention


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
    forward = DirectForward(transformer, attention, store.layers, layout=layout, device=device)
    return Compute(name=name, transformer=transformer, forward=forward, kv=store)

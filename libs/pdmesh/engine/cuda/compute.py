"""What computes on a CUDA device: FlashInfer, Triton kernels and graphs where these can, else plain torch."""

from __future__ import annotations

import importlib.util

import torch

from pdmesh.engine.attention import TorchAttention
from pdmesh.engine.compute import Compute, Loaded
from pdmesh.engine.cuda import flashinfer
from pdmesh.engine.cuda.flashinfer import FlashInfer
from pdmesh.engine.cuda.forward import DeviceForward
from pdmesh.engine.cuda.graphs import CudaRecorder
from pdmesh.engine.cuda.kv_store import DeviceKvStore
from pdmesh.engine.cuda.streams import CudaStreams
from pdmesh.engine.forward import DirectForward
from pdmesh.engine.kernels import Kernels, TorchKernels


def cuda_compute(loaded: Loaded, device: torch.device, *, native: bool) -> Compute:
    """Called on the thread that will execute the steps: the device, which has a number, becomes that thread's."""
    torch.cuda.set_device(device)
    layout = loaded.layout
    streams = CudaStreams(device)
    store = DeviceKvStore(layout, loaded.num_blocks, streams)
    library = flashinfer.load_library() if native and flashinfer.suits(layout) else None
    transformer = loaded.transformer(_kernels(loaded, native=native and layout.dtype == "bfloat16"))
    if library is None:
        attention = TorchAttention(layout, loaded.scale, streams.device)
        direct = DirectForward(
            transformer, attention, store.layers, block_size=layout.block_size, device=streams.device
        )
        return Compute(name="torch on cuda", transformer=transformer, forward=direct, kv=store)
    forward = DeviceForward(
        transformer,
        FlashInfer(library, layout, num_heads=loaded.config.num_heads, scale=loaded.scale, device=streams.device),
        store,
        streams,
        CudaRecorder(),
        max_model_len=loaded.max_model_len,
    )
    forward.warm_up()
    return Compute(name="flashinfer", transformer=transformer, forward=forward, kv=store)


def _kernels(loaded: Loaded, *, native: bool) -> Kernels:
    if native and importlib.util.find_spec("triton") is not None:
        from pdmesh.engine.cuda.kernels import TritonKernels

        return TritonKernels(loaded.config.rms_norm_eps)
    return TorchKernels(loaded.config.rms_norm_eps)

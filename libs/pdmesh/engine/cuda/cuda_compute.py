"""The computation on a CUDA device: FlashInfer, Triton kernels and graphs if they suit the model, else plain torch."""

from __future__ import annotations

import structlog
import torch

from pdmesh.engine.arithmetic_class import class_name, torch_kind
from pdmesh.engine.attention import TorchAttention
from pdmesh.engine.compute import Cache, Compute, Loaded
from pdmesh.engine.cuda import has_triton
from pdmesh.engine.cuda.cuda_forward import DeviceForward
from pdmesh.engine.cuda.flashinfer import FlashInfer, load_library, suits
from pdmesh.engine.cuda.graphs import CudaRecorder
from pdmesh.engine.cuda.kv_store import DeviceKvStore
from pdmesh.engine.cuda.page_tables import PageWriter, write_pages
from pdmesh.engine.cuda.shared_cache import CudaDriver, DeviceMemory
from pdmesh.engine.cuda.streams import CudaStreams
from pdmesh.engine.forward import DirectForward
from pdmesh.engine.kernels import Elementwise, Kernels, TorchKernels
from pdmesh.engine.model_config import ModelConfig
from pdmesh.kv_layout import KvLayout

log = structlog.get_logger()


def cuda_compute(loaded: Loaded, cache: Cache) -> Compute:
    """Return the computation of this model. Call on the thread that will execute the steps.

    With FlashInfer, kernels are compiled and graphs recorded before the return.
    """
    layout, options, device, native = loaded.layout, loaded.options, loaded.options.device, loaded.options.native
    streams = CudaStreams(device)
    store = device_store(layout, cache.num_blocks, streams)
    library = load_library() if native and suits(layout) and not _needs_reference(loaded.config) else None
    transformer = loaded.transformer(_kernels(loaded, native=native and layout.dtype == "bfloat16"))
    kinds = [torch_kind(device, deterministic=False)]
    if native and has_triton():
        kinds.append("triton")
    if library is None:
        arithmetic = class_name(layout.dtype, kinds)
        attention = TorchAttention(layout, loaded.config.scale, streams.device, loaded.config.score_cap)
        direct = DirectForward(transformer, attention, store.layers, layout=layout, device=streams.device)
        return Compute(name="torch on cuda", arithmetic=arithmetic, forward=direct, kv=store)
    transformer.tabulate_rotation(loaded.max_model_len)
    flashinfer = FlashInfer(
        library,
        layout,
        num_heads=loaded.config.num_heads,
        scale=loaded.config.scale,
        max_decodes=options.max_num_seqs,
        num_multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        device=device,
        prefill_backend=options.prefill_attention,
    )
    forward = DeviceForward(
        transformer,
        flashinfer,
        store,
        streams,
        CudaRecorder(),
        max_model_len=loaded.max_model_len,
        max_num_seqs=options.max_num_seqs,
        write=_page_writer(native=native),
    )
    forward.warm_up()
    kinds.append(f"flashinfer-{library.__version__}-{options.prefill_attention}")
    arithmetic = class_name(layout.dtype, kinds)
    return Compute(name="flashinfer", arithmetic=arithmetic, forward=forward, kv=store)


def device_store(layout: KvLayout, num_blocks: int, streams: CudaStreams) -> DeviceKvStore:
    """Return a KV cache on the device of ``streams``, which becomes the calling thread's current device."""
    torch.cuda.set_device(streams.device)
    return DeviceKvStore(layout, num_blocks, streams, _device_memory(streams.device))


def _needs_reference(config: ModelConfig) -> bool:
    """Return whether FlashInfer and graphs lack a feature of the model: windows, caps, sinks, experts or gates."""
    return config.masks_more or config.has_sinks or config.has_experts or config.gates_attention


def _device_memory(device: torch.device) -> DeviceMemory | None:
    def current_stream() -> int:
        stream: int = torch.cuda.current_stream(device).cuda_stream
        return stream

    try:
        return CudaDriver(device.index, current_stream)
    except ImportError as error:
        log.info("other processes cannot read this device's cache", reason=str(error))
        return None


def _page_writer(*, native: bool) -> PageWriter:
    if native and has_triton():
        from pdmesh.engine.cuda.cuda_kernels import write_pages_kernel

        return write_pages_kernel
    return write_pages


def _kernels(loaded: Loaded, *, native: bool) -> Kernels:
    kinds = Elementwise.of(loaded.config)
    if native and has_triton():
        from pdmesh.engine.cuda.cuda_kernels import TritonKernels

        return TritonKernels(kinds)
    return TorchKernels(kinds)

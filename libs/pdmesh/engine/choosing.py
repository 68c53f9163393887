"""Selection of the kernels and attention that an engine computes with, once for a model and a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from pdmesh.engine.arithmetic_class import class_name, torch_kind
from pdmesh.engine.attention import AttentionBackend, AttentionByPage, PartialBackend, TorchAttention
from pdmesh.engine.compute import Cache, Compute, Loaded
from pdmesh.engine.delta_net import delta_kernel
from pdmesh.engine.forward import DirectForward
from pdmesh.engine.kernels import Elementwise, Kernels, TorchKernels
from pdmesh.engine.kv_cache import TORCH_DTYPES, TorchKvStore, with_pages
from pdmesh.engine.latent_attention import LatentAttention
from pdmesh.engine.levels import KernelChoice, KernelLibrary, choose_kernels
from pdmesh.engine.merging import MERGE_KIND, Merge, merge_by_torch, merge_kernel
from pdmesh.engine.model_config import ModelConfig
from pdmesh.engine.native import NativeAttention, NativeKernels, suits
from pdmesh.engine.packed import PACKED_KIND
from pdmesh.engine.ranged_attention import RangedAttention
from pdmesh.engine.tiled_attention import TiledAttention
from pdmesh.kv_layout import KvLayout, PageShape


def choose_library(
    config: ModelConfig, layout: KvLayout, device: torch.device, *, cpu_level: str, ordered: bool
) -> KernelChoice:
    """Return the compiled kernels for this model. ``cpu_level``, ``ordered`` and errors are as in `choose_kernels`.

    The library is None on other devices than the CPU, or if no compiled level computes the dtype. The reason says so.
    If the fastest level does not compute the model's shape, the library is ordered, and may not suit it either.
    """
    if device.type != "cpu":
        return KernelChoice(None, f"it computes on {device}")
    choice = choose_kernels(layout.dtype, cpu_level=cpu_level, ordered=ordered)
    if choice.library is None or suits(choice.library.level, config, layout):
        return choice
    slower = choose_kernels(layout.dtype, cpu_level=cpu_level, ordered=True)
    return KernelChoice(slower.library, f"{choice.library.level} does not compute this model's shape")


def _masking_library(config: ModelConfig, layout: KvLayout, library: KernelLibrary) -> KernelLibrary | None:
    """Return the library for attention: the model's, or an ordered one for windows and score caps.

    None means that no compiled library fits.
    """
    if library.level.is_ordered or not config.masks_more:
        return library
    ordered = choose_kernels(layout.dtype, ordered=True).library
    return ordered if ordered is not None and suits(ordered.level, config, layout) else None


class AttentionChoice(NamedTuple):
    """The attention backend on a CPU, and the compiled kernels behind it. The library is None if torch attends."""

    backend: PartialBackend
    library: KernelLibrary | None


def choose_attention(
    config: ModelConfig,
    layout: KvLayout,
    library: KernelLibrary | None,
    *,
    cache_heads: Mapping[PageShape, int] | None = None,
    deterministic: bool,
) -> AttentionChoice:
    """Return the fastest attention on a CPU over a cache of this layout.

    Compiled kernels attend if ``library``, which computes the rest of the model, suits the model and some library has
    the masks. Otherwise torch attends, by `TiledAttention` if ``deterministic``. ``cache_heads`` has the number of
    key-value heads in the cache, by the shape of pages, if ``layout`` has only some of them.
    """
    masking = None
    if library is not None and suits(library.level, config, layout):
        masking = _masking_library(config, layout, library)

    def backend(layout: KvLayout) -> PartialBackend:
        if masking is not None:
            return NativeAttention(masking, layout, config.scale, config.score_cap)
        if deterministic:
            return TiledAttention(layout, config.scale, config.score_cap)
        num_cache_heads = 0 if cache_heads is None else cache_heads.get(layout.page(0), 0)
        return TorchAttention(layout, config.scale, torch.device("cpu"), config.score_cap, num_cache_heads)

    def backend_of(page: PageShape) -> PartialBackend:
        if all(layer.latent is None or layer.latent.page != page for layer in config.layers):
            return backend(with_pages(layout, page))
        whole = with_pages(layout, page._replace(head_dim=2 * page.head_dim))
        return LatentAttention(backend(whole), layout.block_size)

    if not layout.pages:
        return AttentionChoice(backend(layout), masking)
    return AttentionChoice(AttentionByPage({page: backend_of(page) for page in config.attention_pages}), masking)


def choose_compute(loaded: Loaded, cache: Cache) -> Compute:
    """Return the fastest way to compute this model here. Without ``options.native`` it is the torch reference."""
    options = loaded.options
    if options.device.type == "cuda":
        from pdmesh.engine.cuda.cuda_compute import cuda_compute

        return cuda_compute(loaded, cache)
    config, layout = loaded.rank_config, loaded.rank_layout
    attention, masking = choose_attention(
        config,
        layout,
        loaded.kernels.library,
        cache_heads=loaded.cache_heads,
        deterministic=options.deterministic,
    )
    kernels: Kernels = TorchKernels(Elementwise.of(config), options.deterministic, TORCH_DTYPES[layout.dtype])
    name, library = "torch", loaded.kernels.library
    kinds, needs_torch = [] if library is None else [library.level.kind], True
    if library is not None and suits(library.level, config, layout):
        native_kernels = NativeKernels(library, Elementwise.of(config), options.deterministic)
        if masking is not None:
            kinds.append(masking.level.kind)
        kernels, name = native_kernels, f"native {library.level}"
        uses_torch = config.has_experts or config.has_sinks or config.mixes_by_torch
        for net in {layer.delta for layer in config.layers if layer.delta}:
            compiled = delta_kernel(net, TORCH_DTYPES[layout.dtype])
            uses_torch |= compiled is None
            kinds += [] if compiled is None else [compiled.level.kind]
        needs_torch = masking is None or uses_torch or not native_kernels.are_complete
    if needs_torch:
        kind = torch_kind(options.device, deterministic=options.deterministic)
        kinds.append(kind if loaded.share.rounds_as_one(loaded.config) else f"{kind}-of-{loaded.share.num_ranks}")
    if loaded.weights.scales_sums:
        kinds.append(PACKED_KIND)
    ranged: AttentionBackend = attention
    if options.range_tokens:
        kinds.append(f"ranges-{options.range_tokens}")
        merge: Merge = merge_by_torch
        if masking is not None and (kernel := merge_kernel()) is not None:
            merge = kernel
            kinds.append(MERGE_KIND)
        ranged = RangedAttention(attention, options.range_tokens, layout.block_size, merge)
    transformer = loaded.transformer(kernels)
    store = TorchKvStore(loaded.layout, *cache)
    caches = store.layers[slice(*loaded.layers)]
    forward = DirectForward(
        transformer,
        ranged,
        caches,
        layout=loaded.layout,
        device=options.device,
        frames=store.frames,
        max_taps=config.max_taps,
        has_states=config.has_states,
        any_num_threads=not (needs_torch or options.range_tokens or config.logit_cap),  # torch computes logit caps
    )
    return Compute(
        name=name,
        reason=loaded.kernels.reason,
        arithmetic=class_name(layout.dtype, kinds),
        forward=forward,
        kv=store,
    )

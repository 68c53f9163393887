"""Short convolutions of gated inputs, which are kept as KV: by torch, and by compiled kernels with the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pdmesh.engine.kernels import store_heads
from pdmesh.engine.kv_cache import TORCH_DTYPES, num_cache_heads
from pdmesh.engine.levels import FOLDER, CpuLevel, open_library, processor_levels
from pdmesh.engine.weights import ConvTaps

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class ShortConvolution(Protocol):
    """A convolution whose inputs and results are gated.

    ``products`` (num_tokens, 3 * hidden_size) are gates of inputs, gates of results, and inputs.
    """

    def store(self, products: Tensor, slots: Tensor, cache: Tensor) -> None:
        """Write gated inputs to their slots in a layer's cache."""
        ...

    def convolve(self, products: Tensor, cache: Tensor, earlier: Tensor, taps: ConvTaps) -> Tensor:
        """Return the gated results (num_tokens, hidden_size), summed in fp32.

        ``earlier`` (num_tokens, most taps) are the slots of each token and of the tokens before, -1 before the first.
        """
        ...


class TorchShortConv:
    """The reference, for any device and dtype."""

    def store(self, products: Tensor, slots: Tensor, cache: Tensor) -> None:
        gate, _, values = products.chunk(3, dim=-1)
        num_kv_heads, head_dim = cache.shape[2], cache.shape[4]
        keys, others = (gate * values).view(len(products), 2, num_kv_heads, head_dim).unbind(1)
        store_heads(cache, slots, keys, others)

    def convolve(self, products: Tensor, cache: Tensor, earlier: Tensor, taps: ConvTaps) -> Tensor:
        gate, block_size = products.chunk(3, dim=-1)[1], cache.shape[3]
        total = torch.zeros_like(gate, dtype=torch.float32)
        for slots, factors in zip(earlier.unbind(1), taps.factors, strict=False):
            blocks, offsets = slots.clamp(min=0) // block_size, slots % block_size
            inputs = cache[blocks, :, :, offsets].flatten(1).float() * factors
            total += torch.where(slots[:, None] >= 0, inputs, 0.0)
        if taps.bias is not None:
            total += taps.bias
        return (gate.float() * total).to(products.dtype)


@dataclass(frozen=True, slots=True)
class ShortConvKernel:
    """`ShortConvolution` by one level's ``csrc/ordered/rows.cpp``, for contiguous products of one dtype."""

    store_gated: Callable[..., None]
    short_conv: Callable[..., None]

    def store(self, products: Tensor, slots: Tensor, cache: Tensor) -> None:
        self.store_gated(
            products.data_ptr(),
            slots.data_ptr(),
            cache.data_ptr(),
            len(products),
            *_places(cache),
            torch.get_num_threads(),
        )

    def convolve(self, products: Tensor, cache: Tensor, earlier: Tensor, taps: ConvTaps) -> Tensor:
        num_taps, size = taps.factors.shape
        output = products.new_empty(len(products), size)
        self.short_conv(
            products.data_ptr(),
            cache.data_ptr(),
            earlier.data_ptr(),
            earlier.stride(0),
            taps.factors.data_ptr(),
            None if taps.bias is None else taps.bias.data_ptr(),
            output.data_ptr(),
            len(products),
            num_taps,
            *_places(cache),
            torch.get_num_threads(),
        )
        return output


def _places(cache: Tensor) -> tuple[int, int, int, int]:
    num_heads, block_size, head_dim = cache.shape[2:]
    return num_heads, num_cache_heads(cache), block_size, head_dim


@cached
def fastest_short_conv(dtype: torch.dtype, device_type: str) -> ShortConvolution:
    """Return the fastest compiled kernel for this processor, or the reference if there is none for this dtype."""
    names = [name for name, each in TORCH_DTYPES.items() if each == dtype and device_type == "cpu"]
    found = (load_short_conv_kernel(level, name) for level in processor_levels() for name in names)
    return next((kernel for kernel in found if kernel is not None), TorchShortConv())


def load_short_conv_kernel(level: CpuLevel, dtype: str, folder: Path = FOLDER) -> ShortConvKernel | None:
    """Load a level's kernel, or return None if none was compiled for this dtype. The processor must have the level."""
    library = open_library(level, folder) if level.is_ordered and dtype in level.suffixes else None
    if library is None or not hasattr(library, "pdmesh_short_conv"):
        return None
    store, convolve = (library[f"pdmesh_{name}{level.suffixes[dtype]}"] for name in ("store_gated", "short_conv"))
    store.argtypes, store.restype = [*[_POINTER] * 3, *[_INT] * 6], None
    convolve.argtypes, convolve.restype = [*[_POINTER] * 3, _INT, *[_POINTER] * 3, *[_INT] * 7], None
    return ShortConvKernel(store, convolve)

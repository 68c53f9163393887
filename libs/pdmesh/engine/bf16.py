"""What torch can do with bf16 on this processor."""

from __future__ import annotations

from functools import cache

import torch


@cache
def onednn_multiplies_bf16() -> bool:
    """Whether oneDNN's bf16 matrix products run on this processor: found by computing one.

    The operators exist in every build of torch. Without AVX-512 (or AVX-NE-CONVERT) they raise, and what torch
    computes instead reaches a tenth of the fp32 speed (Zen 3, torch 2.13, 2026-11).
    """
    weight, rows = torch.ones(32, 32, dtype=torch.bfloat16), torch.ones(2, 32, dtype=torch.bfloat16)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
        product = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return bool((product == 32).all())

"""Capabilities of torch for bf16 on this processor."""

from __future__ import annotations

from functools import cache

import torch


@cache
def onednn_multiplies_bf16() -> bool:
    """Return whether oneDNN multiplies bf16 matrices on this processor. One product is computed to find out.

    The operators exist in every build of torch. Without AVX-512 (or AVX-NE-CONVERT) they raise, and torch's substitute
    reaches a tenth of the fp32 speed (Zen 3, torch 2.13, 2026-11).
    """
    weight, rows = torch.ones(32, 32, dtype=torch.bfloat16), torch.ones(2, 32, dtype=torch.bfloat16)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
        product = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return bool((product == 32).all())

"""The Triton kernels against the torch reference: on the device where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="needs Triton")

from pdmesh.engine.cuda.kernels import TritonKernels
from pdmesh.engine.kernels import Rotation, TorchKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPSILON = 1e-5


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator)).bfloat16().to(DEVICE)


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("shape", [(3, 96), (1, 1024), (2, 5, 64)])
def test_add_norm(shape: tuple[int, ...], with_delta: bool) -> None:
    hidden, weight = draw(1, *shape), draw(2, shape[-1])
    delta = draw(3, *shape) if with_delta else None
    expected_sum, expected = TorchKernels(EPSILON).add_norm(hidden, delta, weight)
    total, normed = TritonKernels(EPSILON).add_norm(hidden.clone(), delta, weight)
    torch.testing.assert_close(
        total, expected_sum, atol=0, rtol=1e-2
    )  # the interpreter cuts bf16 off instead of rounding
    torch.testing.assert_close(normed, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("size", [48, 1024, 1500])
def test_gated_silu(size: int) -> None:
    gate_up = 4 * draw(4, 5, 2 * size)
    expected = TorchKernels(EPSILON).gated_silu(gate_up)
    torch.testing.assert_close(TritonKernels(EPSILON).gated_silu(gate_up), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 64), (4, 4, 48), (1, 1, 128)])
def test_rotate_and_store(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    qkv, angles = draw(5, 7, num_heads + 2 * num_kv_heads, head_dim), draw(6, 7, head_dim // 2)
    slots = torch.tensor([33, 0, 47, 16, 15, 5, 31], device=DEVICE)
    rotation = Rotation(cos=angles.cos(), sin=angles.sin(), slots=slots)
    caches = [torch.zeros(3, 2, num_kv_heads, 16, head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    expected = TorchKernels(EPSILON).rotate_and_store(qkv, num_heads, rotation, caches[0])
    query = TritonKernels(EPSILON).rotate_and_store(qkv.clone(), num_heads, rotation, caches[1])
    # the reference rounds each product, the kernel only their sum
    torch.testing.assert_close(query, expected, atol=4e-2, rtol=2e-2)
    torch.testing.assert_close(caches[1], caches[0], atol=4e-2, rtol=2e-2)
    assert torch.equal(caches[1][:, 1], caches[0][:, 1])  # values are not rotated

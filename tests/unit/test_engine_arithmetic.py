"""What an engine computes with is named so that two names are equal only where the bits are."""

from __future__ import annotations

import math

import pytest
import torch

from pdmesh.engine.arithmetic_class import torch_kind
from pdmesh.engine.rope import RotaryEmbedding
from pdmesh.engine.rope_config import RopeConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize("cap", ["ONEDNN_MAX_CPU_ISA", "MKL_CBWR"])
def test_what_caps_torchs_libraries_is_part_of_the_class(monkeypatch: pytest.MonkeyPatch, cap: str) -> None:
    monkeypatch.delenv(cap, raising=False)
    uncapped = torch_kind(CPU, deterministic=False)
    monkeypatch.setenv(cap, "AVX2")
    assert torch_kind(CPU, deterministic=False) == f"{uncapped}-{cap}=AVX2"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotations_of_half_precision_are_exact_ones_rounded(dtype: torch.dtype) -> None:
    theta, head_dim = 1e6, 128
    rotary = RotaryEmbedding(RopeConfig(theta=theta), head_dim, CPU, dtype)
    positions = [0, 1, 77, 4095, 131_071]
    cos, sin = rotary.cos_sin(torch.tensor(positions), torch.ones(len(positions), dtype=torch.int64))
    angles = [[position * theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)] for position in positions]
    for found, function in ((cos, math.cos), (sin, math.sin)):
        expected = torch.tensor([[function(angle) for angle in row] for row in angles], dtype=torch.float64).to(dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

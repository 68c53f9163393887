"""What an engine computes with is named so that two names are equal only where the bits are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from pdmesh.engine import delta_net
from pdmesh.engine.arithmetic_class import torch_kind
from pdmesh.engine.levels import CpuLevel
from pdmesh.engine.rope import RotaryEmbedding
from pdmesh.engine.rope_config import RopeConfig
from pdmesh.engine.runner import TorchEngine
from pdmesh.model import SamplingParams
from pdmesh_testing.levels import library_or_skip, ordered_levels
from pdmesh_testing.stepping import generate
from pdmesh_testing.transformers_checkpoints import model_variants, write_transformers_checkpoint

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


def test_compiled_kernels_of_states_need_no_class_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with delta nets and gated attention has the same class and bits on every ordered level."""
    options = model_variants()["qwen3_5_text"][0]
    checkpoint = write_transformers_checkpoint(tmp_path, "qwen3_5_text", seed=1, **options)
    library_or_skip(ordered_levels()[0] if ordered_levels() else CpuLevel.BASELINE)

    def engine(level: CpuLevel) -> TorchEngine:
        return TorchEngine(checkpoint, num_blocks=32, num_threads=1, dtype="bfloat16", cpu_level=level)

    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3)
    found: list[object] = []
    for level in ordered_levels():
        engine_of_level = engine(level)
        assert engine_of_level.arithmetic == f"bfloat16/{level.kind}"
        found.append(generate(engine_of_level, list(range(1, 50)), 4, params=params).results)
    assert found.count(found[0]) == len(found)
    monkeypatch.setattr(delta_net, "fastest_delta_compute", lambda _: delta_net.compute_by_torch)
    assert "torch" in engine(ordered_levels()[0]).arithmetic

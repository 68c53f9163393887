"""Which device an engine takes, and what it keeps there ready."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdmesh.engine.rope import RotaryEmbedding
from pdmesh.engine.rope_config import RopeConfig, RopeType
from pdmesh.engine.runner import torch_device
from pdmesh.errors import ConfigError

ROPE = RopeConfig(factor=4.0, original_max_position_embeddings=256, low_freq_factor=1.0, high_freq_factor=4.0)


@pytest.mark.parametrize(("name", "number"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)])
def test_a_cuda_device_has_a_number(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    """`torch.cuda.set_device` refuses one without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert torch_device(name) == torch.device("cuda", number)


def test_auto_is_the_host_where_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        torch_device("cuda:1")


@pytest.mark.parametrize("rope_type", list(RopeType))
def test_tabulated_rotations_are_the_computed_ones(rope_type: RopeType) -> None:
    config = replace(ROPE, rope_type=rope_type, short_factors=(1.0,) * 32, long_factors=(2.0,) * 32)
    plain, tabulated = (RotaryEmbedding(config, 64, torch.device("cpu"), torch.bfloat16) for _ in range(2))
    tabulated.tabulate(300)
    positions, lengths = torch.tensor([0, 5, 299, 170]), torch.tensor([1, 280, 290, 1])
    expected, actual = (rotary.cos_sin(positions, lengths) for rotary in (plain, tabulated))
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, atol=1e-2, rtol=0)  # a step of bf16

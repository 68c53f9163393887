"""Quantised models are computed in float16 where their activations fit, whatever parts of them are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdmesh.engine import model_loading as loading
from pdmesh.engine.calibration import prompt_of
from pdmesh.engine.compute import ComputeOptions
from pdmesh.engine.model_loading import decided_dtype, load_model
from pdmesh.engine.ranks.share import RankShare
from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.quantized_checkpoints import write_quantized


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    source = write_checkpoint(tmp_path / "source", shape=CheckpointShape(), dtype="bfloat16")
    quantized, _ = write_quantized(source, tmp_path, "int4-group")
    return quantized


def options(dtype: str = "auto") -> ComputeOptions:
    return ComputeOptions(device=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize(("limit", "expected"), [(65_504 / 16, "float16"), (1e-6, "bfloat16")])
def test_float16_is_taken_where_activations_fit(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, limit: float, expected: str
) -> None:
    monkeypatch.setattr(loading, "FLOAT16_LIMIT", limit)
    assert load_model(checkpoint, options()).layout.dtype == expected
    assert decided_dtype(checkpoint, options()) == expected
    stage = load_model(checkpoint, options(), RankShare(stage=1, num_stages=2))
    assert stage.layout.dtype == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_dtype_that_is_asked_for_is_taken(checkpoint: Path, dtype: str) -> None:
    assert decided_dtype(checkpoint, options(dtype)) == dtype


@pytest.mark.parametrize("vocab_size", [64, 50_000, 262_144])
def test_the_prompt_is_of_the_vocabulary(vocab_size: int) -> None:
    ids = prompt_of(vocab_size)
    assert min(ids) == 0
    assert 0.9 * vocab_size < max(ids) < vocab_size

"""gpt-oss as it is published: experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pdmesh.engine.files import load_model_config
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh_testing.quantized_checkpoints import write_mxfp4
from pdmesh_testing.stepping import generate
from pdmesh_testing.transformers_checkpoints import write_transformers_checkpoint

PROMPT = [number * 37 % 300 for number in range(40)]


def test_experts_in_mxfp4_are_what_they_stand_for(tmp_path: Path) -> None:
    outputs = [
        generate(TorchEngine(path, num_blocks=4, num_threads=1, dtype="float32"), PROMPT, 8).results
        for path in write_mxfp4(tmp_path)
    ]
    assert outputs[0] == outputs[1]


def test_experts_stay_packed(tmp_path: Path) -> None:
    quantized, _ = write_mxfp4(tmp_path)
    engine = TorchEngine(quantized, num_blocks=4, num_threads=1, dtype="bfloat16")
    if "torch" in engine.compute_path.kernels:
        pytest.skip("no kernels: built without a compiler")
    assert "packed" in engine.arithmetic
    results = [generate(engine, PROMPT, 8, chunk_tokens=size).output_ids for size in (7, 40)]
    assert results[0] == results[1]


def test_exponents_of_no_weight_are_refused(tmp_path: Path) -> None:
    quantized, _ = write_mxfp4(tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 255
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ConfigError, match="scale exponents are out of range"):
        TorchEngine(quantized, num_blocks=1, dtype="float32")


def test_mxfp4_is_served_of_gpt_oss_alone(tmp_path: Path) -> None:
    path = write_transformers_checkpoint(tmp_path, "llama") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match="LlamaForCausalLM with weights in mxfp4 is not supported"):
        load_model_config(tmp_path)

"""Quantised checkpoints are served as what their weights stand for, and refused in one sentence where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdmesh.engine.files import load_model_config
from pdmesh.engine.levels import choose_kernels
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh.model import SamplingParams
from pdmesh.testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh.testing.quantized_checkpoints import FORMATS, Format, write_quantized
from pdmesh.testing.stepping import generate

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=320)
PROMPT = [number * 37 % 300 for number in range(30)]
#: Sizes that no block nor word of a format divides, where it allows them.
SHAPE = CheckpointShape(hidden_size=80, intermediate_size=112)


@pytest.mark.parametrize("quantized_format", FORMATS)
def test_a_quantised_model_is_what_its_weights_stand_for(tmp_path: Path, quantized_format: Format) -> None:
    source = write_checkpoint(tmp_path / "source", shape=SHAPE)
    outputs = [
        generate(TorchEngine(path, num_blocks=4, num_threads=1, dtype="float32"), PROMPT, 8, params=PARAMS)
        for path in write_quantized(source, tmp_path, quantized_format)
    ]
    assert outputs[0].results == outputs[1].results
    assert len(set(outputs[0].output_ids)) > 3


@pytest.mark.parametrize("quantized_format", FORMATS)
def test_weights_stay_as_they_are_quantised_and_come_as_close(tmp_path: Path, quantized_format: Format) -> None:
    """In bf16 codes are multiplied, and sums scaled: as near to the model in fp32 as weights that are rounded."""
    choice = choose_kernels("bfloat16")
    if choice.library is None:
        pytest.skip("no kernels: built without a compiler")
    source = write_checkpoint(tmp_path / "source", shape=SHAPE)
    quantized, plain = write_quantized(source, tmp_path, quantized_format)
    packed, rounded, exact = (
        TorchEngine(path, num_blocks=4, num_threads=1, dtype=dtype)
        for path, dtype in ((quantized, "bfloat16"), (plain, "bfloat16"), (plain, "float32"))
    )
    assert ("packed" in packed.arithmetic) is not quantized_format.startswith(("fp8", "bnb-n"))
    assert "packed" not in rounded.arithmetic
    expected = prompt_logprobs(exact)
    errors = [(prompt_logprobs(engine) - expected).abs().mean() for engine in (packed, rounded)]
    assert errors[0] < 1.2 * errors[1] + 1e-3
    results = [generate(packed, PROMPT, 8, chunk_tokens=size, params=PARAMS).results[-8:] for size in (7, 30)]
    assert results[0] == results[1]  # whatever the chunks


#: What bitsandbytes says of a weight, as a tensor.
_STATE = "weight.quant_state.bitsandbytes__nf4"


def state_of(**fields: Any) -> torch.Tensor:
    return torch.tensor([*json.dumps(fields).encode()], dtype=torch.uint8)


def prompt_logprobs(engine: TorchEngine) -> torch.Tensor:
    """Of every token at every place of the prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=320)
    generation = generate(engine, PROMPT, 1, params=params)
    rows = [dict(each.top) for result in generation.results for each in result.prompt_logprobs]
    return torch.tensor([[row[token] for token in sorted(row)] for row in rows])


@pytest.mark.parametrize(
    ("quantization", "sentence"),
    [
        ({"quant_method": "hqq"}, "quantised by 'hqq', which is not served; served are compressed-"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes with weights of type 'fp4' is not served"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf5"},
            "type 'nf5' is not served",
        ),
        ({}, "quantised by None"),
        ("int4", "it must be an object"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits is not served"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; it must be a positive integer"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ of 4 bits, version 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is .* outputs and inputs of a block"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {
                    "a": {"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}}
                },
            },
            "format 'nvfp4-pack-quantized' with 4 bits of type 'float' by group is not served",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
            },
            "config_groups quantise weights differently",
        ),
    ],
    ids=str,
)
def test_what_is_not_served_is_said_in_a_sentence(tmp_path: Path, quantization: Any, sentence: str) -> None:
    path = write_checkpoint(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    with pytest.raises(ConfigError, match=sentence) as error:
        load_model_config(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("quantized_format", "name", "replacement", "sentence"),
    [
        ("bnb-nf4", "weight.absmax", torch.zeros(3), r"weight.absmax' has shape \(3,\)"),
        ("bnb-nf4", _STATE, torch.zeros(5000, dtype=torch.uint8), r"has shape \(5000,\)"),
        ("bnb-nf4", _STATE, torch.zeros(9, dtype=torch.uint8), "has a state that is no JSON object"),
        ("bnb-nf4", _STATE, state_of(blocksize=128), "has blocks of 128 values and 256 scales"),
        ("bnb-nested", _STATE, state_of(blocksize=64), "has a nested_offset of None"),
        ("bnb-int8", "weight_format", torch.tensor(1, dtype=torch.uint8), "is not stored by rows"),
        ("awq", "qzeros", None, "hold no tensor '.*qzeros'"),
        ("gptq", "qweight", torch.zeros(1, 1, dtype=torch.int32), r"has shape \(1, 1\); config.json needs \(10, 64\)"),
        ("gptq", "scales", torch.zeros(5, 64, dtype=torch.int32), "is I32; config.json needs BF16 or"),
        ("gptq-order", "g_idx", torch.full((80,), 7, dtype=torch.int32), "names groups that are none"),
        ("fp8-channel", "weight", torch.zeros(64, 80), "is F32; config.json needs F8_E4M3"),
        ("int8-group", "weight_scale", torch.zeros(64, 4), r"has shape \(64, 4\); config.json needs \(64, 5\)"),
    ],
)
def test_lying_tensors_are_named(
    tmp_path: Path, quantized_format: Format, name: str, replacement: torch.Tensor | None, sentence: str
) -> None:
    source = write_checkpoint(tmp_path / "source", shape=SHAPE)
    path, _ = write_quantized(source, tmp_path, quantized_format)
    tensors = load_file(path / "model.safetensors")
    whole_name = f"model.layers.1.self_attn.q_proj.{name}"
    if replacement is None:
        del tensors[whole_name]
    else:
        tensors[whole_name] = replacement
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=sentence) as error:
        TorchEngine(path, num_blocks=1)
    assert whole_name.removesuffix(name) in str(error.value)

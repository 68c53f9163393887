"""Quantised checkpoints are served as what their weights stand for, and refused in one sentence where they are not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from pdmesh.engine.checkpoint import load_weights
from pdmesh.engine.experts import Mlp
from pdmesh.engine.files import load_model_config
from pdmesh.engine.levels import choose_kernels
from pdmesh.engine.linear import WeightMemory
from pdmesh.engine.model_config import ModelConfig, Quantization, QuantizedFormat
from pdmesh.engine.packed import PackedLinear, packed_linear
from pdmesh.engine.quantized import layout_of
from pdmesh.engine.ranks.share import RankShare
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh.model import SamplingParams
from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.quantized_checkpoints import FORMATS, Format, write_quantized
from pdmesh_testing.stepping import generate
from pdmesh_testing.transformers_checkpoints import model_variants, write_transformers_checkpoint

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=320)
PROMPT = [number * 37 % 300 for number in range(30)]
#: Sizes that no block nor word of a format divides, where it allows them.
SHAPE = CheckpointShape(hidden_size=80, intermediate_size=112)


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "glm4_moe", "granitemoehybrid", "minimax_m2", "nemotron_h", "qwen3_next"]
)
def test_reordered_weights_of_fp8_are_what_they_stand_for(tmp_path: Path, model_type: str) -> None:
    options = model_variants()[model_type][-1]
    source = write_transformers_checkpoint(tmp_path / "source", model_type, **options)
    outputs = [
        generate(TorchEngine(path, num_blocks=4, num_threads=1, dtype="bfloat16"), PROMPT, 8, params=PARAMS)
        for path in write_quantized(source, tmp_path, "fp8-blocks")
    ]
    assert outputs[0].results == outputs[1].results
    assert len(set(outputs[0].output_ids)) > 3


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
    """In bf16 integers are multiplied, and sums scaled: as near to the model in fp32 as weights that are rounded."""
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


#: Of weights that are no integers, and a shape whose rows are whole blocks of bitsandbytes'.
NO_INTEGERS: tuple[Format, ...] = ("fp8-tensor", "fp8-channel", "fp8-blocks", "fp8-ct-blocks", "bnb-nf4", "bnb-nested")
WHOLE_BLOCKS = CheckpointShape(hidden_size=128, intermediate_size=192, num_heads=4, num_kv_heads=2, head_dim=32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("quantized_format", NO_INTEGERS)
def test_weights_that_are_no_integers_stay_packed_with_the_bits_of_rounded_ones(
    tmp_path: Path, quantized_format: Format, ordered: bool, dtype: str
) -> None:
    if choose_kernels(dtype).library is None:
        pytest.skip("no kernels: built without a compiler")
    source = write_checkpoint(tmp_path / "source", shape=WHOLE_BLOCKS, architecture="qwen2")
    quantized, plain = (
        TorchEngine(path, num_blocks=4, num_threads=1, dtype=dtype, ordered=ordered)
        for path in write_quantized(source, tmp_path, quantized_format)
    )
    assert quantized.arithmetic == plain.arithmetic
    for chunk_tokens in (7, 30):
        outputs = [
            generate(engine, PROMPT, 8, chunk_tokens=chunk_tokens, params=PARAMS) for engine in (quantized, plain)
        ]
        assert outputs[0].results == outputs[1].results


@pytest.mark.parametrize("quantized_format", ["fp8-blocks", "bnb-nested"])
def test_experts_of_numbers_that_are_no_integers_give_the_bits_of_rounded_ones(
    tmp_path: Path, quantized_format: Format
) -> None:
    source = write_transformers_checkpoint(
        tmp_path / "source",
        "qwen3_moe",
        hidden_size=64,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    )
    outputs = [
        generate(TorchEngine(path, num_blocks=4, num_threads=1, dtype="bfloat16"), PROMPT, 8, params=PARAMS)
        for path in write_quantized(source, tmp_path, quantized_format)
    ]
    assert outputs[0].results == outputs[1].results


@pytest.mark.parametrize("quantized_format", NO_INTEGERS)
def test_each_rank_has_its_outputs_of_a_packed_weight(tmp_path: Path, quantized_format: Format) -> None:
    if (library := choose_kernels("bfloat16").library) is None:
        pytest.skip("no kernels: built without a compiler")
    source = write_checkpoint(tmp_path / "source", shape=WHOLE_BLOCKS)
    path, _ = write_quantized(source, tmp_path, quantized_format)
    config = load_model_config(path)
    assert isinstance(config, ModelConfig)
    whole, *parts = (
        load_weights(path, config, dtype=torch.bfloat16, device=torch.device("cpu"), library=library, share=share)
        for share in (RankShare(), *RankShare(num_ranks=2).of_all_ranks)
    )
    rows = torch.randn(3, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    downs = [weights.layers[1].mlp.down for weights in (whole, *parts) if isinstance(weights.layers[1].mlp, Mlp)]
    assert all(isinstance(down, PackedLinear) for down in downs)
    assert torch.equal(downs[0](rows), torch.cat([down(rows) for down in downs[1:]], dim=1))


@pytest.mark.parametrize("quantized_format", [name for name in NO_INTEGERS if "blocks" not in name])
def test_packed_weights_are_no_larger_than_in_their_file(tmp_path: Path, quantized_format: Format) -> None:
    """Within a twentieth."""
    if (library := choose_kernels("bfloat16").library) is None:
        pytest.skip("no kernels: built without a compiler")
    shape = replace(WHOLE_BLOCKS, hidden_size=512, intermediate_size=1024, num_layers=1)
    path, _ = write_quantized(write_checkpoint(tmp_path / "source", shape=shape), tmp_path, quantized_format)
    config = load_model_config(path)
    assert isinstance(config, ModelConfig)
    weights = load_weights(path, config, dtype=torch.bfloat16, device=torch.device("cpu"), library=library)
    mlp = weights.layers[0].mlp
    assert isinstance(mlp, Mlp)
    assert isinstance(mlp.down, PackedLinear)
    stored = load_file(path / "model.safetensors")
    own = sum(tensor.nbytes for name, tensor in stored.items() if ".mlp.down_proj." in name and "state" not in name)
    assert sum(each.nbytes for each in mlp.down.memory) <= 1.05 * own


def test_blocks_of_fp8_are_what_transformers_makes_of_them() -> None:
    if (library := choose_kernels("bfloat16").library) is None:
        pytest.skip("no kernels: built without a compiler")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(256, 384, generator=generator).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator).bfloat16()
    dequantize = Fp8Dequantize(None)  # type: ignore[no-untyped-call]
    converted = dequantize.convert({"weight": [values], "weight_scale_inv": [scales]})["weight"]
    assert isinstance(converted, torch.Tensor)
    layout = layout_of(Quantization(format=QuantizedFormat.FLOAT8_BLOCKS, block=(128, 128)))
    weight = layout.weight({"weight": values, "weight_scale_inv": scales}, 256, 384)
    grouped = weight.grouped(8)
    assert grouped is not None
    packed = packed_linear(grouped, None, WeightMemory(), library)
    assert torch.equal(packed.embed(torch.arange(256)), converted)
    assert sum(each.nbytes for each in packed.memory) <= 1.05 * values.nbytes
    dequantised = torch.empty(256, 384, dtype=torch.bfloat16)
    weight.write(dequantised)
    assert torch.equal(dequantised, converted)


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
        ({"quant_method": "hqq"}, "quantised by 'hqq', which is not supported; use one of compressed-"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes with weights of type 'fp4' is not supported"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf5"},
            "type 'nf5' is not supported",
        ),
        ({}, "quantised by None"),
        ("int4", "it must be an object"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits is not supported"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; it must be a positive integer"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ of 4 bits, version 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is .* numbers of outputs and inputs"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {
                    "a": {"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}}
                },
            },
            "format 'nvfp4-pack-quantized' with 4 bits of type 'float' by group is not supported",
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
        ("bnb-nf4", _STATE, torch.zeros(9, dtype=torch.uint8), "has a state that is not a JSON object"),
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


@pytest.mark.parametrize(
    ("quantized_format", "name", "replacement"),
    [
        ("fp8-channel", "weight", torch.full((128, 128), torch.nan).to(torch.float8_e4m3fn)),
        ("fp8-channel", "weight_scale", torch.full((128, 1), torch.nan)),
        ("bnb-nf4", "weight.absmax", torch.full((256,), torch.inf)),
        ("bnb-nf4", "weight.quant_map", torch.full((16,), torch.nan)),
        ("bnb-nested", "weight.nested_absmax", torch.full((1,), torch.nan)),
        ("bnb-nested", "weight.nested_quant_map", torch.full((256,), torch.nan)),
    ],
)
def test_packed_weights_that_are_no_numbers_are_refused(
    tmp_path: Path, quantized_format: Format, name: str, replacement: torch.Tensor
) -> None:
    if choose_kernels("bfloat16").library is None:
        pytest.skip("no kernels: built without a compiler")
    path, _ = write_quantized(write_checkpoint(tmp_path / "source", shape=WHOLE_BLOCKS), tmp_path, quantized_format)
    tensors = load_file(path / "model.safetensors")
    whole_name = f"model.layers.1.self_attn.q_proj.{name}"
    assert whole_name in tensors
    save_file({**tensors, whole_name: replacement}, path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"q_proj\.weight: the quantised weight has values that are not finite numbers"
    ):
        TorchEngine(path, num_blocks=1, dtype="bfloat16")

"""A LoRA adapter is merged into the weights, or refused in a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh.model import SamplingParams
from pdmesh_testing.adapters import write_adapter
from pdmesh_testing.checkpoints import write_checkpoint
from pdmesh_testing.quantized_checkpoints import write_quantized
from pdmesh_testing.stepping import generate

PROMPT = [number * 37 % 300 for number in range(30)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_merged_adapter_is_the_model_with_it(tmp_path: Path, use_rslora: bool) -> None:
    source = write_checkpoint(tmp_path / "source")
    merged = write_adapter(tmp_path / "adapter", source, use_rslora=use_rslora)
    shutil.copytree(source, tmp_path / "merged")
    save_file(merged, tmp_path / "merged/model.safetensors", metadata={"format": "pt"})
    engines = [
        TorchEngine(source, num_blocks=4, num_threads=1, dtype="float32", lora=tmp_path / "adapter"),
        TorchEngine(tmp_path / "merged", num_blocks=4, num_threads=1, dtype="float32"),
        TorchEngine(source, num_blocks=4, num_threads=1, dtype="float32"),
    ]
    found, expected, plain = (generate(engine, PROMPT, 8, params=PARAMS) for engine in engines)
    assert found.output_ids == expected.output_ids
    assert found.output_ids != plain.output_ids
    for one, other in zip(found.results, expected.results, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


def test_layers_that_are_not_adapted_stay_packed(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    write_adapter(tmp_path / "adapter", source)
    quantized, _ = write_quantized(source, tmp_path / "formats", "int4-group")
    engine = TorchEngine(quantized, num_blocks=4, num_threads=1, dtype="bfloat16", lora=tmp_path / "adapter")
    outputs = [generate(engine, PROMPT, 8, chunk_tokens=size).output_ids for size in (7, 30)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"use_dora": True}, "use_dora is set, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set, which is not supported"),
        ({"peft_type": "IA3"}, "the adapter is of type 'IA3'; only LORA is supported"),
        ({"bias": "all"}, "biases or transposed weights are adapted"),
        ({"r": 5}, r"has shape \(4, 128\); config.json needs \(5, 128\)"),
        ({"r": 1 << 40}, "ranks up to 4096 are supported"),
    ],
    ids=str,
)
def test_what_cannot_be_merged_is_said_in_a_sentence(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    source = write_checkpoint(tmp_path / "source")
    write_adapter(tmp_path / "adapter", source)
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ConfigError, match=sentence) as error:
        TorchEngine(source, num_blocks=1, lora=tmp_path / "adapter")
    assert "\n" not in str(error.value)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    write_adapter(tmp_path / "adapter", source)
    path = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(path)
    moved = {name.replace("layers.1", "layers.7"): tensor for name, tensor in tensors.items()}
    save_file(moved, path)
    with pytest.raises(ConfigError, match=r"layers\.7.*which the model does not have"):
        TorchEngine(source, num_blocks=1, lora=tmp_path / "adapter")
    path.write_bytes(b"none")
    with pytest.raises(ConfigError, match="cannot be read"):
        TorchEngine(source, num_blocks=1, lora=tmp_path / "adapter")

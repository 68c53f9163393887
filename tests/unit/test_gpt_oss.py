"""gpt-oss as it is published: experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdmesh.engine.files import load_model_config
from pdmesh.engine.runner import TorchEngine
from pdmesh.errors import ConfigError
from pdmesh.testing.stepping import generate
from pdmesh.testing.transformers_checkpoints import write_transformers_checkpoint

#: The format's values, by its codes.
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
PROMPT = [number * 37 % 300 for number in range(40)]


def in_mxfp4(weights: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(experts, inputs, outputs) as bytes and exponents, and what these stand for."""
    turned = weights.transpose(1, 2)
    blocks = turned.reshape(*turned.shape[:2], -1, 32)
    exponents = (blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    codes = (blocks[..., None] / 2 ** exponents[..., None] - VALUES).abs().argmin(-1)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    meaning = (VALUES[codes] * 2**exponents).view(turned.shape).transpose(1, 2)
    return {"blocks": packed.to(torch.uint8), "scales": (exponents[..., 0] + 127).to(torch.uint8)}, meaning


def write(directory: Path) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and one of what its weights stand for."""
    plain = write_transformers_checkpoint(
        directory / "plain", "gpt_oss", num_local_experts=3, num_experts_per_tok=2, head_dim=16
    )
    quantized = directory / "quantized"
    quantized.mkdir()
    stored: dict[str, torch.Tensor] = {}
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            parts, meaning = in_mxfp4(tensor)
            stored |= {f"{name}_{end}": part.contiguous() for end, part in parts.items()}
            tensors[name] = meaning.contiguous()
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**fields, "quantization_config": {"quant_method": "mxfp4"}}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (quantized / name).write_bytes((plain / name).read_bytes())
    return quantized, plain


def test_experts_in_mxfp4_are_what_they_stand_for(tmp_path: Path) -> None:
    outputs = [
        generate(TorchEngine(path, num_blocks=4, num_threads=1, dtype="float32"), PROMPT, 8).results
        for path in write(tmp_path)
    ]
    assert outputs[0] == outputs[1]


def test_experts_stay_packed(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path)
    engine = TorchEngine(quantized, num_blocks=4, num_threads=1, dtype="bfloat16")
    if "torch" in engine.compute_path.kernels:
        pytest.skip("no kernels: built without a compiler")
    assert "packed" in engine.arithmetic
    results = [generate(engine, PROMPT, 8, chunk_tokens=size).output_ids for size in (7, 40)]
    assert results[0] == results[1]


def test_exponents_of_no_weight_are_refused(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 255
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(ConfigError, match="exponents are those of no weight"):
        TorchEngine(quantized, num_blocks=1, dtype="float32")


def test_mxfp4_is_served_of_gpt_oss_alone(tmp_path: Path) -> None:
    path = write_transformers_checkpoint(tmp_path, "llama") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match="LlamaForCausalLM with weights in mxfp4 is not served"):
        load_model_config(tmp_path)

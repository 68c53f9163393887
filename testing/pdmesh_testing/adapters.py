"""LoRA adapters of small checkpoints. Imports torch late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_RANK, _ALPHA = 4, 6.0
_TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def write_adapter(directory: Path, source: Path, **fields: Any) -> dict[str, Any]:
    """Write an adapter of some layers; return the source's weights with it, by PEFT's definition."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    scale = _ALPHA / (_RANK**0.5 if fields.get("use_rslora") else _RANK)
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, Any] = {}
    for name in [name for name in tensors if any(target in name for target in _TARGETS) and name.endswith(".weight")]:
        outputs, inputs = tensors[name].shape
        into, out = torch.randn(_RANK, inputs, generator=generator), torch.randn(outputs, _RANK, generator=generator)
        out /= 8 * inputs**0.5
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        stored |= {f"{prefix}.lora_A.weight": into, f"{prefix}.lora_B.weight": out}
        tensors[name] = tensors[name] + scale * (out @ into)
    directory.mkdir()
    save_file(stored, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _ALPHA, "target_modules": ["q_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    return tensors

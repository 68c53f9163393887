"""Memory of a quantised model on a CPU over the size of its file: `python benchmarks/format_memory.py`.

Files of each format have Qwen2.5-0.5B's shape, gpt-oss's one of about that size, and random content. Each is loaded in
a process of its own, which says by how much its proportional set size (PSS: private memory, and its share of what is
mapped) has grown, and how high it was while it loaded. Exits 1 if it grew by more than a twentieth over the file.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from cpu_levels import SHAPE
from report import Limits, heading
from safetensors.torch import save_file
from torch import Tensor

from pdmesh.engine import bitsandbytes
from pdmesh.engine.config_fields import Fields
from pdmesh.engine.gguf.gguf_reader import TYPES
from pdmesh.engine.model_config import Quantization, QuantizedFormat
from pdmesh.engine.quantization import quantization_of
from pdmesh.engine.quantized import Layout, layout_of
from pdmesh.engine.runner import TorchEngine
from pdmesh_testing.checkpoints import write_config
from pdmesh_testing.gguf_files import encoded

MOST = 1.05  # of the file


def _compressed(weights: dict[str, Any], name: str = "pack-quantized") -> dict[str, Any]:
    scheme = {"symmetric": True, **weights}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": {"weights": scheme}}}


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
#: ``quantization_config`` of checkpoints.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8 by channel": _compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"),
    "int4 in groups of 128": _compressed({**_INT4, "group_size": 128}),
    "int4 in groups of 32": _compressed({**_INT4, "group_size": 32}),
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "FP8 in blocks of 128": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "FP8 by channel": _compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
    "bitsandbytes NF4, nested": {**_NF4, "bnb_4bit_use_double_quant": True},
    "bitsandbytes, 8 bits": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}
#: GGUF's types of layers, and of embeddings.
GGUF_FILES = {"GGUF Q8_0": ("Q8_0", "Q8_0"), "GGUF Q4_K, Q6_K": ("Q4_K", "Q6_K"), "GGUF MXFP4": ("MXFP4", "Q8_0")}
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8, "I8": torch.int8,
           "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}  # fmt: skip


def pss_bytes() -> int:
    [line] = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Pss:")]
    return int(line.split()[1]) * 1024


def matrices() -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each matrix of the layers."""
    hidden, inner = SHAPE.hidden_size, SHAPE.intermediate_size
    q_size, kv_size = SHAPE.num_heads * SHAPE.head_dim, SHAPE.num_kv_heads * SHAPE.head_dim
    sizes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"model.layers.{layer}.{name}": size for layer in range(SHAPE.num_layers) for name, size in sizes.items()}


def vectors() -> list[str]:
    norms = ("input_layernorm", "post_attention_layernorm")
    return ["model.norm", *(f"model.layers.{layer}.{norm}" for layer in range(SHAPE.num_layers) for norm in norms)]


def some(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Content that no format refuses: integers of any bits, and floats of one value."""
    if dtype in ("U8", "I8", "I32"):
        return torch.randint(0, 256, (*shape[:-1], shape[-1] * _DTYPES[dtype].itemsize), dtype=torch.uint8).view(
            _DTYPES[dtype]
        )
    if dtype == "F8_E4M3":
        return torch.randint(0, 0x7F, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return torch.full(shape, 0.01, dtype=_DTYPES[dtype])


def stored_as(layout: Layout, name: str, outputs: int, inputs: int) -> dict[str, Tensor]:
    """A matrix's tensors."""
    found: dict[str, Tensor] = {}
    for end, stored in layout.tensors(outputs, inputs).items():
        if "quant_state" in end:
            state = json.dumps({"blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.5})
            found[f"{name}.{end}"] = torch.tensor([*state.encode()], dtype=torch.uint8)
        elif not stored.is_optional or end == "weight_scale_inv":
            dtype = next(each for each in ("I8", "U8", "I32", "F8_E4M3", "BF16", "F32") if each in stored.dtypes)
            found[f"{name}.{end}"] = some(stored.shapes[0], dtype)
    return found


def write_checkpoint(directory: Path, quantized: dict[str, Any]) -> Path:
    """Return the file of weights."""
    path = write_config(directory, shape=SHAPE, dtype="bfloat16") / "config.json"
    tensors = {f"{name}.weight": some((SHAPE.hidden_size,), "BF16") for name in vectors()}
    tensors["model.embed_tokens.weight"] = some((SHAPE.vocab_size, SHAPE.hidden_size), "BF16")
    layout = None
    if quantized:
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantized}))
        layout = _layout_of(quantization_of(Fields({"quantization_config": quantized}, "")))
    for name, size in matrices().items():
        tensors |= {f"{name}.weight": some(size, "BF16")} if layout is None else stored_as(layout, name, *size)
    file = directory / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    return file


def _layout_of(quantization: Quantization | None) -> Layout:
    assert quantization is not None
    is_bitsandbytes = quantization.format in (QuantizedFormat.BITSANDBYTES_4, QuantizedFormat.BITSANDBYTES_8)
    return bitsandbytes.layout(quantization) if is_bitsandbytes else layout_of(quantization)


def write_gguf(directory: Path, layers: str, embeddings: str) -> Path:
    """Return the file, which lies in a directory that looks like a checkpoint."""
    numbers = {stored.name: number for number, stored in TYPES.items()}
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}  # fmt: skip

    def tensor(kind: str, outputs: int, inputs: int, *, instead: str) -> tuple[tuple[int, int], int, bytes]:
        if inputs % TYPES[numbers[kind]].num_values:
            kind = instead  # as llama.cpp does
        stored = TYPES[numbers[kind]]
        blocks = np.full((outputs * (inputs // stored.num_values), stored.num_bytes), 0x21, dtype=np.uint8)
        return (outputs, inputs), numbers[kind], blocks.tobytes()

    tensors: dict[str, tuple[tuple[int, ...], int, bytes]] = {
        "token_embd.weight": tensor(embeddings, SHAPE.vocab_size, SHAPE.hidden_size, instead="Q8_0")
    }
    ones = np.ones(SHAPE.hidden_size, dtype="<f4").tobytes()
    for name, size in matrices().items():
        layer, part = name.split(".")[2], name.rpartition(".")[2]
        tensors[f"blk.{layer}.{names[part]}.weight"] = tensor(layers, *size, instead="Q5_0")
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{norm}.weight"] = ((SHAPE.hidden_size,), 0, ones)
    tensors["output_norm.weight"] = ((SHAPE.hidden_size,), 0, ones)
    path = write_config(directory, shape=SHAPE, dtype="bfloat16") / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "gguf"}}
    path.write_text(json.dumps(config))
    file = directory / "model.gguf"
    file.write_bytes(encoded({"general.architecture": "llama"}, tensors))
    return file


def load(directory: Path) -> None:
    """Print bytes by which the set size has grown when the model is loaded, and at most while it was."""
    torch.set_num_threads(1)
    before_bytes, peak_before_bytes = pss_bytes(), _peak_bytes()
    engine = TorchEngine(directory, num_blocks=1, num_threads=1, dtype="bfloat16")
    print(json.dumps([pss_bytes() - before_bytes, _peak_bytes() - peak_before_bytes, engine.arithmetic]))


def _peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is printed is the results
    if options.load is not None:
        return load(options.load)
    print(heading("Memory of quantised models, Qwen2.5-0.5B's shape"))
    limits = Limits()
    for name in [*CHECKPOINTS, *GGUF_FILES]:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            is_gguf = name in GGUF_FILES
            file = (
                write_gguf(directory, *GGUF_FILES[name]) if is_gguf else write_checkpoint(directory, CHECKPOINTS[name])
            )
            command = [sys.executable, __file__, "--load", folder]
            answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            grown_bytes, peak_bytes, arithmetic = json.loads(answer.splitlines()[-1])
            file_bytes = file.stat().st_size
            ratio = grown_bytes / file_bytes
            judged = limits.at_most(name, ratio, MOST)
            print(
                f"{name} ({arithmetic}): file {file_bytes / 1e6:.0f} MB, grown by {grown_bytes / 1e6:.0f} MB,", end=" "
            )
            print(f"{ratio:.3f} x, {judged}; at most {peak_bytes / file_bytes:.2f} x while loading", flush=True)
    limits.end()


if __name__ == "__main__":
    main()

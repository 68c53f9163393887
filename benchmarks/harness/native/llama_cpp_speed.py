"""llama.cpp's speed, for `peers.py`, which runs this with the python of a venv that has llama-cpp-python and gguf.

Files of the types that are asked for are written into ``folder``, and stay there.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np


def write_model(path: Path, shape: dict[str, Any], dtype: gguf.GGMLQuantizationType) -> None:
    """Random weights of a Qwen2 with tied embeddings."""
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_heads"])
    writer.add_head_count_kv(shape["num_kv_heads"])
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(0)

    def matrix(name: str, outputs: int, inputs: int) -> None:
        values = (rng.standard_normal((outputs, inputs), dtype=np.float32) / inputs**0.5).astype(np.float32)
        if dtype is gguf.GGMLQuantizationType.BF16:
            halves = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            halves = values.astype(np.float16).view(np.uint16)
        writer.add_tensor(name, halves.view(np.uint8).reshape(outputs, 2 * inputs), raw_dtype=dtype)

    def vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, dtype=np.float32))

    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    q_size, kv_size = shape["num_heads"] * shape["head_dim"], shape["num_kv_heads"] * shape["head_dim"]
    matrix("token_embd.weight", shape["vocab_size"], hidden)
    vector("output_norm.weight", hidden, 1.0)
    for layer in range(shape["num_layers"]):
        block = f"blk.{layer}"
        vector(f"{block}.attn_norm.weight", hidden, 1.0)
        vector(f"{block}.ffn_norm.weight", hidden, 1.0)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            matrix(f"{block}.attn_{name}.weight", size, hidden)
            vector(f"{block}.attn_{name}.bias", size, 0.0)
        matrix(f"{block}.attn_output.weight", hidden, q_size)
        matrix(f"{block}.ffn_gate.weight", inner, hidden)
        matrix(f"{block}.ffn_up.weight", inner, hidden)
        matrix(f"{block}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


#: Types that llama.cpp makes of a file in bf16, by its own rules for each tensor.
QUANTIZED = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def model_file(folder: Path, name: str, shape: dict[str, Any]) -> Path:
    """Write a file of a type, unless it is there."""
    path = folder / f"{name}.gguf"
    if path.exists():
        return path
    if name not in QUANTIZED:
        write_model(path, shape, gguf.GGMLQuantizationType[name])
        return path
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = QUANTIZED[name], 1
    source = model_file(folder, "BF16", shape)
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)):
        raise RuntimeError(f"{name} was not made")
    return path


class Model:
    """A model file, flash attention."""

    def __init__(self, path: Path, shape: dict[str, Any], num_threads: int) -> None:
        self._shape = shape
        self._clock = time.process_time if num_threads == 1 else time.perf_counter
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 4096, 2048, 512
        params.n_seq_max = max(shape["decodes"])
        params.n_threads = params.n_threads_batch = num_threads
        params.kv_unified = True
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> float:
        """Seconds of one step of (token, position, sequence, whether logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, number, wants) in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0], batch.logits[index] = number, wants
        started_s = self._clock()
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(self._context)
        ctypes.cast(llama_cpp.llama_get_logits_ith(self._context, -1), ctypes.c_void_p)
        return self._clock() - started_s

    def prefill_s(self, num_tokens: int) -> float:
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, True)
        vocab_size = self._shape["vocab_size"]
        return self._decode([(7919 * i % vocab_size, i, 0, i == num_tokens - 1) for i in range(num_tokens)])

    def decode_s(self, batch: int) -> float:
        """A step of so many sequences, which share their context."""
        context = self._shape["context"]
        self.prefill_s(context - 1)
        memory = llama_cpp.llama_get_memory(self._context)
        for number in range(1, batch):
            llama_cpp.llama_memory_seq_cp(memory, 0, number, -1, -1)
        times_s = [
            self._decode([(number, context - 1 + step, number, True) for number in range(batch)]) for step in range(4)
        ]
        return min(times_s)


def main() -> None:
    shape = json.loads(sys.stdin.readline())
    llama_cpp.llama_backend_init()
    folder = Path(shape["folder"])
    models = {name: Model(model_file(folder, name, shape), shape, shape["threads"]) for name in shape["types"]}
    print(json.dumps(f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"), flush=True)
    for _ in sys.stdin:
        times_s: dict[str, float] = {}
        for name, model in models.items():
            calls: dict[str, tuple[Callable[[int], float], list[int]]] = {
                "prefill": (model.prefill_s, shape["prefills"]),
                "decode": (model.decode_s, shape["decodes"]),
            }
            for what, (call, sizes) in calls.items():
                times_s |= {f"{name} {what} {size}": call(size) for size in sizes}
        print(json.dumps(times_s), flush=True)


if __name__ == "__main__":
    main()

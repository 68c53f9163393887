"""llama.cpp's view of GGUF files, for `gguf_variants.py`, which runs this with the python of a venv that has it.

Requests and replies are lines of JSON. "quantize" turns fp32 values of a file into blocks of a type, and "values" turns
blocks into values. "judge" loads a model. Its reply has token ids of texts, tokens that end answers, and distances of
given continuations from llama.cpp's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

LIBRARY = Path(llama_cpp.llama_cpp.__file__).parent / "lib" / "libggml-base.so"


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def keep_quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


def quantize(request: dict[str, Any]) -> dict[str, Any]:
    """Quantise rows with llama.cpp's own quantiser; all values are of equal importance."""
    ggml = ctypes.CDLL(str(LIBRARY))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_row_size.restype = ctypes.c_size_t
    ggml.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    values = np.ascontiguousarray(np.load(request["values"]), dtype=np.float32)
    rows, width = values.shape
    out = np.zeros(rows * ggml.ggml_row_size(request["type"], width), dtype=np.uint8)
    weights = np.ones(width, dtype=np.float32)
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in (values, out, weights)]
    written = ggml.ggml_quantize_chunk(
        request["type"], pointers[0], pointers[1], ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(width),
        pointers[2],
    )  # fmt: skip
    out[:written].tofile(request["out"])
    return {}


class TypeTraits(ctypes.Structure):
    """The beginning of ggml's struct of that name."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


def values(request: dict[str, Any]) -> dict[str, Any]:
    """Write what a file's blocks of a type stand for, by llama.cpp's own dequantiser."""
    ggml = ctypes.CDLL(str(LIBRARY))
    ggml.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    traits = ggml.ggml_get_type_traits(request["type"]).contents
    blocks = np.fromfile(request["blocks"], dtype=np.uint8)
    found = np.empty(len(blocks) // traits.type_size * traits.blck_size, dtype=np.float32)
    if traits.to_float:
        traits.to_float(blocks.ctypes.data, found.ctypes.data, len(found))
    else:
        found = blocks.view(np.float32)
    np.save(request["out"], found)
    return {}


def judge(request: dict[str, Any]) -> dict[str, Any]:
    """Return ids of the texts, all tokens that end answers, and the largest gap of each continuation's tokens.

    A gap is what the likeliest token's logit is more than the given token's.
    """
    model = llama_cpp.llama_model_load_from_file(request["path"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        return {"refused": True}
    vocab = llama_cpp.llama_model_get_vocab(model)
    num_tokens = llama_cpp.llama_vocab_n_tokens(vocab)
    ends = [number for number in range(num_tokens) if llama_cpp.llama_vocab_is_eog(vocab, number)]
    ids = [tokenize(vocab, text) for text in request["texts"]]
    gaps = [gap(model, num_tokens, *each) for each in zip(ids, request["continuations"], strict=False)]
    llama_cpp.llama_model_free(model)
    return {"ids": ids, "ends": ends, "gaps": gaps}


def tokenize(vocab: Any, text: str) -> list[int]:
    data = text.encode()
    tokens = (llama_cpp.llama_token * (len(data) + 8))()
    count = llama_cpp.llama_tokenize(vocab, data, len(data), tokens, len(tokens), True, True)
    return list(tokens[:count])


def gap(model: Any, num_tokens: int, prompt: list[int], continuation: list[int]) -> float:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
    context = llama_cpp.llama_init_from_model(model, params)
    worst, fed = 0.0, prompt
    for token in continuation:
        batch = (llama_cpp.llama_token * len(fed))(*fed)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(batch, len(fed))):
            raise RuntimeError("llama.cpp cannot decode")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (num_tokens,))
        worst = max(worst, float(logits.max() - logits[token]))
        fed = [token]
    llama_cpp.llama_free(context)
    return worst


def main() -> None:
    llama_cpp.llama_log_set(keep_quiet, ctypes.c_void_p(0))
    replies = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            request = json.loads(line)
            reply = {"quantize": quantize, "values": values, "judge": judge}[request["op"]](request)
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()

"""llama.cpp's logits, for `peers.py`, which runs this with the python of a venv that has llama-cpp-python.

Each round computes the next window of tokens, and writes its logits into ``logits.npy`` of the folder.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    windows: list[list[int]] = asked["windows"]
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(asked["file"].encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = max(map(len, windows))
    params.n_threads = params.n_threads_batch = asked["threads"]
    context = llama_cpp.llama_init_from_model(model, params)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
    print(json.dumps(f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"), flush=True)
    for _, tokens in zip(sys.stdin, windows, strict=False):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, index, 1
            batch.seq_id[index][0], batch.logits[index] = 0, True
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        address = ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        np.save(Path(asked["folder"]) / "logits.npy", np.ctypeslib.as_array(address, (len(tokens), vocab_size)))
        print(json.dumps({}), flush=True)


if __name__ == "__main__":
    main()

"""vLLM's prefill speed for `cpu_levels.py`, which runs this with the python of a venv that has vLLM for CPU.

Reads the model's shape and the cases as JSON from standard input, and prints tokens a second of CPU time, best of as
many rounds as the first argument says. ``avx2`` as the second hides AVX-512 from vLLM, oneDNN and torch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}  # it logs to standard output
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def write_config(folder: Path, shape: dict[str, Any]) -> None:
    """A Qwen2 with tied embeddings."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "num_hidden_layers": shape["num_layers"],
        "num_attention_heads": shape["num_heads"],
        "num_key_value_heads": shape["num_kv_heads"],
        **{name: shape[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
    }
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    shape, rounds, level = json.load(sys.stdin), int(sys.argv[1]), sys.argv[2]
    os.environ.update(ONE_THREAD | IN_PROCESS | (AVX2 if level == "avx2" else {}))
    import torch  # what is in the environment counts from here on

    if level == "avx2":
        torch.cpu._is_avx512_supported = lambda: False  # what vLLM chooses its library by
    import vllm

    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), shape)
        engine = vllm.LLM(
            model=name,
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            max_num_seqs=4,
        )
        torch.set_num_threads(1)
        params = vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        print(f"vLLM {vllm.__version__} bf16 ({torch.backends.cpu.get_cpu_capability()}):")
        for num_tokens in shape["prefills"]:
            times_s: list[float] = []
            for _ in range(rounds):
                prompt = {"prompt_token_ids": [7919 * i % shape["vocab_size"] for i in range(num_tokens)]}
                started_s = time.process_time()
                engine.generate([prompt], params, use_tqdm=False)
                times_s.append(time.process_time() - started_s)
            print(f"  prefill {num_tokens:5d}  {num_tokens / min(times_s):7.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()

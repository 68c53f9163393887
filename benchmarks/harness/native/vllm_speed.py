"""vLLM's speed, for `peers.py`, which runs this with the python of a venv that has vLLM for CPU.

A decode step is the median of those after a batch's first. ``avx2`` among the arguments hides AVX-512 from vLLM,
oneDNN and torch; one of `FORMATS` names how weights are quantised, which are bf16 else. Of int8, vLLM 0.32 for CPU
takes weights with activations in int8 (W8A8) only: "Failed to find a kernel that can implement the WNA16 linear layer".
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
DECODE_STEPS = 12
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
#: By our names: weights and activations of compressed-tensors.
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "int8": (
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    ),
    "int4 groups of 128": ({**_INT4, "group_size": 128}, None),
    "int4 groups of 32": ({**_INT4, "group_size": 32}, None),
}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def quantized(name: str) -> dict[str, Any]:
    """What ``config.json`` says of a format's layers; embeddings stay in bf16."""
    weights, activations = FORMATS[name]
    group = {"weights": weights, "input_activations": activations, "targets": ["Linear"]}
    kind = "pack-quantized" if activations is None else "int-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def write_config(folder: Path, shape: dict[str, Any], name: str | None) -> None:
    """A Qwen2 with tied embeddings, in a format."""
    config = {
        **({} if name is None else {"quantization_config": quantized(name)}),
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
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    shape = json.loads(sys.stdin.readline())
    hides_avx512 = "avx2" in sys.argv[1:]
    quantized_format = next((name for name in sys.argv[1:] if name in FORMATS), None)
    kind = (quantized_format or "bf16").upper()
    num_threads = shape["threads"]
    os.environ.update(IN_PROCESS | {"OMP_NUM_THREADS": str(num_threads)} | (AVX2 if hides_avx512 else {}))
    import torch  # what is in the environment counts from here on

    if hides_avx512:
        torch.cpu._is_avx512_supported = lambda: False  # what vLLM chooses its library by
    import vllm

    clock = time.process_time if num_threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), shape, quantized_format)
        engine = vllm.LLM(
            model=name,
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            max_num_seqs=max(4, *shape["decodes"]),
        )
        torch.set_num_threads(num_threads)

        def steps_s(batch: int, num_tokens: int, num_outputs: int, draws: dict[str, float]) -> list[float]:
            params = vllm.SamplingParams(max_tokens=num_outputs, ignore_eos=True, detokenize=False, **draws)
            prompt = {"prompt_token_ids": [7919 * i % shape["vocab_size"] for i in range(num_tokens)]}
            for number in range(batch):
                engine.llm_engine.add_request(f"{time.monotonic_ns()}-{number}", prompt, params)
            times_s: list[float] = []
            while engine.llm_engine.has_unfinished_requests():
                started_s = clock()
                engine.llm_engine.step()
                times_s.append(clock() - started_s)
            return times_s

        title = f"vLLM {vllm.__version__} ({torch.backends.cpu.get_cpu_capability()})"
        print(json.dumps(title), file=answers, flush=True)
        for _ in sys.stdin:
            greedy = shape["draws"]["decode"]
            answer = {f"{kind} prefill {size}": sum(steps_s(1, size, 1, greedy)) for size in shape["prefills"]}
            for batch, (what, draws) in itertools.product(shape["decodes"], shape["draws"].items()):
                times_s = steps_s(batch, shape["context"], DECODE_STEPS, draws)
                answer[f"{kind} {what} {batch}"] = statistics.median(times_s[2:])
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()

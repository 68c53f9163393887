"""The whole matrix of the exactness promise, through HTTP.

fp32 against `transformers`; bf16 and float16 against one engine alone, to the last bit. Dtypes x processor levels x
architectures x topologies x chunk sizes, and the default bundle with prompts that it interrupts; prompts of 1 to 4,000
tokens, alone and 32 at a time, when their KV is kept; log-probabilities of fp32 to 1e-4; and sampled tokens of one
seed, which must be the same warm and cold, in every topology and chunk size of a model. And long prompts that 2 and 3
prefill instances compute together: in turn (pipelined prefill), all at once (parallel prefill), and by groups of two
under `pecsched` (fixed), of mixed instances, too, which decode beside it.

    python -m benchmarks.exactness.exactness [--dtypes float32,bfloat16,float16] [--levels auto,avx2,baseline]
        [--architectures llama,qwen2,qwen3,demo,gemma2,…] [--chunks 1,16,512,8192,adaptive]
        [--groups pipelined,parallel,fixed]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import anyio

from benchmarks.harness.report import heading
from pdmesh.demo.demo_checkpoint import demo_checkpoint
from pdmesh.engine.files import load_model_config
from pdmesh.engine.runner import TorchEngine
from pdmesh_testing.checkpoints import TINY, CheckpointShape, Family, write_checkpoint
from pdmesh_testing.exactness import (
    Reference,
    complete,
    engine_reference,
    mismatches,
    random_prompts,
    reference,
)
from pdmesh_testing.mesh import RunningMesh, running_mesh
from pdmesh_testing.transformers_checkpoints import model_variants, write_transformers_checkpoint

TOPOLOGIES = {"1P+1D": (1, 1, 0), "2P+2D": (2, 2, 0), "2 mixed": (0, 0, 2)}
GROUPS = {"2P+1D": (2, 1, 0), "3P+1D": (3, 1, 0)}
MIXED_GROUPS = {"3 mixed": (0, 0, 3)}
SCHEDULES = {
    "pipelined": {"POLICY_SEQUENCE_PARALLEL": "pipelined"},
    "parallel": {"POLICY_SEQUENCE_PARALLEL": "parallel"},
    "fixed": {"POLICY_SEQUENCE_PARALLEL": "parallel", "SCHEDULER_BUNDLE": "pecsched", "POLICY_GROUP_SIZE": "2"},
}
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 100, 511, 513, 1000)
LONG_PROMPT = 4000
MAX_TOKENS = 16
#: A head that the kernels of every level compute.
SHAPE = replace(TINY, head_dim=32)
#: What makes torch, which computes fp32, use no more of the processor than a level has.
TORCH_CAPS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
#: Of prompts that are asked for with a seed, warm and cold.
SAMPLED_LENGTHS = (1, 17, 100, 513, 1000, LONG_PROMPT)
COLD = {"cache_salt": "cold"}
SAMPLING = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 5}


async def check(
    mesh: RunningMesh, references: list[Reference], tolerance: float
) -> tuple[list[str], list[tuple[int, ...]]]:
    """(differences from the reference, sampled tokens of a fixed seed)."""
    async with mesh.client() as client:
        found = await mismatches(client, mesh.model, references, concurrency=1, tolerance=tolerance)
        found += await mismatches(client, mesh.model, references * 3, concurrency=32, tolerance=tolerance)
        prompts = [reference.prompt for reference in references if len(reference.prompt) in SAMPLED_LENGTHS]
        sampled = [await complete(client, mesh.model, prompt, MAX_TOKENS, **SAMPLING) for prompt in prompts]
        cold = [await complete(client, mesh.model, prompt, MAX_TOKENS, **SAMPLING, **COLD) for prompt in prompts]
    if [answer.token_ids for answer in sampled] != [answer.token_ids for answer in cold]:
        found.append("sampled tokens differ from those of the same prompts when nothing of them was kept")
    return found, [answer.token_ids for answer in sampled]


def settings_of(way: str) -> dict[str, str]:
    """Of a mesh whose chunks have so many tokens, are adaptive, or are computed by groups as `SCHEDULES` names it."""
    if way in SCHEDULES:  # steps are short, so that there is something for everyone
        return {
            **SCHEDULES[way],
            "POLICY_LONG_PROMPT_TOKENS": "500",
            "POLICY_PREFILL_STEP_S": "0.02",
            "POLICY_GROUP_IMPROVEMENT": "0",
        }
    if way == "adaptive":  # prompts of 4,000 are long, so that the others interrupt them
        return {"SCHEDULER_BUNDLE": "pdmesh", "POLICY_LONG_PROMPT_TOKENS": "2000"}
    return {"SCHEDULER_BUNDLE": "fcfs", "POLICY_CHUNK_TOKENS": way}


def was_shared(mesh: RunningMesh) -> bool:
    """Whether instances passed each other KV of prompts that they computed together."""
    sent = re.findall(
        r"^pdmesh:kv_exchange_bytes(?:_total)?{direction=\"out\"} (\S+)$", "\n".join(mesh.metrics().values()), re.M
    )
    return any(float(number) > 0 for number in sent)


def references_of(checkpoint: Path, dtype: str, level: str) -> list[Reference]:
    """What is expected of a mesh that computes in this dtype at this level, for prompts that the model has room for."""
    config = load_model_config(checkpoint)
    lengths = [n for n in (*PROMPT_LENGTHS, LONG_PROMPT) if n + MAX_TOKENS <= config.max_model_len]
    prompts = random_prompts(lengths, config.vocab_size, seed=7)
    if dtype == "float32":
        return [reference(checkpoint, prompt, MAX_TOKENS) for prompt in prompts]
    engine = TorchEngine(checkpoint, num_blocks=512, num_threads=1, device="cpu", dtype=dtype, cpu_level=level)
    return [engine_reference(engine, prompt, MAX_TOKENS) for prompt in prompts]


def checkpoint_of(
    architecture: str,
    directory: Path,
    shape: CheckpointShape = SHAPE,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Path:
    """A model of the architecture: the demo, one of our own, or the most particular one that transformers makes."""
    if architecture == "demo":
        return demo_checkpoint()
    for family in get_args(Family):
        if family == architecture:
            return write_checkpoint(directory, architecture=family, shape=shape, dtype=dtype, seed=1)
    options = model_variants()[architecture][0]
    return write_transformers_checkpoint(directory, architecture, seed=1, dtype=dtype, **options)


@contextmanager
def capped_torch(level: str) -> Generator[None]:
    """Let torch in processes that are started meanwhile use no more of the processor than a level has."""
    caps = TORCH_CAPS.get(level, {})
    os.environ.update(caps)
    try:
        yield
    finally:
        for name in caps:
            del os.environ[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--levels", default="auto", help="the processor's best, or caps")
    parser.add_argument("--architectures", default=",".join(get_args(Family)), help="or any served")
    parser.add_argument("--chunks", default="1,16,512,8192,adaptive", help="sizes under fcfs; adaptive: under pdmesh")
    parser.add_argument("--groups", default=",".join(SCHEDULES), help="how members share a prompt; empty: no groups")
    arguments = parser.parse_args()
    schedules = list(filter(None, arguments.groups.split(",")))
    ways = [
        *product(TOPOLOGIES.items(), filter(None, arguments.chunks.split(","))),
        *product(GROUPS.items(), schedules),
        *product(MIXED_GROUPS.items(), [way for way in schedules if way == "fixed"]),
    ]
    print(heading("Exactness through HTTP"))
    num_wrong = num_asked = 0
    models = product(*(each.split(",") for each in (arguments.dtypes, arguments.levels, arguments.architectures)))
    for dtype, level, architecture in models:
        with tempfile.TemporaryDirectory() as name, capped_torch(level):
            folder = Path(name)
            checkpoint = checkpoint_of(architecture, folder / "model")
            references = references_of(checkpoint, dtype, level)
            first_sample: list[tuple[int, ...]] | None = None
            for (topology, (prefill, decode, mixed)), way in ways:
                began_s = time.monotonic()
                settings = {**settings_of(way), "WORKER_DTYPE": dtype, "WORKER_CPU_LEVEL": level}
                with running_mesh(
                    folder, model=checkpoint, prefill=prefill, decode=decode, mixed=mixed, settings=settings
                ) as mesh:
                    found, sampled = anyio.run(check, mesh, references, 1e-4 if dtype == "float32" else 0.0)
                    if way in SCHEDULES and not was_shared(mesh):
                        found.append("every prompt was computed by one instance")
                    reused, copied = mesh.total("prefix_cache_hits"), mesh.total("prefix_cache_fetched_tokens")
                    classes = {row.arithmetic for row in mesh.status().instances}
                first_sample = first_sample or sampled
                if sampled != first_sample:
                    found.append("sampled tokens differ from those of the first mesh")
                num_asked += 4 * len(references) + 2 * len(sampled)
                num_wrong += len(found)
                verdict = "exact" if not found else f"{len(found)} differ"
                took_s = time.monotonic() - began_s
                what = f"{architecture:6} {level:11} {' '.join(classes)} {topology:8} {way:>8}"
                kept = f"{reused:,.0f} tokens reused, {copied:,.0f} copied"
                print(f"{what}: {verdict} ({took_s:.0f} s, {kept})", flush=True)
                for sentence in found[:3]:
                    print(f"       {sentence}")
    print(f"{num_asked} completions, {num_wrong} differ")
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()

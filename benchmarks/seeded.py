"""Seeded streams against themselves: the same requests two at a time, and then 32 at a time.

    python benchmarks/seeded.py [--requests 40] [--tokens 400] [--dtype float32]

A step of another shape sums in another order, and its logits differ in the last bits. The model has random weights and
a vocabulary of 8,192, so that thousands of tokens are nearly equally likely: the worst case for filters.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
from report import heading

from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.exactness import complete, random_prompts
from pdmesh_testing.mesh import RunningMesh, running_mesh

SHAPE = CheckpointShape(vocab_size=8192, hidden_size=256, intermediate_size=512, num_layers=4, head_dim=64)
FILTERS: list[dict[str, Any]] = [{}, {"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.02}]


async def streams(
    mesh: RunningMesh, prompts: list[list[int]], num_tokens: int, concurrency: int, **fields: Any
) -> list[tuple[int, ...]]:
    """The tokens of each prompt's request, whose seed is its place in the list."""
    limiter = anyio.CapacityLimiter(concurrency)
    tokens: list[tuple[int, ...]] = [()] * len(prompts)

    async def ask(place: int) -> None:
        async with limiter:
            answer = await complete(
                client, mesh.model, prompts[place], num_tokens, temperature=0.9, seed=place, **fields
            )
        tokens[place] = answer.token_ids

    async with mesh.client() as client, anyio.create_task_group() as tasks:
        for place in range(len(prompts)):
            tasks.start_soon(ask, place)
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Seeded streams, two and 32 at a time")
    parser.add_argument("--requests", type=int, default=40, help="for each setting of the filters")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    print(heading(f"Seeded {options.dtype} streams against themselves"), flush=True)
    rng = random.Random(0)
    lengths = [rng.randint(5, 200) for _ in range(options.requests)]
    num_differing = 0
    with tempfile.TemporaryDirectory() as name:
        checkpoint = write_checkpoint(
            Path(name) / "model", architecture="llama", shape=SHAPE, dtype=options.dtype, seed=1
        )
        prompts = random_prompts(lengths, SHAPE.vocab_size, seed=7)
        with running_mesh(Path(name), model=checkpoint) as mesh:
            for fields in FILTERS:
                began_s = time.monotonic()
                few = anyio.run(lambda: streams(mesh, prompts, options.tokens, 2, **fields))  # noqa: B023
                many = anyio.run(lambda: streams(mesh, prompts, options.tokens, 32, **fields))  # noqa: B023
                differing = [place for place, (a, b) in enumerate(zip(few, many, strict=True)) if a != b]
                num_differing += len(differing)
                took_s = time.monotonic() - began_s
                print(f"{fields or 'no filter'}: {len(differing)} of {len(few)} differ ({took_s:.0f} s)", flush=True)
    print(f"{num_differing} of {len(FILTERS) * options.requests} differ")
    sys.exit(1 if num_differing else 0)


if __name__ == "__main__":
    main()

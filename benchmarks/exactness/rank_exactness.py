"""The exactness promise of instances of several ranks: tensor parallel and in stages, prefill and decode unlike.

A mesh of one prefill and two decode instances for each layout. The ways are chunks of 16 tokens, adaptive chunks with a
long prompt that the others interrupt, and running decodes that are moved from one instance to the other again and
again. Tokens and log-probabilities (1e-4) are compared with those of `transformers` in fp32; each prompt is asked for
once alone and three times with all others. Exit code 1 if anything differs.

    python -m benchmarks.exactness.rank_exactness [--architectures llama,qwen3,…] [--layouts 2x1-1x1,4x2-2x1,…]
        [--ways 16,adaptive,moves]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio

from benchmarks.exactness.exactness import checkpoint_of, settings_of
from benchmarks.harness.report import heading
from pdmesh_testing.checkpoints import TINY
from pdmesh_testing.exactness import Reference, mismatches, random_prompts, reference
from pdmesh_testing.mesh import LAYOUTS, RunningMesh, layout_settings, running_mesh
from pdmesh_testing.operating import Mover, operator_of

WAYS = ("16", "adaptive", "moves")
LENGTHS = (1, 15, 16, 17, 100, 513, 2500)
MAX_TOKENS = 16
#: Of requests that are moved, so that they last.
MOVED_LENGTHS = (1, 16, 17, 100, 300)
MOVED_TOKENS = 120
MIN_MOVES = 20


async def check(mesh: RunningMesh, references: Sequence[Reference], way: str) -> tuple[int, list[str], int]:
    """(completions, what differs, moves that were made)."""
    mover, found, num_asked = Mover(operator_of(mesh), ("decode-0", "decode-1")), list[str](), 0
    async with mesh.client() as client, anyio.create_task_group() as tasks:
        if way == "moves":
            tasks.start_soon(mover.run)
        for asked, concurrency in ((list(references), 1), (list(references) * 3, 32)):
            found += await mismatches(client, mesh.model, asked, concurrency=concurrency)
            num_asked += len(asked)
        while way == "moves" and mover.num_moved < MIN_MOVES:
            found += await mismatches(client, mesh.model, references, concurrency=4)
            num_asked += len(references)
        tasks.cancel_scope.cancel()
    mesh.wait_until_idle(60.0)
    return num_asked, found, mover.num_moved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", default="llama,qwen2,qwen3,gemma2")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    print(heading("Exactness of instances of several ranks"), flush=True)
    num_asked = num_differ = num_moved = 0
    for architecture in options.architectures.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            checkpoint = checkpoint_of(architecture, folder / "model")
            prompts = random_prompts(LENGTHS, TINY.vocab_size, seed=7)
            references = [reference(checkpoint, prompt, MAX_TOKENS) for prompt in prompts]
            prompts = random_prompts(MOVED_LENGTHS, TINY.vocab_size, seed=8)
            moved = [reference(checkpoint, prompt, MOVED_TOKENS) for prompt in prompts]
            for layout in options.layouts.split(","):
                for way in options.ways.split(","):
                    began_s = time.monotonic()
                    settings = layout_settings(layout) | ({} if way == "moves" else settings_of(way))
                    settings |= {"WORKER_DTYPE": "float32", "WORKER_NUM_THREADS": "1"}
                    place = folder / f"{layout}-{way}"
                    place.mkdir()
                    with running_mesh(place, model=checkpoint, decode=2, settings=settings) as mesh:
                        asked, found, moves = anyio.run(check, mesh, moved if way == "moves" else references, way)
                    num_asked, num_differ, num_moved = num_asked + asked, num_differ + len(found), num_moved + moves
                    verdict = f"{len(found)} differ" if found else "exact"
                    what = f"{architecture:6} {layout:8} {way:>8}"
                    took_s = time.monotonic() - began_s
                    print(f"{what}: {verdict} ({asked} completions, {moves} moves, {took_s:.0f} s)", flush=True)
                    for sentence in found[:3]:
                        print(f"       {sentence[:300]}", flush=True)
    print(f"{num_asked} completions, {num_moved} moves, {num_differ} differ")
    return int(num_differ > 0)


if __name__ == "__main__":
    sys.exit(main())

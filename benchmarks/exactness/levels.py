"""Whether a mesh of unlike processor levels answers as one engine: handed over, moved and killed across levels.

Each architecture with random weights, and the demo model; every ordered pair of the levels that this machine has. The
mesh is deterministic, so that levels of another class sum in order as well. Tokens and log-probabilities are compared
with those of one engine, to the last bit.

    python -m benchmarks.exactness.levels [--architectures llama,qwen2,qwen3,demo] [--dtypes bfloat16,float16]
        [--prompts 8] [--levels avx512_bf16,avx2]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import permutations, product
from pathlib import Path

from benchmarks.harness.report import heading
from pdmesh.demo.demo_checkpoint import demo_checkpoint
from pdmesh.engine.files import load_model_config
from pdmesh.engine.levels import processor_levels
from pdmesh_testing.checkpoints import CheckpointShape, write_checkpoint
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.unlike_levels import unlike_levels

SHAPE = CheckpointShape()
PROMPT_LENGTHS = (1, 15, 16, 17, 64, 100, 257, 300)
MAX_TOKENS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", default="llama,qwen2,qwen3,demo")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--levels", default=",".join(processor_levels()), help="each with each")
    parser.add_argument("--prompts", type=int, default=len(PROMPT_LENGTHS), help="how many of them")
    arguments = parser.parse_args()
    print(heading("Meshes of unlike processor levels"))
    num_asked = num_wrong = 0
    pairs = list(permutations(filter(None, arguments.levels.split(",")), 2))
    for architecture, dtype, levels in product(arguments.architectures.split(","), arguments.dtypes.split(","), pairs):
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if architecture == "demo":
                checkpoint = demo_checkpoint()
            else:
                checkpoint = write_checkpoint(folder / "model", architecture=architecture, shape=SHAPE, seed=1)
            vocab_size = load_model_config(checkpoint).vocab_size
            prompts = random_prompts(PROMPT_LENGTHS[: arguments.prompts], vocab_size, seed=7)
            found = unlike_levels(folder, checkpoint, levels, prompts, MAX_TOKENS, dtype=dtype)
        num_asked, num_wrong = num_asked + found.num_asked, num_wrong + len(found.differ)
        took_s = time.monotonic() - began_s
        print(
            f"{architecture:6} {dtype:8} prefill {levels[0]}, decode {levels[1]}: {found.num_asked} asked, "
            f"{found.num_moved} moved, {found.num_killed} killed, {len(found.differ)} differ ({took_s:.0f} s)",
            flush=True,
        )
        for sentence in found.differ[:3]:
            print(f"       {sentence}")
    print(f"{num_asked} completions on {len(pairs)} pairs of levels, {num_wrong} differ")
    sys.exit(1 if num_wrong or not pairs else 0)


if __name__ == "__main__":
    main()

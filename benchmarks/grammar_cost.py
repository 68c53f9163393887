"""What holding answers to a grammar costs a decode step of the engine, on one thread.

A model of Qwen2.5-0.5B's shape with random weights and a vocabulary of 151,936, and the demo model's; batches of
requests drawn at temperature 1, each held to the same JSON schema of texts, numbers, an enumeration and a list. Steps
with and without the grammar alternate; times are CPU time of the one thread that computes.

    python benchmarks/grammar_cost.py [--steps 40] [--batches 1,8,32]
"""

from __future__ import annotations

import argparse
import array
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from cpu_levels import SHAPE
from report import Limits, heading

from pdmesh.demo.demo_checkpoint import demo_checkpoint
from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.engine.files import load_model_config
from pdmesh.engine.runner import TorchEngine
from pdmesh.model import RequestId, SamplingParams, num_blocks_for
from pdmesh_testing.checkpoints import write_config
from pdmesh_testing.tokenizers import write_tokenizer

MOST = 1.03  # x a step without grammars, of the large vocabulary at batch 32
CONTEXT, ROOM, BLOCK = 256, 512, 16
_TEXT = {"type": "string", "maxLength": 60}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "kind": {"enum": ["person", "place", "thing"]},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": _TEXT, "maxItems": 8},
        "about": {"type": "string", "maxLength": 300},
    },
    "required": ["name", "kind", "score", "tags", "about"],
    "additionalProperties": False,
}
GRAMMAR = json.dumps({"grammars": [{"json_schema": {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}}]})


class Batch:
    """Requests that decode together. One that reaches its end begins anew."""

    def __init__(self, engine: TorchEngine, size: int, grammar: str, vocab_size: int, first_block: int) -> None:
        self._engine = engine
        self._sequences: list[EngineSequence] = []
        rng = np.random.default_rng(0)
        num_blocks = num_blocks_for(ROOM, BLOCK)
        for i in range(size):
            prompt = array.array("i", rng.integers(0, vocab_size - 8, CONTEXT, dtype=np.int32).tobytes())
            blocks = list(range(first_block + i * num_blocks, first_block + (i + 1) * num_blocks))
            params = SamplingParams(max_tokens=ROOM, temperature=1.0, seed=i, grammar=grammar)
            self._sequences.append(
                EngineSequence(
                    request_id=RequestId(str(i)),
                    params=params,
                    token_ids=prompt,
                    num_prompt_tokens=CONTEXT,
                    block_table=blocks,
                )
            )

    def step(self) -> float:
        """Decode a token of each; return the CPU time of that, in seconds."""
        parts = [
            SequenceSlice(sequence=s, start=len(s.token_ids) - 1, num_tokens=1, sample=True) for s in self._sequences
        ]
        began_s = time.thread_time()
        results = self._engine.execute(parts)
        took_s = time.thread_time() - began_s
        for sequence, result in zip(self._sequences, results, strict=True):
            if result.drawn[0].finish_reason is not None or len(sequence.token_ids) + 1 >= ROOM:
                del sequence.token_ids[CONTEXT:]
            else:
                assert result.token_id is not None
                sequence.token_ids.append(result.token_id)
        return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batches", default="1,8,32")
    arguments, limits = parser.parse_args(), Limits()
    sizes = [int(size) for size in arguments.batches.split(",")]
    print(heading("Cost of grammars, median of a decode step"))
    with tempfile.TemporaryDirectory() as name:
        large = write_config(Path(name), shape=SHAPE, dtype="bfloat16")
        write_tokenizer(large, vocab_size=SHAPE.vocab_size, model_max_length=SHAPE.max_position_embeddings)
        for what, checkpoint in (("0.5B", large), ("demo", demo_checkpoint())):
            vocab_size = load_model_config(checkpoint).vocab_size
            num_blocks = 2 * max(sizes) * num_blocks_for(ROOM, BLOCK)
            engine = TorchEngine(
                checkpoint, num_blocks=num_blocks, device="cpu", num_threads=1, has_random_weights=checkpoint is large
            )
            for size in sizes:
                plain = Batch(engine, size, "", vocab_size, 0)
                held = Batch(engine, size, GRAMMAR, vocab_size, num_blocks // 2)
                times_s = [(plain.step(), held.step()) for _ in range(arguments.steps + 3)][3:]
                plain_s = statistics.median(first for first, _ in times_s)
                ratio = statistics.median(second / first for first, second in times_s)
                verdict = (
                    limits.at_most(f"{what}, batch {size}", ratio, MOST) if size == 32 and checkpoint is large else ""
                )
                print(
                    f"{what}, batch {size:3}: {plain_s * 1e3:7.2f} ms, with grammars x {ratio:.3f} {verdict}",
                    flush=True,
                )
    limits.end()


if __name__ == "__main__":
    main()

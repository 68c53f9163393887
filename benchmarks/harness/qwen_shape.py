"""Steps of a model of Qwen2.5-0.5B's shape, and what other engines measure of the same steps."""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence

from benchmarks.harness.report import GREEDY, SAMPLED
from pdmesh.engine.base import EngineSequence, SequenceSlice
from pdmesh.kv_layout import num_blocks_for
from pdmesh.model import RequestId, SamplingParams
from pdmesh_testing.checkpoints import CheckpointShape

SHAPE = CheckpointShape(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=32_768,
    rope_theta=1e6,
    tie_word_embeddings=True,
)
#: How a decode draws, by its name in a case.
DRAWS: Mapping[str, Mapping[str, float]] = {"decode": GREEDY, "sampled decode": SAMPLED}
CONTEXT = 256  # of each
BLOCK = 16
_LAYERS = (
    SHAPE.num_layers
    * SHAPE.hidden_size
    * (2 * (SHAPE.num_heads + SHAPE.num_kv_heads) * SHAPE.head_dim + 3 * SHAPE.intermediate_size)
)
_HEAD = SHAPE.vocab_size * SHAPE.hidden_size
NUM_WEIGHTS = _LAYERS + _HEAD  # of matrices


def sequence(number: int, num_tokens: int, first_block: int, draws: Mapping[str, float] = GREEDY) -> EngineSequence:
    return EngineSequence(
        request_id=RequestId(f"bench-{number}"),
        params=SamplingParams(max_tokens=1 << 20, seed=number, **draws),  # type: ignore[arg-type]
        token_ids=array.array("i", [(7919 * (token + number)) % SHAPE.vocab_size for token in range(num_tokens)]),
        num_prompt_tokens=num_tokens,
        block_table=list(range(first_block, first_block + num_blocks_for(num_tokens, BLOCK))),
    )


def prefill(num_tokens: int) -> list[SequenceSlice]:
    return [SequenceSlice(sequence=sequence(0, num_tokens, 0), start=0, num_tokens=num_tokens, sample=True)]


def decode(batch: int, draws: Mapping[str, float] = GREEDY) -> list[SequenceSlice]:
    blocks_each = num_blocks_for(CONTEXT, BLOCK)
    return [
        SequenceSlice(
            sequence=sequence(number, CONTEXT, number * blocks_each, draws),
            start=CONTEXT - 1,
            num_tokens=1,
            sample=True,
        )
        for number in range(batch)
    ]


def peer_cases(folder: str, *, types: Sequence[str], decodes: Sequence[int], **others: object) -> dict[str, object]:
    """What a peer measures, of Qwen2.5-0.5B's shape in some of GGUF's types."""
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    return {
        **{name: getattr(SHAPE, name) for name in fields},
        "folder": folder,
        "types": types,
        "decodes": decodes,
        "draws": DRAWS,
        "context": CONTEXT,
        "threads": 1,
        **others,
    }


def tokens_of(case: str) -> int:
    """Tokens of a step, by a case's name."""
    return int(case.rpartition(" ")[2])

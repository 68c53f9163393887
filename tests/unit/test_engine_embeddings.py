"""Embeddings are transformers' last hidden states, however a text is cut and whatever is computed beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pdmesh.engine.runner import TorchEngine
from pdmesh.model import SamplingParams
from pdmesh_testing.checkpoints import Family, write_checkpoint
from pdmesh_testing.reference import HfReference
from pdmesh_testing.stepping import GREEDY, SteppedRequest, new_sequence, separate_tables, step

EMBEDS = SamplingParams(max_tokens=1, temperature=0.0, embeds=True)
PROMPTS = [
    [7 * number % 320 for number in range(start, start + length)] for start, length in ((1, 1), (3, 17), (5, 90))
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def embedded(engine: TorchEngine, chunk_tokens: int, *, with_decode: bool) -> list[npt.NDArray[np.float32]]:
    """The embedding of each prompt, all computed in the same steps; beside a request that draws tokens, or not."""
    tables = list(separate_tables(engine, [*map(len, PROMPTS), 200]))
    requests = [
        SteppedRequest(new_sequence(prompt, table, EMBEDS), 1) for prompt, table in zip(PROMPTS, tables, strict=False)
    ]
    decode = SteppedRequest(new_sequence([1, 2, 3], tables[-1], GREEDY), 190)
    found: dict[int, bytes] = {}
    while len(found) < len(requests):
        left = [index for index in range(len(requests)) if index not in found]
        beside = [(decode, 10)] if with_decode else []
        step(engine, [*((requests[index], chunk_tokens) for index in left), *beside])
        for index in left:
            result = requests[index].results[-1]
            assert result.token_id is None
            if result.embedding:
                assert not result.drawn
                found[index] = result.embedding
    return [np.frombuffer(found[index], dtype="<f4") for index in range(len(requests))]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_embeddings_equal_transformers_whatever_the_steps(family: Family, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, architecture=family, pools=True)
    reference = HfReference(directory)
    expected = [np.array(reference.embedding(prompt)) for prompt in PROMPTS]
    engine = TorchEngine(directory, num_blocks=64, num_threads=1)
    for chunk_tokens in (1, 16, 33, 1000):
        for vector, right in zip(embedded(engine, chunk_tokens, with_decode=chunk_tokens != 16), expected, strict=True):
            assert np.abs(vector - right).max() < 1e-4 * np.abs(right).max()
            assert vector @ right / np.linalg.norm(vector) / np.linalg.norm(right) > 0.9999


def test_deterministic_embeddings_have_the_same_bits_whatever_the_steps(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, pools=True)
    engine = TorchEngine(directory, num_blocks=64, num_threads=1, device="cpu", deterministic=True)
    first, *others = [embedded(engine, chunk_tokens, with_decode=True) for chunk_tokens in (1000, 16, 5)]
    for other in others:
        assert [vector.tobytes() for vector in other] == [vector.tobytes() for vector in first]

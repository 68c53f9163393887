"""Greedy output and log-probabilities equal transformers', whatever the chunking."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pdmesh.engine.runner import TorchEngine
from pdmesh.model import SamplingParams
from pdmesh_testing.checkpoints import Family, write_checkpoint
from pdmesh_testing.reference import HfReference
from pdmesh_testing.stepping import generate

FAMILIES: list[Family] = ["llama", "qwen2", "qwen3"]
ROPE: dict[str, tuple[int, dict[str, Any] | None]] = {  # name: (max_position_embeddings, scaling)
    "default": (8192, None),
    "linear": (8192, {"rope_type": "linear", "factor": 2.0}),
    "dynamic": (64, {"type": "dynamic", "factor": 8.0}),
    "llama3": (
        8192,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "yarn": (256, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def prompt_of(num_tokens: int, vocab_size: int = 320) -> list[int]:
    rng = random.Random(num_tokens)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_for_every_chunking(family: Family, rope: str, tmp_path: Path) -> None:
    max_position_embeddings, rope_scaling = ROPE[rope]
    directory = write_checkpoint(
        tmp_path,
        architecture=family,
        rope_scaling=rope_scaling,
        rope_parameters_key=family == "qwen3",
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=family == "qwen2",
    )
    reference, engine = HfReference(directory), TorchEngine(directory, num_blocks=32, num_threads=1)
    drawn: set[int] = set()
    for num_prompt_tokens in (1, 2, 33, 150):
        prompt = prompt_of(num_prompt_tokens)
        expected = reference.greedy(prompt, 24)
        drawn |= set(expected)
        for chunk_tokens in (1, 7, 16, 1000) if rope == "default" else (7, 1000):
            assert generate(engine, prompt, 24, chunk_tokens=chunk_tokens).output_ids == expected, (
                num_prompt_tokens,
                chunk_tokens,
            )
    assert len(drawn) > 20  # the model wanders: equal output means something


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_for_long_prompts(family: Family, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, architecture=family)
    reference, engine = HfReference(directory), TorchEngine(directory, num_blocks=260)
    prompt = prompt_of(4000)
    expected = reference.greedy(prompt, 12)
    for chunk_tokens in (333, 4000):
        assert generate(engine, prompt, 12, chunk_tokens=chunk_tokens).output_ids == expected


@pytest.mark.parametrize(
    "options",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"num_kv_heads": 1},
        {"num_kv_heads": 4, "head_dim": 24},
        {"sharded": True},
        {"tie_word_embeddings": True, "num_layers": 3, "vocab_size": 1000},
    ],
    ids=str,
)
def test_llama_variants_equal_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, seed=3, **options)
    prompt = prompt_of(50)
    engine = TorchEngine(directory, num_blocks=8)
    assert generate(engine, prompt, 24, chunk_tokens=13).output_ids == HfReference(directory).greedy(prompt, 24)


def test_block_size_and_deterministic_mode_do_not_change_greedy_output(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    prompt = prompt_of(50)
    expected = generate(TorchEngine(directory, num_blocks=8), prompt, 24).output_ids
    for block_size, deterministic in ((1, False), (5, False), (128, False), (16, True)):
        engine = TorchEngine(directory, num_blocks=80, block_size=block_size, deterministic=deterministic)
        assert generate(engine, prompt, 24, chunk_tokens=11).output_ids == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk_tokens", [1, 9, 1000])
def test_logprobs_equal_transformers(family: Family, chunk_tokens: int, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, architecture=family)
    params = SamplingParams(max_tokens=16, temperature=0.0, logprobs=5, prompt_logprobs=2)
    prompt = prompt_of(40)
    generation = generate(TorchEngine(directory, num_blocks=8), prompt, 16, chunk_tokens=chunk_tokens, params=params)
    token_ids = generation.sequence.token_ids.tolist()
    expected = HfReference(directory).logprobs(token_ids)

    for position, result in enumerate((r for r in generation.results if r.token_id is not None), start=len(prompt)):
        logprobs = result.logprobs
        assert logprobs is not None
        assert logprobs.logprob == pytest.approx(expected[position - 1][token_ids[position]], abs=1e-4)
        best = sorted(range(320), key=lambda token_id: -expected[position - 1][token_id])[:5]
        assert [token_id for token_id, _ in logprobs.top] == best
        assert [value for _, value in logprobs.top] == pytest.approx(
            [expected[position - 1][token_id] for token_id in best], abs=1e-4
        )
    prompt_logprobs = [entry for result in generation.results for entry in result.prompt_logprobs]
    assert len(prompt_logprobs) == len(prompt) - 1
    for position, entry in enumerate(prompt_logprobs, start=1):
        assert entry.logprob == pytest.approx(expected[position - 1][prompt[position]], abs=1e-4)
        assert len(entry.top) == 2


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    """Same weights computed in both: the mean difference of log-probabilities stays within bf16's precision."""
    directory = write_checkpoint(tmp_path, dtype="bfloat16", initializer_gain=1.0)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompt = prompt_of(200)
    engines = [TorchEngine(directory, num_blocks=16, dtype=dtype) for dtype in ("auto", "float32")]
    assert [engine.kv.layout.dtype for engine in engines] == ["bfloat16", "float32"]
    narrow, wide = (
        torch.tensor([entry.logprob for entry in generate(engine, prompt, 1, params=params).results[0].prompt_logprobs])
        for engine in engines
    )
    assert float((narrow - wide).abs().mean()) < 0.05

"""Compiled kernels draw what torch draws, at every level of this processor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from torch import Tensor

from pdmesh.engine.base import EngineSequence
from pdmesh.engine.drawing import DrawKernels, load_draw_kernels
from pdmesh.engine.grammar_state import GrammarState
from pdmesh.engine.levels import processor_levels
from pdmesh.engine.sampler import (
    draw,
    noise_bits,
    noise_keys,
    process,
    row_settings,
    sample,
    step_weights,
    token_logprobs,
)
from pdmesh.grammars import Grammars
from pdmesh_testing.levels import ARCHITECTURE_LEVELS
from pdmesh_testing.stepping import sequence_of

Kernels = DrawKernels | None
END_IDS = (256, 258)
REGEXES = ("[0-9]+", "(ab)*", "x", "[^a]{3}")


@pytest.fixture(params=[level for level in ARCHITECTURE_LEVELS if level.is_ordered])
def kernels(request: pytest.FixtureRequest) -> DrawKernels:
    level = request.param
    if level not in processor_levels():
        pytest.skip(f"this processor lacks {level}, or no kernels were compiled")
    found = load_draw_kernels(level)
    if found is None:
        pytest.skip(f"{level} kernels were not compiled")
    return found


class Drawing:
    """Draws and processes with chosen kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def sample(self, logits: Tensor, sequences: Sequence[EngineSequence], kernels: Kernels) -> list[int]:
        self._monkeypatch.setattr("pdmesh.engine.sampler.draw_kernels", lambda: kernels)
        return sample(logits, sequences)

    def processed(self, logits: Tensor, sequence: EngineSequence, kernels: Kernels) -> bytes:
        self._monkeypatch.setattr("pdmesh.engine.sampler.draw_kernels", lambda: kernels)
        row = logits.numpy().copy()
        process(row, sequence)
        return row.tobytes()

    def agree(self, logits: Tensor, sequences: Sequence[EngineSequence], kernels: DrawKernels) -> bool:
        return self.sample(logits, sequences, kernels) == self.sample(logits, sequences, None)


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Drawing:
    return Drawing(monkeypatch)


CHOICES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.2, 0.7, 1.0, 1.0, 1.3, 5.0],
    "top_k": [0, 0, 1, 5, 40, 1000],
    "top_p": [1.0, 1.0, 0.95, 0.9, 0.5, 0.05, 0.0],
    "min_p": [0.0, 0.0, 0.02, 0.3, 1.0],
    "repetition_penalty": [1.0, 1.0, 1.0, 1.2, 0.8],
    "presence_penalty": [0.0, 0.0, 0.5, -1.0],
    "frequency_penalty": [0.0, 0.0, 0.3, -0.2],
    "logit_bias": [(), (), ((3, 4.0), (9, -100.0), (3, 1.5))],
    "min_tokens": [0, 0, 400],
    "eos_token_ids": [(1, 2), END_IDS],
    "allowed_token_ids": [(), (), (), (3, 4, 7, 100, 2)],
    "bad_token_sequences": [(), (), ((5,), (6, 7))],
}


def requests_of(rng: random.Random, vocab_size: int, count: int) -> list[EngineSequence]:
    """Requests over all sampling parameters, some tokens into their outputs."""
    return [
        sequence_of(
            [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 60))],
            [rng.randrange(vocab_size) for _ in range(rng.randrange(60))],
            seed=rng.randrange(-(2**40), 2**63),
            **{name: rng.choice(values) for name, values in CHOICES.items()},
        )
        for _ in range(count)
    ]


def test_a_thousand_requests_draw_the_tokens_of_torch(
    kernels: DrawKernels, drawing: Drawing, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed batches, which torch draws in tiles or at once; no row with a grammar draws what the tokenizer lacks."""
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    grammars = Grammars(model, vocab_size=3001, eos_token_ids=END_IDS)
    for trial in range(125):
        vocab_size = rng.choice([101, 320, 3001, 3001, 20_000])
        logits = torch.randn(8, vocab_size, generator=generator) * rng.choice([0.01, 0.3, 2.0, 4.0])
        if trial % 3 == 0:
            logits = logits.bfloat16().float()  # with ties
        if trial % 7 == 0:
            logits[:, ::3] = -torch.inf
        sequences = requests_of(rng, vocab_size, 8)
        if vocab_size == 3001:
            for sequence in sequences[::3]:
                matcher = grammars.matcher(LLMatcher.grammar_from_regex(rng.choice(REGEXES)))
                sequence.guide = GrammarState(matcher, END_IDS)
        before = logits.clone()
        monkeypatch.setattr("pdmesh.engine.sampler._CPU_TILE_ELEMENTS", rng.choice([1, 3 * vocab_size, 1 << 23]))
        drawn = drawing.sample(logits, sequences, kernels)
        assert drawn == drawing.sample(logits, sequences, None), trial
        assert all(token < 320 for token, each in zip(drawn, sequences, strict=True) if each.guide is not None)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("spread", [0.0, 1e-40, 1e-6, 0.004, 1.0, 30.0, 1e30])
def test_extreme_logits_and_temperatures(kernels: DrawKernels, drawing: Drawing, spread: float) -> None:
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    for offset in (0.0, -1000.0):
        for vocab_size in (1, 2, 15, 64, 1000):
            logits = (torch.randn(40, vocab_size, generator=generator).double() * spread).float() + offset
            logits[::4, :-1][torch.rand(10, vocab_size - 1, generator=generator) < 0.9] = -torch.inf
            sequences = [
                sequence_of(
                    seed=rng.randrange(2**63),
                    temperature=rng.choice([1e-45, 1e-38, 1e-6, 0.01, 1.0, 10.0, 1e5, 1e30]),
                    top_k=rng.choice([0, 1, 3, 10**6]),
                    top_p=rng.choice([1.0, 0.999999, 0.5, 1e-9, 0.0]),
                    min_p=rng.choice([0.0, 1e-30, 1e-9, 0.5, 1.0]),
                )
                for _ in logits
            ]
            assert drawing.agree(logits, sequences, kernels), (offset, vocab_size)


def test_rows_that_have_no_order_are_left_to_torch(kernels: DrawKernels, drawing: Drawing) -> None:
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(3))
    logits[0, 50] = torch.nan
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.5}):
        assert drawing.agree(logits, [sequence_of([3, 7], [9], **params) for _ in logits], kernels)


def test_processed_logits_have_the_same_bits(kernels: DrawKernels, drawing: Drawing, model: Path) -> None:
    rng, generator = random.Random(4), torch.Generator().manual_seed(4)
    for vocab_size in (320, 1003):
        grammars = Grammars(model, vocab_size=vocab_size, eos_token_ids=END_IDS)
        for trial, sequence in enumerate(requests_of(rng, vocab_size, 60)):
            if trial % 2:
                sequence.guide = GrammarState(
                    grammars.matcher(LLMatcher.grammar_from_regex(rng.choice(REGEXES))), END_IDS
                )
            logits = torch.randn(vocab_size, generator=generator) * 3
            assert drawing.processed(logits, sequence, kernels) == drawing.processed(logits, sequence, None)


def test_the_most_likely_tokens_are_those_of_torch(kernels: DrawKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, generator = random.Random(7), torch.Generator().manual_seed(7)
    for trial in range(60):
        logits = torch.randn(4, rng.choice([1, 7, 64, 1003]), generator=generator).round(
            decimals=trial % 4
        )  # with ties
        logits[:, 3::5] = -torch.inf
        token_ids = [rng.randrange(logits.shape[1]) for _ in logits]
        num_top = [rng.choice([0, 1, 5, 20, 64, 65]) for _ in logits]
        monkeypatch.setattr("pdmesh.engine.sampler.draw_kernels", lambda: None)
        expected = token_logprobs(logits, token_ids, num_top)
        monkeypatch.setattr("pdmesh.engine.sampler.draw_kernels", lambda: kernels)
        assert token_logprobs(logits, token_ids, num_top) == expected


def test_threads_change_no_draw(kernels: DrawKernels) -> None:
    rng = random.Random(5)
    logits = torch.randn(9, 3000, generator=torch.Generator().manual_seed(5)).numpy()
    settings = row_settings(requests_of(rng, 3000, 9), 3000)
    addresses = logits.ctypes.data + logits.strides[0] * np.arange(9)
    weights = step_weights(torch.device("cpu")).numpy()
    one, three = (kernels.draw(addresses, settings, weights, vocab_size=3000, num_threads=number) for number in (1, 3))
    assert one == three
    assert len(set(one)) > 3


def test_rows_may_lie_apart(kernels: DrawKernels, drawing: Drawing) -> None:
    wide = torch.randn(6, 200, generator=torch.Generator().manual_seed(6))
    sequences = [sequence_of(seed=seed, top_k=9) for seed in range(6)]
    assert drawing.agree(wide[:, :100], sequences, kernels)
    assert drawing.agree(wide[:1].expand(6, -1), sequences, kernels)
    assert drawing.agree(wide.T[:6], sequences, kernels)


def test_the_lowest_noise_draws_no_token_that_is_left_out(kernels: DrawKernels, drawing: Drawing) -> None:
    """Noise that fp32 would round to -inf, as for one token in 2^25."""
    seed, token_id = 25_437_670, 5
    assert int(noise_bits(torch.from_numpy(noise_keys([seed], [0])), 8)[0, token_id]) >= 2**31 - 64
    logits = torch.zeros(1, 8)
    logits[0, token_id] = 20.0
    variety: list[dict[str, Any]] = [{"top_k": 1}, {"allowed_token_ids": (token_id,)}, {}]
    for params in variety:
        sequences = [sequence_of(seed=seed, **params)]
        for each in (kernels, None):
            assert drawing.sample(logits, sequences, each) == [token_id]
        assert draw(logits, sequences).tolist() == [token_id]

from __future__ import annotations

import array
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pdmesh.engine.base import EngineSequence
from pdmesh.engine.sampler import sample, token_logprobs, uniform
from pdmesh.model import RequestId, SamplingParams

VOCAB_SIZE = 50


def logits_of(seed: int, rows: int = 1, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def sequence_of(prompt: Sequence[int] = (0,), output: Sequence[int] = (), **params: Any) -> EngineSequence:
    return EngineSequence(
        request_id=RequestId("r"),
        params=SamplingParams(**{"max_tokens": 1000, **params}),
        token_ids=array.array("i", [*prompt, *output]),
        num_prompt_tokens=len(prompt),
    )


def draw_many(logits: Tensor, count: int, **params: Any) -> Counter[int]:
    """Tokens drawn for ``count`` seeds."""
    sequences = [sequence_of(seed=seed, **params) for seed in range(count)]
    return Counter(sample(logits.expand(count, -1), sequences))


def assert_plausible(observed: Sequence[int], expected: Sequence[float]) -> None:
    """Pearson's chi-square statistic within four deviations of its mean."""
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(observed) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_uniform_numbers_depend_on_seed_and_index_alone_and_look_uniform() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    along_index = [uniform(7, index) for index in range(20_000)]
    along_seed = [uniform(seed, 7) for seed in range(20_000)]
    for numbers in (along_index, along_seed, [uniform(-seed, seed) for seed in range(20_000)]):
        assert len(set(numbers)) == len(numbers)
        assert all(0 <= number < 1 for number in numbers)
        tenths = Counter(int(number * 10) for number in numbers)
        assert_plausible([tenths[tenth] for tenth in range(10)], [2_000] * 10)
    pairs = Counter((int(a * 10), int(b * 10)) for a, b in itertools.pairwise(along_index))
    assert_plausible([pairs[a, b] for a in range(10) for b in range(10)], [200] * 100)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [30, 12, 40]] = 5.0
    assert sample(logits, [sequence_of(temperature=0.0)]) == [12]


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"temperature": 1.0}, []),
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"temperature": 1.5, "top_k": 7}, [TemperatureLogitsWarper(1.5), TopKLogitsWarper(7)]),
        ({"temperature": 1.0, "top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"temperature": 0.9, "min_p": 0.1}, [TemperatureLogitsWarper(0.9), MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.3, "top_k": 12, "top_p": 0.8},
            [TemperatureLogitsWarper(1.3), TopKLogitsWarper(12), TopPLogitsWarper(0.8)],
        ),
    ],
    ids=str,
)
def test_draws_follow_the_distribution_transformers_draws_from(params: dict[str, Any], warpers: list[Any]) -> None:
    logits = logits_of(seed=1)
    warped = LogitsProcessorList(warpers)(
        cast("torch.LongTensor", torch.zeros(1, 1, dtype=torch.long)), cast("torch.FloatTensor", logits.clone())
    )
    expected = torch.softmax(warped.double(), dim=-1)[0]
    count = 20_000
    drawn = draw_many(logits, count, **params)
    assert all(expected[token_id] > 0 for token_id in drawn)
    likely = [token_id for token_id in range(VOCAB_SIZE) if expected[token_id] * count >= 5]
    observed = [drawn[token_id] for token_id in likely]
    frequencies = expected[likely] / expected[likely].sum() * sum(observed)
    assert_plausible(observed, frequencies.tolist())


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-8}]
)
def test_the_narrowest_filters_leave_the_most_likely_token(params: dict[str, Any]) -> None:
    logits = logits_of(seed=2)
    assert set(draw_many(logits, 50, **params)) == {int(logits.argmax())}


def test_top_k_cuts_ties_by_id() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    assert set(draw_many(logits, 300, top_k=3)) == {0, 1, 2}


def test_a_token_does_not_depend_on_its_row_or_on_its_neighbours() -> None:
    logits = logits_of(seed=3, rows=40, vocab_size=40_000)  # wide enough for several tiles
    variety: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 20, "temperature": 0.7},
        {"min_p": 0.05, "repetition_penalty": 1.3},
    ]
    sequences = [sequence_of(seed=row, **variety[row % 5]) for row in range(40)]
    together = sample(logits, sequences)
    alone = [sample(logits[row : row + 1], [sequences[row]])[0] for row in range(40)]
    backwards = sample(logits.flip(0), sequences[::-1])
    assert together == alone == backwards[::-1]


def test_a_rounding_error_changes_no_draw() -> None:
    """The walk is in the order of ids: with one by probability, swaps of nearly equal tokens would change draws."""
    logits = logits_of(seed=4, vocab_size=5_000)
    noise = torch.randn(1, 5_000, generator=torch.Generator().manual_seed(5)) * 1e-6
    sequences = [sequence_of(seed=seed) for seed in range(2_000)]
    assert sample(logits.expand(2_000, -1), sequences) == sample((logits + noise).expand(2_000, -1), sequences)


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = logits_of(seed=6)
    history = [3, 3, 17, 20, 41]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(
        cast("torch.LongTensor", torch.tensor([history])), cast("torch.FloatTensor", logits.clone())
    )
    for temperature in (0.0, 1.0):
        for seed in range(200):
            penalized = sequence_of(
                history[:2], history[2:], repetition_penalty=1.7, temperature=temperature, seed=seed
            )
            plain = sequence_of(history[:2], history[2:], temperature=temperature, seed=seed)
            assert sample(logits, [penalized]) == sample(expected, [plain])


def test_presence_and_frequency_count_output_tokens_only() -> None:
    logits = logits_of(seed=7)
    best = int(logits.argmax())
    expected = logits.clone()
    expected[0, 9] -= 0.5 + 3 * 0.25
    expected[0, 8] -= 0.5 + 0.25
    for seed in range(200):
        penalized = sequence_of([best] * 5, [9, 9, 8, 9], presence_penalty=0.5, frequency_penalty=0.25, seed=seed)
        plain = sequence_of([best] * 5, [9, 9, 8, 9], seed=seed)
        assert sample(logits, [penalized]) == sample(expected, [plain])


def test_bias_and_minimum_length() -> None:
    logits = logits_of(seed=8)
    order = logits[0].argsort(descending=True).tolist()
    first, second, third = order[:3]
    assert sample(logits, [sequence_of(temperature=0.0, logit_bias=((order[-1], 100.0),))]) == [order[-1]]
    ends: dict[str, Any] = {"eos_token_ids": (first,), "stop_token_ids": (second,), "min_tokens": 2, "temperature": 0.0}
    assert sample(logits, [sequence_of(**ends)]) == [third]
    assert sample(logits, [sequence_of(output=[1], **ends)]) == [third]
    assert sample(logits, [sequence_of(output=[1, 1], **ends)]) == [first]
    # ids that the vocabulary does not have change nothing
    assert sample(logits, [sequence_of(temperature=0.0, logit_bias=((10**6, 5.0), (-1, 90.0)))]) == [first]


def test_sampling_leaves_the_logits_alone() -> None:
    logits = logits_of(seed=9)
    before = logits.clone()
    sample(logits, [sequence_of(repetition_penalty=2.0, logit_bias=((0, 100.0),))])
    assert torch.equal(logits, before)


def test_logprobs_are_log_softmax_with_ties_by_id() -> None:
    logits = torch.full((3, 6), -1.0)
    logits[:, [4, 2]] = 1.0
    logits[2, 5] = 2.0
    totals = logits.double().exp().sum(-1).log()
    none, two, three = token_logprobs(logits, [0, 4, 5], [0, 2, 3])
    assert none.logprob == pytest.approx(-1.0 - float(totals[0]))
    assert none.top == ()
    assert [token_id for token_id, _ in two.top] == [2, 4]
    assert [token_id for token_id, _ in three.top] == [5, 2, 4]
    assert three.top[0][1] == pytest.approx(three.logprob)
    assert three.logprob == pytest.approx(2.0 - float(totals[2]))
    # a tie across the last place: the lower ids are in
    (tied,) = token_logprobs(logits[:1], [0], [4])
    assert [token_id for token_id, _ in tied.top] == [2, 4, 0, 1]
    assert math.isclose(
        sum(math.exp(value) for _, value in token_logprobs(logits[:1], [0], [6])[0].top), 1, rel_tol=1e-6
    )

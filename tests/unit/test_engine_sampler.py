from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from llguidance import LLMatcher
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pdmesh.engine.grammar_state import GrammarState
from pdmesh.engine.sampler import draw, draw_settings, kept_tokens, noise_bits, noise_keys, sample, token_logprobs
from pdmesh.grammars import Grammars
from pdmesh_testing.stepping import sequence_of

VOCAB_SIZE = 50


def logits_of(seed: int, rows: int = 1, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def bits_of(seeds: Sequence[int], indices: Sequence[int], vocab_size: int) -> Tensor:
    return noise_bits(torch.from_numpy(noise_keys(seeds, indices)), vocab_size)


def draw_many(logits: Tensor, count: int, **params: Any) -> Counter[int]:
    """Tokens drawn for ``count`` seeds."""
    sequences = [sequence_of(seed=seed, **params) for seed in range(count)]
    return Counter(sample(logits.expand(count, -1), sequences))


def assert_plausible(observed: Sequence[int], expected: Sequence[float]) -> None:
    """Pearson's chi-square statistic within four deviations of its mean."""
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(observed) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_noise_depends_on_seed_index_and_token_alone_and_looks_uniform() -> None:
    count = 20_000
    by_token = bits_of([7], [3], count)[0].tolist()
    assert by_token[:10] == bits_of([8, 7], [3, 3], 10)[1].tolist()
    by_index = bits_of([7] * count, range(count), 1)[:, 0].tolist()
    by_seed = bits_of(range(count), [7] * count, 1)[:, 0].tolist()
    signed = bits_of(range(0, -count, -1), range(count), 1)[:, 0].tolist()
    for bits in (by_token, by_index, by_seed, signed):
        assert all(0 <= number < 2**31 for number in bits)
        for unit in (2**31 // 16, 2):  # the highest bits, and the lowest
            low = Counter((number // unit if unit > 2 else number) % 16 for number in bits)
            assert_plausible([low[value] for value in range(16)], [count / 16] * 16)
        pairs = Counter((a >> 28, b >> 28) for a, b in itertools.pairwise(bits))
        assert_plausible([pairs[a, b] for a in range(8) for b in range(8)], [count / 64] * 64)
    assert len(set(by_token)) > count - 5
    neighbours = bits_of([7, 7, 8], [3, 4, 3], count) >> 28
    for other in (neighbours[1], neighbours[2]):
        together = Counter(zip(neighbours[0].tolist(), other.tolist(), strict=True))
        assert_plausible([together[a, b] for a in range(8) for b in range(8)], [count / 64] * 64)


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
    ids=lambda given: ",".join(map(str, given.items())) if isinstance(given, dict) else f"{len(given)} warpers",
)
def test_draws_follow_the_distribution_transformers_draws_from(params: dict[str, Any], warpers: list[Any]) -> None:
    logits = logits_of(seed=1)
    warped = LogitsProcessorList(warpers)(
        cast("torch.LongTensor", torch.zeros(1, 1, dtype=torch.long)), cast("torch.FloatTensor", logits.clone())
    )
    expected = torch.softmax(warped.double(), dim=-1)[0]
    count = 5_000
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


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 400},
    {"min_p": 0.3},
    {"top_p": 0.9, "top_k": 3_000, "min_p": 0.01},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_noise_changes_a_draw_as_seldom_as_it_is_small(params: dict[str, Any]) -> None:
    """Thousands of nearly equal tokens, noise of 1e-4: a walk along the cumulative sum changed 15 % of the draws."""
    count, noise = 1_000, 1e-4
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(1, 5_000, generator=generator) * 0.2
    sequences = [sequence_of(seed=seed, temperature=0.9, **params) for seed in range(count)]
    changed = 0
    for first in range(0, count, 500):
        part = sequences[first : first + 500]
        noisy = logits + torch.randn(500, 5_000, generator=generator) * noise
        pairs = zip(sample(logits.expand(500, -1), part), sample(noisy, part), strict=True)
        changed += sum(a != b for a, b in pairs)
    assert changed <= 20 * noise * count  # 2; of 4,000 there were 0 to 3


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_noise_of_fp32_sums_changes_no_draw(params: dict[str, Any]) -> None:
    logits = logits_of(seed=4, vocab_size=5_000)
    noise = torch.randn(1, 5_000, generator=torch.Generator().manual_seed(5)) * 1e-6
    sequences = [sequence_of(seed=seed, **params) for seed in range(1_000)]
    assert sample(logits.expand(1_000, -1), sequences) == sample((logits + noise).expand(1_000, -1), sequences)


def test_a_token_that_is_excluded_changes_no_draw_of_others() -> None:
    logits = logits_of(seed=10)
    sequences = [sequence_of(seed=seed) for seed in range(500)]
    before = sample(logits.expand(500, -1), sequences)
    excluded = logits.clone()
    excluded[0, 17] = -torch.inf
    after = sample(excluded.expand(500, -1), sequences)
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 17)
    assert 17 in before
    assert 17 not in after


def test_filters_leave_what_their_definitions_do() -> None:
    """Against a sort by (score in steps, id), for all filters together."""
    generator = torch.Generator().manual_seed(11)
    for trial in range(200):
        vocab_size = int(torch.randint(2, 60, (1,), generator=generator))
        scores = (torch.randn(1, vocab_size, generator=generator) * 3).round(decimals=1)  # with ties
        scores -= scores.max()
        top_k, top_p, min_p = trial % 5 * 4, (0.5, 0.9, 1.0, 0.0, 0.99)[trial % 7 % 5], (0.0, 0.01, 0.2)[trial % 3]
        params = sequence_of(top_k=top_k, top_p=top_p, min_p=min_p)
        best = int(scores.argmax())
        steps = [-1 if i == best else round(-score * 256) for i, score in enumerate(scores[0].tolist())]
        order = sorted(range(vocab_size), key=lambda i: (steps[i], i))
        if min_p > 0:
            order = [i for i in order if steps[i] <= round(-math.log(min_p) * 256)]
        order = order[: top_k or None]
        weights = [math.exp(-max(steps[i], 0) / 256) for i in order]
        kept = [i for place, i in enumerate(order) if sum(weights[:place]) < top_p * sum(weights) or place == 0]
        settings = draw_settings([params], vocab_size, scores.device)
        assert kept_tokens(scores, settings)[0].nonzero()[:, 0].tolist() == sorted(kept), trial


def test_draws_that_fp32_cannot_tell_apart_are_decided_in_fp64() -> None:
    """Scores that put two tokens' keys into one step of fp32: the draw is that of their exact order."""
    for seed in range(50):
        bits = bits_of([seed], [0], 2)[0].double()
        first, second = (-(-(-(bits + 0.5) * 2.0**-31).log1p()).log()).tolist()
        for difference in (-3e-7, 3e-7):
            logits = torch.tensor([[0.0, first - second + difference]])
            exact = float(logits[0, 1].double()) + second - first
            if abs(exact) > 1e-8:
                assert sample(logits, [sequence_of(seed=seed)]) == [int(exact > 0)]
                assert draw(logits, [sequence_of(seed=seed)]).tolist() == [int(exact > 0)]


def test_a_device_is_not_waited_for(model: Path) -> None:
    """Tensors that hold no data: whoever looked at what is computed would fail. Penalties do, grammars do not."""
    logits = torch.zeros(3, 320, device="meta")
    plain = [sequence_of(temperature=1.0, top_p=0.9, top_k=5), sequence_of(temperature=0.0), sequence_of(min_p=0.1)]
    grammars = Grammars(model, vocab_size=320, eos_token_ids=())
    plain[1].guide = GrammarState(grammars.matcher(LLMatcher.grammar_from_regex("[0-9]+")))
    assert draw(logits, plain).shape == (3,)
    with pytest.raises(NotImplementedError, match="no data"):
        draw(logits, [*plain[:2], sequence_of(presence_penalty=1.0)])


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    allowed = (3, 7, 7, 11)
    drawn = draw_many(logits_of(5), 200, temperature=temperature, allowed_token_ids=allowed, eos_token_ids=(2,))
    assert set(drawn) <= set(allowed)
    biased = draw_many(logits_of(5), 50, temperature=temperature, allowed_token_ids=allowed, logit_bias=((11, 100.0),))
    assert set(biased) == {11}
    ends = sequence_of(allowed_token_ids=(2,), eos_token_ids=(2,), min_tokens=5, temperature=temperature)
    assert sample(logits_of(5), [ends]) == [2]  # nothing else is left


def test_bad_sequences_are_never_completed() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [7, 8, 9]] = torch.tensor([3.0, 2.0, 1.0])

    def best(*output: int, bad: Sequence[Sequence[int]]) -> int:
        bad_token_sequences = tuple(map(tuple, bad))
        return sample(logits, [sequence_of((4, 5), output, temperature=0, bad_token_sequences=bad_token_sequences)])[0]

    assert best(bad=[]) == 7
    assert best(bad=[[7]]) == 8
    assert best(1, bad=[[1, 7], [1, 8]]) == 9
    assert best(bad=[[5, 7]]) == 7  # of the prompt nothing counts
    assert best(1, 2, bad=[[1, 7], [2, 3, 7], [1, 2, 7]]) == 8
    assert best(bad=[[token_id] for token_id in range(VOCAB_SIZE)]) == 7

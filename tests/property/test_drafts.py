"""Drafts continue n-grams, and a step takes of them what would have been drawn without."""

import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.config import WorkerConfig
from pdmesh.engine.base import DrawnToken, accepted
from pdmesh.errors import ConfigError
from pdmesh.model import FinishReason
from pdmesh.worker.drafts import PromptLookup
from pdmesh.worker.runtime import prompt_lookup

few_tokens = st.lists(st.integers(0, 3), max_size=60)


@given(few_tokens, st.integers(1, 4), st.integers(0, 3), st.integers(0, 9))
def test_a_draft_is_what_followed_the_longest_n_gram_where_it_stood_last(
    tokens: list[int], least: int, more: int, most: int
) -> None:
    lookup = PromptLookup(num_tokens=9, min_ngram=least, max_ngram=least + more)
    draft = lookup.continuation(array.array("i", tokens), most)
    for length in range(least + more, least - 1, -1):
        places = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        if places:
            follows = [*tokens[places[-1] :]]
            assert len(draft) == most
            assert list(draft) == (follows * most)[:most]
            return
    assert draft == ()


@given(few_tokens, st.lists(st.integers(0, 3), max_size=6), st.integers(0, 60))
def test_the_draws_that_count_are_the_drafted_ones_up_to_the_first_other_or_the_end(
    drawn: list[int], draft: list[int], end_at: int
) -> None:
    drawn = (drawn + [0] * 7)[: len(draft) + 1]
    draws = [
        DrawnToken(token_id=token, finish_reason=FinishReason.STOP if index == end_at else None)
        for index, token in enumerate(drawn)
    ]
    counted = [each.token_id for each in accepted(draft, iter(draws))]
    assert counted == drawn[: len(counted)]
    assert counted[:-1] == draft[: len(counted) - 1]
    is_cut = len(counted) <= len(draft) and counted[-1] == draft[len(counted) - 1]
    assert is_cut == (len(counted) <= len(draft) and end_at == len(counted) - 1 and counted[-1] == draft[end_at])


def test_settings_that_cannot_be_are_refused_in_a_sentence() -> None:
    config = WorkerConfig(speculation="ngram")
    assert prompt_lookup(WorkerConfig(), "cpu") is None
    assert prompt_lookup(config, "cpu") == PromptLookup(num_tokens=4, min_ngram=2, max_ngram=4)
    with pytest.raises(ConfigError, match="the device is cuda:0"):
        prompt_lookup(config, "cuda:0")

"""The reject cache: what the scheduler has just refused is refused without asking it, and nothing else is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmesh.errors import RequestRejected
from pdmesh_gateway.reject_cache import ANSWER_S, MAX_KINDS, RejectCache, RequestKind

KIND = RequestKind("chat", "alice", 0, 1.0, None, 9)


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def answer(reject_ttl_s: float) -> RequestRejected:
    return RequestRejected("too late", status=429, code="overloaded", retry_after_s=7.5, reject_ttl_s=reject_ttl_s)


def is_refused(reject_cache: RejectCache) -> bool:
    try:
        reject_cache.check(KIND)
    except RequestRejected:
        return True
    return False


def test_others_like_it_are_told_the_same_until_the_time_is_over() -> None:
    clock = Clock()
    reject_cache = RejectCache(clock)
    assert reject_cache.is_open
    reject_cache.refused(KIND, answer(0.5))
    clock.now_s += 0.25
    assert not reject_cache.is_open
    with pytest.raises(RequestRejected, match="too late") as refused:
        reject_cache.check(KIND)
    told = refused.value
    assert (told.status, told.type, told.code, told.retry_after_s) == (429, "rate_limit_error", "overloaded", 7.5)
    assert told.reject_ttl_s == 0, "one that was not judged says nothing of others: the cache would never let one pass"
    clock.now_s += 0.25
    assert not is_refused(reject_cache)


def test_one_is_let_in_to_ask_and_the_others_once_it_was_not_refused() -> None:
    clock = Clock()
    reject_cache = RejectCache(clock)
    reject_cache.refused(KIND, answer(0.5))
    for _ in range(3):
        clock.now_s += 0.5
        assert [is_refused(reject_cache) for _ in range(3)] == [False, True, True]
        reject_cache.refused(KIND, answer(0.5))
    clock.now_s += 0.5
    assert [is_refused(reject_cache) for _ in range(3)] == [False, True, True]
    clock.now_s += 2 * ANSWER_S
    assert not any(is_refused(reject_cache) for _ in range(3))
    assert not len(reject_cache)


def test_what_was_said_long_ago_holds_nobody_up() -> None:
    clock = Clock()
    reject_cache = RejectCache(clock)
    reject_cache.refused(KIND, answer(0.25))
    clock.now_s += 0.5
    assert reject_cache.is_open
    assert not any(is_refused(reject_cache) for _ in range(3))


@pytest.mark.parametrize(
    "other",
    [
        KIND._replace(operation="text_completion"),
        KIND._replace(tenant="bob"),
        KIND._replace(priority=-1),
        KIND._replace(slo_ttft_s=2.0),
        KIND._replace(slo_tpot_s=0.1),
        KIND._replace(size=10),
    ],
)
def test_nobody_is_refused_for_what_was_said_of_others(other: RequestKind) -> None:
    reject_cache = RejectCache(Clock())
    reject_cache.refused(KIND, answer(60.0))
    reject_cache.check(other)


@given(kinds=st.lists(st.tuples(st.integers(0, 3 * MAX_KINDS), st.floats(0.01, 1.0)), max_size=60))
def test_clients_who_choose_ever_new_targets_take_no_memory(kinds: list[tuple[int, float]]) -> None:
    reject_cache = RejectCache(Clock())
    for size in range(MAX_KINDS):
        reject_cache.refused(KIND._replace(size=-size - 1), answer(1.0))
    for size, reject_ttl_s in kinds:
        reject_cache.refused(KIND._replace(size=size), answer(reject_ttl_s))
        with pytest.raises(RequestRejected):
            reject_cache.check(KIND._replace(size=size))
        assert len(reject_cache) == MAX_KINDS

"""Virtual token counters: who is charged what, and whose turn it is."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.core.waiting.fairness import OUTPUT_COST, SPARE, UNITS, TokenCounters
from pdmesh.model import Epoch, Request
from pdmesh_testing.core import a_request


def of_tenant(tenant: str, request_id: str, prompt: int = 100, output: int = 50, share: int = 1) -> Request:
    return replace(a_request(request_id, prompt, output), tenant=tenant, share=share)


def place(counters: TokenCounters, request: Request) -> None:
    counters.joined(request)
    counters.left(request)
    counters.placed(request)


def counter(counters: TokenCounters, tenant: str) -> int:
    return next(view.counter for view in counters.views if view.tenant == tenant)


def test_who_was_charged_least_is_next() -> None:
    counters = TokenCounters()
    for tenant in ("a", "b", "c"):
        counters.joined(of_tenant(tenant, "0"))
    assert list(counters.in_turn()) == ["a", "b", "c"]
    counters.placed(of_tenant("a", "1", prompt=100))
    counters.placed(of_tenant("b", "2", prompt=10))
    assert list(counters.in_turn()) == ["c", "b", "a"]
    counters.placed(of_tenant("c", "3", prompt=10))
    assert list(counters.in_turn()) == ["b", "c", "a"], "of equals who has waited longer for its turn"


def test_a_larger_share_is_charged_less() -> None:
    counters = TokenCounters()
    place(counters, of_tenant("a", "1", prompt=100))
    place(counters, of_tenant("b", "2", prompt=100, share=4))
    assert counter(counters, "b") - counter(counters, "a") == 25 * UNITS


def test_idling_is_no_credit_and_no_debt() -> None:
    counters = TokenCounters()
    place(counters, of_tenant("a", "1", prompt=1000))
    counters.joined(of_tenant("idle", "0"))
    assert counter(counters, "idle") == 1000 * UNITS, "as much as the one that was last"
    counters.left(of_tenant("idle", "0"))
    for number in range(5):
        place(counters, of_tenant("b", f"b{number}", prompt=1000))
    counters.joined(of_tenant("a", "0"))
    counters.joined(of_tenant("idle", "0"))
    assert counter(counters, "idle") == counter(counters, "a") == 6000 * UNITS


def test_what_is_expected_is_charged_until_the_end_tells_better() -> None:
    counters = TokenCounters()
    first, second = of_tenant("a", "1", prompt=100), of_tenant("a", "2", prompt=100)
    place(counters, first)
    assert counter(counters, "a") == 100 * UNITS, "nothing is known of outputs"
    counters.ended(first, 30)
    assert counter(counters, "a") == (100 + OUTPUT_COST * 30) * UNITS
    place(counters, second)
    assert counter(counters, "a") == 2 * (100 + OUTPUT_COST * 30) * UNITS
    counters.ended(second, 10)
    assert counter(counters, "a") == (200 + OUTPUT_COST * 40) * UNITS
    place(counters, of_tenant("a", "3", prompt=1, output=5))
    assert counter(counters, "a") == (201 + OUTPUT_COST * 45) * UNITS, "at most max_tokens"


def test_a_gateway_that_is_lost_tells_nothing_and_what_was_expected_stays() -> None:
    counters = TokenCounters()
    first, second = of_tenant("a", "1"), of_tenant("a", "2")
    place(counters, first)
    counters.ended(first, 30)
    place(counters, second)
    before = counter(counters, "a")
    counters.ended(second, None)
    assert counter(counters, "a") == before


def test_a_restart_costs_its_client_nothing() -> None:
    counters = TokenCounters()
    first = of_tenant("a", "1", prompt=100)
    again = replace(first, epoch=Epoch(1), num_prompt_tokens=120, max_tokens=30)
    place(counters, first)
    counters.ended(first, 0)
    place(counters, again)
    counters.ended(again, 45)
    assert counter(counters, "a") - (100 + OUTPUT_COST * 45) * UNITS == 0


def test_what_never_had_a_place_costs_nothing() -> None:
    counters = TokenCounters()
    counters.joined(of_tenant("a", "0"))
    counters.left(of_tenant("a", "0"))
    counters.ended(of_tenant("a", "1"), 7)
    assert counter(counters, "a") == 0


def test_tenants_that_come_once_are_forgotten() -> None:
    counters = TokenCounters()
    for number in range(10_000):
        request = of_tenant(f"t{number}", f"r{number}", prompt=1 + number % 7)
        place(counters, request)
        counters.ended(request, number % 5)
        counters.check_integrity()
    assert len(counters.views) < 4 * SPARE


def test_a_debt_is_remembered() -> None:
    counters = TokenCounters()
    request = of_tenant("a", "1")
    counters.joined(of_tenant("b", "0"))  # and waits
    place(counters, request)
    counters.ended(request, 1000)
    for number in range(1000):
        counters.joined(of_tenant(f"t{number}", "0"))
        counters.left(of_tenant(f"t{number}", "0"))
    assert counter(counters, "a") == (100 + OUTPUT_COST * 1000) * UNITS
    assert len(counters.views) < 4 * SPARE

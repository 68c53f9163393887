"""KV that instances keep, in the simulated services: conversations, and caches that are not what the core thinks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pdmesh.model import PrefixHashes, Role
from pdmesh.policy import reuse
from pdmesh.worker.block_tables import BlockTables
from pdmesh_testing.dst.clients import expectation
from pdmesh_testing.dst.drawing import draw
from pdmesh_testing.dst.plan import MAX_MODEL_LEN, Ask, Fault, FaultKind, Plan
from pdmesh_testing.dst.run import Result, run

POOLS = {
    "1P+1D": (Role.PREFILL, Role.DECODE),
    "mixed": (Role.MIXED,),
    "2P+2D": (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE),
}


def conversations(roles: tuple[Role, ...], *faults: Fault, num_turns: int = 4, num_blocks: int = 800) -> Plan:
    """Two of them, whose first prompts begin alike; each turn repeats all before it."""
    rng, asks = random.Random(0), list[Ask]()
    stem = tuple(rng.randrange(200) for _ in range(300))
    for number in range(2):
        ask = Ask(at_s=0.3 * number, gateway="g0", label=f"c{number}", prompt=(*stem, number), max_tokens=40)
        for _ in range(num_turns):
            asks.append(ask)
            prompt = (*ask.prompt, *expectation(ask, 0)[0], *(rng.randrange(200) for _ in range(9)))
            ask = replace(ask, at_s=ask.at_s + 4.0, prompt=prompt)
    return Plan(
        seed=1,
        roles=roles,
        num_gateways=1,
        bundle="pdmesh",
        asks=tuple(sorted(asks, key=lambda ask: ask.at_s)),
        faults=faults,
        num_blocks=num_blocks,
        chunk_tokens=128,
        num_backends=8,
        num_buffers=4,
        blocks_per_piece=16,
        max_model_len=8 * MAX_MODEL_LEN,
    )


def num_reused(result: Result) -> list[int]:
    """Granules that each prompt reused where it was computed."""
    lines = [line for line in result.timeline if "-> AdmitPrefill" in line]
    return [int(line.partition("num_reused_granules=")[2].partition(",")[0].rstrip(")")) for line in lines]


@pytest.mark.parametrize("pools", POOLS)
def test_turns_reuse_what_was_before_them_and_nothing_is_refused(pools: str) -> None:
    """In health the core's copy is right: the laws say so."""
    result = run(conversations(POOLS[pools]), with_timeline=True)
    assert result.broken is None
    first, *others = num_reused(result)
    assert first == 0
    assert sum(number >= 2 for number in others) >= len(others) - 2  # and a probe's


def test_little_room_is_given_to_those_who_need_it() -> None:
    """Two conversations do not fit: the core says what goes, and instances need not make room unasked."""
    result = run(conversations(POOLS["mixed"], num_blocks=140), with_timeline=True)
    assert result.broken is None
    assert any("drop=(b" in line for line in result.timeline)


@pytest.mark.parametrize("copy_s", [0.0, 0.4])
def test_what_has_no_room_comes_back_from_the_tier(copy_s: float) -> None:
    """Two conversations take turns in a cache that holds one; a load may take longer than a step's other work."""
    plan = replace(conversations(POOLS["mixed"], num_blocks=140), num_offload_granules=40, copy_s=copy_s)
    result = run(plan, with_timeline=True)
    assert result.broken is None
    loads = [line for line in result.timeline if "-> AdmitPrefill" in line and "num_loaded_granules=0" not in line]
    assert len(loads) > 2
    assert not any("CacheReported" in line for line in result.timeline)


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("left", ["nothing", "a beginning", "an end"])
def test_what_is_not_kept_after_all_is_computed(pools: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instance loses what it is to share, once or twice: the request starts again, and says the same."""
    original: Callable[[BlockTables, int, PrefixHashes], list[int]] = BlockTables.table
    num_lost = 0

    def losing(self: BlockTables, num_blocks: int, prefix: PrefixHashes = ()) -> list[int]:
        nonlocal num_lost
        if prefix and num_lost < 2:
            num_lost += 1
            self.kept.drop({"nothing": prefix, "a beginning": prefix[1:] or prefix, "an end": prefix[:1]}[left])
        return original(self, num_blocks, prefix)

    monkeypatch.setattr(BlockTables, "table", losing)
    harmless: Any = Fault(at_s=0.0, kind=FaultKind.BUNDLE, target="scheduler", other="pdmesh")
    result = run(conversations(POOLS[pools], harmless), with_timeline=True)
    assert result.broken is None
    assert num_lost == 2
    num_told = sum("CacheReported" in line for line in result.timeline)
    assert num_told in (2, 3)  # what was on its way to an instance meanwhile lacks it, too
    assert any(num_reused(result)[-3:])  # it is reused again


def test_an_instance_that_cannot_reach_a_gateway_for_long_ends_no_stream() -> None:
    """It is the only one that decodes: each restart brings a token, from prefill, and is not the request's fault."""
    plan = draw(6394)
    (away,) = [fault for fault in plan.faults if fault.kind is FaultKind.AWAY]
    assert away.duration_s > 30
    result = run(plan)
    assert result.broken is None


@pytest.mark.parametrize("seed", [20056, *[pytest.param(seed, marks=pytest.mark.slow) for seed in (20923, 21897)]])
def test_what_an_instance_keeps_is_not_fetched(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a request that is computed there has less of the prompt. (Copies are cheap here, so there are more.)"""
    monkeypatch.setattr(reuse, "FETCH_OVERHEAD_S", 0.0)
    assert run(replace(draw(seed), num_offload_granules=0)).broken is None

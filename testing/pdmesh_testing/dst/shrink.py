"""Cut a failing plan down to what its failure needs: fewer faults, fewer and simpler requests, better weather."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from pdmesh_testing.dst.plan import Ask, Plan
from pdmesh_testing.dst.run import run

T = TypeVar("T")

#: What of a plan is replaced by its default, if that is enough.
_WEATHER = (
    "window",
    "delay_s",
    "copy_s",
    "clocks",
    "blocks_per_piece",
    "num_buffers",
    "num_backends",
    "num_blocks",
    "max_num_seqs",
    "max_queue_entries",
    "max_outbox",
    "keeps_ids",
    "peer_reads",
    "drafts",
    "num_offload_granules",
    "range_tokens",
)

#: Runs that a plan is shrunk with at most.
MAX_RUNS = 300


def shrink(plan: Plan, law: str, *, max_runs: int = MAX_RUNS) -> Plan:
    """Return the smallest plan found that breaks the same law. ``plan`` must break it."""
    num_runs = 0
    found = True
    while found:
        found = False
        for smaller in _smaller(plan):
            if num_runs == max_runs:
                return plan
            num_runs += 1
            broken = run(smaller).broken
            if broken is not None and broken.law == law:
                plan, found = smaller, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Yield smaller plans, each with one part less, the largest steps first."""
    if len(plan.faults) > 1:
        yield replace(plan, faults=())
    for index in range(len(plan.faults)):
        yield replace(plan, faults=_without(plan.faults, index))
    for index in range(len(plan.asks)):
        if len(plan.asks) > 1:
            yield replace(plan, asks=_without(plan.asks, index))
    plain = Plan(seed=plan.seed, roles=plan.roles, num_gateways=plan.num_gateways, bundle=plan.bundle, asks=plan.asks)
    for name in _WEATHER:
        if getattr(plan, name) != getattr(plain, name):
            yield replace(plan, **{name: getattr(plain, name)})
    for index, ask in enumerate(plan.asks):
        for simpler in _simpler(ask):
            yield replace(plan, asks=(*plan.asks[:index], simpler, *plan.asks[index + 1 :]))


def _simpler(ask: Ask) -> Iterator[Ask]:
    if ask.hangs_up_s is not None:
        yield replace(ask, hangs_up_s=None)
    if ask.n > 1:
        yield replace(ask, n=1)
    if ask.eos_token_ids:
        yield replace(ask, eos_token_ids=())
    if ask.temperature:
        yield replace(ask, temperature=0.0)
    if ask.priority:
        yield replace(ask, priority=0)
    if len(ask.prompt) > 1:
        yield replace(ask, prompt=ask.prompt[: len(ask.prompt) // 2])
    if ask.max_tokens > 2:
        yield replace(ask, max_tokens=ask.max_tokens // 2)


def _without(things: tuple[T, ...], index: int) -> tuple[T, ...]:
    return things[:index] + things[index + 1 :]

"""The named bundles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from pdmesh.errors import ConfigError
from pdmesh.policy.base import Bundle, Packing, PolicyConfig, PrefillOrder
from pdmesh.policy.interruption import ShortInterruptsLong
from pdmesh.policy.latency import StepShape
from pdmesh.policy.order import (
    ByPriority,
    EarliestDeadline,
    Fcfs,
    GuardedShortestFirst,
    LeastRelativeSlack,
    LeastSlack,
    ShortestFirst,
)
from pdmesh.policy.packing import CHUNK_UNIT_TOKENS, AdaptiveChunks, ChunkSizer, StaticChunks
from pdmesh.policy.placement import Freeness, LeastQueuedTokens
from pdmesh.policy.prediction import Prediction, RemainingTime

_NOTHING = StepShape((), 0, 0)


def _static(config: PolicyConfig) -> tuple[Packing, Prediction]:
    packing = StaticChunks(config.chunk_tokens)
    return packing, _predicted(config, packing.chunk_alone)


def _adaptive(config: PolicyConfig) -> tuple[Packing, Prediction]:
    sizer = ChunkSizer(config.latency, config.max_chunk_tokens)

    def chunk_alone(start: int, num_left: int) -> int:
        from_budget = sizer.largest(_NOTHING, start, num_left, config.prefill_step_s)
        return from_budget or min(num_left, CHUNK_UNIT_TOKENS)

    prediction = _predicted(config, chunk_alone)
    packing = AdaptiveChunks(
        sizer=sizer,
        prediction=prediction,
        prefill_step_s=config.prefill_step_s,
        mixed_step_s=config.slo_tpot_s,
        long_prompt_tokens=config.long_prompt_tokens,
        max_shared=config.max_shared,
    )
    return packing, prediction


def _predicted(config: PolicyConfig, chunk_alone: Callable[[int, int], int]) -> Prediction:
    return Prediction(RemainingTime(config.latency, chunk_alone), config.slo_ttft_s, config.slo_ttft_stretch)


def _bundle(name: str, packing: Packing, order: PrefillOrder) -> Bundle:
    return Bundle(
        name=name,
        order=order,
        packing=packing,
        prefill_placement=LeastQueuedTokens(),
        decode_placement=Freeness(),
    )


def _studied(name: str, make_order: Callable[[Prediction], PrefillOrder]) -> Callable[[PolicyConfig], Bundle]:
    """An order alone: everything else as in ``fcfs``."""

    def build(config: PolicyConfig) -> Bundle:
        packing, prediction = _static(config)
        return _bundle(name, packing, make_order(prediction))

    return build


def _medha(config: PolicyConfig) -> Bundle:
    packing, prediction = _adaptive(config)
    return _bundle("medha", packing, LeastRelativeSlack(prediction))


def _pdmesh(config: PolicyConfig) -> Bundle:
    packing, prediction = _adaptive(config)
    bundle = _bundle("pdmesh", packing, GuardedShortestFirst(prediction, config.spare_slack))
    return replace(bundle, interruption=ShortInterruptsLong(config.latency, config.long_prompt_tokens))


BUNDLES: Mapping[str, Callable[[PolicyConfig], Bundle]] = MappingProxyType(
    {
        "fcfs": _studied("fcfs", lambda prediction: Fcfs()),
        "priority": _studied("priority", lambda prediction: ByPriority()),
        "sjf": _studied("sjf", ShortestFirst),
        "edf": _studied("edf", EarliestDeadline),
        "lrs": _studied("lrs", LeastSlack),
        "lars": _studied("lars", LeastRelativeSlack),
        "medha": _medha,
        "pdmesh": _pdmesh,
    }
)


def make_bundle(name: str, config: PolicyConfig) -> Bundle:
    """Build the bundle called ``name``. Raises ConfigError if there is none."""
    build = BUNDLES.get(name)
    if build is None:
        raise ConfigError(f"no policy bundle is called {name!r}: use one of {', '.join(sorted(BUNDLES))}")
    return build(config)

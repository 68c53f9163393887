"""The named bundles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from pdmesh.errors import ConfigError
from pdmesh.policy.batching import Batching, ExclusiveBatching, MixedBatching, SwitchingBatching
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.handover import RunAhead
from pdmesh.policy.interruption import ShortInterruptsLong
from pdmesh.policy.latency import ChunkShape, StepShape
from pdmesh.policy.local_prefill import LocalPrefill
from pdmesh.policy.order import (
    ByPriority,
    EarliestDeadline,
    Fcfs,
    FcfsOfEachKind,
    GuardedShortestFirst,
    LeastRelativeSlack,
    LeastSlack,
    ShortestFirst,
    ShortFirst,
)
from pdmesh.policy.packing import CHUNK_UNIT_TOKENS, NOTHING, AdaptiveChunks, ChunkSizer, StaticChunks
from pdmesh.policy.placement import (
    Apart,
    Freeness,
    InGroups,
    LeastQueuedTokens,
    Reservation,
    ShortAroundLong,
)
from pdmesh.policy.prediction import Prediction, RemainingTime
from pdmesh.policy.rebalancing import Rebalancing
from pdmesh.policy.relay import Relay, Schedule
from pdmesh.policy.seams import Packing, PrefillOrder
from pdmesh.policy.sequence_parallel import ChunkwisePlanner

_ONE_TOKEN = StepShape((ChunkShape(1, 0),), 0, 0)


def _prediction(config: PolicyConfig, chunk: Callable[[int, int], int]) -> Prediction:
    return Prediction(
        remaining=RemainingTime(config.latency, chunk),
        long_prompt_tokens=config.long_prompt_tokens,
        slo_ttft_s=config.slo_ttft_s,
        slo_ttft_stretch=config.slo_ttft_stretch,
    )


def _static(config: PolicyConfig) -> tuple[Packing, Prediction]:
    packing = StaticChunks(config.chunk_tokens)
    return packing, _prediction(config, packing.chunk_alone)


def _adaptive(config: PolicyConfig, *, efficient: bool, long_chunk_alone: bool = False) -> tuple[Packing, Prediction]:
    """``efficient``: steps with chunks alone are long enough for their constant time to be a small part of them."""
    sizer = ChunkSizer(config.latency, config.max_chunk_tokens)
    prefill_step_s = config.prefill_step_s
    if efficient:
        prefill_step_s = max(prefill_step_s, config.latency.a_s / config.max_step_overhead)

    def alone(start: int, num_left: int) -> int:
        return sizer.largest(NOTHING, start, num_left, prefill_step_s) or min(num_left, CHUNK_UNIT_TOKENS)

    prediction = _prediction(config, alone)
    packing = AdaptiveChunks(
        sizer=sizer,
        prediction=prediction,
        prefill_step_s=prefill_step_s,
        slo_tpot_s=config.slo_tpot_s,
        max_shared=config.max_shared,
        local_step_share=config.local_step_share,
        long_chunk_alone=long_chunk_alone,
        sizer_of_make={
            make: ChunkSizer(latency, config.max_chunk_tokens) for make, latency in config.latency_of_make.items()
        },
    )
    return packing, prediction


def _mixed(config: PolicyConfig, *, colocates: bool = True) -> Batching:
    return MixedBatching(long_prompt_tokens=config.long_prompt_tokens, colocates=colocates)


def _exclusive(config: PolicyConfig) -> Batching:
    return ExclusiveBatching(idle_share=config.eb_threshold)


def _switching(config: PolicyConfig) -> Batching:
    return SwitchingBatching(slo_ttft_s=config.slo_ttft_s, max_stall_s=config.max_stall_s)


#: What `scheduler.batching` may name.
BATCHINGS: Mapping[str, Callable[[PolicyConfig], Batching]] = MappingProxyType(
    {"mb": _mixed, "eb": _exclusive, "ebplus": _switching}
)


def _studied(name: str, make_order: Callable[[Prediction], PrefillOrder]) -> Callable[[PolicyConfig], Bundle]:
    """An order alone: everything else as in ``fcfs``."""

    def build(config: PolicyConfig) -> Bundle:
        packing, prediction = _static(config)
        return Bundle(
            name=name,
            order=make_order(prediction),
            packing=packing,
            prefill_placement=LeastQueuedTokens(),
            decode_placement=Freeness(),
            long_prompt_tokens=config.long_prompt_tokens,
            batching=_mixed(config),
        )

    return build


def _in_groups(config: PolicyConfig, bundle: Bundle, *, need_idle: bool = False) -> Bundle:
    """The same with long prompts computed by groups, if these have more than one member: PecSched, and baselines."""
    if config.group_size == 1:
        return bundle
    placement = InGroups(
        bundle.prefill_placement,
        bundle.long_prompt_tokens,
        need_idle=need_idle,
        interrupt=bundle.interruption is not None,
    )
    relay = replace(_relay(config), max_members=config.group_size, group_size=config.group_size, beside_decodes=True)
    return replace(bundle, prefill_placement=placement, relay=relay)


def _fcfs(config: PolicyConfig) -> Bundle:
    return _in_groups(config, _studied("fcfs", lambda _: Fcfs())(config))


def _short_first(config: PolicyConfig) -> Bundle:
    order = ShortFirst(config.long_prompt_tokens, preempts=False)
    return _in_groups(config, _studied("short-first", lambda _: order)(config), need_idle=True)


def _reservation(config: PolicyConfig) -> Bundle:
    long_tokens, num_reserved = config.long_prompt_tokens, config.reserved_instances
    if 0 < num_reserved < config.group_size:
        raise ConfigError(
            f"policy.reserved_instances is {num_reserved}: no group of policy.group_size {config.group_size} fits in"
        )
    bundle = replace(
        _studied("reservation", lambda _: FcfsOfEachKind(long_tokens))(config),
        prefill_placement=Reservation(long_tokens, num_reserved),
        num_reserved=num_reserved,
    )
    return _in_groups(config, bundle)


def _medha(config: PolicyConfig) -> Bundle:
    packing, prediction = _adaptive(config, efficient=False)
    return Bundle(
        name="medha",
        order=LeastRelativeSlack(prediction),
        packing=packing,
        prefill_placement=LeastQueuedTokens(),
        decode_placement=Freeness(),
        long_prompt_tokens=config.long_prompt_tokens,
        batching=_mixed(config),
    )


def _pecsched(
    name: str, *, preempts: bool = True, disaggregates: bool = True, colocates: bool = True
) -> Callable[[PolicyConfig], Bundle]:
    """PecSched, or an ablation of it (§6.4)."""

    def build(config: PolicyConfig) -> Bundle:
        packing, _ = _adaptive(config, efficient=True, long_chunk_alone=True)
        long_tokens = config.long_prompt_tokens
        bundle = Bundle(
            name=name,
            order=ShortFirst(long_tokens, preempts),
            packing=packing,
            prefill_placement=ShortAroundLong(long_tokens, config.colocate_tokens, preempts),
            decode_placement=Apart(long_tokens) if disaggregates else Freeness(),
            long_prompt_tokens=long_tokens,
            batching=_mixed(config, colocates=colocates),
            interruption=ShortInterruptsLong(config.latency, long_tokens) if preempts else None,
        )
        return _in_groups(config, bundle)

    return build


def _relay(config: PolicyConfig) -> Relay:
    return Relay(
        latency=config.latency,
        max_members=config.relay_members,
        improvement_rate=config.relay_improvement,
        bytes_per_s=config.relay_bytes_per_s,
        min_step_s=config.latency.step_s(_ONE_TOKEN) / config.max_group_step_overhead,
        step_overhead=config.max_step_overhead,
        schedule=Schedule(config.sequence_parallel),
    )


def _tetris(config: PolicyConfig) -> Bundle:
    packing, _ = _adaptive(config, efficient=True, long_chunk_alone=True)
    return Bundle(
        name="tetris",
        order=Fcfs(),
        packing=packing,
        prefill_placement=LeastQueuedTokens(),
        decode_placement=Freeness(),
        long_prompt_tokens=config.long_prompt_tokens,
        batching=_mixed(config),
        relay=replace(_relay(config), planner=ChunkwisePlanner, doubles=True),
    )


def _rebalancing(config: PolicyConfig) -> Rebalancing | None:
    if not config.rebalances:
        return None
    return Rebalancing(
        latency=config.latency,
        latency_of_make=config.latency_of_make,
        slo_tpot_s=config.slo_tpot_s,
        bytes_per_s=config.relay_bytes_per_s,
    )


def _pdmesh(config: PolicyConfig) -> Bundle:
    packing, prediction = _adaptive(config, efficient=True, long_chunk_alone=True)
    long_tokens = config.long_prompt_tokens
    return Bundle(
        name="pdmesh",
        order=GuardedShortestFirst(prediction, config.spare_slack, config.min_share),
        packing=packing,
        prefill_placement=ShortAroundLong(long_tokens, config.colocate_tokens, give_way=config.give_way),
        decode_placement=Apart(long_tokens),
        long_prompt_tokens=long_tokens,
        batching=_switching(config),
        interruption=ShortInterruptsLong(config.latency, long_tokens),
        local_prefill=LocalPrefill(
            remaining=prediction.remaining, packing=packing, bytes_per_s=config.relay_bytes_per_s
        )
        if config.prefills_locally
        else None,
        run_ahead=RunAhead(
            prediction=prediction,
            latency=config.latency,
            bytes_per_s=config.relay_bytes_per_s,
            latency_of_make=config.latency_of_make,
        ),
        waiting_kv_share=config.waiting_kv_share,
        sends_computed_first=True,
        relay=_relay(config),
        rebalancing=_rebalancing(config),
    )


BUNDLES: Mapping[str, Callable[[PolicyConfig], Bundle]] = MappingProxyType(
    {
        "fcfs": _fcfs,
        "priority": _studied("priority", lambda _: ByPriority()),
        "sjf": _studied("sjf", ShortestFirst),
        "edf": _studied("edf", EarliestDeadline),
        "lrs": _studied("lrs", LeastSlack),
        "lars": _studied("lars", LeastRelativeSlack),
        "short-first": _short_first,
        "reservation": _reservation,
        "medha": _medha,
        "pecsched": _pecsched("pecsched"),
        "pecsched-no-preemption": _pecsched("pecsched-no-preemption", preempts=False),
        "pecsched-no-disaggregation": _pecsched("pecsched-no-disaggregation", disaggregates=False),
        "pecsched-no-colocation": _pecsched("pecsched-no-colocation", colocates=False),
        "tetris": _tetris,
        "pdmesh": _pdmesh,
    }
)


def make_bundle(name: str, config: PolicyConfig) -> Bundle:
    """Build the bundle called ``name``, with the batching of ``config`` if that names one.

    Raises ConfigError if there is none of that name.
    """
    build = BUNDLES.get(name)
    if build is None:
        raise ConfigError(f"no policy bundle is called {name!r}: use one of {', '.join(sorted(BUNDLES))}")
    bundle = build(config)
    if not config.batching:
        return bundle
    return replace(bundle, batching=make_batching(config.batching, config))


def make_batching(name: str, config: PolicyConfig) -> Batching:
    """Build the batching mode called ``name``. Raises ConfigError if there is none, or for a threshold of no use."""
    build = BATCHINGS.get(name)
    if build is None:
        raise ConfigError(f"no batching mode is called {name!r}: use one of {', '.join(BATCHINGS)}")
    if config.eb_threshold is not None and not 0 < config.eb_threshold < 1:
        raise ConfigError(f"the threshold is {config.eb_threshold}: must be a share between 0 and 1, both excluded")
    return build(config)

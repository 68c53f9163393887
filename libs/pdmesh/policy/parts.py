"""Functions that build the parts of bundles from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pdmesh.policy.batching import Batching, MixedBatching
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import ChunkShape, StepShape
from pdmesh.policy.links import EqualLinks, LinkRates
from pdmesh.policy.packing import CHUNK_UNIT_TOKENS, NOTHING, AdaptiveChunks, ChunkSizer, StaticChunks
from pdmesh.policy.placement import Freeness, InGroups, LeastQueuedTokens
from pdmesh.policy.prediction import Prediction, RemainingTime
from pdmesh.policy.prefill_groups import AUTO, MAX_IN_TURN, GroupPolicy, Schedule
from pdmesh.policy.reuse import ReuseCost
from pdmesh.policy.seams import Packing, PrefillOrder

_ONE_TOKEN = StepShape((ChunkShape(1, 0),), 0, 0)


def _prediction(config: PolicyConfig, chunk: Callable[[int, int], int]) -> Prediction:
    return Prediction(
        remaining=RemainingTime(config.latency, chunk, config.num_stages),
        long_prompt_tokens=config.long_prompt_tokens,
        slo_ttft_s=config.slo_ttft_s,
        slo_ttft_stretch=config.slo_ttft_stretch,
    )


def static(config: PolicyConfig) -> tuple[Packing, Prediction]:
    """Return the packing with a fixed number of tokens per step, and the prediction for prompts alone in such steps."""
    packing = StaticChunks(config.chunk_tokens)
    return packing, _prediction(config, packing.chunk_alone)


def adaptive(config: PolicyConfig, *, efficient: bool, fills_steps: bool = False) -> tuple[Packing, Prediction]:
    """Return the packing with steps of a fixed time, and the prediction for prompts alone in such steps.

    ``efficient``: steps of chunks alone are long enough to make a step's constant time a small part.
    """
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
        fills_steps=fills_steps,
        sizer_of_device_class={
            device_class: ChunkSizer(latency, config.max_chunk_tokens)
            for device_class, latency in config.latency_of_device_class.items()
        },
    )
    return packing, prediction


def links_of(config: PolicyConfig) -> LinkRates:
    """Return the measured rates of links, or the configured rate where no link is measured."""
    return EqualLinks(config.link_bytes_per_s) if config.links is None else config.links


def mixed(config: PolicyConfig, *, colocates: bool = True) -> Batching:
    """Return the batching with chunks and decodes in the same steps."""
    return MixedBatching(long_prompt_tokens=config.long_prompt_tokens, colocates=colocates)


def with_order(name: str, make_order: Callable[[Prediction], PrefillOrder]) -> Callable[[PolicyConfig], Bundle]:
    """Return the builder of a bundle that has the parts of ``fcfs`` but another order."""

    def build(config: PolicyConfig) -> Bundle:
        packing, prediction = static(config)
        return Bundle(
            name=name,
            order=make_order(prediction),
            packing=packing,
            prefill_placement=LeastQueuedTokens(),
            decode_placement=Freeness(),
            long_prompt_tokens=config.long_prompt_tokens,
            batching=mixed(config),
            reuse=ReuseCost(prediction.remaining, links_of(config)),
        )

    return build


def in_groups(config: PolicyConfig, bundle: Bundle, *, need_idle: bool = False) -> Bundle:
    """Return the bundle with long prompts computed by groups of ``config.group_size`` members (PecSched, baselines)."""
    if config.group_size == 1:
        return bundle
    placement = InGroups(
        bundle.prefill_placement,
        bundle.long_prompt_tokens,
        need_idle=need_idle,
        interrupt=bundle.interruption is not None,
    )
    group_policy = replace(
        make_group_policy(config),
        max_members=config.group_size,
        group_size=config.group_size,
        beside_decodes=True,
        at_once=None,
    )
    return replace(bundle, prefill_placement=placement, group_policy=group_policy)


def make_group_policy(config: PolicyConfig) -> GroupPolicy:
    """Return the rule for computing long prompts on several instances, with the schedule of the configuration."""
    is_auto = config.sequence_parallel == AUTO
    policy = GroupPolicy(
        latency=config.latency,
        max_members=config.max_group_members,
        improvement_rate=config.group_improvement,
        links=links_of(config),
        min_step_s=max(
            replace(config.latency, weights_s=0.0).step_s(_ONE_TOKEN) / config.max_group_step_overhead,
            config.latency.step_s(_ONE_TOKEN),
        ),
        step_overhead=config.max_step_overhead,
        schedule=Schedule.PIPELINED if is_auto else Schedule(config.sequence_parallel),
    )
    if not is_auto or not config.steps_are_predictable:
        return replace(policy, max_members=min(policy.max_members, MAX_IN_TURN)) if is_auto else policy
    at_once = replace(policy, schedule=Schedule.PARALLEL, _planners={})
    return replace(policy, max_members=min(policy.max_members, MAX_IN_TURN), at_once=at_once)

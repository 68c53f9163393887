"""Bundles of papers, and baselines with which they and ours are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from pdmesh.errors import ConfigError
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.interruption import ShortInterruptsLong
from pdmesh.policy.order import Fcfs
from pdmesh.policy.parts import adaptive, in_groups, links_of, make_group_policy, mixed, with_order
from pdmesh.policy.placement import Apart, Freeness, LeastQueuedTokens, ShortAroundLong
from pdmesh.policy.prefill_groups import Schedule
from pdmesh.policy.reuse import ReuseCost
from pdmesh_lab.studies.order import FcfsOfEachKind, LeastRelativeSlack, LeastSlack, ShortFirst
from pdmesh_lab.studies.placement import Reservation
from pdmesh_lab.studies.planners import ChunkwisePlanner


def _short_first(config: PolicyConfig) -> Bundle:
    order = ShortFirst(config.long_prompt_tokens, preempts=False)
    return in_groups(config, with_order("short-first", lambda _: order)(config), need_idle=True)


def _reservation(config: PolicyConfig) -> Bundle:
    long_tokens, num_reserved = config.long_prompt_tokens, config.reserved_instances
    if 0 < num_reserved < config.group_size:
        raise ConfigError(
            f"policy.reserved_instances is {num_reserved}: must be at least policy.group_size, {config.group_size}"
        )
    bundle = replace(
        with_order("reservation", lambda _: FcfsOfEachKind(long_tokens))(config),
        prefill_placement=Reservation(long_tokens, num_reserved),
        num_reserved=num_reserved,
    )
    return in_groups(config, bundle)


def _medha(config: PolicyConfig) -> Bundle:
    packing, prediction = adaptive(config, efficient=False, fills_steps=True)
    return Bundle(
        name="medha",
        order=LeastRelativeSlack(prediction),
        packing=packing,
        prefill_placement=LeastQueuedTokens(),
        decode_placement=Freeness(),
        long_prompt_tokens=config.long_prompt_tokens,
        batching=mixed(config),
        reuse=ReuseCost(prediction.remaining, links_of(config)),
    )


def _pecsched(
    name: str, *, preempts: bool = True, disaggregates: bool = True, colocates: bool = True
) -> Callable[[PolicyConfig], Bundle]:
    """Return the builder of PecSched, or of an ablation (§6.4)."""

    def build(config: PolicyConfig) -> Bundle:
        packing, prediction = adaptive(config, efficient=True)
        long_tokens = config.long_prompt_tokens
        bundle = Bundle(
            name=name,
            order=ShortFirst(long_tokens, preempts),
            packing=packing,
            prefill_placement=ShortAroundLong(long_tokens, config.colocate_tokens, preempts),
            decode_placement=Apart(long_tokens) if disaggregates else Freeness(),
            long_prompt_tokens=long_tokens,
            batching=mixed(config, colocates=colocates),
            interruption=ShortInterruptsLong(config.latency, long_tokens) if preempts else None,
            reuse=ReuseCost(prediction.remaining, links_of(config)),
        )
        return in_groups(config, bundle)

    return build


def _tetris(config: PolicyConfig) -> Bundle:
    packing, prediction = adaptive(config, efficient=True)
    return Bundle(
        name="tetris",
        order=Fcfs(),
        packing=packing,
        prefill_placement=LeastQueuedTokens(),
        decode_placement=Freeness(),
        long_prompt_tokens=config.long_prompt_tokens,
        batching=mixed(config),
        group_policy=replace(
            make_group_policy(replace(config, sequence_parallel=Schedule.PARALLEL)),
            planner=ChunkwisePlanner,
            doubles=True,
        ),
        reuse=ReuseCost(prediction.remaining, links_of(config)),
    )


BUNDLES: Mapping[str, Callable[[PolicyConfig], Bundle]] = MappingProxyType(
    {
        "lars": with_order("lars", LeastRelativeSlack),
        "lrs": with_order("lrs", LeastSlack),
        "medha": _medha,
        "pecsched": _pecsched("pecsched"),
        "pecsched-no-colocation": _pecsched("pecsched-no-colocation", colocates=False),
        "pecsched-no-disaggregation": _pecsched("pecsched-no-disaggregation", disaggregates=False),
        "pecsched-no-preemption": _pecsched("pecsched-no-preemption", preempts=False),
        "reservation": _reservation,
        "short-first": _short_first,
        "tetris": _tetris,
    }
)

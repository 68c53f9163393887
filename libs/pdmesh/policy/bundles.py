"""The named bundles. Bundles of papers are only named here; the laboratory builds them (`pdmesh_lab.studies`)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType

from pdmesh.errors import ConfigError
from pdmesh.policy.batching import Batching, ExclusiveBatching, SwitchingBatching
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.handover import RunAhead
from pdmesh.policy.interruption import ShortInterruptsLong
from pdmesh.policy.local_decode import LocalDecode
from pdmesh.policy.local_prefill import LocalPrefill
from pdmesh.policy.order import ByPriority, EarliestDeadline, Fcfs, GuardedShortestFirst, ShortestFirst
from pdmesh.policy.parts import adaptive, in_groups, links_of, make_group_policy, mixed, with_order
from pdmesh.policy.placement import Apart, ShortAroundLong
from pdmesh.policy.rebalancing import Rebalancing
from pdmesh.policy.reuse import ReuseCost


def _exclusive(config: PolicyConfig) -> Batching:
    return ExclusiveBatching(idle_share=config.eb_threshold)


def _switching(config: PolicyConfig) -> Batching:
    return SwitchingBatching(slo_ttft_s=config.slo_ttft_s, max_stall_s=config.max_stall_s)


#: Batching modes that `scheduler.batching` may name.
BATCHINGS: Mapping[str, Callable[[PolicyConfig], Batching]] = MappingProxyType(
    {"mb": mixed, "eb": _exclusive, "ebplus": _switching}
)


def _fcfs(config: PolicyConfig) -> Bundle:
    return in_groups(config, with_order("fcfs", lambda _: Fcfs())(config))


def _rebalancing(config: PolicyConfig) -> Rebalancing | None:
    if not config.rebalances:
        return None
    return Rebalancing(
        latency=config.latency,
        latency_of_device_class=config.latency_of_device_class,
        slo_tpot_s=config.slo_tpot_s,
        links=links_of(config),
    )


def _pdmesh(config: PolicyConfig) -> Bundle:
    packing, prediction = adaptive(config, efficient=True)
    long_tokens, links = config.long_prompt_tokens, links_of(config)
    bundle = Bundle(
        name="pdmesh",
        order=GuardedShortestFirst(prediction, config.spare_slack, config.min_share),
        packing=packing,
        prefill_placement=ShortAroundLong(long_tokens, config.colocate_tokens, give_way=config.give_way),
        decode_placement=Apart(long_tokens),
        long_prompt_tokens=long_tokens,
        batching=_switching(config),
        interruption=ShortInterruptsLong(config.latency, long_tokens),
        local_prefill=LocalPrefill(remaining=prediction.remaining, packing=packing, links=links)
        if config.prefills_locally
        else None,
        local_decode=LocalDecode(latency=config.latency, latency_of_device_class=config.latency_of_device_class)
        if config.decodes_locally
        else None,
        run_ahead=RunAhead(
            prediction=prediction,
            latency=config.latency,
            links=links,
            latency_of_device_class=config.latency_of_device_class,
        ),
        waiting_kv_share=config.waiting_kv_share,
        sends_computed_first=True,
        group_policy=make_group_policy(config),
        rebalancing=_rebalancing(config),
        reuse=ReuseCost(prediction.remaining, links),
    )
    return in_groups(config, bundle)


#: Bundles that are part of the scheduler.
BUNDLES: Mapping[str, Callable[[PolicyConfig], Bundle]] = MappingProxyType(
    {
        "fcfs": _fcfs,
        "priority": with_order("priority", lambda _: ByPriority()),
        "sjf": with_order("sjf", ShortestFirst),
        "edf": with_order("edf", EarliestDeadline),
        "pdmesh": _pdmesh,
    }
)

#: Distribution package with the bundles of papers and their baselines, imported when one of them is chosen.
LABORATORY = "pdmesh_lab"

STUDIED = (
    "lars",
    "lrs",
    "medha",
    "pecsched",
    "pecsched-no-colocation",
    "pecsched-no-disaggregation",
    "pecsched-no-preemption",
    "reservation",
    "short-first",
    "tetris",
)

#: A sentence on each bundle, for people to choose by.
ABOUT: Mapping[str, str] = MappingProxyType(
    {
        "edf": "earliest deadline first, of requests with latency targets",
        "fcfs": "first come, first served",
        "lars": "least relative slack first (Medha's order alone)",
        "lrs": "least slack first",
        "medha": "Medha: least relative slack first, with chunks as large as the latency target allows",
        "pdmesh": "the default: shortest first while no request is late, long prompts apart from short ones",
        "pecsched": "PecSched: short prompts interrupt long ones, which several instances may compute",
        "pecsched-no-colocation": "PecSched, whose short prompts hold up the decodes of long ones",
        "pecsched-no-disaggregation": "PecSched, whose short requests decode where their prompts are computed",
        "pecsched-no-preemption": "PecSched, whose short prompts wait for long ones",
        "priority": "by the priority that requests have, lowest first",
        "reservation": "first come, first served, with instances reserved for long prompts",
        "sjf": "least predicted work first",
        "short-first": "short prompts before long ones, each kind in order of arrival",
        "tetris": "Tetris: first come, first served, with 1, 2, 4, … instances for a long prompt",
    }
)

#: A sentence on each batching mode.
ABOUT_BATCHING: Mapping[str, str] = MappingProxyType(
    {
        "mb": "instances that prefill and decode compute prompts beside decodes",
        "eb": "they compute prompts and decode in turn",
        "ebplus": "whichever of the two is predicted to be faster",
    }
)

#: All bundles that `scheduler.bundle` may name.
BUNDLE_NAMES = tuple(sorted((*BUNDLES, *STUDIED)))


def installed_bundles() -> tuple[str, ...]:
    """Return the names of all bundles that can be chosen here."""
    return BUNDLE_NAMES if find_spec(LABORATORY) is not None else tuple(sorted(BUNDLES))


def check_bundle_name(name: str) -> None:
    """Raise ConfigError if no bundle is called ``name``, or if its package is not installed."""
    if name not in BUNDLE_NAMES:
        near = difflib.get_close_matches(name, BUNDLE_NAMES, 1)
        meant = f"did you mean {near[0]}? There are" if near else "use one of"
        raise ConfigError(f"no policy bundle is called {name!r}: {meant} {', '.join(installed_bundles())}")
    if name not in installed_bundles():
        raise ConfigError(f"the bundle {name!r} of a paper is not installed: run `pip install 'pdmesh[lab]'`")


def make_bundle(name: str, config: PolicyConfig) -> Bundle:
    """Build the bundle called ``name``, with the batching mode that ``config`` names, if any.

    Raises ConfigError if no bundle has this name, if its package is not installed, or for an invalid batching mode.
    """
    check_bundle_name(name)
    bundle = _builders(name)[name](config)
    if not config.batching:
        return bundle
    return replace(bundle, batching=make_batching(config.batching, config))


def _builders(name: str) -> Mapping[str, Callable[[PolicyConfig], Bundle]]:
    if name in BUNDLES:
        return BUNDLES
    studied: Mapping[str, Callable[[PolicyConfig], Bundle]] = import_module(f"{LABORATORY}.studies.bundles").BUNDLES
    return studied


def make_batching(name: str, config: PolicyConfig) -> Batching:
    """Build the batching mode called ``name``. Raises ConfigError for an unknown mode or an invalid threshold."""
    build = BATCHINGS.get(name)
    if build is None:
        raise ConfigError(f"no batching mode is called {name!r}: use one of {', '.join(BATCHINGS)}")
    if config.eb_threshold is not None and not 0 < config.eb_threshold < 1:
        raise ConfigError(f"the threshold is {config.eb_threshold}: must be a share between 0 and 1, both excluded")
    return build(config)

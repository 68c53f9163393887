"""Reusable KV of a prompt on each instance: cached granules, and offloaded ones that are worth loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pdmesh.core.instances.cache_index import CacheIndex
from pdmesh.core.instances.instance import InstanceState
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Request
from pdmesh.policy.reuse import ReuseCost


class Reusable(NamedTuple):
    """Reusable granules of a prompt, by the instance's number; only instances with some.

    ``depths``: number of first granules that need not be computed. ``loads``: how many of these must be loaded.
    """

    depths: Mapping[int, int]
    loads: Mapping[int, int]


def reusable(
    request: Request,
    kept: Mapping[int, int],
    cache_index: CacheIndex,
    by_number: Mapping[int, InstanceState],
    reuse: ReuseCost | None,
) -> Reusable:
    """Return the reusable granules of a prompt: cached ones, and offloaded ones that load faster than they compute.

    ``kept`` counts the cached granules of the prompt, by the number of the instance.
    """
    if reuse is None or not request.prefix or not len(cache_index.offloaded):
        return Reusable(kept, {})
    depths, loads = dict(kept), dict[int, int]()
    chain = request.chain
    for number, depth in cache_index.depths_with_tiers(chain, len(chain)).items():
        num_cached, instance = kept.get(number, 0), by_number[number]
        if depth > num_cached and reuse.pays(
            request, num_cached * GRANULE_TOKENS, depth * GRANULE_TOKENS, instance.load_s(depth - num_cached)
        ):
            depths[number], loads[number] = depth, depth - num_cached
    return Reusable(depths, loads)

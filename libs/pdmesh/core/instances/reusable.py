"""Reusable KV of a prompt on each instance: cached granules, and offloaded ones that are worth loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.kept_where import KeptWhere
from pdmesh.model import GRANULE_TOKENS, Request
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
    kept_where: KeptWhere,
    by_number: Mapping[int, InstanceState],
    reuse: ReuseCost | None,
) -> Reusable:
    """Return the reusable granules of a prompt: cached ones, and offloaded ones that load faster than they compute.

    ``kept`` counts the cached granules of the prompt, by the number of the instance.
    """
    if reuse is None or not request.prefix or not len(kept_where.offloaded):
        return Reusable(kept, {})
    depths, loads = dict(kept), dict[int, int]()
    chain = request.chain
    for number, depth in kept_where.depths_with_tiers(chain, len(chain)).items():
        num_kept, instance = kept.get(number, 0), by_number[number]
        if depth > num_kept and reuse.pays(
            request, num_kept * GRANULE_TOKENS, depth * GRANULE_TOKENS, instance.load_s(depth - num_kept)
        ):
            depths[number], loads[number] = depth, depth - num_kept
    return Reusable(depths, loads)

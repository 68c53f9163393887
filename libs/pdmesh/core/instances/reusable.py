"""What of a prompt's KV need not be computed where: it is kept in the cache, or worth loading from the tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.kept_where import KeptWhere
from pdmesh.model import GRANULE_TOKENS, Request
from pdmesh.policy.reuse import ReuseCost


class Reusable(NamedTuple):
    """Granules of a prompt, from its first on, by the instance's number; only where there are some."""

    depths: Mapping[int, int]  # that need not be computed
    loads: Mapping[int, int]  # of these, to be loaded


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

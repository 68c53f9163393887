"""Where a request goes: the hard rules of what is possible, around the policy's choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from pdmesh.core.state import Instance
from pdmesh.model import InstanceId, Request
from pdmesh.policy.base import Bundle


class Placement(NamedTuple):
    """``prefill is decode`` where the request stays."""

    prefill: Instance
    decode: Instance


def place(
    request: Request, offers: Sequence[Instance], instances: Mapping[InstanceId, Instance], bundle: Bundle
) -> Placement | None:
    """A place for ``request``, its prompt computed on one of ``offers``; None if it must wait."""
    decodes = {instance.instance_id: instance for instance in instances.values() if instance.can_decode(request)}
    if not decodes:
        return None
    # On a mixed instance with room for all of it the request can stay; from any other its KV must have somewhere to go.
    num_in_group = Counter(instance.kv_group for instance in decodes.values())
    candidates = [
        instance.view
        for instance in offers
        if instance.can_prefill(request) and (instance.instance_id in decodes or num_in_group[instance.kv_group])
    ]
    if not candidates:
        return None
    prefill_id = bundle.prefill_placement.choose(request, candidates)
    if prefill_id is None:
        return None
    prefill = instances[prefill_id]
    targets = [instance.view for instance in decodes.values() if instance.kv_group == prefill.kv_group]
    decode_id = bundle.decode_placement.choose(request, prefill.view, targets)
    return None if decode_id is None else Placement(prefill, decodes[decode_id])


def could_place(request: Request, instances: Collection[Instance]) -> bool:
    """Whether some pair of the instances could take the request if they were empty."""
    groups = {instance.kv_group for instance in instances if instance.could_decode(request)}
    return any(instance.kv_group in groups and instance.could_prefill(request) for instance in instances)


def have_pair(instances: Collection[Instance]) -> bool:
    """Whether some instance prefills and some instance, perhaps the same, decodes what it prefilled."""
    groups = {instance.kv_group for instance in instances if instance.role.can_decode}
    return any(instance.role.can_prefill and instance.kv_group in groups for instance in instances)

"""Where a request goes: the hard rules of what is possible, around the policy's choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from pdmesh.core.state import Instance
from pdmesh.model import InstanceId, Request
from pdmesh.policy.base import Bundle


class Wait(Enum):
    """Why a request is not placed now."""

    FOR_ROOM = auto()  # nothing that is there has room for it
    FOR_TURN = auto()  # the policy lets it wait


class Placement(NamedTuple):
    """``prefill is decode`` where the request stays; ``members``, if any, compute and hold it together with these."""

    prefill: Instance
    decode: Instance
    members: tuple[Instance, ...] = ()


def place(
    request: Request, offers: Sequence[Instance], instances: Mapping[InstanceId, Instance], bundle: Bundle
) -> Placement | Wait:
    """A place for ``request``, its prompt computed on one of ``offers``."""
    decodes = {instance.instance_id: instance for instance in instances.values() if instance.can_decode(request)}
    if not decodes:
        return _room_or_turn(request, instances.values(), bundle)
    # On a mixed instance with room for all of it the request can stay; from any other its KV must have somewhere to go.
    num_in_group = Counter(instance.kv_group for instance in decodes.values())
    candidates = [
        instance.view
        for instance in offers
        if instance.can_prefill(request) and (instance.instance_id in decodes or num_in_group[instance.kv_group])
    ]
    if not candidates:
        return _room_or_turn(request, instances.values(), bundle)
    prefill_id = bundle.prefill_placement.choose(request, candidates)
    if prefill_id is None:
        return Wait.FOR_TURN
    prefill = instances[prefill_id]
    targets = [instance.view for instance in decodes.values() if instance.kv_group == prefill.kv_group]
    decode_id = bundle.decode_placement.choose(request, prefill.view, targets)
    return Wait.FOR_TURN if decode_id is None else Placement(prefill, decodes[decode_id])


def needs_group(request: Request, instances: Iterable[Instance], bundle: Bundle) -> bool:
    """Whether a group of instances computes it: it is long, and one that could is there."""
    return bundle.is_long(request) and any(_could_share(request, group) for group in _groups(instances).values())


def place_in_group(request: Request, instances: Collection[Instance], bundle: Bundle) -> Placement | Wait:
    """A group for ``request``, which decodes where it is computed."""
    able = {
        name: group
        for name, group in _groups(instances).items()
        if all(instance.can_share(request, len(group)) for instance in group)
    }
    if not able:
        return _room_or_turn(request, instances, bundle)
    views = {name: [instance.view for instance in group] for name, group in able.items()}
    name = bundle.group_placement.choose(request, views)
    return Wait.FOR_TURN if name is None else Placement(able[name][0], able[name][0], tuple(able[name]))


def _room_or_turn(request: Request, instances: Iterable[Instance], bundle: Bundle) -> Wait:
    """There is no room. A long request that other long ones leave none waits for its turn: short ones may go on."""
    others = bundle.is_long(request) and any(
        instance.view.num_long_prefilling or instance.view.num_long_decoding for instance in instances
    )
    return Wait.FOR_TURN if others else Wait.FOR_ROOM


def could_place(request: Request, instances: Collection[Instance], bundle: Bundle) -> bool:
    """Whether some pair, or some group, of the instances could take the request if they were empty."""
    groups = {instance.kv_group for instance in instances if instance.could_decode(request)}
    return any(instance.kv_group in groups and instance.could_prefill(request) for instance in instances) or (
        needs_group(request, instances, bundle)
    )


def have_pair(instances: Collection[Instance]) -> bool:
    """Whether some instance prefills and some instance, perhaps the same, decodes what it prefilled."""
    groups = {instance.kv_group for instance in instances if instance.role.can_decode}
    return any(instance.role.can_prefill and instance.kv_group in groups for instance in instances)


def _groups(instances: Iterable[Instance]) -> dict[str, list[Instance]]:
    groups: dict[str, list[Instance]] = {}
    for instance in instances:
        if instance.profile.group_id:
            groups.setdefault(instance.profile.group_id, []).append(instance)
    return groups


def _could_share(request: Request, group: Sequence[Instance]) -> bool:
    return all(
        instance.could_share(request, len(group)) and instance.kv_group == group[0].kv_group for instance in group
    )

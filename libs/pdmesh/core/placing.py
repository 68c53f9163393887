"""Where a request goes: the hard rules of what is possible, around the policy's choice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from itertools import chain
from typing import NamedTuple

from pdmesh.core.state import Instance
from pdmesh.model import InstanceId, Request
from pdmesh.policy.base import Bundle

#: Instances that compute long prompts together, the leader first, by the name that they declared.
Groups = Mapping[str, Sequence[Instance]]


class Wait(Enum):
    """Why a request is not placed now."""

    FOR_OPENING = auto()  # no instance has an opening whose step takes it
    FOR_ROOM = auto()  # nothing that is there has room for it
    FOR_TURN = auto()  # the policy lets it wait; others may go past it
    FOR_INSTANCE = auto()  # nothing that is there could ever take it


class Placement(NamedTuple):
    """``prefill is decode`` where the request stays; ``members``, if any, compute and hold it together with these."""

    prefill: Instance
    decode: Instance
    members: tuple[Instance, ...] = ()


def place(
    request: Request,
    offers: Sequence[Instance],
    decoders: Mapping[InstanceId, Instance],
    instances: Collection[Instance],
    bundle: Bundle,
) -> Placement | Wait:
    """A place for ``request``, its prompt computed on one of ``offers``."""
    # Those where prompt and output fit now, with a seat to decode. There may be many: no call for each.
    num_tokens, num_prompt_tokens = request.max_total_tokens, request.num_prompt_tokens
    key = (request.request_id, request.epoch)
    decodes = {
        name: instance
        for name, instance in decoders.items()
        if num_tokens <= instance.decode_room * instance.block_size
        and num_tokens < instance.profile.max_model_len
        and key not in instance.holds
    }
    if not decodes:
        return _room_or_turn(request, instances, bundle)
    # On a mixed instance with room for all of it the request can stay; from any other its KV must have somewhere to go.
    kv_groups = {instance.kv_group for instance in decodes.values()}
    candidates = [
        instance.view
        for instance in offers
        if num_prompt_tokens <= instance.prefill_room * instance.block_size
        and num_tokens < instance.profile.max_model_len
        and instance.kv_group in kv_groups
        and key not in instance.holds
    ]
    if not candidates:
        return _room_or_turn(request, instances, bundle)
    prefill_id = bundle.prefill_placement.choose(request, candidates)
    if prefill_id is None:
        return Wait.FOR_TURN
    prefill = next(instance for instance in offers if instance.instance_id == prefill_id)
    targets = [instance.view for instance in decodes.values() if instance.kv_group == prefill.kv_group]
    decode_id = bundle.decode_placement.choose(request, prefill.view, targets)
    return Wait.FOR_TURN if decode_id is None else Placement(prefill, decodes[decode_id])


def place_locally(request: Request, spare: Iterable[Instance], bundle: Bundle) -> Placement | None:
    """Where an instance of ``spare`` that only decodes has room for it: it is computed there, and no KV moves."""
    num_tokens = request.max_total_tokens
    if request.num_prompt_tokens > bundle.local_prompt_tokens:
        return None
    candidates = {
        instance.instance_id: instance
        for instance in spare
        if num_tokens <= instance.decode_room * instance.block_size
        and not instance.role.can_prefill
        and num_tokens < instance.profile.max_model_len
        and (request.request_id, request.epoch) not in instance.holds
    }
    if not candidates:
        return None
    chosen = bundle.prefill_placement.choose(request, [instance.view for instance in candidates.values()])
    return None if chosen is None else Placement(candidates[chosen], candidates[chosen])


def needs_group(request: Request, groups: Groups, bundle: Bundle) -> bool:
    """Whether a group of instances computes it: it is long, and one that could is there."""
    return bundle.is_long(request) and any(_could_share(request, group) for group in groups.values())


def place_in_group(request: Request, groups: Groups, bundle: Bundle) -> Placement | Wait:
    """One of ``groups`` for ``request``, which decodes where it is computed."""
    views = {name: [instance.view for instance in group] for name, group in groups.items()}
    while views:
        name = bundle.group_placement.choose(request, views)
        if name is None:
            return Wait.FOR_TURN
        members = groups[name]
        if all(instance.can_share(request, len(members)) for instance in members):
            return Placement(members[0], members[0], tuple(members))
        del views[name]
    return _room_or_turn(request, chain.from_iterable(groups.values()), bundle)


def _room_or_turn(request: Request, instances: Iterable[Instance], bundle: Bundle) -> Wait:
    """There is no room. A long request that other long ones leave none waits for its turn: short ones may go on."""
    others = bundle.is_long(request) and any(
        instance.view.num_long_prefilling or instance.view.num_long_decoding for instance in instances
    )
    return Wait.FOR_TURN if others else Wait.FOR_ROOM


def could_place(request: Request, instances: Collection[Instance], groups: Groups, bundle: Bundle) -> bool:
    """Whether some pair, or some group, of the instances could take the request if they were empty."""
    targets = {instance.kv_group for instance in instances if instance.could_decode(request)}
    alone = any(instance.kv_group in targets and instance.could_prefill(request) for instance in instances)
    return alone or needs_group(request, groups, bundle)


def have_pair(instances: Collection[Instance]) -> bool:
    """Whether some instance prefills and some instance, perhaps the same, decodes what it prefilled."""
    groups = {instance.kv_group for instance in instances if instance.role.can_decode}
    return any(instance.role.can_prefill and instance.kv_group in groups for instance in instances)


def _could_share(request: Request, group: Sequence[Instance]) -> bool:
    return all(
        instance.could_share(request, len(group)) and instance.kv_group == group[0].kv_group for instance in group
    )

"""Placement of a request: the hard rules of possible places, around the policy's choice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple

from pdmesh.core.copies.handover import HandOvers
from pdmesh.core.instances.cut_pairs import CutPairs, have_way
from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.instances.ranking import NOTHING_KEPT, Decoders
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import InstanceId, Request
from pdmesh.policy.bundle import Bundle
from pdmesh.policy.views import InstanceView

#: Most instances, in the policy's order, that are asked whether a prompt should begin before it has room to decode.
#: After a refusal later instances seldom accept, and asking all of a large mesh would cost too much.
MAX_ASKED = 8


#: Returns the instances that a number of KV blocks of a source instance take much longer to reach than others.
SlowFrom = Callable[[InstanceState, int], Set[InstanceId]]


class Wait(Enum):
    """Why a request is not placed now."""

    #: No instance has a step slot whose step takes the request.
    FOR_STEP_SLOT = auto()
    #: No instance has room for the request.
    FOR_ROOM = auto()
    #: An instance that has, or will have, more of the prefix will soon be cheaper than the others.
    FOR_KEPT = auto()
    #: The policy makes the request wait; others may overtake it.
    FOR_TURN = auto()
    #: No present instance could ever take the request.
    FOR_INSTANCE = auto()
    #: No instance with the weights that began the request has room; others may overtake it.
    FOR_WEIGHTS = auto()


class Placement(NamedTuple):
    """Instances for a request.

    ``prefill is decode`` if the request stays there. Without ``decode`` the prompt runs ahead of room to decode.
    ``members`` are the shard holders of the first ranges of its context while it decodes, in order.
    """

    prefill: InstanceState
    decode: InstanceState | None
    members: Sequence[InstanceState] = ()

    @property
    def instances(self) -> Sequence[InstanceState]:
        """All instances of the placement."""
        return (self.prefill,) if self.decode is None else (self.prefill, self.decode, *self.members)


def place(
    request: Request,
    offers: Iterable[InstanceState],
    decoders: Decoders,
    bundle: Bundle,
    handovers: HandOvers,
    now_s: float,
    *,
    spans_classes: bool = False,
    depths: Mapping[int, int] = NOTHING_KEPT,
    cut: CutPairs | None = None,
    instances: Collection[InstanceState] = (),
    slow_from: SlowFrom | None = None,
) -> Placement | Wait:
    """Return a placement with the prompt on one of ``offers``, which are in the policy's order, or a reason to wait.

    If the mesh ``spans_classes``, the placement stays within one arithmetic class if there is room in one. A resumed
    request prefers the class that drew its tokens. ``depths`` are the cached granules by instance number.

    Pairs in ``cut`` are avoided as long as some of ``instances`` could serve the request around them, even if these
    have no room now. A decode instance behind a slow link is avoided if another one has room.
    """
    if cut and have_way(request, instances, cut):
        return _place_around(request, offers, decoders, bundle, handovers, now_s, depths, cut)
    firsts = decoders.firsts(request, depths)
    if closed := handovers.closed_groups:
        firsts = {name: first for name, first in firsts.items() if first.kv_group not in closed}
    if spans_classes:
        offers = list(offers)
        same = [offer for offer in offers if offer.arithmetic == request.arithmetic]
        for within in (same, offers):
            # Without room to decode anywhere, the prompt may begin in its own class.
            ahead = within is same and not firsts
            placement = _place(request, within, firsts, decoders, bundle, handovers, now_s, depths, may_be_ahead=ahead)
            if isinstance(placement, Placement):
                return placement
        across = ((offer.arithmetic_class, decoders.across(firsts, offer)) for offer in offers)
        firsts = {name: first for name, first in across if first is not None} | firsts
    return _place(request, offers, firsts, decoders, bundle, handovers, now_s, depths, slow_from=slow_from)


def _place_around(
    request: Request,
    offers: Iterable[InstanceState],
    decoders: Decoders,
    bundle: Bundle,
    handovers: HandOvers,
    now_s: float,
    depths: Mapping[int, int],
    cut: CutPairs,
) -> Placement | Wait:
    """Return a placement whose instances reach each other and the request's gateway, or the last reason to wait."""
    unreachable, wait = cut.of(request.gateway_id), Wait.FOR_STEP_SLOT
    for offer in offers:
        if offer.instance_id in unreachable or offer.kv_group in handovers.closed_groups:
            continue
        first = decoders.first_in(offer.arithmetic_class, request, depths, unreachable | cut.of(offer.instance_id))
        firsts = {} if first is None else {offer.arithmetic_class: first}
        placed = _place(request, [offer], firsts, decoders, bundle, handovers, now_s, depths, avoided=unreachable)
        if isinstance(placed, Placement):
            return placed
        wait = placed
    return wait


def _place(
    request: Request,
    offers: Iterable[InstanceState],
    firsts: Mapping[str, InstanceState],
    decoders: Decoders,
    bundle: Bundle,
    handovers: HandOvers,
    now_s: float,
    depths: Mapping[int, int],
    *,
    may_be_ahead: bool = True,
    slow_from: SlowFrom | None = None,
    avoided: Collection[str] = (),
) -> Placement | Wait:
    """Return a placement, or why to wait, with the first decode instance of each arithmetic class in ``firsts``.

    A request that ends with its prompt needs none. ``may_be_ahead``: the prompt may begin without room to decode.
    """
    wait = Wait.FOR_STEP_SLOT
    num_asked = 0
    for prefill in offers:
        ends_here = request.ends_with_prompt and prefill.has_seat
        if not (firsts or ends_here) and (bundle.run_ahead is None or num_asked == MAX_ASKED):
            return Wait.FOR_ROOM
        first = firsts.get(prefill.arithmetic_class)
        if first is not None and slow_from is not None:
            slow = slow_from(prefill, prefill.num_prefill_blocks(request))
            if first.instance_id in slow:
                first = decoders.first_in(prefill.arithmetic_class, request, depths, slow) or first
        members: Sequence[InstanceState] = ()
        if first is not None and prefill.num_parts(request):
            first, members = decoders.spread(prefill, request, avoided)
        streams_out = prefill.streams_out(request)
        if streams_out and not members:
            first = None
        num_reused = _num_cached_tokens(depths, prefill)
        if handovers.holds_back(prefill, bundle):
            continue
        if not prefill.can_prefill(request):
            wait = Wait.FOR_ROOM if wait is Wait.FOR_STEP_SLOT else wait
        elif first is None and not ends_here:
            takes = bundle.prefill_placement.takes
            if may_be_ahead and not streams_out and num_asked < MAX_ASKED and takes(request, prefill.view, num_reused):
                # An instance without room for its own decodes does not count: the next ones may have room.
                num_asked += prefill.can_decode_locally(request) or not prefill.decodes_locally
                if handovers.decodes_locally(request, prefill, decoders.sums, bundle):
                    return Placement(prefill, prefill)
                if handovers.begins_ahead(request, prefill, num_reused, decoders.sums, bundle, now_s):
                    return Placement(prefill, None)
            wait = Wait.FOR_ROOM if wait is Wait.FOR_STEP_SLOT else wait
        elif not bundle.prefill_placement.takes(request, prefill.view, num_reused):
            wait = Wait.FOR_TURN
        elif ends_here or first is None:
            return Placement(prefill, prefill)
        else:
            if prefill.can_stay(request) and bundle.decode_placement.stays(request, prefill.view, first.view):
                return Placement(prefill, prefill)
            is_later = not streams_out and handovers.promises_later(request, prefill, num_reused, bundle)
            return Placement(prefill, None) if is_later else Placement(prefill, first, members)
    return wait


def place_locally(
    request: Request,
    spare: Iterable[InstanceState],
    least_queued: Callable[[str], InstanceState | None],
    bundle: Bundle,
    handovers: HandOvers,
    beside: Callable[[InstanceState], InstanceView],
    depths: Mapping[int, int] = NOTHING_KEPT,
) -> Placement | None:
    """Place a request wholly on one of ``spare``, which only decode, if one has room and it pays; None otherwise.

    The comparison is with a wait for the ``least_queued`` prefill instance of the KV group. ``beside`` returns an
    instance's load beside a new chunk.
    """
    local = bundle.local_prefill
    if local is None:
        return None
    asked: Iterable[InstanceState] = islice(spare, MAX_ASKED)
    if request.arithmetic:
        asked = sorted(asked, key=lambda instance: instance.arithmetic != request.arithmetic)
    for instance in asked:
        if instance.kv_group in handovers.closed_groups or not instance.can_stay(request):
            continue
        prefill = least_queued(instance.kv_group)
        layout = instance.profile.kv_layout
        layer_bytes = instance.num_prefill_blocks(request) * layout.page_bytes(layout.num_layers - 1)
        num_here = _num_cached_tokens(depths, instance)
        num_there = 0 if prefill is None else _num_cached_tokens(depths, prefill)
        there = None if prefill is None else prefill.view
        if local.pays(
            request, beside(instance), there, layer_bytes, num_here, num_there
        ) and bundle.prefill_placement.takes(request, instance.view, num_here):
            return Placement(instance, instance)
    return None


def _num_cached_tokens(depths: Mapping[int, int], instance: InstanceState) -> int:
    return depths.get(instance.number, 0) * GRANULE_TOKENS

"""Placements of prompts: pools, groups, and short ones around long ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.model import InstanceId, Request, Role
from pdmesh.policy.placement import Apart, InGroups, LeastQueuedTokens, ShortAroundLong
from pdmesh.policy.seams import PrefillPlacement
from pdmesh.policy.views import InstanceView
from pdmesh_lab.studies.order import ShortFirst
from pdmesh_lab.studies.placement import Reservation
from pdmesh_testing.core import a_request, a_view

SHORT, LONG = a_request("short", prompt=100), a_request("long", prompt=4000)
IDLE = a_view("idle")
QUEUED = a_view("queued", num_queued_tokens=200)
FULL = a_view("full", num_queued_tokens=900)
DECODING = a_view("decoding", num_long_decoding=1, num_decoding=1)
COMPUTING = a_view("computing", num_long_prefilling=1, shortest_long_prefill_tokens=9000)
PLACE = ShortAroundLong(long_prompt_tokens=1000, colocate_tokens=500)


def chosen_by(placement: PrefillPlacement, request: Request, *candidates: InstanceView) -> str | None:
    """The first that takes it, as the core goes through them."""
    line = sorted(candidates, key=lambda view: (placement.key(view), view.instance_id))
    return next((view.instance_id for view in line if placement.takes(request, view)), None)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([COMPUTING, DECODING, QUEUED, IDLE], "idle"),
        ([COMPUTING, DECODING, QUEUED], "queued"),
        ([COMPUTING, DECODING, FULL], "decoding"),
        ([COMPUTING, replace(DECODING, num_queued_tokens=500)], "computing"),
        ([COMPUTING, FULL], "computing"),
        ([COMPUTING], "computing"),
    ],
)
def test_a_short_prompt_goes_to_no_long_one_then_to_a_decode_then_to_a_prefill(
    candidates: list[InstanceView], chosen: str
) -> None:
    assert chosen_by(PLACE, SHORT, *candidates) == chosen


def test_of_two_idle_instances_the_one_with_fewer_decodes_computes_the_prompt() -> None:
    """Else one of several mixed instances would decode most requests: only queued tokens are counted otherwise."""
    busy = a_view("a", num_decoding=3, num_seats_taken=3)
    assert chosen_by(PLACE, SHORT, busy, a_view("b", num_decoding=1, num_seats_taken=1)) == "b"
    assert chosen_by(PLACE, SHORT, busy, replace(QUEUED, num_seats_taken=0)) == "a"


def test_without_preemption_a_short_prompt_waits() -> None:
    patient = replace(PLACE, preempts=False)
    assert chosen_by(patient, SHORT, COMPUTING) is None
    assert chosen_by(patient, SHORT, COMPUTING, FULL) == "full"


def test_a_long_prompt_waits_for_another_unless_that_gives_way() -> None:
    assert chosen_by(PLACE, LONG, COMPUTING) is None
    assert chosen_by(PLACE, LONG, COMPUTING, DECODING) == "decoding"
    assert chosen_by(replace(PLACE, give_way=2.0), LONG, COMPUTING) == "computing"
    assert chosen_by(replace(PLACE, give_way=2.5), LONG, COMPUTING) is None


def test_a_reserved_pool_is_for_long_prompts() -> None:
    first, second, third = (replace(IDLE, instance_id=InstanceId(f"i{number}"), number=number) for number in (1, 2, 3))
    place = Reservation(long_prompt_tokens=1000, num_reserved=2)
    assert chosen_by(place, LONG, third, second, first) == "i1"
    assert chosen_by(place, SHORT, first, second, third) == "i3"
    assert chosen_by(place, LONG, third) is chosen_by(place, SHORT, first, second) is None
    none = replace(place, num_reserved=0)
    assert chosen_by(none, LONG, third) == chosen_by(none, SHORT, third) == "i3"


def test_instances_in_a_group_serve_one_long_prompt_at_a_time() -> None:
    place = InGroups(LeastQueuedTokens(), long_prompt_tokens=1000)
    assert chosen_by(place, LONG, COMPUTING, DECODING, FULL, QUEUED) == "queued"
    assert chosen_by(place, LONG, COMPUTING, DECODING) is None
    assert chosen_by(place, SHORT, COMPUTING, FULL) == "full"
    assert chosen_by(place, SHORT, COMPUTING) is None
    assert chosen_by(place, SHORT, DECODING) == "decoding"
    assert chosen_by(replace(place, interrupt=True), SHORT, COMPUTING) == "computing"


def test_a_group_of_idle_instances_has_no_work_at_all() -> None:
    place = InGroups(LeastQueuedTokens(), long_prompt_tokens=1000, need_idle=True)
    assert chosen_by(place, LONG, replace(IDLE, num_seats_taken=1)) is None
    assert chosen_by(place, LONG, replace(IDLE, num_prefilling=1)) is None
    assert chosen_by(place, LONG, IDLE) == "idle"
    assert chosen_by(place, SHORT, replace(IDLE, num_seats_taken=1)) == "idle"


def test_where_groups_are_taken_from_another_placement_has_its_say() -> None:
    place = InGroups(Reservation(long_prompt_tokens=1000, num_reserved=1), long_prompt_tokens=1000)
    one, two = replace(IDLE, number=1), replace(IDLE, number=2)
    assert place.takes(LONG, one)
    assert not place.takes(LONG, two)
    assert place.takes(SHORT, two)


def test_short_prompts_decode_apart_and_long_ones_where_they_are_computed() -> None:
    apart = a_view("apart", Role.DECODE)
    place = Apart(long_prompt_tokens=1000)
    assert sorted([IDLE, apart], key=place.key) == [apart, IDLE]
    assert not place.stays(SHORT, IDLE, apart)
    assert place.stays(LONG, IDLE, apart)
    assert place.stays(SHORT, IDLE, IDLE)


@pytest.mark.parametrize(("preempts", "line"), [(True, [SHORT, LONG]), (False, [LONG, SHORT])])
def test_short_first_passes_a_placed_long_prompt_only_if_it_preempts(preempts: bool, line: list[object]) -> None:
    order = ShortFirst(long_prompt_tokens=1000, preempts=preempts)
    ranks = {request.request_id: order.rank(request, 0, placed_s=0.0) for request in (SHORT, LONG)}
    keys = dict(zip(ranks, order.keys(list(ranks.values()), 1.0), strict=True))
    assert sorted((SHORT, LONG), key=lambda request: keys[request.request_id]) == line
    waiting = order.rank(LONG, 0, placed_s=None)
    assert order.keys([ranks[SHORT.request_id]], 1.0)[0] < order.keys([waiting], 1.0)[0]

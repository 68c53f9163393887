"""Arithmetic classes in the core: a request stays in its class while there is room, and is served all the same."""

from __future__ import annotations

import pytest

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, Reject
from pdmesh.core.events import DrainRequested, InstanceJoined, InstanceLost, RequestArrived
from pdmesh.core.instances.arithmetic import several_classes, why_not_joins
from pdmesh.core.requests.request_histories import CrossedClass, RequestHistories
from pdmesh.model import InstanceId, InstanceProfile
from pdmesh_testing.core import CoreBench, a_request, named_profile, of

ORDERED, DOT = "bfloat16/ordered-1", "bfloat16/dot-amx-1"


def profiles(**class_of: str) -> list[InstanceProfile]:
    return [named_profile(name, arithmetic=arithmetic) for name, arithmetic in class_of.items()]


def bench_with(**class_of: str) -> CoreBench:
    return CoreBench(*profiles(**class_of))


@pytest.mark.parametrize("own", ["d0", "d1"])
def test_a_prompt_is_handed_over_within_its_class(own: str) -> None:
    """Whatever the placement, which takes the first of equals, would choose."""
    bench = bench_with(p0=ORDERED, d0=ORDERED if own == "d0" else DOT, d1=ORDERED if own == "d1" else DOT)
    assert bench.decoding("a") == own
    assert bench.decoding("b") == own


def test_the_pair_of_one_class_is_found_behind_the_first_in_order() -> None:
    bench = bench_with(p0=ORDERED, p1=DOT, d0=DOT)
    (admit,) = of(AdmitPrefill, bench.arrive("a"))
    assert admit.instance_id == "p1"


def test_where_no_instance_of_the_class_has_room_another_serves() -> None:
    bench = CoreBench(*profiles(p0=ORDERED, d1=DOT), named_profile("d0", arithmetic=ORDERED, max_num_seqs=1))
    assert bench.decoding("a") == "d0"
    assert bench.decoding("b") == "d1"


def test_a_mesh_without_two_instances_of_one_class_serves() -> None:
    bench = bench_with(p0=ORDERED, d0=DOT)
    assert bench.core.unready_reason is None
    commands = bench.arrive("a")
    assert not of(Reject, commands)
    assert of(ExpectCopy, commands)[0].instance_id == "d0"


@pytest.mark.parametrize("arithmetic", [ORDERED, DOT])
def test_a_request_that_is_resumed_goes_to_the_class_of_its_tokens(arithmetic: str) -> None:
    bench = bench_with(p0=ORDERED, p1=DOT, d0=ORDERED, d1=DOT)
    (admit,) = of(AdmitPrefill, bench.feed(RequestArrived(a_request("a", epoch=1, arithmetic=arithmetic))))
    assert admit.instance_id == ("p0" if arithmetic == ORDERED else "p1")
    assert admit.decode_instance_id == ("d0" if arithmetic == ORDERED else "d1")


def test_a_request_of_a_class_that_is_gone_is_served_within_another() -> None:
    bench = bench_with(p0=ORDERED, p1=DOT, d1=DOT)
    (admit,) = of(AdmitPrefill, bench.feed(RequestArrived(a_request("a", epoch=1, arithmetic="bfloat16/ordered-0"))))
    assert (admit.instance_id, admit.decode_instance_id) == ("p1", "d1")


def test_kv_without_a_receiver_goes_to_one_of_its_class_before_others() -> None:
    bench = bench_with(p0=ORDERED, d0=ORDERED, d1=DOT, d2=ORDERED)
    bench.arrive("a")
    bench.offered("p0", "a")
    (place,) = of(ExpectCopy, bench.feed(InstanceLost(InstanceId("d0"))))
    assert place.instance_id == "d2"
    (place,) = of(ExpectCopy, bench.feed(InstanceLost(InstanceId("d2"))))
    assert place.instance_id == "d1"


@pytest.mark.parametrize("has_own", [True, False])
def test_what_leaves_an_instance_stays_in_its_class_where_that_has_room(has_own: bool) -> None:
    bench = bench_with(p0=ORDERED, d0=ORDERED)
    bench.decoding("a")
    for profile in profiles(d1=DOT, **({"d2": ORDERED} if has_own else {})):
        bench.feed(InstanceJoined(profile, ()))
    (place,) = of(ExpectCopy, bench.feed(DrainRequested(InstanceId("d0"))))
    assert place.instance_id == ("d2" if has_own else "d1")


def test_who_decodes_for_its_class_is_waited_for_by_no_move_of_another() -> None:
    """More requests leave than may move to one instance at once: those left wait for it rather than cross."""
    bench = bench_with(p0=ORDERED, d0=ORDERED)
    for name in "abcdef":
        bench.decoding(name)
    for profile in profiles(d1=DOT, d2=ORDERED):
        bench.feed(InstanceJoined(profile, ()))
    places = of(ExpectCopy, bench.feed(DrainRequested(InstanceId("d0"))))
    assert {place.instance_id for place in places} == {"d2"}


def test_lives_tell_of_each_crossing() -> None:
    bench = bench_with(p0=ORDERED, d0=DOT)
    lives, found = RequestHistories(), []
    for profile in profiles(p0=ORDERED, d0=DOT):
        lives.observe(InstanceJoined(profile, ()), (), 0.0)
    for request in (a_request("a"), a_request("b", epoch=1, arithmetic=DOT)):
        event = RequestArrived(request)
        found += [m.what for m in lives.observe(event, bench.feed(event), 0.0) if isinstance(m.what, CrossedClass)]
    hand_over = CrossedClass("hand_over", InstanceId("d0"), ORDERED, DOT)
    assert found == [hand_over, hand_over, CrossedClass("restart", InstanceId("p0"), DOT, ORDERED)]


def test_a_deterministic_mesh_is_of_one_class() -> None:
    first, other = profiles(d0=ORDERED, d1=DOT)
    strict = named_profile("p0", arithmetic=ORDERED, deterministic=True)
    assert why_not_joins(strict, [first]) is None
    assert why_not_joins(first, [strict]) is None
    assert why_not_joins(other, [first]) is None
    refusal = why_not_joins(other, [first, strict])
    assert refusal is not None
    assert "d1 computes in the arithmetic class bfloat16/dot-amx-1 and p0 in" in refusal
    assert why_not_joins(strict, [other]) is not None
    assert why_not_joins(named_profile("p0", arithmetic=DOT, deterministic=True), [strict]) is None  # itself, again
    assert why_not_joins(named_profile("m0", model="another", arithmetic=DOT, deterministic=True), [strict]) is None


def test_several_classes_are_named_with_their_instances() -> None:
    names = {InstanceId("p0"): ORDERED, InstanceId("d0"): ORDERED}
    assert several_classes(names) is None
    sentence = several_classes({**names, InstanceId("d1"): ""})
    assert sentence is not None
    assert sentence.startswith("2 arithmetic classes (bfloat16/ordered-1: p0, d0; unknown: d1)")

"""After a scheduler's restart: residents meet the requests that wait for them, whichever comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import (
    AdmitPrefill,
    ExpectCopy,
    ForgetRequest,
    FreeKv,
    Outcome,
    Reject,
    Restart,
    RunStep,
    SetPlaces,
    WakeAt,
)
from pdmesh.core.events import (
    Event,
    GatewayJoined,
    GatewayLost,
    InstanceJoined,
    InstanceLost,
    InstanceUnreachable,
    KvReleased,
    RangeLost,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
)
from pdmesh.model import Epoch, FinishReason, GatewayId, InstanceId, PartMember, RequestId, Resident, Role
from pdmesh_testing.core import GATEWAY, CoreBench, a_request, of
from pdmesh_testing.modelled import modelled_profile

D = InstanceId("d")
DECODE = modelled_profile("d", Role.DECODE)
OTHER = GatewayId("other")


def resident(request_id: str, *, epoch: int = 0, decoding: bool = True) -> Resident:
    return Resident(
        request_id=RequestId(request_id),
        epoch=Epoch(epoch),
        gateway_id=GATEWAY,
        num_blocks=4,
        num_context_tokens=9,
        decoding=decoding,
    )


def waits_for(*keys: tuple[str, int]) -> GatewayJoined:
    return GatewayJoined(GATEWAY, tuple((RequestId(request_id), Epoch(epoch)) for request_id, epoch in keys))


def test_a_resident_is_adopted_whoever_registers_first() -> None:
    joined = InstanceJoined(DECODE, (resident("a"),))
    for first, second in ((joined, waits_for(("a", 0))), (waits_for(("a", 0)), joined)):
        bench = CoreBench()
        bench.feed(first)
        assert not of(FreeKv, bench.feed(second))
        assert bench.core.num_running == 1
        assert bench.free_blocks("d") == 60
        commands = bench.feed(RequestFinished(D, RequestId("a"), Epoch(0), FinishReason.STOP, 5))
        assert [forget.outcome for forget in of(ForgetRequest, commands)] == [Outcome.FINISHED]
        bench.released("d", "a")
        assert bench.free_blocks("d") == 64


def test_what_is_on_no_instance_is_restarted_after_the_grace() -> None:
    bench = CoreBench()
    assert [wake.at_s for wake in of(WakeAt, bench.feed(waits_for(("a", 2))))] == [3.0]
    assert not of(Restart, bench.feed(Tick(), at_s=2.9))
    (restart,) = of(Restart, bench.feed(Tick(), at_s=3.0))
    assert (restart.request_id, restart.epoch, restart.gateway_id) == ("a", 2, GATEWAY)


def test_what_was_sent_and_is_not_known_is_restarted_at_once() -> None:
    """It was lost on the way: no instance can have it. What is known goes on, whatever its gateway has heard."""
    bench = CoreBench()
    bench.arrive("a")
    waiting = tuple((RequestId(request_id), Epoch(0)) for request_id in "abc")
    commands = bench.feed(GatewayJoined(GATEWAY, waiting, (RequestId("a"), RequestId("b"))))
    assert [(restart.request_id, restart.epoch) for restart in of(Restart, commands)] == [("b", 0)]
    assert bench.core.num_waiting == 1
    assert [restart.request_id for restart in of(Restart, bench.feed(Tick(), at_s=3.0))] == ["c"]


def test_what_its_instance_dropped_is_restarted_at_once_whoever_registers_first() -> None:
    joined = InstanceJoined(DECODE, (), dropped=((RequestId("a"), Epoch(1)), (RequestId("b"), Epoch(0))))
    for first, second in ((joined, waits_for(("a", 1))), (waits_for(("a", 1)), joined)):
        bench = CoreBench()
        assert not of(Restart, bench.feed(first))
        (restart,) = of(Restart, bench.feed(second))
        assert (restart.request_id, restart.epoch, restart.gateway_id) == ("a", 1, GATEWAY)
        assert not of(Restart, bench.feed(Tick(), at_s=3.0))  # it waits no more


def test_what_was_dropped_in_another_epoch_or_decodes_elsewhere_is_not_restarted_for_that() -> None:
    dropped = ((RequestId("a"), Epoch(0)), (RequestId("b"), Epoch(0)))
    for is_first in (False, True):
        bench = CoreBench(*([DECODE] if is_first else []))
        if is_first:
            bench.feed(InstanceJoined(DECODE, (resident("b"),)))
        commands = bench.feed(InstanceJoined(modelled_profile("p", Role.PREFILL), (), dropped=dropped))
        commands += bench.feed(waits_for(("a", 1), ("b", 0)) if is_first else waits_for(("a", 1)))
        assert not of(Restart, commands)
        assert [restart.request_id for restart in of(Restart, bench.feed(Tick(), at_s=3.0))] == ["a"]
        assert bench.core.num_running == int(is_first)


def test_what_was_dropped_long_ago_waits_for_its_instance_as_any() -> None:
    bench = CoreBench()
    bench.feed(InstanceJoined(DECODE, (), dropped=((RequestId("a"), Epoch(0)),)))
    bench.feed(waits_for(("b", 0)), at_s=1.0)
    bench.feed(Tick(), at_s=4.0)
    assert not of(Restart, bench.feed(waits_for(("a", 0)), at_s=4.0))
    assert [restart.request_id for restart in of(Restart, bench.feed(Tick(), at_s=7.0))] == ["a"]


def test_a_resident_nobody_waits_for_is_freed_after_the_grace() -> None:
    bench = CoreBench()
    bench.feed(InstanceJoined(DECODE, (resident("a"),)))
    assert [free.request_id for free in of(FreeKv, bench.feed(Tick(), at_s=3.0))] == ["a"]
    assert bench.free_blocks("d") == 60
    bench.released("d", "a")
    assert bench.free_blocks("d") == 64


def test_a_resident_that_does_not_decode_is_freed_at_once() -> None:
    bench = CoreBench()
    commands = bench.feed(InstanceJoined(DECODE, (resident("a", decoding=False),)))
    assert [free.request_id for free in of(FreeKv, commands)] == ["a"]


def test_a_resident_that_was_freed_twice_gives_back_nothing_that_was_promised_since() -> None:
    """Seed 110 of the simulation: it gave up by itself while FreeKv was on its way, and answered that too."""
    bench = CoreBench(modelled_profile("p", Role.PREFILL), DECODE)
    (place,) = of(ExpectCopy, bench.arrive("a"))
    bench.feed(InstanceLost(D))
    brought = place.transfer.transfer_id
    (free,) = of(
        FreeKv, bench.feed(InstanceJoined(DECODE, (replace(resident("a", decoding=False), transfer_id=brought),)))
    )
    assert free.transfer_id == brought
    released = KvReleased(D, RequestId("a"), Epoch(0), brought)
    (again,) = of(ExpectCopy, bench.feed(released))
    assert bench.feed(KvReleased(D, RequestId("a"), Epoch(0), free.transfer_id)) == []
    assert bench.core.ignored["KvReleased"] == 1
    bench.feed(RequestCancelled(GATEWAY, RequestId("a"), Epoch(0)))
    bench.feed(KvReleased(D, RequestId("a"), Epoch(0), again.transfer.transfer_id))
    assert bench.free_blocks("d") == 64


def test_a_resident_of_an_older_epoch_is_freed_at_once() -> None:
    bench = CoreBench()
    bench.feed(InstanceJoined(DECODE, (resident("a", epoch=0),)))
    assert [free.epoch for free in of(FreeKv, bench.feed(waits_for(("a", 1))))] == [0]


def test_a_resident_that_ends_before_it_is_claimed_is_forgotten() -> None:
    bench = CoreBench()
    bench.feed(InstanceJoined(DECODE, (resident("a"),)))
    bench.feed(KvReleased(instance_id=D, request_id=RequestId("a"), epoch=Epoch(0)))
    assert not of(FreeKv, bench.feed(Tick(), at_s=9.0))
    assert bench.free_blocks("d") == 64


def test_a_cancel_reaches_an_unclaimed_resident() -> None:
    bench = CoreBench()
    bench.feed(InstanceJoined(DECODE, (resident("a"),)))
    assert of(FreeKv, bench.feed(RequestCancelled(GATEWAY, RequestId("a"), Epoch(0))))


def test_another_gateway_neither_cancels_nor_claims_what_waits_for_its_own() -> None:
    bench = CoreBench()
    bench.feed(InstanceJoined(DECODE, (resident("a"),)))
    bench.feed(waits_for(("b", 0)))
    for name in ("a", "b"):
        assert not of(FreeKv, bench.feed(RequestCancelled(OTHER, RequestId(name), Epoch(0))))
        theirs = bench.feed(RequestArrived(replace(a_request(name), gateway_id=OTHER)))
        assert [reject.gateway_id for reject in of(Reject, theirs)] == [OTHER]
    bench.feed(GatewayJoined(OTHER, ((RequestId("a"), Epoch(0)), (RequestId("b"), Epoch(0)))))
    assert bench.core.num_running == 0
    bench.feed(InstanceJoined(modelled_profile("e", Role.DECODE), (replace(resident("b"), gateway_id=OTHER),)))
    assert bench.core.num_running == 0
    bench.feed(waits_for(("a", 0), ("b", 0)))
    assert bench.core.num_running == 1


def test_a_resubmitted_request_finds_its_resident() -> None:
    bench = CoreBench()
    bench.feed(InstanceJoined(modelled_profile("d", Role.MIXED), (resident("a"),)))
    assert not of(AdmitPrefill, bench.arrive("a"))
    assert bench.core.num_running == 1


def test_a_waiting_request_found_decoding_is_not_placed_again() -> None:
    bench = CoreBench()
    bench.arrive("a")
    assert not of(AdmitPrefill, bench.feed(InstanceJoined(modelled_profile("d", Role.MIXED), (resident("a"),))))
    assert (bench.core.num_running, bench.core.num_waiting) == (1, 0)


def test_the_same_request_on_two_instances_is_kept_once() -> None:
    bench = CoreBench()
    bench.feed(InstanceJoined(DECODE, (resident("a", epoch=0),)))
    commands = bench.feed(InstanceJoined(modelled_profile("e", Role.DECODE), (resident("a", epoch=1),)))
    assert [(free.instance_id, free.epoch) for free in of(FreeKv, commands)] == [("d", 0)]


def test_a_gateway_that_rejoins_without_a_request_has_given_it_up() -> None:
    bench = CoreBench()
    bench.arrive("a")
    bench.arrive("b")
    commands = bench.feed(waits_for(("b", 0)))
    assert [(forget.request_id, forget.outcome) for forget in of(ForgetRequest, commands)] == [("a", Outcome.CANCELLED)]
    assert bench.core.num_waiting == 1


def test_a_lost_gateways_missing_requests_are_not_asked_for() -> None:
    bench = CoreBench()
    bench.feed(waits_for(("a", 0)))
    bench.feed(GatewayLost(GATEWAY))
    assert not of(Restart, bench.feed(Tick(), at_s=9.0))


def test_an_instance_whose_last_report_was_lost_rejoins_with_its_resident_and_no_chunk_in_flight() -> None:
    """Found by simulation: the stream broke between the prompt's last chunk and the report of it."""
    mixed = modelled_profile("m", Role.MIXED)
    bench = CoreBench(mixed)
    assert of(RunStep, bench.arrive("a"))
    bench.feed(InstanceUnreachable(InstanceId("m")))
    assert not of(FreeKv, bench.feed(InstanceJoined(mixed, (resident("a"),))))
    bench.feed(RequestFinished(InstanceId("m"), RequestId("a"), Epoch(0), FinishReason.STOP, 4))
    bench.released("m", "a")
    assert bench.free_blocks("m") == 64


def test_a_gateway_whose_request_another_one_took_meanwhile_is_told_to_start_it_again() -> None:
    """Found by simulation: nobody told it, and its client waited for ever."""
    bench = CoreBench()
    bench.feed(RequestArrived(replace(a_request("a", epoch=1), gateway_id=OTHER)))
    (restart,) = of(Restart, bench.feed(waits_for(("a", 0))))
    assert (restart.gateway_id, restart.request_id, restart.epoch) == (GATEWAY, "a", 0)


# --- contexts that are spread ---

MEMBERS = tuple(PartMember(instance_id=InstanceId(name), capability=7) for name in ("m0", "m1"))


def holds_range(instance_id: str, number: int) -> InstanceJoined:
    profile = modelled_profile(instance_id, Role.DECODE, max_kv_tokens=16)
    return InstanceJoined(profile, (replace(resident("a", decoding=False), part=number),))


def home_of(members: tuple[PartMember, ...]) -> InstanceJoined:
    profile = modelled_profile("d", Role.DECODE, max_kv_tokens=16)
    return InstanceJoined(profile, (replace(resident("a"), num_context_tokens=41, members=members),))


@pytest.mark.parametrize("num_registered", [0, 1, 2])
@pytest.mark.parametrize("has_gateway", [False, True])
def test_a_spread_context_that_ends_before_all_have_registered_leaves_nothing(
    num_registered: int, has_gateway: bool
) -> None:
    bench = CoreBench()
    holders = [holds_range("m0", 0), holds_range("m1", 1)]
    freed: list[InstanceId] = []
    events: list[Event] = [home_of(MEMBERS), *holders[:num_registered], KvReleased(D, RequestId("a"), Epoch(0))]
    if has_gateway:
        events.insert(0, waits_for(("a", 0)))
    for event in (*events, *holders[num_registered:]):
        freed += [free.instance_id for free in of(FreeKv, bench.feed(event))]
    freed += [free.instance_id for free in of(FreeKv, bench.feed(Tick(), at_s=3.0))]
    assert sorted(freed) == ["m0", "m1"]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 2, 0, 3), (2, 3, 0, 1)])
def test_of_two_that_hold_the_same_range_the_one_stays_that_is_asked(order: tuple[int, ...]) -> None:
    """The range had landed, and the instance where the context decodes had not heard of that."""
    bench = CoreBench()
    bench.feed(waits_for(("a", 0)))
    events = [home_of(MEMBERS), holds_range("m0", 0), holds_range("m1", 1), holds_range("m2", 0)]
    freed: list[InstanceId] = []
    for number in order:
        freed += [free.instance_id for free in of(FreeKv, bench.feed(events[number]))]
    assert bench.core.num_running == 1
    assert freed == ["m2"]


@pytest.mark.parametrize("waits", ["before", "after"])
def test_the_home_of_a_context_that_is_found_asks_all_members_again(waits: str) -> None:
    """It may stand still because one gave no answer, and no scheduler has heard of that."""
    bench = CoreBench()
    events: list[Event] = [home_of(MEMBERS), holds_range("m0", 0), holds_range("m1", 1)]
    events.insert(0 if waits == "before" else 3, waits_for(("a", 0)))
    bench.feed(RangeLost(D, RequestId("a"), Epoch(0), 1))
    told = [members for event in events for members in of(SetPlaces, bench.feed(event))]
    assert [(each.instance_id, each.places) for each in told] == [("d", MEMBERS)]
    bench.feed(home_of(MEMBERS))
    again = of(SetPlaces, bench.feed(home_of(MEMBERS)))
    assert [each.places for each in again] == [MEMBERS]


def test_all_that_hold_a_range_are_freed_if_its_home_does_not_register() -> None:
    bench = CoreBench()
    for event in (holds_range("m0", 0), holds_range("m1", 1), holds_range("m2", 0)):
        bench.feed(event)
    assert sorted(free.instance_id for free in of(FreeKv, bench.feed(Tick(), at_s=3.0))) == ["m0", "m1", "m2"]

"""KV whose receiver fails is granted to another, or decodes where it is; computing it again is the last resort."""

from __future__ import annotations

import pytest

from pdmesh.core.commands import AdmitPrefill, Command, ExpectCopy, FreeKv, Restart, RunStep, SendCopy, Stop
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import (
    Event,
    InstanceJoined,
    InstanceLost,
    InstanceSuspected,
    InstanceUnreachable,
    KvReleased,
    RequestCancelled,
    RequestDropped,
    Tick,
    TransferFailed,
    TransferLanded,
)
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.model import Epoch, InstanceId, RequestId, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import GATEWAY, CoreBench, a_role, kept_here, of, stopped
from pdmesh_testing.modelled import modelled_profile

P, D0, D1 = (InstanceId(name) for name in ("p", "d0", "d1"))


def mesh(*, source: Role = Role.PREFILL, num_blocks: int = 64, config: CoreConfig | None = None) -> CoreBench:
    decodes = [modelled_profile(name, Role.DECODE, num_blocks=num_blocks) for name in (D0, D1)]
    return CoreBench(modelled_profile(P, source), *decodes, config=config)


def placed(bench: CoreBench, request_id: str = "r", **tokens: int) -> tuple[ExpectCopy, RunStep]:
    commands = bench.arrive(request_id, **tokens)
    return of(ExpectCopy, commands)[0], of(RunStep, commands)[0]


def others(of_id: InstanceId) -> InstanceId:
    return D1 if of_id == D0 else D0


def failures(place: ExpectCopy) -> dict[str, Event]:
    """What a receiver can do before the KV has landed, as the core hears of it."""
    key = place.instance_id, place.request_id, place.epoch
    return {
        "dies": InstanceLost(place.instance_id),
        "begins anew": InstanceJoined(modelled_profile(place.instance_id, Role.DECODE), ()),
        "refuses": RequestDropped(*key, "no room"),
        "fails": TransferFailed(*key, place.transfer.transfer_id, "checksum"),
        "frees": KvReleased(*key, place.transfer.transfer_id),
        "times out": TransferFailed(P, *key[1:], place.transfer.transfer_id, "deadline"),
        "is silent": InstanceSuspected(place.instance_id),
    }


HOW = ("dies", "begins anew", "refuses", "fails", "frees", "times out", "is silent")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("computed", [False, True])
def test_another_receiver_gets_the_kv_and_nothing_is_computed_again(how: str, computed: bool) -> None:
    bench = mesh()
    place, step = placed(bench)
    bench.offered(P, "r")
    if computed:
        bench.done(P, step.plan)
    commands = bench.feed(failures(place)[how])
    assert not of(Restart, commands)
    if how not in ("begins anew", "frees"):  # then it has room again, too
        assert [again.instance_id for again in of(ExpectCopy, commands)] == [others(place.instance_id)]
    (again,), (grant,) = of(ExpectCopy, commands), of(SendCopy, commands)
    assert again.transfer.capability != place.transfer.capability
    assert (grant.instance_id, grant.transfer) == (P, again.transfer)
    withdrawn = [withdraw.transfer_id for withdraw in stopped(Stop.WITHDRAW, commands)]
    assert withdrawn == ([] if how == "times out" else [place.transfer.transfer_id]), "the source knows of it once"
    if not computed:
        bench.done(P, step.plan)
    bench.landed(again.instance_id, "r")
    bench.sent(P, "r")
    bench.released(P, "r")
    assert not of(Restart, bench.finish(again.instance_id, "r"))
    assert not of(AdmitPrefill, bench.commands)[1:]


def test_what_ends_with_its_prompt_needs_nobody_to_decode_it() -> None:
    bench = mesh()
    commands = bench.arrive("r", 8, 1)
    assert not of(ExpectCopy, commands)
    assert [(admit.instance_id, admit.moves_on) for admit in of(AdmitPrefill, commands)] == [(P, False)]
    (step,) = of(RunStep, commands)
    bench.done(P, step.plan)
    bench.finish(P, "r", num_output_tokens=0)  # an embedding
    bench.released(P, "r")
    bench.core.check_integrity()
    assert not bench.core._mesh.requests


def test_it_moves_on_where_no_seat_is_left_for_it() -> None:
    profiles = (modelled_profile(P, Role.PREFILL, max_num_seqs=1), modelled_profile(D0, Role.DECODE))
    bench = CoreBench(*profiles)
    bench.arrive("r", 8, 1)
    bench.arrive("s", 8, 1)
    for step in of(RunStep, bench.commands):
        bench.done(P, step.plan)
    assert [place.request_id for place in of(ExpectCopy, bench.commands)] == ["s"]


def test_what_the_old_receiver_says_late_changes_nothing() -> None:
    bench = mesh()
    place, step = placed(bench)
    bench.offered(P, "r")
    bench.done(P, step.plan)
    bench.feed(failures(place)["times out"])
    key = place.instance_id, place.request_id, place.epoch
    late = (
        TransferLanded(*key, place.transfer.transfer_id, 1, 0.1),
        TransferFailed(*key, place.transfer.transfer_id, "checksum"),
        TransferFailed(P, *key[1:], place.transfer.transfer_id, "the receiver cancelled the transfer"),
        RequestDropped(*key, "no room"),
        KvReleased(*key, place.transfer.transfer_id),
    )
    for event in late:
        assert not of(Restart, bench.feed(event)), event
        assert not of(FreeKv, bench.commands[-1:]), event
    assert bench.core.request(RequestId("r")) is not None
    assert not of(Restart, bench.landed(others(place.instance_id), "r"))


def test_a_receiver_that_failed_and_is_promised_anew_frees_what_it_had_once() -> None:
    """Found by the property machine: it gave up by itself while FreeKv was on its way, and answered that too."""
    bench = CoreBench(modelled_profile(P, Role.PREFILL), modelled_profile(D0, Role.DECODE))
    place, step = placed(bench)
    bench.offered(P, "r")
    bench.done(P, step.plan)
    bench.failed(D0, "r", "checksum")
    key = place.instance_id, place.request_id, place.epoch
    released = KvReleased(*key, place.transfer.transfer_id)
    (again,) = of(ExpectCopy, bench.feed(released))
    assert bench.feed(released) == []
    assert bench.core.ignored["KvReleased"] == 1
    bench.landed(again.instance_id, "r")
    assert bench.free_blocks(D0) < 64
    bench.finish(D0, "r")
    bench.feed(KvReleased(*key, again.transfer.transfer_id))
    assert bench.free_blocks(D0) == 64


def test_it_waits_for_room_and_goes_before_whoever_has_no_place() -> None:
    bench = mesh(num_blocks=3)  # of 4 tokens: one request
    first, step = placed(bench, "first")
    second, _ = placed(bench, "second")
    assert {first.instance_id, second.instance_id} == {D0, D1}
    bench.offered(P, "first")
    bench.done(P, step.plan)
    commands = bench.feed(InstanceLost(first.instance_id))
    assert not of(ExpectCopy, commands)
    assert not of(Restart, commands)
    assert list(bench.core.awaiting_decode) == [(RequestId("first"), Epoch(0))]
    bench.arrive("third")
    bench.finish(second.instance_id, "second")
    (again,) = of(ExpectCopy, bench.released(second.instance_id, "second"))
    assert (again.request_id, again.instance_id) == ("first", second.instance_id)


def test_the_first_offer_is_the_first_to_be_received() -> None:
    bench = mesh(num_blocks=3)
    places = {name: placed(bench, name) for name in ("a", "b")}
    for name in ("b", "a"):
        bench.offered(P, name)
    for place, step in places.values():
        bench.done(P, step.plan)
        bench.feed(InstanceLost(place.instance_id))
    commands = bench.feed(InstanceJoined(modelled_profile(D0, Role.DECODE, num_blocks=3), ()))
    assert [place.request_id for place in of(ExpectCopy, commands)] == ["b"]


def test_it_decodes_where_it_is_if_it_may_and_nobody_else_has_room() -> None:
    bench = CoreBench(modelled_profile(P, Role.PREFILL), modelled_profile(D0, Role.DECODE))
    _, step = placed(bench)
    bench.feed(a_role(P, Role.MIXED))
    bench.offered(P, "r")
    bench.done(P, step.plan)
    (keep,) = kept_here(bench.feed(InstanceLost(D0)))
    assert (keep.instance_id, keep.num_blocks) == (P, 3)
    assert not of(Restart, bench.finish(P, "r"))


def test_it_starts_again_when_its_source_fails_too() -> None:
    bench = mesh()
    placed(bench)
    bench.feed(InstanceLost(D0))
    bench.feed(InstanceLost(D1))
    (restart,) = of(Restart, bench.feed(InstanceLost(P)))
    assert restart.reason == "instance p was lost"


def test_it_starts_again_when_nobody_takes_it_in_time() -> None:
    bench = mesh(config=CoreConfig(max_queue_s=5.0, policy=PolicyConfig(chunk_tokens=16)))
    placed(bench)
    for name in (D0, D1):
        bench.feed(InstanceLost(name), at_s=1.0)
    assert not of(Restart, bench.feed(Tick(), at_s=5.9))
    (restart,) = of(Restart, bench.feed(Tick(), at_s=6.0))
    assert "5 s" in restart.reason


def test_it_starts_again_when_receivers_fail_it_too_often() -> None:
    bench = mesh(config=CoreConfig(max_lost_receivers=3, policy=PolicyConfig(chunk_tokens=16)))
    place, _ = placed(bench)
    for _ in range(3):
        commands = bench.failed(place.instance_id, "r", "checksum")
        assert not of(Restart, commands)
        key = place.instance_id, place.request_id, place.epoch
        bench.feed(KvReleased(*key, place.transfer.transfer_id))
        (place,) = of(ExpectCopy, commands)
    assert of(Restart, bench.failed(place.instance_id, "r", "checksum"))


def test_a_source_that_had_the_acknowledgement_has_nothing_to_grant() -> None:
    bench = mesh()
    place, step = placed(bench)
    bench.offered(P, "r")
    bench.done(P, step.plan)
    bench.sent(P, "r")
    assert of(Restart, bench.feed(InstanceLost(place.instance_id)))


def test_a_request_whose_first_chunk_begins_without_a_receiver_is_offered_to_the_next() -> None:
    bench = mesh()
    placed(bench)
    for name in (D0, D1):
        bench.feed(InstanceLost(name))
    bench.offered(P, "r")
    commands = bench.feed(InstanceJoined(modelled_profile(D0, Role.DECODE), ()))
    (place,), (grant,) = of(ExpectCopy, commands), of(SendCopy, commands)
    assert grant.transfer == place.transfer


def test_an_offer_that_comes_again_after_the_landing_gets_no_backend() -> None:
    bench = mesh()
    place, step = placed(bench)
    bench.offered(P, "r")
    (again,) = of(ExpectCopy, bench.feed(failures(place)["times out"]))
    bench.done(P, step.plan)
    bench.landed(again.instance_id, "r")
    assert bench.offered(P, "r") == []
    assert bench.core.ignored["TransferOffered"] == 1
    bench.sent(P, "r")
    bench.released(P, "r")
    assert bench.offered(P, "r") == []
    assert bench.core.ignored["TransferOffered"] == 2


def test_an_instance_that_cannot_be_reached_receives_nothing_that_has_not_begun_to_land() -> None:
    bench = mesh()
    place, _ = placed(bench)
    bench.offered(P, "r")
    commands: list[Command] = bench.feed(InstanceUnreachable(place.instance_id))
    assert [again.instance_id for again in of(ExpectCopy, commands)] == [others(place.instance_id)]


def test_who_waited_for_a_receiver_and_has_gone_keeps_room_from_nobody() -> None:
    """A long prompt that is promised room later, placed at the same moment, does not bring the old closure back."""
    latency = LinearLatencyModel(a_s=0.1, b_s=0.01, c_s=0.0, d_s=0.0)
    policy = PolicyConfig(latency=latency, long_prompt_tokens=256, decodes_locally=False)
    config = CoreConfig(policy=policy, max_queue_s=1e6)
    prefills = [modelled_profile(name, Role.PREFILL, num_blocks=1024, max_model_len=4096) for name in ("p0", "p1")]
    decode = modelled_profile(D0, Role.DECODE, num_blocks=1024, max_model_len=4096)
    bench = CoreBench(*prefills, decode, config=config)
    bench.feed(BundleChangeRequested("pdmesh"))
    bench.arrive("r")
    bench.feed(InstanceLost(D0))
    bench.arrive("long", 2048)
    bench.now_s = 1000.0
    bench.arrive("short", 200)
    bench.feed(RequestCancelled(GATEWAY, RequestId("r"), Epoch(0)))
    commands = bench.feed(InstanceJoined(decode, ()))
    assert [(admit.request_id, admit.awaits_receiver) for admit in of(AdmitPrefill, commands)] == [
        ("long", True),
        ("short", False),
    ]

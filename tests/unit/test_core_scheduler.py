"""The scheduling core, rule by rule, in the order of a request's way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import (
    AdmitPrefill,
    Command,
    ExpectCopy,
    ForgetRequest,
    FreeKv,
    Outcome,
    Reject,
    Restart,
    RunStep,
    SendCopy,
    SetRole,
    Stop,
    StopCopy,
    WakeAt,
)
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import (
    DecodeStepsDone,
    DrainRequested,
    Event,
    GatewayLost,
    InstanceJoined,
    InstanceLost,
    InstanceUnreachable,
    LoadReported,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    StepDone,
    Tick,
    TransferLanded,
    TransferOffered,
)
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.model import (
    Epoch,
    FinishReason,
    GatewayId,
    InstanceId,
    InstanceProfile,
    OwnDecodeSteps,
    RejectReason,
    RequestId,
    Role,
    TransferId,
)
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import GATEWAY, CoreBench, a_request, a_role, of, step_done, stopped
from pdmesh_testing.modelled import modelled_profile

P, D, M = InstanceId("p"), InstanceId("d"), InstanceId("m")


def prefill(name: str = "p", **settings: int) -> InstanceProfile:
    return modelled_profile(name, Role.PREFILL, **settings)  # type: ignore[arg-type] # only its numbers are set here


def decode(name: str = "d", **settings: int) -> InstanceProfile:
    return modelled_profile(name, Role.DECODE, **settings)  # type: ignore[arg-type] # as above


def mixed(name: str = "m", **settings: int) -> InstanceProfile:
    return modelled_profile(name, Role.MIXED, **settings)  # type: ignore[arg-type] # as above


def finished(instance_id: InstanceId, request_id: str) -> RequestFinished:
    return RequestFinished(instance_id, RequestId(request_id), Epoch(0), FinishReason.STOP, 3)


def limited(**limits: float) -> CoreConfig:
    return replace(CoreConfig(policy=PolicyConfig(chunk_tokens=16)), **limits)  # type: ignore[arg-type] # by name


# --- placing ---


def test_prefill_and_decode_are_placed_before_the_first_step() -> None:
    bench = CoreBench(prefill(), decode())
    place, admit, step, *_ = bench.arrive("r", prompt=8, output=6)
    assert isinstance(place, ExpectCopy)
    assert isinstance(admit, AdmitPrefill)
    assert isinstance(step, RunStep)
    assert (place.instance_id, place.transfer.source_ids, place.num_blocks) == (D, (P,), 4)  # 8 + 6 - 1 tokens
    assert (admit.instance_id, admit.decode_instance_id, admit.num_blocks) == (P, D, 2)  # 8 tokens
    assert 0 < place.transfer.capability < 2**64
    assert bench.free_blocks("d") == 60
    assert not step.plan.with_decodes


def test_a_mixed_instance_decodes_what_it_prefilled_without_a_transfer() -> None:
    bench = CoreBench(mixed(), decode())
    commands = bench.arrive("r", prompt=8, output=6)
    assert not of(ExpectCopy, commands)
    (admit,) = of(AdmitPrefill, commands)
    assert (admit.instance_id, admit.decode_instance_id, admit.num_blocks) == (M, None, 4)
    assert of(RunStep, commands)[0].plan.with_decodes


def test_a_mixed_instance_without_a_seat_moves_what_it_prefilled() -> None:
    bench = CoreBench(mixed(max_num_seqs=1), decode())
    bench.arrive("stays")
    (place,) = of(ExpectCopy, bench.arrive("moves"))
    assert (place.instance_id, place.transfer.source_ids) == (D, (M,))


def test_prompts_go_where_fewest_tokens_are_queued_and_ties_to_the_smaller_id() -> None:
    bench = CoreBench(prefill("p1"), prefill("p0"), decode())
    admits = [of(AdmitPrefill, bench.arrive(name, prompt))[0] for name, prompt in (("a", 8), ("b", 4), ("c", 2))]
    assert [admit.instance_id for admit in admits] == ["p0", "p1", "p1"]


def test_decodes_go_to_the_freest_instance_counting_what_is_promised() -> None:
    bench = CoreBench(prefill(), decode("d0"), decode("d1"))
    places = [of(ExpectCopy, bench.arrive(name, prompt=2))[0] for name in ("a", "b")]
    assert [place.instance_id for place in places] == ["d0", "d1"]


def test_kv_moves_only_between_equal_layouts() -> None:
    other = modelled_profile("d", Role.DECODE, block_size=8)
    bench = CoreBench(prefill(), other)
    bench.arrive("r")
    assert bench.core.num_waiting == 1
    assert bench.core.unready_reason == "no prefill and decode instance have the same model, weights and KV layout"


def test_nothing_is_placed_without_a_seat_to_decode() -> None:
    bench = CoreBench(prefill(), decode(max_num_seqs=1))
    bench.arrive("a")
    assert not of(AdmitPrefill, bench.arrive("b"))


def test_the_head_of_the_line_waits_and_nobody_overtakes_it() -> None:
    bench = CoreBench(prefill(num_blocks=8), decode(num_blocks=8), chunk_tokens=64)
    bench.arrive("first", prompt=16, output=4)  # 5 of 8 decode blocks
    bench.arrive("big", prompt=16, output=4)
    commands = bench.arrive("small", prompt=1, output=1)
    assert not of(AdmitPrefill, commands)
    bench.feed(RequestCancelled(GATEWAY, RequestId("first"), Epoch(0)))
    bench.released("p", "first")
    commands = bench.released("d", "first")
    assert [admit.request_id for admit in of(AdmitPrefill, commands)] == ["big", "small"]


def test_equal_arrivals_are_served_by_id() -> None:
    bench = CoreBench(prefill(), decode(max_num_seqs=1))
    for name in ("x", "b", "a"):
        bench.arrive(name)
    bench.feed(RequestCancelled(GATEWAY, RequestId("x"), Epoch(0)))
    bench.released("p", "x")
    assert [admit.request_id for admit in of(AdmitPrefill, bench.released("d", "x"))] == ["a"]


def test_quarantined_blocks_are_not_promised() -> None:
    bench = CoreBench(prefill(num_blocks=4), decode())
    bench.feed(LoadReported(P, 2, 0, 2, 0))
    assert not of(AdmitPrefill, bench.arrive("r", prompt=12))
    assert of(AdmitPrefill, bench.feed(LoadReported(P, 4, 0, 0, 0)))


# --- packing ---


def test_prompts_are_cut_at_the_chunk_size_and_steps_filled_in_order() -> None:
    bench = CoreBench(prefill(), decode(), chunk_tokens=16)
    plans = [step.plan for step in of(RunStep, bench.arrive("a", prompt=20))]
    assert [[(c.start, c.num_tokens, c.is_last) for c in plan.chunks] for plan in plans] == [
        [(0, 16, False)],
        [(16, 4, True)],
    ]
    bench.arrive("b", prompt=20)
    bench.arrive("c", prompt=4)
    (step,) = of(RunStep, bench.done("p", plans[0]))
    assert [(c.request_id, c.start, c.num_tokens) for c in step.plan.chunks] == [("b", 0, 16)]
    (step,) = of(RunStep, bench.done("p", plans[1]))
    assert [(c.request_id, c.start, c.num_tokens) for c in step.plan.chunks] == [("b", 16, 4), ("c", 0, 4)]


def test_two_plans_are_in_flight_and_no_more() -> None:
    bench = CoreBench(prefill(), decode(), chunk_tokens=4)
    plans = [step.plan for step in of(RunStep, bench.arrive("a", prompt=12))]
    assert [plan.plan_id for plan in plans] == [0, 1]
    assert [step.plan.plan_id for step in of(RunStep, bench.done("p", plans[0]))] == [2]


def test_a_request_is_bound_to_an_instance_only_when_its_first_chunk_is_planned() -> None:
    bench = CoreBench(prefill("p0"), decode(), chunk_tokens=4)
    bench.arrive("a", prompt=8)  # both plans of p0
    assert not of(AdmitPrefill, bench.arrive("b"))
    admits = of(AdmitPrefill, bench.feed(InstanceJoined(prefill("p1"), ())))
    assert [(admit.request_id, admit.instance_id) for admit in admits] == [("b", "p1")]


def test_an_urgent_request_takes_the_step_after_those_in_flight_and_the_overtaken_one_goes_on() -> None:
    bench = CoreBench(mixed(), chunk_tokens=4)
    bench.feed(BundleChangeRequested("priority"))
    plans = [step.plan for step in of(RunStep, bench.arrive("long", prompt=16))]
    urgent = replace(a_request("urgent", prompt=4, arrival_s=1.0), priority=-1)
    assert not of(RunStep, bench.feed(RequestArrived(urgent)))
    (step,) = of(RunStep, bench.done("m", plans[0]))
    assert [(c.request_id, c.start, c.is_last) for c in step.plan.chunks] == [("urgent", 0, True)]
    (step,) = of(RunStep, bench.done("m", plans[1]))
    assert [(c.request_id, c.start, c.is_last) for c in step.plan.chunks] == [("long", 8, False)]
    assert not of(FreeKv, bench.commands)


def test_a_plan_whose_requests_are_gone_still_counts_until_it_is_done() -> None:
    bench = CoreBench(prefill(), decode(), chunk_tokens=4)
    plans = [step.plan for step in of(RunStep, bench.arrive("a", prompt=12))]
    bench.feed(RequestCancelled(GATEWAY, RequestId("a"), Epoch(0)))
    assert not of(RunStep, bench.arrive("b", prompt=4))
    assert of(RunStep, bench.feed(step_done(P, plans[0], 0.0, num_tokens=0)))


def test_a_dropped_chunk_restarts_its_request() -> None:
    bench = CoreBench(prefill(), decode())
    (step,) = of(RunStep, bench.arrive("a"))
    commands = bench.feed(step_done(P, step.plan, 0.0, num_tokens=0))
    assert of(Restart, commands)
    assert {free.instance_id for free in of(FreeKv, commands)} == {P, D}


def test_an_instance_of_stages_has_a_plan_more_for_each() -> None:
    bench = CoreBench(prefill(num_stages=3), decode(), config=limited(plans_in_flight=2))
    bench.arrive("long", prompt=80)
    plans = of(RunStep, bench.commands)
    assert [chunk.start for run in plans for chunk in run.plan.chunks] == [0, 16, 32, 48]


# --- transfers ---


def test_transfers_are_granted_in_order_of_first_offer_as_backends_get_free() -> None:
    bench = CoreBench(prefill(), decode(num_transfer_backends=1), config=limited(plans_in_flight=3))
    for name in ("a", "b", "c"):
        bench.arrive(name, prompt=4)
    assert [grant.request_id for grant in of(SendCopy, bench.offered(P, "b"))] == ["b"]
    for name in ("c", "a", "c", "b"):
        assert not of(SendCopy, bench.offered(P, name))
    (grant,) = of(SendCopy, bench.landed(D, "b"))
    (place,) = (place for place in of(ExpectCopy, bench.commands) if place.request_id == "c")
    assert (grant.request_id, grant.instance_id, grant.transfer) == ("c", P, place.transfer)


def test_a_cancelled_transfer_keeps_its_backend_until_the_receiver_has_freed() -> None:
    bench = CoreBench(prefill(), decode(num_transfer_backends=1))
    for name in ("a", "b"):
        bench.arrive(name, prompt=4)
        bench.offered(P, name)
    assert not of(SendCopy, bench.feed(RequestCancelled(GATEWAY, RequestId("a"), Epoch(0))))
    assert [grant.request_id for grant in of(SendCopy, bench.released("d", "a"))] == ["b"]


def test_a_cancelled_offer_leaves_the_line() -> None:
    bench = CoreBench(prefill(), decode(num_transfer_backends=1), config=limited(plans_in_flight=3))
    for name in ("a", "b", "c"):
        bench.arrive(name, prompt=4)
        bench.offered(P, name)
    bench.feed(RequestCancelled(GATEWAY, RequestId("b"), Epoch(0)))
    assert [grant.request_id for grant in of(SendCopy, bench.landed(D, "a"))] == ["c"]


@pytest.mark.parametrize("side", [P, D])
def test_a_transfer_that_fails_too_often_restarts_the_request_and_frees_both_sides(side: InstanceId) -> None:
    bench = CoreBench(prefill(), decode(), config=CoreConfig(max_lost_receivers=1))
    bench.arrive("a")
    bench.offered(P, "a")
    assert not of(Restart, bench.failed(side, "a", "checksum"))
    bench.released("d", "a")
    commands = bench.failed(side, "a", "checksum")
    (restart,) = of(Restart, commands)
    assert (restart.gateway_id, restart.epoch) == (GATEWAY, 0)
    assert "checksum" in restart.reason
    assert {free.instance_id for free in of(FreeKv, commands)} == {P, D}


def test_a_sender_that_missed_the_acknowledgement_is_freed_without_harm_to_the_decode() -> None:
    bench = CoreBench(prefill(), decode())
    (step,) = of(RunStep, bench.arrive("a"))
    bench.done("p", step.plan)
    bench.landed(D, "a")
    commands = bench.failed(P, "a", "no acknowledgement")
    assert [free.instance_id for free in of(FreeKv, commands)] == [P]
    assert not of(Restart, commands)


# --- the end of a request ---


def test_blocks_come_back_only_when_the_worker_has_released_them() -> None:
    bench = CoreBench(prefill(), decode())
    (step,) = of(RunStep, bench.arrive("a", prompt=8, output=6))
    bench.done("p", step.plan)
    bench.landed(D, "a")
    bench.released("p", "a")
    commands = bench.feed(finished(D, "a"))
    assert [forget.outcome for forget in of(ForgetRequest, commands)] == [Outcome.FINISHED]
    assert not of(FreeKv, commands)
    assert bench.free_blocks("d") == 60
    bench.released("d", "a")
    assert [bench.free_blocks(name) for name in ("p", "d")] == [64, 64]


def test_a_first_token_that_ends_the_request_frees_the_reservation() -> None:
    bench = CoreBench(prefill(), decode())
    bench.arrive("a")
    commands = bench.feed(finished(P, "a"))
    assert [free.instance_id for free in of(FreeKv, commands)] == [D]


@pytest.mark.parametrize("stage", ["queued", "prefilling", "in transfer", "decoding"])
def test_cancel_at_any_stage_frees_all_that_is_held(stage: str) -> None:
    bench = CoreBench(prefill(), decode(max_num_seqs=1))
    if stage == "queued":
        bench.arrive("other")
    steps = of(RunStep, bench.arrive("a"))
    allocated = set() if stage == "queued" else {P, D}
    if stage in ("in transfer", "decoding"):
        bench.offered(P, "a")
        bench.done("p", steps[0].plan)
    if stage == "decoding":
        bench.landed(D, "a")
        bench.released("p", "a")
        allocated = {D}
    commands = bench.feed(RequestCancelled(GATEWAY, RequestId("a"), Epoch(0)))
    assert {free.instance_id for free in of(FreeKv, commands)} == allocated
    assert [forget.outcome for forget in of(ForgetRequest, commands)] == [Outcome.CANCELLED]
    assert not bench.core.is_active((RequestId("a"), Epoch(0)))


def test_late_repeated_and_unknown_reports_are_counted_and_change_nothing() -> None:
    bench = CoreBench(prefill(), decode())
    ghost = InstanceId("ghost")
    events: list[Event] = [
        StepDone(P, 7, 0.0, (), 0),
        StepDone(ghost, 0, 0.0, (), 0),
        DecodeStepsDone(
            ghost, OwnDecodeSteps(num_steps=1, num_tokens=1, num_context_tokens=9, duration_s=0.1, wall_s=0.1)
        ),
        TransferOffered(P, RequestId("x"), Epoch(0), TransferId(1)),
        TransferLanded(D, RequestId("x"), Epoch(0), TransferId(1), 1, 0.1),
        finished(D, "x"),
        InstanceLost(ghost),
        InstanceUnreachable(ghost),
        DrainRequested(ghost),
        LoadReported(ghost, 1, 0, 0, 0),
        BundleChangeRequested("no such bundle"),
        RequestCancelled(GATEWAY, RequestId("x"), Epoch(0)),
    ]
    for event in events:
        assert bench.feed(event) == []
    assert bench.released("d", "x") == []
    assert sum(bench.core.ignored.values()) == len(events) + 1


# --- arrivals that come again ---


def test_the_same_request_sent_again_changes_nothing() -> None:
    bench = CoreBench(prefill(), decode())
    bench.arrive("a")
    assert bench.arrive("a") == []
    assert bench.core.num_running == 1


def test_a_new_epoch_takes_the_place_of_the_old_one() -> None:
    bench = CoreBench(prefill(), decode())
    bench.arrive("a")
    commands = bench.arrive("a", epoch=1)
    assert [(forget.epoch, forget.outcome) for forget in of(ForgetRequest, commands)] == [(0, Outcome.SUPERSEDED)]
    assert {free.epoch for free in of(FreeKv, commands)} == {0}
    assert [admit.epoch for admit in of(AdmitPrefill, commands)] == [1]
    assert bench.arrive("a", epoch=0) == []


def test_another_gateways_request_of_the_same_id_is_refused() -> None:
    bench = CoreBench(prefill(), decode())
    bench.arrive("a")
    commands = bench.feed(RequestArrived(replace(a_request("a", epoch=1), gateway_id=GatewayId("other"))))
    assert [reject.gateway_id for reject in of(Reject, commands)] == ["other"]
    assert bench.core.num_running == 1


def test_a_cancel_touches_no_other_gateways_request() -> None:
    bench = CoreBench(prefill(), decode())
    bench.arrive("a")
    assert bench.feed(RequestCancelled(GatewayId("other"), RequestId("a"), Epoch(0))) == []
    assert (bench.core.num_running, bench.core.ignored["RequestCancelled"]) == (1, 1)
    assert of(FreeKv, bench.feed(RequestCancelled(GATEWAY, RequestId("a"), Epoch(0))))


# --- rejections ---


def test_a_full_queue_refuses_new_requests_but_not_resumed_ones() -> None:
    bench = CoreBench(config=limited(max_queue_entries=1))
    bench.arrive("a")
    (reject,) = of(Reject, bench.arrive("b"))
    assert reject.reason is RejectReason.OVERLOADED
    assert reject.retry_after_s is not None
    assert not of(Reject, bench.arrive("c", epoch=1))


def test_the_queue_is_bounded_in_tokens_too() -> None:
    bench = CoreBench(config=limited(max_queue_tokens=10))
    bench.arrive("a", prompt=8)
    assert [reject.reason for reject in of(Reject, bench.arrive("b", prompt=3))] == [RejectReason.OVERLOADED]
    assert not of(Reject, bench.arrive("c", prompt=2))


@pytest.mark.parametrize(("prompt", "output"), [(257, 1), (1, 257), (200, 60)])
def test_what_can_never_fit_is_refused_at_once(prompt: int, output: int) -> None:
    bench = CoreBench(prefill(), decode())  # 64 blocks of 4
    (reject,) = of(Reject, bench.arrive("a", prompt, output))
    assert reject.reason is RejectReason.TOO_LONG
    assert reject.retry_after_s is None
    bench = CoreBench(prefill(max_model_len=16), decode())
    assert of(Reject, bench.arrive("a", 13, 4))
    assert not of(Reject, bench.arrive("b", 12, 4))


def test_a_request_waits_for_room_only_so_long() -> None:
    bench = CoreBench(prefill(), decode(max_num_seqs=1), config=limited(max_queue_s=10.0))
    bench.arrive("a")
    bench.feed(Tick(), at_s=1.0)
    assert [wake.at_s for wake in of(WakeAt, bench.arrive("b"))] == [11.0]
    assert not of(Reject, bench.feed(Tick(), at_s=10.9))
    (reject,) = of(Reject, bench.feed(Tick(), at_s=11.0))
    assert (reject.request_id, reject.reason) == ("b", RejectReason.QUEUE_TIMEOUT)


def test_a_resumed_request_waits_for_room_as_long_as_its_gateway_does() -> None:
    """Half of its answer may be out, and nobody could take it up again. One that came after it times out beside it."""
    bench = CoreBench(prefill(), decode(max_num_seqs=1), config=limited(max_queue_s=10.0))
    bench.arrive("a")
    bench.feed(RequestArrived(a_request("resumed", epoch=1)), at_s=1.0)
    bench.arrive("new")
    assert [reject.request_id for reject in of(Reject, bench.feed(Tick(), at_s=11.0))] == ["new"]
    assert not of(Reject, bench.feed(Tick(), at_s=500.0))
    assert bench.core.num_waiting == 1
    bench.core.check_integrity()


def test_but_not_for_instances_that_do_not_come() -> None:
    bench = CoreBench(prefill(), config=limited(max_queue_s=10.0))
    bench.feed(RequestArrived(a_request("resumed", epoch=1)), at_s=0.0)
    (reject,) = of(Reject, bench.feed(Tick(), at_s=10.0))
    assert (reject.request_id, reject.reason) == ("resumed", RejectReason.NO_INSTANCE)


def test_a_preempted_request_gives_its_backend_to_one_that_waits() -> None:
    """The long prompt is overtaken by two short ones; its backend goes to the first and comes back to it."""
    bench = CoreBench(prefill(), decode(num_transfer_backends=1), chunk_tokens=4)
    bench.feed(BundleChangeRequested("sjf"))

    def offered(request_id: str) -> list[Command]:
        return bench.offered(P, request_id)

    first, second = (step.plan for step in of(RunStep, bench.arrive("long", prompt=12)))
    assert [grant.request_id for grant in of(SendCopy, offered("long"))] == ["long"]
    bench.arrive("a", prompt=4)
    bench.arrive("b", prompt=4)
    (third,) = of(RunStep, bench.done("p", first))
    assert [chunk.request_id for chunk in third.plan.chunks] == ["a"]
    assert stopped(Stop.PAUSE, offered("a")) == []  # the second chunk of the long one is still to come
    (fourth, pause) = bench.done("p", second)[-2:]
    assert isinstance(fourth, RunStep)
    transfer_id = bench.transfers["long"]
    assert pause == StopCopy(
        instance_id=P, request_id=RequestId("long"), epoch=Epoch(0), transfer_id=transfer_id, how=Stop.PAUSE
    )
    assert bench.paused(D, "long") == []  # from the wrong side
    assert bench.paused(P, "a") == []  # nobody asked it
    commands = bench.paused(P, "long")
    assert [grant.request_id for grant in of(SendCopy, commands)] == ["a"]
    assert offered("b") == []
    assert of(SendCopy, bench.paused(P, "long")) == []  # said already

    (last,) = of(RunStep, bench.done("p", third.plan))
    assert [chunk.request_id for chunk in last.plan.chunks] == ["long"]
    commands = bench.landed(D, "a")
    assert [grant.request_id for grant in of(SendCopy, commands)] == ["long"]  # its first offer was before b's


@pytest.mark.parametrize("answered", [True, False])
def test_a_request_that_ends_while_its_backend_comes_back_frees_it_once(answered: bool) -> None:
    bench = CoreBench(prefill(), decode(num_transfer_backends=1), chunk_tokens=4)
    bench.feed(BundleChangeRequested("sjf"))
    plans = [step.plan for step in of(RunStep, bench.arrive("long", prompt=12))]
    bench.offered(P, "long")
    for request_id in ("a", "b"):
        bench.arrive(request_id, prompt=4)
    for plan in plans:
        bench.done("p", plan)
    assert len(stopped(Stop.PAUSE, bench.offered(P, "a"))) == 1
    bench.feed(RequestCancelled(GATEWAY, RequestId("long"), Epoch(0)))
    if answered:
        assert of(SendCopy, bench.paused(P, "long")) == []
    commands = bench.released("d", "long")
    assert [grant.request_id for grant in of(SendCopy, commands)] == ["a"]


def test_a_short_outage_heals_and_a_long_one_is_told_as_such() -> None:
    bench = CoreBench(prefill(), config=limited(max_queue_s=10.0))
    bench.arrive("a")
    assert of(AdmitPrefill, bench.feed(InstanceJoined(decode(), ()), at_s=9.0))
    bench = CoreBench(prefill(), config=limited(max_queue_s=10.0))
    bench.arrive("a")
    (reject,) = of(Reject, bench.feed(Tick(), at_s=10.0))
    assert (reject.reason, reject.message) == (
        RejectReason.NO_INSTANCE,
        "The mesh cannot serve requests now: no decode instance is running.",
    )


def test_an_early_tick_is_followed_by_another() -> None:
    bench = CoreBench(config=limited(max_queue_s=10.0))
    bench.arrive("a")
    assert [wake.at_s for wake in of(WakeAt, bench.feed(Tick(), at_s=9.999))] == [10.0]


def test_a_request_that_fits_no_instance_any_more_steps_aside() -> None:
    bench = CoreBench(prefill(), decode("big"), decode("small", num_blocks=4, max_num_seqs=1))
    bench.feed(DrainRequested(InstanceId("big")))
    bench.arrive("long", prompt=40)
    bench.feed(InstanceLost(InstanceId("big")))
    assert [admit.request_id for admit in of(AdmitPrefill, bench.arrive("short"))] == ["short"]
    commands = bench.feed(InstanceJoined(decode("big"), ()))
    assert [admit.request_id for admit in of(AdmitPrefill, commands)] == ["long"]


# --- instances and gateways come and go ---


def test_a_lost_prefill_restarts_what_it_computed_and_frees_the_reservation() -> None:
    bench = CoreBench(prefill(), decode())
    bench.arrive("a")
    commands = bench.feed(InstanceLost(P))
    assert [restart.request_id for restart in of(Restart, commands)] == ["a"]
    assert [free.instance_id for free in of(FreeKv, commands)] == [D]


def test_a_lost_prefill_does_not_matter_to_what_has_landed() -> None:
    bench = CoreBench(prefill(), decode())
    (step,) = of(RunStep, bench.arrive("a"))
    bench.done("p", step.plan)
    bench.landed(D, "a")
    assert not of(Restart, bench.feed(InstanceLost(P)))
    assert bench.core.num_running == 1


def test_a_lost_decode_restarts_all_of_its_requests() -> None:
    bench = CoreBench(prefill(), decode("d0"), decode("d1"))
    (step,) = of(RunStep, bench.arrive("a"))
    bench.done("p", step.plan)
    bench.landed("d0", "a")
    commands = bench.feed(InstanceLost(InstanceId("d0")))
    assert [restart.request_id for restart in of(Restart, commands)] == ["a"]
    assert [free.instance_id for free in of(FreeKv, commands)] == [P]
    (place,) = of(ExpectCopy, bench.arrive("a", epoch=1))
    assert place.instance_id == "d1"


def test_an_unreachable_instance_gets_no_work_until_it_is_back() -> None:
    bench = CoreBench(prefill(), decode())
    bench.feed(InstanceUnreachable(P))
    assert not of(RunStep, bench.arrive("a"))
    assert of(RunStep, bench.feed(InstanceJoined(prefill(), ())))


def test_a_draining_instance_finishes_what_it_has_and_takes_nothing_new() -> None:
    bench = CoreBench(prefill(), decode(), chunk_tokens=4)
    plans = [step.plan for step in of(RunStep, bench.arrive("a", prompt=12))]
    bench.feed(DrainRequested(P))
    assert bench.core.unready_reason is not None
    (step,) = of(RunStep, bench.done("p", plans[0]))
    assert step.plan.chunks[0].request_id == "a"
    bench.done("p", plans[1])
    assert not of(RunStep, bench.arrive("b"))
    assert of(RunStep, bench.feed(DrainRequested(P, enabled=False)))


def test_what_an_instance_says_of_its_stop_ends_with_its_next_registration() -> None:
    """Found by simulation: one with a lasting id was killed while it stopped, and was never given work again."""
    bench = CoreBench(prefill(), decode())
    bench.feed(DrainRequested(P))
    assert not of(RunStep, bench.arrive("a"))
    assert not of(RunStep, bench.feed(InstanceJoined(prefill(), (), stopping=True)))
    assert of(RunStep, bench.feed(InstanceJoined(prefill(), ())))


def test_plan_numbers_go_on_after_an_instance_has_joined_again() -> None:
    bench = CoreBench(prefill(), decode())
    (first,) = of(RunStep, bench.arrive("a"))
    assert of(Restart, bench.feed(InstanceJoined(prefill(), ())))
    (second,) = of(RunStep, bench.arrive("b"))
    assert second.plan.plan_id > first.plan.plan_id
    assert not bench.done("p", first.plan)


def test_a_role_change_is_passed_on_and_followed() -> None:
    bench = CoreBench(prefill())
    bench.arrive("a")
    commands = bench.feed(a_role(P, Role.MIXED))
    assert [change.role for change in of(SetRole, commands)] == [Role.MIXED]
    assert of(RunStep, commands)[0].plan.with_decodes


def test_a_lost_gateway_takes_its_requests_along() -> None:
    bench = CoreBench(prefill(), decode(max_num_seqs=1))
    bench.arrive("a")
    bench.arrive("b")
    commands = bench.feed(GatewayLost(GATEWAY))
    assert [forget.outcome for forget in of(ForgetRequest, commands)] == [Outcome.GATEWAY_LOST] * 2
    assert {free.instance_id for free in of(FreeKv, commands)} == {P, D}
    assert bench.core.num_running == bench.core.num_waiting == 0


def test_a_bundle_is_changed_while_requests_wait() -> None:
    bench = CoreBench(prefill(), decode(max_num_seqs=1))
    for name in ("a", "b", "c"):
        bench.arrive(name)
    assert bench.feed(BundleChangeRequested("fcfs")) == []
    assert bench.core.bundle == "fcfs"
    assert bench.core.num_waiting == 2

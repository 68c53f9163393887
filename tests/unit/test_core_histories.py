"""One reducer tells of every request: its epochs, its milestones, and what it forgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdmesh.core.commands import AdmitPrefill, Command, ExpectCopy, ForgetRequest, FreeKv, Outcome, Reject
from pdmesh.core.events import Event, KvReleased, RequestArrived, RequestCancelled, RequestFinished, StepDone, Tick
from pdmesh.core.requests.request_histories import Chunk, Forgotten, Milestone, RequestHistories
from pdmesh.model import (
    Epoch,
    FinishReason,
    GatewayId,
    InstanceId,
    RejectReason,
    RequestId,
    Then,
    TransferId,
)
from pdmesh.plans import ChunkDone, TransferPlan
from pdmesh_testing.core import GATEWAY, a_request
from pdmesh_testing.worker import a_shard

OTHER = GatewayId("other")
LEADER, MEMBER = InstanceId("a"), InstanceId("b")
R = RequestId("r")


def kinds(milestones: Sequence[Milestone]) -> list[type]:
    return [type(milestone.what) for milestone in milestones]


def arrived(epoch: int = 0, gateway_id: GatewayId = GATEWAY) -> RequestArrived:
    return RequestArrived(replace(a_request("r", epoch=epoch), gateway_id=gateway_id))


def forget(outcome: Outcome, epoch: int = 0, request_id: RequestId = R) -> ForgetRequest:
    return ForgetRequest(gateway_id=GATEWAY, request_id=request_id, epoch=Epoch(epoch), outcome=outcome)


def chunk(num_tokens: int, *, is_last: bool) -> StepDone:
    done = ChunkDone(request_id=R, epoch=Epoch(0), num_tokens=num_tokens, is_last=is_last)
    return StepDone(LEADER, 7, 0.1, (done,), 0)


def test_a_life_from_arrival_to_end() -> None:
    lives = RequestHistories()
    shards = (a_shard(LEADER, 2), a_shard(MEMBER, 2))
    admits: list[Command] = [
        AdmitPrefill(instance_id=shard.instance_id, request_id=R, epoch=Epoch(0), shards=shards, transfer=None)
        for shard in shards
    ]
    ((life, attempt, what),) = lives.observe(arrived(), [], 1.0)
    assert isinstance(what, RequestArrived)
    assert (attempt.arrived_s, attempt.placed_s, attempt.outcome) == (1.0, None, None)
    assert kinds(lives.observe(Tick(), admits, 2.0)) == [AdmitPrefill, AdmitPrefill]
    assert (life.prefill_id, life.decode_id, life.placed_s) == (LEADER, LEADER, 2.0)  # of a group, its leader
    assert lives.observe(chunk(0, is_last=False), [], 2.5) == []  # the worker dropped it
    first = lives.observe(chunk(5, is_last=False), [], 3.0)
    last = lives.observe(chunk(3, is_last=True), [], 4.0)
    assert [milestone.what for milestone in (*first, *last)] == [
        Chunk(LEADER, 7, 0, 5, is_last=False, step_s=0.1),
        Chunk(LEADER, 7, 5, 3, is_last=True, step_s=0.1),
    ]
    finished = RequestFinished(LEADER, R, Epoch(0), FinishReason.STOP, 4)
    ended = lives.observe(finished, [forget(Outcome.FINISHED)], 6.0)
    assert kinds(ended) == [RequestFinished, ForgetRequest]
    assert (life.first_token_s, life.last_token_s, life.num_output_tokens) == (4.0, 6.0, 4)
    assert attempt.outcome is Outcome.FINISHED
    assert kinds(lives.observe(KvReleased(LEADER, R, Epoch(0)), [], 7.0)) == [KvReleased]
    assert lives.observe(RequestCancelled(GATEWAY, R, Epoch(0)), [], 8.0) == []  # too late


def test_a_superseded_epoch_ends_by_itself_and_the_life_goes_on() -> None:
    lives = RequestHistories()
    ((life, first, _),) = lives.observe(arrived(), [], 1.0)
    lives.observe(chunk(8, is_last=True), [], 2.0)
    free = FreeKv(instance_id=LEADER, request_id=R, epoch=Epoch(0))
    found = lives.observe(arrived(epoch=1), [free, forget(Outcome.SUPERSEDED)], 3.0)
    assert kinds(found) == [RequestArrived, FreeKv, ForgetRequest]
    assert [milestone.is_of_newest for milestone in found] == [True, False, False]
    assert all(milestone.life is life for milestone in found)
    assert (first.outcome, life.attempt.outcome) == (Outcome.SUPERSEDED, None)
    assert (life.first_arrival_s, life.attempt.arrived_s, life.first_token_s) == (1.0, 3.0, 2.0)
    assert lives.observe(KvReleased(LEADER, R, Epoch(0)), [], 4.0) == []  # of an epoch that is over
    assert lives.observe(arrived(epoch=0), [], 5.0) == []  # sent again


def test_another_gateway_cannot_touch_a_life() -> None:
    lives = RequestHistories()
    ((life, attempt, _),) = lives.observe(arrived(), [], 1.0)
    for epoch in (0, 1):
        refusal = Reject(
            gateway_id=OTHER,
            request_id=R,
            epoch=Epoch(epoch),
            reason=RejectReason.OVERLOADED,
            message="Another gateway's request has this id.",
            retry_after_s=None,
        )
        assert lives.observe(arrived(epoch, OTHER), [refusal], 2.0) == []
    assert lives.observe(RequestCancelled(OTHER, R, Epoch(0)), [], 3.0) == []
    assert life.attempt is attempt
    assert kinds(lives.observe(RequestCancelled(GATEWAY, R, Epoch(0)), [], 4.0)) == [RequestCancelled]


def test_a_request_that_was_refused_unopened_has_no_life() -> None:
    lives = RequestHistories(max_ended=0)
    refusal = Reject(
        gateway_id=GATEWAY,
        request_id=R,
        epoch=Epoch(0),
        reason=RejectReason.OVERLOADED,
        message="",
        retry_after_s=None,
    )
    assert lives.observe(arrived(), [refusal], 1.0) == []
    found = lives.observe(arrived(), [refusal, forget(Outcome.REJECTED)], 2.0)  # taken, then refused
    assert kinds(found) == [RequestArrived, Reject, ForgetRequest, Forgotten]


def test_the_eldest_that_ended_is_forgotten_first_and_a_running_one_never() -> None:
    lives = RequestHistories(max_ended=2)
    told: list[tuple[Event, Sequence[Command]]] = [
        *((RequestArrived(a_request(name)), ()) for name in "abcd"),
        *((Tick(), [forget(Outcome.FINISHED, request_id=RequestId(name))]) for name in "bca"),
    ]
    found = [milestone for event, commands in told for milestone in lives.observe(event, commands, 1.0)]
    forgotten = [milestone.life.request.request_id for milestone in found if isinstance(milestone.what, Forgotten)]
    assert forgotten == ["b"]


def test_a_context_that_is_spread_decodes_at_its_home_whoever_holds_ranges_of_it() -> None:
    def placed(then: Then, *destinations: InstanceId, computes: bool = False) -> list[Command]:
        plan = TransferPlan(
            transfer_id=TransferId(1),
            then=then,
            computes=computes,
            sources=(a_shard(LEADER, 2),),
            destinations=tuple(a_shard(each, 2) for each in destinations),
            capability=1,
        )
        return [ExpectCopy(instance_id=each, request_id=R, epoch=Epoch(0), transfer=plan) for each in destinations]

    lives = RequestHistories()
    ((life, attempt, _),) = lives.observe(arrived(), [], 1.0)
    for commands in (
        placed(Then.DECODE, MEMBER, InstanceId("c"), InstanceId("d")),
        placed(Then.HOLD, InstanceId("e")),
        placed(Then.HOLD, InstanceId("f"), computes=True),
    ):
        lives.observe(Tick(), commands, 2.0)
        assert (life.decode_id, attempt.num_receivers) == (MEMBER, 1)
    lives.observe(Tick(), placed(Then.DECODE, InstanceId("c"), InstanceId("d")), 3.0)
    assert (life.decode_id, attempt.num_receivers) == (InstanceId("c"), 2)

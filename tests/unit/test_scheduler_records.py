"""Records of requests: what `pdmesh requests show` is told, by the events and commands of a request's life."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from pdmesh.cli.request_view import computed_again, computed_by, summary
from pdmesh.core.commands import AdmitPrefill, Command, ForgetRequest, Outcome, Restart, RunStep, SetPlaces
from pdmesh.core.events import (
    Event,
    GroupPrefix,
    KvExpected,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    StepDone,
    Tick,
    TransferSent,
)
from pdmesh.core.requests.request_histories import RequestHistories
from pdmesh.metrics import NO_SLO, Slo
from pdmesh.model import Epoch, FinishReason, GatewayId, InstanceId, Request, RequestId, SamplingParams, TransferId
from pdmesh.plans import ChunkDone, ChunkPlan, PrefillGroup, StepPlan
from pdmesh.wire.messages import Generation, RequestRecord, pack_token_ids
from pdmesh_scheduler.observing import Handled
from pdmesh_scheduler.request_records import RequestRecords
from pdmesh_testing.worker import a_shard

G = GatewayId("g")
I = InstanceId("i")  # noqa: E741
NUM_PROMPT_TOKENS = 8


@pytest.mark.parametrize(("carrier", "end"), [("ucx, tcp", ", over ucx, tcp"), ("", "")])
def test_a_transfer_ends_with_what_carried_it(carrier: str, end: str) -> None:
    line = TransferSent(I, RequestId("r"), Epoch(0), TransferId(1), 1000, 0.5, 0.25, carrier=carrier).record_line
    assert line is not None
    assert line.detail == f"1000 bytes in 500.0 ms, 250.0 ms after the prompt was computed{end}"


class ResidentReports:
    """Records that are told of one event at a time."""

    def __init__(self, max_ended: int = 10) -> None:
        self.records = RequestRecords(wall_time=lambda at_s: 1000.0 + at_s)
        self._lives = RequestHistories(max_ended)

    def tell(
        self,
        event: Event,
        commands: Sequence[Command],
        at_s: float,
        *,
        generation: Generation | None = None,
        bundle: str = "fcfs",
    ) -> None:
        milestones = self._lives.observe(event, commands, at_s)
        self.records.observe(
            Handled(
                event=event,
                now_s=at_s,
                commands=commands,
                milestones=milestones,
                generation=generation,
                bundle=bundle,
            )
        )

    def arrived(
        self,
        request_id: str,
        at_s: float,
        *,
        epoch: int = 0,
        num_delivered: int = 0,
        slo: Slo = NO_SLO,
        label: str = "",
    ) -> None:
        num_tokens = NUM_PROMPT_TOKENS + num_delivered
        ids: dict[str, Any] = {"request_id": RequestId(request_id), "epoch": Epoch(epoch), "gateway_id": G}
        generation = Generation(
            **ids,
            token_address="",
            token_ids=pack_token_ids(list(range(num_tokens))),
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            params=SamplingParams(max_tokens=20),
            label=label,
        )
        request = Request(
            **ids,
            num_prompt_tokens=num_tokens,
            max_tokens=20 - num_delivered,
            arrival_s=at_s,
            slo_ttft_s=slo.ttft_s,
            slo_tpot_s=slo.tpot_s,
        )
        admit = AdmitPrefill(
            instance_id=I,
            request_id=request.request_id,
            epoch=request.epoch,
            shards=(a_shard(I, 2),),
            transfer=None,
        )
        self.tell(RequestArrived(request), [admit], at_s, generation=generation)

    def computed(self, request_id: str, at_s: float, *, num_tokens: int = NUM_PROMPT_TOKENS, epoch: int = 0) -> None:
        chunk = ChunkDone(request_id=RequestId(request_id), epoch=Epoch(epoch), num_tokens=num_tokens, is_last=True)
        self.tell(StepDone(I, 0, 0.001, (chunk,), 0), [], at_s)

    def record(self) -> RequestRecord:
        record = self.records.get("r")
        assert record is not None
        return record

    def ended(self, request_id: str, at_s: float, outcome: Outcome, *, epoch: int = 0) -> None:
        key: dict[str, Any] = {"request_id": RequestId(request_id), "epoch": Epoch(epoch)}
        commands: list[Command] = [ForgetRequest(**key, gateway_id=G, outcome=outcome)]
        if outcome is Outcome.FINISHED:
            event: Any = RequestFinished(I, RequestId(request_id), Epoch(epoch), FinishReason.LENGTH, 20)
        elif outcome is Outcome.CANCELLED:
            event = RequestCancelled(G, RequestId(request_id), Epoch(epoch))
        else:
            event, commands = Tick(), [Restart(**key, gateway_id=G, reason="i is lost"), *commands]
        self.tell(event, commands, at_s)


def whats(told: ResidentReports) -> list[str]:
    return [entry.what for entry in told.record().entries]


def test_a_whole_life() -> None:
    told = ResidentReports()
    told.arrived("r", 5.0)
    told.computed("r", 5.25)
    told.ended("r", 6.2, Outcome.FINISHED)
    record = told.record()
    assert whats(told) == ["queued", "placed", "chunk", "finished", "ended"]
    assert (record.first_token_s, record.num_output_tokens, record.arrived_at) == (0.25, 20, 1005.0)
    assert record.entries[2].detail == "tokens 0 to 7, step 0 of 1.0 ms, first token"
    expected = "finished, 20 output tokens, first token after 250.0 ms, last after 1200.0 ms, 50.0 ms a token"
    assert summary(record) == expected


def test_a_living_one_says_how_far_it_is() -> None:
    told = ResidentReports()
    told.arrived("r", 0.0)
    assert state_of(told) == "prefilling"  # placed as it came
    told.computed("r", 0.5)
    assert state_of(told) == "decoding"
    told.ended("r", 1.0, Outcome.RESTARTED)
    told.arrived("r", 1.5, epoch=1, num_delivered=3)
    assert state_of(told) == "prefilling"
    told.ended("r", 2.0, Outcome.FINISHED, epoch=1)
    assert state_of(told) == "finished"


def state_of(told: ResidentReports) -> str:
    record = told.record()
    assert record.is_under_way is (record.state != "finished")
    return record.state


def test_a_cancelled_one_says_so_and_claims_no_last_token() -> None:
    told = ResidentReports()
    told.arrived("r", 0.0)
    told.ended("r", 1.0, Outcome.CANCELLED)
    record = told.record()
    assert whats(told) == ["queued", "placed", "cancelled", "ended"]
    assert (record.first_token_s, record.last_token_s, record.num_output_tokens) == (None, None, None)
    assert summary(record) == "cancelled"


def test_a_resumed_one_keeps_its_clients_prompt_and_its_first_token() -> None:
    told = ResidentReports()
    told.arrived("r", 0.0)
    told.computed("r", 0.5)
    told.ended("r", 1.0, Outcome.RESTARTED)
    told.arrived("r", 1.5, epoch=1, num_delivered=3)
    told.computed("r", 2.0, num_tokens=NUM_PROMPT_TOKENS + 3, epoch=1)
    told.ended("r", 3.0, Outcome.FINISHED, epoch=1)
    record = told.record()
    assert whats(told) == [
        "queued",
        "placed",
        "chunk",
        "restarted",
        "queued again, epoch 1",
        "placed",
        "chunk",
        "finished",
        "ended",
    ]
    assert record.num_prompt_tokens == NUM_PROMPT_TOKENS
    assert record.entries[4].detail == "8 prompt tokens and 3 delivered before, up to 17 to generate"
    assert record.entries[6].detail.endswith(", next token")
    assert (record.first_token_s, record.last_token_s) == (0.5, 3.0)


def test_choices_are_found_by_the_id_of_their_request() -> None:
    told = ResidentReports()
    for request_id in ("r-10", "r-2", "r-0", "r-x", "r-2-1", "s-1", "r-02"):
        told.arrived(request_id, 0.0)
    assert told.records.get("r") is None
    assert [record.request_id for record in told.records.choices("r")] == ["r-0", "r-2", "r-10"]
    assert told.records.choices("t") == ()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("4f2a", ["4f2a"]),
        ("cmpl-4f2a", ["4f2a"]),
        ("chatcmpl-77b0-1", ["77b0-1"]),
        ("chatcmpl-77b0", ["77b0-0", "77b0-1"]),
        ("mine", ["4f2a", "77b0-0", "77b0-1"]),
        ("mi", ["4f2a", "77b0-0", "77b0-1", "9c00"]),
        ("cmpl-mixed", ["b000"]),  # a label may look like a response's id
        ("9", ["9c00"]),
        ("", []),
        ("nothing", []),
    ],
)
def test_a_request_is_found_by_whatever_somebody_has_of_it(name: str, found: list[str]) -> None:
    told = ResidentReports()
    told.arrived("4f2a", 0.0, label="mine")
    told.ended("4f2a", 1.0, Outcome.FINISHED)
    labels = {"77b0-0": "mine", "77b0-1": "mine", "9c00": "mixed", "a000": "", "b000": "cmpl-mixed"}
    for request_id, label in labels.items():
        told.arrived(request_id, 2.0, label=label)
    assert [record.request_id for record in told.records.find(name)] == found
    assert {record.label for record in told.records.find("4f2a")} == {"mine"}


def test_the_newest_are_listed_first_and_short() -> None:
    told = ResidentReports()
    for n in range(4):
        told.arrived(f"r{n}", float(n))
    listed = told.records.newest(3)
    assert [record.request_id for record in listed] == ["r3", "r2", "r1"]
    assert not any(record.entries for record in listed)
    assert told.records.newest(0) == ()


def test_only_so_many_ended_ones_are_remembered() -> None:
    told = ResidentReports(max_ended=2)
    for index in range(4):
        told.arrived(f"r-{index}", 0.0)
        told.ended(f"r-{index}", 1.0, Outcome.FINISHED)
    assert [record.request_id for record in told.records.choices("r")] == ["r-2", "r-3"]


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (NO_SLO, None),
        (Slo(ttft_s=0.5), True),
        (Slo(ttft_s=0.4), False),
        (Slo(tpot_s=0.11), True),  # 19 tokens in 2 s
        (Slo(tpot_s=0.1), False),
        (Slo(ttft_s=0.5, tpot_s=0.1), False),
    ],
)
def test_a_record_says_whether_the_targets_were_met(slo: Slo, met: bool | None) -> None:
    told = ResidentReports()
    told.arrived("r", 10.0, slo=slo)
    told.computed("r", 10.5)
    record = told.record()
    assert record.slo_met is None  # not yet known
    told.ended("r", 12.5, Outcome.FINISHED)
    record = told.record()
    assert (record.slo_ttft_s, record.slo_tpot_s, record.slo_met) == (slo.ttft_s, slo.tpot_s, met)


def test_a_record_names_the_bundle_that_placed_the_request() -> None:
    told = ResidentReports()
    ids: dict[str, Any] = {"request_id": RequestId("r"), "epoch": Epoch(0)}
    request = Request(**ids, gateway_id=G, num_prompt_tokens=8, max_tokens=4, arrival_s=0.0)
    admit = AdmitPrefill(**ids, instance_id=I, shards=(a_shard(I, 2),), transfer=None)
    told.tell(RequestArrived(request), [], 0.0)
    told.tell(Tick(), [admit], 1.0, bundle="pdmesh")
    told.tell(StepDone(I, 0, 0.1, (ChunkDone(**ids, num_tokens=8, is_last=True),), 0), [], 2.0, bundle="edf")
    record = told.record()
    assert record.bundle == "pdmesh"


def test_a_chunk_says_in_which_batching_mode_it_was_computed() -> None:
    told = ResidentReports()
    ids: dict[str, Any] = {"request_id": RequestId("r"), "epoch": Epoch(0)}
    request = Request(**ids, gateway_id=G, num_prompt_tokens=10, max_tokens=4, arrival_s=0.0)
    admit = AdmitPrefill(**ids, instance_id=I, shards=(a_shard(I, 2),), transfer=None)
    chunk = ChunkPlan(**ids, start=8, num_tokens=2, is_last=True)
    waits = StepPlan(plan_id=2, chunks=(chunk,), with_decodes=False, holds_decodes=True)
    told.tell(RequestArrived(request), [admit, RunStep(instance_id=I, plan=waits)], 0.0)
    told.tell(StepDone(I, 0, 0.1, (ChunkDone(**ids, num_tokens=5, is_last=False),), 31), [], 1.0)
    told.tell(StepDone(I, 1, 0.1, (ChunkDone(**ids, num_tokens=3, is_last=False),), 0), [], 2.0)
    told.tell(StepDone(I, 2, 0.1, (ChunkDone(**ids, num_tokens=2, is_last=True),), 0), [], 3.0)
    record = told.record()
    mixed, alone, exclusive = (entry for entry in record.entries if entry.what == "chunk")
    assert mixed.detail == "tokens 0 to 4, step 0 of 100.0 ms beside 31 decodes (mixed batching)"
    assert mixed.figures["num_decodes"] == 31
    assert alone.detail == "tokens 5 to 7, step 1 of 100.0 ms"
    assert exclusive.detail == "tokens 8 to 9, step 2 of 100.0 ms (exclusive batching), first token"


@pytest.mark.parametrize(("prefix", "num_again"), [(6, 0), (4, 2)])
def test_members_of_a_group_with_their_chunks_and_waits(prefix: int, num_again: int) -> None:
    """The leader computes 4 tokens, its helper the next 2 and waits for it; then that is lost, and has 2 in flight.

    What it had in flight is computed for the first time by the leader; the chunk before only if its KV did not come.
    """
    told, other, key = ResidentReports(), InstanceId("j"), (RequestId("r"), Epoch(0))
    group = PrefillGroup(member_ids=(I, other), capability=7)
    told.arrived("r", 0.0)

    def plan(instance_id: InstanceId, plan_id: int, start: int, num_tokens: int) -> RunStep:
        chunk = ChunkPlan(
            request_id=key[0], epoch=key[1], start=start, num_tokens=num_tokens, is_last=start + num_tokens == 8
        )
        return RunStep(instance_id=instance_id, plan=StepPlan(plan_id=plan_id, chunks=(chunk,), with_decodes=False))

    def done(step: RunStep, *, waited_s: float = 0.0) -> StepDone:
        (chunk,) = step.plan.chunks
        result = ChunkDone(request_id=key[0], epoch=key[1], num_tokens=chunk.num_tokens, is_last=chunk.is_last)
        return StepDone(step.instance_id, step.plan.plan_id, 0.1, (result,), 0, waited_s=waited_s)

    steps = [plan(I, 0, 0, 4), plan(other, 0, 4, 2), plan(other, 1, 6, 2), plan(I, 1, prefix, 8 - prefix)]
    told.tell(KvExpected(other, *key), [steps[0], steps[1], steps[2]], 0.1)
    told.tell(done(steps[0]), [], 0.2)
    told.tell(done(steps[1], waited_s=0.025), [], 0.3)
    lost = SetPlaces(
        instance_id=I, request_id=key[0], epoch=key[1], places=msgspec.structs.replace(group, lost_ids=(other,))
    )
    told.tell(Tick(), [lost], 0.4)
    told.tell(GroupPrefix(I, *key, prefix, 1), [steps[3]], 0.5)
    told.tell(done(steps[3]), [], 0.6)
    record = told.record()
    lines = [(entry.instance_id, entry.what, entry.detail) for entry in record.entries[2:]]
    assert lines == [
        (other, "helps", ""),
        (I, "chunk", "tokens 0 to 3, step 0 of 100.0 ms"),
        (other, "chunk", "tokens 4 to 5, step 0 of 100.0 ms and 25.0 ms of waiting for KV"),
        (I, "continues without", "j, which helped"),
        (I, "has", f"the first {prefix} tokens"),
        (I, "chunk", f"tokens {prefix} to 7, step 1 of 100.0 ms, first token"),
    ]
    assert computed_again(record) == num_again
    assert computed_by(record) == (
        f"i (2 chunks, {6 + num_again} tokens, 200.0 ms, 0.0 ms of waiting for KV), "
        "j (1 chunk, 2 tokens, 100.0 ms, 25.0 ms of waiting for KV)"
    )
    assert record.state == "decoding"

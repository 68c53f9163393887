"""Weights identities in the core: nothing passes between two, and new requests go to the newest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, ForgetRequest, Reject, Restart, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import DrainRequested, InstanceJoined, InstanceLost, RequestArrived, Tick
from pdmesh.core.instances.revisions import several_revisions
from pdmesh.core.operator_events import OperationRequested
from pdmesh.model import InstanceId, InstanceProfile, PrefixHash, RejectReason, RequestId
from pdmesh.operations import OperationId, OperationKind
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import CoreBench, a_request, named_profile, of

OLD, NEW = "3f2a" + "0" * 28, "91bc" + "0" * 28
BEGAN_AT = {OLD: 100.0, NEW: 200.0}
MAX_QUEUE_S = 120.0


def profiles(**weights_of: str) -> list[InstanceProfile]:
    return [named_profile(name, weights=weights, started_at=BEGAN_AT[weights]) for name, weights in weights_of.items()]


def joined(**weights_of: str) -> InstanceJoined:
    (profile,) = profiles(**weights_of)
    return InstanceJoined(profile, ())


def bench_with(**weights_of: str) -> CoreBench:
    return CoreBench(*profiles(**weights_of))


def resumes(bench: CoreBench, request_id: str, weights: str, epoch: int = 1) -> list[AdmitPrefill]:
    commands = bench.feed(RequestArrived(a_request(request_id, epoch=epoch, weights=weights)))
    return of(AdmitPrefill, commands)


def restarts(bench: CoreBench, instance_id: str, timeout_s: float = 60.0) -> None:
    """An operator restarts an instance, which first is emptied."""
    requested = OperationRequested(
        operation_id=OperationId(f"restart {instance_id}"),
        kind=OperationKind.RESTART,
        instance_id=InstanceId(instance_id),
        timeout_s=timeout_s,
        force=True,
    )
    bench.feed(requested)


# --- new requests -----------------------------------------------------------------------------------------------------


def test_new_requests_go_to_the_newest_weights_that_can_serve_them() -> None:
    bench = bench_with(p0=OLD, d0=OLD, p1=NEW)
    (admit,) = of(AdmitPrefill, bench.arrive("a"))
    assert (admit.instance_id, admit.decode_instance_id) == ("p0", "d0")
    bench.feed(joined(d1=NEW))
    (admit,) = of(AdmitPrefill, bench.arrive("b"))
    assert (admit.instance_id, admit.decode_instance_id) == ("p1", "d1")
    bench.feed(DrainRequested(InstanceId("d1")))
    (admit,) = of(AdmitPrefill, bench.arrive("c"))
    assert (admit.instance_id, admit.decode_instance_id) == ("p0", "d0")


def test_an_instance_that_is_started_again_does_not_make_its_weights_new() -> None:
    bench = bench_with(p0=OLD, d0=OLD, p1=NEW, d1=NEW)
    bench.feed(InstanceLost(InstanceId("d0")))
    bench.feed(InstanceJoined(named_profile("d0", weights=OLD, started_at=300.0), ()))
    (admit,) = of(AdmitPrefill, bench.arrive("a"))
    assert admit.instance_id == "p1"


def test_a_mesh_without_a_pair_of_one_identity_serves_nothing() -> None:
    bench = bench_with(p0=NEW, d0=OLD)
    assert bench.core.unready_reason == "no prefill and decode instance have the same model, weights and KV layout"
    assert not of(AdmitPrefill, bench.arrive("a"))


def test_the_number_of_requests_that_each_identity_takes_is_told() -> None:
    bench = bench_with(p0=OLD, d0=OLD)
    bench.arrive("a")
    for profile in profiles(p1=NEW, d1=NEW):
        bench.feed(InstanceJoined(profile, ()))
    for name in "bc":
        bench.arrive(name)
    old, new = bench.core.revisions
    assert (old.weights, old.instance_ids, old.share, old.takes_new) == (OLD, ("p0", "d0"), 1 / 3, False)
    assert (new.weights, new.instance_ids, new.share, new.takes_new) == (NEW, ("p1", "d1"), 2 / 3, True)
    sentence = several_revisions("tiny", {each.weights: (len(each.instance_ids), each.share) for each in (old, new)})
    assert sentence is not None
    assert sentence.startswith(
        "model 'tiny' is served by 2 revisions of its weights: 3f2a00 (2 instances, 33% of new requests), "
        "91bc00 (2 instances, 67% of new requests)."
    )
    assert several_revisions("tiny", {OLD: (2, 1.0)}) is None


# --- requests with tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "where"), [(OLD, ("p0", "d0")), (NEW, ("p1", "d1"))])
def test_a_request_goes_on_with_the_weights_that_began_it(weights: str, where: tuple[str, str]) -> None:
    bench = bench_with(p0=OLD, d0=OLD, p1=NEW, d1=NEW)
    (admit,) = resumes(bench, "a", weights)
    assert (admit.instance_id, admit.decode_instance_id) == where


def test_a_request_without_tokens_begins_afresh_with_new_weights() -> None:
    bench = bench_with(p0=OLD, d0=OLD)
    bench.arrive("a")
    for profile in profiles(p1=NEW, d1=NEW):
        bench.feed(InstanceJoined(profile, ()))
    assert [each.request_id for each in of(Restart, bench.feed(InstanceLost(InstanceId("p0"))))] == ["a"]
    (admit,) = resumes(bench, "a", "")
    assert admit.instance_id == "p1"


def test_kv_without_a_receiver_waits_for_one_of_its_weights() -> None:
    bench = bench_with(p0=OLD, d0=OLD, d1=NEW)
    bench.arrive("a")
    bench.offered("p0", "a")
    assert not of(ExpectCopy, bench.feed(InstanceLost(InstanceId("d0"))))
    (place,) = of(ExpectCopy, bench.feed(joined(d2=OLD)))
    assert place.instance_id == "d2"


def test_a_decode_moves_to_its_weights_alone() -> None:
    bench = bench_with(p0=OLD, d0=OLD, d1=NEW)
    bench.decoding("a")
    assert not of(ExpectCopy, bench.feed(DrainRequested(InstanceId("d0"))))
    (place,) = of(ExpectCopy, bench.feed(joined(d2=OLD)))
    assert place.instance_id == "d2"


def test_an_operator_is_told_why_a_request_cannot_move() -> None:
    bench = bench_with(p0=OLD, d0=OLD, d1=NEW)
    bench.decoding("a")
    requested = OperationRequested(
        operation_id=OperationId("move"),
        kind=OperationKind.MOVE,
        instance_id=InstanceId("d1"),
        timeout_s=1.0,
        request_id=RequestId("a"),
    )
    bench.feed(requested)
    assert bench.operation("move").detail == "request a has an answer of other weights (3f2a00) than d1 has (91bc00)"


# --- the last instances of old weights --------------------------------------------------------------------------------


def being_emptied(timeout_s: float) -> CoreBench:
    """Return a mesh whose only instance of old weights decodes a request, and is to restart."""
    bench = bench_with(p0=OLD, d0=OLD)
    bench.decoding("z")
    for profile in profiles(p1=NEW, d1=NEW):
        bench.feed(InstanceJoined(profile, ()))
    bench.feed(InstanceLost(InstanceId("p0")))
    restarts(bench, "d0", timeout_s)
    return bench


def test_a_request_is_finished_where_its_weights_are_left() -> None:
    """On an instance that only decodes and is being emptied: no other has what began the request."""
    bench = being_emptied(timeout_s=60.0)
    (admit,) = resumes(bench, "a", OLD)
    assert (admit.instance_id, admit.moves_on) == ("d0", False)


def test_nothing_goes_on_where_an_operators_time_is_up() -> None:
    bench = being_emptied(timeout_s=60.0)
    assert resumes(bench, "a", OLD)
    commands = bench.feed(Tick(), at_s=61.0)
    assert [each.request_id for each in of(Restart, commands)] == ["z", "a"]
    assert not resumes(bench, "a", OLD, epoch=2)


def test_a_request_whose_weights_have_no_room_lets_others_pass() -> None:
    bench = CoreBench(
        named_profile("p0", weights=OLD, started_at=1.0),
        named_profile("d0", weights=OLD, started_at=1.0, max_num_seqs=1),
        *profiles(p1=NEW, d1=NEW),
        config=CoreConfig(policy=PolicyConfig(chunk_tokens=16)),
    )
    assert resumes(bench, "a", OLD)
    assert not resumes(bench, "b", OLD)
    (admit,) = of(AdmitPrefill, bench.arrive("c"))
    assert admit.instance_id == "p1"


def test_a_request_whose_weights_are_gone_waits_and_ends_with_an_error() -> None:
    bench = bench_with(p1=NEW, d1=NEW)
    assert not resumes(bench, "a", OLD)
    assert bench.core.num_parked == 1
    assert of(AdmitPrefill, bench.arrive("b"))
    assert not of(Reject, bench.feed(Tick(), at_s=MAX_QUEUE_S - 1))
    (reject,) = of(Reject, bench.feed(Tick(), at_s=MAX_QUEUE_S + 1))
    assert (reject.request_id, reject.reason) == ("a", RejectReason.WEIGHTS_GONE)
    assert reject.message == (
        "The answer was begun with the weights 3f2a00, which no instance has any more. Send the request again."
    )
    assert of(ForgetRequest, bench.commands)


def test_a_request_goes_on_once_its_weights_are_back() -> None:
    bench = bench_with(p1=NEW, d1=NEW)
    assert not resumes(bench, "a", OLD)
    bench.feed(joined(p0=OLD))
    (admit,) = of(AdmitPrefill, bench.feed(joined(d0=OLD)))
    assert (admit.instance_id, admit.decode_instance_id) == ("p0", "d0")


# --- kept KV ----------------------------------------------------------------------------------------------------------


def a_prompt(request_id: str, weights: str, *hashes: int) -> RequestArrived:
    """A request of three granules, whose hashes are made for these weights."""
    prefix = tuple(PrefixHash(weights[:4].encode() + bytes([number] * 12)) for number in hashes)
    request = a_request(request_id, prompt=len(hashes) * 128 + 1, output=2)
    return RequestArrived(replace(request, prefix=prefix, prefix_weights=weights))


def reusing_bench() -> CoreBench:
    settings = {"num_blocks": 400, "block_size": 16, "max_model_len": 4096}
    config = CoreConfig(policy=PolicyConfig(chunk_tokens=1024))
    instances = [
        named_profile(name, weights=weights, started_at=BEGAN_AT[weights], **settings)
        for name, weights in (("m0", OLD), ("m1", NEW), ("m2", NEW))
    ]
    return CoreBench(*instances, config=config)


def test_hashes_for_other_weights_are_neither_used_nor_kept() -> None:
    """A gateway that has not heard of the new weights yet names granules of the old ones."""
    bench = reusing_bench()
    commands = bench.feed(a_prompt("a", OLD, 1, 2, 3))
    (admit,), (step,) = of(AdmitPrefill, commands), of(RunStep, commands)
    assert admit.instance_id == "m1"
    bench.done("m1", step.plan)
    bench.finish("m1", "a")
    bench.released("m1", "a")
    state = bench.core._mesh.instances[InstanceId("m1")]
    assert state.kept.is_empty
    commands = bench.feed(a_prompt("b", NEW, 1, 2, 3))
    (admit,), (step,) = of(AdmitPrefill, commands), of(RunStep, commands)
    assert admit.num_reused_granules == 0
    bench.done(admit.instance_id, step.plan)
    bench.finish(admit.instance_id, "b")
    bench.released(admit.instance_id, "b")
    (again,) = of(AdmitPrefill, bench.feed(a_prompt("c", NEW, 1, 2, 3)))
    assert (again.instance_id, again.num_reused_granules) == (admit.instance_id, 3)
    assert not of(ExpectCopy, bench.commands)

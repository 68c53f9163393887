"""KV transfers as objects: their states, and backends of several destinations at once."""

from __future__ import annotations

import random

import pytest

from pdmesh.core.commands import FreeKv, Restart, RunStep, SendCopy
from pdmesh.core.events import RequestDropped
from pdmesh.core.requests.broker import TransferBroker
from pdmesh.core.requests.copy import Copy
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.model import Epoch, InstanceId, RequestId, RequestKey, Role
from pdmesh.plans import KvShard
from pdmesh_testing.core import CoreBench, of
from pdmesh_testing.modelled import modelled_profile

A, B, C, X, Y = (InstanceId(name) for name in "abcxy")


def key(name: str) -> RequestKey:
    return RequestId(name), Epoch(0)


class Bench:
    """A broker between the sources a, b, c and the receivers x and y, which have one backend each."""

    def __init__(self) -> None:
        self.interrupted: set[RequestKey] = set()
        self.computed: set[RequestKey] = set()
        self.broker = TransferBroker(self.interrupted.__contains__, self.computed.__contains__, random.Random(0))
        for receiver in (X, Y):
            self.broker.join(receiver, 1)

    def open(self, name: str, sources: tuple[InstanceId, ...], destinations: tuple[InstanceId, ...]) -> Copy:
        return self.broker.open(
            key(name),
            tuple(shard(source, 4 * index, 4) for index, source in enumerate(sources)),
            tuple(shard(destination, 0, 4 * len(sources)) for destination in destinations),
        )

    def ready(self, transfer: Copy) -> list[Copy]:
        """Every destination confirms, then a source offers: who is granted by that."""
        for destination in transfer.plan.destination_ids:
            assert self.broker.reserve(transfer, destination) == []
        granted = self.broker.offer(transfer)
        self.broker.check_integrity()
        return granted


def shard(instance_id: InstanceId, start: int, num_blocks: int) -> KvShard:
    part = KvPart(IndexRange(start, start + num_blocks), IndexRange(0, 2), IndexRange(0, 1))
    return KvShard(instance_id=instance_id, part=part)


def test_it_goes_through_its_states() -> None:
    bench = Bench()
    broker, transfer = bench.broker, bench.open("r", (A, B), (X, Y))
    assert transfer.state.name == "EXPECTED"
    broker.offer(transfer)
    broker.reserve(transfer, X)
    assert transfer.state.name == "EXPECTED"  # the other destination has not confirmed
    assert broker.reserve(transfer, Y) == [transfer]
    assert transfer.state.name == "GRANTED"
    assert broker.offer(transfer) == []  # by its other source
    assert broker.land(transfer, X) == []
    assert transfer.state.name == "GRANTED"
    broker.land(transfer, Y)
    assert transfer.state.name == "LANDED"
    assert broker.find(transfer.plan.transfer_id, key("r")) is None
    broker.check_integrity()


def test_it_needs_a_backend_of_every_destination_at_once() -> None:
    bench = Bench()
    one, both = bench.open("one", (A,), (Y,)), bench.open("both", (B,), (X, Y))
    late = bench.open("late", (C,), (X,))
    assert bench.ready(one) == [one]
    assert bench.ready(both) == []
    assert both.backends == {}, "it holds one while it waits for the other"
    assert bench.ready(late) == []  # first offers go first, though x is free
    assert bench.broker.land(one, Y) == [both]
    assert bench.broker.land(both, X) == [late]
    bench.broker.land(both, Y)
    bench.broker.check_integrity()


def test_backends_come_back_when_all_sources_have_stopped() -> None:
    bench = Bench()
    broker, first, second = bench.broker, bench.open("first", (A, B), (X,)), bench.open("second", (C,), (X,))
    assert bench.ready(first) == [first]
    bench.interrupted.add(key("first"))
    broker.interrupted(first)
    assert broker.reserve(second, X) == []
    assert broker.offer(second) == []
    assert broker.take_back() == [first]
    assert first.state.name == "RETURNING"
    assert broker.stopped(first, C) is None
    assert broker.stopped(first, A) == []
    assert broker.stopped(first, A) is None
    assert broker.stopped(first, B) == [second]
    assert first.state.name == "PAUSED"
    bench.interrupted.clear()
    assert broker.offer_again(first) == []
    assert first.state.name == "WAITING"
    assert broker.land(second, X) == [first]
    broker.check_integrity()


def test_what_was_going_to_a_lost_receiver_gives_back_the_backends_of_the_others_when_they_free() -> None:
    bench = Bench()
    both, late = bench.open("both", (A,), (X, Y)), bench.open("late", (B,), (X,))
    assert bench.ready(both) == [both]
    assert bench.ready(late) == []
    bench.broker.leave(Y)
    assert both.state.name == "WITHDRAWN"
    assert bench.broker.release_of(key("both"), X) == [late]
    bench.broker.check_integrity()


# --- in the core ---


@pytest.fixture
def core() -> CoreBench:
    return CoreBench(modelled_profile("p", Role.PREFILL), modelled_profile("d", Role.DECODE))


def test_a_source_frees_after_its_acknowledgement_before_the_landing_is_heard_of(core: CoreBench) -> None:
    (step,) = of(RunStep, core.arrive("r"))
    assert len(of(SendCopy, core.offered("p", "r"))) == 1
    core.done("p", step.plan)
    core.sent("p", "r")
    assert core.released("p", "r") == []
    assert core.landed("d", "r") == []


def test_a_source_that_frees_unasked_before_leaves_the_request_without_its_kv(core: CoreBench) -> None:
    """Its whole prompt was computed: that does not say that it went anywhere."""
    (step,) = of(RunStep, core.arrive("r"))
    core.offered("p", "r")
    core.done("p", step.plan)
    (restart,) = of(Restart, core.released("p", "r"))
    assert restart.reason == "instance p dropped its KV"


def test_a_report_of_another_transfer_is_ignored(core: CoreBench) -> None:
    core.arrive("a")
    core.arrive("b")
    core.transfers["a"] = core.transfers["b"]
    assert core.offered("p", "a") == []
    assert core.core.ignored["TransferOffered"] == 1


def test_a_refusal_of_the_source_restarts_the_request_with_the_reason(core: CoreBench) -> None:
    core.arrive("r")
    dropped = RequestDropped(InstanceId("p"), RequestId("r"), Epoch(0), "the instance is stopping")
    commands = core.feed(dropped)
    (restart,) = of(Restart, commands)
    assert restart.reason == "instance p dropped it: the instance is stopping"
    assert {free.instance_id for free in of(FreeKv, commands)} == {"p", "d"}
    assert core.feed(dropped) == []

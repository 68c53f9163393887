"""A drained instance is a source of cached prefixes, and its prefixes are copied to others before it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdmesh.core.commands import AdmitPrefill, Command, ExpectCopy, FreeKv, RunStep, SendCopy, StopInstance
from pdmesh.core.config import CoreConfig
from pdmesh.core.copies.cache_moves import AGAIN_S
from pdmesh.core.copies.prefix_fetches import MAX_AT_ONCE
from pdmesh.core.events import (
    DrainRequested,
    Event,
    InstanceJoined,
    InstanceLost,
    InstanceSuspected,
    KvExpected,
    KvReleased,
    RequestArrived,
    Tick,
    TransferFailed,
    TransferLanded,
    TransferSent,
)
from pdmesh.core.operator_events import OperationCancelled, OperationRequested, ResizeRequested
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import InstanceId, PrefixHash, Request, Then
from pdmesh.operations import OperationId, OperationKind, OperationState, PoolCounts
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import CoreBench, a_report, a_request, of
from pdmesh_testing.reuse import a_profile, a_prompt, hashes, serve

#: A second for each thousand tokens.
POLICY = PolicyConfig(chunk_tokens=4096, latency=LinearLatencyModel(a_s=0.0, b_s=1e-3, c_s=0.0, d_s=0.0))

HOLDER, OTHER = InstanceId("m0"), InstanceId("m1")


class Bench(CoreBench):
    """Instances of 256 blocks, four to a cached block."""

    def __init__(self, *names: str, num_blocks: int = 256) -> None:
        config = CoreConfig(policy=POLICY, plans_in_flight=1)
        super().__init__(*(a_profile(name, num_blocks) for name in names), config=config)

    def serve_on(self, instance_id: InstanceId, request: Request) -> None:
        """Serve a request, whose turn must be on this instance."""
        assert serve(self, request).instance_id == instance_id

    def operate(self, kind: str = "drain", instance_id: InstanceId = HOLDER, name: str = "x") -> list[Command]:
        return self.feed(
            OperationRequested(
                operation_id=OperationId(name),
                kind=OperationKind(kind),
                instance_id=instance_id,
                timeout_s=30.0,
                force=True,
            )
        )

    def land(self, copy: ExpectCopy) -> list[Command]:
        """Report a copy as reserved, landed, sent and released."""
        destination, (source,) = copy.instance_id, copy.transfer.source_ids
        what = copy.request_id, copy.epoch, copy.transfer.transfer_id
        (send,) = of(SendCopy, self.feed(KvExpected(destination, *what)))
        assert (send.instance_id, send.chain) == (source, copy.chain)
        commands = self.feed(TransferLanded(destination, *what, 1 << 20, 0.01))
        commands += self.feed(KvReleased(destination, *what))
        commands += self.feed(TransferSent(source, *what, 1 << 20, 0.01, 0.0, 0.01, destination))
        return commands + self.feed(KvReleased(source, *what))

    def land_all(self, commands: list[Command]) -> list[ExpectCopy]:
        """Land the copies in ``commands``, and those that follow; return all."""
        copies = of(ExpectCopy, commands)
        for copy in copies:
            assert copy.transfer.then is Then.KEEP
            copies += of(ExpectCopy, self.land(copy))
        return copies

    def state(self) -> OperationState:
        return self.operation("x").state

    def num_cached(self, instance_id: InstanceId, request: Request) -> int:
        return self.core._mesh.instances[instance_id].num_cached_granules(request)


def a_holder(*others: str, num_blocks: int = 256) -> Bench:
    bench = Bench("m0", *others, num_blocks=num_blocks)
    bench.serve_on(HOLDER, a_prompt("first", 1000))
    return bench


def test_a_drained_instance_is_done_once_its_prefixes_are_elsewhere() -> None:
    bench = a_holder("m1")
    (copy,) = of(ExpectCopy, bench.operate())
    assert (copy.instance_id, copy.transfer.source_ids, copy.chain) == (OTHER, (HOLDER,), hashes(7))
    assert copy.wanted_by is None
    assert bench.state() is OperationState.RUNNING
    bench.land(copy)
    assert bench.state() is OperationState.DONE
    (admit,) = of(AdmitPrefill, bench.feed(RequestArrived(a_prompt("second", 1100))))
    assert (admit.instance_id, admit.num_reused_granules) == (OTHER, 7)


def test_a_new_scheduler_copies_the_prefixes_that_instances_had_cached_before() -> None:
    """Two prompts with a common beginning, the longest unused first, as the instance reports them."""
    bench = Bench()
    branch = (*hashes(3), *hashes(6, 5)[3:])
    kept = (*reversed(hashes(7)[3:]), *reversed(branch))
    bench.feed(InstanceJoined(a_profile("m0", 256), (), kept=kept, jumps=((3, 7), (9, -1))))
    bench.feed(InstanceJoined(a_profile("m1", 256), ()))
    copies = bench.land_all(bench.operate())
    assert [copy.chain for copy in copies] == [branch, hashes(7)]
    assert bench.state() is OperationState.DONE


def test_a_process_is_stopped_once_its_prefixes_are_elsewhere() -> None:
    bench = a_holder("m1")
    commands = bench.operate("restart")
    assert not of(StopInstance, commands)
    (copy,) = of(ExpectCopy, commands)
    assert of(StopInstance, bench.land(copy))


def test_a_surplus_process_ends_once_its_prefixes_are_elsewhere() -> None:
    bench = a_holder("m1")
    bench.feed(a_report(HOLDER, OTHER))
    resize = ResizeRequested(
        operation_id=OperationId("x"),
        pools=PoolCounts(prefill=0, decode=0, mixed=1),
        timeout_s=10.0,
        start_timeout_s=100.0,
        leaves=(HOLDER,),
    )
    (copy,) = of(ExpectCopy, bench.feed(resize))
    assert not bench.core.desired_processes("a").stop
    bench.land(copy)
    assert bench.core.desired_processes("a").stop == (HOLDER,)


def test_the_most_recently_used_prefix_goes_first_and_each_goes_once() -> None:
    bench = Bench("m0", "m1", num_blocks=512)
    for number in range(3):
        bench.serve_on(HOLDER, a_prompt(f"a{number}", 600, name=number))
        bench.serve_on(OTHER, a_prompt(f"b{number}", 200, name=10 + number))
    copies = bench.land_all(bench.operate())
    assert [copy.chain[0] for copy in copies] == [hashes(1, name)[0] for name in (2, 1, 0)]
    assert bench.state() is OperationState.DONE


def test_a_later_turn_takes_the_place_of_an_earlier_one() -> None:
    """The first prompt is the beginning of the second one."""
    bench = a_holder("m1")
    bench.serve_on(HOLDER, a_prompt("second", 1500))
    (copy,) = bench.land_all(bench.operate())
    assert copy.chain == hashes(11)


def test_a_prefix_waits_for_the_copy_of_its_beginning() -> None:
    """Two prompts begin with the same three blocks of 128 tokens, which are copied once."""
    bench = a_holder("m1")
    serve(bench, a_prompt("elsewhere", 200, name=9))
    chain = (*hashes(3), *hashes(6, 5)[3:])
    bench.serve_on(HOLDER, replace(a_prompt("other", 6 * GRANULE_TOKENS + 1), prefix=chain))
    first, second = bench.land_all(bench.operate())
    assert (first.chain, first.transfer.num_reused_granules) == (chain, 0)
    assert (second.chain, second.transfer.num_reused_granules) == (hashes(7), 3)


def test_a_prefix_that_another_instance_has_stays() -> None:
    bench = a_holder("m1")
    bench.land_all(bench.operate())
    bench.operate("undrain", name="y")
    assert not of(ExpectCopy, bench.operate(name="z"))
    assert bench.operation("z").state is OperationState.DONE


def test_a_copy_evicts_only_what_was_unused_for_longer() -> None:
    """The other instance has room for one of two prompts: the older one of its own is evicted, the newer one not."""
    bench = Bench("m0", "m1", num_blocks=64)
    serve(bench, a_prompt("old", 1000, name=1))
    bench.serve_on(OTHER, a_prompt("older", 1000, name=2))
    bench.serve_on(HOLDER, a_prompt("first", 1000))
    bench.serve_on(OTHER, a_prompt("newer", 600, name=3))
    (copy,) = bench.land_all(bench.operate())
    assert copy.chain == hashes(7)
    assert set(copy.room.drop) <= set(hashes(7, 2))
    assert bench.num_cached(OTHER, a_prompt("again", 600, name=3)) == 4


def test_nothing_is_copied_where_all_was_used_since() -> None:
    bench = Bench("m0", "m1", num_blocks=32)
    bench.serve_on(HOLDER, a_prompt("first", 1000))
    bench.serve_on(OTHER, a_prompt("newer", 1000, name=3))
    assert not of(ExpectCopy, bench.operate())
    assert bench.state() is OperationState.DONE


def test_requests_leave_before_prefixes() -> None:
    bench = Bench("m0", "m1", num_blocks=512)
    bench.serve_on(HOLDER, a_prompt("first", 1000))
    bench.serve_on(OTHER, a_prompt("elsewhere", 1000, name=9))
    (step,) = of(RunStep, bench.feed(RequestArrived(a_request("running", 3000, 1))))
    assert step.instance_id == HOLDER
    assert not of(ExpectCopy, bench.operate())
    bench.done(HOLDER, step.plan)
    bench.finish(HOLDER, "running")
    (copy,) = of(ExpectCopy, bench.released(HOLDER, "running"))
    assert copy.chain == hashes(7)


def fail(bench: Bench, copy: ExpectCopy) -> None:
    what = copy.request_id, copy.epoch, copy.transfer.transfer_id
    bench.feed(TransferFailed(OTHER, *what, "cut"))


ENDS: dict[str, Callable[[Bench, ExpectCopy], object]] = {
    "fails": fail,
    "takes too long": lambda bench, _: bench.feed(Tick(), at_s=31.0),
    "destination is lost": lambda bench, _: bench.feed(InstanceLost(OTHER)),
    "destination is silent": lambda bench, _: bench.feed(InstanceSuspected(OTHER, True)),
    "destination stops": lambda bench, _: bench.feed(DrainRequested(OTHER, True)),
    "source is silent": lambda bench, _: bench.feed(InstanceSuspected(HOLDER, True)),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_a_drain_is_done_whatever_becomes_of_a_copy(end: Callable[[Bench, ExpectCopy], object]) -> None:
    bench = a_holder("m1")
    (copy,) = of(ExpectCopy, bench.operate())
    end(bench, copy)
    for free in of(FreeKv, bench.commands):
        if free.request_id == copy.request_id and free.instance_id in bench.core._mesh.instances:
            bench.feed(KvReleased(free.instance_id, copy.request_id, copy.epoch, free.transfer_id))
    assert bench.state() is OperationState.DONE
    assert not bench.core._mesh.instances[HOLDER].allocations


def test_a_cancelled_drain_copies_nothing_more() -> None:
    bench = Bench("m0", "m1", num_blocks=512)
    for number in range(6):
        bench.serve_on(HOLDER, a_prompt(f"a{number}", 600, name=number))
        bench.serve_on(OTHER, a_prompt(f"b{number}", 200, name=10 + number))
    copies = of(ExpectCopy, bench.operate())
    assert len(copies) == MAX_AT_ONCE
    bench.feed(OperationCancelled(OperationId("x")))
    assert not [more for copy in copies for more in of(ExpectCopy, bench.land(copy))]


def test_a_drained_instance_is_a_source() -> None:
    """Its prefix found no room elsewhere; later there is some, and a request fetches what it needs."""
    bench = Bench("m0", "m1", num_blocks=64)
    bench.serve_on(HOLDER, a_prompt("first", 1000))
    (step,) = of(RunStep, bench.feed(RequestArrived(a_request("running", 1500, 1))))
    assert step.instance_id == OTHER
    assert not of(ExpectCopy, bench.operate())
    assert bench.state() is OperationState.DONE
    bench.done(OTHER, step.plan)
    bench.finish(OTHER, "running")
    bench.released(OTHER, "running")
    commands = bench.feed(RequestArrived(a_prompt("second", 1100)))
    (copy,) = of(ExpectCopy, commands)
    assert (copy.transfer.source_ids, copy.wanted_by) == ((HOLDER,), ("second", 0))
    (admit,) = of(AdmitPrefill, bench.land(copy))
    assert (admit.instance_id, admit.num_reused_granules) == (OTHER, 7)


def test_an_instance_of_the_same_role_is_chosen() -> None:
    bench = Bench("m0", "p0", "d0", "m1")
    bench.serve_on(HOLDER, a_prompt("first", 1000))
    (copy,) = of(ExpectCopy, bench.operate())
    assert copy.instance_id == OTHER


def two_holders(*others: str) -> Bench:
    """Return a mesh where two instances have cached the same prompts, and ``others`` none."""
    bench = Bench()
    kept = (*hashes(5, 2)[::-1], *hashes(7)[::-1])
    for name in ("m0", "m1"):
        bench.feed(InstanceJoined(a_profile(name, 256), (), kept=kept, jumps=((4, -1), (11, -1))))
    for name in others:
        bench.feed(InstanceJoined(a_profile(name, 256), ()))
    return bench


def test_what_a_lost_instance_had_cached_is_copied_again_from_the_last_holder() -> None:
    bench = two_holders("m2")
    copies = bench.land_all(bench.feed(InstanceLost(HOLDER)))
    assert [(copy.instance_id, copy.transfer.source_ids, copy.chain) for copy in copies] == [
        (InstanceId("m2"), (OTHER,), chain) for chain in (hashes(7), hashes(5, 2))
    ]
    bench.land_all(bench.feed(InstanceLost(OTHER)))
    assert bench.num_cached(InstanceId("m2"), a_prompt("r", 1000)) == 7


def apart(*others: str) -> Bench:
    """Return a mesh where m0 has cached two prompts, and m1 and m2 one of them each."""
    bench = Bench()
    first, second = hashes(7)[::-1], hashes(5, 2)[::-1]
    bench.feed(InstanceJoined(a_profile("m0", 256), (), kept=(*second, *first), jumps=((4, -1), (11, -1))))
    bench.feed(InstanceJoined(a_profile("m1", 256), (), kept=first, jumps=((6, -1),)))
    bench.feed(InstanceJoined(a_profile("m2", 256), (), kept=second, jumps=((4, -1),)))
    for name in others:
        bench.feed(InstanceJoined(a_profile(name, 256), ()))
    return bench


@pytest.mark.parametrize("why", [DrainRequested(OTHER), InstanceSuspected(OTHER)])
def test_a_holder_that_may_not_send_does_not_hold_up_the_copies_of_others(why: Event) -> None:
    bench = apart("m3")
    bench.feed(why)
    copies = bench.land_all(bench.feed(InstanceLost(HOLDER)))
    assert [(copy.transfer.source_ids, copy.chain) for copy in copies] == [((InstanceId("m2"),), hashes(5, 2))]
    assert not of(ExpectCopy, bench.feed(Tick(), 10.0))
    if isinstance(why, InstanceSuspected):
        copies = bench.land_all(bench.feed(InstanceSuspected(OTHER, suspected=False), 20.0))
        assert [(copy.transfer.source_ids, copy.chain) for copy in copies] == [((OTHER,), hashes(7))]


def test_a_copy_that_waits_for_its_receiver_begins_once_another_one_ends() -> None:
    """The receiver may have four copies at once; the fifth prefix waits for one of them."""
    bench = Bench()
    prefixes = [hashes(2, name) for name in range(1, 7)]
    kept = tuple([granule for prefix in prefixes for granule in reversed(prefix)])
    jumps = tuple([(2 * number + 1, -1) for number in range(6)])
    for name in ("m0", "m1"):
        bench.feed(InstanceJoined(a_profile(name, 256), (), kept=kept, jumps=jumps))
    bench.feed(InstanceJoined(a_profile("m2", 256), ()))
    copies = of(ExpectCopy, bench.feed(InstanceLost(HOLDER)))
    assert [copy.chain for copy in copies] == prefixes[:1:-1]
    assert [copy.chain for copy in bench.land_all(bench.land(copies[0]))] == prefixes[1::-1]


class Unread(tuple[PrefixHash, ...]):
    """A prefix that must not be looked up."""

    def __len__(self) -> int:
        raise AssertionError("a prefix is looked up")


def test_waiting_prefixes_are_looked_up_again_only_once_their_holder_may_send() -> None:
    bench = two_holders("m2")
    bench.feed(InstanceSuspected(OTHER))
    bench.feed(InstanceLost(HOLDER))
    moves = bench.core._operations._cache_moves
    assert moves is not None
    moves._aside = [lost._replace(prefix=Unread()) for lost in moves._aside]
    assert len(moves._aside) == 2
    bench.feed(Tick())
    bench.feed(InstanceJoined(a_profile("m3", 256), ()))
    with pytest.raises(AssertionError, match="is looked up"):
        bench.feed(InstanceSuspected(OTHER, suspected=False))


def test_waiting_prefixes_are_forgotten_at_their_limit() -> None:
    bench = two_holders("m2")
    bench.feed(DrainRequested(OTHER))
    bench.feed(InstanceLost(HOLDER))
    moves = bench.core._operations._cache_moves
    assert moves is not None
    assert len(moves._aside) == 2
    bench.feed(Tick(), AGAIN_S)
    assert not moves._aside


@pytest.mark.parametrize("why", ["two left", "none left", "drained", "late", "nowhere"])
def test_nothing_is_copied_again_where_this_does_not_help(why: str) -> None:
    bench = two_holders(*({"two left": ["m2"], "nowhere": []}.get(why, ["m3"])))
    if why == "two left":
        bench.land_all(bench.feed(InstanceLost(HOLDER)))
        bench.feed(InstanceJoined(a_profile("m0", 256), ()))
        assert not of(ExpectCopy, bench.feed(InstanceLost(HOLDER)))
        return
    if why == "none left":
        bench.feed(InstanceLost(HOLDER))
        bench.feed(InstanceLost(OTHER))
        bench.commands.clear()
    elif why == "drained":
        bench.feed(DrainRequested(HOLDER))
        bench.feed(InstanceLost(HOLDER))
    elif why == "late":
        bench.feed(InstanceSuspected(OTHER))
        bench.feed(InstanceLost(HOLDER))
        bench.feed(InstanceSuspected(OTHER, suspected=False), AGAIN_S)
    else:
        bench.feed(InstanceLost(HOLDER))
    assert not of(ExpectCopy, bench.feed(Tick()) + bench.commands)

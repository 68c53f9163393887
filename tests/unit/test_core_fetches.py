"""Granules are copied to where a request is then computed from them on; a copy that comes to nothing costs a wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, FreeKv, RunStep, SendCopy
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import (
    DrainRequested,
    InstanceJoined,
    InstanceLost,
    InstanceSuspected,
    KvExpected,
    KvReleased,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    Tick,
    TransferFailed,
    TransferLanded,
    TransferSent,
)
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import InstanceId, Role
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import CoreBench, a_request, a_role, of
from pdmesh_testing.reuse import a_profile, a_prompt, hashes, serve

#: A second for each thousand tokens.
POLICY = PolicyConfig(chunk_tokens=4096, latency=LinearLatencyModel(a_s=0.0, b_s=1e-3, c_s=0.0, d_s=0.0))

HOLDER, OTHER = InstanceId("m0"), InstanceId("m1")


class Bench(CoreBench):
    """A prompt of 1,000 tokens is kept on one of two instances, which then computes another one of 3,000."""

    def __init__(self, policy: PolicyConfig = POLICY, num_blocks: int = 256) -> None:
        config = CoreConfig(policy=policy, plans_in_flight=1)
        super().__init__(a_profile("m0", num_blocks), a_profile("m1", num_blocks), config=config)
        assert serve(self, a_prompt("first", 1000)).instance_id == HOLDER
        assert serve(self, a_prompt("elsewhere", 1000, name=9)).instance_id == OTHER  # so it is the first one's turn
        commands = self.feed(RequestArrived(a_request("other", 3000, 1)))
        (self.other,) = of(RunStep, commands)
        assert self.other.instance_id == HOLDER

    def begin(self, name: str = "second", num_tokens: int = 1100) -> ExpectCopy:
        """A prompt comes that begins as the first one did."""
        commands = self.feed(RequestArrived(a_prompt(name, num_tokens)))
        assert not of(AdmitPrefill, commands)
        (fetch,) = of(ExpectCopy, commands)
        return fetch

    def reserve(self, fetch: ExpectCopy) -> SendCopy:
        """The destination makes room."""
        reserved = KvExpected(OTHER, fetch.request_id, fetch.epoch, fetch.transfer.transfer_id)
        (send,) = of(SendCopy, self.feed(reserved))
        return send

    def landed(self, fetch: ExpectCopy) -> AdmitPrefill:  # type: ignore[override]
        """All of it is there."""
        what = fetch.request_id, fetch.epoch, fetch.transfer.transfer_id
        (admit,) = of(AdmitPrefill, self.feed(TransferLanded(OTHER, *what, 1 << 20, 0.01)))
        self.feed(KvReleased(OTHER, *what))
        self.feed(TransferSent(HOLDER, *what, 1 << 20, 0.01, 0.0, 0.01, OTHER))
        self.feed(KvReleased(HOLDER, *what))
        return admit


def test_a_prefix_is_copied_to_where_it_is_sooner_used_than_computed() -> None:
    """Its holder is busy for three seconds; the copy takes a few milliseconds, and computing it 0.9 seconds."""
    bench = Bench()
    fetch = bench.begin()
    assert (fetch.instance_id, fetch.chain, fetch.num_blocks) == (OTHER, hashes(7), 28)
    assert fetch.transfer.num_reused_granules == 0
    assert (fetch.transfer.source_ids, fetch.wanted_by) == ((HOLDER,), ("second", 0))
    send = bench.reserve(fetch)
    assert (send.instance_id, send.transfer, send.chain) == (HOLDER, fetch.transfer, hashes(7))
    admit = bench.landed(fetch)
    assert (admit.instance_id, admit.num_reused_granules) == (OTHER, 7)
    assert bench.core.link_rates[0].bytes_per_s == pytest.approx((1 << 20) / 0.01)
    assert bench.core.num_fetched_tokens == 896


def test_a_prompt_waits_for_a_copy_whose_source_reports_its_end_first() -> None:
    bench = Bench()
    fetch = bench.begin()
    bench.reserve(fetch)
    what = fetch.request_id, fetch.epoch, fetch.transfer.transfer_id
    commands = bench.feed(TransferSent(HOLDER, *what, 1 << 20, 0.01, 0.0, 0.01, OTHER))
    commands += bench.feed(KvReleased(HOLDER, *what))
    assert not of(AdmitPrefill, commands)
    commands = bench.feed(TransferLanded(OTHER, *what, 1 << 20, 0.01))
    assert [each.num_reused_granules for each in of(AdmitPrefill, commands) if each.request_id == "second"] == [7]


def test_a_copy_that_lands_after_it_was_given_up_is_kept_and_counted() -> None:
    """Both sides are told to free it, and it landed before the destination heard that."""
    bench = Bench()
    fetch = bench.begin()
    bench.reserve(fetch)
    assert HOLDER in [command.instance_id for command in of(FreeKv, bench.feed(Tick(), 60.0))]
    what = fetch.request_id, fetch.epoch, fetch.transfer.transfer_id
    bench.feed(TransferLanded(OTHER, *what, 1 << 20, 0.01))
    assert bench.core.num_fetched_tokens == 896


def test_only_what_is_lacking_is_copied() -> None:
    """The other instance keeps the first three granules, a system prompt perhaps."""
    bench = Bench()
    short = bench.begin("short", 3 * GRANULE_TOKENS + 10)
    bench.reserve(short)
    bench.landed(short)
    bench.done(OTHER, of(RunStep, bench.commands)[-1].plan)
    bench.finish(OTHER, "short")
    bench.released(OTHER, "short")
    fetch = bench.begin()
    assert (fetch.transfer.num_reused_granules, len(fetch.chain)) == (3, 7)


def test_what_is_copied_holds_its_blocks_on_both_sides_until_it_is_kept_there() -> None:
    """At the source they are kept for nobody else, and not dropped meanwhile."""
    bench = Bench()
    before = bench.free_blocks(HOLDER), bench.free_blocks(OTHER)
    fetch = bench.begin()
    assert (bench.free_blocks(HOLDER), bench.free_blocks(OTHER)) == (before[0] - 28, before[1] - 28)
    bench.reserve(fetch)
    bench.landed(fetch)
    bench.finish(OTHER, "second")
    bench.released(OTHER, "second")
    assert (bench.free_blocks(HOLDER), bench.free_blocks(OTHER)) == before


def test_others_wait_for_the_same_copy() -> None:
    """Nothing is copied twice to one instance."""
    bench = Bench()
    fetch = bench.begin()
    assert not of(ExpectCopy, bench.feed(RequestArrived(a_prompt("third", 1200))))
    bench.reserve(fetch)
    bench.landed(fetch)
    assert sum(admit.request_id == "third" for admit in of(AdmitPrefill, bench.commands)) <= 1


@pytest.mark.parametrize(
    "policy",
    [
        PolicyConfig(chunk_tokens=4096, latency=POLICY.latency, link_bytes_per_s=1e4),
        PolicyConfig(chunk_tokens=4096, latency=LinearLatencyModel(a_s=0.0, b_s=1e-6, c_s=0.0, d_s=0.0)),
    ],
    ids=["slow link", "fast instance"],
)
def test_what_is_computed_sooner_is_not_copied(policy: PolicyConfig) -> None:
    """Either the copy would take longer than that, or all of it takes a millisecond."""
    bench = Bench(policy)
    commands = bench.feed(RequestArrived(a_prompt("second", 1100)))
    assert not of(ExpectCopy, commands)
    assert [admit.instance_id for admit in of(AdmitPrefill, commands)] == [OTHER]


def a_failure(instance_id: InstanceId) -> Callable[[Bench, ExpectCopy], object]:
    def fail(bench: Bench, fetch: ExpectCopy) -> None:
        what = fetch.request_id, fetch.epoch
        bench.feed(TransferFailed(instance_id, *what, fetch.transfer.transfer_id, "cut"))
        bench.feed(KvReleased(instance_id, *what, fetch.transfer.transfer_id))

    return fail


def a_refusal(bench: Bench, fetch: ExpectCopy) -> None:
    """The source does not keep it after all."""
    what = HOLDER, fetch.request_id, fetch.epoch
    bench.feed(RequestDropped(*what, "6 of 7 granules are kept"))
    bench.feed(KvReleased(*what, fetch.transfer.transfer_id))


ENDS: dict[str, Callable[[Bench, ExpectCopy], object]] = {
    "fails at its source": a_failure(HOLDER),
    "fails at its destination": a_failure(OTHER),
    "is refused": a_refusal,
    "takes too long": lambda bench, _: bench.feed(Tick(), at_s=10.0),
    "source is lost": lambda bench, _: bench.feed(InstanceLost(HOLDER)),
    "destination is lost": lambda bench, _: bench.feed(InstanceLost(OTHER)),
    "source is silent": lambda bench, _: bench.feed(InstanceSuspected(HOLDER, True)),
    "destination is silent": lambda bench, _: bench.feed(InstanceSuspected(OTHER, True)),
    "source stops": lambda bench, _: bench.feed(DrainRequested(HOLDER, True)),
    "destination stops": lambda bench, _: bench.feed(DrainRequested(OTHER, True)),
    "destination gets another role": lambda bench, _: bench.feed(a_role(OTHER, Role.DECODE)),
    "source registers again": lambda bench, _: bench.feed(InstanceJoined(a_profile("m0", 256), ())),
    "destination registers again": lambda bench, _: bench.feed(InstanceJoined(a_profile("m1", 256), ())),
}


@pytest.mark.parametrize("is_granted", [False, True])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_a_copy_that_comes_to_nothing_ends_on_both_sides(
    end: Callable[[Bench, ExpectCopy], object], *, is_granted: bool
) -> None:
    """Each side is told to free its blocks, and answers; the request is computed once there is an instance for it."""
    bench = Bench()
    fetch = bench.begin()
    if is_granted:
        bench.reserve(fetch)
    end(bench, fetch)
    key = fetch.request_id, fetch.epoch
    for free in of(FreeKv, bench.commands):
        if free.request_id == fetch.request_id:
            bench.feed(KvReleased(free.instance_id, *key, free.transfer_id))
    for instance in bench.core._mesh.instances.values():
        assert key not in instance.allocations
    assert not bench.core._fetches._all
    if not of(AdmitPrefill, bench.commands)[3:]:
        bench.done(HOLDER, bench.other.plan)
        bench.feed(InstanceJoined(a_profile("m1", 256), ()))
    assert [admit.request_id for admit in of(AdmitPrefill, bench.commands)][-1] == "second"


def test_who_wanted_it_may_go_away() -> None:
    """What is on its way is kept for others."""
    bench = Bench()
    fetch = bench.begin()
    bench.feed(RequestCancelled(a_request("second").gateway_id, a_request("second").request_id, fetch.epoch))
    bench.reserve(fetch)
    bench.feed(TransferLanded(OTHER, fetch.request_id, fetch.epoch, fetch.transfer.transfer_id, 1 << 20, 0.01))
    assert bench.core._mesh.instances[OTHER].num_cached_granules(a_prompt("third", 1100)) == 7

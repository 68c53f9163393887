"""What the core does with KV that is kept: commands say what is shared and given up, reports change what it knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, Reject, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import CacheReported, InstanceJoined, InstanceLost, RequestArrived
from pdmesh.core.instances.lengths_seen import MIN_REQUESTS, LengthsSeen
from pdmesh.model import (
    Epoch,
    InstanceId,
    RequestId,
    Resident,
)
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.latency import LinearLatencyModel
from pdmesh_testing.core import GATEWAY, CoreBench, a_request, of
from pdmesh_testing.reuse import a_profile, a_prompt, hashes, serve

M = InstanceId("m")


def a_bench(*names: str, num_blocks: int = 64, link_bytes_per_s: float = 1e9) -> CoreBench:
    policy = PolicyConfig(chunk_tokens=4096, link_bytes_per_s=link_bytes_per_s)
    return CoreBench(*(a_profile(name, num_blocks) for name in names), config=CoreConfig(policy=policy))


def test_a_prompt_that_was_computed_is_shared_and_the_rest_planned() -> None:
    """Its chunks begin behind what is kept."""
    bench = a_bench("m")
    assert serve(bench, a_prompt("a", 300)).num_reused_granules == 0
    commands = bench.feed(RequestArrived(a_prompt("b", 600)))
    (admit,), (step,) = of(AdmitPrefill, commands), of(RunStep, commands)
    assert admit.num_reused_granules == 2
    assert [(chunk.start, chunk.num_tokens, chunk.is_last) for chunk in step.plan.chunks] == [(256, 344, True)]


def test_a_prompt_without_hashes_shares_nothing_and_is_not_kept() -> None:
    """As all were before there was reuse."""
    bench = a_bench("m")
    serve(bench, a_request("a", 300, 1))
    assert serve(bench, a_prompt("b", 300)).num_reused_granules == 0


def test_what_drawn_tokens_completed_is_kept_behind_the_prompt() -> None:
    """The instance tells of them as it gives the blocks back."""
    bench = a_bench("m")
    serve(bench, a_prompt("a", 300, output=200), drawn=hashes(3)[2:])
    assert serve(bench, a_prompt("b", 600)).num_reused_granules == 3


def test_kept_blocks_are_free_and_are_dropped_for_who_needs_them() -> None:
    """The prompt of 1,000 tokens takes 32 of 64 blocks, of which 28 stay."""
    bench = a_bench("m")
    serve(bench, a_prompt("a", 1000))
    assert bench.free_blocks("m") == 64
    admit = serve(bench, a_prompt("b", 1500, name=1))
    assert admit.room.drop == hashes(7)[:3:-1]  # 47 blocks, of which 36 are free
    assert serve(bench, a_prompt("c", 1000)).num_reused_granules == 4


def test_blocks_that_live_requests_share_count_once() -> None:
    """Each of 300 tokens takes ten blocks, eight of them the same."""
    bench = a_bench("m")
    serve(bench, a_prompt("a", 300))
    for name in ("b", "c"):
        bench.feed(RequestArrived(a_prompt(name, 300)))
    assert bench.free_blocks("m") == 64 - 8 - 2 * 2


def test_a_hand_over_brings_what_its_receiver_lacks() -> None:
    """What landed is kept, and what is sent next begins behind it."""
    bench = a_bench("p", "d")
    for name in ("a", "b"):
        commands = bench.feed(RequestArrived(a_prompt(name, 300, output=8)))
        (place,), (step,) = of(ExpectCopy, commands), of(RunStep, commands)
        assert place.transfer.num_reused_granules == (2 if name == "b" else 0)
        bench.done("p", step.plan)
        bench.landed("d", name)
        bench.sent("p", name)
        bench.released("p", name)
        bench.finish("d", name)
        bench.released("d", name)


def test_a_report_replaces_what_was_thought() -> None:
    """An instance lacked what it was to share, and says what it has."""
    bench = a_bench("m")
    serve(bench, a_prompt("a", 600))
    bench.feed(CacheReported(M, hashes(1)))
    assert serve(bench, a_prompt("b", 600)).num_reused_granules == 1
    bench.feed(CacheReported(M, ()))
    assert serve(bench, a_prompt("c", 600)).num_reused_granules == 0


def test_what_a_lost_instance_kept_is_gone() -> None:
    """Another process of its name has nothing."""
    bench = a_bench("m")
    serve(bench, a_prompt("a", 600))
    bench.feed(InstanceLost(M))
    bench.feed(InstanceJoined(a_profile("m"), ()))
    assert serve(bench, a_prompt("b", 600)).num_reused_granules == 0


def test_residents_of_an_instance_that_joins_again_share_what_they_say() -> None:
    """A scheduler that was started again knows how many blocks are taken, and may give up none that are used."""
    bench = a_bench("m")
    residents = [
        Resident(
            request_id=RequestId(name),
            epoch=Epoch(0),
            gateway_id=GATEWAY,
            num_blocks=12,
            num_context_tokens=300,
            decoding=True,
            granules=hashes(2),
        )
        for name in ("a", "b")
    ]
    bench.feed(InstanceJoined(a_profile("m"), tuple(residents)))
    bench.feed(CacheReported(M, (*hashes(4)[:1:-1], *hashes(2, 1)[::-1], *hashes(2)[::-1])))
    assert bench.free_blocks("m") == 64 - 8 - 2 * 4
    admit = serve(bench, a_prompt("c", 1400, name=2))
    assert admit.room.drop == (hashes(4)[3], hashes(4)[2], hashes(2, 1)[1])


def test_of_instances_about_as_free_the_one_that_keeps_most_decodes() -> None:
    """Saved memory counts, but not against the load."""
    bench = a_bench("p", "d0", "d1", num_blocks=200, link_bytes_per_s=1.0)
    bench.feed(CacheReported(InstanceId("d1"), hashes(4)))
    chosen: list[str] = []
    for number in range(3):
        commands = bench.feed(RequestArrived(a_prompt(f"r{number}", 600, output=8)))
        (place,), (step,) = of(ExpectCopy, commands), of(RunStep, commands)
        chosen.append(place.instance_id)
        bench.done("p", step.plan)
    assert chosen == ["d1", "d1", "d0"]


def test_the_queue_is_full_of_what_is_to_be_computed() -> None:
    """What waits and is kept counts nothing, and what comes and is kept fits where the same would not."""
    config = CoreConfig(policy=PolicyConfig(chunk_tokens=4096), max_queue_tokens=1300, refuses_early=False)
    bench = CoreBench(a_profile("m"), config=config)
    serve(bench, a_prompt("a", 1200))
    for name in (1, 2):  # they take all step slots
        bench.feed(RequestArrived(a_prompt(f"busy-{name}", 300, name=name)))
    for number in range(2):
        assert not of(Reject, bench.feed(RequestArrived(a_prompt(f"kept-{number}", 1200 + number))))
    assert of(Reject, bench.feed(RequestArrived(a_prompt("new", 1290, name=3))))


def test_lengths_seen_tell_work_from_room() -> None:
    """A prompt of which 3,000 tokens are kept computes 1,000 behind them, and holds 4,000."""
    seen = LengthsSeen()
    for _ in range(MIN_REQUESTS):
        seen.add(3000, 1000, 100)
    moments = seen.moments
    assert (moments.mean_prompt_tokens, moments.mean_reused_tokens) == (1000, 3000)
    model = LinearLatencyModel(
        a_s=0.0, b_s=1e-4, c_s=1e-8, d_s=1e-8, decode_a_s=0.0, decode_s=0.0, decode_context_s=1e-7
    )
    costs = seen.costs(model, 0.0, 1.0)
    assert costs.prompt_token_s == pytest.approx(1e-4 + 1e-8 * 1000 + 1e-8 * 3000)
    assert costs.decode_token_s == pytest.approx(1e-7 * (4000 + 50))


def test_a_second_tenant_flushes_only_what_is_its_own_or_more_than_the_others_share() -> None:
    """It sends prompts without end; of what the first one has kept, half of the room stays, as if it had never come."""
    bench = a_bench("m")  # room for 16 granules

    def ask(request_id: str, name: int, tenant: str) -> int:
        return serve(bench, replace(a_prompt(request_id, 513, name=name), tenant=tenant)).num_reused_granules

    for name in (1, 2):
        ask(f"mine-{name}", name, "a")
    for number in range(40):
        ask(f"flood-{number}", 10 + number, "b")
    assert [ask(f"again-{name}", name, "a") for name in (2, 1)] == [4, 1]
    for number in range(40):
        ask(f"mine-too-{number}", 100 + number, "a")
    assert ask("once more", 2, "a") == 0  # nobody is kept from flushing its own

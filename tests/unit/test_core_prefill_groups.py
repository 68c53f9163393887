"""Prompts that several instances compute in turn."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from pdmesh.core.commands import AdmitPrefill, Command, ExpectCopy, FreeKv, Restart, RunStep, SendCopy, Stop
from pdmesh.core.config import CoreConfig, LatencyLearning
from pdmesh.core.events import (
    DrainRequested,
    Event,
    GroupPrefix,
    InstanceJoined,
    InstanceLost,
    InstanceSuspected,
    InstanceUnreachable,
    KvExpected,
    KvReleased,
    RequestArrived,
    RequestCancelled,
    RequestDropped,
    TransferSent,
)
from pdmesh.core.operator_events import BundleChangeRequested
from pdmesh.model import Epoch, InstanceId, PrefixHash, RequestId, Role, TransferId
from pdmesh.plans import ChunkPlan, StepPlan
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.improvement import MinimumGain
from pdmesh.policy.latency import ChunkShape, LinearLatencyModel, StepShape
from pdmesh_testing.core import GATEWAY, CoreBench, a_request, of, regrouped, step_done, stopped
from pdmesh_testing.modelled import modelled_profile

#: A second for each token, and for each step half of one. Chunks of groups have 64 tokens.
POLICY = PolicyConfig(
    latency=LinearLatencyModel(a_s=0.5, b_s=1.0, c_s=0.0, d_s=0.0),
    prefill_step_s=64.5,
    max_group_step_overhead=1.5 / 64.5,
    long_prompt_tokens=256,
    slo_tpot_s=10.0,
    sequence_parallel="pipelined",
)

#: Chunks of groups have 32 to 64.
TAPERING = replace(POLICY, max_group_step_overhead=0.5)
LEADER, HELPER = InstanceId("p0"), InstanceId("p1")
KEY = RequestId("long"), Epoch(0)


def bench_of(
    *,
    num_prefill: int = 2,
    joins_groups: bool = True,
    bundle: str = "pdmesh",
    num_blocks: int = 1024,
    role: Role = Role.PREFILL,
    policy: PolicyConfig = POLICY,
    num_transfer_backends: int = 2,
    config: CoreConfig | None = None,
    hosts: str = "",
) -> CoreBench:
    """``hosts``: a letter for each prefill instance."""
    profiles = [
        modelled_profile(
            f"p{i}", role, num_blocks=num_blocks, max_model_len=4096, num_layers=8, joins_groups=joins_groups
        )
        for i in range(num_prefill)
    ]
    profiles = [replace(each, host=host) for each, host in zip(profiles, hosts or [""] * num_prefill, strict=True)]
    decode = modelled_profile(
        "d",
        Role.DECODE,
        num_blocks=1024,
        max_model_len=4096,
        num_layers=8,
        num_transfer_backends=num_transfer_backends,
    )
    bench = CoreBench(*profiles, decode, config=config or CoreConfig(policy=policy))
    bench.feed(BundleChangeRequested(bundle))
    return bench


def chunks_of(commands: list[Command]) -> list[tuple[str, ChunkPlan]]:
    return [(step.instance_id, chunk) for step in of(RunStep, commands) for chunk in step.plan.chunks]


def asked(commands: list[Command]) -> list[str]:
    return [admit.instance_id for admit in of(AdmitPrefill, commands) if not admit.leads]


def join(bench: CoreBench, instance_id: str = HELPER) -> list[Command]:
    return bench.feed(KvExpected(InstanceId(instance_id), *KEY))


class Running:
    """The plans in flight on each instance; `end` ends the first of one."""

    def __init__(self, bench: CoreBench) -> None:
        self.bench = bench
        self.num_seen = 0

    def plans(self) -> dict[str, list[StepPlan]]:
        known = self.bench.core._mesh.instances
        return {name: list(instance.plans.values()) for name, instance in known.items()}

    def end(self, instance_id: str) -> list[Command]:
        return self.bench.done(instance_id, self.plans()[instance_id][0])

    def end_next(self, began_s: dict[tuple[str, int], float]) -> list[Command]:
        """The step that ends first, as GANG foretells. Those after it in the prompt wait for it."""
        ends: list[tuple[float, int, str]] = []
        for name, plans in self.plans().items():
            if plans:
                (chunk,) = plans[0].chunks
                since_s = began_s.setdefault((name, plans[0].plan_id), self.bench.now_s)
                ends.append((since_s + slice_s(PARALLEL, chunk), chunk.start, name))
        first = min(start for _, start, _ in ends)
        end_s, _, name = min(end for end in ends if end[1] == first or end[0] >= min(ends, key=lambda e: e[1])[0])
        self.bench.now_s = max(self.bench.now_s, end_s)
        return self.end(name)

    def end_without(self, instance_id: str) -> list[Command]:
        """The first of one ends with nothing computed."""
        return self.bench.feed(step_done(instance_id, self.plans()[instance_id][0], 0.0, num_tokens=0))


def test_whoever_has_an_opening_takes_the_next_chunk() -> None:
    bench = bench_of()
    placed = bench.arrive("long", 1024)
    assert chunks_of(placed) == [
        (LEADER, ChunkPlan(request_id=KEY[0], epoch=KEY[1], start=0, num_tokens=64, is_last=False))
    ]
    (admit,) = [admit for admit in of(AdmitPrefill, placed) if not admit.leads]
    assert (admit.instance_id, admit.num_blocks, admit.transfer) == (HELPER, 256, None)
    assert admit.group is not None
    assert admit.group.member_ids == (LEADER, HELPER)
    commands = join(bench)
    told = regrouped(commands)
    assert [(name, group.member_ids) for name, group in told] == [
        (LEADER, (LEADER, HELPER)),
        (HELPER, (LEADER, HELPER)),
    ]
    assert {group.capability for _, group in told} == {admit.group.capability}
    assert [(name, chunk.start) for name, chunk in chunks_of(commands)] == [(HELPER, 64), (LEADER, 128), (HELPER, 192)]
    running = Running(bench)
    assert [(name, chunk.start) for name, chunk in chunks_of(running.end(LEADER))] == [(LEADER, 256)]
    assert chunks_of(running.end(LEADER)) == [], "the chunk before is its own, and not done: it is not its turn"
    assert [(name, chunk.start) for name, chunk in chunks_of(running.end(HELPER))] == [(HELPER, 320), (LEADER, 384)]


def test_the_first_chunk_is_short_where_others_are_free() -> None:
    """They join while it is computed, and have its KV when it ends."""

    def first(num_prefill: int) -> int:
        bench = bench_of(num_prefill=num_prefill, policy=replace(TAPERING, max_group_step_overhead=1.0))
        return chunks_of(bench.arrive("long", 2048))[0][1].num_tokens

    assert [first(1), first(2), first(4)] == [64, 32, 32]


def test_helpers_take_turns_in_the_order_in_which_they_began() -> None:
    """In another order for every second chunk, each would wait for who has two in a row, to the end of the prompt."""
    bench = bench_of(num_prefill=4)
    bench.arrive("long", 2048)
    given = [name for helper_id in ("p3", "p1", "p2") for name, _ in chunks_of(join(bench, helper_id))]
    assert given == ["p3", "p1", "p2", LEADER, "p3", "p1", "p2"]


def test_members_are_told_of_while_they_compute() -> None:
    bench = bench_of()
    bench.arrive("long", 1024)
    assert bench.core.helped == []
    join(bench)
    (view,) = bench.core.helped
    assert (view.request_id, view.instance_ids, view.helper_ids) == ("long", (LEADER, "d"), (HELPER,))
    assert 0 < view.num_planned_tokens < view.num_prompt_tokens
    bench.feed(InstanceLost(HELPER))
    assert bench.core.helped == []


def test_chunks_taper_and_the_last_one_is_the_leaders() -> None:
    bench = bench_of(policy=TAPERING)
    bench.arrive("long", 1021)
    join(bench)
    running, seen = Running(bench), chunks_of(bench.commands)
    while any(running.plans().values()):
        for name in (HELPER, LEADER):
            if running.plans()[name]:
                running.end(name)
    seen = sorted(chunks_of(bench.commands), key=lambda pair: pair[1].start)
    assert [chunk.start for _, chunk in seen] == [0, *(chunk.start + chunk.num_tokens for _, chunk in seen[:-1])]
    assert (seen[-1][0], seen[-1][1].is_last, sum(chunk.num_tokens for _, chunk in seen)) == (LEADER, True, 1021)
    assert all(chunk.num_tokens % 4 == 0 and not chunk.is_last for _, chunk in seen[:-1])
    assert {name for name, _ in seen} == {LEADER, HELPER}
    assert seen[-1][1].num_tokens <= 36, "the end is computed by one alone"
    freed = [free.instance_id for free in of(FreeKv, bench.commands)]
    assert freed == [HELPER]
    bench.released(HELPER, "long")
    assert bench.free_blocks(HELPER) == 1024


@pytest.mark.parametrize(
    "bench",
    [
        pytest.param(bench_of(joins_groups=False), id="workers that know nothing of groups"),
        pytest.param(bench_of(bundle="fcfs"), id="a bundle without"),
        pytest.param(bench_of(num_blocks=500), id="no room left beside it"),
        pytest.param(bench_of(num_prefill=1), id="alone"),
    ],
)
def test_who_is_not_asked(bench: CoreBench) -> None:
    assert not asked(bench.arrive("long", 1024))


def test_a_prompt_that_gains_too_little_is_computed_alone() -> None:
    assert not asked(bench_of().arrive("long", 64))


def test_how_much_helpers_must_gain_follows_the_load_of_the_last_half_minute() -> None:
    bench = bench_of(num_prefill=3, num_blocks=4096)
    prefill_groups = bench.core._packer.prefill_groups
    prefill_groups._minimum_gain = MinimumGain(((0.0, 0.0), (5.0, 0.9)))
    assert asked(bench.arrive("first", 2000))
    assert prefill_groups._minimum_gain.rate == 0.0
    for number in range(10):
        bench.now_s += 2.9
        bench.arrive(f"r{number}", 200)
    bench.now_s += 5.0
    bench.arrive("one more", 200)
    assert prefill_groups._minimum_gain.rate == 0.9, "4,000 s of work in 34 for three"
    bench.now_s += 3000.0
    bench.arrive("another", 10)
    assert prefill_groups._minimum_gain.rate == 0.0


@pytest.mark.parametrize(("rate", "num_asked"), [(None, 0), (0.0, 1)])
def test_the_loads_rate_is_for_where_none_is_set(rate: float | None, num_asked: int) -> None:
    bench = bench_of(policy=replace(POLICY, group_improvement=rate))
    bench.core._packer.prefill_groups._minimum_gain = MinimumGain(((0.0, 0.9),))
    assert len(asked(bench.arrive("long", 1024))) == num_asked


def test_a_helper_takes_requests_of_its_own_first_and_helps_no_more_meanwhile() -> None:
    bench = bench_of()
    bench.arrive("long", 1024)
    join(bench)
    arrived = bench.arrive("other", 512)
    assert [admit.instance_id for admit in of(AdmitPrefill, arrived)] == []  # both plans of the helper are in flight
    commands = Running(bench).end(HELPER)
    assert [(name, chunk.request_id) for name, chunk in chunks_of(commands)] == [(HELPER, "other")]
    assert [(name, chunk.request_id) for name, chunk in chunks_of(Running(bench).end(HELPER))] == [(HELPER, "other")]


def test_a_short_prompt_interrupts_a_helper() -> None:
    bench = bench_of()
    bench.arrive("long", 1024)
    join(bench)
    (step,) = of(RunStep, bench.arrive("short", 4))
    assert step.plan.urgent
    assert [chunk.request_id for chunk in step.plan.chunks] == ["short"]


def test_who_joins_late_begins_when_it_has_been_sent_what_was_computed() -> None:
    """512 B a token: 400 of them take 200 s, and the steps in flight 129."""
    bench = bench_of(num_prefill=3, num_blocks=2048, policy=replace(POLICY, link_bytes_per_s=1024.0))
    bench.feed(DrainRequested(InstanceId("p2")))
    assert asked(bench.arrive("long", 3000)) == [HELPER]
    join(bench)
    running = Running(bench)
    for _ in range(3):
        running.end(LEADER)
        running.end(HELPER)
    assert asked(bench.feed(DrainRequested(InstanceId("p2"), enabled=False))) == ["p2"]
    assert not [name for name, _ in chunks_of(join(bench, "p2")) if name == "p2"], "it has nothing to go on"
    bench.now_s += 100.0
    assert {name for name, _ in chunks_of(running.end(HELPER))} == {HELPER, "p2"}


@pytest.mark.parametrize(
    ("hosts", "far_bytes_per_s", "expected"),
    [
        pytest.param("abba", None, ["p3"], id="the leader's host first"),
        pytest.param("abbb", None, ["p1"], id="another host as well"),
        pytest.param("abbb", 1e6, ["p1"], id="a link that keeps up"),
        pytest.param("abbb", 100.0, [], id="a link that is slower than computing alone"),
        pytest.param("acbb", 100.0, ["p1"], id="only one of two other hosts behind a slow link"),
    ],
)
def test_helpers_are_near_the_leader_or_behind_a_link_that_keeps_up(
    hosts: str, far_bytes_per_s: float | None, expected: list[str]
) -> None:
    """A token takes a second to compute, and has 512 B of KV."""
    bench = bench_of(num_prefill=4, policy=replace(POLICY, max_group_members=2), hosts=hosts)
    if far_bytes_per_s is not None:
        sent_s = (1 << 20) / far_bytes_per_s
        of_request = LEADER, RequestId("before"), Epoch(0), TransferId(1)
        bench.feed(TransferSent(*of_request, 1 << 20, sent_s, 0.0, sent_s, InstanceId("p2"), was_decoding=True))
    assert asked(bench.arrive("long", 1024)) == expected


@pytest.mark.parametrize("has_refused", [True, False])
def test_who_does_not_join_costs_nothing(has_refused: bool) -> None:
    bench = bench_of()
    bench.arrive("long", 1024)
    if has_refused:
        bench.feed(RequestDropped(HELPER, *KEY, "stopping"))
        commands = bench.released(HELPER, "long")
    else:
        commands = bench.feed(InstanceLost(HELPER))
    assert not of(Restart, bench.commands)
    assert [(name, chunk.start) for name, chunk in chunks_of(commands)] == [(LEADER, 64)]
    assert not asked(Running(bench).end(LEADER)), "it is asked once"


def test_the_request_starts_again_without_its_leader() -> None:
    bench = bench_of()
    bench.arrive("long", 1024)
    join(bench)
    commands = bench.feed(InstanceLost(LEADER))
    assert [restart.request_id for restart in of(Restart, commands)] == ["long"]
    assert {free.instance_id for free in of(FreeKv, commands)} == {HELPER, "d"}


def computing(num_transfer_backends: int = 2) -> Running:
    """A group in which each has two chunks of 64 tokens in flight: the leader the first and the third of them."""
    bench = bench_of(num_transfer_backends=num_transfer_backends)
    bench.arrive("long", 1024)
    join(bench)
    running = Running(bench)
    assert [plan.chunks[0].start for plan in running.plans()[LEADER]] == [0, 128]
    assert [plan.chunks[0].start for plan in running.plans()[HELPER]] == [64, 192]
    return running


def prefix(bench: CoreBench, num_tokens: int, num_lost: int = 1, *, instance_id: InstanceId = LEADER) -> list[Command]:
    return bench.feed(GroupPrefix(instance_id, *KEY, num_tokens, num_lost))


LOSSES = {
    "lost": InstanceLost(HELPER),
    "cut off": InstanceUnreachable(HELPER),
    "silent": InstanceSuspected(HELPER),
    "anew": InstanceJoined(
        modelled_profile(HELPER, Role.PREFILL, num_blocks=1024, num_layers=8, joins_groups=True), ()
    ),
    "dropped": RequestDropped(HELPER, *KEY, "no KV came"),
    "released": KvReleased(HELPER, *KEY),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_without_a_helper_the_others_go_on_from_what_they_have(loss: Event) -> None:
    running = computing()
    bench = running.bench
    running.end(LEADER)
    commands = bench.feed(loss)
    assert not of(Restart, commands)
    ((name, group),) = regrouped(commands)
    assert (name, group.member_ids, group.lost_ids) == (LEADER, (LEADER, HELPER), (HELPER,))
    assert not chunks_of(commands), "nothing is planned before it is known what is missing"
    while running.plans()[LEADER]:
        assert not chunks_of(running.end_without(LEADER))
    assert [(name, chunk.start) for name, chunk in chunks_of(prefix(bench, 64))] == [(LEADER, 64), (LEADER, 128)]
    assert bench.core.needs_prompt(KEY), "others may be asked to help"
    while running.plans()[LEADER]:
        running.end(LEADER)
    assert not of(Restart, bench.commands)
    assert sorted({chunk.start + chunk.num_tokens for _, chunk in chunks_of(bench.commands)})[-1] == 1024
    assert not asked(bench.commands[-20:]), "who was lost is not asked again"


def test_what_a_silent_helper_has_in_flight_keeps_no_backend_from_others() -> None:
    """The leader waits to be told how to go on, and nothing of the prompt moves meanwhile."""
    running = computing(num_transfer_backends=1)
    bench = running.bench
    bench.offered(LEADER, "long")
    assert [grant.request_id for grant in of(SendCopy, bench.commands)] == ["long"]
    bench.feed(InstanceSuspected(HELPER))
    while running.plans()[LEADER]:
        running.end_without(LEADER)
    assert running.plans()[HELPER]
    bench.arrive("other", 16)
    assert [pause.request_id for pause in stopped(Stop.PAUSE, bench.offered(LEADER, "other"))] == ["long"]
    assert [grant.request_id for grant in of(SendCopy, bench.paused(LEADER, "long"))] == ["other"]
    late = running.end(HELPER)
    assert not of(Restart, late)
    assert not stopped(Stop.PAUSE, late)


def test_what_the_lost_one_computed_counts_if_the_leader_has_it() -> None:
    running = computing()
    bench = running.bench
    for name in (LEADER, HELPER):
        running.end(name)
    bench.feed(InstanceLost(HELPER))
    while running.plans()[LEADER]:
        running.end_without(LEADER)
    assert next(chunk.start for _, chunk in chunks_of(prefix(bench, 64))) == 64, "it was under way"

    running = computing()
    bench = running.bench
    for name in (LEADER, HELPER):
        running.end(name)
    bench.feed(InstanceLost(HELPER))
    running.end(LEADER)
    while running.plans()[LEADER]:
        running.end_without(LEADER)
    assert next(chunk.start for _, chunk in chunks_of(prefix(bench, 128))) == 192, "the leader's own is computed, too"


def test_what_is_left_of_the_group_goes_on_together() -> None:
    bench, third = bench_of(num_prefill=3), InstanceId("p2")
    bench.arrive("long", 2048)
    join(bench)
    join(bench, third)
    running = Running(bench)
    assert {name for name, _ in chunks_of(bench.commands)} == {LEADER, HELPER, third}
    commands = bench.feed(InstanceLost(HELPER))
    assert {name for name, _ in regrouped(commands)} == {LEADER, third}
    while running.plans()[third]:
        assert not chunks_of(running.end_without(third))
    assert not chunks_of(prefix(bench, 0)), "the leader has chunks in flight"
    assert not chunks_of(running.end(LEADER))
    commands = running.end_without(LEADER)
    assert [chunk.start for _, chunk in chunks_of(commands)][:2] == [64, 128]
    assert {name for name, _ in chunks_of(commands)} == {LEADER, third}
    commands = bench.feed(InstanceLost(third))
    assert [(name, group.lost_ids) for name, group in regrouped(commands)] == [(LEADER, (HELPER, third))]
    while running.plans()[LEADER]:
        running.end(LEADER)
    assert chunks_of(prefix(bench, 128, 2))
    while running.plans()[LEADER]:
        running.end(LEADER)
    assert not of(Restart, bench.commands)


def test_only_what_a_lost_helper_had_not_passed_on_is_computed_again() -> None:
    """All before its unfinished chunk is computed when it is lost, and all in flight after that waits for it in vain.

    Nothing before is planned for a second time, and nobody computes any token twice.
    """
    bench, third = bench_of(num_prefill=3), InstanceId("p2")
    bench.arrive("long", 2048)
    join(bench)
    join(bench, third)
    running = Running(bench)
    owners = {chunk.start: name for name, chunk in chunks_of(bench.commands)}
    starts = sorted(owners)
    computed: list[tuple[str, int]] = []

    def end(start: int) -> None:
        name = owners[start]
        plan = running.plans()[name][0]
        assert plan.chunks[0].start == start
        computed.append((name, start))
        running.end(name)

    for start in starts[:3]:  # one of each, so that there are more in flight behind those
        end(start)
    owners = {chunk.start: name for name, chunk in chunks_of(bench.commands)}
    lost_start = running.plans()[HELPER][0].chunks[0].start
    for start in sorted(owners):
        if starts[2] < start < lost_start:
            end(start)
    bench.feed(InstanceLost(HELPER))
    for name in (LEADER, third):
        while running.plans()[name]:
            running.end_without(name)  # it waits for the lost one's chunk
    bench.commands.clear()
    prefix(bench, lost_start)
    while any(running.plans()[name] for name in (LEADER, third)):
        for name in (LEADER, third):
            if running.plans()[name]:
                computed.append((name, running.plans()[name][0].chunks[0].start))
                running.end(name)
    again = [chunk.start for _, chunk in chunks_of(bench.commands)]
    assert min(again) == lost_start
    assert len({start for _, start in computed}) == len(computed), "computed twice"
    assert sum(chunk.num_tokens for _, chunk in chunks_of(bench.commands)) == 2048 - lost_start
    assert not of(Restart, bench.commands)


def test_a_last_chunk_that_waited_in_vain_is_computed_again() -> None:
    bench = bench_of(policy=TAPERING)
    bench.arrive("long", 1024)
    join(bench)
    running = Running(bench)
    while not any(chunk.is_last for plan in running.plans()[LEADER] for chunk in plan.chunks):
        name = HELPER if len(running.plans()[HELPER]) > 1 else LEADER  # the helper keeps one
        running.end(name)
    (first, *_) = running.plans()[HELPER]
    bench.feed(InstanceLost(HELPER))
    while running.plans()[LEADER]:
        running.end_without(LEADER)
    assert not bench.core._mesh.requests[KEY[0]].is_computed
    assert bench.core.needs_prompt(KEY)
    assert next(chunk.start for _, chunk in chunks_of(prefix(bench, 1024))) < 1024, "it says more than it can have"
    assert first.chunks[0].start < 1024
    while running.plans()[LEADER]:
        running.end(LEADER)
    assert bench.core._mesh.requests[KEY[0]].is_computed
    assert not of(Restart, bench.commands)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(GroupPrefix(LEADER, *KEY, 64, 2), id="of another loss"),
        pytest.param(GroupPrefix(InstanceId("d"), *KEY, 64, 1), id="not its leader's"),
        pytest.param(GroupPrefix(LEADER, KEY[0], Epoch(1), 64, 1), id="of another epoch"),
    ],
)
def test_other_answers_change_nothing(answer: GroupPrefix) -> None:
    running = computing()
    bench = running.bench
    bench.feed(InstanceLost(HELPER))
    while running.plans()[LEADER]:
        running.end_without(LEADER)
    assert not chunks_of(bench.feed(answer))
    assert bench.core.ignored["GroupPrefix"] == 1
    assert chunks_of(prefix(bench, 64))


def test_a_chunk_that_is_dropped_without_a_loss_starts_the_request_again() -> None:
    running = computing()
    assert of(Restart, running.end_without(HELPER))


def test_all_members_and_who_was_asked_are_freed_when_the_client_goes_away() -> None:
    bench = bench_of(num_prefill=3)
    assert asked(bench.arrive("long", 2048)) == [HELPER, "p2"]
    join(bench)
    commands = bench.feed(RequestCancelled(GATEWAY, *KEY))
    assert {free.instance_id for free in of(FreeKv, commands)} == {LEADER, HELPER, "p2", "d"}
    assert not regrouped(join(bench, "p2")), "it hears that it is late"


def test_a_helper_that_ends_its_last_chunk_after_the_leader_breaks_nothing() -> None:
    """The leader needs the KV of a chunk, not its end: the helper may be freed in its last layer."""
    bench = bench_of()
    bench.arrive("long", 1024)
    join(bench)
    running = Running(bench)
    while running.plans()[LEADER]:
        running.end(LEADER)
        if len(running.plans()[HELPER]) > 1:
            running.end(HELPER)
    (plan,) = running.plans()[HELPER]
    assert [free.instance_id for free in of(FreeKv, bench.commands)] == [HELPER]
    bench.done(HELPER, StepPlan(plan_id=plan.plan_id, chunks=(), with_decodes=False))
    assert not of(Restart, bench.commands)


@pytest.mark.parametrize("silence", [InstanceUnreachable, InstanceSuspected])
def test_a_prompt_is_computed_whatever_a_helper_has_yet_to_say_of_its_own_chunk(
    silence: type[InstanceUnreachable | InstanceSuspected],
) -> None:
    """Its KV may have landed, and be decoded there already: nobody else is to decode it, too."""
    bench = bench_of()
    bench.feed(
        InstanceJoined(modelled_profile("e", Role.DECODE, num_blocks=1024, max_model_len=4096, num_layers=8), ())
    )
    bench.arrive("long", 1024)
    receiver_id = next(place.instance_id for place in of(ExpectCopy, bench.commands))
    join(bench)
    bench.offered(LEADER, "long")
    running = Running(bench)
    while running.plans()[LEADER]:
        running.end(LEADER)
        if len(running.plans()[HELPER]) > 1:
            running.end(HELPER)
    assert running.plans()[HELPER], "it has told nothing of its last chunk"
    assert bench.core._mesh.requests[KEY[0]].is_computed
    commands = bench.feed(silence(receiver_id))
    assert not of(ExpectCopy, commands)
    assert not of(Restart, commands)


# --- all at once ---

#: Later tokens cost more: two slices of equal time are not of equal length.
PARALLEL = replace(
    POLICY,
    latency=LinearLatencyModel(a_s=0.5, b_s=1.0, c_s=1e-3, d_s=5e-4),
    prefill_step_s=200.0,
    sequence_parallel="parallel",
    group_improvement=0.0,
)


def parallel_steps_of(commands: list[Command]) -> list[list[tuple[str, ChunkPlan]]]:
    """The slices of each parallel step, in order."""
    found: list[list[tuple[str, ChunkPlan]]] = []
    for step in of(RunStep, commands):
        if not step.plan.in_parallel:
            continue
        (chunk,) = step.plan.chunks
        if not found or found[-1][-1][0] == LEADER:
            found.append([])
        found[-1].append((step.instance_id, chunk))
    return found


def slice_s(policy: PolicyConfig, chunk: ChunkPlan) -> float:
    return policy.latency.step_s(StepShape((ChunkShape(chunk.num_tokens, chunk.start),), 0, 0))


def compute_all(bench: CoreBench, *helper_ids: str) -> list[Command]:
    """A prompt of 3001 tokens, to its end."""
    bench.arrive("long", 3001)
    for helper_id in helper_ids:
        join(bench, helper_id)
    running, began_s = Running(bench), dict[tuple[str, int], float]()
    while any(running.plans().values()):
        running.end_next(began_s)
    return bench.commands


@pytest.mark.parametrize("num_members", [2, 3, 4])
def test_a_parallel_step_computes_slices_of_equal_time_at_once(num_members: int) -> None:
    helper_ids = [f"p{i}" for i in range(1, num_members)]
    commands = compute_all(bench_of(num_prefill=num_members, num_blocks=2048, policy=PARALLEL), *helper_ids)
    chunks = [chunk for _, chunk in chunks_of(commands)]
    assert [chunk.start for chunk in chunks] == [0, *(chunk.start + chunk.num_tokens for chunk in chunks[:-1])]
    assert (sum(chunk.num_tokens for chunk in chunks), chunks[-1].is_last) == (3001, True)
    parallel_steps = parallel_steps_of(commands)
    assert len(parallel_steps) > 1
    assert {len(parallel) for parallel in parallel_steps[:-1]} == {num_members}
    assert {parallel[-1][0] for parallel in parallel_steps} == {LEADER}
    busy_s = defaultdict[str, float](float)
    for name, chunk in chunks_of(commands):
        busy_s[name] += slice_s(PARALLEL, chunk)
    assert max(busy_s.values()) < 1.1 * min(busy_s.values())
    assert not any(
        step.plan.urgent or step.plan.with_decodes for step in of(RunStep, commands) if step.plan.in_parallel
    )


def test_a_prompt_whose_rest_fits_into_the_first_members_step_is_shared_by_all() -> None:
    """The second member's step is then asked for 0 tokens, without decodes (a scheduler of CI fell, 2026-11-30)."""
    policy = replace(PARALLEL, latency=replace(PARALLEL.latency, weights_s=16.0), prefill_step_s=8000.0)
    commands = compute_all(bench_of(num_prefill=3, num_blocks=2048, policy=policy), "p1", "p2")
    assert sum(chunk.num_tokens for _, chunk in chunks_of(commands)) == 3001
    (only,) = parallel_steps_of(commands)
    assert {name for name, _ in only} == {"p0", "p1", "p2"}


@pytest.mark.parametrize("num_members", [2, 4])
def test_only_gangs_that_begin_or_end_together_are_in_the_same_layer(num_members: int) -> None:
    helper_ids = [f"p{i}" for i in range(1, num_members)]
    commands = compute_all(bench_of(num_prefill=num_members, num_blocks=2048, policy=PARALLEL), *helper_ids)
    steps = [step.plan for step in of(RunStep, commands) if step.plan.in_parallel]
    parallel_steps = parallel_steps_of(commands)
    at_once: list[bool] = []
    for parallel in parallel_steps:
        plans, steps = steps[: len(parallel)], steps[len(parallel) :]
        assert len({plan.at_once for plan in plans}) == 1
        at_once.append(plans[0].at_once)
    assert at_once[-1] == parallel_steps[-1][-1][1].is_last, "what is left after it may be too little for two"
    assert at_once[0] == (num_members > 2), "of two, the leader begins behind by its first chunk"
    assert not any(at_once[2:-1])
    assert len(at_once) > 4


def test_a_parallel_step_is_planned_when_all_of_it_have_room() -> None:
    bench = bench_of(policy=PARALLEL)
    bench.arrive("long", 1021)
    (first,) = parallel_steps_of(join(bench))
    assert [name for name, _ in first] == [HELPER, LEADER]
    running = Running(bench)
    assert [len(plans) for plans in running.plans().values()][:2] == [2, 1], "the leader has its first chunk, too"
    (second,) = parallel_steps_of(running.end(LEADER))
    assert [name for name, _ in second] == [HELPER, LEADER]
    assert parallel_steps_of(running.end(HELPER)) == [], "the leader has no room"
    assert [[name for name, _ in parallel] for parallel in parallel_steps_of(running.end(LEADER))] == [[HELPER, LEADER]]


def test_who_has_something_of_its_own_is_left_out_of_a_gang() -> None:
    """Nobody waits for it, and the leader goes on alone where nobody is left."""
    bench = bench_of(num_prefill=3, policy=PARALLEL)
    bench.arrive("long", 2021)
    join(bench)
    join(bench, "p2")
    bench.arrive("other", 512)
    running = Running(bench)
    seen: list[Command] = []
    while len(running.plans()[HELPER]) + len(running.plans()["p2"]) and len(seen) < 200:
        for name in (HELPER, "p2", LEADER):
            if running.plans()[name]:
                seen += running.end(name)
    assert not of(Restart, seen)
    others = {name for name, chunk in chunks_of(seen) if chunk.request_id == "other"}
    assert len(others) == 1
    last = [chunk for _, chunk in chunks_of(seen) if chunk.request_id == "long"][-1]
    assert last.is_last


def test_without_a_member_the_rest_of_a_parallel_step_goes_on_from_what_it_has() -> None:
    bench = bench_of(num_prefill=3, policy=PARALLEL)
    bench.arrive("long", 1021)
    join(bench)
    join(bench, "p2")
    running = Running(bench)
    running.end(LEADER)
    num_computed = running.plans()[HELPER][0].chunks[0].start
    bench.feed(InstanceLost(HELPER))
    while any(running.plans()[name] for name in (LEADER, "p2")):
        for name in (LEADER, "p2"):
            if running.plans()[name]:
                running.end_without(name)
    parallel_steps = parallel_steps_of(prefix(bench, num_computed))
    assert [[name for name, _ in parallel] for parallel in parallel_steps] == [["p2", LEADER]] * 2
    assert parallel_steps[0][0][1].start == num_computed
    assert not of(Restart, bench.commands)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_helper_keeps_what_it_has_of_the_prompt(is_known: bool) -> None:
    """Its chunk was computed with all before it. It may keep the beginning already, and could not give that up now."""
    bench = bench_of(num_blocks=1024 if is_known else 512)
    prefix = tuple([PrefixHash(bytes([number]).ljust(16, b"-")) for number in range(8)])
    request = replace(a_request(KEY[0], 1024), prefix=prefix)
    helper = bench.core._mesh.instances[HELPER]
    for name in (LEADER, HELPER) if is_known else ():
        bench.core._mesh.instances[name].replace_kept(prefix[:2])
    placed = bench.feed(RequestArrived(request))
    (admit,) = [admit for admit in of(AdmitPrefill, placed) if not admit.leads]
    assert admit.keeps_prefix
    assert helper.num_taken_blocks == 256 + 64 * is_known
    join(bench)
    running = Running(bench)
    running.end(LEADER)
    running.end(HELPER)  # the second 64 tokens
    assert helper.num_cached_granules(request) == (3 if is_known else 1)
    bench.feed(InstanceLost(LEADER))
    bench.feed(KvReleased(HELPER, *KEY))
    assert helper.num_cached_granules(request) == (3 if is_known else 1)
    assert helper.num_free_blocks == helper.profile.num_blocks


def test_a_helper_without_room_for_both_keeps_nothing_more() -> None:
    bench = bench_of(num_blocks=272)
    prefix = tuple([PrefixHash(bytes([number]).ljust(16, b"-")) for number in range(8)])
    helper = bench.core._mesh.instances[HELPER]
    helper.replace_kept(prefix[:1])
    placed = bench.feed(RequestArrived(replace(a_request(KEY[0], 1024), prefix=prefix)))
    assert not any(admit.keeps_prefix for admit in of(AdmitPrefill, placed) if not admit.leads)


@pytest.mark.parametrize(
    ("num_prefill", "predictable", "is_at_once"), [(4, True, True), (3, True, False), (4, False, False)]
)
def test_members_compute_at_once_while_instances_are_spare_and_steps_predictable(
    num_prefill: int, predictable: bool, is_at_once: bool
) -> None:
    policy = replace(PARALLEL, sequence_parallel="auto", steps_are_predictable=predictable)
    core = CoreConfig(policy=policy, learning=LatencyLearning.FIXED if predictable else LatencyLearning.REFINED)
    bench = bench_of(num_prefill=num_prefill, num_blocks=2048, config=core)
    helper_ids = asked(bench.arrive("long", 3001))
    assert any(parallel_steps_of(join(bench, helper_id)) for helper_id in helper_ids) is is_at_once


def test_prompts_share_the_instances() -> None:
    """A second prompt leaves each of the two a half of the instances, and has the members take turns."""
    bench = bench_of(num_prefill=6, num_blocks=2048, policy=replace(PARALLEL, sequence_parallel="auto"))
    bench.arrive("short", 300)
    commands = bench.arrive("long", 3001)
    assert len(asked(commands)) <= 2
    assert not parallel_steps_of([*commands, *join(bench, asked(commands)[0])])

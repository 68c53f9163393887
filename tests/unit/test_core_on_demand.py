"""Memory on demand: what requests are admitted with, grants, which requests are retracted, and which may not be."""

from __future__ import annotations

import random

import pytest

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, FreeKv, Reject, Restart, RunStep
from pdmesh.core.config import CoreConfig, KvReservation
from pdmesh.core.events import GatewayJoined, InstanceJoined, KvLow, RequestArrived, Tick
from pdmesh.core.instances.kv_growth import Growth
from pdmesh.model import Epoch, InstanceId, RequestId, Resident, Role
from pdmesh.plans import ResidentContext
from pdmesh.policy.config import PolicyConfig
from pdmesh.policy.on_demand import RemainingTokens, risk_score, safe_room
from pdmesh_testing.core import GATEWAY, CoreBench, FixedGrowth, a_request, grown, of
from pdmesh_testing.modelled import modelled_profile

M = InstanceId("m")
CONFIG = CoreConfig(kv_reservation=KvReservation.ON_DEMAND, policy=PolicyConfig(chunk_tokens=64), max_queue_s=50.0)


class OnDemandBench(CoreBench):
    """A core that gives memory on demand, over one mixed instance with blocks of 4 tokens."""

    def __init__(self, num_blocks: int, *, mean_tokens: float = 1.0) -> None:
        super().__init__(config=CONFIG)
        self.num_blocks = num_blocks
        self.core._mesh.growth = FixedGrowth(mean_tokens, risk=0.01 if mean_tokens > 1 else 0.5)
        self.feed(InstanceJoined(modelled_profile("m", Role.MIXED, num_blocks=num_blocks, max_num_seqs=64), ()))

    def decodes(self, request_id: str) -> None:
        """It arrives now, and is computed: 8 tokens, of as many as there is memory for."""
        for step in of(RunStep, self.arrive(request_id, 8, 4 * self.num_blocks - 7)):
            self.done("m", step.plan)

    def low(self, *residents: tuple[str, int]) -> list[tuple[str, int]]:
        """They tell how many tokens they have; the grants."""
        contexts = tuple(
            ResidentContext(request_id=RequestId(name), epoch=Epoch(0), num_tokens=n) for name, n in residents
        )
        commands = self.feed(KvLow(M, contexts))
        return [(grow.request_id, grow.num_blocks) for grow in grown(commands)]


def test_a_request_is_admitted_with_its_prompt_and_two_blocks_and_grows_as_it_says() -> None:
    bench = OnDemandBench(num_blocks=64)
    (admit,) = of(AdmitPrefill, bench.arrive("a", prompt=9, output=100))
    assert admit.num_blocks == 3 + 2
    bench.done("m", of(RunStep, bench.commands)[0].plan)
    assert bench.low(("a", 10)) == [("a", 19)]  # room for 64 tokens more
    assert bench.low(("a", 12)) == []  # said before the grant came
    assert bench.low(("a", 60)) == [("a", 27)]  # all that it can ever need: 108 tokens
    assert bench.low(("a", 105)) == []
    assert bench.free_blocks("m") == 64 - 27


def test_a_hand_over_reserves_two_blocks_more_than_the_prompt() -> None:
    bench = CoreBench(
        modelled_profile("p", Role.PREFILL), modelled_profile("d", Role.DECODE), config=CONFIG, chunk_tokens=64
    )
    commands = bench.arrive("a", prompt=9, output=100)
    assert [admit.num_blocks for admit in of(AdmitPrefill, commands)] == [3]
    assert [place.num_blocks for place in of(ExpectCopy, commands)] == [5]


def test_a_small_max_tokens_is_a_bound() -> None:
    bench = OnDemandBench(num_blocks=64)
    (admit,) = of(AdmitPrefill, bench.arrive("a", prompt=8, output=3))
    assert admit.num_blocks == 3


def test_where_memory_is_short_each_gets_a_block_and_the_oldest_first() -> None:
    bench = OnDemandBench(num_blocks=10)
    bench.decodes("a")
    bench.now_s = 1.0
    bench.decodes("b")
    assert bench.free_blocks("m") == 2
    assert bench.low(("b", 10), ("a", 9)) == [("a", 5), ("b", 5)]
    assert bench.low(("a", 18)) == []  # nothing is left, and nobody is stuck


def test_the_one_that_is_stuck_takes_precedence_over_younger_ones_and_never_over_older_ones() -> None:
    bench = OnDemandBench(num_blocks=12)
    for at_s, name in enumerate("abc"):
        bench.now_s = at_s
        bench.decodes(name)
    bench.feed(KvLow(M, (ResidentContext(request_id=RequestId("c"), epoch=Epoch(0), num_tokens=17),)))
    assert not of(Restart, bench.commands), "all others are older"
    assert bench.low(("b", 17)) == []
    (restart,) = of(Restart, bench.commands)
    assert (restart.request_id, restart.retracted) == ("c", True)
    assert [free.request_id for free in of(FreeKv, bench.commands)] == ["c"]
    bench.low(("b", 17))
    assert len(of(Restart, bench.commands)) == 1, "what is being freed is enough"
    assert [(grow.request_id, grow.num_blocks) for grow in grown(bench.released("m", "c"))] == [("b", 5)]


def test_the_oldest_goes_on_to_its_end_whatever_the_others_do() -> None:
    bench = OnDemandBench(num_blocks=12)
    for at_s, name in enumerate("abc"):
        bench.now_s = at_s
        bench.decodes(name)
    for num_tokens in range(9, 49):
        bench.low(("a", num_tokens))
        for free in of(FreeKv, bench.commands):
            bench.commands.remove(free)
            bench.released("m", free.request_id)
    assert {restart.request_id for restart in of(Restart, bench.commands)} == {"b", "c"}
    assert bench.free_blocks("m") == 0


def test_a_retracted_request_keeps_its_arrival_and_does_not_time_out() -> None:
    bench = OnDemandBench(num_blocks=12)
    for at_s, name in enumerate("abc"):
        bench.now_s = at_s
        bench.decodes(name)
    bench.low(("a", 17))
    (restart,) = of(Restart, bench.commands)
    bench.released("m", restart.request_id)
    resumed = a_request(restart.request_id, prompt=40, output=5, epoch=1, arrival_s=2.0)
    bench.feed(RequestArrived(resumed), at_s=3.0)
    assert bench.core.num_waiting == 1
    bench.arrive("d", prompt=40, output=5)
    bench.feed(Tick(), at_s=500.0)
    assert [reject.request_id for reject in of(Reject, bench.commands)] == ["d"]
    assert bench.core.num_waiting == 1


def test_residents_that_join_again_are_granted_what_was_lost_on_the_way() -> None:
    bench = CoreBench(config=CONFIG)
    bench.feed(GatewayJoined(GATEWAY, ((RequestId("a"), Epoch(2)),)))
    resident = Resident(
        request_id=RequestId("a"),
        epoch=Epoch(2),
        gateway_id=GATEWAY,
        num_blocks=5,
        num_context_tokens=18,
        decoding=True,
        max_total_tokens=30,
    )
    commands = bench.feed(InstanceJoined(modelled_profile("m", Role.MIXED), (resident,)))
    assert [(grow.request_id, grow.num_blocks) for grow in grown(commands)] == [("a", 8)]


def test_admission_leaves_room_for_what_residents_will_need() -> None:
    """Blocks of 4; prompts of 2 blocks; 100 tokens each in the mean, of at most 1000."""
    bench = OnDemandBench(num_blocks=512, mean_tokens=100.0)
    for number in range(100):
        bench.arrive(f"r{number:03}", prompt=8, output=1000)
        for step in of(RunStep, bench.commands):
            bench.commands.remove(step)
            bench.done("m", step.plan)
    num_running = bench.core.num_running
    assert 512 // 252 < 20 < num_running < 512 // 4  # of full reservation, of none


@pytest.mark.parametrize(("room", "mean_growth"), [(500.0, 10.0), (500.0, 40.0), (5000.0, 40.0), (5000.0, 160.0)])
def test_the_risk_of_running_out_is_below_what_was_accepted(room: float, mean_growth: float) -> None:
    """As many as fit, with ten blocks each, grow until all have ended: how often they need more than there is."""
    rng, risk, first = random.Random(0), 0.01, 10
    number = 0
    while safe_room(room, number, number * first, number * first**2, mean_growth, risk_score(risk)).open >= first:
        number += 1
    assert number > 1

    def is_short(number: int) -> bool:
        ends = sorted(rng.expovariate(1 / mean_growth) for _ in range(number))
        return max((number - index) * (first + end) for index, end in enumerate(ends)) > room

    assert sum(is_short(number) for _ in range(2000)) <= 1.2 * risk * 2000
    assert sum(is_short(round(1.4 * number)) for _ in range(200)) > risk * 200  # as many as can be, about


def test_the_remaining_length_is_known_from_those_that_run_before_any_has_ended() -> None:
    remaining = RemainingTokens()
    for _ in range(300):
        remaining.drew(200)
        remaining.ended()
    assert remaining.mean == pytest.approx(200, rel=0.1)
    remaining.drew(64 * 2000)  # sixty-four that run ten times as long
    assert remaining.mean > 600


def test_a_mean_that_has_hardly_moved_is_no_news() -> None:
    growth = Growth(on_demand=True)
    assert not growth.drew(10)
    assert growth.drew(2000)

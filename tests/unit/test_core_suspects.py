"""Which requests may have caused their restart: the core tells their gateways."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.core.commands import Restart, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import DrainRequested, InstanceJoined, InstanceLost, InstanceUnreachable, RequestDropped
from pdmesh.core.recovery.suspects import MEMORY_S
from pdmesh.model import Epoch, InstanceId, RequestId, Resident
from pdmesh.plans import StepPlan
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import GATEWAY, CoreBench, bench_of, named_profile, of

D0, M0, P0 = InstanceId("decode-0"), InstanceId("mixed-0"), InstanceId("prefill-0")


def blames(bench: CoreBench, event: InstanceLost | InstanceJoined | RequestDropped) -> dict[str, float]:
    """The blame of each request that starts again."""
    return {restart.request_id: restart.blame for restart in of(Restart, bench.feed(event))}


def test_a_request_whose_chunk_was_computed_as_its_instance_died_may_have_caused_that() -> None:
    bench = CoreBench(named_profile("prefill-0"), named_profile("decode-0"), config=one_chunk())
    bench.arrive("a", prompt=16)
    bench.arrive("b", prompt=16)
    assert blames(bench, InstanceLost(P0)) == {"a": 1, "b": 0}, "the plan of b had not begun"


def test_what_decodes_is_in_each_step() -> None:
    bench = bench_of("prefill-0", "decode-0")
    bench.decoding("a")
    bench.decoding("b")
    assert blames(bench, InstanceLost(D0)) == {"a": 0.5, "b": 0.5}


def test_one_whose_kv_was_on_its_way_there_was_not_computed_there() -> None:
    bench = bench_of("prefill-0", "decode-0")
    bench.decoding("a")
    bench.done(*step_of(bench, "b"))
    assert blames(bench, InstanceLost(D0)) == {"a": 1}, "and b has another receiver"


def test_another_process_under_the_name_tells_of_a_death_and_the_same_one_does_not() -> None:
    for pid, expected in ((0, 0), (7, 1)):
        bench = bench_of("mixed-0")
        bench.arrive("a", prompt=16)
        bench.feed(InstanceUnreachable(M0))
        assert blames(bench, InstanceJoined(replace(named_profile("mixed-0"), pid=pid), ())) == {"a": expected}


def test_an_instance_that_stops_was_not_killed_by_what_it_computed() -> None:
    bench = bench_of("mixed-0")
    bench.arrive("a", prompt=16)
    bench.feed(DrainRequested(M0))
    assert blames(bench, InstanceLost(M0)) == {"a": 0}


def test_a_request_that_an_instance_does_not_serve_is_to_blame_beside_the_instance() -> None:
    bench = bench_of("mixed-0")
    bench.arrive("a", prompt=16)
    bench.arrive("b", prompt=16)
    assert blames(bench, RequestDropped(M0, RequestId("a"), Epoch(0), "its parameters are wrong")) == {"a": 0.5}


def test_residents_that_are_not_there_any_more_after_a_mere_interruption_are_no_suspects() -> None:
    bench = bench_of("mixed-0")
    bench.done(*step_of(bench, "a"))
    bench.done(*step_of(bench, "b"))
    resident = Resident(
        request_id=RequestId("a"),
        epoch=Epoch(0),
        gateway_id=GATEWAY,
        num_blocks=1,
        num_context_tokens=9,
        max_total_tokens=12,
        decoding=True,
    )
    assert blames(bench, InstanceJoined(named_profile("mixed-0"), (resident,))) == {"b": 0}


def test_what_kills_each_instance_that_computes_it_has_all_the_blame_each_time() -> None:
    bench = bench_of("mixed-0", "mixed-1", "mixed-2")
    for epoch in range(4):
        instance_id, _ = step_of(bench, "poison", epoch=epoch, prompt=16)
        assert blames(bench, InstanceLost(instance_id)) == {"poison": 1.0}
        bench.feed(InstanceJoined(replace(named_profile(instance_id), pid=epoch + 1), ()))


def test_one_has_less_of_it_while_others_die_that_did_not_compute_it() -> None:
    bench = bench_of("mixed-0", "mixed-1")
    first, _ = step_of(bench, "a", prompt=16)
    second, _ = step_of(bench, "b", prompt=16)
    assert first != second
    assert blames(bench, InstanceLost(first)) == {"a": 1.0}
    assert blames(bench, InstanceLost(second)) == {"b": 0.5}
    bench.now_s = MEMORY_S + 1.0
    bench.feed(InstanceJoined(named_profile("mixed-0"), ()))
    step_of(bench, "b", epoch=1, prompt=16)
    assert blames(bench, InstanceLost(M0)) == {"b": 1.0}, "that was long ago"


def one_chunk() -> CoreConfig:
    """One request in a step."""
    return CoreConfig(policy=PolicyConfig(chunk_tokens=16))


def step_of(bench: CoreBench, request_id: str, *, epoch: int = 0, prompt: int = 8) -> tuple[InstanceId, StepPlan]:
    """A request arrives: where it is computed, and the plan."""
    (step,) = of(RunStep, bench.arrive(request_id, prompt, epoch=epoch))
    return step.instance_id, step.plan

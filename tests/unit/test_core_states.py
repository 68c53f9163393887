"""The core chooses cached states of models that have some, evicts others, and reuses prompts behind them."""

from __future__ import annotations

from dataclasses import replace

from pdmesh.core.commands import AdmitPrefill, RunStep
from pdmesh.core.config import CoreConfig
from pdmesh.core.events import CacheReported, InstanceJoined, KvReleased, RequestArrived, Tick
from pdmesh.model import InstanceId, InstanceProfile, PrefixHash, Request, SessionKey, SessionName
from pdmesh.policy.config import PolicyConfig
from pdmesh_testing.core import CoreBench, of
from pdmesh_testing.reuse import a_profile, a_prompt, hashes

M = InstanceId("m")


def a_hybrid(num_states: int, num_blocks: int = 1024) -> InstanceProfile:
    return replace(a_profile("m", num_blocks), num_cached_states=num_states)


def a_bench(num_states: int, num_blocks: int = 1024) -> CoreBench:
    config = CoreConfig(policy=PolicyConfig(chunk_tokens=4096))
    return CoreBench(a_hybrid(num_states, num_blocks), config=config)


def branching(num_tokens: int, num_common: int, name: int) -> tuple[PrefixHash, ...]:
    """Return the granules of a prompt that shares the first ``num_common`` granules with the prompts called 0."""
    return hashes(num_common) + hashes(num_tokens // 128, name)[num_common:]


def serve(
    bench: CoreBench, request: Request, *, drawn: tuple[PrefixHash, ...] = (), states: tuple[PrefixHash, ...] = ()
) -> AdmitPrefill:
    """Compute and end a request. The instance reports ``drawn`` granules, and ``states`` behind the last one."""
    commands = bench.feed(RequestArrived(request))
    (admit,), (step,) = of(AdmitPrefill, commands), of(RunStep, commands)
    bench.done(step.instance_id, step.plan)
    bench.finish(step.instance_id, request.request_id)
    released = KvReleased(M, request.request_id, request.epoch, granules=drawn, states=states)
    bench.feed(released)
    return admit


def a_turn(name: str, num_tokens: int, prefix: tuple[PrefixHash, ...]) -> Request:
    return replace(a_prompt(name, num_tokens), prefix=prefix)


def test_a_prompt_is_reused_up_to_its_last_state() -> None:
    bench = a_bench(num_states=64)
    assert serve(bench, a_prompt("a", 1000)).states == (1, 2, 3, 4, 5, 6, 7)
    assert serve(bench, a_prompt("b", 2000)).num_reused_granules == 7


def test_a_second_prompt_hits_wherever_it_diverges_while_there_is_room() -> None:
    """Two prompts of 1,500 tokens share 600 of them; then two share 700."""
    for num_tokens, num_shared in ((1500, 600), (1600, 600), (1500, 700)):
        bench = a_bench(num_states=16)
        serve(bench, a_prompt("a", num_tokens))
        chain = branching(num_tokens, num_shared // 128, name=1)
        assert serve(bench, a_turn("b", num_tokens, chain)).num_reused_granules == num_shared // 128


def test_states_in_between_are_evenly_spaced() -> None:
    bench = a_bench(num_states=4)
    assert serve(bench, a_prompt("a", 1500)).states == (4, 8, 11)


def test_the_second_sighting_of_a_prefix_keeps_its_state() -> None:
    """The KV of the shared 5 granules is cached, but only the states behind 8 and 11."""
    bench = a_bench(num_states=2)
    assert serve(bench, a_prompt("a", 1500)).states == (8, 11)
    # The granules have blocks already, so the instance reports the state once the request has ended.
    first = serve(bench, a_turn("b", 1500, branching(1500, 5, name=1)), states=hashes(5)[4:])
    assert (first.num_reused_granules, first.states) == (0, (5, 11))
    assert first.room.states == (hashes(8)[-1], hashes(11)[-1])
    assert serve(bench, a_turn("c", 1500, branching(1500, 5, name=2))).num_reused_granules == 5


def test_a_shared_state_outlives_the_states_of_prompts() -> None:
    bench = a_bench(num_states=3)
    serve(bench, a_prompt("a", 1500))
    for number in range(1, 8):
        new = hashes(5)[4:] if number == 1 else ()
        admit = serve(bench, a_turn(f"b{number}", 1500, branching(1500, 5, name=number)), states=new)
        assert admit.num_reused_granules == (4 if number == 1 else 5)


def test_the_end_of_an_answer_replaces_the_states_of_its_prompt() -> None:
    """Two conversations have room for their latest states only, and go on by turns."""
    bench = a_bench(num_states=3)
    chains = {name: hashes(40, name) for name in (0, 1)}
    for turn in range(1, 6):
        for name, chain in chains.items():
            num_granules = 4 * turn
            request = a_turn(f"{name}-{turn}", num_granules * 128 + 10, chain[:num_granules])
            drawn = chain[num_granules : num_granules + 2]
            admit = serve(bench, request, drawn=drawn, states=drawn[-1:])
            assert admit.num_reused_granules == (num_granules - 2 if turn > 1 else 0)


def a_leased_turn(turn: int, num_granules: int, lease_s: float = 3600.0) -> Request:
    named = SessionName(SessionKey(bytes(16)), lease_s=lease_s)
    return replace(a_turn(f"t{turn}", num_granules * 128 + 10, hashes(num_granules)), session=named)


def flush(bench: CoreBench, first: int = 100) -> None:
    """Serve prompts of the same tenant, and their answers, that need more states than the instance keeps."""
    for name in range(first, first + 4):
        serve(bench, a_prompt(f"{name}", 3 * 128 + 10, name=name), drawn=(answer(name),), states=(answer(name),))


def answer(name: int) -> PrefixHash:
    return hashes(1, 200 + name % 50)[0]


def test_a_lease_covers_the_state_of_its_prompt() -> None:
    """Though the answer left a longer state. When the lease ends, the state goes, too."""
    bench = a_bench(num_states=2)
    for turn in (1, 2):
        serve(bench, a_leased_turn(turn, 3 * turn), drawn=(answer(turn),), states=(answer(turn),))
        flush(bench, 10 * turn)
    kept = bench.core._mesh.instances[M].kept
    assert kept.reusable_depth(hashes(6), 6) == 6
    assert kept.reusable_depth(hashes(3), 3) == 0, "the lease keeps states that it has no use for"
    bench.feed(Tick(), 3601.0)
    flush(bench, 30)
    assert kept.reusable_depth(hashes(6), 6) == 0


def test_states_of_sessions_with_room_are_evicted_after_others() -> None:
    """The end of an answer belongs to its prompt's session, though it is not in the prompt's chain."""
    bench = a_bench(num_states=3)
    serve(bench, a_turn("a", 3 * 128 + 10, hashes(3)), drawn=(answer(1),), states=(answer(1),))
    bench.core._mesh.cache_index.protect({hashes(3)[-1]: hashes(3)})
    states = bench.core._mesh.instances[M].kept.states
    assert states is not None
    flush(bench)
    assert answer(1) in states
    bench.core._mesh.cache_index.protect({})
    flush(bench, 10)
    assert answer(1) not in states


def test_no_command_evicts_the_state_that_it_reuses() -> None:
    bench = a_bench(num_states=1)
    serve(bench, a_prompt("a", 300))
    admit = serve(bench, a_prompt("b", 600))
    assert (admit.num_reused_granules, admit.states, admit.room.states) == (2, (), ())


def test_a_state_goes_with_its_granule() -> None:
    """The prompt of 1,000 tokens takes 32 of 64 blocks, and 28 stay."""
    bench = a_bench(num_states=64, num_blocks=64)
    serve(bench, a_prompt("a", 1000))
    admit = serve(bench, a_prompt("b", 1500, name=1))
    assert (admit.room.drop, admit.room.states) == (hashes(7)[:3:-1], ())
    assert serve(bench, a_prompt("c", 1000)).num_reused_granules == 4


def test_a_report_replaces_the_states() -> None:
    bench = a_bench(num_states=64)
    serve(bench, a_prompt("a", 1000))
    bench.feed(CacheReported(M, kept=hashes(7), states=hashes(3)[2:]))
    assert serve(bench, a_prompt("b", 1000)).num_reused_granules == 3


def test_an_instance_that_registers_tells_of_its_states() -> None:
    bench = a_bench(num_states=64)
    bench.feed(InstanceJoined(a_hybrid(64), (), kept=hashes(7), states=hashes(5)[4:]))
    assert serve(bench, a_prompt("a", 1000)).num_reused_granules == 5


def test_a_state_of_a_granule_that_the_core_does_not_know_is_ignored() -> None:
    bench = a_bench(num_states=64)
    serve(bench, a_prompt("a", 300), states=hashes(9, 3)[8:])
    assert serve(bench, a_prompt("b", 2000, name=3)).num_reused_granules == 0

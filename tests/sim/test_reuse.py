"""What is kept of KV is computed once, by a core and modelled instances that check each other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pdmesh.core.config import KvReservation
from pdmesh.core.events import Event
from pdmesh.core.operator_events import OperationRequested, RollingRequested
from pdmesh.kv_layout import GRANULE_TOKENS, KvLayout
from pdmesh.model import InstanceId, Role
from pdmesh.operations import OperationId, OperationKind
from pdmesh.policy.config import PolicyConfig
from pdmesh_lab.sim.faults import Death, random_deaths
from pdmesh_lab.sim.mesh import MeshShape, study_core
from pdmesh_lab.sim.result import SimResult
from pdmesh_lab.sim.simulator import SimConfig, Simulator
from pdmesh_lab.sim.workload import Arrival

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=16, dtype="bfloat16")


def simulate(
    arrivals: Sequence[Arrival],
    *,
    prefill: int = 0,
    decode: int = 0,
    mixed: int = 0,
    num_kv_tokens: int = 1 << 20,
    bundle: str = "pdmesh",
    kv_reservation: KvReservation = KvReservation.FULL,
    layout: KvLayout = LAYOUT,
    slo_tpot_s: float = 0.05,
    link_bytes_per_s: float = 1e9,
    deaths: Sequence[Death] = (),
    requests_of_operators: Sequence[tuple[float, Event]] = (),
) -> SimResult:
    policy = PolicyConfig(slo_tpot_s=slo_tpot_s, link_bytes_per_s=link_bytes_per_s)
    shape = MeshShape(
        num_prefill=prefill, num_decode=decode, num_mixed=mixed, kv_layout=layout, num_kv_tokens=num_kv_tokens
    )
    core = study_core(bundle, policy, 0, kv_reservation=kv_reservation)
    config = SimConfig(
        events_between_checks=1,
        deaths=deaths,
        port_bytes_per_s=link_bytes_per_s,
        requests_of_operators=requests_of_operators,
    )
    return Simulator(core, shape.instances(policy.latency), arrivals, config).run()


def a_turn(arrival_s: float, prompt: int, output: int, *, conversation: int = 0, shared: int = 0) -> Arrival:
    """The beginning of a conversation: its first ``shared`` granules are those of all conversations."""
    number = (prompt + output) // GRANULE_TOKENS
    granules = [*range(shared), *(10_000 * (conversation + 1) + index for index in range(shared, number))]
    return Arrival(arrival_s=arrival_s, num_prompt_tokens=prompt, num_output_tokens=output, granules=tuple(granules))


TWO_TURNS = [a_turn(0.0, 4096, 200), a_turn(60.0, 4400, 10)]


@pytest.mark.parametrize("bundle", ["fcfs", "pdmesh"])
def test_a_next_turn_computes_only_what_is_new(bundle: str) -> None:
    """On a mixed instance its prompt and what was drawn are kept, but for the last granule that is not full."""
    _, second = simulate(TWO_TURNS, mixed=1, bundle=bundle).requests
    assert second.num_reused_tokens == (4096 + 200 - 1) // GRANULE_TOKENS * GRANULE_TOKENS


def test_a_next_turn_is_computed_where_the_last_one_was_decoded() -> None:
    """A prefill instance has the prompt, the other one the answer, too: little is left to compute beside decodes."""
    first, second = simulate(TWO_TURNS, prefill=1, decode=1, slo_tpot_s=0.1).requests
    assert (first.prefill_id, first.decode_id) == ("prefill-000", "decode-000")
    assert (second.prefill_id, second.decode_id) == ("decode-000", "decode-000")
    assert second.num_reused_tokens == 4224
    assert first.ttft_s is not None
    assert second.ttft_s is not None
    assert second.ttft_s < 0.3 * first.ttft_s


def test_without_local_prefill_a_hand_over_brings_what_the_receiver_lacks() -> None:
    """The next turn is computed from its old prompt on, and sent from the old answer's end on."""
    _, second = simulate(TWO_TURNS, prefill=1, decode=1, bundle="fcfs", link_bytes_per_s=1e6).requests
    assert second.prefill_id == "prefill-000"
    assert second.num_reused_tokens == 4096 - GRANULE_TOKENS  # the granule that ends with a prompt is not kept there


def test_what_was_drawn_is_fetched_from_where_it_was_decoded() -> None:
    """A next turn is computed from the old answer on where the old prompt was computed, if the link is fast."""
    first, second = simulate(TWO_TURNS, prefill=1, decode=1, bundle="fcfs").requests
    assert (second.prefill_id, second.num_reused_tokens) == ("prefill-000", 4224)
    assert first.ttft_s is not None
    assert second.ttft_s is not None
    assert second.ttft_s < 0.3 * first.ttft_s


def test_a_prompt_that_is_all_kept_computes_its_last_token() -> None:
    """The last token is always computed: of what is kept, one granule is not used."""
    again = [a_turn(float(60 * i), 1024, 1) for i in range(2)]
    assert simulate(again, mixed=1).requests[1].num_reused_tokens == 1024 - GRANULE_TOKENS


def test_nothing_is_kept_where_blocks_do_not_divide_a_granule() -> None:
    """Blocks of 96 tokens: a granule would end inside one."""
    layout = KvLayout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=96, dtype="bfloat16")
    assert [run.num_reused_tokens for run in simulate(TWO_TURNS, mixed=1, layout=layout).requests] == [0, 0]


def test_what_is_kept_gives_way_to_what_needs_room() -> None:
    """The oldest goes first: of three prompts that fit two at a time the last two are kept."""
    prompts = [a_turn(60.0 * i, 4000, 1, conversation=c) for i, c in enumerate((0, 1, 2, 2, 1, 0))]
    runs = simulate(prompts, mixed=1, num_kv_tokens=8192 + 256).requests
    assert [run.num_reused_tokens > 3000 for run in runs] == [False, False, False, True, True, False]


@pytest.mark.parametrize("prefill", [0, 2])
def test_idle_instances_take_turns_so_that_the_memory_of_all_keeps_something(prefill: int) -> None:
    """Four prompts fit where two fit into each of two instances: all four would go to the first, two at a time."""
    prompts = [a_turn(60.0 * i, 4000, 200, conversation=i % 4) for i in range(8)]
    mixed, decode = (0, 2) if prefill else (2, 0)
    runs = simulate(
        prompts, prefill=prefill, decode=decode, mixed=mixed, bundle="fcfs", num_kv_tokens=8192 + 768
    ).requests
    assert [run.num_reused_tokens > 3000 for run in runs] == [False] * 4 + [True] * 4
    assert len({run.decode_id for run in runs[:4]}) == 2


def test_a_request_waits_for_who_keeps_its_prefix_no_longer_than_that_saves() -> None:
    """Another instance is idle, behind a slow link: a short wait is worth 30K tokens, and a long one is not."""
    begin = [a_turn(0.0, 30_000, 1), a_turn(0.0, 30_000, 1, conversation=1)]
    for other, waits in ((2_000, True), (60_000, False)):
        same = a_turn(60.001, 30_100, 1)
        busy = a_turn(60.0, other + 30_000, 1)
        runs = simulate([*begin, busy, same], mixed=2, bundle="fcfs", link_bytes_per_s=1e6).requests
        assert (runs[3].prefill_id == runs[0].prefill_id) == waits, f"{other} tokens before it"
        assert runs[2].prefill_id == runs[0].prefill_id


def test_the_choices_of_one_prompt_compute_it_once() -> None:
    """Those that come at once wait for the first one's prompt; on several instances as well."""
    choices = [a_turn(0.0, 8000, 100) for _ in range(4)]
    for bundle in ("fcfs", "pdmesh"):
        runs = simulate(choices, mixed=2, bundle=bundle).requests
        assert [run.num_reused_tokens for run in runs] == [0, 7936, 7936, 7936]


def test_what_a_lost_instance_kept_is_forgotten() -> None:
    """Its next process has nothing; what it is given is computed again, and kept again."""
    turns = [a_turn(60.0 * i, 4000, 200) for i in range(4)]
    deaths = [Death(InstanceId("mixed-000"), 70.0, 10.0)]
    runs = simulate(turns, mixed=1, deaths=deaths).requests
    assert [run.num_reused_tokens for run in runs] == [0, 3968, 0, 3968]


def test_a_decode_that_is_lost_finds_its_prompt_where_it_was_computed() -> None:
    """It is resumed from what it had drawn: that alone is computed again."""
    prompt = replace(a_turn(0.0, 4096, 400), max_tokens=400)
    deaths = [Death(InstanceId("decode-000"), 2.0, 1.0)]
    result = simulate([prompt], prefill=1, decode=2, deaths=deaths, bundle="fcfs")
    (run,) = result.requests
    assert (run.num_restarts, len(run.token_times_s)) == (1, 400)
    computed = sum(chunk.num_tokens for step in result.instances[0].steps for chunk in step.chunks)
    assert computed < 4096 + GRANULE_TOKENS + 400


POOLS = ((0, 0, 2), (2, 2, 0))


def an_operation(kind: OperationKind, instance_id: str, role: Role | None = None) -> OperationRequested:
    """Return an operator's request, which is forced."""
    return OperationRequested(
        operation_id=OperationId("x"),
        kind=kind,
        instance_id=InstanceId(instance_id),
        timeout_s=20.0,
        role=role,
        force=True,
    )


@pytest.mark.parametrize("pools", POOLS, ids=str)
@pytest.mark.parametrize("kind", [OperationKind.DRAIN, OperationKind.RESTART])
@pytest.mark.parametrize("of_decode", [False, True])
def test_a_next_turn_computes_only_what_is_new_though_its_holder_is_drained_or_restarted(
    pools: tuple[int, int, int], kind: OperationKind, *, of_decode: bool
) -> None:
    """The holder's prefixes are on another instance by then."""
    prefill, decode, mixed = pools
    first, second = simulate(TWO_TURNS, prefill=prefill, decode=decode, mixed=mixed).requests
    holder = first.decode_id if of_decode else first.prefill_id
    assert holder is not None
    assert second.num_reused_tokens >= 4096 - GRANULE_TOKENS
    operation = an_operation(kind, holder)
    result = simulate(TWO_TURNS, prefill=prefill, decode=decode, mixed=mixed, requests_of_operators=[(30.0, operation)])
    assert result.requests[1].num_reused_tokens >= second.num_reused_tokens
    if kind is OperationKind.DRAIN:
        assert holder not in (result.requests[1].prefill_id, result.requests[1].decode_id)


@pytest.mark.parametrize("pools", [(2, 2, 0), (0, 0, 3)], ids=str)
def test_a_rolling_restart_loses_no_prefix(pools: tuple[int, int, int]) -> None:
    """Each of 20 conversations finds its turn where it was copied, perhaps several times."""
    prefill, decode, mixed = pools
    turns = [
        a_turn(first + 2.0 * c, 2048 + 300 * n, 200, conversation=c)
        for n, first in ((0, 0.0), (1, 200.0))
        for c in range(20)
    ]
    rolling = RollingRequested(operation_id=OperationId("x"), timeout_s=20.0, start_timeout_s=20.0, force=True)
    runs = simulate(
        turns, prefill=prefill, decode=decode, mixed=mixed, requests_of_operators=[(60.0, rolling)]
    ).requests
    assert all(run.num_reused_tokens == 0 for run in runs[:20])
    assert all(run.num_reused_tokens >= 2048 for run in runs[20:])


@pytest.mark.parametrize(("role", "other"), [(Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)])
def test_a_change_of_role_loses_no_prefix(role: Role, other: Role) -> None:
    """What the instance keeps is used there, or fetched from there."""
    first = simulate(TWO_TURNS[:1], prefill=2, decode=2).requests[0]
    holder = first.prefill_id if role is Role.PREFILL else first.decode_id
    assert holder is not None
    operation = an_operation(OperationKind.ROLE, holder, other)
    result = simulate(TWO_TURNS, prefill=2, decode=2, requests_of_operators=[(30.0, operation)])
    assert result.requests[1].num_reused_tokens >= 4096 - GRANULE_TOKENS


def random_turns(rng: random.Random, number: int) -> list[Arrival]:
    """Conversations that go on, some of which share a system prompt."""
    arrivals: list[Arrival] = []
    now_s, lengths = 0.0, dict[int, int]()
    for _ in range(number):
        now_s += rng.expovariate(4.0)
        conversation = rng.randrange(12)
        prompt = lengths.get(conversation, 0) + rng.randint(1, 900)
        output = rng.randint(1, 300)
        lengths[conversation] = 0 if prompt > 6000 else prompt + output
        if conversation % 2 and prompt > 6000:
            prompt = rng.choice((128, 256, 640))
        arrivals.append(a_turn(now_s, prompt, output, conversation=conversation, shared=4 if conversation % 3 else 0))
    return arrivals


@pytest.mark.parametrize(
    ("pools", "bundle", "kv_reservation", "seeds"),
    [
        ((2, 2, 0), "pdmesh", KvReservation.ON_DEMAND, range(1)),
        pytest.param((3, 3, 2), "pdmesh", KvReservation.ON_DEMAND, range(10, 14), marks=pytest.mark.slow),
        pytest.param((2, 2, 0), "pdmesh", KvReservation.FULL, range(2), marks=pytest.mark.slow),
        pytest.param((2, 2, 0), "pdmesh", KvReservation.ON_DEMAND, range(1, 3), marks=pytest.mark.slow),
        pytest.param((0, 0, 3), "fcfs", KvReservation.ON_DEMAND, range(2), marks=pytest.mark.slow),
        pytest.param((1, 1, 1), "pdmesh", KvReservation.ON_DEMAND, range(2), marks=pytest.mark.slow),
        pytest.param((2, 1, 1), "fcfs", KvReservation.FULL, range(2), marks=pytest.mark.slow),
    ],
)
def test_core_and_instances_agree_on_what_is_kept(
    pools: tuple[int, int, int], bundle: str, kv_reservation: KvReservation, seeds: range
) -> None:
    """Under pressure and with preemptions: instances have what they are to share, and room for what they are told."""
    prefill, decode, mixed = pools
    for seed in seeds:
        arrivals = random_turns(random.Random(seed), 120)
        names = [f"{role}-{index:03d}" for role, number in zip(Role, pools, strict=True) for index in range(number)]
        deaths = random_deaths([InstanceId(name) for name in names], 6, 30.0, 2.0, seed)
        result = simulate(
            arrivals,
            prefill=prefill,
            decode=decode,
            mixed=mixed,
            num_kv_tokens=random.Random(seed).choice((9_000, 14_000, 40_000)) // 16 * 16,
            bundle=bundle,
            kv_reservation=kv_reservation,
            deaths=deaths if seed >= 10 else (),
        )
        assert all(run.outcome == "finished" for run in result.requests)
        assert sum(run.num_reused_tokens for run in result.requests) > 0

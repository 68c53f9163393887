"""A request that is prefilled on one instance and decoded on another, over both transports."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
from anyio import to_thread

from pdmesh.config import TransferConfig
from pdmesh.core.events import (
    KvReleased,
    RequestDropped,
    RequestFinished,
    StepDone,
    TransferFailed,
    TransferLanded,
    TransferOffered,
    TransferPaused,
    TransferSent,
)
from pdmesh.model import FinishReason, Role, SamplingParams
from pdmesh.wire.messages import Generation, PeerGone, StreamHandover
from pdmesh_testing.fake_engine import FakeEngine, StepGate, reference_output
from pdmesh_testing.memory_transport import MemoryFabric, MemoryFaults, MemoryTransport
from pdmesh_testing.worker import RunningInstance, chunk_plans, hand_over, make_generation, running_instance

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(max_payload_bytes=4096, num_send_buffers=4, num_receive_buffers=4)
GREEDY = SamplingParams(max_tokens=8, temperature=0)

Pair = tuple[RunningInstance, RunningInstance]


@asynccontextmanager
async def memory_pair(
    fabric: MemoryFabric | None = None,
    *,
    config: TransferConfig = CONFIG,
    prefill_engine: FakeEngine | None = None,
    decode_engine: FakeEngine | None = None,
) -> AsyncGenerator[Pair]:
    fabric = fabric or MemoryFabric()
    async with (
        MemoryTransport(config, fabric) as source,
        MemoryTransport(config, fabric) as target,
        running_instance(prefill_engine or FakeEngine(), source, role=Role.PREFILL, config=config) as prefill,
        running_instance(decode_engine or FakeEngine(), target, role=Role.DECODE, config=config) as decode,
    ):
        yield prefill, decode


@asynccontextmanager
async def ucx_pair() -> AsyncGenerator[Pair]:
    from pdmesh.transport.ucx import UcxTransport

    async with (
        UcxTransport(CONFIG) as source,
        UcxTransport(CONFIG) as target,
        running_instance(FakeEngine(num_blocks=2048), source, role=Role.PREFILL, config=CONFIG) as prefill,
        running_instance(FakeEngine(num_blocks=2048), target, role=Role.DECODE, config=CONFIG) as decode,
    ):
        yield prefill, decode


def output_of(request_id: str, *instances: RunningInstance, epoch: int = 0) -> list[int]:
    """The request's tokens from all instances, by index; no index twice."""
    tokens = {token.index: token.token_id for instance in instances for token in instance.tokens_of(request_id, epoch)}
    assert len(tokens) == sum(len(instance.tokens_of(request_id, epoch)) for instance in instances)
    return [token_id for _, token_id in sorted(tokens.items()) if token_id is not None]


def _is_done(running: RunningInstance, plan_id: int) -> bool:
    return any(isinstance(report, StepDone) and report.plan_id == plan_id for report in running.reports)


def free(running: RunningInstance, generation: Generation) -> None:
    running.free(generation.request_id, generation.epoch)


async def check_whole_way(pair: Pair, name: str, prompt: list[int], params: SamplingParams, sizes: list[int]) -> None:
    prefill, decode = pair
    generation = make_generation(name, prompt, params)
    await hand_over(generation, prefill, decode, sizes)
    await decode.reported(KvReleased, name)
    await prefill.reported(KvReleased, name)
    assert output_of(name, prefill, decode) == reference_output(prompt, params)
    assert [token.index for token in prefill.tokens_of(name)] == [0]  # the first token does not wait for the KV
    assert len(prefill.reports_of(TransferOffered, name)) == len(prefill.reports_of(TransferSent, name)) == 1
    (landed,) = decode.reports_of(TransferLanded, name)
    layout = prefill.engine.kv.layout
    num_blocks = -(-len(prompt) // layout.block_size)
    (sent,) = prefill.reports_of(TransferSent, name)
    assert landed.num_bytes == sent.num_bytes
    assert sent.destination_id == decode.instance.instance_id
    assert sent.carrier == "memory"
    assert 0 <= sent.sent_s <= sent.duration_s
    assert landed.num_bytes == num_blocks * layout.bytes_per_block
    assert len(decode.reports_of(RequestFinished, name)) == 1
    for instance in pair:
        assert len(instance.reports_of(KvReleased, name)) == 1


@pytest.mark.parametrize("sizes", [[1], [3], [4], [5, 2, 8], [100]])
async def test_the_output_is_that_of_one_instance(sizes: list[int]) -> None:
    async with memory_pair() as pair:
        await check_whole_way(pair, "r", list(range(50, 71)), GREEDY, sizes)
        for instance in pair:
            instance.assert_all_free()


@pytest.mark.parametrize("granted_after", [1, 3])
async def test_what_is_computed_ahead_of_room_goes_to_whom_a_grant_names(granted_after: int) -> None:
    prompt = list(range(50, 71))
    async with memory_pair() as (prefill, decode):
        generation = make_generation("r", prompt, GREEDY)
        prefill.admit(generation, kv_moves=True, awaits_receiver=True)
        for number, chunk in enumerate(chunk_plans(generation, [7]), 1):
            plan_id = prefill.run([chunk])
            await prefill.until(partial(_is_done, prefill, plan_id))
            if number == granted_after:
                decode.expect(generation, prefill)
                prefill.grant(generation, decode)
        await decode.reported(KvReleased, "r")
        await prefill.reported(KvReleased, "r")
        assert len(prefill.reports_of(TransferOffered, "r")) == 1
        assert output_of("r", prefill, decode) == reference_output(prompt, GREEDY)
        for instance in (prefill, decode):
            instance.assert_all_free()


@pytest.mark.ucx
async def test_the_output_is_that_of_one_instance_over_ucx() -> None:
    async with ucx_pair() as pair:
        async with anyio.create_task_group() as tasks:
            for number, sizes in enumerate([[1], [3], [4], [5, 2, 8], [100], [512]]):
                prompt = [number + position % 89 for position in range(30 + 200 * number)]
                params = SamplingParams(max_tokens=6, temperature=number % 2, seed=number)
                tasks.start_soon(check_whole_way, pair, f"r{number}", prompt, params, sizes)
        for instance in pair:
            instance.assert_all_free()


async def test_a_resumed_request_is_handed_over_too() -> None:
    prompt, whole = [3, 1, 4, 1, 5], reference_output([3, 1, 4, 1, 5], GREEDY)
    async with memory_pair() as (prefill, decode):
        generation = make_generation("r", prompt, GREEDY, output=whole[:2], epoch=1)
        await hand_over(generation, prefill, decode, [4], with_tokens=True)
        await decode.reported(RequestFinished, "r")
        assert output_of("r", prefill, decode, epoch=1) == whole[2:]
        assert prefill.tokens_of("r", epoch=1)[0].index == 2


async def test_a_request_that_ends_with_its_first_token_is_not_committed() -> None:
    async with memory_pair() as (prefill, decode):
        generation = make_generation("r", [1] * 9, SamplingParams(max_tokens=1, temperature=0))
        await hand_over(generation, prefill, decode, [4])
        await prefill.reported(KvReleased, "r")
        assert prefill.tokens_of("r")[0].finish_reason is FinishReason.LENGTH
        assert len(prefill.reports_of(RequestFinished, "r")) == 1
        assert prefill.reports_of(TransferSent, "r") == []
        assert prefill.reports_of(TransferFailed, "r") == []
        prefill.assert_all_free()
        free(decode, generation)  # as the core does
        await decode.reported(KvReleased, "r")
        assert decode.tokens == []
        decode.assert_all_free()


async def test_decoding_goes_on_while_others_land() -> None:
    async with memory_pair(prefill_engine=FakeEngine(num_blocks=512), decode_engine=FakeEngine(num_blocks=512)) as pair:
        async with anyio.create_task_group() as tasks:
            for number in range(12):
                params = SamplingParams(max_tokens=1 + 3 * (number % 5) + 1, temperature=0)
                tasks.start_soon(check_whole_way, pair, f"r{number}", [number] * (3 + 5 * number), params, [1 + number])
        for instance in pair:
            instance.assert_all_free()


async def freed_before_the_first_chunk(generation: Generation, pair: Pair, gate: StepGate, hold: anyio.Event) -> None:
    prefill, decode = pair
    decode.expect(generation, prefill)
    prefill.admit(generation, kv_moves=True)


async def freed_before_the_grant(generation: Generation, pair: Pair, gate: StepGate, hold: anyio.Event) -> None:
    prefill, _ = pair
    await freed_before_the_first_chunk(generation, pair, gate, hold)
    gate.open()
    for chunk in chunk_plans(generation, [4]):
        prefill.run([chunk])
    await prefill.until(lambda: len(prefill.tokens) == 1)


async def freed_between_layers(generation: Generation, pair: Pair, gate: StepGate, hold: anyio.Event) -> None:
    await hand_over(generation, *pair, [4])
    for _ in range(3):  # into the first layer of the second chunk; layers of the first are under way
        await to_thread.run_sync(gate.arrived)
        gate.let_through()
    await to_thread.run_sync(gate.arrived)
    await anyio.wait_all_tasks_blocked()


async def freed_in_transfer(generation: Generation, pair: Pair, gate: StepGate, hold: anyio.Event) -> None:
    gate.open()
    await hand_over(generation, *pair, [4])
    await pair[0].until(lambda: len(pair[0].tokens) == 1)
    await anyio.wait_all_tasks_blocked()


async def freed_while_decoding(generation: Generation, pair: Pair, gate: StepGate, hold: anyio.Event) -> None:
    gate.open()
    hold.set()
    await hand_over(generation, *pair, [4])
    await pair[1].until(lambda: len(pair[1].tokens) >= 3)


Stage = Callable[[Generation, Pair, StepGate, anyio.Event], Awaitable[None]]


@pytest.mark.parametrize(
    "reach_stage",
    [
        freed_before_the_first_chunk,
        freed_before_the_grant,
        freed_between_layers,
        freed_in_transfer,
        freed_while_decoding,
    ],
)
async def test_a_cancel_at_any_stage_frees_both_sides(reach_stage: Stage) -> None:
    gate, hold = StepGate(), anyio.Event()
    fabric = MemoryFabric(MemoryFaults(gate=hold))
    async with memory_pair(fabric, prefill_engine=FakeEngine(gate=gate)) as pair:
        params = SamplingParams(max_tokens=200, temperature=0)
        generation = make_generation("r", list(range(13)), params)
        await reach_stage(generation, pair, gate, hold)
        for instance in pair:
            free(instance, generation)
        gate.open()
        hold.set()
        for instance in pair:
            await instance.reported(KvReleased, "r")
        await anyio.wait_all_tasks_blocked()
        for instance in pair:
            instance.assert_all_free()
            assert instance.reports_of(RequestFinished, "r") == []
        # and the next request finds everything in order
        await check_whole_way(pair, "next", list(range(30)), GREEDY, [7])


@pytest.mark.parametrize(
    ("reach_stage", "tell_dropped"),
    [
        (freed_before_the_first_chunk, (True, True)),
        (freed_before_the_grant, (True, True)),
        (freed_between_layers, (True, True)),
        (freed_in_transfer, (False, True)),  # the receiver may have everything
        (freed_while_decoding, (False, False)),
    ],
)
async def test_the_next_scheduler_is_told_what_decodes_nowhere(
    reach_stage: Stage, tell_dropped: tuple[bool, bool]
) -> None:
    gate, hold = StepGate(), anyio.Event()
    fabric = MemoryFabric(MemoryFaults(gate=hold))
    async with memory_pair(fabric, prefill_engine=FakeEngine(gate=gate)) as pair:
        params = SamplingParams(max_tokens=200, temperature=0)
        await reach_stage(make_generation("r", list(range(13)), params, epoch=2), pair, gate, hold)
        async with anyio.create_task_group() as tasks:
            for instance in pair:
                tasks.start_soon(instance.instance.drop_all_but_decoding)
            await anyio.wait_all_tasks_blocked()
            gate.open()
            hold.set()
        for instance, tells in zip(pair, tell_dropped, strict=True):
            assert instance.instance.dropped == ([("r", 2)] if tells else [])
            assert all(resident.decoding for resident in instance.instance.residents())
        free(pair[1], make_generation("r", [], params, epoch=2))


async def test_a_hand_over_that_is_paused_gives_the_same_output() -> None:
    """Paused after the first of three chunks; the others are computed meanwhile."""
    prompt = list(range(70, 93))
    async with memory_pair() as (prefill, decode):
        generation = make_generation("r", prompt, GREEDY)
        first, *others = chunk_plans(generation, [8])
        decode.expect(generation, prefill)
        prefill.admit(generation, kv_moves=True)
        prefill.run([first])
        await prefill.reported(TransferOffered, "r")
        prefill.grant(generation, decode)
        prefill.pause(generation.request_id, generation.epoch)
        await prefill.reported(TransferPaused, "r")
        for chunk in others:
            prefill.run([chunk])
        await prefill.until(lambda: len(prefill.tokens_of("r")) == 1)
        await anyio.wait_all_tasks_blocked()
        assert decode.reports_of(TransferLanded, "r") == []
        assert len(prefill.reports_of(TransferOffered, "r")) == 1  # the scheduler knows when to grant it again
        prefill.grant(generation, decode)
        await decode.reported(KvReleased, "r")
        assert output_of("r", prefill, decode) == reference_output(prompt, GREEDY)
        prefill.assert_all_free()
        decode.assert_all_free()


async def test_pieces_that_are_damaged_again_and_again_fail_the_transfer_on_both_sides() -> None:
    fabric = MemoryFabric(MemoryFaults(corrupt=lambda _header: True))
    async with memory_pair(fabric) as pair:
        prefill, decode = pair
        generation = make_generation("r", list(range(21)), GREEDY)
        await hand_over(generation, prefill, decode, [8])
        for instance in pair:
            await instance.reported(TransferFailed, "r")
        fabric.faults = MemoryFaults()
        await decode.reported(KvReleased, "r")
        decode.assert_all_free()
        assert decode.tokens == []
        assert prefill.reports_of(KvReleased, "r") == []  # the sender keeps it for another receiver
        free(prefill, generation)
        await prefill.reported(KvReleased, "r")
        prefill.assert_all_free()
        await check_whole_way(pair, "next", list(range(30)), GREEDY, [7])


async def test_an_unreachable_receiver_fails_the_transfer() -> None:
    fabric = MemoryFabric(MemoryFaults(refuse=True))
    async with memory_pair(fabric) as (prefill, decode):
        generation = make_generation("r", list(range(21)), GREEDY)
        await hand_over(generation, prefill, decode, [8])
        await prefill.reported(TransferFailed, "r")
        for instance in (prefill, decode):
            free(instance, generation)
            await instance.reported(KvReleased, "r")
            instance.assert_all_free()
        assert len(prefill.reports_of(TransferFailed, "r")) == 1


async def test_a_receiver_that_is_gone_fails_the_transfer_at_once() -> None:
    async with memory_pair(MemoryFabric(MemoryFaults(gate=anyio.Event()))) as (prefill, decode):
        generation = make_generation("r", list(range(21)), GREEDY)
        await hand_over(generation, prefill, decode, [8])
        await prefill.until(lambda: len(prefill.tokens) == 1)
        await anyio.wait_all_tasks_blocked()  # pieces are under way, and nobody takes them
        prefill.instance.handle(PeerGone(data_address=decode.address))
        await prefill.reported(TransferFailed, "r")
        for instance in (prefill, decode):
            free(instance, generation)
            await instance.reported(KvReleased, "r")
            instance.assert_all_free()


# --- another receiver ---


@asynccontextmanager
async def memory_three(
    fabric: MemoryFabric, *, prefill_role: Role = Role.PREFILL, prefill_engine: FakeEngine | None = None
) -> AsyncGenerator[tuple[RunningInstance, RunningInstance, RunningInstance]]:
    async with (
        MemoryTransport(CONFIG, fabric) as other,
        running_instance(FakeEngine(), other, role=Role.DECODE, instance_id="other", config=CONFIG) as second,
        MemoryTransport(CONFIG, fabric) as source,
        MemoryTransport(CONFIG, fabric) as target,
        running_instance(prefill_engine or FakeEngine(), source, role=prefill_role, config=CONFIG) as prefill,
        running_instance(FakeEngine(), target, role=Role.DECODE, config=CONFIG) as decode,
    ):
        yield prefill, decode, second


def turns_of(instance: RunningInstance, request_id: str) -> list[tuple[int, str]]:
    """Whom it named, and for which index, after the token that names one."""
    return [
        (said.index, said.next_instance_id)
        for said in instance.tokens
        if isinstance(said, StreamHandover) and said.request_id == request_id
    ]


@pytest.mark.parametrize("how", ["all pieces are damaged", "it is withdrawn", "it is another's at once"])
async def test_what_a_receiver_did_not_take_goes_to_another_one_whole(how: str) -> None:
    gate = anyio.Event()
    is_damaged = how == "all pieces are damaged"
    fabric = MemoryFabric(MemoryFaults(corrupt=lambda _header: True) if is_damaged else MemoryFaults(gate=gate))
    async with memory_three(fabric) as (prefill, decode, second):
        generation = make_generation("r", list(range(50, 71)), GREEDY)
        await hand_over(generation, prefill, decode, [8])
        await prefill.until(lambda: bool(prefill.tokens_of("r")))
        if is_damaged:
            await prefill.reported(TransferFailed, "r")
            fabric.faults = MemoryFaults()
        elif how == "it is withdrawn":
            await anyio.wait_all_tasks_blocked()  # pieces are under way, and nobody takes them
            prefill.withdraw("r")
            prefill.withdraw("r")
            assert turns_of(prefill, "r") == [(1, "prefill")]
        second.expect(generation, prefill, number=2)
        prefill.grant(generation, second, number=2)
        gate.set()
        await second.reported(RequestFinished, "r")
        await prefill.reported(KvReleased, "r")
        assert output_of("r", prefill, second) == reference_output(list(range(50, 71)), GREEDY)
        assert turns_of(prefill, "r")[-1] == (1, "other")
        assert decode.tokens == []
        (sent,) = prefill.reports_of(TransferSent, "r")
        assert (sent.transfer_id, sent.num_bytes) == (2, second.reports_of(TransferLanded, "r")[0].num_bytes)
        free(decode, generation)
        await decode.reported(KvReleased, "r")
        for instance in (prefill, decode, second):
            instance.assert_all_free()


@pytest.mark.parametrize("num_before", [0, 1, 2])
async def test_a_receiver_may_change_while_the_prompt_is_computed(num_before: int) -> None:
    async with memory_three(MemoryFabric()) as (prefill, decode, second):
        prompt = list(range(30))
        generation = make_generation("r", prompt, GREEDY)
        decode.expect(generation, prefill)
        prefill.admit(generation, kv_moves=True)
        chunks = chunk_plans(generation, [10])
        for chunk in chunks[:num_before]:
            prefill.run([chunk])
        if num_before:
            await prefill.reported(TransferOffered, "r")
            prefill.grant(generation, decode)
        prefill.withdraw("r")
        second.expect(generation, prefill, number=2)
        for chunk in chunks[num_before:]:
            prefill.run([chunk])
        await prefill.reported(TransferOffered, "r")
        prefill.grant(generation, second, number=2)
        await second.reported(RequestFinished, "r")
        await prefill.reported(KvReleased, "r")
        assert output_of("r", prefill, second) == reference_output(prompt, GREEDY)
        assert len(prefill.reports_of(TransferOffered, "r")) == 1
        free(decode, generation)


@pytest.mark.parametrize("num_before", [1, 3])
@pytest.mark.parametrize("is_granted", [False, True])
async def test_what_nobody_takes_decodes_where_it_is(num_before: int, is_granted: bool) -> None:
    """Also if a grant crossed the report that its transfer had failed."""
    gate = anyio.Event()
    fabric = MemoryFabric(MemoryFaults(gate=gate))
    async with memory_three(fabric, prefill_role=Role.MIXED) as (prefill, decode, _):
        prompt = list(range(30))
        generation = make_generation("r", prompt, GREEDY)
        decode.expect(generation, prefill)
        prefill.admit(generation, kv_moves=True)
        chunks = chunk_plans(generation, [10])
        for chunk in chunks[:num_before]:
            prefill.run([chunk])
        await prefill.reported(TransferOffered, "r")
        await anyio.wait_all_tasks_blocked()
        if is_granted:
            prefill.grant(generation, decode)
        else:
            prefill.withdraw("r")
        prefill.keep(generation)
        for chunk in chunks[num_before:]:
            prefill.run([chunk])
        await prefill.reported(KvReleased, "r")
        assert output_of("r", prefill) == reference_output(prompt, GREEDY)
        gate.set()
        free(decode, generation)
        for instance in (prefill, decode):
            await instance.reported(KvReleased, "r")
            instance.assert_all_free()


async def test_what_cannot_be_kept_for_lack_of_room_is_given_up() -> None:
    engine = FakeEngine(num_blocks=8)
    async with memory_three(MemoryFabric(), prefill_role=Role.MIXED, prefill_engine=engine) as (prefill, _, _other):
        generation = make_generation("r", list(range(30)), SamplingParams(max_tokens=20, temperature=0))
        prefill.admit(generation, kv_moves=True)
        prefill.run(chunk_plans(generation, [30]))
        await prefill.until(lambda: bool(prefill.tokens_of("r")))
        prefill.withdraw("r")
        prefill.keep(generation)
        await prefill.reported(RequestDropped, "r")
        await prefill.reported(KvReleased, "r")
        prefill.assert_all_free()


async def test_a_capability_that_does_not_fit_moves_nothing() -> None:
    async with memory_pair() as (prefill, decode):
        generation = make_generation("r", list(range(21)), GREEDY)
        await hand_over(generation, prefill, decode, [8])
        stranger = make_generation("s", list(range(21)), GREEDY)
        prefill.admit(stranger, kv_moves=True)
        for chunk in chunk_plans(stranger, [21]):
            prefill.run([chunk])
        prefill.grant(stranger, decode)  # nobody told the receiver
        await decode.reported(RequestFinished, "r")
        await prefill.until(lambda: bool(prefill.tokens_of("s")))
        await anyio.wait_all_tasks_blocked()
        assert sum(decode.mover.counters().dropped.values()) > 0
        free(prefill, stranger)
        for instance in (prefill, decode):
            instance.assert_all_free()


@pytest.mark.parametrize("num_stages", [(2, 1), (1, 2), (2, 2)])
async def test_kv_leaves_stages_and_comes_to_stages(num_stages: tuple[int, int]) -> None:
    """Layers of one chunk leave while another stage computes the next one."""
    prefill, decode = (FakeEngine(num_blocks=512, num_stages=number) for number in num_stages)
    async with memory_pair(prefill_engine=prefill, decode_engine=decode) as pair:
        for number, sizes in enumerate(([4], [7], [3, 11], [64])):
            await check_whole_way(pair, f"r{number}", list(range(60)), GREEDY, sizes)

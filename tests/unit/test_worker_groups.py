"""One prompt computed by several instances in turn, over both transports: the output is that of one instance."""

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from pdmesh.config import TransferConfig
from pdmesh.core.commands import RunStep
from pdmesh.core.events import (
    GroupPrefix,
    KvExpected,
    KvReleased,
    RequestDropped,
    RequestFinished,
    StepDone,
    TransferOffered,
    TransferSent,
)
from pdmesh.kv.intake import WINDOW_CLOSED
from pdmesh.kv.piece import PieceKind, unpack_header
from pdmesh.kv_layout import GRANULE_TOKENS, KvPart
from pdmesh.model import Epoch, Role, SamplingParams
from pdmesh.plans import ChunkPlan, StepPlan
from pdmesh.transport.seal import MeshKey
from pdmesh.wire.messages import Generation, PeerGone, PromptLogprobs
from pdmesh_testing.fake_engine import FAKE_LAYOUT, FakeEngine, StepGate, reference_output
from pdmesh_testing.groups import admit_member, block_chunks, regroup, running_members
from pdmesh_testing.kv import TransportMaker
from pdmesh_testing.memory_transport import MemoryFaults
from pdmesh_testing.worker import (
    DECODE_INSTANCE,
    RunningInstance,
    chunk_plans,
    make_generation,
    running_instance,
    with_prefix,
)

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(max_payload_bytes=4096, num_send_buffers=4, num_receive_buffers=4, group_no_progress_s=20.0)
GREEDY = SamplingParams(max_tokens=8, temperature=0)
BLOCK = 4


@pytest.fixture(params=["memory", pytest.param("ucx", marks=pytest.mark.ucx)])
def maker(request: pytest.FixtureRequest) -> TransportMaker:
    return TransportMaker(request.param)


@pytest.fixture
def memory() -> TransportMaker:
    return TransportMaker("memory")


@asynccontextmanager
async def members(
    maker: TransportMaker,
    number: int,
    *,
    config: TransferConfig = CONFIG,
    make_engine: Callable[[int], FakeEngine] = lambda _: FakeEngine(num_blocks=256),
) -> AsyncGenerator[list[RunningInstance]]:
    async with AsyncExitStack() as stack:
        transports = [await stack.enter_async_context(maker.open(config)) for _ in range(number)]
        engines = [make_engine(number) for number in range(number)]
        async with running_members(engines, transports, config=config) as running:
            yield running


def group_policy(running: Sequence[RunningInstance], chunks: Sequence[ChunkPlan], owners: Sequence[int]) -> None:
    """Send each chunk to whom it is for; the last one to the leader."""
    for chunk, owner in zip(chunks, owners, strict=True):
        running[0 if chunk.is_last else owner].run([chunk])


def owners_of(chunks: Sequence[ChunkPlan], number: int) -> list[int]:
    return [index % number for index in range(len(chunks))]


async def check_output(leader: RunningInstance, name: str, prompt: list[int], params: SamplingParams) -> None:
    await leader.reported(RequestFinished, name)
    tokens = leader.tokens_of(name)
    assert [token.index for token in tokens] == list(range(len(tokens)))
    assert [token.token_id for token in tokens] == reference_output(prompt, params)


async def free_all(running: Sequence[RunningInstance], generation: Generation, *, num_cached: int = 0) -> None:
    """So many granules are kept by the first of them."""
    for member in running:
        member.free(generation.request_id, generation.epoch)
    for member in running:
        await member.reported(KvReleased, generation.request_id)
        member.assert_all_free(num_cached=num_cached if member is running[0] else 0)
        assert member.mover.counters().num_exchanging == 0


@pytest.mark.parametrize("number", [1, 2, 3, 4])
async def test_the_output_is_that_of_one_instance(maker: TransportMaker, number: int) -> None:
    prompt = list(range(50, 113))
    async with members(maker, number) as running:
        generation = make_generation("r", prompt, GREEDY)
        for member in running:
            admit_member(member, generation, running)
        chunks = block_chunks(generation, BLOCK, [2, 1, 3])
        group_policy(running, chunks, owners_of(chunks, number))
        await check_output(running[0], "r", prompt, GREEDY)
        for helper in running[1:]:
            assert len(helper.reports_of(KvExpected, "r")) == 1
            assert helper.tokens == []
            assert helper.reports_of(TransferOffered, "r") == []
        for member in running[1:]:
            assert any(part.num_tokens for report in step_reports(member) for part in report.chunks)
        # A helper may still copy pages when the leader has drawn the first token and nothing is to be read any more.
        assert all(member.mover.counters().dropped.keys() <= {WINDOW_CLOSED} for member in running)
        await free_all(running, generation)


def step_reports(member: RunningInstance) -> list[StepDone]:
    return [report for report in member.reports if isinstance(report, StepDone)]


def has_reported(member: RunningInstance, num_steps: int) -> bool:
    return len(step_reports(member)) >= num_steps


async def test_members_of_a_parallel_step_are_in_the_same_layer_at_the_same_time(maker: TransportMaker) -> None:
    """Each is sent each layer at once: of who takes turns, three of these six layers would wait for each other."""
    prompt = list(range(50, 114))
    layout = replace(FAKE_LAYOUT, num_layers=6)
    gates = [StepGate(), StepGate()]

    def make_engine(number: int) -> FakeEngine:
        return FakeEngine(layout, num_blocks=256, gate=gates[number])

    async with members(maker, 2, make_engine=make_engine) as running:
        leader, helper = running
        generation = make_generation("r", prompt, GREEDY)
        for member in running:
            admit_member(member, generation, running)
        first, last = block_chunks(generation, BLOCK, [9, 7])
        helper.run([first], in_parallel=True, at_once=True)
        leader.run([last], in_parallel=True, at_once=True)
        for gate in gates:
            await anyio.to_thread.run_sync(gate.arrived)
        for gate in gates:
            gate.let_through()
        await anyio.to_thread.run_sync(gates[1].arrived)  # the helper has computed no second layer
        await anyio.to_thread.run_sync(gates[0].arrived)  # and the leader has the first
        for gate in gates:
            gate.open()
        await leader.reported(RequestFinished, "r")
        tokens = [token.token_id for token in leader.tokens_of("r")]
        assert tokens == reference_output(prompt, GREEDY, layout=layout)
        await free_all(running, generation)


async def test_a_group_hands_over_as_one_instance_does(maker: TransportMaker) -> None:
    """What landed here moves on with what was computed here, each page once."""
    prompt = list(range(30, 99))
    async with (
        members(maker, 3) as running,
        maker.open(CONFIG) as transport,
        running_instance(FakeEngine(num_blocks=256), transport, role=Role.DECODE, config=CONFIG) as decode,
    ):
        generation = make_generation("r", prompt, GREEDY)
        decode.expect(generation, running[0])
        for member in running:
            admit_member(member, generation, running, decode=decode)
        chunks = block_chunks(generation, BLOCK, [3])
        group_policy(running, chunks, owners_of(chunks, 3))
        await running[0].reported(TransferOffered, "r")
        running[0].grant(generation, decode)
        await decode.reported(RequestFinished, "r")
        await running[0].reported(KvReleased, "r")
        tokens = [*running[0].tokens_of("r"), *decode.tokens_of("r")]
        assert [token.token_id for token in tokens] == reference_output(prompt, GREEDY)
        sent = running[0].reports_of(TransferSent, "r")[0]
        layout = decode.engine.kv.layout
        assert sent.num_bytes == -(-len(prompt) // BLOCK) * layout.bytes_per_block
        await free_all(running[1:], generation)
        decode.assert_all_free()


@pytest.mark.parametrize("seed", range(12))
async def test_members_may_join_late_and_hear_of_each_other_in_any_order(memory: TransportMaker, seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(1000) for _ in range(rng.randrange(40, 200))]
    number = rng.randint(2, 4)
    async with members(memory, number) as running:
        generation = make_generation("r", prompt, GREEDY)
        chunks = block_chunks(generation, BLOCK, [rng.randint(1, 4) for _ in range(40)])
        running[0].admit(generation, kv_moves=False)  # as any request: the group is formed later
        known = 1
        for index, chunk in enumerate(chunks):
            if known < number and rng.random() < 0.3:
                known += 1
                told = [*running[: known - 1], running[known - 1]]
                rng.shuffle(told)
                for member in told:
                    if member is running[known - 1]:
                        admit_member(member, generation, running[:known])
                    else:
                        regroup(member, generation, running[:known])
                    if rng.random() < 0.5:
                        await anyio.wait_all_tasks_blocked()
            running[0 if chunk.is_last else rng.randrange(known)].run([chunk])
            if rng.random() < 0.3 and index % 3 == 0:
                await anyio.wait_all_tasks_blocked()
        await check_output(running[0], "r", prompt, GREEDY)
        for member in running:
            assert "duplicate" not in member.mover.counters().dropped
        await free_all(running[:known], generation)


async def test_a_group_may_be_formed_while_its_leader_computes(maker: TransportMaker) -> None:
    """What was computed before, and the chunk under way, comes to the helper too; its own comes back and moves on."""
    prompt = list(range(60, 150))
    gate = StepGate()

    def make_engine(number: int) -> FakeEngine:
        return FakeEngine(num_blocks=256, gate=None if number else gate)

    async with (
        members(maker, 2, make_engine=make_engine) as running,
        maker.open(CONFIG) as transport,
        running_instance(FakeEngine(num_blocks=256), transport, role=Role.DECODE, config=CONFIG) as decode,
    ):
        leader, helper = running
        generation = make_generation("r", prompt, GREEDY)
        decode.expect(generation, leader)
        leader.admit(generation, kv_moves=True)
        chunks = block_chunks(generation, BLOCK, [4])
        for chunk in chunks[:2]:
            leader.run([chunk])
        for _ in range(3):
            await anyio.to_thread.run_sync(gate.arrived)
            gate.let_through()
        await anyio.to_thread.run_sync(gate.arrived)  # between the layers of the second chunk
        admit_member(helper, generation, running)
        regroup(leader, generation, running)
        helper.run([chunks[2]])
        await anyio.wait_all_tasks_blocked()
        gate.open()
        for chunk in chunks[3:]:
            (leader if chunk.is_last else helper).run([chunk])
        await leader.reported(TransferOffered, "r")
        leader.grant(generation, decode)
        await decode.reported(RequestFinished, "r")
        await leader.reported(KvReleased, "r")
        tokens = [*leader.tokens_of("r"), *decode.tokens_of("r")]
        assert [token.token_id for token in tokens] == reference_output(prompt, GREEDY)
        await free_all([helper], generation)
        decode.assert_all_free()


async def test_a_leader_that_was_alone_may_go_on_between_blocks(memory: TransportMaker) -> None:
    """The block that it had begun is its own, and goes to the helper once it is full."""
    prompt = list(range(60, 110))
    async with members(memory, 2) as running:
        leader, helper = running
        generation = make_generation("r", prompt, GREEDY)
        leader.admit(generation, kv_moves=False)
        pieces = [(0, 6), (6, 6), (12, 20), (32, 18)]
        first, second, third, last = (
            ChunkPlan(
                request_id=generation.request_id,
                epoch=generation.epoch,
                start=start,
                num_tokens=num_tokens,
                is_last=start + num_tokens == len(prompt),
            )
            for start, num_tokens in pieces
        )
        leader.run([first])
        await leader.until(lambda: len(step_reports(leader)) == 1)
        admit_member(helper, generation, running)
        regroup(leader, generation, running)
        helper.run([third])
        leader.run([second])
        leader.run([last])
        await check_output(leader, "r", prompt, GREEDY)
        await free_all(running, generation)


async def test_prompt_logprobs_come_from_whoever_computed_the_chunk(memory: TransportMaker) -> None:
    prompt = list(range(50, 90))
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)
    async with members(memory, 2) as running:
        generation = make_generation("r", prompt, params)
        for member in running:
            admit_member(member, generation, running)
        chunks = block_chunks(generation, BLOCK, [3])
        group_policy(running, chunks, owners_of(chunks, 2))
        await check_output(running[0], "r", prompt, params)
        found = [
            message.start + index
            for member in running
            for message in member.tokens
            if isinstance(message, PromptLogprobs)
            for index in range(len(message.logprobs))
        ]
        assert sorted(found) == list(range(1, len(prompt)))
        await free_all(running, generation)


async def test_other_rows_of_a_step_and_urgent_steps_are_exact_while_it_waits(memory: TransportMaker) -> None:
    """The helper's step waits for a leader that has not begun: meanwhile it runs what is urgent."""
    long, other, short = list(range(100, 124)), list(range(7)), list(range(5))
    async with members(memory, 2) as running:
        leader, helper = running
        generation, mixed, urgent = (
            make_generation(name, prompt, GREEDY) for name, prompt in (("r", long), ("mixed", other), ("urgent", short))
        )
        for member in running:
            admit_member(member, generation, running)
        helper.admit(mixed, kv_moves=False)
        helper.admit(urgent, kv_moves=False)
        first, second, last = block_chunks(generation, BLOCK, [2])
        (other_chunk,) = block_chunks(mixed, BLOCK, [10])
        (short_chunk,) = block_chunks(urgent, BLOCK, [10])
        helper.run([second, other_chunk])
        await anyio.wait_all_tasks_blocked()
        plan = StepPlan(plan_id=99, chunks=(short_chunk,), with_decodes=False, urgent=True)
        helper.instance.handle(RunStep(instance_id=helper.instance.instance_id, plan=plan))
        await helper.until(lambda: len(helper.tokens_of("urgent")) == 1)
        assert helper.tokens_of("mixed") == []
        assert [report.plan_id for report in step_reports(helper)] == [99]
        leader.run([first])
        leader.run([last])
        await check_output(helper, "urgent", short, GREEDY)
        await check_output(helper, "mixed", other, GREEDY)
        await check_output(leader, "r", long, GREEDY)
        waited = next(report for report in step_reports(helper) if report.plan_id != 99)
        assert waited.duration_s < waited.ended_s - waited.began_s
        await free_all(running, generation)


async def test_an_urgent_plan_with_a_groups_chunk_overtakes_nothing(memory: TransportMaker) -> None:
    """Its KV may be that of a plan before it: it would wait inside that one's step."""
    prompt = list(range(100, 124))
    gate = StepGate()

    def make_engine(number: int) -> FakeEngine:
        return FakeEngine(num_blocks=256, gate=None if number else gate)

    async with members(memory, 2, make_engine=make_engine) as running:
        leader, helper = running
        generation = make_generation("r", prompt, GREEDY)
        for member in running:
            admit_member(member, generation, running)
        chunks = block_chunks(generation, BLOCK, [2])
        leader.run([chunks[0]])
        await anyio.to_thread.run_sync(gate.arrived)
        plan = StepPlan(plan_id=99, chunks=(chunks[2],), with_decodes=False, urgent=True)
        leader.instance.handle(RunStep(instance_id=leader.instance.instance_id, plan=plan))
        helper.run([chunks[1]])
        gate.open()
        await check_output(leader, "r", prompt, GREEDY)
        await free_all(running, generation)


@pytest.mark.parametrize("is_mixed", [False, True])
async def test_a_cancel_ends_the_wait(maker: TransportMaker, is_mixed: bool) -> None:
    other = list(range(9))
    async with members(maker, 2) as running:
        _, helper = running
        generation, beside = make_generation("r", list(range(40)), GREEDY), make_generation("other", other, GREEDY)
        for member in running:
            admit_member(member, generation, running)
        helper.admit(beside, kv_moves=False)
        _, second, *_ = block_chunks(generation, BLOCK, [2])
        helper.run([second, *(block_chunks(beside, BLOCK, [10]) if is_mixed else ())])
        await anyio.wait_all_tasks_blocked()
        for member in running:
            member.free("r")
        for member in running:
            await member.reported(KvReleased, "r")
        if is_mixed:
            await check_output(helper, "other", other, GREEDY)
        await helper.until(lambda: len(step_reports(helper)) >= 1)
        assert step_reports(helper)[0].chunks[0].num_tokens == 0
        helper.free("other")
        await helper.reported(KvReleased, "other")
        for member in running:
            member.assert_all_free()
            assert member.reports_of(RequestDropped, "r") == []


@pytest.mark.parametrize("is_leader", [False, True])
async def test_a_cancel_ends_a_running_chunk_at_its_next_layer(memory: TransportMaker, is_leader: bool) -> None:
    """So its blocks are free on all members after a layer's time, however long their steps are."""
    layout, gate = replace(FAKE_LAYOUT, num_layers=16), StepGate()

    def make_engine(number: int) -> FakeEngine:
        gated = (number == 0) is is_leader
        return FakeEngine(layout, num_blocks=256, gate=gate if gated else None)

    async with members(memory, 2, make_engine=make_engine) as running:
        computing, other = running if is_leader else running[::-1]
        generation = make_generation("r", list(range(40)), GREEDY)
        for member in running:
            admit_member(member, generation, running)
        first, second, *_ = block_chunks(generation, BLOCK, [2])
        other.run([first])
        await other.until(lambda: has_reported(other, 1))
        computing.run([second])
        num_layers = 5
        for _ in range(num_layers):
            await anyio.to_thread.run_sync(gate.arrived)
            gate.let_through()
        await anyio.to_thread.run_sync(gate.arrived)
        for member in running:
            member.free("r")
        await other.reported(KvReleased, "r")
        assert computing.reports_of(KvReleased, "r") == []  # it writes into its blocks yet
        gate.let_through()
        await computing.reported(KvReleased, "r")
        for member in running:
            member.assert_all_free()
        gate.open()


async def test_waiting_for_nothing_is_given_up(memory: TransportMaker) -> None:
    config = TransferConfig(max_payload_bytes=4096, group_no_progress_s=0.05)
    async with members(memory, 2, config=config) as running:
        _, helper = running
        generation = make_generation("r", list(range(40)), GREEDY)
        for member in running:
            admit_member(member, generation, running)
        helper.run([block_chunks(generation, BLOCK, [2])[1]])
        dropped = await helper.reported(RequestDropped, "r")
        assert dropped.reason == "no KV came from other members of the group for 0.05 s"
        await helper.reported(KvReleased, "r")
        assert step_reports(helper)[0].chunks[0].num_tokens == 0
        helper.assert_all_free()
        await free_all(running[:1], generation)


async def test_a_member_that_is_gone_is_the_schedulers_to_say(maker: TransportMaker) -> None:
    """What nobody will compute is waited for until then, and nothing is dropped."""
    prompt = list(range(40))
    async with members(maker, 3) as running:
        leader, helper, dead = running
        generation = make_generation("r", prompt, GREEDY)
        for member in running:
            admit_member(member, generation, running)
        first, second, third, *_ = block_chunks(generation, BLOCK, [2])
        leader.run([first])
        helper.run([third])
        for member in (leader, helper):
            member.instance.handle(PeerGone(data_address=dead.address))
        await leader.until(lambda: len(step_reports(leader)) == 1)
        await anyio.wait_all_tasks_blocked()
        assert step_reports(helper) == []
        for member in (leader, helper):
            regroup(member, generation, running, lost=[dead])
        await helper.until(lambda: len(step_reports(helper)) == 1)
        assert step_reports(helper)[0].chunks[0].num_tokens == 0
        told = await leader.reported(GroupPrefix, "r")
        assert (told.num_tokens, told.num_lost) == (second.start, 1)
        helper.run([second])
        leader.run([ChunkPlan(request_id=generation.request_id, epoch=Epoch(0), start=16, num_tokens=24, is_last=True)])
        await check_output(leader, "r", prompt, GREEDY)
        assert all(member.reports_of(RequestDropped, "r") == [] for member in running)
        await free_all(running, generation)


async def test_nothing_is_computed_of_a_chunk_that_was_given_up(memory: TransportMaker) -> None:
    """Its blocks stay the request's: pages that others sent there before would be overwritten with something else."""
    prompt, other = list(range(40)), list(range(9))
    layout = replace(FAKE_LAYOUT, num_layers=4)
    engines = [FakeEngine(layout, num_blocks=256) for _ in range(3)]
    async with members(memory, 3, make_engine=lambda number: engines[number]) as running:
        leader, helper, dead = running
        generation, mixed = make_generation("r", prompt, GREEDY), make_generation("mixed", other, GREEDY)
        for member in running:
            admit_member(member, generation, running)
        helper.admit(mixed, kv_moves=False)
        (other_chunk,) = block_chunks(mixed, BLOCK, [10])
        chunk = block_chunks(generation, BLOCK, [2])[1]
        blocks = slice(chunk.start // BLOCK, (chunk.start + chunk.num_tokens) // BLOCK)  # it has the pool's first ones
        pages = engines[1].kv.words[1:, blocks]
        pages[:] = 7  # as if they had come
        helper.run([chunk, other_chunk])
        await anyio.wait_all_tasks_blocked()
        for member in (leader, helper):
            regroup(member, generation, running, lost=[dead])
        await helper.until(lambda: len(step_reports(helper)) >= 1)
        assert [part.num_tokens for part in step_reports(helper)[0].chunks] == [0, len(other)]
        assert (pages == 7).all()
        await helper.reported(RequestFinished, "mixed")
        tokens = [token.token_id for token in helper.tokens_of("mixed")]
        assert tokens == reference_output(other, GREEDY, layout=layout)
        await free_all(running, generation)


async def test_plans_of_a_scheduler_that_began_anew_wait_as_others_do(memory: TransportMaker) -> None:
    """It counts from 0; a helper that joins after a loss gives up none of its plans."""
    prompt = list(range(40))
    async with members(memory, 3) as running:
        leader, helper, dead = running
        before, generation = make_generation("before", list(range(9)), GREEDY), make_generation("r", prompt, GREEDY)
        helper.admit(before, kv_moves=False)
        old = StepPlan(plan_id=500, chunks=tuple(block_chunks(before, BLOCK, [1])[:1]), with_decodes=False)
        helper.instance.handle(RunStep(instance_id=helper.instance.instance_id, plan=old))
        await helper.until(partial(has_reported, helper, 1))
        await helper.instance.drop_all_but_decoding()
        for member in (leader, helper):
            admit_member(member, generation, running)
        for member in (leader, helper):
            regroup(member, generation, running, lost=[dead])
        chunks = block_chunks(generation, BLOCK, [4])
        new = StepPlan(plan_id=0, chunks=(chunks[1],), with_decodes=False)
        helper.instance.handle(RunStep(instance_id=helper.instance.instance_id, plan=new))
        await anyio.wait_all_tasks_blocked()
        leader.run([chunks[0]])
        await helper.until(partial(has_reported, helper, 2))
        assert step_reports(helper)[1].chunks[0].num_tokens == chunks[1].num_tokens
        leader.run([chunks[2]])
        await check_output(leader, "r", prompt, GREEDY)
        for member in (leader, helper):
            member.free(generation.request_id, generation.epoch)
            await member.reported(KvReleased, "r")
            member.assert_all_free()


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("in_parallel", [False, True], ids=["in turn", "in parallel steps"])
@pytest.mark.parametrize("num_reused", [0, 2])
@pytest.mark.parametrize("seed", range(12))
async def test_the_death_of_a_helper_costs_what_it_has_not_passed_on(
    memory: TransportMaker, seed: int, num_reused: int, in_parallel: bool, moves: bool
) -> None:
    """It stops in some layer of some chunk; what the leader then misses is planned anew, with other boundaries.

    Of some prompts the leader has the first granules, which it keeps whoever is lost.
    """
    rng = random.Random(seed)
    first = num_reused * GRANULE_TOKENS
    prompt = [rng.randrange(1000) for _ in range(first + 150)]
    number = rng.choice([2, 3, 4])
    gate = StepGate()
    gate.let_through(rng.randrange(1, 12))
    victim = rng.randrange(1, number)

    def make_engine(index: int) -> FakeEngine:
        return FakeEngine(num_blocks=256, gate=gate if index == victim else None)

    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(members(memory, number, make_engine=make_engine))
        decode = None
        if moves:
            transport = await stack.enter_async_context(memory.open(CONFIG))
            decode = await stack.enter_async_context(
                running_instance(FakeEngine(num_blocks=256), transport, role=Role.DECODE, instance_id=DECODE_INSTANCE)
            )
        leader, generation = running[0], make_generation("r", prompt, GREEDY)
        if num_reused:
            generation, before = with_prefix(generation), with_prefix(make_generation("s", prompt[: first + 1], GREEDY))
            leader.admit(before, kv_moves=False)
            leader.run(chunk_plans(before, [first + 1]))
            await leader.reported(RequestFinished, "s")
        num_reports = len(step_reports(leader))
        for member in running:
            admit_member(member, generation, running, decode=decode, num_reused=num_reused if member is leader else 0)
        living = [member for member in running if member is not running[victim]]
        planned = block_chunks(generation, BLOCK, [rng.randint(1, 4), rng.randint(1, 4)], first)
        sent: list[tuple[RunningInstance, int, ChunkPlan]] = []
        for index, chunk in enumerate(planned[: rng.randint(2, len(planned))]):
            member = (
                leader if chunk.is_last else running[(index + in_parallel) % number]
            )  # of a parallel step the leader is the last
            sent.append(
                (member, member.run([chunk], in_parallel=in_parallel, at_once=in_parallel and bool(seed % 2)), chunk)
            )
        for _ in range(rng.randrange(30)):
            await anyio.lowlevel.checkpoint()
        for member in living:
            regroup(member, generation, running, lost=[running[victim]])
        for member in living:
            num_sent = sum(each is member for each, _, _ in sent)
            await member.until(partial(has_reported, member, num_sent + (num_reports if member is leader else 0)))
        start = (await leader.reported(GroupPrefix, "r")).num_tokens
        assert start >= first
        done = {
            (each.address, report.plan_id)
            for each in living
            for report in step_reports(each)
            if report.chunks[0].num_tokens
        }
        for member, plan_id, chunk in sent:
            if (member.address, plan_id) in done and chunk.start <= start:
                start = max(start, chunk.start + chunk.num_tokens)
        gate.open()  # it was only slow, and does not know yet
        while start < len(prompt):
            num_tokens = min(rng.randint(1, 5) * BLOCK, len(prompt) - start)
            is_last = start + num_tokens == len(prompt)
            member = leader if is_last else rng.choice(living)
            chunk = ChunkPlan(
                request_id=generation.request_id,
                epoch=Epoch(0),
                start=start,
                num_tokens=num_tokens,
                is_last=is_last,
            )
            member.run([chunk], in_parallel=in_parallel)
            start += num_tokens
        if decode is None:
            await check_output(leader, "r", prompt, GREEDY)
        else:
            await leader.reported(TransferOffered, "r")
            decode.expect(generation, leader)
            leader.grant(generation, decode)
            await decode.reported(RequestFinished, "r")
            tokens = [token.token_id for token in (*leader.tokens_of("r"), *decode.tokens_of("r"))]
            assert tokens == reference_output(prompt, GREEDY)
        assert all(member.reports_of(RequestDropped, "r") == [] for member in living)
        await free_all(running, generation, num_cached=len(prompt) // GRANULE_TOKENS if num_reused else 0)


async def test_damaged_pieces_are_asked_for_again(memory: TransportMaker) -> None:
    seen: set[tuple[int, int, KvPart]] = set()

    def is_new(data: bytes) -> bool:
        header = unpack_header(data, MeshKey(""))
        what = header.source, header.destination, header.part
        is_new = header.kind in (PieceKind.KV, PieceKind.PEER_READ) and what not in seen
        seen.add(what)
        return is_new

    prompt = list(range(200, 300))
    async with members(memory, 3) as running:
        memory.fabric.faults = MemoryFaults(corrupt=is_new)
        generation = make_generation("r", prompt, GREEDY)
        for member in running:
            admit_member(member, generation, running)
        chunks = block_chunks(generation, BLOCK, [5])
        group_policy(running, chunks, owners_of(chunks, 3))
        await check_output(running[0], "r", prompt, GREEDY)
        assert running[0].mover.counters().num_asked_again > 0
        assert all(member.reports_of(RequestDropped, "r") == [] for member in running)
        await free_all(running, generation)


async def test_pieces_that_are_always_damaged_end_the_request_where_they_came(memory: TransportMaker) -> None:
    def is_for_the_leader(header: bytes) -> bool:
        return unpack_header(header, MeshKey("")).destination == 0

    async with members(memory, 2) as running:
        leader, _ = running
        memory.fabric.faults = MemoryFaults(corrupt=is_for_the_leader)
        generation = make_generation("r", list(range(60)), GREEDY)
        for member in running:
            admit_member(member, generation, running)
        chunks = block_chunks(generation, BLOCK, [2])
        group_policy(running, chunks, owners_of(chunks, 2))
        dropped = await leader.reported(RequestDropped, "r")
        assert "arrived damaged" in dropped.reason
        await free_all(running, generation)


async def test_pieces_that_come_twice_late_and_out_of_order_change_nothing(memory: TransportMaker) -> None:
    prompt = list(range(200, 300))
    async with members(memory, 3) as running:
        generation = make_generation("r", prompt, GREEDY)
        for member in running:
            admit_member(member, generation, running)
        gate = anyio.Event()
        memory.fabric.faults = MemoryFaults(gate=gate)
        chunks = block_chunks(generation, BLOCK, [1, 3, 2])
        group_policy(running, chunks, owners_of(chunks, 3))
        await anyio.wait_all_tasks_blocked()
        memory.fabric.faults = MemoryFaults()
        gate.set()
        await check_output(running[0], "r", prompt, GREEDY)
        await free_all(running, generation)


BAD_CHUNKS = {
    "between blocks": (2, 4, False),
    "ends between blocks": (0, 6, False),
    "the last one at a helper": (32, 8, True),
    "beyond the prompt": (36, 8, False),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
async def test_a_chunk_that_cannot_be_drops_the_request(memory: TransportMaker, name: str) -> None:
    start, num_tokens, is_last = BAD_CHUNKS[name]
    async with members(memory, 2) as running:
        _, helper = running
        generation = make_generation("r", list(range(40)), GREEDY)
        admit_member(helper, generation, running)
        chunk = ChunkPlan(
            request_id=generation.request_id, epoch=Epoch(0), start=start, num_tokens=num_tokens, is_last=is_last
        )
        helper.run([chunk])
        await helper.reported(RequestDropped, "r")
        await helper.reported(KvReleased, "r")
        helper.assert_all_free()


async def test_no_block_is_computed_twice(memory: TransportMaker) -> None:
    async with members(memory, 2) as running:
        _, helper = running
        generation = make_generation("r", list(range(40)), GREEDY)
        admit_member(helper, generation, running)
        first = block_chunks(generation, BLOCK, [2])[0]
        helper.run([first])
        helper.run([first])
        await helper.reported(RequestDropped, "r")
        await helper.reported(KvReleased, "r")
        helper.assert_all_free()


async def test_stopping_does_not_wait_for_other_members(memory: TransportMaker) -> None:
    """Leaving the block cancels the step loop while its thread waits."""
    with anyio.fail_after(10):
        async with members(memory, 2) as running:
            generation = make_generation("r", list(range(40)), GREEDY)
            for member in running:
                admit_member(member, generation, running)
            running[1].run([block_chunks(generation, BLOCK, [2])[1]])
            await anyio.wait_all_tasks_blocked()

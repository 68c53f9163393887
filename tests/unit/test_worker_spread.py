"""A context's ranges go to other instances while it decodes, and so does its home: workers without a scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from pdmesh.config import TransferConfig
from pdmesh.core.commands import ExpectCopy, Hold, SendCopy, SetPlaces, Stop, StopCopy
from pdmesh.core.events import (
    KvExpected,
    KvLow,
    KvReleased,
    MembersSet,
    RangeLost,
    RequestDropped,
    RequestFinished,
    TransferFailed,
    TransferLanded,
    TransferSent,
)
from pdmesh.kv_layout import IndexRange, KvPart, num_blocks_for
from pdmesh.model import Epoch, InstanceId, PartMember, RequestId, SamplingParams, Then, TransferId
from pdmesh.plans import KvShard, TransferPlan
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.ranks import ranked_engine
from pdmesh_testing.worker import CAPABILITY, RunningInstance, chunk_plans, introduce, make_generation, running_instance

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_thread")]

RANGE, BLOCK = 32, 16
CONFIG = TransferConfig(max_payload_bytes=1 << 16, num_send_buffers=4, num_receive_buffers=4)
KEY = RequestId("r"), Epoch(0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", seed=3)


#: Of four instances, ranks of a stage and stages: where requests begin, and where they go.
LAYOUTS = [
    pytest.param([(1, 1)] * 4, id="one rank"),
    pytest.param([(2, 1), (1, 1), (2, 1), (4, 1)], id="ranks"),
    pytest.param([(1, 2), (2, 1), (2, 2), (1, 2)], id="stages", marks=pytest.mark.slow),
]


@pytest.fixture(params=LAYOUTS)
async def instances(checkpoint: Path, request: pytest.FixtureRequest) -> AsyncIterator[list[RunningInstance]]:
    fabric = MemoryFabric()
    async with AsyncExitStack() as stack:
        found: list[RunningInstance] = []
        for number, (num_ranks, num_stages) in enumerate(request.param):
            divided = ranked_engine(
                checkpoint, num_ranks, num_stages=num_stages, num_blocks=40, block_size=BLOCK, range_tokens=RANGE
            )
            engine = stack.enter_context(divided)
            transport = await stack.enter_async_context(MemoryTransport(CONFIG, fabric))
            running = running_instance(engine, transport, config=CONFIG, instance_id=f"i{number}", range_tokens=RANGE)
            found.append(await stack.enter_async_context(running))
        yield found


def name_of(instance: RunningInstance) -> InstanceId:
    return instance.instance.instance_id


def start(home: RunningInstance, prompt: Sequence[int], max_tokens: int, *, num_blocks: int | None = None) -> None:
    generation = make_generation(KEY[0], prompt, SamplingParams(max_tokens=max_tokens, temperature=0))
    home.admit(generation, kv_moves=False, num_blocks=num_blocks)
    for chunk in chunk_plans(generation, [64]):
        home.run([chunk])


def plan(
    source: RunningInstance,
    target: RunningInstance,
    blocks: IndexRange,
    then: Then,
    number: int,
    *,
    computes: bool = False,
) -> TransferPlan:
    layout = source.engine.kv.layout
    part = KvPart(blocks, IndexRange(0, layout.num_layers), IndexRange(0, layout.num_kv_heads))
    return TransferPlan(
        transfer_id=TransferId(number),
        then=then,
        decoding=then is Then.DECODE,
        computes=computes,
        sources=(KvShard(instance_id=name_of(source), part=part),),
        destinations=(KvShard(instance_id=name_of(target), part=part),),
        capability=CAPABILITY + number,
    )


class Scheduler:
    """Says what a scheduler would."""

    def __init__(self, home: RunningInstance) -> None:
        self.home = home
        self.members: list[tuple[RunningInstance, int]] = []  # each with its capability
        self.num_transfers = 0

    @property
    def part_members(self) -> tuple[PartMember, ...]:
        return tuple(PartMember(instance_id=name_of(each), capability=number) for each, number in self.members)

    def begin_part(self, source: RunningInstance, target: RunningInstance, number: int) -> TransferPlan:
        self.num_transfers += 1
        size = RANGE // BLOCK
        blocks = IndexRange(number * size, (number + 1) * size)
        transfer = plan(source, target, blocks, Then.HOLD, self.num_transfers)
        introduce(source, target, self.home)
        target.instance.handle(
            ExpectCopy(
                instance_id=name_of(target),
                request_id=KEY[0],
                epoch=KEY[1],
                transfer=transfer,
                home_id=name_of(self.home),
            )
        )
        self.grant(source, target, transfer)
        return transfer

    @staticmethod
    def grant(source: RunningInstance, target: RunningInstance, transfer: TransferPlan) -> None:
        grant = SendCopy(instance_id=name_of(source), request_id=KEY[0], epoch=KEY[1], transfer=transfer)
        introduce(source, target)
        source.instance.handle(grant)

    async def compute_again(self, target: RunningInstance, number: int) -> None:
        """A range of a member that is gone is computed again, and the home asks who did."""
        self.num_transfers += 1
        count = len(self.home.reports_of(MembersSet, KEY[0])) + 1
        size, before = RANGE // BLOCK, self.members[:number]
        blocks = IndexRange(number * size, (number + 1) * size)
        transfer = plan(self.home, target, blocks, Then.HOLD, self.num_transfers, computes=True)
        for member, _ in before:
            home = SetPlaces(instance_id=name_of(member), request_id=KEY[0], epoch=KEY[1], places=name_of(target))
            introduce(member, target)
            member.instance.handle(home)
        introduce(self.home, target)
        target.instance.handle(
            ExpectCopy(
                instance_id=name_of(target),
                request_id=KEY[0],
                epoch=KEY[1],
                transfer=transfer,
                home_id=name_of(self.home),
                members=self.part_members[:number],
            )
        )
        self.grant(self.home, target, transfer)
        await target.until(partial(was_said, target, TransferLanded, transfer.transfer_id))
        self.members[number] = (target, transfer.capability)
        self.set_members()
        await self.home.reported(MembersSet, KEY[0], count=count)

    def set_members(self) -> None:
        command = SetPlaces(instance_id=name_of(self.home), request_id=KEY[0], epoch=KEY[1], places=self.part_members)
        introduce(self.home, *[member for member, _ in self.members])
        self.home.instance.handle(command)

    async def hand_on(self, source: RunningInstance, target: RunningInstance, number: int) -> None:
        """A range goes from one to another, and the home asks the next holder; the one before has it no longer."""
        count = len(self.home.reports_of(MembersSet, KEY[0])) + 1
        transfer = self.begin_part(source, target, number)
        for side, kind in ((target, TransferLanded), (source, TransferSent)):
            await side.until(partial(was_said, side, kind, transfer.transfer_id))
        self.members[number : number + 1] = [(target, transfer.capability)]
        self.set_members()
        done = await self.home.reported(MembersSet, KEY[0], count=count)
        assert done.member_ids == tuple(name_of(member) for member, _ in self.members)
        if source is not self.home:
            source.free(KEY[0])
            await source.reported(KvReleased, KEY[0])

    async def move_home(self, target: RunningInstance, num_blocks: int) -> None:
        self.num_transfers += 1
        source, first = self.home, len(self.members) * RANGE // BLOCK
        blocks = IndexRange(first, first + num_blocks)
        transfer = plan(source, target, blocks, Then.DECODE, self.num_transfers)
        for member, _ in self.members:
            home = SetPlaces(instance_id=name_of(member), request_id=KEY[0], epoch=KEY[1], places=name_of(target))
            introduce(member, target)
            member.instance.handle(home)
        introduce(source, target)
        target.instance.handle(
            ExpectCopy(
                instance_id=name_of(target),
                request_id=KEY[0],
                epoch=KEY[1],
                transfer=transfer,
                members=self.part_members,
            )
        )
        await target.reported(KvExpected, KEY[0])
        self.grant(source, target, transfer)
        await source.reported(TransferSent, KEY[0])
        self.home = target


def was_said(
    instance: RunningInstance, kind: type[TransferLanded] | type[TransferSent], transfer_id: TransferId
) -> bool:
    """Whether an instance has reported so of a transfer."""
    return transfer_id in [each.transfer_id for each in instance.reports_of(kind, KEY[0])]


def is_empty(instance: RunningInstance) -> bool:
    return instance.pool.num_held == 0


def tokens(*homes: RunningInstance) -> list[int]:
    """What was drawn, wherever; nothing twice."""
    said = {token.index: token.token_id for home in homes for token in home.tokens_of(KEY[0])}
    assert sum(len(home.tokens_of(KEY[0])) for home in homes) == len(said)
    return [token_id for index in range(len(said)) if (token_id := said[index]) is not None]


async def alone(home: RunningInstance, prompt: Sequence[int], max_tokens: int) -> list[int]:
    start(home, prompt, max_tokens)
    await home.reported(RequestFinished, KEY[0])
    return tokens(home)


async def check_end(
    instances: Sequence[RunningInstance], drawn: list[int], prompt: Sequence[int], max_tokens: int
) -> None:
    """Nothing is left, and what was drawn is what one instance draws that holds all."""
    for instance in instances:
        await instance.until(partial(is_empty, instance))
        instance.assert_all_free()
        instance.tokens.clear()
        instance._tokens.clear()
        instance._reports.clear()
    assert drawn == await alone(instances[0], prompt, max_tokens)


async def test_ranges_and_homes_go_elsewhere_and_nothing_is_drawn_otherwise(instances: list[RunningInstance]) -> None:
    one, two, three, four = instances
    (prompt,) = random_prompts([20], TINY.vocab_size, seed=1)
    max_tokens = 300
    start(one, prompt, max_tokens)
    low = await one.reported(KvLow, "")
    while low.residents[0].num_tokens - 1 <= RANGE:
        low = await one.reported(KvLow, "", count=len(one.reports_of(KvLow, "")) + 1)
    scheduler = Scheduler(one)
    await scheduler.hand_on(one, two, 0)
    await one.until(lambda: len(one.tokens_of(KEY[0])) > 2 * RANGE)
    await scheduler.hand_on(one, three, 1)
    await scheduler.hand_on(two, four, 0)
    num_blocks = num_blocks_for(len(prompt) + max_tokens, BLOCK)
    await scheduler.move_home(two, num_blocks - 2 * RANGE // BLOCK)
    await two.reported(RequestFinished, KEY[0])
    for member in (three, four):
        assert member.mover.parts.num_answers > 0
        member.free(KEY[0])
        await member.reported(KvReleased, KEY[0])
    await check_end(instances, tokens(one, two), prompt, max_tokens)


async def test_a_range_that_is_lost_is_computed_again(instances: list[RunningInstance]) -> None:
    """The first from its tokens alone, the next with the range before it where that is; and nothing is drawn twice."""
    one, two, three, four = instances
    (prompt,) = random_prompts([20], TINY.vocab_size, seed=1)
    max_tokens = 300
    start(one, prompt, max_tokens)
    await one.until(lambda: len(one.tokens_of(KEY[0])) > 2 * RANGE + 4)
    scheduler = Scheduler(one)
    await scheduler.hand_on(one, two, 0)
    await scheduler.hand_on(one, three, 1)
    two.free(KEY[0])
    await two.reported(KvReleased, KEY[0])
    one.mover.parts.forget(two.address)
    assert (await one.reported(RangeLost, KEY[0])).number == 0
    num_drawn = len(one.tokens_of(KEY[0]))
    await scheduler.compute_again(four, 0)
    three.free(KEY[0])  # unheard of at the home, which is told by the grant
    await three.reported(KvReleased, KEY[0])
    await scheduler.compute_again(two, 1)
    assert four.mover.parts.num_answers > 0, "who computes range 1 asks who has range 0"
    await one.reported(RequestFinished, KEY[0])
    assert len(one.tokens_of(KEY[0])) > num_drawn
    assert len(one.reports_of(RangeLost, KEY[0])) == 1
    for member in (two, four):
        member.free(KEY[0])
    await check_end(instances, tokens(one), prompt, max_tokens)


async def test_a_lost_member_that_is_named_again_is_asked_again(instances: list[RunningInstance]) -> None:
    """A new scheduler has not heard of the loss, and names the members that the home registered."""
    one, two, three, _ = instances
    (prompt,) = random_prompts([20], TINY.vocab_size, seed=1)
    max_tokens = 150
    start(one, prompt, max_tokens)
    await one.until(lambda: len(one.tokens_of(KEY[0])) > RANGE + 4)
    scheduler = Scheduler(one)
    await scheduler.hand_on(one, two, 0)
    one.mover.parts.forget(two.address)
    assert (await one.reported(RangeLost, KEY[0])).number == 0
    move = plan(one, three, IndexRange(RANGE // BLOCK, 2 * RANGE // BLOCK), Then.DECODE, 77)
    scheduler.grant(one, three, move)
    failed = await one.reported(TransferFailed, KEY[0])
    assert (failed.transfer_id, failed.committed) == (move.transfer_id, False), "no scheduler waits for the move"
    num_drawn = len(one.tokens_of(KEY[0]))
    assert num_drawn < max_tokens
    scheduler.set_members()
    await one.reported(MembersSet, KEY[0], count=2)
    await one.reported(RequestFinished, KEY[0])
    assert len(one.reports_of(RangeLost, KEY[0])) == 1
    two.free(KEY[0])
    await check_end(instances, tokens(one), prompt, max_tokens)


async def test_members_that_are_named_while_a_step_asks_a_lost_one_are_asked_next(
    instances: list[RunningInstance],
) -> None:
    """The request stood still for ever: the step ended without them, and no other followed."""
    one, two, three, _ = instances
    (prompt,) = random_prompts([20], TINY.vocab_size, seed=1)
    max_tokens = 300
    start(one, prompt, max_tokens)
    await one.until(lambda: len(one.tokens_of(KEY[0])) > 2 * RANGE + 4)
    scheduler = Scheduler(one)
    await scheduler.hand_on(one, two, 0)
    transfer = scheduler.begin_part(two, three, 0)
    await three.until(partial(was_said, three, TransferLanded, transfer.transfer_id))
    request = one.instance._sequences.get(*KEY)
    assert request is not None
    with anyio.fail_after(10):
        while not request.in_step:
            await anyio.lowlevel.checkpoint()
    one.mover.parts.forget(two.address)
    scheduler.members = [(three, transfer.capability)]
    scheduler.set_members()
    assert request.in_step, "the step has not ended yet"
    await one.reported(MembersSet, KEY[0], count=2)
    await one.reported(RequestFinished, KEY[0])
    assert one.reports_of(RangeLost, KEY[0]) == []
    for member in (two, three):
        member.free(KEY[0])
    await check_end(instances, tokens(one), prompt, max_tokens)


async def test_a_range_whose_members_before_it_do_not_answer_is_not_computed(instances: list[RunningInstance]) -> None:
    one, two, three, four = instances
    (prompt,) = random_prompts([20], TINY.vocab_size, seed=1)
    start(one, prompt, 300)
    await one.until(lambda: len(one.tokens_of(KEY[0])) > 2 * RANGE + 4)
    scheduler = Scheduler(one)
    await scheduler.hand_on(one, two, 0)
    await scheduler.hand_on(one, three, 1)
    two.free(KEY[0])
    await two.reported(KvReleased, KEY[0])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scheduler.compute_again, four, 1)
        await four.reported(KvExpected, KEY[0])
        four.mover.parts.forget(two.address)
        assert (await four.reported(TransferFailed, KEY[0])).transfer_id == scheduler.num_transfers
        await four.until(partial(is_empty, four))
        tasks.cancel_scope.cancel()
    for instance in (one, three):
        instance.free(KEY[0])
        await instance.reported(KvReleased, KEY[0])
        await instance.until(partial(is_empty, instance))


async def test_what_is_granted_as_a_range_leaves_is_of_the_whole_context(instances: list[RunningInstance]) -> None:
    """A grant that crosses the change of members gives no more than was meant."""
    one, two, *_ = instances
    (prompt,) = random_prompts([20], TINY.vocab_size, seed=1)
    start(one, prompt, 300, num_blocks=3)  # it stands still with 48 tokens of KV
    await one.until(lambda: len(prompt) + len(one.tokens_of(KEY[0])) == 3 * BLOCK + 1)
    await Scheduler(one).hand_on(one, two, 0)
    assert one.pool.num_held == 1
    one.instance.handle(Hold(instance_id=name_of(one), request_id=KEY[0], epoch=KEY[1], num_blocks=5))
    assert one.pool.num_held == 3
    grown = Hold(
        instance_id=name_of(one), request_id=KEY[0], epoch=KEY[1], num_blocks=4, num_elsewhere_blocks=RANGE // BLOCK
    )
    one.instance.handle(grown)
    assert one.pool.num_held == 4
    for instance in (one, two):
        instance.free(KEY[0])
        await instance.reported(KvReleased, KEY[0])


async def test_a_range_that_is_not_there_or_not_wanted_is_not_sent(instances: list[RunningInstance]) -> None:
    one, two, *_ = instances
    (prompt,) = random_prompts([20], TINY.vocab_size, seed=1)
    start(one, prompt, 300, num_blocks=2)
    await one.until(lambda: len(prompt) + len(one.tokens_of(KEY[0])) == 2 * BLOCK + 1)
    scheduler = Scheduler(one)
    transfer = scheduler.begin_part(one, two, 1)  # which begins behind what is there
    assert (await one.reported(TransferFailed, KEY[0])).transfer_id == transfer.transfer_id
    two.free(KEY[0])
    await two.reported(KvReleased, KEY[0])
    transfer = scheduler.begin_part(one, two, 0)
    withdraw = StopCopy(
        instance_id=name_of(one),
        request_id=KEY[0],
        epoch=KEY[1],
        transfer_id=transfer.transfer_id,
        how=Stop.WITHDRAW,
    )
    one.instance.handle(withdraw)
    two.free(KEY[0])
    await two.reported(KvReleased, KEY[0], count=2)
    await scheduler.hand_on(one, two, 0)  # another time
    scheduler.members.append((two, 0))
    scheduler.set_members()  # of a range that has not been computed
    assert "does not have" in (await one.reported(RequestDropped, KEY[0])).reason
    two.free(KEY[0])
    await two.reported(KvReleased, KEY[0], count=3)
    for instance in (one, two):
        instance.assert_all_free()


async def test_a_spread_context_goes_on_where_it_is_if_its_move_is_cancelled(instances: list[RunningInstance]) -> None:
    one, two, three, _ = instances
    (prompt,) = random_prompts([20], TINY.vocab_size, seed=1)
    max_tokens = 150
    start(one, prompt, max_tokens)
    low = await one.reported(KvLow, "")
    while low.residents[0].num_tokens - 1 <= RANGE:
        low = await one.reported(KvLow, "", count=len(one.reports_of(KvLow, "")) + 1)
    scheduler = Scheduler(one)
    await scheduler.hand_on(one, two, 0)
    first, end = RANGE // BLOCK, num_blocks_for(len(prompt) + max_tokens, BLOCK)
    move = plan(one, three, IndexRange(first, end), Then.DECODE, 77)
    introduce(one, two, three)
    members = scheduler.part_members
    expected = ExpectCopy(instance_id=name_of(three), request_id=KEY[0], epoch=KEY[1], transfer=move, members=members)
    three.instance.handle(expected)
    await three.reported(KvExpected, KEY[0])
    scheduler.grant(one, three, move)
    cancel = StopCopy(
        instance_id=name_of(one), request_id=KEY[0], epoch=KEY[1], transfer_id=move.transfer_id, how=Stop.CANCEL
    )
    one.instance.handle(cancel)
    await one.reported(RequestFinished, KEY[0])
    drawn = tokens(one)
    for instance in (two, three):
        instance.free(KEY[0])
    await check_end(instances, drawn, prompt, max_tokens)

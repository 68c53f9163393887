"""A prompt longer than the room of the worker that computes it: its ranges leave meanwhile. Without a scheduler."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from pdmesh.config import TransferConfig
from pdmesh.core.commands import AdmitPrefill, ExpectCopy, RunStep, SendCopy, SetPlaces
from pdmesh.core.events import (
    KvExpected,
    KvReleased,
    MembersSet,
    RequestDropped,
    RequestFinished,
    StepDone,
    TransferLanded,
    TransferOffered,
    TransferSent,
)
from pdmesh.engine.runner import TorchEngine
from pdmesh.kv.remote_kv import RangeQuestion
from pdmesh.kv_layout import IndexRange, num_blocks_for
from pdmesh.model import PartMember, RequestId, SamplingParams, TransferId
from pdmesh.plans import KvShard, StepPlan, TransferPlan
from pdmesh.wire.messages import Generation
from pdmesh_testing.checkpoints import TINY, write_checkpoint
from pdmesh_testing.exactness import random_prompts
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.worker import (
    CAPABILITY,
    RunningInstance,
    chunk_plans,
    introduce,
    make_generation,
    prompt_of,
    running_instance,
)

pytestmark = pytest.mark.anyio

RANGE, BLOCK = 32, 16
CONFIG = TransferConfig(max_payload_bytes=1 << 12, num_send_buffers=4, num_receive_buffers=4)
ID = RequestId("r")
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), architecture="qwen3", seed=3)


@pytest.fixture
async def instances(checkpoint: Path) -> AsyncIterator[list[RunningInstance]]:
    fabric = MemoryFabric()
    async with AsyncExitStack() as stack:
        found: list[RunningInstance] = []
        for number in range(4):
            engine = TorchEngine(checkpoint, num_blocks=20, num_threads=1, block_size=BLOCK, range_tokens=RANGE)
            transport = await stack.enter_async_context(MemoryTransport(CONFIG, fabric))
            running = running_instance(engine, transport, config=CONFIG, instance_id=f"i{number}", range_tokens=RANGE)
            found.append(await stack.enter_async_context(running))
        yield found


class HandOver:
    """A prompt that the first instance computes, and the others decode: the last one is its home."""

    def __init__(self, instances: Sequence[RunningInstance], *, num_held_blocks: int) -> None:
        self.prefill, *self.members, self.home = instances
        (prompt,) = random_prompts([2 * RANGE + 5], TINY.vocab_size, seed=1)
        self.prompt = prompt
        self.generation = make_generation(ID, prompt, SamplingParams(max_tokens=MAX_TOKENS, temperature=0))
        size = RANGE // BLOCK
        parts = [IndexRange(number * size, (number + 1) * size) for number in range(len(self.members))]
        home = IndexRange(len(parts) * size, num_blocks_for(len(prompt) + MAX_TOKENS, BLOCK))
        ends = [(self.home, home), *zip(self.members, parts, strict=True)]
        self.plan = TransferPlan(
            transfer_id=TransferId(1),
            sources=(_shard(self.prefill, IndexRange(0, num_blocks_for(len(prompt), BLOCK))),),
            destinations=tuple([_shard(*end) for end in ends]),
            capability=CAPABILITY,
        )
        introduce(*instances)
        self._admit(num_held_blocks)
        for instance, _ in ends:
            self._expect(instance)

    def _admit(self, num_held_blocks: int) -> None:
        command = AdmitPrefill(
            instance_id=self.prefill.instance.instance_id,
            request_id=ID,
            epoch=self.generation.epoch,
            shards=self.plan.sources,
            transfer=self.plan,
            num_blocks_at_once=num_held_blocks,
        )
        self.prefill.instance.handle(command, prompt_of(self.generation))

    def _expect(self, instance: RunningInstance) -> None:
        command = ExpectCopy(
            instance_id=instance.instance.instance_id,
            request_id=ID,
            epoch=self.generation.epoch,
            transfer=self.plan,
        )
        instance.instance.handle(command, prompt_of(self.generation))

    async def grant(self) -> None:
        await self.prefill.reported(TransferOffered, ID)
        for instance in (self.home, *self.members):
            await instance.reported(KvExpected, ID)
        command = SendCopy(
            instance_id=self.prefill.instance.instance_id,
            request_id=ID,
            epoch=self.generation.epoch,
            transfer=self.plan,
        )
        self.prefill.instance.handle(command)

    def compute(self, start: int, end: int) -> None:
        """Plan these tokens."""
        (chunk, *_) = chunk_plans(self.generation, [end - start], start)
        self.prefill.run([chunk])

    async def give_back(self, num_ranges: int) -> MembersSet:
        """Let others have the first ranges, once they have landed there."""
        members = self.members[:num_ranges]
        for member in members:
            await member.reported(TransferLanded, ID)
        command = SetPlaces(
            instance_id=self.prefill.instance.instance_id,
            request_id=ID,
            epoch=self.generation.epoch,
            places=tuple(
                [PartMember(instance_id=each.instance.instance_id, capability=CAPABILITY) for each in members]
            ),
        )
        self.prefill.instance.handle(command)
        self.prefill.instance.handle(command)  # said again

        def are_set() -> bool:  # once or twice: a step may have had the prompt when both were said
            return any(len(each.member_ids) == num_ranges for each in self.prefill.reports_of(MembersSet, ID))

        await self.prefill.until(are_set)
        return self.prefill.reports_of(MembersSet, ID)[-1]

    async def end(self) -> list[int]:
        """Decode to the end, and free what others hold; the tokens."""
        await self.prefill.reported(TransferSent, ID)
        await self.home.reported(RequestFinished, ID)
        for member in self.members:
            member.free(ID)
        said = [*self.prefill.tokens_of(ID), *self.home.tokens_of(ID)]
        return [each.token_id for each in sorted(said, key=lambda each: each.index) if each.token_id is not None]


def _shard(instance: RunningInstance, blocks: IndexRange) -> KvShard:
    shard = instance.shard(blocks.size)
    return KvShard(instance_id=shard.instance_id, part=shard.part._replace(blocks=blocks))


def is_empty(instance: RunningInstance) -> bool:
    return instance.pool.num_held == 0


async def check_all_free(instances: Sequence[RunningInstance]) -> None:
    for instance in instances:
        await instance.until(partial(is_empty, instance))
        instance.assert_all_free()


async def alone(instance: RunningInstance, generation: Generation) -> list[int]:
    """What one instance draws that holds all."""
    await instance.until(partial(is_empty, instance))
    instance.tokens.clear()
    instance._tokens.clear()
    instance._reports.clear()
    instance.admit(generation, kv_moves=False)
    for chunk in chunk_plans(generation, [64]):
        instance.run([chunk])
    await instance.reported(RequestFinished, generation.request_id)
    return [each.token_id for each in instance.tokens_of(generation.request_id) if each.token_id is not None]


async def test_ranges_leave_as_they_are_computed_and_their_blocks_hold_what_follows(
    instances: list[RunningInstance],
) -> None:
    """With room for one range alone, each is computed where the one before it was."""
    hand_over = HandOver(instances, num_held_blocks=RANGE // BLOCK)
    prefill, size = hand_over.prefill, RANGE // BLOCK
    hand_over.compute(0, 20)
    await hand_over.grant()
    hand_over.compute(20, RANGE)
    done = await hand_over.give_back(1)
    assert (done.member_ids, done.of_prompt) == (("i1",), True)
    assert prefill.pool.num_held == size
    hand_over.compute(RANGE, 2 * RANGE)
    done = await hand_over.give_back(2)
    assert done.member_ids == ("i1", "i2")
    assert prefill.pool.num_held == 1, "no more than what is left of the prompt"
    assert not hand_over.home.reports_of(TransferLanded, ID)
    hand_over.compute(2 * RANGE, len(hand_over.prompt))
    drawn = await hand_over.end()
    for member in hand_over.members:
        assert member.mover.parts.num_answers > 0
    await check_all_free(instances)
    assert drawn == await alone(instances[0], hand_over.generation)


async def test_an_urgent_prompt_is_computed_inside_a_step_that_asks_others(
    instances: list[RunningInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the step waits for an answer in its first layer, and is computed between this one and the next."""
    hand_over = HandOver(instances, num_held_blocks=2 * RANGE // BLOCK)
    prefill, parts = hand_over.prefill, hand_over.members[0].mover.parts
    attend = parts._attend
    assert attend is not None
    is_asked, may_answer = threading.Event(), threading.Event()

    def held_up(number: int, block_ids: Sequence[int], question: RangeQuestion) -> bytes:
        is_asked.set()
        may_answer.wait(10)
        return attend(number, block_ids, question)

    monkeypatch.setattr(parts, "_attend", held_up)
    hand_over.compute(0, RANGE)
    await hand_over.grant()
    await hand_over.give_back(1)
    hand_over.compute(RANGE, 2 * RANGE)
    assert await anyio.to_thread.run_sync(is_asked.wait, 10)
    (prompt,) = random_prompts([20], TINY.vocab_size, seed=2)
    other = make_generation("other", prompt, SamplingParams(max_tokens=1, temperature=0))
    prefill.admit(other, kv_moves=False)
    plan = StepPlan(plan_id=100, chunks=tuple(chunk_plans(other, [20])), with_decodes=False, urgent=True)
    prefill.instance.handle(RunStep(instance_id=prefill.instance.instance_id, plan=plan))
    may_answer.set()
    await prefill.reported(RequestFinished, "other")
    await prefill.reported(StepDone, "", count=3)
    plan_ids = [report.plan_id for report in prefill.reports_of(StepDone, "")]
    assert plan_ids.index(100) < len(plan_ids) - 1, "the urgent one ended first"
    drawn = [each.token_id for each in prefill.tokens_of("other")]
    hand_over.compute(2 * RANGE, len(hand_over.prompt))
    assert await hand_over.end() == await alone(instances[3], hand_over.generation)
    assert drawn == await alone(instances[3], other)
    await check_all_free(instances)


async def test_a_member_that_is_gone_ends_the_prompt_and_nothing_else(instances: list[RunningInstance]) -> None:
    hand_over = HandOver(instances, num_held_blocks=RANGE // BLOCK)
    hand_over.compute(0, RANGE)
    await hand_over.grant()
    await hand_over.give_back(1)
    (member, _) = hand_over.members
    member.free(ID)
    await member.reported(KvReleased, ID)
    hand_over.prefill.mover.parts.forget(member.address)
    hand_over.compute(RANGE, 2 * RANGE)
    dropped = await hand_over.prefill.reported(RequestDropped, ID)
    assert "do not answer" in dropped.reason
    await hand_over.prefill.reported(KvReleased, ID)
    for instance in (hand_over.home, *hand_over.members):
        instance.free(ID)
    await check_all_free(instances)
    assert await alone(instances[0], hand_over.generation)


async def test_a_chunk_that_there_is_no_room_for_yet_is_not_computed(instances: list[RunningInstance]) -> None:
    hand_over = HandOver(instances, num_held_blocks=RANGE // BLOCK)
    hand_over.compute(0, RANGE)
    hand_over.compute(RANGE, RANGE + 1)
    await hand_over.prefill.reported(StepDone, "", count=2)
    assert "does not follow" in hand_over.prefill.reports_of(RequestDropped, ID)[-1].reason
    for instance in (hand_over.home, *hand_over.members):
        instance.free(ID)
    await check_all_free(instances)


async def test_room_for_less_than_a_range_is_refused(instances: list[RunningInstance]) -> None:
    hand_over = HandOver(instances, num_held_blocks=RANGE // BLOCK - 1)
    dropped = await hand_over.prefill.reported(RequestDropped, ID)
    assert "cannot hold a range" in dropped.reason


def giving_back(hand_over: HandOver) -> SetPlaces:
    """All members hold their ranges: said once more, when the last one has landed."""
    prefill = hand_over.prefill.instance.instance_id
    places = [PartMember(instance_id=each.instance.instance_id, capability=CAPABILITY) for each in hand_over.members]
    epoch = hand_over.generation.epoch
    return SetPlaces(instance_id=prefill, request_id=ID, epoch=epoch, places=tuple(places))


@pytest.mark.parametrize("in_step", [False, True])
async def test_a_range_that_lands_late_is_given_back_from_a_computed_prompt(
    instances: list[RunningInstance], in_step: bool
) -> None:
    """The scheduler hears of the last range while the last chunk is computed, or before it hears that it was."""
    hand_over = HandOver(instances, num_held_blocks=2 * RANGE // BLOCK)
    prefill = hand_over.prefill
    hand_over.compute(0, RANGE)
    await hand_over.grant()
    await hand_over.give_back(1)
    hand_over.compute(RANGE, 2 * RANGE)
    await prefill.reported(StepDone, "", count=2)
    for member in hand_over.members:
        await member.reported(TransferLanded, ID)
    hand_over.compute(2 * RANGE, len(hand_over.prompt))
    if not in_step:
        await prefill.reported(StepDone, "", count=3)
    prefill.instance.handle(giving_back(hand_over))
    drawn = await hand_over.end()
    await check_all_free(instances)
    assert drawn == await alone(instances[0], hand_over.generation)

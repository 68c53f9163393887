"""A request that decodes on one instance and goes on on another: both sides, over the memory transport."""

from __future__ import annotations

import array
import random
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from pdmesh.config import TransferConfig
from pdmesh.core.commands import Hold, Stop, StopCopy
from pdmesh.core.events import (
    KvExpected,
    KvReleased,
    RequestDropped,
    RequestFinished,
    TransferFailed,
    TransferLanded,
    TransferSent,
)
from pdmesh.kv.copy_out import KvSource
from pdmesh.kv.outgoing import PieceWriter
from pdmesh.kv.piece import PieceHeader, PieceKind, unpack_header
from pdmesh.kv.transcript import pack_transcript
from pdmesh.kv_layout import KvPart, num_blocks_for
from pdmesh.model import Epoch, RequestId, Role, SamplingParams, TransferId
from pdmesh.transport.buffers import PieceBuffer
from pdmesh.transport.seal import MeshKey
from pdmesh.wire.messages import Generation, StreamHandover
from pdmesh_testing.fake_engine import FAKE_LAYOUT, FakeEngine, StepGate, reference_output
from pdmesh_testing.memory_transport import MemoryFabric, MemoryFaults, MemoryTransport
from pdmesh_testing.worker import RunningInstance, chunk_plans, make_generation, running_instance

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(
    max_payload_bytes=4096,
    num_send_buffers=4,
    num_receive_buffers=4,
    no_progress_s=0.3,
    deadline_s=120.0,
    group_no_progress_s=30.0,
)
LONG = SamplingParams(max_tokens=300, temperature=0)
BLOCK = FAKE_LAYOUT.block_size

#: How KV travels.
PAGES = frozenset({PieceKind.KV, PieceKind.PEER_READ})

Pair = tuple[RunningInstance, RunningInstance, MemoryFabric]


@pytest.fixture(params=["in pieces", "peer reads"], autouse=True)
def peer_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", replace(CONFIG, peer_reads=request.param == "peer reads"))


@asynccontextmanager
async def pair(*, step_s: float = 0.0, num_blocks: int = 512) -> AsyncGenerator[Pair]:
    fabric = MemoryFabric()

    def engine() -> FakeEngine:
        return FakeEngine(num_blocks=num_blocks, step_s=(lambda _: step_s) if step_s else None)

    async with (
        MemoryTransport(CONFIG, fabric) as one,
        MemoryTransport(CONFIG, fabric) as other,
        running_instance(engine(), one, role=Role.MIXED, config=CONFIG) as source,
        running_instance(engine(), other, role=Role.DECODE, config=CONFIG) as target,
    ):
        yield source, target, fabric


def is_kind(header: bytes, kind: PieceKind) -> bool:
    """KV may be read where it lies, too."""
    return header[4] in (PAGES if kind is PieceKind.KV else {kind})


def start(source: RunningInstance, name: str, prompt: list[int], params: SamplingParams) -> int:
    """The request is computed, and decodes, on ``source``; the blocks that it may need."""
    generation = make_generation(name, prompt, params)
    source.admit(generation, kv_moves=False)
    for chunk in chunk_plans(generation, [64]):
        source.run([chunk])
    return num_blocks_for(len(prompt) + params.max_tokens - 1, BLOCK)


async def drawn(instance: RunningInstance, name: str, count: int) -> None:
    await instance.until(lambda: len(instance.tokens_of(name)) >= count)


def stream(name: str, first: str, *instances: RunningInstance) -> list[int]:
    """The tokens as a gateway takes them: each from the instance that the word of the last one names."""
    said = {str(instance.instance.instance_id): instance for instance in instances}
    tokens = {who: {token.index: token for token in instance.tokens_of(name)} for who, instance in said.items()}
    turns = {
        (who, each.index): each.next_instance_id
        for who, instance in said.items()
        for each in instance.tokens
        if isinstance(each, StreamHandover) and each.request_id == name
    }
    whose, ids = first, list[int]()
    while True:
        token = tokens[whose].get(len(ids))
        assert token is not None, f"token {len(ids)} is not said by {whose}"
        assert token.token_id is not None
        ids.append(token.token_id)
        if token.finish_reason is not None:
            return ids
        whose = turns.get((whose, len(ids)), token.next_instance_id) or whose


def assert_one_speaker(name: str, *instances: RunningInstance) -> None:
    """No index comes from two instances."""
    indices = [token.index for instance in instances for token in instance.tokens_of(name)]
    assert len(indices) == len(set(indices))


@pytest.mark.parametrize("num_prompt_tokens", [4 * n + d for n in (1, 5) for d in (-1, 0, 1)])
@pytest.mark.parametrize(
    "params",
    [
        LONG,
        SamplingParams(max_tokens=300, temperature=1.0, seed=7),
        SamplingParams(max_tokens=300, temperature=0, repetition_penalty=1.1, logprobs=2),
    ],
    ids=["greedy", "seeded", "penalized"],
)
async def test_a_moved_stream_is_the_stream(num_prompt_tokens: int, params: SamplingParams) -> None:
    prompt = list(range(1, num_prompt_tokens + 1))
    async with pair() as (source, target, _):
        num_blocks = start(source, "r", prompt, params)
        await drawn(source, "r", 5)
        source.move("r", target, num_blocks)
        await target.reported(RequestFinished, "r")
        await source.reported(KvReleased, "r")
        assert len(source.reports_of(TransferSent, "r")) == len(target.reports_of(TransferLanded, "r")) == 1
        assert stream("r", "mixed", source, target) == reference_output(prompt, params)
        assert_one_speaker("r", source, target)
        if params.logprobs is not None:
            assert all(t.logprobs is not None for i in (source, target) for t in i.tokens_of("r"))
        for instance in (source, target):
            instance.assert_all_free()


async def test_a_stream_that_moves_to_and_fro_is_the_stream() -> None:
    rng = random.Random(1)
    prompt, params = list(range(1, 30)), SamplingParams(max_tokens=600, temperature=1.0, seed=3)
    async with pair() as (one, other, _):
        num_blocks = start(one, "r", prompt, params)
        source, target = one, other
        for number in range(20):
            before = len(source.tokens_of("r"))
            await drawn(source, "r", before + rng.randrange(1, 6))
            source.move("r", target, num_blocks, number=number + 2)
            await target.reported(TransferLanded, "r", count=len(target.reports_of(TransferLanded, "r")) + 1)
            await source.reported(KvReleased, "r", count=number // 2 + 1)
            source, target = target, source
        await source.reported(RequestFinished, "r")
        assert stream("r", "mixed", one, other) == reference_output(prompt, params)
        assert_one_speaker("r", one, other)


async def test_many_move_at_once_while_others_stay() -> None:
    params = SamplingParams(max_tokens=150, temperature=0)
    async with pair(num_blocks=1024) as (source, target, _):
        names = [f"r{number}" for number in range(12)]
        blocks = {name: start(source, name, [number + 1] * (number + 3), params) for number, name in enumerate(names)}
        for name in names:
            await drawn(source, name, 2)
        for name in names[::2]:
            source.move(name, target, blocks[name])
        for number, name in enumerate(names):
            await (target if number % 2 == 0 else source).reported(RequestFinished, name)
            assert stream(name, "mixed", source, target) == reference_output([number + 1] * (number + 3), params)


# --- what goes wrong ---


def resume(source: RunningInstance, name: str = "r", number: int = 2) -> None:
    """The scheduler says that the target never began."""
    what = RequestId(name), Epoch(0), TransferId(number)
    source.instance.handle(
        Hold(
            instance_id=source.instance.instance_id,
            request_id=what[0],
            epoch=what[1],
            num_blocks=1,
            decodes=True,
            move_id=what[2],
        )
    )


def cancel(source: RunningInstance, name: str = "r", number: int = 2) -> None:
    what = RequestId(name), Epoch(0), TransferId(number)
    source.instance.handle(
        StopCopy(
            instance_id=source.instance.instance_id,
            request_id=what[0],
            epoch=what[1],
            transfer_id=what[2],
            how=Stop.CANCEL,
        )
    )


PROMPT = list(range(1, 22))


async def ends_where_it_was(source: RunningInstance, target: RunningInstance, params: SamplingParams = LONG) -> None:
    """The stream is what it should be, and comes from the source alone; the target has nothing."""
    await source.reported(RequestFinished, "r")
    assert stream("r", "mixed", source, target) == reference_output(PROMPT, params)
    assert not target.tokens_of("r")
    target.free("r")
    await source.reported(KvReleased, "r")
    await target.reported(KvReleased, "r")
    for instance in (source, target):
        instance.assert_all_free()


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_before_the_commit_it_goes_on_by_itself(is_stopped: bool) -> None:
    """The target cannot be reached, or takes nothing."""
    params = SamplingParams(max_tokens=1000, temperature=0)
    async with pair(num_blocks=512, step_s=0.001) as (source, target, fabric):
        num_blocks = start(source, "r", PROMPT, params)
        await drawn(source, "r", 3)
        fabric.faults = MemoryFaults(gate=anyio.Event()) if is_stopped else MemoryFaults(refuse=True)
        source.move("r", target, num_blocks)
        assert not (await source.reported(TransferFailed, "r")).committed
        fabric.faults = MemoryFaults()
        await ends_where_it_was(source, target, params)


async def test_damaged_kv_is_asked_for_again_and_the_stream_moves() -> None:
    """Also what is found to be damaged after the commit."""
    seen: set[KvPart] = set()

    def is_new(data: bytes) -> bool:
        header = unpack_header(data, MeshKey(""))
        if header.kind not in PAGES or header.part in seen:
            return False
        seen.add(header.part)
        return True

    async with pair() as (source, target, fabric):
        num_blocks = start(source, "r", PROMPT, LONG)
        await drawn(source, "r", 3)
        fabric.faults = MemoryFaults(corrupt=is_new)
        source.move("r", target, num_blocks)
        await target.reported(RequestFinished, "r")
        await source.reported(KvReleased, "r")
        assert len(source.reports_of(TransferSent, "r")) == 1
        assert target.mover.counters().num_asked_again == len(seen) > 1
        assert stream("r", "mixed", source, target) == reference_output(PROMPT, LONG)
        assert_one_speaker("r", source, target)
        source.assert_all_free()
        target.assert_all_free()


@pytest.mark.parametrize("kind", [PieceKind.KV, PieceKind.TRANSCRIPT])
async def test_what_is_always_damaged_on_the_way_is_found_before_the_target_begins(kind: PieceKind) -> None:
    """And after the commit, if that is on its way by then: the target has said that it never began."""
    params = SamplingParams(max_tokens=1000, temperature=0)
    async with pair(num_blocks=512, step_s=0.001) as (source, target, fabric):
        num_blocks = start(source, "r", PROMPT, params)
        await drawn(source, "r", 3)
        fabric.faults = MemoryFaults(corrupt=lambda header: is_kind(header, kind))
        source.move("r", target, num_blocks)
        failed = await source.reported(TransferFailed, "r")
        await target.reported(TransferFailed, "r")
        fabric.faults = MemoryFaults()
        if failed.committed:
            await target.reported(KvReleased, "r")
            resume(source)
        await ends_where_it_was(source, target, params)


@pytest.mark.parametrize("kind", [PieceKind.KV, PieceKind.TRANSCRIPT, PieceKind.COMMIT])
async def test_after_the_commit_it_waits_for_the_word_that_the_target_never_began(
    kind: PieceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdmesh.kv.copy_out.LANDED_LIMIT_S", 0.1)
    async with pair() as (source, target, fabric):
        num_blocks = start(source, "r", PROMPT, LONG)
        await drawn(source, "r", 3)
        fabric.faults = MemoryFaults(drop=lambda header: is_kind(header, kind))
        source.move("r", target, num_blocks)
        assert (await source.reported(TransferFailed, "r")).committed
        count = len(source.tokens_of("r"))
        target.free("r")
        await target.reported(KvReleased, "r")
        cancel(source)
        await source.reported(TransferFailed, "r", count=2)
        assert (source.reports_of(TransferFailed, "r")[1]).committed
        assert len(source.tokens_of("r")) == count < LONG.max_tokens
        resume(source)
        await ends_where_it_was(source, target)
        assert not target.reports_of(TransferLanded, "r")


async def test_a_request_that_would_outgrow_the_model_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def boast(generation: Generation, token_ids: array.array[int]) -> bytes:
        params = replace(generation.params, max_tokens=1_000_000)
        return pack_transcript(msgspec.structs.replace(generation, params=params), token_ids)

    monkeypatch.setattr("pdmesh.worker.moves.pack_transcript", boast)
    async with pair() as (source, target, _):
        num_blocks = start(source, "r", PROMPT, LONG)
        await drawn(source, "r", 3)
        source.move("r", target, num_blocks)
        assert "tokens exceed the model's context of 4096" in (await target.reported(TransferFailed, "r")).reason
        await target.reported(KvReleased, "r")
        target.assert_all_free()
        resume(source)
        await ends_where_it_was(source, target)


async def test_an_acknowledgement_that_is_lost_leaves_the_source_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdmesh.kv.copy_out.LANDED_LIMIT_S", 0.1)
    async with pair() as (source, target, fabric):
        num_blocks = start(source, "r", PROMPT, LONG)
        await drawn(source, "r", 3)
        fabric.faults = MemoryFaults(drop=lambda header: is_kind(header, PieceKind.LANDED))
        source.move("r", target, num_blocks)
        assert (await source.reported(TransferFailed, "r")).committed
        await target.reported(RequestFinished, "r")
        assert stream("r", "mixed", source, target) == reference_output(PROMPT, LONG)
        assert_one_speaker("r", source, target)
        source.free("r")
        for instance in (source, target):
            await instance.reported(KvReleased, "r")
            instance.assert_all_free()


@pytest.fixture
def when_it_stands_still(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[KvSource], object]], None]:
    """Has something done when a request that moves stands still, before anything else of it leaves."""
    freeze = KvSource.freeze

    def do(what: Callable[[KvSource], object]) -> None:
        def do_and_freeze(self: KvSource, **rest: object) -> None:
            what(self)
            freeze(self, **rest)  # type: ignore[arg-type]

        monkeypatch.setattr(KvSource, "freeze", do_and_freeze)

    return do


async def test_what_finds_no_buffer_for_its_commit_goes_on_where_it_is(
    monkeypatch: pytest.MonkeyPatch, when_it_stands_still: Callable[[Callable[[KvSource], object]], None]
) -> None:
    monkeypatch.setattr("pdmesh.kv.copy_out.FREEZE_LIMIT_S", 0.05)
    lend = PieceWriter.tell

    async def never(self: PieceWriter, address: bytes, header: PieceHeader, **begins: Any) -> None:
        if header.kind is PieceKind.COMMIT:
            await anyio.sleep_forever()
        await lend(self, address, header, **begins)

    async with pair() as (source, target, _):
        when_it_stands_still(lambda _: monkeypatch.setattr(PieceWriter, "tell", never))
        num_blocks = start(source, "r", PROMPT, LONG)
        await drawn(source, "r", 3)
        source.move("r", target, num_blocks)
        failed = await source.reported(TransferFailed, "r")
        assert (failed.committed, "was paused" in failed.reason) == (False, True)
        await ends_where_it_was(source, target)
        assert [t.next_instance_id for t in source.tokens if isinstance(t, StreamHandover)] == ["mixed"]


async def test_nothing_that_is_left_waits_for_an_answer(
    when_it_stands_still: Callable[[Callable[[KvSource], object]], None],
) -> None:
    """So the stream stands still for one way, however long that is: not for there, back, and there again."""
    async with pair() as (source, target, fabric):
        gate = anyio.Event()
        senders: list[KvSource] = []

        def shut(sender: KvSource) -> None:
            fabric.faults = MemoryFaults(gate=gate)
            senders.append(sender)

        when_it_stands_still(shut)
        num_blocks = start(source, "r", PROMPT, LONG)
        await drawn(source, "r", 3)
        source.move("r", target, num_blocks)
        while not senders:
            await anyio.lowlevel.checkpoint()
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        assert senders[0].committed
        gate.set()
        await target.reported(RequestFinished, "r")
        assert stream("r", "mixed", source, target) == reference_output(PROMPT, LONG)
        await source.reported(TransferSent, "r")


@pytest.mark.parametrize("late", [PieceKind.KV, PieceKind.TRANSCRIPT])
async def test_a_commit_may_overtake_what_went_before_it(
    late: PieceKind, when_it_stands_still: Callable[[Callable[[KvSource], object]], None]
) -> None:
    """On a transport that keeps no order: the target goes on when all of it is there, and not before."""
    send = MemoryTransport.send
    gate = anyio.Event()
    held: list[None] = []

    async def slowly(
        self: MemoryTransport, address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False
    ) -> None:
        if held and is_kind(bytes(buffer.header), late):
            held.append(None)
            await gate.wait()
        await send(self, address, buffer, payload_bytes, is_notice=is_notice)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryTransport, "send", slowly)
        async with pair() as (source, target, _):
            when_it_stands_still(lambda _: held.append(None))
            num_blocks = start(source, "r", PROMPT, LONG)
            await drawn(source, "r", 3)
            source.move("r", target, num_blocks)
            while len(held) < 2:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            assert not target.tokens_of("r")
            gate.set()
            await target.reported(RequestFinished, "r")
            assert stream("r", "mixed", source, target) == reference_output(PROMPT, LONG)
            await source.reported(TransferSent, "r")


async def test_what_outgrows_its_room_on_the_way_stays() -> None:
    async with pair() as (source, target, fabric):
        start(source, "r", PROMPT, LONG)
        await drawn(source, "r", 3)
        fabric.faults = MemoryFaults(gate=anyio.Event())
        source.move("r", target, num_blocks_for(len(PROMPT) + 8, BLOCK))
        assert "has no room for" in (await source.reported(TransferFailed, "r")).reason
        fabric.faults = MemoryFaults()
        await ends_where_it_was(source, target)


async def test_what_caught_up_with_a_full_target_is_not_committed_to_it() -> None:
    """The step in flight computes a token more than there is room for."""
    fabric, gate = MemoryFabric(), StepGate()
    async with (
        MemoryTransport(CONFIG, fabric) as one,
        MemoryTransport(CONFIG, fabric) as other,
        running_instance(FakeEngine(num_blocks=512, gate=gate), one, role=Role.MIXED, config=CONFIG) as source,
        running_instance(FakeEngine(num_blocks=512), other, role=Role.DECODE, config=CONFIG) as target,
    ):
        prompt = list(range(2 * BLOCK))
        gate.let_through(FAKE_LAYOUT.num_layers)
        start(source, "r", prompt, LONG)
        await drawn(source, "r", 1)
        await anyio.wait_all_tasks_blocked()  # the next step has begun
        source.move("r", target, 2)
        await target.reported(KvExpected, "r")
        await anyio.wait_all_tasks_blocked()
        gate.open()
        failed = await source.reported(TransferFailed, "r")
        assert not failed.committed
        await source.reported(RequestFinished, "r")
        assert [token.token_id for token in source.tokens_of("r")] == reference_output(prompt, LONG)
        target.free(RequestId("r"), Epoch(0))
        await target.reported(KvReleased, "r")


async def test_a_target_without_room_or_that_stops_refuses() -> None:
    async with pair(num_blocks=100) as (source, target, _):
        start(source, "r", PROMPT, LONG)
        await drawn(source, "r", 3)
        source.move("r", target, 101)
        await target.reported(RequestDropped, "r")
        target.instance.stop_admitting()
        source.move("r", target, 90, number=3)
        await target.reported(RequestDropped, "r", count=2)
        assert not target.reports_of(KvExpected, "r")
        resume(source, number=3)
        await ends_where_it_was(source, target)


async def test_a_source_that_registers_again_says_that_it_decodes() -> None:
    params = SamplingParams(max_tokens=1000, temperature=0)
    async with pair(num_blocks=512, step_s=0.001) as (source, target, fabric):
        num_blocks = start(source, "r", PROMPT, params)
        await drawn(source, "r", 3)
        fabric.faults = MemoryFaults(gate=anyio.Event())
        source.move("r", target, num_blocks)
        await anyio.wait_all_tasks_blocked()
        for instance in (source, target):
            await instance.instance.drop_all_but_decoding()
        assert [resident.decoding for resident in source.instance.residents()] == [True]
        assert not target.instance.residents()
        await ends_where_it_was(source, target, params)


async def test_a_move_that_was_not_begun_is_taken_back() -> None:
    async with pair() as (source, target, _):
        start(source, "r", PROMPT, LONG)
        await drawn(source, "r", 3)
        cancel(source)
        assert not (await source.reported(TransferFailed, "r")).committed
        resume(source)
        await ends_where_it_was(source, target)


async def test_one_that_no_step_computes_moves_at_once() -> None:
    """It waits for memory, and gets it where it goes."""
    params = SamplingParams(max_tokens=60, temperature=0)
    async with pair() as (source, target, _):
        generation = make_generation("r", PROMPT, params)
        source.admit(generation, kv_moves=False, num_blocks=num_blocks_for(len(PROMPT) + 8, BLOCK))
        for chunk in chunk_plans(generation, [64]):
            source.run([chunk])
        await source.until(lambda: source.instance.num_of_stage()["out_of_credit"] == 1)
        source.move("r", target, num_blocks_for(len(PROMPT) + 60, BLOCK))
        await target.reported(RequestFinished, "r")
        assert stream("r", "mixed", source, target) == reference_output(PROMPT, params)
        assert [t.next_instance_id for t in source.tokens if isinstance(t, StreamHandover)] == ["decode"]


@pytest.mark.parametrize("seed", range(40))
async def test_whenever_it_is_taken_back_or_freed_nothing_leaks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a random moment: what the core could say then leaves one stream, or none, and everything free."""
    monkeypatch.setattr("pdmesh.kv.copy_out.LANDED_LIMIT_S", 0.05)
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=200, temperature=0)
    async with pair() as (source, target, _):
        num_blocks = start(source, "r", PROMPT, params)
        await drawn(source, "r", rng.randrange(1, 30))
        source.move("r", target, num_blocks)
        for _ in range(rng.randrange(60)):
            await anyio.lowlevel.checkpoint()
        if rng.random() < 0.5:
            source.free("r")
            target.free("r")
        else:
            cancel(source)
            target.free("r")
            await target.reported(KvReleased, "r")
            if target.reports_of(TransferLanded, "r"):
                source.free("r")
            else:
                resume(source)
                await source.reported(RequestFinished, "r")
                assert stream("r", "mixed", source, target) == reference_output(PROMPT, params)
        for instance in (source, target):
            await instance.reported(KvReleased, "r")
            instance.assert_all_free()
        assert_one_speaker("r", source, target)

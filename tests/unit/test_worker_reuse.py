"""KV that an instance keeps for requests to come: what is reused is what was computed, and nothing is lost or leaks."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from pdmesh.config import TransferConfig
from pdmesh.core.commands import Hold
from pdmesh.core.events import (
    CacheReported,
    KvReleased,
    RequestDropped,
    RequestFinished,
    StepDone,
    TransferLanded,
    TransferSent,
)
from pdmesh.kv.copy_in import CopyIn
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv_layout import GRANULE_TOKENS, IndexRange, KvPart
from pdmesh.model import CacheUser, Epoch, PrefixHash, RequestId, Role, SamplingParams, SessionKey
from pdmesh.plans import ChunkPlan, Evictions
from pdmesh_testing.fake_engine import FakeEngine, StepGate, reference_output
from pdmesh_testing.groups import admit_member, block_chunks, running_members
from pdmesh_testing.kv import TransportMaker
from pdmesh_testing.memory_transport import MemoryFabric, MemoryTransport
from pdmesh_testing.reuse import GREEDY, a_generation, granules_of, output, random_tokens, run
from pdmesh_testing.worker import (
    RunningInstance,
    chunk_plans,
    hand_over,
    make_generation,
    running_instance,
)

pytestmark = pytest.mark.anyio

CONFIG = TransferConfig(max_payload_bytes=4096, num_send_buffers=4, num_receive_buffers=4, no_progress_s=5.0)
NUM_BLOCKS = 512


@pytest.fixture(params=["in pieces", "peer reads"])
def peer_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", replace(CONFIG, peer_reads=request.param == "peer reads"))


@asynccontextmanager
async def one(engine: FakeEngine | None = None) -> AsyncGenerator[RunningInstance]:
    async with (
        MemoryTransport(CONFIG, MemoryFabric()) as transport,
        running_instance(engine or FakeEngine(num_blocks=NUM_BLOCKS), transport, config=CONFIG) as instance,
    ):
        yield instance


@asynccontextmanager
async def pair() -> AsyncGenerator[tuple[RunningInstance, RunningInstance]]:
    fabric = MemoryFabric()
    async with (
        MemoryTransport(CONFIG, fabric) as source,
        MemoryTransport(CONFIG, fabric) as target,
        running_instance(FakeEngine(num_blocks=NUM_BLOCKS), source, role=Role.MIXED, config=CONFIG) as prefill,
        running_instance(FakeEngine(num_blocks=NUM_BLOCKS), target, role=Role.DECODE, config=CONFIG) as decode,
    ):
        yield prefill, decode


def computed(instance: RunningInstance, name: str) -> list[tuple[int, int]]:
    """What the engine computed of a request: (start, tokens) of each slice."""
    assert isinstance(instance.engine, FakeEngine)
    return [part[1:] for batch in instance.engine.batches for part in batch if part[0] == name]


async def test_a_second_prompt_begins_behind_what_the_first_one_left() -> None:
    first = random_tokens(300)
    second = first[:280] + random_tokens(70, seed=1)
    async with one() as instance:
        assert await run(instance, a_generation("first", first)) == reference_output(first, GREEDY)
        instance.assert_all_free(num_cached=2)
        assert await run(instance, a_generation("second", second), num_reused=2) == reference_output(second, GREEDY)
        assert computed(instance, "second")[0] == (256, 94)
        assert [token.num_cached_tokens for token in instance.tokens_of("second")] == [256, *[0] * 7]
        assert all(token.num_cached_tokens == 0 for token in instance.tokens_of("first"))
        instance.assert_all_free(num_cached=2)


async def test_what_is_reused_is_what_lies_there() -> None:
    """Were it computed again, damage to what is kept would not show."""
    prompt = random_tokens(300)
    async with one() as instance:
        await run(instance, a_generation("first", prompt))
        assert isinstance(instance.engine, FakeEngine)
        instance.engine.kv.words ^= np.uint32(1)
        assert await run(instance, a_generation("second", prompt), num_reused=2) != reference_output(prompt, GREEDY)


async def test_a_prompt_shares_with_one_that_is_still_computed() -> None:
    prompt = random_tokens(300)
    async with one() as instance:
        first, second = a_generation("first", prompt), a_generation("second", prompt)
        chunks = chunk_plans(first, [GRANULE_TOKENS])
        instance.admit(first, kv_moves=False)
        plan_id = instance.run(chunks[:1])
        await instance.until(lambda: any(isinstance(r, StepDone) and r.plan_id == plan_id for r in instance.reports))
        instance.admit(second, kv_moves=False, num_reused=1)
        held = instance.pool.references
        assert sorted(held.values()) == [1] * (len(held) - 32) + [2] * 32
        for chunk in [*chunks[1:], *chunk_plans(second, [100], GRANULE_TOKENS)]:
            instance.run([chunk])
        for name in ("first", "second"):
            await instance.reported(KvReleased, name)
            assert output(instance, name) == reference_output(prompt, GREEDY)
        instance.assert_all_free(num_cached=2)


async def test_equal_prompts_at_once_are_kept_once() -> None:
    prompt = random_tokens(300)
    async with one() as instance:
        requests = [a_generation(name, prompt) for name in ("first", "second")]
        for request in requests:
            instance.admit(request, kv_moves=False)
        for request in requests:
            instance.run(chunk_plans(request, [300]))
        for request in requests:
            await instance.reported(KvReleased, request.request_id)
            assert output(instance, request.request_id) == reference_output(prompt, GREEDY)
        instance.assert_all_free(num_cached=2)


@pytest.mark.parametrize("num_prompt_tokens", [1, 50, 127, 128, 129, 200, 256])
async def test_a_next_turn_finds_the_answer_of_the_last(num_prompt_tokens: int) -> None:
    """The chain goes on over drawn tokens as a gateway makes it of the next prompt, which repeats them."""
    prompt, params = random_tokens(num_prompt_tokens), SamplingParams(max_tokens=300, temperature=0)
    async with one() as instance:
        answer = await run(instance, a_generation("first", prompt, params))
        all_kept = granules_of(prompt + answer[:-1])
        assert instance.reports_of(KvReleased, "first")[0].granules == all_kept[(num_prompt_tokens - 1) // 128 :]
        instance.assert_all_free(num_cached=len(all_kept))
        next_turn = prompt + answer + random_tokens(20, seed=1)
        num_reused = len(all_kept)
        assert await run(instance, a_generation("next", next_turn), num_reused=num_reused) == reference_output(
            next_turn, GREEDY
        )
        assert computed(instance, "next")[0][0] == num_reused * GRANULE_TOKENS


@pytest.mark.usefixtures("peer_reads")
@pytest.mark.parametrize("there", [0, 1, 2])
@pytest.mark.parametrize("here", [0, 1, 2])
async def test_a_hand_over_brings_what_is_not_there(here: int, there: int) -> None:
    """Some of a prompt is kept where it is computed, some where it decodes: in any amounts."""
    prompt = random_tokens(300)
    async with pair() as (prefill, decode):
        for instance, number in ((prefill, here), (decode, there)):
            if number:
                await run(instance, a_generation("before", prompt[: number * GRANULE_TOKENS + 5]))
        generation = a_generation("r", prompt)
        await hand_over(generation, prefill, decode, [70], num_reused=(here, there))
        await decode.reported(KvReleased, "r")
        await prefill.reported(KvReleased, "r")
        tokens = output(prefill, "r") + output(decode, "r")
        assert tokens == reference_output(prompt, GREEDY)
        (landed,), (sent,) = decode.reports_of(TransferLanded, "r"), prefill.reports_of(TransferSent, "r")
        layout = prefill.engine.kv.layout
        num_pages = (75 - 32 * there) * layout.num_layers
        assert landed.num_bytes == sent.num_bytes == num_pages * layout.max_page_bytes
        assert prefill.tokens_of("r")[0].num_cached_tokens == here * GRANULE_TOKENS
        assert prefill.mover.counters().dropped == decode.mover.counters().dropped == {}
        for instance in (prefill, decode):
            instance.assert_all_free(num_cached=2)


async def test_a_decode_instance_hashes_on_without_the_prompt() -> None:
    prompt, params = random_tokens(150), SamplingParams(max_tokens=300, temperature=0)
    async with pair() as (prefill, decode):
        await hand_over(a_generation("first", prompt, params), prefill, decode, [200])
        await decode.reported(KvReleased, "first")
        answer = output(prefill, "first") + output(decode, "first")
        assert decode.reports_of(KvReleased, "first")[0].granules == granules_of(prompt + answer[:-1])[1:]
        next_turn = prompt + answer + random_tokens(20, seed=1)
        assert await run(decode, a_generation("next", next_turn), num_reused=3) == reference_output(next_turn, GREEDY)


@pytest.mark.usefixtures("peer_reads")
async def test_a_move_brings_what_is_not_there() -> None:
    prompt, params = random_tokens(300), SamplingParams(max_tokens=200, temperature=0)
    gate = StepGate()
    fabric = MemoryFabric()
    async with (
        MemoryTransport(CONFIG, fabric) as at_source,
        MemoryTransport(CONFIG, fabric) as at_target,
        running_instance(FakeEngine(num_blocks=NUM_BLOCKS, gate=gate), at_source, config=CONFIG) as source,
        running_instance(FakeEngine(num_blocks=NUM_BLOCKS), at_target, role=Role.DECODE, config=CONFIG) as target,
    ):
        await run(target, a_generation("before", prompt[:270]))
        generation = a_generation("r", prompt, params)
        source.admit(generation, kv_moves=False)
        source.run(chunk_plans(generation, [300]))
        gate.let_through(2 * 20)
        await source.until(lambda: len(output(source, "r")) >= 10)
        source.move("r", target, 125, chain=generation.prefix[:2], num_reused=2)
        gate.open()
        sent = await source.reported(TransferSent, "r")
        await target.reported(KvReleased, "r")
        assert output(source, "r") + output(target, "r") == reference_output(prompt, params)
        num_drawn = len(output(source, "r"))
        layout = source.engine.kv.layout
        num_pages = (-(-(300 + num_drawn - 1) // 4) - 64) * layout.num_layers
        assert num_pages * layout.max_page_bytes <= sent.num_bytes  # and the transcript
        assert sent.num_bytes < (num_pages + 64) * layout.max_page_bytes + 4096
        all_kept = granules_of(prompt + reference_output(prompt, params)[:-1])
        assert target.reports_of(KvReleased, "r")[0].granules == all_kept[2:]
        target.assert_all_free(num_cached=len(all_kept))


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_groups_leader_passes_on_what_it_reuses(keeps: bool) -> None:
    """A helper that is told to keeps what it has of the prompt once it has computed a chunk."""
    prompt = random_tokens(400)
    maker = TransportMaker("memory")
    async with (
        maker.open(CONFIG) as first,
        maker.open(CONFIG) as second,
        running_members([FakeEngine(num_blocks=NUM_BLOCKS) for _ in range(2)], [first, second], config=CONFIG) as group,
    ):
        leader, helper = group
        await run(leader, a_generation("before", prompt[:300]))
        generation = a_generation("r", prompt)
        for member in group:
            admit_member(member, generation, group, num_reused=2 if member is leader else 0, keeps_prefix=keeps)
        chunks = [chunk for chunk in block_chunks(generation, 4, [8]) if chunk.start >= 256]
        for number, chunk in enumerate(chunks):
            (leader if chunk.is_last or number % 2 == 0 else helper).run([chunk])
        await leader.reported(RequestFinished, "r")
        assert output(leader, "r") == reference_output(prompt, GREEDY)
        assert any(computed(helper, "r"))
        helper.free("r")
        await helper.reported(KvReleased, "r")
        leader.assert_all_free(num_cached=3)
        helper.assert_all_free(num_cached=3 if keeps else 0)
        if keeps:
            again = a_generation("again", prompt)
            await run(helper, again, num_reused=3)
            assert output(helper, "again") == reference_output(prompt, GREEDY)


async def test_a_prefix_that_is_not_there_is_refused_and_told_of() -> None:
    prompt = random_tokens(300)
    async with one() as instance:
        await run(instance, a_generation("first", prompt[:200]))
        instance.admit(a_generation("second", prompt), kv_moves=False, num_reused=2)
        assert [type(report) for report in instance.reports[-3:]] == [RequestDropped, KvReleased, CacheReported]
        assert instance.reports[-1] == CacheReported(instance.instance.instance_id, granules_of(prompt[:200]))
        instance.assert_all_free(num_cached=1)
        assert await run(instance, a_generation("third", prompt), num_reused=1) == reference_output(prompt, GREEDY)


async def test_an_expected_prefix_that_is_not_there_is_refused() -> None:
    async with pair() as (prefill, decode):
        generation = a_generation("r", random_tokens(300))
        decode.expect(generation, prefill, num_reused=1)
        dropped, released, cache = decode.reports[-3:]
        assert isinstance(dropped, RequestDropped)
        assert "0 of the 1 blocks to reuse" in dropped.reason
        assert isinstance(released, KvReleased)
        assert released.transfer_id == 1
        assert cache == CacheReported(decode.instance.instance_id, ())
        prefill.move("s", decode, 100, chain=generation.prefix, num_reused=1)
        assert isinstance(decode.reports[-1], CacheReported)
        assert len(decode.reports_of(RequestDropped, "s")) == 1
        decode.assert_all_free()


@pytest.mark.parametrize("num_reused", [-1, 3, 1 << 40])
async def test_more_than_there_is_of_a_chain_is_refused(num_reused: int) -> None:
    async with pair() as (prefill, decode):
        generation = a_generation("r", random_tokens(300))
        prefill.admit(generation, kv_moves=False, num_reused=num_reused)
        decode.expect(generation, prefill, num_reused=num_reused)
        prefill.move("s", decode, 100, chain=generation.prefix, num_reused=num_reused)
        for instance, name in ((prefill, "r"), (decode, "r"), (decode, "s")):
            assert len(instance.reports_of(RequestDropped, name)) == 1
            instance.assert_all_free()


async def test_what_is_dropped_is_free() -> None:
    prompts = [random_tokens(300, seed) for seed in range(3)]
    async with one() as instance:
        for number, prompt in enumerate(prompts):
            await run(instance, a_generation(f"r{number}", prompt))
        instance.assert_all_free(num_cached=6)
        last, first = granules_of(prompts[0])[1], granules_of(prompts[1])[0]
        instance.admit(a_generation("r", random_tokens(20)), kv_moves=False, drop=(last, first, PrefixHash(bytes(16))))
        assert instance.pool.num_cached == 4 * 32
        instance.free("r")
        instance.instance.handle(
            Hold(
                instance_id=instance.instance.instance_id,
                request_id=RequestId("gone"),
                epoch=Epoch(0),
                num_blocks=1,
                room=Evictions(drop=granules_of(prompts[2])),
            )
        )
        instance.assert_all_free(num_cached=2)


async def test_room_is_made_unasked_where_books_are_wrong() -> None:
    """The oldest go, leaves before parents, and the scheduler hears of what is left."""
    prompts = [random_tokens(300, seed) for seed in range(3)]
    async with one(FakeEngine(num_blocks=3 * 80)) as instance:
        for number, prompt in enumerate(prompts):
            await run(instance, a_generation(f"r{number}", prompt))
        instance.assert_all_free(num_cached=6)
        assert not [report for report in instance.reports if isinstance(report, CacheReported)]
        other = random_tokens(300, seed=9)
        assert await run(instance, a_generation("r", other)) == reference_output(other, GREEDY)
        (cache,) = [report for report in instance.reports if isinstance(report, CacheReported)]
        oldest_first = [granule for prompt in prompts for granule in reversed(granules_of(prompt))]
        assert cache.kept == tuple(oldest_first[1:])
        instance.assert_all_free(num_cached=5 + 2)


async def test_what_requests_share_is_not_given_up_for_others() -> None:
    prompt = random_tokens(300)
    async with one(FakeEngine(num_blocks=100)) as instance:
        first = a_generation("first", prompt, SamplingParams(max_tokens=90, temperature=0))
        instance.admit(first, kv_moves=False, num_blocks=90)
        instance.run(chunk_plans(first, [300]))
        await instance.until(lambda: len(output(instance, "first")) > 3)
        instance.admit(a_generation("second", random_tokens(100)), kv_moves=False)
        assert len(instance.reports_of(RequestDropped, "second")) == 1
        instance.instance.check_integrity()
        instance.free("first")
        await instance.reported(KvReleased, "first")


async def test_nobody_writes_into_what_is_shared() -> None:
    """A plan that would compute reused tokens again ends the request, and leaves the blocks as they are."""
    prompt = random_tokens(300)
    async with one() as instance:
        await run(instance, a_generation("first", prompt))
        assert isinstance(instance.engine, FakeEngine)
        before = instance.engine.kv.words.copy()
        second = a_generation("second", prompt)
        instance.admit(second, kv_moves=False, num_reused=2)
        instance.run([ChunkPlan(request_id=RequestId("second"), epoch=Epoch(0), start=0, num_tokens=300, is_last=True)])
        await instance.reported(RequestDropped, "second")
        assert (instance.engine.kv.words == before).all()
        instance.assert_all_free(num_cached=2)


async def test_nothing_that_comes_late_lands_in_what_is_shared() -> None:
    async with pair() as (prefill, decode):
        prompt = random_tokens(300)
        await run(decode, a_generation("before", prompt))
        generation = a_generation("r", prompt)
        decode.expect(generation, prefill, num_reused=2)
        (receiver,) = decode.mover.arrivals._copies.values()
        assert isinstance(receiver, CopyIn)
        layout = prefill.engine.kv.layout
        everything = KvPart(IndexRange(0, 75), IndexRange(0, layout.num_layers), IndexRange(0, layout.num_kv_heads))
        for blocks in (IndexRange(0, 75), IndexRange(63, 65), IndexRange(0, 1)):
            part = everything._replace(blocks=blocks)
            header = PieceHeader(
                kind=PieceKind.KV, request_key=receiver.key, epoch=Epoch(0), capability=receiver.capability, part=part
            )
            assert not receiver.expects(header)
        assert receiver.expects(header._replace(part=everything._replace(blocks=IndexRange(64, 75))))
        decode.free("r")


async def test_what_an_instance_tells_when_it_registers_again() -> None:
    prompt, params = random_tokens(300), SamplingParams(max_tokens=1000, temperature=0)
    async with one() as instance:
        assert instance.instance.kept == ()
        await run(instance, a_generation("before", random_tokens(140, seed=5)))
        generation = a_generation("r", prompt, params)
        instance.admit(generation, kv_moves=False)
        instance.run(chunk_plans(generation, [300]))
        await instance.until(lambda: len(output(instance, "r")) > 3)
        (resident,) = instance.instance.residents()
        assert resident.granules == granules_of(prompt)
        assert set(instance.instance.kept) == {*granules_of(prompt), *granules_of(random_tokens(140, seed=5))}
        load = instance.instance.load()
        assert load.num_cached_blocks == 32
        assert load.num_free_blocks + load.num_held_blocks + load.num_cached_blocks == NUM_BLOCKS
        instance.free("r")
        await instance.reported(KvReleased, "r")


async def test_an_instance_tells_who_used_its_cached_kv_last() -> None:
    """Both instances of a hand-over do, in the order of use; a resident names its user, too."""
    users = [CacheUser("t", 1, SessionKey(bytes([number] * 16)), num_turns=number) for number in range(2)]
    async with pair() as (prefill, decode):
        for number, user in enumerate(users):
            name, params = f"r{number}", SamplingParams(max_tokens=1000, temperature=0)
            generation = a_generation(name, random_tokens(300, seed=number), params)
            await hand_over(msgspec.structs.replace(generation, user=user), prefill, decode, [300])
            await decode.reported(TransferLanded, name)
            assert [resident.user for resident in decode.instance.residents()] == [user]
            await prefill.reported(KvReleased, name)
            decode.free(name)
            await decode.reported(KvReleased, name)
        for instance in (prefill, decode):
            uses, runs = instance.instance.last_uses
            assert [(use.user, use.num_prompt_tokens) for use in uses] == [(user, 300) for user in users]
            assert runs == ((0, 0), (2, 1))
            assert len(instance.instance.kept) == 4


async def test_granules_without_the_beginning_of_their_chain_are_not_registered() -> None:
    prompt, other = random_tokens(600), random_tokens(200, seed=1)
    async with one() as instance:
        await run(instance, a_generation("first", prompt))
        await run(instance, a_generation("other", other))
        instance.instance._tables.kept.drop(granules_of(prompt)[1:2])
        await instance.instance.drop_all_but_decoding()
        assert set(instance.instance.kept) == {granules_of(prompt)[0], granules_of(other)[0]}
        instance.assert_all_free(num_cached=2)


async def test_without_a_root_nothing_is_kept() -> None:
    async with one() as instance:
        await run(instance, make_generation("r", random_tokens(300), SamplingParams(max_tokens=200, temperature=0)))
        assert instance.reports_of(KvReleased, "r")[0].granules == ()
        instance.assert_all_free()


async def test_where_blocks_do_not_divide_a_granule_nothing_is_kept() -> None:
    layout = FakeEngine().kv.layout
    engine = FakeEngine(replace(layout, block_size=12), num_blocks=NUM_BLOCKS)
    async with one(engine) as instance:
        generation = a_generation("r", random_tokens(300), SamplingParams(max_tokens=200, temperature=0))
        await run(instance, generation)
        assert instance.reports_of(KvReleased, "r")[0].granules == ()
        instance.assert_all_free()


async def test_another_salt_is_another_chain() -> None:
    one_salt, other = a_generation("a", random_tokens(300), salt=b"1"), a_generation("a", random_tokens(300), salt=b"2")
    assert not set(one_salt.prefix) & set(other.prefix)
    assert msgspec.structs.replace(one_salt, prefix_root=b"", prefix=()) == msgspec.structs.replace(
        other, prefix_root=b"", prefix=()
    )

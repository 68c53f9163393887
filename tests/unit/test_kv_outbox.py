"""Layers of a chunk that wait for the same member go together, and nothing that more could join waits for ever."""

import random

import anyio
import pytest

from pdmesh.kv.outbox import Outbox, Outgoing
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import PieceKind
from pdmesh.transport.buffers import MAX_PIECES

pytestmark = pytest.mark.anyio

NUM_LAYERS = 8


def an_outbox(max_pages: int = 1000, pages_a_message: int = 0) -> Outbox:
    return Outbox(num_layers=NUM_LAYERS, max_pages=lambda: max_pages, pages_a_message=lambda: pages_a_message)


def put(outbox: Outbox, layer: int, first: int = 0, *, chunk: int = 0, num_members: int = 2, together: int = 4) -> None:
    outbox.put(Outgoing(Blocks(chunk, layer, first, 5), num_members), together)


async def take_all(outbox: Outbox) -> list[Outgoing]:
    """Those that are due."""
    taken: list[Outgoing] = []
    async with anyio.create_task_group() as tasks:

        async def take() -> None:
            while items := await outbox.take():
                taken.extend(items)

        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    return taken


async def test_a_piece_leaves_when_it_has_the_layers_that_were_wanted() -> None:
    outbox = an_outbox()
    for layer in range(3):
        put(outbox, layer)
    assert await take_all(outbox) == []
    put(outbox, 3)
    assert await take_all(outbox) == [Outgoing(Blocks(0, 0, 0, 5, 4), 2)]
    put(outbox, 4)
    put(outbox, 5, together=2)  # its turn has come nearer
    assert await take_all(outbox) == [Outgoing(Blocks(0, 4, 0, 5, 2), 2)]


async def test_the_last_layer_a_full_piece_and_a_flush_end_what_is_held_back() -> None:
    outbox = an_outbox(max_pages=14)
    for layer in (6, 7):
        put(outbox, layer)
    assert await take_all(outbox) == [Outgoing(Blocks(0, 6, 0, 5, 2), 2)]
    put(outbox, 0)
    put(outbox, 0, 5, chunk=1)
    assert await take_all(outbox) == []
    put(outbox, 1, 5, chunk=1)  # a third would not fit
    assert await take_all(outbox) == [Outgoing(Blocks(1, 0, 5, 5, 2), 2)]
    outbox.flush()
    assert await take_all(outbox) == [Outgoing(Blocks(0, 0, 0, 5), 2)]


async def test_layers_of_several_chunks_are_held_back_beside_each_other() -> None:
    outbox = an_outbox()
    for layer in range(4):
        for first in (0, 5, 10):
            put(outbox, layer, first)
    assert [item.blocks for item in await take_all(outbox)] == [Blocks(0, 0, first, 5, 4) for first in (0, 5, 10)]


async def test_pages_are_paused_and_words_are_not() -> None:
    outbox = an_outbox()
    said, page = Outgoing(Blocks(0, 3, 5, 5), 2, PieceKind.AGAIN), Outgoing(Blocks(0, 0, 0, 5), 2)
    outbox.pause()
    outbox.put(page)
    outbox.say(said)
    assert await take_all(outbox) == [said]
    outbox.resume()
    outbox.say(said)
    assert await take_all(outbox) == [said, page]
    outbox.put(page)
    outbox.close()
    assert await outbox.take() == []


async def test_what_was_sent_to_more_members_does_not_join() -> None:
    outbox = an_outbox()
    put(outbox, 0)
    put(outbox, 1, num_members=3)
    assert await take_all(outbox) == [Outgoing(Blocks(0, 0, 0, 5), 2)]


async def test_what_comes_first_leaves_at_once_and_what_was_held_back_is() -> None:
    outbox = an_outbox()
    asked = [Outgoing(Blocks(0, 3, 5, 5), 2, kind) for kind in (PieceKind.AGAIN, PieceKind.KV)]
    outbox.put_first(asked[0])
    assert await take_all(outbox) == asked[:1]
    put(outbox, 4)
    put(outbox, 0, 10, chunk=1)
    for item in asked:
        outbox.put_first(item)
    put(outbox, 1, 10, chunk=1)
    assert await take_all(outbox) == [*reversed(asked)]
    outbox.flush()
    assert await take_all(outbox) == [Outgoing(Blocks(0, 4, 0, 5), 2), Outgoing(Blocks(1, 0, 10, 5, 2), 2)]


async def test_what_is_more_than_a_piece_leaves_in_pieces_and_what_comes_first_goes_between_them() -> None:
    outbox = an_outbox(max_pages=14)
    asked = Outgoing(Blocks(0, 7, 50, 5), 2, PieceKind.AGAIN)
    outbox.put(Outgoing(Blocks(0, 0, 0, 20, 2), 2))
    put(outbox, 0, 20, chunk=1)
    assert await outbox.take() == [Outgoing(Blocks(0, 0, 0, 14), 2)]
    outbox.put_first(asked)
    assert await take_all(outbox) == [
        asked,
        *(Outgoing(Blocks(0, *pages), 2) for pages in [(0, 14, 6), (1, 0, 14), (1, 14, 6)]),
    ]
    put(outbox, 1, 20, chunk=1)
    put(outbox, 2, 20, chunk=1)
    outbox.put(Outgoing(Blocks(0, 0, 0, 5, 5), 2))
    outbox.flush()
    assert [item.blocks[1:] for item in await take_all(outbox)] == [
        (0, 20, 5, 2),
        (0, 0, 5, 2),
        (2, 0, 5, 2),
        (4, 0, 5, 1),
        (2, 20, 5, 1),
    ]


async def test_whoever_waits_is_woken_while_another_is_busy() -> None:
    outbox = an_outbox()
    taken: list[Outgoing] = []

    async def take() -> None:
        taken.extend(await outbox.take())  # then it is busy for good

    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        for layer in (0, 1):
            put(outbox, layer, together=1)
            await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert taken == [Outgoing(Blocks(0, layer, 0, 5), 2) for layer in (0, 1)]


async def test_what_is_due_leaves_together_as_far_as_it_fits_into_a_message() -> None:
    outbox = an_outbox(max_pages=6, pages_a_message=16)
    said = Outgoing(Blocks(0, 3, 5, 5), 2, PieceKind.AGAIN)
    for first in (0, 10, 20):
        outbox.put(Outgoing(Blocks(0, 0, first, 5), first))
    outbox.put(Outgoing(Blocks(0, 1, 0, 8), 2))
    outbox.say(said)
    assert await outbox.take() == [said]
    assert await outbox.take() == [Outgoing(Blocks(0, 0, first, 5), first) for first in (0, 10, 20)]
    assert await outbox.take() == [Outgoing(Blocks(0, 1, *pages), 2) for pages in ((0, 6), (6, 2))]


async def test_a_piece_that_fills_a_message_leaves_alone() -> None:
    outbox = an_outbox(max_pages=10, pages_a_message=4)
    for first in (0, 10):
        put(outbox, 7, first)
    put(outbox, 7, 20)
    assert [await outbox.take() for _ in range(3)] == [[Outgoing(Blocks(0, 7, first, 5), 2)] for first in (0, 10, 20)]


async def test_a_message_holds_no_more_pieces_than_its_receiver_takes() -> None:
    outbox = an_outbox(max_pages=1, pages_a_message=1000)
    outbox.put(Outgoing(Blocks(0, 0, 0, 2 * MAX_PIECES + 1), 2))
    assert [len(await outbox.take()) for _ in range(3)] == [MAX_PIECES, MAX_PIECES, 1]


@pytest.mark.parametrize("seed", range(20))
async def test_each_page_leaves_once_and_in_pieces_that_fit(seed: int) -> None:
    rng = random.Random(seed)
    max_pages = rng.choice([1, 4, 10, 1000])
    outbox = an_outbox(max_pages, rng.choice([0, 7, 50]))
    given: list[tuple[int, int]] = []
    taken: list[Outgoing] = []
    for chunk in range(10):
        size = rng.randint(1, 5)
        for layer in range(NUM_LAYERS):
            outbox.put(Outgoing(Blocks(chunk, layer, 5 * chunk, size), 2), rng.randint(1, NUM_LAYERS))
            given += [(layer, 5 * chunk + block) for block in range(size)]
            if rng.random() < 0.3:
                taken += await take_all(outbox)
    taken += await take_all(outbox)
    pages = [
        (layer, block)
        for blocks, *_ in taken
        for layer in range(blocks.layer, blocks.end_layer)
        for block in range(blocks.first_block, blocks.end)
    ]
    assert sorted(pages) == sorted(given)
    assert all(blocks.num_pages <= max_pages for blocks, *_ in taken)

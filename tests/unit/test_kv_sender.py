"""What a source sends of a prompt's KV, and in how many pieces."""

from __future__ import annotations

import random

import pytest

from pdmesh.kv.copy_out import CopyOut, KvSource
from pdmesh.kv.lane import STEPS_A_CHUNK
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import FirstToken, KvDestination
from pdmesh.kv_layout import KvLayout
from pdmesh.model import Epoch, RequestId
from pdmesh_testing.kv import EVERYTHING, ByteStore
from pdmesh_testing.transfers import a_context

pytestmark = pytest.mark.anyio

LAYOUT = KvLayout(num_layers=8, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32")


def a_sender(num_blocks: int) -> KvSource:
    return KvSource(
        a_context(ByteStore(LAYOUT, num_blocks)),
        RequestId("request"),
        Epoch(0),
        block_ids=range(num_blocks),
        num_context_tokens=num_blocks * LAYOUT.block_size,
    )


def grant(sender: KvSource) -> CopyOut:
    return CopyOut(sender._context, sender, [KvDestination(b"destination", EVERYTHING)], 1)


def land(sender: KvSource, blocks: Blocks) -> None:
    """Another instance computed them."""
    for new in sender.ledger.place(blocks):
        sender.add(new)


def pieces(push: CopyOut) -> list[Blocks]:
    return [item.blocks for item in push._lanes[0]._outbox._due]


def check_each_page_once(push: CopyOut, num_blocks: int) -> None:
    pages = [
        (layer, block)
        for blocks in pieces(push)
        for layer in range(blocks.layer, blocks.end_layer)
        for block in range(blocks.first_block, blocks.end)
    ]
    assert len(pages) == len(set(pages)) == LAYOUT.num_layers * num_blocks


async def test_what_others_compute_meanwhile_goes_on_in_as_few_pieces_as_what_is_computed_here() -> None:
    """Each layer of three members' slices comes before any has all: a piece for each would be 24."""
    sender = a_sender(6)
    push = grant(sender)
    for layer in range(LAYOUT.num_layers):
        land(sender, Blocks(0, layer, 0, 2))
        land(sender, Blocks(0, layer, 2, 2))
        sender.blocks_ready(chunk=1, layer=layer, first_block=4, num_blocks=2)
    assert sender.has_all
    assert len(pieces(push)) == 3 * STEPS_A_CHUNK
    check_each_page_once(push, 6)


@pytest.mark.parametrize("seed", range(20))
async def test_every_page_is_sent_once_whatever_ended_early(seed: int) -> None:
    """Slices stop in any layer, and are computed again by others, in other parts; the grant comes whenever it does."""
    rng, num_blocks = random.Random(seed), 9
    sender, push = a_sender(num_blocks), None
    for chunk in range(4):
        if push is None and rng.random() < 0.3:
            push = grant(sender)
        first = rng.randrange(num_blocks)
        for layer in range(rng.randrange(LAYOUT.num_layers)):
            land(sender, Blocks(chunk, layer, first, rng.choice([1, num_blocks - first])))
    for first in (0, 3, 6):
        for layer in range(LAYOUT.num_layers):
            land(sender, Blocks(9, layer, first, 3))
    sender.commit(FirstToken(1, 0))
    assert sender.has_all
    check_each_page_once(push or grant(sender), num_blocks)

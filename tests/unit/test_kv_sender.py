"""What a source makes ready of a prompt's KV, and in how many pieces."""

from __future__ import annotations

import random

import pytest

from pdmesh.kv.outgoing import Blocks
from pdmesh.kv.receiver import FirstToken
from pdmesh.kv.sender import STEPS_A_CHUNK, KvSender
from pdmesh.model import Epoch, KvLayout, RequestId
from pdmesh.testing.kv import ByteStore

pytestmark = pytest.mark.anyio

LAYOUT = KvLayout(num_layers=8, num_kv_heads=1, head_dim=1, block_size=4, dtype="float32")


def a_sender(num_blocks: int) -> KvSender:
    return KvSender(
        RequestId("request"),
        Epoch(0),
        block_ids=range(num_blocks),
        num_context_tokens=num_blocks * LAYOUT.block_size,
        source=0,
        blocks=None,
        store=ByteStore(LAYOUT, num_blocks),
        pages_a_piece=1 << 20,
        call_soon=lambda callback: callback(),
        clock=lambda: 0.0,
    )


async def test_what_others_compute_meanwhile_goes_on_in_as_few_pieces_as_what_is_computed_here() -> None:
    """Each layer of three members' slices comes before any has all: a piece for each would be 24."""
    sender = a_sender(6)
    for layer in range(LAYOUT.num_layers):
        sender.blocks_landed(Blocks(0, layer, 0, 2))
        sender.blocks_landed(Blocks(0, layer, 2, 2))
        sender.blocks_ready(chunk=1, layer=layer, first_block=4, num_blocks=2)
    assert sender.has_all
    assert len(sender.ready) == 3 * STEPS_A_CHUNK


@pytest.mark.parametrize("seed", range(20))
async def test_every_page_is_ready_once_whatever_ended_early(seed: int) -> None:
    """Slices stop in any layer, and are computed again by others, in other parts."""
    rng, num_blocks = random.Random(seed), 9
    sender = a_sender(num_blocks)
    for chunk in range(4):
        first = rng.randrange(num_blocks)
        for layer in range(rng.randrange(LAYOUT.num_layers)):
            sender.blocks_landed(Blocks(chunk, layer, first, rng.choice([1, num_blocks - first])))
    for first in (0, 3, 6):
        for layer in range(LAYOUT.num_layers):
            sender.blocks_landed(Blocks(9, layer, first, 3))
    sender.commit(FirstToken(1, 0))
    assert sender.has_all
    pages = [
        (layer, block)
        for blocks in sender.ready
        for layer in range(blocks.layer, blocks.end_layer)
        for block in range(blocks.first_block, blocks.end)
    ]
    assert len(pages) == len(set(pages)) == LAYOUT.num_layers * num_blocks

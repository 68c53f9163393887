"""When a group changes, that costs the event loop something for each run of pages, and nothing for each page."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from pdmesh.kv.exchange import KvExchange
from pdmesh.kv.gate import Wakeup
from pdmesh.kv.pages import Blocks, marked, runs
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv_layout import IndexRange, KvLayout, KvPart
from pdmesh.model import Epoch, RequestId
from pdmesh.policy.pacing import ChunkPace
from pdmesh_testing.calls import num_calls
from pdmesh_testing.kv import ByteStore
from pdmesh_testing.transfers import a_context

pytestmark = pytest.mark.anyio

LAYOUT = KvLayout(num_layers=8, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32")
HEADS = IndexRange(0, LAYOUT.num_kv_heads)
ADDRESSES = tuple(f"member {number}".encode() for number in range(4))


def a_leader(num_blocks: int) -> KvExchange:
    """Alone in its group yet."""
    exchange = a_member(num_blocks)
    assert exchange.set_members(0, ADDRESSES[:1]) is None
    return exchange


def a_member(num_blocks: int) -> KvExchange:
    return KvExchange(
        a_context(ByteStore(LAYOUT, 1)),
        RequestId("request"),
        Epoch(0),
        capability=1,
        block_ids=range(num_blocks),
        wakeup=Wakeup(),
        on_failed=lambda exchange, reason: None,
    )


def land(exchange: KvExchange, source: int, layer: int, blocks: IndexRange, *, num_members: int) -> None:
    part = KvPart(blocks, IndexRange(layer, layer + 1), HEADS)
    header = PieceHeader(
        kind=PieceKind.KV,
        request_key=exchange.key,
        epoch=exchange.epoch,
        capability=exchange.capability,
        source=source,
        num_members=num_members,
        part=part,
        payload_bytes=part.num_pages * LAYOUT.max_page_bytes,
    )
    assert exchange.expects(header)
    assert exchange.ledger.claim(Blocks.of(header), source) == [Blocks.of(header)]
    exchange.place(header, Blocks.of(header))


def calls_of_a_group(num_blocks: int) -> Sequence[int]:
    """Of a join, of one after half of it came from another member, and of that one's loss."""
    leader = a_leader(num_blocks)
    half = num_blocks // 2
    assert leader.begin(0, half)
    for layer in range(LAYOUT.num_layers):
        leader.publish(Blocks(0, layer, 0, half))
    join = num_calls(lambda: leader.set_members(0, ADDRESSES[:2]), of_c=True)
    for layer in range(LAYOUT.num_layers):
        land(leader, 1, layer, IndexRange(half, num_blocks), num_members=2)
    later = num_calls(lambda: leader.set_members(0, ADDRESSES[:3]), of_c=True)
    loss = num_calls(lambda: leader.set_members(0, (ADDRESSES[0], b"", ADDRESSES[2])), of_c=True)
    assert leader.ledger.num_complete_blocks == num_blocks
    leader.end("over")
    return join, later, loss


async def test_a_join_and_a_loss_cost_the_same_whatever_the_length_of_the_prompt() -> None:
    calls_of_a_group(32)  # tables are made once
    assert calls_of_a_group(8192) == calls_of_a_group(32)


def layers_sent(exchange: KvExchange, pace: ChunkPace, number: int) -> list[int]:
    """Of a chunk that is computed here, to this member: how many layers each piece has."""
    for layer in range(LAYOUT.num_layers):
        exchange.publish(Blocks(0, layer, 0, 2), pace)
    return [item.blocks.num_layers for item in exchange._peers[number].lane._outbox._due]


@pytest.mark.parametrize(
    ("own", "pace", "expected"),
    [
        pytest.param(0, ChunkPace.IN_PARALLEL, {1: [4, 4], 2: [4, 4], 3: [4, 4]}, id="the leader's slice is the last"),
        pytest.param(1, ChunkPace.IN_PARALLEL, {2: [2] * 4, 3: [3, 3, 2], 0: [4, 4]}, id="half of them, first to last"),
        pytest.param(
            2, ChunkPace.IN_PARALLEL, {1: [4, 4], 3: [2] * 4, 0: [3, 3, 2]}, id="who is before needs it later"
        ),
        pytest.param(1, ChunkPace.AT_ONCE, {2: [1] * 8, 3: [1] * 8, 0: [1] * 8}, id="all are in the same layer"),
        pytest.param(3, ChunkPace.AT_ONCE, {1: [4, 4], 2: [4, 4], 0: [1] * 8}, id="but who is before"),
    ],
)
async def test_members_of_a_parallel_step_are_sent_as_many_layers_as_they_are_behind(
    own: int, pace: ChunkPace, expected: dict[int, list[int]]
) -> None:
    for number, sizes in expected.items():
        exchange = a_member(8)
        assert exchange.set_members(own, ADDRESSES) is None
        assert layers_sent(exchange, pace, number) == sizes
        exchange.end("over")


async def test_a_lost_member_of_a_parallel_step_counts_no_more() -> None:
    exchange = a_member(8)
    assert exchange.set_members(1, (ADDRESSES[0], ADDRESSES[1], b"", b"")) is None
    assert layers_sent(exchange, ChunkPace.IN_PARALLEL, 0) == [4, 4], "of two, one is four layers behind"
    exchange.end("over")


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_where_the_ones_are(seed: int) -> None:
    rng = random.Random(seed)
    values = bytes(rng.randrange(4) for _ in range(rng.randrange(40)))
    wanted = [rng.randrange(4) for _ in range(seed % 3)]
    found = list(runs(values.translate(marked(*wanted))))
    assert [index for first, count in found for index in range(first, first + count)] == [
        index for index, value in enumerate(values) if value in wanted
    ]
    assert all(first + count < later for (first, count), (later, _) in itertools.pairwise(found))

"""What the CUDA engine keeps in device memory, and how it gets there and back: on the host, with stand-in streams."""

from __future__ import annotations

import random
import threading

import anyio
import numpy as np
import pytest
import torch

from pdmesh.engine.attention import QuerySpan
from pdmesh.engine.cuda.kv_store import DeviceKvStore
from pdmesh.engine.cuda.page_tables import NUM_ROWS, PageTables, write_pages
from pdmesh.engine.cuda.staging import Staging
from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.mover import KvMover
from pdmesh.kv.outcome import LandedTransfer, SentTransfer, TransferOutcome
from pdmesh.kv.piece import FirstToken, KvDestination
from pdmesh.kv_layout import KvLayout, num_blocks_for
from pdmesh.model import Epoch, RequestId
from pdmesh_testing.cuda import FakeStreams
from pdmesh_testing.kv import EVERYTHING, SMALL_TRANSFER, ByteStore, TransportMaker

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=4, block_size=5, dtype="bfloat16")


def random_bytes(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize(
    "block_ids", [[], [0], [6, 0, 3], [2, 3, 4], [5, 6, 1, 2], [6, 4, 2, 0, 1, 3], [5, 3, 1, 6, 4]]
)
def test_gather_and_scatter_are_inverse_and_follow_the_order_of_ids(block_ids: list[int]) -> None:
    store = DeviceKvStore(LAYOUT, 7, FakeStreams())
    size = len(block_ids) * LAYOUT.max_page_bytes
    data = memoryview(bytearray(random_bytes(size + 3, 1)))[3:]  # as it lies in a buffer: anywhere
    store.scatter(1, block_ids, data)
    for position, block_id in enumerate(block_ids):
        piece = bytearray(LAYOUT.max_page_bytes)
        store.gather(1, [block_id], memoryview(piece))
        assert piece == data[position * LAYOUT.max_page_bytes : (position + 1) * LAYOUT.max_page_bytes]
    out = bytearray(len(data))
    store.gather(1, block_ids, memoryview(out))
    assert out == data
    assert not store.layers[0].any()


def test_a_store_is_the_host_stores_equal_byte_for_byte() -> None:
    """Instances of both kinds exchange KV."""
    host = ByteStore(LAYOUT, 4, seed=3)
    device = DeviceKvStore(LAYOUT, 4, FakeStreams())
    piece = bytearray(LAYOUT.max_page_bytes)
    host.gather(1, [2], memoryview(piece))
    device.scatter(1, [2], memoryview(piece))
    expected = torch.frombuffer(piece, dtype=torch.int16).view(2, 3, 5, 4)
    assert torch.equal(device.layers[1][2].view(torch.int16), expected)


def test_no_block_outside_the_cache_is_touched() -> None:
    store = DeviceKvStore(LAYOUT, 2, FakeStreams())
    piece = bytearray(LAYOUT.max_page_bytes)
    for block_id in (-1, store.scratch_block):
        with pytest.raises(IndexError, match="2 blocks"):
            store.scatter(0, [block_id], memoryview(piece))
    with pytest.raises(ValueError, match="1 blocks of 240 bytes"):
        store.gather(0, [0], memoryview(piece)[:-1])


def test_callbacks_come_when_their_events_do_in_order_and_on_another_thread() -> None:
    streams = FakeStreams()
    streams.held = True
    store = DeviceKvStore(LAYOUT, 2, streams)
    told: list[tuple[str, bool]] = []
    both = threading.Barrier(2)

    def tell(name: str) -> None:
        told.append((name, threading.current_thread() is threading.main_thread()))
        both.wait(10)

    with store.serving([memoryview(bytearray(8))]):
        assert streams.num_pinned == 1
        store.when_written(lambda: tell("first"))
        store.when_written(lambda: tell("second"))
        streams.events[1].complete()
        assert told == []  # the second is done, but comes after the first
        streams.events[0].complete()
        both.wait(10)
        both.wait(10)
    assert told == [("first", False), ("second", False)]
    assert streams.num_pinned == 0


@pytest.mark.anyio
async def test_nothing_is_sent_before_the_device_has_written_it() -> None:
    """A whole hand-over from a device's memory to another's; each layer leaves when its event has come about."""
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
    maker, request, epoch = TransportMaker("memory"), RequestId("r"), Epoch(0)
    streams = FakeStreams()
    source, target = DeviceKvStore(layout, 4, streams), DeviceKvStore(layout, 4, FakeStreams())
    outcomes: list[TransferOutcome] = []
    landed = anyio.Event()

    def on_landed(outcome: TransferOutcome) -> None:
        outcomes.append(outcome)
        landed.set()

    async with maker.open(SMALL_TRANSFER) as a, maker.open(SMALL_TRANSFER) as b:
        pool_a, pool_b = BlockPool(4), BlockPool(4)
        sending = KvMover(transport=a, store=source, pool=pool_a, config=SMALL_TRANSFER, on_outcome=outcomes.append)
        receiving = KvMover(transport=b, store=target, pool=pool_b, config=SMALL_TRANSFER, on_outcome=on_landed)
        with anyio.fail_after(10):
            async with sending, receiving:
                assert streams.num_pinned == SMALL_TRANSFER.num_send_buffers + SMALL_TRANSFER.num_receive_buffers
                blocks_a, blocks_b = pool_a.allocate(3), pool_b.allocate(3)
                receiving.arrivals.expect(
                    request,
                    epoch,
                    capability=7,
                    block_ids=blocks_b,
                    num_context_tokens=12,
                    source_addresses=(a.address,),
                )
                sender = sending.departures.offer(request, epoch, block_ids=blocks_a, num_context_tokens=12)
                sending.departures.grant(
                    request, epoch, destinations=[KvDestination(b.address, EVERYTHING)], capability=7
                )
                streams.held = True
                for layer in range(3):  # given to the device, which has computed none of it
                    sender.blocks_ready(chunk=0, layer=layer, first_block=0, num_blocks=3)
                sender.commit(FirstToken(1, 0))
                await anyio.lowlevel.checkpoint()
                for layer in range(3):  # now it computes
                    source.layers[layer][:3] = float(layer + 1)
                    assert sending.counters().num_pieces_sent <= layer
                    streams.events[layer].complete()
                await landed.wait()
        assert {type(outcome) for outcome in outcomes} >= {LandedTransfer}
        assert {type(outcome) for outcome in outcomes} <= {LandedTransfer, SentTransfer}
        for layer in range(3):
            assert (target.layers[layer][blocks_b] == layer + 1).all()


class Tables:
    """Page tables, and what they say."""

    def __init__(self, *, block_size: int = 4, max_blocks: int = 16) -> None:
        self.block_size = block_size
        self.tables = PageTables(block_size=block_size, max_blocks=max_blocks, device=torch.device("cpu"))
        self.staging = Staging(FakeStreams())

    def check(self, requests: list[tuple[list[int], int]]) -> None:
        """The index for sequences of (block table, length) is theirs."""
        self.staging.restart()
        index = self.tables.index([QuerySpan(0, 1, length - 1, table) for table, length in requests], self.staging)
        used = [num_blocks_for(length, self.block_size) for _, length in requests]
        assert index.lengths.indptr.tolist() == [0, *np.cumsum(used).tolist()]
        assert index.lengths.last_page_len.tolist() == [(length - 1) % self.block_size + 1 for _, length in requests]
        assert index.pages.tolist() == [b for (table, _), n in zip(requests, used, strict=True) for b in table[:n]]
        assert index.lengths.indptr.dtype == np.int32
        assert index.pages.dtype == torch.int32


def test_an_index_is_that_of_the_block_tables() -> None:
    tables = Tables()
    first, second = [7, 1, 4, 9], [3, 2]
    tables.check([(first, 13), (second, 5)])
    assert tables.tables.num_sent == 6
    tables.check([(second, 8), (first, 4), (first, 16)])
    tables.check([(first, 16)])
    assert tables.tables.num_sent == 6
    second += [5, 6]
    tables.check([(first, 16), (second, 13)])
    assert tables.tables.num_sent == 8


def test_tables_that_are_equal_are_not_the_same() -> None:
    tables = Tables()
    table, other = [7, 1, 4], [7, 1, 5]
    tables.check([(table, 9)])
    tables.check([(other, 9)])
    tables.check([(table, 9), (other, 5)])


def test_rows_are_those_used_last_and_stay_where_they_are() -> None:
    tables = Tables()
    memory = tables.tables.table.data_ptr()
    requests = [([number, number + 1000], 5) for number in range(NUM_ROWS + 100)]
    for first in range(0, NUM_ROWS + 100, 50):
        tables.check(requests[first : first + 50])
    num_sent = 2 * (NUM_ROWS + 100)
    assert tables.tables.num_sent == num_sent
    tables.check(requests[-50:])  # still there
    assert tables.tables.num_sent == num_sent
    tables.check(requests[:60])  # given up since
    assert tables.tables.num_sent == num_sent + 120
    tables.check(requests)  # more at once than there are rows: sent for this step alone
    tables.check(requests[::-1])
    assert tables.tables.num_sent == num_sent + 120
    assert tables.tables.table.data_ptr() == memory


def test_pages_are_written_in_place() -> None:
    """Whatever lies behind the last of them, as in a graph's buffer."""
    table = torch.tensor([[5, 6, 7], [8, 9, 10]], dtype=torch.int32)
    pages = torch.full((8,), -1, dtype=torch.int32)
    rows, indptr = torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([0, 2, 5, 6], dtype=torch.int32)
    write_pages(table, rows, indptr, pages)
    assert pages[:6].tolist() == [8, 9, 5, 6, 7, 8]


def test_a_longer_reservation_than_the_context_is_cut() -> None:
    tables = Tables(max_blocks=3)
    tables.check([([5, 6, 7, 8, 9], 12), ([1], 2)])


def test_staging_keeps_what_was_given_until_restarted() -> None:
    staging = Staging(FakeStreams())
    arrays = [np.arange(size, dtype=np.int64) + size for size in (3, 70_000, 0, 200_000, 5)]
    held = [staging.host(values) for values in arrays]
    for values, place in zip(arrays, held, strict=True):
        assert place.dtype == torch.int32
        assert np.array_equal(place.numpy(), values)
    split = staging.upload(arrays[0], arrays[2], arrays[4])
    assert [part.tolist() for part in split] == [[3, 4, 5], [], [5, 6, 7, 8, 9]]
    staging.restart()
    address = staging.host(arrays[0]).data_ptr()
    staging.restart()
    assert staging.host(arrays[4]).data_ptr() == address

"""Where pieces are copied: on the event loop, or on a thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import anyio
import pytest

from pdmesh.kv.blocks import BlockPool
from pdmesh.kv.intake import PageIntake
from pdmesh.kv.lane import UNREADABLE, Lane
from pdmesh.kv.ledger import PageLedger
from pdmesh.kv.pages import Blocks
from pdmesh.kv.peer_reads import note_bytes
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv.store import HostKvStore
from pdmesh.kv_layout import IndexRange, KvLayout, KvPart
from pdmesh.model import Epoch
from pdmesh.threads import CallThreads
from pdmesh.transport.seal import MeshKey
from pdmesh_testing.transfers import a_context

pytestmark = pytest.mark.anyio

LAYOUT = KvLayout(num_layers=4, num_kv_heads=1, head_dim=16, block_size=16, dtype="bfloat16")
KEY = MeshKey("token")


@dataclass
class Piece:
    payload: memoryview
    header: memoryview = field(default_factory=lambda: memoryview(b""))
    is_released: bool = False

    def load(self) -> bool:
        return True

    def release(self) -> None:
        self.is_released = True


@dataclass(eq=False)
class OneInlet:
    """Expects a piece, and notes what became of it: as the lane to its source, too."""

    block_ids: Sequence[int]
    address: bytes = b""
    is_over: bool = False
    faults: list[str | None] = field(default_factory=list[str | None])
    told: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.ledger = PageLedger(LAYOUT.num_layers, len(self.block_ids))

    def lane_from(self, source: int) -> Lane:
        return cast(Lane, self)

    def expects(self, header: PieceHeader) -> bool:
        return True

    def place(self, header: PieceHeader, blocks: Blocks) -> None:
        self.faults.append(None)
        self.told.set()

    def give_up(self, reason: str) -> None:
        raise AssertionError(reason)

    def resume(self) -> None:
        pass

    def add_sound(self) -> None:
        pass

    def ask_again(self, header: PieceHeader, fault: str) -> None:
        self.faults.append(fault)
        self.told.set()


@dataclass
class Noting(HostKvStore):
    """A cache of which only its size is real."""

    num_blocks: int
    layout: KvLayout = LAYOUT
    copied_by: list[int] = field(default_factory=list[int])  # thread ids

    def gather(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        raise AssertionError("nothing is sent")

    def scatter(self, layer: int, block_ids: Sequence[int], data: memoryview) -> None:
        self.copied_by.append(threading.get_ident())


async def test_a_peer_read_that_cannot_be_made_commits_no_memory() -> None:
    """The pieces that come in its place do, on a thread."""
    store, pool = Noting(1 << 16), BlockPool(1 << 16)
    pool.allocate(2)
    part = KvPart(IndexRange(0, 2), IndexRange(0, 1), IndexRange(0, 1))
    inlet = OneInlet([0, 1])
    async with CallThreads("copies", 1) as copies, anyio.create_task_group() as tasks:
        intake = PageIntake(a_context(store, tasks, copies, KEY), pool)
        for kind, num_bytes in (
            (PieceKind.PEER_READ, note_bytes(2)),
            (PieceKind.KV, part.num_pages * LAYOUT.max_page_bytes),
        ):
            payload = memoryview(bytes(num_bytes))
            header = PieceHeader(
                kind=kind,
                request_key=bytes(16),
                epoch=Epoch(0),
                capability=1,
                part=part,
                payload_bytes=num_bytes,
                check=KEY.close_payload(payload),
            )
            intake.take(inlet, header, Piece(payload))
            assert inlet.faults == [UNREADABLE]
    assert inlet.faults == [UNREADABLE, None]
    assert threading.get_ident() not in store.copied_by


@pytest.mark.parametrize(
    ("num_blocks", "inline"), [(1 << 16, [False, True, False, True, False, False]), (64, [True] * 6)]
)
async def test_a_thread_copies_what_reaches_into_memory_that_may_not_be_committed(
    num_blocks: int, inline: list[bool]
) -> None:
    store, pool = Noting(num_blocks), BlockPool(num_blocks)
    pool.allocate(16)
    found: list[bool] = []
    async with CallThreads("copies", 1) as copies, anyio.create_task_group() as tasks:
        intake = PageIntake(a_context(store, tasks, copies, KEY), pool)
        for layers, blocks in (
            *(((0, 2), [0, 1]), ((0, 2), [1, 0]), ((1, 3), [0, 1]), ((0, 3), [1])),
            *(((0, 1), [9]), ((0, 1), [5])),  # of two requests, of which the second one's KV comes first
        ):
            part = KvPart(IndexRange(0, len(blocks)), IndexRange(*layers), IndexRange(0, 1))
            payload = memoryview(bytes(part.num_pages * LAYOUT.max_page_bytes))
            header = PieceHeader(
                kind=PieceKind.KV,
                request_key=bytes(16),
                epoch=Epoch(0),
                capability=1,
                part=part,
                payload_bytes=len(payload),
                check=KEY.close_payload(payload),
            )
            piece, inlet = Piece(payload), OneInlet(blocks)
            intake.take(inlet, header, piece)
            with anyio.fail_after(10):
                await inlet.told.wait()
            assert inlet.faults == [None]
            assert piece.is_released
            found.append(set(store.copied_by) == {threading.get_ident()})
            store.copied_by.clear()
    assert found == inline
    pool.check_integrity()

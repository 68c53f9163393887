"""Laws of what is asked for again: a receiver's counts agree, and whoever sends bears with an honest one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdmesh.kv.copy_in import CopyIn
from pdmesh.kv.lane import UNREADABLE
from pdmesh.kv.outbox import Outgoing
from pdmesh.kv.pages import Blocks
from pdmesh.kv.peer_reads import note_bytes
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv.repair import FREE_PIECES, DamageLimit, RefusalLimit
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.model import Epoch, RequestId
from pdmesh_testing.kv import SMALL_LAYOUT, ByteStore
from pdmesh_testing.transfers import a_context

NUM_BLOCKS = 6
NUM_LAYERS = SMALL_LAYOUT.num_layers
EVERYTHING = KvPart(IndexRange(0, NUM_BLOCKS), IndexRange(0, NUM_LAYERS), IndexRange(0, SMALL_LAYOUT.num_kv_heads))
A_COMMIT = PieceHeader(
    kind=PieceKind.COMMIT,
    request_key=bytes(16),
    epoch=Epoch(0),
    capability=1,
    part=EVERYTHING,
    num_context_tokens=NUM_BLOCKS * SMALL_LAYOUT.block_size,
    has_token=True,
)


@given(st.lists(st.booleans()))
def test_an_honest_receiver_is_answered_until_it_gives_up(is_damaged: list[bool]) -> None:
    """Though its sender learns of what was taken last of all."""
    receiver, sender = DamageLimit(sends=False), DamageLimit(sends=True)
    num_untold = 0
    for damaged in is_damaged:
        if not damaged:
            receiver.add_sound()
            num_untold += 1
        elif receiver.add_damaged():
            assert sender.add_damaged()
        if num_untold > 16:  # more than are under way to one peer
            sender.add_sound()
            num_untold -= 1


@given(st.integers(0, 1000))
def test_what_is_always_damaged_is_asked_for_a_bounded_number_of_times(num_sound: int) -> None:
    limit = DamageLimit(sends=False)
    limit.add_sound(num_sound)
    num_asked = 0
    while limit.add_damaged():
        num_asked += 1
    assert num_asked == limit.num_damaged == FREE_PIECES + num_sound // 4


@st.composite
def parts(draw: st.DrawFn) -> list[KvPart]:
    """All of it, in pieces."""
    cuts = sorted({0, NUM_BLOCKS, *draw(st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=3))})
    return draw(
        st.permutations(
            [
                EVERYTHING._replace(blocks=IndexRange(first, end), layers=IndexRange(layer, layer + 1))
                for first, end in itertools.pairwise(cuts)
                for layer in range(NUM_LAYERS)
            ]
        )
    )


def a_piece(part: KvPart, *, is_lent: bool) -> PieceHeader:
    page_bytes = part.num_pages * SMALL_LAYOUT.max_page_bytes
    return A_COMMIT._replace(
        kind=PieceKind.PEER_READ if is_lent else PieceKind.KV,
        part=part,
        payload_bytes=note_bytes(part.blocks.size) if is_lent else page_bytes,
        has_token=False,
        num_context_tokens=0,
    )


@given(st.integers(1, 50), st.lists(st.integers(1, 9)))
def test_every_page_may_be_refused_once_and_nothing_for_ever(num_pages: int, windows: list[int]) -> None:
    limit, num_refused = RefusalLimit(num_pages), 0
    for size in windows:
        is_allowed = limit.add(size)
        assert is_allowed or num_refused + size > num_pages
        num_refused += size if is_allowed else 0
    assert num_refused <= 2 * num_pages


@given(parts(), st.data(), st.booleans())
def test_a_receiver_lands_once_every_page_came_sound_whatever_was_damaged(
    pieces: list[KvPart], data: st.DataObject, is_move: bool
) -> None:
    """The commit comes after all were taken, of which some are damaged, checked late, read in vain, or come twice."""
    receiver = CopyIn(
        a_context(ByteStore(SMALL_LAYOUT, NUM_BLOCKS)),
        RequestId("r"),
        Epoch(0),
        capability=1,
        block_ids=range(NUM_BLOCKS),
        num_context_tokens=None if is_move else A_COMMIT.num_context_tokens,
        source_addresses=(b"source",),
        on_placed=lambda receiver: None,
        on_failed=lambda receiver, reason: None,
    )
    (lane,) = receiver.lanes

    def ask(header: PieceHeader, fault: str) -> None:
        receiver.ledger.release(Blocks.of(header), 0)
        assert lane.ask_again(header, fault) is None

    headers = [a_piece(part, is_lent=data.draw(st.booleans())) for part in pieces]
    unread, placed = list[PieceHeader](), set[KvPart]()
    to_come, num_damaged, committed = list(headers), 0, False
    while to_come or unread:
        assert not receiver.complete
        if to_come and (not unread or data.draw(st.booleans())):
            header = to_come.pop()
            assert receiver.expects(header)
            assert receiver.ledger.claim(Blocks.of(header), 0) == [Blocks.of(header)]
            assert receiver.ledger.claim(Blocks.of(header), 0) == []
            unread.append(header)
        else:
            header = unread.pop(data.draw(st.integers(0, len(unread) - 1)))
            if header.kind is PieceKind.PEER_READ and data.draw(st.booleans()):
                if data.draw(st.booleans()):
                    ask(header, UNREADABLE)
                    assert lane._outbox._said.pop() == Outgoing(Blocks.of(header), kind=PieceKind.NO_PEER_READS)
                else:  # the window was closed
                    receiver.ledger.release(Blocks.of(header), 0)
                to_come.append(a_piece(header.part, is_lent=False))
            elif num_damaged < FREE_PIECES and data.draw(st.booleans()):
                num_damaged += 1
                ask(header, "checksum")
                assert lane._outbox._said.pop() == Outgoing(Blocks.of(header), kind=PieceKind.AGAIN)
                to_come.append(header)
            else:
                receiver.place(header, Blocks.of(header))
                placed.add(header.part)
        if not committed and not set(pieces) - placed - {header.part for header in unread}:
            committed = data.draw(st.booleans())
            if committed:
                assert receiver.commit(A_COMMIT) is None
        receiver.ledger.check_integrity()
    if not committed:
        assert not receiver.complete
        assert receiver.commit(A_COMMIT) is None
    assert placed == set(pieces)
    assert receiver.num_bytes == EVERYTHING.num_pages * SMALL_LAYOUT.max_page_bytes
    if not is_move:  # its transcript is missing
        assert receiver.complete

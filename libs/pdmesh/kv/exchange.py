"""What the members of a prefill group pass each other of one request's KV: each its own pages to all others.

**Who sends a page to whom.** Whoever computed it, to all members that it knew of then; that number is the page's
*audience*, and travels with it. A member that joins later gets older pages from the group's leader, which passes on
what it holds to everyone beyond a page's audience. So each page comes to each member once, whoever learns of it when,
and whichever helper leaves early.

**Who may be sent to.** The scheduler tells members of each other at different times, and a piece that comes before its
request is lost. So a member that learns of another says HELLO, which is answered by WELCOME; either of them, or any
other piece, says that its sender is ready. Of two members one hears of the other last, and *its* HELLO is heard.

**In how many pieces.** Members take turns, so when one begins its chunk, the next one of ``n`` begins about a chunk's
``n``-th part later, and as many layers behind. Whoever is ``d`` turns behind is sent ``d`` of these parts at once: it
waits no longer for it (`pdmesh.policy.pacing`). Whose turn is next is told by what came from whom last; a wrong guess
makes somebody wait for half a chunk. A parallel step's slices are in the order of its members, the leader's last.

**How pages travel** is the writer's business, and that of `pdmesh.kv.groups`, which takes them: in pieces, or, inside a
host, copied from where they lie (`pdmesh.kv.peer_reads`).

**When a member is lost.** The scheduler says so by an empty address. Whatever was taken from it stays; the leader sends
that to all others again, for the lost one may have had no time to. What the leader misses then is computed again, by
whomever, with other boundaries perhaps, and with the same bits: a page may come, or be computed, where it is already.
A member that cannot be sent to is left out, and it is the scheduler who says what that means.

**When a piece is damaged.** Its receiver says AGAIN to whoever sent it, who holds these pages yet, and sends them again
before anything else that waits to go there, to the same audience. Up to a limit: then the receiver cannot go on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import anyio
import anyio.abc
import structlog

from pdmesh.errors import KvTransferError
from pdmesh.kv.outbox import Outbox, Outgoing
from pdmesh.kv.outgoing import Blocks, PieceWriter
from pdmesh.kv.pages import PageBooks
from pdmesh.kv.peer_reads import note_bytes
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv.presence import KvPresence
from pdmesh.kv.repair import DamageLimit, RefusalLimit
from pdmesh.kv.store import KvStore
from pdmesh.model import Epoch, IndexRange, KvLayout, KvPart, RequestId
from pdmesh.plans import MAX_GROUP_MEMBERS
from pdmesh.policy.pacing import ChunkPace, layers_a_piece

log = structlog.get_logger()

#: Pieces under way to one member at once: one is copied and checked while another travels.
PIECES_IN_FLIGHT = 2

#: Of the leader, among a group's members.
LEADER = 0


class KvExchange(Protocol):
    """How a member's step hands its new KV to the other members, and waits for theirs."""

    @property
    def presence(self) -> KvPresence: ...

    @property
    def leads(self) -> bool: ...

    @property
    def num_lost(self) -> int:
        """Members that were lost, as the scheduler says."""
        ...

    def begin(self, first_block: int, num_blocks: int) -> bool:
        """A chunk that fills these blocks is about to be computed here. Event loop.

        False if another one was, here or elsewhere; unless a member was lost.
        """
        ...

    def abandon(self, first_block: int, num_blocks: int) -> None:
        """A chunk that was begun has ended without having filled them in all layers. Event loop."""
        ...

    def publish(self, blocks: Blocks, pace: ChunkPace = ChunkPace.IN_TURN) -> None:
        """Announce blocks computed in this layer; ``pace`` says when others need them. Engine thread; cheap."""
        ...

    def add_computed(self, first_block: int, num_blocks: int) -> None:
        """Announce blocks computed in all layers by a step that began before the group existed. Event loop."""
        ...


@dataclass(slots=True, eq=False)
class _Peer:
    """Another member, and what is to be sent there."""

    number: int
    address: bytes
    outbox: Outbox
    refusals: RefusalLimit
    ready: anyio.Event = field(default_factory=anyio.Event)
    greeted: anyio.Event = field(default_factory=anyio.Event)  # it said HELLO
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)  # of sending there; cancelled for good
    last_block: int = -1  # where the last chunk began that something came of
    received: DamageLimit = field(default_factory=lambda: DamageLimit(sends=False))
    sent: DamageLimit = field(default_factory=lambda: DamageLimit(sends=True))


class PieceExchange:
    """`KvExchange` over pieces: one member's side, for one epoch of a request.

    Made by `pdmesh.kv.groups.KvGroups.open`, which also runs it and brings it the pieces. Everything but `publish`
    belongs to the event loop. ``on_landed`` is told of blocks of a layer that others computed and that are in place.
    Nothing of its pages is read once it has ended.
    """

    def __init__(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        capability: int,
        block_ids: Sequence[int],
        presence: KvPresence,
        store: KvStore,
        writer: PieceWriter,
        call_soon: Callable[[Callable[[], object]], object],
        on_landed: Callable[[Blocks], object] | None,
        on_failed: Callable[[PieceExchange, str], object],
    ) -> None:
        self.request_id = request_id
        self.epoch = epoch
        self.key = exchange_key(request_id)
        self.capability = capability
        self.presence: KvPresence = presence
        self.num_bytes_received = 0
        self.scope = anyio.CancelScope()
        self._number: int | None = None  # until the members are known
        self._block_ids = block_ids
        self._layout: KvLayout = store.layout
        self._store = store
        self._writer = writer
        self._call_soon = call_soon
        self._on_landed = on_landed
        self._on_failed = on_failed
        self.pages = PageBooks(self._layout.num_layers, len(block_ids))
        self._addresses: tuple[bytes, ...] = ()
        self._peers: dict[int, _Peer] = {}
        self._lost: set[int] = set()
        self._joined_in, self._joined_out = anyio.create_memory_object_stream[_Peer](MAX_GROUP_MEMBERS)

    @property
    def num_bytes_sent(self) -> int:
        return self._writer.num_bytes

    @property
    def leads(self) -> bool:
        return self._number == LEADER

    @property
    def num_lost(self) -> int:
        return len(self._lost)

    # --- for the worker runtime ---------------------------------------------------------------------------------------

    def begin(self, first_block: int, num_blocks: int) -> bool:
        return self._number is not None and self.pages.begin(first_block, num_blocks, again=bool(self._lost))

    def abandon(self, first_block: int, num_blocks: int) -> None:
        self.pages.abandon(first_block, num_blocks)

    def publish(self, blocks: Blocks, pace: ChunkPace = ChunkPace.IN_TURN) -> None:
        self.presence.add(blocks.layer, blocks.first_block, blocks.num_blocks)
        self._store.when_written(lambda: self._call_soon(lambda: self._push(blocks, pace)))

    def add_computed(self, first_block: int, num_blocks: int) -> None:
        if num_blocks == 0:
            return
        self.reserve(first_block, num_blocks)
        self._push(Blocks(0, 0, first_block, num_blocks, self._layout.num_layers))
        for layer in range(self._layout.num_layers):
            self.presence.add(layer, first_block, num_blocks)

    def reserve(self, first_block: int, num_blocks: int) -> None:
        """Refuse other members' copies of blocks that a step begun before the group existed is computing here."""
        self.pages.reserve(first_block, num_blocks)

    # --- for the mover ------------------------------------------------------------------------------------------------

    def set_members(self, number: int, addresses: Sequence[bytes]) -> str | None:
        """All members' data addresses, in their order: those known before and more. Otherwise says what is wrong.

        This is member number ``number``, now and later. The address of a member that was lost is empty from then on.
        """
        known = len(self._addresses)
        if self._number is None:
            self._number = number
        if number != self._number:
            return f"member {self._number} cannot become member {number}"
        if any(new not in (old, b"") for old, new in zip(self._addresses, addresses, strict=False)):
            return f"{len(addresses)} members do not follow {known}"
        if len(addresses) > MAX_GROUP_MEMBERS or (number < len(addresses) and not addresses[number]):
            return f"member {number} of {len(addresses)} was lost"
        for other, address in enumerate(addresses[known:], start=known):
            self._addresses = (*self._addresses, address)
            if other != number and address:
                self._join(other, address)
        for other, address in enumerate(addresses):
            if not address and other not in self._lost:
                self._lose(other)
        return None

    async def run(self) -> None:
        """Send what is to be sent, until cancelled."""
        with self.scope:
            async with anyio.create_task_group() as tasks:
                async for peer in self._joined_out:
                    tasks.start_soon(self._serve, peer)

    def end(self, reason: str) -> None:
        """Stop sending and receiving, and wake every step that waits for KV. Idempotent."""
        self._writer.close()
        self.scope.cancel()
        self.presence.abort(reason)

    def close(self) -> None:
        """Release the wake-up channels; to be called after `run`."""
        self._writer.close()
        self._joined_in.close()
        self._joined_out.close()

    def take_greeting(self, header: PieceHeader) -> str | None:
        """A HELLO or a WELCOME; or say why it must be dropped."""
        peer = self._peers.get(header.source)
        if peer is None or header.destination != self._number:
            return "range"
        peer.ready.set()
        if header.kind is PieceKind.HELLO:
            peer.greeted.set()
        return None

    def address_of(self, header: PieceHeader) -> bytes:
        """Return the data address of the member that sent a claimed piece."""
        return self._peers[header.source].address

    def block_ids_of(self, header: PieceHeader) -> list[int]:
        return list(self._block_ids[header.part.blocks.start : header.part.blocks.stop])

    def claim(self, header: PieceHeader, parts: Sequence[KvPart], payload_bytes: int) -> str | None:
        """Accept these parts of a piece of KV or a window, or say why it must be dropped."""
        if header.kind is PieceKind.PEER_READ:
            expected_bytes = note_bytes(header.part.blocks.size)
        else:
            expected_bytes = header.part.num_pages * self._layout.block_bytes
        if not self._names_pages(header) or not expected_bytes == header.payload_bytes == payload_bytes:
            return "range"
        claimed = [self.pages.claim(part, header.source) for part in parts]
        if not any(claimed):
            return "duplicate"
        peer = self._peers[header.source]
        peer.ready.set()
        peer.last_block = max(peer.last_block, header.part.blocks.start)
        return None

    def missing(self, header: PieceHeader) -> list[KvPart]:
        """Return the parts of a peer read that are neither here nor on their way; empty if it cannot be claimed.

        Only this is copied: what was copied too late means nothing, and must not lie where good pages do.
        """
        return self.pages.missing(header.part) if self._names_pages(header) else []

    def unclaim(self, header: PieceHeader, parts: Sequence[KvPart]) -> None:
        """Take back claims of this piece that were not copied, so that the pages may come again."""
        for part in parts:
            self.pages.unclaim(part, header.source)

    def place(self, header: PieceHeader) -> None:
        """A claimed piece has been copied into its blocks."""
        blocks = Blocks.of(header)
        self.num_bytes_received += blocks.num_pages * self._layout.block_bytes
        if header.source in self._peers:
            self._peers[header.source].received.add_sound()
        self.pages.set_audience(blocks, header.num_members)
        if self.leads and header.source in self._lost:
            self._send_again(blocks)
        elif self.leads:
            for number in range(header.num_members, len(self._addresses)):
                if number in self._peers:
                    self._pass_on(self._peers[number], blocks)
        if self._on_landed is not None:
            self._on_landed(blocks)
        for layer in range(*header.part.layers):
            self.presence.add(layer, blocks.first_block, blocks.num_blocks)

    def take_damaged(self, header: PieceHeader, parts: Sequence[KvPart], *, asks: PieceKind = PieceKind.AGAIN) -> bool:
        """A piece was damaged on the way, or cannot be read here. Whether all of it is asked for again, and how.

        Not that of a member that was lost since: what is missing of its chunks is computed again.
        """
        self.unclaim(header, parts)
        blocks = Blocks.of(header)
        peer = self._peers.get(header.source)
        if peer is None:
            return False
        if asks is PieceKind.NO_PEER_READS:
            if not peer.refusals.add(blocks.num_pages):
                self.fail(f"member {peer.number} offers again and again what cannot be read here")
                return False
        elif not peer.received.add_damaged():
            self.fail(
                f"{peer.received.num_damaged + 1} pieces of member {peer.number} were damaged on the way, "
                f"this one of layer {blocks.layer}"
            )
            return False
        peer.outbox.put_first(Outgoing(blocks, header.num_members, asks))
        return True

    def send_again(self, header: PieceHeader) -> str | None:
        """Another member asks for pages that came damaged, or cannot be read there; or say why that must be dropped."""
        if not self._names_pages(header) or header.part.num_pages > self._writer.max_pages:
            return "range"
        if not self.pages.has(header.part):
            return "range"  # not here, so it was not sent
        peer = self._peers[header.source]
        if header.kind is PieceKind.NO_PEER_READS:
            is_allowed = self._writer.refused(peer.address, header.part.num_pages)
        else:
            is_allowed = peer.sent.add_damaged()
        if not is_allowed:
            return "limit"
        peer.outbox.put_first(Outgoing(Blocks.of(header), header.num_members))
        return None

    def fail(self, reason: str) -> None:
        """Give this member's part up; the first reason is reported."""
        if self.presence.aborted is None:
            self.presence.abort(reason)
            self._on_failed(self, reason)

    def cut_off(self, address: bytes) -> None:
        """Stop sending to this address. The scheduler decides what that means for the request."""
        for peer in self._peers.values():
            if peer.address == address:
                peer.scope.cancel()

    def check_integrity(self) -> None:
        """Check that no page computed here was also taken from another member, unless a member was lost."""
        if not self._lost:
            self.pages.check_one_writer()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _names_pages(self, header: PieceHeader) -> bool:
        """Whether it is about pages that there can be, between another member and this one."""
        blocks, layers, heads = header.part
        return (
            header.source in self._peers
            and header.destination == self._number
            and 0 < header.num_members <= MAX_GROUP_MEMBERS
            and IndexRange(0, self._layout.num_layers).holds(layers)
            and IndexRange(0, len(self._block_ids)).holds(blocks)
            and heads == IndexRange(0, self._layout.num_kv_heads)
        )

    def _join(self, number: int, address: bytes) -> None:
        outbox = Outbox(num_layers=self._layout.num_layers, max_pages=self._writer.max_pages)
        refusals = RefusalLimit(len(self._block_ids) * self._layout.num_layers)
        peer = self._peers[number] = _Peer(number, address, outbox, refusals)
        if self.leads:
            self._pass_on(peer, Blocks(0, 0, 0, len(self._block_ids), self._layout.num_layers))
        self._joined_in.send_nowait(peer)

    def _lose(self, number: int) -> None:
        self._lost.add(number)
        peer = self._peers.pop(number, None)
        if peer is not None:
            peer.scope.cancel()
        if self.leads:
            for blocks in self.pages.taken_from(number):
                self._send_again(blocks)

    def _send_again(self, blocks: Blocks) -> None:
        """Send blocks to every member, because the member that computed them may not have reached all."""
        self.pages.set_audience(blocks, len(self._addresses))
        for peer in self._peers.values():
            peer.outbox.put(Outgoing(blocks, len(self._addresses)))

    def _push(self, blocks: Blocks, pace: ChunkPace = ChunkPace.IN_TURN) -> None:
        """Send blocks that were computed here to all members that there are."""
        num_members = max(1, len(self._addresses))
        self.pages.set_audience(blocks, num_members)
        for behind, peer in self._in_turn(blocks) if pace is ChunkPace.IN_TURN else self._in_parallel():
            num_layers = layers_a_piece(pace, self._layout.num_layers, 1 + len(self._peers), behind)
            peer.outbox.put(Outgoing(blocks, num_members), num_layers)

    def _in_turn(self, blocks: Blocks) -> Iterable[tuple[int, _Peer]]:
        """The others, and how many turns they are behind."""
        next_ones = sorted(
            self._peers.values(), key=lambda peer: (peer.last_block < blocks.first_block, peer.last_block)
        )
        return enumerate(next_ones, start=1)

    def _in_parallel(self) -> Iterable[tuple[int, _Peer]]:
        """The others, and by how many slices theirs comes after the one here: in their order, the leader's last."""
        assert self._number is not None, "there is a parallel step, so the members are known"
        line = sorted({self._number, *self._peers}, key=lambda number: (number == LEADER, number))
        own = line.index(self._number)
        return [(max(0, place - own), self._peers[number]) for place, number in enumerate(line) if place != own]

    def _pass_on(self, peer: _Peer, blocks: Blocks) -> None:
        """Send of ``blocks`` what is here and was not meant for this member."""
        for passed in self.pages.not_sent_to(peer.number, blocks):
            self.pages.set_audience(passed, peer.number + 1)
            peer.outbox.put(Outgoing(passed, peer.number + 1), self._layout.num_layers)
        peer.outbox.flush()

    def _header(self, kind: PieceKind, peer: _Peer) -> PieceHeader:
        assert self._number is not None, "there are peers, so the members are known"
        return PieceHeader(
            kind=kind,
            request_key=self.key,
            epoch=self.epoch,
            capability=self.capability,
            source=self._number,
            destination=peer.number,
        )

    async def _welcome(self, peer: _Peer) -> None:
        """Answer its HELLO, once."""
        await peer.greeted.wait()
        await self._tell(PieceKind.WELCOME, peer)

    async def _tell(self, kind: PieceKind, peer: _Peer) -> None:
        try:
            await self._writer.tell(peer.address, self._header(kind, peer))
        except KvTransferError as error:  # it has not heard of us yet, and will greet us; or it is gone
            log.info("member not told", request_id=self.request_id, epoch=self.epoch, kind=kind.name, reason=str(error))

    async def _serve(self, peer: _Peer) -> None:
        """Send what is to be sent there, as long as that can be done."""
        with peer.scope:
            async with anyio.create_task_group() as lanes:
                lanes.start_soon(self._tell, PieceKind.HELLO, peer)
                lanes.start_soon(self._welcome, peer)
                for _ in range(PIECES_IN_FLIGHT):
                    lanes.start_soon(self._send_to, peer)

    async def _send_to(self, peer: _Peer) -> None:
        await peer.ready.wait()
        try:
            while True:
                blocks, num_members, kind = await peer.outbox.take()
                about = replace(self._header(kind, peer), num_members=num_members)
                if kind is PieceKind.KV:
                    peer.sent.add_sound(await self._writer.send(peer.address, blocks, about))
                else:
                    await self._writer.ask(peer.address, blocks, about)
        except KvTransferError as error:
            log.warning(
                "a member takes no KV",
                request_id=self.request_id,
                epoch=self.epoch,
                member=peer.number,
                reason=str(error),
            )
            peer.scope.cancel()


def exchange_key(request_id: RequestId) -> bytes:
    """16 bytes that stand for what a request's group passes on; a transfer of it has others."""
    return hashlib.blake2b(request_id.encode(), digest_size=16, person=b"exchange").digest()

"""Exchange of one request's KV inside a prefill group: each member sends the pages that it computed to all others.

**Senders.** The member that computed a page sends it to all members that it knows at that time. Their number is the
page's *sent_to*, and is sent with the page. A member that joins later gets older pages from the group's leader, which
passes pages on to every member beyond a page's *sent_to*. So each page reaches each member once, in whatever order
members learn of each other, and whichever helper leaves early.

**Ready members.** The scheduler tells members of each other at different times, and a piece that arrives before its
request is lost. So a member that learns of another sends HELLO, which is answered by WELCOME. Either of them, or any
other piece, means that its sender is ready. Between two members, the HELLO of the member that learns last arrives.

**Size of pieces.** Members take turns: after one begins its chunk, the next of ``n`` members begins about an ``n``-th
part of a chunk later, and as many layers behind. A member that is ``d`` turns behind is sent ``d`` of these parts at
once, which does not make it wait longer (`pdmesh.policy.pacing`). The order of turns is estimated from the blocks that
each member sent last. After a wrong estimate a member waits for half a chunk. The slices of a parallel step are in the
order of its members, the leader's last.

**How pages travel** is decided by the writer, and by `KvGroups`, which receives them: in pieces, or, inside a host,
copied from the sender's cache (`pdmesh.kv.peer_reads`).

**When a member is lost.** The scheduler reports the loss by an empty address. Pages received from the lost member stay,
and the leader sends them to all others again, because the lost member may not have reached all. Pages that the leader
lacks are computed again, by any member, perhaps with other boundaries, and with the same bits. So a page may arrive, or
be computed, where it is already. A member that does not accept pieces is sent no more, and the scheduler decides about
the group.

**When a piece is damaged.** Its receiver sends AGAIN to the sender, which still holds these pages. The sender sends
them again before anything else for that member, with the same *sent_to*. Beyond a limit the receiver fails.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from pdmesh.kv.context import KvContext, mismatch
from pdmesh.kv.gate import GroupGate, Wakeup
from pdmesh.kv.intake import PageIntake
from pdmesh.kv.lane import Lane
from pdmesh.kv.ledger import PageLedger
from pdmesh.kv.outbox import Outgoing
from pdmesh.kv.outcome import FailedExchange
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv_layout import IndexRange, KvPart
from pdmesh.model import Epoch, RequestId
from pdmesh.plans import MAX_GROUP_MEMBERS
from pdmesh.policy.pacing import ChunkPace, layers_a_piece
from pdmesh.transport.kv_transport import ReceivedPiece

log = structlog.get_logger()

#: The leader's index among a group's members.
LEADER = 0


@dataclass(slots=True, eq=False)
class _Peer:
    """Another member and the lane to it, which is paused until the member is ready.

    ``last_block`` is the highest first block among the pieces received from the member; -1 before the first.
    """

    number: int
    lane: Lane
    last_block: int = -1
    is_welcomed: bool = False


class KvExchange:
    """A member's side of its group's exchange, for one epoch of a request.

    `KvGroups.open` makes it, and `KvGroups` passes the pieces to it. Everything but `publish` belongs to the event
    loop. ``on_new`` is called with blocks that are new in the ledger, from any member. Once the exchange has ended,
    peers read none of its pages. ``gate`` is where steps wait for KV.
    """

    def __init__(
        self,
        context: KvContext,
        request_id: RequestId,
        epoch: Epoch,
        *,
        capability: int,
        block_ids: Sequence[int],
        wakeup: Wakeup,
        ledger: PageLedger | None = None,
        on_new: Callable[[Blocks], object] | None = None,
        on_failed: Callable[[KvExchange, str], object],
    ) -> None:
        layout = context.store.layout
        self.request_id = request_id
        self.epoch = epoch
        self.key = exchange_key(request_id)
        self.capability = capability
        self.ledger = ledger or PageLedger(layout.num_layers, len(block_ids))
        self.gate = GroupGate(
            wakeup, self.ledger, no_progress_s=context.config.group_no_progress_s, clock=context.clock
        )
        self._number: int | None = None
        self.block_ids = block_ids
        self._layout = layout
        self._everything = KvPart(
            IndexRange(0, len(block_ids)), IndexRange(0, layout.num_layers), IndexRange(0, layout.num_kv_heads)
        )
        self._context = context
        self._writer = context.writer(block_ids)
        self._on_new = on_new or (lambda blocks: None)
        self._on_failed = on_failed
        self._addresses: tuple[bytes, ...] = ()
        self._peers: dict[int, _Peer] = {}
        self._lost: set[int] = set()
        self.is_over = False

    @property
    def num_bytes_sent(self) -> int:
        return self._writer.num_bytes

    @property
    def leads(self) -> bool:
        return self._number == LEADER

    @property
    def num_lost(self) -> int:
        """Number of members that the scheduler has declared lost."""
        return len(self._lost)

    # --- for the worker runtime ---------------------------------------------------------------------------------------

    def begin(self, first_block: int, num_blocks: int) -> bool:
        """Note that a chunk that fills these blocks is about to be computed here. Return False if it must not be.

        That is so until the members are known, while one of its pages is being copied from a peer's cache, and if its
        blocks were begun before, here or elsewhere. After the loss of a member, blocks may be begun again.
        """
        return self._number is not None and self.ledger.begin(first_block, num_blocks, again=bool(self._lost))

    def publish(self, blocks: Blocks, pace: ChunkPace = ChunkPace.IN_TURN) -> None:
        """Send blocks computed in this layer to the other members. ``pace`` says when they need them. Engine thread;
        cheap.
        """
        self.ledger.write(blocks)
        context = self._context
        context.store.when_written(lambda: context.call_soon(lambda: self._push(blocks, pace)))

    def add_computed(self, first_block: int, num_blocks: int) -> None:
        """Send blocks to the other members that a step computed in all layers before the group existed."""
        if num_blocks:
            self._push(Blocks(0, 0, first_block, num_blocks, self._layout.num_layers))

    # --- for the mover ------------------------------------------------------------------------------------------------

    def set_members(self, number: int, addresses: Sequence[bytes]) -> str | None:
        """Set the data addresses of all members, in order. Return why they are wrong, else None.

        The first ones are the known members; more may follow. This instance is member number ``number``, now and later.
        The address of a lost member is empty from then on.
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

    def end(self, reason: str) -> None:
        """Stop sending and receiving, and wake every step that waits for KV. Idempotent."""
        self.is_over = True
        self._writer.close()
        for peer in self._peers.values():
            peer.lane.cut_off()
        self.gate.abort(reason)

    def take_word(self, header: PieceHeader) -> str | None:
        """Handle a piece without pages. Return the reason to drop the piece, else None."""
        peer = self._peers.get(header.source)
        if peer is None or header.destination != self._number:
            return "range"
        if header.kind in (PieceKind.AGAIN, PieceKind.NO_PEER_READS):
            return peer.lane.send_again(header, self.ledger, self._everything) if self.expects(header) else "range"
        if header.kind not in (PieceKind.HELLO, PieceKind.WELCOME):
            return "kind"
        peer.lane.resume()
        if header.kind is PieceKind.HELLO and not peer.is_welcomed:
            peer.is_welcomed = True
            peer.lane.say(PieceKind.WELCOME)
        return None

    def lane_from(self, source: int) -> Lane | None:
        return self._peers[source].lane if source in self._peers else None

    def expects(self, header: PieceHeader) -> bool:
        everything, part = self._everything, header.part
        return (
            header.source in self._peers
            and header.destination == self._number
            and 0 < header.num_members <= MAX_GROUP_MEMBERS
            and everything.layers.holds(part.layers)
            and everything.blocks.holds(part.blocks)
            and part.heads == everything.heads
        )

    def place(self, header: PieceHeader, blocks: Blocks) -> None:
        if header.source in self._peers:
            peer = self._peers[header.source]
            peer.last_block = max(peer.last_block, blocks.first_block)
        self.ledger.set_sent_to(blocks, header.num_members)
        for new in self.ledger.place(blocks):
            self._on_new(new)
        if self.leads and header.source in self._lost:
            self._send_to_all(blocks)
        elif self.leads:
            for number in range(header.num_members, len(self._addresses)):
                if number in self._peers:
                    self._pass_on(self._peers[number], blocks)

    def give_up(self, reason: str) -> None:
        """End this member's part, and report the reason. Only the first reason counts."""
        if self.gate.aborted is None:
            self.gate.abort(reason)
            self._on_failed(self, reason)

    def cut_off(self, address: bytes) -> None:
        """Stop sending the request's KV to the member at ``address``; cancel sends in progress.

        The exchange with other members continues, until the scheduler decides about the request.
        """
        for peer in self._peers.values():
            if peer.lane.address == address:
                peer.lane.cut_off()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _join(self, number: int, address: bytes) -> None:
        assert self._number is not None, "it comes with the members"
        about = PieceHeader(
            kind=PieceKind.KV,
            request_key=self.key,
            epoch=self.epoch,
            capability=self.capability,
            source=self._number,
            destination=number,
        )
        lane = Lane(
            address,
            about,
            self._writer,
            layout=self._layout,
            num_pages=self._everything.num_pages,
            start=self._context.tasks.start_soon,
            on_failed=lambda reason: log.warning(
                "cannot send KV to a group member",
                request_id=self.request_id,
                epoch=self.epoch,
                member=number,
                reason=reason,
            ),
        )
        peer = self._peers[number] = _Peer(number, lane)
        lane.pause()
        lane.say(PieceKind.HELLO)
        if self.leads:
            self._pass_on(peer, self.ledger.everything)

    def _lose(self, number: int) -> None:
        self._lost.add(number)
        peer = self._peers.pop(number, None)
        if peer is not None:
            peer.lane.cut_off()
        if self.leads:
            for blocks in self.ledger.taken_from(number):
                self._send_to_all(blocks)

    def _send_to_all(self, blocks: Blocks) -> None:
        """Send blocks to every member, because the member that computed them may not have reached all."""
        self.ledger.set_sent_to(blocks, len(self._addresses))
        for peer in self._peers.values():
            peer.lane.put(Outgoing(blocks, len(self._addresses)))

    def _push(self, blocks: Blocks, pace: ChunkPace = ChunkPace.IN_TURN) -> None:
        """Add blocks that were computed here to the ledger, and send them to all known members.

        ``pace`` says when the members need the blocks: the sooner, the fewer layers go in a piece. Members that join
        later get the blocks from the leader.
        """
        for new in self.ledger.place(blocks):
            self._on_new(new)
        num_members = max(1, len(self._addresses))
        self.ledger.set_sent_to(blocks, num_members)
        for behind, peer in self._in_turn(blocks) if pace is ChunkPace.IN_TURN else self._in_parallel():
            num_layers = layers_a_piece(pace, self._layout.num_layers, 1 + len(self._peers), behind)
            peer.lane.put(Outgoing(blocks, num_members), num_layers)

    def _in_turn(self, blocks: Blocks) -> Iterable[tuple[int, _Peer]]:
        """Return the other members, each with its estimated number of turns behind this one."""
        next_ones = sorted(
            self._peers.values(), key=lambda peer: (peer.last_block < blocks.first_block, peer.last_block)
        )
        return enumerate(next_ones, start=1)

    def _in_parallel(self) -> Iterable[tuple[int, _Peer]]:
        """Return the other members, each with the number of slices that its own comes after this one's."""
        assert self._number is not None, "there is a parallel step, so the members are known"
        line = sorted({self._number, *self._peers}, key=lambda number: (number == LEADER, number))
        own = line.index(self._number)
        return [(max(0, place - own), self._peers[number]) for place, number in enumerate(line) if place != own]

    def _pass_on(self, peer: _Peer, blocks: Blocks) -> None:
        """Send ``peer`` the pages of ``blocks`` that are here and were sent only to members with lower numbers."""
        for passed in self.ledger.not_sent_to(peer.number, blocks):
            self.ledger.set_sent_to(passed, peer.number + 1)
            peer.lane.put(Outgoing(passed, peer.number + 1), self._layout.num_layers)
        peer.lane.flush()


class KvGroups:
    """This instance's exchanges with other members of prefill groups. Event loop only."""

    def __init__(self, context: KvContext, pages: PageIntake) -> None:
        self._context = context
        self.pages = pages
        self._exchanges: dict[bytes, KvExchange] = {}
        self._num_bytes_sent = 0

    def __len__(self) -> int:
        return len(self._exchanges)

    def __contains__(self, key: bytes) -> bool:
        return key in self._exchanges

    @property
    def num_bytes_sent(self) -> int:
        return self._num_bytes_sent + sum(exchange.num_bytes_sent for exchange in self._exchanges.values())

    def open(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        capability: int,
        block_ids: Sequence[int],
        wakeup: Wakeup,
        ledger: PageLedger | None = None,
        on_new: Callable[[Blocks], object] | None = None,
    ) -> KvExchange:
        """Exchange KV of the request with the other members of its group, and receive theirs into ``block_ids``.

        `set_members` names the members. ``wakeup`` wakes the thread that waits for their KV. ``ledger`` is the
        request's ledger, if it has one, and ``on_new`` is called with pages that are new there. An earlier exchange of
        this epoch or an older one is ended.
        """
        exchange = KvExchange(
            self._context,
            request_id,
            epoch,
            capability=capability,
            block_ids=block_ids,
            wakeup=wakeup,
            ledger=ledger,
            on_new=on_new,
            on_failed=self._failed,
        )
        self.end(request_id, epoch, "a newer epoch began")
        self._exchanges[exchange.key] = exchange
        return exchange

    def set_members(self, request_id: RequestId, epoch: Epoch, number: int, addresses: Sequence[bytes]) -> None:
        """Set the data addresses of all members, known ones and more. This instance is member number ``number``.

        Addresses of lost members are empty. Ignored if there is no such exchange, because the request was freed. The
        exchange fails if the addresses do not follow the known ones.
        """
        exchange = self._exchanges.get(exchange_key(request_id))
        if exchange is not None and exchange.epoch == epoch:
            for address in filter(None, addresses):
                self._context.admit(address)
            if fault := exchange.set_members(number, addresses):
                exchange.give_up(fault)

    def end(self, request_id: RequestId, epoch: Epoch, reason: str) -> None:
        """Stop the request's exchanges of this epoch and older ones, without an outcome. Idempotent."""
        exchange = self._exchanges.get(exchange_key(request_id))
        if exchange is not None and exchange.epoch <= epoch:
            del self._exchanges[exchange.key]
            exchange.end(reason)
            self._num_bytes_sent += exchange.num_bytes_sent

    def clear(self) -> None:
        """End all exchanges."""
        for exchange in list(self._exchanges.values()):
            self.end(exchange.request_id, exchange.epoch, "the instance is stopping")

    def forget(self, address: bytes) -> None:
        """Stop sending to an instance that is gone, by its data address. The scheduler decides about its groups."""
        for exchange in self._exchanges.values():
            exchange.cut_off(address)

    def take(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        """Handle a piece of one of the exchanges."""
        exchange = self._exchanges[header.request_key]
        fault = mismatch(exchange, header)
        if fault is None and header.kind in (PieceKind.KV, PieceKind.PEER_READ):
            self.pages.take(exchange, header, piece)
        else:
            self._context.settle(piece, fault or exchange.take_word(header))

    def check_integrity(self) -> None:
        for exchange in self._exchanges.values():
            exchange.ledger.check_integrity()

    def _failed(self, exchange: KvExchange, reason: str) -> None:
        log.warning("KV exchange failed", request_id=exchange.request_id, epoch=exchange.epoch, reason=reason)
        self.end(exchange.request_id, exchange.epoch, reason)
        self._context.on_outcome(FailedExchange(request_id=exchange.request_id, epoch=exchange.epoch, reason=reason))


def exchange_key(request_id: RequestId) -> bytes:
    """Return 16 bytes that identify a request's exchange. Transfers of the request have another key."""
    return hashlib.blake2b(request_id.encode(), digest_size=16, person=b"exchange").digest()

"""The exchanges of one instance: which piece is for which, and what becomes of them. Part of `pdmesh.kv.mover`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import structlog

from pdmesh.kv.context import KvContext, mismatch
from pdmesh.kv.exchange import PieceExchange, exchange_key
from pdmesh.kv.incoming import UNREADABLE, WINDOW_CLOSED, PieceReader
from pdmesh.kv.outcome import FailedExchange
from pdmesh.kv.outgoing import Blocks
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.kv.presence import KvPresence, Wakeup
from pdmesh.model import Epoch, KvPart, RequestId
from pdmesh.transport.base import ReceivedPiece

log = structlog.get_logger()


class KvGroups:
    """What this instance exchanges with members of prefill groups. Event loop only."""

    def __init__(self, context: KvContext, *, reader: PieceReader) -> None:
        self._context = context
        self._reader = reader
        self._exchanges: dict[bytes, PieceExchange] = {}
        self.num_bytes_received = 0
        self.num_bytes_peer_read = 0  # of these
        self._num_bytes_sent = 0  # by those that have ended

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
        on_landed: Callable[[Blocks], object] | None = None,
    ) -> PieceExchange:
        """Pass KV of the request on to the other members of its group, and take theirs, into all of ``block_ids``.

        `set_members` says who they are. ``wakeup`` wakes whoever waits for their KV. An older epoch is ended.
        """
        presence = KvPresence(
            wakeup,
            num_layers=self._context.store.layout.num_layers,
            num_blocks=len(block_ids),
            no_progress_s=self._context.config.group_no_progress_s,
            clock=self._context.clock,
        )
        exchange = PieceExchange(
            request_id,
            epoch,
            capability=capability,
            block_ids=block_ids,
            presence=presence,
            store=self._context.store,
            writer=self._context.writer(block_ids),
            call_soon=self._context.call_soon,
            on_landed=on_landed,
            on_failed=self._failed,
        )
        self.end(request_id, epoch, "a newer epoch began")
        self._exchanges[exchange.key] = exchange
        self._context.tasks.start_soon(self._run, exchange)
        return exchange

    def set_members(self, request_id: RequestId, epoch: Epoch, number: int, addresses: Sequence[bytes]) -> None:
        """All members' data addresses, those set before and more; this is member number ``number``.

        Those of members that were lost are empty.
        Ignored if the exchange is not there: the request was freed meanwhile.
        """
        exchange = self._exchanges.get(exchange_key(request_id))
        if exchange is not None and exchange.epoch == epoch:
            for address in filter(None, addresses):
                self._context.admit(address)
            if fault := exchange.set_members(number, addresses):
                exchange.fail(fault)

    def end(self, request_id: RequestId, epoch: Epoch, reason: str) -> None:
        """Stop this epoch's and older exchanges of the request, without an outcome. Idempotent."""
        exchange = self._exchanges.get(exchange_key(request_id))
        if exchange is not None and exchange.epoch <= epoch:
            del self._exchanges[exchange.key]
            exchange.end(reason)

    def forget(self, address: bytes) -> None:
        """The instance at this data address is gone. What becomes of its groups is for the scheduler to say."""
        for exchange in self._exchanges.values():
            exchange.cut_off(address)

    def take(self, header: PieceHeader, piece: ReceivedPiece) -> None:
        """A piece whose key is in here."""
        exchange = self._exchanges[header.request_key]
        if fault := mismatch(exchange, header):
            self._context.drop(piece, fault)
        elif header.kind in (PieceKind.KV, PieceKind.PEER_READ):
            self._take_pages(exchange, header, piece)
        elif header.kind in (PieceKind.HELLO, PieceKind.WELCOME):
            if fault := exchange.take_greeting(header):
                self._context.drop(piece, fault)
            else:
                piece.release()
        elif header.kind in (PieceKind.AGAIN, PieceKind.NO_PEER_READS):
            fault = exchange.send_again(header)
            if fault != "range" and header.kind is PieceKind.NO_PEER_READS:
                self._context.decline(exchange.address_of(header))
            if fault:
                self._context.drop(piece, fault)
            else:
                piece.release()
        else:
            self._context.drop(piece, "kind")

    def check_integrity(self) -> None:
        for exchange in self._exchanges.values():
            exchange.check_integrity()

    def _take_pages(self, exchange: PieceExchange, header: PieceHeader, piece: ReceivedPiece) -> None:
        if self._exchanges.get(exchange.key) is not exchange:
            self._context.drop(piece, "unknown")
            return
        if exchange.pages.waits_for_read(header.part, partial(self._take_pages, exchange, header, piece)):
            return
        is_read = header.kind is PieceKind.PEER_READ
        parts = exchange.missing(header) if is_read else [header.part]
        if fault := exchange.claim(header, parts, len(piece.payload)):
            self._context.drop(piece, fault)
            return
        if is_read:
            exchange.pages.begin_read(header.part)
        self._reader.read(
            header,
            piece,
            exchange.block_ids_of(header),
            address=exchange.address_of(header),
            is_wanted=lambda: self._exchanges.get(exchange.key) is exchange,
            on_read=partial(self._read, exchange, header, parts),
            parts=parts,
        )

    def _read(self, exchange: PieceExchange, header: PieceHeader, parts: Sequence[KvPart], fault: str | None) -> None:
        """What was missing of a piece has been copied, or could not be."""
        is_wanted = self._exchanges.get(exchange.key) is exchange
        if fault is None:
            num_bytes = sum(part.num_pages for part in parts) * self._context.store.layout.block_bytes
            self.num_bytes_received += num_bytes
            self.num_bytes_peer_read += num_bytes if header.kind is PieceKind.PEER_READ else 0
            for part in parts if is_wanted else ():
                exchange.place(replace(header, part=part))
        else:
            self._context.dropped[fault] += 1
            if is_wanted and fault == WINDOW_CLOSED:
                exchange.unclaim(header, parts)
            elif is_wanted:
                asks = PieceKind.NO_PEER_READS if fault == UNREADABLE else PieceKind.AGAIN
                self._context.num_asked_again += exchange.take_damaged(header, parts, asks=asks)
        if header.kind is PieceKind.PEER_READ:
            exchange.pages.end_read(header.part)

    def _failed(self, exchange: PieceExchange, reason: str) -> None:
        log.warning("kv exchange failed", request_id=exchange.request_id, epoch=exchange.epoch, reason=reason)
        self.end(exchange.request_id, exchange.epoch, reason)
        self._context.on_outcome(FailedExchange(request_id=exchange.request_id, epoch=exchange.epoch, reason=reason))

    async def _run(self, exchange: PieceExchange) -> None:
        try:
            await exchange.run()
        finally:
            exchange.close()
            self._num_bytes_sent += exchange.num_bytes_sent

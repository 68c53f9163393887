"""The exchanges of one instance: which piece belongs to which, and how they end. Part of `pdmesh.kv.mover`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from pdmesh.kv.context import KvContext, mismatch
from pdmesh.kv.exchange import KvExchange, exchange_key
from pdmesh.kv.gate import GroupGate, Wakeup
from pdmesh.kv.incoming import PieceReader
from pdmesh.kv.inlet import PageIntake
from pdmesh.kv.ledger import PageLedger
from pdmesh.kv.outcome import FailedExchange
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.model import Epoch, RequestId
from pdmesh.transport.kv_transport import ReceivedPiece

log = structlog.get_logger()


class KvGroups:
    """What this instance exchanges with other members of prefill groups. Event loop only."""

    def __init__(self, context: KvContext, reader: PieceReader) -> None:
        self._context = context
        self.pages = PageIntake(context, reader)
        self._exchanges: dict[bytes, KvExchange] = {}
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
        ledger: PageLedger | None = None,
        on_new: Callable[[Blocks], object] | None = None,
    ) -> KvExchange:
        """Pass KV of the request on to the other members of its group, and take theirs, into all of ``block_ids``.

        `set_members` says which members there are. ``wakeup`` wakes the thread that waits for their KV. ``ledger`` is
        the request's, if it has one, and ``on_new`` is called with what is new there. An older epoch is ended.
        """
        context = self._context
        ledger = ledger or PageLedger(context.store.layout.num_layers, len(block_ids))
        exchange = KvExchange(
            request_id,
            epoch,
            capability=capability,
            block_ids=block_ids,
            ledger=ledger,
            gate=GroupGate(wakeup, ledger, no_progress_s=context.config.group_no_progress_s, clock=context.clock),
            store=context.store,
            writer=context.writer(block_ids),
            call_soon=context.call_soon,
            start=context.tasks.start_soon,
            on_new=on_new or (lambda blocks: None),
            on_failed=self._failed,
        )
        self.end(request_id, epoch, "a newer epoch began")
        self._exchanges[exchange.key] = exchange
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
        """Take a piece that belongs to one of the exchanges."""
        exchange = self._exchanges[header.request_key]
        if fault := mismatch(exchange, header):
            self._context.drop(piece, fault)
        elif header.kind in (PieceKind.KV, PieceKind.PEER_READ):
            self.pages.take(exchange, header, piece)
        elif header.kind in (PieceKind.HELLO, PieceKind.WELCOME):
            if fault := exchange.take_greeting(header):
                self._context.drop(piece, fault)
            else:
                piece.release()
        elif header.kind in (PieceKind.AGAIN, PieceKind.NO_PEER_READS):
            fault = exchange.send_again(header)
            lane = exchange.lane_from(header.source)
            if fault != "range" and header.kind is PieceKind.NO_PEER_READS and lane is not None:
                self._context.decline(lane.address)
            if fault:
                self._context.drop(piece, fault)
            else:
                piece.release()
        else:
            self._context.drop(piece, "kind")

    def check_integrity(self) -> None:
        for exchange in self._exchanges.values():
            exchange.ledger.check_integrity()

    def _failed(self, exchange: KvExchange, reason: str) -> None:
        log.warning("kv exchange failed", request_id=exchange.request_id, epoch=exchange.epoch, reason=reason)
        self.end(exchange.request_id, exchange.epoch, reason)
        self._context.on_outcome(FailedExchange(request_id=exchange.request_id, epoch=exchange.epoch, reason=reason))

"""KV that leaves an instance, for whichever reason: `pdmesh.instance.copying` decides, and the KV mover sends.

A prompt's KV is kept until it has landed at the receiver, so that another receiver or this instance can use it instead.
"""

from __future__ import annotations

import structlog

from pdmesh.instance.effects import (
    CopyFailed,
    CopyPaused,
    CopySent,
)
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv.outcome import FailedTransfer, SentTransfer
from pdmesh.kv.pages import NO_BLOCK
from pdmesh.kv.piece import KvDestination
from pdmesh.kv.spread import PartHolder
from pdmesh.kv_layout import GRANULE_TOKENS, IndexRange, KvPart, blocks_of_granule
from pdmesh.model import Then
from pdmesh.plans import TransferPlan
from pdmesh.wire.messages import pack_token_ids
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.moves import MovingDecodes
from pdmesh.worker.sequences import LocalRequest
from pdmesh.worker.spans import DONE

log = structlog.get_logger()


class LeavingCopies:
    """Sending side of all copies from an instance."""

    def __init__(self, context: InstanceContext, *, moves: MovingDecodes) -> None:
        self._context = context
        self._moves = moves

    def sent(self, request: LocalRequest, outcome: SentTransfer) -> None:
        """Handle a destination's acknowledgement of a whole copy. Ignored if no copy is on its way."""
        then, transfer = _leaving(request)
        if transfer is None:
            return
        self._context.metrics.transfer_bytes.labels("out").inc(outcome.num_bytes)
        waited_s, sent_s = outcome.exposed_s, outcome.sent_s
        if then is Then.KEEP:
            # All KV was here from the start, so the whole time measures the link, even where the destination reads it.
            waited_s, sent_s = 0.0, outcome.duration_s
        elif then is Then.HOLD:
            # No stream waited for a range.
            waited_s = 0.0
        elif request.state.move is not None:
            request.end_trace(DONE)
        else:
            self._context.metrics.transfer_s.observe(outcome.duration_s)
            self._context.metrics.exposed_s.observe(outcome.exposed_s)
            if request.trace is not None:
                request.trace.transfer_sent(outcome)
        destination_id = transfer.destination_ids[0] if len(transfer.destinations) == 1 else None
        sent = CopySent(
            request.state.key,
            then,
            outcome.num_bytes,
            outcome.duration_s,
            waited_s,
            sent_s,
            destination_id,
            outcome.carrier,
        )
        self._context.hear(request, sent)

    def paused(self, request: LocalRequest) -> None:
        """Report that the current copy, if any, is paused: no piece is under way until the next grant."""
        _, transfer = _leaving(request)
        if transfer is not None:
            self._context.hear(request, CopyPaused(request.state.key, transfer.transfer_id))

    def failed(self, request: LocalRequest, outcome: FailedTransfer) -> None:
        """Report a copy that could not be sent, or was not acknowledged. Ignored if no copy is on its way."""
        then, transfer = _leaving(request)
        if transfer is None:
            return
        self._context.metrics.failed_transfers.labels("out").inc()
        log.info(
            "copy failed",
            request_id=request.request_id,
            epoch=request.epoch,
            then=transfer.then,
            reason=outcome.reason,
        )
        self._context.hear(request, CopyFailed(request.state.key, then, outcome.reason))

    # --- effects of the machine ---

    def send(self, request: LocalRequest, transfer: TransferPlan, *, is_renewed: bool) -> None:
        """Send KV of a request to the destinations of a transfer. ``is_renewed``: the receiver is new to the source."""
        match transfer.then:
            case Then.KEEP:
                self._send_blocks(request, transfer, request.sequence.block_table, len(request.chain) * GRANULE_TOKENS)
            case Then.DECODE if request.state.move is not None:
                self._moves.begin(request, self._destinations(transfer)[0], transfer)
            case Then.HOLD if transfer.computes:
                self._send_tokens(request, transfer)
            case Then.HOLD:
                blocks, table = transfer.sources[0].part.blocks, request.sequence.block_table
                # On the holder of a range, these are the range's blocks.
                block_ids = [*[NO_BLOCK] * blocks.start, *table[: blocks.size]]
                self._send_blocks(request, transfer, block_ids, blocks.stop * request.block_size, blocks)
            case _:
                self._grant(request, transfer)
                if request.trace is not None:
                    request.trace.transfer_granted()
                if is_renewed and request.phase is SeqPhase.COMPUTED:
                    self._context.gateways.hand_over_stream(request, transfer.destination_ids[0])

    def _send_tokens(self, request: LocalRequest, transfer: TransferPlan) -> None:
        """Send the tokens of a lost range to the instance that computes it again."""
        begin, end = (number * request.block_size for number in transfer.destinations[0].part.blocks)
        (address,) = self._context.addresses.of(transfer.destination_ids[:1])

        def failed(reason: str) -> None:
            handing = request.state.handing
            if handing is not None and handing.transfer_id == transfer.transfer_id:
                log.info("sending a range failed", request_id=request.request_id, epoch=request.epoch, reason=reason)
                self._context.hear(request, CopyFailed(request.state.key, Then.HOLD, reason))

        self._context.mover.parts.send_tokens(
            request.request_id,
            request.epoch,
            pack_token_ids(request.sequence.token_ids[begin:end]),
            request.sequence.num_prompt_tokens,
            holder=PartHolder(address, transfer.capability),
            on_failure=failed,
        )

    def _send_blocks(
        self,
        request: LocalRequest,
        transfer: TransferPlan,
        block_ids: list[int],
        num_context_tokens: int,
        blocks: IndexRange | None = None,
    ) -> None:
        """Send ``blocks`` of the context, or all blocks, whose KV is complete."""
        sender = self._context.mover.departures.offer(
            request.request_id,
            request.epoch,
            block_ids=block_ids,
            num_context_tokens=num_context_tokens,
            blocks=blocks,
            num_present_blocks=len(block_ids),
        )
        sender.commit(None)
        self._grant(request, transfer)

    def _grant(self, request: LocalRequest, transfer: TransferPlan) -> None:
        self._context.mover.departures.grant(
            request.request_id,
            request.epoch,
            destinations=self._destinations(transfer),
            capability=transfer.capability,
        )

    def _destinations(self, transfer: TransferPlan) -> list[KvDestination]:
        addresses = self._context.addresses.of(transfer.destination_ids)
        return [
            KvDestination(address, part_to_send(transfer, number, self._context.block_size))
            for number, address in enumerate(addresses)
        ]

    def stop(self, request: LocalRequest, transfer: TransferPlan) -> None:
        """Stop sending a request's KV by a transfer. A prompt's KV is kept for another receiver."""
        key = request.state.key
        match transfer.then:
            case Then.DECODE if request.move is not None:
                request.move = None
                self._context.mover.departures.cancel(*key)
            case Then.HOLD:
                self._context.mover.departures.cancel(*key)
            case _:
                log.info("KV kept for another receiver", request_id=request.request_id, epoch=request.epoch)
                self._context.mover.departures.withdraw(*key)
                if request.trace is not None:
                    request.trace.receiver_lost()
                if request.phase is SeqPhase.COMPUTED:
                    self._context.gateways.hand_over_stream(request, self._context.instance_id)


def _leaving(request: LocalRequest) -> tuple[Then, TransferPlan | None]:
    """Return the purpose and the transfer of the current copy; None for the transfer if there is no copy.

    The copy of a range takes precedence.
    """
    state = request.state
    if state.handing is not None:
        return Then.HOLD, state.handing.transfer
    copy = state.move or state.onward
    then = Then.KEEP if Then.KEEP in state.outgoing else Then.DECODE
    return then, None if copy is None else copy.transfer


def part_to_send(transfer: TransferPlan, number: int, block_size: int) -> KvPart:
    """Return the part to send to a transfer's destination, without the blocks that are cached there."""
    part = transfer.destinations[number].part
    num_shared = max(0, transfer.num_reused_granules) * blocks_of_granule(block_size)
    start, stop = part.blocks
    return part._replace(blocks=IndexRange(min(max(start, num_shared), stop), stop))

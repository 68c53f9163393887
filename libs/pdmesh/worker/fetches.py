"""Granules that are copied from one instance to another, to be kept there, too: both sides."""

from __future__ import annotations

import structlog

from pdmesh.core.commands import FetchKept, SendKept
from pdmesh.core.events import DecodeReserved, TransferFailed, TransferLanded, TransferSent
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.kv.outcome import FailedTransfer, LandedTransfer, SentTransfer, TransferOutcome
from pdmesh.kv.transfer import KvDestination
from pdmesh.model import GRANULE_TOKENS, blocks_of_granule
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.departures import part_to_send
from pdmesh.worker.intake import Intake
from pdmesh.worker.sequences import LocalRequest, Stage

log = structlog.get_logger()


class KeptCopies:
    """What an instance copies from others, and they from it."""

    def __init__(self, context: InstanceContext, *, intake: Intake) -> None:
        self._context = context
        self._intake = intake

    def fetch(self, command: FetchKept) -> None:
        """Make room for granules, and expect them."""
        transfer = command.transfer
        self._context.tables.make_room(command.room)
        try:
            source_addresses = self._context.addresses.of(transfer.source_ids)
            num_blocks = self._num_blocks(command)
            num_there = transfer.num_reused_granules
            if num_there >= len(command.chain):
                raise ProtocolError(f"{num_there} of {len(command.chain)} granules are there, and others are to come")
            request = self._intake.take_unknown(
                command,
                num_blocks,
                command.chain,
                num_there,
                Stage.RECEIVING,
                num_coming_tokens=len(command.chain) * GRANULE_TOKENS,
            )
        except PdmeshError as error:
            self._intake.refuse(command, error, transfer.transfer_id)
            return
        self._context.mover.arrivals.expect(
            request.request_id,
            request.epoch,
            capability=transfer.capability,
            block_ids=request.sequence.block_table,
            num_context_tokens=len(command.chain) * GRANULE_TOKENS,
            num_present_blocks=request.num_reused_tokens // request.block_size,
            source_addresses=source_addresses,
            draws=False,
        )
        self._context.report(
            DecodeReserved(self._context.instance_id, request.request_id, request.epoch, transfer.transfer_id)
        )

    def send(self, command: SendKept) -> None:
        """Send granules that are kept here."""
        transfer = command.transfer
        num_granules = len(command.chain)
        try:
            num_blocks = self._num_blocks(command)
            if len(transfer.destinations) != 1:
                raise ProtocolError(f"{len(transfer.destinations)} destinations of granules")
            (address,) = self._context.addresses.of(transfer.destination_ids)
            request = self._intake.take_unknown(command, num_blocks, command.chain, num_granules, Stage.SENDING)
        except PdmeshError as error:
            self._intake.refuse(command, error, transfer.transfer_id)
            return
        departures = self._context.mover.departures
        request.sender = departures.offer(
            request.request_id,
            request.epoch,
            block_ids=request.sequence.block_table,
            num_context_tokens=num_granules * GRANULE_TOKENS,
            num_present_blocks=num_blocks,
        )
        request.sender.commit(None)
        part = part_to_send(transfer, 0, self._context.block_size)
        departures.grant(
            request.request_id,
            request.epoch,
            destinations=[KvDestination(address, part)],
            capability=transfer.capability,
        )

    def _num_blocks(self, command: FetchKept | SendKept) -> int:
        """Return the blocks of all granules of a chain. Raises ProtocolError if nothing is kept in such blocks."""
        num_blocks = len(command.chain) * blocks_of_granule(self._context.block_size)
        if num_blocks <= 0:
            raise ProtocolError(f"{len(command.chain)} granules in blocks of {self._context.block_size} tokens")
        return num_blocks

    def ended(self, request: LocalRequest, outcome: TransferOutcome) -> None:
        """It has landed here, was sent from here, or has come to nothing."""
        assert request.transfer is not None
        transfer_id, metrics = request.transfer.transfer_id, self._context.metrics
        about = self._context.instance_id, request.request_id, request.epoch, transfer_id
        match outcome:
            case LandedTransfer():
                metrics.transfer_bytes.labels("in").inc(outcome.num_bytes)
                metrics.fetched_bytes.inc(outcome.num_bytes)
                metrics.fetched_tokens.inc(len(request.chain) * GRANULE_TOKENS - request.num_reused_tokens)
                self._context.tables.keep_prompt(request, len(request.chain) * GRANULE_TOKENS)
                self._context.report(TransferLanded(*about, outcome.num_bytes, outcome.duration_s))
            case SentTransfer():
                metrics.transfer_bytes.labels("out").inc(outcome.num_bytes)
                # All of it was there from the start, so its time tells of the link, also where it is read.
                sent_s, destination_id = outcome.duration_s, request.transfer.destination_ids[0]
                carrier = outcome.carrier
                self._context.report(
                    TransferSent(*about, outcome.num_bytes, outcome.duration_s, 0.0, sent_s, destination_id, carrier)
                )
            case FailedTransfer():
                metrics.failed_transfers.labels("out" if outcome.sending else "in").inc()
                log.info("a fetch failed", request_id=request.request_id, reason=outcome.reason)
                self._context.report(TransferFailed(*about, outcome.reason))
            case _:
                return
        self._context.sequences.release(request)

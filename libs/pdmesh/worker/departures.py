"""KV that moves on after its prefill, at the instance that computed it.

It is sent to the receiver that the scheduler grants. Until it has landed there it is kept, to be sent to another
receiver or decoded here.
"""

from __future__ import annotations

import structlog

from pdmesh.core.commands import GrantTransfer, Hold, StopCopy
from pdmesh.core.events import TransferFailed, TransferPaused, TransferSent
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.kv.outcome import SentTransfer
from pdmesh.kv.transfer import KvDestination
from pdmesh.model import IndexRange, InstanceId, KvPart, TransferId, blocks_of_granule
from pdmesh.plans import TransferPlan
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.sequences import LocalRequest, Stage

log = structlog.get_logger()


class Departures:
    """Prompts of an instance whose requests will decode elsewhere."""

    def __init__(self, context: InstanceContext, *, growth: RoomGrowth) -> None:
        self._context = context
        self._growth = growth

    # --- what the scheduler says ---

    def grant(self, command: GrantTransfer) -> None:
        """Begin a transfer, or continue it after a pause. Raises ProtocolError if a destination is unknown."""
        self._context.mover.departures.grant(
            command.request_id,
            command.epoch,
            destinations=[
                KvDestination(address, part_to_send(command.transfer, number, self._context.block_size))
                for number, address in enumerate(self._context.addresses.of(command.transfer.destination_ids))
            ],
            capability=command.transfer.capability,
        )
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is None:
            return
        if request.transfer is None or request.transfer.transfer_id != command.transfer.transfer_id:
            request.transfer = command.transfer
            self._give_turn(request, command.transfer.destination_ids[0])
        if request.trace is not None:
            request.trace.transfer_granted()

    def withdraw(self, command: StopCopy) -> None:
        """Take a transfer back: its receiver is not to have the KV."""
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is not None and request.transfer is not None and request.transfer.transfer_id == command.transfer_id:
            self._context.mover.departures.withdraw(command.request_id, command.epoch)
            self._lose_receiver(request)

    def keep(self, command: Hold) -> None:
        """Decode a request here that was to move away."""
        self._context.tables.make_room(command.room)
        request = self._context.sequences.get(command.request_id, command.epoch)
        if request is None or request.sender is None:
            return  # it was freed meanwhile
        num_tokens = len(request.sequence.token_ids) - (request.stage is Stage.SENDING)
        request.max_kv_tokens = num_tokens + request.generation.max_tokens_left - 1
        request.transfer = request.sender = None
        self._context.mover.departures.withdraw(request.request_id, request.epoch)
        try:
            if request.max_kv_tokens > self._context.max_model_len:
                raise ProtocolError(
                    f"{request.max_kv_tokens} tokens are more than the {self._context.max_model_len} of the model"
                )
            self._growth.extend(request, command.num_blocks)
        except PdmeshError as error:
            self._context.endings.drop(request, str(error))
            return
        if request.stage is Stage.SENDING:
            self._give_turn(request, self._context.instance_id)
            self._context.sequences.start_decoding(request)
            self._growth.tell([request])
            self._context.wake()

    # --- how it went ---

    def sent(self, request: LocalRequest, transfer_id: TransferId, outcome: SentTransfer) -> None:
        """Note that the receiver has acknowledged a whole transfer."""
        self._context.metrics.transfer_bytes.labels("out").inc(outcome.num_bytes)
        self._context.metrics.transfer_s.observe(outcome.duration_s)
        self._context.metrics.exposed_s.observe(outcome.exposed_s)
        if request.trace is not None:
            request.trace.transfer_sent(outcome)
        destinations = () if request.transfer is None else request.transfer.destination_ids
        self._context.report(
            TransferSent(
                self._context.instance_id,
                request.request_id,
                request.epoch,
                transfer_id,
                outcome.num_bytes,
                outcome.duration_s,
                outcome.exposed_s,
                outcome.sent_s,
                destinations[0] if len(destinations) == 1 else None,
                outcome.carrier,
            )
        )
        self._context.sequences.release(request)

    def paused(self, request: LocalRequest, transfer_id: TransferId) -> None:
        """Report that no piece of the transfer is under way until it is granted again."""
        self._context.report(TransferPaused(self._context.instance_id, request.request_id, request.epoch, transfer_id))

    def failed(self, request: LocalRequest, transfer_id: TransferId, reason: str) -> None:
        """Report a transfer that could not be sent, or was not acknowledged."""
        self._context.metrics.failed_transfers.labels("out").inc()
        self._context.report(
            TransferFailed(self._context.instance_id, request.request_id, request.epoch, transfer_id, reason)
        )
        self._lose_receiver(request)

    def _lose_receiver(self, request: LocalRequest) -> None:
        """Keep its KV for another one."""
        log.info("kv kept for another receiver", request_id=request.request_id, epoch=request.epoch)
        request.transfer = None
        if request.trace is not None:
            request.trace.receiver_lost()
        self._give_turn(request, self._context.instance_id)

    def _give_turn(self, request: LocalRequest, instance_id: InstanceId) -> None:
        """Tell the gateway which instance draws the next token, unless that is said with the first one."""
        if request.stage is Stage.SENDING:
            self._context.gateways.give_turn(request, instance_id)


def part_to_send(transfer: TransferPlan, number: int, block_size: int) -> KvPart:
    """Return what a transfer's destination is sent: its part, but for the blocks that it shares."""
    part = transfer.destinations[number].part
    num_shared = max(0, transfer.num_reused_granules) * blocks_of_granule(block_size)
    start, stop = part.blocks
    return part._replace(blocks=IndexRange(min(max(start, num_shared), stop), stop))

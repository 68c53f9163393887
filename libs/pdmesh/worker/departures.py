"""KV that moves on after its prefill, at the instance that computed it.

It is sent to the receiver that the scheduler grants. Until it has landed there it is kept, to be sent to another
receiver or decoded here.
"""

from __future__ import annotations

import structlog

from pdmesh.core.commands import KeepKv, WithdrawTransfer
from pdmesh.core.events import TransferFailed, TransferPaused, TransferSent
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.kv.outcome import SentTransfer
from pdmesh.kv.transfer import KvDestination
from pdmesh.model import IndexRange, InstanceId, KvPart, TransferId, blocks_of_granule
from pdmesh.plans import TransferPlan
from pdmesh.wire.messages import Grant
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.sequences import Hold, Stage

log = structlog.get_logger()


class Departures:
    """Prompts of an instance whose requests will decode elsewhere."""

    def __init__(self, context: InstanceContext, *, growth: RoomGrowth) -> None:
        self._context = context
        self._growth = growth

    # --- what the scheduler says ---

    def grant(self, message: Grant) -> None:
        """Begin a transfer, or continue it after a pause."""
        command = message.command
        self._context.mover.departures.grant(
            command.request_id,
            command.epoch,
            destinations=[
                KvDestination(address, part_to_send(command.transfer, number, self._context.block_size))
                for number, address in enumerate(message.destination_addresses[: len(command.transfer.destinations)])
            ],
            capability=command.transfer.capability,
        )
        hold = self._context.sequences.get(command.request_id, command.epoch)
        if hold is None:
            return
        if hold.transfer is None or hold.transfer.transfer_id != command.transfer.transfer_id:
            hold.transfer = command.transfer
            self._give_turn(hold, command.transfer.destination_ids[0])
        if hold.trace is not None:
            hold.trace.transfer_granted()

    def withdraw(self, command: WithdrawTransfer) -> None:
        """Take a transfer back: its receiver is not to have the KV."""
        hold = self._context.sequences.get(command.request_id, command.epoch)
        if hold is not None and hold.transfer is not None and hold.transfer.transfer_id == command.transfer_id:
            self._context.mover.departures.withdraw(command.request_id, command.epoch)
            self._lose_receiver(hold)

    def keep(self, command: KeepKv) -> None:
        """Decode a request here that was to move away."""
        self._context.tables.drop(command.drop)
        hold = self._context.sequences.get(command.request_id, command.epoch)
        if hold is None or hold.sender is None:
            return  # it was freed meanwhile
        num_tokens = len(hold.sequence.token_ids) - (hold.stage is Stage.SENDING)
        hold.max_kv_tokens = num_tokens + hold.generation.max_tokens_left - 1
        hold.transfer = hold.sender = None
        self._context.mover.departures.withdraw(hold.request_id, hold.epoch)
        try:
            if hold.max_kv_tokens > self._context.max_model_len:
                raise ProtocolError(
                    f"{hold.max_kv_tokens} tokens are more than the {self._context.max_model_len} of the model"
                )
            self._growth.extend(hold, command.num_blocks)
        except PdmeshError as error:
            self._context.endings.drop(hold, str(error))
            return
        if hold.stage is Stage.SENDING:
            self._give_turn(hold, self._context.instance_id)
            self._context.sequences.start_decoding(hold)
            self._growth.tell([hold])
            self._context.wake()

    # --- how it went ---

    def sent(self, hold: Hold, transfer_id: TransferId, outcome: SentTransfer) -> None:
        """Note that the receiver has acknowledged a whole transfer."""
        self._context.metrics.transfer_bytes.labels("out").inc(outcome.num_bytes)
        self._context.metrics.transfer_s.observe(outcome.duration_s)
        self._context.metrics.exposed_s.observe(outcome.exposed_s)
        if hold.trace is not None:
            hold.trace.transfer_sent(outcome)
        self._context.report(
            TransferSent(
                self._context.instance_id,
                hold.request_id,
                hold.epoch,
                transfer_id,
                outcome.num_bytes,
                outcome.duration_s,
                outcome.exposed_s,
            )
        )
        self._context.sequences.release(hold)

    def paused(self, hold: Hold, transfer_id: TransferId) -> None:
        """Report that no piece of the transfer is under way until it is granted again."""
        self._context.report(TransferPaused(self._context.instance_id, hold.request_id, hold.epoch, transfer_id))

    def failed(self, hold: Hold, transfer_id: TransferId, reason: str) -> None:
        """Report a transfer that could not be sent, or was not acknowledged."""
        self._context.metrics.failed_transfers.labels("out").inc()
        self._context.report(
            TransferFailed(self._context.instance_id, hold.request_id, hold.epoch, transfer_id, reason)
        )
        self._lose_receiver(hold)

    def _lose_receiver(self, hold: Hold) -> None:
        """Keep its KV for another one."""
        log.info("kv kept for another receiver", request_id=hold.request_id, epoch=hold.epoch)
        hold.transfer = None
        if hold.trace is not None:
            hold.trace.receiver_lost()
        self._give_turn(hold, self._context.instance_id)

    def _give_turn(self, hold: Hold, instance_id: InstanceId) -> None:
        """Tell the gateway who draws the next token, unless that is said with the first one."""
        if hold.stage is Stage.SENDING:
            self._context.gateways.give_turn(hold, instance_id)


def part_to_send(transfer: TransferPlan, number: int, block_size: int) -> KvPart:
    """Return what a transfer's destination is sent: its part, but for the blocks that it shares."""
    part = transfer.destinations[number].part
    num_shared = max(0, transfer.num_reused_granules) * blocks_of_granule(block_size)
    start, stop = part.blocks
    return part._replace(blocks=IndexRange(min(max(start, num_shared), stop), stop))

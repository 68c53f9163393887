"""KV that comes to an instance to be decoded there: the room for it, and how the request begins once all has landed."""

from __future__ import annotations

import array
from collections.abc import Callable

from pdmesh.core.events import DecodeReserved, InstanceEvent, TransferLanded
from pdmesh.errors import PdmeshError, ProtocolError
from pdmesh.kv.mover import KvMover
from pdmesh.kv.outcome import LandedTransfer
from pdmesh.model import InstanceId, TransferId
from pdmesh.telemetry.tracing import Tracing
from pdmesh.wire.messages import ExpectKv
from pdmesh.worker.endings import Endings
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.intake import Intake, transcript
from pdmesh.worker.metrics import WorkerMetrics
from pdmesh.worker.moves import MovingDecodes
from pdmesh.worker.replies import ToGateways
from pdmesh.worker.sequences import Hold, Sequences, Stage
from pdmesh.worker.spans import trace_of


class Arrivals:
    """What an instance receives. ``wake`` is told that there is more to decode."""

    def __init__(
        self,
        instance_id: InstanceId,
        *,
        sequences: Sequences,
        admission: Intake,
        moves: MovingDecodes,
        mover: KvMover,
        credit: RoomGrowth,
        endings: Endings,
        max_model_len: int,
        gateways: ToGateways,
        report: Callable[[InstanceEvent], None],
        metrics: WorkerMetrics,
        tracing: Tracing,
        wake: Callable[[], None],
    ) -> None:
        self._instance_id = instance_id
        self._sequences = sequences
        self._admission = admission
        self._moves = moves
        self._mover = mover
        self._credit = credit
        self._endings = endings
        self._max_model_len = max_model_len
        self._gateways = gateways
        self._report = report
        self._metrics = metrics
        self._tracing = tracing
        self._wake = wake

    def expect(self, message: ExpectKv) -> None:
        """Make room for a request whose prompt others compute."""
        generation, num_context_tokens = message.generation, message.num_context_tokens
        transfer = message.command.transfer
        try:
            if generation.token_ids:
                token_ids = transcript(generation)
            else:  # zeros stand in for a prompt that sampling does not look at
                token_ids = array.array("i", bytes(4 * min(max(0, num_context_tokens), self._max_model_len)))
            if len(token_ids) != num_context_tokens:
                raise ProtocolError(f"{num_context_tokens} tokens of KV for a transcript of {len(token_ids)}")
            max_tokens_left = generation.params.max_tokens - (num_context_tokens - generation.num_prompt_tokens)
            max_kv_tokens = num_context_tokens + max_tokens_left - 1
            hold = self._admission.hold(generation, token_ids, message.command.num_blocks, max_kv_tokens)
        except PdmeshError as error:
            self._admission.refuse(generation, str(error), transfer.transfer_id)
            return
        hold.stage = Stage.RECEIVING
        hold.transfer, hold.received_by = transfer, transfer.transfer_id
        self._mover.expect(
            hold.request_id,
            hold.epoch,
            capability=transfer.capability,
            block_ids=hold.sequence.block_table,
            num_context_tokens=num_context_tokens,
            source_addresses=message.source_addresses,
            destination=transfer.destination_ids.index(self._instance_id),
        )
        self._report(DecodeReserved(self._instance_id, hold.request_id, hold.epoch, transfer.transfer_id))

    def landed(self, hold: Hold, transfer_id: TransferId, outcome: LandedTransfer) -> None:
        """All of it is in place: decode on from the token that came with it."""
        if outcome.transcript:
            try:
                self._moves.arrived(hold, outcome)
            except ProtocolError as error:
                self._endings.fail_to_receive(hold, transfer_id, str(error))
                return
            self._gateways.open(hold)
            hold.trace = trace_of(self._tracing, hold.generation, self._instance_id)
        if outcome.token_index != hold.sequence.num_output_tokens:
            reason = f"the first token came with index {outcome.token_index}"
            self._endings.fail_to_receive(hold, transfer_id, reason)
            return
        self._metrics.transfer_bytes.labels("in").inc(outcome.num_bytes)
        hold.sequence.token_ids.append(outcome.token_id)
        self._sequences.start_decoding(hold)
        self._report(
            TransferLanded(
                self._instance_id, hold.request_id, hold.epoch, transfer_id, outcome.num_bytes, outcome.duration_s
            )
        )
        self._credit.tell([hold])
        self._wake()

    def failed(self, hold: Hold, transfer_id: TransferId, reason: str) -> None:
        """It did not come, or not whole."""
        self._metrics.failed_transfers.labels("in").inc()
        self._endings.fail_to_receive(hold, transfer_id, reason)

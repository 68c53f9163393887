"""What an instance does between steps: it takes messages, and hands out what a step gave.

No I/O: messages come in through `Instance.handle`, go out through the callables it was given, and only the step loop
(`pdmesh.worker.steps`) touches the engine. Everything runs on the event loop. It executes and does not decide: whatever
it cannot take it *refuses* (`RequestDropped`), and the scheduler starts the request again elsewhere.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Callable, Iterable
from typing import assert_never

import structlog

from pdmesh.core.commands import (
    CancelMove,
    FreeKv,
    GrowKv,
    KeepKv,
    PauseTransfer,
    PlaceDecode,
    PlainInstanceCommand,
    ResumeDecode,
    RunStep,
    SetRole,
    StopInstance,
    WithdrawTransfer,
)
from pdmesh.core.events import (
    CreditLow,
    DecodeReserved,
    DecodeStepsDone,
    HelperJoined,
    InstanceEvent,
    KvReleased,
    LoadReported,
    RequestDropped,
    TransferFailed,
    TransferLanded,
    TransferPaused,
    TransferSent,
)
from pdmesh.core.own_steps import OwnSteps
from pdmesh.engine.base import EngineSequence, SliceResult
from pdmesh.errors import InstanceUnavailable, PdmeshError, ProtocolError
from pdmesh.kv.blocks import BlockPool, OutOfBlocks
from pdmesh.kv.mover import KvMover
from pdmesh.kv.outcome import (
    FailedExchange,
    FailedTransfer,
    LandedTransfer,
    PausedTransfer,
    SentTransfer,
    TransferOutcome,
)
from pdmesh.kv.presence import Bell
from pdmesh.kv.push import KvDestination
from pdmesh.kv.receiver import FirstToken
from pdmesh.model import (
    NO_TRANSFER,
    Epoch,
    FinishReason,
    InstanceId,
    RequestId,
    Resident,
    ResidentContext,
    Role,
    TransferId,
    TransferPurpose,
)
from pdmesh.telemetry.tracing import Tracing
from pdmesh.wire.messages import (
    Admit,
    ExpectKv,
    ExpectMove,
    Generation,
    Grant,
    PeerGone,
    Regroup,
    TokensUp,
    TurnOver,
)
from pdmesh.worker.admission import check_group, check_members, check_request, join_group, transcript
from pdmesh.worker.batch import Batch, BatchChunk
from pdmesh.worker.metrics import WorkerMetrics
from pdmesh.worker.moves import MovingDecodes
from pdmesh.worker.plans import Plans
from pdmesh.worker.replies import TokenSink, error_out, finished, prompt_logprobs, step_done, token_out
from pdmesh.worker.sequences import Hold, Sequences, Stage
from pdmesh.worker.spans import DONE, ERROR, FAILED, FREED, HoldTrace
from pdmesh.worker.times import StepTime

log = structlog.get_logger()

#: What the scheduler tells an instance: core commands, some of them with what only the services know.
Instruction = PlainInstanceCommand | Admit | Regroup | ExpectKv | ExpectMove | Grant | PeerGone


class Instance:
    """The requests of one model replica. See the module's docstring."""

    def __init__(
        self,
        *,
        instance_id: InstanceId,
        role: Role,
        max_model_len: int,
        block_size: int,
        pool: BlockPool,
        mover: KvMover,
        bell: Bell,
        report: Callable[[InstanceEvent], None],
        tokens: TokenSink,
        metrics: WorkerMetrics,
        tracing: Tracing,
        stop: Callable[[], None],
    ) -> None:
        self.role = role
        self.instance_id = instance_id
        self._tracing = tracing
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._pool = pool
        self._mover = mover
        self._bell = bell
        self._report = report
        self._tokens = tokens
        self._metrics = metrics
        self._stop = stop
        self._sequences = Sequences(pool, mover, on_released=self._released)
        self._own = OwnSteps()
        self.plans = Plans(instance_id, self._sequences, self._own, bell=bell, report=report, drop=self._drop)
        self._moves = MovingDecodes(
            instance_id,
            sequences=self._sequences,
            mover=mover,
            pool=pool,
            max_model_len=max_model_len,
            block_size=block_size,
            report=report,
            give_turn=self._give_turn,
            wake=self.plans.wake,
        )
        self._num_turns = itertools.count()
        self._admits = True

    # --- what the scheduler says ----------------------------------------------------------------------------

    def handle(self, message: Instruction) -> None:
        """Take one of them. Nothing that a peer can say makes it raise."""
        match message:
            case RunStep(plan=plan):
                self.plans.queue(plan)
            case Admit():
                self._admit(message)
            case ExpectKv():
                self._expect(message)
            case Regroup():
                self._regroup(message)
            case ExpectMove():
                self._expect_move(message)
            case Grant() if message.command.transfer.purpose is TransferPurpose.MOVE:
                self._moves.grant(message)
            case Grant():
                self._grant(message)
            case CancelMove():
                self._moves.cancel(message)
            case ResumeDecode():
                self._moves.resume(message)
            case PauseTransfer(request_id=request_id, epoch=epoch):
                self._mover.pause(request_id, epoch)
            case WithdrawTransfer(request_id=request_id, epoch=epoch, transfer_id=transfer_id):
                self._withdraw(request_id, epoch, transfer_id)
            case KeepKv():
                self._keep(message)
            case GrowKv():
                self._grow(message)
            case FreeKv():
                self._free(message)
            case SetRole(role=role):
                self.role = role
            case StopInstance():
                self._stop()  # as SIGTERM does
            case PeerGone(data_address=data_address):
                self._mover.forget(data_address)
            case _:
                assert_never(message)

    def _admit(self, message: Admit) -> None:
        generation, command = message.generation, message.command
        decodes = command.transfer is None and command.leads
        try:
            check_group(message, self.instance_id)
            token_ids = transcript(generation)
            num_tokens = len(token_ids)
            num_output_tokens_kept = generation.max_tokens_left - 1 if decodes else 0
            hold = self._hold(generation, token_ids, command.num_blocks, num_tokens + num_output_tokens_kept)
        except PdmeshError as error:
            self._refuse(generation, str(error))
            return
        if command.transfer is not None:
            hold.transfer = command.transfer
            source = command.transfer.source_ids.index(self.instance_id)
            hold.sender = self._mover.offer(
                hold.request_id,
                hold.epoch,
                block_ids=hold.sequence.block_table,
                num_context_tokens=num_tokens,
                source=source,
                blocks=command.transfer.sources[source].part.blocks,
            )
        if command.group is not None:
            join_group(hold, command.group, self._mover.groups, self._bell)
            if command.leads:
                self._mover.groups.set_members(hold.request_id, hold.epoch, 0, message.member_addresses)
            else:
                self._report(HelperJoined(self.instance_id, hold.request_id, hold.epoch))

    def _regroup(self, message: Regroup) -> None:
        command = message.command
        hold = self._sequences.get(command.request_id, command.epoch)
        if hold is None or hold.stage is not Stage.PREFILLING:
            return  # freed, or computed, meanwhile
        try:
            number = check_members(message, self.instance_id)
        except ProtocolError as error:
            self._drop(hold, str(error))
            return
        if hold.exchange is None:  # it leads a group that was formed while it computed
            join_group(hold, command.group, self._mover.groups, self._bell)
        self._mover.groups.set_members(hold.request_id, hold.epoch, number, message.member_addresses)

    def _expect(self, message: ExpectKv) -> None:
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
            hold = self._hold(generation, token_ids, message.command.num_blocks, max_kv_tokens)
        except PdmeshError as error:
            self._refuse(generation, str(error), transfer.transfer_id)
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
            destination=transfer.destination_ids.index(self.instance_id),
        )
        self._report(DecodeReserved(self.instance_id, hold.request_id, hold.epoch, transfer.transfer_id))

    def _expect_move(self, message: ExpectMove) -> None:
        try:
            self._moves.expect(message, admits=self._admits)
        except PdmeshError as error:
            self._refuse(message.command, str(error), message.command.transfer.transfer_id)

    def _grant(self, message: Grant) -> None:
        command = message.command
        self._mover.grant(
            command.request_id,
            command.epoch,
            destinations=[
                KvDestination(address, shard.part)
                for address, shard in zip(message.destination_addresses, command.transfer.destinations, strict=False)
            ],
            capability=command.transfer.capability,
        )
        hold = self._sequences.get(command.request_id, command.epoch)
        if hold is None:
            return
        if hold.transfer is None or hold.transfer.transfer_id != command.transfer.transfer_id:
            hold.transfer = command.transfer
            self._name_next(hold, command.transfer.destination_ids[0])
        if hold.trace is not None:
            hold.trace.transfer_granted()

    def _withdraw(self, request_id: RequestId, epoch: Epoch, transfer_id: TransferId) -> None:
        hold = self._sequences.get(request_id, epoch)
        if hold is not None and hold.transfer is not None and hold.transfer.transfer_id == transfer_id:
            self._mover.withdraw(request_id, epoch)
            self._lose_receiver(hold)

    def _lose_receiver(self, hold: Hold) -> None:
        """Keep its KV for another one."""
        log.info("kv kept for another receiver", request_id=hold.request_id, epoch=hold.epoch)
        hold.transfer = None
        if hold.trace is not None:
            hold.trace.receiver_lost()
        self._name_next(hold, self.instance_id)

    def _name_next(self, hold: Hold, instance_id: InstanceId) -> None:
        """Tell the gateway who draws the next token, unless that is said with the first one."""
        if hold.stage is Stage.SENDING:
            self._give_turn(hold, instance_id)

    def _give_turn(self, hold: Hold, instance_id: InstanceId) -> None:
        turn = TurnOver(
            request_id=hold.request_id,
            epoch=hold.epoch,
            index=hold.sequence.num_output_tokens,
            next_instance_id=instance_id,
            num=next(self._num_turns),
        )
        self._send(hold, turn)

    def _keep(self, command: KeepKv) -> None:
        """Decode here what was to move away."""
        hold = self._sequences.get(command.request_id, command.epoch)
        if hold is None or hold.sender is None:
            return  # it was freed meanwhile
        generation = hold.generation
        num_tokens = len(hold.sequence.token_ids) - (hold.stage is Stage.SENDING)
        hold.max_kv_tokens = num_tokens + generation.max_tokens_left - 1
        hold.transfer = hold.sender = None
        self._mover.withdraw(hold.request_id, hold.epoch)
        try:
            if hold.max_kv_tokens > self._max_model_len:
                raise ProtocolError(f"{hold.max_kv_tokens} tokens are more than the {self._max_model_len} of the model")
            num_missing = max(0, command.num_blocks - len(hold.sequence.block_table))
            hold.sequence.block_table.extend(self._pool.allocate(num_missing))
        except PdmeshError as error:
            self._drop(hold, str(error))
            return
        if hold.stage is Stage.SENDING:
            self._name_next(hold, self.instance_id)
            self._start_decoding(hold)
            self._tell_of_credit([hold])
            self.plans.wake()

    def _hold(self, generation: Generation, token_ids: array.array[int], num_blocks: int, max_kv_tokens: int) -> Hold:
        """Take the blocks of a request. Raises PdmeshError if that cannot be."""
        if not self._admits:
            raise InstanceUnavailable("the instance is stopping")
        if self._sequences.get(generation.request_id, generation.epoch) is not None:
            raise ProtocolError("the request is held here already")
        check_request(
            generation,
            len(token_ids),
            num_blocks=num_blocks,
            max_kv_tokens=max_kv_tokens,
            block_size=self._block_size,
            max_model_len=self._max_model_len,
        )
        hold = Hold(
            generation=generation,
            sequence=EngineSequence(
                request_id=generation.request_id,
                params=generation.params,
                token_ids=token_ids,
                num_prompt_tokens=generation.num_prompt_tokens,
                block_table=self._pool.allocate(num_blocks),
            ),
            stage=Stage.PREFILLING,
            block_size=self._block_size,
            max_kv_tokens=max_kv_tokens,
        )
        self._trace(hold)
        self._sequences.add(hold)
        log.debug(
            "request held",
            request_id=hold.request_id,
            epoch=hold.epoch,
            num_tokens=len(token_ids),
            num_blocks=num_blocks,
        )
        self._tokens.open(generation.token_address)
        return hold

    def _trace(self, hold: Hold) -> None:
        generation = hold.generation
        if self._tracing.on and generation.traceparent is not None:
            hold.trace = HoldTrace(self._tracing, generation.traceparent, generation, self.instance_id)

    def _grow(self, command: GrowKv) -> None:
        hold = self._sequences.get(command.request_id, command.epoch)
        num_missing = 0 if hold is None else command.num_blocks - len(hold.sequence.block_table)
        if hold is None or num_missing <= 0:
            return  # it ended meanwhile, or was granted more already
        try:
            hold.sequence.block_table.extend(self._pool.allocate(num_missing))
        except OutOfBlocks as error:  # the scheduler's books are wrong
            self._drop(hold, str(error))
            return
        self.plans.wake()

    def _tell_of_credit(self, holds: Iterable[Hold]) -> None:
        """Ask for more room where there is little left."""
        low = tuple(
            [
                ResidentContext(request_id=hold.request_id, epoch=hold.epoch, num_tokens=len(hold.sequence.token_ids))
                for hold in holds
                if hold.credit_is_news()
            ]
        )
        if low:
            self._report(CreditLow(self.instance_id, low))

    def _refuse(self, generation: Generation | PlaceDecode, reason: str, transfer_id: TransferId = NO_TRANSFER) -> None:
        request_id, epoch = generation.request_id, generation.epoch
        log.warning("request refused", request_id=request_id, epoch=epoch, reason=reason)
        self._metrics.refused_requests.inc()
        self._report(RequestDropped(self.instance_id, request_id, epoch, reason))
        if self._sequences.get(request_id, epoch) is None:
            self._report(KvReleased(self.instance_id, request_id, epoch, transfer_id))

    def _free(self, command: FreeKv) -> None:
        request_id, epoch = command.request_id, command.epoch
        holds = self._sequences.up_to(request_id, epoch)
        if not self._sequences.is_leaving(request_id, epoch) and all(hold.epoch != epoch for hold in holds):
            self._report(KvReleased(self.instance_id, request_id, epoch, command.transfer_id))
        for hold in holds:
            self._sequences.release(hold)

    # --- steps -----------------------------------------------------------------------------------------------

    def finish_batch(self, batch: Batch, results: list[SliceResult | None], time: StepTime) -> None:
        """Hand out what the batch gave; a result that is None is of a chunk that was abandoned."""
        duration_s = time.duration_s
        if batch.waiting:
            self._metrics.kv_wait_s.observe(time.waited_s)
        for chunk, result in zip(batch.chunks, results, strict=False):
            if result is None and not chunk.hold.doomed and chunk.exchange is not None:
                self._drop(chunk.hold, chunk.exchange.presence.aborted or "it was given up")
        kind = "mixed" if batch.chunks and batch.decodes else "prefill" if batch.chunks else "decode"
        self._metrics.step_s.labels(kind).observe(duration_s)
        if batch.plan is not None:
            self._report(step_done(self.instance_id, batch.plan, batch, time, self._own.take()))
        else:
            self._own.made(
                num_tokens=len(batch.decodes),
                num_context_tokens=batch.num_decode_context_tokens,
                duration_s=duration_s,
                began_s=time.began_s,
                ended_s=time.ended_s,
            )
        for chunk, result in zip(batch.chunks, results, strict=False):
            if self._sequences.step_ended(chunk.hold) and result is not None:
                self._finish_chunk(chunk, result, time)
        for hold, result in zip(batch.decodes, results[len(batch.chunks) :], strict=True):
            if self._sequences.step_ended(hold) and result is not None:
                self._deliver(hold, result)
        if self._own.num_left <= 0 and (own_steps := self._own.take()) is not None:
            self._report(DecodeStepsDone(self.instance_id, own_steps))
        self._tell_of_credit(
            [*(chunk.hold for chunk in batch.chunks if chunk.hold.stage is Stage.DECODING), *batch.decodes]
        )

    def _finish_chunk(self, chunk: BatchChunk, result: SliceResult, time: StepTime) -> None:
        hold, plan = chunk.hold, chunk.plan
        if hold.trace is not None:
            hold.trace.chunk_done(plan.num_tokens, time, is_last=plan.is_last)
        hold.num_computed_tokens += plan.num_tokens
        if hold.exchange is not None and chunk.exchange is None and not plan.is_last:
            hold.exchange.add_computed(*chunk.completed_blocks(self._block_size))
        self._metrics.prompt_tokens.inc(plan.num_tokens)
        if result.prompt_logprobs:
            self._send(hold, prompt_logprobs(chunk, result))
        if not plan.is_last:
            return
        self._mover.groups.end(hold.request_id, hold.epoch, "the prompt is computed")
        if hold.sender is None:
            self._start_decoding(hold)
            self._deliver(hold, result)
            return
        token_index = hold.sequence.num_output_tokens
        self._deliver(hold, result)
        if not hold.doomed:
            assert result.token_id is not None
            hold.stage = Stage.SENDING
            hold.sender.commit(FirstToken(result.token_id, token_index))

    def _start_decoding(self, hold: Hold) -> None:
        self._sequences.start_decoding(hold)
        if hold.trace is not None:
            hold.trace.decode_began()

    def _deliver(self, hold: Hold, result: SliceResult) -> None:
        """Send a drawn token to the gateway; release the request if it ends with it."""
        assert result.token_id is not None, "a slice that samples gave no token"
        self._metrics.generation_tokens.inc()
        successor = self._moves.successor(hold)
        self._send(hold, token_out(hold, result, successor))
        hold.sequence.token_ids.append(result.token_id)
        if result.finish_reason is not None:
            self._finish(hold, result.finish_reason)
        else:
            self._moves.stepped(hold, successor)

    def stop_waiting(self) -> None:
        """Nobody will use what the running step waits for: it is to end."""
        self._sequences.abort_waiting("the instance is stopping")

    def fail_batch(self, batch: Batch, error: Exception) -> None:
        """The engine broke: end the batch's requests with an error."""
        for hold in (*(chunk.hold for chunk in batch.chunks), *batch.decodes):
            if self._sequences.step_ended(hold):
                log.error("request ended by the engine's failure", request_id=hold.request_id, epoch=hold.epoch)
                self._send(hold, error_out(hold, error))
                self._finish(hold, FinishReason.ERROR)

    def _finish(self, hold: Hold, reason: FinishReason) -> None:
        self._report(finished(self.instance_id, hold, reason, self._own.take()))
        self._end_trace(hold, ERROR if reason is FinishReason.ERROR else DONE)
        self._sequences.release(hold)

    # --- transfers -------------------------------------------------------------------------------------------

    def on_outcome(self, outcome: TransferOutcome) -> None:
        """Take the end, or a pause, of a KV transfer from the mover."""
        hold = self._sequences.get(outcome.request_id, outcome.epoch)
        if hold is None:
            return
        if isinstance(outcome, FailedExchange):
            self._drop(hold, outcome.reason)
            return
        transfer = hold.transfer if hold.leaving is None else hold.leaving.transfer
        if transfer is None:
            return
        transfer_id = transfer.transfer_id
        match outcome:
            case LandedTransfer():
                self._landed(hold, transfer_id, outcome)
            case SentTransfer() if hold.leaving is not None:
                self._metrics.transfer_bytes.labels("out").inc(outcome.num_bytes)
                self._moves.sent(hold, outcome)
                self._end_trace(hold, DONE)
                self._sequences.release(hold)
            case SentTransfer():
                self._metrics.transfer_bytes.labels("out").inc(outcome.num_bytes)
                self._metrics.transfer_s.observe(outcome.duration_s)
                self._metrics.exposed_s.observe(outcome.exposed_s)
                if hold.trace is not None:
                    hold.trace.transfer_sent(outcome)
                self._report(
                    TransferSent(
                        self.instance_id,
                        hold.request_id,
                        hold.epoch,
                        transfer_id,
                        outcome.num_bytes,
                        outcome.duration_s,
                        outcome.exposed_s,
                    )
                )
                self._sequences.release(hold)
            case PausedTransfer():
                self._report(TransferPaused(self.instance_id, hold.request_id, hold.epoch, transfer_id))
            case FailedTransfer(sending=True) if hold.leaving is not None:
                self._metrics.failed_transfers.labels("out").inc()
                self._moves.failed(hold, outcome)
            case FailedTransfer(sending=True, reason=reason):
                self._metrics.failed_transfers.labels("out").inc()
                self._report(TransferFailed(self.instance_id, hold.request_id, hold.epoch, transfer_id, reason))
                self._lose_receiver(hold)
            case FailedTransfer(reason=reason):
                self._metrics.failed_transfers.labels("in").inc()
                self._fail(hold, transfer_id, reason)
            case _:
                assert_never(outcome)

    def _landed(self, hold: Hold, transfer_id: TransferId, outcome: LandedTransfer) -> None:
        if outcome.transcript:
            try:
                self._moves.arrived(hold, outcome)
            except ProtocolError as error:
                self._fail(hold, transfer_id, str(error))
                return
            self._tokens.open(hold.generation.token_address)
            self._trace(hold)
        if outcome.token_index != hold.sequence.num_output_tokens:
            self._fail(hold, transfer_id, f"the first token came with index {outcome.token_index}")
            return
        self._metrics.transfer_bytes.labels("in").inc(outcome.num_bytes)
        hold.sequence.token_ids.append(outcome.token_id)
        self._start_decoding(hold)
        self._report(
            TransferLanded(
                self.instance_id, hold.request_id, hold.epoch, transfer_id, outcome.num_bytes, outcome.duration_s
            )
        )
        self._tell_of_credit([hold])
        self.plans.wake()

    def _fail(self, hold: Hold, transfer_id: TransferId, reason: str) -> None:
        """Its KV cannot be received."""
        self._report(TransferFailed(self.instance_id, hold.request_id, hold.epoch, transfer_id, reason))
        self._give_up(hold, reason)

    def _drop(self, hold: Hold, reason: str) -> None:
        """It cannot go on here, whatever became of its KV."""
        self._report(RequestDropped(self.instance_id, hold.request_id, hold.epoch, reason))
        self._give_up(hold, reason)

    def _give_up(self, hold: Hold, reason: str) -> None:
        log.warning("request given up", request_id=hold.request_id, epoch=hold.epoch, reason=reason)
        self._end_trace(hold, FAILED)
        self._sequences.release(hold)

    # --- books -----------------------------------------------------------------------------------------------

    @property
    def num_decoding(self) -> int:
        return self._sequences.num_decoding

    def num_of_stage(self) -> dict[str, int]:
        """See `Sequences.num_of_stage`."""
        return self._sequences.num_of_stage()

    def load(self) -> LoadReported:
        """The books, for a heartbeat."""
        return LoadReported(
            instance_id=self.instance_id,
            num_free_blocks=self._pool.num_free,
            num_held_blocks=self._pool.num_held,
            num_quarantined_blocks=self._pool.num_quarantined,
            num_decoding=self._sequences.num_decoding,
        )

    async def drop_all_but_decoding(self) -> None:
        """Forget all plans and all requests that do not decode yet, and wait until their blocks are free.

        A scheduler that we register with knows nothing of them; gateways start them again.
        """
        self.plans.clear()
        self._moves.stay_all()
        for hold in self._sequences:
            if hold.stage is not Stage.DECODING:
                self._sequences.release(hold)
        await self._sequences.settled()

    def residents(self) -> tuple[Resident, ...]:
        return tuple(hold.as_resident() for hold in self._sequences)

    @property
    def admits(self) -> bool:
        """Whether it takes new requests."""
        return self._admits

    def stop_admitting(self) -> None:
        """Refuse new requests from now on."""
        self._admits = False

    async def emptied(self) -> None:
        """Wait until no request is held."""
        await self._sequences.emptied()

    def check_integrity(self) -> None:
        self._sequences.check_integrity()
        self._mover.check_integrity()

    def _end_trace(self, hold: Hold, outcome: str) -> None:
        if hold.trace is not None:
            hold.trace.ended(hold.sequence.num_output_tokens, outcome)

    def _released(self, hold: Hold) -> None:
        self._end_trace(hold, FREED)  # of what was still open when it was cancelled or dropped
        log.debug("request released", request_id=hold.request_id, epoch=hold.epoch, stage=hold.stage.name.lower())
        self._report(KvReleased(self.instance_id, hold.request_id, hold.epoch, hold.received_by))

    def _send(self, hold: Hold, message: TokensUp) -> None:
        self._tokens.send(hold.generation.token_address, message)

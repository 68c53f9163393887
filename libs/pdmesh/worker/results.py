"""Results of a step: tokens for gateways, a report for the scheduler, and the next phase of each request."""

from __future__ import annotations

from collections.abc import Collection

import structlog

from pdmesh.core.events import DecodeStepsDone
from pdmesh.core.instances.own_steps import OwnSteps
from pdmesh.engine.base import SliceResult
from pdmesh.errors import ProtocolError
from pdmesh.instance.machine import InstanceMachine
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.kv.piece import FirstToken
from pdmesh.kv.spread import SpreadKv
from pdmesh.model import FinishReason
from pdmesh.worker.batch import Batch, BatchChunk, BatchDecode
from pdmesh.worker.context import InstanceContext
from pdmesh.worker.groups import PrefillGroups
from pdmesh.worker.growth import RoomGrowth
from pdmesh.worker.moves import MovingDecodes
from pdmesh.worker.recomputing import RecomputedRanges
from pdmesh.worker.replies import embedding_out, error_out, prompt_logprobs, step_done, token_out
from pdmesh.worker.sequences import LocalRequest
from pdmesh.worker.spans import DONE, ERROR
from pdmesh.worker.times import StepTime

log = structlog.get_logger()


class Results:
    """Distributor of the results of steps. ``own`` sums up the steps that no plan requested."""

    def __init__(
        self,
        context: InstanceContext,
        machine: InstanceMachine,
        *,
        own: OwnSteps,
        groups: PrefillGroups,
        moves: MovingDecodes,
        growth: RoomGrowth,
        lost_ranges: RecomputedRanges,
    ) -> None:
        self._context = context
        self._own = own
        self._machine = machine
        self._groups = groups
        self._moves = moves
        self._growth = growth
        self._lost_ranges = lost_ranges

    def hand_out(self, batch: Batch, results: list[SliceResult | None], time: StepTime) -> bool:
        """Distribute a batch's results, None for abandoned rows; return whether a stream waits for KV to leave.

        Such a stream is paused until its last KV has left. This should happen before the next step, whose thread would
        compete for the interpreter. A group's chunk without a result was waiting for a lost member and is planned anew.
        """
        if batch.waiting:
            self._context.metrics.kv_wait_s.observe(time.waited_s)
        ended = [chunk for chunk, result in zip(batch.chunks, results, strict=False) if result is None]
        for chunk in ended:
            if chunk.request.is_released:
                continue
            if (why_aborted := chunk.aborted) is not None:
                self._context.drop(chunk.request, why_aborted)
            elif chunk.request.streams_out:
                self._context.drop(chunk.request, "shard holders with some of its KV do not answer")
            elif chunk.exchange is not None:
                chunk.exchange.ledger.abandon(*chunk.begun_blocks(self._context.block_size))
        self._tell_of_step(batch, time, ended)
        for chunk, result in zip(batch.chunks, results, strict=False):
            # A helper may have been freed in its last layer.
            if result is not None and result.prompt_logprobs:
                self._context.gateways.send(chunk.request, prompt_logprobs(chunk, result))
            if not self._context.sequences.step_ended(chunk.request):
                continue
            if chunk.request.state.is_range:
                self._lost_ranges.ended(chunk, is_computed=result is not None)
            elif result is not None:
                self._finish_chunk(chunk, result, time)
                self.between_steps(chunk.request)
        for decode, result in zip(batch.decodes, results[len(batch.chunks) :], strict=True):
            if result is not None and decode.draft:
                self._note_draft(decode, result)
            if not self._context.sequences.step_ended(decode.request):
                continue
            if result is not None:
                self._deliver(decode.request, result)
                self.between_steps(decode.request)
            else:
                self._lose_members(decode.request)
        if self._own.num_left <= 0 and (own_steps := self._own.take()) is not None:
            self._context.report(DecodeStepsDone(self._context.instance_id, own_steps))
        decoding = [decode.request for decode in batch.decodes]
        self._growth.tell([*(chunk.request for chunk in batch.chunks if chunk.request.state.is_decoding), *decoding])
        return any(request.phase is SeqPhase.PAUSED for request in decoding)

    def fail(self, batch: Batch, error: Exception) -> None:
        """End the batch's requests with an error, because the engine broke. Drop ranges, which others then compute."""
        for request in [*(chunk.request for chunk in batch.chunks), *(decode.request for decode in batch.decodes)]:
            if not self._context.sequences.step_ended(request):
                continue
            if request.state.is_range:
                self._context.drop(request, f"the engine failed: {error}")
            else:
                log.error("request failed with the engine", request_id=request.request_id, epoch=request.epoch)
                self._context.gateways.send(request, error_out(request, error))
                self._finish(request, FinishReason.ERROR)

    def between_steps(self, request: LocalRequest) -> None:
        """Set the shard holders that the scheduler named, if any and if no step computes the request."""
        if request.state.next_members is None or request.in_step:
            return
        try:
            self._context.do(self._machine.set_members(request.state))
        except ProtocolError as error:
            self._context.drop(request, str(error))

    def _lose_members(self, request: LocalRequest) -> None:
        """Handle a step that lacked KV on other instances: use members named meanwhile, or pause and report a lost one.

        Drop the request if several are lost, or if it moves or does not decode. Ignore a loss that was reported before.
        """
        if request.state.next_members is not None:
            self.between_steps(request)
            return
        elsewhere = request.sequence.elsewhere
        numbers = elsewhere.lost_members if isinstance(elsewhere, SpreadKv) else ()
        self._context.do(self._machine.lose_members(request.state, numbers))

    def _tell_of_step(self, batch: Batch, time: StepTime, ended: Collection[BatchChunk]) -> None:
        """Report a planned step, or add one of the instance's own to the sums.

        An own step with a chunk is not added, because it is slower than decodes alone.
        """
        kind = "mixed" if batch.chunks and batch.decodes else "prefill" if batch.chunks else "decode"
        self._context.metrics.step_s.labels(kind).observe(time.duration_s)
        self._context.metrics.lent_core_s.inc(time.num_lent_cores * time.duration_s)
        if batch.plan is not None:
            report = step_done(self._context.instance_id, batch.plan, batch, time, self._own.take(), ended)
            self._context.report(report)
        elif not batch.chunks:
            self._own.made(
                num_tokens=batch.num_decode_tokens,
                num_context_tokens=batch.num_decode_context_tokens,
                duration_s=time.duration_s,
                began_s=time.began_s,
                ended_s=time.ended_s,
                lent_share=time.lent_share,
            )

    def _finish_chunk(self, chunk: BatchChunk, result: SliceResult, time: StepTime) -> None:
        request, plan = chunk.request, chunk.plan
        if request.trace is not None:
            request.trace.chunk_done(plan.num_tokens, time, is_last=plan.is_last)
        self._context.do(self._machine.end_chunk(request.state, plan))
        if request.exchange is not None and chunk.exchange is None and not plan.is_last:
            request.exchange.add_computed(*chunk.completed_blocks(self._context.block_size))
        self._context.windows.pass_by(request.held, request.sequence.block_table, plan.start + plan.num_tokens)
        self._context.metrics.prompt_tokens.inc(plan.num_tokens)
        if not plan.is_last:
            return
        self._groups.leave(request)
        token_index = request.sequence.num_output_tokens
        self._context.do(self._machine.end_prompt(request.state))
        self._deliver(request, result)
        if request.sender is not None and not request.is_released:
            assert result.token_id is not None
            request.sender.commit(FirstToken(result.token_id, token_index))

    def _note_draft(self, decode: BatchDecode, result: SliceResult) -> None:
        num_accepted = len(result.drawn) - 1
        decode.request.num_drafted_tokens += len(decode.draft)
        decode.request.num_accepted_tokens += num_accepted
        self._context.metrics.drafted(len(decode.draft), num_accepted)

    def _deliver(self, request: LocalRequest, result: SliceResult) -> None:
        """Send drawn tokens, or an embedding, to the gateway; release the request if it has finished."""
        if result.embedding:
            self._context.gateways.send(request, embedding_out(request, result.embedding))
            self._finish(request, FinishReason.STOP)
            return
        assert result.drawn, "a slice that samples gave nothing"
        *before, last = result.drawn
        self._context.metrics.generation_tokens.inc(len(result.drawn))
        for drawn in before:
            self._context.gateways.send(request, token_out(request, drawn))
            request.sequence.token_ids.append(drawn.token_id)
        successor = self._moves.successor(request)
        self._context.gateways.send(request, token_out(request, last, successor))
        request.sequence.token_ids.append(last.token_id)
        if last.finish_reason is not None:
            self._finish(request, last.finish_reason)
        else:
            self._moves.stepped(request, successor)

    def _finish(self, request: LocalRequest, reason: FinishReason) -> None:
        """End a request whose last token or error has been sent."""
        request.end_trace(ERROR if reason is FinishReason.ERROR else DONE)
        self._machine.endings.finish(
            request.state,
            reason,
            request.sequence.num_output_tokens,
            request.num_drafted_tokens,
            request.num_accepted_tokens,
        )
        self._context.do(self._machine.done())

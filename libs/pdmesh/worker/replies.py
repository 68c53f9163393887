"""Messages of an instance to the scheduler and the gateways about the results of a step."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Protocol

from pdmesh.core.events import StepDone
from pdmesh.engine.base import DrawnToken, Logprobs, SliceResult
from pdmesh.model import FinishReason, GatewayId, InstanceId, OwnDecodeSteps
from pdmesh.plans import ChunkDone, StepPlan
from pdmesh.wire.messages import PromptLogprobs, StreamHandover, TokenLogprobs, TokenMessage, TokenOut
from pdmesh.worker.batch import Batch, BatchChunk
from pdmesh.worker.sequences import LocalRequest
from pdmesh.worker.times import StepTime


class TokenSink(Protocol):
    """Sender of tokens to gateways. Neither method blocks."""

    def open(self, address: str, gateway_id: GatewayId) -> None:
        """Get ready to send to a gateway."""
        ...

    def send(self, address: str, gateway_id: GatewayId, message: TokenMessage) -> None: ...


class ToGateways:
    """Messages to the gateways about the requests of an instance."""

    def __init__(self, tokens: TokenSink) -> None:
        self._tokens = tokens
        self._num_turns = itertools.count()

    def open(self, request: LocalRequest) -> None:
        """Get ready to send to the request's gateway."""
        self._tokens.open(request.generation.token_address, request.generation.gateway_id)

    def send(self, request: LocalRequest, message: TokenMessage) -> None:
        generation = request.generation
        self._tokens.send(generation.token_address, generation.gateway_id, message)

    def hand_over_stream(self, request: LocalRequest, instance_id: InstanceId) -> None:
        """Name the instance that draws the next token."""
        self.send(
            request,
            StreamHandover(
                request_id=request.request_id,
                epoch=request.epoch,
                index=request.sequence.num_output_tokens,
                next_instance_id=instance_id,
                num=next(self._num_turns),
            ),
        )


def step_done(
    instance_id: InstanceId,
    plan: StepPlan,
    batch: Batch | None = None,
    time: StepTime = StepTime(),  # noqa: B008  # frozen
    own_steps: OwnDecodeSteps | None = None,
    ended: Collection[BatchChunk] = (),
) -> StepDone:
    """Return the report of a plan, which was executed as ``batch``, or not at all.

    Chunks of dropped requests, and chunks that ``ended`` before they were computed, have 0 tokens in the report.
    ``own_steps`` are earlier decode steps that were not reported yet.
    """
    chunks = () if batch is None else batch.chunks
    computed = {
        (chunk.plan.request_id, chunk.plan.epoch)
        for chunk in chunks
        if not (chunk.request.is_released or chunk in ended)
    }
    return StepDone(
        instance_id=instance_id,
        plan_id=plan.plan_id,
        duration_s=time.duration_s,
        chunks=tuple(
            ChunkDone(
                request_id=part.request_id,
                epoch=part.epoch,
                num_tokens=part.num_tokens if (part.request_id, part.epoch) in computed else 0,
                is_last=part.is_last,
            )
            for part in plan.chunks
        ),
        num_decodes=0 if batch is None else batch.num_decode_tokens,
        num_decode_context_tokens=0 if batch is None else batch.num_decode_context_tokens,
        own_steps=own_steps,
        began_s=time.began_s,
        ended_s=time.ended_s,
        waited_s=time.waited_s,
        lent_share=time.lent_share,
    )


def token_out(request: LocalRequest, drawn: DrawnToken, successor: InstanceId | None = None) -> TokenOut:
    """Make the message for a drawn token that is not in the sequence yet. After a move, ``successor`` decodes on."""
    return TokenOut(
        request_id=request.request_id,
        epoch=request.epoch,
        index=request.sequence.num_output_tokens,
        token_id=drawn.token_id,
        logprobs=None if drawn.logprobs is None else _on_wire(drawn.logprobs),
        finish_reason=drawn.finish_reason,
        stop_token_id=drawn.stop_token_id,
        next_instance_id=(successor or request.next_instance_id) if drawn.finish_reason is None else None,
        num_cached_tokens=0 if request.sequence.num_output_tokens else request.num_reused_tokens,
    )


def embedding_out(request: LocalRequest, embedding: bytes) -> TokenOut:
    """Make the message that brings an embedding, and ends the request."""
    return TokenOut(
        request_id=request.request_id,
        epoch=request.epoch,
        index=request.sequence.num_output_tokens,
        token_id=None,
        finish_reason=FinishReason.STOP,
        num_cached_tokens=request.num_reused_tokens,
        embedding=embedding,
    )


def error_out(request: LocalRequest, error: Exception) -> TokenOut:
    """Make the message that ends a request's tokens because the engine failed."""
    return TokenOut(
        request_id=request.request_id,
        epoch=request.epoch,
        index=request.sequence.num_output_tokens,
        token_id=None,
        finish_reason=FinishReason.ERROR,
        error=f"the engine failed: {type(error).__name__}",
    )


def prompt_logprobs(chunk: BatchChunk, result: SliceResult) -> PromptLogprobs:
    """Make the message with the log-probabilities of a chunk's tokens; the prompt's first token has none."""
    return PromptLogprobs(
        request_id=chunk.request.request_id,
        epoch=chunk.request.epoch,
        start=chunk.plan.start + 1,
        logprobs=tuple(_on_wire(logprobs) for logprobs in result.prompt_logprobs),
    )


def _on_wire(logprobs: Logprobs) -> TokenLogprobs:
    return TokenLogprobs(logprob=logprobs.logprob, top=logprobs.top)

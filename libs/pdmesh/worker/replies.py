"""What an instance tells the scheduler and gateways of what a step gave."""

from __future__ import annotations

from collections.abc import Iterable

from pdmesh.core.events import RequestFinished, StepDone
from pdmesh.engine.base import Logprobs, SliceResult
from pdmesh.model import ChunkDone, FinishReason, InstanceId, StepPlan
from pdmesh.wire.messages import PromptLogprobs, TokenLogprobs, TokenOut
from pdmesh.worker.batch import BatchChunk
from pdmesh.worker.sequences import Hold


def step_done(
    instance_id: InstanceId,
    plan: StepPlan,
    chunks: Iterable[BatchChunk] = (),
    *,
    num_decodes: int = 0,
    duration_s: float = 0.0,
) -> StepDone:
    """What was done of a plan. A chunk that was dropped, before or while it ran, counts no tokens."""
    computed = {(chunk.plan.request_id, chunk.plan.epoch) for chunk in chunks if not chunk.hold.doomed}
    return StepDone(
        instance_id=instance_id,
        plan_id=plan.plan_id,
        duration_s=duration_s,
        chunks=tuple(
            ChunkDone(
                request_id=part.request_id,
                epoch=part.epoch,
                num_tokens=part.num_tokens if (part.request_id, part.epoch) in computed else 0,
                is_last=part.is_last,
            )
            for part in plan.chunks
        ),
        num_decodes=num_decodes,
    )


def token_out(hold: Hold, result: SliceResult) -> TokenOut:
    """The drawn token, before it joins the sequence."""
    return TokenOut(
        request_id=hold.request_id,
        epoch=hold.epoch,
        index=hold.sequence.num_output_tokens,
        token_id=result.token_id,
        logprobs=None if result.logprobs is None else _on_wire(result.logprobs),
        finish_reason=result.finish_reason,
        stop_token_id=result.stop_token_id,
        next_instance_id=hold.next_instance_id if result.finish_reason is None else None,
    )


def error_out(hold: Hold, error: Exception) -> TokenOut:
    return TokenOut(
        request_id=hold.request_id,
        epoch=hold.epoch,
        index=hold.sequence.num_output_tokens,
        token_id=None,
        finish_reason=FinishReason.ERROR,
        error=f"the engine failed: {type(error).__name__}",
    )


def prompt_logprobs(chunk: BatchChunk, result: SliceResult) -> PromptLogprobs:
    return PromptLogprobs(
        request_id=chunk.hold.request_id,
        epoch=chunk.hold.epoch,
        start=chunk.plan.start + 1,
        logprobs=tuple(_on_wire(logprobs) for logprobs in result.prompt_logprobs),
    )


def finished(instance_id: InstanceId, hold: Hold, reason: FinishReason) -> RequestFinished:
    return RequestFinished(
        instance_id=instance_id,
        request_id=hold.request_id,
        epoch=hold.epoch,
        reason=reason,
        num_output_tokens=hold.sequence.num_output_tokens,
    )


def _on_wire(logprobs: Logprobs) -> TokenLogprobs:
    return TokenLogprobs(logprob=logprobs.logprob, top=logprobs.top)

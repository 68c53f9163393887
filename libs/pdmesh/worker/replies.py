"""The messages in which an instance tells what a step gave."""

from __future__ import annotations

from pdmesh.engine.base import Logprobs, SliceResult
from pdmesh.model import ChunkDone, FinishReason
from pdmesh.wire.messages import FinishedReport, PromptLogprobs, StepReport, TokenLogprobs, TokenOut
from pdmesh.worker.batch import Batch, Chunk
from pdmesh.worker.sequences import Hold


def step_report(batch: Batch, duration_s: float) -> StepReport | None:
    """None for a step that nobody planned. A chunk that was dropped, before or while it ran, counts no tokens."""
    if batch.plan is None:
        return None
    computed = {(chunk.plan.request_id, chunk.plan.epoch) for chunk in batch.chunks if not chunk.hold.doomed}
    return StepReport(
        plan_id=batch.plan.plan_id,
        duration_s=duration_s,
        chunks=tuple(
            ChunkDone(
                request_id=part.request_id,
                epoch=part.epoch,
                num_tokens=part.num_tokens if (part.request_id, part.epoch) in computed else 0,
                is_last=part.is_last,
            )
            for part in batch.plan.chunks
        ),
        num_decodes=len(batch.decodes),
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


def prompt_logprobs(chunk: Chunk, result: SliceResult) -> PromptLogprobs:
    return PromptLogprobs(
        request_id=chunk.hold.request_id,
        epoch=chunk.hold.epoch,
        start=chunk.plan.start + 1,
        logprobs=tuple(_on_wire(logprobs) for logprobs in result.prompt_logprobs),
    )


def finished_report(hold: Hold, reason: FinishReason) -> FinishedReport:
    return FinishedReport(
        request_id=hold.request_id,
        epoch=hold.epoch,
        reason=reason,
        num_output_tokens=hold.sequence.num_output_tokens,
    )


def _on_wire(logprobs: Logprobs) -> TokenLogprobs:
    return TokenLogprobs(logprob=logprobs.logprob, top=logprobs.top)

"""Answers as item events, for tests of renderings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.model import SamplingParams
from pdmesh_gateway.dialects import Dialect
from pdmesh_gateway.items import AnswerEnded, ItemEvent, ItemWriter
from pdmesh_gateway.jobs import GenerationJob

#: Kind and pieces of each item of an answer: ``text``, ``reasoning``, or the name of a called tool.
Pieces = Sequence[tuple[str, Sequence[str]]]


def job_in(dialect: Dialect) -> GenerationJob:
    """Return a small job."""
    params = SamplingParams(max_tokens=9)
    return GenerationJob(dialect=dialect, request_id="0123.abcd", prompts=[[1, 2, 3]], params=params)


@dataclass
class EndedGeneration:
    """What renderings ask of a `pdmesh_gateway.text_stream.TextStream`."""

    job: GenerationJob
    num_output_tokens: int = 7
    num_cached_tokens: int = 1


def answer_events(pieces: Pieces, finish_reason: str, stop_reason: int | str | None = None) -> list[ItemEvent]:
    """Return the events of an answer."""
    writer = ItemWriter("seed")
    for kind, texts in pieces:
        if kind not in ("text", "reasoning"):
            writer.begin_call(kind)
        for text in texts:
            {"text": writer.text, "reasoning": writer.reasoning}.get(kind, writer.arguments)(text)
        writer.end_item()
    return [*writer.take(), AnswerEnded(finish_reason, stop_reason, writer.num_calls)]

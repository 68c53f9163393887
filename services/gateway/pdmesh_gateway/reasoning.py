"""Reasoning between ``<think>`` and ``</think>``, before the answer proper."""

from __future__ import annotations

from enum import StrEnum

from pdmesh_gateway.tools.reader import SPACE, Reader, Script

OPEN, CLOSE = "<think>", "</think>"


class ReasoningStart(StrEnum):
    """Whether an answer begins with reasoning."""

    NONE = "none"
    POSSIBLE = "possible"  # by its first marker
    BEGUN = "begun"  # the prompt ends within it


def reasoning_after(prompt: str) -> ReasoningStart:
    """Return how the answer of a model that reasons begins, by the end of its prompt."""
    end = prompt.rstrip()
    if end.endswith(OPEN):
        return ReasoningStart.BEGUN
    return ReasoningStart.NONE if end.endswith(CLOSE) else ReasoningStart.POSSIBLE


def read_reasoning(reader: Reader, reasoning: ReasoningStart) -> Script[None]:
    """Read up to where the answer proper begins."""
    if reasoning is ReasoningStart.POSSIBLE and not (yield from reader.follows(SPACE, OPEN)):
        reasoning = ReasoningStart.NONE
    if reasoning is not ReasoningStart.NONE:
        yield from reader.skip(SPACE, OPEN)
        yield from reader.spaces()
        if (yield from reader.until([CLOSE], reader.writer.reasoning, is_inside=True)):
            reader.mark(len(CLOSE))
            reader.reasoning_chars = reader.writer.num_chars
            yield from reader.spaces()
            return
        reader.mark(len(reader.buffer))
    reader.reasoning_chars = reader.writer.num_chars

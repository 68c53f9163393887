"""Reasoning before the answer proper, between markers such as ``<think>`` and ``</think>``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from pdmesh_gateway.tools.answer_reader import SPACE, Reader, Script


class ReasoningStart(StrEnum):
    """Whether an answer begins with reasoning.

    ``POSSIBLE``: the model may write the opening marker. ``BEGUN``: the prompt ends within reasoning.
    """

    NONE = "none"
    POSSIBLE = "possible"
    BEGUN = "begun"


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers of a model family before and after reasoning.

    ``resumes`` is text after them, before the answer proper.
    """

    open: str
    close: str
    resumes: str = ""

    def begins_after(self, prompt: str) -> ReasoningStart:
        """Return how the answer to a prompt begins, by the end of the prompt."""
        end = prompt.rstrip()
        if end.endswith(self.open):
            return ReasoningStart.BEGUN
        return ReasoningStart.NONE if end.endswith(self.close) else ReasoningStart.POSSIBLE

    def read(self, reader: Reader, begins: ReasoningStart) -> Script[None]:
        """Read up to the beginning of the answer proper."""
        if begins is ReasoningStart.POSSIBLE:
            head = yield from reader.match(SPACE, self.open)
            if head is not None and not head.is_whole and reader.is_cut:
                reader.mark(len(reader.buffer))
            elif head is None or not head.is_whole:
                begins = ReasoningStart.NONE
        if begins is not ReasoningStart.NONE:
            yield from reader.skip(SPACE, self.open)
            yield from reader.spaces()
            if (yield from reader.until([self.close], reader.writer.reasoning, is_inside=True)):
                reader.mark(len(self.close))
                reader.reasoning_chars = reader.writer.num_chars
                yield from reader.spaces()
                return
            reader.mark(len(reader.buffer))
        reader.reasoning_chars = reader.writer.num_chars


#: DeepSeek-R1, Qwen3 and many others; Mistral's Magistral.
THINK = ReasoningMarkers("<think>", "</think>")
FAMILIES = (THINK, ReasoningMarkers("[THINK]", "[/THINK]"))


def markers_of(template: str, vocabulary: Collection[str]) -> ReasoningMarkers | None:
    """Return a checkpoint's markers of reasoning; None if its models do not reason."""
    return next((each for each in FAMILIES if each.close in template or each.close in vocabulary), None)

"""Packings."""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.model import Request
from pdmesh.policy.base import Draft, InstanceView


@dataclass(frozen=True, slots=True)
class StaticChunks:
    """Steps of at most ``chunk_tokens`` prompt tokens, filled in order; a prompt is cut where the step is full."""

    chunk_tokens: int

    def num_tokens(self, instance: InstanceView, draft: Draft, request: Request, start: int) -> int:
        return min(request.num_prompt_tokens - start, self.chunk_tokens - draft.num_tokens)

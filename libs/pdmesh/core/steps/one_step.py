"""The next step of an instance while it is packed."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.requests.request import RequestState
from pdmesh.plans import ChunkPlan
from pdmesh.policy.views import PartialStep


@dataclass(slots=True, eq=False)
class StepSlot:
    """Step of an instance while it is packed.

    ``running`` are the instance's prompts without a chunk in this step yet. ``urgent``: all regular plans are in
    flight, so the step can only be an interruption. ``is_late``: the instance was idle, and comes after busy ones.
    ``fits`` is the last request that was tried, with the number of tokens of its first chunk.
    """

    instance: InstanceState
    step: PartialStep
    running: list[RequestState] = field(default_factory=list[RequestState])
    urgent: bool = False
    is_late: bool = False
    fits: tuple[RequestState, int] | None = None

    @property
    def place(self) -> tuple[bool, int]:
        """Sort key: by instance number, then late slots in the order in which they were opened."""
        return self.is_late, 0 if self.is_late else self.instance.number


def next_chunk(state: RequestState, num_tokens: int) -> ChunkPlan:
    """Return a chunk with the next ``num_tokens`` of a request's prompt."""
    start = state.num_planned_tokens
    return ChunkPlan(
        request_id=state.request.request_id,
        epoch=state.request.epoch,
        start=start,
        num_tokens=num_tokens,
        is_last=start + num_tokens >= state.request.num_prompt_tokens,
    )

"""The next step of an instance while it is packed."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdmesh.core.instances.instance import InstanceState
from pdmesh.core.requests.request import RequestState
from pdmesh.plans import ChunkPlan
from pdmesh.policy.views import PartialStep


@dataclass(slots=True, eq=False)
class StepSlot:
    """An instance's next step while it is packed."""

    instance: InstanceState
    step: PartialStep
    running: list[RequestState] = field(default_factory=list[RequestState])  # prompts without a chunk in this step yet
    urgent: bool = False  # the instance has all its plans: only an interruption can be added
    is_late: bool = False  # the instance was idle, and comes behind busy ones
    fits: tuple[RequestState, int] | None = None  # the last request asked about, and the tokens of its first chunk

    @property
    def place(self) -> tuple[bool, int]:
        """Late ones stay as they come."""
        return self.is_late, 0 if self.is_late else self.instance.number


def next_chunk(state: RequestState, num_tokens: int) -> ChunkPlan:
    """Return the next ``num_tokens`` of a request's prompt."""
    start = state.num_planned_tokens
    return ChunkPlan(
        request_id=state.request.request_id,
        epoch=state.request.epoch,
        start=start,
        num_tokens=num_tokens,
        is_last=start + num_tokens >= state.request.num_prompt_tokens,
    )

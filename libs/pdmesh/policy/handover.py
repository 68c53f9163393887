"""Prompts that are computed ahead of room to decode: when to begin one, and when a long one is to have its room.

Room that is promised as a prompt begins is idle while that is computed. Where room is short, somebody else could decode
in it. So a prompt may begin when its KV will be complete about when there is room for it, and a long one may begin
without the room that others wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from pdmesh.model import Request
from pdmesh.policy.latency import LatencyModel, StepShape
from pdmesh.policy.links import LinkRates
from pdmesh.policy.prediction import Prediction
from pdmesh.policy.views import InstanceView


class Decoding(NamedTuple):
    """Instances whose room a request waits for, together."""

    num_requests: int  # that have a seat there
    num_blocks: int  # that they hold
    num_free_seats: int
    num_free_blocks: int
    ends_per_s: float  # of requests, predicted

    def room_s(self, num_requests: int, num_blocks: int) -> float:
        """Predicted time until so many more have room, of whom one has none now: whoever ends leaves a mean share.

        Infinite if nobody is there to end.
        """
        if not self.num_requests or self.ends_per_s <= 0:
            return inf
        share = max(1.0, self.num_blocks / self.num_requests)
        num_ends = max(1.0, num_requests - self.num_free_seats, (num_blocks - self.num_free_blocks) / share)
        return num_ends / self.ends_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAhead:
    """Begins a prompt without room when its KV will be complete about when there is room for it.

    Earlier if it would draw its first token too late, were it to wait for room before it begins. Then nothing is lost
    by an early first token, and an output that is long enough bears the wait between its first two.
    """

    prediction: Prediction
    latency: LatencyModel
    links: LinkRates  # that KV moves over
    latency_of_device_class: Mapping[str, LatencyModel] = field(default_factory=dict[str, LatencyModel])

    def tokens_per_s(self, instance: InstanceView) -> float:
        """Return the tokens a second that an instance's requests draw once all of them decode."""
        latency = self.latency_of_device_class.get(instance.device_class, self.latency)
        shape = StepShape((), max(1, instance.num_seats_taken), instance.num_resident_tokens)
        return instance.num_seats_taken / max(1e-6, latency.step_s(shape))

    def begins(self, request: Request, prefill: InstanceView, *, room_s: float, now_s: float) -> bool:
        """Whether to compute a prompt on ``prefill`` now that is predicted to have room to decode in ``room_s``."""
        total_s = self.prediction.remaining.total_s
        work_s = total_s(request.num_prompt_tokens)
        is_needed_then = room_s <= total_s(prefill.num_queued_tokens) + work_s
        return is_needed_then or now_s + room_s + work_s > self.prediction.due_s(request)

    def needs_room(
        self, request: Request, prefill: InstanceView, num_planned_tokens: int, num_kv_bytes: float, room_s: float
    ) -> bool:
        """Whether it is time to promise it room: the rest of its prompt takes no longer than to have room and move."""
        remaining_s = self.prediction.remaining_s(request, num_planned_tokens)
        return remaining_s <= room_s + num_kv_bytes / self.links.bytes_per_s(prefill, None)

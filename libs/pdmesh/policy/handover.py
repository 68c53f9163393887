"""Prompts that begin before there is room to decode: when one may begin, and when a long one gets its room.

Room that is promised when a prompt begins stays idle until the prompt is computed. If room is short, another request
could decode in it. So a prompt may begin when its KV is predicted to be complete about when there is room for it. A
long prompt may begin without the room that others wait for.
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
    """The seats and blocks of the instances whose room a request waits for, in sum."""

    num_requests: int  # with a seat
    num_blocks: int  # held by these requests
    num_free_seats: int
    num_free_blocks: int
    ends_per_s: float  # predicted rate at which requests end

    def room_s(self, num_requests: int, num_blocks: int) -> float:
        """Return the predicted seconds until so many more requests have room; each that ends frees a mean share.

        Infinite if no request runs that could end.
        """
        if not self.num_requests or self.ends_per_s <= 0:
            return inf
        share = max(1.0, self.num_blocks / self.num_requests)
        num_ends = max(1.0, num_requests - self.num_free_seats, (num_blocks - self.num_free_blocks) / share)
        return num_ends / self.ends_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAhead:
    """Begins a prompt without room when its KV will be complete about when there is room for it.

    It begins earlier if its first token would be late after a wait for room. An early first token then costs nothing,
    and a long enough output bears the wait between its first two tokens.
    """

    prediction: Prediction
    latency: LatencyModel
    links: LinkRates  # that KV moves over
    latency_of_device_class: Mapping[str, LatencyModel] = field(default_factory=dict[str, LatencyModel])

    def tokens_per_s(self, instance: InstanceView) -> float:
        """Return the tokens a second that an instance's requests draw once all of them decode."""
        latency = self.latency_of_device_class.get(instance.device_class, self.latency)
        shape = StepShape((), max(1, instance.num_seats_taken), instance.num_resident_tokens)
        return instance.num_seats_taken / max(1e-6, latency.step_s(shape.shared_by(instance.num_stages)))

    def begins(
        self, request: Request, prefill: InstanceView, num_reused_tokens: int = 0, *, room_s: float, now_s: float
    ) -> bool:
        """Whether to begin a prompt on ``prefill`` now, if it is predicted to have room to decode in ``room_s``.

        ``num_reused_tokens`` of it are kept there.
        """
        total_s = self.prediction.remaining.total_s
        work_s = self.prediction.work_s(request, num_reused_tokens)
        is_needed_then = room_s <= total_s(prefill.num_queued_tokens) + work_s
        return is_needed_then or now_s + room_s + work_s > self.prediction.due_s(request, num_reused_tokens)

    def needs_room(
        self, request: Request, prefill: InstanceView, num_planned_tokens: int, num_kv_bytes: float, room_s: float
    ) -> bool:
        """Whether to promise room now: the rest of the prompt takes no longer than getting room and moving the KV."""
        remaining_s = self.prediction.remaining_s(request, num_planned_tokens)
        return remaining_s <= room_s + num_kv_bytes / self.links.bytes_per_s(prefill, None)

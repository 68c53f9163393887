"""Prompts that begin before there is room to decode: when one may begin, and when a long one gets its room.

Room that is promised when a prompt begins stays idle until the prompt is computed. If room is short, another request
could decode there. So a prompt may begin when its KV is predicted to be complete about when there is room for it. A
long prompt may begin without the room for which others wait.
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
    """Sums over the instances whose room a request waits for.

    ``num_requests`` have a seat and hold ``num_blocks``; ``ends_per_s`` is the predicted rate at which they end.
    """

    num_requests: int
    num_blocks: int
    num_free_seats: int
    num_free_blocks: int
    ends_per_s: float

    def room_s(self, num_requests: int, num_blocks: int) -> float:
        """Return the predicted seconds until ``num_requests`` more have room for ``num_blocks`` in all.

        At least one request must end. Each is taken to free the mean number of blocks.
        Infinite if no request runs that could end.
        """
        if not self.num_requests or self.ends_per_s <= 0:
            return inf
        share = max(1.0, self.num_blocks / self.num_requests)
        num_ends = max(1.0, num_requests - self.num_free_seats, (num_blocks - self.num_free_blocks) / share)
        return num_ends / self.ends_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAhead:
    """Rule that begins a prompt without room when its KV will be complete about when there is room for it.

    A prompt begins earlier if its first token would be late after a wait for room. An early first token then costs
    nothing, and a long enough output bears the wait between its first two tokens.
    """

    prediction: Prediction
    latency: LatencyModel
    links: LinkRates
    latency_of_device_class: Mapping[str, LatencyModel] = field(default_factory=dict[str, LatencyModel])

    def tokens_per_s(self, instance: InstanceView) -> float:
        """Return the tokens a second that an instance's requests draw once they all decode."""
        latency = self.latency_of_device_class.get(instance.device_class, self.latency)
        shape = StepShape((), max(1, instance.num_seats_taken), instance.num_resident_tokens)
        return instance.num_seats_taken / max(1e-6, latency.step_s(shape.shared_by(instance.num_stages)))

    def begins(
        self, request: Request, prefill: InstanceView, num_reused_tokens: int = 0, *, room_s: float, now_s: float
    ) -> bool:
        """Whether to begin a prompt on ``prefill`` now, if there will be room to decode in ``room_s`` seconds.

        ``num_reused_tokens`` of the prompt are cached there.
        """
        total_s = self.prediction.remaining.total_s
        work_s = self.prediction.work_s(request, num_reused_tokens)
        is_needed_then = room_s <= total_s(prefill.num_queued_tokens) + work_s
        return is_needed_then or now_s + room_s + work_s > self.prediction.due_s(request, num_reused_tokens)

    def needs_room(
        self, request: Request, prefill: InstanceView, num_planned_tokens: int, num_kv_bytes: float, room_s: float
    ) -> bool:
        """Whether to promise room now: the rest of the prompt takes no longer than freeing room and moving the KV."""
        remaining_s = self.prediction.remaining_s(request, num_planned_tokens)
        return remaining_s <= room_s + num_kv_bytes / self.links.bytes_per_s(prefill, None)

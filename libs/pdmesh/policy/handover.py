"""Prompts that are computed ahead of room to decode: when to begin one, and when a long one is to have its room.

Room that is promised as a prompt begins is idle while that is computed. Where room is short, somebody else could decode
in it. So a prompt may begin when its KV will be complete about when there is room for it, and a long one may begin
without the room that others wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from pdmesh.model import Request
from pdmesh.policy.latency import LatencyModel, StepShape

if TYPE_CHECKING:
    from pdmesh.policy.base import InstanceView
    from pdmesh.policy.prediction import Prediction


#: Of the target for the first token, that those who wait for room in line may take.
LINE_SHARE = 0.5

#: Of the mean number of tokens that requests draw: outputs that long must bear the wait (`benchmarks/pressure.py`).
BEARING_SHARE = 1.5


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

    Earlier if the line before room is so long that first tokens would come too late, and an output of
    `BEARING_SHARE` times the mean length can bear to wait between its first two tokens: so much of its TPOT target is
    left beyond its decode steps.
    """

    prediction: Prediction
    latency: LatencyModel
    slo_tpot_s: float
    bytes_per_s: float  # at which KV moves
    latency_of_make: Mapping[str, LatencyModel] = field(default_factory=dict[str, LatencyModel])

    def tokens_per_s(self, instance: InstanceView) -> float:
        """That the requests on an instance draw, once all of them decode."""
        return instance.num_seats_taken / self._decode_step_s(instance)

    def begins(
        self,
        request: Request,
        prefill: InstanceView,
        decode: InstanceView,
        *,
        room_s: float,
        line_s: float,
        mean_tokens: float,
    ) -> bool:
        """Whether to compute a prompt on ``prefill`` that is predicted to have room on one as ``decode`` in ``room_s``.

        Those that have not begun have room in ``line_s``.
        """
        total_s = self.prediction.remaining.total_s
        prefill_s = total_s(prefill.num_queued_tokens) + total_s(request.num_prompt_tokens)
        if room_s <= prefill_s:
            return True
        target_s = self.prediction.due_s(request) - request.arrival_s
        is_late = line_s >= LINE_SHARE * target_s
        return is_late and room_s - prefill_s <= self._bearable_s(request, decode, mean_tokens)

    def _bearable_s(self, request: Request, decode: InstanceView, mean_tokens: float) -> float:
        target_s = self.slo_tpot_s if request.slo_tpot_s is None else request.slo_tpot_s
        spare_s = max(0.0, target_s - self._decode_step_s(decode))
        return spare_s * min(BEARING_SHARE * mean_tokens, request.max_tokens)

    def needs_room(self, request: Request, num_planned_tokens: int, num_kv_bytes: float, room_s: float) -> bool:
        """Whether it is time to promise it room: the rest of its prompt takes no longer than to have room and move."""
        remaining_s = self.prediction.remaining_s(request, num_planned_tokens)
        return remaining_s <= room_s + num_kv_bytes / self.bytes_per_s

    def _decode_step_s(self, instance: InstanceView) -> float:
        latency = self.latency_of_make.get(instance.make, self.latency)
        shape = StepShape((), max(1, instance.num_seats_taken), instance.num_resident_tokens)
        return max(1e-6, latency.step_s(shape))

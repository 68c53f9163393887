"""Local decode: whether a prefill instance decodes a request whose prompt it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdmesh.policy.latency import LatencyModel, StepShape
from pdmesh.policy.views import InstanceView


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDecode:
    """Rule that prefers the prefill instance if its prompts lose less time than the request would wait for room."""

    latency: LatencyModel
    latency_of_device_class: Mapping[str, LatencyModel] = field(default_factory=dict[str, LatencyModel])

    def pays(self, prefill: InstanceView, num_context_tokens: int, num_output_tokens: float, room_s: float) -> bool:
        """Whether to decode on ``prefill`` if the decode instances have room in ``room_s`` (infinite: never).

        The price is the time that ``num_output_tokens`` add to the steps of ``prefill``. The first decode there pays
        for whole steps, because steps beside decodes are short.
        """
        latency = self.latency_of_device_class.get(prefill.device_class, self.latency)
        num_decodes, num_tokens = prefill.num_seats_taken, prefill.num_resident_tokens
        before, after = (
            latency.step_s(StepShape((), num_decodes + more, num_tokens + more * num_context_tokens)) for more in (0, 1)
        )
        return num_output_tokens * (after - before) < room_s

"""Whether a prompt is computed where it decodes, beside the decodes there, or waits for an instance that prefills."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pdmesh.model import Request
from pdmesh.policy.links import LinkRates
from pdmesh.policy.prediction import RemainingTime
from pdmesh.policy.seams import Packing
from pdmesh.policy.views import InstanceView


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPrefill:
    """Prefers the decode instance where a prompt's first token is predicted to come earlier, with its KV in place.

    What the residents there can bear is kept by the packing: no step with a chunk takes longer than a share of the
    smallest target of theirs.
    """

    remaining: RemainingTime
    packing: Packing
    links: LinkRates  # that KV moves over

    def pays(
        self, request: Request, decode: InstanceView, prefill: InstanceView | None, last_layer_bytes: float
    ) -> bool:
        """Whether to compute it on ``decode``; of those that take prompts, now or later, ``prefill`` has the fewest.

        There it waits for what is computed there, takes its own time, and its last layer's KV moves after that.
        """
        there_s = inf
        if prefill is not None:
            total_s = self.remaining.total_s
            move_s = last_layer_bytes / self.links.bytes_per_s(prefill, decode)
            there_s = total_s(prefill.num_queued_tokens) + total_s(request.num_prompt_tokens) + move_s
        return self.packing.local_s(decode, request.num_prompt_tokens) < there_s

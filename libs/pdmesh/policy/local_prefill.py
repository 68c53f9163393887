"""Local prefill: whether a prompt is computed on a decode instance or waits for a prefill instance."""

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
    """Rule that prefers the decode instance if a prompt's first token is predicted to come earlier there.

    The packing protects the residents: no step with a chunk takes longer than a share of their smallest TPOT target.
    """

    remaining: RemainingTime
    packing: Packing
    links: LinkRates

    def pays(
        self,
        request: Request,
        decode: InstanceView,
        prefill: InstanceView | None,
        last_layer_bytes: float,
        num_reused_tokens: int = 0,
        num_reused_there: int = 0,
    ) -> bool:
        """Whether to compute the prompt on ``decode``; ``prefill`` has the fewest queued tokens of the other instances.

        On ``prefill`` the prompt waits for the queued prompts and is computed; then the KV of the last layer moves.
        If ``prefill`` is None, any room in the steps of ``decode`` is enough.
        ``num_reused_tokens`` of the prompt are cached on ``decode``, and ``num_reused_there`` on ``prefill``.
        """
        there_s = inf
        if prefill is not None:
            total_s = self.remaining.total_s
            move_s = last_layer_bytes / self.links.bytes_per_s(prefill, decode)
            work_s = self.remaining.remaining_s(request.num_prompt_tokens, num_reused_there)
            there_s = total_s(prefill.num_queued_tokens) + work_s + move_s
        return self.packing.local_s(decode, request.num_prompt_tokens - num_reused_tokens, num_reused_tokens) < there_s

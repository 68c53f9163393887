"""A bundle: the named choice of a policy for every seam. `pdmesh.policy.bundles` lists the bundles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdmesh.model import Request
from pdmesh.policy.batching import Batching
from pdmesh.policy.handover import RunAhead
from pdmesh.policy.interruption import ShortInterruptsLong
from pdmesh.policy.local_decode import LocalDecode
from pdmesh.policy.local_prefill import LocalPrefill
from pdmesh.policy.prefill_groups import GroupPolicy
from pdmesh.policy.rebalancing import Rebalancing
from pdmesh.policy.reuse import ReuseCost
from pdmesh.policy.seams import DecodePlacement, Packing, PrefillOrder, PrefillPlacement
from pdmesh.policy.views import InstanceView


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A named choice for every seam.

    ``long_prompt_tokens``: least length of a long prompt.
    ``interruption``: rule for prompts that run before steps in flight; None: no prompt does.
    ``local_prefill``: rule for computing prompts on instances that only decode; None: none is.
    ``local_decode``: rule for decoding on prefill instances; None: they do not decode.
    ``num_reserved``: number of instances, the first to join, that compute only long prompts; the others short ones.
    ``run_ahead``: rule for computing prompts before there is room to decode; None: none is.
    ``waiting_kv_share``: share of a prefill instance's KV that may wait to move away.
    ``sends_computed_first``: whether complete KV is sent before KV that is being computed.
    ``group_policy``: rule for prefill groups; None: no groups.
    ``rebalancing``: rule for moving decodes; None: they move only to empty an instance.
    ``reuse``: cost of cached prefixes; None: the placement of a prompt does not depend on them.
    """

    name: str
    order: PrefillOrder
    packing: Packing
    prefill_placement: PrefillPlacement
    decode_placement: DecodePlacement
    long_prompt_tokens: int
    batching: Batching
    interruption: ShortInterruptsLong | None = None
    local_prefill: LocalPrefill | None = None
    local_decode: LocalDecode | None = None
    num_reserved: int = 0
    run_ahead: RunAhead | None = None
    waiting_kv_share: float = 1.0
    sends_computed_first: bool = False
    group_policy: GroupPolicy | None = None
    rebalancing: Rebalancing | None = None
    reuse: ReuseCost | None = None

    def why_not(self, instances: Sequence[InstanceView]) -> str | None:
        """Return why these instances cannot serve with this bundle; None if they can, or if none computes prompts."""
        prefilling = [instance for instance in instances if instance.role.can_prefill]
        num_reserved = sum(instance.number <= self.num_reserved for instance in prefilling)
        if self.num_reserved and prefilling and num_reserved in (0, len(prefilling)):
            kind = "short" if num_reserved else "long"
            return (
                f"{self.name} reserves the first {self.num_reserved} instances for long prompts. These are "
                f"{num_reserved} of the {len(prefilling)} instances that compute prompts: {kind} ones would never run"
            )
        return None

    def is_long(self, request: Request, num_reused_tokens: int = 0) -> bool:
        """Whether a prompt has ``long_prompt_tokens`` or more without its ``num_reused_tokens`` cached tokens."""
        return request.num_prompt_tokens - num_reused_tokens >= self.long_prompt_tokens

"""A bundle: the named choice of a policy for every seam. `pdmesh.policy.bundles` has those that exist."""

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
    """A named choice for every seam."""

    name: str
    order: PrefillOrder
    packing: Packing
    prefill_placement: PrefillPlacement
    decode_placement: DecodePlacement
    long_prompt_tokens: int  # from this length on a prompt is long
    batching: Batching
    interruption: ShortInterruptsLong | None = None  # without it no prompt runs before steps in flight
    local_prefill: LocalPrefill | None = (
        None  # whether a prompt is computed on an instance that only decodes; None: none
    )
    local_decode: LocalDecode | None = None  # prefill instances decode by this rule, if there is one
    num_reserved: int = 0  # instances, the first that joined, which compute long prompts only; the others short ones
    run_ahead: RunAhead | None = None  # None: no prompt is computed ahead of room to decode
    waiting_kv_share: float = 1.0  # of a prefill instance's KV, that may wait to move away
    sends_computed_first: bool = False  # KV that is all there goes before KV that is being computed
    group_policy: GroupPolicy | None = None  # None: no prefill groups
    rebalancing: Rebalancing | None = None  # None: decodes move only to empty an instance
    reuse: ReuseCost | None = None  # None: where a prompt is computed does not depend on what is kept of it

    def why_not(self, instances: Sequence[InstanceView]) -> str | None:
        """Say why these instances cannot serve with this bundle; None if they can, or if none computes prompts."""
        prefilling = [instance for instance in instances if instance.role.can_prefill]
        num_reserved = sum(instance.number <= self.num_reserved for instance in prefilling)
        if self.num_reserved and prefilling and num_reserved in (0, len(prefilling)):
            kind = "short" if num_reserved else "long"
            return (
                f"{self.name} keeps the first {self.num_reserved} instances that joined for long prompts, which are "
                f"{num_reserved} of the {len(prefilling)} that compute prompts: {kind} ones would wait for ever"
            )
        return None

    def is_long(self, request: Request, num_reused_tokens: int = 0) -> bool:
        """Whether a prompt is long, but for what is kept of it."""
        return request.num_prompt_tokens - num_reused_tokens >= self.long_prompt_tokens

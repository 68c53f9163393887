"""Interface of an instance machine to its owner: blocks, residents and plans.

The simulator and the laws count blocks and tokens (`pdmesh.instance.holding`). A worker has block tables and the
engine's tokens.
"""

from __future__ import annotations

from typing import Protocol

from pdmesh.core.commands import AdmitPrefill, ExpectCopy, Hold, SendCopy
from pdmesh.core.events import MembersSet
from pdmesh.core.instances.own_steps import OwnSteps
from pdmesh.instance.effects import Effect
from pdmesh.instance.sequence import Sequence
from pdmesh.model import InstanceId, PartMember, PrefixHashes, RequestKey
from pdmesh.plans import Evictions, StepPlan, TransferPlan

TakesBlocks = AdmitPrefill | ExpectCopy | SendCopy


class MakesRoom(Protocol):
    """A command that names the granules to evict first."""

    @property
    def room(self) -> Evictions: ...


class Floor(Protocol):
    """The blocks and the residents of an instance."""

    @property
    def instance_id(self) -> InstanceId: ...
    @property
    def block_size(self) -> int: ...
    @property
    def range_tokens(self) -> int:
        """Number of tokens of a range on another instance; 0: contexts are not spread."""
        ...

    @property
    def effects(self) -> list[Effect]:
        """Effects that the owner carries out, in order."""
        ...

    @property
    def sequences(self) -> dict[RequestKey, Sequence]:
        """Sequences with blocks here, except freed ones in the worker."""
        ...

    @property
    def own(self) -> OwnSteps:
        """Decode steps without a plan that are not reported yet."""
        ...

    # --- new sequences ---

    def chain_of(self, key: RequestKey) -> PrefixHashes:
        """Return the cacheable blocks of a new request's prompt."""
        ...

    def take(self, sequence: Sequence, command: TakesBlocks, num_reused: int) -> bool:
        """Give a new sequence its blocks; the first ``num_reused`` granules are cached here, or in the tier.

        Returns False if the sequence is refused; then the effects say why.
        """
        ...

    # --- room ---

    def make_room(self, command: MakesRoom) -> None:
        """Evict the cached blocks that a command names."""
        ...

    def grow(self, sequence: Sequence, command: Hold) -> None:
        """Let a sequence hold as many blocks as a command says, if it has fewer."""
        ...

    def keep(self, sequence: Sequence, command: Hold) -> bool:
        """Give a sequence the blocks to decode here. Returns False if there is no room."""
        ...

    def computed(self, sequence: Sequence, num_granules: int) -> None:
        """Cache the first granules of a sequence."""
        ...

    # --- residents ---

    def land(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that the whole KV of a sequence is here (`Sequence.land`), and cache it."""
        ...

    def decode(self, sequence: Sequence) -> None:
        """Let a sequence draw tokens from the next step on (`Sequence.decode`)."""
        ...

    def leave(self, sequence: Sequence) -> None:
        """Let a resident leave before the next step."""
        ...

    def stay(self, sequence: Sequence) -> None:
        """Let a resident that was about to leave continue here."""
        ...

    # --- copies ---

    def why_not_sent(self, sequence: Sequence, transfer: TransferPlan) -> str:
        """Return why KV cannot be sent from here, as far as the owner knows; empty if it can."""
        ...

    # --- ranges on other instances ---

    def num_kv_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens of a context have their KV, here or on other instances."""
        ...

    def spread(self, sequence: Sequence, members: tuple[PartMember, ...], num_blocks: int, done: MembersSet) -> None:
        """Let ``members`` hold the first ranges from the next step on, before `Sequence.spread`.

        Free the first ``num_blocks`` here. A prompt that is longer than the room gets as many new blocks. Report
        ``done`` when the blocks are free.
        """
        ...

    def lose_range(self, sequence: Sequence, number: int) -> None:
        """Pause a resident until another instance has computed a lost range of its context."""
        ...

    # --- the end ---

    def release(self, sequence: Sequence) -> None:
        """Free a sequence (`Sequence.free`), and its blocks once no running step computes it."""
        ...

    def end(self, sequence: Sequence) -> None:
        """Release a sequence that ended with the last step."""
        ...

    def is_leaving(self, key: RequestKey) -> bool:
        """Whether a sequence is released, but its blocks are not free yet."""
        ...


class PlanQueue(Protocol):
    """The step plans of an instance."""

    @property
    def under_way(self) -> list[StepPlan]:
        """Queued plans, oldest first. Running plans may be missing, and urgent ones that can begin at once."""
        ...

    def queue(self, plan: StepPlan) -> bool:
        """Add a plan. Returns False if the plan does not fit the state."""
        ...

    def forget(self) -> None:
        """Forget all plans, because their scheduler is gone."""
        ...

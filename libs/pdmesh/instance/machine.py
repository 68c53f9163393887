"""An instance without engine, transport, clock, loop or thread: see `docs/architecture/instance.md`.

Commands of the scheduler and events of copies go in. Each call changes the state at once, and returns effects for the
owner of the machine: events for the scheduler, and work. `pdmesh.instance.counted` adds steps of counted tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import assert_never

from pdmesh.core.commands import (
    AdmitPrefill,
    ExpectCopy,
    FreeKv,
    Hold,
    InstanceCommand,
    RunStep,
    SendCopy,
    SetPlaces,
    SetRole,
    StopCopy,
    StopInstance,
)
from pdmesh.core.events import KvExpected
from pdmesh.instance.cache import CachedPrefix
from pdmesh.instance.chunks import Chunks
from pdmesh.instance.copying import CopyRules
from pdmesh.instance.effects import (
    Admitted,
    CopyEvent,
    Effect,
    Planned,
    Refused,
    Regrouped,
    Rehomed,
    ResidentsChange,
    WaitNoLonger,
)
from pdmesh.instance.endings import Endings
from pdmesh.instance.floor import Floor, PlanQueue
from pdmesh.instance.new_copies import NewCopies
from pdmesh.instance.sequence import PromptWork, Sequence
from pdmesh.instance.sequence_phases import DECODES, SeqPhase
from pdmesh.instance.spreading import Spreading
from pdmesh.kv_layout import GRANULE_TOKENS
from pdmesh.model import Epoch, InstanceId, PartMember, RequestKey, Role, Then
from pdmesh.plans import ChunkPlan, PrefillGroup, StepPlan


class InstanceMachine:
    """Machine of one instance, with the blocks and residents of ``floor``."""

    def __init__(self, floor: Floor, plans: PlanQueue, role: Role) -> None:
        self.instance_id = floor.instance_id
        self.role = role
        self.is_told_to_stop = False
        self.sequences = floor.sequences
        self.endings = Endings(floor)
        self._floor = floor
        self._plans = plans
        self._chunks = Chunks(floor)
        self._copying = CopyRules(floor)
        self._new_copies = NewCopies(floor)
        self._spreading = Spreading(floor)
        self._effects = floor.effects

    def done(self) -> list[Effect]:
        """Return the pending effects and clear them."""
        effects = self._effects[:]
        self._effects.clear()
        return effects

    # --- commands ---

    def obey(self, command: InstanceCommand) -> list[Effect]:
        match command:
            case RunStep(plan=plan):
                self._effects.append(
                    Planned(plan) if self._plans.queue(plan) else Refused(command, "another urgent plan is queued")
                )
            case AdmitPrefill():
                self._admit(command)
            case ExpectCopy():
                self._new_copies.expect(command)
            case SendCopy() if command.transfer.then is Then.KEEP:
                self._new_copies.send_cached(command)
            case FreeKv():
                self.endings.free(command)
            case SetRole(role=role):
                self.role = role
            case StopInstance():
                self.is_told_to_stop = True
            case _:
                if isinstance(command, Hold):
                    self._floor.make_room(command)
                sequence = self.sequences.get((command.request_id, command.epoch))
                if sequence is not None:
                    self._obey_for(sequence, command)
        return self.done()

    def _obey_for(self, sequence: Sequence, command: SetPlaces | SendCopy | StopCopy | Hold) -> None:
        """Obey a command for a sequence that is here."""
        match command:
            case SetPlaces(places=places):
                self._set_places(sequence, places)
            case Hold(decodes=False):
                self._floor.grow(sequence, command)
            case SendCopy() | StopCopy() | Hold():
                self._copying.obey(sequence, command)
            case _:
                assert_never(command)

    def _set_places(self, sequence: Sequence, places: PrefillGroup | tuple[PartMember, ...] | InstanceId) -> None:
        """Record the other instances that have KV of a sequence."""
        match places:
            case PrefillGroup():
                if sequence.phase is SeqPhase.PREFILLING:
                    self._regroup(sequence, places)
            case str():
                self._effects.append(Rehomed(sequence, places))
            case _:
                if sequence.phase in DECODES or sequence.prompt.num_blocks_at_once:
                    sequence.expect_members(places)
                    self._effects.append(ResidentsChange())

    def _admit(self, command: AdmitPrefill) -> None:
        """Take a prompt to compute, and free older epochs of the request. Nothing else happens if it is refused."""
        key = (command.request_id, command.epoch)
        if command.epoch > 0:
            self.endings.free_up_to(command.request_id, Epoch(command.epoch - 1))
        is_cached = (command.leads or command.keeps_prefix) and not command.num_blocks_at_once
        sequence = Sequence(
            key,
            SeqPhase.PREFILLING,
            command.num_blocks,
            prefix=CachedPrefix(
                self._floor.chain_of(key) if is_cached else (), command.num_loaded_granules, command.states
            ),
            prompt=PromptWork(
                command.num_reused_granules * GRANULE_TOKENS,
                group=command.group,
                num_blocks_at_once=command.num_blocks_at_once,
                has_older_plans=any(_has_chunk(plan, key) for plan in self._plans.under_way),
            ),
            leads=command.leads,
        )
        if command.moves_on:
            sequence.send_on(command.transfer, Then.DECODE)
        if not self._floor.take(sequence, command, command.num_reused_granules):
            return
        if command.group is not None:
            self._effects.append(Regrouped(sequence, None))
        if command.leads:
            self._effects.append(Admitted(sequence))
        else:
            self._effects.append(KvExpected(self.instance_id, *key))

    def _regroup(self, sequence: Sequence, group: PrefillGroup) -> None:
        """Record the members of a group. If a member was lost, chunks planned until now no longer wait."""
        known = sequence.prompt.group
        sequence.regroup(group)
        self._effects.append(Regrouped(sequence, known))
        if set(group.lost_ids).difference(() if known is None else known.lost_ids):
            plans = [plan.plan_id for plan in self._plans.under_way if _has_chunk(plan, sequence.key)]
            sequence.give_up_plans(plans)
            self._effects.append(WaitNoLonger(sequence, group))

    # --- copies ---

    def copy_event(self, event: CopyEvent) -> list[Effect]:
        """Handle an event of a copy."""
        self._copying.hear(self.sequences[event.key], event)
        return self.done()

    def set_members(self, sequence: Sequence) -> list[Effect]:
        """Set the shard holders that the scheduler named, if any, and free the blocks of their ranges here.

        A context that does not fit them is dropped. Call between two steps. Raise ProtocolError for an unknown holder.
        """
        self._spreading.set_members(sequence)
        return self.done()

    def lose_members(self, sequence: Sequence, numbers: Collection[int]) -> list[Effect]:
        """Pause or drop a context whose shard holders ``numbers`` do not answer (`Spreading.lose_members`)."""
        self._spreading.lose_members(sequence, numbers)
        return self.done()

    def drop(self, sequence: Sequence, reason: str) -> list[Effect]:
        """Drop a sequence that cannot continue here."""
        self.endings.drop(sequence, reason)
        return self.done()

    # --- steps ---

    def begin_chunk(self, sequence: Sequence) -> list[Effect]:
        """Offer the KV of a prompt when its first chunk begins."""
        self._chunks.begin(sequence)
        return self.done()

    def end_chunk(self, sequence: Sequence, chunk: ChunkPlan) -> list[Effect]:
        """Record a computed chunk, and cache the prompt up to its end."""
        self._chunks.end(sequence, chunk)
        return self.done()

    def end_prompt(self, sequence: Sequence) -> list[Effect]:
        """Record the first token, and decode here unless the KV moves on."""
        self._chunks.end_prompt(sequence)
        return self.done()

    def freeze(self, sequence: Sequence, num_tokens: int) -> list[Effect]:
        """Pause a moving resident, which has ``num_tokens`` of prompt and output."""
        self._copying.freeze(sequence, num_tokens)
        return self.done()

    # --- the scheduler ---

    def drop_all_but_decoding(self) -> list[Effect]:
        """Drop all plans, and all sequences that need a scheduler, since the next one does not know them.

        Moves that have not committed are cancelled.
        """
        self._plans.forget()
        for sequence in list(self.sequences.values()):
            move = sequence.move
            if move is not None and not move.may_have_begun:
                self._copying.stay(sequence)
            self._copying.forget_plans(sequence)
            if not sequence.goes_on_alone:
                self.endings.forget(sequence)
        return self.done()

    def check_integrity(self) -> None:
        """Raise AssertionError if effects are left, or if a sequence contradicts its phase."""
        assert not self._effects, f"{self.instance_id} has effects that no call returned"
        for sequence in self.sequences.values():
            sequence.check_integrity()


def _has_chunk(plan: StepPlan, key: RequestKey) -> bool:
    return any((chunk.request_id, chunk.epoch) == key for chunk in plan.chunks)

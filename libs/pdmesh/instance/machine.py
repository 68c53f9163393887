"""An instance without engine, transport, clock, loop or thread: see `docs/architecture/instance.md`.

Commands of the scheduler, results of steps and events of copies go in. Each call changes the state at once, and returns
effects for the owner of the machine: events for the scheduler, and work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import assert_never

from pdmesh.core.commands import (
    AdmitPrefill,
    FetchKept,
    FreeKv,
    GrantTransfer,
    Hold,
    InstanceCommand,
    PlaceDecode,
    RunStep,
    SendKept,
    SetPlaces,
    SetRole,
    StopCopy,
    StopInstance,
)
from pdmesh.core.events import HelperJoined
from pdmesh.instance.cache import CachedPrefix
from pdmesh.instance.copy_state import Then
from pdmesh.instance.copying import CopyRules
from pdmesh.instance.effects import Admitted, CopyEvent, Effect, Planned, Refused, Regrouped, WaitNoLonger
from pdmesh.instance.holding import Holding
from pdmesh.instance.new_copies import NewCopies
from pdmesh.instance.planned_steps import Steps
from pdmesh.instance.residents import Length
from pdmesh.instance.sequence import PromptWork, Sequence
from pdmesh.instance.sequence_phases import SeqPhase
from pdmesh.instance.spreading import Spreading
from pdmesh.model import GRANULE_TOKENS, FinishReason, InstanceId, InstanceProfile, PartMember, PrefixHashes, RequestKey
from pdmesh.plans import PrefillGroup, StepPlan


class InstanceMachine:
    """Machine of one instance. ``length_of`` returns how long a request gets."""

    def __init__(self, profile: InstanceProfile, length_of: Callable[[RequestKey], Length]) -> None:
        self.profile = profile
        self.instance_id = profile.instance_id
        self.role = profile.role
        self.is_told_to_stop = False
        self.holding = holding = Holding(profile, length_of)
        self.sequences = holding.sequences
        self.residents = holding.residents
        self.cache = holding.cache
        self.own = holding.own
        self._copying = CopyRules(holding)
        self._new_copies = NewCopies(holding)
        self._spreading = Spreading(holding)
        self.steps = Steps(holding, self._spreading)
        self._effects = holding.effects

    def _done(self) -> list[Effect]:
        """Return the effects of a call."""
        effects = self._effects[:]
        self._effects.clear()
        return effects

    # --- commands ---

    def obey(self, command: InstanceCommand) -> list[Effect]:
        match command:
            case RunStep(plan=plan):
                self._effects.append(Planned(plan) if self.steps.queue(plan) else Refused(command, "two urgent plans"))
            case AdmitPrefill():
                self._admit(command)
            case PlaceDecode():
                self._new_copies.expect(command)
            case FetchKept():
                self._new_copies.fetch(command)
            case SendKept():
                self._new_copies.send_cached(command)
            case FreeKv():
                self.holding.free(command)
            case SetRole(role=role):
                self.role = role
            case StopInstance():
                self.is_told_to_stop = True
            case _:
                if isinstance(command, Hold):
                    self.holding.make_room(command)
                sequence = self.sequences.get((command.request_id, command.epoch))
                if sequence is not None:
                    self._obey_for(sequence, command)
        return self._done()

    def _obey_for(self, sequence: Sequence, command: SetPlaces | GrantTransfer | StopCopy | Hold) -> None:
        """Obey a command for a sequence that is here."""
        match command:
            case SetPlaces(places=places):
                self._set_places(sequence, places)
            case Hold(decodes=False):
                num_blocks = self.holding.num_context_blocks
                if self.holding.grow(sequence, command) and self.residents.grow(sequence.key, num_blocks(sequence)):
                    self.holding.residents_change()
            case GrantTransfer() | StopCopy() | Hold():
                self._copying.obey(sequence, command)
            case _:
                assert_never(command)

    def _set_places(self, sequence: Sequence, places: PrefillGroup | tuple[PartMember, ...] | InstanceId) -> None:
        """Take the other instances that have KV of a sequence."""
        match places:
            case PrefillGroup():
                if sequence.phase is SeqPhase.PREFILLING:
                    self._regroup(sequence, places)
            case str():
                pass  # the owner answers questions
            case _:
                sequence.expect_members(places)
                self.holding.residents_change()

    def _admit(self, command: AdmitPrefill) -> None:
        key = (command.request_id, command.epoch)
        length = self.holding.length_of(key)
        is_cached = (command.leads or command.keeps_prefix) and not command.num_blocks_at_once
        sequence = Sequence(
            key,
            SeqPhase.PREFILLING,
            command.num_blocks,
            prefix=CachedPrefix(length.chain if is_cached else (), command.num_loaded_granules),
            prompt=PromptWork(
                command.num_reused_granules * GRANULE_TOKENS,
                group=command.group,
                num_blocks_at_once=command.num_blocks_at_once,
                has_older_plans=any(_has_chunk(plan, key) for plan in self.steps.under_way),
            ),
            length=length if command.leads else None,
            leads=command.leads,
        )
        if command.moves_on:
            sequence.send_on(command.transfer, Then.DECODE)
        if not self.holding.take(sequence, command, command.num_reused_granules):
            return
        if command.group is not None:
            self._effects.append(Regrouped(sequence, None))
        if command.leads:
            self._effects.append(Admitted(sequence))
        else:
            self._effects.append(HelperJoined(self.instance_id, *key))

    def _regroup(self, sequence: Sequence, group: PrefillGroup) -> None:
        """Take the members of a group. If a member was lost, the chunks planned until now do not wait."""
        known = sequence.prompt.group
        sequence.regroup(group)
        self._effects.append(Regrouped(sequence, known))
        if set(group.lost_ids).difference(() if known is None else known.lost_ids):
            plans = [plan.plan_id for plan in self.steps.under_way if _has_chunk(plan, sequence.key)]
            sequence.give_up_plans(plans)
            self._effects.append(WaitNoLonger(sequence, group))

    # --- copies ---

    def copy_event(self, event: CopyEvent) -> list[Effect]:
        """Take an event of a copy."""
        self._copying.hear(self.sequences[event.key], event)
        return self._done()

    def end_copies(self) -> list[Effect]:
        """End every copy: quarantined blocks are free."""
        self.holding.end_copies()
        return self._done()

    def lose_member(self, instance_id: InstanceId) -> list[Effect]:
        """Continue without an instance, which may have held ranges."""
        self._spreading.lose_member(instance_id)
        return self._done()

    def lose_offloaded(self, granules: PrefixHashes) -> list[Effect]:
        """Lose granules of the offload tier."""
        self.holding.lose_offloaded(granules)
        return self._done()

    # --- steps ---

    def turn(self) -> list[Effect]:
        """Let residents join and leave, between two steps."""
        self.steps.turn()
        return self._done()

    def begin_step(self) -> list[Effect]:
        """Begin the next plan's step, which is the last one of ``steps.running`` from then on."""
        self.steps.begin()
        return self._done()

    def end_step(
        self,
        uncomputed: Collection[RequestKey] = (),
        *,
        duration_s: float = 0.0,
        began_s: float = 0.0,
        ended_s: float = 0.0,
        ended_by_first_token: bool = False,
    ) -> list[Effect]:
        """End the running step. Chunks of ``uncomputed`` ended without the KV before them.

        ``ended_by_first_token`` ends the generations of its last chunks at once.
        """
        self.steps.end(
            uncomputed,
            duration_s=duration_s,
            began_s=began_s,
            ended_s=ended_s,
            ended_by_first_token=ended_by_first_token,
        )
        return self._done()

    def make_own_steps(self, num_steps: int, *, duration_s: float, began_s: float, ended_s: float) -> list[Effect]:
        """Make decode steps without a plan: no more than residents and reports allow at once."""
        self.steps.make_own(num_steps, duration_s=duration_s, began_s=began_s, ended_s=ended_s)
        return self._done()

    def draw(self, num_steps: int) -> list[Effect]:
        """Give every resident a token for each step, and report no step."""
        self.steps.draw(num_steps)
        return self._done()

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_output_tokens: int | None = None,
        drawn: PrefixHashes | None = None,
    ) -> list[Effect]:
        """End a generation, with all that it was to draw unless ``num_output_tokens`` or ``drawn`` say otherwise."""
        self.holding.finish(sequence, reason, num_output_tokens, drawn)
        return self._done()

    def drop(self, sequence: Sequence, reason: str) -> list[Effect]:
        """Give up a sequence that cannot go on here."""
        self.holding.drop(sequence, reason)
        return self._done()

    # --- the scheduler ---

    def report_load(self) -> list[Effect]:
        self.holding.report_load()
        return self._done()

    def drop_all_but_decoding(self) -> list[Effect]:
        """Forget all plans and all sequences that do not decode: the next scheduler does not know them."""
        self.holding.end_copies()
        self.steps.forget()
        for sequence in list(self.sequences.values()):
            move = sequence.move
            if move is not None and not move.may_have_begun:
                self._copying.stay(sequence)
            self._copying.forget_plans(sequence)
            if not sequence.is_decoding and sequence.phase is not SeqPhase.HOLDING:
                self.holding.forget(sequence)
        return self._done()

    def check_integrity(self) -> None:
        """AssertionError names what does not balance."""
        assert not self._effects, f"{self.instance_id} has effects that no call returned"
        for sequence in self.sequences.values():
            sequence.check_integrity()


def _has_chunk(plan: StepPlan, key: RequestKey) -> bool:
    return any((chunk.request_id, chunk.epoch) == key for chunk in plan.chunks)

"""The state of one epoch of a request on an instance, and the one place where that state changes.

Each transition of `pdmesh.instance.sequence_phases` is a method. No other module assigns a field.
"""

from __future__ import annotations

from pdmesh.instance.cache import CachedPrefix
from pdmesh.instance.copy_state import LeavingCopy
from pdmesh.instance.residents import Length
from pdmesh.instance.sequence_phases import (
    DECODES,
    FACTS,
    TRANSITIONS,
    IllegalStep,
    LeavingState,
    SeqPhase,
    SequenceFacts,
)
from pdmesh.model import NO_TRANSFER, PartMember, PrefixHashes, RequestKey, Then, TransferId
from pdmesh.plans import PrefillGroup, TransferPlan


class PromptWork:
    """Progress of this instance on a prompt, alone or in a group.

    ``given_up`` has the ids of plans that no longer wait for other members.
    """

    __slots__ = ("given_up", "group", "has_older_plans", "num_blocks_at_once", "num_computed_tokens")

    def __init__(
        self,
        num_computed_tokens: int = 0,
        *,
        group: PrefillGroup | None = None,
        num_blocks_at_once: int = 0,
        has_older_plans: bool = False,
    ) -> None:
        """``num_blocks_at_once``: blocks here of a prompt that is longer than the room; 0: the prompt fits.

        ``has_older_plans``: plans for an earlier sequence of the same key are waiting.
        """
        self.num_computed_tokens = num_computed_tokens
        self.group = group
        self.given_up: set[int] = set()
        self.num_blocks_at_once = num_blocks_at_once
        self.has_older_plans = has_older_plans


class Sequence:
    """State machine of one epoch of a request on an instance. Each transition is a method.

    ``leads``: whether this instance draws the first token, or decodes.
    ``incoming``: the transfer that brings the KV here, or takes cached blocks from here.
    ``part``: number of the range, if the context decodes on another instance.
    ``members``: holders of the first ranges, in order, if the context decodes here or the prompt exceeds the room.
    ``next_members``: members from the next step on.
    ``lost_range``: number of the range that another instance computes again.
    ``num_tokens``: prompt and output tokens at the last time that decoding began or paused.
    ``drawn``: granules that the output completes, once the generation has ended.
    """

    __slots__ = (
        "drawn",
        "incoming",
        "key",
        "leads",
        "length",
        "lost_range",
        "members",
        "next_members",
        "num_blocks",
        "num_tokens",
        "outgoing",
        "part",
        "phase",
        "prefix",
        "prompt",
    )

    def __init__(
        self,
        key: RequestKey,
        phase: SeqPhase,
        num_blocks: int,
        *,
        prefix: CachedPrefix,
        prompt: PromptWork | None = None,
        length: Length | None = None,
        leads: bool = True,
        incoming: TransferPlan | None = None,
        part: int | None = None,
        members: tuple[PartMember, ...] = (),
    ) -> None:
        self.key = key
        self.phase = phase
        self.num_blocks = num_blocks
        self.prefix = prefix
        self.prompt = PromptWork() if prompt is None else prompt
        self.length = length
        self.leads = leads
        self.incoming = incoming
        self.outgoing: dict[Then, LeavingCopy] = {}
        self.part = part
        self.members = members
        self.next_members: tuple[PartMember, ...] | None = None
        self.lost_range: int | None = None
        self.num_tokens = 0
        self.drawn: PrefixHashes = ()

    # --- questions ---

    @property
    def chain(self) -> PrefixHashes:
        """Cacheable granules of the prompt."""
        return self.prefix.chain

    @property
    def is_decoding(self) -> bool:
        return self.phase is SeqPhase.DECODING

    @property
    def goes_on_alone(self) -> bool:
        """Whether the sequence survives without a scheduler: a range, or a context that decodes or lacks a range."""
        is_asking = self.phase is SeqPhase.PAUSED and self.has_lost_range and self.move is None
        return self.phase in (SeqPhase.DECODING, SeqPhase.HOLDING) or is_asking

    @property
    def is_computed(self) -> bool:
        """Whether the KV is complete here, for another instance."""
        return self.phase is SeqPhase.COMPUTED

    @property
    def is_freed(self) -> bool:
        return self.phase is SeqPhase.FREED

    @property
    def is_range(self) -> bool:
        """Whether the sequence is a range of a context that decodes on another instance."""
        return self.part is not None

    @property
    def onward(self) -> LeavingCopy | None:
        """The copy of a prompt's whole KV to the instance that will decode or cache it.

        None if the KV stays here, and in phases other than PREFILLING and COMPUTED. For a decoding sequence see `move`.
        """
        if self.phase is SeqPhase.PREFILLING or self.phase is SeqPhase.COMPUTED:
            return self.outgoing.get(Then.DECODE) or self.outgoing.get(Then.KEEP)
        return None

    @property
    def moves_on(self) -> bool:
        """Whether the prompt is computed here, for another instance that will decode."""
        return Then.DECODE in self.outgoing and self.phase in (SeqPhase.PREFILLING, SeqPhase.COMPUTED)

    @property
    def move(self) -> LeavingCopy | None:
        """Copy of a decoding or paused sequence to the instance where the sequence continues; None without one."""
        return self.outgoing.get(Then.DECODE) if self.phase in DECODES else None

    @property
    def handing(self) -> LeavingCopy | None:
        """The copy of a range to the instance that holds it next; None if there is none."""
        return self.outgoing.get(Then.HOLD)

    @property
    def transfer(self) -> TransferPlan | None:
        """The transfer that brings the KV here or, for a prompt computed here, takes it on; None without one."""
        onward = self.onward
        return self.incoming if onward is None else onward.transfer

    @property
    def is_granted(self) -> bool:
        """Whether the KV is being sent to the instance that will decode or cache it."""
        onward = self.onward
        return onward is not None and onward.is_sending

    @property
    def received_by(self) -> TransferId:
        """Id of the transfer that brings the KV here, or takes cached blocks from here; else `NO_TRANSFER`."""
        return NO_TRANSFER if self.incoming is None else self.incoming.transfer_id

    @property
    def asks_others(self) -> bool:
        """Whether other instances hold ranges of the prompt while it is computed."""
        return self.prompt.num_blocks_at_once > 0 and len(self.members) > 0

    @property
    def has_lost_range(self) -> bool:
        """Whether a range of the context is lost, so that no tokens are drawn until it has been computed again."""
        return self.lost_range is not None

    @property
    def takes_seat(self) -> bool:
        """Whether the sequence decodes here, or will."""
        move = self.move
        return self.leads and not self.moves_on and (move is None or not move.may_have_begun)

    @property
    def decodes_nowhere(self) -> bool:
        """Whether the sequence waits to decode, and cannot have begun here or at the receiver."""
        if self.phase is SeqPhase.PREFILLING:
            return True
        if self.phase is SeqPhase.COMPUTED:
            return not self.is_granted
        if self.phase is SeqPhase.PAUSED:
            return self.move is None and self.is_handed_over
        return self.phase in (SeqPhase.EXPECTED, SeqPhase.FREED) and not self.is_range and self.is_handed_over

    @property
    def is_handed_over(self) -> bool:
        """Return True if the KV was computed here, or came here before the sequence decoded on another instance."""
        return self.incoming is None or self.incoming.is_hand_over

    def moves_by(self, transfer_id: TransferId) -> bool:
        move = self.move
        return move is not None and move.transfer_id == transfer_id

    # --- the prompt ---

    def compute(self, num_tokens: int) -> None:
        """Record that the KV of the first ``num_tokens`` of the prompt, or of a lost range, is here."""
        self._go("compute", self.phase)
        self.prompt.num_computed_tokens = num_tokens

    def regroup(self, group: PrefillGroup) -> None:
        """Compute the prompt together with these members from now on."""
        self._go("regroup", SeqPhase.PREFILLING)
        self.prompt.group = group

    def give_up_plans(self, plan_ids: list[int]) -> None:
        """Let chunks of these plans end instead of waiting for another member."""
        self.prompt.given_up.update(plan_ids)

    def end_prompt(self) -> None:
        """Record that the whole prompt is computed, and the first token drawn."""
        self._go("end_prompt", SeqPhase.COMPUTED)
        self.num_tokens = self.prompt.num_computed_tokens + 1

    # --- KV that leaves ---

    def send_on(self, transfer: TransferPlan | None, then: Then, state: LeavingState = LeavingState.WAITING) -> None:
        """Let the KV be sent to another instance; ``transfer`` is None as long as there is no receiver."""
        self._go("send_on", self.phase)
        self.outgoing[then] = LeavingCopy(transfer, state)

    def keep(self) -> None:
        """Let the sequence decode here, and not on another instance."""
        self._go("keep", self.phase)
        del self.outgoing[Then.DECODE]

    def begin_move(self, transfer: TransferPlan) -> LeavingCopy:
        """Begin to copy the KV to another instance, where the sequence continues."""
        self._go("begin_move", SeqPhase.DECODING)
        copy = self.outgoing[Then.DECODE] = LeavingCopy(transfer, LeavingState.SENDING)
        return copy

    def end_move(self) -> None:
        """End the move, and let the sequence continue here."""
        self._go("end_move", self.phase)
        del self.outgoing[Then.DECODE]

    def hand_range(self, transfer: TransferPlan) -> LeavingCopy:
        """Begin to copy a range, or the tokens of a lost one, to the instance that holds it next."""
        self._go("hand_range", self.phase)
        copy = self.outgoing[Then.HOLD] = LeavingCopy(transfer, LeavingState.SENDING)
        return copy

    def end_hand_range(self) -> None:
        """Record that the copy of a range has ended or failed."""
        self.outgoing.pop(Then.HOLD, None)

    # --- decoding ---

    def land(self, num_tokens: int, length: Length | None = None) -> None:
        """Record that the whole KV is here, with ``num_tokens`` of prompt and output."""
        self._go("land", SeqPhase.EXPECTED)
        self.length, self.num_tokens = length, num_tokens

    def land_range(self, num_tokens: int) -> None:
        """Record that the KV of the range is here, so that this instance answers for it."""
        self._go("land_range", SeqPhase.HOLDING)
        self.num_tokens = num_tokens

    def decode(self) -> None:
        """Draw tokens from the next step on."""
        self._go("decode", SeqPhase.DECODING)

    def pause(self, num_tokens: int) -> None:
        """Stop drawing tokens now. ``num_tokens`` is the present length of prompt and output."""
        self._go("pause", SeqPhase.PAUSED)
        self.num_tokens = num_tokens

    def grow(self, num_blocks: int) -> None:
        """Add ``num_blocks`` to the held blocks."""
        self.num_blocks += num_blocks

    # --- spread contexts ---

    def expect_members(self, members: tuple[PartMember, ...]) -> None:
        """Set the members from the next step on."""
        self.next_members = members

    def forget_plans(self) -> None:
        """Forget the plans of a lost scheduler for the ranges of the context."""
        self.next_members = None
        self.outgoing.pop(Then.HOLD, None)

    def spread(self, members: tuple[PartMember, ...], num_given_back: int) -> None:
        """Let ``members`` hold the first ranges, whose ``num_given_back`` blocks are freed here."""
        self._go("spread", self.phase)
        self.members, self.next_members = members, None
        if num_given_back:
            self.num_blocks -= num_given_back
            self.prefix.clear()

    def lose_range(self, number: int) -> None:
        """Record that a member is lost, and that the range is computed again."""
        self._go("lose_range", self.phase)
        self.lost_range = number

    def find_range(self) -> None:
        """Record that every range has a holder again."""
        self._go("find_range", self.phase)
        self.lost_range = None

    # --- the end ---

    def free(self) -> None:
        """Free the sequence. The blocks are free when no step or copy uses them."""
        if self.phase is not SeqPhase.FREED:
            self._go("free", SeqPhase.FREED)
            self.outgoing.clear()

    def set_length(self, length: Length) -> None:
        """Set the final length of a request that is computed here."""
        self.length = length

    def end(self, drawn: PrefixHashes) -> None:
        """Record that the generation ended here; ``drawn`` are the cacheable granules of the output."""
        self.drawn = drawn

    # --- the tables ---

    def _go(self, transition: str, phase: SeqPhase) -> None:
        """Change the phase. Raises IllegalStep if the table does not allow the transition."""
        begins, leads = TRANSITIONS[transition]
        if self.phase not in begins or phase not in leads:
            raise IllegalStep(f"{self.key}: {transition} from {self.phase} to {phase}")
        self.phase = phase

    def check_integrity(self) -> None:
        """Raise AssertionError if a fact contradicts the phase."""
        found = SequenceFacts(
            has_transfer=self.incoming is not None,
            sends=Then.DECODE in self.outgoing or Then.KEEP in self.outgoing,
            hands_range=Then.HOLD in self.outgoing,
            is_range=self.is_range,
            lost_range=self.has_lost_range,
        )
        for name, wanted, value in zip(SequenceFacts._fields, FACTS[self.phase], found, strict=True):
            assert wanted is None or wanted == value, f"{self.key} is {self.phase}, and {name} is {value}"
        if self.phase is SeqPhase.PAUSED:
            move = self.move
            assert self.has_lost_range or (move is not None and move.is_frozen), f"{self.key} pauses without a reason"

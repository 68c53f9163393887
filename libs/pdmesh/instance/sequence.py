"""The state of one epoch of a request on an instance, and the one place where that state changes.

Each transition of `pdmesh.instance.sequence_phases` is a method. No other module assigns a field.
"""

from __future__ import annotations

from pdmesh.instance.cache import CachedPrefix
from pdmesh.instance.copy_state import Copy
from pdmesh.instance.residents import Length
from pdmesh.instance.sequence_phases import (
    DECODES,
    FACTS,
    TRANSITIONS,
    CopyState,
    IllegalStep,
    SeqPhase,
    SequenceFacts,
)
from pdmesh.model import NO_TRANSFER, PartMember, PrefixHashes, RequestKey, Then, TransferId
from pdmesh.plans import PrefillGroup, TransferPlan


class PromptWork:
    """How far this instance has computed a prompt, alone or in a group."""

    __slots__ = ("given_up", "group", "has_older_plans", "num_blocks_at_once", "num_computed_tokens")

    def __init__(
        self,
        num_computed_tokens: int = 0,
        *,
        group: PrefillGroup | None = None,
        num_blocks_at_once: int = 0,
        has_older_plans: bool = False,
    ) -> None:
        """``num_blocks_at_once``: blocks of a prompt that is longer than the room here; 0: it is not.

        ``has_older_plans``: plans wait that were made for an earlier sequence of the same key.
        """
        self.num_computed_tokens = num_computed_tokens
        self.group = group
        self.given_up: set[int] = set()  # ids of plans that no longer wait for other members
        self.num_blocks_at_once = num_blocks_at_once
        self.has_older_plans = has_older_plans


class Sequence:
    """State machine of one epoch of a request on an instance. Each transition is a method."""

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
        self.leads = leads  # this instance draws the first token, or decodes
        #: The transfer that brings the KV here, or takes cached blocks from here.
        self.incoming = incoming
        self.outgoing: dict[Then, Copy] = {}
        self.part = part  # number of the range, of a context that decodes on another instance
        #: Holders of the first ranges of its context, in order, if it decodes here or if its prompt exceeds the room.
        self.members = members
        self.next_members: tuple[PartMember, ...] | None = None  # members from the next step on
        self.lost_range: int | None = None  # number of the range that another instance computes again
        self.num_tokens = 0  # prompt and output tokens when it last began to decode, or paused
        self.drawn: PrefixHashes = ()  # granules that the output completes, once the generation has ended

    # --- questions ---

    @property
    def chain(self) -> PrefixHashes:
        """Cacheable blocks of its prompt."""
        return self.prefix.chain

    @property
    def is_decoding(self) -> bool:
        return self.phase is SeqPhase.DECODING

    @property
    def goes_on_alone(self) -> bool:
        """Whether it needs no plan of the scheduler: it decodes, is to ask another holder of a range, or is a range."""
        is_asking = self.phase is SeqPhase.PAUSED and self.has_lost_range and self.move is None
        return self.phase in (SeqPhase.DECODING, SeqPhase.HOLDING) or is_asking

    @property
    def is_computed(self) -> bool:
        """Whether its KV is complete here, for another instance."""
        return self.phase is SeqPhase.COMPUTED

    @property
    def is_freed(self) -> bool:
        return self.phase is SeqPhase.FREED

    @property
    def is_range(self) -> bool:
        """Whether it is a range of a context that decodes on another instance."""
        return self.part is not None

    @property
    def onward(self) -> Copy | None:
        """The copy of its whole KV to where it decodes or is cached; None if it stays here."""
        if self.phase is SeqPhase.PREFILLING or self.phase is SeqPhase.COMPUTED:
            return self.outgoing.get(Then.DECODE) or self.outgoing.get(Then.KEEP)
        return None

    @property
    def moves_on(self) -> bool:
        """Whether it is to decode on another instance, and is computed here."""
        return Then.DECODE in self.outgoing and self.phase in (SeqPhase.PREFILLING, SeqPhase.COMPUTED)

    @property
    def move(self) -> Copy | None:
        """The copy of a decoding sequence to the instance where it continues."""
        return self.outgoing.get(Then.DECODE) if self.phase in DECODES else None

    @property
    def handing(self) -> Copy | None:
        """The copy of a range to the instance that holds it next."""
        return self.outgoing.get(Then.HOLD)

    @property
    def transfer(self) -> TransferPlan | None:
        """The transfer that brings its KV here or, as it is computed here, takes it on."""
        onward = self.onward
        return self.incoming if onward is None else onward.transfer

    @property
    def is_granted(self) -> bool:
        """Whether its KV is being sent to where it decodes or is cached."""
        onward = self.onward
        return onward is not None and onward.is_sending

    @property
    def received_by(self) -> TransferId:
        """Id of the transfer that brings its KV here, or takes cached blocks from here."""
        return NO_TRANSFER if self.incoming is None else self.incoming.transfer_id

    @property
    def asks_others(self) -> bool:
        """Whether other instances hold ranges of its prompt while it is computed."""
        return self.prompt.num_blocks_at_once > 0 and len(self.members) > 0

    @property
    def has_lost_range(self) -> bool:
        """Whether a range of its context is lost, and it draws no tokens until another instance has computed it."""
        return self.lost_range is not None

    @property
    def takes_seat(self) -> bool:
        """Whether it decodes here, or will."""
        move = self.move
        return self.leads and not self.moves_on and (move is None or not move.may_have_begun)

    @property
    def decodes_nowhere(self) -> bool:
        """Whether it is to decode, and cannot have begun to, here or at its receiver."""
        if self.phase is SeqPhase.PREFILLING:
            return True
        if self.phase is SeqPhase.COMPUTED:
            return not self.is_granted
        if self.phase is SeqPhase.PAUSED:
            return self.move is None and self.is_handed_over
        return self.phase in (SeqPhase.EXPECTED, SeqPhase.FREED) and not self.is_range and self.is_handed_over

    @property
    def is_handed_over(self) -> bool:
        """Whether its KV came here, if it came, before it had decoded elsewhere."""
        return self.incoming is None or self.incoming.is_hand_over

    def moves_by(self, transfer_id: TransferId) -> bool:
        move = self.move
        return move is not None and move.transfer_id == transfer_id

    # --- its prompt ---

    def compute(self, num_tokens: int) -> None:
        """Note that the KV of the first ``num_tokens`` of its prompt, or of a lost range, is here."""
        self._go("compute", self.phase)
        self.prompt.num_computed_tokens = num_tokens

    def regroup(self, group: PrefillGroup) -> None:
        """Compute the prompt together with these members from now on."""
        self._go("regroup", SeqPhase.PREFILLING)
        self.prompt.group = group

    def give_up_plans(self, plan_ids: list[int]) -> None:
        """Let chunks of these plans end where they would wait for another member."""
        self.prompt.given_up.update(plan_ids)

    def end_prompt(self) -> None:
        """Note that the whole prompt is computed, and the first token drawn."""
        self._go("end_prompt", SeqPhase.COMPUTED)
        self.num_tokens = self.prompt.num_computed_tokens + 1

    # --- KV that leaves ---

    def send_on(self, transfer: TransferPlan | None, then: Then, state: CopyState = CopyState.WAITING) -> None:
        """Let its KV be sent once it is computed; ``transfer`` is None as long as there is no receiver."""
        self._go("send_on", self.phase)
        self.outgoing[then] = Copy(transfer, state)

    def keep(self) -> None:
        """Let it decode here after all."""
        self._go("keep", self.phase)
        del self.outgoing[Then.DECODE]

    def begin_move(self, transfer: TransferPlan) -> Copy:
        """Begin to copy its KV to another instance, where it continues."""
        self._go("begin_move", SeqPhase.DECODING)
        copy = self.outgoing[Then.DECODE] = Copy(transfer, CopyState.SENDING)
        return copy

    def end_move(self) -> None:
        """Let it continue here."""
        self._go("end_move", self.phase)
        del self.outgoing[Then.DECODE]

    def hand_range(self, transfer: TransferPlan) -> Copy:
        """Begin to copy a range, or the tokens of a lost one, to the instance that holds it next."""
        self._go("hand_range", self.phase)
        copy = self.outgoing[Then.HOLD] = Copy(transfer, CopyState.SENDING)
        return copy

    def end_hand_range(self) -> None:
        """Note that the copy of a range has ended, or failed."""
        self.outgoing.pop(Then.HOLD, None)

    # --- it decodes ---

    def land(self, num_tokens: int, length: Length | None = None) -> None:
        """Note that its whole KV is here, with ``num_tokens`` of prompt and output."""
        self._go("land", SeqPhase.EXPECTED)
        self.length, self.num_tokens = length, num_tokens

    def land_range(self, num_tokens: int) -> None:
        """Note that the KV of its range is here: answer for it."""
        self._go("land_range", SeqPhase.HOLDING)
        self.num_tokens = num_tokens

    def decode(self) -> None:
        """Draw tokens from the next step on."""
        self._go("decode", SeqPhase.DECODING)

    def pause(self, num_tokens: int) -> None:
        """Draw no more; it has ``num_tokens`` of prompt and output."""
        self._go("pause", SeqPhase.PAUSED)
        self.num_tokens = num_tokens

    def grow(self, num_blocks: int) -> None:
        """Hold ``num_blocks`` more."""
        self.num_blocks += num_blocks

    # --- its context is spread ---

    def expect_members(self, members: tuple[PartMember, ...]) -> None:
        """Ask these from the next step on."""
        self.next_members = members

    def forget_plans(self) -> None:
        """Forget the plans of a lost scheduler for the ranges of its context."""
        self.next_members = None
        self.outgoing.pop(Then.HOLD, None)

    def spread(self, members: tuple[PartMember, ...], num_given_back: int) -> None:
        """Let ``members`` hold the first ranges; ``num_given_back`` blocks of these are freed here."""
        self._go("spread", self.phase)
        self.members, self.next_members = members, None
        if num_given_back:
            self.num_blocks -= num_given_back
            self.prefix.clear()

    def lose_range(self, number: int) -> None:
        """Note that a member is lost: its range is computed again."""
        self._go("lose_range", self.phase)
        self.lost_range = number

    def find_range(self) -> None:
        """Note that every range has a holder again."""
        self._go("find_range", self.phase)
        self.lost_range = None

    # --- it ends ---

    def free(self) -> None:
        """Free the sequence. Its blocks are free when no step or copy touches them."""
        if self.phase is not SeqPhase.FREED:
            self._go("free", SeqPhase.FREED)
            self.outgoing.clear()

    def set_length(self, length: Length) -> None:
        """Note how long a request gets that is computed here."""
        self.length = length

    def end(self, drawn: PrefixHashes) -> None:
        """Note that its generation ended here; ``drawn`` are the cacheable blocks of its output."""
        self.drawn = drawn

    # --- the tables ---

    def _go(self, transition: str, phase: SeqPhase) -> None:
        """Raises IllegalTransition."""
        begins, leads = TRANSITIONS[transition]
        if self.phase not in begins or phase not in leads:
            raise IllegalStep(f"{self.key}: {transition} from {self.phase} to {phase}")
        self.phase = phase

    def check_integrity(self) -> None:
        """AssertionError names a fact that the phase does not allow."""
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

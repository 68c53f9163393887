"""Phases of a sequence on an instance, and states of a copy that leaves it: tables of transitions, and of facts."""

from __future__ import annotations

from enum import StrEnum, auto
from typing import NamedTuple


class SeqPhase(StrEnum):
    """Phase of a sequence on an instance.

    EXPECTED: blocks are reserved, and the KV comes from another instance.
    PREFILLING: this instance computes the prompt.
    COMPUTED: this instance has the complete KV, for another instance.
    PAUSED: no tokens are drawn, at the end of a move or while a range of the context is lost.
    HOLDING: this instance has a range of a context that decodes on another instance.
    FREED: a step or a copy may still use the blocks.
    """

    EXPECTED = auto()
    PREFILLING = auto()
    COMPUTED = auto()
    DECODING = auto()
    PAUSED = auto()
    HOLDING = auto()
    FREED = auto()


DECODES = (SeqPhase.DECODING, SeqPhase.PAUSED)
LIVES = tuple([phase for phase in SeqPhase if phase is not SeqPhase.FREED])

#: For each transition: the phases before it, and the phases after it.
TRANSITIONS: dict[str, tuple[tuple[SeqPhase, ...], tuple[SeqPhase, ...]]] = {
    # the prompt
    # In EXPECTED, the tokens of a lost range are computed.
    "compute": ((SeqPhase.PREFILLING, SeqPhase.EXPECTED), (SeqPhase.PREFILLING, SeqPhase.EXPECTED)),
    "regroup": ((SeqPhase.PREFILLING,), (SeqPhase.PREFILLING,)),
    "end_prompt": ((SeqPhase.PREFILLING,), (SeqPhase.COMPUTED,)),
    # KV that leaves
    "send_on": ((SeqPhase.PREFILLING, SeqPhase.COMPUTED), (SeqPhase.PREFILLING, SeqPhase.COMPUTED)),
    "keep": ((SeqPhase.PREFILLING, SeqPhase.COMPUTED), (SeqPhase.PREFILLING, SeqPhase.COMPUTED)),
    "begin_move": ((SeqPhase.DECODING,), (SeqPhase.DECODING,)),
    "end_move": (DECODES, DECODES),
    "hand_range": (
        (SeqPhase.DECODING, SeqPhase.PAUSED, SeqPhase.HOLDING),
        (SeqPhase.DECODING, SeqPhase.PAUSED, SeqPhase.HOLDING),
    ),
    # KV that comes
    "land": ((SeqPhase.EXPECTED,), (SeqPhase.EXPECTED,)),
    "land_range": ((SeqPhase.EXPECTED,), (SeqPhase.HOLDING,)),
    # decoding
    "decode": ((SeqPhase.EXPECTED, SeqPhase.COMPUTED, SeqPhase.PAUSED), (SeqPhase.DECODING,)),
    "pause": ((SeqPhase.DECODING,), (SeqPhase.PAUSED,)),
    "lose_range": (DECODES, DECODES),
    "find_range": (DECODES, DECODES),
    # In COMPUTED, a range of a prompt leaves that landed elsewhere during the last chunk.
    "spread": (
        (SeqPhase.PREFILLING, SeqPhase.COMPUTED, *DECODES),
        (SeqPhase.PREFILLING, SeqPhase.COMPUTED, *DECODES),
    ),
    # the end
    "free": (LIVES, (SeqPhase.FREED,)),
}


class SequenceFacts(NamedTuple):
    """Facts about a sequence in a phase; None: either is possible.

    ``has_transfer``: a transfer brings the KV here, or takes cached blocks from here.
    ``sends``: a copy of the whole KV leaves.
    """

    has_transfer: bool | None
    sends: bool | None
    hands_range: bool | None
    is_range: bool | None
    lost_range: bool | None


FACTS: dict[SeqPhase, SequenceFacts] = {
    SeqPhase.EXPECTED: SequenceFacts(True, False, False, None, False),
    SeqPhase.PREFILLING: SequenceFacts(False, None, False, False, False),
    SeqPhase.COMPUTED: SequenceFacts(None, True, False, False, False),
    SeqPhase.DECODING: SequenceFacts(None, None, None, False, None),
    SeqPhase.PAUSED: SequenceFacts(None, None, None, False, None),
    SeqPhase.HOLDING: SequenceFacts(True, False, None, True, False),
    SeqPhase.FREED: SequenceFacts(None, None, None, None, None),
}


class LeavingState(StrEnum):
    """State of a copy that leaves the instance.

    WAITING: no chunk has begun.
    OFFERED: the source waits for a grant.
    FROZEN: no tokens are drawn, and the last ones are sent with their KV.
    COMMITTED: the destination may have begun, so only the scheduler may let the source continue.
    ABANDONED: committed, and the source awaits no acknowledgement.
    """

    WAITING = auto()
    OFFERED = auto()
    SENDING = auto()
    FROZEN = auto()
    COMMITTED = auto()
    ABANDONED = auto()


#: For each transition of a copy that leaves an instance: the states before it, and the states after it.
COPY_TRANSITIONS: dict[str, tuple[tuple[LeavingState, ...], tuple[LeavingState, ...]]] = {
    "offer": ((LeavingState.WAITING,), (LeavingState.OFFERED,)),
    "grant": ((LeavingState.WAITING, LeavingState.OFFERED), (LeavingState.SENDING,)),
    "stop": ((LeavingState.SENDING,), (LeavingState.OFFERED,)),
    "lose_receiver": (
        (LeavingState.WAITING, LeavingState.OFFERED, LeavingState.SENDING),
        (LeavingState.WAITING, LeavingState.OFFERED),
    ),
    "freeze": ((LeavingState.SENDING,), (LeavingState.FROZEN,)),
    "commit": ((LeavingState.FROZEN,), (LeavingState.COMMITTED,)),
    "abandon": ((LeavingState.COMMITTED, LeavingState.ABANDONED), (LeavingState.ABANDONED,)),
}


class IllegalStep(Exception):
    """A bug: this transition is not allowed in the phase of the sequence, or in the state of the copy."""

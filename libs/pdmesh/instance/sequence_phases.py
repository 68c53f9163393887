"""Phases of a sequence on an instance, and states of a copy that leaves it: tables of transitions, and of facts."""

from __future__ import annotations

from enum import StrEnum, auto
from typing import NamedTuple


class Phase(StrEnum):
    """Phase of a sequence on an instance."""

    EXPECTED = auto()  # blocks are reserved; the KV comes from another instance
    PREFILLING = auto()  # this instance computes the prompt
    COMPUTED = auto()  # this instance has the complete KV, for another instance
    DECODING = auto()
    PAUSED = auto()  # no tokens are drawn: at the end of a move, or while a range of the context is lost
    HOLDING = auto()  # a range of a context that decodes on another instance
    FREED = auto()  # a step or a copy may still touch the blocks


DECODES = (Phase.DECODING, Phase.PAUSED)
LIVES = tuple([phase for phase in Phase if phase is not Phase.FREED])

#: The phases in which each transition may begin, and the phases that it may lead to.
TRANSITIONS: dict[str, tuple[tuple[Phase, ...], tuple[Phase, ...]]] = {
    # the prompt
    "compute": ((Phase.PREFILLING, Phase.EXPECTED), (Phase.PREFILLING, Phase.EXPECTED)),  # EXPECTED: a lost range
    "regroup": ((Phase.PREFILLING,), (Phase.PREFILLING,)),
    "end_prompt": ((Phase.PREFILLING,), (Phase.COMPUTED,)),
    # KV that leaves
    "send_on": ((Phase.PREFILLING, Phase.COMPUTED), (Phase.PREFILLING, Phase.COMPUTED)),
    "keep": ((Phase.PREFILLING, Phase.COMPUTED), (Phase.PREFILLING, Phase.COMPUTED)),
    "begin_move": ((Phase.DECODING,), (Phase.DECODING,)),
    "end_move": (DECODES, DECODES),
    "hand_range": ((Phase.DECODING, Phase.PAUSED, Phase.HOLDING), (Phase.DECODING, Phase.PAUSED, Phase.HOLDING)),
    # KV that comes
    "land": ((Phase.EXPECTED,), (Phase.EXPECTED,)),
    "land_range": ((Phase.EXPECTED,), (Phase.HOLDING,)),
    # decoding
    "decode": ((Phase.EXPECTED, Phase.COMPUTED, Phase.PAUSED), (Phase.DECODING,)),
    "pause": ((Phase.DECODING,), (Phase.PAUSED,)),
    "lose_range": (DECODES, DECODES),
    "find_range": (DECODES, DECODES),
    # COMPUTED: a range of a prompt can land while its last chunk is computed
    "spread": ((Phase.PREFILLING, Phase.COMPUTED, *DECODES), (Phase.PREFILLING, Phase.COMPUTED, *DECODES)),
    # the end
    "free": (LIVES, (Phase.FREED,)),
}


class Facts(NamedTuple):
    """Facts about a sequence in a phase; None: either is possible."""

    has_transfer: bool | None  # a transfer brings the KV here, or takes cached blocks from here
    sends: bool | None  # a copy of the whole KV leaves
    hands_range: bool | None
    is_range: bool | None
    lost_range: bool | None


FACTS: dict[Phase, Facts] = {
    Phase.EXPECTED: Facts(True, False, False, None, False),
    Phase.PREFILLING: Facts(False, None, False, False, False),
    Phase.COMPUTED: Facts(None, True, False, False, False),
    Phase.DECODING: Facts(None, None, None, False, None),
    Phase.PAUSED: Facts(None, None, None, False, None),
    Phase.HOLDING: Facts(True, False, None, True, False),
    Phase.FREED: Facts(None, None, None, None, None),
}


class CopyState(StrEnum):
    """State of a copy that leaves the instance."""

    WAITING = auto()  # no chunk has begun
    OFFERED = auto()  # the source waits for a grant
    SENDING = auto()
    FROZEN = auto()  # the sequence draws no more; its last tokens and their KV are sent
    COMMITTED = auto()  # the destination may have begun: only the scheduler lets the source go on
    ABANDONED = auto()  # committed, and the source awaits no acknowledgement


#: The same for a copy that leaves an instance.
COPY_TRANSITIONS: dict[str, tuple[tuple[CopyState, ...], tuple[CopyState, ...]]] = {
    "offer": ((CopyState.WAITING,), (CopyState.OFFERED,)),
    "grant": ((CopyState.WAITING, CopyState.OFFERED), (CopyState.SENDING,)),
    "stop": ((CopyState.SENDING,), (CopyState.OFFERED,)),
    "lose_receiver": (
        (CopyState.WAITING, CopyState.OFFERED, CopyState.SENDING),
        (CopyState.WAITING, CopyState.OFFERED),
    ),
    "freeze": ((CopyState.SENDING,), (CopyState.FROZEN,)),
    "commit": ((CopyState.FROZEN,), (CopyState.COMMITTED,)),
    "abandon": ((CopyState.COMMITTED, CopyState.ABANDONED), (CopyState.ABANDONED,)),
}


class IllegalTransition(Exception):
    """A bug: this transition is not allowed in the phase of the sequence, or in the state of the copy."""

"""The phases that a request goes through in the core: where each transition leads, and what is true in each."""

from __future__ import annotations

from enum import StrEnum, auto
from typing import NamedTuple


class Phase(StrEnum):
    WAITING = auto()  # in the queue
    PREFILLING = auto()  # placed: its prompt is computed, and what is computed of its KV may move on meanwhile
    AWAITING_DECODE = auto()  # its prompt is computed where it does not stay, and nobody receives its KV
    TRANSFERRING = auto()  # its prompt is computed, and its KV on its way to where it decodes
    DECODING = auto()  # its whole KV is where it decodes
    MOVING = auto()  # decodes, and is on its way to another instance


IN_PREFILL = (Phase.PREFILLING, Phase.AWAITING_DECODE, Phase.TRANSFERRING)
DECODES = (Phase.DECODING, Phase.MOVING)

#: Of each transition: the phases in which it may begin, and those that it may lead to.
TRANSITIONS: dict[str, tuple[tuple[Phase, ...], tuple[Phase, ...]]] = {
    "place": ((Phase.WAITING,), (Phase.PREFILLING,)),
    "adopt": ((Phase.WAITING,), (Phase.DECODING,)),
    # while its prompt is computed
    "ask_helper": ((Phase.PREFILLING,), (Phase.PREFILLING,)),
    "plan_chunk": ((Phase.PREFILLING,), (Phase.PREFILLING,)),
    "draw_first_token": ((Phase.PREFILLING,), (Phase.PREFILLING,)),
    "give_back": ((Phase.PREFILLING,), (Phase.PREFILLING,)),
    "plan_again_from": ((Phase.PREFILLING,), (Phase.PREFILLING,)),
    "end_prompt": ((Phase.PREFILLING,), (Phase.AWAITING_DECODE, Phase.TRANSFERRING)),
    # what receives its KV
    "receive": ((Phase.PREFILLING, Phase.AWAITING_DECODE), (Phase.PREFILLING, Phase.TRANSFERRING)),
    "lose_receiver": ((Phase.PREFILLING, Phase.TRANSFERRING), (Phase.PREFILLING, Phase.AWAITING_DECODE)),
    "keep": ((Phase.PREFILLING, Phase.AWAITING_DECODE), (Phase.PREFILLING, Phase.AWAITING_DECODE)),
    "land": (IN_PREFILL, (Phase.DECODING,)),
    # while it decodes
    "begin_copy": ((Phase.DECODING,), DECODES),
    "end_copy": (DECODES, (Phase.DECODING,)),
    "land_move": ((Phase.MOVING,), (Phase.DECODING,)),
    "hand_on_range": ((Phase.DECODING,), (Phase.DECODING,)),
    "lose_part": ((Phase.DECODING,), (Phase.DECODING,)),
}


class Facts(NamedTuple):
    """Facts about a request in a phase; None: either is possible."""

    is_placed: bool
    has_receiver: bool | None  # an instance where it decodes, or will
    has_transfer: bool | None
    has_group: bool | None
    copies: bool | None  # the request, or a range of its context, is on its way to another instance
    is_planned: bool | None  # its whole prompt


FACTS: dict[Phase, Facts] = {
    Phase.WAITING: Facts(False, False, False, False, False, False),
    Phase.PREFILLING: Facts(True, None, None, None, False, None),
    Phase.AWAITING_DECODE: Facts(True, False, False, False, False, True),
    Phase.TRANSFERRING: Facts(True, True, True, False, False, True),
    Phase.DECODING: Facts(True, True, None, False, None, True),
    Phase.MOVING: Facts(True, True, None, False, True, True),
}


class IllegalTransition(Exception):
    """A bug in the core: this transition is not allowed in the request's phase."""

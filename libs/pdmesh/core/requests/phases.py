"""Phases of a request in the core: which transition leads where, and which facts hold in each."""

from __future__ import annotations

from enum import StrEnum, auto
from typing import NamedTuple


class Phase(StrEnum):
    """Phase of a request in the core.

    - ``WAITING``: in the queue.
    - ``PREFILLING``: placed. The prompt is computed, and computed KV may already move on.
    - ``AWAITING_DECODE``: the prompt is computed where the request cannot decode, and no instance receives its KV.
    - ``TRANSFERRING``: the prompt is computed, and its KV is moving to the decoding instance.
    - ``DECODING``: the whole KV is on the decoding instance.
    - ``MOVING``: decodes while moving to another instance.
    """

    WAITING = auto()
    PREFILLING = auto()
    AWAITING_DECODE = auto()
    TRANSFERRING = auto()
    DECODING = auto()
    MOVING = auto()


IN_PREFILL = (Phase.PREFILLING, Phase.AWAITING_DECODE, Phase.TRANSFERRING)
DECODES = (Phase.DECODING, Phase.MOVING)

#: For each transition: the phases in which it may begin, and the phases that it may lead to.
TRANSITIONS: dict[str, tuple[tuple[Phase, ...], tuple[Phase, ...]]] = {
    "place": ((Phase.WAITING,), (Phase.PREFILLING,)),
    "adopt": ((Phase.WAITING,), (Phase.DECODING,)),
    # computing the prompt
    "ask_helper": ((Phase.PREFILLING,), (Phase.PREFILLING,)),
    "plan_chunk": ((Phase.PREFILLING,), (Phase.PREFILLING,)),
    "draw_first_token": ((Phase.PREFILLING,), (Phase.PREFILLING,)),
    "give_back": ((Phase.PREFILLING,), (Phase.PREFILLING,)),
    "plan_again_from": ((Phase.PREFILLING,), (Phase.PREFILLING,)),
    "end_prompt": ((Phase.PREFILLING,), (Phase.AWAITING_DECODE, Phase.TRANSFERRING)),
    # receiving the KV
    "receive": ((Phase.PREFILLING, Phase.AWAITING_DECODE), (Phase.PREFILLING, Phase.TRANSFERRING)),
    "lose_receiver": ((Phase.PREFILLING, Phase.TRANSFERRING), (Phase.PREFILLING, Phase.AWAITING_DECODE)),
    "keep": ((Phase.PREFILLING, Phase.AWAITING_DECODE), (Phase.PREFILLING, Phase.AWAITING_DECODE)),
    "land": (IN_PREFILL, (Phase.DECODING,)),
    # decoding
    "begin_copy": ((Phase.DECODING,), DECODES),
    "end_copy": (DECODES, (Phase.DECODING,)),
    "land_move": ((Phase.MOVING,), (Phase.DECODING,)),
    "hand_on_range": ((Phase.DECODING,), (Phase.DECODING,)),
    "lose_range": ((Phase.DECODING,), (Phase.DECODING,)),
}


class Facts(NamedTuple):
    """Facts about a request in a phase; None: either value is possible.

    `has_receiver`: an instance is chosen to decode. `copies`: the request or a range of its context is being copied to
    another instance. `is_planned`: the whole prompt is in plans.
    """

    is_placed: bool
    has_receiver: bool | None
    has_transfer: bool | None
    has_group: bool | None
    copies: bool | None
    is_planned: bool | None


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

"""How KV transfers end, or pause, as told to the worker runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.model import Epoch, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTransfer:
    """Sender's side: the receiver acknowledged the whole KV.

    ``duration_s`` runs from the transfer's first grant, and ``exposed_s`` from the moment the prompt was computed and
    its first token sampled (when decode could have started), both to the acknowledgement. For a move, ``duration_s`` is
    the time of the whole move, and ``exposed_s`` how long the request paused. In ``sent_s`` of that time pieces with KV
    were under way; 0 if the receiver read it where it lay. ``carrier`` is `KvTransport.carrier_to` of the receiver.
    """

    request_id: RequestId
    epoch: Epoch
    num_bytes: int
    duration_s: float
    exposed_s: float
    sent_s: float = 0.0
    carrier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LandedTransfer:
    """Receiver's side: all blocks of all layers are in place and checked, and the token to go on from, if any."""

    request_id: RequestId
    epoch: Epoch
    token_id: int | None  # None: of KV that is only kept
    token_index: int
    num_bytes: int
    duration_s: float  # from the first piece
    transcript: bytes = b""  # of a move: see `pdmesh.kv.transcript`


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTransfer:
    """A transfer that either side gave up. The sender still has all its KV, for another transfer."""

    request_id: RequestId
    epoch: Epoch
    sending: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedTransfer:
    """Sender's side: it stopped when asked to, and no piece is in progress. It goes on with the next grant."""

    request_id: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedExchange:
    """The end of a membership in a prefill group: the member can neither pass its KV on nor wait for others'."""

    request_id: RequestId
    epoch: Epoch
    reason: str


TransferOutcome = SentTransfer | LandedTransfer | FailedTransfer | PausedTransfer | FailedExchange

#: Called on the event loop; must not block.
OnOutcome = Callable[[TransferOutcome], None]

"""Outcomes of KV transfers, as reported to the worker runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdmesh.model import Epoch, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTransfer:
    """Sender's outcome: the receiver acknowledged the whole KV.

    ``duration_s`` and ``exposed_s`` end with the acknowledgement. ``duration_s`` begins with the copy's first grant.
    ``exposed_s`` begins when the prompt was computed and its first token sampled, so decode could have started. For a
    move, ``duration_s`` is the time of the whole move, and ``exposed_s`` the pause of the request.

    During ``sent_s`` pieces with KV were under way; 0 if the receiver read the KV from the sender's cache. ``carrier``
    is `KvTransport.carrier_to` of the receiver.
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
    """Receiver's outcome: all blocks of all layers are in place and checked.

    ``token_id`` is the token to continue from; None if the KV is only cached. ``duration_s`` begins with the first
    piece. ``transcript`` is set for a move (`pdmesh.kv.transcript`).
    """

    request_id: RequestId
    epoch: Epoch
    token_id: int | None
    token_index: int
    num_bytes: int
    duration_s: float
    transcript: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTransfer:
    """A transfer that either side has ended. The sender still has all its KV, for another transfer."""

    request_id: RequestId
    epoch: Epoch
    sending: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedTransfer:
    """Sender's report that no piece is under way, after it was told to pause. The next grant resumes the transfer."""

    request_id: RequestId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedExchange:
    """The end of a membership in a prefill group: the member can neither send its KV nor receive the others'."""

    request_id: RequestId
    epoch: Epoch
    reason: str


TransferOutcome = SentTransfer | LandedTransfer | FailedTransfer | PausedTransfer | FailedExchange

#: Called on the event loop; must not block.
OnOutcome = Callable[[TransferOutcome], None]

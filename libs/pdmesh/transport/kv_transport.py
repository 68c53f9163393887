"""The interface of the data plane: how bytes of KV get from one instance to another.

A transport knows nothing of requests or blocks. It moves *pieces*: a fixed-size header (`pdmesh.kv.piece`) and a
payload no larger than ``max_payload_bytes``. Receive buffers exist before anything arrives, so a length on the wire
never allocates. `ucx`, the tests' transport and any later one pass the same contract tests (``tests/contract``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from pdmesh.transport.buffers import PieceBuffer

#: The carrier of pieces that a peer on the same host reads from the sender's memory. See `KvTransport.carrier_to`.
MEMORY = "memory"


class ReceivedPiece(Protocol):
    """A piece in a receive buffer. The buffer is reused after ``release``."""

    @property
    def header(self) -> memoryview: ...

    @property
    def payload(self) -> memoryview:
        """The payload, once `load` has returned True."""
        ...

    def load(self) -> bool:
        """Copy the payload into the buffer, if it is not there yet. Any thread; it blocks. Idempotent.

        Return False if the sender's memory cannot be read. The payload is then invalid.
        """
        ...

    def release(self) -> None: ...


class KvTransport(Protocol):
    """Moves pieces between instances. Used from one event loop; opened by its ``async with``."""

    @property
    def address(self) -> bytes:
        """The address that a peer passes to `send` to reach this transport."""
        ...

    @property
    def max_payload_bytes(self) -> int: ...

    def payload_limit(self, address: bytes) -> int:
        """Return the largest payload that a peer accepts from here. Raises `KvTransferError` for an invalid address."""
        ...

    def message_limit(self, address: bytes) -> int:
        """Return the number of payload bytes up to which pieces to a peer are sent together.

        Raises KvTransferError if ``address`` is no data address.
        """
        ...

    def process_of(self, address: bytes) -> int | None:
        """Return the id of the peer's process if it is on this host and its memory can be read from here; else None.

        Raises KvTransferError if ``address`` is no data address.
        """
        ...

    def carrier_to(self, address: bytes) -> str:
        """Return the carrier of pieces to a peer, as `pdmesh requests show` prints it: "memory", or "ucx, tcp".

        Raises KvTransferError if ``address`` is no data address.
        """
        ...

    @property
    def memory(self) -> Sequence[memoryview]:
        """All send and receive buffers, each beginning on a page."""
        ...

    def lend(self) -> AbstractAsyncContextManager[PieceBuffer]:
        """Return a context that lends a send buffer, after waiting while all are in use.

        A buffer whose send was cancelled or timed out is *quarantined* at the end of the context, because the hardware
        may still read it. It returns to the pool only when the endpoint has been force-closed.
        """
        ...

    def admit(self, address: bytes) -> None:
        """Accept pieces from a peer that the scheduler has named. Sending to a peer does not require this.

        Raises KvTransferError if ``address`` is no data address.
        """
        ...

    async def send(self, address: bytes, buffer: PieceBuffer, payload_bytes: int, *, is_notice: bool = False) -> None:
        """Send the pieces that were ended in the buffer, then its header and ``payload_bytes`` of its payload.

        Return when the buffer may be reused: when the peer has taken the piece. A *notice*, which has no payload, may
        end when it has left, so it takes one message instead of a piece's four. Its receiver may have no buffer for it
        yet. So send only notices about transfers that the receiver waits for, which bounds their number.

        Pieces to one address arrive in the order of their sends if each send is awaited before the next begins; sends
        that run at the same time may overtake one another. Raises `KvTransferError` if the peer cannot be reached or
        does not take the piece within ``no_progress_s``; the endpoint is then force-closed, and the next send opens a
        new one.
        """
        ...

    def receive(self) -> AsyncIterator[ReceivedPiece]:
        """Yield pieces from all peers, to a single consumer. Senders wait while it holds all receive buffers."""
        ...

    async def forget(self, address: bytes) -> None:
        """Close the endpoint to a peer that is gone: sends to it fail, and their buffers return to the pool.

        If the peer still exists, this does no harm: the next send opens another endpoint.
        """
        ...

    @property
    def num_refused(self) -> int:
        """Number of connections and messages that were not from known peers, or were no pieces."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError, with the numbers, unless ``free + lent + quarantined = total`` buffers on each side."""
        ...

"""What all transfers that leave an instance have in common, of prompts and of running decodes.

A lane to each destination, what is asked for again, and how a transfer ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio
import anyio.abc

from pdmesh.errors import KvTransferError
from pdmesh.kv.lane import Lane
from pdmesh.kv.ledger import PageLedger
from pdmesh.kv.outcome import SentTransfer
from pdmesh.kv.outgoing import PieceWriter
from pdmesh.kv.pages import Blocks
from pdmesh.kv.piece import PieceHeader, PieceKind, request_key
from pdmesh.kv.receiver import FirstToken
from pdmesh.model import Epoch, IndexRange, KvLayout, KvPart, RequestId


class KvDestination(NamedTuple):
    """A transfer's destination: its data address and the part of the request's KV that goes there."""

    address: bytes
    part: KvPart


class GrantedTransfer(ABC):
    """A transfer that runs until it has landed or failed. If ``scope`` is cancelled, it ends without an outcome.

    Made and run by `pdmesh.kv.departures.KvDepartures`. The ledger says what can be sent.
    """

    def __init__(
        self,
        request_id: RequestId,
        epoch: Epoch,
        *,
        capability: int,
        destinations: Sequence[KvDestination],
        ledger: PageLedger,
        layout: KvLayout,
        writer: PieceWriter,
        clock: Callable[[], float],
        source: int = 0,
    ) -> None:
        self.request_id = request_id
        self.epoch = epoch
        self.key = request_key(request_id)
        self.capability = capability
        self.destinations = tuple(destinations)
        self.scope = anyio.CancelScope()
        self._about = PieceHeader(
            kind=PieceKind.KV, request_key=self.key, epoch=epoch, capability=capability, source=source
        )
        self._lanes = [
            Lane(
                destination.address,
                self._about._replace(destination=index),
                writer,
                num_layers=layout.num_layers,
                on_taken=self._note,
                on_failed=self.fail,
            )
            for index, destination in enumerate(destinations)
        ]
        self._ledger = ledger
        self._layout = layout
        self._writer = writer
        self._clock = clock
        self._work = anyio.CancelScope()  # of `run`
        self._failure: str | None = None
        self._unlanded = set(range(len(destinations)))  # have not acknowledged
        self._changed = anyio.Event()

    @property
    def num_bytes(self) -> int:
        return self._writer.num_bytes

    @property
    def num_pieces(self) -> int:
        return self._writer.num_pieces

    def landed(self, destination: int) -> None:
        """Note that a destination has all that goes there."""
        self._unlanded.discard(destination)
        self._note()

    def close(self) -> None:
        """Close the read window, so that blocks that peers could read may be used again. Idempotent."""
        self._writer.close()

    def send_again(self, header: PieceHeader) -> str | None:
        """Send pages again that a destination could not use. Return why its request must be dropped, if it must."""
        blocks, layers, heads = header.part
        if header.destination not in self._unlanded or not 0 < header.part.num_pages <= self._writer.max_pages:
            return "range"
        theirs = self.destinations[header.destination].part
        if (
            not theirs.blocks.holds(blocks)
            or not theirs.layers.holds(layers)
            or heads != IndexRange(0, self._layout.num_kv_heads)
            or not self._ledger.has(Blocks.of(header))
        ):
            return "range"
        return self._lanes[header.destination].send_again(header)

    def fail(self, reason: str) -> None:
        """End `run` with a KvTransferError, unless it has landed."""
        if self._failure is None and self._unlanded:
            self._failure = reason
            self._work.cancel()

    async def run(self) -> SentTransfer:
        """Send everything and wait for the acknowledgement. Raises KvTransferError."""
        began_s, landed_s = self._clock(), None
        with self._work:
            async with anyio.create_task_group() as self._tasks:
                for lane in self._lanes:
                    self._tasks.start_soon(lane.run)
                await self._send()
                await self._until(lambda: not self._unlanded)
                landed_s = self._clock()
                for lane in self._lanes:
                    lane.close()
        if landed_s is None:
            raise KvTransferError(self._failure or self._why_late())
        return SentTransfer(
            request_id=self.request_id,
            epoch=self.epoch,
            num_bytes=self.num_bytes,
            duration_s=landed_s - began_s,
            exposed_s=landed_s - self._exposed_since_s(),
            sent_s=self._sent_s,
            carrier=self._writer.carrier_to(self.destinations[0].address),
        )

    @property
    def _sent_s(self) -> float:
        """While pieces were under way; 0 if peers read the KV where it lay."""
        was_read = self._writer.num_pushed_bytes < self._writer.num_bytes // 2
        return 0.0 if was_read else sum(lane.sent_s for lane in self._lanes)

    # --- inside -------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def _send(self) -> None:
        """Send what there is, or have it sent; the acknowledgement is waited for then."""

    @abstractmethod
    def _exposed_since_s(self) -> float:
        """When somebody began to wait for the rest."""

    @abstractmethod
    def _why_late(self) -> str:
        """Return the reason of a failure by the clock."""

    def _commit(self, part: KvPart, num_tokens: int, token: FirstToken | None) -> PieceHeader:
        """Return the header that says that all of ``part`` was sent; ``token`` if this source drew it."""
        return self._about._replace(
            kind=PieceKind.COMMIT,
            part=part,
            num_context_tokens=num_tokens,
            has_token=token is not None,
            token_id=0 if token is None else token.token_id,
            token_index=0 if token is None else token.token_index,
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _note(self) -> None:
        """Something was changed that `_until` may wait for."""
        self._changed.set()
        self._changed = anyio.Event()

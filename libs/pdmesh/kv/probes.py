"""Probes: headers without a request. A peer that receives one is reachable and has the same mesh token."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection

import anyio

from pdmesh.kv.context import KvContext
from pdmesh.kv.piece import PieceHeader, PieceKind
from pdmesh.model import Epoch, InstanceId

#: Number of latest probes that are remembered.
MAX_HEARD = 4096


def probe_key(check_id: int, source_id: InstanceId, destination_id: InstanceId) -> bytes:
    """Return the 16 bytes that the probe of check ``check_id`` carries from one instance to another."""
    text = f"{check_id} {len(source_id)} {source_id} {destination_id}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class KvProbes:
    """Sends probes, and remembers the latest received ones. Event loop only."""

    def __init__(self, context: KvContext) -> None:
        self._context = context
        self._heard: deque[bytes] = deque(maxlen=MAX_HEARD)
        self._changed = anyio.Event()

    async def send(self, address: bytes, key: bytes) -> None:
        """Send a probe to a data address. Raises KvTransferError if the peer does not accept it."""
        self._context.admit(address)
        header = PieceHeader(kind=PieceKind.PROBE, request_key=key, epoch=Epoch(0), capability=0)
        await self._context.writer().tell(address, header)

    def take(self, header: PieceHeader) -> None:
        """Record a received probe."""
        self._heard.append(header.request_key)
        self._changed.set()
        self._changed = anyio.Event()

    async def wait(self, keys: Collection[bytes], limit_s: float) -> set[bytes]:
        """Wait up to ``limit_s`` until all probes have arrived. Return the keys of missing ones."""
        with anyio.move_on_after(limit_s):
            while not set(keys) <= set(self._heard):
                await self._changed.wait()
        return set(keys) - set(self._heard)

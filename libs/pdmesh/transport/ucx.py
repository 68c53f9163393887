"""KV pieces over UCX: tagged messages between UCX workers, progressed by the event loop.

Each transport is one UCX worker. A piece is one tagged message, ``prefix | header | payload``; the receiver keeps
posted receives, so that nothing is allocated for what arrives. The rendezvous threshold is 0: a send ends when the peer
has *taken* the piece into a posted buffer, so a receiver without buffers makes senders wait, and "no progress" means
the same for a small piece as for a large one.

The loop sleeps on UCX's event descriptor, armed when nothing is left to do; every posted operation wakes it. The copies
inside a host (cross-memory attach) happen in ``progress``, on the loop, about 100 µs a MiB; after a few, other tasks
get their turn.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel

from pdmesh.config import TransferConfig
from pdmesh.transport.address import WorkerAddress, host_id, pack_address
from pdmesh.transport.base import SendBuffer
from pdmesh.transport.buffers import PieceBuffer, SendPool, allocate_buffers
from pdmesh.transport.ucx_api import PREFIX, open_ucx
from pdmesh.transport.ucx_links import UcxLinks
from pdmesh.transport.ucx_ring import UcxPiece, UcxRing

#: Calls of UCX's progress before other tasks get their turn.
PROGRESS_ROUNDS = 8


class UcxTransport:
    """`pdmesh.transport.base.KvTransport` over UCX."""

    def __init__(self, config: TransferConfig) -> None:
        self._config = config

    async def __aenter__(self) -> Self:
        config = self._config
        self._idle: anyio.CancelScope | None = None
        self._api = open_ucx(config.ucx_tls)
        own_host = host_id()
        self._address = pack_address(WorkerAddress(own_host, self._api.worker.address.tobytes()))
        self._pool = SendPool(allocate_buffers(config.num_send_buffers, config.max_payload_bytes, PREFIX.size))
        receive_buffers = allocate_buffers(config.num_receive_buffers, config.max_payload_bytes, PREFIX.size)
        self._ring = UcxRing(self._api, receive_buffers, self._wake)
        self._stack = AsyncExitStack()
        self._stack.callback(self._shut_down)
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._links = UcxLinks(
            self._api,
            self._pool,
            self._tasks,
            host_id=own_host,
            no_progress_s=config.no_progress_s,
            wake=self._wake,
        )
        self._tasks.start_soon(self._progress)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        await self._stack.__aexit__(kind, error, trace)

    def _shut_down(self) -> None:
        self._links.close_all()
        self._ring.close()
        del self._links, self._ring, self._api  # UCX frees its resources with the last reference to the worker

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def max_payload_bytes(self) -> int:
        return self._config.max_payload_bytes

    @property
    def num_malformed(self) -> int:
        """Messages dropped because they are larger than a buffer or not pieces."""
        return self._ring.num_malformed

    def lend(self) -> AbstractAsyncContextManager[PieceBuffer]:
        return self._pool.lend()

    async def send(self, address: bytes, buffer: SendBuffer, payload_bytes: int) -> None:
        assert isinstance(buffer, PieceBuffer)
        assert payload_bytes <= self._config.max_payload_bytes
        await self._links.send(address, buffer, payload_bytes)

    def receive(self) -> AsyncIterator[UcxPiece]:
        return self._ring.receive()

    async def forget(self, address: bytes) -> None:
        self._links.close(address, "the peer is gone")
        await anyio.lowlevel.checkpoint()

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        self._ring.check_integrity()

    def _wake(self) -> None:
        if self._idle is not None:
            self._idle.cancel()

    async def _progress(self) -> None:
        event_fd = self._api.worker.epoll_file_descriptor
        while True:
            if self._drive():
                with anyio.CancelScope() as self._idle:
                    await anyio.wait_readable(event_fd)
                self._idle = None
            else:
                await anyio.lowlevel.checkpoint()

    def _drive(self) -> bool:
        """Progress for a while. True when nothing is left to do and UCX's descriptor will tell of more."""
        worker = self._api.worker
        self._ring.post()
        for _ in range(PROGRESS_ROUNDS):
            if not worker.progress_once():
                return not self._reap() and bool(worker.arm())
        self._reap()
        return False

    def _reap(self) -> bool:
        arrived, ended = self._ring.reap(), self._links.reap()
        return arrived or ended
